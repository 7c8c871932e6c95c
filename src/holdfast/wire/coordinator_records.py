"""The records of `__consumer_offsets` and `__transaction_state`, as Kafka 4.3 writes them.

A record's key begins with two bytes that name its kind and is never flexible; its value begins with two bytes that
name the version of its layout. No value means that what the key names is gone. A value remembers the
`layout_version` it was read in and writes itself in that again, so that reading and writing is the identity; a new
one takes the version Kafka 4.3 writes, which is not always the newest it can read. `layout_version` is no part of
what a record says and does not count when records are compared.

Kinds and versions that are not known here, such as those of share and streams groups, become an `UnknownRecord`,
which keeps the bytes; whoever reads it decides that nothing important was said. Bytes that are no record at all
raise `CorruptLog`. Writing raises `ValueError` for what has no room, such as a group id of more than 32,767 bytes.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, ClassVar, Final, TypeAlias
from uuid import UUID

from holdfast.errors import CorruptLog
from holdfast.seams import Buffer
from holdfast.wire.record_codec import (
    BYTES,
    INT8,
    INT16,
    INT32,
    INT64,
    NULLABLE_STRING,
    STRING,
    UUIDS,
    Array,
    Field,
    NullableStruct,
    Struct,
    read_struct,
    write_struct,
)

_PREFIX: Final = struct.Struct(">h")
NO_TOPIC_ID: Final = UUID(int=0)
NO_TIMESTAMP: Final = -1

Ids: TypeAlias = tuple[int, ...]
_INT32S: Final = Array(INT32)


@dataclass(frozen=True)
class CoordinatorRecord:
    """A key or a value."""

    def encode(self) -> bytes:
        raise TypeError(f"{type(self).__name__} has no bytes of its own")


@dataclass(frozen=True)
class CoordinatorKey(CoordinatorRecord):
    """What every key has."""

    type: ClassVar[int]
    """The number of this kind of record."""

    def encode(self) -> bytes:
        out = bytearray(_PREFIX.pack(self.type))
        write_struct(self, out, 0, flexible=False)
        return bytes(out)


@dataclass(frozen=True, kw_only=True)
class CoordinatorValue(CoordinatorRecord):
    """What every value has."""

    version_max: ClassVar[int] = 0
    version_written: ClassVar[int] = 0
    """The layout of new values."""
    flexible_since: ClassVar[int] = 0

    layout_version: int | None = field(default=None, compare=False, repr=False)
    """The layout it was read in; None for a new one."""

    @property
    def layout(self) -> int:
        """The layout it is written in."""
        return self.version_written if self.layout_version is None else self.layout_version

    def encode(self) -> bytes:
        version = self.layout
        out = bytearray(_PREFIX.pack(version))
        write_struct(self, out, version, version >= self.flexible_since)
        return bytes(out)


@dataclass(frozen=True)
class UnknownRecord(CoordinatorRecord):
    """A key of a kind, or a value of a version, that is not known here, as its bytes."""

    number: int
    """The kind or the version."""
    body: bytes

    def encode(self) -> bytes:
        return _PREFIX.pack(self.number) + self.body


# --- positions ------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class OffsetCommitKey(CoordinatorKey):
    """The position of a group in a partition."""

    type: ClassVar[int] = 1

    group: Annotated[str, Field(STRING)]
    topic: Annotated[str, Field(STRING)]
    partition: Annotated[int, Field(INT32)]


@dataclass(frozen=True)
class LegacyOffsetCommitKey(OffsetCommitKey):
    """The same, as brokers of long ago wrote it."""

    type: ClassVar[int] = 0


@dataclass(frozen=True, kw_only=True)
class OffsetCommitValue(CoordinatorValue):
    version_max: ClassVar[int] = 4
    version_written: ClassVar[int] = 4
    flexible_since: ClassVar[int] = 4

    offset: Annotated[int, Field(INT64)]
    leader_epoch: Annotated[int, Field(INT32, since=3, ignorable=True)] = -1
    metadata: Annotated[str, Field(STRING)] = ""
    commit_timestamp: Annotated[int, Field(INT64)]
    expire_timestamp: Annotated[int, Field(INT64, since=1, until=1, ignorable=True)] = NO_TIMESTAMP
    """When it expires, if the client asked for that itself; only version 1 can say so."""
    topic_id: Annotated[UUID, Field(UUIDS, since=4, tag=0, ignorable=True)] = NO_TOPIC_ID

    @property
    def layout(self) -> int:
        if self.layout_version is None and self.expire_timestamp != NO_TIMESTAMP:
            return 1
        return super().layout


# --- groups of the classic protocol ---------------------------------------------------------------------------


@dataclass(frozen=True)
class GroupMetadataKey(CoordinatorKey):
    """A group of the classic protocol, with all its members."""

    type: ClassVar[int] = 2

    group: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class MemberMetadata:
    """A member of a group of the classic protocol."""

    member_id: Annotated[str, Field(STRING)]
    group_instance_id: Annotated[str | None, Field(NULLABLE_STRING, since=3, ignorable=True)] = None
    client_id: Annotated[str, Field(STRING)]
    client_host: Annotated[str, Field(STRING)]
    rebalance_timeout: Annotated[int, Field(INT32, since=1, ignorable=True)] = -1
    """In milliseconds, like the next."""
    session_timeout: Annotated[int, Field(INT32)]
    subscription: Annotated[bytes, Field(BYTES)]
    assignment: Annotated[bytes, Field(BYTES)]


@dataclass(frozen=True, kw_only=True)
class GroupMetadataValue(CoordinatorValue):
    version_max: ClassVar[int] = 4
    version_written: ClassVar[int] = 3
    flexible_since: ClassVar[int] = 4

    protocol_type: Annotated[str, Field(STRING)]
    generation: Annotated[int, Field(INT32)]
    protocol: Annotated[str | None, Field(NULLABLE_STRING)]
    leader: Annotated[str | None, Field(NULLABLE_STRING)]
    current_state_timestamp: Annotated[int, Field(INT64, since=2, ignorable=True)] = NO_TIMESTAMP
    members: Annotated[tuple[MemberMetadata, ...], Field(Array(Struct(MemberMetadata)))] = ()


# --- groups of the consumer protocol --------------------------------------------------------------------------


@dataclass(frozen=True)
class ConsumerGroupMetadataKey(CoordinatorKey):
    """A group of the consumer protocol."""

    type: ClassVar[int] = 3

    group_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupMetadataValue(CoordinatorValue):
    epoch: Annotated[int, Field(INT32)]
    metadata_hash: Annotated[int, Field(INT64, tag=0)] = 0
    """Of the topics subscribed to: another hash makes a new epoch."""


@dataclass(frozen=True)
class ConsumerGroupPartitionMetadataKey(CoordinatorKey):
    """The topics a group is subscribed to, as brokers before 4.1 wrote them; only removed nowadays."""

    type: ClassVar[int] = 4

    group_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True)
class PartitionMetadata:
    partition: Annotated[int, Field(INT32)]
    racks: Annotated[tuple[str, ...], Field(Array(STRING))] = ()


@dataclass(frozen=True)
class TopicMetadata:
    topic_id: Annotated[UUID, Field(UUIDS)]
    topic_name: Annotated[str, Field(STRING)]
    num_partitions: Annotated[int, Field(INT32)]
    partition_metadata: Annotated[tuple[PartitionMetadata, ...], Field(Array(Struct(PartitionMetadata)))] = ()


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupPartitionMetadataValue(CoordinatorValue):
    topics: Annotated[tuple[TopicMetadata, ...], Field(Array(Struct(TopicMetadata)))] = ()


@dataclass(frozen=True)
class ConsumerGroupMemberMetadataKey(CoordinatorKey):
    """What a member of the consumer protocol says of itself."""

    type: ClassVar[int] = 5

    group_id: Annotated[str, Field(STRING)]
    member_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True)
class ClassicProtocol:
    name: Annotated[str, Field(STRING)]
    metadata: Annotated[bytes, Field(BYTES)]


@dataclass(frozen=True)
class ClassicMemberMetadata:
    """What is known only of a member that speaks the classic protocol."""

    session_timeout_ms: Annotated[int, Field(INT32)] = 0
    supported_protocols: Annotated[tuple[ClassicProtocol, ...], Field(Array(Struct(ClassicProtocol)))] = ()


_CLASSIC: Final = Field(NullableStruct(ClassicMemberMetadata), tag=0, untagged=ClassicMemberMetadata())


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupMemberMetadataValue(CoordinatorValue):
    instance_id: Annotated[str | None, Field(NULLABLE_STRING)] = None
    rack_id: Annotated[str | None, Field(NULLABLE_STRING)] = None
    client_id: Annotated[str, Field(STRING)]
    client_host: Annotated[str, Field(STRING)]
    subscribed_topic_names: Annotated[tuple[str, ...], Field(Array(STRING))] = ()
    subscribed_topic_regex: Annotated[str | None, Field(NULLABLE_STRING)] = None
    rebalance_timeout_ms: Annotated[int, Field(INT32)] = -1
    server_assignor: Annotated[str | None, Field(NULLABLE_STRING)] = None
    classic_member_metadata: Annotated[ClassicMemberMetadata | None, _CLASSIC] = None
    """None for a member that speaks the consumer protocol."""


@dataclass(frozen=True)
class ConsumerGroupTargetAssignmentMetadataKey(CoordinatorKey):
    """The epoch of a group that its target assignment was computed for."""

    type: ClassVar[int] = 6

    group_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupTargetAssignmentMetadataValue(CoordinatorValue):
    assignment_epoch: Annotated[int, Field(INT32)]
    assignment_timestamp: Annotated[int, Field(INT64, tag=0)] = 0
    """When it was computed, in milliseconds."""


@dataclass(frozen=True)
class ConsumerGroupTargetAssignmentMemberKey(CoordinatorKey):
    """What a member of the consumer protocol is to own."""

    type: ClassVar[int] = 7

    group_id: Annotated[str, Field(STRING)]
    member_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True)
class TargetTopicPartitions:
    topic_id: Annotated[UUID, Field(UUIDS)]
    partitions: Annotated[Ids, Field(_INT32S)]


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupTargetAssignmentMemberValue(CoordinatorValue):
    topic_partitions: Annotated[
        tuple[TargetTopicPartitions, ...], Field(Array(Struct(TargetTopicPartitions)))
    ] = ()


@dataclass(frozen=True)
class ConsumerGroupCurrentMemberAssignmentKey(CoordinatorKey):
    """What a member of the consumer protocol owns, and what it has yet to give up."""

    type: ClassVar[int] = 8

    group_id: Annotated[str, Field(STRING)]
    member_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True)
class CurrentTopicPartitions:
    topic_id: Annotated[UUID, Field(UUIDS)]
    partitions: Annotated[Ids, Field(_INT32S)]
    assignment_epochs: Annotated[Ids | None, Field(Array(INT32, nullable=True), tag=0)] = ()
    """The epoch each partition was assigned in, in the order of `partitions`."""


_CURRENT: Final = Array(Struct(CurrentTopicPartitions))


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupCurrentMemberAssignmentValue(CoordinatorValue):
    member_epoch: Annotated[int, Field(INT32)]
    previous_member_epoch: Annotated[int, Field(INT32)]
    """What the member may still send if the answer that raised its epoch got lost."""
    state: Annotated[int, Field(INT8)]
    """0 stable, 1 unrevoked partitions, 2 unreleased partitions."""
    assigned_partitions: Annotated[tuple[CurrentTopicPartitions, ...], Field(_CURRENT)] = ()
    partitions_pending_revocation: Annotated[tuple[CurrentTopicPartitions, ...], Field(_CURRENT)] = ()


@dataclass(frozen=True)
class ConsumerGroupRegularExpressionKey(CoordinatorKey):
    """The topics a regular expression stands for in a group."""

    type: ClassVar[int] = 16

    group_id: Annotated[str, Field(STRING)]
    regular_expression: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class ConsumerGroupRegularExpressionValue(CoordinatorValue):
    topics: Annotated[tuple[str, ...], Field(Array(STRING))] = ()
    version: Annotated[int, Field(INT64)]
    """The version of the cluster's metadata it was resolved with."""
    timestamp: Annotated[int, Field(INT64)]
    """When it was resolved, in milliseconds."""


# --- transactions ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TransactionLogKey(CoordinatorKey):
    """A transactional id."""

    type: ClassVar[int] = 0

    transactional_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True)
class TransactionPartitions:
    topic: Annotated[str, Field(STRING)]
    partition_ids: Annotated[Ids, Field(_INT32S)]


_PARTITIONS: Final = Array(Struct(TransactionPartitions), nullable=True)


LAST_PRODUCER_EPOCH_TAG: Final = 10_000
"""Kafka numbers its tags from 0, and skips those it does not know."""


@dataclass(frozen=True, kw_only=True)
class TransactionLogValue(CoordinatorValue):
    version_max: ClassVar[int] = 1
    version_written: ClassVar[int] = 1
    flexible_since: ClassVar[int] = 1

    producer_id: Annotated[int, Field(INT64)]
    previous_producer_id: Annotated[int, Field(INT64, since=1, tag=0)] = -1
    next_producer_id: Annotated[int, Field(INT64, since=1, tag=1)] = -1
    producer_epoch: Annotated[int, Field(INT16)]
    next_producer_epoch: Annotated[int, Field(INT16, since=1, tag=3)] = -1
    transaction_timeout_ms: Annotated[int, Field(INT32)]
    transaction_status: Annotated[int, Field(INT8)]
    """0 empty, 1 ongoing, 2 prepare commit, 3 prepare abort, 4 complete commit, 5 complete abort, 6 dead,
    7 prepare epoch fence."""
    transaction_partitions: Annotated[tuple[TransactionPartitions, ...] | None, Field(_PARTITIONS)] = ()
    """None while there is no transaction."""
    transaction_last_update_timestamp_ms: Annotated[int, Field(INT64)]
    transaction_start_timestamp_ms: Annotated[int, Field(INT64)] = NO_TIMESTAMP
    client_transaction_version: Annotated[int, Field(INT16, since=1, tag=2)] = 0
    last_producer_epoch: Annotated[int, Field(INT16, since=1, tag=LAST_PRODUCER_EPOCH_TAG)] = -1
    """Not Kafka's, which does not read it: the epoch that a producer had before it renewed it."""


Kinds: TypeAlias = Mapping[int, tuple[type[CoordinatorKey], type[CoordinatorValue]]]

GROUP_KINDS: Final[Kinds] = {
    key.type: (key, value)
    for key, value in (
        (LegacyOffsetCommitKey, OffsetCommitValue),
        (OffsetCommitKey, OffsetCommitValue),
        (GroupMetadataKey, GroupMetadataValue),
        (ConsumerGroupMetadataKey, ConsumerGroupMetadataValue),
        (ConsumerGroupPartitionMetadataKey, ConsumerGroupPartitionMetadataValue),
        (ConsumerGroupMemberMetadataKey, ConsumerGroupMemberMetadataValue),
        (ConsumerGroupTargetAssignmentMetadataKey, ConsumerGroupTargetAssignmentMetadataValue),
        (ConsumerGroupTargetAssignmentMemberKey, ConsumerGroupTargetAssignmentMemberValue),
        (ConsumerGroupCurrentMemberAssignmentKey, ConsumerGroupCurrentMemberAssignmentValue),
        (ConsumerGroupRegularExpressionKey, ConsumerGroupRegularExpressionValue),
    )
}
"""Every kind of record of `__consumer_offsets` known here, by its number."""

TRANSACTION_KINDS: Final[Kinds] = {TransactionLogKey.type: (TransactionLogKey, TransactionLogValue)}
"""The kind of record of `__transaction_state`."""


def decode_group_record(
    key: Buffer | None, value: Buffer | None
) -> tuple[CoordinatorRecord, CoordinatorRecord | None]:
    """The record of `__consumer_offsets` with this key and value; raises `CorruptLog` if there is none."""
    return _decode(GROUP_KINDS, key, value)


def decode_transaction_record(
    key: Buffer | None, value: Buffer | None
) -> tuple[CoordinatorRecord, CoordinatorRecord | None]:
    """The record of `__transaction_state` with this key and value; raises `CorruptLog` if there is none."""
    return _decode(TRANSACTION_KINDS, key, value)


def _decode(
    kinds: Kinds, key: Buffer | None, value: Buffer | None
) -> tuple[CoordinatorRecord, CoordinatorRecord | None]:
    number = _prefix(key, "key")
    assert key is not None
    kind = kinds.get(number)
    if kind is None:
        unknown = UnknownRecord(number, bytes(key[2:]))
        return unknown, None if value is None else UnknownRecord(_prefix(value, "value"), bytes(value[2:]))
    key_type, value_type = kind
    decoded = _read(key_type, key, 0, False)
    if value is None:
        return decoded, None
    version = _prefix(value, "value")
    if not 0 <= version <= value_type.version_max:
        return decoded, UnknownRecord(version, bytes(value[2:]))
    record = _read(value_type, value, version, version >= value_type.flexible_since)
    object.__setattr__(record, "layout_version", version)
    return decoded, record


def _prefix(data: Buffer | None, what: str) -> int:
    if data is None or len(data) < _PREFIX.size:
        raise CorruptLog(f"the {what} of a coordinator's record is {data!r}: it has no number in front")
    return int(_PREFIX.unpack_from(data)[0])


def _read(record_type: Any, data: Buffer, version: int, flexible: bool) -> Any:
    try:
        record, end = read_struct(record_type, data, _PREFIX.size, version, flexible)
        if end != len(data):
            raise ValueError(f"{len(data) - end} bytes follow it")
    except ValueError as error:
        raise CorruptLog(f"{len(data)} bytes are no {record_type.__name__}: {error}") from None
    return record
