"""The control records: in the raft log who leads, who votes, where a snapshot begins and ends; in the logs of
topics where a transaction ends.

A control record stands in a batch whose control attribute is set. Its key is four bytes, the key's version (0)
and the type. Its value is a struct whose first field is the version of its own layout. The markers that end
transactions, types 0 and 1, are not flexible, grow only at their end, and have a reader of their own.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Annotated, ClassVar, Final, NamedTuple
from uuid import UUID

from holdfast.errors import CorruptLog
from holdfast.seams import Buffer
from holdfast.wire.record_codec import (
    INT16,
    INT32,
    INT64,
    STRING,
    UINT16,
    UUIDS,
    Array,
    Field,
    Struct,
    read_struct,
    write_struct,
)

_KEY: Final = struct.Struct(">hh")
_KEY_VERSION: Final = 0
_VERSION: Final = struct.Struct(">h")
_NO_DIRECTORY: Final = UUID(int=0)


@dataclass(frozen=True, kw_only=True)
class ControlRecord:
    """What every control record has."""

    type: ClassVar[int]
    version_max: ClassVar[int] = 0

    version: Annotated[int, Field(INT16)] = 0
    """The layout of the value, which is also its first field."""

    def encode_key(self) -> bytes:
        return _KEY.pack(_KEY_VERSION, self.type)

    def encode_value(self) -> bytes:
        out = bytearray()
        write_struct(self, out, self.version)
        return bytes(out)


@dataclass(frozen=True)
class Voter:
    """One voter, as the leader's first record names it."""

    voter_id: Annotated[int, Field(INT32)]
    voter_directory_id: Annotated[UUID, Field(UUIDS, since=1)] = _NO_DIRECTORY


@dataclass(frozen=True, kw_only=True)
class LeaderChange(ControlRecord):
    """The first record of every epoch: who leads it and who elected the leader."""

    type: ClassVar[int] = 2
    version_max: ClassVar[int] = 1

    leader_id: Annotated[int, Field(INT32)]
    voters: Annotated[tuple[Voter, ...], Field(Array(Struct(Voter)))] = ()
    granting_voters: Annotated[tuple[Voter, ...], Field(Array(Struct(Voter)))] = ()


@dataclass(frozen=True, kw_only=True)
class SnapshotHeader(ControlRecord):
    """The first record of a snapshot."""

    type: ClassVar[int] = 3

    last_contained_log_timestamp: Annotated[int, Field(INT64)]
    """When the last record the snapshot stands for was appended, in milliseconds."""


@dataclass(frozen=True, kw_only=True)
class SnapshotFooter(ControlRecord):
    """The last record of a snapshot: without it the snapshot is not whole."""

    type: ClassVar[int] = 4


@dataclass(frozen=True, kw_only=True)
class KRaftVersion(ControlRecord):
    """Which version of the raft protocol the voters speak; from 1 on the voters are in the log."""

    type: ClassVar[int] = 5

    kraft_version: Annotated[int, Field(INT16)]


@dataclass(frozen=True)
class VoterEndPoint:
    name: Annotated[str, Field(STRING)]
    host: Annotated[str, Field(STRING)]
    port: Annotated[int, Field(UINT16)]


@dataclass(frozen=True)
class KRaftVersionFeature:
    min_supported_version: Annotated[int, Field(INT16)] = 0
    max_supported_version: Annotated[int, Field(INT16)] = 1


@dataclass(frozen=True)
class VoterDescription:
    """One voter with where it listens and what it speaks."""

    voter_id: Annotated[int, Field(INT32)]
    voter_directory_id: Annotated[UUID, Field(UUIDS)]
    endpoints: Annotated[tuple[VoterEndPoint, ...], Field(Array(Struct(VoterEndPoint)))] = ()
    kraft_version_feature: Annotated[KRaftVersionFeature, Field(Struct(KRaftVersionFeature))] = (
        KRaftVersionFeature()
    )


@dataclass(frozen=True, kw_only=True)
class Voters(ControlRecord):
    """The whole set of voters from here on."""

    type: ClassVar[int] = 6

    voters: Annotated[tuple[VoterDescription, ...], Field(Array(Struct(VoterDescription)))] = ()


@dataclass(frozen=True, kw_only=True)
class UnknownControlRecord(ControlRecord):
    """A control record of a type or version that is not known here, as its bytes."""

    kind: int
    value: bytes

    def encode_key(self) -> bytes:
        return _KEY.pack(_KEY_VERSION, self.kind)

    def encode_value(self) -> bytes:
        return self.value


KINDS: Final[dict[int, type[ControlRecord]]] = {
    kind.type: kind for kind in (LeaderChange, SnapshotHeader, SnapshotFooter, KRaftVersion, Voters)
}
"""Every control record known here, by its type."""


def decode_control_record(key: Buffer, value: Buffer) -> ControlRecord:
    """The control record with this key and value; raises `CorruptLog` if there is none."""
    try:
        key_version, kind = _KEY.unpack_from(key, 0)
        version = _VERSION.unpack_from(value, 0)[0]
    except struct.error:
        sizes = f"a key of {len(key)} bytes with a value of {len(value)}"
        raise CorruptLog(f"{sizes} is no control record") from None
    record_type = KINDS.get(kind)
    if record_type is None or not 0 <= version <= record_type.version_max or key_version != _KEY_VERSION:
        return UnknownControlRecord(version=version, kind=kind, value=bytes(value))
    try:
        record, end = read_struct(record_type, value, 0, version)
        if end != len(value):
            raise ValueError(f"{len(value) - end} bytes follow it")
    except ValueError as error:
        raise CorruptLog(f"a value of {len(value)} bytes is no {record_type.__name__}: {error}") from None
    assert isinstance(record, record_type)
    return record


_MARKER_VALUE: Final = struct.Struct(">hi")
_MARKER_VERSION: Final = 0
_ABORT, _COMMIT = 0, 1


class EndTransactionMarker(NamedTuple):
    """The control record that ends a transaction in the log of a partition."""

    is_commit: bool
    coordinator_epoch: int

    def encode_key(self) -> bytes:
        return _KEY.pack(_KEY_VERSION, _COMMIT if self.is_commit else _ABORT)

    def encode_value(self) -> bytes:
        return _MARKER_VALUE.pack(_MARKER_VERSION, self.coordinator_epoch)


def decode_end_marker(key: Buffer | None, value: Buffer | None) -> EndTransactionMarker | None:
    """The marker with this key and value, None for another control record; raises `CorruptLog` for neither."""
    try:
        _, kind = _KEY.unpack_from(key or b"")
        if kind not in (_ABORT, _COMMIT):
            return None
        version, coordinator_epoch = _MARKER_VALUE.unpack_from(value or b"")
    except struct.error:
        raise CorruptLog(f"a control record is too short: key {key!r}, value {value!r}") from None
    if version < 0:
        raise CorruptLog(f"a transaction marker has version {version}")
    return EndTransactionMarker(kind == _COMMIT, coordinator_epoch)
