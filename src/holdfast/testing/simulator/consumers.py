"""Consumers: they read from the beginning or at the tail, and remember nothing but where they are."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode

from holdfast.testing import history
from holdfast.testing.history import Partition, StoredBatch
from holdfast.testing.simulator.link import Link
from holdfast.wire.batch import HEADER_SIZE, check_whole, iterate_records, read_header

if TYPE_CHECKING:
    from holdfast.testing.simulator.world import KnownPartition, World

FETCH = 1
LIST_OFFSETS = 2
EARLIEST = -2
LATEST = -1
_NOT_NOW = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.offset_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
    }
)
_UNKNOWN_TOPIC = frozenset({ErrorCode.unknown_topic_or_partition, ErrorCode.unknown_topic_id})


class BatchReader:
    """Record batches of fetch answers, decoded once each."""

    def __init__(self) -> None:
        self._known: dict[bytes, StoredBatch] = {}

    def read(self, records: Any) -> tuple[StoredBatch, ...]:
        data = bytes(records) if records else b""
        position = 0
        found = []
        while len(data) - position >= HEADER_SIZE:
            size = read_header(data, position).size
            if position + size > len(data):
                break
            raw = data[position : position + size]
            batch = self._known.get(raw)
            if batch is None:
                header = check_whole(raw)
                values = tuple(record.value or b"" for record in iterate_records(raw))
                batch = self._known[raw] = StoredBatch(header.base_offset, values, header.leader_epoch)
            found.append(batch)
            position += size
        return tuple(found)


def asking(index: int, position: int, limit_bytes: int) -> dict[str, Any]:
    """One partition of a fetch request."""
    return {
        "partition": index,
        "current_leader_epoch": -1,
        "fetch_offset": position,
        "last_fetched_epoch": -1,
        "log_start_offset": -1,
        "partition_max_bytes": limit_bytes,
    }


class Consumer:
    """Fetches some partitions at a time; one fetch under way."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.link = Link(world, name)
        self.positions: dict[Partition, int] = {}
        self.ends: dict[Partition, int] = {}
        """The end each partition's last answer showed."""
        self._waiting = False

    @property
    def is_idle(self) -> bool:
        return not self._waiting

    def act(self) -> bool:
        if self._waiting:
            return False
        rng = self.world.rng
        chosen = self.world.some_partitions(rng.choice((1, 3, 8)))
        if not chosen:
            return False
        if rng.random() < 0.08:
            self._rewind(chosen)
        elif rng.random() < 0.1:
            self.list_offsets(chosen, rng.choice((EARLIEST, LATEST)))
            return True
        self.fetch(chosen, max_wait_ms=rng.choice((0, 0, 20, 500)), limit_bytes=rng.choice((1, 500, 1 << 20)))
        return True

    def _rewind(self, chosen: list[KnownPartition]) -> None:
        for known in chosen:
            if self.world.rng.random() < 0.7:
                self.positions.pop(known.partition, None)
            else:
                self.positions[known.partition] = self.ends.get(known.partition, 0)

    def fetch(self, chosen: list[KnownPartition], max_wait_ms: int = 0, limit_bytes: int = 1 << 20) -> None:
        version = self.world.rng.choice((12, 13, 16, 17))
        by_topic: dict[str, dict[str, Any]] = {}
        asked: dict[tuple[Any, int], tuple[KnownPartition, int]] = {}
        for known in chosen:
            position = self.positions.get(known.partition, 0)
            key = known.topic.uuid if version >= 13 else known.topic.name
            asked[key, known.index] = (known, position)
            topic = by_topic.setdefault(
                known.topic.topic_id, {"topic_id" if version >= 13 else "topic": key, "partitions": []}
            )
            topic["partitions"].append(asking(known.index, position, limit_bytes))
            self.world.observe(history.ReadBegun(self.name, known.partition))
        fields = {
            "max_wait": max_wait_ms,
            "min_bytes": self.world.rng.choice((0, 1, 1, 1000)),
            "max_bytes": 1 << 24,
            "session_id": 0,
            "session_epoch": -1,
            "topics": list(by_topic.values()),
        }
        self._waiting = True
        self.link.request(
            FETCH, version, fields, partial(self._fetched, version, asked, limit_bytes < 1 << 20)
        )

    def _fetched(
        self,
        version: int,
        asked: dict[tuple[Any, int], tuple[KnownPartition, int]],
        limited: bool,
        response: Any | None,
    ) -> None:
        self._waiting = False
        if response is None:
            self.world.count("fetch", "unknown")
            return
        self.world.count(
            "fetch", "answered" if response.error_code == ErrorCode.none else response.error_code.name
        )
        for topic in response.responses:
            for answer in topic.partitions:
                key = topic.topic_id if version >= 13 else topic.topic
                known, position = asked[key, answer.partition_index]
                self._fetched_partition(known, position, answer, limited)

    def _fetched_partition(self, known: KnownPartition, position: int, answer: Any, limited: bool) -> None:
        error = answer.error_code
        if error == ErrorCode.none:
            batches = self.world.batch_reader.read(answer.records)
            self.world.observe(
                history.BatchesRead(
                    self.name,
                    known.partition,
                    position,
                    batches,
                    answer.high_watermark,
                    answer.log_start_offset,
                    limited,
                )
            )
            self.ends[known.partition] = answer.high_watermark
            if batches:
                end = batches[-1].base_offset + len(batches[-1].values)
                self.world.report.records_read += end - position
                self.world.say(f"{self.name}: {known} read {position} to {end}, end {answer.high_watermark}")
                position = end
            self.positions[known.partition] = position
        elif error == ErrorCode.offset_out_of_range:
            self.world.say(f"{self.name}: {known} at {position} is out of range")
            self.world.observe(history.ReadOutOfRange(self.name, known.partition, position))
            self.list_offsets([known], EARLIEST)
        elif error in _UNKNOWN_TOPIC:
            self.world.observe(history.PartitionMissing(self.name, known.partition))
        elif error == ErrorCode.kafka_storage_error:
            self.world.storage_error(f"{self.name}: fetch of {known}")
        elif error not in _NOT_NOW:
            self.world.unexpected(f"{self.name}: fetch of {known} was answered {error.name}")

    def list_offsets(self, chosen: list[KnownPartition], timestamp: int) -> None:
        """Ask for the first offset or the end, and go there; by name, so only of topics that still are."""
        chosen = [known for known in chosen if self.world.is_live(known.partition)]
        if not chosen:
            return
        by_topic: dict[str, dict[str, Any]] = {}
        for known in chosen:
            topic = by_topic.setdefault(known.topic.name, {"name": known.topic.name, "partitions": []})
            topic["partitions"].append(
                {"partition_index": known.index, "current_leader_epoch": -1, "timestamp": timestamp}
            )
            self.world.observe(history.ReadBegun(self.name, known.partition))
        fields = {"replica_id": -1, "isolation_level": 0, "topics": list(by_topic.values()), "timeout": 1000}
        version = self.world.rng.choice((1, 6, 9, 10))
        self._waiting = True
        self.link.request(LIST_OFFSETS, version, fields, partial(self._listed, chosen, timestamp))

    def _listed(self, chosen: list[KnownPartition], timestamp: int, response: Any | None) -> None:
        self._waiting = False
        kind = "list offsets"
        if response is None:
            self.world.count(kind, "unknown")
            return
        known_by = {(known.topic.name, known.index): known for known in chosen}
        for topic in response.topics:
            for answer in topic.partitions:
                known = known_by[topic.name, answer.partition_index]
                self.world.count(kind, answer.error_code.name)
                if not self.world.is_live(known.partition):
                    continue
                if answer.error_code == ErrorCode.none:
                    self._go_to(known, timestamp, answer.offset)
                elif answer.error_code in _UNKNOWN_TOPIC:
                    self.world.observe(history.PartitionMissing(self.name, known.partition))
                elif answer.error_code == ErrorCode.kafka_storage_error:
                    self.world.storage_error(f"{self.name}: offsets of {known}")
                elif answer.error_code not in _NOT_NOW:
                    self.world.unexpected(f"{self.name}: offsets of {known}: {answer.error_code.name}")

    def _go_to(self, known: KnownPartition, timestamp: int, offset: int) -> None:
        self.world.say(f"{self.name}: {known} {'starts' if timestamp == EARLIEST else 'ends'} at {offset}")
        if timestamp == EARLIEST:
            self.world.observe(history.OffsetsListed(self.name, known.partition, start=offset))
        else:
            self.world.observe(history.OffsetsListed(self.name, known.partition, end=offset))
            self.ends[known.partition] = offset
        self.positions[known.partition] = offset
