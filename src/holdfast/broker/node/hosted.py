"""A partition this node hosts: its log on disk and its offsets, kept in step.

Machines do not call each other: this is where what the log says is carried to the offsets and back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from functools import partial
from typing import NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.log.leader_epochs import UNDEFINED_EPOCH, EpochEnd
from holdfast.broker.log.log import Log
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.meter import TopicTraffic
from holdfast.broker.node.placement import Placement
from holdfast.broker.partition.offsets import PartitionOffsets, Waiters
from holdfast.errors import ApiError, LogDirectoryOffline
from holdfast.seams import Buffer, Now
from holdfast.wire.batch import BatchHeader
from holdfast.wire.positions import LogPosition


@dataclass(slots=True, eq=False, repr=False)
class HostedPartition:
    topic: str
    topic_id: UUID
    index: int
    leader_epoch: int
    log: Log
    directory: LogDirectory
    report: InitVar[Callable[[str, Exception], None]]
    """Is told what those raise who wait for the partition."""
    traffic: TopicTraffic = field(default_factory=TopicTraffic)
    """The topic's, which all its partitions share."""
    offsets: PartitionOffsets = field(init=False)
    flush_waiters: Waiters = field(init=False)
    """Who waits for a flush although the topic acknowledges without; see `GroupCommit.when_flushed`."""
    _stable_position: LogPosition = field(init=False)
    flush_running: bool = False
    wants_flush: bool = False
    is_deleted: bool = False

    def __post_init__(self, report: Callable[[str, Exception], None]) -> None:
        report_waiter = partial(report, f"what waits for {self.name}")
        self.offsets = PartitionOffsets(self.log.end_position, report_waiter)
        self.flush_waiters = Waiters(report_waiter)
        self._stable_position = self.log.end_position
        self._follow_transactions()

    @property
    def name(self) -> str:
        return f"{self.topic}-{self.index}"

    @property
    def flushes_in_groups(self) -> bool:
        """Whether acknowledging waits for a flush; otherwise the durable end is the log end by definition."""
        return self.log.config.holdfast_flush == "group"

    @property
    def offline(self) -> bool:
        return self.directory.offline

    def append(self, header: BatchHeader, batch: Buffer, now: Now) -> BatchHeader:
        """Append one batch in the present leader epoch; returns it as it is stored, and nobody sees it yet.

        KAFKA_STORAGE_ERROR where the disk does not take it. Want of room or descriptors refuses this batch and
        nothing else; any other error takes the directory offline.
        """
        try:
            return self.log.append(header, batch, self.leader_epoch, now)
        except OSError as error:
            self.directory.refuses(error)
            raise ApiError(
                ErrorCode.kafka_storage_error, f"{self.name} could not be written: {error}"
            ) from error

    # Offsets

    def became_durable(self, end: LogPosition) -> None:
        """Everything below `end` is durable: by a flush, or by definition without group commit."""
        producers = self.log.producers
        if producers.unstable:
            # On one node the durable end is the high watermark.
            producers.advance_high_watermark(end.offset)
            self._follow_transactions()
        self.offsets.advance_durable_end(end)

    def advance_start(self, offset: int) -> None:
        """The log begins at `offset` from now on, durably. A transaction open since before counts from there."""
        self.log.advance_start(offset)
        if self.log.producers.unstable:
            self._follow_transactions()

    def _follow_transactions(self) -> None:
        unstable = self.log.producers.first_unstable_offset
        if unstable is not None:
            unstable = max(unstable, self.log.start_offset)
        self.offsets.first_unstable_offset = unstable

    def readable_end(self, *, read_committed: bool) -> LogPosition:
        """Where readers must stop: at the high watermark, or before it at the last stable offset."""
        offsets = self.offsets
        if not read_committed or offsets.first_unstable_offset is None:
            return offsets.high_watermark
        stable = offsets.last_stable_offset
        if stable >= offsets.high_watermark.offset:
            return offsets.high_watermark
        # Compaction leaves the segment of the last stable offset alone: a place once found stays the place.
        if self._stable_position.offset != stable:
            self._stable_position = self.log.position_of(stable)
        return self._stable_position

    def end_of_epoch(self, epoch: int, end_offset: int) -> EpochEnd:
        """Where `epoch` ended, for a log that ends at `end_offset` (KIP-320).

        The log knows epochs that wrote something. The present one counts even if it has not: clients learn of it
        from Metadata and ListOffsets, and must not take its silence for a cut after the next start.
        """
        if epoch == self.leader_epoch:
            return EpochEnd(epoch, end_offset)
        end = self.log.epochs.end_offset_for(epoch, end_offset)
        if end.epoch == UNDEFINED_EPOCH and 0 <= epoch < self.leader_epoch:
            latest = self.log.epochs.latest_epoch
            return EpochEnd(epoch if latest == UNDEFINED_EPOCH else latest, end_offset)
        return end

    def require_online(self) -> None:
        if self.directory.offline:
            raise LogDirectoryOffline(f"{self.directory.path} is offline: {self.directory.failure}")

    def wake_flush_waiters(self) -> None:
        """A flush has returned: tell those whose offsets it has reached."""
        self.flush_waiters.reached(self.log.recovery_point)

    def fail(self, error: Exception) -> None:
        """The outcome of what is not durable yet is unknown for good: every waiter is told."""
        self.offsets.fail(error)
        self.flush_waiters.fail(error)


class OfflinePartition(NamedTuple):
    """A partition whose log could not be opened, or not be made. It answers storage errors only."""

    reason: str
    directory: LogDirectory | None
    """Where its files are, if it has any."""
    placement: Placement | None
    """How it is tried again: it was refused for want of room or descriptors, or its name is not free yet."""

    @property
    def is_new(self) -> bool:
        """Whether it holds nothing yet."""
        return self.placement is not None and self.placement.is_new
