"""What each kind of request handler, and the coordinators, see of the broker: no more than they need.

`Node` has all of these parts. A handler names the protocol with the parts that it works on, so its signature tells
what it can touch, and a test may give it those alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from holdfast.broker.node.checkpoints import Checkpoints, LogStarts
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.fetch_sessions import FetchSessions
from holdfast.broker.node.loggers import Levels
from holdfast.broker.node.metadata_log import MetadataLog, Settings
from holdfast.broker.node.meter import Meter
from holdfast.broker.node.partitions import HostedPartitions
from holdfast.broker.node.timers import Timers
from holdfast.broker.node.troubles import Troubles
from holdfast.broker.node.wall_clock import WallClock
from holdfast.saying import Say
from holdfast.seams import Clock, FileSystem, Flusher, Randomness, Worker
from holdfast.wire.metadata_records import EndPoint

if TYPE_CHECKING:
    from holdfast.broker.node.group_service import GroupService
    from holdfast.broker.node.intake import Intake
    from holdfast.broker.node.transaction_service import ProducerIdSource, TransactionService


@dataclass(frozen=True, slots=True)
class NodeSeams:
    """Everything a node needs from the world."""

    fs: FileSystem
    randomness: Randomness
    flusher: Flusher
    worker: Worker
    clock: Clock
    call_soon: Callable[[Callable[[], None]], None]
    """Run something when the requests that have already arrived were begun."""
    boot_id: str
    """Names the boot of the machine: another one means the page cache of the last run is gone."""
    say: Say
    """One line for the operator. What it raises is left alone; it must not block."""
    levels: Levels = field(default_factory=Levels)
    """Of the loggers, for whoever writes the lines down."""


@dataclass(slots=True)
class Identity:
    """Who this broker is. The start finds it out."""

    node_id: int
    cluster_id: str = ""
    is_new_cluster: bool = False
    broker_epoch: int = -1
    endpoints: dict[str, EndPoint] = field(default_factory=dict)
    """Advertised address by listener name: Metadata answers with that of the listener asked."""


class CoordinatorServices(Protocol):
    """For the coordinators of groups and transactions."""

    seams: NodeSeams
    metadata: MetadataLog
    partitions: HostedPartitions
    commit: GroupCommit
    timers: Timers
    wall_clock: WallClock
    troubles: Troubles
    say: Say


class UpkeepServices(Protocol):
    """For what recurs: retention, compaction, the scrub."""

    seams: NodeSeams
    metadata: MetadataLog
    settings: Settings
    directories: list[LogDirectory]
    partitions: HostedPartitions
    checkpoints: Checkpoints
    log_starts: LogStarts
    commit: GroupCommit
    timers: Timers
    wall_clock: WallClock
    troubles: Troubles
    meter: Meter
    report: Callable[[str, Exception], None]
    say: Say


class ClusterServices(Protocol):
    """For requests about topics, settings and brokers."""

    seams: NodeSeams
    identity: Identity
    metadata: MetadataLog
    settings: Settings
    directories: list[LogDirectory]
    partitions: HostedPartitions
    unserved_topics: set[tuple[str, str]]
    say: Say


class DataServices(Protocol):
    """For requests that read, write or delete records."""

    seams: NodeSeams
    settings: Settings
    partitions: HostedPartitions
    commit: GroupCommit
    intake: Intake
    log_starts: LogStarts
    fetch_sessions: FetchSessions
    transactions: TransactionService
    timers: Timers
    meter: Meter
    say: Say


class GroupServices(Protocol):
    """For requests of consumer groups."""

    settings: Settings
    partitions: HostedPartitions
    groups: GroupService
    transactions: TransactionService


class TransactionServices(Protocol):
    """For requests of transactional producers."""

    metadata: MetadataLog
    partitions: HostedPartitions
    groups: GroupService
    producer_ids: ProducerIdSource
    transactions: TransactionService
