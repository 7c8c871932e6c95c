"""The real broker's core, `holdfast.broker.node.node.Node`, behind the simulator's `Broker`."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from functools import cache

from tests.support.simulator.broker import BrokerConnection, Seams

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.connection import Connection
from holdfast.broker.node.context import Part
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config import BrokerConfig
from holdfast.seams import Now
from holdfast.wire.metadata_records import EndPoint

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


class NodeBroker:
    """One life of the broker."""

    def __init__(self, node: Node, turn: deque[Callable[[], None]]) -> None:
        self._node = node
        self._turn = turn

    @property
    def is_failed(self) -> bool:
        return any(directory.offline for directory in self._node.directories)

    def connect(self, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]) -> BrokerConnection:
        return NodeConnection(self._node, on_frame, on_close)

    def next_deadline_ms(self) -> int | None:
        return self._node.next_deadline_ms

    def tick(self, now: Now) -> None:
        self._node.tick(now)

    def end_turn(self) -> None:
        turn = self._turn
        while turn:
            turn.popleft()()

    def stop_cleanly(self, now: Now) -> None:
        self._node.stop(now)


class NodeConnection:
    def __init__(
        self, node: Node, on_frame: Callable[[bytes], None], on_close: Callable[[str], None]
    ) -> None:
        self._buffer = bytearray()
        self._on_frame = on_frame
        self._connection: Connection = node.connect(_LISTENER, "127.0.0.1", self._transmit, on_close)

    def send(self, frame: bytes, now: Now) -> None:
        self._connection.receive(frame, now)

    def cut(self) -> None:
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


def start_node(seams: Seams) -> NodeBroker:
    """Start a broker over the given disk; raises what the real one raises."""
    turn: deque[Callable[[], None]] = deque()
    node = Node(
        broker_config(),
        NodeSeams(
            fs=seams.file_system,
            randomness=seams.randomness,
            flusher=seams.flusher,
            worker=seams.worker,
            clock=seams.clock,
            call_soon=turn.append,
            boot_id=seams.boot_id,
            say=seams.say,
        ),
    )
    node.start([EndPoint(_LISTENER, "127.0.0.1", 9092, 0)], seams.clock.now())
    return NodeBroker(node, turn)
