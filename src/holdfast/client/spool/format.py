"""The bytes of a spool: frames that prove themselves, one behind the other.

    uint32 length of the body, uint32 CRC-32C of the body, body

A body begins with its kind:

- 1, a message: int64 sequence, int64 timestamp in milliseconds, int32 partition, uint16 length of the topic, int32
  length of the key (-1: none), int32 length of the value (-1: none), uint16 headers; then topic, key, value, and for
  each header uint16 length of the name, name, int32 length of the value (-1: none), value.
- 2, the counters: for each partition its topic, number and next sequence. They stand at the beginning of every
  segment, so that sequences go on although the segments they come from are gone.
- 3, a group: the int64 position it stands at. One begins every write; whatever is in front of it was flushed before
  it was written. By this a torn end, which nobody was promised, can be told from damage to what was stored.
- 4, a note: UTF-8 text about the message in front of it; the file of refused messages keeps the reasons so.

A *position* counts bytes over the whole life of a spool; a segment is named by the position it begins at. A
*sequence* counts the messages of one spool for one partition of a topic, from 0 without gaps: with the spool's id it
names a message for ever (header `hf-id`).

All integers are big endian.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from struct import Struct, error
from typing import Final, NamedTuple, TypeAlias

from crc32c import crc32c

from holdfast.errors import StorageError
from holdfast.seams import Buffer

MESSAGE: Final = 1
COUNTERS: Final = 2
GROUP: Final = 3
NOTE: Final = 4
BODY_BYTES_MAX: Final = 1 << 30
"""No client can send more in one message; a longer body is damage, not a message."""
TOPIC_BYTES_MAX: Final = 2**16 - 1
HEADERS_MAX: Final = 2**16 - 1

_FRAME: Final = Struct(">II")
FRAME_BYTES: Final = _FRAME.size
_MESSAGE: Final = Struct(">BqqiHiiH")
_GROUP: Final = Struct(">Bq")
_COUNTERS: Final = Struct(">BI")
_COUNTER: Final = Struct(">Hiq")
_HEADER: Final = Struct(">H")
_LENGTH: Final = Struct(">i")

Headers: TypeAlias = tuple[tuple[str, bytes | None], ...]
PartitionKey: TypeAlias = tuple[str, int]
"""A topic and the number of a partition."""


class DamagedSpool(StorageError):
    """A spool holds bytes that nobody stored there, in front of messages that somebody did."""


class Message(NamedTuple):
    """What a producer is asked to send."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int


class Entry(NamedTuple):
    """A message in the spool."""

    position: int
    """Where its frame begins."""
    end: int
    """Where the next one does."""
    sequence: int
    message: Message


def frame(body: Buffer) -> bytes:
    return _FRAME.pack(len(body), crc32c(body)) + body


def encode_message(message: Message, sequence: int) -> bytes:
    """The frame of a message; `ValueError` when it cannot be one."""
    topic, partition, key, value, headers, timestamp_ms = message
    name = topic.encode()
    head = _MESSAGE.pack(
        MESSAGE,
        sequence,
        timestamp_ms,
        partition,
        len(name),
        -1 if key is None else len(key),
        -1 if value is None else len(value),
        len(headers),
    )
    body = b"".join((head, name, key or b"", value or b"", encode_headers(headers) if headers else b""))
    return _FRAME.pack(len(body), crc32c(body)) + body


def encode_headers(headers: Headers) -> bytes:
    parts: list[bytes] = []
    for name, value in headers:
        raw = name.encode()
        parts += (
            _HEADER.pack(len(raw)),
            raw,
            _LENGTH.pack(-1 if value is None else len(value)),
            value or b"",
        )
    return b"".join(parts)


def encode_group(position: int) -> bytes:
    return frame(_GROUP.pack(GROUP, position))


def encode_note(text: str) -> bytes:
    return frame(bytes([NOTE]) + text.encode())


def encode_counters(counters: Mapping[PartitionKey, int]) -> bytes:
    parts = [_COUNTERS.pack(COUNTERS, len(counters))]
    for (topic, partition), following in counters.items():
        name = topic.encode()
        parts += (_COUNTER.pack(len(name), partition, following), name)
    return frame(b"".join(parts))


def check_message(message: Message) -> None:
    """Refuse what no frame can hold, before anything of it is written."""
    topic, partition, key, value, headers, timestamp_ms = message
    if not 0 < len(topic.encode()) <= TOPIC_BYTES_MAX:
        raise ValueError(f"a topic name of {len(topic.encode())} bytes")
    if not 0 <= partition < 2**31:
        raise ValueError(f"partition {partition}")
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} headers")
    if not -1 <= timestamp_ms < 2**63:
        raise ValueError(f"timestamp {timestamp_ms}")
    size = (
        len(key or b"") + len(value or b"") + sum(len(name) * 4 + len(each or b"") for name, each in headers)
    )
    if size > BODY_BYTES_MAX // 2:
        raise ValueError(f"a message of {size} bytes")


# Reading


class Body(NamedTuple):
    """A frame that holds what its checksum says."""

    position: int
    end: int
    data: memoryview

    @property
    def kind(self) -> int:
        return self.data[0]


def read_frame(buffer: Buffer, at: int, base: int) -> Body | None:
    """The frame at `at`, a place in `buffer`, which begins at position `base`; None when there is no whole one."""
    start = at + FRAME_BYTES
    if start > len(buffer):
        return None
    length, checksum = _FRAME.unpack_from(buffer, at)
    end = start + length
    if not 0 < length <= BODY_BYTES_MAX or end > len(buffer):
        return None
    data = memoryview(buffer)[start:end]
    if crc32c(data) != checksum:
        return None
    return Body(base + at, base + end, data)


def frame_length(head: Buffer) -> int:
    """How long the frame is that begins with these bytes; more than it can be when they are no frame."""
    return FRAME_BYTES + _FRAME.unpack_from(head)[0] if len(head) >= FRAME_BYTES else FRAME_BYTES


def decode_message(body: Body) -> Entry:
    try:
        return _decode_message(body)
    except (ValueError, IndexError, error) as problem:
        raise DamagedSpool(f"the message at {body.position} cannot be read: {problem}") from problem


def _decode_message(body: Body) -> Entry:
    data = body.data
    _, sequence, timestamp_ms, partition, name, key, value, count = _MESSAGE.unpack_from(data)
    at = _MESSAGE.size
    topic = str(data[at : at + name], "utf-8")
    at += name
    key_bytes, at = _optional(data, at, key)
    value_bytes, at = _optional(data, at, value)
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        (length,) = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        header = str(data[at : at + length], "utf-8")
        at += length
        (length,) = _LENGTH.unpack_from(data, at)
        header_value, at = _optional(data, at + _LENGTH.size, length)
        headers.append((header, header_value))
    if at != len(data):
        raise ValueError(f"{len(data) - at} bytes too many")
    message = Message(topic, partition, key_bytes, value_bytes, tuple(headers), timestamp_ms)
    return Entry(body.position, body.end, sequence, message)


def _optional(data: memoryview, at: int, length: int) -> tuple[bytes | None, int]:
    if length < 0:
        return None, at
    return bytes(data[at : at + length]), at + length


def decode_counters(body: Body) -> dict[PartitionKey, int]:
    counters: dict[PartitionKey, int] = {}
    try:
        _, count = _COUNTERS.unpack_from(body.data)
        at = _COUNTERS.size
        for _ in range(count):
            length, partition, following = _COUNTER.unpack_from(body.data, at)
            at += _COUNTER.size
            counters[str(body.data[at : at + length], "utf-8"), partition] = following
            at += length
    except (ValueError, error) as problem:
        raise DamagedSpool(f"the counters at {body.position} cannot be read: {problem}") from problem
    return counters


def decode_group(body: Body) -> int:
    """The position a group says it stands at."""
    position: int = _GROUP.unpack(body.data)[1] if len(body.data) == _GROUP.size else -1
    return position


def decode_note(body: Body) -> str:
    return str(body.data[1:], "utf-8", "replace")


def entries_of(buffer: Buffer, base: int) -> Iterable[Entry]:
    """The messages of a buffer of whole frames."""
    at = 0
    while at < len(buffer):
        body = read_frame(buffer, at, base)
        if body is None:
            raise DamagedSpool(f"no whole frame at {base + at}")
        if body.kind == MESSAGE:
            yield decode_message(body)
        at = body.end - base
