"""Values out of JSON by their paths, whole batches at a time.

What is right is decided record by record in plain Python (`found_at`). Where a path is names only, the machine code
of `holdfast.pipeline.formats` finds the values first; what it does not decide goes the plain way. Both give the same
texts.

A path that leads nowhere gives null, as a record without a value does: only what is no JSON at all is unreadable. Of a
name that stands twice in an object the last counts, as with Spark.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.formats.base import Decoded
from holdfast.pipeline.formats.json_cells import Cells, Schema, decode_in_bulk, gathered
from holdfast.pipeline.formats.json_layout import (
    DECIDED,
    INTEGER,
    NOTHING,
    NULL,
    NUMBER,
    OBJECT,
    STRING,
    TRUE,
)
from holdfast.pipeline.formats.types import Column, parse_type

Path = tuple[str | int, ...]
Flags = npt.NDArray[np.bool_]

TEXT: Final = pa.large_string()
FAST_ROWS_MIN: Final = 2000
"""Below this, starting the machine code costs more than it saves."""


class Number(str):
    """A number as it is spelled."""

    __slots__ = ()


_parse = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=Number).decode


class JsonPaths:
    """Reads a fixed set of paths."""

    def __init__(self, paths: Sequence[Path], *, fast_rows_min: int = FAST_ROWS_MIN) -> None:
        self.paths = tuple(paths)
        self._fast_rows_min = fast_rows_min

    def read(self, values: pa.Array) -> dict[Path, tuple[pa.Array, Flags]]:
        """For each path the texts, null where there is nothing, and which records could not be read."""
        values = values.cast(pa.binary())
        return {path: self._read_one(path, values) for path in self.paths}

    def _read_one(self, path: Path, values: pa.Array) -> tuple[pa.Array, Flags]:
        names = [each for each in path if isinstance(each, str)]
        if len(names) < len(path) or len(values) < self._fast_rows_min:
            return _read_plainly(path, values)
        texts, errors = decode_in_bulk(values, _Finder(names).find, lambda rest: _reference(path, rest))
        return texts[0].cast(TEXT), errors.is_valid().to_numpy(zero_copy_only=False)


class _Finder(Schema):
    """Looks for one name in objects, and behind it for the next."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__([Column(names[0], parse_type("string"), False)], is_open=True)
        self._readers = [_spelled if len(names) == 1 else _Finder(names[1:]).inside]

    def find(self, cells: Cells) -> list[pa.Array]:
        return self.read(cells, cells.document.marks)

    def inside(self, cells: Cells) -> pa.Array:
        """What is no object has nothing in it."""
        marks = np.where(cells.kinds == OBJECT, np.uint8(DECIDED), np.uint8(NOTHING))
        return self.read(cells, marks)[0]


def _spelled(cells: Cells) -> pa.Array:
    """Texts, and numbers and truths as they are spelled; objects and arrays go the plain way."""
    nested = cells.kinds >= OBJECT
    if nested.any():
        cells.undecided(nested)
    kinds = cells.kinds.copy()
    kinds[(kinds >= TRUE) & (kinds <= NUMBER)] = STRING
    kinds[nested] = NULL
    texts = gathered(Cells(cells.document, cells.begins, cells.ends, kinds, cells.owners), pa.string())
    zeros = pc.and_(pc.equal(texts, "-0"), pa.array(cells.kinds == INTEGER))
    return pc.if_else(pc.fill_null(zeros, False), "0", texts)


def _reference(path: Path, values: pa.Array) -> Decoded:
    texts, bad = _read_plainly(path, values)
    errors = ["no JSON" if each else None for each in bad.tolist()]
    return Decoded([texts.cast(pa.string())], pa.array(errors, pa.string()))


def _read_plainly(path: Path, values: pa.Array) -> tuple[pa.Array, Flags]:
    texts: list[str | None] = []
    bad = np.zeros(len(values), np.bool_)
    for row, raw in enumerate(values.to_pylist()):
        text = None
        if raw is not None:
            try:
                text = found_at(raw, path)
            except (ValueError, RecursionError):
                bad[row] = True
        texts.append(text)
    return pa.array(texts, TEXT), bad


def found_at(raw: bytes, path: Path) -> str | None:
    """The text at the path of a document; raises `ValueError` for what is no JSON."""
    value: Any = _parse(raw.decode("utf-8").strip(" \t\r\n"))
    for step in path:
        if isinstance(step, str) and isinstance(value, dict):
            value = value.get(step)
        elif isinstance(step, int) and isinstance(value, list) and step < len(value):
            value = value[step]
        else:
            return None
    text = _text(value)
    if text is not None:
        text.encode("utf-8")  # lone surrogates are no text
    return text


def _text(value: Any) -> str | None:
    if value is None:
        return None
    if isinstance(value, Number):
        return "0" if value == "-0" else str(value)
    if isinstance(value, str):
        return value
    return _json(value)


def _json(value: Any) -> str:
    """Without blanks and with sorted names; numbers as they were spelled."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{json.dumps(name)}:{_json(value[name])}" for name in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_json, value)) + "]"
    if isinstance(value, Number):
        return str(value)
    return json.dumps(value)
