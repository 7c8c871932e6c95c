"""What tasks do for the PostgreSQL sink: they copy rows, and find those that the server does not take.

Each task copies in a transaction of its own and reports how many rows it has. Where the server does not take one for
what is in it, it says so for the whole copy; a second job then copies parts of the rows, half by half, and takes them
all back, until the rows at fault stand alone.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterable, Iterator
from typing import Any

import psycopg
import psycopg.errors
import pyarrow as pa

from holdfast.pipeline.digest import MASK
from holdfast.pipeline.sinks.base import SinkError, SinkUnavailable
from holdfast.pipeline.sinks.lineage import digest_of_lineage
from holdfast.pipeline.sinks.postgres_types import as_csv

CONNECT_SECONDS = 10
ENCODING = "UTF8"
"""In which rows are copied, whatever the database keeps text in: the server converts, or rejects the row."""
REPORT = "attempt long, rows long, digest string"
REJECTED_REPORT = "topic string, partition int, offset long, why string"
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


def copy_task(batches: Iterable[pa.RecordBatch], url: str, statement: str) -> Iterator[pa.RecordBatch]:
    """What one task does: copies its rows in a transaction of its own, then reports them."""
    from pyspark import TaskContext

    context = TaskContext.get()
    attempt = 0 if context is None else context.taskAttemptId()
    rows, digest = 0, 0
    connection: Connection | None = None
    try:
        with contextlib.ExitStack() as stack:
            copy: Any = None
            for batch in batches:
                if batch.num_rows == 0:
                    continue
                if connection is None:
                    connection = psycopg.connect(
                        url, connect_timeout=CONNECT_SECONDS, client_encoding=ENCODING
                    )
                    connection.execute(
                        "SET synchronous_commit = off"
                    )  # an unlogged table has nothing to wait for
                    copy = stack.enter_context(connection.cursor().copy(statement.encode()))
                tag = pa.repeat(pa.scalar(attempt, pa.int64()), batch.num_rows)
                values = batch.select(batch.schema.names[1:])
                copy.write(as_csv(values.add_column(0, "attempt", tag)))
                rows += batch.num_rows
                digest += digest_of_lineage(batch.column(0))
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
    yield pa.record_batch(
        {
            "attempt": pa.array([attempt], pa.int64()),
            "rows": pa.array([rows], pa.int64()),
            "digest": pa.array([str(digest & MASK)], pa.string()),
        }
    )


def rejected_task(batches: Iterable[pa.RecordBatch], url: str, statement: str) -> Iterator[pa.RecordBatch]:
    """What one task does to find the rows that the server does not take: it copies parts, and takes them all back."""
    found: list[tuple[Any, str]] = []

    def look(connection: Connection, part: pa.RecordBatch) -> None:
        attempt = pa.repeat(pa.scalar(0, pa.int64()), part.num_rows)
        values = part.select(part.schema.names[1:]).add_column(0, "attempt", attempt)
        try:
            with (
                connection.transaction(force_rollback=True),
                connection.cursor().copy(statement.encode()) as copy,
            ):
                copy.write(as_csv(values))
        except OF_ROWS as error:
            if part.num_rows == 1:
                found.append((part.column(0)[0].as_py(), f"{first_line(error)}{_where(error, part)}"))
                return
            half = part.num_rows // 2
            for each in (part.slice(0, half), part.slice(half)):
                look(connection, each)

    with psycopg.connect(
        url, connect_timeout=CONNECT_SECONDS, client_encoding=ENCODING, autocommit=True
    ) as connection:
        for batch in batches:
            if batch.num_rows:
                look(connection, batch)
    yield pa.record_batch(
        {
            "topic": pa.array([place["topic"] for place, _ in found], pa.string()),
            "partition": pa.array([place["partition"] for place, _ in found], pa.int32()),
            "offset": pa.array([place["offset"] for place, _ in found], pa.int64()),
            "why": pa.array([why for _, why in found], pa.string()),
        }
    )


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
