"""Text and bytes: the value as it is, in one column named `value` unless the definition names its one field.

Text is UTF-8; anything else is an error. An empty text is a text.
"""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from holdfast.pipeline.definition.model import Decoding
from holdfast.pipeline.formats.base import Decoded, Decoder, FormatError
from holdfast.pipeline.formats.types import Column, Type


class Plain(Decoder):
    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        kind = "string" if decoding.format == "text" else "binary"
        if len(fields) > 1 or any(each.type.kind != kind for each in fields):
            raise FormatError(f"format {decoding.format}: it has one field at most, of type {kind}")
        super().__init__(decoding, prefix, fields or [Column("value", Type(kind), required=False)])

    def decode(self, values: pa.Array) -> Decoded:
        values = values.cast(pa.binary())
        fine = pa.nulls(len(values), pa.string())
        if self.decoding.format == "bytes":
            return Decoded([values], fine)
        try:
            return Decoded([values.cast(pa.string())], fine)
        except pa.ArrowInvalid:
            return self._row_by_row(values)

    def _row_by_row(self, values: pa.Array) -> Decoded:
        texts: list[str | None] = []
        errors: list[str | None] = []
        for value in values.to_pylist():
            text, error = None, None
            try:
                text = None if value is None else value.decode("utf-8")
            except UnicodeDecodeError as wrong:
                error = f"invalid UTF-8 at byte {wrong.start}"
            texts.append(text)
            errors.append(error)
        return Decoded([pa.array(texts, pa.string())], pa.array(errors, pa.string()))
