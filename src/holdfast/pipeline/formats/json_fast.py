"""JSON values in bulk: machine code finds and reads the fields, Arrow arrays are made of whole columns.

A batch is scanned once (`json_kernel.scan`), which gives for every field and row a slice and its kind. Each column is
then made from its slices by type; a struct is scanned again for its own fields, arrays and maps are listed into the
slices of their elements, and so on inwards. Rows that the machine code does not decide go to the reference, whole.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from holdfast.pipeline.definition.model import Decoding
from holdfast.pipeline.formats import machine
from holdfast.pipeline.formats.base import Decoded, Decoder
from holdfast.pipeline.formats.bulk import decode_in_bulk
from holdfast.pipeline.formats.json_cells import Cells, Schema
from holdfast.pipeline.formats.json_reference import JsonReference
from holdfast.pipeline.formats.types import Column


class JsonFast(Decoder):
    """The decoder of `format: json`."""

    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        self.reference = JsonReference(decoding, prefix, fields)
        super().__init__(decoding, prefix, self.reference.columns)
        # What is kept of structs stands in another place of the text: such rows are the reference's.
        is_ignoring = decoding.unknown == "ignore"
        self._schema = Schema(fields, is_open=is_ignoring or self.reference.keep, is_open_inside=is_ignoring)

    def prepare(self) -> None:
        machine.load()

    def decode(self, values: pa.Array) -> Decoded:
        return decode_in_bulk(values.cast(pa.binary()), self._read, self.reference.decode)

    def _read(self, cells: Cells) -> list[pa.Array]:
        columns = self._schema.read(cells, cells.document.marks)
        if self.reference.keep:
            columns.append(self._schema.unknown(cells))
        return columns
