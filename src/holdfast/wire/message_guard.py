"""Walks the lengths of a message before kio's reader is let near it.

kio reads fast, and trusting: it reserves memory for as many items as an array's length claims, which for a
length made up by a peer ends the process, and it knows no tagged fields but those of its own schema, whereas
the protocol says that a reader skips the ones it does not know. So every message is walked first. The walk
builds nothing. It adds up sizes, and finds either that the message ends within the buffer, that every array
could have as many items as it claims in the bytes that are left and that nothing is null which may not be, or
that the frame is malformed. Unknown tagged fields are noted as *edits*: ranges to cut out, and counts and sizes
to correct, before reading. Bytes behind the message are no part of it: Kafka ignores them, and librdkafka sends
some with Metadata requests.

Walkers are compiled once per kio type, like the encoders. They check array lengths and nulls as they go and
nothing else: a position that ran past the end is noticed by the next read, or by the comparison at the end.
Text that is no UTF-8 is left to the reader to refuse.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import cache
from typing import Any, Final, NamedTuple, TypeAlias

from holdfast.errors import MalformedFrame
from holdfast.seams import Buffer
from holdfast.wire.message_encoder import FIXED_FORMATS
from holdfast.wire.message_schema import FieldShape, shapes
from holdfast.wire.varint import decode_uvarint, encode_uvarint


class Edit(NamedTuple):
    """Bytes of a message to be replaced before it is read."""

    start: int
    end: int
    replacement: bytes


Walker: TypeAlias = Callable[[Buffer, int, list[Edit]], int]
"""Takes the position where something begins and returns the one where it ends."""

_UUID_SIZE: Final = 16
_int16 = struct.Struct(">h").unpack_from
_int32 = struct.Struct(">i").unpack_from


def checked(entity_type: type, buffer: Buffer, offset: int) -> tuple[Buffer, int]:
    """The buffer and offset to read this message from; raises `MalformedFrame` if it must not be read."""
    edits: list[Edit] = []
    try:
        end = struct_walker(entity_type)(buffer, offset, edits)
    except (IndexError, ValueError, struct.error) as error:
        raise MalformedFrame(f"{entity_type.__name__}: {error}") from None
    if end > len(buffer):
        raise MalformedFrame(f"{entity_type.__name__}: it is cut off")
    if edits:
        return _edited(buffer, offset, edits), 0
    return buffer, offset


def _edited(buffer: Buffer, offset: int, edits: list[Edit]) -> bytes:
    parts: list[Any] = []
    position = offset
    for edit in sorted(edits):
        parts += (buffer[position : edit.start], edit.replacement)
        position = edit.end
    parts.append(buffer[position:])
    return b"".join(parts)


@cache
def struct_walker(entity_type: Any) -> Walker:
    """The walker of one struct type."""
    flexible = bool(entity_type.__flexible__)
    steps: list[tuple[int, Walker]] = []  # bytes of fixed size to skip, then what to walk
    skip = 0
    known_tags: dict[int, Walker] = {}
    for shape in shapes(entity_type):
        if shape.tag is not None:
            known_tags[shape.tag] = _value_walker(shape, flexible)
            continue
        size = fixed_size(shape)
        if size is not None:
            skip += size
        else:
            steps.append((skip, _value_walker(shape, flexible)))
            skip = 0
    if flexible:
        steps.append((skip, _tags_walker(known_tags)))
        skip = 0
    if len(steps) == 1 and skip == 0:
        first_skip, only = steps[0]
        return lambda buffer, position, edits: only(buffer, position + first_skip, edits)

    def walk_struct(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        for before, walk in steps:
            position = walk(buffer, position + before, edits)
        return position + skip

    return walk_struct


def fixed_size(shape: FieldShape) -> int | None:
    """How many bytes the field takes, if it always takes the same."""
    if shape.is_array or shape.kafka_type is None:
        return None
    return _primitive_size(shape.kafka_type)


def _primitive_size(kafka_type: str) -> int | None:
    if kafka_type == "uuid":
        return _UUID_SIZE
    fixed = FIXED_FORMATS.get(kafka_type)
    return struct.calcsize(">" + fixed) if fixed is not None else None


@cache
def size_min(entity_type: Any) -> int:
    """How many bytes a struct takes at least."""
    flexible = bool(entity_type.__flexible__)
    total = 1 if flexible else 0
    for shape in shapes(entity_type):
        if shape.tag is None:
            total += _field_size_min(shape, flexible)
    return total


def _field_size_min(shape: FieldShape, flexible: bool) -> int:
    size = fixed_size(shape)
    if size is not None:
        return size
    if shape.struct_type is not None and not shape.is_array:
        return 1 if shape.nullable else size_min(shape.struct_type)
    if flexible:
        return 1
    return 2 if shape.kafka_type == "string" and not shape.is_array else 4


def _value_walker(shape: FieldShape, flexible: bool) -> Walker:
    if shape.struct_type is not None:
        walk = struct_walker(shape.struct_type)
        if shape.is_array:
            return _array_walker(shape, walk, size_min(shape.struct_type), flexible)
        return _nullable_struct_walker(walk) if shape.nullable else walk
    assert shape.kafka_type is not None
    size = _primitive_size(shape.kafka_type)
    if size is not None:
        return _fixed_array_walker(shape, size, flexible) if shape.is_array else _fixed_walker(size)
    if not shape.is_array:
        return _text_walker(shape, flexible)
    # That an array may be null says nothing of its items, which never are.
    item = shape._replace(name=f"an item of {shape.name}", is_array=False, nullable=False)
    return _array_walker(shape, _text_walker(item, flexible), 1 if flexible else 2, flexible)


def _fixed_walker(size: int) -> Walker:
    return lambda buffer, position, edits: position + size


def _refuse_null(shape: FieldShape) -> None:
    if not shape.nullable:
        raise ValueError(f"{shape.name} is null, which it may not be")


def _text_walker(shape: FieldShape, flexible: bool) -> Walker:
    """Of strings and bytes, which have the same shape."""
    read_size, width = (_int16, 2) if shape.kafka_type == "string" else (_int32, 4)

    def walk_compact(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        size = buffer[position]
        if 0 < size < 128:
            return position + size  # the size is one more than that of the value; 0 is null
        size, position = decode_uvarint(buffer, position)
        if size:
            return position + size - 1
        _refuse_null(shape)
        return position

    def walk_legacy(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        size = read_size(buffer, position)[0]
        if size >= 0:
            return int(position + width + size)
        _refuse_null(shape)
        return position + width

    return walk_compact if flexible else walk_legacy


def _array_count(
    shape: FieldShape, buffer: Buffer, position: int, item_size_min: int, flexible: bool
) -> tuple[int, int]:
    """How many items follow, none for null, and where."""
    if flexible:
        count = buffer[position]
        if count < 128:
            position += 1
        else:
            count, position = decode_uvarint(buffer, position)
        count -= 1
    else:
        count = _int32(buffer, position)[0]
        position += 4
    if count < 0:
        _refuse_null(shape)
    elif count * item_size_min > len(buffer) - position:
        raise ValueError(f"an array of {count} items where {len(buffer) - position} bytes are left")
    return count, position


def _array_walker(shape: FieldShape, walk: Walker, item_size_min: int, flexible: bool) -> Walker:
    if item_size_min < 1:
        raise TypeError("items that take no bytes would leave an array's length without a bound")

    def walk_array(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        count, position = _array_count(shape, buffer, position, item_size_min, flexible)
        for _ in range(count):
            position = walk(buffer, position, edits)
        return position

    return walk_array


def _fixed_array_walker(shape: FieldShape, size: int, flexible: bool) -> Walker:
    def walk_fixed_array(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        count, position = _array_count(shape, buffer, position, size, flexible)
        return position + count * size if count > 0 else position

    return walk_fixed_array


def _nullable_struct_walker(walk: Walker) -> Walker:
    def walk_nullable_struct(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        is_null = buffer[position] > 127  # a negative int8
        return position + 1 if is_null else walk(buffer, position + 1, edits)

    return walk_nullable_struct


def _tags_walker(known: dict[int, Walker]) -> Walker:
    def walk_tags(buffer: Buffer, position: int, edits: list[Edit]) -> int:
        if buffer[position] == 0:
            return position + 1
        return _walk_tagged_fields(known, buffer, position, edits)

    return walk_tags


def _walk_tagged_fields(known: dict[int, Walker], buffer: Buffer, start: int, edits: list[Edit]) -> int:
    count, after_count = decode_uvarint(buffer, start)
    position = after_count
    kept = 0
    for _ in range(count):
        field_start = position
        tag, size_start = decode_uvarint(buffer, position)
        size, position = decode_uvarint(buffer, size_start)
        end = position + size
        if end > len(buffer):
            raise ValueError(f"a tagged field of {size} bytes where {len(buffer) - position} are left")
        walk = known.get(tag)
        if walk is None:
            edits.append(Edit(field_start, end, b""))
        else:
            kept += 1
            edits_before = len(edits)
            if walk(buffer, position, edits) != end:
                raise ValueError(f"tagged field {tag} does not fill the {size} bytes it claims")
            change = sum(len(edit.replacement) - edit.end + edit.start for edit in edits[edits_before:])
            if change:
                edits.append(Edit(size_start, position, encode_uvarint(size + change)))
        position = end
    if kept != count:
        edits.append(Edit(start, after_count, encode_uvarint(kept)))
    return position
