"""Whether rows fit the columns that sinks hold: told before a run meets it.

Only the rows at the end of the steps are judged: their columns are what `check` learns from Spark.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.pipeline.changes.levels import Change, refused, show
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)
from holdfast.pipeline.sinks.columns import is_stored

RESERVED = "_"


def held_columns(definition: PipelineDefinition, sink: SinkDefinition) -> dict[str, str] | None:
    """Types by name, as Spark writes them; nothing for a sink that holds none. Secrets are expanded."""
    match sink:
        case ParquetSink():
            from holdfast.pipeline.sinks.parquet import ParquetSinkWriter

            text = ParquetSinkWriter(sink, definition.name, definition.directory).store.held_schema()
            return None if text is None else _types(json.loads(text)["columns"])
        case DeltaSink():
            from holdfast.pipeline.sinks.delta import DeltaSinkWriter

            table = DeltaSinkWriter(sink, definition.name, definition.directory).ledger.table()
            return None if table is None else _types(json.loads(table.schema().to_json()))
        case PostgresSink():
            document = _noted_columns(definition, sink)
            return None if document is None else _types(document)
        case KafkaSink():
            return None


def _noted_columns(definition: PipelineDefinition, sink: PostgresSink) -> Any:
    import psycopg
    from psycopg import sql

    from holdfast.pipeline.sinks.postgres_sql import ledger

    statement = sql.SQL(
        "SELECT columns FROM {} WHERE pipeline = %s AND sink = %s AND columns IS NOT NULL ORDER BY number DESC LIMIT 1"
    ).format(ledger(sink.schema_name))
    try:
        with psycopg.connect(sink.url, connect_timeout=10) as connection:
            found = connection.execute(statement, (definition.name, sink.name)).fetchone()
    except psycopg.Error:
        return None  # the ledger itself could not be read either, which is told
    return None if found is None else found[0]


def _types(document: Any) -> dict[str, str]:
    from pyspark.sql.types import StructType

    return {
        field.name: field.dataType.simpleString()
        for field in StructType.fromJson(document).fields
        if is_stored(field.name) and not field.name.startswith(RESERVED)
    }


def column_changes(definition: PipelineDefinition, columns: Mapping[str, str]) -> Iterator[Change]:
    """What sinks would refuse of rows with these columns. Of a definition with its secrets expanded."""
    for sink in definition.sinks:
        if sink.rows or isinstance(sink, KafkaSink):
            continue
        held = held_columns(definition, sink)
        if held is not None:
            yield from misfits(sink.name, sink.schema, held, columns)


def misfits(sink: str, setting: str, held: Mapping[str, str], columns: Mapping[str, str]) -> Iterator[Change]:
    """Of one sink."""
    for name, kind in held.items():
        now = columns.get(name)
        if now is not None and now != kind:
            yield refused(
                f"sinks.{sink}",
                f"column {name!r} is {kind} there, and the rows bring {now}",
                "A type is never changed by itself.",
                f"Cast it in a step (CAST({name} AS {kind})), or give it another name.",
            )
    if setting != "fail":
        return
    for names, what in (
        ([name for name in columns if name not in held], "does not hold"),
        ([name for name in held if name not in columns], "holds, and the rows lack,"),
    ):
        if names:
            yield refused(
                f"sinks.{sink}",
                f"it {what} {show(names)}",
                "It takes rows with the columns it holds and no others (`schema: fail`).",
                "Write `schema: add-columns` in the sink, or give the rows the columns it has.",
            )
