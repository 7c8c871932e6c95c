"""Compaction against a dictionary, and its swap against a disk that crashes at every step."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.log.cleaner import Cleaned
from holdfast.log.compaction import Swap, examine, is_due, plan_round
from holdfast.log.log import Log
from holdfast.log.producer_state import EndMarker, encode_end_marker
from holdfast.log.recovery import Trust, open_log
from holdfast.log.tasks import run
from holdfast.seams import Now
from holdfast.testing.disk import PowerLost, SimulatedDisk
from holdfast.wire.batch import (
    BatchHeader,
    Record,
    build_batch,
    check_whole,
    iterate_records,
    read_header,
)
from holdfast.wire.codecs import Codec

DIRECTORY = "/data/t-0"
START_MS = 1_700_000_000_000
DELETE_RETENTION_MS = 10_000
MAP_BYTES = 1 << 20

Pair = tuple[bytes | None, bytes | None]


def compacted(**overrides: str) -> TopicConfig:
    config, _ = BrokerConfig.load({"log.dirs": "/data"})
    return config.topic_config(
        {
            "cleanup.policy": "compact",
            "internal.segment.bytes": "600",
            "index.interval.bytes": "100",
            "delete.retention.ms": str(DELETE_RETENTION_MS),
            "min.cleanable.dirty.ratio": "0",
            **{name.replace("_", "."): value for name, value in overrides.items()},
        }
    )


class Kept(NamedTuple):
    """One record as a reader finds it."""

    offset: int
    key: bytes | None
    value: bytes | None
    timestamp: int


class CompactedLog:
    """A log on a simulated disk, cleaned in this process."""

    def __init__(self, config: TopicConfig | None = None, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.disk.prepare("/data")
        self.config = config or compacted()
        self.now_ms = START_MS
        self.clean_to: int | None = None
        self.said: list[str] = []
        self.log = self.open(clean=False)

    @property
    def now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    def open(self, *, clean: bool, recovery_point: int = 0, disk: SimulatedDisk | None = None) -> Log:
        trust = Trust(clean=clean, recovery_point=recovery_point, start_offset=0, torn_tail_expected=True)
        return open_log(disk or self.disk, DIRECTORY, self.config, trust, self.now, self.said.append)

    def append(self, pairs: Sequence[Pair], codec: Codec = Codec.NONE, **options: int) -> BatchHeader:
        records = [Record(index, index, key, value) for index, (key, value) in enumerate(pairs)]
        batch = build_batch(records, base_timestamp=self.now_ms, codec=codec, **options)  # type: ignore[arg-type]
        return self.log.append(check_whole(batch), batch, 0, self.now)

    def append_marker(self, producer_id: int, *, is_commit: bool) -> BatchHeader:
        key, value = encode_end_marker(EndMarker(is_commit, 0))
        batch = build_batch(
            [Record(0, 0, key, value)],
            base_timestamp=self.now_ms,
            producer_id=producer_id,
            producer_epoch=0,
            is_transactional=True,
            is_control=True,
        )
        header = check_whole(batch)._replace(base_offset=self.log.end_offset)
        # The log takes markers for data until transactions are served: keep them from its producer state.
        stored = self.log.append(header._replace(producer_id=-1), batch, 0, self.now)
        self.log.producers.complete(header, EndMarker(is_commit, 0), stored.base_offset, self.now_ms)
        return stored

    def roll(self) -> None:
        self.log.roll(self.now)
        self.flush()

    def flush(self) -> None:
        for target in self.log.begin_flush().targets:
            if isinstance(target, str):
                self.disk.flush_directory(target)
            else:
                target.flush()

    def clean(self, map_bytes: int = MAP_BYTES) -> Cleaned:
        """Clean up to the active segment, through JSON as the real worker does, without swapping in."""
        log = self.log
        end = log.end_position
        dirt = examine(log, self.clean_to, log.end_offset, end, self.now)
        asked = plan_round(log, dirt, end, self.now, map_bytes)
        return Cleaned.from_json(
            json.loads(json.dumps(run(self.disk, "compact", json.loads(json.dumps(asked.to_json())))))
        )

    def swap_in(self, cleaned: Cleaned) -> None:
        seen = {segment.base_offset: segment for segment in self.log.segments}
        for segment in cleaned.segments:
            swap = Swap(self.disk, self.log, segment, seen)
            assert swap.is_possible
            swap.commit()
            self.disk.flush_directory(DIRECTORY)
            retired = swap.exchange()
            self.disk.flush_directory(DIRECTORY)
            swap.finish()
            self.disk.flush_directory(DIRECTORY)
            run(self.disk, "remove", {"paths": retired})
        self.clean_to = cleaned.end_offset

    def compact(self, map_bytes: int = MAP_BYTES) -> Cleaned:
        cleaned = self.clean(map_bytes)
        self.swap_in(cleaned)
        return cleaned

    def restart(self) -> None:
        self.log.close()
        self.log = self.open(clean=True)

    def headers(self) -> list[BatchHeader]:
        return [found.header for found in self.log.batches_from(0)]

    def records(self) -> list[Kept]:
        return read_all(self.log)


def read_all(log: Log) -> list[Kept]:
    """Every record from the log's start, by way of `Log.read` as a fetch does."""
    records: list[Kept] = []
    offset = log.start_offset
    end = log.end_position
    while (part := log.read(offset, 200, end, at_least_one=True)) is not None:
        data = part.file.pread(part.length, part.position)
        header = read_header(data)
        batch = data[: header.size]
        if not header.is_control:
            records += [
                Kept(
                    header.base_offset + record.offset_delta,
                    record.key,
                    record.value,
                    header.base_timestamp + record.timestamp_delta,
                )
                for record in iterate_records(batch)
            ]
        assert header.next_offset > offset
        offset = header.next_offset
    return records


def latest(records: Iterable[Kept]) -> dict[bytes | None, bytes]:
    """What a reader that applies the log to a dictionary ends with."""
    table: dict[bytes | None, bytes] = {}
    for record in records:
        if record.value is None:
            table.pop(record.key, None)
        else:
            table[record.key] = record.value
    return table


# ---- what stays and what goes


def test_only_the_latest_value_of_each_key_stays_at_its_offset() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1")])
    subject.append([(b"a", b"2"), (b"c", b"1")])
    subject.append([(b"b", b"2")])
    subject.roll()
    subject.compact()
    assert [record[:3] for record in subject.records()] == [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2")]


def test_batches_keep_the_offsets_they_span() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    subject.append([(b"a", b"2"), (b"c", b"2")])
    subject.roll()
    subject.compact()
    assert [(h.base_offset, h.last_offset, h.records_count) for h in subject.headers()] == [
        (0, 2, 1),
        (3, 4, 2),
    ]


def test_records_without_a_key_go() -> None:
    subject = CompactedLog()
    subject.append([(None, b"lost"), (b"a", b"1"), (None, None)])
    subject.roll()
    subject.compact()
    assert [record[:3] for record in subject.records()] == [(1, b"a", b"1")]


def test_the_active_segment_is_not_touched() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    subject.roll()
    subject.append([(b"a", b"2"), (b"a", b"3")])
    subject.compact()
    assert [record.offset for record in subject.records()] == [0, 1, 2]


def test_a_key_of_any_length_is_told_from_every_other() -> None:
    keys = [b"", b"k" * 14, b"k" * 15, b"k" * 16, b"k" * 300]
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for value in (b"old", b"new"):
        for key in keys:
            subject.append([(key, value)])
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == dict.fromkeys(keys, b"new")
    assert len(subject.records()) == len(keys)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_is_packed_again_with_its_own_codec(codec: Codec) -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"key-%d" % index, b"value" * 20) for index in range(50)], codec)
    subject.append([(b"key-%d" % index, b"new" * 20) for index in range(0, 50, 2)], codec)
    subject.roll()
    subject.compact()
    first = subject.headers()[0]
    assert (first.codec, first.records_count) == (codec, 25)
    assert [record.offset for record in subject.records()][:25] == list(range(1, 50, 2))
    assert subject.records()[0].timestamp == START_MS + 1


def test_the_largest_timestamp_is_that_of_the_records_that_stay() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    subject.append([(b"c", b"2")])
    subject.roll()
    subject.compact()
    assert subject.headers()[0].max_timestamp == START_MS + 1


# ---- tombstones


def test_a_tombstone_stays_until_its_horizon_and_goes_afterwards() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1")])
    subject.append([(b"a", None)])
    subject.roll()
    subject.compact()
    tombstone = subject.headers()[-1]
    assert tombstone.has_delete_horizon
    assert tombstone.base_timestamp == START_MS + DELETE_RETENTION_MS
    assert subject.records()[-1] == (2, b"a", None, START_MS)

    subject.now_ms += DELETE_RETENTION_MS - 1
    subject.append([(b"x", b"1")])
    subject.roll()
    subject.compact()
    assert (2, b"a", None, START_MS) in subject.records()

    subject.now_ms += 1
    subject.append([(b"x", b"2")])
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == {b"b": b"1", b"x": b"2"}
    assert all(record.value is not None for record in subject.records())


def test_a_tombstone_behind_the_mapped_part_gets_no_horizon_yet() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")])
    subject.append([(b"b", b"1")])
    subject.append([(b"a", None)])
    subject.roll()
    cleaned = subject.compact(map_bytes=1)
    assert cleaned.end_offset == 1
    assert not subject.headers()[-1].has_delete_horizon


# ---- the bounds of a round


def test_a_full_map_ends_the_round_and_the_next_goes_on() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for value in (b"1", b"2"):
        for key in (b"a", b"b", b"c", b"d"):
            subject.append([(key, value)])
    subject.roll()
    ends = []
    while not ends or ends[-1] < subject.log.active.base_offset:
        ends.append(subject.compact(map_bytes=3 * 160).end_offset)
        assert latest(subject.records()) == dict.fromkeys((b"a", b"b", b"c", b"d"), b"2")
    assert len(ends) > 1
    assert [record.offset for record in subject.records()] == [4, 5, 6, 7]


def test_a_round_stops_at_the_last_stable_offset() -> None:
    subject = CompactedLog()
    for _ in range(3):
        subject.append([(b"a", b"1")])
        subject.roll()
    dirt = examine(subject.log, None, 2, subject.log.end_position, subject.now)
    assert dirt.bound == 2


def test_a_round_stops_where_the_high_watermark_is() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    before_roll = subject.log.end_position
    subject.roll()
    assert examine(subject.log, None, 1, before_roll, subject.now).bound == 0
    assert examine(subject.log, None, 1, subject.log.end_position, subject.now).bound == 1


def test_records_younger_than_the_lag_are_left_alone() -> None:
    subject = CompactedLog(compacted(min_compaction_lag_ms="1000"))
    subject.append([(b"a", b"1")])
    subject.roll()
    subject.now_ms += 600
    subject.append([(b"a", b"2")])
    subject.roll()
    subject.now_ms += 600
    assert examine(subject.log, None, 2, subject.log.end_position, subject.now).bound == 1


def test_a_log_is_due_by_its_dirty_ratio_or_by_the_age_of_its_dirt() -> None:
    subject = CompactedLog(compacted(min_cleanable_dirty_ratio="0.5", max_compaction_lag_ms="5000"))
    for _ in range(3):
        subject.append([(b"a", b"1")])
        subject.roll()

    def due(clean_to: int) -> bool:
        dirt = examine(subject.log, clean_to, 3, subject.log.end_position, subject.now)
        return is_due(subject.log, dirt)

    assert due(1)
    assert not due(2)
    subject.now_ms += 5001
    assert due(2)
    assert not due(3)


@pytest.mark.parametrize("clean_to", [99, 1])
def test_a_checkpoint_outside_the_log_is_taken_as_none(clean_to: int) -> None:
    subject = CompactedLog()
    for _ in range(4):
        subject.append([(b"a", b"1")])
    subject.roll()
    subject.log.advance_start(2)
    dirt = examine(subject.log, clean_to, 4, subject.log.end_position, subject.now)
    assert dirt.first_dirty_offset == 2


# ---- segments


def test_small_neighbours_become_one_segment() -> None:
    subject = CompactedLog()
    for round_number in range(20):
        subject.append([(b"key", b"%d" % round_number * 50)])
        subject.roll()
    assert len(subject.log.segments) == 21
    subject.compact()
    subject.compact()
    assert [segment.base_offset for segment in subject.log.segments][-1] == 20
    assert len(subject.log.segments) < 6
    assert [record.offset for record in subject.records()] == [19]


def test_a_segment_in_which_nothing_changes_is_not_written_again() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="150"))
    subject.append([(b"a", b"1" * 80)])
    subject.roll()
    before = subject.log.segments[0]
    assert subject.compact().segments == []
    assert subject.log.segments[0] is before
    assert not [name for name in subject.disk.list(DIRECTORY) if "cleaned" in name]


def test_a_cleaned_segment_reaches_to_the_end_of_what_it_replaces() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")])
    subject.append([(b"b", b"1")])
    subject.roll()
    subject.append([(b"a", b"2"), (b"b", b"2")])
    subject.roll()
    seen = {segment.base_offset: segment for segment in subject.log.segments}
    subject.config = compacted(internal_segment_bytes="10")
    subject.log.config = subject.config
    cleaned = subject.clean()
    first = cleaned.segments[0]
    assert first.replaces == [0]
    Swap(subject.disk, subject.log, first, seen).commit()
    subject.log = subject.open(clean=True)
    headers = subject.headers()
    assert (headers[0].base_offset, headers[0].last_offset, headers[0].records_count) == (1, 1, 0)


def test_indexes_of_a_cleaned_segment_are_those_a_rebuild_gives() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for number in range(100):
        subject.now_ms += 7
        subject.append([(b"key-%d" % (number % 60), b"v" * 30)])
    subject.roll()
    subject.compact()
    segment = subject.log.segments[0]
    written = (list(segment.index.entries), list(segment.time_index.entries))
    assert len(written[0]) > 10
    segment.rebuild_indexes(subject.config.index_interval_bytes)
    assert (list(segment.index.entries), list(segment.time_index.entries)) == written


def test_damage_ends_the_round_and_changes_nothing() -> None:
    from holdfast.errors import CorruptLog

    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    subject.append([(b"a", b"2")])
    subject.roll()
    segment = subject.log.segments[0]
    segment.file.pwritev([b"X"], segment.size - 3)
    with pytest.raises(CorruptLog, match="checksum"):
        subject.clean()
    assert not [name for name in subject.disk.list(DIRECTORY) if "cleaned" in name]
