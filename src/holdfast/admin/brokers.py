"""The brokers of one cluster: who has to answer a request, and the answer.

The rules kept here:

- The version of a request is the newest that both sides know, within what the caller can read.
- A request goes where it belongs: to the leader of a partition, the coordinator of a group or transactional id, a
  broker named by its id, or whoever answers. Who that is, is asked for and remembered until `retried` forgets it.
- `retried` makes an attempt again, with fresh metadata, while the cluster's refusal says that somebody else is in
  charge or that work is still under way, and no longer than `default.api.timeout.ms`.
- One connection per broker, opened when it is needed. A broker that cannot be reached is `Unreachable`, at once.
- A `Brokers` belongs to one thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from types import TracebackType
from typing import Any, Final, Literal, NamedTuple, Self, TypeVar

from kio.schema.errors import ErrorCode

from holdfast.admin.connection import Address, Connection, tls_context
from holdfast.admin.errors import ClusterError, Refused, Unreachable, UnsupportedBroker, check, refused
from holdfast.admin.settings import ConnectionSettings
from holdfast.wire.api_keys import (
    CONSUMER_GROUP_DESCRIBE,
    DESCRIBE_GROUPS,
    FIND_COORDINATOR,
    METADATA,
    OFFSET_COMMIT,
    OFFSET_FETCH,
)

T = TypeVar("T")

CoordinatorKind = Literal["group", "transaction"]
KEY_TYPES: Final[Mapping[CoordinatorKind, int]] = {"group": 0, "transaction": 1}

ANY_VERSION: Final = 99
"""Above every version there is."""
OFFSETS_BY_NAME: Final = 9
"""The last version of OffsetFetch and OffsetCommit that names topics; later ones have their ids."""

PASSING: Final = frozenset(
    {
        ErrorCode.leader_not_available,
        ErrorCode.not_leader_or_follower,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
        ErrorCode.offset_not_available,
    }
)
"""Answers that change by themselves: another broker takes over, or what was begun comes to its end."""


class Brokers:
    """The brokers of one cluster, each spoken to over a connection of its own."""

    def __init__(self, settings: ConnectionSettings) -> None:
        self.settings = settings
        self._tls = tls_context(settings.tls)
        self._connections: dict[Address, Connection] = {}
        self._addresses: dict[int, Address] = {}
        self._coordinators: dict[tuple[CoordinatorKind, str], int] = {}
        self._partitions: dict[str, dict[int, Any]] | None = None
        self._last_good: Address | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()
        self._connections.clear()

    # -------------------------------------------------------------------- whom to ask

    def ask_any(
        self, api_key: int, fields: Mapping[str, Any], *, lowest: int = 0, highest: int = ANY_VERSION
    ) -> Any:
        """The answer of the broker that answered last, or of the first of all we know that can be reached."""
        addresses = [*self.settings.bootstrap_servers, *self._addresses.values()]
        if self._last_good is not None:
            addresses.insert(0, self._last_good)
        reasons: dict[str, None] = {}
        for address in dict.fromkeys(addresses):
            try:
                answer = self._ask(address, api_key, fields, lowest, highest)
            except Unreachable as error:
                reasons[str(error)] = None
                continue
            self._last_good = address
            return answer
        raise Unreachable("; ".join(reasons))

    def ask_broker(
        self,
        broker_id: int,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        lowest: int = 0,
        highest: int = ANY_VERSION,
    ) -> Any:
        return self._ask(self.address_of(broker_id), api_key, fields, lowest, highest)

    def ask_coordinator(
        self,
        kind: CoordinatorKind,
        key: str,
        api_key: int,
        fields: Mapping[str, Any],
        *,
        highest: int = ANY_VERSION,
    ) -> Any:
        try:
            return self.ask_broker(self.coordinator_of(kind, key), api_key, fields, highest=highest)
        except Unreachable:
            self._coordinators.pop((kind, key), None)  # another broker may answer for it by now
            raise

    def retried(self, attempt: Callable[[], T]) -> T:
        """What an attempt returns, retried while its refusal is one of `PASSING`."""
        deadline_s = time.monotonic() + self.settings.deadline_ms / 1000
        while True:
            try:
                return attempt()
            except Refused as refusal:
                if refusal.code not in PASSING or time.monotonic() >= deadline_s:
                    raise
            self._partitions = None
            self._coordinators.clear()
            self.back_off()

    def back_off(self) -> None:
        time.sleep(self.settings.retry_backoff_ms / 1000)

    # -------------------------------------------------------------------- who is who

    def metadata(self, topics: Iterable[str] | None, *, lowest: int = 1) -> Any:
        """What the cluster says of itself and of these topics, or of all; asking never creates one."""
        fields = {
            "topics": None if topics is None else [{"topic_id": None, "name": name} for name in topics],
            "allow_auto_topic_creation": False,
            "include_topic_authorized_operations": False,
        }
        answer = self.ask_any(METADATA, fields, lowest=lowest)
        self._addresses = {each.node_id: (each.host, each.port) for each in answer.brokers}
        return answer

    def broker_ids(self) -> list[int]:
        self.partitions()
        return sorted(self._addresses)

    def partitions(self) -> dict[str, dict[int, Any]]:
        """Every partition, by topic and number, as the metadata describes it."""
        if self._partitions is None:
            self._partitions = {
                topic.name: {each.partition_index: each for each in topic.partitions}
                for topic in self.metadata(None).topics
            }
        return self._partitions

    def leader_of(self, topic: str, partition: int) -> int:
        numbers = self.partitions().get(topic)
        if numbers is None:
            raise ClusterError(f"topic '{topic}' does not exist; 'holdfast topics list' shows which do")
        if partition not in numbers:
            raise ClusterError(
                f"topic '{topic}' has no partition {partition}; it has 0 to {len(numbers) - 1}"
            )
        leader = int(numbers[partition].leader_id)
        if leader < 0:
            raise refused(f"cannot ask the leader of {topic}-{partition}", ErrorCode.leader_not_available)
        return leader

    def coordinator_of(self, kind: CoordinatorKind, key: str) -> int:
        """The id of the broker that answers for a group or a transactional id."""
        known = self._coordinators.get((kind, key))
        if known is not None:
            return known
        fields = {"key_type": KEY_TYPES[kind], "coordinator_keys": [key], "key": key}
        answer = self.ask_any(FIND_COORDINATOR, fields)
        found = answer.coordinators[0] if hasattr(answer, "coordinators") else answer
        check(found.error_code, f"cannot find the coordinator of {kind} '{key}'", found.error_message)
        self._addresses[found.node_id] = (found.host, found.port)
        self._coordinators[kind, key] = found.node_id
        return int(found.node_id)

    def address_of(self, broker_id: int) -> Address:
        if broker_id not in self._addresses:
            self._partitions = None
            self.partitions()
        if broker_id not in self._addresses:
            ids = ", ".join(map(str, sorted(self._addresses)))
            raise ClusterError(f"broker {broker_id} is not in the cluster; its brokers are {ids}")
        return self._addresses[broker_id]

    # -------------------------------------------------------------------- the connections

    def connected(self, address: Address) -> Connection:
        """An open connection."""
        connection = self._connections.get(address)
        if connection is None:
            connection = self._connections[address] = Connection(address, self.settings, self._tls)
        if not connection.is_open:
            connection.open()
        return connection

    def _ask(
        self, address: Address, api_key: int, fields: Mapping[str, Any], lowest: int, highest: int
    ) -> Any:
        return self.connected(address).ask(api_key, fields, lowest=lowest, highest=highest)


class Committed(NamedTuple):
    """One committed offset of a group."""

    offset: int
    leader_epoch: int | None
    """Where one is known."""
    metadata: str


def committed_offsets(brokers: Brokers, group: str) -> dict[tuple[str, int], tuple[int, int | None]]:
    """Every committed offset of a group, with its leader epoch where one is known; none if there is no such group."""
    return {place: each[:2] for place, each in committed(brokers, group).items()}


def committed_metadata(brokers: Brokers, group: str) -> dict[tuple[str, int], str]:
    """What stands beside the committed offsets of a group, where something does."""
    return {place: each.metadata for place, each in committed(brokers, group).items() if each.metadata}


def committed(brokers: Brokers, group: str) -> dict[tuple[str, int], Committed]:
    """Every committed offset of a group; none if there is no such group."""
    request = {"group_id": group, "topics": None, "groups": [{"group_id": group, "topics": None}]}

    def ask() -> dict[tuple[str, int], Committed]:
        answer = brokers.ask_coordinator("group", group, OFFSET_FETCH, request, highest=OFFSETS_BY_NAME)
        found = answer.groups[0] if hasattr(answer, "groups") else answer
        subject = f"cannot read the committed offsets of group '{group}'"
        check(found.error_code, subject)
        offsets = {}
        for topic in found.topics:
            for each in topic.partitions:
                check(each.error_code, f"{subject} in {topic.name}-{each.partition_index}")
                if each.committed_offset >= 0:
                    epoch = getattr(each, "committed_leader_epoch", -1)
                    # confluent-kafka commits the end of its C string with it.
                    metadata = (each.metadata or "").removesuffix("\0")
                    offsets[topic.name, each.partition_index] = Committed(
                        each.committed_offset, epoch if epoch >= 0 else None, metadata
                    )
        return offsets

    return brokers.retried(ask)


def commit(brokers: Brokers, group: str, offsets: Mapping[tuple[str, int], tuple[int, str]]) -> None:
    """Commit offsets, each with what shall stand beside it, to a group that has no members."""
    topics: dict[str, list[dict[str, Any]]] = {}
    for (topic, partition), (offset, metadata) in offsets.items():
        topics.setdefault(topic, []).append(
            {
                "partition_index": partition,
                "committed_offset": offset,
                "committed_leader_epoch": -1,
                "committed_metadata": metadata,
            }
        )
    request = {
        "group_id": group,
        "generation_id_or_member_epoch": -1,
        "member_id": "",
        "group_instance_id": None,
        "retention_time_ms": -1,
        "topics": [{"name": name, "partitions": partitions} for name, partitions in topics.items()],
    }

    def ask() -> None:
        answer = brokers.ask_coordinator("group", group, OFFSET_COMMIT, request, highest=OFFSETS_BY_NAME)
        for topic in answer.topics:
            for each in topic.partitions:
                what = f"cannot commit {topic.name}-{each.partition_index} for group '{group}'"
                check(each.error_code, what)

    brokers.retried(ask)


def member_count(brokers: Brokers, group: str) -> int:
    """How many members a group has, whichever protocol it speaks; none if there is no such group."""
    request = {"include_authorized_operations": False, "groups": [group], "group_ids": [group]}

    def ask(api_key: int) -> int:
        [found] = brokers.ask_coordinator("group", group, api_key, request).groups
        if found.error_code is ErrorCode.group_id_not_found:
            return 0
        check(found.error_code, f"cannot describe group '{group}'")
        return len(found.members)

    try:
        count = brokers.retried(lambda: ask(CONSUMER_GROUP_DESCRIBE))
    except UnsupportedBroker:
        count = 0  # it knows the classic protocol alone
    return count or brokers.retried(lambda: ask(DESCRIBE_GROUPS))
