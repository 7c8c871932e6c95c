"""Consumers: they read from the beginning or at the tail, and remember nothing but where they are.

One that wants committed records only does what every client library does: it leaves out the batches that the
answer's list of aborted transactions hides, and tells the checkers which those were.

`SessionConsumer` has an incremental fetch session: it names a partition once, and again only when something changed.
What the broker leaves out of an answer is a statement too: nothing new there, and the end is where it was. The
consumer hands it to the checkers as such, so that a session that forgets a partition shows.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.contents import hidden_batches
from tests.support.simulator.link import UNKNOWN_TOPIC, Client

from holdfast.wire.api_keys import FETCH, LIST_OFFSETS

if TYPE_CHECKING:
    from tests.support.simulator.world import KnownPartition, World


EARLIEST = -2
LATEST = -1
LARGEST_TIMESTAMP = -3
_NOT_NOW = frozenset(
    {
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.offset_not_available,
        ErrorCode.fenced_leader_epoch,
        ErrorCode.unknown_leader_epoch,
    }
)


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


class Consumer(Client):
    """Fetches some partitions at a time; one fetch under way."""

    def __init__(self, world: World, name: str, committed_only: bool = False) -> None:
        super().__init__(world, name)
        self.committed_only = committed_only
        self.positions: dict[Partition, int] = {}
        self.ends: dict[Partition, int] = {}
        """The end each partition's last answer showed."""
        self.stable_ends: dict[Partition, int] = {}
        self.shown: dict[Partition, list[tuple[int, bytes]]] = {}
        """(offset, value) of what was read of compacted partitions."""

    def act(self) -> bool:
        if self.is_waiting:
            return False
        rng = self.world.rng
        chosen = self.world.some_partitions(rng.choice((1, 3, 8)))
        if not chosen:
            return False
        if rng.random() < 0.08:
            self._rewind(chosen)
        elif rng.random() < 0.1:
            self.list_offsets(chosen, self._some_time())
            return True
        self.fetch(chosen, max_wait_ms=rng.choice((0, 0, 20, 500)), limit_bytes=rng.choice((1, 500, 1 << 20)))
        return True

    def _some_time(self) -> int:
        """A time to look up, or one of the special places."""
        rng = self.world.rng
        draw = rng.random()
        if draw < 0.5:
            return rng.choice((EARLIEST, LATEST))
        if draw < 0.65:
            return LARGEST_TIMESTAMP
        return self.world.clock.now().wall_ms - rng.choice((0, 50, 500, 3_000, 10_000))

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
            "isolation_level": int(self.committed_only),
            "session_id": 0,
            "session_epoch": -1,
            "topics": list(by_topic.values()),
        }
        self.ask(
            "fetch", FETCH, version, fields, partial(self._fetched, version, asked, limit_bytes < 1 << 20)
        )

    def _fetched(
        self,
        version: int,
        asked: dict[tuple[Any, int], tuple[KnownPartition, int]],
        limited: bool,
        response: Any,
    ) -> None:
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
            self._take(known, position, answer, limited)
        elif error == ErrorCode.offset_out_of_range:
            self.world.say(f"{self.name}: {known} at {position} is out of range")
            self.world.observe(history.ReadOutOfRange(self.name, known.partition, position))
            self.list_offsets([known], EARLIEST)
        elif error in UNKNOWN_TOPIC:
            self.world.observe(history.PartitionMissing(self.name, known.partition))
        elif error == ErrorCode.kafka_storage_error:
            self.world.storage_error(f"{self.name}: fetch of {known}", known)
        elif error not in _NOT_NOW:
            self.world.unexpected(f"{self.name}: fetch of {known} was answered {error.name}")

    def _take(self, known: KnownPartition, position: int, answer: Any, limited: bool) -> None:
        read = self.world.batch_reader.read(answer.records)
        batches = tuple(batch.stored for batch in read)
        hidden: frozenset[int] = frozenset()
        if self.committed_only:
            aborted = answer.aborted_transactions or ()
            hidden = hidden_batches(read, [(each.producer_id, each.first_offset) for each in aborted])
            self.world.count("read committed", "hidden", len(hidden))
        end = answer.high_watermark
        self.world.observe(
            history.BatchesRead(
                self.name,
                known.partition,
                position,
                batches,
                end,
                answer.log_start_offset,
                limited,
                answer.last_stable_offset,
                self.committed_only,
                hidden,
            )
        )
        self.ends[known.partition] = end
        self.stable_ends[known.partition] = answer.last_stable_offset
        if batches:
            next_position = batches[-1].next_offset
            self.world.report.records_read += next_position - position
            self.world.say(f"{self.name}: {known} read {position} to {next_position}, end {end}")
            position = next_position
        elif known.topic.is_compacted and not limited:
            position = max(position, answer.last_stable_offset if self.committed_only else end)
        if known.topic.is_compacted:
            self.shown.setdefault(known.partition, []).extend(
                record
                for batch in batches
                if batch.base_offset not in hidden
                for record in zip(batch.record_offsets, batch.values, strict=True)
            )
        self.positions[known.partition] = position

    def list_offsets(self, chosen: list[KnownPartition], timestamp: int) -> None:
        """Ask for an offset by time or place, and go there; by name, so only of topics that still are."""
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
        fields = {
            "replica_id": -1,
            "isolation_level": int(self.committed_only),
            "topics": list(by_topic.values()),
            "timeout": 1000,
        }
        version = self.world.rng.choice((9, 10) if timestamp == LARGEST_TIMESTAMP else (2, 6, 9, 10))
        kind = "list offsets" if timestamp in (EARLIEST, LATEST) else "look up a time"
        self.ask(kind, LIST_OFFSETS, version, fields, partial(self._listed, kind, chosen, timestamp))

    def _listed(self, kind: str, chosen: list[KnownPartition], timestamp: int, response: Any) -> None:
        known_by = {(known.topic.name, known.index): known for known in chosen}
        for topic in response.topics:
            for answer in topic.partitions:
                known = known_by[topic.name, answer.partition_index]
                self.world.count(kind, answer.error_code.name)
                if not self.world.is_live(known.partition):
                    continue
                if answer.error_code == ErrorCode.none:
                    self._go_to(known, timestamp, answer)
                elif answer.error_code in UNKNOWN_TOPIC:
                    self.world.observe(history.PartitionMissing(self.name, known.partition))
                elif answer.error_code == ErrorCode.kafka_storage_error:
                    self.world.storage_error(f"{self.name}: offsets of {known}", known)
                elif answer.error_code not in _NOT_NOW:
                    self.world.unexpected(f"{self.name}: offsets of {known}: {answer.error_code.name}")

    def _go_to(self, known: KnownPartition, timestamp: int, answer: Any) -> None:
        offset = int(answer.offset)
        place = {EARLIEST: "starts", LATEST: "ends"}.get(timestamp, f"has time {timestamp}")
        self.world.say(f"{self.name}: {known} {place} at {offset}")
        if timestamp == EARLIEST:
            self.world.observe(history.OffsetsListed(self.name, known.partition, start=offset))
        elif timestamp != LATEST:
            self.world.observe(
                history.TimeLookedUp(
                    self.name, known.partition, timestamp, offset, answer.timestamp, self.committed_only
                )
            )
            if offset < 0:
                return
        elif self.committed_only:
            self.world.observe(history.OffsetsListed(self.name, known.partition, stable=offset))
        else:
            self.world.observe(history.OffsetsListed(self.name, known.partition, end=offset))
            self.ends[known.partition] = offset
        self.positions[known.partition] = offset


VERSION = 17
SESSION = "fetch in a session"
NAME_AGAIN = -1
"""No position: the partition is still in the session, and the next request names it whatever its position."""
_SESSION_ERRORS = frozenset(
    {
        ErrorCode.fetch_session_id_not_found,
        ErrorCode.invalid_fetch_session_epoch,
        ErrorCode.fetch_session_topic_id_error,
    }
)


class SessionConsumer(Consumer):
    def __init__(self, world: World, name: str, committed_only: bool = False) -> None:
        super().__init__(world, name, committed_only)
        self._session_id = 0
        self._epoch = 0
        self._asked: dict[Partition, int] = {}
        """The position each partition of the session was last named with."""

    def act(self) -> bool:
        if self.is_waiting:
            return False
        every = self.world.all_partitions()
        if not every:
            return False
        rng = self.world.rng
        if rng.random() < 0.05:
            self._rewind(rng.sample(every, 1))
        elif rng.random() < 0.05:
            self.list_offsets(rng.sample(every, 1), self._some_time())
            return True
        self.fetch(every, max_wait_ms=rng.choice((0, 0, 20, 500)))
        return True

    def _reset(self) -> None:
        self._session_id = self._epoch = 0
        self._asked.clear()

    def fetch(self, chosen: list[KnownPartition], max_wait_ms: int = 0, limit_bytes: int = 1 << 20) -> None:
        wanted = {known.partition: known for known in chosen}
        forgotten = [partition for partition in self._asked if partition not in wanted]
        for partition in forgotten:
            del self._asked[partition]
        topics: dict[str, dict[str, Any]] = {}
        for partition, known in wanted.items():
            position = self.positions.get(partition, 0)
            if self._asked.get(partition) != position:
                self._asked[partition] = position
                topic = topics.setdefault(partition[0], {"topic_id": known.topic.uuid, "partitions": []})
                topic["partitions"].append(asking(known.index, position, limit_bytes))
            self.world.observe(history.ReadBegun(self.name, partition))
        fields = {
            "max_wait": max_wait_ms,
            "min_bytes": self.world.rng.choice((0, 1, 1, 1000)),
            "max_bytes": 1 << 24,
            "isolation_level": int(self.committed_only),
            "session_id": self._session_id,
            "session_epoch": self._epoch,
            "topics": list(topics.values()),
            "forgotten_topics_data": [
                {"topic_id": bytes.fromhex(topic_id), "partitions": [index]} for topic_id, index in forgotten
            ],
        }
        self.ask(SESSION, FETCH, VERSION, fields, partial(self._answered, wanted), lost=self._reset)

    def _answered(self, wanted: dict[Partition, KnownPartition], response: Any) -> None:
        self.world.count(SESSION, "answered" if not response.error_code else response.error_code.name)
        if response.error_code in _SESSION_ERRORS:
            self._reset()
            return
        if self._epoch == 0:
            self._session_id = response.session_id
        self._epoch += 1
        left_out = dict(wanted)
        for topic in response.responses:
            for answer in topic.partitions:
                key = (topic.topic_id.hex, answer.partition_index)
                known = left_out.pop(key)
                self._fetched_partition(known, self._asked[key], answer, limited=False)
                if answer.error_code != ErrorCode.none:
                    self._asked[key] = NAME_AGAIN
        for key in left_out:
            self._unchanged(key)
        if not self._session_id:
            self._reset()

    def _unchanged(self, key: Partition) -> None:
        if key in self.ends:
            self.world.observe(
                history.BatchesRead(
                    self.name,
                    key,
                    self._asked[key],
                    (),
                    self.ends[key],
                    last_stable=self.stable_ends.get(key, -1),
                    committed_only=self.committed_only,
                )
            )
