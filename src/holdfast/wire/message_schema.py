"""What kio's generated message types say about themselves.

kio generates one dataclass per struct and version from Kafka's message schemas. This module is the only one
that knows how those classes carry the schema: the annotation tells arrays and nullability, the field's
metadata the protocol's type and tag, the dataclass default the schema's default. Importing all of kio's
modules takes seconds, so types are loaded one API and version at a time and kept.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from types import GenericAlias, NoneType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

from kio.index import load_request_schema, load_response_schema
from kio.schema.index import api_key_map, schema_name_map
from kio.static.primitive import i64

NO_DEFAULT = dataclasses.MISSING
OFFSET_COMMIT = 8
DESCRIBE_TRANSACTIONS = 65


class FieldShape(NamedTuple):
    """One field of one struct in one version."""

    name: str
    kafka_type: str | None
    """The protocol's type of the value, or of an array's items; None when that is a struct."""
    struct_type: type | None
    """kio's type of the value, or of an array's items, when that is a struct."""
    is_array: bool
    nullable: bool
    """Whether the value, or the array itself, may be null."""
    tag: int | None
    default: Any
    """The schema's default as kio holds it, or `NO_DEFAULT`."""


@cache
def request_type(api_key: int, version: int) -> Any:
    """kio's type of a request body; LookupError when it has none."""
    _check_known(api_key, version)
    entity_type = load_request_schema(api_key, version)
    return _with_any_retention(entity_type) if api_key == OFFSET_COMMIT else entity_type


@cache
def response_type(api_key: int, version: int) -> Any:
    """kio's type of a response body; LookupError when it has none."""
    _check_known(api_key, version)
    entity_type = load_response_schema(api_key, version)
    return _without_start_time_bound(entity_type) if api_key == DESCRIBE_TRANSACTIONS else entity_type


def _with_any_retention(request: Any) -> Any:
    """OffsetCommit with its retention in milliseconds: "for ever" is more than kio's type can hold."""
    if not any(field.name == "retention_time" for field in dataclasses.fields(request)):
        return request
    milliseconds = dataclasses.field(metadata={"kafka_type": "int64"}, default=i64(-1))
    return _replaced(request, "retention_time", i64, milliseconds)


def _without_start_time_bound(response: Any) -> Any:
    """DescribeTransactions with a start time that may be missing.

    A transactional id without an open transaction answers -1 there, which kio's type refuses to read.
    """
    states = _field(response, "transaction_states")
    state = get_args(states.type)[0]
    start = _field(state, "transaction_start_time")
    optional = dataclasses.field(metadata=start.metadata, default=None)
    lenient_state = _replaced(state, start.name, start.type | None, optional)
    annotation = GenericAlias(tuple, (lenient_state, ...))
    return _replaced(response, states.name, annotation, dataclasses.field())


def _field(entity_type: Any, name: str) -> Any:
    (found,) = (field for field in dataclasses.fields(entity_type) if field.name == name)
    return found


def _replaced(entity_type: Any, name: str, annotation: Any, field: Any) -> Any:
    """The same type with another annotation on one of its fields."""
    return dataclasses.make_dataclass(
        entity_type.__name__,
        [(name, annotation, field)],
        bases=(entity_type,),
        namespace={"__module__": entity_type.__module__},
        frozen=True,
        slots=True,
        kw_only=True,
    )


def known_versions(api_key: int) -> list[int]:
    """The versions of this API that have a schema."""
    name = api_key_map.get(api_key)
    return sorted(schema_name_map[name]) if name is not None else []


def _check_known(api_key: int, version: int) -> None:
    if version not in known_versions(api_key):
        raise LookupError(f"no schema for API key {api_key} version {version}")


@cache
def shapes(entity_type: type) -> tuple[FieldShape, ...]:
    """The fields of a struct type in the order of the wire, tagged ones where the schema has them."""
    return tuple(_shape(field) for field in dataclasses.fields(entity_type))


def _shape(field: dataclasses.Field[Any]) -> FieldShape:
    annotation, nullable = _without_none(field.type)
    is_array = get_origin(annotation) is tuple
    if is_array:
        # An array of uuids is annotated as holding None, which kio has for the zero uuid: not a null on the
        # wire.
        annotation, _ = _without_none(get_args(annotation)[0])
    is_struct = dataclasses.is_dataclass(annotation)
    return FieldShape(
        name=field.name,
        kafka_type=None if is_struct else field.metadata["kafka_type"],
        struct_type=annotation if is_struct else None,
        is_array=is_array,
        nullable=nullable,
        tag=field.metadata.get("tag"),
        default=field.default,
    )


def _without_none(annotation: Any) -> tuple[Any, bool]:
    if get_origin(annotation) is not UnionType:
        return annotation, False
    others = [argument for argument in get_args(annotation) if argument is not NoneType]
    if len(others) != 1:
        raise TypeError(f"{annotation} is a union this schema reader does not know")
    return others[0], True
