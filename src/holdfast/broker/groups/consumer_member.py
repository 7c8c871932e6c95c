"""One member of a group of the consumer protocol: what it says of itself, what it holds, and its next step.

A group has a target: which partitions each member shall own. A member moves towards its target by itself, in steps
that its heartbeats drive, and at every step a partition has one owner at most:

- *stable*: it holds what its target says and has the target's epoch.
- *unrevoked*: it was told to give partitions up. It keeps its epoch, and still counts as the owner of those, until
  it reports what it owns and they are not among it.
- *unreleased*: it has the target's epoch and everything that was free; the rest is still held by others, and is
  given to it one by one as they let go.

A `CurrentAssignment` is a value: `reconcile` makes the next one and touches nothing. Each partition is held since
some epoch; a commit that a slow client sends with an older epoch of its own is good for what it has held since
then.

Below it stand what is said to a group of the consumer protocol and what it answers, and the way between the
partitions such a group gives out, by topic id, and what its classic members say and are told, which is by name and
inside JoinGroup and SyncGroup.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import IntEnum
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.assignors import NOTHING, Assignment
from holdfast.broker.groups.model import Topics
from holdfast.errors import ApiError
from holdfast.wire.consumer_protocol import ConsumerAssignment, OwnedPartitions, decode_subscription
from holdfast.wire.coordinator_records import ClassicMemberMetadata

JOIN_EPOCH: Final = 0
LEAVE_EPOCH: Final = -1
STATIC_LEAVE_EPOCH: Final = -2
"""A static member is away and will be back before its session ends: nothing is taken from it."""

Held: TypeAlias = Mapping[UUID, Mapping[int, int]]
"""Partitions by topic, each with the epoch it is held since; a topic without partitions has no entry."""
Owned: TypeAlias = Sequence[tuple[UUID, Sequence[int]]]
"""What a member reports to own."""

HOLDS_NOTHING: Final[Held] = {}


class MemberState(IntEnum):
    """Numbered as the records have it."""

    STABLE = 0
    UNREVOKED = 1
    UNRELEASED = 2
    UNKNOWN = 127
    """Written by a version that knew more states."""


@dataclass(frozen=True, slots=True)
class Profile:
    """What a member says of itself."""

    instance_id: str | None = None
    rack_id: str | None = None
    client_id: str = ""
    client_host: str = ""
    topic_names: tuple[str, ...] = ()
    """Sorted, each once."""
    topic_regex: str | None = None
    """None or not empty."""
    rebalance_timeout_ms: int = -1
    server_assignor: str | None = None
    classic: ClassicMemberMetadata | None = None
    """None for a member that speaks the consumer protocol."""

    @property
    def subscription(self) -> tuple[tuple[str, ...], str | None]:
        return self.topic_names, self.topic_regex


@dataclass(frozen=True, slots=True)
class CurrentAssignment:
    """What a member holds, and how far it has come."""

    epoch: int = JOIN_EPOCH
    previous_epoch: int = JOIN_EPOCH
    """What it may still send because the answer that raised its epoch got lost."""
    state: MemberState = MemberState.STABLE
    assigned: Held = field(default_factory=lambda: HOLDS_NOTHING)
    revoking: Held = field(default_factory=lambda: HOLDS_NOTHING)
    """Told to give up, and not known to have done so."""

    def is_at(self, target_epoch: int) -> bool:
        return self.state is MemberState.STABLE and self.epoch == target_epoch

    @property
    def must_give_up(self) -> bool:
        """Whether it is waited for; one that is away has nothing any more, and its session is waited for."""
        return self.state is MemberState.UNREVOKED and self.epoch != STATIC_LEAVE_EPOCH

    @property
    def everything(self) -> Held:
        """What it holds, and what it has not given up."""
        if not self.revoking:
            return self.assigned
        topics = {**self.assigned, **self.revoking}
        return {topic: {**self.assigned.get(topic, {}), **self.revoking.get(topic, {})} for topic in topics}

    def since(self, topic_id: UUID, partition: int) -> int | None:
        """The epoch it has held a partition since, None if it holds it not."""
        for held in (self.assigned, self.revoking):
            since = held.get(topic_id, {}).get(partition)
            if since is not None:
                return since
        return None


NEWCOMER: Final = CurrentAssignment()
STRANGER: Final = Profile()


class TargetAssignment(NamedTuple):
    epoch: int
    assignment: Assignment = NOTHING


class Step(NamedTuple):
    """What a member's next step depends on."""

    target: TargetAssignment
    owned: Owned | None
    """None when the member did not say."""
    subscribed: frozenset[UUID]
    """The topics it subscribes to that exist. Only these are given to it, whatever an older target says."""
    has_other_owner: Callable[[UUID, int], bool]
    drops_unsubscribed: bool = False
    """Partitions of topics it has left, or that are no more, are taken from it though the target has not caught
    up."""


def reconcile(held: CurrentAssignment, step: Step) -> CurrentAssignment:
    """The next holding; the same object when there is nothing to do or the member must act first."""
    match held.state:
        case MemberState.STABLE:
            if held.epoch != step.target.epoch:
                return _approach(held, step)
            return _drop_unsubscribed(held, step) if step.drops_unsubscribed else held
        case MemberState.UNREVOKED:
            if not _owns(step.owned, held.revoking):
                return _approach(held, step)
            return _drop_unsubscribed(held, step) if step.drops_unsubscribed else held
        case MemberState.UNRELEASED:
            return _approach(held, step)
        case _:
            if step.owned is None or any(partitions for _, partitions in step.owned):
                raise ApiError(
                    ErrorCode.fenced_member_epoch,
                    "the member's state is not known any more: it must give up all partitions and join again",
                )
            return _approach(held, step)


def is_within(owned: Owned | None, held: Held) -> bool:
    """Whether a member reports nothing that it was not given; false when it does not report."""
    if owned is None:
        return False
    return all(held.get(topic_id, {}).keys() >= set(partitions) for topic_id, partitions in owned)


def _approach(held: CurrentAssignment, step: Step) -> CurrentAssignment:
    """One step towards the target: give up first, then take what is free."""
    wanted = {topic: these for topic, these in step.target.assignment.items() if topic in step.subscribed}
    kept: dict[UUID, dict[int, int]] = {}
    revoking: dict[UUID, dict[int, int]] = {}
    for topic, partitions in held.assigned.items():
        target = wanted.get(topic, frozenset())
        for partition, since in partitions.items():
            (kept if partition in target else revoking).setdefault(topic, {})[partition] = since
    if revoking and _owns(step.owned, revoking):
        return _next(held, held.epoch, MemberState.UNREVOKED, kept, revoking)
    is_short = False
    for topic, target in wanted.items():
        for partition in sorted(target - held.assigned.get(topic, {}).keys()):
            # What it was told to give up, and what another gave up since, it may have again at once.
            if step.has_other_owner(topic, partition):
                is_short = True
            else:
                kept.setdefault(topic, {})[partition] = step.target.epoch
    state = MemberState.UNRELEASED if is_short else MemberState.STABLE
    return _next(held, step.target.epoch, state, kept, HOLDS_NOTHING)


def _drop_unsubscribed(held: CurrentAssignment, step: Step) -> CurrentAssignment:
    gone = {topic: partitions for topic, partitions in held.assigned.items() if topic not in step.subscribed}
    if not gone:
        return held
    kept = {topic: partitions for topic, partitions in held.assigned.items() if topic not in gone}
    revoking = {
        topic: {**held.revoking.get(topic, {}), **gone.get(topic, {})} for topic in {**held.revoking, **gone}
    }
    if _owns(step.owned, revoking):
        return _next(held, held.epoch, MemberState.UNREVOKED, kept, revoking)
    return _next(held, held.epoch, held.state, kept, held.revoking)


def _owns(owned: Owned | None, revoking: Held) -> bool:
    """Whether a member still has some of what it must give up; silence does not mean that it has given it up."""
    if owned is None:
        return True
    return any(not revoking.get(topic_id, {}).keys().isdisjoint(partitions) for topic_id, partitions in owned)


def _next(
    held: CurrentAssignment, epoch: int, state: MemberState, assigned: Held, revoking: Held
) -> CurrentAssignment:
    # The epoch before stays good until the epoch rises again: an answer may be lost more than once.
    previous = held.epoch if epoch != held.epoch else held.previous_epoch
    following = CurrentAssignment(epoch, previous, state, assigned, revoking)
    return held if following == held else following


def away(held: CurrentAssignment) -> CurrentAssignment:
    """A static member says that it will be back."""
    return replace(held, epoch=STATIC_LEAVE_EPOCH, revoking=HOLDS_NOTHING)


def returned(held: CurrentAssignment) -> CurrentAssignment:
    """A static member is back under another id: what it held is still its own, and it catches up from there."""
    return replace(held, epoch=JOIN_EPOCH, previous_epoch=JOIN_EPOCH)


NO_TIMEOUT_MS: Final = -1
"""A member whose rebalance time-out has not changed says so with this."""


class ConsumerHeartbeat(NamedTuple):
    """A heartbeat; what has not changed since the last one is None, and what is not None counts."""

    group_id: str
    member_id: str
    member_epoch: int
    """0 joins, -1 leaves, -2 is a static member that will be back."""
    instance_id: str | None = None
    rack_id: str | None = None
    rebalance_timeout_ms: int = NO_TIMEOUT_MS
    topic_names: tuple[str, ...] | None = None
    topic_regex: str | None = None
    server_assignor: str | None = None
    owned: Owned | None = None
    client_id: str = ""
    client_host: str = ""
    api_version: int = 1


class ConsumerReply(NamedTuple):
    member_id: str
    member_epoch: int
    heartbeat_interval_ms: int
    assignment: Assignment | None = None
    """What the member may use from now on; None when that has not changed."""


class NamedPartitions(NamedTuple):
    topic_id: UUID
    topic_name: str
    partitions: tuple[int, ...]


class ConsumerMemberDescription(NamedTuple):
    member_id: str
    instance_id: str | None
    rack_id: str | None
    member_epoch: int
    client_id: str
    client_host: str
    topic_names: tuple[str, ...]
    topic_regex: str | None
    assignment: tuple[NamedPartitions, ...]
    target: tuple[NamedPartitions, ...]
    is_classic: bool


class ConsumerDescription(NamedTuple):
    group_id: str
    state: str
    epoch: int
    assignment_epoch: int
    assignor: str
    members: tuple[ConsumerMemberDescription, ...]


def by_topic_id(named: Iterable[OwnedPartitions], topics: Topics) -> dict[UUID, tuple[int, ...]]:
    """Topics that are gone are left out."""
    found = ((topics.by_name(each.topic), each.partitions) for each in named)
    return {facts.topic_id: partitions for facts, partitions in found if facts is not None}


def embedded_assignment(held: Held, metadata: bytes, topics: Topics) -> bytes:
    """What a classic member holds, in the layout of what it said of itself."""
    found = ((topics.by_id(topic_id), partitions) for topic_id, partitions in held.items())
    assigned = sorted(
        (
            OwnedPartitions(facts.name, tuple(sorted(partitions)))
            for facts, partitions in found
            if facts is not None
        ),
        key=lambda each: each.topic,
    )
    try:
        version, _ = decode_subscription(metadata)
    except ValueError:
        version = 0
    return ConsumerAssignment(assigned_partitions=tuple(assigned)).encode(version)
