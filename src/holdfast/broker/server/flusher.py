"""Flushing: on the loop itself while the disk answers at once, in a pool of threads otherwise.

Handing a flush to a thread and back costs two wake-ups and a fight for the interpreter lock. A good disk flushes in a
tenth of a millisecond, so as long as flushes have been that quick those of a turn are done right away, one after
another. When a turn's would take longer than `INLINE_SECONDS_MAX` they go to threads, where nobody but those who wait
for them notices, until they are quick again. So do background flushes.

A turn with several files has the choice of flushing each, side by side in threads, or the whole file system at once
(`syncfs`) where that is known to flush. The second is an order of magnitude cheaper for a dozen files, unless others
have left much unwritten on the same file system. Both are timed, and the one that has been quicker is used. The other
gets a try now and then: soon after a single slow flush of everything, which has written what others had left and made
the next one quick.

Either way nothing is reported from inside `submit`, and a finished job is reported once, on the loop's thread. What a
report raises is told, and costs no other job its own.
"""

from __future__ import annotations

import errno
import os
import threading
from collections import deque
from collections.abc import Callable
from functools import partial
from queue import Empty, SimpleQueue
from time import monotonic
from typing import Final, cast

from holdfast.exposition import Histogram
from holdfast.real import RealFile, WholeFlushFailed, file_of_whole, flush_descriptor, flush_whole
from holdfast.seams import File, FlushJob

INLINE_SECONDS_MAX: Final = 0.001
"""What takes longer on average must not hold up the loop: others wait there who want nothing from the disk."""
NEWEST_SHARE: Final = 0.1
"""How much the newest flush counts in the average: a single slow one changes nothing, ten in a row do."""
ALL_AT_ONCE_FROM: Final = 3
"""From this many files in a turn on, flushing the whole file system is worth a try."""
FORGIVEN_AFTER_MIN: Final = 16
FORGIVEN_AFTER_MAX: Final = 1024
"""Turns with several files until a slow flush of the whole file system is forgotten. A single one may have written what
others had left; each one more in a row doubles the time."""
TRY_APART_EVERY: Final = 500
"""Turns with several files that are flushed at once before each is flushed by itself again, to know what that takes."""


class AdaptiveFlusher:
    def __init__(
        self,
        threads: int,
        call_soon: Callable[[Callable[[], None]], object],
        call_soon_threadsafe: Callable[[Callable[[], None]], object],
        report: Callable[[str, Exception], None],
    ) -> None:
        """`report` is told what those raise who are told that a flush has ended."""
        self._report = report
        self._pool = FlushThreads(threads, call_soon_threadsafe, self._took)
        self._call_soon = call_soon
        self._submitted: list[FlushJob] = []
        self._average_seconds = 0.0
        self.seconds = Histogram()
        """How long flushes took that somebody waited for."""
        self._many = ManyFiles(self.seconds)

    def _tell(self, done: Callable[[OSError | None], None], error: OSError | None) -> None:
        try:
            done(error)
        except Exception as defect:  # noqa: BLE001 - other jobs are to be reported as well
            self._report("what follows a flush", defect)

    def submit(self, job: FlushJob) -> None:
        job = job._replace(done=partial(self._tell, job.done))
        if job.is_background:
            self._pool.submit(job)
            return
        if not self._submitted:
            self._call_soon(self._begin)
        self._submitted.append(job)

    def _begin(self) -> None:
        """Everything the node wanted flushed in this turn has been submitted, and requests came meanwhile."""
        jobs, self._submitted = [job.gathered() for job in self._submitted], []
        if len(jobs) >= ALL_AT_ONCE_FROM and self._many.are_flushed_at_once(len(jobs), self._average_seconds):
            file = file_of_whole(target for job in jobs for target in job.targets)
            if file is not None:
                self._flush_all_at_once(jobs, file)
                return
        left = INLINE_SECONDS_MAX
        while jobs and len(jobs) * self._average_seconds <= left:
            job = jobs.pop(0)
            began = monotonic()
            error = carry_out(job)
            took = monotonic() - began
            left -= took
            self._took(took)
            job.done(error)
        for job in jobs:
            self._pool.submit(job)

    # Several files

    def _flush_all_at_once(self, jobs: list[FlushJob], file: RealFile) -> None:
        def done(error: OSError | None) -> None:
            if isinstance(error, WholeFlushFailed):
                for job in jobs:
                    self._pool.submit(job)
                return
            for job in jobs:
                job.done(error)

        target = cast(File, _WholeFileSystem(file, self._many.took))  # all that is asked of it is `flush`
        whole = FlushJob((target,), done, is_background=True)
        if self._many.seconds > INLINE_SECONDS_MAX:
            self._pool.submit(whole)
        else:
            done(carry_out(whole))

    def _took(self, seconds: float) -> None:
        self.seconds.note(seconds)
        self._average_seconds += NEWEST_SHARE * (seconds - self._average_seconds)

    def close(self) -> None:
        """Let submitted jobs finish, then end the threads."""
        jobs, self._submitted = [job.gathered() for job in self._submitted], []
        for job in jobs:
            job.done(carry_out(job))
        self._pool.close()


class ManyFiles:
    """Whether the files of a turn are flushed at once or each by itself: whatever has been quicker."""

    def __init__(self, measured: Histogram | None = None) -> None:
        self._measured = measured
        self.seconds = 0.0
        """How long flushing the whole file system has taken on average."""
        self._is_apart = False
        self._turns = 0
        """How long that has been so."""
        self._forgiven_after = FORGIVEN_AFTER_MIN

    def took(self, seconds: float) -> None:
        """The whole file system was flushed."""
        if self._measured is not None:
            self._measured.note(seconds)
        self.seconds += NEWEST_SHARE * (seconds - self.seconds)

    def are_flushed_at_once(self, count: int, seconds_each: float) -> bool:
        self._turns += 1
        is_apart = self.seconds >= count * seconds_each / 2
        if is_apart and self._is_apart and self._turns > self._forgiven_after:
            self._forgiven_after = min(2 * self._forgiven_after, FORGIVEN_AFTER_MAX)
            self.seconds = 0.0
            is_apart = False
        if is_apart != self._is_apart:
            self._is_apart = is_apart
            self._turns = 1
        elif not is_apart and self._turns == FORGIVEN_AFTER_MAX:
            self._forgiven_after = FORGIVEN_AFTER_MIN
        return not is_apart and self._turns % TRY_APART_EVERY != 0


class _WholeFileSystem:
    """The file system a file is on, as something to flush."""

    def __init__(self, file: RealFile, took: Callable[[float], None]) -> None:
        self._file = file
        self._took = took
        self.path = file.path

    def flush(self) -> None:
        began = monotonic()
        flush_whole(self._file)
        self._took(monotonic() - began)


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
        self._queue.put(job)
        if self._under_way > len(self._threads) and len(self._threads) < self._threads_max:
            thread = threading.Thread(target=self._run, name=f"flush-{len(self._threads)}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                # The system gives us no more threads: those we have do, or else the loop waits for the disk.
                if not self._threads:
                    self._wake(self._flush_here)
            else:
                self._threads.append(thread)

    def _flush_here(self) -> None:
        try:
            while (job := self._queue.get_nowait()) is not None:
                self._finished.append((job, carry_out(job), 0.0))
        except Empty:
            self._deliver()

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
    except Exception as defect:  # noqa: BLE001 - whoever waits for the flush would wait for ever
        return OSError(errno.EIO, f"a flush ran into a defect: {defect!r}")
    return None


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        flush_descriptor(fd)
    finally:
        os.close(fd)
