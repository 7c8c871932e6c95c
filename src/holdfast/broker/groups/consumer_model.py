"""What is said to a group of the consumer protocol and what it answers."""

from __future__ import annotations

from typing import Final, NamedTuple
from uuid import UUID

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_member import Owned

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
