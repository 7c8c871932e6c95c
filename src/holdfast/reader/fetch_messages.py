"""Fetch, versions 13 to 18, packed and walked by hand: the answer's records stay where they were received.

The generated reader would copy every batch out of the answer. This walk copies nothing: it goes over the lengths,
checks each against the bytes that are left, and hands out views. Tests compare it with the generated schemas.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from holdfast.errors import MalformedFrame
from holdfast.wire.varint import decode_uvarint, encode_uvarint

FETCH: Final = 1
LOWEST_VERSION: Final = 13
"""The first that names topics by id."""
REPLICA_STATE_TAGGED: Final = 15

_HEAD: Final = struct.Struct(">iiibii").pack  # wait, least and most bytes, isolation, session id and epoch
_PARTITION: Final = struct.Struct(">iiqiqix").pack
_RESPONSE: Final = struct.Struct(">ihi").unpack_from
_FETCHED: Final = struct.Struct(">ihqqq")
_ABORTED: Final = struct.Struct(">qq")
_NO_REPLICA: Final = struct.pack(">i", -1)
_END: Final = b"\x01\x01\x00"
"""No forgotten topics, no rack, no tagged fields."""


class Asked(NamedTuple):
    partition: int
    leader_epoch: int
    offset: int
    bytes_max: int


class Aborted(NamedTuple):
    producer_id: int
    first_offset: int


class Fetched(NamedTuple):
    """One partition of an answer."""

    topic_id: UUID
    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: Sequence[Aborted]
    records: memoryview


class FetchAnswer(NamedTuple):
    throttle_ms: int
    error_code: int
    partitions: list[Fetched]


def pack_fetch(
    version: int,
    topics: Mapping[UUID, Iterable[Asked]],
    *,
    isolation_level: int,
    wait_ms: int,
    bytes_max: int,
) -> bytes:
    """The body of a request outside any session."""
    parts = [_NO_REPLICA] if version < REPLICA_STATE_TAGGED else []
    parts += (_HEAD(wait_ms, 1, bytes_max, isolation_level, 0, -1), encode_uvarint(len(topics) + 1))
    for topic_id, asked in topics.items():
        packed = [
            _PARTITION(each.partition, each.leader_epoch, each.offset, -1, -1, each.bytes_max)
            for each in asked
        ]
        parts += (topic_id.bytes, encode_uvarint(len(packed) + 1), *packed, b"\0")
    parts.append(_END)
    return b"".join(parts)


def walk_fetch(body: memoryview) -> FetchAnswer:
    """The answer in `body`; its records are views of it."""
    try:
        return _walk(body)
    except (struct.error, IndexError, ValueError) as error:
        raise MalformedFrame(f"a Fetch response that cannot be read: {error}") from None


def _walk(body: memoryview) -> FetchAnswer:
    throttle_ms, error_code, _ = _RESPONSE(body, 0)
    topics_count, position = _count(body, 10)
    partitions: list[Fetched] = []
    for _ in range(topics_count):
        topic_id = UUID(bytes=bytes(body[position : position + 16]))
        partitions_count, position = _count(body, position + 16)
        for _ in range(partitions_count):
            fetched, position = _walk_partition(body, position, topic_id)
            partitions.append(fetched)
        position = _skip_tags(body, position)
    _skip_tags(body, position)
    return FetchAnswer(throttle_ms, error_code, partitions)


def _walk_partition(body: memoryview, position: int, topic_id: UUID) -> tuple[Fetched, int]:
    partition, error_code, high_watermark, last_stable, log_start = _FETCHED.unpack_from(body, position)
    aborted_count, position = _count(body, position + _FETCHED.size)
    aborted = []
    for _ in range(aborted_count):
        aborted.append(Aborted(*_ABORTED.unpack_from(body, position)))
        position = _skip_tags(body, position + _ABORTED.size)
    size, position = _count(body, position + 4)  # past the preferred read replica, which we do not ask for
    records = body[position : position + size]
    position = _skip_tags(body, position + size)
    return (
        Fetched(topic_id, partition, error_code, high_watermark, last_stable, log_start, aborted, records),
        position,
    )


def _count(body: memoryview, position: int) -> tuple[int, int]:
    """A length, null read as 0; no more than there are bytes left, since each item takes at least one."""
    count, position = decode_uvarint(body, position)
    count = max(0, count - 1)
    if count > len(body) - position:
        raise ValueError(f"a length of {count} where {len(body) - position} bytes are left")
    return count, position


def _skip_tags(body: memoryview, position: int) -> int:
    if body[position] == 0:
        return position + 1
    count, position = decode_uvarint(body, position)
    for _ in range(count):
        _, position = decode_uvarint(body, position)
        size, position = decode_uvarint(body, position)
        position += size
        if position > len(body):
            raise ValueError("a tagged field reaches past the end")
    return position
