"""One partition's log on a simulated disk, for tests of the log, of recovery and of compaction.

The first half is a plain log beside a model of what it should hold. `CompactedLog` is cleaned and its segments are
swapped in by the calling thread.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from holdfast.atomic import flush_each
from holdfast.broker.log.cleaner import Cleaned
from holdfast.broker.log.compaction import Swap, examine, plan_round
from holdfast.broker.log.end_markers import build_end_marker
from holdfast.broker.log.leader_epochs import EpochStart
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import Trust, open_log
from holdfast.broker.log.tasks import run
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import (
    BatchHeader,
    Record,
    build_batch,
    check_whole,
    iterate_records,
    read_header,
)
from holdfast.wire.codecs import Codec
from holdfast.wire.control_records import EndTransactionMarker

DIRECTORY: Final = "/data/t-0"
START_MS: Final = 1_700_000_000_000
NOW: Final = Now(START_MS, 0)


def topic_config(**overrides: str) -> TopicConfig:
    """Small segments and dense indexes, so that little data makes many of both. Dots are underscores here."""
    config, _ = BrokerConfig.load({"log.dirs": "/data"})
    small = {"internal_segment_bytes": "700", "index_interval_bytes": "150"}
    return config.topic_config(
        {name.replace("_", "."): value for name, value in {**small, **overrides}.items()}
    )


class Batch(NamedTuple):
    """What to append: records and who sends them."""

    values: tuple[bytes, ...]
    producer_id: int = -1
    sequence: int = -1
    codec: Codec = Codec.NONE
    timestamp: int = START_MS
    epoch: int = 0


class Stored(NamedTuple):
    """One batch as the log should hold it, byte for byte."""

    header: BatchHeader
    data: bytes


class LogState(NamedTuple):
    """Everything about an open log that a reader or the next writer could notice."""

    start_offset: int
    end_offset: int
    batches: tuple[bytes, ...]
    segments: tuple[tuple[int, int], ...]
    """Base offset and size of each."""
    timestamps: tuple[tuple[int, int], ...]
    """The largest timestamp of each segment, and its offset."""
    epochs: tuple[EpochStart, ...]
    producers: tuple[tuple[int, int, tuple[tuple[int, ...], ...]], ...]
    """Id, epoch, and of the remembered batches the first and last sequence and offset."""


class Indexes(NamedTuple):
    offsets: tuple[tuple[int, int], ...]
    times: tuple[tuple[int, int], ...]


def encode(batch: Batch) -> bytes:
    return build_batch(
        [Record(index, 0, None, value) for index, value in enumerate(batch.values)],
        base_timestamp=batch.timestamp,
        codec=batch.codec,
        producer_id=batch.producer_id,
        producer_epoch=0 if batch.producer_id >= 0 else -1,
        base_sequence=batch.sequence if batch.producer_id >= 0 else -1,
    )


def append(log: Log, batch: Batch, now: Now = NOW) -> Stored:
    data = encode(batch)
    header = log.append(check_whole(data), data, batch.epoch, now)
    return Stored(
        header,
        header.base_offset.to_bytes(8, "big") + data[8:12] + batch.epoch.to_bytes(4, "big") + data[16:],
    )


def open_at(
    disk: SimulatedDisk,
    *,
    config: TopicConfig | None = None,
    clean: bool = False,
    recovery_point: int = 0,
    start_offset: int = 0,
    torn: bool = False,
    recovery_point_known: bool = True,
    start_offset_known: bool = True,
    accept_loss: bool = False,
    said: list[str] | None = None,
    now: Now = NOW,
) -> Log:
    trust = Trust(clean, recovery_point, start_offset, torn, recovery_point_known, start_offset_known)
    lines = [] if said is None else said
    config = config or topic_config()
    return open_log(disk, DIRECTORY, config, trust, now, lines.append, accept_loss=accept_loss)


def flush(disk: SimulatedDisk, log: Log) -> int:
    """Flush what the log names; returns the offset below which everything is durable now."""
    pending = log.begin_flush(apart=True)
    flush_each(disk, pending.targets)
    log.advance_recovery_point(pending.end)
    return pending.end.offset


def read_batches(log: Log, *, max_bytes: int = 1 << 20) -> tuple[bytes, ...]:
    """Every batch from the log start, by way of `Log.read`, as fetches find them."""
    batches: list[bytes] = []
    offset = log.start_offset
    while (piece := log.read(offset, max_bytes, log.end_position, at_least_one=True)) is not None:
        data = piece.file.pread(piece.length, piece.position)
        while len(data) >= 61 and len(data) >= (header := read_header(data)).size:
            batches.append(data[: header.size])
            data = data[header.size :]
            if header.next_offset <= offset:
                raise AssertionError(f"asked for {offset}, got a batch that ends before it: {header}")
            offset = header.next_offset
    return tuple(batches)


def state_of(log: Log) -> LogState:
    return LogState(
        log.start_offset,
        log.end_offset,
        read_batches(log),
        tuple((segment.base_offset, segment.size) for segment in log.segments),
        tuple((segment.max_timestamp, segment.offset_of_max_timestamp) for segment in log.segments),
        tuple(log.epochs.entries),
        tuple(
            sorted(
                (
                    producer.producer_id,
                    producer.producer_epoch,
                    tuple(batch[:4] for batch in log.producers.batches_of(producer.producer_id)),
                )
                for producer in log.producers.describe()
            )
        ),
    )


def indexes_of(log: Log) -> list[Indexes]:
    return [
        Indexes(tuple(segment.index.entries), tuple(segment.time_index.entries)) for segment in log.segments
    ]


def fresh_copy(stored: Sequence[Stored], config: TopicConfig | None = None) -> Log:
    """A log on a new disk to which these batches were appended: what a recovered one must equal."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=config)
    for header, data in stored:
        log.append(header, data, header.leader_epoch, NOW)
    return log


DELETE_RETENTION_MS: Final = 10_000
MAP_BYTES: Final = 1 << 20

Pair = tuple[bytes | None, bytes | None]


def compacted(**overrides: str) -> TopicConfig:
    settings = {
        "cleanup_policy": "compact",
        "internal_segment_bytes": "600",
        "index_interval_bytes": "100",
        "delete_retention_ms": str(DELETE_RETENTION_MS),
        "min_cleanable_dirty_ratio": "0",
    }
    return topic_config(**{**settings, **overrides})


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

    def append(self, pairs: Sequence[Pair], codec: Codec = Codec.NONE, **options: Any) -> BatchHeader:
        records = [Record(index, index, key, value) for index, (key, value) in enumerate(pairs)]
        batch = build_batch(records, base_timestamp=self.now_ms, codec=codec, **options)
        return self.log.append(check_whole(batch), batch, 0, self.now)

    def append_marker(self, producer_id: int, *, is_commit: bool) -> BatchHeader:
        batch = build_end_marker(producer_id, 0, EndTransactionMarker(is_commit, 0), self.now_ms)
        return self.log.append(check_whole(batch), batch, 0, self.now)

    def roll(self) -> None:
        self.log.roll(self.now)
        self.flush()

    def flush(self) -> None:
        targets, end = self.log.begin_flush()
        flush_each(self.disk, targets)
        self.log.advance_recovery_point(end)

    def clean(self, map_bytes: int = MAP_BYTES, first_base: int = 0, part_bytes: int = 1 << 40) -> Cleaned:
        """Clean up to the active segment, through JSON as the real worker does, without swapping in."""
        log = self.log
        end = log.end_position
        dirt = examine(log, self.clean_to, log.end_offset, end, self.now)
        asked = replace(plan_round(log, dirt, end, self.now, map_bytes, first_base), part_bytes=part_bytes)
        return Cleaned.from_json(
            json.loads(json.dumps(run(self.disk, "compact", json.loads(json.dumps(asked.to_json())))))
        )

    def swap_in(self, cleaned: Cleaned) -> None:
        swap_in(self.disk, self.log, cleaned)
        self.clean_to = cleaned.end_offset

    def compact(self, map_bytes: int = MAP_BYTES) -> Cleaned:
        cleaned = self.clean(map_bytes)
        self.swap_in(cleaned)
        return cleaned

    def restart(self) -> None:
        self.log.flush_and_close()
        self.log = self.open(clean=True)

    def headers(self) -> list[BatchHeader]:
        return [found.header for found in self.log.batches_from(0)]

    def records(self) -> list[Kept]:
        return read_all(self.log)


def swap_in(disk: SimulatedDisk, log: Log, cleaned: Cleaned) -> None:
    """Put what a round of compaction has written in the place of what it has read."""
    seen = {segment.base_offset: segment for segment in log.segments}
    for segment in cleaned.segments:
        swap = Swap(disk, log, segment, seen)
        assert swap.is_possible
        swap.commit()
        disk.flush_directory(DIRECTORY)
        retired = swap.exchange()
        disk.flush_directory(DIRECTORY)
        swap.finish()
        disk.flush_directory(DIRECTORY)
        run(disk, "remove", {"paths": retired})


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
