"""The broker as the simulator sees it, and the flusher it is given.

`Broker` is one life of the real broker's core, `holdfast.broker.node.node.Node`. It is dropped, without a word, when
its process dies.

A flush has two phases, as it has on a real disk: it is carried out at one moment and reported at a later one,
and whatever is written in between is not covered by it.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from functools import cache
from typing import TypeAlias

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.connection import Connection
from holdfast.broker.node.context import Part
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config import BrokerConfig
from holdfast.seams import FileSystem, FlushJob, Now
from holdfast.testing.fakes import ManualFlusher
from holdfast.wire.metadata_records import EndPoint

MakeSeams: TypeAlias = Callable[..., NodeSeams]
"""Gives a broker its seams, of which it brings `call_soon` itself."""


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


DATA_DIRECTORIES = ("/data", "/more")
"""Two disks in one: each directory fails by itself."""
_LISTENER = "PLAINTEXT"
_SETTINGS = {
    "node.id": "1",
    "log.dirs": ",".join(DATA_DIRECTORIES),
    "listeners": "PLAINTEXT://127.0.0.1:9092",
    "log.segment.delete.delay.ms": "500",
    "log.retention.check.interval.ms": "1000",
    "log.message.timestamp.after.max.ms": str(2**63 - 1),
    "log.cleaner.backoff.ms": "400",
    "log.cleaner.min.cleanable.ratio": "0.1",
    "log.roll.ms": "3000",
    "offsets.topic.num.partitions": "2",
    "transaction.state.log.num.partitions": "2",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "300",
    "group.initial.rebalance.delay.ms": "50",
    "group.min.session.timeout.ms": "100",
    "group.consumer.session.timeout.ms": "3000",
    "group.consumer.min.session.timeout.ms": "1000",
    "group.consumer.heartbeat.interval.ms": "300",
    "group.consumer.min.heartbeat.interval.ms": "100",
}


@cache
def broker_config() -> BrokerConfig:
    """One broker's settings, parsed once for all seeds."""
    return BrokerConfig.load(_SETTINGS)[0]


class Broker:
    """One life of the broker over the given disk; raises what the real one raises at its start."""

    def __init__(self, make_seams: MakeSeams) -> None:
        self._turn: deque[Callable[[], None]] = deque()
        seams = make_seams(call_soon=self._turn.append)
        self._node = Node(broker_config(), seams)
        self._node.start([EndPoint(_LISTENER, "127.0.0.1", 9092, 0)], seams.clock.now())

    @property
    def is_failed(self) -> bool:
        """The disk failed it; only a restart helps."""
        return any(directory.offline for directory in self._node.directories)

    def connect(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> BrokerConnection:
        return BrokerConnection(self._node, on_frame, on_close)

    def next_deadline_ms(self) -> int | None:
        return self._node.next_deadline_ms

    def tick(self, now: Now) -> None:
        self._node.tick(now)

    def end_turn(self) -> None:
        """All requests that had arrived were begun."""
        turn = self._turn
        while turn:
            turn.popleft()()

    def stop_cleanly(self, now: Now) -> None:
        self._node.stop(now)


class BrokerConnection:
    def __init__(
        self, node: Node, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]
    ) -> None:
        self._buffer = bytearray()
        self._on_frame = on_frame
        self._connection: Connection = node.connect(_LISTENER, "127.0.0.1", self._transmit, on_close)

    def send(self, frame: bytes, now: Now) -> None:
        """One request, without its length prefix."""
        self._connection.receive(frame, now)

    def cut(self) -> None:
        """The connection is gone; nothing more is delivered on it."""
        self._connection.lost()

    def _transmit(self, parts: list[Part]) -> None:
        buffer = self._buffer
        for part in parts:
            buffer += part.file.pread(part.length, part.position) if isinstance(part, Slice) else part
        while len(buffer) >= 4:
            end = 4 + int.from_bytes(buffer[:4], "big")
            if len(buffer) < end:
                break
            self._on_frame(bytes(buffer[4:end]))
            del buffer[:end]
