"""The records of the metadata log, `__cluster_metadata-0`, as Kafka 4.3 writes them.

Each record's value is a frame: the frame's version (1), the kind of record, the version of its layout, then
its fields. A record remembers the `version` it was read in, and writes itself in that again, so that reading
and writing is the identity; a new record takes the newest layout. `version` is no part of what a record says
and does not count when records are compared.

Kinds and versions that are not known here become an `UnknownRecord`, which keeps the bytes. It is for whoever
reads it to decide that nothing important was said; an image of the cluster must refuse it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Annotated, ClassVar, Final, TypeAlias, TypeVar
from uuid import UUID

from holdfast.errors import CorruptLog
from holdfast.seams import Buffer
from holdfast.wire.record_codec import (
    BOOL,
    BYTES,
    FLOAT64,
    INT8,
    INT16,
    INT32,
    INT64,
    NULLABLE_STRING,
    STRING,
    UINT16,
    UUIDS,
    Array,
    Field,
    Struct,
    read_struct,
    write_struct,
)
from holdfast.wire.varint import decode_uvarint, encode_uvarint

FRAME_VERSION: Final = 1
LEADER_UNCHANGED: Final = -2

Ids: TypeAlias = tuple[int, ...]
Uuids: TypeAlias = tuple[UUID, ...]

_Record = TypeVar("_Record", bound="MetadataRecord")


@dataclass(frozen=True, kw_only=True)
class MetadataRecord:
    """What every kind of record has."""

    api_key: ClassVar[int]
    """The number of this kind."""
    version_max: ClassVar[int] = 0

    version: int = field(default=-1, compare=False, repr=False)
    """The layout it is written in; the newest unless told otherwise."""

    def __post_init__(self) -> None:
        if self.version < 0:
            object.__setattr__(self, "version", self.version_max)

    def encode(self) -> bytes:
        """The value of the record in the metadata log."""
        out = bytearray(_frame(self.api_key, self.version))
        write_struct(self, out, self.version)
        return bytes(out)


@dataclass(frozen=True, kw_only=True)
class UnknownRecord(MetadataRecord):
    """A record of a kind or version that is not known here, as its bytes."""

    kind: int
    body: bytes

    def encode(self) -> bytes:
        return _frame(self.kind, self.version) + self.body


@dataclass(frozen=True)
class EndPoint:
    """Where a broker or controller listens."""

    name: Annotated[str, Field(STRING)]
    host: Annotated[str, Field(STRING)]
    port: Annotated[int, Field(UINT16)]
    security_protocol: Annotated[int, Field(INT16)]


@dataclass(frozen=True)
class SupportedFeature:
    """A feature a broker or controller supports, and from where to where."""

    name: Annotated[str, Field(STRING)]
    min_supported_version: Annotated[int, Field(INT16)]
    max_supported_version: Annotated[int, Field(INT16)]


_END_POINTS: Final = Array(Struct(EndPoint))
_FEATURES: Final = Array(Struct(SupportedFeature))
_INT32S: Final = Array(INT32)
_NULLABLE_INT32S: Final = Array(INT32, nullable=True)
_NULLABLE_UUIDS: Final = Array(UUIDS, nullable=True)


@dataclass(frozen=True, kw_only=True)
class RegisterBroker(MetadataRecord):
    """A broker process announces itself."""

    api_key: ClassVar[int] = 0
    version_max: ClassVar[int] = 4

    broker_id: Annotated[int, Field(INT32)]
    is_migrating_zk_broker: Annotated[bool, Field(BOOL, since=2)] = False
    incarnation_id: Annotated[UUID, Field(UUIDS)]
    """One per process: tells a restarted broker from its predecessor."""
    broker_epoch: Annotated[int, Field(INT64)]
    end_points: Annotated[tuple[EndPoint, ...], Field(_END_POINTS)] = ()
    features: Annotated[tuple[SupportedFeature, ...], Field(_FEATURES)] = ()
    rack: Annotated[str | None, Field(NULLABLE_STRING)] = None
    fenced: Annotated[bool, Field(BOOL)] = True
    in_controlled_shutdown: Annotated[bool, Field(BOOL, since=1)] = False
    log_dirs: Annotated[Uuids, Field(Array(UUIDS), since=3, tag=0)] = ()
    """Directories in working order at the last start, or missed then."""
    cordoned_log_dirs: Annotated[Uuids | None, Field(_NULLABLE_UUIDS, since=4, tag=1)] = None

    @property
    def active(self) -> bool:
        """May this broker lead, and be given new replicas?"""
        return not self.fenced and not self.in_controlled_shutdown


@dataclass(frozen=True, kw_only=True)
class UnregisterBroker(MetadataRecord):
    """A broker is gone for good."""

    api_key: ClassVar[int] = 1

    broker_id: Annotated[int, Field(INT32)]
    broker_epoch: Annotated[int, Field(INT64)]


@dataclass(frozen=True, kw_only=True)
class Topic(MetadataRecord):
    """A topic comes to be; its partitions follow."""

    api_key: ClassVar[int] = 2

    name: Annotated[str, Field(STRING)]
    topic_id: Annotated[UUID, Field(UUIDS)]


@dataclass(frozen=True, kw_only=True)
class Partition(MetadataRecord):
    """A partition comes to be."""

    api_key: ClassVar[int] = 3
    version_max: ClassVar[int] = 2

    partition_id: Annotated[int, Field(INT32)]
    topic_id: Annotated[UUID, Field(UUIDS)]
    replicas: Annotated[Ids, Field(_INT32S)] = ()
    """In order of preference."""
    isr: Annotated[Ids, Field(_INT32S)] = ()
    removing_replicas: Annotated[Ids, Field(_INT32S)] = ()
    adding_replicas: Annotated[Ids, Field(_INT32S)] = ()
    leader: Annotated[int, Field(INT32)] = -1
    leader_recovery_state: Annotated[int, Field(INT8, tag=0)] = 0
    leader_epoch: Annotated[int, Field(INT32)] = -1
    partition_epoch: Annotated[int, Field(INT32)] = -1
    directories: Annotated[Uuids, Field(Array(UUIDS), since=1)] = ()
    """The log directory of each replica, in the order of `replicas`."""
    eligible_leader_replicas: Annotated[Ids | None, Field(_NULLABLE_INT32S, since=2, tag=1)] = None
    last_known_elr: Annotated[Ids | None, Field(_NULLABLE_INT32S, since=2, tag=2)] = None


@dataclass(frozen=True, kw_only=True)
class Config(MetadataRecord):
    """A setting of a topic, a broker or another resource is set, or removed when `value` is None."""

    api_key: ClassVar[int] = 4

    resource_type: Annotated[int, Field(INT8)]
    resource_name: Annotated[str, Field(STRING)]
    name: Annotated[str, Field(STRING)]
    value: Annotated[str | None, Field(NULLABLE_STRING)]


@dataclass(frozen=True, kw_only=True)
class PartitionChange(MetadataRecord):
    """A partition changes: None, `LEADER_UNCHANGED` and a recovery state of -1 say what stays."""

    api_key: ClassVar[int] = 5
    version_max: ClassVar[int] = 2

    partition_id: Annotated[int, Field(INT32)]
    topic_id: Annotated[UUID, Field(UUIDS)]
    isr: Annotated[Ids | None, Field(_NULLABLE_INT32S, tag=0)] = None
    leader: Annotated[int, Field(INT32, tag=1)] = LEADER_UNCHANGED
    replicas: Annotated[Ids | None, Field(_NULLABLE_INT32S, tag=2)] = None
    removing_replicas: Annotated[Ids | None, Field(_NULLABLE_INT32S, tag=3)] = None
    adding_replicas: Annotated[Ids | None, Field(_NULLABLE_INT32S, tag=4)] = None
    leader_recovery_state: Annotated[int, Field(INT8, tag=5)] = -1
    directories: Annotated[Uuids | None, Field(_NULLABLE_UUIDS, since=1, tag=8)] = None
    eligible_leader_replicas: Annotated[Ids | None, Field(_NULLABLE_INT32S, since=2, tag=6)] = None
    last_known_elr: Annotated[Ids | None, Field(_NULLABLE_INT32S, since=2, tag=7)] = None


@dataclass(frozen=True, kw_only=True)
class FenceBroker(MetadataRecord):
    """A broker is fenced, as versions before 3.3 wrote it."""

    api_key: ClassVar[int] = 7

    id: Annotated[int, Field(INT32)]
    epoch: Annotated[int, Field(INT64)]


@dataclass(frozen=True, kw_only=True)
class UnfenceBroker(MetadataRecord):
    """A broker may serve, as versions before 3.3 wrote it."""

    api_key: ClassVar[int] = 8

    id: Annotated[int, Field(INT32)]
    epoch: Annotated[int, Field(INT64)]


@dataclass(frozen=True, kw_only=True)
class RemoveTopic(MetadataRecord):
    """A topic and all its partitions are gone."""

    api_key: ClassVar[int] = 9

    topic_id: Annotated[UUID, Field(UUIDS)]


@dataclass(frozen=True, kw_only=True)
class DelegationToken(MetadataRecord):
    """A token that stands for its owner's credentials."""

    api_key: ClassVar[int] = 10

    owner: Annotated[str, Field(STRING)]
    requester: Annotated[str, Field(STRING)]
    renewers: Annotated[tuple[str, ...], Field(Array(STRING))] = ()
    issue_timestamp: Annotated[int, Field(INT64)]
    max_timestamp: Annotated[int, Field(INT64)]
    expiration_timestamp: Annotated[int, Field(INT64)]
    token_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class UserScramCredential(MetadataRecord):
    """What a user's password is checked against."""

    api_key: ClassVar[int] = 11

    name: Annotated[str, Field(STRING)]
    mechanism: Annotated[int, Field(INT8)]
    salt: Annotated[bytes, Field(BYTES)]
    stored_key: Annotated[bytes, Field(BYTES)]
    server_key: Annotated[bytes, Field(BYTES)]
    iterations: Annotated[int, Field(INT32)]


@dataclass(frozen=True, kw_only=True)
class FeatureLevel(MetadataRecord):
    """The level the cluster runs a feature at; 0 switches it off."""

    api_key: ClassVar[int] = 12

    name: Annotated[str, Field(STRING)]
    feature_level: Annotated[int, Field(INT16)]


@dataclass(frozen=True)
class QuotaEntity:
    """One part of whom a quota is for; a name of None stands for all that have no quota of their own."""

    entity_type: Annotated[str, Field(STRING)]
    entity_name: Annotated[str | None, Field(NULLABLE_STRING)]


@dataclass(frozen=True, kw_only=True)
class ClientQuota(MetadataRecord):
    """A quota is set, or removed."""

    api_key: ClassVar[int] = 14

    entity: Annotated[tuple[QuotaEntity, ...], Field(Array(Struct(QuotaEntity)))]
    key: Annotated[str, Field(STRING)]
    value: Annotated[float, Field(FLOAT64)]
    remove: Annotated[bool, Field(BOOL)]


@dataclass(frozen=True, kw_only=True)
class ProducerIds(MetadataRecord):
    """A broker took a block of producer ids; the next block begins at `next_producer_id`."""

    api_key: ClassVar[int] = 15

    broker_id: Annotated[int, Field(INT32)]
    broker_epoch: Annotated[int, Field(INT64)] = -1
    next_producer_id: Annotated[int, Field(INT64)]


@dataclass(frozen=True, kw_only=True)
class BrokerRegistrationChange(MetadataRecord):
    """A registered broker changes; what has its default stays."""

    api_key: ClassVar[int] = 17
    version_max: ClassVar[int] = 3

    broker_id: Annotated[int, Field(INT32)]
    broker_epoch: Annotated[int, Field(INT64)]
    fenced: Annotated[int, Field(INT8, tag=0)] = 0
    """1 fences the broker, -1 lets it serve."""
    in_controlled_shutdown: Annotated[int, Field(INT8, since=1, tag=1)] = 0
    log_dirs: Annotated[Uuids, Field(Array(UUIDS), since=2, tag=2)] = ()
    cordoned_log_dirs: Annotated[Uuids | None, Field(_NULLABLE_UUIDS, since=3, tag=3)] = None


@dataclass(frozen=True, kw_only=True)
class AccessControlEntry(MetadataRecord):
    """Who may, or may not, do what to which resource, and from where."""

    api_key: ClassVar[int] = 18

    id: Annotated[UUID, Field(UUIDS)]
    resource_type: Annotated[int, Field(INT8)]
    resource_name: Annotated[str, Field(STRING)]
    pattern_type: Annotated[int, Field(INT8)]
    principal: Annotated[str, Field(STRING)]
    host: Annotated[str, Field(STRING)]
    operation: Annotated[int, Field(INT8)]
    permission_type: Annotated[int, Field(INT8)]


@dataclass(frozen=True, kw_only=True)
class RemoveAccessControlEntry(MetadataRecord):
    api_key: ClassVar[int] = 19

    id: Annotated[UUID, Field(UUIDS)]


@dataclass(frozen=True, kw_only=True)
class NoOp(MetadataRecord):
    """Nothing; an active controller writes one now and then so that the log's end moves."""

    api_key: ClassVar[int] = 20


@dataclass(frozen=True, kw_only=True)
class ZkMigrationState(MetadataRecord):
    """How far a cluster had come from ZooKeeper; over since Kafka 4."""

    api_key: ClassVar[int] = 21

    zk_migration_state: Annotated[int, Field(INT8)]


@dataclass(frozen=True, kw_only=True)
class RemoveUserScramCredential(MetadataRecord):
    api_key: ClassVar[int] = 22

    name: Annotated[str, Field(STRING)]
    mechanism: Annotated[int, Field(INT8)]


@dataclass(frozen=True, kw_only=True)
class BeginTransaction(MetadataRecord):
    """The records up to the end of the transaction count together or not at all."""

    api_key: ClassVar[int] = 23

    name: Annotated[str | None, Field(NULLABLE_STRING, tag=0)] = None


@dataclass(frozen=True, kw_only=True)
class EndTransaction(MetadataRecord):
    """The records since the beginning of the transaction count."""

    api_key: ClassVar[int] = 24


@dataclass(frozen=True, kw_only=True)
class AbortTransaction(MetadataRecord):
    """The records since the beginning of the transaction do not count."""

    api_key: ClassVar[int] = 25

    reason: Annotated[str | None, Field(NULLABLE_STRING, tag=0)] = None


@dataclass(frozen=True, kw_only=True)
class RemoveDelegationToken(MetadataRecord):
    api_key: ClassVar[int] = 26

    token_id: Annotated[str, Field(STRING)]


@dataclass(frozen=True, kw_only=True)
class RegisterController(MetadataRecord):
    """A controller process announces itself."""

    api_key: ClassVar[int] = 27

    controller_id: Annotated[int, Field(INT32)]
    incarnation_id: Annotated[UUID, Field(UUIDS)]
    zk_migration_ready: Annotated[bool, Field(BOOL)] = False
    end_points: Annotated[tuple[EndPoint, ...], Field(_END_POINTS)] = ()
    features: Annotated[tuple[SupportedFeature, ...], Field(_FEATURES)] = ()


@dataclass(frozen=True, kw_only=True)
class ClearElr(MetadataRecord):
    """Eligible leader replicas are forgotten, for one topic or, named "", for all."""

    api_key: ClassVar[int] = 28

    topic_name: Annotated[str, Field(STRING)] = ""


KINDS: Final[dict[int, type[MetadataRecord]]] = {
    kind.api_key: kind for kind in MetadataRecord.__subclasses__() if kind is not UnknownRecord
}
"""Every kind of record known here, by its number."""


def decode_metadata_record(value: Buffer) -> MetadataRecord:
    """The record in the value of a record of the metadata log; raises `CorruptLog` if there is none."""
    try:
        frame_version, position = decode_uvarint(value, 0)
        if frame_version != FRAME_VERSION:
            raise ValueError(f"frame version {frame_version} instead of {FRAME_VERSION}")
        api_key, position = decode_uvarint(value, position)
        version, position = decode_uvarint(value, position)
        kind = KINDS.get(api_key)
        if kind is None or version > kind.version_max:
            return UnknownRecord(kind=api_key, version=version, body=bytes(value[position:]))
        return _decode_body(kind, value, position, version)
    except ValueError as error:
        raise CorruptLog(f"a value of {len(value)} bytes is no metadata record: {error}") from None


decode = decode_metadata_record


def _decode_body(kind: type[_Record], value: Buffer, position: int, version: int) -> _Record:
    record, end = read_struct(kind, value, position, version)
    if end != len(value):
        raise ValueError(f"{len(value) - end} bytes follow the {kind.__name__}")
    assert isinstance(record, kind)
    object.__setattr__(record, "version", version)
    return record


def _frame(api_key: int, version: int) -> bytes:
    return encode_uvarint(FRAME_VERSION) + encode_uvarint(api_key) + encode_uvarint(version)
