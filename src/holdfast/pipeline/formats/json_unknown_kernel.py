"""The text of `_unknown`: members of documents that the schema does not name, in Python that becomes machine code.

Documents have been accepted by `json_kernel.scan`. The text is the reference's: members in their order, without white
space, numbers and strings as they are spelled; one with an escape is left to the reference, which spells it anew.
"""

from __future__ import annotations

from numba import njit

from holdfast.pipeline.formats.json_kernel import find_field, skip_space, skip_string, skip_value
from holdfast.pipeline.formats.json_layout import DECIDED
from holdfast.reader.kernel_source import (
    copy,
    load_byte,
    load_uint32,
    store_byte,
    store_int32,
)


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
        if load_byte(marks + row) == DECIDED:
            position = base + load_uint32(begins + row * 4)
            size = write_members(position, base + load_uint32(ends + row * 4), names, fields, 0, False)
            if size > 0:
                total += size
                store_byte(valid + row, 1)
            elif size < 0:
                store_byte(bad + row, 1)
        store_int32(offsets + (row + 1) * 4, total)
    return total


def gather_unknown(base, rows, begins, ends, _kinds, names, fields, offsets, valid, target):  # type: ignore[no-untyped-def]
    """Write the texts that were measured."""
    for row in range(rows):
        if load_byte(valid + row) == 1:
            position = base + load_uint32(begins + row * 4)
            place = target + load_uint32(offsets + row * 4)
            write_members(position, base + load_uint32(ends + row * 4), names, fields, place, True)
    return 0
