"""The part of `pyspark.sql` that sinks use, over Arrow tables: frames, columns, and functions of columns.

Sinks ask Spark for little: they choose and cast columns, make JSON of them, sort by partition values, and have a
function called with Arrow batches. `Frame` does that for a table in memory, and `Functions` stands in the place of
`pyspark.sql.functions`. An SQL expression has the meaning that was given for its text (`Functions.known`): nothing here
parses SQL.
"""

from __future__ import annotations

import base64
import datetime
import json
import re
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from functools import cache
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from pyspark.errors import PySparkException
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_type
from pyspark.sql.types import DataType, Row, StructType

from holdfast.pipeline.digest import MASK, Tally, place_hash
from holdfast.pipeline.sinks.dead_letter import AS_ROW

Value = Any
Meaning = tuple[Callable[[dict[str, Any]], Value], pa.DataType]
"""What an expression gives for a row, and of which type."""


@dataclass(frozen=True)
class Column:
    make: Callable[[pa.Table], pa.Array]
    name: str = ""

    def alias(self, name: str) -> Column:
        return Column(self.make, name)

    def cast(self, kind: Any) -> Column:
        return Column(lambda table: _cast(self.make(table), kind), self.name)

    def otherwise(self, value: Column) -> Column:
        raise AssertionError("otherwise follows when")

    def __eq__(self, other: object) -> Column:  # type: ignore[override]
        assert isinstance(other, Column)
        return Column(lambda table: pc.equal(self.make(table), other.make(table)))

    def __hash__(self) -> int:
        return id(self)

    def __invert__(self) -> Column:
        return Column(lambda table: pc.invert(self.make(table)))


@dataclass(frozen=True)
class When(Column):
    """A value where a condition holds; null elsewhere, unless `otherwise` says."""

    condition: Column = field(default_factory=lambda: Column(lambda table: pa.array([])))
    value: Column = field(default_factory=lambda: Column(lambda table: pa.array([])))

    def otherwise(self, value: Column) -> Column:
        def make(table: pa.Table) -> pa.Array:
            chosen, other = self.value.make(table), value.make(table)
            kind = other.type if pa.types.is_null(chosen.type) else chosen.type
            condition = pc.fill_null(self.condition.make(table), False)
            return pc.if_else(condition, chosen.cast(kind), other.cast(kind))

        return Column(make)


def _cast(values: pa.Array, kind: Any) -> pa.Array:
    wanted = kind if isinstance(kind, str) else kind.simpleString()
    if wanted == "string":
        if pa.types.is_binary(values.type):
            return values.cast(pa.string())
        return pa.array([text_of(each) for each in values.to_pylist()], pa.string())
    if isinstance(kind, DataType):
        return values.cast(to_arrow_type(kind, timezone="UTC"))
    return values.cast({"binary": pa.binary(), "bigint": pa.int64(), "int": pa.int32()}[wanted])


def text_of(value: Value) -> str | None:
    """A value as Spark casts it to a string."""
    match value:
        case None | str():
            return value
        case bool():
            return "true" if value else "false"
        case datetime.datetime():
            text = value.strftime("%Y-%m-%d %H:%M:%S.%f")
            return text.rstrip("0").rstrip(".")
        case Decimal():
            return f"{value:f}"
        case bytes():
            return value.decode()
        case _:
            return str(value)


def json_of(value: Value, kind: pa.DataType) -> Value:
    """A value as `to_json` writes it: of a struct every field, of a map its entries."""
    if value is None:
        return None
    if pa.types.is_struct(kind):
        return {each.name: json_of(value[each.name], each.type) for each in kind}
    if pa.types.is_map(kind):
        pairs = value.items() if isinstance(value, Mapping) else value
        return {text_of(name): json_of(each, kind.item_type) for name, each in pairs}
    if pa.types.is_list(kind):
        return [json_of(each, kind.value_type) for each in value]
    if isinstance(value, datetime.datetime):
        return value.strftime("%Y-%m-%dT%H:%M:%S.%f") + ("Z" if value.tzinfo else "")
    if isinstance(value, datetime.date):
        return value.isoformat()
    if isinstance(value, Decimal):
        return _Number(f"{value:f}")
    return base64.b64encode(value).decode() if isinstance(value, bytes) else value


class _Number(float):
    """Written as its digits stand."""

    def __new__(cls, text: str) -> _Number:
        made = super().__new__(cls, text)
        made.text = text
        return made

    text: str

    def __repr__(self) -> str:
        return self.text


def json_text(value: Value, kind: pa.DataType) -> str | None:
    """None for null: there is no text of it."""
    return None if value is None else _written(json_of(value, kind))


def _written(value: Value) -> str:
    match value:
        case dict():
            return (
                "{" + ",".join(f"{json.dumps(name)}:{_written(each)}" for name, each in value.items()) + "}"
            )
        case list():
            return "[" + ",".join(map(_written, value)) + "]"
        case _Number():
            return value.text
        case _:
            return json.dumps(value, ensure_ascii=False)


HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
LETTER_TYPES = {
    "topic": pa.string(), "partition": pa.int32(), "offset": pa.int64(), "timestamp": pa.timestamp("us", tz="UTC"),
    "key": pa.binary(), "value": pa.binary(), "reason": pa.string(), "step": pa.string(), "error": pa.string(),
}  # fmt: skip
LETTER_CELLS: dict[str, tuple[str, Callable[[dict[str, Any]], Value]]] = {
    "topic": (AS_ROW["topic"], lambda row: row["_hf"]["topic"]),
    "partition": (AS_ROW["partition"], lambda row: row["_hf"]["partition"]),
    "offset": (AS_ROW["offset"], lambda row: row["_hf"]["offset"]),
    "timestamp": (AS_ROW["timestamp"], lambda row: row["_timestamp"]),
    "key": (AS_ROW["key"], lambda row: row["_key"]),
    "value": (AS_ROW["value"], lambda row: row["_raw"]),
    "reason": (AS_ROW["reason"], lambda row: row["_reason"]),
    "step": (
        AS_ROW["step"],
        lambda row: None if re.match("parse$|sink:", row["_reason"]) else row["_reason"],
    ),
    "error": (AS_ROW["error"], lambda row: row["_error"].replace("\0", "\ufffd")),
}
"""Of a dead letter in a table, by column: its SQL, and what that means."""


class Functions:
    """`pyspark.sql.functions`, as far as sinks use it."""

    def __init__(self) -> None:
        self.known: dict[str, Meaning] = {
            "false": (lambda row: False, pa.bool_()),
            **{text: (meaning, LETTER_TYPES[name]) for name, (text, meaning) in LETTER_CELLS.items()},
            "unix_millis(_timestamp)": (lambda row: _millis(row["_timestamp"]), pa.int64()),
            "encode(concat(_hf.topic, ':', _hf.partition, '@', _hf.offset, '#', _hf.index), 'utf-8')": (
                lambda row: source_of(row["_hf"]),
                pa.binary(),
            ),
            "transform(coalesce(_headers, array()), h -> struct(h.key AS key, h.value AS value))": (
                lambda row: row["_headers"] or [],
                HEADERS,
            ),
        }
        """By text, what an expression means."""

    def col(self, name: str) -> Column:
        path = [name[1:-1].replace("``", "`")] if name.startswith("`") else name.split(".")

        def make(table: pa.Table) -> pa.Array:
            found = table.column(path[0]).combine_chunks()
            for part in path[1:]:
                found = pc.struct_field(found, part)
            return found

        return Column(make, path[-1])

    def lit(self, value: Value) -> Column:
        return Column(lambda table: pa.array([value] * table.num_rows, pa.scalar(value).type))

    def expr(self, text: str) -> Column:
        function, kind = self.known[text]
        return Column(lambda table: pa.array([function(row) for row in table.to_pylist()], kind))

    def coalesce(self, *columns: Column) -> Column:
        def make(table: pa.Table) -> pa.Array:
            found = [column.make(table) for column in columns]
            kind = next((each.type for each in found if not pa.types.is_null(each.type)), pa.null())
            return pc.coalesce(*(each.cast(kind) for each in found))

        return Column(make)

    def when(self, condition: Column, value: Column) -> When:
        def make(table: pa.Table) -> pa.Array:
            chosen = value.make(table)
            return pc.if_else(
                pc.fill_null(condition.make(table), False), chosen, pa.scalar(None, chosen.type)
            )

        return When(make, "", condition, value)

    def concat(self, *columns: Column) -> Column:
        return Column(lambda table: pc.binary_join_element_wise(*(each.make(table) for each in columns), ""))

    def hex(self, column: Column) -> Column:
        def make(table: pa.Table) -> pa.Array:
            found = column.make(table).to_pylist()
            return pa.array([None if each is None else each.hex().upper() for each in found], pa.string())

        return Column(make)

    def encode(self, column: Column, charset: str) -> Column:
        return Column(lambda table: column.make(table).cast(pa.binary()))

    def struct(self, *columns: Column) -> Column:
        def make(table: pa.Table) -> pa.Array:
            return pa.StructArray.from_arrays(
                [column.make(table) for column in columns], [column.name for column in columns]
            )

        return Column(make)

    def to_json(self, column: Column, options: Mapping[str, str] | None = None) -> Column:
        def make(table: pa.Table) -> pa.Array:
            found = column.make(table)
            return pa.array([json_text(each, found.type) for each in found.to_pylist()], pa.string())

        return Column(make)

    def validate_utf8(self, column: Column) -> Column:
        return column


def _millis(time: datetime.datetime | None) -> int | None:
    return None if time is None else round(time.timestamp() * 1000)


def source_of(place: Mapping[str, Any]) -> bytes:
    return f"{place['topic']}:{place['partition']}@{place['offset']}#{place['index']}".encode()


@cache
def _spark_schema(schema: pa.Schema) -> StructType:
    return from_arrow_schema(schema)


@dataclass(frozen=True)
class Frame:
    """A table, with those methods of Spark's frames that the engine and the sinks call."""

    table: pa.Table

    @property
    def schema(self) -> StructType:
        return _spark_schema(self.table.schema)

    @property
    def columns(self) -> list[str]:
        return list(self.table.column_names)

    @property
    def dtypes(self) -> list[tuple[str, str]]:
        return [(each.name, each.dataType.simpleString()) for each in self.schema.fields]

    @property
    def tally(self) -> Tally:
        places = self.table.column("_hf").to_pylist()
        hashes = (place_hash(at["topic"], at["partition"], at["offset"]) for at in places)
        return Tally(len(places), sum(hashes) & MASK)

    def select(self, *columns: Column | str) -> Frame:
        found = [Functions().col(each) if isinstance(each, str) else each for each in columns]
        arrays = [each.make(self.table) for each in found]
        return Frame(pa.table(arrays, names=[each.name for each in found]))

    def withColumn(self, name: str, column: Column) -> Frame:
        return self.withColumns({name: column})

    def withColumns(self, columns: Mapping[str, Column]) -> Frame:
        table = self.table
        for name, column in columns.items():
            values = column.make(self.table)
            at = table.schema.get_field_index(name)
            table = table.append_column(name, values) if at < 0 else table.set_column(at, name, values)
        return Frame(table)

    def sortWithinPartitions(self, *names: str) -> Frame:
        return Frame(self.table.sort_by([(name, "ascending") for name in names]))

    def where(self, condition: Column) -> Frame:
        return Frame(self.table.filter(pc.fill_null(condition.make(self.table), False)))

    def mapInArrow(self, task: Callable[..., Any], schema: Any) -> SimpleNamespace:
        def collect() -> list[dict[str, Any]]:
            batches = self.table.combine_chunks().to_batches()
            try:
                return [row for report in task(iter(batches)) for row in report.to_pylist()]
            except RuntimeError as error:
                raise PySparkException(str(error)) from error  # as Spark tells what a task raised

        return SimpleNamespace(
            collect=collect, limit=lambda count: SimpleNamespace(collect=lambda: collect()[:count])
        )

    def toArrow(self) -> pa.Table:
        return self.table.combine_chunks()

    def collect(self) -> list[Row]:
        return [Row(**row) for row in self.table.to_pylist()]


def writer_of(writers: int) -> Meaning:
    """In the place of `pmod(xxhash64(…))`: any hash will do that is the same each time."""
    return (lambda row: zlib.crc32(row["key"] or row["source"]) % writers, pa.int32())
