"""The bytes of a spool: frames that prove themselves, one behind the other.

    uint32 length of the body, uint32 CRC-32C of the body, body

A body begins with its kind:

- 1, a message alone, as the file of refused messages keeps it.
- 2, the counters: for each partition its topic, number and next sequence. They stand at the beginning of every
  segment, so that sequences go on although the segments they come from are gone.
- 3, a group: "grp", the int64 position it stands at, uint32 messages, and the messages. Each write is one group.
  Whatever is in front of a group was flushed before it was written; by this a torn end, which nobody was promised, can
  be told from damage to what was stored.
- 4, a note: UTF-8 text about the message in front of it.
- 5, a move: as a group, with uint16 length of a topic, int64 sequence and the topic in front of the messages, which
  had been stored undecided and now have their partitions. Every undecided message of the topic in front of that
  sequence has been moved, here or earlier, or was set aside.

A message: int64 sequence, int64 timestamp in milliseconds, int32 partition, uint16 length of the topic, int32 length of
the key (-1: none), int32 length of the value (-1: none), uint16 headers; then topic, key, value, and for each header
uint16 length of the name, name, int32 length of the value (-1: none), value.

A *position* counts bytes over the whole life of a spool; a segment is named by the position it begins at. A
*sequence* counts the messages of one spool for one partition of a topic, from 0 without gaps: with the spool's id it
names a message for ever (header `hf-id`). A message whose partition is not known when it is stored is *undecided*: its
partition is -1, and its sequence counts those of its topic. Among the counters, partition -2 of a topic is the sequence
in front of which all its undecided messages have been moved or set aside.

All integers are big endian.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from struct import Struct, error
from typing import Final, NamedTuple, Protocol, TypeAlias

from crc32c import crc32c

from holdfast.errors import StorageError
from holdfast.seams import Buffer

MESSAGE: Final = 1
COUNTERS: Final = 2
GROUP: Final = 3
NOTE: Final = 4
MOVE: Final = 5
GROUPS: Final = (GROUP, MOVE)
BODY_BYTES_MAX: Final = 1 << 30
"""No client can send more in one message; a longer body is damage, not a message."""
MESSAGE_BYTES_MAX: Final = BODY_BYTES_MAX // 4
TOPIC_BYTES_MAX: Final = 2**16 - 1
HEADERS_MAX: Final = 2**16 - 1

UNDECIDED: Final = -1
"""The partition of a message whose topic's partitions nobody could count."""
MOVED: Final = -2
"""As a counter: in front of it, undecided messages of the topic have been moved or set aside."""

_FRAME: Final = Struct(">II")
FRAME_BYTES: Final = _FRAME.size
_MAGIC: Final = b"grp"
_GROUP: Final = Struct(">B3sqI")
_MOVE: Final = Struct(">Hq")
_MESSAGE: Final = Struct(">qqiHiiH")
MESSAGE_OVERHEAD_BYTES: Final = _MESSAGE.size
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
    """What a producer is asked to send, as it stands in the spool."""

    topic: str
    partition: int
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    sequence: int


class Storable(Protocol):
    """A message that can be put into a group, which gives it its sequence."""

    topic: str
    partition: int | None
    key: bytes | None
    value: bytes | None
    headers: Headers
    timestamp_ms: int
    sequence: int


class Moved(NamedTuple):
    """What a group that moves undecided messages says of their topic."""

    topic: str
    through: int


# Writing


def frame(body: Buffer) -> bytes:
    return _FRAME.pack(len(body), crc32c(body)) + body


def encode_group(
    messages: Sequence[Storable],
    position: int,
    next_sequence: Callable[[PartitionKey], int],
    moved: Moved | None = None,
) -> tuple[bytes, bytes, dict[PartitionKey, int]]:
    """The head of the frame, its body, and the counters that hold when it is stored. Numbers the messages."""
    kind = GROUP if moved is None else MOVE
    pieces = [_GROUP.pack(kind, _MAGIC, position, len(messages))]
    counters: dict[PartitionKey, int] = {}
    if moved is not None:
        name = moved.topic.encode()
        pieces += (_MOVE.pack(len(name), moved.through), name)
        counters[moved.topic, MOVED] = moved.through
    append, pack = pieces.append, _MESSAGE.pack
    topic, partition, encoded, sequence = "", UNDECIDED, b"", 0
    for message in messages:
        if message.topic != topic or message.partition != partition:
            # Messages of one partition often follow each other: what they share is looked up once.
            if topic:
                counters[topic, partition] = sequence
            topic = message.topic
            partition = UNDECIDED if message.partition is None else message.partition
            following = counters.get((topic, partition))
            sequence = next_sequence((topic, partition)) if following is None else following
            encoded = topic.encode()
        message.sequence = sequence
        key, value, headers = message.key, message.value, message.headers
        append(
            pack(
                sequence,
                message.timestamp_ms,
                partition,
                len(encoded),
                -1 if key is None else len(key),
                -1 if value is None else len(value),
                len(headers),
            )
        )
        append(encoded)
        if key:
            append(key)
        if value:
            append(value)
        if headers:
            append(encode_headers(headers))
        sequence += 1
    if topic:
        counters[topic, partition] = sequence
    body = b"".join(pieces)
    return _FRAME.pack(len(body), crc32c(body)), body, counters


def encode_message(message: Message) -> bytes:
    """The frame of a message alone."""
    topic, partition, key, value, headers, timestamp_ms, sequence = message
    name = topic.encode()
    head = _MESSAGE.pack(
        sequence,
        timestamp_ms,
        partition,
        len(name),
        -1 if key is None else len(key),
        -1 if value is None else len(value),
        len(headers),
    )
    return frame(b"".join((bytes([MESSAGE]), head, name, key or b"", value or b"", encode_headers(headers))))


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


def encode_note(text: str) -> bytes:
    return frame(bytes([NOTE]) + text.encode())


def encode_counters(counters: Mapping[PartitionKey, int]) -> bytes:
    parts = [_COUNTERS.pack(COUNTERS, len(counters))]
    for (topic, partition), following in counters.items():
        name = topic.encode()
        parts += (_COUNTER.pack(len(name), partition, following), name)
    return frame(b"".join(parts))


def check_topic(topic: str) -> None:
    """Refuse a name that no frame can hold."""
    if not 0 < len(topic.encode()) <= TOPIC_BYTES_MAX:
        raise ValueError(f"a topic name of {len(topic.encode())} bytes")


def check_headers(headers: Headers) -> int:
    """Refuse headers that no frame can hold; returns about how many bytes they take."""
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} headers")
    size = 0
    for name, value in headers:
        length = len(name.encode())
        if length > TOPIC_BYTES_MAX:
            raise ValueError(f"a header's name of {length} bytes")
        size += length + len(value or b"") + _HEADER.size + _LENGTH.size
    return size


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


def whole_frames(buffer: Buffer, base: int) -> Iterator[Body]:
    """Frames from the first byte of `buffer`, which is at position `base`, up to the first that is not whole."""
    at = 0
    while (body := read_frame(buffer, at, base)) is not None:
        yield body
        at = body.end - base


def frame_length(head: Buffer) -> int:
    """How long the frame is that begins with these bytes; more than it can be when they are no frame."""
    return FRAME_BYTES + _FRAME.unpack_from(head)[0] if len(head) >= FRAME_BYTES else FRAME_BYTES


class Group(NamedTuple):
    """Messages that were stored together."""

    position: int
    """Where its frame stands."""
    end: int
    moved: Moved | None
    messages: list[Message]


def decode_group(body: Body) -> Group:
    data = body.data
    try:
        kind, magic, position, count = _GROUP.unpack_from(data)
        if magic != _MAGIC or position != body.position:
            raise ValueError(f"it says that it stands at {position}")
        at = _GROUP.size
        moved = None
        if kind == MOVE:
            length, through = _MOVE.unpack_from(data, at)
            at += _MOVE.size
            moved = Moved(str(data[at : at + length], "utf-8"), through)
            at += length
        messages: list[Message] = []
        for _ in range(count):
            message, at = _decode_message(data, at)
            messages.append(message)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes too many")
    except (ValueError, IndexError, error) as problem:
        raise DamagedSpool(f"the group at {body.position} cannot be read: {problem}") from problem
    return Group(position, body.end, moved, messages)


def decode_message(body: Body) -> Message:
    """A message that stands alone."""
    try:
        message, at = _decode_message(body.data, 1)
        if body.kind != MESSAGE or at != len(body.data):
            raise ValueError(f"kind {body.kind}, {len(body.data) - at} bytes too many")
    except (ValueError, IndexError, error) as problem:
        raise DamagedSpool(f"the message at {body.position} cannot be read: {problem}") from problem
    return message


def _decode_message(data: memoryview, at: int) -> tuple[Message, int]:
    sequence, timestamp_ms, partition, name, key, value, count = _MESSAGE.unpack_from(data, at)
    at += _MESSAGE.size
    topic = str(data[at : at + name], "utf-8")
    at += name
    key_bytes, at = _optional(data, at, key)
    value_bytes, at = _optional(data, at, value)
    headers: Headers = ()
    if count:
        headers, at = _decode_headers(data, at, count)
    return Message(topic, partition, key_bytes, value_bytes, headers, timestamp_ms, sequence), at


def _decode_headers(data: memoryview, at: int, count: int) -> tuple[Headers, int]:
    headers: list[tuple[str, bytes | None]] = []
    for _ in range(count):
        (length,) = _HEADER.unpack_from(data, at)
        at += _HEADER.size
        name = str(data[at : at + length], "utf-8")
        at += length
        (length,) = _LENGTH.unpack_from(data, at)
        value, at = _optional(data, at + _LENGTH.size, length)
        headers.append((name, value))
    return tuple(headers), at


def _optional(data: memoryview, at: int, length: int) -> tuple[bytes | None, int]:
    if length < 0:
        return None, at
    end = at + length
    if end > len(data):
        raise ValueError("a length that points behind the end")
    return bytes(data[at:end]), end


def counters_of(group: Group) -> dict[PartitionKey, int]:
    """The counters that hold once the group is stored, of what it holds."""
    counters: dict[PartitionKey, int] = {}
    if group.moved is not None:
        counters[group.moved.topic, MOVED] = group.moved.through
    for message in group.messages:
        counters[message.topic, message.partition] = message.sequence + 1
    return counters


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


def decode_note(body: Body) -> str:
    return str(body.data[1:], "utf-8", "replace")


def find_group(tail: Buffer, base: int) -> int | None:
    """Where a group begins behind the first byte of `tail`: what is in front of it had been flushed."""
    data = bytes(tail)
    at = data.find(_MAGIC)
    while at >= 0:
        begin = at - FRAME_BYTES - 1
        if begin > 0 and _is_group(data, begin, base):
            return begin
        at = data.find(_MAGIC, at + 1)
    return None


def _is_group(tail: bytes, at: int, base: int) -> bool:
    body = read_frame(tail, at, base)
    if body is None or body.kind not in GROUPS or len(body.data) < _GROUP.size:
        return False
    position: int = _GROUP.unpack_from(body.data)[2]
    return position == base + at
