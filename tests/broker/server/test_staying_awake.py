"""After which answers the loop looks for the next request before it sleeps."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.context import Part
from holdfast.broker.server.server import Server
from holdfast.broker.server.staying_awake import CREDIT_MAX, StayingAwake
from holdfast.broker.server.transport import BULK_BYTES, ClientProtocol
from holdfast.real import RealFileSystem

HEARTBEAT, CONSUMER_GROUP_HEARTBEAT, PRODUCE, FETCH, METADATA = 12, 68, 0, 1, 3


class Connection:
    """Answers every request at once."""

    is_saturated = False

    def __init__(self, transmit: Callable[[list[Part]], None], answer: Part) -> None:
        self._transmit = transmit
        self._answer = answer

    def receive(self, frame: bytes, now: object) -> None:
        self._transmit([self._answer])


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def set_write_buffer_limits(self, high: int) -> None:
        assert high > 0

    def get_extra_info(self, name: str) -> tuple[str, int]:
        return "127.0.0.1", 1

    def is_closing(self) -> bool:
        return False

    def write(self, data: bytes) -> None:
        self.written.append(data)


class CountingServer:
    """As much of a server as a connection uses to answer; it counts how often it was kept awake."""

    frame_bytes_max = 2 * BULK_BYTES

    def __init__(self, answer: Part) -> None:
        self._answer = answer
        self.receive_view = memoryview(bytearray(2 * BULK_BYTES))
        self.loop = self.node = self
        self.kept_awake = 0

    def time(self) -> float:
        return 0.0

    def now(self) -> None:
        return None

    def connect(self, listener: str, address: str, transmit: Any, close: Any) -> Connection:
        return Connection(transmit, self._answer)

    def connected(self, protocol: ClientProtocol) -> None:
        return None

    def stay_awake(self) -> None:
        self.kept_awake += 1


def kept_awake_by(*api_keys: int, request_bytes: int = 8, answer: Part = b"answer") -> int:
    server, transport = CountingServer(answer), Transport()
    protocol = ClientProtocol(cast(Server, server), "PLAINTEXT")
    protocol.connection_made(cast(Any, transport))
    for api_key in api_keys:
        frame = struct.pack(">ihhi", request_bytes, api_key, 0, 1) + bytes(request_bytes - 8)
        server.receive_view[: len(frame)] = frame
        protocol.buffer_updated(len(frame))
    assert len(transport.written) == len(api_keys)
    return server.kept_awake


@pytest.mark.parametrize("api_key", [PRODUCE, METADATA])
def test_an_answer_keeps_the_loop_awake_for_what_the_client_asks_next(api_key: int) -> None:
    assert kept_awake_by(api_key) == 1


@pytest.mark.parametrize("api_key", [HEARTBEAT, CONSUMER_GROUP_HEARTBEAT])
def test_a_heartbeat_does_not(api_key: int) -> None:
    assert kept_awake_by(api_key) == 0
    assert kept_awake_by(api_key, PRODUCE, api_key) == 1


def test_a_request_in_bulk_does_not() -> None:
    assert kept_awake_by(PRODUCE, request_bytes=BULK_BYTES - 1) == 1
    assert kept_awake_by(PRODUCE, request_bytes=BULK_BYTES) == 0


def test_an_answer_in_bulk_does_not(tmp_path: Path) -> None:
    path = tmp_path / "segment"
    path.write_bytes(bytes(BULK_BYTES))
    file = RealFileSystem().open(str(path), "read")
    if file.pread_cached(BULK_BYTES, 0) is None:
        pytest.skip("this file system does not tell what is cached")
    assert kept_awake_by(FETCH, answer=Slice(file, 0, BULK_BYTES - 1)) == 1
    assert kept_awake_by(FETCH, answer=Slice(file, 0, BULK_BYTES)) == 0


class Moments:
    """A loop whose time passes when told, and that says whether it would sleep."""

    def __init__(self) -> None:
        self.seconds = 100.0
        self._soon: list[Callable[[], object]] = []

    def call_soon(self, callback: Callable[[], object], /) -> None:
        self._soon.append(callback)

    def pass_by(self, seconds: float) -> None:
        """Turn every hundredth of a millisecond."""
        until = self.seconds + seconds
        while self.seconds < until:
            self.seconds += 0.000_01
            due, self._soon = self._soon, []
            for callback in due:
                callback()

    @property
    def is_awake(self) -> bool:
        return bool(self._soon)


@pytest.fixture
def moments() -> Moments:
    return Moments()


def awake_for(moments: Moments, seconds: float) -> StayingAwake:
    return StayingAwake(moments, seconds, lambda: moments.seconds)


def test_a_loop_waits_for_clients_that_come_back_soon_and_then_sleeps(moments: Moments) -> None:
    awake = awake_for(moments, 0.000_3)
    for _ in range(5):
        awake.answered()
        moments.pass_by(0.000_25)
    assert moments.is_awake
    moments.pass_by(0.000_1)
    assert not moments.is_awake


def test_it_does_not_wait_for_clients_that_take_their_time(moments: Moments) -> None:
    awake = awake_for(moments, 0.000_3)
    for _ in range(50):
        awake.answered()
        assert not moments.is_awake
        moments.pass_by(0.001)


def test_it_gives_up_on_clients_that_become_slow_and_waits_again_for_quick_ones(moments: Moments) -> None:
    awake = awake_for(moments, 0.000_3)
    for _ in range(1000):
        awake.answered()
        moments.pass_by(0.000_1)
    waited_for = 0
    for _ in range(50):
        moments.pass_by(0.001)
        awake.answered()
        waited_for += moments.is_awake
    assert 0 < waited_for <= CREDIT_MAX
    moments.pass_by(0.000_1)
    awake.answered()
    assert moments.is_awake


def test_zero_never_waits(moments: Moments) -> None:
    awake = awake_for(moments, 0.0)
    for _ in range(5):
        awake.answered()
        assert not moments.is_awake
