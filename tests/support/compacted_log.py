"""A compacted log on a simulated disk, cleaned and swapped in by the calling thread: for tests of compaction."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from holdfast.atomic import flush_each
from holdfast.broker.log.cleaner import Cleaned
from holdfast.broker.log.compaction import Swap, examine, plan_round
from holdfast.broker.log.end_markers import build_end_marker
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
DELETE_RETENTION_MS: Final = 10_000
MAP_BYTES: Final = 1 << 20

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
        self.log.flush_and_close()
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
