"""What a definition of the PostgreSQL sink must be for the rows it gets; nothing here talks to a server."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.model import PostgresSink
from holdfast.pipeline.sinks import postgres_copy
from holdfast.pipeline.sinks.base import Problem
from holdfast.pipeline.sinks.columns import check_columns, check_json_keys, stored_schema

if TYPE_CHECKING:
    from pyspark.sql.types import DataType, StructType

ORDERED = frozenset({"tinyint", "smallint", "int", "bigint", "decimal", "date", "timestamp", "timestamp_ntz"})
"""Types of an `order`."""


def problems_of(definition: PostgresSink, rows: StructType) -> list[Problem]:
    """What is wrong with the definition for rows of this schema."""
    stored = {field.name: field.dataType for field in stored_schema(rows).fields}
    problems = check_columns(rows) + check_json_keys(stored_schema(rows).fields)
    problems += [
        Problem("", f"column {name!r} is {kind.simpleString()}, which PostgreSQL has no type for")
        for name, kind in stored.items()
        if postgres_copy.postgres_type(kind) is None
    ]
    key, mode = definition.key, definition.mode
    if mode == "upsert" and not key:
        problems.append(Problem("key", "upsert needs the columns that make a row one of its own"))
    if mode == "append" and key:
        problems.append(Problem("key", "append keeps every row; a key is for `mode: upsert`"))
    problems += [Problem("key", f"there is no column {name!r}") for name in key if name not in stored]
    if mode == "upsert" and key and set(stored) - {LINEAGE} <= set(key):
        problems.append(Problem("key", "it names every column; rows that have nothing else need no upsert"))
    return problems + _check_order(definition, stored) + _check_deletes(definition, rows)


def _check_order(definition: PostgresSink, stored: Mapping[str, DataType]) -> list[Problem]:
    """Values that Spark, PostgreSQL and the audit put in the same order."""
    order = definition.order
    if order is None:
        return []
    if order not in stored:
        return [Problem("order", f"there is no column {order!r}")]
    kind = stored[order].simpleString()
    if kind.partition("(")[0] in ORDERED:
        return []
    return [
        Problem("order", f"column {order!r} is {kind}; rows are ordered by whole numbers, decimals or times")
    ]


def _check_deletes(definition: PostgresSink, rows: StructType) -> list[Problem]:
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import SparkSession

    text = definition.delete_when
    if text is None:
        return []
    if definition.mode != "upsert":
        return [Problem("delete_when", "only `mode: upsert` deletes")]
    spark = SparkSession.getActiveSession()
    if spark is None:
        return []
    try:
        kind = spark.createDataFrame([], rows).selectExpr(f"({text}) AS it").schema[0].dataType
    except (AnalysisException, ParseException) as error:
        return [Problem("delete_when", str(error).splitlines()[0])]
    if kind.simpleString() != "boolean":
        return [Problem("delete_when", f"it gives {kind.simpleString()}, and has to be true or false")]
    return []
