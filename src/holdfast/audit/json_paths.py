"""Values out of JSON by their paths, whole batches at a time.

What is right is decided record by record in plain Python (`found_at`). Where a path is names only, the machine code
of `holdfast.pipeline.formats` reads the records first, as texts or as whole numbers, whichever fits more of the first
batch; what it does not take goes the plain way. Both give the same texts.

A path that leads nowhere gives null, as a record without a value does: only what is no JSON at all is unreadable. Of a
name that stands twice in an object the last counts, as with Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, compile_decoder

Path = tuple[str | int, ...]
Flags = npt.NDArray[np.bool_]

TEXT: Final = pa.large_string()
PROBED_ROWS: Final = 500
TYPES: Final = ("string", "long")
FAST_ROWS_MIN: Final = 2000
"""Below this, starting the machine code costs more than it saves."""
_PLAIN_NAME: Final = re.compile(r"[A-Za-z][A-Za-z0-9_]*")


class Number(str):
    """A number as it is spelled."""

    __slots__ = ()


_parse = json.JSONDecoder(parse_float=Number, parse_int=Number, parse_constant=Number).decode


class JsonPaths:
    """Reads a fixed set of paths."""

    def __init__(self, paths: Sequence[Path], *, fast_rows_min: int = FAST_ROWS_MIN) -> None:
        self.paths = tuple(paths)
        self._fast_rows_min = fast_rows_min
        self._decoders: dict[Path, Decoder] = {}

    def read(self, values: pa.Array) -> dict[Path, tuple[pa.Array, Flags]]:
        """For each path the texts, null where there is nothing, and which records could not be read."""
        values = values.cast(pa.binary())
        return {path: self._read_one(path, values) for path in self.paths}

    def _read_one(self, path: Path, values: pa.Array) -> tuple[pa.Array, Flags]:
        names = [each for each in path if isinstance(each, str) and _PLAIN_NAME.fullmatch(each)]
        if len(names) < len(path) or len(values) < self._fast_rows_min:
            return _read_plainly(path, values)
        if path not in self._decoders:
            self._decoders[path] = _best_decoder(names, values.slice(0, PROBED_ROWS))
        columns, errors = self._decoders[path].decode(values)
        column = columns[0]
        for name in names[1:]:
            column = pc.struct_field(column, name)
        texts, bad = column.cast(TEXT), np.zeros(len(values), np.bool_)
        if errors.null_count == len(values):
            return texts, bad
        rest = np.flatnonzero(errors.is_valid().to_numpy(zero_copy_only=False))
        found, bad[rest] = _read_plainly(path, values.take(pa.array(rest)))
        mask = np.zeros(len(values), np.bool_)
        mask[rest] = True
        return pc.replace_with_mask(texts, pa.array(mask), found), bad


def _best_decoder(names: Sequence[str], sample: pa.Array) -> Decoder:
    decoders = [_decoder(names, type_) for type_ in TYPES]
    return max(decoders, key=lambda each: int(each.decode(sample).errors.null_count))


def _decoder(names: Sequence[str], type_: str) -> Decoder:
    for name in reversed(names[1:]):
        type_ = f"struct<{name}:{type_}>"
    return compile_decoder(Decoding("json", (Field(names[0], type_, required=False),)))


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
