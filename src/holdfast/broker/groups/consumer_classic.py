"""Members of a consumer group that still speak the classic protocol.

While a group moves from one protocol to the other, it has members of both. To the coordinator they are alike: it
assigns partitions to all of them, and none is given a partition another has not let go of. To a classic member it
looks as if it were in a classic group in which somebody else always leads: it is told by a heartbeat that there is a
rebalance, joins, and is told in the answer to SyncGroup what it may use. Its member epoch is its generation. A step
of reconciliation that a consumer makes with a heartbeat takes a classic member one round of joining and syncing: what
it reports to own when it joins is what it has not given up.

Each classic member has its own session time-out. Between being told to join and joining, and between joining and
syncing, it has its rebalance time-out.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import migration
from holdfast.broker.groups.consumer_embedded import by_topic_id, embedded_assignment
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import MemberState, Profile
from holdfast.broker.groups.consumer_state import ConsumerMember
from holdfast.broker.groups.consumer_turn import Requester, Turn
from holdfast.broker.groups.model import (
    CONSUMER_PROTOCOL_TYPE,
    NO_MEMBER_ID,
    HeartbeatRequest,
    JoinCallback,
    JoinReply,
    JoinRequest,
    LeaveReply,
    LeaveRequest,
    LeavingMember,
    MemberProtocol,
    SyncCallback,
    SyncReply,
    SyncRequest,
)
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.consumer_protocol import ConsumerSubscription, decode_subscription
from holdfast.wire.coordinator_records import ClassicMemberMetadata, ClassicProtocol

if TYPE_CHECKING:
    from holdfast.broker.groups.consumer import ConsumerGroups

NO_MIGRATION: Final = "disabled"


class ClassicMembers:
    def __init__(self, home: ConsumerGroups) -> None:
        self._home = home

    # Joining

    def join(self, group: ConsumerGroup, request: JoinRequest, reply: JoinCallback, now: Now) -> None:
        try:
            answer = self._join(group, request, now)
        except ApiError as error:
            answer = JoinReply(error.code, request.member_id)
        reply(answer)

    def _join(self, group: ConsumerGroup, request: JoinRequest, now: Now) -> JoinReply:
        home = self._home
        self._check_welcome(group, request)
        subscription = _subscription_of(request.protocols)
        is_unknown = request.member_id == NO_MEMBER_ID
        member_id = home.new_member_id() if is_unknown else request.member_id
        if is_unknown and request.group_instance_id is None and request.requires_known_member_id:
            return JoinReply(ErrorCode.member_id_required, member_id)
        requester = self._requester(group, request, member_id)
        profile = _updated(requester.profile, request, subscription)
        takes_over = group.member_of_instance(request.group_instance_id)
        if takes_over is not None and migration.can_downgrade(home, group, replaced=takes_over):
            return migration.downgrade_joining(home, group, requester, profile, now)
        owned = list(by_topic_id(subscription.owned_partitions, home.context.topics).items())
        outcome = Turn(group, requester, home.circumstances(group, now)).take(profile, owned)
        home.commit(group, outcome.changes, now)
        home.looked_at_topics(group, now)
        member = group.members[requester.member_id]
        member.cancel("join_timer")
        home.begin_session(group, member, request.session_timeout_ms, now)
        home.limit(group, member, "sync_timer", "it joined and has not synced in time", now)
        return JoinReply(
            ErrorCode.none,
            requester.member_id,
            outcome.current.epoch,
            CONSUMER_PROTOCOL_TYPE,
            request.protocols[0].name,
        )

    def _check_welcome(self, group: ConsumerGroup, request: JoinRequest) -> None:
        settings = self._home.context.settings()
        if settings.group_consumer_migration_policy.lower() == NO_MIGRATION:
            raise ApiError(ErrorCode.inconsistent_group_protocol, "this group takes no classic members")
        if len(group.members) >= settings.group_consumer_max_size and request.member_id not in group.members:
            raise ApiError(ErrorCode.group_max_size_reached)
        names = [protocol.name for protocol in request.protocols]
        fits = any(group.classic_protocols.get(name, 0) == group.classic_members for name in names)
        if request.protocol_type != CONSUMER_PROTOCOL_TYPE or not fits:
            raise ApiError(ErrorCode.inconsistent_group_protocol)

    def _requester(self, group: ConsumerGroup, request: JoinRequest, member_id: str) -> Requester:
        instance_id = request.group_instance_id
        if instance_id is None:
            member = group.members.get(member_id)
            return Requester(member_id) if member is None else Requester.of(member)
        if request.member_id != NO_MEMBER_ID:
            return Requester.of(group.find_static(member_id, instance_id))
        known = group.member_of_instance(instance_id)
        return Requester(member_id) if known is None else Requester.instead_of(known, member_id)

    # Syncing

    def sync(self, group: ConsumerGroup, request: SyncRequest, reply: SyncCallback, now: Now) -> None:
        try:
            answer = self._sync(group, request, now)
        except ApiError as error:
            answer = SyncReply(error.code)
        reply(answer)

    def _sync(self, group: ConsumerGroup, request: SyncRequest, now: Now) -> SyncReply:
        member, classic = _speaker(group, request.member_id, request.group_instance_id)
        _check_generation(member, request.generation)
        protocol = classic.supported_protocols[0]
        if request.protocol_type not in (None, CONSUMER_PROTOCOL_TYPE):
            raise ApiError(ErrorCode.inconsistent_group_protocol)
        if request.protocol_name not in (None, protocol.name):
            raise ApiError(ErrorCode.inconsistent_group_protocol)
        current = member.current
        if group.assignment_epoch > current.epoch and current.state is not MemberState.UNREVOKED:
            self._expect_join(group, member, now)
            raise ApiError(ErrorCode.rebalance_in_progress)
        member.cancel("sync_timer")
        self._home.begin_session(group, member, classic.session_timeout_ms, now)
        return SyncReply(
            ErrorCode.none,
            request.protocol_type,
            request.protocol_name,
            embedded_assignment(member.current.assigned, protocol.metadata, self._home.context.topics),
        )

    # Staying and leaving

    def heartbeat(self, group: ConsumerGroup, request: HeartbeatRequest, now: Now) -> ErrorCode:
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

    def leave(self, group: ConsumerGroup, request: LeaveRequest, now: Now) -> LeaveReply:
        gone: dict[str, ConsumerMember] = {}
        outcomes: list[tuple[LeavingMember, ErrorCode]] = []
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
        return LeaveReply(ErrorCode.none, tuple(outcomes))

    def _expect_join(self, group: ConsumerGroup, member: ConsumerMember, now: Now) -> None:
        if member.join_timer is None:
            self._home.limit(group, member, "join_timer", "it has not joined the rebalance in time", now)


def _subscription_of(protocols: tuple[MemberProtocol, ...]) -> ConsumerSubscription:
    """All of a member's protocols carry the same one."""
    try:
        return decode_subscription(protocols[0].metadata)[1]
    except ValueError as error:
        raise ApiError(
            ErrorCode.inconsistent_group_protocol, f"no subscription of a consumer: {error}"
        ) from error


def _updated(profile: Profile, request: JoinRequest, subscription: ConsumerSubscription) -> Profile:
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


def _leaving(group: ConsumerGroup, leaving: LeavingMember) -> ConsumerMember:
    if leaving.group_instance_id is None:
        return group.find(leaving.member_id)
    if leaving.member_id != NO_MEMBER_ID:
        return group.find_static(leaving.member_id, leaving.group_instance_id)
    # An operator removes an instance, whoever it is at the moment.
    member = group.member_of_instance(leaving.group_instance_id)
    if member is None:
        raise ApiError(ErrorCode.unknown_member_id)
    return member
