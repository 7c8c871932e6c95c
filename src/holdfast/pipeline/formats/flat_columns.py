"""Flat Avro and Protobuf records in bulk: a table of steps for the kernel, and whole columns from what it notes.

A schema is flat when all its fields are scalars, unions of null with one, or Protobuf's Timestamp. Whoever plans a
schema says for each of its fields which code reads it and what its bits mean (`Meaning`); a column is made from a
meaning and the column's type, and rows whose value does not fit it are left undecided.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.formats.flat_layout import NO_UNION, STEP_WORDS
from holdfast.pipeline.formats.json_cells import Cells, from_values, gathered, packed
from holdfast.pipeline.formats.json_layout import ABSENT, DECIDED, NULL, STRING, UNDECIDED
from holdfast.pipeline.formats.texts import DAY_END, DAY_MIN, INSTANT_END, INSTANT_MIN
from holdfast.pipeline.formats.types import INTEGER_BITS, Column, Type

Bits = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]
Kind = Literal[
    "integer",
    "unsigned",
    "signed_four",
    "boolean",
    "single",
    "double",
    "text",
    "bytes",
    "decimal",
    "instant",
    "day",
    "names",
]


@dataclass(frozen=True)
class Meaning:
    """What the bits of a field stand for."""

    kind: Kind
    times: int = 1
    parts: int = 1
    """Of an instant: what makes microseconds of its unit."""
    scale: int = 0
    """Of a decimal."""
    names: Mapping[int, str] = field(default_factory=dict)
    """Of an enum's numbers."""


@dataclass(frozen=True)
class Step:
    """One field of the writer's schema."""

    name: str
    code: int
    meaning: Meaning
    null_branch: int = NO_UNION
    size: int = 0
    number: int = 0
    wire_type: int = 0
    has_presence: bool = True
    """Absent is null, and not the type's zero."""


def fits(meaning: Meaning, kind: Type) -> bool:
    """Whether a column of this type can be made in bulk."""
    if meaning.kind in ("integer", "signed_four"):
        return kind.kind in INTEGER_BITS
    if meaning.kind == "unsigned":
        return kind.kind == "bigint" or (kind.kind == "decimal" and kind.precision >= 20 and kind.scale == 0)
    if meaning.kind == "decimal":
        return kind.kind == "decimal" and kind.scale == meaning.scale
    wanted: dict[str, tuple[str, ...]] = {
        "boolean": ("boolean",),
        "single": ("float", "double"),
        "double": ("double",),
        "text": ("string",),
        "bytes": ("binary",),
        "instant": ("timestamp", "timestamp_ntz"),
        "day": ("date",),
        "names": ("string",),
    }
    return kind.kind in wanted[meaning.kind]


class Flat:
    """A flat schema and the columns taken from it; `flat_of` makes one where that is possible."""

    def __init__(
        self,
        steps: Sequence[Step],
        columns: Sequence[Column],
        *,
        is_protobuf: bool,
        is_open: bool,
        defaults: Mapping[str, Any],
    ) -> None:
        self._is_protobuf = is_protobuf
        self._columns = tuple(columns)
        self._defaults = defaults
        self._is_open = is_open
        self._steps = {each.name: each for each in steps}
        places = {each.name: place for place, each in enumerate(columns)}
        self._table = np.zeros((max(len(steps), 1), STEP_WORDS), np.int64)
        self._count = len(steps)
        for row, step in zip(self._table, steps, strict=False):
            tail = (step.number, step.wire_type) if is_protobuf else (step.null_branch, step.size)
            row[:] = step.code, places.get(step.name, -1), *tail

    def read(self, cells: Cells) -> list[pa.Array]:
        """A column for each; the document's marks tell which rows hold a record, and which get undecided."""
        document = cells.document
        rows, fields = len(cells), len(self._columns)
        values = np.zeros((fields, rows), np.int64)
        begins = np.zeros((fields, rows), np.int32)
        ends = np.zeros((fields, rows), np.int32)
        kinds = np.zeros((fields, rows), np.uint8)
        marks = document.marks
        undecided = document.machine.scan_flat(
            document.base,
            rows,
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            marks.ctypes.data,
            self._table.ctypes.data,
            self._count,
            self._is_protobuf,
            self._is_open,
            values.ctypes.data,
            begins.ctypes.data,
            ends.ctypes.data,
            kinds.ctypes.data,
        )
        if undecided:
            kinds[:, marks == UNDECIDED] = NULL
        columns = []
        for place, column in enumerate(self._columns):
            step = self._steps.get(column.name)
            noted = Cells(document, begins[place], ends[place], kinds[place], cells.owners)
            columns.append(self._column(column, step, noted, values[place]))
        return columns

    def _column(self, column: Column, step: Step | None, cells: Cells, values: Bits) -> pa.Array:
        if step is None:
            default = pa.array([self._defaults.get(column.name)], column.type.arrow)
            return default.take(pa.array(np.zeros(len(cells), np.int64)))
        there = cells.document.marks == DECIDED
        if not step.has_presence:
            cells.kinds[there & (cells.kinds == ABSENT)] = STRING
        valid: Mask = cells.kinds == STRING
        if column.required:
            cells.undecided(there & ~valid)
        return _READERS[step.meaning.kind](cells, values, valid, step.meaning, column.type)


def flat_of(
    steps: Sequence[Step] | None,
    columns: Sequence[Column],
    *,
    is_protobuf: bool,
    is_open: bool,
    defaults: Mapping[str, Any] | None = None,
) -> Flat | None:
    """The bulk reader of a schema; nothing when it is not flat, or a column not simply one of its fields."""
    if not steps:
        return None
    found = {each.name: each for each in steps}
    if any(each.name in found and not fits(found[each.name].meaning, each.type) for each in columns):
        return None
    return Flat(steps, columns, is_protobuf=is_protobuf, is_open=is_open, defaults=defaults or {})


# ------------------------------------------------------------------------ columns by meaning


def _integers(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    if meaning.kind == "signed_four":
        values = values.astype(np.int32).astype(np.int64)
    bits = INTEGER_BITS[kind.kind]
    width = np.dtype(f"int{bits}")
    narrow = values.astype(width)
    if bits < 64:
        cells.undecided(valid & (narrow != values))
    return from_values(kind.arrow, narrow, valid)


def _unsigned(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    if kind.kind == "bigint":
        cells.undecided(valid & (values < 0))
        return from_values(kind.arrow, values, valid)
    words = np.zeros((len(values), 2), np.int64)
    words[:, 0] = values
    return from_values(kind.arrow, words, valid)


def _booleans(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    bits = pa.py_buffer(np.packbits(values != 0, bitorder="little"))
    return pa.Array.from_buffers(pa.bool_(), len(values), [packed(valid), bits])


def _singles(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    found = values.astype(np.uint32).view(np.float32)
    with np.errstate(invalid="ignore"):
        return from_values(kind.arrow, found.astype(np.float64) if kind.kind == "double" else found, valid)


def _doubles(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    return from_values(kind.arrow, values, valid)


def _texts(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    return gathered(cells, kind.arrow)


def _decimals(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    if kind.precision < 19:
        limit = 10**kind.precision
        cells.undecided(valid & ((values >= limit) | (values <= -limit)))
    words = np.empty((len(values), 2), np.int64)
    words[:, 0] = values
    words[:, 1] = values >> 63
    return from_values(kind.arrow, words, valid)


def _instants(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    lowest, end = INSTANT_MIN // meaning.times * meaning.parts, INSTANT_END // meaning.times * meaning.parts
    # Nanoseconds of 64 bits cannot leave these years; their bounds would not fit.
    if meaning.parts == 1:
        wrong = valid & ((values < lowest) | (values >= end))
        cells.undecided(wrong)
        values = np.where(wrong, 0, values)
    micros = values * meaning.times if meaning.parts == 1 else values // meaning.parts
    return from_values(kind.arrow, micros, valid)


def _days(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    cells.undecided(valid & ((values < DAY_MIN) | (values >= DAY_END)))
    return from_values(kind.arrow, values.astype(np.int32), valid)


def _names(cells: Cells, values: Bits, valid: Mask, meaning: Meaning, kind: Type) -> pa.Array:
    numbers = np.array(sorted(meaning.names), np.int64)
    places = np.searchsorted(numbers, values).clip(0, len(numbers) - 1)
    cells.undecided(valid & (numbers[places] != values))
    names = pa.array([meaning.names[int(number)] for number in numbers], pa.string())
    return names.take(pa.array(places, mask=~valid))


_READERS: Final = {
    "integer": _integers,
    "signed_four": _integers,
    "unsigned": _unsigned,
    "boolean": _booleans,
    "single": _singles,
    "double": _doubles,
    "text": _texts,
    "bytes": _texts,
    "decimal": _decimals,
    "instant": _instants,
    "day": _days,
    "names": _names,
}
