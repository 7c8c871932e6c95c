"""Columns of decoders through Parquet into Spark: exactly the types they say."""

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import SparkSession

from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import compile_decoder

TYPES = (
    *(
        "long",
        "byte",
        "short",
        "int",
        "string",
        "boolean",
        "double",
        "float",
        "decimal(10,2)",
        "decimal(38,10)",
    ),
    *("date", "timestamp", "timestamp_ntz", "binary", "array<string>", "map<string,struct<a:int>>"),
    "struct<a:array<struct<b:decimal(5,1)>>,`c d`:timestamp>",
)
RECORD = b"""{"f0":1,"f9":1.5,"f10":"0001-01-01","f11":"0001-01-01T00:00:00Z","f12":"1500-01-01T00:00:00","f13":"YQ==",
"f14":["a",null],"f15":{"k":{"a":1}},"f16":{"a":[{"b":1.5}],"c d":0},"more":1}"""


def test_spark_reads_the_columns_as_the_types_they_were_decoded_to(
    spark: SparkSession, tmp_path: Path
) -> None:
    fields = tuple(Field(f"f{place}", kind, required=False) for place, kind in enumerate(TYPES))
    decoder = compile_decoder(Decoding("json", fields, unknown="keep"))
    found = decoder.decode(pa.array([RECORD, None], pa.binary()))
    table = pa.Table.from_arrays(found.columns, schema=pa.schema(decoder.arrow_fields))
    pq.write_table(table, tmp_path / "part.parquet")
    frame = spark.read.parquet(str(tmp_path))
    assert frame.schema.simpleString() == spark.createDataFrame([], decoder.spark_ddl).schema.simpleString()
    row = frame.where("f0 = 1").selectExpr(
        "string(f9)", "string(f10)", "string(f11)", "string(f12)", "to_json(f16)"
    )
    assert list(row.collect()[0]) == [
        *("1.5000000000", "0001-01-01", "0001-01-01 00:00:00", "1500-01-01 00:00:00"),
        '{"a":[{"b":1.5}],"c d":"1970-01-01T00:00:00.000Z"}',
    ]
    assert frame.where("f0 is null and _unknown is null").count() == 1
