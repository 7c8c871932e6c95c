"""Rows out of messages: `DatabaseSink` into PostgreSQL or SQLite, as many ways as it offers."""

from __future__ import annotations

import sqlite3
import time
import uuid
from collections.abc import Sequence
from typing import Any

from holdfast.client import DatabaseSink, Message
from holdfast.client.database.store import open_database


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` messages, a row each, timed from the first handler's call to the last commit.

    `manner` is "each" (a statement per message), "pipeline" (the same, not waiting for each answer) or "batch" (one
    COPY, or executemany, per transaction).
    """
    url, table = spec["database"], f"rows_{uuid.uuid4().hex}"
    is_postgres = url.startswith("postgresql://")
    _prepare(url, table)
    begun_at = 0.0
    sink = DatabaseSink(
        spec["bootstrap_servers"],
        group=f"bench-{table}",
        topics=[spec["topic"]],
        database=url,
        pipeline=spec["manner"] == "pipeline",
    )
    insert = f"insert into {table} values ({', '.join(['%s' if is_postgres else '?'] * 3)})"
    handled = 0

    def row(message: Message) -> tuple[int, int, str]:
        assert message.value is not None
        return message.partition, message.offset, message.value.decode()

    def each(message: Message, connection: Any) -> None:
        nonlocal begun_at, handled
        if not begun_at:
            begun_at = time.monotonic()
        connection.execute(insert, row(message))
        handled += 1
        if handled == spec["count"]:
            sink.stop()

    def batch(messages: Sequence[Message], connection: Any) -> None:
        nonlocal begun_at, handled
        if not begun_at:
            begun_at = time.monotonic()
        if is_postgres:
            with connection.cursor().copy(f"copy {table} from stdin") as copy:
                for message in messages:
                    copy.write_row(row(message))
        else:
            connection.executemany(insert, map(row, messages))
        handled += len(messages)
        if handled >= spec["count"]:
            sink.stop()

    if spec["manner"] == "batch":
        sink.run_batches(batch)
    else:
        sink.run(each)
    seconds = time.monotonic() - begun_at
    stored = _count(url, table)
    if stored != spec["count"]:
        raise SystemExit(f"{stored} rows of {spec['count']} messages")
    return {"seconds": seconds, "count": stored}


def _prepare(url: str, table: str) -> None:
    database = open_database(url)
    database.connect()
    database.migrate()
    database.close()
    _execute(url, f"create table {table} (partition integer, position bigint, value text)")


def _count(url: str, table: str) -> int:
    rows = _execute(url, f"select count(*) from {table}")
    _execute(url, f"drop table {table}")
    return int(rows[0][0])


def _execute(url: str, statement: str) -> list[Any]:
    if url.startswith("postgresql://"):
        import psycopg

        with psycopg.connect(url, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []
    file = sqlite3.connect(url.removeprefix("sqlite:///"), isolation_level=None)
    try:
        return file.execute(statement).fetchall()
    finally:
        file.close()
