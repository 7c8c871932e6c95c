"""Flushing off the event loop: a small pool of threads that do nothing but wait for the disk.

`fdatasync` releases the interpreter lock, so while a thread waits the loop serves. A finished job reports
through one wake-up of the loop for however many jobs have finished meanwhile.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable
from queue import SimpleQueue

from holdfast.seams import FlushJob


class ThreadFlusher:
    def __init__(self, threads: int, call_soon_threadsafe: Callable[[Callable[[], None]], object]) -> None:
        self._queue: SimpleQueue[FlushJob | None] = SimpleQueue()
        self._wake = call_soon_threadsafe
        self._finished: deque[tuple[FlushJob, OSError | None]] = deque()
        self._wake_pending = False
        self._threads_max = threads
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._lock = threading.Lock()

    def submit(self, job: FlushJob) -> None:
        self._queue.put(job)
        with self._lock:
            wanted = self._queue.qsize() > self._idle and len(self._threads) < self._threads_max
        if wanted:
            thread = threading.Thread(target=self._run, name=f"flush-{len(self._threads)}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def close(self) -> None:
        """Let queued jobs finish, then end the threads."""
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
        self._deliver()

    def _run(self) -> None:
        while True:
            with self._lock:
                self._idle += 1
            job = self._queue.get()
            with self._lock:
                self._idle -= 1
            if job is None:
                return
            error: OSError | None = None
            try:
                for target in job.targets:
                    if isinstance(target, str):
                        _flush_directory(target)
                    else:
                        target.flush()
            except OSError as failure:
                error = failure
            self._finished.append((job, error))
            if not self._wake_pending:
                self._wake_pending = True
                self._wake(self._deliver)

    def _deliver(self) -> None:
        self._wake_pending = False
        finished = self._finished
        while finished:
            job, error = finished.popleft()
            job.done(error)


def _flush_directory(path: str) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
