"""The contents of rows, by Spark: the columns of sinks that rules and queries made.

Rows are joined with what the steps give for the same place and compared column by column; null equals null. A sink's
text (a topic's JSON) is read as the types that the steps give. Left alone are maps, which have no order, columns that a
sink's directories are named by, rows of records that were expanded, and columns of tables made by hand whose types
round.
"""

from __future__ import annotations

import os
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.audit.content import keeps_exactly
from holdfast.audit.spark.steps import LINEAGE, PLACE, Evaluated
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PostgresSink,
    SinkDefinition,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

VALUE: Final = "_held_value"
ROWS_PER_GROUP: Final = 1 << 20
_LINEAGE: Final = [
    ("_hf_topic", pa.string()),
    ("_hf_partition", pa.int32()),
    ("_hf_offset", pa.int64()),
    ("_hf_index", pa.int32()),
]


class Scratch:
    """A directory of the audit's own for what Spark's tasks read and write; it is gone when the audit ends."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self._spark = spark
        self._directory = directory

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def table(
        self,
        name: str,
        tables: Iterable[pa.Table],
        schema: pa.Schema | None = None,
        *,
        empty: Sequence[str] = (),
    ) -> DataFrame:
        """A frame of these rows. Without a schema that of the first table counts; without any, texts named `empty`.

        Readers stream, so that no more than some batches are in memory.
        """
        path = self.path(f"{name}.parquet")
        writer: pq.ParquetWriter | None = None
        try:
            for table in tables:
                if writer is None:
                    schema = schema or table.schema
                    writer = pq.ParquetWriter(path, schema, compression="lz4")
                assert schema is not None
                writer.write_table(table.cast(schema), row_group_size=ROWS_PER_GROUP)
            if writer is None:
                columns = [*_LINEAGE, *((each, pa.string()) for each in empty)]
                writer = pq.ParquetWriter(path, schema or pa.schema(columns))
        finally:
            if writer is not None:
                writer.close()
        return self._spark.read.parquet(path)


def not_compared(sink: SinkDefinition, evaluated: Evaluated) -> str:
    """Why the columns that steps compute for a sink are not compared; nothing when they are."""
    if evaluated.unknown:
        return f"step {evaluated.unknown!r} is not run again"
    if evaluated.expands:
        return "the rows that a query makes of one record are not told apart"
    if sink.rows:
        return f"its rows are those of {sink.rows!r}, beside the steps"
    if isinstance(sink, KafkaSink) and sink.value is not None:
        return "its values are an expression's, which is not evaluated again"
    return ""


def different(
    scratch: Scratch, sink: SinkDefinition, reader: Any, evaluated: Evaluated, columns: Sequence[str]
) -> DataFrame:
    """The places of rows whose columns do not hold what the steps say."""
    from pyspark.sql import functions

    held = _held(scratch, sink, reader, columns, evaluated.main.schema)
    made = evaluated.main.select(
        *(functions.col(f"{LINEAGE}.{name}").alias(name) for name in PLACE),
        *(functions.col(f"`{name}`").alias(f"_made_{at}") for at, name in enumerate(columns)),
    )
    differs = " OR ".join(f"NOT (_made_{at} <=> _held_{at})" for at in range(len(columns)))
    return made.join(held, list(PLACE)).where(differs).select(*PLACE)


def comparable(sink: SinkDefinition, reader: Any, schema: StructType, known: Container[str]) -> list[str]:
    """The columns of a sink that are to hold exactly what the steps give, but for those that were compared already."""
    found: list[str] = []
    types: Mapping[str, str] = getattr(reader, "column_types", {})
    for field in schema.fields:
        text = field.dataType.simpleString()
        if field.name.startswith("_") or "map<" in text or field.name in known:
            continue
        match sink:
            case ParquetSink() | DeltaSink():
                if field.name in sink.partition_by:
                    continue
            case PostgresSink():
                if not keeps_exactly(types.get(field.name, ""), text):
                    continue
        found.append(field.name)
    return found


def _held(
    scratch: Scratch, sink: SinkDefinition, reader: Any, columns: Sequence[str], schema: StructType
) -> DataFrame:
    """The sink's rows: places, and `_held_<n>` for each column, in the types of the steps."""
    from pyspark.sql import functions

    is_topic = isinstance(sink, KafkaSink)
    asked = ("value",) if is_topic else tuple(columns)
    tables = (_plain(table) for table in reader.table_batches(asked) if table.num_rows)
    frame = scratch.table(f"content-{sink.name}", tables, empty=asked)
    places = [functions.col(f"_hf_{name}").alias(name) for name in PLACE]
    if is_topic:
        fields = ", ".join(f"`{name}` {schema[name].dataType.simpleString()}" for name in columns)
        value = functions.from_json(functions.col("value").cast("string"), fields)
        frame = frame.withColumn(VALUE, value)
        return frame.select(
            *places,
            *(functions.col(f"{VALUE}.`{name}`").alias(f"_held_{at}") for at, name in enumerate(columns)),
        )
    return frame.select(
        *places,
        *(
            _typed(functions.col(f"`{name}`"), schema[name].dataType, frame.schema[name].dataType).alias(
                f"_held_{at}"
            )
            for at, name in enumerate(columns)
        ),
    )


def _typed(column: Column, wanted: Any, held: Any) -> Column:
    """What a table gives as text, as the type it stands for."""
    from pyspark.sql import functions

    if wanted == held:
        return column
    if held.simpleString() == "string" and wanted.simpleString() == "binary":
        return functions.unhex(functions.substring(column, 3, 2_000_000_000))
    return column.cast(wanted)


def _plain(table: pa.Table) -> pa.Table:
    """Without dictionaries, which Parquet does not need."""
    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(at, field.name, table.column(at).cast(field.type.value_type))
    return table
