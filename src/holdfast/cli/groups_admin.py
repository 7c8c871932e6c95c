"""Groups as the commands see them: listings, members, offsets, and where the logs end.

confluent-kafka's admin client answers most of it. What it does not know, the epochs and the newer states of
groups of the new protocol, is asked for directly, where our own client can authenticate; elsewhere it stays unknown.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaError,
    KafkaException,
    TopicPartition,
)
from confluent_kafka.admin import AdminClient, ConsumerGroupDescription, OffsetSpec
from kio.schema.errors import ErrorCode

from holdfast.admin.brokers import committed_offsets
from holdfast.admin.errors import Refused, check, refused
from holdfast.cli.client import Connection, describe_error, failure, no_such_topic, result_of
from holdfast.cli.exits import CommandFailed, complain
from holdfast.wire.api_keys import CONSUMER_GROUP_DESCRIBE, OFFSET_DELETE

Place = tuple[str, int]
"""A topic and one of its partitions."""

STATES: Final[Mapping[Any, str]] = {
    ConsumerGroupState.UNKNOWN: "Unknown",
    ConsumerGroupState.PREPARING_REBALANCING: "PreparingRebalance",
    ConsumerGroupState.COMPLETING_REBALANCING: "CompletingRebalance",
    ConsumerGroupState.STABLE: "Stable",
    ConsumerGroupState.DEAD: "Dead",
    ConsumerGroupState.EMPTY: "Empty",
}
STATE_NAMES: Final = (
    "Empty",
    "PreparingRebalance",
    "CompletingRebalance",
    "Assigning",
    "Reconciling",
    "Stable",
    "Dead",
)
TYPES: Final[Mapping[Any, str]] = {
    ConsumerGroupType.UNKNOWN: "Unknown",
    ConsumerGroupType.CONSUMER: "Consumer",
    ConsumerGroupType.CLASSIC: "Classic",
}
TYPE_NAMES: Final = ("Classic", "Consumer")

MEMBER_TYPES: Final[Mapping[int | None, bool]] = {0: False, 1: True}
"""What ConsumerGroupDescribe calls a member of the classic and of the new protocol."""

EARLIEST: Final[Any] = OffsetSpec.earliest()  # type: ignore[no-untyped-call]
LATEST: Final[Any] = OffsetSpec.latest()  # type: ignore[no-untyped-call]
NOT_THERE: Final = frozenset({KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION})


REFUSALS: Final[Mapping[ErrorCode, str]] = {
    ErrorCode.group_id_not_found: "'holdfast groups list' shows which there are",
    ErrorCode.non_empty_group: "stop its members first",
    ErrorCode.group_subscribed_to_topic: "stop the members that are subscribed to it first",
}
"""What to do when committed offsets cannot be deleted."""


class Listing(NamedTuple):
    group: str
    type: str
    state: str


@dataclass(frozen=True)
class Member:
    member_id: str
    instance_id: str | None
    host: str
    client_id: str
    assignment: tuple[Place, ...]
    target_assignment: tuple[Place, ...] | None
    """None in a group of the classic protocol, whose leader alone knows what it wants."""
    epoch: int | None
    speaks_new_protocol: bool | None
    """False for a classic member inside a group of the new protocol; None in a classic group."""


@dataclass(frozen=True)
class Group:
    group: str
    type: str
    state: str
    coordinator_id: int
    coordinator_address: str
    assignor: str
    members: tuple[Member, ...]
    epoch: int | None
    assignment_epoch: int | None

    @property
    def has_members(self) -> bool:
        return self.state not in ("Empty", "Dead")


class CommittedOffset(NamedTuple):
    """A committed offset."""

    offset: int
    leader_epoch: int | None


class GroupAdmin:
    """What can be asked about groups and done to them."""

    def __init__(self, connection: Connection, timeout_ms: int) -> None:
        self._connection = connection
        self._timeout_ms = timeout_ms
        self._timeout_s = timeout_ms / 1000
        self.admin: AdminClient = connection.admin()

    # -------------------------------------------------------------------- groups

    def listings(self) -> list[Listing]:
        found = result_of(
            self.admin.list_consumer_groups(request_timeout=self._timeout_s), "cannot list groups", ""
        )
        for error in found.errors:
            complain(f"a broker did not list its groups: {describe_error(error.args[0], '')}")
        if found.errors:
            raise CommandFailed("the list of groups is not complete")
        unknown = [each.group_id for each in found.valid if each.state is ConsumerGroupState.UNKNOWN]
        details = self._details(unknown)
        return sorted(
            Listing(
                each.group_id,
                TYPES[each.type],
                details[each.group_id].group_state if each.group_id in details else STATES[each.state],
            )
            for each in found.valid
        )

    def names(self) -> list[str]:
        return [listing.group for listing in self.listings()]

    def describe(self, groups: Collection[str], *, with_epochs: bool = False) -> dict[str, Group | None]:
        """Each group, or None where there is none."""
        found: dict[str, ConsumerGroupDescription] = {}
        if groups:
            futures = self.admin.describe_consumer_groups(
                list(dict.fromkeys(groups)), request_timeout=self._timeout_s
            )
            for name, future in futures.items():
                found[name] = result_of(future, f"cannot describe group '{name}'", name)
        wanted = [
            name
            for name, each in found.items()
            if each.type is ConsumerGroupType.CONSUMER
            and (with_epochs or each.state is ConsumerGroupState.UNKNOWN)
        ]
        details = self._details(wanted)
        return {name: _group(each, details.get(name)) for name, each in found.items()}

    def _details(self, groups: Collection[str]) -> dict[str, Any]:
        """What ConsumerGroupDescribe says about groups of the new protocol, where it can be asked."""
        if not groups or self._connection.needs_librdkafka:
            return {}
        found = {}
        with self._connection.brokers(self._timeout_ms) as brokers:
            for name in groups:

                def ask(name: str = name) -> Any:
                    request = {"group_ids": [name], "include_authorized_operations": False}
                    answer = brokers.ask_coordinator("group", name, CONSUMER_GROUP_DESCRIBE, request)
                    (described,) = answer.groups
                    # A group may have gone, or turned classic, since it was listed.
                    if described.error_code is ErrorCode.group_id_not_found:
                        return None
                    check(described.error_code, f"cannot describe group '{name}'", described.error_message)
                    return described

                described = brokers.retried(ask)
                if described is not None:
                    found[name] = described
        return found

    def delete(self, groups: Collection[str]) -> dict[str, KafkaError | None]:
        """The outcome for each group: None where it was deleted."""
        futures = self.admin.delete_consumer_groups(list(groups), request_timeout=self._timeout_s)
        outcomes: dict[str, KafkaError | None] = {}
        for name, future in futures.items():
            try:
                future.result()
                outcomes[name] = None
            except KafkaException as error:
                outcomes[name] = error.args[0]
        return outcomes

    # -------------------------------------------------------------------- offsets

    def offsets(self, group: str) -> dict[Place, CommittedOffset]:
        """Every committed offset of a group; none for a group that does not exist."""
        if self._connection.needs_librdkafka:
            return self._listed_offsets(group)
        # librdkafka ends the process when the answer is that the coordinator has moved.
        with self._connection.brokers(self._timeout_ms) as brokers:
            return {
                place: CommittedOffset(*found) for place, found in committed_offsets(brokers, group).items()
            }

    def _listed_offsets(self, group: str) -> dict[Place, CommittedOffset]:
        request = [ConsumerGroupTopicPartitions(group)]
        future = self.admin.list_consumer_group_offsets(request, request_timeout=self._timeout_s)[group]
        found = result_of(future, f"cannot read the committed offsets of group '{group}'", group)
        return {
            (each.topic, each.partition): CommittedOffset(each.offset, each.leader_epoch)
            for each in found.topic_partitions
            if each.offset >= 0
        }

    def set_offsets(self, group: str, offsets: Mapping[Place, int]) -> dict[Place, KafkaError | None]:
        wanted = [TopicPartition(topic, partition, offset) for (topic, partition), offset in offsets.items()]
        request = [ConsumerGroupTopicPartitions(group, wanted)]
        future = self.admin.alter_consumer_group_offsets(request, request_timeout=self._timeout_s)[group]
        found = result_of(future, f"cannot reset the committed offsets of group '{group}'", group)
        return {(each.topic, each.partition): each.error for each in found.topic_partitions}

    def delete_offsets(self, group: str, places: Collection[Place]) -> dict[Place, Refused | None]:
        """The outcome for each partition: None where its committed offset is gone; librdkafka has no such request."""
        request = {
            "group_id": group,
            "topics": [
                {"name": name, "partitions": [{"partition_index": p} for topic, p in places if topic == name]}
                for name in dict.fromkeys(topic for topic, _ in places)
            ],
        }
        with self._connection.brokers(self._timeout_ms) as brokers:

            def ask() -> Any:
                answer = brokers.ask_coordinator("group", group, OFFSET_DELETE, request)
                advice = REFUSALS.get(answer.error_code, "")
                check(answer.error_code, f"cannot delete committed offsets of group '{group}'", None, advice)
                return answer

            answer = brokers.retried(ask)
        outcomes: dict[Place, Refused | None] = {}
        for topic in answer.topics:
            for each in topic.partitions:
                problem = None
                if each.error_code is not ErrorCode.none:
                    place = f"{topic.name}-{each.partition_index}"
                    subject = f"cannot delete the committed offset of group '{group}' for {place}"
                    problem = refused(subject, each.error_code, None, REFUSALS.get(each.error_code, ""))
                outcomes[topic.name, each.partition_index] = problem
        return dict(sorted(outcomes.items()))

    # -------------------------------------------------------------------- logs

    def partitions(self) -> dict[str, list[int]]:
        """The partitions of every topic; asking for all never creates one."""
        cluster = self.admin.list_topics(timeout=self._timeout_s)
        return {name: sorted(topic.partitions) for name, topic in cluster.topics.items()}

    def check_exist(self, places: Iterable[Place]) -> None:
        found = self.partitions()
        for topic, partition in places:
            if topic not in found:
                raise no_such_topic(topic)
            if partition not in found[topic]:
                last = len(found[topic]) - 1
                raise CommandFailed(f"topic '{topic}' has no partition {partition}; it has 0 to {last}")

    def log_offsets(self, places: Collection[Place], spec: Any) -> dict[Place, int | None]:
        """One offset per partition; None where there is no such partition (any more).

        `spec` is `EARLIEST`, `LATEST`, or a time: the first offset at or after it, -1 where the log has none so late.
        """
        if not places:
            return {}
        request = {TopicPartition(*place): spec for place in places}
        offsets: dict[Place, int | None] = {}
        for each, future in self.admin.list_offsets(request, request_timeout=self._timeout_s).items():
            try:
                offsets[each.topic, each.partition] = future.result().offset
            except KafkaException as error:
                if not self._has_gone(each.topic, error.args[0]):
                    what = f"cannot find the offsets of {each.topic}-{each.partition}"
                    raise failure(error, what, each.topic) from error
                offsets[each.topic, each.partition] = None
        return offsets

    def _has_gone(self, topic: str, error: KafkaError) -> bool:
        if (
            error.code() == KafkaError._NOENT
        ):  # no partition that was asked for has a leader: there may be none
            return topic not in self.admin.list_topics(timeout=self._timeout_s).topics
        return error.code() in NOT_THERE


def _group(described: ConsumerGroupDescription, details: Any) -> Group | None:
    state = details.group_state if details is not None else STATES[described.state]
    if state == "Dead" and not described.members:
        return None
    known = {each.member_id: each for each in details.members} if details is not None else {}
    node = described.coordinator
    return Group(
        group=described.group_id,
        type=TYPES[described.type],
        state=state,
        coordinator_id=node.id,
        coordinator_address=f"{node.host}:{node.port}",
        assignor=described.partition_assignor,
        members=tuple(
            _member(each, known.get(each.member_id))
            for each in sorted(described.members, key=lambda each: each.member_id)
        ),
        epoch=details.group_epoch if details is not None else None,
        assignment_epoch=details.assignment_epoch if details is not None else None,
    )


def _member(described: Any, details: Any) -> Member:
    target = described.target_assignment
    return Member(
        member_id=described.member_id,
        instance_id=described.group_instance_id,
        host=described.host,
        client_id=described.client_id,
        assignment=_places(described.assignment),
        target_assignment=None if target is None else _places(target),
        epoch=None if details is None else details.member_epoch,
        speaks_new_protocol=MEMBER_TYPES.get(getattr(details, "member_type", None)),
    )


def _places(assignment: Any) -> tuple[Place, ...]:
    return tuple(sorted((each.topic, each.partition) for each in assignment.topic_partitions))
