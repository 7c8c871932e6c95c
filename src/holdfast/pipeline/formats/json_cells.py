"""Columns out of slices of JSON documents: the calls of the machine code, and what numpy and Arrow add to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.formats import json_layout as layout
from holdfast.pipeline.formats.base import Decoded
from holdfast.pipeline.formats.machine import Machine, load
from holdfast.pipeline.formats.types import INTEGER_BITS, Column, Type

Ints = npt.NDArray[np.int32]
Bytes = npt.NDArray[np.uint8]

EXACT_MAX: Final = 1 << 53
EXACT_POWER: Final = 22
"""A double holds integers up to 2**53 and powers of ten up to 10**22 exactly: one division then rounds once."""
HALVES: Final = np.uint64((1 << 29) - 1)
HALF: Final = np.uint64(1 << 28)
"""The bits of a double's fraction that a single does not have, and what they are in the middle between two singles."""
SINGLE_MIN: Final = 2.0**-126
"""Below it singles have fewer bits."""
POWERS: Final = np.array([float(10**power) for power in range(EXACT_POWER + 1)])
INTEGER_POWERS: Final = np.array([10**power for power in range(layout.DIGITS_MAX + 1)], np.int64)


class Document:
    """The bytes that all slices are positions in, and the mark of every record."""

    def __init__(self, base: int, rows: int) -> None:
        self.base = base
        self.marks: Bytes = np.zeros(rows, np.uint8)
        self.machine: Machine = load()
        self.scratch = np.empty(layout.SCRATCH_WORDS, np.int64)


class Cells:
    """Slices of one column with their kinds, and the record each belongs to."""

    __slots__ = ("begins", "document", "ends", "kinds", "owners")

    def __init__(
        self, document: Document, begins: Ints, ends: Ints, kinds: Bytes | None, owners: Ints
    ) -> None:
        self.document = document
        self.begins = np.ascontiguousarray(begins)
        self.ends = np.ascontiguousarray(ends)
        self.kinds = np.full(len(begins), layout.OBJECT, np.uint8) if kinds is None else kinds
        self.owners = owners

    def __len__(self) -> int:
        return len(self.begins)

    @property
    def places(self) -> tuple[int, int, int, int, int]:
        """The first parameters of every function that reads cells."""
        addresses = (self.begins.ctypes.data, self.ends.ctypes.data, self.kinds.ctypes.data)
        return self.document.base, len(self), *addresses

    def undecided(self, cells: npt.NDArray[np.bool_]) -> None:
        """Send the records of these cells to the reference."""
        if cells.any():
            self.document.marks[self.owners[cells]] = layout.UNDECIDED

    def only(self, *kinds: int) -> npt.NDArray[np.bool_]:
        """Which cells are of the kinds; those that are of another, and not null, are undecided."""
        wanted: npt.NDArray[np.bool_] = self.kinds == kinds[0]
        for kind in kinds[1:]:
            wanted = wanted | (self.kinds == kind)
        self.undecided(~wanted & (self.kinds > layout.NULL))
        return wanted


def packed(valid: npt.NDArray[Any]) -> pa.Buffer | None:
    """A validity bitmap; nothing when all are valid."""
    return None if valid.all() else pa.py_buffer(np.packbits(valid, bitorder="little"))


def from_values(kind: pa.DataType, values: npt.NDArray[Any], valid: npt.NDArray[Any]) -> pa.Array:
    return pa.Array.from_buffers(kind, len(values), [packed(valid), pa.py_buffer(values)])


class Schema:
    """The fields of an object, ready to be looked for."""

    def __init__(self, fields: Sequence[Column], is_open: bool, is_open_inside: bool | None = None) -> None:
        """`is_open`: fields it does not name are passed over, here and (unless told otherwise) in its structs."""
        self.is_open = is_open
        self.fields = tuple(fields)
        self._names = [each.name.encode("utf-8") for each in fields]
        self._text = np.frombuffer(b"".join(self._names) + bytes(8), np.uint8).copy()
        self._table = np.empty((len(fields) + 1, 2), np.int64)
        begin = self._text.ctypes.data
        for place, name in enumerate(self._names):
            # A key that needs escapes is never looked up here: rows with such keys are undecided.
            plain = not any(byte < 0x20 or byte in b'"\\' for byte in name)
            self._table[place] = begin, len(name) if plain else -1
            begin += len(name)
        self._table[-1] = 0, -1
        inside = is_open if is_open_inside is None else is_open_inside
        self._readers = [reader_of(each.type, inside) for each in fields]

    def read(self, cells: Cells, marks: Bytes) -> list[pa.Array]:
        """A column for each field; `marks` say which cells hold an object, and which of them get undecided."""
        document = cells.document
        rows, fields = len(cells), len(self.fields)
        begins = np.empty((fields, rows), np.int32)
        ends = np.empty((fields, rows), np.int32)
        kinds = np.zeros((fields, rows), np.uint8)
        undecided = document.machine.scan(
            document.base,
            rows,
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            marks.ctypes.data,
            self._table.ctypes.data,
            fields,
            self.is_open,
            begins.ctypes.data,
            ends.ctypes.data,
            kinds.ctypes.data,
            document.scratch.ctypes.data,
        )
        if undecided:
            wrong = marks == layout.UNDECIDED
            kinds[:, wrong] = layout.NULL
            cells.undecided(wrong)
        columns = []
        for place, (field, reader) in enumerate(zip(self.fields, self._readers, strict=True)):
            column = Cells(document, begins[place], ends[place], kinds[place], cells.owners)
            if field.required:
                column.undecided((column.kinds <= layout.NULL) & (marks == layout.DECIDED))
            columns.append(reader(column))
        return columns

    def unknown(self, cells: Cells) -> pa.Array:
        """The texts of what the fields leave over of each row that is decided, null where that is nothing."""
        document, machine = cells.document, cells.document.machine
        rows = (
            document.base,
            len(cells),
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            document.marks.ctypes.data,
            self._table.ctypes.data,
            len(self.fields),
        )
        return _texts(cells, rows, machine.measure_unknown, machine.gather_unknown, pa.string())


Reader = Callable[[Cells], pa.Array]


def reader_of(kind: Type, is_open: bool) -> Reader:
    if kind.kind in INTEGER_BITS:
        return _integers(kind)
    if kind.kind == "decimal":
        return _decimals(kind)
    if kind.kind == "array":
        return _arrays(kind, is_open)
    if kind.kind == "map":
        return _maps(kind, is_open)
    if kind.kind == "struct":
        return _structs(kind, is_open)
    readers: dict[str, Reader] = {
        "boolean": _booleans,
        "string": partial(gathered, kind=pa.string()),
        "binary": _binaries,
        "double": _doubles,
        "float": _floats,
        "date": _dates,
        "timestamp": partial(_instants, kind=pa.timestamp("us", tz="UTC"), with_offset=True),
        "timestamp_ntz": partial(_instants, kind=pa.timestamp("us"), with_offset=False),
    }
    return readers[kind.kind]


class _Output:
    """What a function of the machine code fills: a value for each cell, whether it is valid, whether it is bad."""

    def __init__(self, cells: Cells) -> None:
        self.cells = cells
        self.values = np.zeros(len(cells), np.int64)
        self.valid = np.zeros(len(cells), np.uint8)
        self.bad = np.zeros(len(cells), np.uint8)

    @property
    def places(self) -> tuple[int, ...]:
        return *self.cells.places, self.values.ctypes.data, self.valid.ctypes.data, self.bad.ctypes.data

    def finish(self) -> None:
        self.cells.undecided(self.bad != 0)


def _integers(kind: Type) -> Reader:
    bits = INTEGER_BITS[kind.kind]
    arrow, width = kind.arrow, np.dtype(f"int{bits}")

    def read(cells: Cells) -> pa.Array:
        output = _Output(cells)
        limit = 1 << (bits - 1)
        cells.document.machine.read_integers(*output.places, -limit, limit - 1)
        output.finish()
        return from_values(arrow, output.values.astype(width, copy=False), output.valid)

    return read


def _booleans(cells: Cells) -> pa.Array:
    valid = cells.only(layout.TRUE, layout.FALSE)
    values = np.packbits(cells.kinds == layout.TRUE, bitorder="little")
    return pa.Array.from_buffers(pa.bool_(), len(cells), [packed(valid), pa.py_buffer(values)])


def _texts(
    cells: Cells,
    places: tuple[int, ...],
    measure: Callable[..., int],
    gather: Callable[..., int],
    kind: pa.DataType,
) -> pa.Array:
    """Strings or binary of these places: `measure` tells where each ends, `gather` writes them."""
    offsets = np.empty(len(cells) + 1, np.int32)
    valid = np.zeros(len(cells), np.uint8)
    bad = np.zeros(len(cells), np.uint8)
    total = measure(*places, offsets.ctypes.data, valid.ctypes.data, bad.ctypes.data)
    cells.undecided(bad != 0)
    content = np.empty(total, np.uint8)
    gather(*places, offsets.ctypes.data, content.ctypes.data)
    buffers = [packed(valid), pa.py_buffer(offsets), pa.py_buffer(content)]
    return pa.Array.from_buffers(kind, len(cells), buffers)


def gathered(cells: Cells, kind: pa.DataType) -> pa.Array:
    """The slices themselves, as strings or binary."""
    machine = cells.document.machine
    return _texts(cells, cells.places, machine.measure_strings, machine.gather_strings, kind)


def _binaries(cells: Cells) -> pa.Array:
    machine = cells.document.machine
    return _texts(cells, cells.places, machine.measure_base64, machine.gather_base64, pa.binary())


def _numbers(cells: Cells) -> tuple[_Output, Ints]:
    output = _Output(cells)
    exponents = np.zeros(len(cells), np.int32)
    cells.document.machine.read_numbers(*output.places, exponents.ctypes.data)
    return output, exponents


def _as_text(cells: Cells, places: npt.NDArray[np.intp]) -> pa.Array:
    """Numbers as they are spelled, for Arrow's correctly rounding reader: they need more than one exact operation."""
    few = Cells(
        cells.document,
        cells.begins[places],
        cells.ends[places],
        np.full(len(places), layout.STRING, np.uint8),
        cells.owners[places],
    )
    return gathered(few, pa.string())


def _as_doubles(cells: Cells) -> tuple[npt.NDArray[np.float64], npt.NDArray[Any]]:
    output, exponents = _numbers(cells)
    values = output.values.astype(np.float64)
    small = np.abs(output.values) <= EXACT_MAX
    small &= np.abs(exponents) <= EXACT_POWER
    below = POWERS[np.clip(-exponents, 0, EXACT_POWER)]
    above = POWERS[np.clip(exponents, 0, EXACT_POWER)]
    values *= above
    values /= below
    is_number = cells.only(layout.INTEGER, layout.NUMBER)
    long = is_number & ~(small & (output.valid != 0))
    if long.any():
        places = np.flatnonzero(long)
        values[places] = _as_text(cells, places).cast(pa.float64()).to_numpy(zero_copy_only=False)
        cells.undecided(np.isinf(values))
    return values, is_number


def _doubles(cells: Cells) -> pa.Array:
    values, valid = _as_doubles(cells)
    return from_values(pa.float64(), values, valid)


def _floats(cells: Cells) -> pa.Array:
    values, valid = _as_doubles(cells)
    with np.errstate(over="ignore"):
        singles = values.astype(np.float32)
    # A double just between two singles may have been rounded to there: which one is nearer, the spelling says.
    is_few = (values != 0) & (np.abs(values) < SINGLE_MIN)
    middle = valid & (is_few | ((values.view(np.uint64) & HALVES) == HALF))
    if middle.any():
        places = np.flatnonzero(middle)
        singles[places] = _as_text(cells, places).cast(pa.float32()).to_numpy(zero_copy_only=False)
    cells.undecided(np.isinf(singles))
    return from_values(pa.float32(), singles, valid)


def _decimals(kind: Type) -> Reader:
    arrow = kind.arrow

    def read(cells: Cells) -> pa.Array:
        output, exponents = _numbers(cells)
        values = output.values
        shift = exponents + kind.scale
        up = INTEGER_POWERS[np.clip(shift, 0, layout.DIGITS_MAX)]
        down = INTEGER_POWERS[np.clip(-shift, 0, layout.DIGITS_MAX)]
        limit = 10 ** min(kind.precision, layout.DIGITS_MAX)
        fits = (np.abs(values) <= (limit - 1) // up) & (np.abs(shift) <= layout.DIGITS_MAX)
        whole, rest = np.divmod(values, down)
        scaled = np.where(shift > 0, values * np.where(fits, up, 0), whole)
        fits = np.where(
            shift > 0, fits, (rest == 0) & (np.abs(shift) <= layout.DIGITS_MAX) & (np.abs(whole) < limit)
        )
        output.bad |= (~fits & (output.valid != 0)).view(np.uint8)
        output.finish()
        words = np.empty((len(cells), 2), np.int64)
        words[:, 0] = scaled
        words[:, 1] = scaled >> 63
        return from_values(arrow, words, output.valid)

    return read


def _dates(cells: Cells) -> pa.Array:
    output = _Output(cells)
    cells.document.machine.read_dates(*output.places)
    output.finish()
    return from_values(pa.date32(), output.values.astype(np.int32), output.valid)


def _instants(cells: Cells, kind: pa.DataType, with_offset: bool) -> pa.Array:
    output = _Output(cells)
    cells.document.machine.read_instants(*output.places, with_offset)
    output.finish()
    return from_values(kind, output.values, output.valid)


def _structs(kind: Type, is_open: bool) -> Reader:
    schema = Schema(kind.columns, is_open)
    fields = list(kind.arrow)

    def read(cells: Cells) -> pa.Array:
        found = cells.only(layout.OBJECT)
        marks = np.where(found, np.uint8(layout.DECIDED), np.uint8(layout.NOTHING))
        columns = schema.read(cells, marks)
        mask = None if found.all() else pa.array(~found)
        return pa.StructArray.from_arrays(columns, fields=fields, mask=mask)

    return read


class _Elements:
    """The elements of all arrays of a column, or the members of all objects."""

    def __init__(self, cells: Cells, wanted: int) -> None:
        self.found = cells.only(wanted)
        machine = cells.document.machine
        counts = np.zeros(len(cells), np.int32)
        total = machine.count_elements(*cells.places, wanted, counts.ctypes.data)
        keys = np.empty((2, total), np.int32)
        values = np.empty((2, total), np.int32)
        kinds = np.zeros(total, np.uint8)
        machine.list_elements(
            *cells.places,
            wanted,
            counts.ctypes.data,
            keys[0].ctypes.data,
            keys[1].ctypes.data,
            values[0].ctypes.data,
            values[1].ctypes.data,
            kinds.ctypes.data,
        )
        owners = np.repeat(cells.owners, counts)
        offsets = np.zeros(len(cells) + 1, np.int32)
        np.cumsum(counts, out=offsets[1:])
        self.offsets = pa.array(offsets)
        self.mask = None if self.found.all() else pa.array(~self.found)
        plain = np.full(total, layout.STRING, np.uint8)
        self.keys = Cells(cells.document, keys[0], keys[1], plain, owners)
        self.values = Cells(cells.document, values[0], values[1], kinds, owners)


def _arrays(kind: Type, is_open: bool) -> Reader:
    reader = reader_of(kind.inner, is_open)
    arrow = kind.arrow

    def read(cells: Cells) -> pa.Array:
        elements = _Elements(cells, layout.ARRAY)
        values = reader(elements.values)
        return pa.ListArray.from_arrays(elements.offsets, values, type=arrow, mask=elements.mask)

    return read


def _maps(kind: Type, is_open: bool) -> Reader:
    reader = reader_of(kind.inner, is_open)
    arrow = kind.arrow

    def read(cells: Cells) -> pa.Array:
        members = _Elements(cells, layout.OBJECT)
        keys, values = gathered(members.keys, pa.string()), reader(members.values)
        return pa.MapArray.from_arrays(members.offsets, keys, values, type=arrow, mask=members.mask)

    return read


# ------------------------------------------------------------------------ whole batches
#
# The rows of a batch are read in parts whose slices stay in the processor's cache. What machine code leaves undecided
# goes through the reference, row by row; its results take the places of undecided rows, so every error text is the
# reference's.

ROWS_AT_ONCE: Final = 32_768

Read = Callable[[Cells], list[pa.Array]]
Reference = Callable[[pa.Array], Decoded]


def decode_in_bulk(values: pa.Array, read: Read, reference: Reference, *, header_bytes: int = 0) -> Decoded:
    """Decode a binary array; `header_bytes` stand before each value and are passed over (the reference sees them)."""
    parts = [
        _decode_part(values.slice(start, ROWS_AT_ONCE), read, reference, header_bytes)
        for start in range(0, max(len(values), 1), ROWS_AT_ONCE)
    ]
    if len(parts) == 1:
        return parts[0]
    columns = [pa.concat_arrays(each) for each in zip(*(part.columns for part in parts), strict=True)]
    return Decoded(columns, pa.concat_arrays([part.errors for part in parts]))


def cells_of(values: pa.Array, header_bytes: int) -> Cells | None:
    """The values as slices of a document of their own; nothing when they hold no bytes at all."""
    rows = len(values)
    _, offsets_buffer, data = values.buffers()
    if rows == 0 or data is None:
        return None
    offsets = np.frombuffer(offsets_buffer, np.int32, rows + 1, values.offset * 4)
    document = Document(data.address, rows)
    if values.null_count:
        document.marks[values.is_null().to_numpy(zero_copy_only=False)] = layout.NOTHING
    begins = offsets[:-1] + np.int32(header_bytes) if header_bytes else offsets[:-1]
    return Cells(document, begins, offsets[1:], None, np.arange(rows, dtype=np.int32))


def _decode_part(values: pa.Array, read: Read, reference: Reference, header_bytes: int) -> Decoded:
    cells = cells_of(values, header_bytes)
    if cells is None:
        return reference(values)
    rows, document = len(cells), cells.document
    columns = read(cells)
    undecided = np.flatnonzero(document.marks == layout.UNDECIDED)
    if len(undecided) == 0:
        return Decoded(columns, pa.nulls(rows, pa.string()))
    again = reference(values.take(pa.array(undecided)))
    if len(undecided) == rows:
        return again
    return _patched(Decoded(columns, pa.nulls(rows, pa.string())), undecided, again)


def _patched(found: Decoded, undecided: npt.NDArray[np.intp], again: Decoded) -> Decoded:
    rows = len(found.errors)
    places = np.arange(rows, dtype=np.int64)
    places[undecided] = rows + np.arange(len(undecided))
    mask = np.zeros(rows, np.bool_)
    mask[undecided] = True
    indices, replaced = pa.array(places), pa.array(mask)

    def patch(column: pa.Array, other: pa.Array) -> pa.Array:
        if pa.types.is_nested(column.type):
            return pa.concat_arrays([column, other]).take(indices)
        return pc.replace_with_mask(column, replaced, other)

    columns = [patch(one, other) for one, other in zip(found.columns, again.columns, strict=True)]
    return Decoded(columns, patch(found.errors, again.errors))
