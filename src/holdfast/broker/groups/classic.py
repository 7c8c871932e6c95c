"""The classic group protocol: members meet, one of them shares the work out, and all learn their part.

A group lives in generations. A rebalance gathers the members (PreparingRebalance): everybody sends JoinGroup and
waits. When all are there, or time is up, a new generation begins (CompletingRebalance): everybody is told it, the
leader is told who the others are. Everybody sends SyncGroup and waits for the leader's, which brings the
assignments. They are recorded, and the group is Stable until somebody comes, goes or changes.

    Empty ──join──▶ PreparingRebalance ──all joined──▶ CompletingRebalance ──leader's sync──▶ Stable
      ▲                    │  ▲  ▲                             │                               │
      └──────nobody left───┘  │  └─────────join, leave, death──┘                               │
                              └────────────────────────join, leave, death──────────────────────┘

Rules kept:

- One record holds the whole group. It is appended when assignments arrive, when a static member changes its id, and
when the group becomes empty; a generation nobody has an assignment of yet is not recorded, and after a crash the
one before it stands, whose members are told to join again by ILLEGAL_GENERATION. - A first rebalance waits
`group.initial.rebalance.delay.ms` for others, and again while new ones come, at most for the longest rebalance
time-out. Later ones wait for the members known, and for those that were given an id. - Members that wait for us are
not late. Those that never got an answer are forgotten after a few minutes. - A dynamic member that does not join in
time is out; a static one keeps its membership until its session ends.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.classic_state import (
    TRANSITIONS,
    ClassicMember,
    ClassicState,
    Membership,
    described,
    group_record,
    group_tombstone,
    joined,
)
from holdfast.broker.groups.classic_time import Gathering, Sessions, SyncPhase
from holdfast.errors import ApiError
from holdfast.saying import warn
from holdfast.seams import Now

NEW_MEMBER_JOIN_TIMEOUT_MS: Final = 5 * 60 * 1000
"""A client that gave up on its first JoinGroup leaves a member nobody speaks for; it is not waited for longer."""


class ClassicGroup:
    type: Final = model.GroupType.CLASSIC

    def __init__(self, group_id: str, context: model.CoordinatorContext) -> None:
        self.group_id = group_id
        self._context = context
        self._state = ClassicState.EMPTY
        self._came_from = ClassicState.EMPTY
        self.state_since_ms: int | None = None
        """Wall clock; committed offsets of an empty group expire from here on. None for a group of which only
        committed offsets are known."""
        self.generation = 0
        self.is_unsettled = False
        """As it was recorded: there are partitions that nobody of it was given."""
        self._protocol_type: str | None = None
        self.protocol_name: str | None = None
        self.membership = Membership()
        self._sessions = Sessions(context.schedule, self.membership, self._silent)
        self._topics: frozenset[str] | None = None
        """What the members read; None when that cannot be known."""
        self._gathering = Gathering(context, self._complete_join)
        self._syncs = SyncPhase(context.schedule, self._syncs_late)

    # Looking

    @property
    def state(self) -> str:
        return self._state.value

    @property
    def is_stable(self) -> bool:
        return self._state is ClassicState.STABLE

    @property
    def protocol_type(self) -> str | None:
        return self._protocol_type

    @property
    def leader(self) -> str | None:
        return self.membership.leader

    @property
    def members(self) -> dict[str, ClassicMember]:
        return self.membership.members

    @property
    def is_empty(self) -> bool:
        return self._state is ClassicState.EMPTY

    @property
    def is_of_consumers(self) -> bool:
        return self._protocol_type == model.CONSUMER_PROTOCOL_TYPE

    def is_subscribed_to(self, topic: str) -> bool:
        """When the members' metadata cannot be read, consumers may read anything."""
        return topic in self._topics if self._topics is not None else self.is_of_consumers

    def describe(self) -> model.ClassicDescription:
        return described(self)

    # Joining

    def join(self, request: model.JoinRequest, reply: model.JoinCallback, now: Now) -> None:
        if not self._has_room_for(request.member_id):
            self._turn_away(request.member_id, now)
            reply(model.JoinReply(ErrorCode.group_max_size_reached, model.NO_MEMBER_ID))
            return
        try:
            self._refuse_strange_protocols(request)
            if request.member_id == model.NO_MEMBER_ID:
                self._join_unknown(request, reply, now)
            else:
                self._join_known(request, reply, now)
        except ApiError as error:
            reply(model.JoinReply(error.code, request.member_id))

    def _has_room_for(self, member_id: str) -> bool:
        size_max = self._context.settings().group_max_size
        members = self.members
        member = members.get(member_id)
        if self._state is ClassicState.PREPARING:
            # The setting may have been lowered: those who come back last are one too many.
            is_here = member is not None and member.join_reply is not None
            return is_here or self.membership.awaiting_join < size_max
        return self._state is ClassicState.EMPTY or member is not None or len(members) < size_max

    def _turn_away(self, member_id: str, now: Now) -> None:
        self.membership.forget_pending(member_id)
        member = self.members.get(member_id)
        if member is not None:
            self.membership.remove(member)
        if not self._is_first_rebalance:
            self._complete_if_all_joined(now)

    def _refuse_strange_protocols(self, request: model.JoinRequest) -> None:
        if self._state is ClassicState.EMPTY:
            fits = bool(request.protocol_type and request.protocols)
        else:
            fits = request.protocol_type == self._protocol_type and self.membership.supports_one_of(
                name for name, _ in request.protocols
            )
        if not fits:
            raise ApiError(ErrorCode.inconsistent_group_protocol)

    def _join_unknown(self, request: model.JoinRequest, reply: model.JoinCallback, now: Now) -> None:
        named = request.client_id if request.group_instance_id is None else request.group_instance_id
        member_id = f"{named}-{UUID(bytes=self._context.randomness.uuid_bytes())}"
        if request.group_instance_id is not None:
            known = self.membership.static.get(request.group_instance_id)
            if known is None:
                self._add(request, member_id, reply, now)
            else:
                self._replace_static(request, self.members[known], member_id, reply, now)
        elif request.requires_known_member_id:
            deadline_ms = now.monotonic_ms + request.session_timeout_ms
            self.membership.pending[member_id] = self._context.schedule.at(
                deadline_ms, lambda later: self._pending_expired(member_id, later)
            )
            reply(model.JoinReply(ErrorCode.member_id_required, member_id))
        else:
            self._add(request, member_id, reply, now)

    def _join_known(self, request: model.JoinRequest, reply: model.JoinCallback, now: Now) -> None:
        if request.member_id in self.membership.pending:
            if request.group_instance_id is not None:
                raise ApiError(ErrorCode.unknown_server_error, "ids are handed out to dynamic members only")
            self._add(request, request.member_id, reply, now)
            return
        member = self.membership.find(request.member_id, request.group_instance_id)
        unchanged = member.protocols == request.protocols
        is_leader = self.leader == member.member_id
        if self._state is ClassicState.COMPLETING and unchanged:
            # Its answer may have been lost.
            reply(joined(self, member))
        elif self._state is ClassicState.STABLE and unchanged and not is_leader:
            reply(joined(self, member))
        elif self._state is ClassicState.EMPTY:
            raise ApiError(ErrorCode.unknown_member_id)
        else:
            # A stable group's leader joins when the topics have changed, which its own metadata does not show.
            self._update(member, request, reply)
            self._rebalance(now)

    def _add(self, request: model.JoinRequest, member_id: str, reply: model.JoinCallback, now: Now) -> None:
        member = ClassicMember(
            member_id,
            request.group_instance_id,
            request.client_id,
            request.client_host,
            request.session_timeout_ms,
            request.rebalance_timeout_ms,
            request.protocols,
        )
        member.is_new = True
        if self._is_first_rebalance:
            self._gathering.newcomers = True
        if not self.members:
            self._protocol_type = request.protocol_type
        self.membership.add(member, reply)
        self._sessions.expect(member, NEW_MEMBER_JOIN_TIMEOUT_MS, now)
        self._rebalance(now)

    def _update(self, member: ClassicMember, request: model.JoinRequest, reply: model.JoinCallback) -> None:
        # A client that asks again does not listen for the answer to what it asked before.
        self.membership.answer_join(
            member, model.JoinReply(ErrorCode.rebalance_in_progress, member.member_id)
        )
        self.membership.update(
            member, request.protocols, request.session_timeout_ms, request.rebalance_timeout_ms
        )
        self.membership.await_join(member, reply)

    def _replace_static(
        self,
        request: model.JoinRequest,
        member: ClassicMember,
        member_id: str,
        reply: model.JoinCallback,
        now: Now,
    ) -> None:
        """The instance has been restarted: it gets a new id, and whoever still uses the old one is fenced."""
        old_id, led_by = member.member_id, self.leader
        before = (member.protocols, member.session_timeout_ms, member.rebalance_timeout_ms)
        self.membership.rename(member, member_id)
        self.membership.update(
            member, request.protocols, request.session_timeout_ms, request.rebalance_timeout_ms
        )
        if self._state is ClassicState.STABLE and self.membership.choose_protocol() == self.protocol_name:
            try:
                self._context.journal.append([group_record(self, now.wall_ms)], now)
            except ApiError as error:
                self.membership.update(member, *before)
                self.membership.rename(member, old_id)
                reply(model.JoinReply(model.append_error(error), model.NO_MEMBER_ID))
                return
            self._sessions.expect(member, member.session_timeout_ms, now)
            is_leader = self.leader == member_id
            if request.supports_skipping_assignment:
                reply(joined(self, member)._replace(skip_assignment=is_leader))
            else:
                # It must not share work out anew, and so is not told that it leads.
                reply(joined(self, member)._replace(leader=led_by or "", members=()))
            return
        self._fence(member, old_id)
        self._syncs.rename(old_id, member_id)
        self.membership.await_join(member, reply)
        self._sessions.expect(member, member.session_timeout_ms, now)
        self._rebalance(now)

    def _fence(self, member: ClassicMember, old_id: str) -> None:
        self.membership.answer_join(member, model.JoinReply(ErrorCode.fenced_instance_id, old_id))
        self.membership.answer_sync(member, model.SyncReply(ErrorCode.fenced_instance_id))

    # Rebalancing

    @property
    def _is_first_rebalance(self) -> bool:
        return self._state is ClassicState.PREPARING and self._came_from is ClassicState.EMPTY

    def _rebalance(self, now: Now) -> None:
        """Begin to gather the members, or see whether all are here."""
        if ClassicState.PREPARING in TRANSITIONS[self._state]:
            self._prepare(now)
        elif not self._is_first_rebalance:
            self._complete_if_all_joined(now)

    def _prepare(self, now: Now) -> None:
        if self._state is ClassicState.COMPLETING:
            for member in self.membership:
                member.assignment = b""
            self._answer_syncs(ErrorCode.rebalance_in_progress, now)
        self._syncs.end()
        first = self._state is ClassicState.EMPTY
        self._move_to(ClassicState.PREPARING, now)
        if first:
            self._gathering.await_newcomers(self.membership.rebalance_timeout_ms, now)
        elif self.membership.have_all_joined:
            self._complete_join(now)
        else:
            self._gathering.limit(self.membership.rebalance_timeout_ms, now)

    def _complete_if_all_joined(self, now: Now) -> None:
        if self._state is ClassicState.PREPARING and self.membership.have_all_joined:
            self._complete_join(now)

    def _complete_join(self, now: Now) -> None:
        """The members that are here make the next generation."""
        self._gathering.end()
        if self._state is not ClassicState.PREPARING:
            return
        for member in self.membership:
            if member.join_reply is None and member.group_instance_id is None:
                self.membership.remove(member)
        if not self.members:
            self._become_empty(now)
        elif not self.membership.elect_joined_leader():
            # Only static members that keep silent: their sessions will end, or they come back.
            self._gathering.limit(self.membership.rebalance_timeout_ms, now)
        else:
            self._begin_generation(now)

    def _begin_generation(self, now: Now) -> None:
        self.generation += 1
        self.protocol_name = self.membership.choose_protocol()
        self._topics = self._read_topics()
        self._move_to(ClassicState.COMPLETING, now)
        self._syncs.begin(self.members, self.membership.rebalance_timeout_ms, now)
        for member in self.membership:
            self._sessions.expect(member, member.session_timeout_ms, now)
            member.is_new = False
            self.membership.answer_join(member, joined(self, member))

    def _become_empty(self, now: Now) -> None:
        self.generation += 1
        self.protocol_name = None
        self._topics = self._read_topics()
        self._move_to(ClassicState.EMPTY, now)
        self._syncs.end()
        try:
            self._context.journal.append([group_record(self, now.wall_ms)], now)
        except ApiError as error:
            # After a crash the generation before comes back, with members that will time out again.
            text = f"group {self.group_id!r} is empty, which could not be recorded: {error}"
            self._context.say(warn(text, kind="empty group"))

    # Syncing

    def sync(self, request: model.SyncRequest, reply: model.SyncCallback, now: Now) -> None:
        try:
            if self._state is ClassicState.EMPTY:
                raise ApiError(ErrorCode.unknown_member_id)
            member = self.membership.find(request.member_id, request.group_instance_id)
            if request.generation != self.generation:
                raise ApiError(ErrorCode.illegal_generation)
            if _differ(request.protocol_type, self._protocol_type) or _differ(
                request.protocol_name, self.protocol_name
            ):
                raise ApiError(ErrorCode.inconsistent_group_protocol)
            if self._state is ClassicState.PREPARING:
                raise ApiError(ErrorCode.rebalance_in_progress)
        except ApiError as error:
            reply(model.SyncReply(error.code))
            return
        if self._state is ClassicState.STABLE:
            self._syncs.came(member.member_id)
            reply(self._synced(member))
            return
        self.membership.answer_sync(member, model.SyncReply(ErrorCode.rebalance_in_progress))
        member.sync_reply = reply
        self._syncs.came(member.member_id)
        if self.leader == member.member_id:
            self._assign(dict(request.assignments), now)

    def _assign(self, assignments: dict[str, bytes], now: Now) -> None:
        for member in self.membership:
            member.assignment = assignments.get(member.member_id, b"")
        try:
            self._context.journal.append([group_record(self, now.wall_ms)], now)
        except ApiError as error:
            for member in self.membership:
                member.assignment = b""
            self._answer_syncs(model.append_error(error), now)
            self._rebalance(now)
            return
        self._move_to(ClassicState.STABLE, now)
        self._answer_syncs(ErrorCode.none, now)

    def _synced(self, member: ClassicMember) -> model.SyncReply:
        return model.SyncReply(ErrorCode.none, self._protocol_type, self.protocol_name, member.assignment)

    def _answer_syncs(self, error: ErrorCode, now: Now) -> None:
        for member in self.membership:
            answer = self._synced(member) if error is ErrorCode.none else model.SyncReply(error)
            if self.membership.answer_sync(member, answer):
                self._sessions.expect(member, member.session_timeout_ms, now)

    def _syncs_late(self, now: Now) -> None:
        """Whoever joined and did not sync within the rebalance time-out is gone."""
        if self._state not in (ClassicState.COMPLETING, ClassicState.STABLE):
            return
        late = [self.members[member_id] for member_id in self._syncs.due if member_id in self.members]
        for member in late:
            self.membership.answer_join(
                member, model.JoinReply(ErrorCode.unknown_member_id, model.NO_MEMBER_ID)
            )
            self.membership.remove(member)
        if late:
            self._prepare(now)

    # Heartbeats and sessions

    def heartbeat(self, request: model.HeartbeatRequest, now: Now) -> ErrorCode:
        member = self.membership.members.get(request.member_id)
        if member is None or request.group_instance_id is not None:
            try:
                member = self.membership.find(request.member_id, request.group_instance_id)
            except ApiError as error:
                return error.code
        if request.generation != self.generation:
            return ErrorCode.illegal_generation
        member.deadline_ms = now.monotonic_ms + member.session_timeout_ms
        if member.timer is None:
            self._sessions.expect(member, member.session_timeout_ms, now)
        if self._state is ClassicState.PREPARING:
            return ErrorCode.rebalance_in_progress
        return ErrorCode.none

    def _silent(self, member: ClassicMember, now: Now) -> None:
        # Whoever waits for us is expected again once answered.
        if member.is_new or not member.is_waiting:
            self._dismiss(member)
            self._members_went(now)

    def _pending_expired(self, member_id: str, now: Now) -> None:
        if self.membership.forget_pending(member_id):
            self._complete_if_all_joined(now)

    def _dismiss(self, member: ClassicMember) -> None:
        """Take a member out; if it is still there, it will join anew."""
        self.membership.answer_join(member, model.JoinReply(ErrorCode.unknown_member_id, model.NO_MEMBER_ID))
        self.membership.answer_sync(member, model.SyncReply(ErrorCode.unknown_member_id))
        self._syncs.due.discard(member.member_id)
        self.membership.remove(member)

    def _members_went(self, now: Now) -> None:
        if self._state in (ClassicState.STABLE, ClassicState.COMPLETING):
            self._prepare(now)
        else:
            self._complete_if_all_joined(now)

    # Leaving

    def leave(self, request: model.LeaveRequest, now: Now) -> model.LeaveReply:
        outcomes = tuple((member, self._leave_one(member)) for member in request.members)
        if any(error is ErrorCode.none for _, error in outcomes) and not self._is_first_rebalance:
            self._members_went(now)
        return model.LeaveReply(ErrorCode.none, outcomes)

    def _leave_one(self, leaving: model.LeavingMember) -> ErrorCode:
        member_id = leaving.member_id
        if member_id == model.NO_MEMBER_ID:
            # An operator removes an instance, whoever it is at the moment.
            known = self.membership.static.get(leaving.group_instance_id or "")
            if leaving.group_instance_id is None or known is None:
                return ErrorCode.unknown_member_id
            member_id = known
        elif self.membership.forget_pending(member_id):
            return ErrorCode.none
        try:
            member = self.membership.find(member_id, leaving.group_instance_id)
        except ApiError as error:
            return error.code
        self._dismiss(member)
        return ErrorCode.none

    # Committed offsets

    def check_offset_commit(
        self, commit: model.CommitRequest | model.TransactionalCommit, now: Now
    ) -> model.PartitionCheck | None:
        is_transactional = isinstance(commit, model.TransactionalCommit)
        if commit.generation < 0 and self._state is ClassicState.EMPTY:
            return None
        if commit.generation >= 0 or commit.member_id or commit.group_instance_id is not None:
            member = self.membership.find(commit.member_id, commit.group_instance_id)
            if commit.generation != self.generation:
                raise ApiError(ErrorCode.illegal_generation)
            if not is_transactional:
                if self._state is ClassicState.COMPLETING:
                    raise ApiError(ErrorCode.rebalance_in_progress)
                self._sessions.expect(member, member.session_timeout_ms, now)
        elif not is_transactional:
            raise ApiError(ErrorCode.unknown_member_id, "the group has members, and this is none of them")
        return None

    def check_offset_fetch(self, member_id: str | None, member_epoch: int) -> None:
        """Anybody may read the committed offsets of a classic group."""

    def check_offset_delete(self) -> None:
        if self._state is not ClassicState.EMPTY and not self.is_of_consumers:
            raise ApiError(ErrorCode.non_empty_group)

    def expiry_base_ms(self, commit_ms: int) -> int | None:
        if self._protocol_type is None:
            return commit_ms
        if self._state is ClassicState.EMPTY:
            return commit_ms if self.state_since_ms is None else self.state_since_ms
        if self._state is ClassicState.STABLE and self.is_of_consumers and self._topics is not None:
            return commit_ms
        return None

    def _read_topics(self) -> frozenset[str] | None:
        return self.membership.subscribed_topics(self.protocol_name) if self.is_of_consumers else None

    # Life

    def check_delete(self) -> None:
        if self._state is not ClassicState.EMPTY:
            raise ApiError(ErrorCode.non_empty_group)

    def tombstones(self) -> model.Records:
        return [group_tombstone(self.group_id)]

    def restore(
        self,
        generation: int,
        protocol_type: str | None,
        protocol_name: str | None,
        leader: str | None,
        state_since_ms: int | None,
        members: Iterable[ClassicMember],
    ) -> None:
        """Take over a recorded or converted state: Stable with these members, or Empty without."""
        self.generation = generation
        self._protocol_type = protocol_type
        self.protocol_name = protocol_name
        self.state_since_ms = state_since_ms
        for member in members:
            self.membership.add(member)
        if leader in self.members:
            self.membership.leader = leader
        self._state = ClassicState.STABLE if self.members else ClassicState.EMPTY
        self._topics = self._read_topics()

    def begin_rebalance(self, now: Now) -> None:
        """Have everybody join again, because what they agreed on does not hold any more."""
        if ClassicState.PREPARING in TRANSITIONS[self._state] and self.members:
            self._prepare(now)

    def loaded(self, now: Now) -> None:
        for member in self.membership:
            session_ms = self._context.first_session_ms(
                self.group_id, member.member_id, member.session_timeout_ms
            )
            self._sessions.expect(member, session_ms, now)
        if self.is_unsettled or len(self.members) > self._context.settings().group_max_size:
            self.begin_rebalance(now)

    def unload(self) -> None:
        self._gathering.end()
        self._syncs.end()
        for member_id in list(self.membership.pending):
            self.membership.forget_pending(member_id)
        for member in self.membership:
            self.membership.answer_join(member, model.JoinReply(ErrorCode.not_coordinator, member.member_id))
            self.membership.answer_sync(member, model.SyncReply(ErrorCode.not_coordinator))
            if member.timer is not None:
                member.timer.cancel()
                member.timer = None
        self._state = ClassicState.DEAD

    def _move_to(self, state: ClassicState, now: Now) -> None:
        assert state in TRANSITIONS[self._state], f"{self._state} to {state}"
        self._came_from, self._state = self._state, state
        self.state_since_ms = now.wall_ms


def _differ(said: str | None, known: str | None) -> bool:
    return said is not None and known is not None and said != known
