"""The broker as the simulator sees it, and the flusher it is given.

A flush has two phases, as it has on a real disk: it is carried out at one moment and reported at a later one,
and whatever is written in between is not covered by it.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import NamedTuple, Protocol

from holdfast.seams import Clock, FileSystem, Flusher, FlushJob, Now, Randomness, Worker
from holdfast.testing.fakes import ManualFlusher


class BrokerConnection(Protocol):
    def send(self, frame: bytes, now: Now) -> None:
        """One request, without its length prefix."""
        ...

    def cut(self) -> None:
        """The connection is gone; nothing more is delivered on it."""
        ...


class Broker(Protocol):
    """A running broker. It is dropped, without a word, when its process dies."""

    @property
    def is_failed(self) -> bool:
        """The disk failed it; only a restart helps."""
        ...

    def connect(
        self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]
    ) -> BrokerConnection: ...

    def next_deadline_ms(self) -> int | None: ...

    def tick(self, now: Now) -> None: ...

    def end_turn(self) -> None:
        """All requests that had arrived were begun."""
        ...

    def stop_cleanly(self, now: Now) -> None: ...


class Seams(NamedTuple):
    """What a broker is started with."""

    file_system: FileSystem
    clock: Clock
    randomness: Randomness
    flusher: Flusher
    worker: Worker
    boot_id: str
    """Another one after each power loss."""
    say: Callable[[str], None]


Start = Callable[[Seams], Broker]


class SimulatedFlusher(ManualFlusher):
    """Carries out and reports flushes one by one, in an order drawn by the simulator."""

    def __init__(self, file_system: FileSystem) -> None:
        super().__init__(file_system)
        self.carried_out: list[tuple[FlushJob, OSError | None]] = []
        self.has_failed = False
        """Whether a flush has failed in this life of the broker."""
        self._slow: FlushJob | None = None
        self._slow_steps = 0
        self._stalled_steps = 0

    @property
    def is_idle(self) -> bool:
        return not self.jobs and not self.carried_out and self._slow is None

    @property
    def has_unreported_failure(self) -> bool:
        """A flush failed, and the broker has not been told: the page cache lies, and no file says so."""
        return any(error is not None for _, error in self.carried_out)

    def slow_down(self, steps: int, index: int = 0) -> bool:
        """Hold back a flush, by default the oldest, for some steps while others go on; false when there is none."""
        if self._slow is not None or not self.jobs:
            return False
        index %= len(self.jobs)
        self._slow = self.jobs[index]
        del self.jobs[index]
        self._slow_steps = steps
        return True

    def stall(self, steps: int) -> None:
        """The disk hangs: no flush makes progress for some steps."""
        self._stalled_steps = steps

    def step(self, rng: random.Random) -> None:
        """Carry out one flush, or report one."""
        if self._stalled_steps > 0:
            self._stalled_steps -= 1
            return
        if self._slow is not None:
            self._slow_steps -= 1
            if self._slow_steps <= 0:
                self.jobs.append(self._slow)
                self._slow = None
        if self.carried_out and (not self.jobs or rng.random() < 0.5):
            job, error = self.carried_out.pop(rng.randrange(len(self.carried_out)))
            self.report(job, error)
        elif self.jobs:
            index = rng.randrange(len(self.jobs))
            job = self.jobs[index].gathered()
            del self.jobs[index]
            error = self.carry_out(job)
            self.has_failed = self.has_failed or error is not None
            self.carried_out.append((job, error))

    def report_all(self) -> None:
        """What was carried out is reported before a clean stop; what was not, never will be."""
        while self.carried_out:
            self.report(*self.carried_out.pop(0))

    def report(self, job: FlushJob, error: OSError | None) -> None:
        job.done(error)
