"""What the records of the internal topics say: keys and values of `__consumer_offsets`, `__transaction_state` and
`__cluster_metadata`, as plain documents with Kafka's own field names.

The records are those of `wire`; this module only names their fields as Kafka's tools do. A decoder never fails on
its own account: bytes that are no such record come back as `Undecodable`, because the file may simply belong to
another topic.
"""

from __future__ import annotations

import base64
import dataclasses
import re
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias, get_type_hints
from uuid import UUID

from holdfast.errors import CorruptLog, HoldfastError
from holdfast.seams import Buffer
from holdfast.wire import coordinator_records
from holdfast.wire.consumer_protocol import decode_assignment, decode_subscription
from holdfast.wire.control_records import UnknownControlRecord, decode_control_record
from holdfast.wire.metadata_records import UnknownRecord, decode_metadata_record
from holdfast.wire.record_codec import Field

Document = dict[str, Any]

_Parts: TypeAlias = tuple[coordinator_records.CoordinatorRecord, coordinator_records.CoordinatorRecord | None]


class Undecodable(HoldfastError):
    """Bytes that are no record of the expected kind."""


class Decoded(NamedTuple):
    key: Document | None
    value: Document | None


def url_safe(data: bytes) -> str:
    """A UUID as Kafka's tools write it."""
    return base64.urlsafe_b64encode(data).decode("ascii").rstrip("=")


def decode_offsets(key: bytes | None, value: bytes | None) -> Decoded:
    """A record of `__consumer_offsets`: a committed position, or something about a group or its members."""
    return _decode(coordinator_records.decode_group_record, key, value)


def decode_transactions(key: bytes | None, value: bytes | None) -> Decoded:
    """A record of `__transaction_state`."""
    return _decode(coordinator_records.decode_transaction_record, key, value)


def _decode(
    decode: Callable[[Buffer | None, Buffer | None], _Parts], key: bytes | None, value: bytes | None
) -> Decoded:
    try:
        named, said = decode(key, value)
    except CorruptLog as error:
        raise Undecodable(str(error)) from error
    if not isinstance(named, coordinator_records.CoordinatorKey):
        assert isinstance(named, coordinator_records.UnknownRecord)
        raise Undecodable(f"records of type {named.number} are not known here")
    key_document = {"type": str(named.type), "data": _as_document(named, 0)}
    if said is None:
        return Decoded(key_document, None)
    if not isinstance(said, coordinator_records.CoordinatorValue):
        assert isinstance(said, coordinator_records.UnknownRecord)
        raise Undecodable(f"version {said.number} of a record of type {named.type} is not known here")
    document = _as_document(said, said.layout)
    if isinstance(said, coordinator_records.GroupMetadataValue) and said.protocol_type == "consumer":
        document["members"] = [_consumer(member) for member in document["members"]]
    return Decoded(key_document, {"version": str(said.layout), "data": document})


def _consumer(member: Document) -> Document:
    """A member whose subscription and assignment are shown, not their bytes, if they can be read."""
    shown = dict(member)
    for name, decode in (("subscription", decode_subscription), ("assignment", decode_assignment)):
        try:
            version, message = decode(base64.b64decode(member[name]))
        except ValueError:
            continue
        shown[name] = _as_document(message, version)
    return shown


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
    return {"type": type(record).__name__, "data": _as_document(record, record.version)}


def _as_document(record: Any, version: int) -> Document:
    """A record's fields by Kafka's names; left out are those that say nothing, as Kafka does it: fields that the
    version lacks, and tagged ones that were not written.
    """
    formats = get_type_hints(type(record), include_extras=True)
    document: Document = {}
    for each in dataclasses.fields(record):
        value = getattr(record, each.name)
        for note in getattr(formats[each.name], "__metadata__", ()):
            if isinstance(note, Field) and note.is_written(value, each.default, version):
                document[_kafka_name(each.name)] = _plain(value, version)
    return document


def _kafka_name(name: str) -> str:
    head, *rest = name.split("_")
    return "".join(["kRaft" if head == "kraft" else head, *(word.capitalize() for word in rest)])


def _plain(value: Any, version: int) -> Any:
    if isinstance(value, UUID):
        return url_safe(value.bytes)
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    if isinstance(value, tuple):
        return [_plain(item, version) for item in value]
    if dataclasses.is_dataclass(value):
        return _as_document(value, version)
    return value
