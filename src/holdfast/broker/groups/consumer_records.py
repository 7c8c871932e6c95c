"""The records of a group of the consumer protocol: from what we keep to what is stored, and back.

A `Change` is one record as its decoded key and value. A group is changed only by changes: those it appends while it
runs and those it finds in the log at start go through the same door (`consumer_state`), so that what is rebuilt is
what there was.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypeAlias

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_member import CurrentAssignment, Held, MemberState, Profile
from holdfast.broker.groups.model import Records
from holdfast.broker.groups.names import not_recorded
from holdfast.broker.groups.regex import Resolution
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
