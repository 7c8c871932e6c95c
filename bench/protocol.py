"""The few Kafka requests the bare-socket clients need, encoded by hand, independent of holdfast's code.

Versions before the flexible ones, which both brokers serve: Produce 8, Metadata 1, ListOffsets 1,
ApiVersions 0.
"""

from __future__ import annotations

import socket
import struct
import time
from collections.abc import Sequence
from typing import Final, NamedTuple

import crc32c

PRODUCE: Final = 0
LIST_OFFSETS: Final = 2
METADATA: Final = 3
API_VERSIONS: Final = 18

LATEST: Final = -1
ACKS_ALL: Final = -1
REQUEST_TIMEOUT_MS: Final = 30_000


class ProtocolError(Exception):
    """A broker answered with an error, or with something else than was asked."""


def string(text: str) -> bytes:
    """Text with its length."""
    data = text.encode()
    return struct.pack(">h", len(data)) + data


def frame(api_key: int, version: int, body: bytes, correlation_id: int = 1) -> bytes:
    """One request, length included."""
    request = struct.pack(">hhi", api_key, version, correlation_id) + string("holdfast-bench") + body
    return struct.pack(">i", len(request)) + request


def _varint(value: int) -> bytes:
    value = value << 1 if value >= 0 else (-value << 1) - 1
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


def record_batch(values: Sequence[bytes], timestamp_ms: int) -> bytes:
    """An uncompressed record batch without producer id; its records have no keys."""
    records = bytearray()
    for offset_delta, value in enumerate(values):
        body = b"\0\0" + _varint(offset_delta) + _varint(-1) + _varint(len(value)) + value + _varint(0)
        records += _varint(len(body)) + body
    checked = struct.pack(
        ">hiqqqhii", 0, len(values) - 1, timestamp_ms, timestamp_ms, -1, -1, -1, len(values)
    )
    checked += records
    crc: int = crc32c.crc32c(checked)
    return struct.pack(">qiibI", 0, 9 + len(checked), -1, 2, crc) + checked


def produce_frame(topic: str, partition: int, batch: bytes, correlation_id: int = 1) -> bytes:
    """A Produce request with acks=all."""
    body = struct.pack(">hhi", -1, ACKS_ALL, REQUEST_TIMEOUT_MS)
    body += struct.pack(">i", 1) + string(topic) + struct.pack(">ii", 1, partition)
    body += struct.pack(">i", len(batch)) + batch
    return frame(PRODUCE, 8, body, correlation_id)


def produce_error(answer: bytes, topic: str) -> int:
    """The error code of a Produce answer (without its length) that is about one partition of `topic`."""
    # Correlation id, one topic, its name, one partition, its index.
    (code,) = struct.unpack_from(">h", answer, 4 + 4 + 2 + len(topic.encode()) + 4 + 4)
    return int(code)


class Connection:
    """A blocking connection that asks and waits."""

    def __init__(self, host: str, port: int, timeout_s: float = 60.0) -> None:
        self.socket = socket.create_connection((host, port), timeout=timeout_s)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def close(self) -> None:
        """Close it."""
        self.socket.close()

    def ask(self, request: bytes) -> bytes:
        """Send one frame and return the answer without its length."""
        self.send(request)
        return self.receive()

    def send(self, request: bytes) -> None:
        """Send one frame."""
        self.socket.sendall(request)

    def receive(self) -> bytes:
        """The next answer without its length."""
        (size,) = struct.unpack(">i", self._exactly(4))
        return self._exactly(size)

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            more = self.socket.recv(count - len(data))
            if not more:
                raise ProtocolError("the broker closed the connection")
            data += more
        return data

    def produce(self, topic: str, partition: int, batch: bytes) -> int:
        """Produce with acks=all; returns the error code."""
        return produce_error(self.ask(produce_frame(topic, partition, batch)), topic)

    def end_offset(self, topic: str, partition: int) -> int | None:
        """The offset after the last readable record, or None while the broker cannot say."""
        body = struct.pack(">ii", -1, 1) + string(topic) + struct.pack(">iiq", 1, partition, LATEST)
        answer = self.ask(frame(LIST_OFFSETS, 1, body))
        error, _, offset = struct.unpack_from(">hqq", answer, 4 + 4 + 2 + len(topic.encode()) + 4 + 4)
        return int(offset) if error == 0 else None

    def leaders(self) -> int:
        """How many partitions of all topics together have a leader."""
        return count_leaders(self.ask(frame(METADATA, 1, struct.pack(">i", -1))))


class _Reader(NamedTuple):
    data: bytes
    place: list[int]

    def take(self, code: str) -> int:
        (value,) = struct.unpack_from(">" + code, self.data, self.place[0])
        self.place[0] += struct.calcsize(">" + code)
        return int(value)

    def skip_string(self) -> None:
        length = self.take("h")
        self.place[0] += max(length, 0)


def count_leaders(answer: bytes) -> int:
    """Partitions with a leader in a Metadata 1 answer."""
    reader = _Reader(answer, [4])
    for _ in range(reader.take("i")):
        reader.take("i")
        reader.skip_string()
        reader.take("i")
        reader.skip_string()
    reader.take("i")
    found = 0
    for _ in range(reader.take("i")):
        reader.take("h")
        reader.skip_string()
        reader.take("b")
        for _ in range(reader.take("i")):
            reader.take("h")
            reader.take("i")
            found += reader.take("i") >= 0
            for _ in range(2):
                count = reader.take("i")
                reader.place[0] += 4 * count
    return found


def first_acknowledgement(host: str, port: int, topic: str, deadline: float, poll_s: float = 0.002) -> None:
    """Return when a Produce to partition 0 is first acknowledged; connects again and again until then.

    librdkafka would add its own reconnect backoff, which is longer than the whole start being measured.
    """
    batch = record_batch([b"x" * 100], int(time.time() * 1000))
    while time.monotonic() < deadline:
        try:
            connection = Connection(host, port)
        except OSError:
            time.sleep(poll_s)
            continue
        try:
            while time.monotonic() < deadline:
                if connection.produce(topic, 0, batch) == 0:
                    return
                time.sleep(poll_s)
        except (OSError, ProtocolError):
            time.sleep(poll_s)
        finally:
            connection.close()
    raise ProtocolError(f"no produce to {topic} was acknowledged in time")
