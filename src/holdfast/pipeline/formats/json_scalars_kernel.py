"""Scalars out of the slices that `json_kernel` found, column by column, in the Python that becomes machine code.

Each function reads `cells` slices with their kinds and writes one value for each, `valid` (1: there is a value) and
`bad` (1: the reference must look at this row: a wrong type, out of range, or written in a way not handled here). Values
of cells that are not valid are zero. All rules of `texts` hold; whatever is not surely within them is bad.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from holdfast.pipeline.formats import json_layout as layout
from holdfast.pipeline.formats.json_kernel import (
    bounds,
    find_field,
    read_hex,
    skip_space,
    skip_string,
    skip_value,
)
from holdfast.reader.kernel_source import (
    WORD,
    copy,
    load_byte,
    load_uint32,
    store_byte,
    store_int32,
    store_word,
)

DAY_MICROS: Final = 86_400_000_000
NO_NUMBER: Final = -1


@njit
def read_digits(position, size):  # type: ignore[no-untyped-def]
    """The number that exactly `size` digits are, -1 when one is none."""
    value = 0
    for index in range(size):
        digit = load_byte(position + index) - 0x30
        if digit < 0 or digit > 9:
            return NO_NUMBER
        value = value * 10 + digit
    return value


@njit
def note(fine, value, cell, values, valid, bad):  # type: ignore[no-untyped-def]
    """The value of a cell, or that the reference must look at it."""
    if fine:
        store_word(values + cell * WORD, value)
        store_byte(valid + cell, 1)
    else:
        store_byte(bad + cell, 1)


def read_integers(base, cells, begins, ends, kinds, values, valid, bad, minimum, maximum):  # type: ignore[no-untyped-def]
    """Integers of at most 19 digits, within the bounds given."""
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind <= layout.NULL:
            continue
        position, end = bounds(base, begins, ends, cell)
        value = 0
        fine = kind == layout.INTEGER
        if fine:
            negative = load_byte(position) == 0x2D
            if negative:
                position += 1
            # Nineteen digits may pass 2**63, which shows as a number below zero, but not 2**64.
            fine = end - position <= layout.DIGITS_MAX + 1
            if fine:
                value = read_digits(position, end - position)
                fine = value >= 0
                value = -value if negative else value
                fine = fine and minimum <= value <= maximum
        note(fine, value, cell, values, valid, bad)
    return 0


def read_numbers(base, cells, begins, ends, kinds, values, valid, bad, exponents):  # type: ignore[no-untyped-def]
    """Numbers as an integer and a power of ten; bad when they have more digits than fit, or are minus zero."""
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind <= layout.NULL:
            continue
        if kind != layout.INTEGER and kind != layout.NUMBER:
            store_byte(bad + cell, 1)
            continue
        position, end = bounds(base, begins, ends, cell)
        negative = load_byte(position) == 0x2D
        if negative:
            position += 1
        value = 0
        exponent = 0
        digits = 0
        in_fraction = False
        fine = True
        while position < end:
            byte = load_byte(position)
            if byte == 0x2E:
                in_fraction = True
            elif byte | 0x20 == 0x65:
                break
            else:
                value = value * 10 + (byte - 0x30)
                if value != 0:
                    digits += 1
                if digits > layout.DIGITS_MAX:
                    fine = False
                    break
                if in_fraction:
                    exponent -= 1
            position += 1
        if fine and position < end:
            position += 1
            below = load_byte(position) == 0x2D
            if below or load_byte(position) == 0x2B:
                position += 1
            power = read_digits(position, end - position) if end - position <= 4 else NO_NUMBER
            fine = power >= 0
            exponent += -power if below else power
        if not fine or (negative and value == 0):
            store_byte(bad + cell, 1)
            continue
        store_word(values + cell * WORD, -value if negative else value)
        store_int32(exponents + cell * 4, exponent)
        store_byte(valid + cell, 1)
    return 0


@njit
def read_day(position):  # type: ignore[no-untyped-def]
    """Days since 1970 of the ten bytes `YYYY-MM-DD`, and whether they are a date."""
    year = read_digits(position, 4)
    month = read_digits(position + 5, 2)
    day = read_digits(position + 8, 2)
    if year < 1 or month < 1 or month > 12 or day < 1:
        return 0, False
    if load_byte(position + 4) != 0x2D or load_byte(position + 7) != 0x2D:
        return 0, False
    leap = year & 3 == 0 and (year % 100 != 0 or year % 400 == 0)
    # 30 and 31 days alternate, and do so anew from August on.
    last = 30 + ((month + (month >> 3)) & 1) if month != 2 else 28 + (1 if leap else 0)
    if day > last:
        return 0, False
    shifted = year - 1 if month <= 2 else year
    era = shifted // 400
    year_of_era = shifted - era * 400
    day_of_year = (153 * (month - 3 if month > 2 else month + 9) + 2) // 5 + day - 1
    days = era * 146_097 + year_of_era * 365 + (year_of_era >> 2) - year_of_era // 100 + day_of_year - 719_468
    return days, True


def read_dates(base, cells, begins, ends, kinds, values, valid, bad):  # type: ignore[no-untyped-def]
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind <= layout.NULL:
            continue
        position, end = bounds(base, begins, ends, cell)
        days = 0
        fine = kind == layout.STRING and end - position == 10
        if fine:
            days, fine = read_day(position)
        note(fine, days, cell, values, valid, bad)
    return 0


@njit
def read_offset(position, end):  # type: ignore[no-untyped-def]
    """Minutes east of Greenwich, and whether `Z`, `+HH`, `+HHMM` or `+HH:MM` is what stands there."""
    size = end - position
    if size == 1 and load_byte(position) == 0x5A:
        return 0, True
    sign = load_byte(position)
    if (sign != 0x2B and sign != 0x2D) or (size != 3 and size != 5 and size != 6):
        return 0, False
    minutes = 0
    if size == 5:
        minutes = read_digits(position + 3, 2)
    elif size == 6:
        minutes = read_digits(position + 4, 2) if load_byte(position + 3) == 0x3A else NO_NUMBER
    hours = read_digits(position + 1, 2)
    if hours < 0 or minutes < 0 or minutes > 59 or hours * 60 + minutes > 18 * 60:
        return 0, False
    total = hours * 60 + minutes
    return -total if sign == 0x2D else total, True


@njit
def read_instant(position, end, with_offset):  # type: ignore[no-untyped-def]
    """Microseconds since 1970 of an ISO 8601 text, and whether it is one."""
    if end - position < 16:
        return 0, False
    days, fine = read_day(position)
    separator = load_byte(position + 10)
    hour = read_digits(position + 11, 2)
    minute = read_digits(position + 14, 2)
    if not fine or (separator != 0x54 and separator != 0x20) or load_byte(position + 13) != 0x3A:
        return 0, False
    if hour < 0 or hour > 23 or minute < 0 or minute > 59:
        return 0, False
    position += 16
    second = 0
    fraction = 0
    if position < end and load_byte(position) == 0x3A:
        if end - position < 3:
            return 0, False
        second = read_digits(position + 1, 2)
        if second < 0 or second > 59:
            return 0, False
        position += 3
        if position < end and load_byte(position) == 0x2E:
            position += 1
            digits = 0
            while position < end and 0x30 <= load_byte(position) <= 0x39:
                if digits < 6:
                    fraction = fraction * 10 + load_byte(position) - 0x30
                digits += 1
                position += 1
            if digits < 1 or digits > 9:
                return 0, False
            while digits < 6:
                fraction *= 10
                digits += 1
    micros = days * DAY_MICROS + ((hour * 60 + minute) * 60 + second) * 1_000_000 + fraction
    if not with_offset:
        return micros, position == end
    if position >= end:
        return 0, False
    minutes, fine = read_offset(position, end)
    micros -= minutes * 60_000_000
    return micros, fine and layout.INSTANT_MIN_MS * 1000 <= micros < layout.INSTANT_END_MS * 1000


def read_instants(base, cells, begins, ends, kinds, values, valid, bad, with_offset):  # type: ignore[no-untyped-def]
    """Timestamps: ISO 8601 with an offset or integers of milliseconds; or without an offset, and no integers."""
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind <= layout.NULL:
            continue
        position, end = bounds(base, begins, ends, cell)
        micros = 0
        fine = False
        if kind == layout.STRING:
            micros, fine = read_instant(position, end, with_offset)
        elif kind == layout.INTEGER and with_offset:
            negative = load_byte(position) == 0x2D
            if negative:
                position += 1
            if end - position <= layout.DIGITS_MAX:
                millis = read_digits(position, end - position)
                millis = -millis if negative else millis
                fine = layout.INSTANT_MIN_MS <= millis < layout.INSTANT_END_MS
                micros = millis * 1000
        note(fine, micros, cell, values, valid, bad)
    return 0


@njit
def unescape(position, end, target, is_writing):  # type: ignore[no-untyped-def]
    """Write what a string means, or only count its bytes; its escapes are whole, as `scan` has seen."""
    begin = target
    while position < end:
        byte = load_byte(position)
        if byte != 0x5C:
            if is_writing:
                store_byte(target, byte)
            target += 1
            position += 1
            continue
        byte = load_byte(position + 1)
        if byte != 0x75:
            if byte == 0x62:
                byte = 0x08
            elif byte == 0x66:
                byte = 0x0C
            elif byte == 0x6E:
                byte = 0x0A
            elif byte == 0x72:
                byte = 0x0D
            elif byte == 0x74:
                byte = 0x09
            if is_writing:
                store_byte(target, byte)
            target += 1
            position += 2
            continue
        unit = read_hex(position + 2, end)
        position += 6
        if 0xD800 <= unit <= 0xDBFF:
            unit = 0x10000 + ((unit & 0x3FF) << 10) + (read_hex(position + 2, end) & 0x3FF)
            position += 6
        size = 1 if unit < 0x80 else 2 if unit < 0x800 else 3 if unit < 0x10000 else 4
        if is_writing:
            if size == 1:
                store_byte(target, unit)
            else:
                lead = 0xC0 if size == 2 else 0xE0 if size == 3 else 0xF0
                store_byte(target, lead | unit >> 6 * (size - 1))
                for index in range(1, size):
                    store_byte(target + index, 0x80 | (unit >> 6 * (size - 1 - index) & 0x3F))
        target += size
    return target - begin


def measure_strings(base, cells, begins, ends, kinds, offsets, valid, bad):  # type: ignore[no-untyped-def]
    """Where each string ends in the column's bytes; the total is returned."""
    total = 0
    store_int32(offsets, 0)
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind == layout.STRING:
            total += load_uint32(ends + cell * 4) - load_uint32(begins + cell * 4)
            store_byte(valid + cell, 1)
        elif kind == layout.ESCAPED:
            position, end = bounds(base, begins, ends, cell)
            total += unescape(position, end, 0, False)
            store_byte(valid + cell, 1)
        elif kind > layout.NULL:
            store_byte(bad + cell, 1)
        store_int32(offsets + (cell + 1) * 4, total)
    return total


def gather_strings(base, cells, begins, ends, kinds, offsets, target):  # type: ignore[no-untyped-def]
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        place = target + load_uint32(offsets + cell * 4)
        position, end = bounds(base, begins, ends, cell)
        if kind == layout.STRING:
            copy(place, position, end - position)
        elif kind == layout.ESCAPED:
            unescape(position, end, place, True)
    return 0


@njit
def base64_digit(byte):  # type: ignore[no-untyped-def]
    if 0x41 <= byte <= 0x5A:
        return byte - 0x41
    if 0x61 <= byte <= 0x7A:
        return byte - 0x61 + 26
    if 0x30 <= byte <= 0x39:
        return byte - 0x30 + 52
    if byte == 0x2B:
        return 62
    return 63 if byte == 0x2F else -1


def measure_base64(base, cells, begins, ends, kinds, offsets, valid, bad):  # type: ignore[no-untyped-def]
    """As `measure_strings`, for the bytes that Base64 stands for."""
    total = 0
    store_int32(offsets, 0)
    for cell in range(cells):
        kind = load_byte(kinds + cell)
        if kind > layout.NULL:
            begin, end = bounds(base, begins, ends, cell)
            size = end - begin
            fine = kind == layout.STRING and size & 3 == 0
            if fine and size > 0:
                padding = 0
                if load_byte(end - 1) == 0x3D:
                    padding = 2 if load_byte(end - 2) == 0x3D else 1
                for place in range(begin, end - padding):
                    fine = fine and base64_digit(load_byte(place)) >= 0
                # Bits that stand for nothing: whether they may be set is for the reference to say.
                if fine and padding > 0:
                    rest = base64_digit(load_byte(end - padding - 1))
                    fine = rest & (0x0F if padding == 2 else 0x03) == 0
                if fine:
                    total += (size >> 2) * 3 - padding
            store_byte(valid + cell if fine else bad + cell, 1)
        store_int32(offsets + (cell + 1) * 4, total)
    return total


def gather_base64(base, cells, begins, _ends, _kinds, offsets, target):  # type: ignore[no-untyped-def]
    for cell in range(cells):
        place = target + load_uint32(offsets + cell * 4)
        left = load_uint32(offsets + (cell + 1) * 4) - load_uint32(offsets + cell * 4)
        position = base + load_uint32(begins + cell * 4)
        while left > 0:
            bits = 0
            for index in range(4):
                digit = base64_digit(load_byte(position + index))
                bits = bits << 6 | (digit if digit > 0 else 0)
            store_byte(place, bits >> 16)
            if left > 1:
                store_byte(place + 1, bits >> 8 & 0xFF)
            if left > 2:
                store_byte(place + 2, bits & 0xFF)
            place += 3
            left -= 3
            position += 4
    return 0


# ------------------------------------------------------------------------ the text of `_unknown`
#
# Members of documents that the schema does not name. Documents have been accepted by `json_kernel.scan`. The text is
# the reference's: members in their order, without white space, numbers and strings as they are spelled; one with an
# escape is left to the reference, which spells it anew.


@njit
def compact(position, end, target, is_writing):  # type: ignore[no-untyped-def]
    """Write a value without its white space, or only count its bytes; -1: it holds an escape."""
    begin = target
    in_string = False
    while position < end:
        byte = load_byte(position)
        position += 1
        if in_string:
            if byte == 0x5C:
                return -1
            in_string = byte != 0x22
        elif byte == 0x22:
            in_string = True
        elif byte <= 0x20:
            continue
        if is_writing:
            store_byte(target, byte)
        target += 1
    return target - begin


@njit
def write_members(position, end, names, fields, target, is_writing):  # type: ignore[no-untyped-def]
    """The object of a document's unknown members, or only its size: 0 when there are none, -1 when one is escaped."""
    size = 0
    position = skip_space(skip_space(position, end) + 1, end)
    while position < end and load_byte(position) != 0x7D:
        key = position + 1
        key_end, _ = skip_string(key, end)
        if key_end < 0:
            return -1
        key_size = key_end - key
        position = skip_space(skip_space(key_end + 1, end) + 1, end)
        if position >= end:
            return -1
        begin = position
        position, _ = skip_value(position, end)
        if position < 0:
            return -1
        if find_field(key, key_size, names, fields) < 0:
            if is_writing:
                store_byte(target + size, 0x7B if size == 0 else 0x2C)
                copy(target + size + 1, key - 1, key_size + 2)
                store_byte(target + size + key_size + 3, 0x3A)
            size += key_size + 4
            value_size = compact(begin, position, target + size, is_writing)
            if value_size < 0:
                return -1
            size += value_size
        position = skip_space(position, end)
        if position < end and load_byte(position) == 0x2C:
            position = skip_space(position + 1, end)
    if size > 0:
        if is_writing:
            store_byte(target + size, 0x7D)
        size += 1
    return size


def measure_unknown(base, rows, begins, ends, marks, names, fields, offsets, valid, bad):  # type: ignore[no-untyped-def]
    """Where each row's text ends; the total is returned."""
    total = 0
    store_int32(offsets, 0)
    for row in range(rows):
        if load_byte(marks + row) == layout.DECIDED:
            position, end = bounds(base, begins, ends, row)
            size = write_members(position, end, names, fields, 0, False)
            if size > 0:
                total += size
                store_byte(valid + row, 1)
            elif size < 0:
                store_byte(bad + row, 1)
        store_int32(offsets + (row + 1) * 4, total)
    return total


def gather_unknown(base, rows, begins, ends, _marks, names, fields, offsets, target):  # type: ignore[no-untyped-def]
    """Write the texts that were measured."""
    for row in range(rows):
        place, place_end = bounds(target, offsets, offsets + 4, row)
        if place < place_end:
            position, end = bounds(base, begins, ends, row)
            write_members(position, end, names, fields, place, True)
    return 0
