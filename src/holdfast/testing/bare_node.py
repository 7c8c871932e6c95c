"""A node without a shell: requests in as bytes, answers out, and nothing happens unless a test says so.

`BareNode` puts a real `Node` on a `SimulatedDisk` with manual seams. Its time stands still, its flushes wait, its
connections are lists. `settle` lets everything due come to pass; tests that want to look in between use `turn` and
`flusher`.

    node = BareNode()
    client = node.connect()
    client.begin(PRODUCE, 9, ...)       # nothing is flushed yet
    assert not client.answers
    node.settle()
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from holdfast.broker.log.segment import Slice
from holdfast.broker.node.context import Part
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import NodeSeams
from holdfast.config.broker import BrokerConfig
from holdfast.saying import Say
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import InlineWorker, ManualClock, ManualFlusher, SeededRandomness
from holdfast.testing.wire_client import frame
from holdfast.wire.apis import BY_KEY
from holdfast.wire.messages import decode_response, encode_request, response_header_version
from holdfast.wire.metadata_records import EndPoint

SETTINGS = {"node.id": "1", "log.dirs": "/data", "listeners": "PLAINTEXT://127.0.0.1:9092"}
LENGTH_BYTES = 4
Meanwhile: TypeAlias = Callable[[SimulatedDisk], None]
"""What somebody does to the disk while no node runs on it."""


def check_defects(said: list[str]) -> None:
    """A timer that raises spoils no other, but it does spoil a test."""
    for line in said:
        if line.startswith("defect"):
            raise AssertionError(line)


class BareClient:
    """One connection to a `BareNode`."""

    def __init__(self, node: BareNode) -> None:
        self.node = node
        self._asked: dict[int, tuple[int, int]] = {}
        self._correlation_id = 0
        self.frames: list[bytes] = []
        """Whole responses in the order they left, without their lengths."""
        self.closed: list[str] = []
        """Why the node closed the connection, if it did."""
        self.connection = node.node.connect("PLAINTEXT", "10.0.0.9:4711", self._transmit, self.closed.append)

    def _transmit(self, parts: list[Part]) -> None:
        data = b"".join(
            part.file.pread(part.length, part.position) if isinstance(part, Slice) else bytes(part)
            for part in parts
        )
        while data:
            (length,) = struct.unpack_from(">i", data)
            self.frames.append(data[LENGTH_BYTES : LENGTH_BYTES + length])
            data = data[LENGTH_BYTES + length :]

    def begin(self, api_key: int, version: int | None = None, /, **fields: Any) -> int:
        """Send a request and let nothing happen but its beginning; returns its correlation id."""
        version = BY_KEY[api_key].max if version is None else version
        self._correlation_id += 1
        self._asked[self._correlation_id] = (api_key, version)
        body = encode_request(api_key, version, fields)
        self.send(frame(api_key, version, body, correlation_id=self._correlation_id)[LENGTH_BYTES:])
        return self._correlation_id

    def send(self, request: bytes) -> None:
        """Any frame, without its length."""
        self.connection.receive(request, self.node.clock.now())

    @property
    def correlation_ids(self) -> list[int]:
        """Of the responses that have left, in order."""
        return [struct.unpack_from(">i", answer)[0] for answer in self.frames]

    def answer(self, correlation_id: int) -> Any:
        """The decoded answer to a request, taken out of what has left."""
        at = self.correlation_ids.index(correlation_id)
        api_key, version = self._asked[correlation_id]
        head = LENGTH_BYTES + response_header_version(api_key, version)
        return decode_response(api_key, version, self.frames.pop(at), head)

    def ask(self, api_key: int, version: int | None = None, /, **fields: Any) -> Any:
        """Send a request, let everything come to pass, and return the decoded answer."""
        correlation_id = self.begin(api_key, version, **fields)
        self.node.settle()
        if self.closed:
            raise AssertionError(f"the connection was closed: {self.closed}")
        return self.answer(correlation_id)

    def create_topic(self, name: str, partitions: int = 1, **configs: str) -> None:
        """Settings are given with underscores for dots."""
        topic = {
            "name": name,
            "num_partitions": partitions,
            "replication_factor": 1,
            "assignments": [],
            "configs": [
                {"name": setting.replace("_", "."), "value": value} for setting, value in configs.items()
            ],
        }
        (result,) = self.ask(19, 5, topics=[topic], timeout=5000).topics
        if result.error_code:
            raise AssertionError(f"{name} was not created: {result}")

    def produce_fields(self, topic: str, batches: Mapping[int, bytes], acks: int = -1) -> dict[str, Any]:
        data = [{"index": index, "records": batch} for index, batch in batches.items()]
        return {
            "transactional_id": None,
            "acks": acks,
            "timeout": 30_000,
            "topic_data": [{"name": topic, "partition_data": data}],
        }

    def begin_produce(self, topic: str, batch: bytes, index: int = 0, acks: int = -1) -> int:
        return self.begin(0, 9, **self.produce_fields(topic, {index: batch}, acks))

    def produce(self, topic: str, batch: bytes, index: int = 0) -> Any:
        """Produce with acks=all; returns the partition's part of the answer."""
        answer = self.ask(0, 9, **self.produce_fields(topic, {index: batch}))
        return answer.responses[0].partition_responses[0]

    def begin_fetch(self, topic: str, offset: int, index: int = 0, max_wait_ms: int = 0) -> int:
        wanted = {
            "partition": index,
            "fetch_offset": offset,
            "partition_max_bytes": 1 << 20,
            "current_leader_epoch": -1,
            "last_fetched_epoch": -1,
            "log_start_offset": -1,
        }
        return self.begin(
            1,
            12,
            max_wait=max_wait_ms,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic": topic, "partitions": [wanted]}],
        )

    def fetch(self, topic: str, offset: int, index: int = 0) -> Any:
        """The partition's part of a fetch that does not wait."""
        correlation_id = self.begin_fetch(topic, offset, index)
        self.node.settle()
        return self.answer(correlation_id).responses[0].partitions[0]


class BareNode:
    def __init__(
        self,
        settings: Mapping[str, str] | None = None,
        *,
        disk: SimulatedDisk | None = None,
        clock: ManualClock | None = None,
        boot_id: str = "first boot",
        settles: bool = True,
        say: Say | None = None,
        accept_loss: Sequence[str] = (),
    ) -> None:
        """With `settles` false, what the start has begun is left under way. What `say` gets is not in `said`."""
        self.settings = {**SETTINGS, **(settings or {})}
        self.clock = clock or ManualClock()
        self.disk = disk or SimulatedDisk(clock=self.clock)
        self.boot_id = boot_id
        self.said: list[str] = []
        self._turn: deque[Callable[[], None]] = deque()
        self.flusher = ManualFlusher(self.disk)
        self.worker = InlineWorker(self.disk)
        seams = NodeSeams(
            fs=self.disk,
            randomness=SeededRandomness(self.disk.generation),
            flusher=self.flusher,
            worker=self.worker,
            clock=self.clock,
            call_soon=self._turn.append,
            boot_id=boot_id,
            say=say or self.said.append,
        )
        self.node = Node(BrokerConfig.load(self.settings)[0], seams, accept_loss)
        self.node.start([EndPoint("PLAINTEXT", "127.0.0.1", 9092, 0)], self.clock.now())
        if settles:
            self.settle()

    def connect(self) -> BareClient:
        return BareClient(self)

    @property
    def has_turn(self) -> bool:
        """Whether something was asked to run soon."""
        return bool(self._turn)

    def turn(self) -> None:
        """End the turn: what was asked to run soon runs. Flushes are begun, none returns."""
        while self._turn:
            self._turn.popleft()()

    def settle(self, *, works: bool = True) -> None:
        """Let every flush and, unless told not to, all background work under way return, and what they lead to."""
        while self._turn or self.flusher.jobs or (works and self.worker.jobs):
            self.turn()
            self.flusher.run_all()
            if works:
                self.worker.run_one()

    def advance(self, ms: int) -> None:
        """Let time pass and run what is due."""
        said = len(self.said)
        self.node.tick(self.clock.advance(ms))
        check_defects(self.said[said:])

    def hosted(self, topic: str, index: int = 0) -> HostedPartition:
        hosted = self.node.partitions.get(topic, index)
        if hosted is None:
            raise AssertionError(f"{topic}-{index} is not hosted: {self.said}")
        return hosted

    # Ending, and beginning again on what is left

    def stop(self, meanwhile: Meanwhile | None = None) -> BareNode:
        """Stop cleanly and start anew."""
        self.node.stop(self.clock.now())
        return self._again(self.boot_id, meanwhile)

    def kill(self, meanwhile: Meanwhile | None = None) -> BareNode:
        """The process dies; the page cache does not. Start anew."""
        self.disk.kill()
        return self._again(self.boot_id, meanwhile)

    def lose_power(self, meanwhile: Meanwhile | None = None) -> BareNode:
        """What was not flushed may be gone. Start anew, after another boot."""
        self.disk.crash()
        return self._again(f"boot {self.disk.generation}", meanwhile)

    def _again(self, boot_id: str, meanwhile: Meanwhile | None) -> BareNode:
        if meanwhile is not None:
            meanwhile(self.disk)
        return BareNode(self.settings, disk=self.disk, clock=self.clock, boot_id=boot_id)
