"""Protobuf: messages by a `.proto` text or protoc's `FileDescriptorSet` (in Base64), or the registry's schema.

Columns by type: int32 kinds are int, uint32 and int64 kinds long, uint64 kinds decimal(20,0); float, double, bool,
string and bytes as they are; an enum is its value's name; a message is a struct, repeated an array, map a map whose
keys are written as strings. `google.protobuf.Timestamp` is timestamp (cut to microseconds), the wrappers are their
value or null. Fields without presence always have a value, others are null when absent. Integers may be read as any
integer type they fit in, float as double.

Errors: bytes that do not parse, a field written with another wire type, a number that the enum lacks, a required field
that is absent. An empty value is a message with nothing set. Fields that no column takes follow `unknown`, as do
numbers that the schema does not name: kept, they are in `_unknown` under their name or number (those of the message
itself, not of messages within it).
"""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Callable, Hashable, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import DecodeError
from google.protobuf.unknown_fields import UnknownFieldSet

from holdfast.pipeline.formats import flat_layout as layout
from holdfast.pipeline.formats.base import Decoder, FormatError, Undecodable, shown_name
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.flat_columns import Kind, Meaning, Step, flat_of
from holdfast.pipeline.formats.proto_text import declared, parse_proto, resolve
from holdfast.pipeline.formats.registry import Registered
from holdfast.pipeline.formats.schema_rows import (
    Convert,
    Mismatch,
    Plan,
    SchemaRows,
    cannot,
    check_schema,
    checked,
    unknown_text,
)
from holdfast.pipeline.formats.texts import Unfit, in_range_decimal, in_range_instant, in_range_integer
from holdfast.pipeline.formats.types import INTEGER_BITS, Column, Type

WELL_KNOWN: Final = ("any", "duration", "empty", "field_mask", "struct", "timestamp", "wrappers")
TIMESTAMP: Final = "google.protobuf.Timestamp"
WRAPPERS: Final = frozenset(
    f"google.protobuf.{name}Value"
    for name in ("Double", "Float", "Int64", "UInt64", "Int32", "UInt32", "Bool", "String", "Bytes")
)
INDEXES_MAX: Final = 32
"""Levels of nested messages in a registry's header."""
D = FieldDescriptor


class Scalar(NamedTuple):
    """The column of a field, and how it is read in bulk."""

    type: Type
    code: int
    wire_type: int
    kind: Kind


SCALARS: Final[dict[int, Scalar]] = {
    D.TYPE_DOUBLE: Scalar(Type("double"), layout.EIGHT_BYTES, 1, "double"),
    D.TYPE_FLOAT: Scalar(Type("float"), layout.FOUR_BYTES, 5, "single"),
    D.TYPE_INT64: Scalar(Type("bigint"), layout.VARINT, 0, "integer"),
    D.TYPE_SINT64: Scalar(Type("bigint"), layout.ZIGZAG, 0, "integer"),
    D.TYPE_SFIXED64: Scalar(Type("bigint"), layout.EIGHT_BYTES, 1, "integer"),
    D.TYPE_UINT64: Scalar(Type("decimal", precision=20), layout.VARINT, 0, "unsigned"),
    D.TYPE_FIXED64: Scalar(Type("decimal", precision=20), layout.EIGHT_BYTES, 1, "unsigned"),
    D.TYPE_INT32: Scalar(Type("int"), layout.SIGNED_32, 0, "integer"),
    D.TYPE_SINT32: Scalar(Type("int"), layout.ZIGZAG_32, 0, "integer"),
    D.TYPE_SFIXED32: Scalar(Type("int"), layout.FOUR_BYTES, 5, "signed_four"),
    D.TYPE_UINT32: Scalar(Type("bigint"), layout.UNSIGNED_32, 0, "integer"),
    D.TYPE_FIXED32: Scalar(Type("bigint"), layout.FOUR_BYTES, 5, "integer"),
    D.TYPE_BOOL: Scalar(Type("boolean"), layout.TRUTH, 0, "boolean"),
    D.TYPE_STRING: Scalar(Type("string"), layout.TEXT, 2, "text"),
    D.TYPE_BYTES: Scalar(Type("binary"), layout.BYTES, 2, "bytes"),
    D.TYPE_ENUM: Scalar(Type("string"), layout.SIGNED_32, 0, "names"),
}
INSTANT: Final = Scalar(Type("timestamp"), layout.INSTANT, 2, "instant")
INTEGERS: Final = frozenset(
    kind for kind, found in SCALARS.items() if found.type.kind in ("int", "bigint", "decimal")
)


# ------------------------------------------------------------------------ schemas


def well_known(name: str) -> descriptor_pb2.FileDescriptorProto | None:
    match = re.fullmatch(r"google/protobuf/(\w+)\.proto", name)
    if match is None or match[1] not in WELL_KNOWN:
        return None
    from importlib import import_module

    found = descriptor_pb2.FileDescriptorProto()
    import_module(f"google.protobuf.{match[1]}_pb2").DESCRIPTOR.CopyToProto(found)
    return found


class Schema:
    """The types of a schema in a pool of their own, and the message of it that is read."""

    def __init__(self, text: str, references: Sequence[tuple[str, str]] = ()) -> None:
        self._pool = descriptor_pool.DescriptorPool()
        self._added: set[str] = set()
        self._known: dict[str, int] = {}
        try:
            self.file = self._add_set(text) or self._add_text(text, "schema.proto", dict(references))
        except (TypeError, ValueError, KeyError) as wrong:
            raise Mismatch(f"its Protobuf schema is not valid: {wrong}") from None

    def _add_set(self, text: str) -> descriptor_pb2.FileDescriptorProto | None:
        """The last file of a descriptor set, the one protoc was asked for; None where the text is no such set."""
        try:
            content = base64.b64decode("".join(text.split()), validate=True)
            files = descriptor_pb2.FileDescriptorSet.FromString(content).file
        except (binascii.Error, DecodeError, ValueError):
            return None
        if not files:
            return None
        for file in files:
            for name in file.dependency:
                found = well_known(name)
                if name not in self._added and found is not None:
                    self._add(found)
            if file.name not in self._added:
                self._add(file)
        return files[-1]

    def _add_text(
        self, text: str, name: str, references: dict[str, str], above: tuple[str, ...] = ()
    ) -> descriptor_pb2.FileDescriptorProto:
        file = parse_proto(text, name)
        for each in file.dependency:
            if each in self._added:
                continue
            if each in above:
                raise Mismatch(f"import {each!r}: the files import each other")
            found = well_known(each)
            if found is not None:
                self._add(found)
            elif each in references:
                self._add_text(references[each], each, references, (*above, each))
            else:
                raise Mismatch(
                    f"import {each!r}: only google/protobuf/*.proto can be imported by a text; give protoc's "
                    "FileDescriptorSet (--include_imports --descriptor_set_out) instead"
                )
        resolve(file, {**self._known, **declared(file)})
        self._add(file)
        return file

    def _add(self, file: descriptor_pb2.FileDescriptorProto) -> None:
        self._added.add(file.name)
        self._known.update(declared(file))
        self._pool.AddSerializedFile(file.SerializeToString())

    def message(self, name: str | None) -> Descriptor:
        """The message of that full name; without one, the file's only message."""
        if name is None:
            if len(self.file.message_type) != 1:
                raise Mismatch("its schema has several messages: say which by `message`")
            name = ".".join(filter(None, (self.file.package, self.file.message_type[0].name)))
        try:
            return self._pool.FindMessageTypeByName(name)
        except KeyError:
            names = sorted(each[1:] for each, kind in declared(self.file).items() if kind == D.TYPE_MESSAGE)
            raise Mismatch(f"its schema has no message {name}, only {', '.join(names[:5])}") from None

    def message_at(self, indexes: Sequence[int]) -> Descriptor:
        """The message that a registry's header points at: places of nested messages, from the outermost in."""
        path = [self.file.package] if self.file.package else []
        messages: Any = self.file.message_type
        for index in indexes:
            if index >= len(messages):
                raise Mismatch(f"it has no message at {list(indexes)}")
            path.append(messages[index].name)
            messages = messages[index].nested_type
        return self.message(".".join(path))


# ------------------------------------------------------------------------ columns and conversions


def is_map(field: FieldDescriptor) -> bool:
    return bool(field.message_type is not None and field.message_type.GetOptions().map_entry)


def derive(field: FieldDescriptor, path: str, above: tuple[str, ...]) -> Type:
    if is_map(field):
        return Type("map", element=_derive_one(field.message_type.fields_by_name["value"], path, above))
    found = _derive_one(field, path, above)
    return Type("array", element=found) if field.is_repeated else found


def _derive_one(field: FieldDescriptor, path: str, above: tuple[str, ...]) -> Type:
    if field.message_type is None:
        if field.type not in SCALARS:
            raise Mismatch(f'field "{path}": groups have no column type')
        return SCALARS[field.type].type
    name = field.message_type.full_name
    if name == TIMESTAMP:
        return Type("timestamp")
    if name in WRAPPERS:
        return SCALARS[field.message_type.fields_by_name["value"].type].type
    if name in above:
        raise Mismatch(f'field "{path}": the message {name} holds itself: name the fields to read')
    columns = message_columns(field.message_type, path + ".", (*above, name))
    if not columns:
        raise Mismatch(f'field "{path}": the message {name} has no fields')
    return Type("struct", columns=tuple(columns))


def message_columns(message: Descriptor, path: str = "", above: tuple[str, ...] = ()) -> list[Column]:
    return [
        Column(field.name, derive(field, path + field.name, above or (message.full_name,)), required=False)
        for field in message.fields
    ]


def converter(field: FieldDescriptor, kind: Type, path: str, unknown: str) -> Convert:
    """What turns a field's value into a column's; raises `Mismatch` when nothing can."""
    if is_map(field):
        if kind.kind != "map":
            raise cannot(path, "a map", kind)
        value = _convert_one(field.message_type.fields_by_name["value"], kind.inner, path + "[]", unknown)
        return lambda found: [(_key(key), value(found[key])) for key in found]
    if not field.is_repeated:
        return _convert_one(field, kind, path, unknown)
    if kind.kind != "array":
        raise cannot(path, "a repeated field", kind)
    inner = _convert_one(field, kind.inner, path + "[]", unknown)
    return lambda found: [inner(each) for each in found]


def _key(key: Any) -> str:
    return ("true" if key else "false") if isinstance(key, bool) else str(key)


def _convert_one(field: FieldDescriptor, kind: Type, path: str, unknown: str) -> Convert:
    if field.message_type is not None:
        return _convert_message(field.message_type, kind, path, unknown)
    if field.type == D.TYPE_ENUM and kind.kind == "string":
        names = enum_names(field)
        return checked(lambda number: _enum_name(names, number), path, kind)
    if field.type in INTEGERS and kind.kind in INTEGER_BITS:
        bits = INTEGER_BITS[kind.kind]
        return checked(lambda value: in_range_integer(value, bits), path, kind)
    if field.type in INTEGERS and kind.kind == "decimal":
        return checked(lambda value: in_range_decimal(Decimal(value), kind.precision, kind.scale), path, kind)
    written = SCALARS[field.type].type if field.type in SCALARS else None
    if written is None or (written.kind != kind.kind and (written.kind, kind.kind) != ("float", "double")):
        raise cannot(path, f"Protobuf's {written or 'group'}", kind)
    return lambda value: value


def enum_names(field: FieldDescriptor) -> dict[int, str]:
    """Of names for one number the first counts: the others are aliases."""
    return {value.number: value.name for value in reversed(field.enum_type.values)}


def _enum_name(names: dict[int, str], number: int) -> str:
    if number not in names:
        raise Unfit("no value of the enum")
    return names[number]


def _instant(value: Any) -> int:
    if not 0 <= value.nanos < 1_000_000_000:
        raise Unfit("nanos out of range")
    return in_range_instant(value.seconds * 1_000_000 + value.nanos // 1000)


def _convert_message(message: Descriptor, kind: Type, path: str, unknown: str) -> Convert:
    if message.full_name == TIMESTAMP and kind.kind == "timestamp":
        return checked(_instant, path, kind)
    if message.full_name in WRAPPERS and kind.kind != "struct":
        inner = _convert_one(message.fields_by_name["value"], kind, path, unknown)
        return lambda value: inner(value.value)
    if kind.kind != "struct":
        raise cannot(path, f"the message {message.full_name}", kind)
    read = message_reader(message, kind.columns, path + ".", unknown)
    names = [each.name for each in kind.columns]

    def convert(value: Any) -> dict[str, Any]:
        row, _ = read(value)
        return dict(zip(names, row, strict=True))

    return convert


def message_reader(
    message: Descriptor, columns: Sequence[Column], path: str, unknown: str
) -> Callable[[Any], tuple[list[Any], dict[str, Any]]]:
    """What reads the columns of a message, and whatever of it no column takes."""
    fields = message.fields_by_name
    parts: list[tuple[str, bool, bool, Convert | None]] = []
    for column in columns:
        field = fields.get(column.name)
        if field is None and column.required:
            raise Mismatch(f'required field "{path}{column.name}" is not in the message {message.full_name}')
        convert = None if field is None else converter(field, column.type, path + column.name, unknown)
        parts.append((column.name, column.required, field is not None and field.has_presence, convert))
    wanted = {each.name for each in columns}
    numbers = {field.number: field.name for field in message.fields}
    has_extra = any(field.name not in wanted for field in message.fields)

    def read(value: Any) -> tuple[list[Any], dict[str, Any]]:
        others = _unnamed(value, numbers, path)
        if has_extra and unknown != "ignore":
            others.update(
                {field.name: found for field, found in value.ListFields() if field.name not in wanted}
            )
        if others and unknown == "reject":
            raise Undecodable(
                f"unknown field {shown_name(next(iter(others)))}" + (f' in "{path[:-1]}"' if path else "")
            )
        row: list[Any] = []
        for name, required, has_presence, convert in parts:
            if convert is None or (has_presence and not value.HasField(name)):
                if required:
                    raise Undecodable(f'required field "{path}{name}" is missing')
                row.append(None)
            else:
                row.append(convert(getattr(value, name)))
        return row, others

    return read


def _unnamed(value: Any, numbers: dict[int, str], path: str) -> dict[str, Any]:
    """Fields by numbers that the schema lacks; one that it has is here when its wire type was another."""
    found: dict[str, Any] = {}
    for each in UnknownFieldSet(value):
        if each.field_number in numbers:
            name = numbers[each.field_number]
            raise Undecodable(
                f'field "{path}{name}": written with the wire type {each.wire_type} of another type'
            )
        found.setdefault(str(each.field_number), []).append(each.data)
    return found


def _json_ready(value: Any) -> Any:
    """What an unknown field of the schema holds, for JSON."""
    if hasattr(value, "ListFields"):
        return {field.name: _json_ready(each) for field, each in value.ListFields()}
    if isinstance(value, UnknownFieldSet):
        return {str(each.field_number): _json_ready(each.data) for each in value}
    if hasattr(value, "items"):
        return {_key(key): _json_ready(value[key]) for key in value}
    if isinstance(value, bytes | str) or not hasattr(value, "__getitem__"):
        return value
    return [_json_ready(each) for each in value]


# ------------------------------------------------------------------------ the decoder


def read_varint(payload: bytes, position: int) -> tuple[int, int]:
    """A zigzag number of a registry's header, and the position behind it."""
    value = 0
    for shift in range(0, 35, 7):
        if position >= len(payload):
            break
        byte = payload[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), position
    raise Undecodable("no schema registry header: its message indexes are cut short")


class Protobuf(SchemaRows):
    single_place = (0,)
    place_bytes = 1

    def own_plan(self) -> Plan:
        assert self.decoding.schema is not None
        return self._plan(Schema(self.decoding.schema).message(self.decoding.message))

    def registered_plan(self, registered: Registered, place: Hashable) -> Plan:
        if registered.kind != "PROTOBUF":
            raise Mismatch(f"it is a schema of {registered.kind}, not of Protobuf")
        assert isinstance(place, tuple)
        message = Schema(registered.text, registered.references).message_at(place)
        if self.decoding.message is not None and message.full_name != self.decoding.message:
            raise Mismatch(f"the message is {message.full_name}, expected {self.decoding.message}")
        return self._plan(message)

    def split_place(self, payload: bytes) -> tuple[Hashable, bytes]:
        count, position = read_varint(payload, 0)
        if not 0 <= count <= INDEXES_MAX:
            raise Undecodable(f"no schema registry header: {count} message indexes")
        indexes: list[int] = []
        for _ in range(count):
            index, position = read_varint(payload, position)
            if index < 0:
                raise Undecodable("no schema registry header: a message index below zero")
            indexes.append(index)
        return tuple(indexes) or (0,), payload[position:]

    def _plan(self, descriptor: Descriptor) -> Plan:
        unknown = self.decoding.unknown
        read = message_reader(descriptor, self.fields, "", unknown)
        parse = message_factory.GetMessageClass(descriptor).FromString

        def plan(payload: bytes) -> list[Any]:
            try:
                message = parse(payload)
            except (DecodeError, ValueError):
                raise Undecodable(f"not a message {descriptor.full_name}: its bytes do not parse") from None
            missing = message.FindInitializationErrors()
            if missing:
                raise Undecodable(f'required field "{missing[0]}" is missing')
            row, others = read(message)
            if unknown == "keep":
                row.append(unknown_text({name: _json_ready(value) for name, value in others.items()}))
            return row

        steps = flat_steps(descriptor)
        return Plan(plan, flat_of(steps, self.fields, is_protobuf=True, is_open=unknown == "ignore"))


def flat_steps(message: Descriptor) -> list[Step] | None:
    """How the fields of a message are read in bulk; nothing when one is repeated, nested, required or in a oneof."""
    steps: list[Step] = []
    for field in message.fields:
        oneof = field.containing_oneof
        if field.is_repeated or field.is_required or (oneof is not None and len(oneof.fields) > 1):
            return None
        names = enum_names(field) if field.type == D.TYPE_ENUM else {}
        if field.type == D.TYPE_MESSAGE and field.message_type.full_name == TIMESTAMP:
            scalar = INSTANT
        elif field.type in SCALARS:
            scalar = SCALARS[field.type]
        else:
            return None
        steps.append(
            Step(
                field.name,
                scalar.code,
                Meaning(scalar.kind, names=names),
                number=field.number,
                wire_type=scalar.wire_type,
                has_presence=field.has_presence,
            )
        )
    return steps


def protobuf_decoder(decoding: Decoding, prefix: str, columns: Sequence[Column]) -> Decoder:
    check_schema(decoding, columns)
    try:
        found = list(columns)
        if decoding.schema is not None and not found:
            message = Schema(decoding.schema).message(decoding.message)
            found = message_columns(message)
            if not found:
                raise Mismatch(f"the message {message.full_name} has no fields")
        return Protobuf(decoding, prefix, found)
    except Mismatch as mismatch:
        raise FormatError(f"format protobuf: {mismatch}") from None
