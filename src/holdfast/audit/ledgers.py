"""The ledgers as chains: without a gap from where a sink began to where it stands.

A ledger is the pipeline's own word, and a sink's rows are compared with the log, not with it. But it says where the
pipeline began and how far each sink is, which no log tells; so it has to be a chain: entries numbered without a gap,
each range continuing the one before, positions that follow from both. What entries count is counted again in `books`.

What the ledgers' entries count, counted again: records read, rows written, rows that left by each route.

That finds what places cannot show, such as the last row of a record that was expanded to several, and records that
have been compacted away since they were read.

Entries are many, and partitions too; so what an entry covers is summed up as a difference of running sums, for all
entries of a partition at once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.audit.compare import Holding, finding
from holdfast.audit.model import AuditError, Examined, Fate, Finding, Said, Unproven, examining
from holdfast.audit.source import COMPACTED, EXPIRED, RECORD, SourceWalk
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.digest import MASK, digest_of_offsets, hashes_of_offsets
from holdfast.pipeline.ledger import Entry, Reached
from holdfast.pipeline.positions import Place, Positions
from holdfast.pipeline.sealing import Head

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]

PRUNED: Final = frozenset({"kafka", "delta"})
"""Kinds of sinks whose older entries go: a compacted topic keeps the newest of each writer, a log is cleaned."""


@dataclass(frozen=True)
class Chain:
    """What one sink's entries say about its way through the source."""

    sink: str
    starts: Mapping[Place, int]
    """Where it began in each partition; where that is not kept any more, where the oldest entry begins."""
    unsure: frozenset[Place]
    """Partitions whose beginning is not kept."""
    positions: Positions
    examined: Examined = field(default_factory=Examined)
    begins_anew: bool = False
    """It had a ledger before this one, which was forgotten or lost, and that was said to be meant."""
    added_at: Mapping[Place, int] = field(default_factory=dict)
    """Where the first ledger that it ever had began, as far as those of the other sinks tell."""


def follow(sink: str, kind: str, pipeline: str, entries: Sequence[Entry]) -> Chain:
    """Read a ledger from its oldest entry to its newest."""
    said: list[Said] = []
    starts: dict[Place, int] = {}
    unsure: frozenset[Place] = frozenset()
    standing: Positions | None = None
    expected = 0
    for entry in entries:
        if entry.pipeline != pipeline:
            said.append(
                _altered(sink, f"entry {entry.number} of its ledger is of pipeline {entry.pipeline!r}")
            )
        begins = {place: span.start for place, span in entry.range.spans.items()}
        if standing is None:
            begins = {place: at.offset for place, at in entry.positions.at.items()} | begins
            unsure = frozenset(entry.positions.at if entry.number else ())
        if entry.number != expected:
            absent = _pruned if kind in PRUNED and entry.number > expected else _missing
            said.append(absent(sink, expected, entry.number - 1))
        elif standing is not None:
            said += _continues(sink, standing, entry)
        starts = begins | starts
        standing, expected = entry.positions, entry.number + 1
    return Chain(
        sink,
        starts,
        unsure,
        standing or Positions({}),
        Examined.of(said),
        begins_anew=bool(entries) and entries[0].generation > 0,
    )


def added_at(sink: str, others: Iterable[Sequence[Entry]]) -> dict[Place, int]:
    """Where the others stood when this sink came, which began there: no entry up to then names it, and every one since
    does. Nothing where that is not known: it was there from the start, or no ledger goes back so far."""
    found: dict[Place, int] = {}
    for entries in others:
        first = next((at for at, entry in enumerate(entries) if sink in entry.others), None)
        if not first:
            continue  # that one was there before the other, whose ledger begins later
        if not entries[first - 1].others:  # an earlier holdfast named no others
            return {}
        for place, at in entries[first - 1].positions.at.items():
            found[place] = min(found.get(place, at.offset), at.offset)
    return found


def _continues(sink: str, standing: Positions, entry: Entry) -> Iterator[Finding]:
    for place, span in sorted(entry.range.spans.items()):
        other, at = standing.of(place.topic, place.partition) or (place, None)
        name = f"{place.topic}-{place.partition}"
        if at is None:
            continue
        if other.topic_id != place.topic_id:
            yield _altered(
                sink, f"entry {entry.number} of its ledger goes on in another topic named {place.topic}"
            )
        elif span.start != at.offset:
            verb = "leaves out" if span.start > at.offset else "repeats"
            first, last = sorted((span.start, at.offset))
            detail = f"entry {entry.number} of its ledger {verb} these offsets of {name}"
            yield Finding(Fate.ALTERED, sink, place, ((first, last - 1),), last - first, detail=detail)
    if standing.moved(entry.range).at != entry.positions.at:
        yield _altered(
            sink, f"the positions of entry {entry.number} of its ledger do not follow from its range"
        )


def _altered(sink: str, detail: str) -> Finding:
    return Finding(Fate.ALTERED, sink, count=1, detail=detail)


def _missing(sink: str, first: int, last: int) -> Finding:
    which = f"entry {first} is" if first >= last else f"entries {first} to {last} are"
    return _altered(sink, f"{which} missing in its ledger, with the rows they stand for")


def _pruned(sink: str, first: int, last: int) -> Unproven:
    return Unproven(
        f"what the entries {first} to {last} of the ledger of {sink!r} counted",
        "they are not kept; the rows of those batches are compared with the log all the same",
    )


def heads_path(home: str) -> str:
    return os.path.join(home, "sinks.json")


def reached(home: str) -> dict[str, Head]:
    """The newest entry that each sink had, as the home says; one from before there was this file says nothing."""
    path = heads_path(home)
    try:
        with open(path, encoding="utf-8") as file:
            sinks = json.load(file)["sinks"]
        return {
            name: Head(
                Reached(each["generation"], each["number"], each.get("place", "")), str(each.get("chain", ""))
            )
            for name, each in sinks.items()
        }
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AuditError(f"{path} says how far each sink had come, and cannot be read ({error})") from error


# ---------------------------------------------------------------------------- which entry is about which offset


def cover(chains: Mapping[str, Sequence[Entry]], spans: Mapping[Place, Span], first: str = "") -> list[Entry]:
    """Entries of all sinks, each offset of the scope in at most one: those of `first`, then of the fullest ledger."""
    covered: dict[Place, list[Span]] = {}
    chosen: list[Entry] = []
    sizes = {sink: sum(_within(each, spans) for each in entries) for sink, entries in chains.items()}
    fullest = sorted(chains, key=lambda sink: (sink != first, -sizes[sink], sink))
    for entry in (each for sink in fullest for each in chains[sink] if _within(each, spans)):
        taken = {place: span for place, span in entry.range.spans.items() if span.offsets}
        if any(
            span.start < end and start < span.end
            for place, span in taken.items()
            for start, end in covered.get(place, ())
        ):
            continue
        chosen.append(entry)
        for place, span in taken.items():
            known = covered.setdefault(place, [])
            # Ranges mostly continue the last one: kept short, looking through them stays cheap.
            is_next = known and known[-1][1] == span.start
            known.append((known.pop()[0] if is_next else span.start, span.end))
    return chosen


def _within(entry: Entry, spans: Mapping[Place, Span]) -> int:
    """Offsets of the entry's range that are in the scope."""
    taken = [(span, spans[place]) for place, span in entry.range.spans.items() if place in spans]
    return sum(max(0, min(span.end, end) - max(span.start, start)) for span, (start, end) in taken)


def is_whole(entry: Entry, spans: Mapping[Place, Span]) -> bool:
    """Whether all that the entry took is in the scope."""
    return entry.range.offsets > 0 and _within(entry, spans) == entry.range.offsets


# ---------------------------------------------------------------------------- books


Mask = npt.NDArray[np.bool_]
Weigh = Callable[[Place], npt.NDArray[Any]]
"""How often each offset of a partition's scope counts."""

ROUTE_NAMES: Final = {
    Fate.DEAD_LETTER: "dead letters",
    Fate.FILTERED: "filtered rows",
    Fate.DUPLICATE: "duplicates",
    Fate.LATE: "late rows",
}


@dataclass
class Books:
    """What was found of the rows, to hold entries against."""

    walk: SourceWalk
    routes: Mapping[Fate, Holding]
    """Dead letters, filtered, duplicate, late."""
    mains: Mapping[str, Holding]
    """The sinks with every row of the end of the steps, by name."""
    doubtful: Mapping[Place, Mask]
    """Offsets about which something was found already: an entry over them is not judged again."""

    @property
    def holdings(self) -> tuple[Holding, ...]:
        return (*self.routes.values(), *self.mains.values())

    def held(self, place: Place, at: Any = slice(None)) -> Mask:
        """Whether any of them has rows of these offsets of the scope."""
        found: Mask = np.logical_or.reduce([each.counts[place][at] > 0 for each in self.holdings])
        return found

    def readable(self, entries: Iterable[Entry]) -> list[Entry]:
        """Those whose whole range is in the scope and still in the log."""
        spans = {place: (part.start, part.end) for place, part in self.walk.partitions.items()}
        expired = {place: part.codes == EXPIRED for place, part in self.walk.partitions.items()}
        return self._without(expired, [entry for entry in entries if is_whole(entry, spans)])

    def undoubted(self, entries: Sequence[Entry]) -> list[Entry]:
        """Those about whose offsets nothing was found."""
        return self._without(self.doubtful, entries)

    def _without(self, marked: Mapping[Place, Mask], entries: Sequence[Entry]) -> list[Entry]:
        """Those that took none of the marked offsets."""
        if not any(mask.any() for mask in marked.values()):
            return list(entries)
        nothing = {place: np.zeros_like(part.codes) for place, part in self.walk.partitions.items()}
        counts = self.sums(entries, {**nothing, **marked}.__getitem__)
        return [entry for entry, count in zip(entries, counts, strict=True) if not count]

    def sums(self, entries: Sequence[Entry], weigh: Weigh) -> list[int]:
        """Of each entry, the weights of the offsets it took."""
        return self.digests(entries, weigh, is_wanted=False)[0]

    def digests(
        self, entries: Sequence[Entry], weigh: Weigh, *, is_wanted: bool = True
    ) -> tuple[list[int], list[int]]:
        """The sums, and the digests of the offsets, each as often as it weighs."""
        counts = np.zeros(len(entries), np.int64)
        digests = np.zeros(len(entries), np.uint64)
        for place, part in self.walk.partitions.items():
            spans = [
                (number, span.start - part.start, span.end - part.start)
                for number, entry in enumerate(entries)
                if (span := entry.range.spans.get(place)) is not None and span.offsets
            ]
            if not spans:
                continue
            numbers, starts, ends = np.array(spans, np.int64).T
            weights = weigh(place)
            running = np.concatenate(([0], np.cumsum(weights, dtype=np.int64)))
            counts[numbers] += running[ends] - running[starts]
            if is_wanted and running[-1]:
                offsets = np.arange(part.start, part.end, dtype=np.int64)
                hashes = hashes_of_offsets(place.topic, place.partition, offsets)
                with np.errstate(over="ignore"):
                    hashes *= weights.astype(np.uint64)
                    sums = np.concatenate((np.zeros(1, np.uint64), np.cumsum(hashes, dtype=np.uint64)))
                    digests[numbers] += sums[ends] - sums[starts]
        return counts.tolist(), digests.tolist()


@examining
def check_intake(entries: Iterable[Entry], books: Books) -> Iterator[Finding]:
    """What each entry says it read is what the log has, with those records that were compacted away since.

    Where nothing was compacted since, a row of an offset that is in no batch was never a record's.
    """
    readable = books.readable(entries)
    partitions = books.walk.partitions
    records, digests = books.digests(readable, lambda place: partitions[place].codes == RECORD)
    planted = books.sums(readable, lambda place: _held_without_record(books, place))
    for entry, count, digest, rows in zip(readable, records, digests, planted, strict=True):
        if (count, digest) == (entry.intake.records, entry.intake.digest):
            if rows:
                yield from _planted(books, _compacted(entry, books))
            continue
        compacted = _compacted(entry, books)
        again, again_digest = _routed(books, compacted)
        if (count + again, (digest + again_digest) & MASK) == (entry.intake.records, entry.intake.digest):
            continue
        if count < entry.intake.records < count + again:
            excess = count + again - entry.intake.records
            yield from _planted(books, compacted, f"{excess} of these were never produced")
        elif books.undoubted([entry]):
            yield _misread(entry, count, again, compacted)


def _held_without_record(books: Books, place: Place) -> Mask:
    compacted: Mask = books.walk.partitions[place].codes == COMPACTED
    return compacted & books.held(place) if compacted.any() else compacted


def _compacted(entry: Entry, books: Books) -> dict[Place, Offsets]:
    found: dict[Place, Offsets] = {}
    for place, span in entry.range.spans.items():
        if span.offsets:
            part = books.walk.partitions[place]
            codes = part.codes[span.start - part.start : span.end - part.start]
            found[place] = np.flatnonzero(codes == COMPACTED).astype(np.int64) + span.start
    return found


def _planted(
    books: Books, compacted: Mapping[Place, Offsets], detail: str = "in no batch of the log: never produced"
) -> Iterator[Finding]:
    """Rows of offsets that are in no batch; what they are counted in is in doubt from here on."""
    for place, offsets in compacted.items():
        start = books.walk.partitions[place].start
        for holding in books.holdings if len(offsets) else ():
            held = offsets[holding.counts[place][offsets - start] > 0]
            if len(held):
                yield finding(Fate.EXTRA, holding.name, place, held, detail)
                if place in books.doubtful:
                    books.doubtful[place][held - start] = True


def _misread(entry: Entry, records: int, again: int, compacted: Mapping[Place, Offsets]) -> Finding:
    missing = entry.intake.records - records - again
    holes = sum(len(offsets) for offsets in compacted.values())
    if 0 < missing <= holes - again:
        place, offsets = next(each for each in compacted.items() if len(each[1]))
        detail = (
            f"entry {entry.number} of the ledger of {entry.sink!r} read {entry.intake.records} records; these were "
            "compacted away since, and no sink has them"
        )
        return finding(Fate.LOST, "", place, offsets, detail, missing)
    detail = (
        f"entry {entry.number} of its ledger says that {entry.intake.records} records were read, and the log has "
        f"{records + again}" + ("" if missing else ": as many, but others")
    )
    return _about(entry, Fate.ALTERED, entry.sink, abs(missing) or 1, detail)


def _about(entry: Entry, fate: Fate, sink: str, count: int, detail: str) -> Finding:
    """With the offsets that the entry took, of the first partition that it took some of."""
    place, span = next(each for each in sorted(entry.range.spans.items()) if each[1].offsets)
    return Finding(fate, sink, place, ((span.start, span.end - 1),), count, detail=detail)


def _routed(books: Books, compacted: Mapping[Place, Offsets]) -> tuple[int, int]:
    """Records that the log has no more, and some sink or route still has."""
    count = digest = 0
    for place, offsets in compacted.items():
        held = offsets[books.held(place, offsets - books.walk.partitions[place].start)]
        count += len(held)
        digest += digest_of_offsets(place.topic, place.partition, held)
    return count, digest & MASK


def missing_from_routes(
    entries: Iterable[Entry], books: Books, lost: Mapping[Place, Mask], known: Iterable[Fate]
) -> dict[Fate, dict[Place, Mask]]:
    """Of the records that are nowhere, those that by the ledger had left by a route: it is short of just as many."""
    readable = books.readable(entries)
    nowhere = books.sums(readable, lambda place: lost[place])
    held = {fate: books.sums(readable, books.routes[fate].counts.__getitem__) for fate in known}
    found: dict[Fate, dict[Place, Mask]] = {}
    for number, entry in enumerate(readable):
        if not nowhere[number]:
            continue
        said = _said(entry)
        short = {
            fate: said[fate] - counts[number] for fate, counts in held.items() if counts[number] < said[fate]
        }
        if len(short) != 1 or sum(short.values()) != nowhere[number]:
            continue
        (fate,) = short
        masks = found.setdefault(fate, {place: np.zeros_like(mask) for place, mask in lost.items()})
        for place, span in entry.range.spans.items():
            if span.offsets:
                start = books.walk.partitions[place].start
                chosen = slice(span.start - start, span.end - start)
                masks[place][chosen] = lost[place][chosen]
    return found


def _said(entry: Entry) -> dict[Fate, int]:
    return {
        Fate.DEAD_LETTER: sum(entry.routes.dead_letter.values()),
        Fate.FILTERED: sum(entry.routes.filtered.values()),
        Fate.DUPLICATE: entry.routes.duplicate,
        Fate.LATE: entry.routes.late,
    }


@examining
def check_routes(entries: Iterable[Entry], books: Books, known: Iterable[Fate]) -> Iterator[Finding]:
    """What each entry says left by a route is what was found there; `known` are the routes that could be read."""
    judged = books.undoubted(books.readable(entries))
    for fate in known:
        said = [_said(entry)[fate] for entry in judged]
        yield from _counted(judged, books, books.routes[fate], said, fate, ROUTE_NAMES[fate])


@examining
def check_rows(sink: str, entries: Iterable[Entry], books: Books) -> Iterator[Finding]:
    """The rows that each entry of a sink says it wrote are there."""
    judged = books.undoubted(books.readable(entries))
    said = [entry.rows for entry in judged]
    yield from _counted(judged, books, books.mains[sink], said, Fate.OUTPUT, "rows")


def _counted(
    entries: Sequence[Entry], books: Books, holding: Holding, said: Sequence[int], fate: Fate, what: str
) -> Iterator[Finding]:
    if not holding.rows and not any(said):
        return
    counts, digests = books.digests(entries, holding.counts.__getitem__)
    for entry, wanted, rows, digest in zip(entries, said, counts, digests, strict=True):
        text = entry.digests.get("main" if fate is Fate.OUTPUT else str(fate))
        if rows == wanted and (text is None or int(text, 16) == digest):
            continue
        outcome = Fate.LOST if rows < wanted else Fate.DUPLICATED if rows > wanted else Fate.ALTERED
        detail = (
            f"entry {entry.number} of the ledger of {entry.sink!r} counts {wanted} {what} in this range, and "
            f"{rows} are there" + ("" if rows != wanted else ", of other records")
        )
        yield _about(entry, outcome, holding.name, abs(wanted - rows) or 1, detail)


def has_batch(newest: Entry, entry: Entry) -> bool:
    """Whether a sink with this newest entry has the batch of that entry."""
    ends = {place: at.offset for place, at in newest.positions.at.items()}
    return all(span.end <= ends.get(place, 0) for place, span in entry.range.spans.items())


def rows_for(sink: str, entries: Sequence[Entry]) -> int:
    """That these batches had for the sink, as they count them."""
    routes = [entry.routes for entry in entries]
    return sum(sum(each.dead_letter.values()) if sink == DEAD_LETTER_NAME else each.main for each in routes)
