"""What the records of the internal topics say: keys and values of `__consumer_offsets`, `__transaction_state` and
`__cluster_metadata`, as plain documents with Kafka's own field names.

A schema is a tuple of fields with the versions that have them; one small reader serves the old encoding and the
flexible one (lengths one too high, tagged fields at the end). A decoder never fails on its own account: bytes
that are no such record come back as `Undecodable`, because the file may simply belong to another topic.
"""

from __future__ import annotations

import base64
import dataclasses
import re
import struct
from collections.abc import Mapping
from typing import Any, Final, NamedTuple, get_type_hints
from uuid import UUID

from holdfast.errors import CorruptLog, HoldfastError
from holdfast.wire.control_records import UnknownControlRecord, decode_control_record
from holdfast.wire.metadata_records import UnknownRecord, decode_metadata_record
from holdfast.wire.varint import decode_uvarint

Document = dict[str, Any]


class Undecodable(HoldfastError):
    """Bytes that are no record of the expected kind."""


class Decoded(NamedTuple):
    key: Document | None
    value: Document | None


class Field(NamedTuple):
    name: str
    type: Any
    """A name in `_FIXED`, "string", "bytes", "uuid", or [item type] or [fields] for an array."""
    since: int = 0
    until: int = 2**15
    tag: int | None = None


_FIXED: Final[Mapping[str, struct.Struct]] = {
    "int8": struct.Struct(">b"),
    "int16": struct.Struct(">h"),
    "int32": struct.Struct(">i"),
    "int64": struct.Struct(">q"),
}
_VERSION: Final = _FIXED["int16"]

OFFSET_COMMIT_KEY: Final = (Field("group", "string"), Field("topic", "string"), Field("partition", "int32"))
OFFSET_COMMIT_VALUE: Final = (
    Field("offset", "int64"),
    Field("leaderEpoch", "int32", since=3),
    Field("metadata", "string"),
    Field("commitTimestamp", "int64"),
    Field("expireTimestamp", "int64", since=1, until=1),
    Field("topicId", "uuid", since=4, tag=0),
)
GROUP_METADATA_KEY: Final = (Field("group", "string"),)
GROUP_MEMBER: Final = (
    Field("memberId", "string"),
    Field("groupInstanceId", "string", since=3),
    Field("clientId", "string"),
    Field("clientHost", "string"),
    Field("rebalanceTimeout", "int32", since=1),
    Field("sessionTimeout", "int32"),
    Field("subscription", "bytes"),
    Field("assignment", "bytes"),
)
GROUP_METADATA_VALUE: Final = (
    Field("protocolType", "string"),
    Field("generation", "int32"),
    Field("protocol", "string"),
    Field("leader", "string"),
    Field("currentStateTimestamp", "int64", since=2),
    Field("members", [GROUP_MEMBER]),
)
TRANSACTION_KEY: Final = (Field("transactionalId", "string"),)
TRANSACTION_VALUE: Final = (
    Field("producerId", "int64"),
    Field("previousProducerId", "int64", since=1, tag=0),
    Field("nextProducerId", "int64", since=1, tag=1),
    Field("producerEpoch", "int16"),
    Field("transactionTimeoutMs", "int32"),
    Field("transactionStatus", "int8"),
    Field("transactionPartitions", [(Field("topic", "string"), Field("partitionIds", ["int32"]))]),
    Field("transactionLastUpdateTimestampMs", "int64"),
    Field("transactionStartTimestampMs", "int64"),
    Field("clientTransactionVersion", "int16", since=1, tag=2),
)


class _Reader:
    """Takes values off a buffer; flexible or not, never past the end."""

    def __init__(self, data: bytes, position: int, version: int, flexible: bool) -> None:
        self.data = data
        self.position = position
        self.version = version
        self.flexible = flexible

    def fields(self, schema: tuple[Field, ...]) -> Document:
        present = [field for field in schema if field.since <= self.version <= field.until]
        document = {field.name: self.value(field.type) for field in present if field.tag is None}
        if self.flexible:
            by_tag = {field.tag: field for field in present if field.tag is not None}
            for _ in range(self.unsigned()):
                tag, size = self.unsigned(), self.unsigned()
                content = self.take(size)
                if tag in by_tag:
                    inner = _Reader(content, 0, self.version, True)
                    document[by_tag[tag].name] = inner.value(by_tag[tag].type)
        return {field.name: document[field.name] for field in present if field.name in document}

    def value(self, kind: Any) -> Any:
        if isinstance(kind, list):
            count = self.length("int32")
            return None if count is None else [self.item(kind[0]) for _ in range(count)]
        return self.item(kind)

    def item(self, kind: Any) -> Any:
        if isinstance(kind, tuple):
            return self.fields(kind)
        if kind in _FIXED:
            return _FIXED[kind].unpack(self.take(_FIXED[kind].size))[0]
        if kind == "uuid":
            return url_safe(self.take(16))
        size = self.length("int16" if kind == "string" else "int32")
        if size is None:
            return None
        content = self.take(size)
        return content.decode("utf-8") if kind == "string" else base64.b64encode(content).decode("ascii")

    def length(self, kind: str) -> int | None:
        length = self.unsigned() - 1 if self.flexible else self.item(kind)
        if length > len(self.data):
            raise Undecodable(f"a length of {length} in {len(self.data)} bytes")
        return None if length < 0 else int(length)

    def unsigned(self) -> int:
        value, self.position = decode_uvarint(self.data, self.position)
        return value

    def take(self, size: int) -> bytes:
        end = self.position + size
        if size < 0 or end > len(self.data):
            raise Undecodable(f"{len(self.data)} bytes end inside a field")
        content = self.data[self.position : end]
        self.position = end
        return content


def url_safe(data: bytes) -> str:
    """A UUID as Kafka's tools write it."""
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def _read(data: bytes, schema: tuple[Field, ...], version: int, flexible_since: int | None) -> Document:
    flexible = flexible_since is not None and version >= flexible_since
    reader = _Reader(data, _VERSION.size, version, flexible)
    try:
        document = reader.fields(schema)
    except (ValueError, UnicodeDecodeError) as error:
        raise Undecodable(str(error)) from error
    if reader.position != len(data):
        raise Undecodable(f"{len(data) - reader.position} bytes are left over")
    return document


def _version(data: bytes | None) -> int:
    if data is None or len(data) < _VERSION.size:
        raise Undecodable("there is no version in front")
    return int(_VERSION.unpack_from(data)[0])


def _decode(
    key: bytes | None,
    value: bytes | None,
    kinds: Mapping[int, tuple[tuple[Field, ...], tuple[Field, ...], int, int]],
) -> Decoded:
    """`kinds`: type of key to its schema, the value's schema, its first flexible and its last version."""
    key_type = _version(key)
    if key_type not in kinds:
        raise Undecodable(f"records of type {key_type} are not known here")
    key_schema, value_schema, flexible_since, version_max = kinds[key_type]
    assert key is not None
    key_document = {"type": str(key_type), "data": _read(key, key_schema, key_type, None)}
    if value is None:
        return Decoded(key_document, None)
    version = _version(value)
    if not 0 <= version <= version_max:
        raise Undecodable(f"version {version} of a record of type {key_type} is not known here")
    return Decoded(
        key_document,
        {"version": str(version), "data": _read(value, value_schema, version, flexible_since)},
    )


def decode_offsets(key: bytes | None, value: bytes | None) -> Decoded:
    """A record of `__consumer_offsets`: a committed position, or a classic group's members."""
    offsets = (OFFSET_COMMIT_KEY, OFFSET_COMMIT_VALUE, 4, 4)
    return _decode(key, value, {0: offsets, 1: offsets, 2: (GROUP_METADATA_KEY, GROUP_METADATA_VALUE, 4, 4)})


def decode_transactions(key: bytes | None, value: bytes | None) -> Decoded:
    """A record of `__transaction_state`."""
    return _decode(key, value, {0: (TRANSACTION_KEY, TRANSACTION_VALUE, 1, 1)})


def decode_cluster_metadata(key: bytes | None, value: bytes | None) -> Decoded:
    """A record of `__cluster_metadata`."""
    if value is None:
        raise Undecodable("a metadata record has a value")
    try:
        record = decode_metadata_record(value)
    except CorruptLog as error:
        raise Undecodable(str(error)) from error
    if isinstance(record, UnknownRecord):
        return Decoded(None, {"type": "UNKNOWN", "data": base64.b64encode(value).decode("ascii")})
    kind = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", type(record).__name__).upper() + "_RECORD"
    return Decoded(
        None, {"type": kind, "version": record.version, "data": _as_document(record, record.version)}
    )


def decode_raft_control(key: bytes | None, value: bytes | None) -> Document:
    """A control record of the raft log: its kind and fields."""
    try:
        record = decode_control_record(key or b"", value or b"")
    except CorruptLog as error:
        raise Undecodable(str(error)) from error
    if isinstance(record, UnknownControlRecord):
        raise Undecodable("its type is not known")
    return {
        "type": type(record).__name__,
        "data": {"version": record.version, **_as_document(record, record.version)},
    }


def _as_document(record: Any, version: int) -> Document:
    """A record's fields by Kafka's names; left out are those that say nothing new, as Kafka does it: fields
    that the version lacks, and tagged ones with their default.
    """
    formats = get_type_hints(type(record), include_extras=True)
    document: Document = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        notes = getattr(formats[each.name], "__metadata__", ())
        optional = any(note.tag is not None or note.since > version for note in notes)
        if each.name != "version" and not (optional and value == each.default):
            document[_kafka_name(each.name)] = _plain(value, version)
    return document


def _kafka_name(name: str) -> str:
    head, *rest = name.split("_")
    return "".join(["kRaft" if head == "kraft" else head, *(word.capitalize() for word in rest)])


def _plain(value: Any, version: int) -> Any:
    if isinstance(value, UUID):
        return url_safe(value.bytes)
    if isinstance(value, tuple):
        return [_plain(item, version) for item in value]
    if dataclasses.is_dataclass(value):
        return _as_document(value, version)
    return value
