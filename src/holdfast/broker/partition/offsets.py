"""The offsets of one partition, and who waits for them.

    log start ≤ last stable ≤ high watermark ≤ durable end ≤ log end

- The *durable end* moves when a flush returns, to where the log ended when that flush began.
- The *high watermark* is the smallest durable end of the in-sync set. On one node the set is this
  replica alone, so it equals our durable end; replication will lower it, and nothing else changes.
- The *last stable offset* stops at the first undecided transaction. A decided one still holds it until
  its marker is below the high watermark.

Nobody sees an offset at or above the high watermark. Waiters are callbacks that fire when the high
watermark has reached their offset; they are answered in the order of their offsets, which is the order
they came in. Each is told whatever became of the others: what one raises is reported, and costs nobody else an
answer.

Waits are bounded from outside: a connection has a bounded number of requests under way.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Protocol, TypeAlias

from holdfast.wire.positions import LogPosition

CommitWaiter = Callable[[Exception | None], None]
Report: TypeAlias = Callable[[Exception], None]
"""Takes what a waiter has raised, and raises nothing."""


class FetchWaiter(Protocol):
    def data_arrived(self) -> None: ...


class Waiters:
    """Who waits for which offset, in the order of the offsets."""

    __slots__ = ("_report", "_waiting")

    def __init__(self, report: Report) -> None:
        self._report = report
        self._waiting: deque[tuple[int, CommitWaiter]] = deque()

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def add(self, end_offset: int, waiter: CommitWaiter) -> None:
        self._waiting.append((end_offset, waiter))

    def reached(self, offset: int) -> None:
        """Tell those who wait for nothing above `offset`."""
        waiting = self._waiting
        while waiting and waiting[0][0] <= offset:
            self._tell(waiting.popleft()[1], None)

    def fail(self, error: Exception) -> None:
        waiting, self._waiting = self._waiting, deque()
        for _, waiter in waiting:
            self._tell(waiter, error)

    def _tell(self, waiter: CommitWaiter, error: Exception | None) -> None:
        try:
            waiter(error)
        except Exception as defect:  # noqa: BLE001 - the others are to be told as well
            self._report(defect)


class PartitionOffsets:
    __slots__ = (
        "_commit_waiters",
        "_report",
        "durable_end",
        "failure",
        "fetch_waiters",
        "first_unstable_offset",
        "high_watermark",
    )

    def __init__(self, end: LogPosition, report: Report) -> None:
        """Everything below `end` was found on disk by recovery, so it is durable and visible."""
        self.durable_end = end
        self.high_watermark = end
        self.failure: Exception | None = None
        """Why nothing more will be committed here, once that is so."""
        self.first_unstable_offset: int | None = None
        """The first offset of the earliest transaction that is undecided, or decided by a marker that is
        not below the high watermark. Whoever moves the high watermark sets it first; in between it may lack
        transactions that begin above the high watermark, which bound nothing yet."""
        self._report = report
        self._commit_waiters = Waiters(report)
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
            self._commit_waiters.add(end_offset, waiter)

    def advance_durable_end(self, end: LogPosition) -> None:
        """A flush that began when the log ended at `end` has returned."""
        if end.offset > self.durable_end.offset:
            self.durable_end = end
            self._raise_high_watermark(end)
        elif end.offset == self.durable_end.offset and end.segment_base > self.durable_end.segment_base:
            # The same offset, now the beginning of a new segment: what was sealed is left behind.
            self.durable_end = self.high_watermark = end

    def _raise_high_watermark(self, end: LogPosition) -> None:
        self.high_watermark = end
        self._commit_waiters.reached(end.offset)
        if self.fetch_waiters:
            self._wake_fetches()

    def fail(self, error: Exception) -> None:
        """The outcome of what is not committed yet is unknown for good: every waiter is told."""
        self.failure = error
        self._commit_waiters.fail(error)
        self._wake_fetches()

    def _wake_fetches(self) -> None:
        for waiter in list(self.fetch_waiters):
            try:
                waiter.data_arrived()
            except Exception as defect:  # noqa: BLE001 - the others are to be told as well
                self._report(defect)
