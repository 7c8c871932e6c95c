"""What a sink stores of a row, and whether it fits what the sink holds already.

A sink stores the lineage `_hf`, unknown fields that are kept, what aggregates were made of, and every column whose name
does not start with an underscore; the other reserved ones are there for its expressions. Columns may be added where
`schema: add-columns` says so; one that is gone is then stored as null. A column that changes its type always stops the
pipeline: no cast is ever guessed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from holdfast.pipeline.core.sql import LINEAGE, quoted
from holdfast.pipeline.definition.model import DeltaSink, PostgresSink
from holdfast.pipeline.definition.naming import IS_CURRENT, IS_DELETED, VALID_FROM, VALID_TO, VERSION_COLUMNS
from holdfast.pipeline.definition.sink_words import SchemaChange
from holdfast.pipeline.ledger import Rejected
from holdfast.pipeline.sinks.base import REJECTED_MAX, Problem, SchemaChanged

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import DataType, StructField, StructType

RESERVED = "_"
UNKNOWN = "_unknown"
"""Fields the definition does not name, kept as JSON where it says `unknown: keep`."""
COUNT = "_hf_count"
DIGEST = "_hf_digest"
"""Of an aggregate: how many rows are in it, and the digest of their places (`holdfast.pipeline.digest`)."""
STORED = frozenset({LINEAGE, UNKNOWN, COUNT, DIGEST})
"""The reserved columns that are stored."""
JSON_KEYS = frozenset(
    {"boolean", "byte", "short", "integer", "long", "float", "double", "decimal", "string", "char", "varchar"}
)
"""Types whose values `to_json` writes as themselves where they are a map's keys, as Spark calls them."""
STORABLE = JSON_KEYS | {"binary", "date", "timestamp", "timestamp_ntz", "array", "map", "struct"}
"""Types that every reader of a sink knows."""
SPANS = frozenset({VALID_TO, IS_CURRENT})
"""What follows from the other versions of the key: no part of a row's digest."""
ORDERED = frozenset({"tinyint", "smallint", "int", "bigint", "decimal", "date", "timestamp", "timestamp_ntz"})
"""Types of an `order_by`."""
INVALID_TEXT = "INVALID_UTF8_STRING"
JSON_OPTIONS = {
    "ignoreNullFields": "false",
    "timestampFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSSXXX",
    "timestampNTZFormat": "yyyy-MM-dd'T'HH:mm:ss.SSSSSS",
}
"""For `to_json`, wherever rows become text: every field is there, and times have all their digits."""


def is_stored(name: str) -> bool:
    return name in STORED or not name.startswith(RESERVED)


def stored_schema(rows: StructType) -> StructType:
    """The columns of these rows that a sink keeps, lineage first."""
    from pyspark.sql.types import StructType

    kept = [field for field in rows.fields if is_stored(field.name)]
    kept.sort(key=lambda field: field.name != LINEAGE)
    return StructType(kept)


def fitting_schema(sink: str, held: StructType | None, rows: StructType, setting: SchemaChange) -> StructType:
    """The schema under which these rows are stored beside those that are there; `SchemaChanged` when they cannot."""
    from pyspark.sql.types import StructField, StructType

    if held is None:
        return rows
    ours = {field.name: field for field in held.fields}
    theirs = {field.name: field for field in rows.fields}
    for name, field in theirs.items():
        known = ours.get(name)
        if known is None:
            continue
        before, now = known.dataType.simpleString(), field.dataType.simpleString()
        if before != now:
            raise SchemaChanged(
                f"sink {sink!r} holds column {name!r} as {before}, and the rows bring it as {now}; a type is never "
                f"changed by itself: cast it in a step (CAST({name} AS {before})), or give it another name"
            )
    added = [field for name, field in theirs.items() if name not in ours]
    gone = [name for name in ours if name not in theirs]
    if setting == "fail" and (added or gone):
        differing = {"new": [field.name for field in added], "missing": gone}
        told = "; ".join(
            f"{word} {', '.join(map(repr, names))}" for word, names in differing.items() if names
        )
        raise SchemaChanged(
            f"the rows do not have the columns that sink {sink!r} holds: {told}. Allow it with `schema: add-columns` "
            "in the sink, or give the rows the columns it has"
        )
    new = [StructField(field.name, field.dataType, True) for field in added]
    return StructType([*held.fields, *new])


def projected(rows: DataFrame, schema: StructType, extra: tuple[Column, ...] = ()) -> DataFrame:
    """The rows with exactly these columns, null where they have none; then `extra`."""
    from pyspark.sql import functions

    present = set(rows.columns)
    columns = [
        column_named(field.name)
        if field.name in present
        else functions.lit(None).cast(field.dataType).alias(field.name)
        for field in schema.fields
    ]
    return rows.select(*columns, *extra)


def with_checked_text(rows: DataFrame) -> DataFrame:
    """The same rows; a job over them fails (`INVALID_TEXT`) at a text that is not UTF-8: a CAST of bytes gives it."""
    from pyspark.sql import functions

    return rows.withColumns({name: functions.validate_utf8(column_named(name)) for name in _texts(rows)})


def rejected_for_text(sink: str, rows: DataFrame) -> list[Rejected]:
    """The rows that `with_checked_text` fails at."""
    from pyspark.sql import functions

    found: list[Rejected] = []
    for name in _texts(rows):
        is_wrong = ~functions.is_valid_utf8(column_named(name))
        found += rejected_where(sink, rows, is_wrong, f"column {name!r} is not UTF-8")
    return found


def rejected_where(sink: str, rows: DataFrame, condition: Column, why: str) -> list[Rejected]:
    found = rows.where(condition).select(LINEAGE).limit(REJECTED_MAX + 1)
    places = [row[LINEAGE] for row in found.collect()]
    return [Rejected(at["topic"], at["partition"], at["offset"], sink, why) for at in places]


def _texts(rows: DataFrame) -> list[str]:
    return [name for name, kind in rows.dtypes if kind == "string" and is_stored(name)]


def column_named(name: str) -> Column:
    """The column of exactly this name, dots and all."""
    from pyspark.sql import functions

    return functions.col(quoted(name))


def check_partitioning(partition_by: tuple[str, ...], rows: StructType) -> list[Problem]:
    from pyspark.sql.types import ArrayType, BinaryType, MapType, StructType, TimestampType

    found = []
    stored = {field.name: field.dataType for field in stored_schema(rows).fields}
    for name in partition_by:
        kind = stored.get(name)
        if kind is None or name == LINEAGE:
            having = ", ".join(other for other in stored if other != LINEAGE)
            found.append(f"there is no column {name!r}; the rows have {having}")
        elif isinstance(kind, ArrayType | BinaryType | MapType | StructType):
            found.append(
                f"column {name!r} is {kind.simpleString()}, which cannot be part of a directory's name"
            )
        elif isinstance(kind, TimestampType):
            found.append(
                f"column {name!r} is timestamp, and a directory's name has no zone: readers in another than UTC "
                f"would see another time. Partition by a date (to_date({name})), a timestamp_ntz or a string"
            )
    if len(set(partition_by)) < len(partition_by):
        found.append("a column is named twice")
    if partition_by and set(stored) <= {*partition_by, LINEAGE}:
        found.append("it names every column, and nothing is left to store")
    return [Problem("partition_by", message) for message in found]


def _types_in(kind: DataType) -> Iterator[DataType]:
    """A type and all that is in it."""
    yield kind
    inner = [getattr(kind, name) for name in ("elementType", "keyType", "valueType") if hasattr(kind, name)]
    for each in (*inner, *(field.dataType for field in getattr(kind, "fields", ()))):
        yield from _types_in(each)


def check_json_keys(fields: Iterable[StructField]) -> list[Problem]:
    """Maps in what becomes JSON: of a key that is a time or bytes, Spark writes a number or an object's address."""
    return [
        Problem(
            "",
            f"column {field.name!r} is {field.dataType.simpleString()}, and keys in JSON are texts or numbers: "
            f"CAST(… AS map<string,…>), or leave it out",
        )
        for field in fields
        for each in _types_in(field.dataType)
        if hasattr(each, "keyType") and each.keyType.typeName() not in JSON_KEYS
    ]


def check_columns(rows: StructType) -> list[Problem]:
    """Names that differ in case only: files would hold both, and no SQL reader could tell them apart. And types that
    nothing but Spark knows."""
    seen: dict[str, str] = {}
    found = []
    for field in stored_schema(rows).fields:
        kind = field.dataType.simpleString()
        if kind == "void":
            found.append(
                f"column {field.name!r} is always NULL and has no type: CAST(NULL AS …) gives it one"
            )
        elif {each.typeName() for each in _types_in(field.dataType)} - STORABLE:
            found.append(f"column {field.name!r} is {kind}, which this sink cannot store")
        other = seen.setdefault(field.name.lower(), field.name)
        if other != field.name:
            found.append(f"the columns {other!r} and {field.name!r} differ in capital letters only")
        elif list(rows.fieldNames()).count(field.name) > 1:
            found.append(f"there are two columns named {field.name!r}")
    return [Problem("", message) for message in found]


def check_merge(definition: PostgresSink | DeltaSink, rows: StructType) -> list[Problem]:
    """What is wrong with a sink that merges rows by key, for rows of this schema."""
    stored = {field.name: field.dataType for field in stored_schema(rows).fields}
    key, mode, problems = definition.key, definition.mode, list[Problem]()
    if mode != "append" and not key:
        problems.append(Problem("key", f"{mode} needs the columns that make a row one of its own"))
    if mode == "append" and key:
        problems.append(Problem("key", "append keeps every row; a key is for `mode: upsert`"))
    problems += [Problem("key", f"there is no column {name!r}") for name in key if name not in stored]
    problems += [
        Problem("key", f"column {name!r} is {stored[name].simpleString()}; a key is made of single values")
        for name in key
        if name in stored and stored[name].typeName() in ("array", "map", "struct")
    ]
    if mode == "scd2":
        problems += [
            Problem("", f"the rows have a column {name!r}, which scd2 adds: give theirs another name")
            for name in VERSION_COLUMNS
            if name in stored
        ]
    if mode == "upsert" and key and set(stored) - {LINEAGE} <= set(key):
        problems.append(Problem("key", "it names every column; rows that have nothing else need no upsert"))
    return problems + _check_order(definition, stored) + _check_deletes(definition, rows)


def with_versions(rows: DataFrame, definition: PostgresSink | DeltaSink) -> DataFrame:
    """Of `scd2`: the rows with the columns of a version. Where its span ends, only the merge can tell."""
    from pyspark.sql import functions

    if definition.mode != "scd2" or definition.order_by is None:
        return rows
    since = column_named(definition.order_by)
    added = {
        VALID_FROM: since,
        VALID_TO: functions.lit(None).cast(rows.schema[definition.order_by].dataType),
        IS_CURRENT: functions.lit(False),
    }
    if definition.delete_when is not None:
        added[IS_DELETED] = deletes_of(definition.delete_when)
    return rows.withColumns(added)


def deletes_of(text: str) -> Column:
    """Whether a row deletes; what is null does not."""
    from pyspark.sql import functions

    return functions.coalesce(functions.expr(text), functions.lit(False))


def _check_order(definition: PostgresSink | DeltaSink, stored: Mapping[str, DataType]) -> list[Problem]:
    """Values that Spark, PostgreSQL and the audit put in the same order."""
    order = definition.order_by
    if order is None:
        return []
    if order not in stored:
        return [Problem("order_by", f"there is no column {order!r}")]
    kind = stored[order].simpleString()
    if kind.partition("(")[0] in ORDERED:
        return []
    return [
        Problem(
            "order_by", f"column {order!r} is {kind}; rows are ordered by whole numbers, decimals or times"
        )
    ]


def _check_deletes(definition: PostgresSink | DeltaSink, rows: StructType) -> list[Problem]:
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import SparkSession

    text = definition.delete_when
    if text is None:
        return []
    if definition.mode == "append":
        return [Problem("delete_when", "only `mode: upsert` and `scd2` delete")]
    spark = SparkSession.getActiveSession()
    if spark is None:
        return []
    try:
        kind = spark.createDataFrame([], rows).selectExpr(f"({text}) AS it").schema[0].dataType
    except (AnalysisException, ParseException) as error:
        return [Problem("delete_when", str(error).splitlines()[0])]
    if kind.simpleString() != "boolean":
        return [Problem("delete_when", f"it gives {kind.simpleString()}, and has to be true or false")]
    return []
