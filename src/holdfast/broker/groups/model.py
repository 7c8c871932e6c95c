"""What is said to a group coordinator and what it answers, and what every kind of group can be asked.

A coordinator is one machine per partition of `__consumer_offsets`. It owns the groups whose names hash there and
their committed offsets. Requests come as the tuples below, with the time; answers are returned at once, or, where
a group makes its members wait for each other (join, sync), handed to `reply` later.

The rules every group keeps:

- It decides, then appends to `CoordinatorContext.journal`, then changes its state, then replies. An append that is
  refused raises `ApiError`, and then nothing has changed.
- `reply` is called exactly once for each request, never twice. It may be called from inside the call that got it. It
  never raises. Whoever gave it holds the answer back until the journal is durable, so no group thinks about that.
- A request from somebody who is not a member, or not of this generation or epoch, raises or answers the protocol's
  error and changes nothing.
- Time comes in through `now` and the schedule. A deadline that a heartbeat moves is a plain field: its timer fires
  at the old deadline, looks, and is set again.

Names that end up in records may be only so long. Requests of newer versions have room for names of any length. A
key, and the one record of a classic group, have two bytes for the length of each. What has no room there is refused
before a group depends on it: a group that cannot be recorded can never be stable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Final, NamedTuple, Protocol, TypeAlias
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.config.broker import BrokerConfig
from holdfast.errors import ApiError
from holdfast.seams import Journal, Now, Randomness, Schedule

NO_GENERATION: Final = -1
NO_MEMBER_ID: Final = ""
CONSUMER_PROTOCOL_TYPE: Final = "consumer"
"""The protocol type of consumers: the one whose metadata the coordinator can read."""
NO_TOPIC_ID: Final = UUID(int=0)

Records: TypeAlias = list[tuple[bytes, bytes | None]]
"""Keys and values for the journal; None is a tombstone."""


class GroupType(Enum):
    """The kinds of groups, under the names the protocol has for them."""

    CLASSIC = "classic"
    CONSUMER = "consumer"


# The world around a group


class TopicFacts(NamedTuple):
    name: str
    topic_id: UUID
    partitions: int
    racks: tuple[tuple[str, ...], ...] = ()
    """For each partition the racks its replicas are in; empty when no broker names one."""


class Topics(Protocol):
    """The topics of the cluster as they are now."""

    def by_name(self, name: str) -> TopicFacts | None: ...

    def by_id(self, topic_id: UUID) -> TopicFacts | None: ...

    def names(self) -> Iterable[str]: ...

    def matching(self, expression: str) -> frozenset[str]:
        """The names that a regular expression matches."""
        ...


@dataclass(frozen=True, slots=True)
class CoordinatorContext:
    """Everything a group needs from the world."""

    journal: Journal
    schedule: Schedule
    randomness: Randomness
    topics: Topics
    settings: Callable[[], BrokerConfig]
    """The settings of this moment: never keep what it returns."""
    overrides: Callable[[str], Mapping[str, str]]
    """The settings an operator gave one group, by name (`consumer.session.timeout.ms`, …)."""
    say: Callable[[str], None]
    """One line for the operator."""
    first_session_ms: Callable[[str, str, int], int] = lambda group_id, member_id, timeout_ms: timeout_ms
    """How long after a start a member may be silent, whose session lasts that long: silence may have begun before."""


class Watched(Protocol):
    """A member, as far as its session goes."""

    @property
    def deadline_ms(self) -> int: ...

    @property
    def is_waiting(self) -> bool:
        """For an answer of ours: nothing is heard of it meanwhile."""
        ...


# The classic protocol


class MemberProtocol(NamedTuple):
    """One way of sharing work out that a member is ready to follow, with what it says about itself."""

    name: str
    metadata: bytes


class JoinRequest(NamedTuple):
    group_id: str
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    session_timeout_ms: int
    rebalance_timeout_ms: int
    protocol_type: str
    protocols: tuple[MemberProtocol, ...]
    """In order of preference."""
    requires_known_member_id: bool
    """The client can come back with the id it is given (version 4 on): nobody takes a place it does not know of."""
    supports_skipping_assignment: bool
    """A leader that is told so assigns nothing (version 9 on)."""
    reason: str | None = None


class JoinedMember(NamedTuple):
    """Another member, as the leader is told of it."""

    member_id: str
    group_instance_id: str | None
    metadata: bytes


class JoinReply(NamedTuple):
    error: ErrorCode
    member_id: str
    generation: int = NO_GENERATION
    protocol_type: str | None = None
    protocol_name: str | None = None
    leader: str = ""
    skip_assignment: bool = False
    members: tuple[JoinedMember, ...] = ()
    """For the leader alone."""


class SyncRequest(NamedTuple):
    group_id: str
    generation: int
    member_id: str
    group_instance_id: str | None
    protocol_type: str | None
    protocol_name: str | None
    assignments: tuple[tuple[str, bytes], ...]
    """Member id and assignment, from the leader."""


class SyncReply(NamedTuple):
    error: ErrorCode
    protocol_type: str | None = None
    protocol_name: str | None = None
    assignment: bytes = b""


class HeartbeatRequest(NamedTuple):
    group_id: str
    generation: int
    member_id: str
    group_instance_id: str | None


class LeavingMember(NamedTuple):
    member_id: str
    group_instance_id: str | None
    reason: str | None = None


class LeaveRequest(NamedTuple):
    group_id: str
    members: tuple[LeavingMember, ...]


class LeaveReply(NamedTuple):
    error: ErrorCode
    members: tuple[tuple[LeavingMember, ErrorCode], ...] = ()


JoinCallback: TypeAlias = Callable[[JoinReply], None]
SyncCallback: TypeAlias = Callable[[SyncReply], None]


# Committed offsets


class CommittedOffset(NamedTuple):
    """One committed offset of a group in a partition."""

    offset: int
    leader_epoch: int
    """Of the last record consumed; -1 when the client did not say."""
    metadata: str
    commit_ms: int
    expire_ms: int = -1
    """When a client of an old version wanted it forgotten; -1: retention decides."""
    topic_id: UUID = NO_TOPIC_ID
    """Of the topic it was committed for, when the client or the cluster knew; a recreated topic is another one."""
    order: int = 0
    """Rises with each commit of a coordinator partition: which of two commits was later."""


class PartitionCommit(NamedTuple):
    partition: int
    offset: int
    leader_epoch: int
    metadata: str | None


class TopicCommit(NamedTuple):
    topic: str
    topic_id: UUID
    partitions: tuple[PartitionCommit, ...]


class CommitRequest(NamedTuple):
    group_id: str
    member_id: str
    group_instance_id: str | None
    generation: int
    """Of the classic protocol, or the member epoch of the new one; -1 for those without a group."""
    topics: tuple[TopicCommit, ...]
    """Known topics with known partitions only: unknown ones are refused before a group is asked."""
    retention_ms: int = -1
    api_version: int = 9


class TransactionalCommit(NamedTuple):
    """Committed offsets that count once the producer's transaction is committed."""

    group_id: str
    member_id: str
    group_instance_id: str | None
    generation: int
    topics: tuple[TopicCommit, ...]
    producer_id: int
    producer_epoch: int
    api_version: int = 5


PartitionCheck: TypeAlias = Callable[[str, UUID, int], None]
"""Given a topic, its id and a partition: raises the `ApiError` that refuses the whole commit."""
CommitReply: TypeAlias = dict[tuple[str, int], ErrorCode]
"""The outcome for each topic and partition of the request."""


# What every kind of group can be asked


class DescribedMember(NamedTuple):
    member_id: str
    group_instance_id: str | None
    client_id: str
    client_host: str
    metadata: bytes
    assignment: bytes


class ClassicDescription(NamedTuple):
    """What DescribeGroups tells about a classic group."""

    group_id: str
    state: str
    protocol_type: str
    protocol: str
    members: tuple[DescribedMember, ...]


class ListedGroup(NamedTuple):
    group_id: str
    protocol_type: str
    state: str
    type: GroupType


class Group(Protocol):
    """Both kinds of groups. Every `check_…` raises the `ApiError` to answer with."""

    group_id: str

    @property
    def type(self) -> GroupType: ...

    @property
    def state(self) -> str:
        """As Kafka names it: Empty, PreparingRebalance, CompletingRebalance, Stable, Dead, Assigning, Reconciling."""
        ...

    @property
    def protocol_type(self) -> str | None: ...

    @property
    def members(self) -> Mapping[str, Watched]: ...

    @property
    def is_empty(self) -> bool:
        """No members, and nobody on the way in."""
        ...

    def is_subscribed_to(self, topic: str) -> bool: ...

    # The classic protocol. A consumer group answers it for its classic members.

    def join(self, request: JoinRequest, reply: JoinCallback, now: Now) -> None: ...

    def sync(self, request: SyncRequest, reply: SyncCallback, now: Now) -> None: ...

    def heartbeat(self, request: HeartbeatRequest, now: Now) -> ErrorCode: ...

    def leave(self, request: LeaveRequest, now: Now) -> LeaveReply: ...

    # Committed offsets

    def check_offset_commit(
        self, commit: CommitRequest | TransactionalCommit, now: Now
    ) -> PartitionCheck | None:
        """Whether this member may commit now, anything (None) or what the returned check lets pass.

        A commit of a classic member is a sign of life.
        """
        ...

    def check_offset_fetch(self, member_id: str | None, member_epoch: int) -> None: ...

    def check_offset_delete(self) -> None: ...

    def expiry_base_ms(self, commit_ms: int) -> int | None:
        """From when on the retention of a committed offset counts (wall clock), None while no committed offset may
        expire."""
        ...

    # Life

    def check_delete(self) -> None: ...

    def tombstones(self) -> Records:
        """What takes the group itself (not its committed offsets) out of the log."""
        ...

    def loaded(self, now: Now) -> None:
        """Everything was replayed: the sessions of members begin, or what is left of them."""
        ...

    def unload(self) -> None:
        """The coordinator lets go of the group: cancel timers, answer whoever waits with NOT_COORDINATOR."""
        ...


class Registry(Protocol):
    """What a group may ask of its coordinator: to be taken out, or replaced by its other kind."""

    groups: dict[str, Group]
    context: CoordinatorContext

    def put(self, group: Group) -> None:
        """Make `group` the one of its name. The old one is not unloaded: whoever replaces it moved what it had."""
        ...

    def drop(self, group_id: str) -> None: ...


def append_error(error: ApiError) -> ErrorCode:
    """What a client is told when the journal refused: that a record does not fit is nothing it can mend."""
    if error.code in (ErrorCode.message_too_large, ErrorCode.record_list_too_large):
        return ErrorCode.unknown_server_error
    return error.code


NAME_BYTES_MAX: Final = 0x7FFF
MEMBER_ID_BYTES_ADDED: Final = 37
"""A dash and a UUID make a member's id of the name of its client or instance."""


def has_room(name: str | None, *, added: int = 0) -> bool:
    room = NAME_BYTES_MAX - added
    return name is None or len(name) <= room // 4 or len(name.encode()) <= room


def refuse_id_too_long(group_id: str) -> None:
    if not has_room(group_id):
        raise ApiError(ErrorCode.invalid_group_id, f"a group id of {len(group_id)} characters")


def refuse_long_names(request: JoinRequest) -> None:
    named = request.client_id if request.group_instance_id is None else request.group_instance_id
    others = (request.member_id, request.protocol_type, *(protocol.name for protocol in request.protocols))
    if not has_room(named, added=MEMBER_ID_BYTES_ADDED) or not all(map(has_room, others)):
        raise ApiError(ErrorCode.invalid_request, "a name that no record has room for")


def not_recorded(error: ValueError) -> ApiError:
    """What could not be written as a record, as the answer to whoever said it."""
    return ApiError(ErrorCode.invalid_request, f"no record has room for this: {error}")
