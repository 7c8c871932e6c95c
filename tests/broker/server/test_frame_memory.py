"""Half-received frames: bounded together, one can always get done, and who stalls loses his place."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import cast

import pytest

from holdfast import Broker
from holdfast.broker.server import frame_memory
from holdfast.broker.server.frame_memory import (
    LARGEST_FRAMES_MIN,
    READ_BYTES_MIN,
    WINDOW_BYTES,
    WINDOW_SECONDS,
    FrameMemory,
    HalfFrame,
    frame_bytes_limit,
    memory_bytes,
)
from holdfast.testing.wire_client import CLOSED, WireClient, frame
from holdfast.wire.api_keys import CREATE_TOPICS, PRODUCE
from holdfast.wire.batch import make_batch
from holdfast.wire.messages import encode_request

KIB, MIB = 1 << 10, 1 << 20
LIMIT = 1000 * KIB
FRAME = 400 * KIB


class Timer:
    def __init__(self, loop: ManualLoop) -> None:
        self._loop = loop

    def cancel(self) -> None:
        self._loop.due = None


class ManualLoop:
    """As much of an event loop as is asked for: a time that moves when told, and one timer."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: tuple[float, Callable[[], None]] | None = None

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, action: Callable[[], None]) -> Timer:
        assert self.due is None
        self.due = (self.now + delay, action)
        return Timer(self)

    def advance(self, seconds: float) -> None:
        end = self.now + seconds
        while self.due is not None and self.due[0] <= end:
            (self.now, action), self.due = self.due, None
            action()
        self.now = end


class Sender:
    """One connection with a frame on its way."""

    def __init__(self, memory: FrameMemory, length: int = FRAME, begun: int = 0) -> None:
        self.memory = memory
        self.is_read = True
        self.lost: str | None = None
        self.is_done = False
        self.frame = HalfFrame(self, length, memoryview(bytes(begun)))
        self.is_read = memory.begin(self.frame)

    def send(self, count: int) -> int:
        """Send up to `count` bytes, as long as they are taken; returns how many were."""
        sent = 0
        while sent < count and self.is_read and not self.is_done:
            left = len(self.frame.buffer) - self.frame.arrived
            piece = min(count - sent, left, self.memory.room(self.frame))
            self.is_read = self.memory.arrived(self.frame, piece)
            sent += piece
            if self.frame.is_whole:
                self.leave()
        return sent

    def leave(self) -> None:
        self.is_done = True
        self.memory.end(self.frame)

    def go_on(self) -> None:
        assert not self.is_done
        self.is_read = True

    def lose(self, reason: str) -> None:
        self.lost = reason
        self.leave()


@pytest.fixture
def loop() -> ManualLoop:
    return ManualLoop()


@pytest.fixture
def memory(loop: ManualLoop) -> FrameMemory:
    return FrameMemory(LIMIT, cast(asyncio.AbstractEventLoop, loop))


def test_what_counts_is_what_has_arrived_not_what_was_announced(memory: FrameMemory) -> None:
    giants = [Sender(memory, 100 * LIMIT, begun=KIB) for _ in range(100)]
    assert memory.held == 100 * KIB
    assert all(giant.is_read for giant in giants)
    assert Sender(memory).send(FRAME) == FRAME
    assert memory.held == 100 * KIB


def test_at_the_limit_one_frame_at_a_time_gets_done(memory: FrameMemory) -> None:
    senders = [Sender(memory) for _ in range(10)]
    for sender in senders:
        sender.send(FRAME - KIB)
    assert memory.held <= LIMIT + FRAME + 10 * READ_BYTES_MIN
    reading = [sender for sender in senders if sender.is_read]
    assert 0 < len(reading) < 10
    while not all(sender.is_done for sender in senders):
        assert sum(sender.send(FRAME) for sender in senders), "nobody goes on"
    assert memory.held == 0


def test_who_falls_silent_while_others_wait_is_lost_and_who_waits_is_not(
    memory: FrameMemory, loop: ManualLoop
) -> None:
    silent = [Sender(memory) for _ in range(3)]
    for sender in silent:
        sender.send(FRAME - 1)
    loop.advance(1000)
    assert not any(sender.lost for sender in silent), "nobody wants the memory"
    waiting = Sender(memory)
    assert waiting.send(FRAME) == 0
    loop.advance(2 * WINDOW_SECONDS)
    assert all(sender.lost for sender in silent)
    assert "queued.max.request.bytes=1024000" in (silent[0].lost or "")
    assert waiting.lost is None
    assert waiting.send(FRAME) == FRAME
    loop.advance(1000)
    assert loop.due is None, "nothing is looked for when nobody waits"


@pytest.mark.parametrize(("bytes_per_second", "is_lost"), [(KIB, True), (2 * WINDOW_BYTES // 10, False)])
def test_who_drips_while_others_wait_is_lost(
    memory: FrameMemory, loop: ManualLoop, bytes_per_second: int, is_lost: bool
) -> None:
    slow = Sender(memory, 100 * LIMIT, begun=LIMIT)
    waiting = Sender(memory, begun=KIB)
    assert not waiting.is_read
    for _ in range(40):
        slow.send(bytes_per_second)
        loop.advance(1)
    assert bool(slow.lost) == is_lost
    assert waiting.is_read == is_lost


def test_a_sender_who_had_to_wait_has_all_the_time_anew(memory: FrameMemory, loop: ManualLoop) -> None:
    first = Sender(memory, 100 * LIMIT, begun=LIMIT)
    second, third = Sender(memory, begun=KIB), Sender(memory, begun=KIB)
    for _ in range(10 * int(WINDOW_SECONDS)):
        first.send(WINDOW_BYTES // 5)
        loop.advance(1)
    assert not second.is_read
    first.leave()
    loop.advance(WINDOW_SECONDS / 2)
    assert second.lost is None
    assert third.lost is None


def test_any_order_of_events_keeps_the_bounds_and_somebody_going(
    memory: FrameMemory, loop: ManualLoop
) -> None:
    chance = random.Random(7)
    senders: list[Sender] = []
    for _ in range(20_000):
        senders = [sender for sender in senders if not sender.is_done]
        if len(senders) < 12 and chance.random() < 0.3:
            senders.append(Sender(memory, chance.randrange(1, FRAME), begun=0))
        elif senders:
            sender = chance.choice(senders)
            if chance.random() < 0.05:
                sender.leave()
            else:
                sender.send(chance.randrange(1, 200 * KIB))
        if chance.random() < 0.1:
            loop.advance(chance.random() * 3)
        alive = [sender for sender in senders if not sender.is_done]
        assert memory.held == sum(sender.frame.arrived for sender in alive)
        assert memory.held <= LIMIT + FRAME + 12 * READ_BYTES_MIN
        assert not alive or any(sender.is_read for sender in alive)
    for sender in senders:
        if not sender.is_done:
            sender.leave()
    assert memory.held == 0


def test_without_a_limit_nobody_waits(loop: ManualLoop) -> None:
    memory = FrameMemory(-1, cast(asyncio.AbstractEventLoop, loop))
    assert all(Sender(memory, 10 * LIMIT, begun=LIMIT).is_read for _ in range(10))
    assert loop.due is None


def test_unless_given_the_limit_is_a_share_of_the_memory() -> None:
    assert frame_bytes_limit(-1, 100) == -1
    assert frame_bytes_limit(5000, 100) == 5000
    assert frame_bytes_limit(None, 100) == memory_bytes() // 4
    assert frame_bytes_limit(None, memory_bytes()) == LARGEST_FRAMES_MIN * memory_bytes()


def test_a_group_that_is_allowed_less_than_the_machine_has_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlimited, limited = tmp_path / "memory.max", tmp_path / "around" / "memory.max"
    limited.parent.mkdir()
    unlimited.write_text("max\n", encoding="ascii")
    limited.write_text("1048576\n", encoding="ascii")
    machine = memory_bytes()
    monkeypatch.setattr(frame_memory, "_cgroup_files", lambda: [str(unlimited), str(tmp_path / "none")])
    assert memory_bytes() >= machine
    monkeypatch.setattr(frame_memory, "_cgroup_files", lambda: [str(unlimited), str(limited)])
    assert memory_bytes() == 1048576


# Real sockets


@pytest.fixture
def said() -> list[str]:
    """What the broker has said."""
    return []


@pytest.fixture
def broker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: list[str]) -> Iterator[Broker]:
    """Half-received frames of 8 MiB together; who stalls is found out soon."""
    monkeypatch.setattr(frame_memory, "WINDOW_SECONDS", 0.6)
    monkeypatch.setattr(frame_memory, "LOOK_SECONDS", 0.1)
    settings = {
        "socket.request.max.bytes": str(4 * MIB),
        "queued.max.request.bytes": str(8 * MIB),
        "message.max.bytes": str(4 * MIB),
    }
    with Broker(str(tmp_path / "data"), settings=settings, say=said.append) as broker:
        topic = {"name": "t", "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
        with WireClient(broker.bootstrap_servers) as client:
            client.ask(CREATE_TOPICS, 5, {"topics": [topic], "timeout": 30_000})
        yield broker


def connect(broker: Broker) -> socket.socket:
    host, _, port = broker.bootstrap_servers.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=0.3)


def produce_body(size: int) -> bytes:
    batch = make_batch([bytes(size)], timestamp=time.time_ns() // 1_000_000)
    data = [{"index": 0, "records": batch}]
    fields = {"acks": -1, "timeout": 30_000, "topic_data": [{"name": "t", "partition_data": data}]}
    return encode_request(PRODUCE, 9, fields)


def stall(stack: ExitStack, broker: Broker, count: int) -> None:
    """So many clients that send almost all of a large frame, as far as it is taken, and fall silent."""
    begun = struct.pack(">i", 4 * MIB) + bytes(4 * MIB - 100)
    for _ in range(count):
        silent = stack.enter_context(connect(broker))
        with suppress(TimeoutError):
            silent.sendall(begun)


def test_an_honest_large_produce_gets_through_between_stalled_senders(
    broker: Broker, said: list[str]
) -> None:
    with ExitStack() as stack, WireClient(broker.bootstrap_servers) as honest:
        stall(stack, broker, 5)
        assert honest.is_alive(), "small requests pass"
        answer = honest.ask_encoded(PRODUCE, 9, produce_body(3 * MIB))
        assert answer != CLOSED
        assert answer.responses[0].partition_responses[0].error_code == 0
    assert any("others wait for memory" in line for line in said)


def test_announcements_alone_keep_nobody_waiting(broker: Broker, said: list[str]) -> None:
    with ExitStack() as stack, WireClient(broker.bootstrap_servers) as honest:
        for _ in range(50):
            stack.enter_context(connect(broker)).sendall(struct.pack(">i", 4 * MIB) + bytes(1000))
        for _ in range(5):
            answer = honest.ask_encoded(PRODUCE, 9, produce_body(3 * MIB))
            assert answer.responses[0].partition_responses[0].error_code == 0
    assert not any("others wait" in line for line in said)


def test_many_large_produces_at_once_all_get_through(broker: Broker) -> None:
    request = frame(PRODUCE, 9, produce_body(3 * MIB), correlation_id=5)
    with ExitStack() as stack:
        clients = [stack.enter_context(WireClient(broker.bootstrap_servers)) for _ in range(8)]
        for at in range(0, len(request), 500_000):
            for client in clients:
                client.send(request[at : at + 500_000])
        for client in clients:
            assert isinstance(client.receive(), bytes)
