"""Keys of rows as numbers, the same for records of the source and for rows of a sink.

A sink may hold a key's column in another form: PostgreSQL gives text, a topic JSON. It is brought to the type that
decoding gave the source's column; what cannot be, is no key of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Codes = npt.NDArray[np.int64]
WIDE: Final = 2**62


class KeysDiffer(ValueError):
    """A sink's column cannot be read as the source's."""


class KeySpace:
    """The keys of all records: equal numbers, equal keys. Nulls are equal to each other."""

    def __init__(self, columns: Sequence[pa.ChunkedArray], rows: int) -> None:
        self._values: list[pa.Array] = []
        self._types = [column.type for column in columns]
        self._narrowed: dict[int, Codes] = {}
        """Before which column the numbers were made small again, and those that there were."""
        self.codes: Codes = np.zeros(rows, np.int64)
        for number, column in enumerate(columns):
            encoded = _combined(_comparable(column)).dictionary_encode()
            self._values.append(encoded.dictionary)
            size = len(encoded.dictionary) + 1
            if len(self.codes) and int(self.codes.max()) > WIDE // size:
                self._narrowed[number], self.codes = np.unique(self.codes, return_inverse=True)
            self.codes = self.codes * size + _numbers(encoded.indices) + 1

    def codes_of(self, columns: Sequence[pa.ChunkedArray]) -> Codes:
        """Of rows of a sink; keys that no record has are below 0, each by a number of its own."""
        held = [_as_type(column, kind) for column, kind in zip(columns, self._types, strict=True)]
        rows = len(held[0]) if held else 0
        codes = np.zeros(rows, np.int64)
        known = np.ones(rows, np.bool_)
        for number, (column, values) in enumerate(zip(held, self._values, strict=True)):
            if number in self._narrowed:
                codes, is_there = _found(self._narrowed[number], codes)
                known &= is_there
            plain = _combined(_comparable(column))
            at = _numbers(pc.index_in(plain, value_set=values, skip_nulls=True)) + 1
            known &= (at > 0) | _flags(plain.is_null())
            codes = codes * (len(values) + 1) + at
        if not known.all():
            strangers = [column.filter(pa.array(~known)) for column in held]
            codes[~known] = -1 - KeySpace(strangers, int((~known).sum())).codes
        return codes


def _found(values: Codes, codes: Codes) -> tuple[Codes, npt.NDArray[np.bool_]]:
    if len(values) == 0:
        return np.zeros(len(codes), np.int64), np.zeros(len(codes), np.bool_)
    at = np.minimum(np.searchsorted(values, codes), len(values) - 1)
    return at.astype(np.int64), values[at] == codes


def _combined(column: pa.ChunkedArray) -> pa.Array:
    made = column.combine_chunks()
    return made.combine_chunks() if isinstance(made, pa.ChunkedArray) else made


def _numbers(indices: pa.Array) -> Codes:
    return np.asarray(pc.fill_null(indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False), np.int64)


def _flags(column: pa.Array) -> npt.NDArray[np.bool_]:
    return np.asarray(column.to_numpy(zero_copy_only=False), np.bool_)


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        return column.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise KeysDiffer(f"{column.type} is not {kind}: {error}") from error


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """In a type that can hold many, and in which what Spark takes for equal is equal."""
    if pa.types.is_floating(column.type):
        return pc.add(column, pa.scalar(0.0, column.type))  # of -0 and 0 one
    if pa.types.is_string(column.type):
        return column.cast(pa.large_string())
    if pa.types.is_binary(column.type):
        return column.cast(pa.large_binary())
    return column


def key_text(names: Sequence[str], columns: Mapping[str, pa.ChunkedArray], row: int) -> str:
    """One key, to be read: `customer=7, shop=north`."""
    return ", ".join(f"{name}={_shown(columns[name][row].as_py())}" for name in names)


def _shown(value: Any) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= 60 else text[:59] + "…"


def sorting(*columns: Codes) -> Codes:
    """The order by these columns, the first before all: as one number where that fits, which is much quicker."""
    spans = []
    total = 1
    for column in columns:
        low, high = (int(column.min()), int(column.max())) if len(column) else (0, 0)
        spans.append((low, high - low + 1))
        total *= high - low + 1
    if total >= WIDE:
        return np.lexsort(columns[::-1])
    mixed = np.zeros(len(columns[0]), np.int64)
    for column, (low, size) in zip(columns, spans, strict=True):
        mixed *= size
        mixed += column - low
    return np.argsort(mixed, kind="quicksort")
