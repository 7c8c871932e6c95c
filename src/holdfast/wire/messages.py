"""Requests and responses: bytes in, entities out; dictionaries in, bytes out.

Decoding is kio's, whose native reader builds an entity in about a microsecond, after `message_guard` has
walked over the lengths; encoding is ours
(`message_encoder` tells the rules of the dictionaries). Both load their schemas lazily, one API and version
at a time; `preload` does it ahead of the first request.

What a reader of this module may rely on: whatever bytes arrive, decoding either gives an entity in which nothing
is None that the schema does not allow to be null, or raises `MalformedFrame`, and takes memory in proportion to
the bytes that are there, not to the lengths they claim. Tagged fields that the schema does not know are skipped,
and so are bytes behind the message. An API or version without a schema raises `ApiError(unsupported_version)`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

from kio.schema.errors import ErrorCode
from kio.serial import entity_reader
from kio.serial.errors import SerialError

from holdfast.errors import ApiError, MalformedFrame
from holdfast.seams import Buffer
from holdfast.wire import apis
from holdfast.wire.message_encoder import encode_parts, struct_encoder
from holdfast.wire.message_guard import checked, struct_walker
from holdfast.wire.message_schema import known_versions, request_type, response_type, shapes
from holdfast.wire.varint import decode_uvarint

strict_fields = False
"""When set, a key that no version of its struct has is an error instead of being dropped. Tests set it."""

_head = struct.Struct(">hhih").unpack_from
_correlation = struct.Struct(">i").pack
_correlation_and_no_tags = struct.Struct(">ix").pack


class RequestHeader(NamedTuple):
    """What stands before the body of every request."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body_offset: int
    """Where in the frame the body begins."""


_flexible_from = apis.FLEXIBLE_FROM.get


def parse_request_header(buffer: Buffer) -> RequestHeader:
    """The header of one frame (without its length prefix)."""
    try:
        api_key, version, correlation_id, client_id_size = _head(buffer, 0)
    except struct.error:
        raise MalformedFrame(f"a request header does not fit a frame of {len(buffer)} bytes") from None
    position = 10
    client_id = None
    if client_id_size >= 0:
        position += client_id_size
        if position > len(buffer):
            raise MalformedFrame(f"client id of {client_id_size} bytes in a frame of {len(buffer)} bytes")
        try:
            client_id = str(buffer[10:position], "utf-8")
        except UnicodeDecodeError as error:
            raise MalformedFrame(f"client id is not UTF-8: {error}") from None
    elif client_id_size != -1:
        raise MalformedFrame(f"client id of {client_id_size} bytes")
    if version >= _flexible_from(api_key, apis.NEVER):
        position = _skip_tagged_fields(buffer, position)
    return RequestHeader(api_key, version, correlation_id, client_id, position)


def _skip_tagged_fields(buffer: Buffer, position: int) -> int:
    try:
        if buffer[position] == 0:
            return position + 1
        count, position = decode_uvarint(buffer, position)
        for _ in range(count):
            _, position = decode_uvarint(buffer, position)
            size, position = decode_uvarint(buffer, position)
            position += size
    except (IndexError, ValueError) as error:
        raise MalformedFrame(f"tagged fields of the request header: {error}") from None
    if position > len(buffer):
        raise MalformedFrame("tagged fields of the request header reach past the end of the frame")
    return position


def response_header_version(api_key: int, version: int) -> int:
    """1 when the response's header carries tagged fields, else 0."""
    return apis.response_header_version(api_key, version)


def response_header(api_key: int, version: int, correlation_id: int) -> bytes:
    """What stands before the body of a response (after the length prefix)."""
    if apis.response_header_version(api_key, version):
        return _correlation_and_no_tags(correlation_id)
    return _correlation(correlation_id)


def decode_request(api_key: int, version: int, buffer: Buffer, offset: int = 0) -> Any:
    """The kio entity of the request whose body begins at `offset` of `buffer`."""
    return _decode(_request_reader(api_key, version), buffer, offset)


def decode_response(api_key: int, version: int, buffer: Buffer, offset: int = 0) -> Any:
    """The kio entity of the response whose body begins at `offset` of `buffer`."""
    return _decode(_response_reader(api_key, version), buffer, offset)


def encode_response(api_key: int, version: int, fields: Mapping[str, Any]) -> bytes:
    """The body of a response, without its header."""
    return _encode(_typed(response_type, api_key, version), fields)


def encode_request(api_key: int, version: int, fields: Mapping[str, Any]) -> bytes:
    """The body of a request, without its header."""
    return _encode(_typed(request_type, api_key, version), fields)


def preload(api_key: int, version: int) -> None:
    """Load and compile what decoding this request and encoding its response needs."""
    _request_reader(api_key, version)
    struct_encoder(_typed(response_type, api_key, version))


class _Reader(NamedTuple):
    entity_type: Any
    read: Callable[..., Any]


@cache
def _request_reader(api_key: int, version: int) -> _Reader:
    return _reader(_typed(request_type, api_key, version))


@cache
def _response_reader(api_key: int, version: int) -> _Reader:
    return _reader(_typed(response_type, api_key, version))


def _reader(entity_type: Any) -> _Reader:
    struct_walker(entity_type)
    return _Reader(entity_type, entity_reader(entity_type))


def _typed(load: Callable[[int, int], Any], api_key: int, version: int) -> Any:
    try:
        return load(api_key, version)
    except LookupError as error:
        raise ApiError(ErrorCode.unsupported_version, str(error)) from None


def _decode(reader: _Reader, buffer: Buffer, offset: int) -> Any:
    buffer, offset = checked(reader.entity_type, buffer, offset)
    if type(buffer) is not bytes:
        buffer = memoryview(buffer).toreadonly()  # the native reader refuses what could change under it
    try:
        entity, _ = reader.read(buffer, offset)
    except (SerialError, ValueError, OverflowError, LookupError, TypeError) as error:
        raise MalformedFrame(f"{reader.entity_type.__name__}: {type(error).__name__}: {error}") from None
    return entity


def _encode(entity_type: Any, fields: Mapping[str, Any]) -> bytes:
    if strict_fields:
        _refuse_unknown_keys(entity_type, fields)
    return b"".join(encode_parts(entity_type, fields))


def _refuse_unknown_keys(entity_type: Any, fields: Mapping[str, Any]) -> None:
    load = request_type if entity_type.__name__.endswith("Request") else response_type
    known = _keys_by_struct(entity_type.__api_key__, load)
    _check_keys(entity_type, fields, known)


@cache
def _keys_by_struct(api_key: int, load: Callable[[int, int], Any]) -> dict[str, dict[str, type | None]]:
    """For each struct of an API, by name: the keys some version of it has, and the struct type under each."""
    keys: dict[str, dict[str, type | None]] = {}

    def collect(entity_type: type) -> None:
        own = keys.setdefault(entity_type.__name__, {})
        for shape in shapes(entity_type):
            own[shape.name] = shape.struct_type
            if shape.struct_type is not None:
                collect(shape.struct_type)

    for version in known_versions(api_key):
        collect(load(api_key, version))
    return keys


def _check_keys(
    entity_type: type, fields: Mapping[str, Any], known: dict[str, dict[str, type | None]]
) -> None:
    own = known[entity_type.__name__]
    for key, value in fields.items():
        if key not in own:
            raise ValueError(
                f"no version of {entity_type.__name__} has a field {key!r}; it has {sorted(own)}"
            )
        struct_type = own[key]
        if struct_type is None or value is None:
            continue
        for item in [value] if isinstance(value, Mapping) else value:
            _check_keys(struct_type, item, known)
