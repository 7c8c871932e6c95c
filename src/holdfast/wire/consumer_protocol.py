"""What consumers of the classic protocol tell each other through the coordinator: subscriptions and assignments.

To the coordinator these are bytes that belong to the members. It looks inside only where it must: to know which
topics a group reads, to serve a classic member in a group of the consumer protocol, and to show them. Both begin
with the version of their layout and are not flexible. A version that is not known yet is read as the newest that
is, and bytes after the last known field are passed over: newer layouts only append. Bytes that are no such thing
raise `ValueError`, because it is for the caller to know whose fault that is.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Final

from holdfast.seams import Buffer
from holdfast.wire.record_codec import (
    INT32,
    NULLABLE_STRING,
    STRING,
    Array,
    Bytes,
    Field,
    Struct,
    read_struct,
    write_struct,
)

_VERSION: Final = struct.Struct(">h")
_USER_DATA: Final = Bytes(nullable=True)


@dataclass(frozen=True)
class OwnedPartitions:
    """Partitions of one topic."""

    topic: Annotated[str, Field(STRING)]
    partitions: Annotated[tuple[int, ...], Field(Array(INT32))]


@dataclass(frozen=True, kw_only=True)
class ConsumerSubscription:
    """What a member wants to read, in its metadata for each assignor."""

    version_max: ClassVar[int] = 3

    topics: Annotated[tuple[str, ...], Field(Array(STRING))] = ()
    user_data: Annotated[bytes | None, Field(_USER_DATA)] = None
    owned_partitions: Annotated[
        tuple[OwnedPartitions, ...], Field(Array(Struct(OwnedPartitions)), since=1, ignorable=True)
    ] = ()
    generation_id: Annotated[int, Field(INT32, since=2, ignorable=True)] = -1
    rack_id: Annotated[str | None, Field(NULLABLE_STRING, since=3, ignorable=True)] = None

    def encode(self, version: int = version_max) -> bytes:
        return _encode(self, version)


@dataclass(frozen=True, kw_only=True)
class ConsumerAssignment:
    """What the leader, or the coordinator in its place, gives a member to read."""

    version_max: ClassVar[int] = 3

    assigned_partitions: Annotated[tuple[OwnedPartitions, ...], Field(Array(Struct(OwnedPartitions)))] = ()
    user_data: Annotated[bytes | None, Field(_USER_DATA)] = None

    def encode(self, version: int = version_max) -> bytes:
        return _encode(self, version)


def decode_subscription(data: Buffer) -> tuple[int, ConsumerSubscription]:
    """The version of the layout that was read, and the subscription."""
    return _decode(ConsumerSubscription, data)


def decode_assignment(data: Buffer) -> tuple[int, ConsumerAssignment]:
    """The version of the layout that was read, and the assignment."""
    return _decode(ConsumerAssignment, data)


def _encode(message: Any, version: int) -> bytes:
    out = bytearray(_VERSION.pack(version))
    write_struct(message, out, version, flexible=False)
    return bytes(out)


def _decode(message_type: Any, data: Buffer) -> tuple[int, Any]:
    if len(data) < _VERSION.size:
        raise ValueError(f"{len(data)} bytes are no {message_type.__name__}: there is no version in front")
    version = min(_VERSION.unpack_from(data)[0], message_type.version_max)
    if version < 0:
        raise ValueError(f"version {version} of a {message_type.__name__}")
    message, _ = read_struct(message_type, data, _VERSION.size, version, flexible=False)
    return version, message
