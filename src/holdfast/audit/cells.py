"""Cells in one form, whatever a sink keeps them in: what the source says and what a sink holds, as equal numbers.

Every row is hashed by what its values mean, as for its digest (`holdfast.pipeline.row_digest`), under a key of this
process's own, and with one zero. What a sink keeps as text (PostgreSQL's, JSON in a topic, the name of a directory) is
read back as the source's type first.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, compile_decoder
from holdfast.pipeline.row_digest import LINEAGE, DigestKey, RowHasher

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
NOT_NUMBERS: Final = r'"(?:NaN|-?Infinity)"'
"""JSON has no word for these, and Spark writes them as texts: whether a text or a number was meant cannot be told."""


# ---------------------------------------------------------------------------- hashing


@cache
def _hasher() -> RowHasher:
    return RowHasher(DigestKey(os.urandom(32)), has_one_zero=True)


def hash_rows(columns: Mapping[str, pa.Array | pa.ChunkedArray]) -> Hashes:
    """One number for each row, of all its columns by their names."""
    assert columns, "rows without columns have nothing to compare"
    whole = {
        name: _whole(values) if isinstance(values, pa.ChunkedArray) else values
        for name, values in columns.items()
    }
    size = len(next(iter(whole.values())))
    nowhere = {"topic": pa.nulls(size, pa.string())} | dict.fromkeys(LINEAGE[1:], pa.nulls(size, pa.int64()))
    return np.ascontiguousarray(_hasher().digests(whole, nowhere)[:, 0])


def hash_values(values: pa.Array) -> Hashes:
    return hash_rows({"": values})


def _whole(values: pa.ChunkedArray) -> pa.Array:
    made = values.combine_chunks()
    return made if isinstance(made, pa.Array) else pa.concat_arrays(made.chunks)


# ---------------------------------------------------------------------------- reading back


def as_type(values: pa.Array, kind: pa.DataType, ddl: str) -> tuple[pa.Array, Flags]:
    """What a sink holds, in the source's type; and which of them cannot be read so (they are null then)."""
    values = _whole(values) if isinstance(values, pa.ChunkedArray) else values
    if values.type == kind:
        return values, np.zeros(len(values), np.bool_)
    try:
        return _cast(values, kind, ddl)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError, ValueError):
        if len(values) == 1:
            return pa.nulls(1, kind), np.ones(1, np.bool_)
    middle = len(values) // 2
    parts = [
        as_type(part, kind, ddl) for part in (values.slice(0, middle), values.slice(middle)) if len(part)
    ]
    return pa.concat_arrays([part for part, _ in parts]), np.concatenate([wrong for _, wrong in parts])


def _cast(values: pa.Array, kind: pa.DataType, ddl: str) -> tuple[pa.Array, Flags]:
    fine = np.zeros(len(values), np.bool_)
    if not (pa.types.is_string(values.type) or pa.types.is_large_string(values.type)):
        return values.cast(kind), fine
    if pa.types.is_nested(kind):
        texts = pc.binary_join_element_wise('{"v":', values.cast(pa.string()), "}", "")
        decoded, errors = json_decoder((("v", ddl),)).decode(texts.cast(pa.binary()))
        return decoded[0], errors.is_valid().to_numpy(zero_copy_only=False)
    if pa.types.is_boolean(kind):
        is_true = pc.is_in(values, pa.array(["t", "true"], values.type))
        return pc.if_else(values.is_null(), pa.scalar(None, pa.bool_()), is_true), fine
    if pa.types.is_binary(kind):
        listed = (None if each is None else bytes.fromhex(each[2:]) for each in values.to_pylist())
        return pa.array(list(listed), kind), fine
    return values.cast(pa.timestamp("us", tz=kind.tz) if pa.types.is_timestamp(kind) else kind), fine


@cache
def json_decoder(fields: tuple[tuple[str, str], ...]) -> Decoder:
    """Of JSON objects that hold these fields, by name and type, and no others."""
    listed = tuple(Field(name, ddl, required=False) for name, ddl in fields)
    return compile_decoder(Decoding("json", listed, unknown="reject"))


def has_no_number(texts: pa.Array) -> Flags:
    """Texts in which a number may stand as a text."""
    found = pc.fill_null(pc.match_substring_regex(texts, NOT_NUMBERS), False)
    return np.asarray(found.to_numpy(zero_copy_only=False), np.bool_)


_EXACT: Final[Mapping[str, tuple[str, ...]]] = {
    "boolean": ("boolean",),
    "tinyint": ("smallint", "integer", "bigint"),
    "smallint": ("smallint", "integer", "bigint"),
    "int": ("integer", "bigint"),
    "bigint": ("bigint",),
    "float": ("real", "double precision"),
    "double": ("double precision",),
    "string": ("text", "character varying"),
    "binary": ("bytea",),
    "date": ("date",),
    "timestamp": ("timestamp with time zone",),
    "timestamp_ntz": ("timestamp without time zone",),
}
"""Types of PostgreSQL that keep every value of ours as it is; a table made by hand may have others, which round."""
_NESTED: Final = re.compile(r"(?:array|map|struct)<")


def keeps_exactly(held: str, ddl: str) -> bool:
    """Whether a column of PostgreSQL of this type keeps every value of this type of ours as it is."""
    base = held.split("(")[0]
    if _NESTED.match(ddl):
        return base in ("jsonb", "json", "text")
    if ddl.startswith("decimal"):
        return held in ("numeric", ddl.replace("decimal", "numeric"))
    if base == "character varying" and "(" in held:
        return True  # too long a text is refused, never cut
    return base in _EXACT.get(ddl, ())
