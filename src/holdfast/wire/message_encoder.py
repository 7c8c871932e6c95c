"""Compiles kio's message types into encoders of plain dictionaries.

kio's own writers want an entity object per struct and spend a `write` call per field: about twenty
microseconds for a small response. Here each type is compiled once into a list of *steps*. A step takes the
dictionary of one struct and appends what it encodes to a list of parts, which is joined at the end.
Neighbouring fields of fixed size become one `struct.pack`, and a closing empty section of tagged fields
becomes a pad byte of that pack.

The rules of a value:

- a key that is missing takes the schema's default, or else the zero of its type: 0, False, "", b"", [], None
  where the field is nullable, and all of these recursively for a struct;
- a key that this version does not have is dropped, so that one dictionary serves every version;
- durations and timestamps are milliseconds, error codes integers, uuids 16 bytes, a `uuid.UUID` or None for
  zero;
- a tagged field is written when its encoding differs from that of its default.
"""

from __future__ import annotations

import dataclasses
import datetime
import struct
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any, Final, TypeAlias

from holdfast.wire.message_schema import NO_DEFAULT, FieldShape, shapes
from holdfast.wire.varint import encode_uvarint

Append: TypeAlias = Callable[[Any], None]
Step: TypeAlias = Callable[[Mapping[str, Any], Append], None]
"""Encodes some fields of one struct."""
ValueStep: TypeAlias = Callable[[Any, Append], None]
"""Encodes one value."""

FIXED_FORMATS: Final = {
    "bool": "?",
    "int8": "b",
    "int16": "h",
    "uint16": "H",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "float64": "d",
    "error_code": "h",
    "timedelta_i32": "i",
    "timedelta_i64": "q",
    "datetime_i64": "q",
}

_ZERO_UUID: Final = bytes(16)
_LEGACY_STRING_MAX: Final = 0x7FFF
_EMPTY: Final[Mapping[str, Any]] = {}

_int16 = struct.Struct(">h").pack
_int32 = struct.Struct(">i").pack


@cache
def struct_encoder(entity_type: type) -> ValueStep:
    """The encoder of one struct type: takes its dictionary and where to append."""
    steps = _steps(entity_type)
    if len(steps) == 1:
        return steps[0]

    def encode_struct(fields: Mapping[str, Any], append: Append) -> None:
        for step in steps:
            step(fields, append)

    return encode_struct


def encode_parts(entity_type: type, fields: Mapping[str, Any]) -> list[Any]:
    """One message as parts, in order."""
    parts: list[Any] = []
    try:
        struct_encoder(entity_type)(fields, parts.append)
    except (struct.error, TypeError, AttributeError, ValueError) as error:
        error.add_note(
            f"while encoding {entity_type.__module__}.{entity_type.__name__} from {fields!r:.2000}"
        )
        raise
    return parts


def _steps(entity_type: Any) -> list[Step]:
    flexible = bool(entity_type.__flexible__)
    steps: list[Step] = []
    tagged: list[FieldShape] = []
    run: list[tuple[str, str, Any]] = []  # format, name, default of neighbouring fields of fixed size

    def close_run(closing: str = "") -> None:
        if run or closing:
            steps.append(_fixed_run(run.copy(), closing))
        run.clear()

    for shape in shapes(entity_type):
        fixed = None if shape.is_array else FIXED_FORMATS.get(shape.kafka_type or "")
        if shape.tag is not None:
            tagged.append(shape)
        elif fixed is not None:
            run.append((fixed, shape.name, _default(shape)))
        else:
            close_run()
            steps.append(_named(shape.name, _default(shape), _value_step(shape, flexible)))
    if tagged:
        close_run()
        steps.append(_tagged_section(tagged, flexible))
    else:
        close_run("x" if flexible else "")
    return steps


def _fixed_run(run: list[tuple[str, str, Any]], closing: str) -> Step:
    pack = struct.Struct(">" + "".join(fixed for fixed, _, _ in run) + closing).pack
    if not run:
        constant = pack()
        return lambda fields, append: append(constant)
    if any(default is None for _, _, default in run):  # a nullable timestamp: null is written as -1
        defaults = [(name, -1 if default is None else default) for _, name, default in run]

        def encode_run_with_nulls(fields: Mapping[str, Any], append: Append) -> None:
            values = (fields.get(name, default) for name, default in defaults)
            append(pack(*[-1 if value is None else value for value in values]))

        return encode_run_with_nulls
    if len(run) == 1:
        _, only_name, only_default = run[0]
        return lambda fields, append: append(pack(fields.get(only_name, only_default)))
    named_defaults = [(name, default) for _, name, default in run]

    def encode_run(fields: Mapping[str, Any], append: Append) -> None:
        get = fields.get
        append(pack(*[get(name, default) for name, default in named_defaults]))

    return encode_run


def _named(name: str, default: Any, encode: ValueStep) -> Step:
    return lambda fields, append: encode(fields.get(name, default), append)


def _tagged_section(tagged: list[FieldShape], flexible: bool) -> Step:
    entries = []
    for shape in sorted(tagged, key=lambda shape: shape.tag or 0):
        encode = _value_step(shape, flexible)
        default_bytes = _joined(encode, _default(shape))
        entries.append((encode_uvarint(shape.tag or 0), shape.name, encode, default_bytes))

    def encode_tagged(fields: Mapping[str, Any], append: Append) -> None:
        present: list[bytes] = []
        count = 0
        for tag, name, encode, default_bytes in entries:
            if name not in fields:
                continue
            value_bytes = _joined(encode, fields[name])
            if value_bytes != default_bytes:
                count += 1
                present += (tag, encode_uvarint(len(value_bytes)), value_bytes)
        append(encode_uvarint(count))
        if count:
            append(b"".join(present))

    return encode_tagged


def _joined(encode: ValueStep, value: Any) -> bytes:
    parts: list[bytes] = []
    encode(value, parts.append)
    return b"".join(parts)


def _value_step(shape: FieldShape, flexible: bool) -> ValueStep:
    if shape.struct_type is not None:
        encode = struct_encoder(shape.struct_type)
        if shape.is_array:
            return _array(encode, flexible, shape.nullable)
        return _nullable_struct(encode) if shape.nullable else encode
    assert shape.kafka_type is not None
    if shape.is_array:
        return _primitive_array(shape.kafka_type, flexible, shape.nullable)
    return _primitive(shape.kafka_type, flexible, shape.nullable)


def _primitive(kafka_type: str, flexible: bool, nullable: bool) -> ValueStep:
    if kafka_type in FIXED_FORMATS:
        pack = struct.Struct(">" + FIXED_FORMATS[kafka_type]).pack
        if nullable:
            return lambda value, append: append(pack(-1 if value is None else value))
        return lambda value, append: append(pack(value))
    if kafka_type == "uuid":
        return _encode_uuid
    if kafka_type == "string":
        encode = _encode_compact_string if flexible else _encode_legacy_string
    else:
        encode = _encode_compact_bytes if flexible else _encode_legacy_bytes
    if not nullable:
        return encode
    return partial(_encode_nullable, encode, _null_marker(kafka_type, flexible))


def _null_marker(kafka_type: str, flexible: bool) -> bytes:
    if flexible:
        return b"\x00"
    return _int16(-1) if kafka_type == "string" else _int32(-1)


def _encode_nullable(encode: ValueStep, null: bytes, value: Any, append: Append) -> None:
    if value is None:
        append(null)
    else:
        encode(value, append)


def _encode_uuid(value: bytes | uuid.UUID | None, append: Append) -> None:
    if value is None:
        append(_ZERO_UUID)
    elif isinstance(value, uuid.UUID):
        append(value.bytes)
    elif len(value) == 16:
        append(value)
    else:
        raise ValueError(f"a uuid has 16 bytes, not {len(value)}")


def _encode_compact_string(value: str, append: Append) -> None:
    raw = value.encode()
    append(encode_uvarint(len(raw) + 1))
    append(raw)


def _encode_legacy_string(value: str, append: Append) -> None:
    raw = value.encode()
    if len(raw) > _LEGACY_STRING_MAX:
        raise ValueError(f"string of {len(raw)} bytes; this version carries at most {_LEGACY_STRING_MAX}")
    append(_int16(len(raw)))
    append(raw)


def _encode_compact_bytes(value: Any, append: Append) -> None:
    append(encode_uvarint(_size_of(value) + 1))
    append(value)


def _encode_legacy_bytes(value: Any, append: Append) -> None:
    append(_int32(_size_of(value)))
    append(value)


def _size_of(part: bytes | bytearray | memoryview) -> int:
    """How many bytes a part of a message takes on the wire."""
    return part.nbytes if isinstance(part, memoryview) else len(part)


def _array_length(flexible: bool) -> Callable[[int], bytes]:
    return (lambda count: encode_uvarint(count + 1)) if flexible else _int32


def _array(encode_item: ValueStep, flexible: bool, nullable: bool) -> ValueStep:
    length = _array_length(flexible)
    null = length(-1)

    def encode_array(items: Sequence[Any] | None, append: Append) -> None:
        if items is None and nullable:
            append(null)
            return
        append(length(len(items)))  # type: ignore[arg-type]  # None in a field that forbids it must raise
        for item in items:  # type: ignore[union-attr]
            encode_item(item, append)

    return encode_array


def _primitive_array(kafka_type: str, flexible: bool, nullable: bool) -> ValueStep:
    fixed = FIXED_FORMATS.get(kafka_type)
    if fixed is None:
        return _array(_primitive(kafka_type, flexible, nullable=False), flexible, nullable)
    length = _array_length(flexible)
    null = length(-1)

    def encode_fixed_array(items: Sequence[Any] | None, append: Append) -> None:
        if items is None and nullable:
            append(null)
            return
        count = len(items)  # type: ignore[arg-type]  # None in a field that forbids it must raise
        append(length(count))
        append(struct.pack(f">{count}{fixed}", *items))  # type: ignore[misc]

    return encode_fixed_array


def _nullable_struct(encode: ValueStep) -> ValueStep:
    def encode_nullable_struct(value: Mapping[str, Any] | None, append: Append) -> None:
        if value is None:
            append(b"\xff")
        else:
            append(b"\x01")
            encode(value, append)

    return encode_nullable_struct


def _default(shape: FieldShape) -> Any:
    """What a missing key stands for, in the plain form a dictionary would hold."""
    if shape.default is not NO_DEFAULT:
        return plain_value(shape.default)
    if shape.nullable:
        return None
    if shape.is_array:
        return ()
    if shape.kafka_type is None:
        return _EMPTY
    if shape.kafka_type in FIXED_FORMATS:
        return 0
    return {"string": "", "uuid": None}.get(shape.kafka_type, b"")


def plain_value(value: Any) -> Any:
    """An entity, or a value of one of its fields, as the plain dictionaries, tuples and numbers encoders
    take."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain_value(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return tuple(plain_value(item) for item in value)
    if isinstance(value, datetime.timedelta):
        return value // datetime.timedelta(milliseconds=1)
    if isinstance(value, datetime.datetime):
        return round(value.timestamp() * 1000)
    return value
