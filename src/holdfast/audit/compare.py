"""What rows name, held against what the log has: multisets of places, never counts alone.

A `Holding` is the rows of one sink, or of one route out of the steps (dead letters, filtered, duplicate, late), as a
count for each offset of the scope. The rules that `judge` holds a sink to:

- a record is in the sink or in exactly one route, once; in neither it is lost, in more it is there twice;
- an offset that is no record has no row. One that was compacted away may have been a record when it was read: whether
  it was, the ledger's digest tells (`ledgers`), not we;
- where a step makes several rows of a record, they are numbered from 0 without a gap, over sink and routes together.
  Dead letters do not tell the number of theirs: each of them may stand for one that is missing.

Rows that name no partition of the source, or an offset outside the scope, are strays, and kept apart: below the scope
they are somebody else's business, beyond it they may be too young, anywhere else they are nobody's.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.audit.lineage import LineageBatch, Offsets, as_ranges
from holdfast.audit.model import Fate, Finding
from holdfast.audit.source import ABORTED, CONTROL, PartitionWalk
from holdfast.pipeline.positions import Place

RANGES_MAX: Final = 1000
"""Kept with a finding; its count goes on."""
COUNT_MAX: Final = np.iinfo(np.uint16).max
INDEX_BITS: Final = 24
"""Of a row's number among those of its record; the offset has the rest."""

Counts = npt.NDArray[np.uint16]
Mask = npt.NDArray[np.bool_]
Span = tuple[int, int]

FATES: Final = tuple(Fate)
CODE: Final = {fate: number for number, fate in enumerate(FATES)}
NO_FATE: Final = 255
"""An offset that is no record."""


class Holding:
    """How many rows each offset of the scope has."""

    def __init__(self, name: str, spans: Mapping[Place, Span], *, numbers_rows: bool = False) -> None:
        self.name = name
        self.spans = dict(spans)
        self.counts: dict[Place, Counts] = {
            place: np.zeros(max(0, end - start), np.uint16) for place, (start, end) in spans.items()
        }
        self.rows = 0
        self.numbers_rows = numbers_rows
        """Rows of one record are told apart by their number; else each is expected to be the only one, number 0."""
        self.beyond: dict[Place, list[Offsets]] = {}
        """Rows of offsets behind the scope's end; those before its start are somebody else's business."""
        self.unknown: dict[tuple[str, int], list[Offsets]] = {}
        """Rows of partitions that are not of the scope; ("", -1) are those that name none."""
        self.misnumbered: dict[Place, list[Offsets]] = {}
        """Rows that say they are not the only one of their record, where nothing makes several."""
        self.erased: dict[Place, Counts] = {}
        """Those among the counts that are no longer there; of partitions where there are any."""
        self.rows_erased = 0
        self._numbered: dict[Place, list[npt.NDArray[np.int64]]] = {}
        self._places = {(place.topic, place.partition): place for place in spans}

    def add(self, batches: Iterable[LineageBatch]) -> None:
        for batch in batches:
            self._add(batch)

    def add_erased(self, batches: Iterable[LineageBatch]) -> None:
        """Rows that were here and were taken out on purpose: they count as rows, and are known as such."""
        before = self.rows
        for batch in batches:
            self._add(batch)
            place = self._places.get((batch.topic, batch.partition))
            if place is not None:
                start, end = self.spans[place]
                at = batch.offsets - start
                counts = self.erased.setdefault(place, np.zeros(max(0, end - start), np.uint16))
                np.add.at(counts, at[(at >= 0) & (at < end - start)], 1)
        self.rows_erased += self.rows - before

    def _add(self, batch: LineageBatch) -> None:
        self.rows += len(batch)
        place = self._places.get((batch.topic, batch.partition))
        if place is None:
            self.unknown.setdefault((batch.topic, batch.partition), []).append(batch.offsets)
            return
        start, end = self.spans[place]
        at, indexes = batch.offsets - start, batch.indexes
        inside = (at >= 0) & (at < end - start)
        if not inside.all():
            self.beyond.setdefault(place, []).append(batch.offsets[at >= end - start])
            at, indexes = at[inside], indexes[inside]
        if not self.numbers_rows and indexes.any():
            wrong = indexes != 0
            self.misnumbered.setdefault(place, []).append(at[wrong] + start)
            at, indexes = at[~wrong], indexes[~wrong]
        self._count(self.counts[place], at)
        if self.numbers_rows and len(at):
            self._numbered.setdefault(place, []).append((at << INDEX_BITS) | indexes.astype(np.int64))

    @staticmethod
    def _count(counts: Counts, at: Offsets) -> None:
        if not len(at):
            return
        first, last = int(at[0]), int(at[-1])
        if len(at) == 1 or bool((np.diff(at) > 0).all()):
            chosen = slice(first, last + 1) if last - first + 1 == len(at) else at
            counts[chosen] += counts[chosen] < COUNT_MAX
            return
        first, last = int(at.min()), int(at.max())
        added = np.bincount(at - first, minlength=last - first + 1)
        counts[first : last + 1] = np.minimum(counts[first : last + 1] + added, COUNT_MAX)

    def numbered(self, place: Place) -> npt.NDArray[np.int64]:
        """Offset in the scope and number of every row, ascending."""
        parts = self._numbered.get(place)
        if not parts:
            return np.empty(0, np.int64)
        if len(parts) > 1 or not _is_sorted(parts[0]):
            self._numbered[place] = parts = [np.sort(np.concatenate(parts))]
        return parts[0]


def _is_sorted(values: npt.NDArray[np.int64]) -> bool:
    return len(values) < 2 or bool((np.diff(values) >= 0).all())


@dataclass
class Judgement:
    """What comparing one sink with the log gave, for one partition."""

    findings: list[Finding]
    lost: Mask
    twice: Mask
    unknown: Mask | None = None
    """Records that are not there, of which nobody can say whether they were."""

    def blame_other(self, mask: Mask, sink: str, walk: PartitionWalk) -> None:
        """What is missing here was to be elsewhere: it is lost, and not by this sink."""
        self.findings = [each for each in self.findings if each.fate is not Fate.LOST]
        self.findings = marked(Fate.LOST, sink, walk, self.lost & ~mask) + self.findings

    def excuse(self) -> None:
        """What is missing is not said to be lost."""
        self.unknown = self.lost
        self.lost = np.zeros_like(self.lost)
        self.findings = [each for each in self.findings if each.fate is not Fate.LOST]


def finding(
    fate: Fate, sink: str, place: Place | None, offsets: Offsets, detail: str = "", count: int | None = None
) -> Finding:
    """About these offsets, ascending."""
    ranges = tuple(as_ranges(offsets)[:RANGES_MAX])
    return Finding(fate, sink, place, ranges, len(offsets) if count is None else count, (), detail)


def marked(
    fate: Fate, sink: str, walk: PartitionWalk, mask: Mask, detail: str = "", count: int | None = None
) -> list[Finding]:
    """About the offsets of a partition that are marked; nothing where none is."""
    offsets = np.flatnonzero(mask).astype(np.int64) + walk.start
    return [finding(fate, sink, walk.place, offsets, detail, count)] if len(offsets) else []


def judge(
    sink: Holding, routes: Sequence[Holding], walk: PartitionWalk, *, since: int | None = None
) -> Judgement:
    """Whether each record is in this sink, or in one of the routes, once. It need not have those before `since`."""
    have = sink.counts[walk.place]
    gone = _sum(route.counts[walk.place] for route in routes)
    records = walk.records
    if sink.numbers_rows:
        lost, twice = _of_numbered(sink, routes, walk.place, records)
    else:
        total = gone if gone is not None else np.zeros(len(have), np.uint32)
        lost = records & (have + total == 0)
        twice = have > 1
    if since is not None:
        lost[: max(0, since - walk.start)] = False
    found = marked(Fate.LOST, sink.name, walk, lost)
    if sink.numbers_rows:
        found += marked(Fate.DUPLICATED, sink.name, walk, twice, "there more than once")
    else:
        found += _repeated(sink, walk, twice)
    if gone is not None and not sink.numbers_rows:
        both = (have > 0) & (gone > 0)
        for route in routes:
            shared = both & (route.counts[walk.place] > 0)
            found += marked(Fate.DUPLICATED, sink.name, walk, shared, f"in the sink and among {route.name}")
        twice = twice | both
    found.extend(_extras(sink, walk))
    return Judgement(found, lost, twice)


def judge_routes(routes: Sequence[Holding], walk: PartitionWalk) -> Judgement:
    """The routes out of the steps by themselves: a record leaves once, by one of them."""
    found: list[Finding] = []
    nothing = np.zeros(walk.end - walk.start, np.bool_)
    twice = nothing
    for route in routes:
        counts = route.counts[walk.place]
        if not any(each.numbers_rows for each in routes):
            found += _repeated(route, walk, counts > 1)
            twice = twice | (counts > 1)
        found.extend(_extras(route, walk))
    if len(routes) > 1 and not any(route.numbers_rows for route in routes):
        several = _sum((route.counts[walk.place] > 0) for route in routes)
        both = nothing if several is None else several > 1
        if both.any():
            first = int(np.flatnonzero(both)[0])
            names = " and ".join(route.name for route in routes if route.counts[walk.place][first])
            found += marked(Fate.DUPLICATED, "", walk, both, f"in {names}")
            twice = twice | both
    return Judgement(found, nothing, twice)


def strays(
    holding: Holding,
    position: Mapping[Place, int],
    log_ends: Mapping[Place, int],
    *,
    is_exact: bool,
    unread: Collection[tuple[str, int]] = (),
) -> list[Finding]:
    """Rows that are nobody's: of no partition of the source, beyond its log, or beyond the sink's own ledger.

    `unread` are partitions of the source that could not be read: of their rows nothing is known.
    """
    found: list[Finding] = []
    for (topic, partition), parts in sorted(holding.unknown.items()):
        if (topic, partition) in unread:
            continue
        offsets = np.sort(np.concatenate(parts))
        if not topic:
            detail = "rows without a lineage: no pipeline wrote them"
            found.append(Finding(Fate.EXTRA, holding.name, count=len(offsets), detail=detail))
            continue
        detail = f"rows of {topic}-{partition}, which is no partition that the pipeline has read"
        ranges = tuple(as_ranges(offsets)[:RANGES_MAX])
        found.append(Finding(Fate.EXTRA, holding.name, None, ranges, len(offsets), (), detail))
    for place, wrong in sorted(holding.misnumbered.items()):
        offsets = np.sort(np.concatenate(wrong))
        detail = "rows that say they are a further one of their record, and no step makes several"
        found.append(finding(Fate.EXTRA, holding.name, place, offsets, detail))
    for place, parts in sorted(holding.beyond.items()):
        offsets = np.sort(np.concatenate(parts))
        never = offsets[offsets >= log_ends[place]]
        if len(never):
            detail = f"never produced: the log ends at {log_ends[place]}"
            found.append(finding(Fate.EXTRA, holding.name, place, never, detail))
        young = offsets[(offsets >= position.get(place, 0)) & (offsets < log_ends[place])]
        if is_exact and len(young):
            detail = f"beyond its ledger, which stands at {position.get(place, 0)}"
            found.append(finding(Fate.EXTRA, holding.name, place, young, detail))
    return found


def _of_numbered(sink: Holding, routes: Sequence[Holding], place: Place, records: Mask) -> tuple[Mask, Mask]:
    """Which records lack a row, and which have one twice, where rows of a record are numbered."""
    size = len(records)
    parts = [sink.numbered(place), *(route.numbered(place) for route in routes if route.numbers_rows)]
    rows = np.sort(np.concatenate(parts))
    repeated = np.flatnonzero(rows[1:] == rows[:-1]) if len(rows) else np.empty(0, np.int64)
    twice = np.zeros(size, np.bool_)
    twice[rows[repeated] >> INDEX_BITS] = True
    rows = np.delete(rows, repeated) if len(repeated) else rows
    at = rows >> INDEX_BITS
    held = np.bincount(at, minlength=size).astype(np.int64)
    highest = np.full(size, -1, np.int64)
    if len(rows):
        lasts = np.flatnonzero(np.append(at[1:] != at[:-1], True))
        highest[at[lasts]] = rows[lasts] & ((1 << INDEX_BITS) - 1)
    unnumbered = np.zeros(size, np.int64)
    for route in routes:
        if not route.numbers_rows:
            unnumbered += route.counts[place]
    lost = records & ((held + unnumbered == 0) | (highest + 1 > held + unnumbered))
    return lost, twice


def _repeated(holding: Holding, walk: PartitionWalk, twice: Mask) -> list[Finding]:
    """Offsets with more than one row, counted by the rows that are too many."""
    counts = holding.counts[walk.place][twice].astype(np.int64)
    most = int(counts.max(initial=0))
    times = "twice" if most == 2 else f"up to {most} times"
    return marked(Fate.DUPLICATED, holding.name, walk, twice, f"there {times}", int((counts - 1).sum()))


def _extras(holding: Holding, walk: PartitionWalk) -> list[Finding]:
    """Rows of offsets that are no record."""
    counts = holding.counts[walk.place]
    found: list[Finding] = []
    for code, detail in (
        (ABORTED, "records of a transaction that was aborted"),
        (CONTROL, "offsets of markers that end transactions: never a record"),
    ):
        found += marked(Fate.EXTRA, holding.name, walk, (counts > 0) & (walk.codes == code), detail)
    return found


def fates_of(
    walk: PartitionWalk,
    routes: Mapping[Fate, Holding],
    sinks: Sequence[Holding],
    main: Fate,
    judgements: Sequence[Judgement],
) -> npt.NDArray[np.uint8]:
    """One fate for each record of a partition. `main` is the fate of those that left by no route.

    A record of several rows may be in a sink with some of them, and have left with others: it counts where it stayed.
    """
    records = walk.records
    fates = np.full(len(walk.codes), NO_FATE, np.uint8)
    fates[records] = CODE[main]
    stayed = np.zeros(len(walk.codes), np.bool_)
    for sink in sinks:
        if sink.numbers_rows:
            stayed |= sink.counts[walk.place] > 0
    for fate, route in routes.items():
        fates[(route.counts[walk.place] > 0) & records & ~stayed] = CODE[fate]
    for each in judgements:
        if each.unknown is not None:
            fates[each.unknown] = NO_FATE
        fates[each.twice & records] = CODE[Fate.DUPLICATED]
    for each in judgements:
        fates[each.lost & records] = CODE[Fate.LOST]
    return fates


def _sum(arrays: Iterable[npt.NDArray[np.generic]]) -> npt.NDArray[np.uint32] | None:
    total: npt.NDArray[np.uint32] | None = None
    for array in arrays:
        total = array.astype(np.uint32) if total is None else total + array.astype(np.uint32)
    return total
