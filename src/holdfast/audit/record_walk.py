"""The records of a scope, and of what lies before and behind it, with the values that an expression gives them.

The log is read once, zone by zone: `BEFORE` from the log's start to the scope's, `SCOPE`, and `AFTER` from its end to
the log's end as it was when the walk began, which has to be after the sink was read: then whatever a row was made of is
in one of the zones, or is gone. Records that the log has lost at its head meanwhile end the walk (`OffsetGone`), and
whoever called begins again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.evaluating import Evaluator, Kind, Values, canonical, joined
from holdfast.audit.matched_values import MatchedValues, Numbers, Zone
from holdfast.audit.model import Kind as OffsetKind
from holdfast.audit.model import PartitionAccount
from holdfast.audit.words import place_text
from holdfast.pipeline.positions import Place
from holdfast.pipeline.scratch import shortened
from holdfast.reader import Cluster, Isolation, PartitionRange, RangeReport, TopicPartition

BATCH_BYTES: Final = 8 << 20
DECIDED_SECONDS_MAX: Final = 10.0
"""For the markers of a decided transaction to reach every partition. One that is open longer is somebody's who hangs
or died."""
DECIDED_POLL_SECONDS: Final = 0.02


@dataclass
class Ground:
    """One partition: what of it is audited, and what there is of it."""

    place: Place
    start: int
    end: int
    log_start: int
    log_end: int
    """Of what is decided: the last stable offset."""
    high_watermark: int = -1
    kinds: dict[str, int] = field(default_factory=dict)
    """Of the offsets of the scope, when they were read."""

    @property
    def at(self) -> TopicPartition:
        return TopicPartition(self.place.topic, self.place.partition)

    @property
    def name(self) -> str:
        return place_text(self.place)

    @property
    def missing(self) -> int:
        """Offsets of the scope in no batch."""
        return self.kinds.get(OffsetKind.COMPACTED, 0)

    @property
    def undecided(self) -> int:
        """Offsets behind a transaction that is open."""
        return max(0, self.high_watermark - self.log_end)

    @property
    def expired(self) -> int:
        """Offsets of the scope that nobody can read any more."""
        return max(0, min(self.end, self.log_start) - self.start)

    def account(self, fates: Mapping[str, int]) -> PartitionAccount:
        end = max(self.start, self.end)
        return PartitionAccount(self.place, self.start, end, self.kinds, fates, self.log_start, self.log_end)

    def span(self, zone: Zone) -> tuple[int, int]:
        first, behind = (min(max(each, self.log_start), self.log_end) for each in (self.start, self.end))
        return ((self.log_start, first), (first, behind), (behind, self.log_end))[zone]


@dataclass
class Walked:
    grounds: list[Ground]
    unread: dict[int, list[Numbers]] = field(default_factory=dict)
    """By place: records of the scope whose values could not be read."""
    unread_outside: int = 0
    filtered: dict[int, int] = field(default_factory=dict)
    """By place: records of the scope for which the condition does not hold."""
    missing: dict[Zone, int] = field(default_factory=lambda: dict.fromkeys(Zone, 0))
    """Offsets in no batch."""
    aborted: int = 0
    first_ms: int = 0
    last_ms: int = 0

    @property
    def unread_count(self) -> int:
        """Outside of the scope too."""
        return sum(len(part) for parts in self.unread.values() for part in parts) + self.unread_outside

    @property
    def forgotten_before(self) -> int:
        """Offsets in front of the scope that were there once, at most: expired, or compacted away."""
        return self.missing[Zone.BEFORE] + sum(min(each.log_start, each.start) for each in self.grounds)

    @property
    def forgotten(self) -> int:
        """The same of all offsets."""
        return sum(self.missing.values()) + sum(each.log_start for each in self.grounds)


def await_decided(cluster: Cluster, topics: Iterable[str]) -> dict[TopicPartition, int]:
    """Let the markers come of what somebody says is committed; returns the partitions that hold offsets behind an open
    transaction all the same, and how many.

    Apache Kafka answers the end of a transaction when it is decided, and writes its markers one partition after the
    other: until then its records are not among those that are read.
    """
    found = cluster.refresh(list(topics))
    places = [TopicPartition(info.name, number) for info in found.values() for number in info.partitions]
    if not places:
        return {}
    written = cluster.offsets(places, "latest")
    deadline = time.monotonic() + DECIDED_SECONDS_MAX
    while True:
        decided = cluster.offsets(places, "last-stable")
        left = {place: written[place].offset - decided[place].offset for place in places}
        undecided = {place: count for place, count in left.items() if count > 0}
        if not undecided or time.monotonic() > deadline:
            return undecided
        time.sleep(DECIDED_POLL_SECONDS)


def grounds_of(cluster: Cluster, scopes: Mapping[TopicPartition, tuple[int, int]]) -> list[Ground]:
    """What the logs hold now of these scopes."""
    places = sorted(scopes)
    if not places:
        return []
    infos = cluster.topics(sorted({place.topic for place in places}))
    starts = cluster.offsets(places, "earliest")
    ends = cluster.offsets(places, "last-stable")
    tops = cluster.offsets(places, "latest")
    return [
        Ground(
            Place(place.topic, infos[place.topic].topic_id, place.partition),
            scopes[place][0],
            scopes[place][1],
            starts[place].offset,
            ends[place].offset,
            tops[place].offset,
        )
        for place in places
    ]


def walk(
    cluster: Cluster,
    grounds: Sequence[Ground],
    evaluator: Evaluator,
    kinds: Sequence[Kind],
    into: MatchedValues,
) -> Walked:
    """Read the zones into what is compared."""
    found = Walked(list(grounds))
    numbers = {ground.at: at for at, ground in enumerate(grounds)}
    times: list[int] = []
    for zone in Zone:
        reports: list[RangeReport] = []
        for batch in read_zone(cluster, grounds, zone, reports, headers=evaluator.needs_headers):
            at_ms = _take(batch, numbers[_at(batch)], zone, evaluator, kinds, into, found)
            if zone is Zone.SCOPE:
                times += at_ms
        for report in reports:
            found.missing[zone] += report.missing
            found.aborted += report.aborted
        if zone is Zone.SCOPE:
            note_kinds(grounds, reports)
    found.first_ms, found.last_ms = (min(times), max(times)) if times else (0, 0)
    return found


def read_zone(
    cluster: Cluster,
    grounds: Sequence[Ground],
    zone: Zone,
    reports: list[RangeReport],
    *,
    headers: bool = True,
) -> Iterator[pa.RecordBatch]:
    return _read(cluster, {each.place: each.span(zone) for each in grounds}, headers=headers, reports=reports)


def _read(cluster: Cluster, spans: Mapping[Place, tuple[int, int]], **how: Any) -> Iterator[pa.RecordBatch]:
    """The records of these spans; none of them in a batch of its own is none."""
    ranges = [
        PartitionRange(place.topic, place.topic_id, place.partition, first, behind)
        for place, (first, behind) in spans.items()
        if first < behind
    ]
    return (batch for batch in cluster.read(ranges, batch_bytes=BATCH_BYTES, **how) if batch.num_rows)


def _at(batch: pa.RecordBatch) -> TopicPartition:
    return TopicPartition(batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py())


def note_kinds(grounds: Sequence[Ground], reports: Iterable[RangeReport]) -> None:
    """What the offsets of the scopes are, now that they were read."""
    by_place = {TopicPartition(report.range.topic, report.range.partition): report for report in reports}
    for ground in grounds:
        if report := by_place.get(ground.at):
            ground.kinds = {
                OffsetKind.RECORD: report.records,
                OffsetKind.CONTROL: report.control,
                OffsetKind.ABORTED: report.aborted,
                OffsetKind.COMPACTED: report.missing,
            }
        if ground.expired:
            ground.kinds[OffsetKind.EXPIRED] = ground.expired


def _take(
    batch: pa.RecordBatch,
    place: int,
    zone: Zone,
    evaluator: Evaluator,
    kinds: Sequence[Kind],
    into: MatchedValues,
    found: Walked,
) -> list[int]:
    """Take a batch's values; returns its first and last time."""
    offsets = batch.column("offset").to_numpy()
    times = _milliseconds(batch)
    chosen = np.ones(batch.num_rows, np.bool_)
    bad = np.zeros(batch.num_rows, np.bool_)
    if evaluator.conditions:
        chosen, bad = evaluator.chosen(batch)
        if zone is Zone.SCOPE:
            found.filtered[place] = found.filtered.get(place, 0) + int((~chosen & ~bad).sum())
    values = evaluated(evaluator.evaluate(batch), kinds)
    bad |= values.bad & chosen
    chosen &= ~bad
    if bad.any():
        if zone is Zone.SCOPE:
            found.unread.setdefault(place, []).append(offsets[bad])
        else:
            found.unread_outside += int(bad.sum())
    array = values.array if chosen.all() else values.array.filter(pa.array(chosen))
    into.add_records(array, place, zone, offsets[chosen], times[chosen])
    return [int(times.min()), int(times.max())]


def evaluated(values: Sequence[Values], kinds: Sequence[Kind]) -> Values:
    """In the form in which they are compared, all columns in one."""
    return joined([canonical(kind, each) for kind, each in zip(kinds, values, strict=True)])


def _milliseconds(batch: pa.RecordBatch) -> Numbers:
    micros = batch.column("timestamp").cast(pa.timestamp("us")).cast(pa.int64()).to_numpy()
    return np.asarray(micros // 1000, np.int64)


def find_values(
    cluster: Cluster,
    grounds: Sequence[Ground],
    evaluator: Evaluator,
    kinds: Sequence[Kind],
    wanted: pa.Array,
    isolation: Isolation,
) -> tuple[dict[Place, Numbers], pa.Array]:
    """Where these values stand, whatever the conditions say; also the values found.

    Uncommitted means also what was taken back, and what is not decided yet.
    """
    is_committed = isolation == "read_committed"
    spans = {
        each.place: (each.log_start, each.log_end if is_committed else each.high_watermark)
        for each in grounds
    }
    places = {each.at: each.place for each in grounds}
    found = [pa.array([], pa.large_binary())]
    offsets: dict[Place, list[Numbers]] = {}
    for batch in _read(cluster, spans, isolation=isolation, headers=evaluator.needs_headers):
        values = shortened(evaluated(evaluator.evaluate(batch), kinds).array)
        hits = pc.is_in(values, value_set=wanted, skip_nulls=True)
        if pc.any(hits).as_py():
            offsets.setdefault(places[_at(batch)], []).append(batch.column("offset").filter(hits).to_numpy())
            found.append(values.filter(hits))
    whole = {place: np.sort(np.concatenate(parts)) for place, parts in offsets.items()}
    return whole, pa.concat_arrays(found)
