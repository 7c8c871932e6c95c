"""Types in Spark's words: read, written back, and their Arrow side."""

import pyarrow as pa
import pytest

from holdfast.errors import ConfigError
from holdfast.pipeline.definition.model import Decoding, Field
from holdfast.pipeline.formats import FormatError, compile_decoder
from holdfast.pipeline.formats.types import parse_type


@pytest.mark.parametrize(
    ("text", "ddl", "arrow"),
    [
        ("string", "string", pa.string()),
        ("BYTE", "tinyint", pa.int8()),
        ("short", "smallint", pa.int16()),
        ("integer", "int", pa.int32()),
        ("long", "bigint", pa.int64()),
        ("real", "float", pa.float32()),
        ("double", "double", pa.float64()),
        ("boolean", "boolean", pa.bool_()),
        ("date", "date", pa.date32()),
        ("timestamp", "timestamp", pa.timestamp("us", "UTC")),
        ("timestamp_ntz", "timestamp_ntz", pa.timestamp("us")),
        ("binary", "binary", pa.binary()),
        ("decimal", "decimal(10,0)", pa.decimal128(10, 0)),
        ("decimal( 38 , 6 )", "decimal(38,6)", pa.decimal128(38, 6)),
        ("array<array<long>>", "array<array<bigint>>", pa.list_(pa.list_(pa.int64()))),
        ("map<string, double>", "map<string,double>", pa.map_(pa.string(), pa.float64())),
        (
            "struct<a: int NOT NULL, `b c` string>",
            "struct<`a`:int,`b c`:string>",
            pa.struct([("a", pa.int32()), ("b c", pa.string())]),
        ),
    ],
)
def test_a_type_is_read_and_written(text: str, ddl: str, arrow: pa.DataType) -> None:
    kind = parse_type(text)
    assert kind.ddl == ddl
    assert kind.arrow == arrow
    assert parse_type(kind.ddl).arrow == arrow


@pytest.mark.parametrize(
    "text",
    [
        "",
        "strin",
        "decimal(39,0)",
        "decimal(0)",
        "decimal(5,6)",
        "array<>",
        "array<int",
        "map<int,string>",
        "struct<>",
        "struct<a:int,A:int>",
        "int int",
        "string; drop",
        "array<" * 40 + "int" + ">" * 40,
    ],
)
def test_what_is_no_type_is_refused_with_the_text(text: str) -> None:
    with pytest.raises(ConfigError, match="type"):
        parse_type(text)


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ((Field("_id", "long"),), "underscore"),
        ((Field("", "long"),), "empty"),
        ((Field("id", "lonk"),), "field 'id': 'lonk' is no type; did you mean 'long'"),
        ((Field("id", "long"), Field("ID", "long")), "twice"),
        ((), "name its fields"),
    ],
)
def test_fields_that_cannot_be_columns_are_refused(fields: tuple[Field, ...], reason: str) -> None:
    with pytest.raises(FormatError, match=reason):
        compile_decoder(Decoding("json", fields))


def test_a_prefix_goes_before_every_column() -> None:
    decoder = compile_decoder(Decoding("json", (Field("id", "long"),), unknown="keep"), prefix="_key_")
    assert [each.name for each in decoder.arrow_fields] == ["_key_id", "_key__unknown"]
    assert decoder.spark_ddl == "`_key_id` bigint, `_key__unknown` string"
