"""A whole node on a simulated disk: requests go in as bytes, what comes out is decoded."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.context import Part
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config.broker import BrokerConfig
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import InlineWorker, ManualClock, ManualFlusher, SeededRandomness
from holdfast.wire import messages
from holdfast.wire.apis import BY_KEY, FLEXIBLE_FROM
from holdfast.wire.metadata_records import EndPoint

BASE = {"node.id": "1", "log.dirs": "/data", "listeners": "PLAINTEXT://127.0.0.1:9092"}


class Desk:
    """One node and one client connection."""

    def __init__(self, settings: Mapping[str, str] | None = None, disk: SimulatedDisk | None = None) -> None:
        self.settings = {**BASE, **(settings or {})}
        self.clock = ManualClock()
        self.disk = disk or SimulatedDisk(clock=self.clock)
        self.said: list[str] = []
        self.sent: list[bytes] = []
        self.closed: list[str] = []
        self.turn: deque[Callable[[], None]] = deque()
        self.flusher = ManualFlusher(self.disk)
        seams = NodeSeams(
            fs=self.disk,
            randomness=SeededRandomness(7),
            flusher=self.flusher,
            worker=InlineWorker(self.disk),
            clock=self.clock,
            call_soon=self.turn.append,
            boot_id="boot",
            say=self.said.append,
        )
        self.node = Node(BrokerConfig.load(self.settings)[0], seams)
        self.node.start([EndPoint("PLAINTEXT", "127.0.0.1", 9092, 0)], self.clock.now())
        self.settle()
        self.connection = self.node.connect("PLAINTEXT", "10.0.0.9", self._transmit, self.closed.append)

    def _transmit(self, parts: list[Part]) -> None:
        self.sent.append(
            b"".join(
                part.file.pread(part.length, part.position) if isinstance(part, Slice) else bytes(part)
                for part in parts
            )
        )

    def settle(self) -> None:
        """Let every flush under way, and those it leads to, return."""
        while self.turn or self.flusher.jobs:
            while self.turn:
                self.turn.popleft()()
            self.flusher.run_all()

    def begin(self, api_key: int, version: int, **fields: Any) -> None:
        """Send a request; nothing is flushed yet."""
        flexible = version >= FLEXIBLE_FROM[api_key]
        header = api_key.to_bytes(2, "big") + version.to_bytes(2, "big") + (5).to_bytes(4, "big")
        header += (4).to_bytes(2, "big") + b"desk" + (b"\0" if flexible else b"")
        body = messages.encode_request(api_key, version, fields)
        self.connection.receive(header + body, self.clock.now())

    def ask(self, api_key: int, version: int | None = None, **fields: Any) -> Any:
        """Send a request, in the newest version unless told, and return the decoded answer."""
        version = BY_KEY[api_key].max if version is None else version
        self.begin(api_key, version, **fields)
        self.settle()
        assert not self.closed, self.closed
        assert len(self.sent) == 1
        answer = self.sent.pop()
        head = 8 + messages.response_header_version(api_key, version)
        return messages.decode_response(api_key, version, answer, head)

    def create(self, name: str, partitions: int = 1, **configs: str) -> Any:
        """Create a topic; settings are given with underscores for dots."""
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "assignments": [],
            "configs": [
                {"name": setting.replace("_", "."), "value": value} for setting, value in configs.items()
            ],
        }
        (result,) = self.ask(19, topics=[topic], timeout=5000).topics
        assert result.error_code == 0, result
        return result

    def restart(self, settings: Mapping[str, str] | None = None) -> Desk:
        """Stop this node cleanly and start another on its disk."""
        self.node.stop(self.clock.now())
        return Desk({**self.settings, **(settings or {})}, self.disk)


@pytest.fixture(autouse=True)
def only_known_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    """A key that no version of a message has is an error, not dropped."""
    monkeypatch.setattr(messages, "strict_fields", True)


@pytest.fixture
def desk() -> Desk:
    return Desk()


@pytest.fixture
def make_desk() -> Callable[..., Desk]:
    return Desk
