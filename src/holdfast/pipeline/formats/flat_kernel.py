"""Flat Avro and Protobuf records, walked by a table of steps, in the part of Python that becomes machine code.

For every column and row a value of 64 bits is written, or, for text and bytes, a slice; kinds tell which rows have one
(`STRING`), have none (`NULL`) or do not name it (`ABSENT`). As in `json_kernel`, what is wrong or rare is left
undecided for the reference, no byte is read at or behind a record's end, and slices are positions from one base.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from holdfast.pipeline.formats import flat_layout as layout
from holdfast.pipeline.formats.json_kernel import HIGHS, bounds, skip_utf8, trailing_zeros
from holdfast.pipeline.formats.json_layout import DECIDED, NOTHING, NULL, STRING, UNDECIDED
from holdfast.reader.kernel_source import (
    WORD,
    load_byte,
    load_uint32,
    load_word,
    store_byte,
    store_int32,
    store_word,
)

MAX_63: Final = 0x7FFFFFFFFFFFFFFF
LOW_32: Final = 0xFFFFFFFF
MESSAGE: Final = 2
"""Protobuf's wire type of text, bytes and messages."""


@njit
def read_varint(position, end):  # type: ignore[no-untyped-def]
    """64 bits in groups of seven, and the position behind them; -1: there is no such number."""
    value = 0
    shift = 0
    while position < end and shift <= 63:
        byte = load_byte(position)
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value, position) if shift < 63 or byte <= 1 else (0, -1)
        shift += 7
    return 0, -1


@njit
def unzigzag(value):  # type: ignore[no-untyped-def]
    return ((value >> 1) & MAX_63) ^ -(value & 1)


@njit
def is_text(position, end):  # type: ignore[no-untyped-def]
    """Whether these bytes are UTF-8."""
    while position < end:
        while end - position >= 8:
            high = load_word(position) & HIGHS
            if high != 0:
                position += trailing_zeros(high) >> 3
                break
            position += 8
        if position < end:
            position = position + 1 if load_byte(position) < 0x80 else skip_utf8(position, end)
            if position < 0:
                return False
    return True


@njit
def read_big_integer(position, size):  # type: ignore[no-untyped-def]
    value = -1 if size > 0 and load_byte(position) >= 0x80 else 0
    for index in range(size):
        value = value << 8 | load_byte(position + index)
    return value


@njit
def read_number(code, position, end):  # type: ignore[no-untyped-def]
    """A number of any code but those with a length, and the position behind it; -1: it is not there, or rare."""
    if code == layout.FOUR_BYTES:
        return (load_uint32(position), position + 4) if end - position >= 4 else (0, -1)
    if code == layout.EIGHT_BYTES:
        return (load_word(position), position + 8) if end - position >= 8 else (0, -1)
    if code == layout.BOOLEAN:
        if position < end and load_byte(position) <= 1:
            return load_byte(position), position + 1
        return 0, -1
    value, position = read_varint(position, end)
    if code == layout.ZIGZAG:
        value = unzigzag(value)
    elif code == layout.ZIGZAG_32:
        value = unzigzag(value & LOW_32)
    elif code == layout.TRUTH:
        value = 1 if value != 0 else 0
    elif code == layout.UNSIGNED_32:
        value &= LOW_32
    elif code == layout.SIGNED_32:
        value = ((value & LOW_32) ^ 0x80000000) - 0x80000000
    return value, position


@njit
def read_instant(position, end):  # type: ignore[no-untyped-def]
    """Microseconds of a message with seconds (1) and nanoseconds (2), and whether it is one in good order."""
    seconds = 0
    nanos = 0
    while position < end:
        tag = load_byte(position)
        if tag != 0x08 and tag != 0x10:
            return 0, False
        value, position = read_varint(position + 1, end)
        if position < 0:
            return 0, False
        if tag == 0x08:
            seconds = value
        else:
            nanos = ((value & LOW_32) ^ 0x80000000) - 0x80000000
    fine = -62_135_596_800 <= seconds < 253_402_300_800 and 0 <= nanos < 1_000_000_000
    return seconds * 1_000_000 + nanos // 1000 if fine else 0, fine


@njit
def read_sized(code, base, position, size, end, place, values, begins, ends):  # type: ignore[no-untyped-def]
    """Note a field of `size` bytes; `place` below zero: only check it. The position behind it, -1: wrong or rare."""
    if size < 0 or size > end - position:
        return -1
    value = 0
    if code == layout.TEXT:
        if not is_text(position, position + size):
            return -1
    elif code == layout.BIG_INTEGER:
        if size > 8:
            return -1
        value = read_big_integer(position, size)
    elif code == layout.INSTANT:
        value, fine = read_instant(position, position + size)
        if not fine:
            return -1
    if place >= 0:
        store_word(values + place * WORD, value)
        store_int32(begins + place * 4, position - base)
        store_int32(ends + place * 4, position + size - base)
    return position + size


@njit
def walk_avro(base, position, end, row, rows, steps, count, values, begins, ends, kinds):  # type: ignore[no-untyped-def]
    for step in range(count):
        entry = steps + step * layout.STEP_WORDS * WORD
        code = load_word(entry)
        column = load_word(entry + 1 * WORD)
        null_branch = load_word(entry + 2 * WORD)
        place = column * rows + row if column >= 0 else -1
        if null_branch != layout.NO_UNION:
            branch, position = read_varint(position, end)
            branch = unzigzag(branch)
            if position < 0 or branch < 0 or branch > 1:
                return UNDECIDED
            if branch == null_branch:
                if place >= 0:
                    store_byte(kinds + place, NULL)
                continue
        if code in (layout.TEXT, layout.BYTES, layout.BIG_INTEGER):
            size, position = read_varint(position, end)
            size = unzigzag(size)
            if position < 0:
                return UNDECIDED
            position = read_sized(code, base, position, size, end, place, values, begins, ends)
        elif code == layout.FIXED:
            size = load_word(entry + 3 * WORD)
            position = read_sized(code, base, position, size, end, place, values, begins, ends)
        else:
            value, position = read_number(code, position, end)
            symbols = load_word(entry + 3 * WORD)
            if symbols > 0 and (value < 0 or value >= symbols):
                return UNDECIDED
            if place >= 0:
                store_word(values + place * WORD, value)
        if position < 0:
            return UNDECIDED
        if place >= 0:
            store_byte(kinds + place, STRING)
    return DECIDED if position == end else UNDECIDED


@njit
def find_step(number, steps, count, guess):  # type: ignore[no-untyped-def]
    """The step of a field number, looked for where it is expected first; -1 for none."""
    for turn in range(count):
        step = guess + turn
        if step >= count:
            step -= count
        if load_word(steps + (step * layout.STEP_WORDS + 2) * WORD) == number:
            return step
    return -1


@njit
def skip_unknown(wire_type, position, end):  # type: ignore[no-untyped-def]
    """Behind a field that the schema does not name; -1: cut short, or a group."""
    if wire_type == 0:
        _, position = read_varint(position, end)
        return position
    if wire_type == 1 or wire_type == 5:
        size = 8 if wire_type == 1 else 4
        return position + size if end - position >= size else -1
    if wire_type != MESSAGE:
        return -1
    size, position = read_varint(position, end)
    if position < 0 or size < 0 or size > end - position:
        return -1
    return position + size


@njit
def walk_protobuf(base, position, end, row, rows, steps, count, is_open, values, begins, ends, kinds):  # type: ignore[no-untyped-def]
    guess = 0
    while position < end:
        tag, position = read_varint(position, end)
        number = tag >> 3
        wire_type = tag & 7
        if position < 0 or number <= 0 or tag > LOW_32:
            return UNDECIDED
        step = find_step(number, steps, count, guess)
        if step < 0:
            position = skip_unknown(wire_type, position, end) if is_open else -1
            if position < 0:
                return UNDECIDED
            continue
        guess = step + 1 if step + 1 < count else 0
        entry = steps + step * layout.STEP_WORDS * WORD
        code = load_word(entry)
        column = load_word(entry + 1 * WORD)
        if load_word(entry + 3 * WORD) != wire_type or (column < 0 and not is_open):
            return UNDECIDED
        place = column * rows + row if column >= 0 else -1
        if wire_type == MESSAGE:
            size, position = read_varint(position, end)
            # A message that comes twice is merged, not replaced.
            if position < 0 or (code == layout.INSTANT and place >= 0 and load_byte(kinds + place) != 0):
                return UNDECIDED
            position = read_sized(code, base, position, size, end, place, values, begins, ends)
        else:
            value, position = read_number(code, position, end)
            if place >= 0:
                store_word(values + place * WORD, value)
        if position < 0:
            return UNDECIDED
        if place >= 0:
            store_byte(kinds + place, STRING)
    return DECIDED


def scan_flat(  # type: ignore[no-untyped-def]
    base, rows, row_begins, row_ends, marks, steps, count, is_protobuf, is_open, values, begins, ends, kinds
):
    """Walk records of one schema. Avro's must end where their last fields end; of Protobuf's fields, which are scalars
    and instants only, the last counts where one comes twice."""
    undecided = 0
    for row in range(rows):
        if load_byte(marks + row) == NOTHING:
            continue
        position, end = bounds(base, row_begins, row_ends, row)
        mark = UNDECIDED
        if is_protobuf:
            mark = walk_protobuf(
                base, position, end, row, rows, steps, count, is_open, values, begins, ends, kinds
            )
        elif position < end:
            mark = walk_avro(base, position, end, row, rows, steps, count, values, begins, ends, kinds)
        if mark != DECIDED:
            store_byte(marks + row, mark)
            undecided += 1
    return undecided


@njit
def check_sized(code, position, end):  # type: ignore[no-untyped-def]
    size, position = read_varint(position, end)
    size = unzigzag(size)
    if position < 0 or size < 0 or size > end - position:
        return -1
    if code == layout.TEXT and not is_text(position, position + size):
        return -1
    return position + size


@njit
def check_scalar(code, first, count, position, end):  # type: ignore[no-untyped-def]
    """Behind one value that is neither record, union, array nor map; -1: these bytes are none."""
    if code == layout.EMPTY:
        return position
    if code in (layout.TEXT, layout.BYTES):
        return check_sized(code, position, end)
    if code == layout.FIXED:
        return position + first if first <= end - position else -1
    if code == layout.BOOLEAN:
        return position + 1 if position < end else -1
    value, position = read_number(layout.ZIGZAG if code == layout.ENUM else code, position, end)
    if code == layout.ENUM and (value < 0 or value >= count):
        return -1
    return position


@njit
def next_block(position, end):  # type: ignore[no-untyped-def]
    """How many items a block of an array or map has, 0 at the end of them, and the position of the first; -1: none."""
    left, position = read_varint(position, end)
    left = unzigzag(left)
    if position >= 0 and left < 0:
        _, position = read_varint(position, end)
        left = -left
    return left, position if left >= 0 else -1


@njit
def check_value(nodes, children, position, end, frames):  # type: ignore[no-untyped-def]
    """Behind one value of a schema, whose first node it is; -1: these bytes are none.

    Open records, arrays and maps stand in `frames`: the node, the next field or the items left, where the item began.
    """
    node = 0
    depth = 0
    is_done = False
    while True:
        if is_done:
            if depth == 0:
                return position
            frame = frames + (depth - 1) * layout.CHECK_WORDS * WORD
            node = load_word(frame)
            progress = load_word(frame + 1 * WORD)
        place = nodes + node * layout.CHECK_WORDS * WORD
        code = load_word(place)
        first = load_word(place + 1 * WORD)
        count = load_word(place + 2 * WORD)
        if not is_done:
            if code == layout.UNION:
                choice, position = read_number(layout.ZIGZAG, position, end)
                if position < 0 or choice < 0 or choice >= count:
                    return -1
                node = load_word(children + (first + choice) * WORD)
                continue
            is_done = True
            if code in (layout.RECORD, layout.ARRAY, layout.MAP):
                if depth >= layout.CHECK_DEPTH_MAX:
                    return -1
                frame = frames + depth * layout.CHECK_WORDS * WORD
                store_word(frame, node)
                store_word(frame + 1 * WORD, 0)
                store_word(frame + 2 * WORD, -1)
                depth += 1
            else:
                position = check_scalar(code, first, count, position, end)
                if position < 0:
                    return -1
            continue
        if code == layout.RECORD:
            if progress == count:
                depth -= 1
                continue
            store_word(frame + 1 * WORD, progress + 1)
            node = load_word(children + (first + progress) * WORD)
            is_done = False
            continue
        # Items without bytes could be claimed in any number.
        if position <= load_word(frame + 2 * WORD):
            return -1
        if progress == 0:
            progress, position = next_block(position, end)
            if position < 0:
                return -1
            if progress == 0:
                depth -= 1
                continue
        store_word(frame + 1 * WORD, progress - 1)
        store_word(frame + 2 * WORD, position)
        if code == layout.MAP:
            position = check_sized(layout.TEXT, position, end)
            if position < 0:
                return -1
        node = first
        is_done = False


def check_avro(base, rows, row_begins, row_ends, marks, nodes, children, frames):  # type: ignore[no-untyped-def]
    """Whether records are exactly of a schema, nested or not; the others are marked undecided."""
    undecided = 0
    for row in range(rows):
        if load_byte(marks + row) == NOTHING:
            continue
        position, end = bounds(base, row_begins, row_ends, row)
        if position >= end or check_value(nodes, children, position, end, frames) != end:
            store_byte(marks + row, UNDECIDED)
            undecided += 1
    return undecided
