"""Seams that do nothing until told: a clock that stands still, chance from a seed, flushes and background work.

`ManualFlusher` and `InlineWorker` keep the rule that nothing is reported from inside `submit`: jobs wait in a
queue, and `run_one` or `run_all` carries them out, on the caller's thread, in the order given.
"""

from __future__ import annotations

import errno
import importlib
import random
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from holdfast.atomic import flush_each
from holdfast.errors import HoldfastError
from holdfast.seams import FileSystem, FlushJob, Now


class SeededRandomness:
    """A `holdfast.seams.Randomness` that repeats itself for the same seed."""

    def __init__(self, seed: int | random.Random = 0) -> None:
        self._rng = seed if isinstance(seed, random.Random) else random.Random(seed)

    def uuid_bytes(self) -> bytes:
        value = bytearray(self._rng.randbytes(16))
        value[6] = value[6] & 0x0F | 0x40
        value[8] = value[8] & 0x3F | 0x80
        return bytes(value)

    def below(self, bound: int) -> int:
        return self._rng.randrange(bound)


class ManualFlusher:
    """A `holdfast.seams.Flusher` whose jobs wait until told."""

    def __init__(self, file_system: FileSystem) -> None:
        self._file_system = file_system
        self.jobs: deque[FlushJob] = deque()

    def submit(self, job: FlushJob) -> None:
        self.jobs.append(job)

    def begin_one(self, index: int = 0) -> None:
        """Begin with the job at `index` of the queue: what comes from now on is not part of it."""
        self.jobs[index] = self.jobs[index].gathered()

    def run_one(self, index: int = 0) -> bool:
        """Carry out the job at `index` of the queue and report it; false when there is none."""
        if index >= len(self.jobs):
            return False
        job = self.jobs[index].gathered()
        del self.jobs[index]
        job.done(self.carry_out(job))
        return True

    def run_all(self) -> int:
        """Carry out jobs, those submitted meanwhile included, until none is left; returns how many."""
        count = 0
        while self.run_one():
            count += 1
        return count

    def carry_out(self, job: FlushJob) -> OSError | None:
        """Flush a job's targets in order; the first failure ends it."""
        try:
            flush_each(self._file_system, job.targets)
        except OSError as failure:
            return failure
        except Exception as defect:  # noqa: BLE001 - every job is reported, whatever went wrong with it
            return OSError(errno.EIO, f"a flush ran into a defect: {defect!r}")
        return None


class WorkerJob(NamedTuple):
    task: str
    arguments: Mapping[str, Any]
    done: Callable[[Mapping[str, Any] | None, str | None], None]


class InlineWorker:
    """A `holdfast.seams.Worker` that runs `holdfast.broker.log.tasks` in this process when told."""

    def __init__(self, file_system: FileSystem) -> None:
        self._file_system = file_system
        self.jobs: deque[WorkerJob] = deque()

    def submit(
        self,
        task: str,
        arguments: Mapping[str, Any],
        done: Callable[[Mapping[str, Any] | None, str | None], None],
    ) -> None:
        self.jobs.append(WorkerJob(task, arguments, done))

    def run_one(self) -> bool:
        """Run the oldest job and report it; false when there is none."""
        if not self.jobs:
            return False
        job = self.jobs.popleft()
        tasks = importlib.import_module("holdfast.broker.log.tasks")
        try:
            result = tasks.run(self._file_system, job.task, job.arguments)
        except (HoldfastError, OSError) as failure:
            job.done(None, str(failure))
        else:
            job.done(result, None)
        return True

    def run_all(self) -> int:
        count = 0
        while self.run_one():
            count += 1
        return count


START_WALL_MS = 1_700_000_000_000


class ManualClock:
    """A `holdfast.seams.Clock`. `advance` moves both readings; `step_wall` moves what may step back."""

    def __init__(self, wall_ms: int = START_WALL_MS, monotonic_ms: int = 0) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms

    def now(self) -> Now:
        return Now(self._wall_ms, self._monotonic_ms)

    @property
    def read_ns(self) -> int:
        return self._monotonic_ms * 1_000_000

    def monotonic_ns(self) -> int:
        return self._monotonic_ms * 1_000_000

    def since_boot_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> Now:
        """Let time pass, and return the new reading."""
        if ms < 0:
            raise ValueError(f"time does not run backwards by {-ms} ms; step_wall sets the wall clock back")
        self._wall_ms += ms
        self._monotonic_ms += ms
        return self.now()

    def step_wall(self, ms: int) -> Now:
        """Set the wall clock forward or back, as an operator or NTP does."""
        self._wall_ms += ms
        return self.now()
