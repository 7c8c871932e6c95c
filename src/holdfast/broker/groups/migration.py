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

`ClassicMembers` are the members of a consumer group that still speak the classic protocol. While a group moves from
one protocol to the other, it has members of both. To the coordinator they are alike: it
assigns partitions to all of them, and none is given a partition another has not let go of. To a classic member it
looks as if it were in a classic group in which somebody else always leads: it is told by a heartbeat that there is a
rebalance, joins, and is told in the answer to SyncGroup what it may use. Its member epoch is its generation. A step
of reconciliation that a consumer makes with a heartbeat takes a classic member one round of joining and syncing: what
it reports to own when it joins is what it has not given up.

Each classic member has its own session time-out. Between being told to join and joining, and between joining and
syncing, it has its rebalance time-out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.classic_state import ClassicMember, Membership, group_record
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import (
    CurrentAssignment,
    Held,
    MemberState,
    Profile,
    by_topic_id,
    embedded_assignment,
)
from holdfast.broker.groups.consumer_state import (
    Change,
    ConsumerMember,
    current_assignment_change,
    encoded,
    epoch_change,
    profile_change,
    target_change,
    target_epoch_change,
)
from holdfast.broker.groups.consumer_turn import Requester, Subscriptions, Turn, topics_followed, usable
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


def upgraded(home: ConsumerGroups, group: model.Group) -> tuple[ConsumerGroup, list[Change]]:
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


def release_waiting(group: model.Group) -> None:
    """The classic group is no more; its members are to join what it has become."""
    again = ErrorCode.rebalance_in_progress
    membership = group.membership if isinstance(group, ClassicGroup) else Membership()
    for member in membership:
        membership.answer_join(member, model.JoinReply(again, member.member_id))
        membership.answer_sync(member, model.SyncReply(again))
    group.unload()


def _refused(group: model.Group, reason: str) -> ApiError:
    return ApiError(
        ErrorCode.group_id_not_found,
        f"classic group {group.group_id!r} does not become a consumer group: {reason}",
    )


def _changes_of(group: ClassicGroup, topics: model.Topics) -> list[Change]:
    group_id, generation = group.group_id, group.generation
    profiles, targets, holdings = [], [], []
    for member_id, held in _holdings(group, topics).items():
        current = CurrentAssignment(generation, generation, assigned=held)
        profiles.append(profile_change(group_id, member_id, _profile(group, group.members[member_id])))
        targets.append(target_change(group_id, member_id, usable(current)))
        holdings.append(current_assignment_change(group_id, member_id, current))
    return [*profiles, *targets, target_epoch_change(group_id, generation, 0), *holdings]


def _holdings(group: ClassicGroup, topics: model.Topics) -> dict[str, Held]:
    """What each member holds: what it was assigned, and what it said when it joined that it had not given up. A
    cooperative member gives that up only once it has its assignment, which may still be on its way to it, and then
    joins again. Nobody holds what another was assigned."""
    claims: dict[str, list[dict[UUID, tuple[int, ...]]]] = {}
    for member in group.members.values():
        owned = _subscription(group, member).owned_partitions
        claims[member.member_id] = [_assigned(group, member.assignment, topics), by_topic_id(owned, topics)]
    taken: set[tuple[UUID, int]] = set()
    held: dict[str, dict[UUID, dict[int, int]]] = {member_id: {} for member_id in claims}
    for rank in range(2):
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


def _assigned(group: ClassicGroup, assignment: bytes, topics: model.Topics) -> dict[UUID, tuple[int, ...]]:
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
) -> model.JoinReply:
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
    return model.JoinReply(
        ErrorCode.none,
        requester.member_id,
        classic.generation,
        model.CONSUMER_PROTOCOL_TYPE,
        classic.protocol_name,
    )


def _is_settled(group: ConsumerGroup, topics: model.Topics) -> bool:
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
        protocol_type=model.CONSUMER_PROTOCOL_TYPE,
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
    member_id: str, profile: Profile, current: CurrentAssignment, topics: model.Topics
) -> ClassicMember:
    assert profile.classic is not None
    protocols = tuple(
        model.MemberProtocol(protocol.name, protocol.metadata)
        for protocol in profile.classic.supported_protocols
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


NO_MIGRATION: Final = "disabled"


class ClassicMembers:
    def __init__(self, home: ConsumerGroups) -> None:
        self._home = home

    # Joining

    def join(
        self, group: ConsumerGroup, request: model.JoinRequest, reply: model.JoinCallback, now: Now
    ) -> None:
        try:
            answer = self._join(group, request, now)
        except ApiError as error:
            answer = model.JoinReply(error.code, request.member_id)
        reply(answer)

    def _join(self, group: ConsumerGroup, request: model.JoinRequest, now: Now) -> model.JoinReply:
        home = self._home
        self._check_welcome(group, request)
        subscription = _subscription_of(request.protocols)
        is_unknown = request.member_id == model.NO_MEMBER_ID
        member_id = home.new_member_id() if is_unknown else request.member_id
        if is_unknown and request.group_instance_id is None and request.requires_known_member_id:
            return model.JoinReply(ErrorCode.member_id_required, member_id)
        requester = self._requester(group, request, member_id)
        profile = _updated(requester.profile, request, subscription)
        takes_over = group.member_of_instance(request.group_instance_id)
        if takes_over is not None and can_downgrade(home, group, replaced=takes_over):
            return downgrade_joining(home, group, requester, profile, now)
        owned = list(by_topic_id(subscription.owned_partitions, home.context.topics).items())
        outcome = Turn(group, requester, home.circumstances(group, now)).take(profile, owned)
        home.commit(group, outcome.changes, now)
        home.looked_at_topics(group, now)
        member = group.members[requester.member_id]
        member.cancel("join_timer")
        home.begin_session(group, member, request.session_timeout_ms, now)
        home.limit(group, member, "sync_timer", "it joined and has not synced in time", now)
        return model.JoinReply(
            ErrorCode.none,
            requester.member_id,
            outcome.current.epoch,
            model.CONSUMER_PROTOCOL_TYPE,
            request.protocols[0].name,
        )

    def _check_welcome(self, group: ConsumerGroup, request: model.JoinRequest) -> None:
        settings = self._home.context.settings()
        if settings.group_consumer_migration_policy.lower() == NO_MIGRATION:
            raise ApiError(ErrorCode.inconsistent_group_protocol, "this group takes no classic members")
        if len(group.members) >= settings.group_consumer_max_size and request.member_id not in group.members:
            raise ApiError(ErrorCode.group_max_size_reached)
        names = [protocol.name for protocol in request.protocols]
        fits = any(group.classic_protocols.get(name, 0) == group.classic_members for name in names)
        if request.protocol_type != model.CONSUMER_PROTOCOL_TYPE or not fits:
            raise ApiError(ErrorCode.inconsistent_group_protocol)

    def _requester(self, group: ConsumerGroup, request: model.JoinRequest, member_id: str) -> Requester:
        instance_id = request.group_instance_id
        if instance_id is None:
            member = group.members.get(member_id)
            return Requester(member_id) if member is None else Requester.of(member)
        if request.member_id != model.NO_MEMBER_ID:
            return Requester.of(group.find_static(member_id, instance_id))
        known = group.member_of_instance(instance_id)
        return Requester(member_id) if known is None else Requester.instead_of(known, member_id)

    # Syncing

    def sync(
        self, group: ConsumerGroup, request: model.SyncRequest, reply: model.SyncCallback, now: Now
    ) -> None:
        try:
            answer = self._sync(group, request, now)
        except ApiError as error:
            answer = model.SyncReply(error.code)
        reply(answer)

    def _sync(self, group: ConsumerGroup, request: model.SyncRequest, now: Now) -> model.SyncReply:
        member, classic = _speaker(group, request.member_id, request.group_instance_id)
        _check_generation(member, request.generation)
        protocol = classic.supported_protocols[0]
        if request.protocol_type not in (None, model.CONSUMER_PROTOCOL_TYPE):
            raise ApiError(ErrorCode.inconsistent_group_protocol)
        if request.protocol_name not in (None, protocol.name):
            raise ApiError(ErrorCode.inconsistent_group_protocol)
        current = member.current
        if group.assignment_epoch > current.epoch and current.state is not MemberState.UNREVOKED:
            self._expect_join(group, member, now)
            raise ApiError(ErrorCode.rebalance_in_progress)
        member.cancel("sync_timer")
        self._home.begin_session(group, member, classic.session_timeout_ms, now)
        return model.SyncReply(
            ErrorCode.none,
            request.protocol_type,
            request.protocol_name,
            embedded_assignment(member.current.assigned, protocol.metadata, self._home.context.topics),
        )

    # Staying and leaving

    def heartbeat(self, group: ConsumerGroup, request: model.HeartbeatRequest, now: Now) -> ErrorCode:
        try:
            member, classic = _speaker(group, request.member_id, request.group_instance_id)
            _check_generation(member, request.generation)
            self._home.follow_topics(group, now)
        except ApiError as error:
            return error.code
        self._home.begin_session(group, member, classic.session_timeout_ms, now)
        if _has_to_join(group, member) or self._home.is_target_due(group, now):
            self._expect_join(group, member, now)
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def leave(self, group: ConsumerGroup, request: model.LeaveRequest, now: Now) -> model.LeaveReply:
        gone: dict[str, ConsumerMember] = {}
        outcomes: list[tuple[model.LeavingMember, ErrorCode]] = []
        for leaving in request.members:
            try:
                member = _leaving(group, leaving)
            except ApiError as error:
                outcomes.append((leaving, error.code))
            else:
                gone[member.member_id] = member
                outcomes.append((leaving, ErrorCode.none))
        if gone:
            self._home.remove(group, list(gone.values()), now)
        return model.LeaveReply(ErrorCode.none, tuple(outcomes))

    def _expect_join(self, group: ConsumerGroup, member: ConsumerMember, now: Now) -> None:
        if member.join_timer is None:
            self._home.limit(group, member, "join_timer", "it has not joined the rebalance in time", now)


def _subscription_of(protocols: tuple[model.MemberProtocol, ...]) -> ConsumerSubscription:
    """All of a member's protocols carry the same one."""
    try:
        return decode_subscription(protocols[0].metadata)[1]
    except ValueError as error:
        raise ApiError(
            ErrorCode.inconsistent_group_protocol, f"no subscription of a consumer: {error}"
        ) from error


def _updated(profile: Profile, request: model.JoinRequest, subscription: ConsumerSubscription) -> Profile:
    return replace(
        profile,
        instance_id=request.group_instance_id or profile.instance_id,
        rack_id=subscription.rack_id or profile.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=tuple(sorted(set(subscription.topics))),
        topic_regex=None,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        classic=ClassicMemberMetadata(
            request.session_timeout_ms,
            tuple(ClassicProtocol(protocol.name, protocol.metadata) for protocol in request.protocols),
        ),
    )


def _speaker(
    group: ConsumerGroup, member_id: str, instance_id: str | None
) -> tuple[ConsumerMember, ClassicMemberMetadata]:
    """The classic member a request speaks for."""
    member = group.find(member_id) if instance_id is None else group.find_static(member_id, instance_id)
    classic = member.profile.classic
    if classic is None or not classic.supported_protocols:
        raise ApiError(ErrorCode.unknown_member_id, f"{member_id!r} does not speak the classic protocol")
    return member, classic


def _check_generation(member: ConsumerMember, generation: int) -> None:
    if generation != member.current.epoch:
        raise ApiError(
            ErrorCode.illegal_generation,
            f"the generation of {member.member_id!r} is {member.current.epoch}, not {generation}",
        )


def _has_to_join(group: ConsumerGroup, member: ConsumerMember) -> bool:
    """To catch up, to give something up, or because all that it waited for is free now."""
    current = member.current
    if current.epoch < group.assignment_epoch or current.state is MemberState.UNREVOKED:
        return True
    return current.state is MemberState.UNRELEASED and not _waits_for_others(group, member)


def _waits_for_others(group: ConsumerGroup, member: ConsumerMember) -> bool:
    missing = (
        (topic_id, partition)
        for topic_id, partitions in group.target_of(member.member_id).items()
        for partition in partitions
        if partition not in member.current.assigned.get(topic_id, {})
    )
    return any(_is_others(group.owner_of(*each), member) for each in missing)


def _is_others(owner: str | None, member: ConsumerMember) -> bool:
    return owner is not None and owner != member.member_id


def _leaving(group: ConsumerGroup, leaving: model.LeavingMember) -> ConsumerMember:
    if leaving.group_instance_id is None:
        return group.find(leaving.member_id)
    if leaving.member_id != model.NO_MEMBER_ID:
        return group.find_static(leaving.member_id, leaving.group_instance_id)
    # An operator removes an instance, whoever it is at the moment.
    member = group.member_of_instance(leaving.group_instance_id)
    if member is None:
        raise ApiError(ErrorCode.unknown_member_id)
    return member
