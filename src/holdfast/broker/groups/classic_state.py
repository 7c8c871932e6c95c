"""What a classic group is made of: its states, under Kafka's names, and where each can lead; its members; the one
record it is kept in, and back; and how others see it, the members that join it and operators.

The members of a classic group: who they are, whom they wait for, what they can agree on.

`Membership` keeps these together:

- `members` in the order they came. The leader is one of them; when it goes, the one that came next leads.
- `static`: the one member that stands for each instance id.
- `pending`: ids handed out to clients that have not come back with them. A rebalance waits for those too.
- `support`: how many members can follow each protocol. A protocol that all of them can follow is a candidate.
- `awaiting_join`: how many members have a JoinGroup parked.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.errors import ApiError
from holdfast.seams import Scheduled
from holdfast.wire.consumer_protocol import decode_subscription
from holdfast.wire.coordinator_records import GroupMetadataKey, GroupMetadataValue, MemberMetadata

if TYPE_CHECKING:
    from holdfast.broker.groups.classic import ClassicGroup


class ClassicState(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS: Final = {
    ClassicState.EMPTY: {ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.PREPARING: {ClassicState.COMPLETING, ClassicState.EMPTY, ClassicState.DEAD},
    ClassicState.COMPLETING: {ClassicState.STABLE, ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.STABLE: {ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.DEAD: set(),
}
"""Where a group can go from where it is."""


@dataclass(slots=True, eq=False, repr=False)
class ClassicMember:
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocols: tuple[model.MemberProtocol, ...]
    assignment: bytes = b""
    is_new: bool = False
    """It has never got an answer, does not know its id and cannot heartbeat."""
    join_reply: model.JoinCallback | None = None
    sync_reply: model.SyncCallback | None = None
    deadline_ms: int = 0
    """When it counts as gone (monotonic clock). Heartbeats move this and nothing else."""
    timer: Scheduled | None = None
    timer_ms: int = 0
    """When `timer` fires: at or before `deadline_ms`."""

    @property
    def is_waiting(self) -> bool:
        """A request of it is parked: silence is our doing."""
        return self.join_reply is not None or self.sync_reply is not None

    def metadata(self, protocol: str | None) -> bytes:
        for name, metadata in self.protocols:
            if name == protocol:
                return metadata
        return b""

    def vote(self, candidates: Iterable[str]) -> str:
        for name, _ in self.protocols:
            if name in candidates:
                return name
        raise AssertionError(f"{self.member_id} follows none of {candidates}")


class Membership:
    def __init__(self) -> None:
        self.members: dict[str, ClassicMember] = {}
        self.static: dict[str, str] = {}
        self.pending: dict[str, Scheduled] = {}
        """Ids that were handed out, with the timer that forgets them."""
        self.leader: str | None = None
        self.awaiting_join = 0
        self._support: dict[str, int] = {}

    def __len__(self) -> int:
        return len(self.members)

    def __iter__(self) -> Iterator[ClassicMember]:
        return iter(list(self.members.values()))

    @property
    def have_all_joined(self) -> bool:
        return self.awaiting_join == len(self.members) and not self.pending

    @property
    def rebalance_timeout_ms(self) -> int:
        return max((member.rebalance_timeout_ms for member in self.members.values()), default=0)

    # Coming and going

    def add(self, member: ClassicMember, join_reply: model.JoinCallback | None = None) -> None:
        if member.group_instance_id is not None:
            assert member.group_instance_id not in self.static
            self.static[member.group_instance_id] = member.member_id
        if self.leader is None:
            self.leader = member.member_id
        self.members[member.member_id] = member
        self._count(member, 1)
        self.forget_pending(member.member_id)
        self.await_join(member, join_reply)

    def remove(self, member: ClassicMember) -> None:
        """Take a member out; what it waits for was answered before."""
        assert not member.is_waiting
        del self.members[member.member_id]
        self._count(member, -1)
        if member.group_instance_id is not None:
            self.static.pop(member.group_instance_id, None)
        if member.timer is not None:
            member.timer.cancel()
            member.timer = None
        if self.leader == member.member_id:
            self.leader = next(iter(self.members), None)

    def rename(self, member: ClassicMember, member_id: str) -> None:
        """The same static member under a new id, with its lead and its assignment."""
        assert member.group_instance_id is not None
        if self.leader == member.member_id:
            self.leader = member_id
        del self.members[member.member_id]
        self.members[member_id] = member
        member.member_id = member_id
        self.static[member.group_instance_id] = member_id

    def update(
        self,
        member: ClassicMember,
        protocols: tuple[model.MemberProtocol, ...],
        session_timeout_ms: int,
        rebalance_timeout_ms: int,
    ) -> None:
        self._count(member, -1)
        member.protocols = protocols
        self._count(member, 1)
        member.session_timeout_ms = session_timeout_ms
        member.rebalance_timeout_ms = rebalance_timeout_ms

    def forget_pending(self, member_id: str) -> bool:
        timer = self.pending.pop(member_id, None)
        if timer is not None:
            timer.cancel()
        return timer is not None

    # Parked requests

    def await_join(self, member: ClassicMember, reply: model.JoinCallback | None) -> None:
        self.awaiting_join += (reply is not None) - (member.join_reply is not None)
        member.join_reply = reply

    def answer_join(self, member: ClassicMember, reply: model.JoinReply) -> None:
        waiting = member.join_reply
        if waiting is not None:
            self.await_join(member, None)
            waiting(reply)

    def answer_sync(self, member: ClassicMember, reply: model.SyncReply) -> bool:
        waiting, member.sync_reply = member.sync_reply, None
        if waiting is not None:
            waiting(reply)
        return waiting is not None

    # Who is who

    def find(self, member_id: str, group_instance_id: str | None) -> ClassicMember:
        """The member a request speaks for, or why it may not."""
        if group_instance_id is not None:
            known = self.static.get(group_instance_id)
            if known is None:
                raise ApiError(ErrorCode.unknown_member_id, f"no member is {group_instance_id!r}")
            if known != member_id:
                raise ApiError(
                    ErrorCode.fenced_instance_id, f"{group_instance_id!r} is {known} by now, not {member_id}"
                )
        member = self.members.get(member_id)
        if member is None:
            raise ApiError(ErrorCode.unknown_member_id, f"{member_id!r} is no member")
        return member

    def elect_joined_leader(self) -> bool:
        """See that the leader is somebody who is here; false when nobody is."""
        if self.leader is None:
            return False
        if self.members[self.leader].join_reply is not None:
            return True
        for member in self.members.values():
            if member.join_reply is not None:
                self.leader = member.member_id
                return True
        return False

    # Protocols

    def supports_one_of(self, names: Iterable[str]) -> bool:
        count = len(self.members)
        return any(self._support.get(name, 0) == count for name in names)

    def choose_protocol(self) -> str:
        """The candidate that most members like best; of equals, what the one who came first likes better."""
        count = len(self.members)
        candidates = {name for name, supporters in self._support.items() if supporters == count}
        votes: dict[str, int] = {}
        for member in self.members.values():
            choice = member.vote(candidates)
            votes[choice] = votes.get(choice, 0) + 1
        return max(votes, key=lambda name: votes[name])

    def subscribed_topics(self, protocol: str | None) -> frozenset[str] | None:
        """What consumers read, by the metadata they gave for a protocol; None when it cannot be understood."""
        topics: set[str] = set()
        try:
            for member in self.members.values():
                # All versions begin with the topics; what follows does not matter here.
                as_oldest = b"\0\0" + member.metadata(protocol)[2:]
                topics.update(decode_subscription(as_oldest)[1].topics)
        except ValueError:
            return None
        return frozenset(topics)

    def _count(self, member: ClassicMember, by: int) -> None:
        # A protocol named twice is one protocol.
        for name in {name for name, _ in member.protocols}:
            left = self._support.get(name, 0) + by
            if left:
                self._support[name] = left
            else:
                self._support.pop(name, None)


def group_record(
    group: ClassicGroup, state_since_ms: int, *, is_unsettled: bool = False
) -> tuple[bytes, bytes]:
    """The whole group as it is; without a leader if its members have to share their work out anew."""
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation,
        protocol=group.protocol_name,
        leader=None if is_unsettled else group.leader,
        current_state_timestamp=state_since_ms,
        members=tuple(
            MemberMetadata(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.metadata(group.protocol_name),
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )
    try:
        return GroupMetadataKey(group.group_id).encode(), value.encode()
    except ValueError as error:
        raise model.not_recorded(error) from error


def new_group_record(group_id: str, state_since_ms: int) -> tuple[bytes, bytes]:
    """A group that somebody is about to join."""
    value = GroupMetadataValue(
        protocol_type="", generation=0, protocol="", leader=None, current_state_timestamp=state_since_ms
    )
    return GroupMetadataKey(group_id).encode(), value.encode()


def group_tombstone(group_id: str) -> tuple[bytes, None]:
    return GroupMetadataKey(group_id).encode(), None


def restore_group(group: ClassicGroup, value: GroupMetadataValue) -> None:
    """Give a fresh group the state of its record."""
    group.is_unsettled = bool(value.members) and value.leader is None
    protocol = value.protocol or None
    group.restore(
        generation=value.generation,
        protocol_type=value.protocol_type or None,
        protocol_name=protocol,
        leader=value.leader,
        state_since_ms=None if value.current_state_timestamp < 0 else value.current_state_timestamp,
        members=[
            ClassicMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.session_timeout,
                # Before version 1 the session time-out stood for both.
                member.session_timeout if member.rebalance_timeout < 0 else member.rebalance_timeout,
                (model.MemberProtocol(protocol or "", member.subscription),),
                member.assignment,
            )
            for member in value.members
        ],
    )


def joined(group: ClassicGroup, member: ClassicMember) -> model.JoinReply:
    """What a member is told of the generation it is in; the leader is told who the others are."""
    others: tuple[model.JoinedMember, ...] = ()
    if group.leader == member.member_id:
        others = tuple(
            model.JoinedMember(other.member_id, other.group_instance_id, other.metadata(group.protocol_name))
            for other in group.members.values()
        )
    return model.JoinReply(
        ErrorCode.none,
        member.member_id,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader or "",
        False,
        others,
    )


def described(group: ClassicGroup) -> model.ClassicDescription:
    """What members said is shown while it holds; what they were given, until they are given something else."""
    stable = group.is_stable
    return model.ClassicDescription(
        group.group_id,
        group.state,
        group.protocol_type or "",
        (group.protocol_name or "") if stable else "",
        tuple(
            model.DescribedMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.metadata(group.protocol_name) if stable else b"",
                member.assignment,
            )
            for member in group.members.values()
        ),
    )
