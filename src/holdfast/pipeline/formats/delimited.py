"""CSV: one record per value, fields by position.

Settings (`csv:`): `delimiter` (`,`), `quote` (`"`), `null` (nothing: an empty cell). A cell in quotes may hold the
delimiter, line breaks, and the quote doubled; it is never null. A quote inside an unquoted cell is an error, as is
whatever follows a closing quote. One line break may end the value; a second line is a second record and an error.
Scalars are written as in JSON without its quotes (see `texts`), booleans `true` and `false`; nested types do not fit
in a cell. Unknown fields are columns too many: always an error, since positions are all there is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa

from holdfast.pipeline.formats import json_layout as layout
from holdfast.pipeline.formats import machine
from holdfast.pipeline.formats.base import Decoded, FormatError, RowDecoder, Undecodable, shown, utf8
from holdfast.pipeline.formats.decoding import Decoding
from holdfast.pipeline.formats.json_cells import Cells, decode_in_bulk, reader_of
from holdfast.pipeline.formats.texts import (
    INTEGER,
    Unfit,
    boolean,
    epoch_millis,
    number_reader,
    string_reader,
)
from holdfast.pipeline.formats.types import Column, Type

SETTINGS: Final = {"delimiter": ",", "quote": '"', "null": ""}


def _reader(kind: Type) -> Callable[[str], Any]:
    if kind.kind == "boolean":
        return boolean
    if kind.kind == "timestamp":
        of_text = string_reader(kind)
        assert of_text is not None
        return lambda text: epoch_millis(text) if INTEGER.fullmatch(text) else of_text(text)
    reader = string_reader(kind) or number_reader(kind)
    if reader is None:
        raise FormatError(f"format csv: a cell cannot hold {kind.ddl}")
    return reader


def _cell_class(kind: Type) -> int:
    if kind.kind in ("boolean", "timestamp"):
        return layout.CELL_BOOLEAN if kind.kind == "boolean" else layout.CELL_INSTANT
    return layout.CELL_TEXT if string_reader(kind) is not None else layout.CELL_NUMBER


class Delimited(RowDecoder):
    def __init__(self, decoding: Decoding, prefix: str, fields: Sequence[Column]) -> None:
        super().__init__(decoding, prefix, fields)
        if not fields:
            raise FormatError("format csv: name the fields, in the order of the columns")
        wrong = sorted(set(decoding.csv) - set(SETTINGS))
        if wrong:
            raise FormatError(f"csv setting {wrong[0]!r}: there are delimiter, quote and null")
        settings = {**SETTINGS, **decoding.csv}
        self.delimiter, self.quote, self.null = settings["delimiter"], settings["quote"], settings["null"]
        if len(self.delimiter) != 1 or len(self.quote) != 1 or self.delimiter == self.quote:
            raise FormatError("csv settings delimiter and quote are one character each, not the same one")
        if self.delimiter in "\r\n" or self.quote in "\r\n":
            raise FormatError("csv settings delimiter and quote cannot be line breaks")
        mark, between = re.escape(self.quote), re.escape(self.delimiter)
        self._quoted = re.compile(f"{mark}((?:[^{mark}]|{mark}{mark})*){mark}", re.DOTALL)
        self._bare = re.compile(f"[^{between}{mark}\r\n]*")
        self._readers = [_reader(each.type) for each in fields]
        self._bulk = [reader_of(each.type, is_open=True) for each in fields]
        self._classes = np.array([_cell_class(each.type) for each in fields], np.uint8)
        self._null = np.frombuffer(self.null.encode("utf-8") + b"\0", np.uint8)

    def prepare(self) -> None:
        machine.load()

    def decode(self, values: pa.Array) -> Decoded:
        values = values.cast(pa.binary())
        if not (self.delimiter.isascii() and self.quote.isascii()):
            return super().decode(values)
        return decode_in_bulk(values, self._read, super().decode)

    def decode_plainly(self, values: pa.Array) -> Decoded:
        return super().decode(values)

    def _read(self, cells: Cells) -> list[pa.Array]:
        """The columns of a batch; rows that are not simply cells of their types become undecided."""
        document = cells.document
        rows, columns = len(cells), len(self.columns)
        begins = np.zeros((columns, rows), np.int32)
        ends = np.zeros((columns, rows), np.int32)
        kinds = np.zeros((columns, rows), np.uint8)
        undecided = document.machine.scan_delimited(
            document.base,
            rows,
            cells.begins.ctypes.data,
            cells.ends.ctypes.data,
            document.marks.ctypes.data,
            self._classes.ctypes.data,
            columns,
            ord(self.delimiter),
            ord(self.quote),
            self._null.ctypes.data,
            len(self._null) - 1,
            begins.ctypes.data,
            ends.ctypes.data,
            kinds.ctypes.data,
        )
        if undecided:
            kinds[:, document.marks == layout.UNDECIDED] = layout.NULL
        found = []
        for place, column in enumerate(self.columns):
            noted = Cells(document, begins[place], ends[place], kinds[place], cells.owners)
            if column.required:
                noted.undecided((noted.kinds <= layout.NULL) & (document.marks == layout.DECIDED))
            found.append(self._bulk[place](noted))
        return found

    def _cells(self, text: str) -> list[str | None]:
        cells: list[str | None] = []
        position = 0
        while True:
            quoted = text.startswith(self.quote, position)
            match = (self._quoted if quoted else self._bare).match(text, position)
            if match is None:
                raise Undecodable(f"column {len(cells) + 1}: the quote is never closed")
            if quoted:
                cells.append(match[1].replace(self.quote * 2, self.quote))
            else:
                cells.append(None if match[0] == self.null else match[0])
            position = match.end()
            if position == len(text):
                return cells
            if text[position] in "\r\n":
                raise Undecodable(
                    f"a second line after column {len(cells)}: {shown(text[position:].strip(), 30)}"
                )
            if text[position] != self.delimiter:
                raise Undecodable(f"column {len(cells)}: unexpected {shown(text[position:], 30)} at a quote")
            position += 1

    def decode_row(self, value: bytes) -> Sequence[Any]:
        text = utf8(value)
        text = text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")
        if not text:
            raise Undecodable("empty value")
        cells = self._cells(text)
        if len(cells) != len(self.columns):
            raise Undecodable(f"expected {len(self.columns)} columns, found {len(cells)}: {shown(text, 40)}")
        row: list[Any] = []
        for cell, column, reader in zip(cells, self.columns, self._readers, strict=True):
            if cell is None and column.required:
                raise Undecodable(f'required field "{column.name}" is null')
            try:
                row.append(None if cell is None else reader(cell))
            except Unfit as unfit:
                found = shown(cell or "", 40)
                raise Undecodable(
                    f'field "{column.name}": expected {column.type}, found {found}: {unfit}'
                ) from None
        return row
