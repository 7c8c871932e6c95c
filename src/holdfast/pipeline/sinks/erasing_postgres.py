"""Erasing rows of a table: one transaction reads them, deletes them and adds the entry to the ledger.

PostgreSQL evaluates the condition, in its own SQL. The rows are read as an audit reads them, for their digests; the
table of an upsert has those beside its rows. The transaction sees one moment: where somebody else has changed one of
the rows meanwhile, the server refuses, and nothing is erased.
"""

from __future__ import annotations

from typing import Any, Final

import pyarrow as pa
from psycopg import errors, sql

from holdfast.pipeline.definition.model import PostgresSink
from holdfast.pipeline.definition.streams import merge_key
from holdfast.pipeline.ledger import Entry, Erasure
from holdfast.pipeline.row_digest import MASK, database_form, from_database
from holdfast.pipeline.sinks import postgres_sql
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.erasing import Removed, Request, Seal, WrongCondition, first_line
from holdfast.pipeline.sinks.postgres import PostgresSinkWriter
from holdfast.pipeline.sinks.postgres_copy import Connection

ROWS_TOGETHER: Final = 10_000
LINEAGE: Final = (
    ("topic", pa.string()),
    ("partition", pa.int32()),
    ("offset", pa.int64()),
    ("index", pa.int32()),
)


class PostgresEraser:
    def __init__(self, sink: PostgresSink, writer: PostgresSinkWriter, request: Request) -> None:
        self._sink, self._writer, self._request = sink, writer, request
        self._table = sql.Identifier(sink.schema_name, sink.table)
        # The operator's own words, as they would be typed into psql; `%` is no placeholder here.
        self._where: Any = sql.SQL("(" + request.where.replace("%", "%%") + "\n)")

    def count(self) -> int:
        with self._writer.erasing() as (connection, _, columns):
            if not columns:
                return 0
            found = self._execute(connection, "SELECT count(*) FROM {} WHERE {}").fetchone()
        return 0 if found is None else int(found[0])

    def erase(self, seal: Seal) -> Erasure | None:
        with self._writer.erasing() as (connection, entries, columns):
            if not columns:
                return None
            removed = Removed.of(entries, self._request)
            self._read(connection, entries[-1], columns, removed)
            if not removed.rows:
                return None
            erasure = removed.erasure()
            deleted = self._execute(connection, "DELETE FROM {} WHERE {}").rowcount
            if deleted != removed.rows:
                raise SinkError(
                    f"sink {self._sink.name!r}: {removed.rows} rows were to be erased, and the server deleted "
                    f"{deleted}: a trigger or a rule of the table is in the way, or the condition is not always the "
                    "same. Nothing was erased"
                )
            if self._sink.mode == "scd2":  # spans end at the versions that are left
                sink, key = self._sink, merge_key(self._sink)
                names = sink.schema_name, sink.table
                connection.execute(
                    postgres_sql.Target(*names, columns, key, False, sink.order_by, sink.key).spans()
                )
            self._writer.advance(connection, seal(erasure, removed.went))
            return erasure

    def _execute(self, connection: Connection, statement: Any) -> Any:
        try:
            return connection.execute(sql.SQL(statement).format(self._table, self._where), ())
        except (errors.SyntaxError, errors.DataError, errors.ProgrammingError) as error:
            raise WrongCondition(f"sink {self._sink.name!r}: {first_line(error)}") from error

    def _read(self, connection: Connection, newest: Entry, columns: dict[str, str], removed: Removed) -> None:
        """Lineage, and what the digest of each row is made of, or the digest itself."""
        is_upsert = self._sink.mode != "append"
        types = {} if is_upsert or newest.content is None else newest.content.columns
        wanted = [name for name in types if name in columns]
        texts = [sql.SQL(database_form(columns[name])).format(sql.Identifier(name)) for name in wanted]
        kept = [sql.SQL("_hf_content")] if is_upsert and postgres_sql.CONTENT in columns else []
        listed = sql.SQL(", ").join([*(sql.SQL(f"_hf_{name}") for name, _ in LINEAGE), *kept, *texts])
        statement = sql.SQL("SELECT {} FROM {} WHERE {} FOR UPDATE").format(listed, self._table, self._where)
        with connection.cursor(name="hf_erased") as cursor:
            try:
                cursor.execute(statement, ())
                while rows := cursor.fetchmany(ROWS_TOGETHER):
                    self._take(list(zip(*rows, strict=True)), wanted, bool(kept), types, removed)
            except (errors.SyntaxError, errors.DataError, errors.ProgrammingError) as error:
                raise WrongCondition(f"sink {self._sink.name!r}: {first_line(error)}") from error

    def _take(
        self, values: list[Any], wanted: list[str], has_digests: bool, types: Any, removed: Removed
    ) -> None:
        lineage = {name: pa.array(each, kind) for each, (name, kind) in zip(values, LINEAGE, strict=False)}
        rest = values[len(LINEAGE) :]
        if self._sink.mode != "append":
            digests = [int(each) for each in rest[0] if each is not None] if has_digests else []
            removed.went = (removed.went + sum(digests)) & MASK
            removed.add(lineage)
            return
        cells = {
            name: from_database(pa.array(each, pa.string()), types[name])
            for name, each in zip(wanted, rest, strict=True)
        }
        removed.take(lineage, cells)
