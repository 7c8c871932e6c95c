"""JSON values in bulk: machine code finds and reads the fields, Arrow arrays are made of whole columns.

A batch is scanned once (`json_kernel.scan`), which gives for every field and row a slice and its kind. Each column is
then made from its slices by type; a struct is scanned again for its own fields, arrays and maps are listed into the
slices of their elements, and so on inwards. Rows that the machine code does not decide go to the reference, whole, and
their results take their places: every error text is the reference's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.definition.model import Decoding
from holdfast.pipeline.formats.base import Decoded, Decoder
from holdfast.pipeline.formats.json_cells import Cells, Document, Schema
from holdfast.pipeline.formats.json_layout import NOTHING, UNDECIDED
from holdfast.pipeline.formats.json_reference import JsonReference
from holdfast.pipeline.formats.types import Column

ROWS_AT_ONCE: Final = 32_768
"""Slices of so many rows stay in the processor's cache between the scan and the columns."""


class JsonFast(Decoder):
    """The decoder of `format: json`."""

    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        self.reference = JsonReference(decoding, prefix, fields)
        super().__init__(decoding, prefix, self.reference.columns)
        self._schema = Schema(fields, is_open=decoding.unknown == "ignore")

    def decode(self, values: pa.Array) -> Decoded:
        values = values.cast(pa.binary())
        parts = [
            self._decode_some(values.slice(start, ROWS_AT_ONCE))
            for start in range(0, max(len(values), 1), ROWS_AT_ONCE)
        ]
        if len(parts) == 1:
            return parts[0]
        columns = [pa.concat_arrays(each) for each in zip(*(part.columns for part in parts), strict=True)]
        return Decoded(columns, pa.concat_arrays([part.errors for part in parts]))

    def _decode_some(self, values: pa.Array) -> Decoded:
        rows = len(values)
        _, offsets_buffer, data = values.buffers()
        if rows == 0 or data is None:
            return self.reference.decode(values)
        offsets = np.frombuffer(offsets_buffer, np.int32, rows + 1, values.offset * 4)
        document = Document(data.address, rows)
        if values.null_count:
            document.marks[values.is_null().to_numpy(zero_copy_only=False)] = NOTHING
        cells = Cells(document, offsets[:-1], offsets[1:], None, np.arange(rows, dtype=np.int32))
        columns = self._schema.read(cells, document.marks)
        if self.reference.keep:
            columns.append(pa.nulls(rows, pa.string()))
        undecided = np.flatnonzero(document.marks == UNDECIDED)
        errors = pa.nulls(rows, pa.string())
        if len(undecided):
            return self._patched(values, undecided, columns)
        return Decoded(columns, errors)

    def _patched(self, values: pa.Array, undecided: npt.NDArray[np.intp], columns: list[Any]) -> Decoded:
        """The columns with the reference's results in the places of undecided rows."""
        rows = len(values)
        again = self.reference.decode(values.take(pa.array(undecided)))
        if len(undecided) == rows:
            return again
        places = np.arange(rows, dtype=np.int64)
        places[undecided] = rows + np.arange(len(undecided))
        indices = pa.array(places)
        mask = np.zeros(rows, np.bool_)
        mask[undecided] = True
        patched = [
            _replaced(column, pa.array(mask), other, indices)
            for column, other in zip(columns, again.columns, strict=True)
        ]
        errors = _replaced(pa.nulls(rows, pa.string()), pa.array(mask), again.errors, indices)
        return Decoded(patched, errors)


def _replaced(column: pa.Array, mask: pa.Array, other: pa.Array, indices: pa.Array) -> pa.Array:
    if pa.types.is_nested(column.type):
        return pa.concat_arrays([column, other]).take(indices)
    return pc.replace_with_mask(column, mask, other)
