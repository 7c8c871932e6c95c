"""A live group changes its protocol: from classic to consumer when the first member of the new one joins, and back
when the last one goes.

Upgrading keeps everything: generation becomes epoch, assignments become holdings, and every classic member stays a
member. Whoever waited in the classic group for the others is told to join again, and joins the consumer group. Nobody
owns a partition twice, because what the classic members were assigned is what they hold until they give it up.

Downgrading is the reverse: the classic members that are left make a classic group of the next generation, with what
they hold as their assignments, and are told to rebalance, unless one of them has just taken the last consumer's seat
and nothing else is to change.

Both are one batch in the log: the tombstones of what the group was and the records of what it is. After a crash it is
the one or the other. `group.consumer.migration.policy` decides which of the two may happen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.classic_members import ClassicMember, Membership
from holdfast.broker.groups.classic_records import group_record
from holdfast.broker.groups.consumer_embedded import by_topic_id, embedded_assignment
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import CurrentAssignment, Held, Profile
from holdfast.broker.groups.consumer_records import (
    Change,
    current_assignment_change,
    encoded,
    epoch_change,
    profile_change,
    target_change,
    target_epoch_change,
)
from holdfast.broker.groups.consumer_state import ConsumerMember
from holdfast.broker.groups.consumer_turn import Requester, Subscriptions, topics_followed, usable
from holdfast.broker.groups.model import (
    CONSUMER_PROTOCOL_TYPE,
    Group,
    JoinReply,
    MemberProtocol,
    SyncReply,
    Topics,
)
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.consumer_protocol import ConsumerSubscription, decode_assignment, decode_subscription
from holdfast.wire.coordinator_records import ClassicMemberMetadata, ClassicProtocol

if TYPE_CHECKING:
    from holdfast.broker.groups.consumer import ConsumerGroups

UPGRADES: Final = ("upgrade", "bidirectional")
DOWNGRADES: Final = ("downgrade", "bidirectional")
STANDARD_ASSIGNORS: Final = ("range", "roundrobin", "sticky", "cooperative-sticky")
"""What these add to an assignment says what it was, and is not missed; of others nobody can know. librdkafka's
cooperative-sticky adds something, and Kafka takes it for a custom one."""


# Up


def upgraded(home: ConsumerGroups, group: Group) -> tuple[ConsumerGroup, list[Change]]:
    """A classic group as a consumer group, which counts for nothing yet, and the changes that make it."""
    settings = home.context.settings()
    if not isinstance(group, ClassicGroup):
        raise ApiError(ErrorCode.group_id_not_found, f"group {group.group_id!r} is no consumer group")
    if settings.group_consumer_migration_policy.lower() not in UPGRADES:
        raise _refused(group, "the migration policy does not allow it")
    if not group.is_of_consumers:
        raise _refused(group, f"its protocol type is {group.protocol_type!r}")
    if len(group.members) > settings.group_consumer_max_size:
        raise _refused(group, "it has too many members")
    try:
        changes = _changes_of(group, home.context.topics)
    except ValueError as error:
        raise _refused(group, f"what its members say cannot be read: {error}") from error
    consumer = ConsumerGroup(group.group_id, home)
    for change in changes:
        consumer.apply(change)
    hashed = Subscriptions(consumer.names, {}, home.context.topics).metadata_hash()
    epoch = epoch_change(group.group_id, group.generation, hashed)
    consumer.apply(epoch)
    return consumer, [*changes, epoch]


def release_waiting(group: Group) -> None:
    """The classic group is no more; its members are to join what it has become."""
    again = ErrorCode.rebalance_in_progress
    membership = group.membership if isinstance(group, ClassicGroup) else Membership()
    for member in membership:
        membership.answer_join(member, JoinReply(again, member.member_id))
        membership.answer_sync(member, SyncReply(again))
    group.unload()


def _refused(group: Group, reason: str) -> ApiError:
    return ApiError(
        ErrorCode.group_id_not_found,
        f"classic group {group.group_id!r} does not become a consumer group: {reason}",
    )


def _changes_of(group: ClassicGroup, topics: Topics) -> list[Change]:
    group_id, generation = group.group_id, group.generation
    profiles, targets, holdings = [], [], []
    for member_id, held in _holdings(group, topics).items():
        current = CurrentAssignment(generation, generation, assigned=held)
        profiles.append(profile_change(group_id, member_id, _profile(group, group.members[member_id])))
        targets.append(target_change(group_id, member_id, usable(current)))
        holdings.append(current_assignment_change(group_id, member_id, current))
    return [*profiles, *targets, target_epoch_change(group_id, generation, 0), *holdings]


def _holdings(group: ClassicGroup, topics: Topics) -> dict[str, Held]:
    """What each member holds: what it was assigned, and, while the group is between two assignments, what it said
    that it had not given up. Nobody holds what another does."""
    claims: dict[str, list[dict[UUID, tuple[int, ...]]]] = {}
    for member in group.members.values():
        claims[member.member_id] = [_assigned(group, member.assignment, topics)]
    if not group.is_stable:
        for member in group.members.values():
            owned = _subscription(group, member).owned_partitions
            claims[member.member_id].append(by_topic_id(owned, topics))
    taken: set[tuple[UUID, int]] = set()
    held: dict[str, dict[UUID, dict[int, int]]] = {member_id: {} for member_id in claims}
    for rank in range(1 if group.is_stable else 2):
        for member_id, claimed in claims.items():
            for topic_id, partitions in claimed[rank].items():
                for partition in partitions:
                    if (topic_id, partition) not in taken:
                        taken.add((topic_id, partition))
                        held[member_id].setdefault(topic_id, {})[partition] = group.generation
    return dict(held)


def _subscription(group: ClassicGroup, member: ClassicMember) -> ConsumerSubscription:
    _, subscription = decode_subscription(
        member.metadata(group.protocol_name) or member.protocols[0].metadata
    )
    return subscription


def _profile(group: ClassicGroup, member: ClassicMember) -> Profile:
    subscription = _subscription(group, member)
    return Profile(
        member.group_instance_id,
        subscription.rack_id or None,
        member.client_id,
        member.client_host,
        tuple(sorted(set(subscription.topics))),
        None,
        member.rebalance_timeout_ms,
        None,
        ClassicMemberMetadata(
            member.session_timeout_ms,
            tuple(ClassicProtocol(protocol.name, protocol.metadata) for protocol in member.protocols),
        ),
    )


def _assigned(group: ClassicGroup, assignment: bytes, topics: Topics) -> dict[UUID, tuple[int, ...]]:
    """No bytes at all are no assignment yet."""
    if not assignment:
        return {}
    _, embedded = decode_assignment(assignment)
    if embedded.user_data and group.protocol_name not in STANDARD_ASSIGNORS:
        raise ValueError("the data of a custom assignor would be lost")
    return by_topic_id(embedded.assigned_partitions, topics)


# Down


def can_downgrade(
    home: ConsumerGroups,
    group: ConsumerGroup,
    *,
    gone: Sequence[ConsumerMember] = (),
    replaced: ConsumerMember | None = None,
) -> bool:
    """Whether only classic members stay once some are gone, or one is replaced by a classic one."""
    settings = home.context.settings()
    leaving = [*gone] if replaced is None else [replaced]
    consumers = len(group.members) - group.classic_members
    if consumers != sum(not member.is_classic for member in leaving) or not consumers:
        return False
    left = len(group.members) - len(gone)
    return (
        left > 0
        and settings.group_consumer_migration_policy.lower() in DOWNGRADES
        and left <= settings.group_max_size
    )


def downgrade(home: ConsumerGroups, group: ConsumerGroup, gone: Sequence[ConsumerMember], now: Now) -> None:
    """The members that stay make a classic group, and rebalance."""
    away = {member.member_id for member in gone}
    members = [
        _classic_member(member.member_id, member.profile, member.current, home.context.topics)
        for member in group.members.values()
        if member.member_id not in away
    ]
    classic = _become_classic(home, group, members, now, rebalances=True)
    classic.begin_rebalance(now)


def downgrade_joining(
    home: ConsumerGroups, group: ConsumerGroup, requester: Requester, profile: Profile, now: Now
) -> JoinReply:
    """A classic static member takes the place of the last consumer: it joins, and the group is classic again.

    It goes on as it is only where everybody has its part of the work, and knows of all of it. A classic group has no
    target: what a member was still to be given would be nobody's.
    """
    topics = home.context.topics
    members = [
        _classic_member(requester.member_id, profile, requester.current, topics)
        if member is requester.replaces or member.member_id == requester.member_id
        else _classic_member(member.member_id, member.profile, member.current, topics)
        for member in group.members.values()
    ]
    rebalances = profile.subscription != requester.profile.subscription or not _is_settled(group, topics)
    classic = _become_classic(home, group, members, now, rebalances=rebalances)
    if rebalances:
        classic.begin_rebalance(now)
    return JoinReply(
        ErrorCode.none, requester.member_id, classic.generation, CONSUMER_PROTOCOL_TYPE, classic.protocol_name
    )


def _is_settled(group: ConsumerGroup, topics: Topics) -> bool:
    """Whether everybody has what a target made of the present says; one who is replaced, what it leaves behind."""
    return (
        group.epoch == group.assignment_epoch
        and not topics_followed(group, topics)
        and all(
            usable(member.current) == group.target_of(member.member_id) for member in group.members.values()
        )
    )


def _become_classic(
    home: ConsumerGroups, group: ConsumerGroup, members: list[ClassicMember], now: Now, *, rebalances: bool
) -> ClassicGroup:
    agreed = Membership()
    for member in members:
        agreed.add(member)
    classic = ClassicGroup(group.group_id, home.context)
    classic.restore(
        generation=group.epoch,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocol_name=agreed.choose_protocol(),
        leader=None,
        state_since_ms=now.wall_ms,
        members=members,
    )
    # A rebalance is not recorded before it is done. If the coordinator dies meanwhile, nobody must take the group for
    # settled: not those who know of it, nor those who have joined already.
    record = group_record(classic, now.wall_ms, is_unsettled=rebalances)
    home.context.journal.append([*encoded(group.farewell()), record], now)
    group.unload()
    home.put(classic)
    classic.loaded(now)
    return classic


def _classic_member(
    member_id: str, profile: Profile, current: CurrentAssignment, topics: Topics
) -> ClassicMember:
    assert profile.classic is not None
    protocols = tuple(
        MemberProtocol(protocol.name, protocol.metadata) for protocol in profile.classic.supported_protocols
    )
    return ClassicMember(
        member_id,
        profile.instance_id,
        profile.client_id,
        profile.client_host,
        profile.classic.session_timeout_ms,
        profile.rebalance_timeout_ms,
        protocols,
        embedded_assignment(current.assigned, protocols[0].metadata, topics),
    )
