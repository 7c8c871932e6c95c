"""What follows from one request to a group of the consumer protocol, worked out before any of it counts.

Three epochs keep a group together. The *group's* rises when somebody's subscription, or the topics subscribed to,
have changed: the target must be computed anew. The *target's* is the group's epoch it was computed for; computing is
put off until `consumer.assignment.interval.ms` after the last time, so that many members coming at once cost few
computations. A *member's* is that of the target it has caught up with. A turn goes down that chain: the member, the
subscriptions, the group's epoch, the target, the member's next step; each adds the changes that record it.

Nothing here changes a group: a turn reads its state and ends in a list of changes to append and apply, or an error.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple
from uuid import UUID

from holdfast.broker.groups.assignors import ASSIGNORS, NOTHING, Assignment, Subscriber
from holdfast.broker.groups.consumer_member import (
    NEWCOMER,
    STRANGER,
    CurrentAssignment,
    Owned,
    Profile,
    Step,
    TargetAssignment,
    reconcile,
    returned,
)
from holdfast.broker.groups.consumer_state import (
    Change,
    ConsumerMember,
    ConsumerState,
    Counter,
    current_assignment_change,
    epoch_change,
    legacy_metadata_tombstone,
    member_tombstones,
    profile_change,
    resolution_change,
    resolution_tombstone,
    target_change,
    target_epoch_change,
)
from holdfast.broker.groups.model import Topics
from holdfast.broker.groups.regex import Resolution
from holdfast.seams import Now


class Requester(NamedTuple):
    """Who a request speaks for: a member, somebody new, or a static member that is back under another id."""

    member_id: str
    profile: Profile = STRANGER
    current: CurrentAssignment = NEWCOMER
    replaces: ConsumerMember | None = None

    @classmethod
    def of(cls, member: ConsumerMember) -> Requester:
        return cls(member.member_id, member.profile, member.current)

    @classmethod
    def instead_of(cls, member: ConsumerMember, member_id: str) -> Requester:
        return cls(member_id, member.profile, returned(member.current), member)


@dataclass(frozen=True, slots=True)
class Circumstances:
    """What a turn depends on besides the group and the request."""

    topics: Topics
    topics_version: int
    """Rises with every change of any topic."""
    may_have_changed: bool
    """Some topic has changed since the group last looked at its own."""
    assignment_interval_ms: int
    assignors: tuple[str, ...]
    """By name, the default first."""
    resolves_again: bool
    """Expressions are due to be looked up again."""
    now: Now


class RequestOutcome(NamedTuple):
    changes: list[Change]
    profile: Profile
    current: CurrentAssignment


class Subscriptions:
    """What members subscribe to after a turn."""

    def __init__(self, names: Counter, resolutions: Mapping[str, Resolution], topics: Topics) -> None:
        self._names = names
        self._resolutions = resolutions
        self._topics = topics
        self._ids: dict[tuple[tuple[str, ...], str | None], frozenset[UUID]] = {}

    def metadata_hash(self) -> int:
        """Stands for the topics subscribed to, as they are; 0 when none of them exists."""
        names = set(self._names).union(*(resolution.topics for resolution in self._resolutions.values()))
        digest = blake2b(digest_size=8)
        found = False
        for name in sorted(names):
            facts = self._topics.by_name(name)
            if facts is not None:
                found = True
                racks = ";".join(",".join(sorted(each)) for each in facts.racks)
                digest.update(f"{name}/{facts.topic_id}/{facts.partitions}/{racks}\n".encode())
        return int.from_bytes(digest.digest(), "big", signed=True) if found else 0

    def ids_of(self, profile: Profile) -> frozenset[UUID]:
        """The topics a member subscribes to that exist; one object for all members that subscribe alike."""
        ids = self._ids.get(profile.subscription)
        if ids is None:
            names: Iterable[str] = profile.topic_names
            resolution = self._resolutions.get(profile.topic_regex or "")
            if resolution is not None:
                names = resolution.topics.union(names)
            found = (self._topics.by_name(name) for name in names)
            ids = frozenset(facts.topic_id for facts in found if facts is not None)
            self._ids[profile.subscription] = ids
        return ids


class Turn:
    """One member's request; `take` says what follows from it."""

    def __init__(self, state: ConsumerState, requester: Requester, circumstances: Circumstances) -> None:
        self._state = state
        self._requester = requester
        self._context = circumstances
        self._changes: list[Change] = []

    def take(self, profile: Profile, owned: Owned | None) -> RequestOutcome:
        requester, state = self._requester, self._state
        self._change_profile(profile)
        subscriptions, resolved_anew = self._subscriptions(profile)
        is_new_subscription = profile.subscription != requester.profile.subscription
        epoch = self._raise_epoch(subscriptions, is_needed=is_new_subscription or resolved_anew)
        target = self._target(epoch, profile, subscriptions)
        subscribed = subscriptions.ids_of(profile)
        # A topic it holds may be gone, or have never been: a crash can take back what its target was made from.
        has_strange_topics = not requester.current.assigned.keys() <= subscribed
        current = reconcile_unless_done(
            requester.current,
            Step(
                target,
                owned,
                subscribed,
                self._has_other_owner,
                is_new_subscription or has_strange_topics,
            ),
        )
        if current is not requester.current or requester.replaces is not None:
            self._changes.append(current_assignment_change(state.group_id, requester.member_id, current))
        return RequestOutcome(self._changes, profile, current)

    def _change_profile(self, profile: Profile) -> None:
        requester, group_id = self._requester, self._state.group_id
        if requester.replaces is not None:
            self._changes += member_tombstones(group_id, requester.replaces.member_id)
        elif profile == requester.profile:
            return
        self._changes.append(profile_change(group_id, requester.member_id, profile))
        if requester.replaces is not None:
            inherited = self._state.target_of(requester.replaces.member_id)
            self._changes.append(target_change(group_id, requester.member_id, inherited))

    def _has_other_owner(self, topic_id: UUID, partition: int) -> bool:
        owner = self._state.owner_of(topic_id, partition)
        if owner is None or owner == self._requester.member_id:
            return False
        return self._requester.replaces is None or owner != self._requester.replaces.member_id

    # Subscriptions

    def _subscriptions(self, profile: Profile) -> tuple[Subscriptions, bool]:
        """After the request; and whether an expression stands for other topics than before."""
        state, before = self._state, self._requester.profile
        names = state.names
        if profile.topic_names != before.topic_names:
            names = Counter(names)
            names.count(before.topic_names, -1)
            names.count(profile.topic_names, 1)
        resolutions, changed = self._resolve(self._expressions(profile))
        return Subscriptions(names, resolutions, self._context.topics), changed

    def _expressions(self, profile: Profile) -> Counter:
        before, after = self._requester.profile.topic_regex, profile.topic_regex
        if before == after:
            return self._state.expressions
        expressions = Counter(self._state.expressions)
        expressions.count(() if before is None else (before,), -1)
        expressions.count(() if after is None else (after,), 1)
        return expressions

    def _resolve(self, expressions: Counter) -> tuple[Mapping[str, Resolution], bool]:
        state, context = self._state, self._context
        known = state.resolutions
        if not context.resolves_again and expressions.keys() == known.keys():
            return known, False
        resolutions, changed = {}, False
        for expression in expressions:
            before = known.get(expression)
            if before is not None and not context.resolves_again:
                resolutions[expression] = before
                continue
            topics = context.topics.matching(expression)
            if before is not None and before.topics == topics:
                resolutions[expression] = before
                continue
            found = Resolution(topics, context.topics_version, context.now.wall_ms)
            resolutions[expression] = found
            self._changes.append(resolution_change(state.group_id, expression, found))
            changed = True
        gone = [expression for expression in known if expression not in expressions]
        self._changes += [resolution_tombstone(state.group_id, expression) for expression in gone]
        return resolutions, changed

    # Epoch and target

    def _raise_epoch(self, subscriptions: Subscriptions, *, is_needed: bool) -> int:
        state = self._state
        if not is_needed and not self._context.may_have_changed:
            return state.epoch
        metadata_hash = subscriptions.metadata_hash()
        if not is_needed and metadata_hash == state.metadata_hash:
            return state.epoch
        self._changes.append(epoch_change(state.group_id, state.epoch + 1, metadata_hash))
        if state.has_legacy_metadata:
            self._changes.append(legacy_metadata_tombstone(state.group_id))
        return state.epoch + 1

    def _target(self, epoch: int, profile: Profile, subscriptions: Subscriptions) -> TargetAssignment:
        state, requester = self._state, self._requester
        if epoch <= state.assignment_epoch or not self._may_assign():
            known_as = requester.member_id if requester.replaces is None else requester.replaces.member_id
            return TargetAssignment(state.assignment_epoch, state.target_of(known_as))
        members = {
            member_id: Subscriber(
                subscriptions.ids_of(member.profile), state.target_of(member_id), member.profile.instance_id
            )
            for member_id, member in state.members.items()
            if member is not requester.replaces
        }
        inherited = state.target_of(
            requester.member_id if requester.replaces is None else requester.replaces.member_id
        )
        members[requester.member_id] = Subscriber(
            subscriptions.ids_of(profile), inherited, profile.instance_id
        )
        targets = ASSIGNORS[self._assignor(profile)](members, self._partition_counts(members))
        for member_id, target in targets.items():
            before = members[member_id].target
            if target is not before and target != before:
                self._changes.append(target_change(state.group_id, member_id, target))
        self._changes.append(target_epoch_change(state.group_id, epoch, self._context.now.wall_ms))
        return TargetAssignment(epoch, targets.get(requester.member_id, NOTHING))

    def _may_assign(self) -> bool:
        return may_assign(self._state, self._context.assignment_interval_ms, self._context.now)

    def _assignor(self, profile: Profile) -> str:
        """What most members ask for; the default when nobody does."""
        wanted = Counter(self._state.assignors)
        for name, by in ((self._requester.profile.server_assignor, -1), (profile.server_assignor, 1)):
            if name is not None:
                wanted.count((name,), by)
        return preferred_assignor(wanted, self._context.assignors)

    def _partition_counts(self, members: Mapping[str, Subscriber]) -> dict[UUID, int]:
        counts: dict[UUID, int] = {}
        # Members that subscribe alike share one object.
        for topics in {id(member.topics): member.topics for member in members.values()}.values():
            for topic_id in topics:
                facts = self._context.topics.by_id(topic_id)
                if facts is not None:
                    counts[topic_id] = facts.partitions
        return counts


def may_assign(state: ConsumerState, interval_ms: int, now: Now) -> bool:
    """Whether it is long enough ago that the target was computed."""
    # A clock that was set back must not stop a group from being assigned anything.
    return not state.assigned_at_ms <= now.wall_ms < state.assigned_at_ms + interval_ms


def topics_followed(state: ConsumerState, topics: Topics) -> list[Change]:
    """What changed topics mean for a group when no member has anything to say."""
    metadata_hash = Subscriptions(state.names, state.resolutions, topics).metadata_hash()
    if metadata_hash == state.metadata_hash:
        return []
    return [epoch_change(state.group_id, state.epoch + 1, metadata_hash)]


def preferred_assignor(wanted: Mapping[str, int], assignors: tuple[str, ...]) -> str:
    known = {name: count for name, count in wanted.items() if name in assignors}
    return max(sorted(known), key=lambda name: known[name]) if known else assignors[0]


def reconcile_unless_done(held: CurrentAssignment, step: Step) -> CurrentAssignment:
    if held.is_at(step.target.epoch) and not step.drops_unsubscribed:
        return held
    return reconcile(held, step)


def departure(state: ConsumerState, gone: Iterable[ConsumerMember], topics: Topics) -> list[Change]:
    """Members go: what they held is free, and the rest of the group shall get it."""
    changes: list[Change] = []
    names, expressions = Counter(state.names), Counter(state.expressions)
    for member in gone:
        changes += member_tombstones(state.group_id, member.member_id)
        names.count(member.profile.topic_names, -1)
        if member.profile.topic_regex is not None:
            expressions.count((member.profile.topic_regex,), -1)
    resolutions = {name: found for name, found in state.resolutions.items() if name in expressions}
    changes += [
        resolution_tombstone(state.group_id, name) for name in state.resolutions if name not in resolutions
    ]
    metadata_hash = Subscriptions(names, resolutions, topics).metadata_hash()
    changes.append(epoch_change(state.group_id, state.epoch + 1, metadata_hash))
    return changes


def usable(current: CurrentAssignment) -> Assignment:
    """What a member may use."""
    return {topic_id: frozenset(partitions) for topic_id, partitions in current.assigned.items()}
