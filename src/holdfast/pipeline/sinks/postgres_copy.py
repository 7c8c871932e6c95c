"""What tasks do for the PostgreSQL sink: they copy rows, and find those that the server does not take.

Each task copies in a transaction of its own and reports how many rows it has. Where the server does not take one for
what is in it, it says so for the whole copy; a second job then copies parts of the rows, half by half, and takes them
all back, until the rows at fault stand alone.

Rows are copied as CSV, which Arrow writes without a Python object per value; every PostgreSQL type reads its own text,
so a table that was made by hand may use narrower or other types of the same family (`uuid` or `varchar(20)` for a
string) and checks the values itself. Types that would change a value without an error are refused: they round it, cut
it, fill it up with spaces, or read it in the server's time zone. What is nested becomes `jsonb`.
"""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import psycopg.errors
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv

from holdfast.pipeline.digest import MASK
from holdfast.pipeline.row_digest import DigestKey, Digests, from_database, hasher_of, total
from holdfast.pipeline.sinks.base import SinkError, SinkUnavailable
from holdfast.pipeline.sinks.columns import JSON_OPTIONS
from holdfast.pipeline.sinks.lineage import digest_of_lineage

if TYPE_CHECKING:
    from pyspark.sql import Column
    from pyspark.sql.types import DataType

CONNECT_SECONDS = 10
ENCODING = "UTF8"
"""In which rows are copied, whatever the database keeps text in: the server converts, or rejects the row."""
REPORT = "attempt long, rows long, digest string, content string"
REJECTED_REPORT = "topic string, partition int, offset long, why string"
REJECTED = pa.schema(
    {"topic": pa.string(), "partition": pa.int32(), "offset": pa.int64(), "why": pa.string()}
)
COLUMN = re.compile(r"COPY [^\n]*, line \d+, column ([^:\n]+)")
"""Of what the server says about where a copy has stopped."""
OF_ROWS = (psycopg.DataError, psycopg.errors.NotNullViolation)
"""What the server raises for what is in a row."""
OF_TABLE = (
    *OF_ROWS,
    psycopg.IntegrityError,
    psycopg.errors.ProgramLimitExceeded,
    psycopg.errors.RaiseException,
)
"""And for a row beside others, where the table has rules: the last ones are too long for an index, and triggers."""
TASK_MARK = "holdfast-copy-failed:"
"""Before the JSON by which a task tells its driver what the server said, through Spark's own text."""

Connection = psycopg.Connection[tuple[Any, ...]]


def connect(url: str, **options: Any) -> Connection:
    return psycopg.connect(url, connect_timeout=CONNECT_SECONDS, client_encoding=ENCODING, **options)


@dataclass(frozen=True)
class Digesting:
    """How tasks take the digests of rows."""

    key: DigestKey
    columns: Mapping[str, str]
    """By name, the types that they have for Spark."""
    is_kept: bool
    """Each row has its own beside it, in a last column."""

    def of(self, batch: pa.RecordBatch) -> Digests:
        places = batch.column(0)
        return hasher_of(self.key).digests(
            {name: from_database(batch.column(name), kind) for name, kind in self.columns.items()},
            dict(zip((each.name for each in places.type), places.flatten(), strict=True)),
        )


def copy_task(
    batches: Iterable[pa.RecordBatch], url: str, statement: str, digesting: Digesting | None = None
) -> Iterator[pa.RecordBatch]:
    """What one task does: copies its rows in a transaction of its own, then reports them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    rows, digest, content = 0, 0, 0
    connection: Connection | None = None
    try:
        with contextlib.ExitStack() as stack:
            copy: Any = None
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                if connection is None:
                    connection = connect(url)
                    connection.execute(
                        "SET synchronous_commit = off"
                    )  # an unlogged table has nothing to wait for
                    copy = stack.enter_context(connection.cursor().copy(statement.encode()))
                digests = None if digesting is None else digesting.of(batch)
                is_kept = digesting is not None and digesting.is_kept
                copy.write(_tagged(batch, attempt, digests if is_kept else None))
                rows += batch.num_rows
                digest += digest_of_lineage(batch.column(0))
                content += 0 if digests is None else total(digests)
        if connection is not None:
            connection.commit()
    except psycopg.Error as error:
        told = {
            "said": first_line(error),
            "is_away": isinstance(error, psycopg.OperationalError),
            "is_about_rows": isinstance(error, OF_ROWS),
        }
        raise RuntimeError(TASK_MARK + json.dumps(told)) from None
    finally:
        if connection is not None:
            connection.close()
    counted = {"rows": rows, "digest": str(digest & MASK), "content": str(content)}
    yield pa.RecordBatch.from_pylist([{"attempt": attempt, **counted}])


def _tagged(batch: pa.RecordBatch, attempt: int, digests: Digests | None = None) -> bytes:
    """What is copied of rows: all but their lineage, behind the attempt they belong to; then their digests."""
    tag = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
    tagged = batch.select(batch.schema.names[1:]).add_column(0, "attempt", tag)
    if digests is not None:
        numbers = [str(low | high << 64) for low, high in digests.tolist()]
        tagged = tagged.append_column("digest", pa.array(numbers, pa.string()))
    return as_csv(tagged)


def rejected_task(
    batches: Iterable[pa.RecordBatch], url: str, statement: str, digesting: Digesting | None = None
) -> Iterator[pa.RecordBatch]:
    """What one task does to find the rows that the server does not take: it copies parts, and takes them all back."""
    found: list[tuple[Any, str]] = []

    def look(connection: Connection, part: pa.RecordBatch) -> None:
        try:
            with (
                connection.transaction(force_rollback=True),
                connection.cursor().copy(statement.encode()) as copy,
            ):
                is_kept = digesting is not None and digesting.is_kept
                copy.write(
                    _tagged(part, 0, digesting.of(part) if digesting is not None and is_kept else None)
                )
        except OF_ROWS as error:
            if part.num_rows == 1:
                found.append((part.column(0)[0].as_py(), f"{first_line(error)}{_where(error, part)}"))
                return
            half = part.num_rows // 2
            for each in (part.slice(0, half), part.slice(half)):
                look(connection, each)

    with connect(url, autocommit=True) as connection:
        for batch in batches:
            if batch.num_rows:
                look(connection, batch)
    yield pa.RecordBatch.from_pylist([{**place, "why": why} for place, why in found], schema=REJECTED)


def _where(error: psycopg.Error, row: pa.RecordBatch) -> str:
    """The column that is at fault; of bytes that are no text the server names none."""
    told = COLUMN.search(error.diag.context or "")
    names = [told[1]] if told else [name for name in row.schema.names[1:] if "\0" in str(row.column(name)[0])]
    return f" in column {', '.join(map(repr, names))}" if names else ""


class NotTaken(SinkError):
    """The server does not take a row for what is in it."""


def told_by_task(sink: str, error: BaseException) -> SinkError | None:
    """What the server said to a task, out of what Spark makes of it; None when it was not the server."""
    text = str(error)
    at = text.find(TASK_MARK)
    if at < 0:
        return None
    told = json.JSONDecoder().raw_decode(text, at + len(TASK_MARK))[0]
    kind = SinkUnavailable if told["is_away"] else NotTaken if told["is_about_rows"] else SinkError
    return kind(f"sink {sink!r}: PostgreSQL does not take the rows: {told['said']}; nothing was committed")


def first_line(error: psycopg.Error) -> str:
    """What the server said, without its context."""
    return error.diag.message_primary or str(error).strip().split("\n")[0]


# ------------------------------------------------------------------------ types, and the text of values

_PLAIN = {
    "boolean": "boolean",
    "tinyint": "smallint",
    "smallint": "smallint",
    "int": "integer",
    "bigint": "bigint",
    "float": "real",
    "double": "double precision",
    "string": "text",
    "binary": "bytea",
    "date": "date",
    "timestamp": "timestamp with time zone",
    "timestamp_ntz": "timestamp without time zone",
}
MICROSECOND_DIGITS = 6
_NESTED = ("array", "map", "struct")
_WHOLE = ("smallint", "integer", "bigint", "numeric")
_FLOATING = ("real", "double precision", "numeric")
_TIMES = ("timestamp with time zone", "timestamp without time zone")
_FAMILIES = {
    "boolean": ("boolean",),
    "smallint": _WHOLE,
    "integer": _WHOLE,
    "bigint": _WHOLE,
    "real": _FLOATING,
    "double precision": ("double precision", "numeric"),
    "numeric": _WHOLE,
    "bytea": ("bytea",),
    "date": ("date", "timestamp without time zone"),
    "timestamp with time zone": _TIMES,
    "timestamp without time zone": ("timestamp without time zone",),
    "jsonb": ("jsonb", "json", "text"),
}
_NOT_TEXT = {
    *("boolean", "bytea", "date", "oid", *_WHOLE, *_FLOATING, *_TIMES),
    *("character", "name", '"char"'),  # they fill up or cut
}
_PRINTED = re.compile(r"(?P<name>[^(]+)(?:\((?P<sizes>[\d,-]+)\))?(?P<rest>.*)")


def postgres_type(kind: DataType) -> str | None:
    """The type of a column for these values, as PostgreSQL prints it; None when there is none."""
    text = kind.simpleString()
    if text in _PLAIN:
        return _PLAIN[text]
    if text.startswith("decimal"):
        return text.replace("decimal", "numeric")
    if text.startswith(("varchar", "char")):
        return "text"
    return "jsonb" if text.startswith(_NESTED) else None


def is_fitting(held: str, wanted: str) -> bool:
    """Whether a column of the type `held` reads values meant for `wanted`."""
    base, sizes = _parts(held)
    family, wanted_sizes = _parts(wanted)
    if family == "text":
        return base not in _NOT_TEXT
    if base not in _FAMILIES[family]:
        return False
    if not sizes:
        return True
    if base in _TIMES:
        return sizes[0] >= MICROSECOND_DIGITS
    if base == "numeric" and family in ("real", "double precision"):
        return False
    scale, wanted_scale = ((*each, 0)[1] if each else 0 for each in (sizes, wanted_sizes))
    return base != "numeric" or scale >= wanted_scale


def comes_back(held: str, wanted: str) -> bool:
    """Whether a column of the type `held` prints values meant for `wanted` as they were written, but for spelling."""
    base, family = _parts(held)[0], _parts(wanted)[0]
    alike = {"text": ("text", "character varying"), "jsonb": ("jsonb", "json", "text")}
    return base in alike.get(family, (family,))


def _parts(printed: str) -> tuple[str, tuple[int, ...]]:
    """A type as PostgreSQL prints it, without its sizes, and those: `numeric`, (10, 2)."""
    found = _PRINTED.fullmatch(printed)
    assert found is not None
    sizes = tuple(int(each) for each in (found["sizes"] or "").split(",") if each)
    return found["name"] + found["rest"], sizes


def travelling(value: Column, kind: DataType) -> Column:
    """A value in a form that Arrow's CSV writes as PostgreSQL reads it."""
    from pyspark.sql import functions

    text = kind.simpleString()
    if text == "binary":
        return functions.concat(functions.lit("\\x"), functions.hex(value))
    if text.startswith(_NESTED):
        return functions.to_json(value, JSON_OPTIONS)
    if text.startswith("decimal"):
        return value.cast("string")
    return value


def as_csv(batch: pa.RecordBatch) -> bytes:
    """Strings quoted, nulls as nothing: so an empty string is none. Years that Arrow cannot write become a text that no
    server takes; where a time has a zone, Arrow would write another year."""
    for at, field in enumerate(batch.schema):
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            text = batch.column(at).cast(pa.timestamp(field.type.unit)).cast(pa.string())
            batch = batch.set_column(at, field.name, pc.binary_join_element_wise(text, "Z", ""))
    sink = io.BytesIO()
    pyarrow.csv.write_csv(batch, sink, pyarrow.csv.WriteOptions(include_header=False, quoting_style="needed"))
    return sink.getvalue()
