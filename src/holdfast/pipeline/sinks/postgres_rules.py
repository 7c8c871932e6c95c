"""What a definition of the PostgreSQL sink must be for the rows it gets; nothing here talks to a server."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.pipeline.definition.model import PostgresSink
from holdfast.pipeline.sinks import postgres_copy
from holdfast.pipeline.sinks.base import Problem
from holdfast.pipeline.sinks.columns import check_columns, check_json_keys, check_merge, stored_schema

if TYPE_CHECKING:
    from pyspark.sql.types import StructType


def problems_of(definition: PostgresSink, rows: StructType) -> list[Problem]:
    """What is wrong with the definition for rows of this schema."""
    stored = {field.name: field.dataType for field in stored_schema(rows).fields}
    problems = check_columns(rows) + check_json_keys(stored_schema(rows).fields)
    problems += [
        Problem("", f"column {name!r} is {kind.simpleString()}, which PostgreSQL has no type for")
        for name, kind in stored.items()
        if postgres_copy.postgres_type(kind) is None
    ]
    return problems + check_merge(definition, rows)
