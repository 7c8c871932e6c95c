"""The ledgers, held against the log and the rows: a chain without a gap, and every entry true.

A ledger is the pipeline's own word, and a sink's rows are compared with the log, not with it. But it says where the
pipeline began and how far each sink is, which no log tells; so it has to be a chain: entries numbered without a gap,
each range continuing the one before, positions that follow from both. And it counts: what an entry says it read, wrote
and let go by each route is counted again. That finds what places cannot show, such as the last row of a record that
was expanded to several, and records that have been compacted away since they were read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.audit.compare import Holding, finding
from holdfast.audit.lineage import as_ranges
from holdfast.audit.model import Examined, Fate, Finding, Unproven
from holdfast.audit.source import COMPACTED, EXPIRED, RECORD, SourceWalk
from holdfast.pipeline.digest import MASK, digest_of_offsets
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, Positions

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]

PRUNED: Final = frozenset({"kafka", "dead_letter", "delta"})
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


def follow(sink: str, kind: str, pipeline: str, entries: Sequence[Entry]) -> Chain:
    """Read a ledger from its oldest entry to its newest."""
    found: list[Finding] = []
    unproven: list[Unproven] = []
    starts: dict[Place, int] = {}
    unsure: set[Place] = set()
    standing: Positions | None = None
    previous: Entry | None = None
    for entry in entries:
        if entry.pipeline != pipeline:
            found.append(
                _altered(sink, f"entry {entry.number} of its ledger is of pipeline {entry.pipeline!r}")
            )
        if previous is None:
            is_first = entry.number == 0
            for place, at in entry.positions.at.items():
                span = entry.range.spans.get(place)
                starts[place] = at.offset if span is None else span.start
                if not is_first:
                    unsure.add(place)
            if not is_first and kind not in PRUNED:
                found.append(_missing(sink, 0, entry.number - 1))
            elif not is_first:
                unproven.append(_pruned(sink, 0, entry.number - 1))
        elif entry.number != previous.number + 1:
            if kind in PRUNED and entry.number > previous.number:
                unproven.append(_pruned(sink, previous.number + 1, entry.number - 1))
            else:
                found.append(_missing(sink, previous.number + 1, entry.number - 1))
        else:
            assert standing is not None
            found.extend(_continues(sink, standing, entry))
        for place, span in entry.range.spans.items():
            starts.setdefault(place, span.start)
        standing, previous = entry.positions, entry
    return Chain(
        sink,
        starts,
        frozenset(unsure),
        standing or Positions({}),
        Examined(tuple(found), tuple(unproven)),
    )


def _continues(sink: str, standing: Positions, entry: Entry) -> list[Finding]:
    found = []
    for place, span in sorted(entry.range.spans.items()):
        known = standing.of(place.topic, place.partition)
        if known is None:
            continue
        other, at = known
        name = f"{place.topic}-{place.partition}"
        if other.topic_id != place.topic_id:
            found.append(
                _altered(
                    sink, f"entry {entry.number} of its ledger goes on in another topic named {place.topic}"
                )
            )
        elif span.start != at.offset:
            verb = "leaves out" if span.start > at.offset else "repeats"
            first, last = sorted((span.start, at.offset))
            found.append(
                Finding(
                    Fate.ALTERED,
                    sink,
                    place,
                    ((first, last - 1),),
                    last - first,
                    (),
                    f"entry {entry.number} of its ledger {verb} these offsets of {name}",
                )
            )
    if standing.moved(entry.range).at != entry.positions.at:
        found.append(
            _altered(
                sink, f"the positions of entry {entry.number} of its ledger do not follow from its range"
            )
        )
    return found


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


# ---------------------------------------------------------------------------- which entry is about which offset


def cover(chains: Mapping[str, Sequence[Entry]], spans: Mapping[Place, Span]) -> list[Entry]:
    """Entries of all sinks, each offset of the scope in at most one: those of the fullest ledger first."""
    covered: dict[Place, list[Span]] = {}
    chosen: list[Entry] = []
    fullest = sorted(chains, key=lambda sink: (-sum(_within(each, spans) for each in chains[sink]), sink))
    for sink in fullest:
        for entry in chains[sink]:
            taken = {place: span for place, span in entry.range.spans.items() if span.offsets}
            if not taken or not _within(entry, spans):
                continue
            if any(
                span.start < end and start < span.end
                for place, span in taken.items()
                for start, end in covered.get(place, ())
            ):
                continue
            chosen.append(entry)
            for place, span in taken.items():
                _join(covered.setdefault(place, []), (span.start, span.end))
    return chosen


def _join(spans: list[Span], added: Span) -> None:
    """Ranges mostly continue the last one: kept short, looking through them stays cheap."""
    if spans and spans[-1][1] == added[0]:
        spans[-1] = (spans[-1][0], added[1])
    else:
        spans.append(added)


def _within(entry: Entry, spans: Mapping[Place, Span]) -> int:
    """Offsets of the entry's range that are in the scope."""
    total = 0
    for place, span in entry.range.spans.items():
        if place in spans:
            start, end = spans[place]
            total += max(0, min(span.end, end) - max(span.start, start))
    return total


def is_whole(entry: Entry, spans: Mapping[Place, Span]) -> bool:
    """Whether all that the entry took is in the scope."""
    return entry.range.offsets > 0 and _within(entry, spans) == entry.range.offsets


# ---------------------------------------------------------------------------- what entries counted


@dataclass
class Books:
    """What was found of the rows, to hold entries against."""

    walk: SourceWalk
    routes: Mapping[Fate, Holding]
    """Dead letters, filtered, duplicate, late."""
    mains: Mapping[str, Holding]
    """The sinks with every row of the end of the steps, by name."""
    doubtful: Mapping[Place, npt.NDArray[np.bool_]]
    """Offsets about which something was found already: an entry over them is not judged again."""

    def is_doubtful(self, entry: Entry) -> bool:
        for place, span in entry.range.spans.items():
            if place in self.doubtful:
                start = self.walk.partitions[place].start
                if self.doubtful[place][max(0, span.start - start) : span.end - start].any():
                    return True
        return False

    def spans(self) -> dict[Place, Span]:
        return {place: (part.start, part.end) for place, part in self.walk.partitions.items()}


def check_intake(entries: Iterable[Entry], books: Books) -> Examined:
    """What each entry says it read is what the log has, with those records that were compacted away since.

    Where nothing was compacted since, a row of an offset that is in no batch was never a record's.
    """
    found: list[Finding] = []
    spans = books.spans()
    for entry in entries:
        if not is_whole(entry, spans) or _has_expired(entry, books.walk):
            continue
        records, digest, compacted = _in_log(entry, books)
        if (records, digest) == (entry.intake.records, entry.intake.digest):
            found.extend(_planted(books, compacted))
            continue
        again, again_digest = _routed(books, compacted)
        if (records + again, (digest + again_digest) & MASK) == (entry.intake.records, entry.intake.digest):
            continue
        if records < entry.intake.records < records + again:
            excess = records + again - entry.intake.records
            found.extend(_planted(books, compacted, f"{excess} of these were never produced"))
        elif not books.is_doubtful(entry):
            found.append(_misread(entry, records, again, compacted))
    return Examined(tuple(found))


def _planted(
    books: Books, compacted: Mapping[Place, Offsets], detail: str = "in no batch of the log: never produced"
) -> list[Finding]:
    """Rows of offsets that are in no batch; what they are counted in is in doubt from here on."""
    found = []
    for place, offsets in compacted.items():
        start = books.walk.partitions[place].start
        for holding in (*books.routes.values(), *books.mains.values()) if len(offsets) else ():
            held = offsets[holding.counts[place][offsets - start] > 0]
            if len(held):
                found.append(finding(Fate.EXTRA, holding.name, place, held, detail))
                if place in books.doubtful:
                    books.doubtful[place][held - start] = True
    return found


def _misread(entry: Entry, records: int, again: int, compacted: Mapping[Place, Offsets]) -> Finding:
    place, span = next(each for each in sorted(entry.range.spans.items()) if each[1].offsets)
    missing = entry.intake.records - records - again
    holes = sum(len(offsets) for offsets in compacted.values())
    if 0 < missing <= holes - again:
        where = {each: offsets for each, offsets in compacted.items() if len(offsets)}
        place = next(iter(where))
        return Finding(
            Fate.LOST,
            "",
            place,
            tuple(as_ranges(where[place])),
            missing,
            (),
            f"entry {entry.number} of the ledger of {entry.sink!r} read {entry.intake.records} records; these were "
            "compacted away since, and no sink has them",
        )
    return Finding(
        Fate.ALTERED,
        entry.sink,
        place,
        ((span.start, span.end - 1),),
        abs(missing) or 1,
        (),
        f"entry {entry.number} of its ledger says that {entry.intake.records} records were read, and the log has "
        f"{records + again}" + ("" if missing else ": as many, but others"),
    )


def _has_expired(entry: Entry, walk: SourceWalk) -> bool:
    for place, span in entry.range.spans.items():
        part = walk.partitions[place]
        if (part.codes[span.start - part.start : span.end - part.start] == EXPIRED).any():
            return True
    return False


def _in_log(entry: Entry, books: Books) -> tuple[int, int, dict[Place, Offsets]]:
    records = digest = 0
    compacted: dict[Place, Offsets] = {}
    for place, span in entry.range.spans.items():
        part = books.walk.partitions[place]
        codes = part.codes[span.start - part.start : span.end - part.start]
        records += int((codes == RECORD).sum())
        digest += part.digest(span.start, span.end)
        compacted[place] = np.flatnonzero(codes == COMPACTED).astype(np.int64) + span.start
    return records, digest & MASK, compacted


def _routed(books: Books, compacted: Mapping[Place, Offsets]) -> tuple[int, int]:
    """Records that the log has no more, and some sink or route still has."""
    holdings = [*books.routes.values(), *books.mains.values()]
    count = digest = 0
    for place, offsets in compacted.items():
        start = books.walk.partitions[place].start
        held = np.zeros(len(offsets), np.bool_)
        for holding in holdings:
            held |= holding.counts[place][offsets - start] > 0
        count += int(held.sum())
        digest += digest_of_offsets(place.topic, place.partition, offsets[held])
    return count, digest & MASK


def missing_from_routes(
    entries: Iterable[Entry], books: Books, lost: Mapping[Place, npt.NDArray[np.bool_]], known: Iterable[Fate]
) -> dict[Fate, dict[Place, npt.NDArray[np.bool_]]]:
    """Of the records that are nowhere, those that by the ledger had left by a route: it is short of just as many."""
    routes = tuple(known)
    found: dict[Fate, dict[Place, npt.NDArray[np.bool_]]] = {}
    spans = books.spans()
    for entry in entries:
        if not is_whole(entry, spans) or _has_expired(entry, books.walk):
            continue
        nowhere = {
            place: slice(span.start - spans[place][0], span.end - spans[place][0])
            for place, span in entry.range.spans.items()
            if span.offsets
        }
        count = sum(int(lost[place][chosen].sum()) for place, chosen in nowhere.items())
        if not count:
            continue
        said = _said(entry)
        short = {}
        for fate in routes:
            held = sum(
                books.routes[fate].rows_between(place, span.start, span.end)
                for place, span in entry.range.spans.items()
            )
            if held < said[fate]:
                short[fate] = said[fate] - held
        if len(short) != 1 or sum(short.values()) != count:
            continue
        (fate,) = short
        masks = found.setdefault(fate, {place: np.zeros_like(mask) for place, mask in lost.items()})
        for place, chosen in nowhere.items():
            masks[place][chosen] = lost[place][chosen]
    return found


def _said(entry: Entry) -> dict[Fate, int]:
    return {
        Fate.DEAD_LETTER: sum(entry.routes.dead_letter.values()),
        Fate.FILTERED: sum(entry.routes.filtered.values()),
        Fate.DUPLICATE: entry.routes.duplicate,
        Fate.LATE: entry.routes.late,
    }


ROUTE_NAMES: Final = {
    Fate.DEAD_LETTER: "dead letters",
    Fate.FILTERED: "filtered rows",
    Fate.DUPLICATE: "duplicates",
    Fate.LATE: "late rows",
}


def check_routes(entries: Iterable[Entry], books: Books, known: Iterable[Fate]) -> Examined:
    """What each entry says left by a route is what was found there; `known` are the routes that could be read."""
    routes = tuple(known)
    found: list[Finding] = []
    spans = books.spans()
    for entry in entries:
        if not is_whole(entry, spans) or _has_expired(entry, books.walk) or books.is_doubtful(entry):
            continue
        said = _said(entry)
        for fate in routes:
            found.extend(_count(entry, books.routes[fate], said[fate], fate, ROUTE_NAMES[fate]))
    return Examined(tuple(found))


def check_rows(sink: str, entries: Iterable[Entry], books: Books) -> Examined:
    """The rows that each entry of a sink says it wrote are there."""
    found: list[Finding] = []
    spans = books.spans()
    for entry in entries:
        if not is_whole(entry, spans) or _has_expired(entry, books.walk) or books.is_doubtful(entry):
            continue
        found.extend(_count(entry, books.mains[sink], entry.rows, Fate.OUTPUT, "rows"))
    return Examined(tuple(found))


DIGEST_NAMES: Final = {
    Fate.OUTPUT: "main",
    Fate.DEAD_LETTER: "dead_letter",
    Fate.FILTERED: "filtered",
    Fate.DUPLICATE: "duplicate",
    Fate.LATE: "late",
}


def _count(entry: Entry, holding: Holding, said: int, fate: Fate, what: str) -> list[Finding]:
    rows = digest = 0
    for place, span in entry.range.spans.items():
        if not span.offsets:
            continue
        offsets = holding.offsets_between(place, span.start, span.end)
        rows += len(offsets)
        digest += digest_of_offsets(place.topic, place.partition, offsets)
    text = entry.digests.get(DIGEST_NAMES[fate])
    is_same = text is None or int(text, 16) == digest & MASK
    if rows == said and is_same:
        return []
    place, span = next(each for each in sorted(entry.range.spans.items()) if each[1].offsets)
    outcome = Fate.LOST if rows < said else Fate.DUPLICATED if rows > said else Fate.ALTERED
    return [
        Finding(
            outcome,
            holding.name,
            place,
            ((span.start, span.end - 1),),
            abs(said - rows) or 1,
            (),
            f"entry {entry.number} of the ledger of {entry.sink!r} counts {said} {what} in this range, and {rows} "
            "are there" + ("" if rows != said else ", of other records"),
        )
    ]
