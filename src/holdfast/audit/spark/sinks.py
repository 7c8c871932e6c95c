"""What is read outside of Spark, set aside as Parquet files for its tasks: rows of sinks, dead letters, what left.

Readers stream, so that no more than some batches are in memory; files go below a directory of the audit's own, which is
gone when it ends.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Final

import pyarrow as pa

from holdfast.audit.lineage import LineageBatch

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

ROWS_PER_GROUP: Final = 1 << 20
PLACES: Final = pa.schema([("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64())])
ASIDE: Final = pa.schema([*PLACES, ("route", pa.string()), ("step", pa.string())])
_LINEAGE: Final = [
    ("_hf_topic", pa.string()),
    ("_hf_partition", pa.int32()),
    ("_hf_offset", pa.int64()),
    ("_hf_index", pa.int32()),
]


class Scratch:
    """A directory of tables."""

    def __init__(self, spark: SparkSession, directory: str) -> None:
        self._spark = spark
        self._directory = directory

    def path(self, name: str) -> str:
        return os.path.join(self._directory, name)

    def places(self, name: str, batches: Iterable[LineageBatch]) -> DataFrame:
        """The places of rows; those from nowhere have an empty topic."""
        tables = (
            pa.table(
                {
                    "topic": pa.repeat(batch.topic, len(batch)),
                    "partition": pa.repeat(pa.scalar(batch.partition, pa.int32()), len(batch)),
                    "offset": pa.array(batch.offsets, pa.int64()),
                }
            )
            for batch in batches
        )
        return self.table(name, tables, PLACES)

    def table(
        self,
        name: str,
        tables: Iterable[pa.Table],
        schema: pa.Schema | None = None,
        *,
        empty: Sequence[str] = (),
    ) -> DataFrame:
        """A frame of these rows. Without a schema that of the first table counts; without any, texts named `empty`."""
        import pyarrow.parquet as pq

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
