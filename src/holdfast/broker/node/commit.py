"""Group commit: many waiting requests, one flush.

A partition whose log has unflushed appends is *dirty*. At the end of a turn (all requests that had arrived
were begun) every dirty partition that has no flush under way gets one. What is appended before the flusher begins
with it is part of it; what comes later gathers for the next. An append therefore waits at most for the flush in
progress and the one after it, and holds no thread while it waits.

The order that makes an acknowledgement true: append, flush returns, durable end moves, response leaves. A flush
that fails takes its log directory offline: every waiter of every partition there is told, and nothing is flushed
there again. A defect on the way counts as such a failure: nobody could say what is durable. A flush that could not
be begun, since nothing more can be opened, has not failed: its waiters wait on.
"""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from holdfast.broker.node.directories import NO_DESCRIPTOR_ERRNOS
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.partition.offsets import CommitWaiter
from holdfast.seams import Flusher, FlushJob, FlushTarget
from holdfast.wire.positions import LogPosition

FLUSHED_APART_MAX: Final = 2
"""A turn with more partitions to flush is better off with one flush of them all."""


@dataclass(eq=False, repr=False)
class GroupCommit:
    _flusher: Flusher
    _call_soon: Callable[[Callable[[], None]], None]
    _on_flushed: Callable[[HostedPartition], None]
    _report: Callable[[str, Exception], None]
    _sizes: Callable[[float], None]
    """Takes how many messages a flush is for."""
    _dirty: dict[HostedPartition, None] = field(default_factory=dict, init=False)
    _put_off: list[HostedPartition] = field(default_factory=list, init=False)
    _scheduled: bool = field(default=False, init=False)
    _under_way: dict[HostedPartition, int] = field(default_factory=dict, init=False)
    """How often `look` has found the flush of a partition under way."""
    flushes: int = field(default=0, init=False)

    def appended(self, partition: HostedPartition) -> None:
        """A batch was written to the partition's log."""
        if not partition.flushes_in_groups:
            partition.became_durable(partition.log.end_position)
            if not partition.wants_flush and not self._flush_due(partition):
                return
        self.request(partition)

    @staticmethod
    def _flush_due(partition: HostedPartition) -> bool:
        """Without group commit: after a roll, and after `flush.messages` messages, as Kafka does."""
        log = partition.log
        return log.has_sealed_unflushed or log.unflushed_messages >= log.config.flush_messages

    def when_flushed(self, partition: HostedPartition, end_offset: int, waiter: CommitWaiter) -> None:
        """Call `waiter(None)` once everything below `end_offset` has been flushed, or with the error that ended it.

        In group commit that is when it is committed. Otherwise a flush is asked for: a record elsewhere that
        relies on this one, and is flushed, must not outlive it.
        """
        offsets = partition.offsets
        if partition.flushes_in_groups:
            offsets.when_committed(end_offset, waiter)
        elif end_offset <= partition.log.recovery_point:
            waiter(None)
        elif offsets.failure is not None:
            waiter(offsets.failure)
        else:
            partition.flush_waiters.add(end_offset, waiter)
            self.request(partition)

    def request(self, partition: HostedPartition) -> None:
        """Flush the partition's log at the end of this turn, or when the flush under way has returned."""
        if partition.wants_flush:
            return
        partition.wants_flush = True
        if partition.flush_running:
            return
        self._dirty[partition] = None
        if not self._scheduled:
            self._scheduled = True
            self._call_soon(self._begin)

    def _put_off_flush(self, partition: HostedPartition) -> None:
        """Nothing was asked of the disk, for want of descriptors: flush when `go_on` is called."""
        partition.log.flush_not_begun()
        partition.wants_flush = True
        self._put_off.append(partition)

    def go_on(self) -> None:
        put_off, self._put_off = self._put_off, []
        for partition in put_off:
            partition.wants_flush = False
            self.request(partition)

    def look(self) -> None:
        """Once a second: see which flushes do not return."""
        for partition, looks in self._under_way.items():
            self._under_way[partition] = looks + 1

    def stuck(self, seconds: int) -> list[HostedPartition]:
        """Partitions whose flush has been under way for so long; a disk that answers nothing fails nothing."""
        return [partition for partition, looks in self._under_way.items() if looks >= seconds]

    @property
    def oldest_flush_seconds(self) -> int:
        return max(self._under_way.values(), default=0)

    def _begin(self) -> None:
        self._scheduled = False
        dirty, self._dirty = self._dirty, {}
        apart = len(dirty) <= FLUSHED_APART_MAX
        for partition in dirty:
            if not _is_gone(partition):
                try:
                    self._flush(partition, apart=apart)
                except Exception as defect:  # noqa: BLE001 - the others are to be flushed as well
                    partition.directory.take_offline(self._as_failure(partition, defect))

    def _flush(self, partition: HostedPartition, *, apart: bool) -> None:
        partition.flush_running = True
        self._under_way[partition] = 0
        end = partition.log.end_position

        refusal: OSError | None = None

        def gather() -> tuple[FlushTarget, ...]:
            nonlocal end, refusal
            partition.wants_flush = False
            if _is_gone(partition):
                return ()
            try:
                self._sizes(partition.log.unflushed_messages)
                targets, end = partition.log.begin_flush(apart=apart)
            except OSError as error:
                refusal = error
                return ()
            except Exception as defect:  # noqa: BLE001 - the others are to be flushed as well
                refusal = self._as_failure(partition, defect)
                return ()
            return targets

        def done(error: OSError | None) -> None:
            self._done(partition, end, error or refusal)

        self._flusher.submit(FlushJob((), done, gather=gather))

    def _as_failure(self, partition: HostedPartition, defect: Exception) -> OSError:
        self._report(f"flushing {partition.name}", defect)
        return OSError(errno.EIO, f"flushing {partition.name} ran into a defect: {defect!r}")

    def _done(self, partition: HostedPartition, end: LogPosition, error: OSError | None) -> None:
        partition.flush_running = False
        self._under_way.pop(partition, None)
        self.flushes += 1
        if _is_gone(partition):
            return
        if error is None:
            try:
                self._settle(partition, end)
            except Exception as defect:  # noqa: BLE001 - whoever waits here would wait for ever
                error = self._as_failure(partition, defect)
        if error is None:
            return
        if error.errno in NO_DESCRIPTOR_ERRNOS:
            partition.directory.refuses(error)
            self._put_off_flush(partition)
        else:
            partition.directory.take_offline(error)

    def _settle(self, partition: HostedPartition, end: LogPosition) -> None:
        partition.log.advance_recovery_point(end)
        if partition.wants_flush:
            self._dirty[partition] = None
            if not self._scheduled:
                self._scheduled = True
                self._call_soon(self._begin)
        self._on_flushed(partition)
        # Last: whatever becomes of those who are told now, the next flush is on its way.
        partition.became_durable(end)
        if partition.flush_waiters:
            partition.wake_flush_waiters()


def _is_gone(partition: HostedPartition) -> bool:
    """Whether nobody waits here any more: the topic was deleted, the directory failed, or the node has stopped."""
    directory = partition.directory
    return directory.offline or directory.is_closed or partition.is_deleted
