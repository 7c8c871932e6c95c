"""Flushing: on the loop itself while the disk answers at once, in a pool of threads otherwise.

Handing a flush to a thread and back costs two wake-ups and a fight for the interpreter lock. A good disk flushes in a
tenth of a millisecond, so as long as flushes have been that quick a turn's only flush is done right away. When they
take longer on average than `INLINE_SECONDS_MAX` they go to threads, where nobody but those who wait for them notices,
until they are quick again. So do background flushes, and the flushes of a turn that has several: side by side they
share the journal's commits.

Either way nothing is reported from inside `submit`, and a finished job is reported once, on the loop's thread.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from time import monotonic
from typing import Final

from holdfast.seams import FlushJob

INLINE_SECONDS_MAX: Final = 0.0005
"""A flush longer than this on average must not hold up the loop: others wait there who want nothing from the disk."""
NEWEST_SHARE: Final = 0.1
"""How much the newest flush counts in the average: a single slow one changes nothing, ten in a row do."""
INLINE_JOBS_MAX: Final = 1
"""More flushes than this in one turn are done side by side."""


class AdaptiveFlusher:
    def __init__(
        self,
        threads: int,
        call_soon: Callable[[Callable[[], None]], object],
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
    ) -> None:
        self._pool = FlushThreads(threads, call_soon_threadsafe, self._took)
        self._call_soon = call_soon
        self._submitted: list[FlushJob] = []
        self._finished: deque[tuple[FlushJob, OSError | None]] = deque()
        self._average_seconds = 0.0

    def submit(self, job: FlushJob) -> None:
        if job.is_background:
            self._pool.submit(job)
            return
        if not self._submitted:
            self._call_soon(self._begin)
        self._submitted.append(job)

    def _begin(self) -> None:
        """Everything the node wanted flushed in this turn has been submitted."""
        jobs, self._submitted = self._submitted, []
        if len(jobs) > INLINE_JOBS_MAX or self._average_seconds > INLINE_SECONDS_MAX:
            for job in jobs:
                self._pool.submit(job)
            return
        for job in jobs:
            began = monotonic()
            self._finished.append((job, carry_out(job)))
            self._took(monotonic() - began)
        self._report()

    def _took(self, seconds: float) -> None:
        self._average_seconds += NEWEST_SHARE * (seconds - self._average_seconds)

    def _report(self) -> None:
        while self._finished:
            job, error = self._finished.popleft()
            job.done(error)

    def close(self) -> None:
        """Let submitted jobs finish, then end the threads."""
        for job in self._submitted:
            self._finished.append((job, carry_out(job)))
        self._submitted = []
        self._report()
        self._pool.close()


class FlushThreads:
    """A pool of threads that do nothing but wait for the disk; `fdatasync` releases the interpreter lock."""

    def __init__(
        self,
        threads_max: int,
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        took: Callable[[float], None],
    ) -> None:
        self._took = took
        self._queue: SimpleQueue[FlushJob | None] = SimpleQueue()
        self._wake = call_soon_threadsafe
        self._finished: deque[tuple[FlushJob, OSError | None, float]] = deque()
        self._wake_pending = False
        self._threads_max = threads_max
        self._threads: list[threading.Thread] = []
        self._under_way = 0

    def submit(self, job: FlushJob) -> None:
        self._under_way += 1
        if self._under_way > len(self._threads) and len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._run, name=f"flush-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._queue.put(job)

    def close(self) -> None:
        """Let queued jobs finish, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._deliver()

    def _run(self) -> None:
        while True:
            job = self._queue.get()
            if job is None:
                return
            began = monotonic()
            error = carry_out(job)
            self._finished.append((job, error, monotonic() - began))
            # One wake-up of the loop serves however many jobs have finished when it comes round.
            if not self._wake_pending:
                self._wake_pending = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        self._wake_pending = False
        finished = self._finished
        while finished:
            job, error, seconds = finished.popleft()
            self._under_way -= 1
            if not job.is_background:
                self._took(seconds)
            job.done(error)


def carry_out(job: FlushJob) -> OSError | None:
    """Flush a job's targets in order; the first failure ends it."""
    try:
        for target in job.targets:
            if isinstance(target, str):
                _flush_directory(target)
            else:
                target.flush()
    except OSError as failure:
        return failure
    return None


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
