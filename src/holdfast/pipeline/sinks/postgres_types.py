"""Spark's types in PostgreSQL, and the text in which their values travel.

Rows are copied as CSV, which Arrow writes without a Python object per value; every PostgreSQL type reads its own text,
so a table that was made by hand may use narrower or other types of the same family (`uuid` or `varchar(20)` for a
string) and checks the values itself. Types that would change a value without an error are refused: they round it, cut
it, fill it up with spaces, or read it in the server's time zone. What is nested becomes `jsonb`.
"""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from holdfast.pipeline.sinks.columns import JSON_OPTIONS

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

_PLAIN = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}
MICROSECOND_DIGITS = 6
_NESTED = ("array", "map", "struct")
_WHOLE = ("smallint", "integer", "bigint", "numeric")
_FLOATING = ("real", "double precision", "numeric")
_TIMES = ("timestamp with time zone", "timestamp without time zone")
_FAMILIES = {
    "boolean": ("boolean",),
    "smallint": _WHOLE,
    "integer": _WHOLE,
    "bigint": _WHOLE,
    "real": _FLOATING,
    "double precision": ("double precision", "numeric"),
    "numeric": _WHOLE,
    "bytea": ("bytea",),
    "date": ("date", "timestamp without time zone"),
    "timestamp with time zone": _TIMES,
    "timestamp without time zone": ("timestamp without time zone",),
    "jsonb": ("jsonb", "json", "text"),
}
_NOT_TEXT = {
    *("boolean", "bytea", "date", "oid", *_WHOLE, *_FLOATING, *_TIMES),
    *("character", "name", '"char"'),  # they fill up or cut
}
_PRINTED = re.compile(r"(?P<name>[^(]+)(?:\((?P<sizes>[\d,-]+)\))?(?P<rest>.*)")


def postgres_type(kind: DataType) -> str | None:
    """The type of a column for these values, as PostgreSQL prints it; None when there is none."""
    text = kind.simpleString()
    if text in _PLAIN:
        return _PLAIN[text]
    if text.startswith("decimal"):
        return text.replace("decimal", "numeric")
    if text.startswith(("varchar", "char")):
        return "text"
    return "jsonb" if text.startswith(_NESTED) else None


def is_fitting(held: str, wanted: str) -> bool:
    """Whether a column of the type `held` reads values meant for `wanted`."""
    base, sizes = _parts(held)
    family, wanted_sizes = _parts(wanted)
    if family == "text":
        return base not in _NOT_TEXT
    if base not in _FAMILIES[family]:
        return False
    if not sizes:
        return True
    if base in _TIMES:
        return sizes[0] >= MICROSECOND_DIGITS
    if base == "numeric" and family in ("real", "double precision"):
        return False
    scale, wanted_scale = ((*each, 0)[1] if each else 0 for each in (sizes, wanted_sizes))
    return base != "numeric" or scale >= wanted_scale


def _parts(printed: str) -> tuple[str, tuple[int, ...]]:
    """A type as PostgreSQL prints it, without its sizes, and those: `numeric`, (10, 2)."""
    found = _PRINTED.fullmatch(printed)
    assert found is not None
    sizes = tuple(int(each) for each in (found["sizes"] or "").split(",") if each)
    return found["name"] + found["rest"], sizes


def travelling(value: Column, kind: DataType) -> Column:
    """A value in a form that Arrow's CSV writes as PostgreSQL reads it."""
    from pyspark.sql import functions

    text = kind.simpleString()
    if text == "binary":
        return functions.concat(functions.lit("\\x"), functions.hex(value))
    if text.startswith(_NESTED):
        return functions.to_json(value, JSON_OPTIONS)
    if text.startswith("decimal"):
        return value.cast("string")
    return value


def as_csv(batch: pa.RecordBatch) -> bytes:
    """Strings quoted, nulls as nothing: so an empty string is none. Years that Arrow cannot write become a text that no
    server takes; where a time has a zone, Arrow would write another year."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            text = batch.column(at).cast(pa.timestamp(field.type.unit)).cast(pa.string())
            batch = batch.set_column(at, field.name, pc.binary_join_element_wise(text, "Z", ""))
    sink = io.BytesIO()
    pyarrow.csv.write_csv(batch, sink, pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed"))
    return sink.getvalue()
