"""Whole batches through machine code, and what it leaves undecided through the reference, row by row.

The rows of a batch are read in parts whose slices stay in the processor's cache. Results of the reference take the
places of undecided rows, so every error text is the reference's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.formats.base import Decoded
from holdfast.pipeline.formats.json_cells import Cells, Document
from holdfast.pipeline.formats.json_layout import NOTHING, UNDECIDED

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
        document.marks[values.is_null().to_numpy(zero_copy_only=False)] = NOTHING
    begins = offsets[:-1] + np.int32(header_bytes) if header_bytes else offsets[:-1]
    return Cells(document, begins, offsets[1:], None, np.arange(rows, dtype=np.int32))


def _decode_part(values: pa.Array, read: Read, reference: Reference, header_bytes: int) -> Decoded:
    cells = cells_of(values, header_bytes)
    if cells is None:
        return reference(values)
    rows, document = len(cells), cells.document
    columns = read(cells)
    undecided = np.flatnonzero(document.marks == UNDECIDED)
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
