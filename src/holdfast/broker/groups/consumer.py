"""The consumer protocol (KIP-848): one request, by which members join, stay, are told what to do, and leave.

`ConsumerGroups` are the groups of that protocol of one coordinator. A heartbeat that brings nothing new, of a member
that has caught up with its group, is the common case and costs a few comparisons and one assignment: no timer is
moved, nothing is computed, nothing is appended. Everything else is a `Turn`.

Rules kept:

- A request is checked whole before anything is decided; what is decided is appended before it counts (`commit`). -
A member lives as long as its session, which every heartbeat begins anew. Its timer fires at a deadline that may
have moved, looks, and is set again. - A member that must give partitions up has its rebalance time-out for that,
and is out when it has not. - When topics change, each group looks at its own at its next heartbeat; nobody iterates
over groups.
"""

from __future__ import annotations

from base64 import urlsafe_b64encode
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import migration, regex
from holdfast.broker.groups.assignors import ASSIGNORS, Assignment
from holdfast.broker.groups.consumer_group import ConsumerGroup, Timing
from holdfast.broker.groups.consumer_member import (
    JOIN_EPOCH,
    LEAVE_EPOCH,
    NO_TIMEOUT_MS,
    STATIC_LEAVE_EPOCH,
    ConsumerDescription,
    ConsumerHeartbeat,
    ConsumerReply,
    MemberState,
    Profile,
    away,
    is_within,
)
from holdfast.broker.groups.consumer_state import Change, ConsumerMember, current_assignment_change, encoded
from holdfast.broker.groups.consumer_turn import (
    Circumstances,
    Requester,
    Turn,
    departure,
    may_assign,
    topics_followed,
    usable,
)
from holdfast.broker.groups.model import MEMBER_ID_BYTES_ADDED, Group, Records, Registry, has_room
from holdfast.errors import ApiError
from holdfast.saying import warn
from holdfast.seams import Now
from holdfast.wire.coordinator_records import ConsumerGroupMetadataKey, CoordinatorRecord

RETRY_MS: Final = 1_000
"""How long a member that could not be taken out, because the log refused, is left alone."""
BATCH_BYTES: Final = 512 * 1024
"""What is appended at once, and a record more: well below what a partition takes as one batch by default."""
ASSIGNOR_CLASSES: Final = {
    "org.apache.kafka.coordinator.group.assignor.UniformAssignor": "uniform",
    "org.apache.kafka.coordinator.group.assignor.RangeAssignor": "range",
}
"""What `group.consumer.assignors` may call the assignors as well."""


class Arrival(NamedTuple):
    """The group somebody joins."""

    group: ConsumerGroup
    records: Records = []  # noqa: RUF012 - never changed
    """What its past as a classic group leaves to be recorded."""
    successor_of: Group | None = None


class ConsumerGroups:
    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self.context = registry.context
        self.classic = migration.ClassicMembers(self)
        self._topics_version = 0

    # The protocol

    def heartbeat(self, request: ConsumerHeartbeat, now: Now) -> ConsumerReply:
        """The answer, or the `ApiError` to answer with."""
        group = self._registry.groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            member = group.members.get(request.member_id)
            if member is not None and self._is_keep_alive(group, member, request, now):
                timing = self.timing(group)
                self.begin_session(group, member, timing.session_timeout_ms, now)
                return ConsumerReply(
                    request.member_id,
                    request.member_epoch,
                    timing.heartbeat_interval_ms,
                    self._tell(member, request, timing, now, is_news=False),
                )
        check_request(request, self.assignors)
        if request.member_epoch < 0:
            return self._leave(request, now)
        return self._beat(request, now)

    def _is_keep_alive(
        self, group: ConsumerGroup, member: ConsumerMember, request: ConsumerHeartbeat, now: Now
    ) -> bool:
        """Nothing has happened since the last heartbeat, on either side."""
        current, profile = member.current, member.profile
        return (
            request.member_epoch == current.epoch == group.assignment_epoch == group.epoch
            and request.topic_names is None
            and request.topic_regex is None
            and request.rebalance_timeout_ms == NO_TIMEOUT_MS
            and request.server_assignor is None
            and request.rack_id is None
            and current.state is MemberState.STABLE
            and group.seen_topics_version == self._topics_version
            and request.client_host == profile.client_host
            and request.client_id == profile.client_id
            and profile.classic is None
            and (request.instance_id is None or request.instance_id == profile.instance_id)
            and (not group.expressions or now.monotonic_ms < group.resolve_again_ms)
        )

    def _beat(self, request: ConsumerHeartbeat, now: Now) -> ConsumerReply:
        arrival = self._group_for(request)
        group = arrival.group
        if len(group.members) >= self.context.settings().group_consumer_max_size:
            self._refuse_more(group, request.member_id)
        requester = self._requester(group, request)
        profile = _updated(requester.profile, request)
        if profile.topic_regex is not None and profile.topic_regex not in group.expressions:
            regex.check(profile.topic_regex)
        outcome = Turn(group, requester, self.circumstances(group, now)).take(profile, request.owned)
        try:
            self.commit(group, outcome.changes, now, before=arrival.records)
        finally:
            if arrival.successor_of is not None and self._registry.groups.get(group.group_id) is group:
                self._succeed(arrival.successor_of, group, now)
        self.looked_at_topics(group, now)
        member = group.members[requester.member_id]
        timing = self.timing(group)
        self.begin_session(group, member, timing.session_timeout_ms, now)
        if outcome.current is not requester.current:
            self._limit_revocation(group, member, now)
        is_news = (
            request.member_epoch == JOIN_EPOCH
            or _is_full(request)
            or outcome.current.assigned != requester.current.assigned
            # It has not got the answer with its epoch, nor what else was in it.
            or request.member_epoch < requester.current.epoch
        )
        return ConsumerReply(
            requester.member_id,
            outcome.current.epoch,
            timing.heartbeat_interval_ms,
            self._tell(member, request, timing, now, is_news=is_news),
        )

    @staticmethod
    def _tell(
        member: ConsumerMember, request: ConsumerHeartbeat, timing: Timing, now: Now, *, is_news: bool
    ) -> Assignment | None:
        """What a member is to hold, when it is news, or when it has said nothing of it for long."""
        if request.owned is not None:
            member.answered()
        if not is_news and not member.is_to_be_told_again(now.monotonic_ms):
            return None
        if member.current.assigned or member.current.revoking:
            member.told(now.monotonic_ms, timing.heartbeat_interval_ms)
        return usable(member.current)

    def _group_for(self, request: ConsumerHeartbeat) -> Arrival:
        group = self._registry.groups.get(request.group_id)
        if isinstance(group, ConsumerGroup):
            return Arrival(group)
        if request.member_epoch != JOIN_EPOCH:
            raise _not_found(request.group_id, group)
        if group is None:
            return Arrival(ConsumerGroup(request.group_id, self))
        if group.is_empty:
            return Arrival(ConsumerGroup(request.group_id, self), group.tombstones(), group)
        upgraded, changes = migration.upgraded(self, group)
        return Arrival(upgraded, [*group.tombstones(), *encoded(changes)], group)

    def _refuse_more(self, group: ConsumerGroup, member_id: str) -> None:
        if member_id not in group.members:
            raise ApiError(
                ErrorCode.group_max_size_reached,
                f"group {group.group_id!r} has its {len(group.members)} members and takes no more",
            )

    def _requester(self, group: ConsumerGroup, request: ConsumerHeartbeat) -> Requester:
        if request.instance_id is not None:
            return self._static_requester(group, request, request.instance_id)
        member = group.members.get(request.member_id)
        if member is not None:
            _check_epoch(member, request)
            return Requester.of(member)
        if request.member_epoch != JOIN_EPOCH:
            group.find(request.member_id)
        return Requester(request.member_id or self.new_member_id())

    def _static_requester(
        self, group: ConsumerGroup, request: ConsumerHeartbeat, instance_id: str
    ) -> Requester:
        if request.member_epoch != JOIN_EPOCH:
            member = group.find_static(request.member_id, instance_id)
            _check_epoch(member, request)
            return Requester.of(member)
        known = group.member_of_instance(instance_id)
        member_id = request.member_id or self.new_member_id()
        if known is None:
            joined = group.members.get(member_id)
            return Requester(member_id) if joined is None else Requester.of(joined)
        if known.current.epoch != STATIC_LEAVE_EPOCH and not known.is_classic:
            raise ApiError(
                ErrorCode.unreleased_instance_id,
                f"{instance_id!r} is {known.member_id!r}, which has not left",
            )
        return Requester.of(known) if known.member_id == member_id else Requester.instead_of(known, member_id)

    def _leave(self, request: ConsumerHeartbeat, now: Now) -> ConsumerReply:
        group = self._registry.groups.get(request.group_id)
        if not isinstance(group, ConsumerGroup):
            raise _not_found(request.group_id, group)
        if request.instance_id is None:
            member = group.find(request.member_id)
        else:
            member = group.find_static(request.member_id, request.instance_id)
        if request.instance_id is not None and request.member_epoch == STATIC_LEAVE_EPOCH:
            change = current_assignment_change(group.group_id, member.member_id, away(member.current))
            self.commit(group, [change], now)
        else:
            self.remove(group, [member], now)
        return ConsumerReply(request.member_id, request.member_epoch, 0)

    # Looking

    def find(self, group_id: str) -> ConsumerGroup:
        group = self._registry.groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            raise _not_found(group_id, group)
        return group

    def describe(self, group_id: str) -> ConsumerDescription:
        return self.find(group_id).describe(self.context.topics, self.assignors)

    @property
    def assignors(self) -> tuple[str, ...]:
        named = (
            ASSIGNOR_CLASSES.get(name, name) for name in self.context.settings().group_consumer_assignors
        )
        return tuple(name for name in named if name in ASSIGNORS) or tuple(ASSIGNORS)

    def timing(self, group: ConsumerGroup) -> Timing:
        """The settings of this moment. Both sources are replaced whole when something in them changes."""
        settings, overrides = self.context.settings(), self.context.overrides(group.group_id)
        if group.timing_source[0] is not settings or group.timing_source[1] is not overrides:

            def bounded(quantity: str, default: int, least: int, most: int) -> int:
                """An operator's value outside of bounds that have become narrower since is taken as the bound."""
                text = overrides.get(f"consumer.{quantity}")
                return default if text is None else min(max(int(text), least), most)

            group.timing = Timing(
                bounded(
                    "session.timeout.ms",
                    settings.group_consumer_session_timeout_ms,
                    settings.group_consumer_min_session_timeout_ms,
                    settings.group_consumer_max_session_timeout_ms,
                ),
                bounded(
                    "heartbeat.interval.ms",
                    settings.group_consumer_heartbeat_interval_ms,
                    settings.group_consumer_min_heartbeat_interval_ms,
                    settings.group_consumer_max_heartbeat_interval_ms,
                ),
                int(
                    overrides.get(
                        "consumer.assignment.interval.ms", settings.group_consumer_assignment_interval_ms
                    )
                ),
            )
            group.timing_source = (settings, overrides)
        return group.timing

    def is_target_due(self, group: ConsumerGroup, now: Now) -> bool:
        """The target is not that of the group's epoch, and whoever speaks next computes it."""
        return group.epoch > group.assignment_epoch and may_assign(
            group, self.timing(group).assignment_interval_ms, now
        )

    def circumstances(self, group: ConsumerGroup, now: Now) -> Circumstances:
        has_changed = group.seen_topics_version != self._topics_version
        return Circumstances(
            self.context.topics,
            self._topics_version,
            has_changed,
            self.timing(group).assignment_interval_ms,
            self.assignors,
            has_changed or now.monotonic_ms >= group.resolve_again_ms,
            now,
        )

    # Changing

    def commit(
        self, group: ConsumerGroup, changes: Iterable[Change], now: Now, *, before: Records | None = None
    ) -> None:
        """Append changes and make them count; a group that is new takes the place of what `before` ends.

        What does not fit into one batch is appended, and counts, in parts. Any part of it is a good state: a target
        has its epoch after it, and nobody is given what another has not let go of, whatever its target says.
        """
        for part in _parts(list(changes), before or []):
            try:
                self.context.journal.append(part.records, now)
            except ApiError:
                self._watch_newcomers(group, now)
                raise
            if self._registry.groups.get(group.group_id) is not group:
                self._registry.put(group)
            for change in part.changes:
                group.apply(change)

    def looked_at_topics(self, group: ConsumerGroup, now: Now) -> None:
        if group.seen_topics_version != self._topics_version or now.monotonic_ms >= group.resolve_again_ms:
            group.seen_topics_version = self._topics_version
            interval_ms = self.context.settings().group_consumer_regex_refresh_interval_ms
            group.resolve_again_ms = now.monotonic_ms + interval_ms

    def follow_topics(self, group: ConsumerGroup, now: Now) -> None:
        """See to the topics of a group none of whose members may be of the consumer protocol."""
        if group.seen_topics_version != self._topics_version and not group.expressions:
            self.commit(group, topics_followed(group, self.context.topics), now)
            self.looked_at_topics(group, now)

    def remove(self, group: ConsumerGroup, members: list[ConsumerMember], now: Now) -> None:
        """Members go, or are put out. If only members of the classic protocol stay, so does a classic group."""
        if migration.can_downgrade(self, group, gone=members):
            migration.downgrade(self, group, members, now)
            return
        self.commit(group, departure(group, members, self.context.topics), now)

    def topics_changed(self, names: Iterable[str], now: Now) -> None:
        self._topics_version += 1

    def put(self, group: Group) -> None:
        self._registry.put(group)

    def replay(self, key: CoordinatorRecord, value: CoordinatorRecord | None) -> None:
        """A stored record of one of our groups."""
        group_id: str = getattr(key, "group_id")  # noqa: B009 - all keys of these groups have it
        group = self._registry.groups.get(group_id)
        if not isinstance(group, ConsumerGroup):
            if value is None:
                return
            group = ConsumerGroup(group_id, self)
            self._registry.put(group)
        if isinstance(key, ConsumerGroupMetadataKey) and value is None:
            self._registry.drop(group_id)
            return
        group.apply((key, value))

    def resume(self, group: ConsumerGroup, now: Now) -> None:
        """After a start everybody has a session, and the whole time to give up what it was told to."""
        for member_id, member in group.members.items():
            timeout_ms = self._session_timeout_ms(group, member)
            session_ms = self.context.first_session_ms(group.group_id, member_id, timeout_ms)
            self.begin_session(group, member, session_ms, now)
            self._limit_revocation(group, member, now)

    def _watch_newcomers(self, group: ConsumerGroup, now: Now) -> None:
        """Who came with a part of what was to be appended, and was told that it did not, may never come again."""
        if self._registry.groups.get(group.group_id) is group:
            for member in group.members.values():
                if not member.deadline_ms:
                    self.begin_session(group, member, self._session_timeout_ms(group, member), now)

    def _session_timeout_ms(self, group: ConsumerGroup, member: ConsumerMember) -> int:
        classic = member.profile.classic
        return self.timing(group).session_timeout_ms if classic is None else classic.session_timeout_ms

    def _succeed(self, classic: Group, group: ConsumerGroup, now: Now) -> None:
        """A classic group has become one of ours."""
        migration.release_waiting(classic)
        self.resume(group, now)

    # Time

    def begin_session(self, group: ConsumerGroup, member: ConsumerMember, timeout_ms: int, now: Now) -> None:
        member.deadline_ms = deadline_ms = now.monotonic_ms + timeout_ms
        if member.session_timer is None or deadline_ms < member.session_timer_ms:
            member.cancel("session_timer")
            self._watch_session(group, member, deadline_ms)

    def _watch_session(self, group: ConsumerGroup, member: ConsumerMember, at_ms: int) -> None:
        def look(now: Now) -> None:
            member.session_timer = None
            if group.members.get(member.member_id) is not member:
                return
            has_ended = now.monotonic_ms >= member.deadline_ms
            # Set first, so that a defect in what follows cannot keep a dead member for ever.
            self._watch_session(
                group, member, now.monotonic_ms + RETRY_MS if has_ended else member.deadline_ms
            )
            if has_ended:
                self.expel(group, member, now, "its session has ended")

        member.session_timer = self.context.schedule.at(at_ms, look)
        member.session_timer_ms = at_ms

    def _limit_revocation(self, group: ConsumerGroup, member: ConsumerMember, now: Now) -> None:
        """A member of the classic protocol has time-outs of its own for this."""
        if member.current.must_give_up and not member.is_classic:
            self.limit(group, member, "rebalance_timer", "it has not given up its partitions in time", now)

    def limit(self, group: ConsumerGroup, member: ConsumerMember, timer: str, reason: str, now: Now) -> None:
        """Put a member out after its rebalance time-out unless the timer is cancelled by then."""

        def expel(now: Now) -> None:
            setattr(member, timer, None)
            if group.members.get(member.member_id) is member:
                setattr(member, timer, self.context.schedule.at(now.monotonic_ms + RETRY_MS, expel))
                self.expel(group, member, now, reason)

        member.cancel(timer)
        due_ms = now.monotonic_ms + max(member.profile.rebalance_timeout_ms, 0)
        setattr(member, timer, self.context.schedule.at(due_ms, expel))

    def expel(self, group: ConsumerGroup, member: ConsumerMember, now: Now, reason: str) -> None:
        """Take a member out; the log may refuse."""
        try:
            self.remove(group, [member], now)
        except ApiError as refused:
            text = f"group {group.group_id!r}: {member.member_id!r} must go ({reason}), but {refused}: will try again"
            self.context.say(warn(text, kind="expelled member"))

    def new_member_id(self) -> str:
        """22 characters; none that a command line would take for a flag."""
        while True:
            name = urlsafe_b64encode(self.context.randomness.uuid_bytes()).decode().rstrip("=")
            if not name.startswith("-"):
                return name


class _Part(NamedTuple):
    records: Records
    changes: list[Change]


def _parts(changes: list[Change], before: Records) -> list[_Part]:
    """Changes as records, in parts of about `BATCH_BYTES`; with nothing to append, none."""
    parts: list[_Part] = []
    room = 0
    for change, record in zip(changes, encoded(changes), strict=True):
        if room <= 0:
            parts.append(_Part([] if parts else list(before), []))
            room = BATCH_BYTES
        parts[-1].records.append(record)
        parts[-1].changes.append(change)
        room -= len(record[0]) + len(record[1] or b"")
    return parts


def check_request(request: ConsumerHeartbeat, assignors: tuple[str, ...]) -> None:
    """What a request must be like, whoever sends it."""
    epoch = request.member_epoch
    if request.api_version >= 1 or epoch > 0 or epoch == LEAVE_EPOCH:
        _require(request.member_id.strip(), "the member id is empty")
    _require(request.group_id.strip(), "the group id is empty")
    _require(request.instance_id is None or request.instance_id.strip(), "the instance id is empty")
    _require(request.rack_id is None or request.rack_id.strip(), "the rack id is empty")
    _require(
        all(map(has_room, (request.group_id, request.member_id, request.topic_regex)))
        and has_room(request.instance_id, added=MEMBER_ID_BYTES_ADDED),
        "a name that no record has room for",
    )
    if epoch == JOIN_EPOCH:
        _require(request.rebalance_timeout_ms != NO_TIMEOUT_MS, "a member joins with its rebalance time-out")
        _require(
            request.owned is not None and not request.owned, "a member joins with an empty list of partitions"
        )
        _require(
            request.topic_names is not None or request.topic_regex is not None,
            "a member joins with the topics it subscribes to, by name or by expression",
        )
    elif epoch == STATIC_LEAVE_EPOCH:
        _require(request.instance_id is not None, "only a static member, with its instance id, can be back")
    else:
        _require(epoch > STATIC_LEAVE_EPOCH, f"{epoch} is no member epoch")
    if request.server_assignor is not None and request.server_assignor not in assignors:
        raise ApiError(
            ErrorCode.unsupported_assignor,
            f"there is no assignor {request.server_assignor!r}, but {', '.join(assignors)}",
        )


def _require(condition: object, message: str) -> None:
    if not condition:
        raise ApiError(ErrorCode.invalid_request, message)


def _check_epoch(member: ConsumerMember, request: ConsumerHeartbeat) -> None:
    """A member that lags by one answer, and has nothing that is not its own, is taken along; others are fenced."""
    epoch, known = request.member_epoch, member.current
    if epoch in (JOIN_EPOCH, known.epoch):
        return
    if epoch < known.epoch and epoch == known.previous_epoch and is_within(request.owned, known.assigned):
        return
    raise ApiError(
        ErrorCode.fenced_member_epoch,
        f"{member.member_id!r} says epoch {epoch} where it has {known.epoch}: "
        "it must give up all partitions and join again",
    )


def _updated(profile: Profile, request: ConsumerHeartbeat) -> Profile:
    """A member's word on itself; what it does not mention has not changed."""
    names, expression = request.topic_names, request.topic_regex
    timeout_ms = request.rebalance_timeout_ms
    return replace(
        profile,
        instance_id=profile.instance_id if request.instance_id is None else request.instance_id,
        rack_id=profile.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topic_names=profile.topic_names if names is None else tuple(sorted(set(names))),
        topic_regex=profile.topic_regex if expression is None else expression or None,
        rebalance_timeout_ms=profile.rebalance_timeout_ms if timeout_ms == NO_TIMEOUT_MS else timeout_ms,
        server_assignor=request.server_assignor or profile.server_assignor,
        classic=None,
    )


def _is_full(request: ConsumerHeartbeat) -> bool:
    """A member that has lost track says everything, and is told everything."""
    return (
        request.rebalance_timeout_ms != NO_TIMEOUT_MS
        and (request.topic_names is not None or request.topic_regex is not None)
        and request.owned is not None
    )


def _not_found(group_id: str, group: Group | None) -> ApiError:
    what = "does not exist" if group is None else "is no group of the consumer protocol"
    return ApiError(ErrorCode.group_id_not_found, f"group {group_id!r} {what}")
