"""The state of a group of the consumer protocol: its records, what they say, and what follows from that.

A `Change` is one record as its decoded key and value: from what we keep to what is stored, and back. A group is
changed only by changes: those it appends while it runs and those it finds in the log at start go through the same
door (`ConsumerState.apply`), so that what is rebuilt is what there was.

`ConsumerState.apply` takes one change after the other, from the log at start and from the group while it runs; there
is no other way to change it. Beside what the records say, it keeps what would be costly to find again:

- `owner_of` a partition: the member that holds it, giving it up included. Nobody is given what has another owner.
- how many members name a topic, an expression, an assignor; how many speak the classic protocol and what they can
  follow.

A log that was compacted may tell of a member's holding before it tells who the member is, and of members before it
tells of their group; what is missing is taken as empty until it comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Final, TypeAlias
from uuid import UUID

from holdfast.broker.groups.assignors import NOTHING, Assignment
from holdfast.broker.groups.consumer_member import (
    LEAVE_EPOCH,
    NEWCOMER,
    STRANGER,
    CurrentAssignment,
    Held,
    MemberState,
    Profile,
)
from holdfast.broker.groups.model import Records, not_recorded
from holdfast.broker.groups.regex import Resolution
from holdfast.seams import Scheduled
from holdfast.wire.coordinator_records import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupMetadataKey,
    ConsumerGroupMetadataValue,
    ConsumerGroupPartitionMetadataKey,
    ConsumerGroupRegularExpressionKey,
    ConsumerGroupRegularExpressionValue,
    ConsumerGroupTargetAssignmentMemberKey,
    ConsumerGroupTargetAssignmentMemberValue,
    ConsumerGroupTargetAssignmentMetadataKey,
    ConsumerGroupTargetAssignmentMetadataValue,
    CoordinatorRecord,
    CurrentTopicPartitions,
    TargetTopicPartitions,
)

Change: TypeAlias = tuple[CoordinatorRecord, CoordinatorRecord | None]


def encoded(changes: Iterable[Change]) -> Records:
    try:
        return [(key.encode(), None if value is None else value.encode()) for key, value in changes]
    except ValueError as error:
        raise not_recorded(error) from error


# What a group says


def epoch_change(group_id: str, epoch: int, metadata_hash: int) -> Change:
    value = ConsumerGroupMetadataValue(epoch=epoch, metadata_hash=metadata_hash)
    return ConsumerGroupMetadataKey(group_id), value


def profile_change(group_id: str, member_id: str, profile: Profile) -> Change:
    value = ConsumerGroupMemberMetadataValue(
        instance_id=profile.instance_id,
        rack_id=profile.rack_id,
        client_id=profile.client_id,
        client_host=profile.client_host,
        subscribed_topic_names=profile.topic_names,
        # Kafka stores the empty expression of a member that subscribes by name.
        subscribed_topic_regex=profile.topic_regex or "",
        rebalance_timeout_ms=profile.rebalance_timeout_ms,
        server_assignor=profile.server_assignor,
        classic_member_metadata=profile.classic,
    )
    return ConsumerGroupMemberMetadataKey(group_id, member_id), value


def target_epoch_change(group_id: str, epoch: int, assigned_at_ms: int) -> Change:
    value = ConsumerGroupTargetAssignmentMetadataValue(
        assignment_epoch=epoch, assignment_timestamp=assigned_at_ms
    )
    return ConsumerGroupTargetAssignmentMetadataKey(group_id), value


def target_change(group_id: str, member_id: str, target: Assignment) -> Change:
    value = ConsumerGroupTargetAssignmentMemberValue(
        topic_partitions=tuple(
            TargetTopicPartitions(topic_id, tuple(sorted(partitions)))
            for topic_id, partitions in target.items()
        )
    )
    return ConsumerGroupTargetAssignmentMemberKey(group_id, member_id), value


def current_assignment_change(group_id: str, member_id: str, current: CurrentAssignment) -> Change:
    value = ConsumerGroupCurrentMemberAssignmentValue(
        member_epoch=current.epoch,
        previous_member_epoch=current.previous_epoch,
        state=current.state,
        assigned_partitions=_stored(current.assigned),
        partitions_pending_revocation=_stored(current.revoking),
    )
    return ConsumerGroupCurrentMemberAssignmentKey(group_id, member_id), value


def resolution_change(group_id: str, expression: str, resolution: Resolution) -> Change:
    value = ConsumerGroupRegularExpressionValue(
        topics=tuple(sorted(resolution.topics)),
        version=resolution.version,
        timestamp=resolution.resolved_at_ms,
    )
    return ConsumerGroupRegularExpressionKey(group_id, expression), value


def member_tombstones(group_id: str, member_id: str) -> list[Change]:
    """In the order that readers need: nothing is left that names a member who is gone."""
    return [
        (ConsumerGroupCurrentMemberAssignmentKey(group_id, member_id), None),
        (ConsumerGroupTargetAssignmentMemberKey(group_id, member_id), None),
        (ConsumerGroupMemberMetadataKey(group_id, member_id), None),
    ]


def resolution_tombstone(group_id: str, expression: str) -> Change:
    return ConsumerGroupRegularExpressionKey(group_id, expression), None


def legacy_metadata_tombstone(group_id: str) -> Change:
    return ConsumerGroupPartitionMetadataKey(group_id), None


def group_tombstones(
    group_id: str, member_ids: Sequence[str], expressions: Sequence[str], *, has_legacy_metadata: bool
) -> list[Change]:
    """Everything of a group, members first, itself last."""
    changes: list[Change] = []
    for key_type in (ConsumerGroupCurrentMemberAssignmentKey, ConsumerGroupTargetAssignmentMemberKey):
        changes += [(key_type(group_id, member_id), None) for member_id in member_ids]
    changes.append((ConsumerGroupTargetAssignmentMetadataKey(group_id), None))
    changes += [(ConsumerGroupMemberMetadataKey(group_id, member_id), None) for member_id in member_ids]
    changes += [resolution_tombstone(group_id, expression) for expression in expressions]
    if has_legacy_metadata:
        changes.append(legacy_metadata_tombstone(group_id))
    changes.append((ConsumerGroupMetadataKey(group_id), None))
    return changes


def _stored(held: Held) -> tuple[CurrentTopicPartitions, ...]:
    stored = []
    for topic_id, partitions in held.items():
        indexes = sorted(partitions)
        stored.append(
            CurrentTopicPartitions(topic_id, tuple(indexes), tuple(partitions[index] for index in indexes))
        )
    return tuple(stored)


# What the log says


def stored_profile(value: ConsumerGroupMemberMetadataValue) -> Profile:
    return Profile(
        value.instance_id,
        value.rack_id,
        value.client_id,
        value.client_host,
        tuple(sorted(set(value.subscribed_topic_names))),
        value.subscribed_topic_regex or None,
        value.rebalance_timeout_ms,
        value.server_assignor,
        value.classic_member_metadata,
    )


def stored_target(value: ConsumerGroupTargetAssignmentMemberValue) -> Assignment:
    return {
        topic.topic_id: frozenset(topic.partitions) for topic in value.topic_partitions if topic.partitions
    }


def stored_current_assignment(value: ConsumerGroupCurrentMemberAssignmentValue) -> CurrentAssignment:
    known = value.state in (MemberState.STABLE, MemberState.UNREVOKED, MemberState.UNRELEASED)
    return CurrentAssignment(
        value.member_epoch,
        value.previous_member_epoch,
        MemberState(value.state) if known else MemberState.UNKNOWN,
        _held(value.assigned_partitions, value.member_epoch),
        _held(value.partitions_pending_revocation, value.member_epoch),
    )


def _held(stored: Sequence[CurrentTopicPartitions], member_epoch: int) -> Held:
    """Epochs that a version before 4.3 did not store are the member's own: the strictest that can be true."""
    held = {}
    for topic in stored:
        epochs = topic.assignment_epochs or ()
        if len(epochs) != len(topic.partitions):
            epochs = (member_epoch,) * len(topic.partitions)
        if topic.partitions:
            held[topic.topic_id] = dict(zip(topic.partitions, epochs, strict=True))
    return held


NO_ASSIGNMENT_EPOCH: Final = -1
INITIAL_EPOCH: Final = 1
"""Of a group that nobody has subscribed to anything in; a member of it has an epoch above that of joining."""
_GONE: Final = CurrentAssignment(LEAVE_EPOCH, LEAVE_EPOCH)


TELL_AGAIN_HEARTBEATS: Final = 3
"""Heartbeats in which a member has not said what it holds, after which it is sent its assignment once more.

The answer with it may have been lost. By the protocol a member that missed an answer says everything in its next
request; librdkafka (2.16) does so after a lost connection, and not after a request that timed out, and would then
never hear of partitions that are its own, or that it must give up. The wait doubles each time.
"""


@dataclass(slots=True, eq=False, repr=False)
class ConsumerMember:
    """A member and its deadlines."""

    member_id: str
    profile: Profile = STRANGER
    current: CurrentAssignment = NEWCOMER
    deadline_ms: int = 0
    """When it counts as gone (monotonic clock), 0 before its first session. A heartbeat moves this and nothing
    else."""
    session_timer: Scheduled | None = None
    session_timer_ms: int = 0
    """When that timer fires: at or before the deadline, looks at it, and is set again."""
    rebalance_timer: Scheduled | None = None
    """By when it must have given up what it was told to."""
    join_timer: Scheduled | None = None
    """By when a classic member that was told of a rebalance must have joined again."""
    sync_timer: Scheduled | None = None
    """By when a classic member that joined must have asked for its assignment."""
    tell_again_ms: int | None = None
    """When to send it its assignment again (monotonic clock). None once it has said what it holds since it was
    sent."""
    told_times: int = 0
    """How often it was sent since."""
    is_waiting: ClassVar[bool] = False
    """Every request of this protocol is answered at once."""

    @property
    def is_classic(self) -> bool:
        return self.profile.classic is not None

    def told(self, now_ms: int, heartbeat_interval_ms: int) -> None:
        """Its assignment is in the answer that leaves now."""
        self.tell_again_ms = (
            now_ms + (TELL_AGAIN_HEARTBEATS << min(self.told_times, 10)) * heartbeat_interval_ms
        )
        self.told_times += 1

    def is_to_be_told_again(self, now_ms: int) -> bool:
        return self.tell_again_ms is not None and now_ms >= self.tell_again_ms

    def answered(self) -> None:
        """It says what it holds."""
        self.tell_again_ms = None
        self.told_times = 0

    def cancel_timers(self) -> None:
        for name in ("session_timer", "rebalance_timer", "join_timer", "sync_timer"):
            self.cancel(name)

    def cancel(self, name: str) -> None:
        timer: Scheduled | None = getattr(self, name)
        if timer is not None:
            timer.cancel()
            setattr(self, name, None)


class Counter(dict[str, int]):
    """How many members name something; what nobody names has no entry."""

    def count(self, names: Iterable[str], by: int) -> None:
        for name in names:
            left = self.get(name, 0) + by
            if left:
                self[name] = left
            else:
                self.pop(name, None)


class ConsumerState:
    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = INITIAL_EPOCH
        """Rises whenever members must be given a new target."""
        self.metadata_hash = 0
        self.assignment_epoch = INITIAL_EPOCH
        """The group's epoch that the target was computed for."""
        self.assigned_at_ms = 0
        """When that was, by the wall clock."""
        self.members: dict[str, ConsumerMember] = {}
        self.static: dict[str, str] = {}
        """The member that stands for each instance id."""
        self.targets: dict[str, Assignment] = {}
        self.resolutions: dict[str, Resolution] = {}
        self.has_legacy_metadata = False
        self.names = Counter()
        self.expressions = Counter()
        self.assignors = Counter()
        self.classic_protocols = Counter()
        self.classic_members = 0
        self._owners: dict[UUID, dict[int, str]] = {}

    # Asking

    def owner_of(self, topic_id: UUID, partition: int) -> str | None:
        return self._owners.get(topic_id, {}).get(partition)

    @property
    def owners(self) -> Mapping[UUID, Mapping[int, str]]:
        return self._owners

    def member_of_instance(self, instance_id: str | None) -> ConsumerMember | None:
        if instance_id is None:
            return None
        member_id = self.static.get(instance_id)
        return None if member_id is None else self.members.get(member_id)

    def subscribed_topics(self) -> frozenset[str]:
        return frozenset(self.names).union(*(resolution.topics for resolution in self.resolutions.values()))

    def target_of(self, member_id: str) -> Assignment:
        return self.targets.get(member_id, NOTHING)

    # Changing

    def apply(self, change: Change) -> None:
        match change:
            case ConsumerGroupMetadataKey(), ConsumerGroupMetadataValue() as value:
                self.epoch = value.epoch
                self.metadata_hash = value.metadata_hash
            case ConsumerGroupMemberMetadataKey() as key, ConsumerGroupMemberMetadataValue() as value:
                self._set_profile(self._member(key.member_id), stored_profile(value))
            case ConsumerGroupMemberMetadataKey() as key, None:
                self._remove(key.member_id)
            case (
                ConsumerGroupTargetAssignmentMetadataKey(),
                ConsumerGroupTargetAssignmentMetadataValue() as value,
            ):
                self.assignment_epoch = value.assignment_epoch
                self.assigned_at_ms = value.assignment_timestamp
            case ConsumerGroupTargetAssignmentMetadataKey(), None:
                self.assignment_epoch = NO_ASSIGNMENT_EPOCH
            case (
                ConsumerGroupTargetAssignmentMemberKey() as key,
                ConsumerGroupTargetAssignmentMemberValue() as value,
            ):
                self.targets[key.member_id] = stored_target(value)
            case ConsumerGroupTargetAssignmentMemberKey() as key, None:
                self.targets.pop(key.member_id, None)
            case _:
                self._apply_rest(change)

    def _apply_rest(self, change: Change) -> None:
        match change:
            case (
                ConsumerGroupCurrentMemberAssignmentKey() as key,
                ConsumerGroupCurrentMemberAssignmentValue() as value,
            ):
                self._set_holding(self._member(key.member_id), stored_current_assignment(value))
            case ConsumerGroupCurrentMemberAssignmentKey() as key, None:
                known = self.members.get(key.member_id)
                if known is not None:
                    self._set_holding(known, _GONE)
            case ConsumerGroupRegularExpressionKey() as key, ConsumerGroupRegularExpressionValue() as value:
                self.resolutions[key.regular_expression] = Resolution(
                    frozenset(value.topics), value.version, value.timestamp
                )
            case ConsumerGroupRegularExpressionKey() as key, None:
                self.resolutions.pop(key.regular_expression, None)
            case ConsumerGroupPartitionMetadataKey(), value:
                self.has_legacy_metadata = value is not None
            case _:
                # A value of a version that is not known here: nothing of it can be used.
                return

    def _member(self, member_id: str) -> ConsumerMember:
        member = self.members.get(member_id)
        if member is None:
            member = self.members[member_id] = ConsumerMember(member_id)
        return member

    def _set_profile(self, member: ConsumerMember, profile: Profile) -> None:
        self._count(member.profile, -1)
        if member.profile.instance_id is not None and member.profile.instance_id != profile.instance_id:
            self._release_instance(member)
        member.profile = profile
        if profile.instance_id is not None:
            self.static[profile.instance_id] = member.member_id
        self._count(profile, 1)

    def _remove(self, member_id: str) -> None:
        member = self.members.pop(member_id, None)
        if member is None:
            return
        self._set_holding(member, _GONE)
        self._count(member.profile, -1)
        self._release_instance(member)
        member.cancel_timers()

    def _release_instance(self, member: ConsumerMember) -> None:
        instance_id = member.profile.instance_id
        if instance_id is not None and self.static.get(instance_id) == member.member_id:
            del self.static[instance_id]

    def _count(self, profile: Profile, by: int) -> None:
        self.names.count(profile.topic_names, by)
        if profile.topic_regex is not None:
            self.expressions.count((profile.topic_regex,), by)
        if profile.server_assignor is not None:
            self.assignors.count((profile.server_assignor,), by)
        if profile.classic is not None:
            self.classic_members += by
            # A protocol named twice is one protocol.
            self.classic_protocols.count({each.name for each in profile.classic.supported_protocols}, by)

    def _set_holding(self, member: ConsumerMember, current: CurrentAssignment) -> None:
        before = member.current
        if current.assigned is not before.assigned or current.revoking is not before.revoking:
            self._disown(member.member_id, before.assigned)
            self._disown(member.member_id, before.revoking)
            self._own(member.member_id, current.assigned)
            self._own(member.member_id, current.revoking)
        member.current = current
        if not current.must_give_up:
            member.cancel("rebalance_timer")

    def _own(self, member_id: str, held: Held) -> None:
        for topic_id, partitions in held.items():
            owners = self._owners.setdefault(topic_id, {})
            for partition in partitions:
                owners[partition] = member_id

    def _disown(self, member_id: str, held: Held) -> None:
        for topic_id, partitions in held.items():
            owners = self._owners.get(topic_id, {})
            for partition in partitions:
                if owners.get(partition) == member_id:
                    del owners[partition]
            if not owners:
                self._owners.pop(topic_id, None)
