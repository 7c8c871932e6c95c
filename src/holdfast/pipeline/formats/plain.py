"""Text and bytes: the value as it is, in one column named `value` unless the definition names its one field.

Text is UTF-8; anything else is an error. An empty text is a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from holdfast.pipeline.formats.base import Decoded, FormatError, RowDecoder, utf8
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.types import Column, Type


class Plain(RowDecoder):
    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        kind = "string" if decoding.format == "text" else "binary"
        if len(fields) > 1 or any(each.type.kind != kind for each in fields):
            raise FormatError(f"format {decoding.format}: it has one field at most, of type {kind}")
        super().__init__(decoding, prefix, fields or [Column("value", Type(kind), required=False)])

    def decode(self, values: pa.Array) -> Decoded:
        try:
            columns = [values.cast(pa.binary()).cast(self.columns[0].type.arrow)]
        except pa.ArrowInvalid:
            return super().decode(values)
        return Decoded(columns, pa.nulls(len(values), pa.string()))

    def decode_row(self, value: bytes) -> Sequence[str]:
        return [utf8(value)]
