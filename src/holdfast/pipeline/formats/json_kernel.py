"""The scanner of JSON documents, in the part of Python that becomes machine code (see `holdfast.reader.kernel`).

`scan` checks a whole document, its grammar, UTF-8, escapes, surrogates, depth and duplicate keys, and notes where the
fields of a schema are. It decides nothing that is wrong or rare: such rows are marked undecided, and the reference
decodes them from the start. So a mistake here can only be to accept what the reference would not, which is what the
differential tests look for.

Rules: no byte is read at or behind a document's end; slices are 32-bit positions from one base address; output arrays
are `fields x rows`, allocated by the caller, and kinds are zero at the start. What `scan` has proven of a document, the
functions behind it rely on, but for ends of slices, which they compare all the same.
"""

from __future__ import annotations

from typing import Any, Final

from llvmlite import ir  # type: ignore[import-untyped]
from numba import njit, types
from numba.extending import intrinsic

from holdfast.pipeline.formats import json_layout as layout
from holdfast.reader.kernel_source import (
    WORD,
    load_byte,
    load_uint32,
    load_word,
    store_byte,
    store_int32,
    store_word,
)

ONES: Final = 0x0101010101010101
HIGHS: Final = -0x7F7F7F7F7F7F7F80
"""0x80 in every byte, as the signed number it is here."""
SPACES: Final = 0x2020202020202020
QUOTES: Final = 0x2222222222222222
BACKSLASHES: Final = 0x5C5C5C5C5C5C5C5C
HASH_START: Final = -0x340D631B7BDDDCDB
HASH_PRIME: Final = 0x100000001B3

WORD_NULL: Final = int.from_bytes(b"null", "little")
WORD_TRUE: Final = int.from_bytes(b"true", "little")
WORD_ALSE: Final = int.from_bytes(b"alse", "little")


def _trailing_zeros(typing_context: Any, number: Any) -> Any:
    def code(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 1))

    return types.int64(types.int64), code


trailing_zeros: Any = intrinsic(_trailing_zeros)


@njit
def bounds(base, begins, ends, place):  # type: ignore[no-untyped-def]
    """Where the slice of this place begins and ends."""
    return base + load_uint32(begins + place * 4), base + load_uint32(ends + place * 4)


@njit
def skip_space(position, end):  # type: ignore[no-untyped-def]
    while position < end:
        byte = load_byte(position)
        if byte > 0x20 or (byte != 0x20 and byte != 0x0A and byte != 0x0D and byte != 0x09):
            break
        position += 1
    return position


@njit
def hex_digit(byte):  # type: ignore[no-untyped-def]
    if 0x30 <= byte <= 0x39:
        return byte - 0x30
    byte |= 0x20
    if 0x61 <= byte <= 0x66:
        return byte - 0x57
    return -1


@njit
def read_hex(position, end):  # type: ignore[no-untyped-def]
    """The four hexadecimal digits of an escape; -1 when they are not there."""
    if end - position < 4:
        return -1
    value = 0
    for index in range(4):
        digit = hex_digit(load_byte(position + index))
        if digit < 0:
            return -1
        value = value << 4 | digit
    return value


@njit
def skip_escape(position, end):  # type: ignore[no-untyped-def]
    """Behind an escape whose backslash stands at `position`; -1: no escape, or half a surrogate pair."""
    if end - position < 2:
        return -1
    byte = load_byte(position + 1)
    if byte != 0x75:
        known = (
            byte == 0x22
            or byte == 0x5C
            or byte == 0x2F
            or byte == 0x62
            or byte == 0x66
            or byte == 0x6E
            or byte == 0x72
            or byte == 0x74
        )
        return position + 2 if known else -1
    unit = read_hex(position + 2, end)
    if unit < 0 or 0xDC00 <= unit <= 0xDFFF:
        return -1
    position += 6
    if unit < 0xD800 or unit > 0xDBFF:
        return position
    if end - position < 6 or load_byte(position) != 0x5C or load_byte(position + 1) != 0x75:
        return -1
    low = read_hex(position + 2, end)
    return position + 6 if 0xDC00 <= low <= 0xDFFF else -1


@njit
def skip_utf8(position, end):  # type: ignore[no-untyped-def]
    """Behind one character of several bytes; -1 when it is not the shortest form of a Unicode scalar value."""
    lead = load_byte(position)
    if lead < 0xC2 or lead > 0xF4:
        return -1
    size = 2 if lead < 0xE0 else 3 if lead < 0xF0 else 4
    if end - position < size:
        return -1
    second = load_byte(position + 1)
    low = 0xA0 if lead == 0xE0 else 0x90 if lead == 0xF0 else 0x80
    high = 0x9F if lead == 0xED else 0x8F if lead == 0xF4 else 0xBF
    if second < low or second > high:
        return -1
    for index in range(2, size):
        if load_byte(position + index) & 0xC0 != 0x80:
            return -1
    return position + size


@njit
def skip_string(position, end):  # type: ignore[no-untyped-def]
    """The closing quote of a string whose content begins at `position` (-1: none), and whether it has escapes."""
    escaped = False
    while True:
        while end - position >= 8:
            word = load_word(position)
            quote = word ^ QUOTES
            backslash = word ^ BACKSLASHES
            marks = (
                ((quote - ONES) & ~quote)
                | ((backslash - ONES) & ~backslash)
                | ((word - SPACES) & ~word)
                | word
            ) & HIGHS
            if marks != 0:
                position += trailing_zeros(marks) >> 3
                break
            position += 8
        if position >= end:
            return -1, escaped
        byte = load_byte(position)
        if byte == 0x22:
            return position, escaped
        if byte == 0x5C:
            escaped = True
            position = skip_escape(position, end)
        elif byte >= 0x80:
            position = skip_utf8(position, end)
        elif byte < 0x20:
            return -1, escaped
        else:
            position += 1
        if position < 0:
            return -1, escaped


@njit
def is_digit(position, end):  # type: ignore[no-untyped-def]
    return position < end and 0x30 <= load_byte(position) <= 0x39


@njit
def skip_number(position, end):  # type: ignore[no-untyped-def]
    """Behind a number (-1: there is none), and its kind."""
    kind = layout.INTEGER
    if load_byte(position) == 0x2D:
        position += 1
    if not is_digit(position, end):
        return -1, kind
    if load_byte(position) == 0x30:
        position += 1
    else:
        while is_digit(position, end):
            position += 1
    if position < end and load_byte(position) == 0x2E:
        kind = layout.NUMBER
        position += 1
        if not is_digit(position, end):
            return -1, kind
        while is_digit(position, end):
            position += 1
    if position < end and load_byte(position) | 0x20 == 0x65:
        kind = layout.NUMBER
        position += 1
        if position < end and (load_byte(position) == 0x2B or load_byte(position) == 0x2D):
            position += 1
        if not is_digit(position, end):
            return -1, kind
        while is_digit(position, end):
            position += 1
    return position, kind


@njit
def skip_word(position, end):  # type: ignore[no-untyped-def]
    """Behind `null`, `true` or `false` (-1: none of them), and its kind."""
    if end - position >= 4:
        word = load_uint32(position)
        if word == WORD_NULL:
            return position + 4, layout.NULL
        if word == WORD_TRUE:
            return position + 4, layout.TRUE
        if end - position >= 5 and load_byte(position) == 0x66 and load_uint32(position + 1) == WORD_ALSE:
            return position + 5, layout.FALSE
    return -1, layout.NULL


@njit
def skip_scalar(position, end):  # type: ignore[no-untyped-def]
    """Behind a value that is neither object nor array (-1: there is none), and its kind."""
    byte = load_byte(position)
    if byte == 0x22:
        position, escaped = skip_string(position + 1, end)
        if position < 0:
            return -1, layout.STRING
        return position + 1, layout.ESCAPED if escaped else layout.STRING
    if byte == 0x2D or 0x30 <= byte <= 0x39:
        return skip_number(position, end)
    return skip_word(position, end)


@njit
def equal(left, right, size):  # type: ignore[no-untyped-def]
    if size >= 8:
        index = 0
        while index < size - 8:
            if load_word(left + index) != load_word(right + index):
                return False
            index += 8
        return load_word(left + size - 8) == load_word(right + size - 8)
    if size >= 4:
        same = load_uint32(left) == load_uint32(right)
        return same and load_uint32(left + size - 4) == load_uint32(right + size - 4)
    same = True
    for index in range(size):
        same = same and load_byte(left + index) == load_byte(right + index)
    return same


@njit
def hash_key(position, size):  # type: ignore[no-untyped-def]
    value = HASH_START ^ size
    for index in range(size):
        value = (value ^ load_byte(position + index)) * HASH_PRIME
    return value


@njit
def find_field(key, size, names, fields):  # type: ignore[no-untyped-def]
    """The schema's field of that name, -1 for none. `names` holds an address and a size for each."""
    for field in range(fields):
        place = names + field * 2 * WORD
        if load_word(place + WORD) == size and equal(key, load_word(place), size):
            return field
    return -1


@njit
def is_new_key(value, keys, base, top):  # type: ignore[no-untyped-def]
    """Whether a key's hash is none of the open object's, and there is room to remember it."""
    if top - base >= layout.KEYS_MAX or top >= layout.OPEN_KEYS_MAX:
        return False
    for index in range(base, top):
        if load_word(keys + index * WORD) == value:
            return False
    store_word(keys + top * WORD, value)
    return True


@njit
def scan_document(base, position, end, row, rows, names, fields, is_open, begins, ends, kinds, scratch):  # type: ignore[no-untyped-def]
    """Check one document and note its fields; tells whether it is decided."""
    frames = scratch + layout.OPEN_KEYS_MAX * WORD
    position = skip_space(position, end)
    if position >= end or load_byte(position) != 0x7B:
        return layout.UNDECIDED
    position += 1
    depth = 1
    in_object = True
    first = True
    keys_base = 0
    keys_top = 0
    expected = 0
    field = -1
    while depth > 0:
        position = skip_space(position, end)
        if position >= end:
            return layout.UNDECIDED
        byte = load_byte(position)
        # The container ends, or goes on behind a comma.
        if byte == (0x7D if in_object else 0x5D):
            position += 1
            depth -= 1
            if depth == 0:
                break
            if in_object:
                keys_top = keys_base
            frame = frames + depth * layout.FRAME_WORDS * WORD
            in_object = load_word(frame) != 0
            keys_base = load_word(frame + WORD)
            first = False
            if depth == 1 and field >= 0:
                store_int32(ends + (field * rows + row) * 4, position - base)
            continue
        if not first:
            if byte != 0x2C:
                return layout.UNDECIDED
            position = skip_space(position + 1, end)
            if position >= end:
                return layout.UNDECIDED
            byte = load_byte(position)
        first = False
        if in_object:
            if byte != 0x22:
                return layout.UNDECIDED
            key = position + 1
            known = False
            if depth == 1:
                place = names + expected * 2 * WORD
                size = load_word(place + WORD)
                # One word more than the fields stands in `names`, with a size that matches nothing.
                if (
                    0 <= size < end - key
                    and load_byte(key + size) == 0x22
                    and equal(key, load_word(place), size)
                ):
                    known = True
                    field = expected
                    position = key + size
            if not known:
                position, escaped = skip_string(key, end)
                if position < 0 or escaped:
                    return layout.UNDECIDED
                size = position - key
                if depth == 1:
                    field = find_field(key, size, names, fields)
                    known = field >= 0
                    if not known and not is_open:
                        return layout.UNDECIDED
                if not known:
                    if not is_new_key(hash_key(key, size), scratch, keys_base, keys_top):
                        return layout.UNDECIDED
                    keys_top += 1
            if known:
                if load_byte(kinds + field * rows + row) != 0:
                    return layout.UNDECIDED
                expected = field + 1
            position = skip_space(position + 1, end)
            if position >= end or load_byte(position) != 0x3A:
                return layout.UNDECIDED
            position = skip_space(position + 1, end)
            if position >= end:
                return layout.UNDECIDED
            byte = load_byte(position)
        begin = position
        if byte == 0x7B or byte == 0x5B:
            if depth == 1 and field >= 0:
                store_int32(begins + (field * rows + row) * 4, begin - base)
                store_byte(kinds + field * rows + row, layout.OBJECT if byte == 0x7B else layout.ARRAY)
            if depth >= layout.DEPTH_MAX:
                return layout.UNDECIDED
            frame = frames + depth * layout.FRAME_WORDS * WORD
            store_word(frame, 1 if in_object else 0)
            store_word(frame + WORD, keys_base)
            depth += 1
            position += 1
            in_object = byte == 0x7B
            keys_base = keys_top
            first = True
            continue
        position, kind = skip_scalar(position, end)
        if position < 0:
            return layout.UNDECIDED
        if depth == 1 and field >= 0:
            quote = 1 if layout.STRING <= kind <= layout.ESCAPED else 0
            place = field * rows + row
            store_int32(begins + place * 4, begin + quote - base)
            store_int32(ends + place * 4, position - quote - base)
            store_byte(kinds + place, kind)
    return layout.DECIDED if skip_space(position, end) == end else layout.UNDECIDED


def scan(base, rows, row_begins, row_ends, marks, names, fields, is_open, begins, ends, kinds, scratch):  # type: ignore[no-untyped-def]
    """Check documents that must be objects, and note where the fields of the schema are in each."""
    undecided = 0
    for row in range(rows):
        if load_byte(marks + row) == layout.NOTHING:
            continue
        position, end = bounds(base, row_begins, row_ends, row)
        mark = scan_document(
            base, position, end, row, rows, names, fields, is_open, begins, ends, kinds, scratch
        )
        if mark != layout.DECIDED:
            store_byte(marks + row, mark)
            undecided += 1
    return undecided


@njit
def skip_value(position, end):  # type: ignore[no-untyped-def]
    """Behind any value of a document that `scan` has accepted, and its kind; -1 when it does not end here."""
    byte = load_byte(position)
    if byte != 0x7B and byte != 0x5B:
        return skip_scalar(position, end)
    kind = layout.OBJECT if byte == 0x7B else layout.ARRAY
    depth = 0
    while position < end:
        byte = load_byte(position)
        position += 1
        if byte == 0x22:
            position, _ = skip_string(position, end)
            if position < 0:
                break
            position += 1
        elif byte == 0x7B or byte == 0x5B:
            depth += 1
        elif byte == 0x7D or byte == 0x5D:
            depth -= 1
            if depth == 0:
                return position, kind
    return -1, kind


def count_elements(base, cells, begins, ends, kinds, wanted, counts):  # type: ignore[no-untyped-def]
    """How many elements each array has, or members each object; 0 for cells of another kind."""
    total = 0
    for cell in range(cells):
        count = 0
        if load_byte(kinds + cell) == wanted:
            position, end = bounds(base, begins, ends, cell)
            position = skip_space(position + 1, end)
            while position < end and load_byte(position) != 0x5D and load_byte(position) != 0x7D:
                if wanted == layout.OBJECT:
                    position, _ = skip_value(position, end)
                    if position < 0:
                        break
                    position = skip_space(skip_space(position, end) + 1, end)
                if position >= end:
                    break
                position, _ = skip_value(position, end)
                if position < 0:
                    break
                count += 1
                position = skip_space(position, end)
                if position < end and load_byte(position) == 0x2C:
                    position = skip_space(position + 1, end)
        store_int32(counts + cell * 4, count)
        total += count
    return total


def list_elements(  # type: ignore[no-untyped-def]
    base,
    cells,
    begins,
    ends,
    _kinds,
    wanted,
    counts,
    key_begins,
    key_ends,
    value_begins,
    value_ends,
    value_kinds,
):
    """Note the slices of all elements of arrays, or of all keys and values of objects, counted before."""
    place = 0
    for cell in range(cells):
        count = load_uint32(counts + cell * 4)
        if count == 0:
            continue  # Cells of another kind have no slice.
        position, end = bounds(base, begins, ends, cell)
        position = skip_space(position + 1, end)
        for _ in range(count):
            if wanted == layout.OBJECT:
                begin = position + 1
                position, _kind = skip_value(position, end)
                store_int32(key_begins + place * 4, begin - base)
                store_int32(key_ends + place * 4, position - 1 - base)
                position = skip_space(skip_space(position, end) + 1, end)
            begin = position
            position, kind = skip_value(position, end)
            quote = 1 if layout.STRING <= kind <= layout.ESCAPED else 0
            store_int32(value_begins + place * 4, begin + quote - base)
            store_int32(value_ends + place * 4, position - quote - base)
            store_byte(value_kinds + place, kind)
            place += 1
            position = skip_space(position, end)
            if position < end and load_byte(position) == 0x2C:
                position = skip_space(position + 1, end)
    return place
