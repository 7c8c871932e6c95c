"""Whether a sink has what was written to it: its rows held against the digests in its ledger.

The rows of a sink are read once, all columns of them, and hashed with the pipeline's key as they were when they were
written (`holdfast.pipeline.row_digest`). A row belongs to the batch whose range has its place; a row that a step made,
to the batch whose state has its number. The sums of each batch must be those of its entry. Where a ledger keeps only
some entries, the difference of two totals stands for the batches between them. An upsert keeps the digest beside each
row, and the newest entry the total of all rows that the table has.

The entries themselves must form a chain under the key, and the head of the chain must be the one that the pipeline's
home and its committed offsets know (`Witness`). Those are read before the sinks are. A sink that they know and that has
no ledger is lost, and a ledger that is shorter than they say went back.

Nothing here says that a row is right: only that it is the one that was written.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.admin.brokers import Brokers, committed_metadata
from holdfast.admin.errors import ClusterError
from holdfast.audit.compare import finding
from holdfast.audit.ledgers import heads_path
from holdfast.audit.lineage import LineageBatch, Offsets, as_ranges
from holdfast.audit.model import AuditError, Fate, Finding, Range, Unproven, gap
from holdfast.audit.sinks.base import EVERYTHING, ContentBatch, ErasedRows, SinkReader, SinkScope
from holdfast.audit.sinks.kafka import DeadLetters
from holdfast.pipeline.definition.fingerprint import canonical
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.definition.naming import home_of, monitoring_group
from holdfast.pipeline.definition.places import places_of
from holdfast.pipeline.erased_places import RowsByEntry, by_partition, unpack
from holdfast.pipeline.ledger import BEFORE_LEDGER, Content, Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.row_digest import MASK, DigestKey, Digests, RowHasher, totals
from holdfast.pipeline.sealing import KEY_FILE, DigestKeyLost, Head, broken_links, heads_in, read_key

if TYPE_CHECKING:
    from holdfast.audit.stateful.carried import TableRows

BEFORE: Final = "they were written before their digests were taken"
RESET: Final = "they are from before a reset"
NO_COLUMN: Final = "the table has no column _hf_content: somebody else made it, or an earlier holdfast"
NO_DIGEST: Final = (
    "they have no digest: they are from before the table had _hf_content, or from before a reset"
)
DAMAGED_MAX: Final = 10_000
"""Rows of an upsert that are named one by one."""
LINEAGE: Final = "_hf"


@dataclass(frozen=True)
class Unaltered:
    """What the digests say of one sink's rows. It holds for every column in `columns` alike."""

    sink: str
    columns: tuple[str, ...] = ()
    """Those in the digests; of others, nothing is known."""
    rows: int = 0
    """That were read and hashed; without a digest to compare with, none are."""
    unaltered: int = 0
    """Rows of batches whose digest is the one in the ledger."""
    trusted: int = 0
    """Rows that were read and that no digest is about."""
    why: str = ""
    """Of those that no digest is about."""
    findings: tuple[Finding, ...] = ()
    table: Digests | None = None
    """Of a table without marks: its rows, for the next audit."""


class Witness(NamedTuple):
    """How far a sink's ledger had come, and its head, as somebody outside the sink knows them."""

    generation: int
    number: int
    """Of the newest entry; -1: the ledger was forgotten, on purpose."""
    chain: str
    """Nothing: it is not known."""
    who: str


class SinksGone(AuditError):
    """Every sink of the pipeline is lost: there is nothing to make a report of."""

    exit_code = 1


@dataclass(frozen=True)
class Keeper:
    """The key, or why there is none."""

    key: DigestKey | None
    lost: str = ""
    """It was there once: what is wrong."""
    unreadable: str = ""


# ---------------------------------------------------------------------------- what is known outside the sink


def keeper_of(definition: PipelineDefinition) -> Keeper:
    """The pipeline's key; of a definition with its secrets expanded."""
    home = home_of(definition)
    try:
        key = read_key(home, definition.digest_key)
    except DigestKeyLost as error:
        return Keeper(None, lost=str(error))
    except OSError as error:
        return Keeper(None, unreadable=f"{os.path.join(home, KEY_FILE)} cannot be read ({error.strerror})")
    if key is None:
        return Keeper(None, lost=f"{os.path.join(home, KEY_FILE)} is gone")
    return Keeper(key)


def witnesses_of(
    plain: PipelineDefinition, expanded: PipelineDefinition, brokers: Brokers, noted: Mapping[str, Head]
) -> dict[str, list[Witness]]:
    """What the home (`noted`) and the group's committed offsets say of each sink's ledger; to be asked before the sinks
    are.

    `plain` has its secrets as references. Of a sink that was elsewhere then, nothing is known.
    """
    places = places_of(canonical(plain))
    group = monitoring_group(expanded)
    said = [(name, head, heads_path(home_of(expanded))) for name, head in noted.items()]
    try:
        heads = heads_in(committed_metadata(brokers, group).values())
    except ClusterError:
        heads = {}  # whoever audits may lack the right to ask
    said += [
        (name, head, f"the metadata of the committed offsets of {group!r}") for name, head in heads.items()
    ]
    found: dict[str, list[Witness]] = {}
    for name, head, who in said:
        generation, number, place = head.reached
        if place == places.get(name):
            found.setdefault(name, []).append(Witness(generation, number, head.chain, who))
    return found


# ---------------------------------------------------------------------------- erasures


def erasures(reader: SinkReader, keeper: Keeper) -> tuple[list[ErasedRows], list[Unproven]]:
    """What the ledger says was erased, as far as its chain bears that out; and what nobody can tell.

    An entry that the key disowns is not believed: the rows that it names are missing, and the chain is broken there.
    Where there is no key, or not the entry before, it is believed and said to be unproven.
    """
    entries = list(reader.entries())
    found: list[ErasedRows] = []
    unproven: list[Unproven] = []
    numbers = {entry.number for entry in entries}
    broken = [] if keeper.key is None else [entry.number for entry in broken_links(entries, keeper.key)]
    for entry in entries:
        erasure = entry.erased
        if erasure is None or entry.number in broken:
            continue
        try:
            places = tuple(
                LineageBatch(topic, partition, unpack(at), unpack(of).astype(np.int32), "erased")
                for topic, partition, at, of in erasure.places
            )
        except ValueError:
            continue
        if sum(map(len, places)) != erasure.rows:
            continue
        is_sealed = keeper.key is not None and entry.chain.startswith(f"{keeper.key.id}:")
        why = keeper.lost or keeper.unreadable or "" if keeper.key is None else ""
        if keeper.key is not None and not is_sealed:
            why = "the entry is not sealed with the key of today"
        elif entry.number - 1 not in numbers:
            why = why or "the entry before it is not kept, and so its chain cannot be followed"
        elif reader.takes and entry.content is None:
            why = why or "the table has no digests, and its rows name no record"
        found.append(ErasedRows(entry, erasure, places))
        if why:
            unproven.append(gap(f"that {erasure.rows:,} rows of {reader.name} were {found[-1].words}", why))
    return found, unproven


def erased_findings(reader: SinkReader) -> Iterator[Finding]:
    """Those rows, for the report."""
    for each in reader.erased:
        for batch in each.places:
            known = each.entry.positions.of(batch.topic, batch.partition)
            if known is None:
                yield Finding(Fate.ERASED, reader.name, count=len(batch), detail=each.words)
            else:
                offsets = np.unique(batch.offsets)
                yield finding(Fate.ERASED, reader.name, known[0], offsets, each.words, len(batch))


# ---------------------------------------------------------------------------- one sink


def check(
    reader: SinkReader,
    keeper: Keeper,
    witnesses: Sequence[Witness] = (),
    *,
    with_rows: bool = True,
    since: Mapping[Place, int] | None = None,
    turn: int | None = None,
    table: TableRows | None = None,
) -> Unaltered:
    """Hold the rows and the ledger of a sink against their digests, or the ledger alone. `table` is shown all rows.

    `since` says up to where an earlier audit has proven everything: batches up to there are not read again. The table
    of an upsert is always looked at whole: of one without rows nothing else tells that it had some.
    """
    with_rows = with_rows or bool(reader.keeps_digests) or bool(reader.erased) or table is not None
    entries = list(reader.entries())
    if not entries:
        return Unaltered(reader.name, findings=tuple(gone(reader.name, witnesses)))
    content = entries[-1].content
    found: list[Finding] = []

    def unknown(why: str, detail: str = "") -> Unaltered:
        told = [Finding(Fate.ALTERED, reader.name, detail=detail)] if detail else []
        return Unaltered(reader.name, why=why, findings=(*found, *told))

    if keeper.key is None:
        if not any(entry.chain for entry in entries):
            return unknown(BEFORE)
        if keeper.unreadable:
            return unknown(keeper.unreadable)
        detail = f"its ledger is sealed with a key, and {keeper.lost}"
        return unknown(keeper.lost, f"{detail}: whether its rows were altered is not known")
    found += _sealed(reader, entries, keeper.key, witnesses)
    if reader.keeps_digests is False:
        detail = "its rows had their digests beside them, and the column _hf_content is gone, or the table is"
        return unknown(NO_COLUMN, detail if content is not None and content.total else "")
    if content is None or not with_rows:
        return unknown(BEFORE)
    if content.key != keeper.key.id:
        return unknown(f"they were digested with the key {content.key}, and the key here is {keeper.key.id}")
    types = dict(content.columns)
    is_table = reader.keeps_digests or table is not None
    known = -1 if since is None or is_table else proven_entry(entries, since)
    counting = (
        _Kept(reader, entries[-1], content) if reader.keeps_digests else _Summed(reader, entries, known)
    )
    hasher, scope = RowHasher(keeper.key), EVERYTHING
    if known >= 0:
        ends = {place: (at.offset, at.offset) for place, at in entries[known].positions.at.items()}
        scope = SinkScope(ends, turn)
    for batch in reader.contents(types, scope):
        counting.take(batch, hasher.digests(batch.columns, batch.lineage, batch.constants))
        if table is not None:
            table.take(batch)
    counting.judge()
    # Of a topic of dead letters: its headers, which are among those of the record.
    more = ("failure",) if isinstance(reader, DeadLetters) else ()
    return Unaltered(
        reader.name,
        (LINEAGE, *sorted(types), *more),
        counting.rows,
        counting.unaltered,
        counting.trusted,
        counting.why,
        (*found, *counting.findings),
        None if table is None else table.finish(),
    )


def proven_entry(entries: Sequence[Entry], since: Mapping[Place, int]) -> int:
    """The last of these entries that lies wholly in what was proven; -1: none that is kept does."""
    below = [
        at
        for at, entry in enumerate(entries)
        if all(position.offset <= since.get(place, -1) for place, position in entry.positions.at.items())
    ]
    return max(below, default=-1)


def gone(sink: str, witnesses: Sequence[Witness]) -> list[Finding]:
    """Of a sink without a ledger: that it had one, and so is lost, and was not added later."""
    furthest = max(witnesses, default=None)
    if furthest is None or furthest.number < 0:
        return []
    detail = (
        f"nothing of the pipeline is there, and its ledger had {furthest.number + 1} entries, as {furthest.who} says: "
        "it is lost, or not where it was"
    )
    return [Finding(Fate.LOST, sink, detail=detail)]


def _sealed(
    reader: SinkReader, entries: Sequence[Entry], key: DigestKey, witnesses: Sequence[Witness]
) -> Iterator[Finding]:
    """What is wrong with the chain of the ledger and its head."""
    for entry in broken_links(entries, key):
        what = (
            f"entry {entry.number} of its ledger was altered, or the one before it: the chain is broken there"
        )
        yield Finding(Fate.ALTERED, reader.name, detail=what)
    by_number = {entry.number: entry for entry in entries}
    newest = entries[-1]
    for witness in sorted(witnesses):
        if (newest.generation, newest.number) < witness[:2]:
            what = f"its ledger ends with entry {newest.number}, and had entry {witness.number}: it went back"
        elif newest.generation == witness.generation and (held := by_number.get(witness.number)) is not None:
            if witness.chain in ("", held.chain):
                continue
            what = f"entry {witness.number} of its ledger is not the one that was written"
        else:
            continue  # it began anew since, on purpose; or the entry is not kept
        yield Finding(Fate.ALTERED, reader.name, detail=f"{what}, as {witness.who} says")


@dataclass
class _Counting:
    reader: SinkReader
    rows: int = field(default=0, init=False)
    unaltered: int = field(default=0, init=False)
    trusted: int = field(default=0, init=False)
    why: str = field(default="", init=False)
    findings: list[Finding] = field(default_factory=list, init=False)

    def _altered(
        self, detail: str, place: Place | None = None, ranges: tuple[Range, ...] = (), count: int = 0
    ) -> None:
        self.findings.append(Finding(Fate.ALTERED, self.reader.name, place, ranges, count, detail=detail))


@dataclass
class _Kept(_Counting):
    """The rows of an upsert: each has its digest beside it."""

    newest: Entry
    content: Content
    total: int = field(default=0, init=False)
    _damaged: list[Mapping[str, pa.Array]] = field(default_factory=list, init=False)

    def take(self, batch: ContentBatch, made: Digests) -> None:
        kept = batch.digests or ()
        missing = kept.count(None)
        self.why = NO_DIGEST if missing else self.why
        pairs = zip(kept, made.tolist(), strict=True)
        wrong = [each is not None and each != low | high << 64 for each, (low, high) in pairs]
        self.rows += len(kept)
        self.trusted += missing
        self.unaltered += len(kept) - missing - sum(wrong)
        self.total = (self.total + sum(each for each in kept if each is not None)) & MASK
        if any(wrong):
            damaged = pa.array(wrong)
            self._damaged.append({name: part.filter(damaged) for name, part in batch.lineage.items()})

    def judge(self) -> None:
        places: dict[tuple[str, int], list[Offsets]] = {}
        for lineage in self._damaged:
            for topic, partition, _, offsets in by_partition(lineage):
                places.setdefault((topic, partition), []).append(offsets)
        for at, parts in sorted(places.items()):
            offsets = np.concatenate(parts)
            known = self.newest.positions.of(*at)
            detail = f"{len(offsets):,} rows are not those that were written: their digest is another"
            ranges = tuple(as_ranges(np.unique(offsets[:DAMAGED_MAX])))
            self._altered(detail, None if known is None else known[0], ranges, len(offsets))
        if self.total != self.content.total:
            detail = (
                "the rows of the table are not those that its ledger knows of: rows were removed, added, or older ones "
                "put back"
            )
            self._altered(detail)
            self.unaltered = 0


@dataclass
class _Summed(_Counting):
    """The rows of a sink that keeps every row: summed by the entry that their place belongs to."""

    entries: Sequence[Entry]
    known: int = -1
    """Entries up to this one were proven before, and are not judged."""
    sums: list[int] = field(init=False)
    counts: npt.NDArray[np.int64] = field(init=False)
    """By entry, rows that belong to it or to one that is not kept between it and the one before; then those beyond the
    newest, and those from before the ledger began."""

    def __post_init__(self) -> None:
        self.sums = [0] * (len(self.entries) + 2)
        self.counts = np.zeros(len(self.entries) + 2, np.int64)
        self._by_entry = RowsByEntry(self.entries)
        numbers = [entry.number for entry in self.entries]
        for each in self.reader.erased:
            for number, (_, digest) in each.erasure.entries.items():
                at = int(np.searchsorted(numbers, int(number)))
                if number != BEFORE_LEDGER and at < len(numbers):
                    self.sums[at] = (self.sums[at] + int(digest, 16)) & MASK

    def take(self, batch: ContentBatch, made: Digests) -> None:
        self.rows += len(made)
        if batch.is_before_reset:
            self.trusted += len(made)
            self.why = RESET
            return
        groups = self._by_entry.groups(batch.lineage)
        self.counts += np.bincount(groups, minlength=len(self.counts))
        for group, added in enumerate(totals(made, groups, len(self.sums))):
            self.sums[group] = (self.sums[group] + added) & MASK

    def judge(self) -> None:
        self.rows -= int(self.counts[: self.known + 1].sum())
        for at in range(self.known + 1, len(self.entries)):
            before = self.entries[at - 1] if at else None
            self._judge_one(self.entries[at], before, int(self.counts[at]), self.sums[at])
        beyond, earlier = int(self.counts[-2]), int(self.counts[-1])
        if earlier and self.entries[0].generation:
            self.trusted += earlier
            self.why = RESET
        elif earlier:
            self._altered(f"{earlier:,} rows are from before its ledger began", count=earlier)
        if beyond and self.reader.is_exact:
            self._altered(f"{beyond:,} rows belong to no entry of its ledger", count=beyond)

    def _judge_one(self, entry: Entry, before: Entry | None, rows: int, digest: int) -> None:
        content = entry.content
        newest = self.entries[-1].content
        assert newest is not None
        if content is None or content.key != newest.key:
            self.trusted += rows
            self.why = self.why or (BEFORE if rows else "")
            return
        held = before.content if before is not None and before.content is not None else None
        follows = before is not None and before.number + 1 == entry.number
        if held is not None and held.key == content.key and held.since == content.since:
            wanted = (content.total - held.total) & MASK
        elif follows or content.since == entry.number:
            wanted = content.digest
            if not follows and rows and entry.number != 0:  # rows of entries that are gone are among them
                self.trusted += rows
                self.why = self.why or BEFORE
                return
        else:
            wanted = content.total
        if digest == wanted:
            self.unaltered += rows
        elif self.reader.gone_offsets:
            self.trusted += rows
            self.why = "the topic has dropped records of theirs, or compacted them away"
        else:
            self._differs(entry, before, rows)

    def _differs(self, entry: Entry, before: Entry | None, rows: int) -> None:
        which = f"of entry {entry.number}"
        if before is not None and before.number + 1 < entry.number:
            which = f"of the entries {before.number + 1} to {entry.number}"
        elif before is None and entry.number:
            which = f"of the entries up to {entry.number}"
        detail = f"the rows {which} of its ledger are not those that were written: their digest is another"
        spans = [(place, span) for place, span in sorted(entry.range.spans.items()) if span.offsets]
        if len(spans) > 1:
            detail += f" (the batch has {len(spans)} partitions)"
        place, span = spans[0] if spans else (None, None)
        self._altered(detail, place, () if span is None else ((span.start, span.end - 1),), max(1, rows))
