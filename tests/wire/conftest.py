"""Random messages of every API and version, and random records, made from the schemas themselves."""

from __future__ import annotations

import datetime
import uuid
from collections.abc import Callable, Iterator
from typing import Any, get_type_hints

import pytest
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from holdfast.wire import apis, messages, record_codec
from holdfast.wire.message_schema import (
    NO_DEFAULT,
    FieldShape,
    known_versions,
    request_type,
    response_type,
    shapes,
)

INTEGERS = {
    "int8": 8,
    "int16": 16,
    "int32": 32,
    "int64": 64,
}
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def primitive(kafka_type: str) -> st.SearchStrategy[Any]:
    if kafka_type in INTEGERS:
        bound = 2 ** (INTEGERS[kafka_type] - 1)
        return st.integers(-bound, bound - 1)
    if kafka_type == "error_code":
        return st.sampled_from(ErrorCode)
    if kafka_type == "timedelta_i32":
        return st.integers(-(2**31), 2**31 - 1).map(lambda ms: datetime.timedelta(milliseconds=ms))
    if kafka_type == "timedelta_i64":
        return st.integers(-(2**44), 2**44).map(lambda ms: datetime.timedelta(milliseconds=ms))
    if kafka_type == "datetime_i64":
        # Whole seconds: kio goes through floating point and loses the last millisecond of some times.
        return st.integers(0, 2**33).map(lambda seconds: EPOCH + datetime.timedelta(seconds=seconds))
    return {
        "bool": st.booleans(),
        "uint16": st.integers(0, 2**16 - 1),
        "float64": st.floats(allow_nan=False, allow_infinity=False),
        "string": st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("long" * 60),
        "bytes": st.binary(max_size=6),
        "records": st.binary(max_size=6) | st.just(bytes(300)),
        "uuid": st.uuids().filter(lambda value: value.int != 0) | st.none(),
    }[kafka_type]


def field_value(shape: FieldShape) -> st.SearchStrategy[Any]:
    item = entity(shape.struct_type) if shape.struct_type is not None else primitive(shape.kafka_type or "")
    value = st.lists(item, max_size=2).map(tuple) if shape.is_array else item
    return value | st.none() if shape.nullable else value


def entity(entity_type: Any) -> st.SearchStrategy[Any]:
    """Any entity of this type."""
    return st.builds(entity_type, **{shape.name: field_value(shape) for shape in shapes(entity_type)})


def zero_value(shape: FieldShape) -> Any:
    """What the encoder promises for a missing key, as an entity holds it."""
    if shape.default is not NO_DEFAULT:
        return shape.default
    if shape.nullable:
        return None
    if shape.is_array:
        return ()
    if shape.struct_type is not None:
        return zero_entity(shape.struct_type)
    zeros: dict[str, Any] = {
        "string": "",
        "bytes": b"",
        "records": b"",
        "uuid": uuid.UUID(int=0),
        "timedelta_i32": datetime.timedelta(0),
        "timedelta_i64": datetime.timedelta(0),
        "datetime_i64": EPOCH,
        "error_code": ErrorCode(0),
    }
    return zeros.get(shape.kafka_type or "", 0)


def zero_entity(entity_type: Any) -> Any:
    return entity_type(**{shape.name: zero_value(shape) for shape in shapes(entity_type)})


def every_type() -> Iterator[tuple[str, int, int, Any]]:
    """Kind, API key, version and kio's type of every message of the table."""
    for api in apis.APIS:
        for version in known_versions(api.key):
            if api.is_served(version):
                yield "request", api.key, version, request_type(api.key, version)
                yield "response", api.key, version, response_type(api.key, version)


def record_value(format_: Any, version: int) -> st.SearchStrategy[Any]:
    """Anything a field of a record of this format can hold."""
    if isinstance(format_, record_codec.Struct):
        return record(format_.type, version)
    if isinstance(format_, record_codec.NullableStruct):
        return record(format_.type, version) | st.none()
    if isinstance(format_, record_codec.Array):
        items = st.lists(record_value(format_.item, version), max_size=3).map(tuple)
        return items | st.none() if format_.nullable else items
    if isinstance(format_, record_codec.String):
        text = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.just("long" * 50)
        return text | st.none() if format_.nullable else text
    if isinstance(format_, record_codec.Bytes):
        return st.binary(max_size=6) | st.just(bytes(300))
    return {
        record_codec.BOOL: st.booleans(),
        record_codec.INT8: st.integers(-(2**7), 2**7 - 1),
        record_codec.INT16: st.integers(-(2**15), 2**15 - 1),
        record_codec.UINT16: st.integers(0, 2**16 - 1),
        record_codec.INT32: st.integers(-(2**31), 2**31 - 1),
        record_codec.INT64: st.integers(-(2**63), 2**63 - 1),
        record_codec.FLOAT64: st.floats(allow_nan=False),
        record_codec.UUIDS: st.uuids(),
    }[format_]


def record(record_type: Any, version: int = 99) -> st.SearchStrategy[Any]:
    """Records with anything in the fields this version has."""
    fields = {}
    for name, hint in get_type_hints(record_type, include_extras=True).items():
        for note in getattr(hint, "__metadata__", ()):
            if isinstance(note, record_codec.Field) and note.since <= version <= note.until:
                fields[name] = record_value(note.format, version)
    return st.builds(record_type, **fields)


class Messages:
    """What tests of several modules need to make and encode messages."""

    entity = staticmethod(entity)
    record = staticmethod(record)
    zero_entity = staticmethod(zero_entity)
    every_type = staticmethod(every_type)

    @staticmethod
    def encoder(kind: str) -> Callable[..., bytes]:
        return messages.encode_request if kind == "request" else messages.encode_response

    @staticmethod
    def decoder(kind: str) -> Callable[..., Any]:
        return messages.decode_request if kind == "request" else messages.decode_response


@pytest.fixture(scope="session")
def made() -> type[Messages]:
    return Messages


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "strict_fields", True)
