"""Schemas in Spark's words."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

HEADERS_DDL: Final = "array<struct<key:string,value:binary>>"


def ddl_schema(text: str) -> StructType:
    """The schema that a text in Spark's words names."""
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(text)
    assert isinstance(schema, StructType)
    return schema
