"""The offsets of one partition, and who waits for them.

    log start ≤ last stable ≤ high watermark ≤ durable end ≤ log end

- The *durable end* moves when a flush returns, to where the log ended when that flush began.
- The *high watermark* is the smallest durable end of the in-sync set. On one node the set is this
  replica alone, so it equals our durable end; replication will lower it, and nothing else changes.
- The *last stable offset* stops at the first undecided transaction. A decided one still holds it until
  its marker is below the high watermark.

Nobody sees an offset at or above the high watermark. Waiters are callbacks that fire when the high
watermark has reached their offset; they are answered in the order of their offsets, which is the order
they came in.

Waits are bounded from outside: a connection has a bounded number of requests under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Protocol

from holdfast.wire.positions import LogPosition

CommitWaiter = Callable[[Exception | None], None]


def call_each(waiters: Iterable[Callable[..., None]], *arguments: object) -> None:
    """Call every one of them, whatever the others raise; the first error is raised when all were called."""
    failure: Exception | None = None
    for waiter in waiters:
        try:
            waiter(*arguments)
        except Exception as error:  # noqa: BLE001
            failure = failure or error
    if failure is not None:
        raise failure


class FetchWaiter(Protocol):
    def data_arrived(self) -> None: ...


def reached(waiters: deque[tuple[int, CommitWaiter]], offset: int) -> Iterator[CommitWaiter]:
    """Those at the front that wait for `offset` or less, taken out one by one."""
    while waiters and waiters[0][0] <= offset:
        yield waiters.popleft()[1]


class PartitionOffsets:
    __slots__ = (
        "_commit_waiters",
        "durable_end",
        "failure",
        "fetch_waiters",
        "first_unstable_offset",
        "high_watermark",
        "leader_epoch",
    )

    def __init__(self, end: LogPosition, leader_epoch: int) -> None:
        """Everything below `end` was found on disk by recovery, so it is durable and visible."""
        self.durable_end = end
        self.high_watermark = end
        self.leader_epoch = leader_epoch
        self.failure: Exception | None = None
        """Why nothing more will be committed here, once that is so."""
        self.first_unstable_offset: int | None = None
        """The first offset of the earliest transaction that is undecided, or decided by a marker that is
        not below the high watermark. Whoever moves the high watermark sets it first; in between it may lack
        transactions that begin above the high watermark, which bound nothing yet."""
        self._commit_waiters: deque[tuple[int, CommitWaiter]] = deque()
        self.fetch_waiters: dict[FetchWaiter, None] = {}
        """Parked fetches that watch this partition, in order of arrival."""

    @property
    def last_stable_offset(self) -> int:
        unstable = self.first_unstable_offset
        high_watermark = self.high_watermark.offset
        return high_watermark if unstable is None else min(unstable, high_watermark)

    def is_committed(self, end_offset: int) -> bool:
        return end_offset <= self.high_watermark.offset

    def when_committed(self, end_offset: int, waiter: CommitWaiter) -> None:
        """Call `waiter(None)` once everything below `end_offset` is committed, or with the error that ended it."""
        if end_offset <= self.high_watermark.offset:
            waiter(None)
        elif self.failure is not None:
            waiter(self.failure)
        else:
            self._commit_waiters.append((end_offset, waiter))

    def flushed(self, end: LogPosition) -> None:
        """A flush that began when the log ended at `end` has returned."""
        if end.offset > self.durable_end.offset:
            self.durable_end = end
            self._raise_high_watermark(end)
        elif end.offset == self.durable_end.offset and end.segment_base > self.durable_end.segment_base:
            # The same offset, now the beginning of a new segment: what was sealed is left behind.
            self.durable_end = self.high_watermark = end

    def _raise_high_watermark(self, end: LogPosition) -> None:
        self.high_watermark = end
        try:
            call_each(reached(self._commit_waiters, end.offset), None)
        finally:
            if self.fetch_waiters:
                call_each([waiter.data_arrived for waiter in self.fetch_waiters])

    def fail(self, error: Exception) -> None:
        """The outcome of what is not committed yet is unknown for good: every waiter is told."""
        self.failure = error
        waiters, self._commit_waiters = self._commit_waiters, deque()
        try:
            call_each([waiter for _, waiter in waiters], error)
        finally:
            call_each([waiter.data_arrived for waiter in self.fetch_waiters])
