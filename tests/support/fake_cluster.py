"""A Kafka cluster that does as a test says: several brokers on loopback, leaders that move, answers that go wrong.

    with FakeCluster(brokers=2) as cluster:
        topic = cluster.add_topic("orders", partitions=1)
        topic.partitions[0].append(make_batch([b"one"]))
        cluster.script(FETCH, CLOSE)                    # the next fetch finds its connection closed
        ...
        cluster.move("orders", 0, broker=1)             # another broker leads, in a new epoch

It answers ApiVersions, SASL, Metadata, ListOffsets, OffsetForLeaderEpoch and Fetch, as far as a reader of logs needs.
Of a fetch the first partition with data gets at least one batch, and none gets more than it asked for otherwise, as
with Kafka. What a test scripts comes first: an action for the next request of an API, on whichever broker.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import socket
import ssl
import struct
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self
from uuid import UUID, uuid4

from kio.schema.errors import ErrorCode

from holdfast.wire import apis
from holdfast.wire.batch import OFFSET_AND_EPOCH, BatchHeader, read_header
from holdfast.wire.messages import decode_request, encode_response, parse_request_header, response_header

FETCH, LIST_OFFSETS, METADATA, SASL_HANDSHAKE = 1, 2, 3, 17
API_VERSIONS, OFFSET_FOR_LEADER_EPOCH, SASL_AUTHENTICATE = 18, 23, 36
APIS: Final = (
    FETCH,
    LIST_OFFSETS,
    METADATA,
    SASL_HANDSHAKE,
    API_VERSIONS,
    OFFSET_FOR_LEADER_EPOCH,
    SASL_AUTHENTICATE,
)
CLOSE: Final = "close"
"""The connection is closed instead of an answer."""
HALF: Final = "half"
"""Half of the answer is sent, then the connection is closed."""
GARBAGE: Final = "garbage"
"""The answer's body is replaced by bytes that mean nothing."""

Action = str | Callable[[dict[str, Any]], None]
"""One of the words above, or a change to the answer's fields."""

ITERATIONS: Final = 4096
SALT: Final = b"a fake cluster's"


@dataclass
class FakePartition:
    leader: int = 0
    epoch: int = 0
    batches: list[tuple[BatchHeader, bytes]] = field(default_factory=list)
    log_start: int = 0
    local_start: int | None = None
    """What is before it lies in remote storage; None when nothing does."""
    log_end: int = 0
    last_stable: int | None = None
    """Where undecided transactions begin; None when there are none."""
    aborted: list[tuple[int, int]] = field(default_factory=list)
    epoch_ends: dict[int, int] = field(default_factory=dict)

    def append(self, batch: bytes, *, base_offset: int | None = None) -> None:
        """Put a batch at the end of the log, or further behind it."""
        start = self.log_end if base_offset is None else base_offset
        placed = bytearray(batch)
        OFFSET_AND_EPOCH.pack_into(placed, 0, start, len(batch) - 12, self.epoch)
        header = read_header(placed)
        self.batches.append((header, bytes(placed)))
        self.log_end = header.next_offset

    @property
    def stable_end(self) -> int:
        return self.log_end if self.last_stable is None else self.last_stable

    def fetch(self, offset: int, bytes_max: int, end: int, *, at_least_one: bool) -> bytes:
        found = bytearray()
        for header, batch in self.batches:
            if header.last_offset < offset or header.base_offset >= end:
                continue
            if len(found) + len(batch) > bytes_max and (found or not at_least_one):
                found += batch[: max(0, bytes_max - len(found))]
                break
            found += batch
        return bytes(found)


@dataclass
class FakeTopic:
    topic_id: UUID
    partitions: list[FakePartition]


class FakeCluster:
    def __init__(
        self,
        brokers: int = 1,
        *,
        tls: ssl.SSLContext | None = None,
        passwords: Mapping[str, str] | None = None,
        versions: Mapping[int, tuple[int, int]] | None = None,
    ) -> None:
        self.topics: dict[str, FakeTopic] = {}
        self.asked: list[tuple[int, int, Any]] = []
        """Broker, API and request of everything that was asked, in order."""
        self._scripts: dict[int, deque[Action]] = defaultdict(deque)
        self._lock = threading.RLock()
        self._tls = tls
        self._passwords = passwords
        self._versions = dict(versions or {})
        self._listeners: list[socket.socket | None] = [None] * brokers
        self._ports = [0] * brokers
        self._connections: list[list[socket.socket]] = [[] for _ in range(brokers)]
        self._threads: list[threading.Thread] = []

    # -------------------------------------------------------------------- what a test does

    def __enter__(self) -> Self:
        for broker in range(len(self._listeners)):
            self.start(broker)
        return self

    def __exit__(self, *_: object) -> None:
        for broker in range(len(self._listeners)):
            self.stop(broker)
        for thread in self._threads:
            thread.join(10)

    @property
    def bootstrap_servers(self) -> str:
        return ",".join(f"127.0.0.1:{port}" for port in self._ports)

    def start(self, broker: int) -> None:
        """Listen, on the port it had before if it was stopped."""
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self._ports[broker]))
        listener.listen()
        self._ports[broker] = listener.getsockname()[1]
        self._listeners[broker] = listener
        self._run(self._accept, broker, listener)

    def stop(self, broker: int) -> None:
        """Close everything, as a crash does."""
        listener = self._listeners[broker]
        self._listeners[broker] = None
        if listener is not None:
            listener.shutdown(socket.SHUT_RDWR)
            listener.close()
        for connection in self._connections[broker]:
            _hang_up(connection)
        self._connections[broker].clear()

    def add_topic(self, name: str, partitions: int = 1) -> FakeTopic:
        topic = FakeTopic(uuid4(), [FakePartition(leader=n % len(self._ports)) for n in range(partitions)])
        with self._lock:
            self.topics[name] = topic
        return topic

    def move(self, name: str, partition: int, broker: int) -> None:
        """Let another broker lead, in a new epoch."""
        with self._lock:
            moved = self.topics[name].partitions[partition]
            moved.epoch_ends.setdefault(moved.epoch, moved.log_end)
            moved.leader = broker
            moved.epoch += 1

    def script(self, api_key: int, *actions: Action) -> None:
        """What becomes of the next requests of an API."""
        with self._lock:
            self._scripts[api_key] += actions

    # -------------------------------------------------------------------- connections

    def _run(self, work: Callable[..., None], *arguments: Any) -> None:
        thread = threading.Thread(target=work, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self, broker: int, listener: socket.socket) -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            self._connections[broker].append(connection)
            self._run(self._serve, broker, connection)

    def _serve(self, broker: int, connection: socket.socket) -> None:
        try:
            if self._tls is not None:
                connection = self._tls.wrap_socket(connection, server_side=True)
            scram: dict[str, str] = {}
            while True:
                frame = _exactly(connection, struct.unpack(">i", _exactly(connection, 4))[0])
                self._answer(broker, connection, frame, scram)
        except (OSError, EOFError):
            _hang_up(connection)

    def _answer(self, broker: int, connection: socket.socket, frame: bytes, scram: dict[str, str]) -> None:
        header = parse_request_header(frame)
        request = decode_request(header.api_key, header.version, frame, header.body_offset)
        with self._lock:
            self.asked.append((broker, header.api_key, request))
            fields = self._fields(broker, header.api_key, request, scram)
            scripted = self._scripts[header.api_key]
            action = scripted.popleft() if scripted else None
            if callable(action):
                action(fields)
            body = encode_response(header.api_key, header.version, fields)
        if action == CLOSE:
            raise EOFError
        if action == GARBAGE:
            body = b"\xff" * 100
        answer = response_header(header.api_key, header.version, header.correlation_id) + body
        framed = struct.pack(">i", len(answer)) + answer
        if action == HALF:
            connection.sendall(framed[: len(framed) // 2])
            raise EOFError
        connection.sendall(framed)

    # -------------------------------------------------------------------- answers

    def _fields(self, broker: int, api_key: int, request: Any, scram: dict[str, str]) -> dict[str, Any]:
        if api_key == API_VERSIONS:
            return {"api_keys": [self._offered(key) for key in APIS]}
        if api_key == METADATA:
            return self._metadata(request)
        if api_key == LIST_OFFSETS:
            return {
                "topics": [self._offsets(broker, topic, request.isolation_level) for topic in request.topics]
            }
        if api_key == OFFSET_FOR_LEADER_EPOCH:
            return {"topics": [self._epochs(broker, topic) for topic in request.topics]}
        if api_key == FETCH:
            return self._fetch(broker, request)
        if api_key == SASL_HANDSHAKE:
            return {"error_code": 0, "mechanisms": ["PLAIN", "SCRAM-SHA-256", "SCRAM-SHA-512"]}
        return self._authenticate(request.auth_bytes, scram)

    def _offered(self, api_key: int) -> dict[str, int]:
        api = apis.BY_KEY[api_key]
        lowest, highest = self._versions.get(api_key, (api.min, api.max))
        return {"api_key": api_key, "min_version": lowest, "max_version": highest}

    def _metadata(self, request: Any) -> dict[str, Any]:
        names = list(self.topics) if request.topics is None else [topic.name for topic in request.topics]
        return {
            "brokers": [
                {"node_id": number, "host": "127.0.0.1", "port": port}
                for number, port in enumerate(self._ports)
            ],
            "topics": [self._topic_metadata(name) for name in names],
        }

    def _topic_metadata(self, name: str) -> dict[str, Any]:
        topic = self.topics.get(name)
        if topic is None:
            return {"error_code": ErrorCode.unknown_topic_or_partition, "name": name, "topic_id": None}
        partitions = [
            {"partition_index": number, "leader_id": each.leader, "leader_epoch": each.epoch}
            for number, each in enumerate(topic.partitions)
        ]
        return {"name": name, "topic_id": topic.topic_id, "partitions": partitions}

    def _checked(self, broker: int, partition: FakePartition, epoch: int) -> ErrorCode:
        if partition.leader != broker:
            return ErrorCode.not_leader_or_follower
        if 0 <= epoch < partition.epoch:
            return ErrorCode.fenced_leader_epoch
        return ErrorCode.unknown_leader_epoch if epoch > partition.epoch else ErrorCode.none

    def _offsets(self, broker: int, topic: Any, isolation: int) -> dict[str, Any]:
        answers = []
        for asked in topic.partitions:
            partition = self.topics[topic.name].partitions[asked.partition_index]
            end = partition.stable_end if isolation else partition.log_end
            local_start = partition.log_start if partition.local_start is None else partition.local_start
            offset = {-2: partition.log_start, -4: local_start}.get(asked.timestamp, end)
            code = self._checked(broker, partition, asked.current_leader_epoch)
            answers.append(
                {
                    "partition_index": asked.partition_index,
                    "error_code": code,
                    "offset": offset,
                    "timestamp": -1,
                }
            )
        return {"name": topic.name, "partitions": answers}

    def _epochs(self, broker: int, topic: Any) -> dict[str, Any]:
        answers = []
        for asked in topic.partitions:
            partition = self.topics[topic.topic].partitions[asked.partition]
            answers.append(
                {
                    "partition": asked.partition,
                    "error_code": self._checked(broker, partition, asked.current_leader_epoch),
                    "leader_epoch": asked.leader_epoch,
                    "end_offset": partition.epoch_ends.get(asked.leader_epoch, partition.log_end),
                }
            )
        return {"topic": topic.topic, "partitions": answers}

    def _fetch(self, broker: int, request: Any) -> dict[str, Any]:
        ids = {topic.topic_id: topic for topic in self.topics.values()}
        responses = []
        got = 0
        for asked_topic in request.topics:
            topic = ids.get(UUID(bytes=asked_topic.topic_id.bytes))
            partitions = []
            for asked in asked_topic.partitions:
                if topic is None:
                    fields: dict[str, Any] = {"error_code": ErrorCode.unknown_topic_id, "records": b""}
                else:
                    limit = min(asked.partition_max_bytes, request.max_bytes - got)
                    partition = topic.partitions[asked.partition]
                    fields = self._fetch_one(broker, partition, asked, limit, request.isolation_level, got)
                    got += len(fields["records"])
                partitions.append({"partition_index": asked.partition, **fields})
            responses.append({"topic_id": asked_topic.topic_id, "partitions": partitions})
        return {"responses": responses}

    def _fetch_one(
        self, broker: int, partition: FakePartition, asked: Any, bytes_max: int, isolation: int, got: int
    ) -> dict[str, Any]:
        code = self._checked(broker, partition, asked.current_leader_epoch)
        if code is ErrorCode.none and not partition.log_start <= asked.fetch_offset <= partition.log_end:
            code = ErrorCode.offset_out_of_range
        end = partition.stable_end if isolation else partition.log_end
        records = b""
        if code is ErrorCode.none:
            records = partition.fetch(asked.fetch_offset, max(0, bytes_max), end, at_least_one=not got)
        return {
            "error_code": code,
            "high_watermark": partition.log_end,
            "last_stable_offset": partition.stable_end,
            "log_start_offset": partition.log_start,
            "aborted_transactions": [
                {"producer_id": producer_id, "first_offset": first}
                for producer_id, first in partition.aborted
            ],
            "records": records,
        }

    # -------------------------------------------------------------------- SASL

    def _authenticate(self, said: bytes, scram: dict[str, str]) -> dict[str, Any]:
        assert self._passwords is not None, "this cluster has no users"
        text = bytes(said).decode()
        if text.startswith("\0"):
            _, name, password = text.split("\0")
            return _verdict(self._passwords.get(name) == password)
        if text.startswith("n,,"):
            scram["first"] = text.removeprefix("n,,")
            name, nonce = (part[2:] for part in scram["first"].split(",", 1))
            scram["name"] = name
            scram["challenge"] = f"r={nonce}server,s={base64.b64encode(SALT).decode()},i={ITERATIONS}"
            return {"error_code": 0, "auth_bytes": scram["challenge"].encode()}
        final, _, proof = text.rpartition(",p=")
        signed = f"{scram['first']},{scram['challenge']},{final}".encode()
        for name in ("sha256", "sha512"):
            secret = self._passwords.get(scram["name"], "").encode()
            salted = hashlib.pbkdf2_hmac(name, secret, SALT, ITERATIONS)
            key = hmac.digest(salted, b"Client Key", name)
            signature = hmac.digest(hashlib.new(name, key).digest(), signed, name)
            if base64.b64decode(proof) == bytes(a ^ b for a, b in zip(key, signature, strict=True)):
                server = hmac.digest(hmac.digest(salted, b"Server Key", name), signed, name)
                return {"error_code": 0, "auth_bytes": b"v=" + base64.b64encode(server)}
        return _verdict(False)


def _verdict(is_right: bool) -> dict[str, Any]:
    if is_right:
        return {"error_code": 0, "auth_bytes": b""}
    return {"error_code": ErrorCode.sasl_authentication_failed, "error_message": "wrong password"}


def _exactly(connection: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        part = connection.recv(size - len(data))
        if not part:
            raise EOFError
        data += part
    return data


def _hang_up(connection: socket.socket) -> None:
    try:
        connection.shutdown(socket.SHUT_RDWR)
    except OSError:  # the other side was quicker
        pass
    finally:
        connection.close()
