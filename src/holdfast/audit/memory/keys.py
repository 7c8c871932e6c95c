"""Keys of rows as numbers, the same for records of the source and for rows of a sink.

A sink may hold a key's column in another form: PostgreSQL gives text, a topic JSON. It is brought to the type that
decoding gave the source's column; what cannot be, is no key of the source.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

Codes = npt.NDArray[np.int64]


class KeysDiffer(ValueError):
    """A sink's column cannot be read as the source's."""


def joint_codes(
    source: Sequence[pa.ChunkedArray], held: Sequence[pa.ChunkedArray], *, rows: int, others: int
) -> tuple[Codes, Codes]:
    """A number for each record's key and for each held row's: equal numbers, equal keys. Nulls are equal."""
    codes = np.zeros(rows + others, np.int64)
    for ours, theirs in zip(source, held, strict=True):
        column = _as_type(theirs, ours.type) if others else pa.chunked_array([], ours.type)
        dictionary = _comparable(pa.chunked_array([*ours.chunks, *column.chunks], ours.type))
        encoded = dictionary.combine_chunks().dictionary_encode()
        if isinstance(encoded, pa.ChunkedArray):
            encoded = encoded.combine_chunks()
        numbers = _numbers(encoded.indices) + 1
        codes = _mixed(codes, numbers, len(encoded.dictionary) + 1)
    return codes[:rows], codes[rows:]


def _mixed(codes: Codes, numbers: Codes, size: int) -> Codes:
    if len(codes) and int(codes.max()) > 2**62 // size:
        codes = np.unique(codes, return_inverse=True)[1].astype(np.int64)
    return codes * size + numbers


def _numbers(indices: pa.Array) -> Codes:
    return np.asarray(pc.fill_null(indices.cast(pa.int64()), -1).to_numpy(zero_copy_only=False), np.int64)


def _as_type(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    if column.type == kind:
        return column
    try:
        if pa.types.is_dictionary(column.type):
            column = column.cast(column.type.value_type)
        if pa.types.is_timestamp(kind) and kind.tz is not None and pa.types.is_string(column.type):
            return column.cast(pa.timestamp("us", tz="UTC")).cast(kind)
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
