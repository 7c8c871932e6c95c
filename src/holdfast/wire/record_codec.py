"""Dataclasses that know their own bytes, for the records Kafka writes into its own logs.

kio generates what clients and brokers say to each other; the records of the metadata log are not among it.
Their format is the same: fields in order, lengths one too high so that zero can mean null, a section of
tagged fields at the end of each struct. A record class names the format of each field in its annotation:

    leader: Annotated[int, Field(INT32)]
    directories: Annotated[tuple[UUID, ...], Field(Array(UUIDS), since=1)] = ()

`since` is the first version that has the field, `tag` makes it a tagged one. Writing leaves out tagged fields
that have their default, and refuses a value that the version has no room for: that would lose it silently.
Reading skips tags it does not know, never reads past the end, checks every length before it allocates, and
raises `ValueError` for bytes that are no such struct.
"""

from __future__ import annotations

import dataclasses
import struct
from functools import cache
from typing import Any, Final, NamedTuple, Protocol, get_type_hints
from uuid import UUID

from holdfast.seams import Buffer
from holdfast.wire.varint import decode_uvarint, encode_uvarint


class Format(Protocol):
    """How one value is written and read."""

    def write(self, value: Any, out: bytearray, version: int) -> None: ...

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[Any, int]:
        """The value and the position after it."""
        ...


class Field(NamedTuple):
    """The format of one field of a record, as an annotation."""

    format: Format
    since: int = 0
    tag: int | None = None


class _Fixed:
    def __init__(self, code: str) -> None:
        self._struct = struct.Struct(">" + code)

    def write(self, value: Any, out: bytearray, version: int) -> None:
        out += self._struct.pack(value)

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[Any, int]:
        return self._struct.unpack_from(buffer, position)[0], position + self._struct.size


class _Uuid:
    def write(self, value: UUID, out: bytearray, version: int) -> None:
        out += value.bytes

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[UUID, int]:
        end = position + 16
        return UUID(bytes=bytes(_slice(buffer, position, end))), end


class String(NamedTuple):
    """Text with its length; null where that is allowed."""

    nullable: bool = False

    def write(self, value: str | None, out: bytearray, version: int) -> None:
        if value is None:
            _write_null(self.nullable, out)
            return
        raw = value.encode()
        out += encode_uvarint(len(raw) + 1)
        out += raw

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[str | None, int]:
        length, position = _read_length(buffer, position, self.nullable)
        if length is None:
            return None, position
        end = position + length
        return str(_slice(buffer, position, end), "utf-8"), end


class Array(NamedTuple):
    """Items of one format with their number; null where that is allowed. Held as a tuple."""

    item: Format
    nullable: bool = False

    def write(self, value: tuple[Any, ...] | None, out: bytearray, version: int) -> None:
        if value is None:
            _write_null(self.nullable, out)
            return
        out += encode_uvarint(len(value) + 1)
        for item in value:
            self.item.write(item, out, version)

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[tuple[Any, ...] | None, int]:
        count, position = _read_length(buffer, position, self.nullable)
        if count is None:
            return None, position
        items = []
        for _ in range(count):
            item, position = self.item.read(buffer, position, version)
            items.append(item)
        return tuple(items), position


class Struct(NamedTuple):
    """Another dataclass of annotated fields."""

    type: type

    def write(self, value: Any, out: bytearray, version: int) -> None:
        write_struct(value, out, version)

    def read(self, buffer: Buffer, position: int, version: int) -> tuple[Any, int]:
        return read_struct(self.type, buffer, position, version)


BOOL: Final = _Fixed("?")
INT8: Final = _Fixed("b")
INT16: Final = _Fixed("h")
UINT16: Final = _Fixed("H")
INT32: Final = _Fixed("i")
INT64: Final = _Fixed("q")
UUIDS: Final = _Uuid()
STRING: Final = String()
NULLABLE_STRING: Final = String(nullable=True)


def write_struct(record: Any, out: bytearray, version: int) -> None:
    """Append the struct as this version of it is written."""
    record_type: Any = type(record)
    layout = _layout(record_type, version)
    for name, default in layout.absent:
        if getattr(record, name) != default:
            raise ValueError(f"{type(record).__name__} version {version} has no field {name!r}")
    for name, format_ in layout.plain:
        format_.write(getattr(record, name), out, version)
    written = 0
    tagged = bytearray()
    for tag, (name, format_, default) in layout.tagged.items():
        value = getattr(record, name)
        if value != default:
            encoded = bytearray()
            format_.write(value, encoded, version)
            tagged += encode_uvarint(tag) + encode_uvarint(len(encoded)) + encoded
            written += 1
    out += encode_uvarint(written)
    out += tagged


def read_struct(record_type: Any, buffer: Buffer, position: int, version: int) -> tuple[Any, int]:
    """The struct at this position, written in this version, and the position after it."""
    layout = _layout(record_type, version)
    values: dict[str, Any] = {}
    try:
        for name, format_ in layout.plain:
            values[name], position = format_.read(buffer, position, version)
    except struct.error as error:
        raise ValueError(f"{record_type.__name__} is cut off: {error}") from None
    count, position = decode_uvarint(buffer, position)
    for _ in range(count):
        tag, position = decode_uvarint(buffer, position)
        size, position = decode_uvarint(buffer, position)
        content = _slice(buffer, position, position + size)
        position += size
        if tag in layout.tagged:
            name, format_, _ = layout.tagged[tag]
            values[name] = _read_tagged(format_, content, version, f"{record_type.__name__} tag {tag}")
    return record_type(**values), position


def _read_tagged(format_: Format, content: Buffer, version: int, what: str) -> Any:
    try:
        value, end = format_.read(content, 0, version)
    except struct.error as error:
        raise ValueError(f"{what} is cut off: {error}") from None
    if end != len(content):
        raise ValueError(f"{what} does not fill its {len(content)} bytes")
    return value


class _Layout(NamedTuple):
    plain: list[tuple[str, Format]]
    tagged: dict[int, tuple[str, Format, Any]]
    """By tag, in ascending order: name, format and the default that is not written."""
    absent: list[tuple[str, Any]]
    """Fields of later versions, with the default they must have to be left out."""


@cache
def _layout(record_type: Any, version: int) -> _Layout:
    layout = _Layout([], {}, [])
    hints = get_type_hints(record_type, include_extras=True)
    annotated = []
    for field in dataclasses.fields(record_type):
        metadata = getattr(hints[field.name], "__metadata__", ())
        annotated += [(field, note) for note in metadata if isinstance(note, Field)]
    for field, (format_, since, tag) in sorted(annotated, key=lambda pair: pair[1].tag or 0):
        if version < since:
            layout.absent.append((field.name, field.default))
        elif tag is not None:
            layout.tagged[tag] = (field.name, format_, field.default)
        else:
            layout.plain.append((field.name, format_))
    return layout


def _write_null(nullable: bool, out: bytearray) -> None:
    if not nullable:
        raise ValueError("null in a field that forbids it")
    out.append(0)


def _read_length(buffer: Buffer, position: int, nullable: bool) -> tuple[int | None, int]:
    length, position = decode_uvarint(buffer, position)
    if length == 0:
        if not nullable:
            raise ValueError(f"null at position {position} in a field that forbids it")
        return None, position
    if length - 1 > len(buffer) - position:  # each byte and each item takes at least one byte
        raise ValueError(f"a length of {length - 1} where {len(buffer) - position} bytes are left")
    return length - 1, position


def _slice(buffer: Buffer, start: int, end: int) -> Buffer:
    if end > len(buffer):
        raise ValueError(f"{end - start} bytes wanted where {len(buffer) - start} are left")
    return buffer[start:end]
