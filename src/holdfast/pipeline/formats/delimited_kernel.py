"""The scanner of delimited records, in the part of Python that becomes machine code.

It splits a record into cells, checks their UTF-8 and finds their kinds, in the words of `json_layout`, so that columns
are made of them as of JSON's. What is wrong or rare (doubled quotes) is left undecided for the reference.
"""

from __future__ import annotations

from typing import Final

from numba import njit

from holdfast.pipeline.formats import json_layout as layout
from holdfast.pipeline.formats.json_kernel import bounds, equal, skip_number, skip_utf8, skip_word
from holdfast.reader.kernel_source import load_byte, store_byte, store_int32

NEW_LINE: Final = 0x0A
RETURN: Final = 0x0D


@njit
def end_of_quoted(position, end, quote):  # type: ignore[no-untyped-def]
    """The quote that closes a cell whose content begins here; -1: none, or there are doubled ones."""
    while position < end:
        byte = load_byte(position)
        if byte == quote:
            return -1 if position + 1 < end and load_byte(position + 1) == quote else position
        position = position + 1 if byte < 0x80 else skip_utf8(position, end)
        if position < 0:
            break
    return -1


@njit
def end_of_bare(position, end, delimiter, quote):  # type: ignore[no-untyped-def]
    """Where a cell without quotes ends; -1: at something that cannot stand in one."""
    while position < end:
        byte = load_byte(position)
        if byte == delimiter:
            return position
        if byte in (quote, NEW_LINE, RETURN):
            return -1
        position = position + 1 if byte < 0x80 else skip_utf8(position, end)
        if position < 0:
            return -1
    return position


@njit
def kind_of_cell(cell_class, begin, end):  # type: ignore[no-untyped-def]
    """The kind of a cell that is not null; -1: none that its column takes."""
    if cell_class == layout.CELL_TEXT:
        return layout.STRING
    if begin == end:
        return -1
    if cell_class == layout.CELL_BOOLEAN:
        behind, kind = skip_word(begin, end)
        return kind if behind == end and kind != layout.NULL else -1
    behind, kind = skip_number(begin, end)
    if behind == end and (cell_class == layout.CELL_NUMBER or kind == layout.INTEGER):
        return kind
    return layout.STRING if cell_class == layout.CELL_INSTANT else -1


@njit
def walk_record(  # type: ignore[no-untyped-def]
    base, position, end, row, rows, classes, columns, delimiter, quote, null, null_size, begins, ends, kinds
):
    if position < end and load_byte(end - 1) == NEW_LINE:
        end -= 1
        if position < end and load_byte(end - 1) == RETURN:
            end -= 1
    if position >= end:
        return layout.UNDECIDED
    for column in range(columns):
        begin = position
        is_quoted = position < end and load_byte(position) == quote
        if is_quoted:
            begin = position + 1
            cell_end = end_of_quoted(begin, end, quote)
            position = cell_end + 1
        else:
            cell_end = end_of_bare(begin, end, delimiter, quote)
            position = cell_end
        if cell_end < 0:
            return layout.UNDECIDED
        kind = layout.NULL
        if is_quoted or cell_end - begin != null_size or not equal(begin, null, null_size):
            kind = kind_of_cell(load_byte(classes + column), begin, cell_end)
            if kind < 0:
                return layout.UNDECIDED
        place = column * rows + row
        store_int32(begins + place * 4, begin - base)
        store_int32(ends + place * 4, cell_end - base)
        store_byte(kinds + place, kind)
        if column + 1 < columns:
            if position >= end or load_byte(position) != delimiter:
                return layout.UNDECIDED
            position += 1
    return layout.DECIDED if position == end else layout.UNDECIDED


def scan_delimited(  # type: ignore[no-untyped-def]
    base,
    rows,
    row_begins,
    row_ends,
    marks,
    classes,
    columns,
    delimiter,
    quote,
    null,
    null_size,
    begins,
    ends,
    kinds,
):
    """Split records into their cells."""
    undecided = 0
    for row in range(rows):
        if load_byte(marks + row) == layout.NOTHING:
            continue
        position, end = bounds(base, row_begins, row_ends, row)
        mark = walk_record(
            base,
            position,
            end,
            row,
            rows,
            classes,
            columns,
            delimiter,
            quote,
            null,
            null_size,
            begins,
            ends,
            kinds,
        )
        if mark != layout.DECIDED:
            store_byte(marks + row, mark)
            undecided += 1
    return undecided
