"""What the steps make of the records, as the audit compares it: rows that Spark evaluates, brought back as Arrow.

Spark says what a row must hold and nothing else: its rows go through files of the audit's own into the same comparison
that the columns of the source go through (`holdfast.audit.content`). A topic's key, value and headers are made by the
sink's expressions.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq

from holdfast.audit.content import HEADERS, KEY, OF_RECORD, TOMBSTONE
from holdfast.audit.spark.steps import LINEAGE, PLACE
from holdfast.pipeline.core.sql import arrow_schema
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import KafkaSink

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession

STORED: Final = frozenset({"_unknown"})
JSON_OPTIONS: Final = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""How the columns of a row are written where a sink does not say (docs/guides/pipelines.md)."""


class Scratch:
    """A directory of the audit's own for what Spark's tasks read and write; it is gone when the audit ends."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self._spark = spark
        self._directory = directory
        self._number = 0

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def new(self, name: str) -> str:
        self._number += 1
        return f"{name}-{self._number}"

    def table(self, name: str, tables: Iterable[pa.Table], schema: pa.Schema) -> DataFrame:
        """A frame of these rows; no more than one table is in memory."""
        path = self.path(f"{name}.parquet")
        with pq.ParquetWriter(path, schema, compression="lz4") as writer:
            for table in tables:
                writer.write_table(table.cast(schema))
        return self._spark.read.parquet(path)

    def rows(self, frame: DataFrame) -> Iterator[pa.Table]:
        """The rows of a frame, in the types that Spark names for Arrow, through files."""
        path = self.path(self.new("rows"))
        frame.write.parquet(path)
        schema = to_arrow(frame)
        options = ds.ParquetReadOptions(coerce_int96_timestamp_unit="us")
        for batch in ds.dataset(path, format=ds.ParquetFileFormat(read_options=options)).to_batches():
            if batch.num_rows:
                yield pa.Table.from_batches([batch]).cast(schema)


def to_arrow(frame: DataFrame) -> pa.Schema:
    return arrow_schema(frame.schema)


def with_places(frame: DataFrame, columns: Sequence[Column]) -> DataFrame:
    """The lineage of rows under the names that readers of sinks give it, and these columns."""
    from pyspark.sql import functions

    return frame.select(
        *(functions.col(f"{LINEAGE}.{name}").alias(f"_hf_{name}") for name in PLACE), *columns
    )


def is_stored(name: str) -> bool:
    return name in STORED or not name.startswith("_")


def of_topic(sink: KafkaSink, rows: DataFrame) -> list[Column]:
    """Key, value and headers of the records that a topic gets, as `_key`, `value` and `_headers`."""
    from pyspark.sql import functions

    rows = _with_keys_of_tombstones(rows)
    is_tombstone = functions.col(TOMBSTONE) if TOMBSTONE in rows.columns else functions.lit(False)
    of_record = functions.col(KEY) if KEY in rows.columns else functions.lit(None).cast("binary")
    key = of_record
    if sink.key is not None:
        key = functions.coalesce(_as_bytes(sink.key, rows), functions.when(is_tombstone, of_record))
    if sink.value is not None:
        value = _as_bytes(sink.value, rows)
    else:
        stored = [named(rows, name) for name in rows.columns if is_stored(name)]
        text = functions.to_json(functions.struct(*stored), JSON_OPTIONS) if stored else functions.lit("{}")
        value = functions.encode(text, "utf-8")
    if TOMBSTONE not in (sink.value or ""):
        value = functions.when(is_tombstone, functions.lit(None)).otherwise(value)
    headers = [
        functions.struct(functions.lit(name).alias("key"), _as_bytes(text, rows).alias("value"))
        for name, text in sink.headers.items()
    ]
    listed = functions.array(*headers).cast("array<struct<key: string, value: binary>>")
    return [key.alias(KEY), value.cast("binary").alias("value"), listed.alias(HEADERS)]


def _with_keys_of_tombstones(rows: DataFrame) -> DataFrame:
    """A tombstone has no value: columns that the record's key has too are taken from there."""
    from pyspark.sql import functions

    names = [name for name in rows.columns if KEY_PREFIX + name in rows.columns]
    if not names or TOMBSTONE not in rows.columns:
        return rows
    of_key = {
        name: functions.coalesce(
            named(rows, name), named(rows, KEY_PREFIX + name).cast(rows.schema[name].dataType)
        )
        for name in names
    }
    is_tombstone = functions.col(TOMBSTONE)
    return rows.withColumns(
        {
            name: functions.when(is_tombstone, each).otherwise(named(rows, name))
            for name, each in of_key.items()
        }
    )


def named(rows: DataFrame, name: str) -> Column:
    return rows["`" + name.replace("`", "``") + "`"]


def _as_bytes(expression: str, rows: DataFrame) -> Column:
    """Bytes as they are, anything else as its text."""
    from pyspark.sql import functions

    value = functions.expr(expression)
    kind = rows.select(value.alias("it")).schema[0].dataType.simpleString()
    return value if kind == "binary" else functions.encode(value.cast("string"), "utf-8")


TOPIC_TYPES: Final = {KEY: OF_RECORD[KEY], "value": OF_RECORD[KEY], HEADERS: OF_RECORD[KEY]}
