"""Dataclasses that know their own bytes, for the records Kafka writes into its own logs.

kio generates what clients and brokers say to each other; the records of the metadata log and of the coordinators'
topics are not among it. Their format is the same, in its two forms. The *flexible* one has lengths that are one
too high, so that zero can mean null, and a section of tagged fields at the end of each struct. The older one has
lengths of a fixed width, -1 for null, and no tags. A record class names the format of each field in its annotation:

    leader: Annotated[int, Field(INT32)]
    directories: Annotated[tuple[UUID, ...], Field(Array(UUIDS), since=1)] = ()

`since` and `until` are the first and last version that have the field, `tag` makes it a tagged one. Writing leaves
out tagged fields that have their default, and refuses a value that the version has no room for, since that would
lose it silently, unless the field is `ignorable`. Reading skips tags it does not know, never reads past the end,
checks every length before it allocates, and raises `ValueError` for bytes that are no such struct.
"""

from __future__ import annotations

import dataclasses
import struct
from functools import cache
from typing import Any, Final, NamedTuple, Protocol, get_type_hints
from uuid import UUID

from holdfast.seams import Buffer
from holdfast.wire.varint import decode_uvarint, encode_uvarint


class Form(NamedTuple):
    """Which of a struct's layouts is meant."""

    version: int
    flexible: bool = True


class Format(Protocol):
    """How one value is written and read."""

    def write(self, value: Any, out: bytearray, form: Form) -> None: ...

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[Any, int]:
        """The value and the position after it."""
        ...


_VERSION_MAX: Final = 2**15 - 1
_ITS_DEFAULT: Final = object()


class Field(NamedTuple):
    """The format of one field of a record, as an annotation."""

    format: Format
    since: int = 0
    until: int = _VERSION_MAX
    tag: int | None = None
    ignorable: bool = False
    """Versions without the field drop its value."""
    untagged: Any = _ITS_DEFAULT
    """What it means that the tag is missing, where that is not the field's default."""

    def is_written(self, value: Any, default: Any, version: int) -> bool:
        """Whether this version writes a field with this value and this default."""
        unwritten = default if self.untagged is _ITS_DEFAULT else self.untagged
        return self.since <= version <= self.until and (self.tag is None or value != unwritten)


class _Fixed:
    def __init__(self, code: str) -> None:
        self._struct = struct.Struct(">" + code)

    def write(self, value: Any, out: bytearray, form: Form) -> None:
        try:
            out += self._struct.pack(value)
        except struct.error as error:
            raise ValueError(f"{value!r} does not fit: {error}") from None

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[Any, int]:
        return self._struct.unpack_from(buffer, position)[0], position + self._struct.size


class _Uuid:
    def write(self, value: UUID, out: bytearray, form: Form) -> None:
        out += value.bytes

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[UUID, int]:
        end = position + 16
        return UUID(bytes=bytes(_slice(buffer, position, end))), end


class String(NamedTuple):
    """Text with its length; null where that is allowed."""

    nullable: bool = False

    def write(self, value: str | None, out: bytearray, form: Form) -> None:
        if value is None:
            _write_null(self.nullable, out, form, _SHORT)
            return
        raw = value.encode()
        _write_length(len(raw), out, form, _SHORT)
        out += raw

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[str | None, int]:
        length, position = _read_length(buffer, position, self.nullable, form, _SHORT)
        if length is None:
            return None, position
        end = position + length
        return str(_slice(buffer, position, end), "utf-8"), end


class Bytes(NamedTuple):
    """Bytes with their length; null where that is allowed."""

    nullable: bool = False

    def write(self, value: bytes | None, out: bytearray, form: Form) -> None:
        if value is None:
            _write_null(self.nullable, out, form, _LONG)
            return
        _write_length(len(value), out, form, _LONG)
        out += value

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[bytes | None, int]:
        length, position = _read_length(buffer, position, self.nullable, form, _LONG)
        if length is None:
            return None, position
        end = position + length
        return bytes(_slice(buffer, position, end)), end


class Array(NamedTuple):
    """Items of one format with their number; null where that is allowed. Held as a tuple."""

    item: Format
    nullable: bool = False

    def write(self, value: tuple[Any, ...] | None, out: bytearray, form: Form) -> None:
        if value is None:
            _write_null(self.nullable, out, form, _LONG)
            return
        _write_length(len(value), out, form, _LONG)
        for item in value:
            self.item.write(item, out, form)

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[tuple[Any, ...] | None, int]:
        count, position = _read_length(buffer, position, self.nullable, form, _LONG)
        if count is None:
            return None, position
        items = []
        for _ in range(count):
            item, position = self.item.read(buffer, position, form)
            items.append(item)
        return tuple(items), position


class Struct(NamedTuple):
    """Another dataclass of annotated fields."""

    type: type

    def write(self, value: Any, out: bytearray, form: Form) -> None:
        write_struct(value, out, *form)

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[Any, int]:
        return read_struct(self.type, buffer, position, *form)


class NullableStruct(NamedTuple):
    """Another dataclass, or null, as a tagged field: one byte says which."""

    type: type

    def write(self, value: Any, out: bytearray, form: Form) -> None:
        out.append(value is not None)
        if value is not None:
            write_struct(value, out, *form)

    def read(self, buffer: Buffer, position: int, form: Form) -> tuple[Any, int]:
        present, position = decode_uvarint(buffer, position)
        if not present:
            return None, position
        return read_struct(self.type, buffer, position, *form)


_SHORT: Final = struct.Struct(">h")
_LONG: Final = struct.Struct(">i")
"""The lengths of the form that is not flexible."""

BOOL: Final = _Fixed("?")
INT8: Final = _Fixed("b")
INT16: Final = _Fixed("h")
UINT16: Final = _Fixed("H")
INT32: Final = _Fixed("i")
INT64: Final = _Fixed("q")
FLOAT64: Final = _Fixed("d")
UUIDS: Final = _Uuid()
STRING: Final = String()
NULLABLE_STRING: Final = String(nullable=True)
BYTES: Final = Bytes()


def write_struct(record: Any, out: bytearray, version: int, flexible: bool = True) -> None:
    """Append the struct as this version of it is written."""
    record_type: Any = type(record)
    form = Form(version, flexible)
    layout = _layout(record_type, form)
    for name, default in layout.absent:
        if getattr(record, name) != default:
            raise ValueError(f"{record_type.__name__} version {version} has no field {name!r}")
    for name, format_ in layout.plain:
        format_.write(getattr(record, name), out, form)
    if not flexible:
        return
    written = 0
    tagged = bytearray()
    for tag, (name, format_, unwritten) in layout.tagged.items():
        value = getattr(record, name)
        if value != unwritten:
            encoded = bytearray()
            format_.write(value, encoded, form)
            tagged += encode_uvarint(tag) + encode_uvarint(len(encoded)) + encoded
            written += 1
    out += encode_uvarint(written)
    out += tagged


def read_struct(
    record_type: Any, buffer: Buffer, position: int, version: int, flexible: bool = True
) -> tuple[Any, int]:
    """The struct at this position, written in this version, and the position after it."""
    form = Form(version, flexible)
    layout = _layout(record_type, form)
    values: dict[str, Any] = {}
    try:
        for name, format_ in layout.plain:
            values[name], position = format_.read(buffer, position, form)
    except struct.error as error:
        raise ValueError(f"{record_type.__name__} is cut off: {error}") from None
    if not flexible:
        return record_type(**values), position
    values.update(layout.untagged)
    count, position = decode_uvarint(buffer, position)
    for _ in range(count):
        tag, position = decode_uvarint(buffer, position)
        size, position = decode_uvarint(buffer, position)
        content = _slice(buffer, position, position + size)
        position += size
        if tag in layout.tagged:
            name, format_, _ = layout.tagged[tag]
            values[name] = _read_tagged(format_, content, form, f"{record_type.__name__} tag {tag}")
    return record_type(**values), position


def _read_tagged(format_: Format, content: Buffer, form: Form, what: str) -> Any:
    try:
        value, end = format_.read(content, 0, form)
    except struct.error as error:
        raise ValueError(f"{what} is cut off: {error}") from None
    if end != len(content):
        raise ValueError(f"{what} does not fill its {len(content)} bytes")
    return value


class _Layout(NamedTuple):
    plain: list[tuple[str, Format]]
    tagged: dict[int, tuple[str, Format, Any]]
    """By tag, in ascending order: name, format and the value that is not written."""
    untagged: dict[str, Any]
    """What tagged fields are whose tag is missing, where that is not their default."""
    absent: list[tuple[str, Any]]
    """Fields of other versions, with the default they must have to be left out."""


@cache
def _layout(record_type: Any, form: Form) -> _Layout:
    layout = _Layout([], {}, {}, [])
    hints = get_type_hints(record_type, include_extras=True)
    annotated = []
    for field in dataclasses.fields(record_type):
        metadata = getattr(hints[field.name], "__metadata__", ())
        annotated += [(field, note) for note in metadata if isinstance(note, Field)]
    for field, note in sorted(annotated, key=lambda pair: pair[1].tag or 0):
        if not note.since <= form.version <= note.until:
            if not note.ignorable:
                layout.absent.append((field.name, field.default))
        elif note.tag is None:
            layout.plain.append((field.name, note.format))
        elif note.untagged is _ITS_DEFAULT:
            layout.tagged[note.tag] = (field.name, note.format, field.default)
        else:
            layout.tagged[note.tag] = (field.name, note.format, note.untagged)
            layout.untagged[field.name] = note.untagged
    return layout


def _write_null(nullable: bool, out: bytearray, form: Form, width: struct.Struct) -> None:
    if not nullable:
        raise ValueError("null in a field that forbids it")
    out += b"\0" if form.flexible else width.pack(-1)


def _write_length(length: int, out: bytearray, form: Form, width: struct.Struct) -> None:
    if form.flexible:
        out += encode_uvarint(length + 1)
        return
    if length >> (8 * width.size - 1):
        raise ValueError(f"{length} bytes or items do not fit a length of {width.size} bytes")
    out += width.pack(length)


def _read_length(
    buffer: Buffer, position: int, nullable: bool, form: Form, width: struct.Struct
) -> tuple[int | None, int]:
    if form.flexible:
        length, position = decode_uvarint(buffer, position)
        length -= 1
    else:
        length = width.unpack_from(buffer, position)[0]
        position += width.size
    if length < 0:
        if not nullable:
            raise ValueError(f"null at position {position} in a field that forbids it")
        return None, position
    if length > len(buffer) - position:  # each byte and each item takes at least one byte
        raise ValueError(f"a length of {length} where {len(buffer) - position} bytes are left")
    return length, position


def _slice(buffer: Buffer, start: int, end: int) -> Buffer:
    if end > len(buffer):
        raise ValueError(f"{end - start} bytes wanted where {len(buffer) - start} are left")
    return buffer[start:end]
