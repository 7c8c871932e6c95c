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
- 5, a move: as a group, with uint16 length of a topic, int64 number and the topic in front of the messages, which were
  stored elsewhere before and count as stored here from now on. Without a topic they come from the file of refused
  messages, to be sent once more: that many of its messages, from the first on, have been stored again. With a topic
  they were undecided; earlier versions wrote such moves, and every undecided message of the topic in front of that
  sequence was moved or set aside.
- 6, a group in columns: as a group, of messages for one topic that have their partitions and no headers. What they
  have in common is written once: uint16 length of the topic, uint16 partitions, int64 timestamp in milliseconds (-1:
  each has its own), the topic, and for each partition its int32 number and the int64 sequence of its first message
  here; the others follow it without a gap. Then the columns: int32 partition, int32 length of the key (-1: none) and
  int32 length of the value (-1: none) of every message, int64 timestamps when each has its own, all keys, all values.
  Most groups are of this kind: a column is written in one step, a message in twenty.

A message: int64 sequence, int64 timestamp in milliseconds, int32 partition, uint16 length of the topic, int32 length of
the key (-1: none), int32 length of the value (-1: none), uint16 headers; then topic, key, value, and for each header
uint16 length of the name, name, int32 length of the value (-1: none), value.

A *position* counts bytes over the whole life of a spool; a segment is named by the position it begins at. A
*sequence* counts the messages of one spool for one partition of a topic, from 0 without gaps. A message whose partition
is not known when it is stored is *undecided*: its partition is -1, and its sequence counts those of its topic; it is
sent from where it stands. An *opening* is a random number that a process draws when it opens the spool; each process
begins a segment of its own. Spool, opening, topic, partition and sequence name a message for ever (header `hf-id`).

Among the counters, partition -2 of a topic is the number of its last move, and partition -3 of no topic the opening of
the segment; segments of earlier versions have none.

All integers are big endian.
"""

from __future__ import annotations

import sys
from array import array
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
COLUMNS: Final = 6
GROUPS: Final = (GROUP, MOVE, COLUMNS)
BODY_BYTES_MAX: Final = 1 << 30
"""No client can send more in one message; a longer body is damage, not a message."""
MESSAGE_BYTES_MAX: Final = BODY_BYTES_MAX // 4
TOPIC_BYTES_MAX: Final = 2**16 - 1
HEADERS_MAX: Final = 2**16 - 1

UNDECIDED: Final = -1
"""The partition of a message whose topic's partitions nobody could count."""
MOVED: Final = -2
"""As a counter: in front of it, undecided messages of the topic have been moved or set aside, by earlier versions."""
RETRIED: Final = ("", MOVED)
"""The counter of messages that were set aside and have been stored again since, from the first on."""
OPENING: Final = ("", -3)
"""As a counter: which opening of the spool a segment belongs to."""

_FRAME: Final = Struct(">II")
FRAME_BYTES: Final = _FRAME.size
_MAGIC: Final = b"grp"
_GROUP: Final = Struct(">B3sqI")
_MOVE: Final = Struct(">Hq")
_COLUMNS: Final = Struct(">HHq")
_FIRST: Final = Struct(">iq")
_INT32: Final = "i"
_INT64: Final = "q"
PARTITIONS_MAX: Final = 2**16 - 1
"""Of one group in columns."""
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


class SpooledMessage(NamedTuple):
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
    if moved is None:
        in_columns = _encode_columns(messages, position, next_sequence)
        if in_columns is not None:
            return in_columns
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


def _encode_columns(
    messages: Sequence[Storable], position: int, next_sequence: Callable[[PartitionKey], int]
) -> tuple[bytes, bytes, dict[PartitionKey, int]] | None:
    """As `encode_group`, in columns; None when the messages have too little in common."""
    if not messages:
        return None
    topic = messages[0].topic
    first: dict[int, int] = {}
    following: dict[int, int] = {}
    partitions: list[int] = []
    append, get = partitions.append, following.get
    for message in messages:
        partition = message.partition
        if partition is None or message.headers or message.topic != topic:
            return None
        sequence = get(partition)
        if sequence is None:
            first[partition] = sequence = next_sequence((topic, partition))
        message.sequence = sequence
        following[partition] = sequence + 1
        append(partition)
    if len(first) > PARTITIONS_MAX:
        return None
    keys = [message.key for message in messages]
    values = [message.value for message in messages]
    stamps = [message.timestamp_ms for message in messages]
    is_at_once = stamps[0] >= 0 and stamps.count(stamps[0]) == len(stamps)
    name = topic.encode()
    pieces = [
        _GROUP.pack(COLUMNS, _MAGIC, position, len(messages)),
        _COLUMNS.pack(len(name), len(first), stamps[0] if is_at_once else -1),
        name,
        *(_FIRST.pack(*each) for each in first.items()),
        _column(_INT32, partitions),
        _column(_INT32, [-1 if key is None else len(key) for key in keys]),
        _column(_INT32, [-1 if value is None else len(value) for value in values]),
        b"" if is_at_once else _column(_INT64, stamps),
        *filter(None, keys),
        *filter(None, values),
    ]
    body = b"".join(pieces)
    counters = {(topic, partition): after for partition, after in following.items()}
    return _FRAME.pack(len(body), crc32c(body)), body, counters


def _column(kind: str, numbers: Sequence[int]) -> bytes:
    column = array(kind, numbers)
    if sys.byteorder == "little":
        column.byteswap()
    return column.tobytes()


def encode_message(message: SpooledMessage) -> bytes:
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


def check_bytes(what: str, value: bytes | None) -> None:
    """Refuse what a serializer made that is not bytes: it has a length, and no frame can hold it."""
    if value is not None and not isinstance(value, bytes):
        raise TypeError(f"its {what} is of type {type(value).__name__}, and not bytes")


def check_headers(headers: Headers) -> int:
    """Refuse headers that no frame can hold; returns about how many bytes they take."""
    if len(headers) > HEADERS_MAX:
        raise ValueError(f"{len(headers)} headers")
    size = 0
    for name, value in headers:
        length = len(name.encode())
        check_bytes(f"header {name}", value)
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
    messages: list[SpooledMessage]


def decode_group(body: Body) -> Group:
    data = body.data
    try:
        kind, magic, position, count = _GROUP.unpack_from(data)
        if magic != _MAGIC or position != body.position:
            raise ValueError(f"it says that it stands at {position}")
        at = _GROUP.size
        if kind == COLUMNS:
            return Group(position, body.end, None, _decode_columns(data, at, count))
        moved = None
        if kind == MOVE:
            length, through = _MOVE.unpack_from(data, at)
            at += _MOVE.size
            moved = Moved(str(data[at : at + length], "utf-8"), through)
            at += length
        messages: list[SpooledMessage] = []
        for _ in range(count):
            message, at = _decode_message(data, at)
            messages.append(message)
        if at != len(data):
            raise ValueError(f"{len(data) - at} bytes too many")
    except (ValueError, IndexError, error) as problem:
        raise DamagedSpool(f"the group at {body.position} cannot be read: {problem}") from problem
    return Group(position, body.end, moved, messages)


_new = tuple.__new__
"""Past the named tuple's own constructor, which costs as much as the rest of a message."""


def _decode_columns(data: memoryview, at: int, count: int) -> list[SpooledMessage]:
    length, partition_count, stamp = _COLUMNS.unpack_from(data, at)
    at += _COLUMNS.size
    topic = str(data[at : at + length], "utf-8")
    at += length
    following: dict[int, int] = {}
    for _ in range(partition_count):
        partition, first = _FIRST.unpack_from(data, at)
        following[partition] = first
        at += _FIRST.size
    partitions, at = _read_column(_INT32, data, at, count)
    keys, at = _read_column(_INT32, data, at, count)
    values, at = _read_column(_INT32, data, at, count)
    stamps: Sequence[int] = (stamp,) * count
    if stamp < 0:
        stamps, at = _read_column(_INT64, data, at, count)
    value_at = at + sum(length for length in keys if length > 0)
    size = value_at + sum(length for length in values if length > 0)
    if size != len(data):
        raise ValueError(f"{len(data)} bytes, and not {size}")
    raw = bytes(data)
    messages: list[SpooledMessage] = []
    for partition, key_length, value_length, timestamp_ms in zip(
        partitions, keys, values, stamps, strict=True
    ):
        key = value = None
        if key_length >= 0:
            key = raw[at : at + key_length]
            at += key_length
        if value_length >= 0:
            value = raw[value_at : value_at + value_length]
            value_at += value_length
        sequence = following.get(partition)
        if sequence is None:
            raise ValueError(f"no sequence for partition {partition}")
        following[partition] = sequence + 1
        messages.append(_new(SpooledMessage, (topic, partition, key, value, (), timestamp_ms, sequence)))
    return messages


def _read_column(kind: str, data: memoryview, at: int, count: int) -> tuple[Sequence[int], int]:
    column = array(kind)
    end = at + count * column.itemsize
    if end > len(data):
        raise ValueError("columns that are longer than the group")
    column.frombytes(data[at:end])
    if sys.byteorder == "little":
        column.byteswap()
    return column, end


def decode_message(body: Body) -> SpooledMessage:
    """A message that stands alone."""
    try:
        message, at = _decode_message(body.data, 1)
        if body.kind != MESSAGE or at != len(body.data):
            raise ValueError(f"kind {body.kind}, {len(body.data) - at} bytes too many")
    except (ValueError, IndexError, error) as problem:
        raise DamagedSpool(f"the message at {body.position} cannot be read: {problem}") from problem
    return message


def _decode_message(data: memoryview, at: int) -> tuple[SpooledMessage, int]:
    sequence, timestamp_ms, partition, name, key, value, count = _MESSAGE.unpack_from(data, at)
    at += _MESSAGE.size
    topic = str(data[at : at + name], "utf-8")
    at += name
    key_bytes, at = _optional(data, at, key)
    value_bytes, at = _optional(data, at, value)
    headers: Headers = ()
    if count:
        headers, at = _decode_headers(data, at, count)
    return SpooledMessage(topic, partition, key_bytes, value_bytes, headers, timestamp_ms, sequence), at


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
