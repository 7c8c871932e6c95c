"""A cluster as a reader sees it: its topics, how far their logs reach, and the records between two offsets.

The rules kept here:

- A question about a partition goes to the broker that leads it (`Brokers`). Where that is, is remembered and asked for
  again when a broker says it is somewhere else, or is gone.
- What time may mend (an election, a broker that restarts, metadata that has not arrived everywhere) is retried
  until `default.api.timeout.ms` has passed; what it cannot mend is raised at once. The first contact is different: if
  no bootstrap server answers within `socket.connection.setup.timeout.ms`, the address is taken to be wrong.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import Brokers
from holdfast.admin.connection import Connection
from holdfast.admin.errors import ClusterError, NotAuthorised, Refused, Unreachable, UnsupportedBroker
from holdfast.admin.settings import parse_settings
from holdfast.errors import UsageError, from_extra
from holdfast.reader.errors import TopicMissing
from holdfast.reader.model import (
    Isolation,
    OffsetAnswer,
    OffsetSpec,
    PartitionInfo,
    PartitionRange,
    RangeReport,
    TopicInfo,
    TopicPartition,
)
from holdfast.wire import error_table
from holdfast.wire.api_keys import LIST_OFFSETS, OFFSET_FOR_LEADER_EPOCH

if TYPE_CHECKING:
    import pyarrow as pa

T = TypeVar("T")

METADATA_WITH_IDS: Final = 10
LIST_OFFSETS_WITH_EPOCHS: Final = 4
LIST_OFFSETS_WITH_LOCAL_STARTS: Final = 8

EARLIEST: Final = -2
LATEST: Final = -1
EARLIEST_LOCAL: Final = -4
READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1

CLIENT_ID: Final = "holdfast-reader"

BATCH_BYTES_USUAL_MAX: Final = 1 << 20
"""Larger batches are the exception: they are asked for one by one."""

MISSING_CONFIRMATIONS: Final = 3
"""How often a topic must be missing before it is."""

DENIED: Final = frozenset(
    {
        ErrorCode.topic_authorization_failed,
        ErrorCode.cluster_authorization_failed,
        ErrorCode.sasl_authentication_failed,
    }
)


class Cluster(Brokers):
    """The brokers of one cluster and what they know of its topics."""

    def __init__(self, settings: Mapping[str, str]) -> None:
        super().__init__(parse_settings({"client.id": CLIENT_ID, **settings}))
        self._leaders: dict[TopicPartition, PartitionInfo] = {}
        self.batch_bytes: dict[str, int] = {}
        """By topic: how large the batches are that its producers write."""

    # -------------------------------------------------------------------- what there is

    def topics(
        self, names: Sequence[str] | None = None, *, pattern: str | None = None
    ) -> dict[str, TopicInfo]:
        """The topics with these names, or those whose whole name matches a pattern, or all but the internal ones.

        A name that no topic has raises `TopicMissing`.
        """
        if names is not None and pattern is not None:
            raise UsageError("topics are chosen by name or by pattern, not both")
        if names is not None:
            return self._named(names)
        matches = _matcher(pattern)
        found: dict[str, TopicInfo] = {}
        for topic in self._asked(None).topics:
            is_going = topic.error_code is ErrorCode.unknown_topic_or_partition
            if not is_going and not topic.is_internal and matches(topic.name):
                self._check_topic(topic)
                found[topic.name] = self._remember(topic)
        return found

    def _named(self, names: Sequence[str]) -> dict[str, TopicInfo]:
        """Topics by name; one that is not there is asked for again: not every broker knows at once of a new one."""
        for attempt in range(MISSING_CONFIRMATIONS):
            if attempt:
                self.back_off()
            found = self.refresh(names)
            missing = [name for name in names if name not in found]
            if not missing:
                return {name: found[name] for name in dict.fromkeys(names)}
        raise TopicMissing(f"there is no topic '{missing[0]}'")

    def offsets(
        self, partitions: Iterable[TopicPartition], spec: OffsetSpec
    ) -> dict[TopicPartition, OffsetAnswer]:
        """For each partition its log's start or end, the end of what is decided, or the first record of a time.

        Asked by name: compare the topic's id before and after where a topic may be recreated meanwhile.
        """
        timestamp = {"earliest": EARLIEST, "latest": LATEST, "last-stable": LATEST}.get(str(spec), spec)
        if not isinstance(timestamp, int) or timestamp < EARLIEST:
            raise UsageError(f"{spec!r} is no place in a log: earliest, latest, last-stable or milliseconds")
        isolation = READ_COMMITTED if spec == "last-stable" else READ_UNCOMMITTED
        return self._list_offsets(partitions, timestamp, isolation, LIST_OFFSETS_WITH_EPOCHS)

    def local_start(self, place: TopicPartition) -> int | None:
        """Up to where the leader has moved the log to remote storage; None from brokers that know of no such thing."""
        try:
            found = self._list_offsets(
                [place], EARLIEST_LOCAL, READ_UNCOMMITTED, LIST_OFFSETS_WITH_LOCAL_STARTS
            )
        except UnsupportedBroker:
            return None
        return found[place].offset

    def _list_offsets(
        self, partitions: Iterable[TopicPartition], timestamp: int, isolation: int, lowest: int
    ) -> dict[TopicPartition, OffsetAnswer]:
        def fields(asked: list[TopicPartition]) -> dict[str, Any]:
            return {
                "replica_id": -1,
                "isolation_level": isolation,
                "topics": _by_topic(
                    asked,
                    "name",
                    lambda each: {
                        "partition_index": each.partition,
                        "current_leader_epoch": self._leaders[each].leader_epoch,
                        "timestamp": timestamp,
                    },
                ),
                "timeout": self.settings.request_timeout_ms,
            }

        def answers(entity: Any) -> Iterator[tuple[TopicPartition, ErrorCode, OffsetAnswer]]:
            for topic in entity.topics:
                for each in topic.partitions:
                    place = TopicPartition(topic.name, each.partition_index)
                    yield place, each.error_code, OffsetAnswer(each.offset, each.leader_epoch, each.timestamp)

        return self._ask_leaders(LIST_OFFSETS, lowest, partitions, fields, answers)

    def epoch_ends(self, epochs: Mapping[TopicPartition, int]) -> dict[TopicPartition, tuple[int, int]]:
        """For each partition the largest epoch not above the given one that its log has, and where that one ends.

        (-1, -1) where the leader knows no such epoch.
        """

        def fields(asked: list[TopicPartition]) -> dict[str, Any]:
            return {
                "replica_id": -1,
                "topics": _by_topic(
                    asked,
                    "topic",
                    lambda each: {
                        "partition": each.partition,
                        "current_leader_epoch": self._leaders[each].leader_epoch,
                        "leader_epoch": epochs[each],
                    },
                ),
            }

        def answers(entity: Any) -> Iterator[tuple[TopicPartition, ErrorCode, tuple[int, int]]]:
            for topic in entity.topics:
                for each in topic.partitions:
                    place = TopicPartition(topic.topic, each.partition)
                    yield place, each.error_code, (each.leader_epoch, each.end_offset)

        return self._ask_leaders(OFFSET_FOR_LEADER_EPOCH, 0, epochs, fields, answers)

    # -------------------------------------------------------------------- records

    def read(
        self,
        ranges: Sequence[PartitionRange],
        *,
        isolation: Isolation = "read_committed",
        batch_bytes: int = 4 << 20,
        headers: bool = True,
        reports: list[RangeReport] | None = None,
    ) -> Iterator[pa.RecordBatch]:
        """The records of the ranges, as Arrow batches of about `batch_bytes`.

        Each batch holds rows of one partition in the order of their offsets; batches of different ranges come in any
        order. `reports` gets one report per range, in their order, filled as the reading goes on. Without `headers`
        that column is null, which is faster.
        """
        with from_extra("reader", "reading topics"):
            from holdfast.reader.fetching import RangesReader

        if isolation not in ("read_committed", "read_uncommitted"):
            raise UsageError(f"isolation {isolation!r} is neither read_committed nor read_uncommitted")
        reader = RangesReader(self, ranges, isolation, batch_bytes, headers)
        if reports is not None:
            reports.extend(reader.reports)
        return reader.batches()

    # -------------------------------------------------------------------- whom to ask

    def leader(self, place: TopicPartition) -> PartitionInfo | None:
        """Who leads a partition, as far as we know."""
        return self._leaders.get(place)

    def refresh(self, topics: Iterable[str]) -> dict[str, TopicInfo]:
        """Ask who leads what; topics that are not there are left out."""
        answer = self._asked(sorted(set(topics)))
        found = {}
        for topic in answer.topics:
            if topic.error_code is ErrorCode.unknown_topic_or_partition:
                continue
            self._check_topic(topic)
            found[topic.name] = self._remember(topic)
        return found

    def connection(self, broker_id: int) -> Connection:
        """An open connection to a broker."""
        address = self._addresses.get(broker_id)
        if address is None:
            raise Unreachable(f"broker {broker_id} is not in the cluster's metadata")
        return self.connected(address)

    def note_batch_bytes(self, topic: str, size: int) -> None:
        """A batch of this size was seen: what is asked for of this topic should have room for one."""
        self.batch_bytes[topic] = max(self.batch_bytes.get(topic, 0), min(size, BATCH_BYTES_USUAL_MAX))

    def is_at(self, broker_id: int, connection: Connection) -> bool:
        """Whether this is the connection to that broker."""
        return self._addresses.get(broker_id) == connection.address

    def retrying(self, attempt: Callable[[], T], deadline_ms: int | None = None) -> T:
        """What an attempt returns, retried while nobody can be reached."""
        deadline_s = time.monotonic() + (deadline_ms or self.settings.deadline_ms) / 1000
        while True:
            try:
                return attempt()
            except Unreachable:
                if time.monotonic() >= deadline_s:
                    raise
            self.back_off()

    def _asked(self, names: Iterable[str] | None) -> Any:
        """The metadata of topics; nobody at all is waited for longer once somebody has answered."""
        deadline_ms = (
            self.settings.connect_timeout_ms if self._last_good is None else self.settings.deadline_ms
        )
        return self.retrying(lambda: self.metadata(names, lowest=METADATA_WITH_IDS), deadline_ms)

    def _check_topic(self, topic: Any) -> None:
        code = topic.error_code
        if code in DENIED:
            raise NotAuthorised(f"topic '{topic.name}' may not be read with these credentials")
        if code is ErrorCode.invalid_topic_exception:
            raise TopicMissing(f"there is no topic '{topic.name}': it is no name a topic can have")
        if code is not ErrorCode.none and not error_table.is_retriable(code):
            raise Refused(f"topic '{topic.name}': {error_table.describe(code)}", code)
        if topic.topic_id is None:
            raise UnsupportedBroker(
                f"topic '{topic.name}' has no id: the cluster's metadata is older than Kafka 2.8's"
            )

    def _remember(self, topic: Any) -> TopicInfo:
        info = TopicInfo(
            topic.name,
            UUID(bytes=topic.topic_id.bytes),
            {
                each.partition_index: PartitionInfo(each.leader_id, each.leader_epoch)
                for each in sorted(topic.partitions, key=lambda each: int(each.partition_index))
            },
        )
        for partition, leader in info.partitions.items():
            self._leaders[TopicPartition(topic.name, partition)] = leader
        return info

    def _ask_leaders(
        self,
        api_key: int,
        lowest: int,
        partitions: Iterable[TopicPartition],
        fields: Callable[[list[TopicPartition]], Mapping[str, Any]],
        answers: Callable[[Any], Iterator[tuple[TopicPartition, ErrorCode, T]]],
    ) -> dict[TopicPartition, T]:
        """Ask each partition's leader, and the next one where the leader has changed, until all have answered."""
        wanted = [TopicPartition(*each) for each in dict.fromkeys(partitions)]
        found: dict[TopicPartition, T] = {}
        deadline_s = time.monotonic() + self.settings.deadline_ms / 1000
        if any(self._leaderless(each) for each in wanted):
            self._locate(wanted)
        while True:
            problem: ClusterError = Unreachable("no broker leads the partitions")
            for leader, asked in self._by_leader(each for each in wanted if each not in found).items():
                try:
                    entity = self.connection(leader).ask(api_key, fields(asked), lowest=lowest)
                except Unreachable as error:
                    problem = error
                    continue
                for place, code, answer in answers(entity):
                    if code is ErrorCode.none:
                        found[place] = answer
                    else:
                        problem = _judge(place, code)
            if all(each in found for each in wanted):
                return {each: found[each] for each in wanted}
            if time.monotonic() >= deadline_s:
                raise problem
            self.back_off()
            self._locate([each for each in wanted if each not in found])

    def _leaderless(self, place: TopicPartition) -> bool:
        leader = self._leaders.get(place)
        return leader is None or leader.leader not in self._addresses

    def _locate(self, places: Iterable[TopicPartition]) -> None:
        places = list(places)
        known = self.topics(sorted({each.topic for each in places}))
        for each in places:
            if each.partition not in known[each.topic].partitions:
                raise TopicMissing(
                    f"topic '{each.topic}' has no partition {each.partition}; "
                    f"it has {len(known[each.topic].partitions)}"
                )

    def _by_leader(self, places: Iterable[TopicPartition]) -> dict[int, list[TopicPartition]]:
        groups: dict[int, list[TopicPartition]] = {}
        for each in places:
            leader = self._leaders[each].leader
            if leader in self._addresses:
                groups.setdefault(leader, []).append(each)
        return groups


def _judge(place: TopicPartition, code: ErrorCode) -> ClusterError:
    """What to raise should time run out; raised at once where time does not help."""
    name = f"{place.topic}-{place.partition}"
    if code in DENIED:
        raise NotAuthorised(f"topic '{place.topic}' may not be read with these credentials")
    refused = Refused(f"{name}: {error_table.describe(code)}", code)
    if not error_table.is_retriable(code):
        raise refused
    return refused


def _matcher(pattern: str | None) -> Callable[[str], bool]:
    if pattern is None:
        return lambda name: True
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"the topic pattern {pattern!r} is no regular expression: {error}") from None
    return lambda name: compiled.fullmatch(name) is not None


def _by_topic(
    places: Iterable[TopicPartition], key: str, item: Callable[[TopicPartition], dict[str, Any]]
) -> list[dict[str, Any]]:
    topics: dict[str, list[dict[str, Any]]] = {}
    for each in places:
        topics.setdefault(each.topic, []).append(item(each))
    return [{key: name, "partitions": partitions} for name, partitions in topics.items()]
