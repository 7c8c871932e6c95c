"""The contents of rows, by Spark: every column that a sink stores, also those that rules and queries made.

Rows are joined with what the steps give for the same place and compared column by column; null equals null. A sink's
text (a topic's JSON) is read as the types that the steps give. Left alone are maps, which have no order, columns that a
sink's directories are named by, rows of records that were expanded, and columns of tables made by hand whose types
round.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from holdfast.audit.content_check import keeps_exactly
from holdfast.audit.model import Fate
from holdfast.audit.spark.sinks import Scratch
from holdfast.audit.spark.steps import LINEAGE, PLACE, Evaluated
from holdfast.pipeline.definition.model import (
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SinkDefinition,
)

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

VALUE = "_held_value"


def compared(
    scratch: Scratch, definition: PipelineDefinition, reader: Any, evaluated: Evaluated
) -> DataFrame | None:
    """Places whose row does not hold what the steps say, with `fate`, `sink` and `why`; nothing to compare: nothing."""
    from pyspark.sql import functions

    sink = next(each for each in definition.sinks if each.name == reader.name)
    if evaluated.unknown or evaluated.expands or sink.rows:
        return None
    columns = comparable(sink, reader, evaluated.main.schema)
    if not columns or (isinstance(sink, KafkaSink) and sink.value is not None):
        return None
    held = _held(scratch, sink, reader, columns, evaluated.main.schema)
    made = evaluated.main.select(
        *(functions.col(f"{LINEAGE}.{name}").alias(name) for name in PLACE),
        *(functions.col(f"`{name}`").alias(f"_made_{at}") for at, name in enumerate(columns)),
    )
    differs = " OR ".join(f"NOT (_made_{at} <=> _held_{at})" for at in range(len(columns)))
    why = f"the row does not hold what the record at its place says ({', '.join(sorted(columns))})"
    return (
        made.join(held, list(PLACE))
        .where(differs)
        .select(
            *PLACE,
            functions.lit(str(Fate.ALTERED)).alias("fate"),
            functions.lit(reader.name).alias("sink"),
            functions.lit(why).alias("why"),
        )
    )


def comparable(sink: SinkDefinition, reader: Any, schema: StructType) -> list[str]:
    """The columns of a sink that are to hold exactly what the steps give."""
    found: list[str] = []
    types: Mapping[str, str] = getattr(reader, "column_types", {})
    for field in schema.fields:
        text = field.dataType.simpleString()
        if field.name.startswith("_") or "map<" in text:
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


def _plain(table: Any) -> Any:
    """Without dictionaries, which Parquet does not need."""
    import pyarrow as pa

    for at, field in enumerate(table.schema):
        if pa.types.is_dictionary(field.type):
            table = table.set_column(at, field.name, table.column(at).cast(field.type.value_type))
    return table
