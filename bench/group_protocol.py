"""The requests of a group member and of a transactional producer, encoded by hand like those of `bench.protocol`.

The classic protocol in versions before the flexible ones, which both brokers serve: FindCoordinator 1, JoinGroup 5,
SyncGroup 3, Heartbeat 3, OffsetFetch 5, ListOffsets 1, Fetch 4. ConsumerGroupHeartbeat 1 is flexible, there is no
other. `RawMember` is one member with a connection of its own that asks and waits.
"""

from __future__ import annotations

import struct
import time
import uuid
from typing import Final, NamedTuple

from bench.protocol import LIST_OFFSETS, Connection, ProtocolError, frame, string

FETCH: Final = 1
OFFSET_FETCH: Final = 9
FIND_COORDINATOR: Final = 10
JOIN_GROUP: Final = 11
HEARTBEAT: Final = 12
SYNC_GROUP: Final = 14
CONSUMER_GROUP_HEARTBEAT: Final = 68

NO_ERROR: Final = 0
COORDINATOR_LOADING: Final = 14
COORDINATOR_NOT_AVAILABLE: Final = 15
REBALANCE_IN_PROGRESS: Final = 27
MEMBER_ID_REQUIRED: Final = 79

EARLIEST: Final = -2
REBALANCE_TIMEOUT_MS: Final = 60_000
ANSWER_TIMEOUT_S: Final = 60.0
RETRY_S: Final = 0.005


class Reader:
    """Takes values off an answer."""

    def __init__(self, data: bytes, place: int = 0) -> None:
        self.data = data
        self.place = place

    def take(self, code: str) -> int:
        """A number of this struct code."""
        (value,) = struct.unpack_from(">" + code, self.data, self.place)
        self.place += struct.calcsize(">" + code)
        return int(value)

    def blob(self, code: str) -> bytes | None:
        """Bytes or text behind a length of this struct code."""
        length = self.take(code)
        return None if length < 0 else self._bytes(length)

    def unsigned(self) -> int:
        """An unsigned varint."""
        value = shift = 0
        while True:
            byte = self.take("B")
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 128:
                return value

    def compact(self) -> bytes | None:
        """Bytes or text of the flexible form."""
        length = self.unsigned()
        return None if length == 0 else self._bytes(length - 1)

    def skip_tags(self) -> None:
        """A section of tagged fields."""
        for _ in range(self.unsigned()):
            self.unsigned()
            self._bytes(self.unsigned())

    def _bytes(self, length: int) -> bytes:
        self.place += length
        return self.data[self.place - length : self.place]


def _unsigned(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def _compact(text: str) -> bytes:
    data = text.encode()
    return _unsigned(len(data) + 1) + data


def flexible_frame(api_key: int, version: int, body: bytes) -> bytes:
    """One request whose header has tagged fields, length included."""
    request = struct.pack(">hhi", api_key, version, 1) + string("holdfast-bench") + b"\0" + body
    return struct.pack(">i", len(request)) + request


# -- requests


def find_coordinator_frame(key: str, key_type: int = 0) -> bytes:
    """Who coordinates a group (0) or a transactional id (1)."""
    return frame(FIND_COORDINATOR, 1, string(key) + struct.pack(">b", key_type))


def subscription(topic: str) -> bytes:
    """What a consumer says it wants to read."""
    return struct.pack(">hi", 0, 1) + string(topic) + struct.pack(">i", 0)


def assignment(topic: str, partitions: list[int]) -> bytes:
    """What a consumer is given to read."""
    body = (
        struct.pack(">hi", 0, 1)
        + string(topic)
        + struct.pack(f">i{len(partitions)}i", len(partitions), *partitions)
    )
    return body + struct.pack(">i", 0)


def join_frame(
    group: str, member_id: str, session_timeout_ms: int, metadata: bytes, version: int = 5
) -> bytes:
    """JoinGroup 5, or 3, which needs no member id beforehand."""
    body = string(group) + struct.pack(">ii", session_timeout_ms, REBALANCE_TIMEOUT_MS) + string(member_id)
    if version >= 5:
        body += struct.pack(">h", -1)
    body += string("consumer") + struct.pack(">i", 1) + string("range")
    body += struct.pack(">i", len(metadata)) + metadata
    return frame(JOIN_GROUP, version, body)


def sync_frame(group: str, generation: int, member_id: str, assignments: dict[str, bytes]) -> bytes:
    """SyncGroup 3; only the leader has assignments."""
    body = (
        string(group)
        + struct.pack(">i", generation)
        + string(member_id)
        + struct.pack(">hi", -1, len(assignments))
    )
    for each, given in assignments.items():
        body += string(each) + struct.pack(">i", len(given)) + given
    return frame(SYNC_GROUP, 3, body)


def heartbeat_frame(group: str, generation: int, member_id: str) -> bytes:
    """Heartbeat 3."""
    body = string(group) + struct.pack(">i", generation) + string(member_id) + struct.pack(">h", -1)
    return frame(HEARTBEAT, 3, body)


def consumer_heartbeat_frame(
    group: str, member_id: str, epoch: int, topic: str | None, owned: list[tuple[bytes, list[int]]] | None
) -> bytes:
    """ConsumerGroupHeartbeat 1; what is None has not changed since the last one."""
    body = _compact(group) + _compact(member_id) + struct.pack(">i", epoch) + b"\0\0"
    body += struct.pack(">i", REBALANCE_TIMEOUT_MS if topic is not None else -1)
    body += b"\0" if topic is None else b"\2" + _compact(topic)
    body += b"\0\0"
    if owned is None:
        body += b"\0"
    else:
        body += _unsigned(len(owned) + 1)
        for topic_id, partitions in owned:
            body += topic_id + _unsigned(len(partitions) + 1)
            body += struct.pack(f">{len(partitions)}i", *partitions) + b"\0"
    return flexible_frame(CONSUMER_GROUP_HEARTBEAT, 1, body + b"\0")


# -- answers, without their length


def heartbeat_error(answer: bytes) -> int:
    """Of a Heartbeat or SyncGroup 3 answer."""
    return Reader(answer, 8).take("h")


class Joined(NamedTuple):
    """A JoinGroup answer."""

    error: int
    generation: int
    leader: str
    member_id: str
    members: list[str]
    """All of them, for the leader; empty for the others."""


def read_join(answer: bytes, version: int = 5) -> Joined:
    """A JoinGroup 3 or 5 answer."""
    reader = Reader(answer, 8)
    error, generation = reader.take("h"), reader.take("i")
    reader.blob("h")
    leader, member_id = reader.blob("h") or b"", reader.blob("h") or b""
    members = []
    for _ in range(reader.take("i")):
        members.append((reader.blob("h") or b"").decode())
        if version >= 5:
            reader.blob("h")
        reader.blob("i")
    return Joined(error, generation, leader.decode(), member_id.decode(), members)


class Beat(NamedTuple):
    """A ConsumerGroupHeartbeat answer."""

    error: int
    message: str
    epoch: int
    assigned: list[tuple[bytes, list[int]]] | None
    """Topic id and partitions; None when nothing changed."""


def read_beat(answer: bytes) -> Beat:
    """A ConsumerGroupHeartbeat answer."""
    reader = Reader(answer, 4)
    reader.skip_tags()
    reader.take("i")
    error, message = reader.take("h"), reader.compact() or b""
    reader.compact()
    epoch = reader.take("i")
    reader.take("i")
    if reader.take("b") < 0:
        return Beat(error, message.decode(), epoch, None)
    assigned = []
    for _ in range(reader.unsigned() - 1):
        topic_id = bytes(reader.take("B") for _ in range(16))
        assigned.append((topic_id, [reader.take("i") for _ in range(reader.unsigned() - 1)]))
        reader.skip_tags()
    return Beat(error, message.decode(), epoch, assigned)


def assigned_partitions(given: bytes) -> list[int]:
    """The partitions of the one topic of a consumer's assignment."""
    if not given:
        return []
    reader = Reader(given, 2)
    found: list[int] = []
    for _ in range(reader.take("i")):
        reader.blob("h")
        found += [reader.take("i") for _ in range(reader.take("i"))]
    return found


# -- members that ask and wait


class RawMember:
    """What members of both protocols do: find the coordinator, look up the position, read."""

    def __init__(self, host: str, port: int, group: str, topic: str) -> None:
        self.connection = Connection(host, port, ANSWER_TIMEOUT_S)
        self.group = group
        self.topic = topic

    def find_coordinator(self) -> None:
        """Ask until the coordinator is there; it is the one broker there is."""
        deadline = time.monotonic() + ANSWER_TIMEOUT_S
        while time.monotonic() < deadline:
            error = Reader(self.connection.ask(find_coordinator_frame(self.group)), 8).take("h")
            if error == NO_ERROR:
                return
            if error not in (COORDINATOR_LOADING, COORDINATOR_NOT_AVAILABLE):
                raise ProtocolError(f"FindCoordinator was answered with error {error}")
            time.sleep(RETRY_S)
        raise ProtocolError(f"the coordinator of {self.group} was not available in time")

    def read_first(self, partition: int) -> bytes:
        """Position, beginning of the partition, first batch: as a client without a position does."""
        body = (
            string(self.group) + struct.pack(">i", 1) + string(self.topic) + struct.pack(">ii", 1, partition)
        )
        reader = Reader(self.connection.ask(frame(OFFSET_FETCH, 5, body)), 8)
        reader.take("i")
        reader.blob("h")
        reader.take("i")
        reader.take("i")
        position = reader.take("q")
        if position < 0:
            body = (
                struct.pack(">ii", -1, 1) + string(self.topic) + struct.pack(">iiq", 1, partition, EARLIEST)
            )
            answer = self.connection.ask(frame(LIST_OFFSETS, 1, body))
            position = Reader(answer, 4 + 4 + 2 + len(self.topic.encode()) + 4 + 4 + 2 + 8).take("q")
        body = struct.pack(">iiiib", -1, 500, 1, 1 << 20, 0) + struct.pack(">i", 1) + string(self.topic)
        body += struct.pack(">iiqi", 1, partition, position, 1 << 20)
        reader = Reader(self.connection.ask(frame(FETCH, 4, body)), 8)
        reader.take("i")
        reader.blob("h")
        reader.take("i")
        reader.take("i")
        error = reader.take("h")
        reader.take("q")
        reader.take("q")
        for _ in range(reader.take("i")):
            reader.take("q")
            reader.take("q")
        records = reader.blob("i")
        if error != NO_ERROR or not records:
            raise ProtocolError(f"Fetch at {position} gave error {error} and {records!r}")
        return records

    def die(self) -> None:
        """Go without a word."""
        self.connection.close()


class ClassicMember(RawMember):
    """A member of the classic protocol."""

    def __init__(self, host: str, port: int, group: str, topic: str, session_timeout_ms: int) -> None:
        super().__init__(host, port, group, topic)
        self.session_timeout_ms = session_timeout_ms
        self.member_id = ""
        self.generation = -1
        self.joined: Joined | None = None

    def send_join(self) -> None:
        """Ask to join and do not wait; the first time the member id is fetched before."""
        metadata = subscription(self.topic)
        if not self.member_id:
            answer = self.connection.ask(join_frame(self.group, "", self.session_timeout_ms, metadata))
            joined = read_join(answer)
            if joined.error != MEMBER_ID_REQUIRED:
                raise ProtocolError(f"JoinGroup without member id was answered with error {joined.error}")
            self.member_id = joined.member_id
        self.connection.send(join_frame(self.group, self.member_id, self.session_timeout_ms, metadata))

    def receive_join(self) -> Joined:
        """The answer to the join that was sent."""
        joined = read_join(self.connection.receive())
        if joined.error != NO_ERROR:
            raise ProtocolError(f"JoinGroup was answered with error {joined.error}")
        self.generation = joined.generation
        return joined

    def sync(self, assignments: dict[str, bytes]) -> list[int]:
        """The partitions this member is given; `assignments` are the leader's."""
        reader = Reader(
            self.connection.ask(sync_frame(self.group, self.generation, self.member_id, assignments)), 8
        )
        error = reader.take("h")
        if error != NO_ERROR:
            raise ProtocolError(f"SyncGroup was answered with error {error}")
        return assigned_partitions(reader.blob("i") or b"")

    def heartbeat(self) -> int:
        """The error code of a heartbeat."""
        return heartbeat_error(
            self.connection.ask(heartbeat_frame(self.group, self.generation, self.member_id))
        )

    def join_alone(self) -> list[int]:
        """Join, be the leader of all there are, and take everything (the topic has one partition)."""
        self.send_join()
        self.receive_join()
        return self.sync({self.member_id: assignment(self.topic, [0])})


class ConsumerMember(RawMember):
    """A member of the consumer protocol."""

    def __init__(self, host: str, port: int, group: str, topic: str) -> None:
        super().__init__(host, port, group, topic)
        self.member_id = str(uuid.uuid4())
        self.epoch = 0
        self.assigned: list[tuple[bytes, list[int]]] = []

    def heartbeat(self) -> Beat:
        """One heartbeat: the whole of it when joining, what is owned after a change, else the least."""
        joining = self.epoch == 0
        request = consumer_heartbeat_frame(
            self.group, self.member_id, self.epoch, self.topic if joining else None, [] if joining else None
        )
        return self._beat(request)

    def _beat(self, request: bytes) -> Beat:
        beat = read_beat(self.connection.ask(request))
        if beat.error != NO_ERROR:
            raise ProtocolError(
                f"ConsumerGroupHeartbeat was answered with error {beat.error}: {beat.message}"
            )
        self.epoch = beat.epoch
        if beat.assigned is not None and beat.assigned != self.assigned:
            # What was assigned is owned at once: there is nothing to finish with.
            self.assigned = beat.assigned
            self._beat(consumer_heartbeat_frame(self.group, self.member_id, self.epoch, None, beat.assigned))
        return beat

    @property
    def partitions(self) -> list[int]:
        """What it owns."""
        return [partition for _, partitions in self.assigned for partition in partitions]
