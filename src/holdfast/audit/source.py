"""The source's log, walked by the auditor itself: what every offset of the scope is.

One byte for each offset says its kind, four more the time kept with the record, to a tenth of a second. Nothing else of
a record is kept: who needs its content looks on as an `Observer` while the walk passes, and the keys of the few records
that a finding names are read again.

The rules:

- What the scope is, is fixed before the walk: what is written meanwhile lies beyond it.
- Offsets below the log's start are `expired`, also where retention passes us on the way: the walk goes on behind them.
- The reader counts what became of every offset it passed; the bytes here must add up to the same, or the walk raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt

from holdfast.admin.errors import ClusterError
from holdfast.audit.decoding import Observer, SourceDecoder
from holdfast.audit.model import KEYS_MAX, AuditError, Kind
from holdfast.pipeline.digest import digest_of_offsets
from holdfast.pipeline.positions import Place
from holdfast.reader import PartitionRange, RangeReport, TopicPartition
from holdfast.reader.errors import OffsetGone

if TYPE_CHECKING:
    import pyarrow as pa

    from holdfast.reader.cluster import Cluster

COMPACTED, RECORD, CONTROL, ABORTED, EXPIRED = range(5)
"""The bytes. An offset that nothing is said about is in no batch."""
KINDS: Final = dict(enumerate((Kind.COMPACTED, Kind.RECORD, Kind.CONTROL, Kind.ABORTED, Kind.EXPIRED)))
CODES: Final = {str(kind): code for code, kind in KINDS.items()}
TICK_MS: Final = 100
"""Times are kept in these: 32 bits of them reach thirteen years."""
TICKS_MAX: Final = 2**31 - 1
NO_TICK: Final = -(2**31)
"""The record has no time."""
KEY_CHARACTERS_MAX: Final = 80
RETRIES_MAX: Final = 100
"""How often retention may overtake the walk: each time it has gone on behind what expired."""

Codes = npt.NDArray[np.uint8]
Ticks = npt.NDArray[np.int32]
Span = tuple[int, int]


@dataclass(frozen=True)
class LogEnds:
    """How far the log of a partition reached when the audit began."""

    start: int
    end: int
    """The last stable offset: what is decided."""


@dataclass
class PartitionWalk:
    """Every offset of one partition's scope."""

    place: Place
    start: int
    end: int
    codes: Codes
    ticks: Ticks

    @property
    def records(self) -> npt.NDArray[np.bool_]:
        found: npt.NDArray[np.bool_] = self.codes == RECORD
        return found

    def kinds(self) -> dict[str, int]:
        counted = np.bincount(self.codes, minlength=len(KINDS))
        return {str(kind): int(counted[code]) for code, kind in KINDS.items() if counted[code]}

    def digest(self, start: int, end: int) -> int:
        """Of the records between two offsets of the scope."""
        offsets = np.flatnonzero(self.codes[start - self.start : end - self.start] == RECORD) + start
        return digest_of_offsets(self.place.topic, self.place.partition, offsets)


@dataclass
class SourceWalk:
    """What was found on the way."""

    partitions: dict[Place, PartitionWalk] = field(default_factory=dict)
    base_ms: int | None = None
    """The time of tick 0: that of the first record read that has one."""
    expired_on_the_way: dict[Place, int] = field(default_factory=dict)
    """By partition: offsets that retention took while the walk was under way."""

    @property
    def records(self) -> int:
        return sum(int(walk.records.sum()) for walk in self.partitions.values())


def look(cluster: Cluster, topics: Iterable[str]) -> dict[Place, LogEnds]:
    """How far every partition of these topics reaches now; topics that are not there are left out."""
    names = sorted(set(topics))
    while True:
        found = cluster.refresh(names)
        partitions = {
            TopicPartition(info.name, number): Place(info.name, info.topic_id, number)
            for info in found.values()
            for number in info.partitions
        }
        if not partitions:
            return {}
        starts = cluster.offsets(partitions, "earliest")
        ends = cluster.offsets(partitions, "last-stable")
        again = cluster.refresh(names)
        # Offsets are asked for by name: those of a topic recreated in between would be another's.
        if {name: info.topic_id for name, info in again.items()} == {
            name: info.topic_id for name, info in found.items()
        }:
            return {
                place: LogEnds(starts[partition].offset, ends[partition].offset)
                for partition, place in partitions.items()
            }


def walk(
    cluster: Cluster,
    spans: Mapping[Place, Span],
    logs: Mapping[Place, LogEnds],
    *,
    decoder: SourceDecoder | None = None,
    observers: Sequence[Observer] = (),
) -> SourceWalk:
    """Read the scope: by partition, from the first offset up to and without the second."""
    found = SourceWalk()
    for place, (start, end) in sorted(spans.items()):
        size = max(0, end - start)
        found.partitions[place] = PartitionWalk(
            place, start, max(start, end), np.full(size, COMPACTED, np.uint8), np.zeros(size, np.int32)
        )
        expired = min(max(0, logs[place].start - start), size)
        found.partitions[place].codes[:expired] = EXPIRED
    _Walker(cluster, found, decoder, observers).go(
        {place: (max(start, logs[place].start), end) for place, (start, end) in spans.items()}
    )
    return found


@dataclass
class _Walker:
    cluster: Cluster
    found: SourceWalk
    decoder: SourceDecoder | None
    observers: Sequence[Observer]

    def go(self, spans: Mapping[Place, Span]) -> None:
        wants_headers = any(getattr(observer, "needs_headers", False) for observer in self.observers)
        left = {place: span for place, span in spans.items() if span[0] < span[1]}
        for _ in range(RETRIES_MAX):
            if not left:
                return
            ranges = {
                place: PartitionRange(place.topic, place.topic_id, place.partition, start, end)
                for place, (start, end) in left.items()
            }
            reports: list[RangeReport] = []
            batches = self.cluster.read(list(ranges.values()), headers=wants_headers, reports=reports)
            for report in reports:
                report.set_aside = []
            reached = {place: start for place, (start, _) in left.items()}
            try:
                for batch in batches:
                    place = self._take(batch, ranges)
                    reached[place] = int(batch.column("offset")[-1].as_py()) + 1
            except OffsetGone as gone:
                self._note(reports)
                left = self._behind_expired(left, reached, gone)
            else:
                self._note(reports)
                self._check(reports)
                return
        raise AuditError(
            "the source's retention is faster than the audit reads: raise retention, and audit again"
        )

    def _take(self, batch: pa.RecordBatch, ranges: Mapping[Place, PartitionRange]) -> Place:
        topic, partition = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
        place = next(each for each in ranges if each.topic == topic and each.partition == partition)
        part = self.found.partitions[place]
        offsets = batch.column("offset").to_numpy() - part.start
        times_us = batch.column("timestamp").cast("int64").fill_null(0).to_numpy()
        known = times_us > 0
        if self.found.base_ms is None and known.any():
            self.found.base_ms = int(times_us[known][0]) // 1000
        ticks = (times_us // 1000 - (self.found.base_ms or 0)) // TICK_MS
        ticks = np.where(known, np.clip(ticks, -TICKS_MAX, TICKS_MAX), NO_TICK).astype(np.int32)
        at: Any = offsets
        if int(offsets[-1]) - int(offsets[0]) + 1 == len(offsets):
            at = slice(int(offsets[0]), int(offsets[-1]) + 1)  # as nearly always: no gaps
        part.codes[at] = RECORD
        part.ticks[at] = ticks
        if self.observers:
            assert self.decoder is not None, "observers ask for decoded records"
            decoded = self.decoder.once(topic, batch)
            for observer in self.observers:
                observer.take(place, batch, decoded)
        return place

    def _note(self, reports: Iterable[RangeReport]) -> None:
        """Batches without rows; of compacted ones the offsets in no record count with the rest of the batch."""
        for report in reports:
            part = self._part(report)
            for kind, first, last in report.set_aside or ():
                begin, behind = max(0, first - part.start), max(0, last + 1 - part.start)
                part.codes[begin:behind] = CODES[kind]

    def _part(self, report: RangeReport) -> PartitionWalk:
        wanted = report.range
        return self.found.partitions[Place(wanted.topic, wanted.topic_id, wanted.partition)]

    def _check(self, reports: Iterable[RangeReport]) -> None:
        for report in reports:
            part = self._part(report)
            first = report.range.start - part.start
            counted = int((part.codes[first : report.range.end - part.start] == RECORD).sum())
            if counted != report.records:
                raise AuditError(
                    f"{part.place.topic}-{part.place.partition}: {report.records} records were read and {counted} "
                    "offsets have one: two batches of its log claim the same offset"
                )

    def _behind_expired(
        self, left: Mapping[Place, Span], reached: dict[Place, int], gone: OffsetGone
    ) -> dict[Place, Span]:
        """What is still to be read, after retention has taken some of it."""
        logs = look(self.cluster, {each.topic for each in left})
        moved = {
            place: logs[place].start for place in left if place in logs and logs[place].start > reached[place]
        }
        if not moved:
            raise gone
        for place, log_start in moved.items():
            part, start = self.found.partitions[place], reached[place]
            behind = min(log_start, left[place][1])
            part.codes[start - part.start : behind - part.start] = EXPIRED
            lost = self.found.expired_on_the_way
            lost[place] = lost.get(place, 0) + behind - start
            reached[place] = behind
        return {place: (reached[place], end) for place, (_, end) in left.items() if reached[place] < end}


def keys_at(cluster: Cluster, place: Place, offsets: Iterable[int]) -> list[str]:
    """The keys of the first few of these records, as text; a record without one has none to tell."""
    found: list[str] = []
    for offset in sorted(set(offsets))[:KEYS_MAX]:
        wanted = PartitionRange(place.topic, place.topic_id, place.partition, offset, offset + 1)
        try:
            for batch in cluster.read([wanted], headers=False):
                found += [key_text(key) for key in batch.column("key").to_pylist() if key is not None]
        except ClusterError:
            break  # gone meanwhile: the offset still names it
    return found


def key_text(key: bytes) -> str:
    """UTF-8 where it is, else hexadecimal digits; long ones are cut."""
    try:
        text = key.decode("utf-8")
        if not text.isprintable():
            raise ValueError
    except ValueError:
        text = f"0x{key.hex()}"
    return text if len(text) <= KEY_CHARACTERS_MAX else text[: KEY_CHARACTERS_MAX - 1] + "…"
