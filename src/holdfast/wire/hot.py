"""Responses packed by hand, where measurement showed it pays: Produce and Fetch.

The general encoder takes a few microseconds per structure; these two answer nearly every request a busy
broker gets. Each function writes exactly the fields of its version, in the schema's order; the tests decode
the result with the generated schemas for every version and compare.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from holdfast.wire.varint import encode_uvarint

PRODUCE_FLEXIBLE: Final = 9
PRODUCE_TOPIC_IDS: Final = 13
FETCH_FLEXIBLE: Final = 12
FETCH_TOPIC_IDS: Final = 13

_PRODUCED_V3: Final = struct.Struct(">ihqq").pack
_PRODUCED_V5: Final = struct.Struct(">ihqqq").pack
_PRODUCED_V8: Final = struct.Struct(">ihqqqih").pack
_PRODUCED_FLEXIBLE: Final = struct.Struct(">ihqqqBBB").pack
_I16: Final = struct.Struct(">h").pack
_I32: Final = struct.Struct(">i").pack


class Produced(NamedTuple):
    """One partition's success in a Produce response."""

    partition: int
    base_offset: int
    log_append_time: int
    log_start_offset: int


def pack_produce_response(version: int, topics: Sequence[tuple[str | UUID, Sequence[Produced]]]) -> bytes:
    """A Produce response in which every partition succeeded."""
    parts: list[bytes] = []
    flexible = version >= PRODUCE_FLEXIBLE
    parts.append(encode_uvarint(len(topics) + 1) if flexible else _I32(len(topics)))
    for topic, partitions in topics:
        parts.append(_topic(topic, flexible))
        parts.append(encode_uvarint(len(partitions) + 1) if flexible else _I32(len(partitions)))
        for produced in partitions:
            if flexible:
                # no record errors (empty array), no error message (null), no tagged fields
                parts.append(
                    _PRODUCED_FLEXIBLE(produced[0], 0, produced[1], produced[2], produced[3], 1, 0, 0)
                )
            elif version >= 8:
                parts.append(_PRODUCED_V8(produced[0], 0, produced[1], produced[2], produced[3], 0, -1))
            elif version >= 5:
                parts.append(_PRODUCED_V5(produced[0], 0, produced[1], produced[2], produced[3]))
            else:
                parts.append(_PRODUCED_V3(produced[0], 0, produced[1], produced[2]))
        if flexible:
            parts.append(b"\x00")
    parts.append(b"\x00\x00\x00\x00\x00" if flexible else b"\x00\x00\x00\x00")
    return b"".join(parts)


def _topic(topic: str | UUID, flexible: bool) -> bytes:
    if isinstance(topic, UUID):
        return topic.bytes
    name = topic.encode()
    return (encode_uvarint(len(name) + 1) if flexible else _I16(len(name))) + name


class Fetched(NamedTuple):
    """One partition of a Fetch response; `records` is a slice or bytes of `records_length`."""

    partition: int
    error_code: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted: Sequence[tuple[int, int]] | None
    records: Any
    records_length: int
    diverging: tuple[int, int] | None = None
    """(epoch, end offset) when the fetcher's last epoch ended before its offset."""


_FETCHED_V4: Final = struct.Struct(">ihqq").pack
_FETCHED_V5: Final = struct.Struct(">ihqqq").pack
_DIVERGING: Final = struct.Struct(">BBiqB").pack


def pack_fetch_response(
    version: int,
    error_code: int,
    session_id: int,
    topics: Sequence[tuple[str | UUID, Sequence[Fetched]]],
) -> list[Any]:
    """A Fetch response as parts; file slices stay slices."""
    flexible = version >= FETCH_FLEXIBLE
    head = bytearray(b"\x00\x00\x00\x00")
    if version >= 7:
        head += struct.pack(">hi", error_code, session_id)
    head += encode_uvarint(len(topics) + 1) if flexible else _I32(len(topics))
    parts: list[Any] = []
    for topic, partitions in topics:
        head += _topic(topic, flexible)
        head += encode_uvarint(len(partitions) + 1) if flexible else _I32(len(partitions))
        for fetched in partitions:
            head += _fetched_head(version, flexible, fetched)
            if fetched.records_length:
                parts.append(bytes(head))
                parts.append(fetched.records)
                head = bytearray()
            if flexible:
                head += _fetched_tags(fetched)
        if flexible:
            head += b"\x00"
    if flexible:
        head += b"\x00"
    if head:
        parts.append(bytes(head))
    return parts


def _fetched_head(version: int, flexible: bool, fetched: Fetched) -> bytes:
    index, error, high_watermark, stable, start, aborted, _, length, *_ = fetched
    if version >= 5:
        out = _FETCHED_V5(index, error, high_watermark, stable, start)
    else:
        out = _FETCHED_V4(index, error, high_watermark, stable)
    if flexible:
        if aborted is None:
            out += b"\x00"
        else:
            out += encode_uvarint(len(aborted) + 1)
            out += b"".join(struct.pack(">qqB", producer_id, first, 0) for producer_id, first in aborted)
    elif aborted is None:
        out += b"\xff\xff\xff\xff"
    else:
        out += _I32(len(aborted)) + b"".join(struct.pack(">qq", *entry) for entry in aborted)
    if version >= 11:
        out += b"\xff\xff\xff\xff"  # no preferred read replica
    return out + (encode_uvarint(length + 1) if flexible else _I32(length))


def _fetched_tags(fetched: Fetched) -> bytes:
    return b"\x00" if fetched.diverging is None else b"\x01" + _DIVERGING(0, 13, *fetched.diverging, 0)
