"""What rows are called in Spark's SQL: names and texts of any characters, schemas, and the column of lineage."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql.types import StructType

LINEAGE: Final = "_hf"
"""The column by which every row says which record it came from."""
PLACE: Final = ("topic", "partition", "offset", "index")
"""The fields of a row's lineage: the record, and which of the record's rows it is."""
LINEAGE_TYPE: Final = "struct<topic:string,partition:int,offset:bigint,index:int>"
PLACE_COLUMNS: Final = tuple(f"{LINEAGE}_{part}" for part in PLACE)
"""The same as columns of their own."""
PLACE_DDL: Final = "_hf_topic string, _hf_partition int, _hf_offset bigint, _hf_index int"
NARROW: Final = (
    f"named_struct('topic', {LINEAGE}.topic, 'partition', {LINEAGE}.partition, 'offset', {LINEAGE}.offset, "
    f"'index', {LINEAGE}.index) AS {LINEAGE}"
)
"""A row's lineage alone, of the wider one it has while steps run."""
HEADERS_DDL: Final = "array<struct<key:string,value:binary>>"


def quoted(name: str) -> str:
    """The name of a column, dots and all."""
    return "`" + name.replace("`", "``") + "`"


def literal(text: str) -> str:
    """A text as a string literal."""
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def struct_of(names: list[str]) -> str:
    """A struct of these columns, which keep their names."""
    return f"named_struct({', '.join(f'{literal(name)}, {quoted(name)}' for name in names)})"


def of_step(name: str, offset: str, index: str) -> str:
    """The lineage of a row that a step makes out of many: the step stands for the topic."""
    return f"named_struct('topic', {literal(name)}, 'partition', 0, 'offset', {offset}, 'index', {index}) AS {LINEAGE}"


def ddl_schema(text: str) -> StructType:
    """The schema that a text in Spark's words names."""
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(text)
    assert isinstance(schema, StructType)
    return schema


def arrow_schema(schema: StructType) -> pa.Schema:
    """The same in Arrow's types, with times in UTC: Spark before 4.2 knows no other zone, and no such argument."""
    from pyspark import __version__
    from pyspark.sql.pandas.types import to_arrow_schema

    zone: dict[str, Any] = {} if __version__.startswith(("4.0.", "4.1.")) else {"timezone": "UTC"}
    return to_arrow_schema(schema, **zone)
