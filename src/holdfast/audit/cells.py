"""Cells in one form, whatever a sink keeps them in: what the source says and what a sink holds, as equal numbers.

Every value is hashed to 64 bits by what it means. Numbers count by value (one zero, one NaN), times by microseconds,
texts and bytes by their bytes, decimals by value; a struct by its fields' names and values, a list by its elements in
their order, a map by its entries in any order. What a sink keeps as text (PostgreSQL's, JSON in a topic, the name of a
directory) is read back as the source's type first. Texts are hashed by Python's own keyed hash, so hashes mean
something within one process only.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import Decoder, compile_decoder

Hashes = npt.NDArray[np.uint64]
Flags = npt.NDArray[np.bool_]
_NULL: Final = np.uint64(0x9E3779B97F4A7C15)
_M1: Final = np.uint64(0xBF58476D1CE4E5B9)
_M2: Final = np.uint64(0x94D049BB133111EB)
NOT_NUMBERS: Final = r'"(?:NaN|-?Infinity)"'
"""JSON has no word for these, and Spark writes them as texts: whether a text or a number was meant cannot be told."""


# ---------------------------------------------------------------------------- hashing


def hash_rows(columns: Mapping[str, pa.Array]) -> Hashes:
    """One number for each row, of all its columns by their names."""
    total: Hashes | None = None
    for name, values in columns.items():
        hashed = _mixed(hash_values(values) + _salt(name))
        total = hashed if total is None else total + hashed
    assert total is not None, "rows without columns have nothing to compare"
    return total


def _salt(name: str) -> np.uint64:
    return np.uint64(zlib.crc32(name.encode()) * 0x9E3779B1 & 0xFFFFFFFFFFFFFFFF)


def _mixed(values: Hashes) -> Hashes:
    values = (values ^ (values >> np.uint64(30))) * _M1
    values = (values ^ (values >> np.uint64(27))) * _M2
    return values ^ (values >> np.uint64(31))


def hash_values(values: pa.Array) -> Hashes:
    if isinstance(values, pa.ChunkedArray):
        values = _whole(values)
    if pa.types.is_dictionary(values.type):
        values = values.dictionary_decode()
    kind = values.type
    if pa.types.is_nested(kind):
        hashed = _nested(values)
    elif pa.types.is_floating(kind):
        numbers = pc.fill_null(values.cast(pa.float64()), 0.0).to_numpy(zero_copy_only=False)
        numbers = np.where(np.isnan(numbers), np.nan, numbers) + 0.0  # one NaN, one zero
        hashed = numbers.view(np.uint64)
    elif _is_whole(kind):
        hashed = pc.fill_null(_as_integers(values), 0).to_numpy(zero_copy_only=False).view(np.uint64)
    else:
        if pa.types.is_decimal(kind):
            values = values.cast(pa.string())
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.large_binary())
        items = values.to_pylist()
        hashed = np.fromiter(map(hash, items), np.int64, len(items)).view(np.uint64)
    if values.null_count:
        hashed = np.where(values.is_null().to_numpy(zero_copy_only=False), _NULL, hashed)
    return hashed


def _whole(values: pa.ChunkedArray) -> pa.Array:
    made = values.combine_chunks()
    return made if isinstance(made, pa.Array) else pa.concat_arrays(made.chunks)


def _nested(values: pa.Array) -> Hashes:
    """What is null has any number here."""
    if pa.types.is_struct(values.type):
        if values.type.num_fields == 0:
            return np.zeros(len(values), np.uint64)
        fields = zip((field.name for field in values.type), values.flatten(), strict=True)
        return hash_rows(dict(fields))
    is_map = pa.types.is_map(values.type)
    lengths = pc.fill_null(pc.list_value_length(values), 0) if not is_map else _map_lengths(values)
    counts = lengths.to_numpy(zero_copy_only=False).astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(counts)))
    if is_map:
        inner = values.filter(values.is_valid()) if values.null_count else values
        keys, items = _entries(inner)
        hashed = _mixed(_mixed(hash_values(keys)) + hash_values(items))
    else:
        places = np.arange(ends[-1]) - np.repeat(ends[:-1], counts)
        hashed = _mixed(hash_values(values.flatten()) + _mixed(places.astype(np.uint64) + np.uint64(1)))
    totals = np.concatenate((np.zeros(1, np.uint64), np.cumsum(hashed, dtype=np.uint64)))
    return _mixed(totals[ends[1:]] - totals[ends[:-1]] + counts.astype(np.uint64))


def _map_lengths(values: pa.Array) -> pa.Array:
    lengths = np.diff(np.asarray(values.offsets.to_numpy(), np.int64))
    return pa.array(np.where(values.is_valid().to_numpy(zero_copy_only=False), lengths, 0))


def _entries(values: pa.Array) -> tuple[pa.Array, pa.Array]:
    """Keys and items of maps none of which is null."""
    offsets = np.asarray(values.offsets.to_numpy(), np.int64)
    first, count = int(offsets[0]), int(offsets[-1] - offsets[0])
    return values.keys.slice(first, count), values.items.slice(first, count)


def _is_whole(kind: pa.DataType) -> bool:
    types = pa.types
    return bool(
        types.is_integer(kind) or types.is_boolean(kind) or types.is_date(kind) or types.is_timestamp(kind)
    )


def _as_integers(values: pa.Array) -> pa.Array:
    if pa.types.is_timestamp(values.type):
        values = values.cast(pa.timestamp("us", tz=values.type.tz))
    elif pa.types.is_date(values.type):
        values = values.cast(pa.date32()).cast(pa.int32())
    return values.cast(pa.int64())


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
