"""Flushing: on the loop itself while the disk answers at once, in a pool of threads otherwise.

Handing a flush to a thread and back costs two wake-ups and a fight for the interpreter lock: 30 µs of latency and a
third of the processor time of a small request. A disk with a write cache that survives power loss, or a good SSD,
flushes in less than a tenth of a millisecond, so while flushes are that quick a turn's only flush is done right
away. As soon as one takes longer than `INLINE_SECONDS_MAX`, flushes go to threads for a while, where nobody but those
who wait for them notices; so do the flushes of a turn that has several, because they then share the journal's commits.

Either way nothing is reported from inside `submit`, and a finished job is reported once, on the loop's thread.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Final

from holdfast.seams import FlushJob

INLINE_SECONDS_MAX: Final = 0.001
"""A flush longer than this must not hold up the loop: others wait there who want nothing from the disk."""
THREADS_SECONDS: Final = 1.0
"""How long flushes stay in threads after a slow one."""
INLINE_JOBS_MAX: Final = 1
"""More flushes than this in one turn are done side by side."""


class AdaptiveFlusher:
    def __init__(
        self,
        threads: int,
        call_soon: Callable[[Callable[[], None]], object],
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
    ) -> None:
        self._pool = FlushThreads(threads, call_soon_threadsafe)
        self._call_soon = call_soon
        self._submitted: list[FlushJob] = []
        self._finished: deque[tuple[FlushJob, OSError | None]] = deque()
        self._threads_until = 0.0

    def submit(self, job: FlushJob) -> None:
        if not self._submitted:
            self._call_soon(self._begin)
        self._submitted.append(job)

    def _begin(self) -> None:
        """Everything the node wanted flushed in this turn has been submitted."""
        jobs, self._submitted = self._submitted, []
        if len(jobs) <= INLINE_JOBS_MAX:
            began = time.monotonic()
            if began >= self._threads_until:
                for job in jobs:
                    self._finished.append((job, carry_out(job)))
                ended = time.monotonic()
                if ended - began > INLINE_SECONDS_MAX:
                    self._threads_until = ended + THREADS_SECONDS
                self._report()
                return
        for job in jobs:
            self._pool.submit(job)

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
        self, threads_max: int, call_soon_threadsafe: Callable[[Callable[[], None]], object]
    ) -> None:
        self._queue: SimpleQueue[FlushJob | None] = SimpleQueue()
        self._wake = call_soon_threadsafe
        self._finished: deque[tuple[FlushJob, OSError | None]] = deque()
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
            self._finished.append((job, carry_out(job)))
            # One wake-up of the loop serves however many jobs have finished when it comes round.
            if not self._wake_pending:
                self._wake_pending = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        self._wake_pending = False
        finished = self._finished
        while finished:
            job, error = finished.popleft()
            self._under_way -= 1
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
