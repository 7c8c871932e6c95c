"""The PostgreSQL sink: its ledger and its table, in one snapshot of a transaction that may only read.

The transaction is REPEATABLE READ, READ ONLY and stays open until the reader is closed, so ledger and rows are of one
moment however long it takes. A role with USAGE on the schema and SELECT on the table and on
`holdfast_ledger` is enough. Rows travel by COPY, as text, which Arrow turns into columns.
"""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
from psycopg import errors, sql

from holdfast.audit.lineage import NOWHERE, LineageBatch, split_columns
from holdfast.audit.model import Fate, Finding, Unproven
from holdfast.audit.sinks.base import KeyedBatch, SinkScope, SinkUnreadable, WindowBatch
from holdfast.audit.sinks.ledger import NOWHERE_YET, number_holes, read_entry
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, Positions

LEDGER: Final = "holdfast_ledger"
LINEAGE_COLUMNS: Final = ("_hf_topic", "_hf_partition", "_hf_offset", "_hf_index")
COPIED_BYTES: Final = 8 * 1024 * 1024
"""Of a table's text, turned into columns at once."""
CONNECT_SECONDS: Final = 10

_ARROW: Final = {
    "boolean": pa.bool_(),
    "smallint": pa.int16(),
    "integer": pa.int32(),
    "bigint": pa.int64(),
    "real": pa.float32(),
    "double precision": pa.float64(),
    "date": pa.date32(),
}
"""Of columns in windows and keys; anything else comes as text, times apart."""


class PostgresReader:
    """One PostgreSQL sink, as it stood when it was opened."""

    kind = "postgres"
    is_exact = True

    def __init__(self, definition: PipelineDefinition, sink: PostgresSink) -> None:
        self.name = sink.name
        self.takes = sink.rows
        self._sink = sink
        self._pipeline = definition.name
        self._connection = self._connect()
        self._found: list[Finding] = []
        self.rows_seen = 0
        try:
            with self._explained():
                self._has_ledger = self._oid(LEDGER) is not None
                self.column_types: Mapping[str, str] = self._columns()
                """By column, as PostgreSQL prints its type; empty when there is no table."""
                self._entries = self._read_ledger()
        except BaseException:
            self.close()
            raise

    def _connect(self) -> psycopg.Connection[tuple[Any, ...]]:
        try:
            connection = psycopg.connect(
                self._sink.url, connect_timeout=CONNECT_SECONDS, application_name="holdfast audit"
            )
            connection.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            connection.read_only = True
            # Two servers may print the same moment, or the same number, in their own way.
            connection.execute("SET LOCAL TIME ZONE 'UTC'")
            connection.execute("SET LOCAL extra_float_digits = 1")
            connection.execute("SET LOCAL statement_timeout = 0")
        except psycopg.Error as error:
            raise SinkUnreadable(
                f"sink {self.name!r}: PostgreSQL cannot be reached: {str(error).strip()}"
            ) from error
        return connection

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except errors.InsufficientPrivilege as error:
            raise SinkUnreadable(
                f"sink {self.name!r}: {_first(error)}. The role that audits needs USAGE on the schema "
                f"{self._sink.schema_name!r} and SELECT on {self._sink.table!r} and on {LEDGER!r}"
            ) from error
        except psycopg.Error as error:
            raise SinkUnreadable(f"sink {self.name!r}: {_first(error)}") from error

    def _oid(self, table: str) -> int | None:
        found = self._connection.execute(
            "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p', 'v', 'm', 'f')",
            (self._sink.schema_name, table),
        ).fetchone()
        return None if found is None else int(found[0])

    def _columns(self) -> dict[str, str]:
        found = self._connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped ORDER BY attnum",
            (self._oid(self._sink.table) or 0,),
        ).fetchall()
        return {str(name): str(kind) for name, kind in found}

    # -------------------------------------------------------------------- the ledger

    def _read_ledger(self) -> list[Entry]:
        if not self._has_ledger:
            return []
        found = self._connection.execute(
            sql.SQL(
                "SELECT number, entry::text FROM {} WHERE pipeline = %s AND sink = %s ORDER BY number"
            ).format(sql.Identifier(self._sink.schema_name, LEDGER)),
            (self._pipeline, self.name),
        ).fetchall()
        entries = []
        for number, text in found:
            try:
                entry = read_entry(text, self._pipeline, self.name)
            except ValueError as error:
                self._altered(f"entry {number} of {LEDGER}: {error}")
                continue
            if entry.number != number:
                self._altered(f"entry {number} of {LEDGER} says that it is {entry.number}")
            entries.append(entry)
        return entries

    def _altered(self, detail: str) -> None:
        self._found.append(Finding(Fate.ALTERED, self.name, detail=detail))

    def entries(self) -> Sequence[Entry]:
        return self._entries

    def positions(self) -> Positions:
        return self._entries[-1].positions if self._entries else NOWHERE_YET

    # -------------------------------------------------------------------- rows

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier(self._sink.schema_name, self._sink.table)

    @property
    def _has_lineage(self) -> bool:
        return all(name in self.column_types for name in LINEAGE_COLUMNS)

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        self.rows_seen = 0
        where = f"{self._sink.schema_name}.{self._sink.table}"
        if not self._has_lineage:
            yield from self._nameless(where)
            return
        for table in self._copied(LINEAGE_COLUMNS, above=scope):
            self.rows_seen += table.num_rows
            topics, partitions, offsets, indexes = (
                table.column(name).combine_chunks() for name in LINEAGE_COLUMNS
            )
            yield from split_columns(topics, partitions, offsets, indexes, where)

    def _nameless(self, where: str) -> Iterator[LineageBatch]:
        """Rows of a table without lineage."""
        if not self.column_types:
            return
        with self._explained():
            found = self._connection.execute(
                sql.SQL("SELECT count(*) FROM {}").format(self._table)
            ).fetchone()
        count = 0 if found is None else int(found[0])
        self.rows_seen = count
        if count:
            nowhere = np.full(count, -1, np.int64)
            yield LineageBatch(NOWHERE, -1, nowhere, nowhere.astype(np.int32), where)

    def _copied(
        self,
        columns: Sequence[str],
        kinds: Mapping[str, pa.DataType] | None = None,
        above: SinkScope | None = None,
    ) -> Iterator[pa.Table]:
        """Some columns of the table, a part at a time: lineage as numbers, others as text or as `kinds` says."""
        listed = sql.SQL(", ").join(sql.Identifier(name) for name in columns)
        statement = sql.SQL("COPY (SELECT {} FROM {}{}) TO STDOUT (FORMAT csv)").format(
            listed, self._table, _not_below(above)
        )
        types = {name: pa.string() for name in columns}
        types |= {name: pa.int64() for name in LINEAGE_COLUMNS[1:] if name in columns}
        types |= dict(kinds or {})
        with self._explained(), self._connection.cursor() as cursor, cursor.copy(statement) as copy:
            held: list[bytes] = []
            size = 0
            for chunk in copy:
                held.append(bytes(chunk))
                size += len(chunk)
                if size > COPIED_BYTES:
                    yield _parsed(b"".join(held), columns, types)
                    held, size = [], 0
            if held:
                yield _parsed(b"".join(held), columns, types)

    def table_batches(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Lineage, and these columns as text, in UTC."""
        lineage = [name for name in LINEAGE_COLUMNS if name in self.column_types]
        wanted = [name for name in columns if name in self.column_types and name not in lineage]
        if self.column_types:
            yield from self._copied([*lineage, *wanted])

    def _kinds(self, columns: Sequence[str]) -> dict[str, pa.DataType]:
        found = {}
        for name in columns:
            kind = self.column_types[name]
            if kind in _ARROW:
                found[name] = _ARROW[kind]
            elif kind.startswith("numeric(") and "," in kind:
                precision, scale = kind[8:-1].split(",")
                found[name] = pa.decimal128(int(precision), int(scale))
        return found

    def _typed(self, columns: Sequence[str]) -> Iterator[pa.Table]:
        """Columns as values, times too."""
        kinds = self._kinds(columns)
        for table in self._copied(columns, kinds):
            for name in columns:
                kind = self.column_types[name]
                if kind in ("timestamp with time zone", "timestamp without time zone"):
                    at = table.schema.get_field_index(name)
                    table = table.set_column(at, name, _times(table.column(name), kind))
            yield table

    def windows(self) -> Iterator[WindowBatch]:
        where = f"{self._sink.schema_name}.{self._sink.table}"
        for table in self._typed(list(self.column_types)):
            for batch in table.combine_chunks().to_batches():
                yield WindowBatch(batch, where)

    def keys_of(self, columns: Sequence[str]) -> Iterator[KeyedBatch]:
        """Sorted by partition, since a batch has one."""
        missing = [name for name in columns if name not in self.column_types]
        if missing or not self._has_lineage:
            if self.column_types:
                self._altered(f"{self._sink.table} has no column {', '.join(missing) or LINEAGE_COLUMNS[0]}")
            return
        where = f"{self._sink.schema_name}.{self._sink.table}"
        for table in self._typed(
            [*LINEAGE_COLUMNS, *(name for name in columns if name not in LINEAGE_COLUMNS)]
        ):
            ordered = table.sort_by([(LINEAGE_COLUMNS[0], "ascending"), (LINEAGE_COLUMNS[1], "ascending")])
            topics, partitions, offsets, indexes = (
                ordered.column(name).combine_chunks() for name in LINEAGE_COLUMNS
            )
            keys = ordered.select(list(columns)).combine_chunks()
            row = 0
            for run in split_columns(topics, partitions, offsets, indexes, where):
                batch = keys.slice(row, len(run)).combine_chunks().to_batches()
                yield KeyedBatch(batch[0], run)
                row += len(run)

    def find(self, place: Place, offset: int) -> list[str]:
        if not self._has_lineage:
            return []
        where = f"{self._sink.schema_name}.{self._sink.table}"
        shown = self._sink.key or ()
        listed = sql.SQL("").join(sql.SQL(", {}").format(sql.Identifier(name)) for name in shown)
        with self._explained():
            found = self._connection.execute(
                sql.SQL(
                    "SELECT ctid::text, _hf_index{} FROM {} WHERE _hf_topic = %s AND _hf_partition = %s "
                    "AND _hf_offset = %s ORDER BY _hf_index"
                ).format(listed, self._table),
                (place.topic, place.partition, offset),
            ).fetchall()
        rows = []
        for ctid, index, *values in found:
            keys = ", ".join(f"{name}={value}" for name, value in zip(shown, values, strict=True))
            rows.append(
                f"{where} row {ctid}" + (f" ({keys})" if keys else "") + (f" #{index}" if index else "")
            )
        return rows

    # -------------------------------------------------------------------- what is wrong

    def problems(self) -> Sequence[Finding]:
        found = list(self._found)
        where = f"{self._sink.schema_name}.{LEDGER}"
        found += number_holes(self.name, self._entries, where)
        counted = sum(entry.rows for entry in self._entries)
        if not self.column_types and counted:
            found.append(
                Finding(
                    Fate.ALTERED,
                    self.name,
                    detail=f"the table {self._sink.schema_name}.{self._sink.table} is gone; its ledger counts "
                    f"{counted:,} rows",
                )
            )
        if not self._entries and self.rows_seen:
            what = "holds no entry of it" if self._has_ledger else "is gone"
            found.append(
                Finding(
                    Fate.ALTERED,
                    self.name,
                    detail=f"{where} {what}, and {self._sink.table} holds {self.rows_seen:,} rows",
                )
            )
        return found

    def gaps(self) -> Sequence[Unproven]:
        return []

    def close(self) -> None:
        self._connection.close()


def _not_below(scope: SinkScope | None) -> sql.Composable:
    """Leaves out rows from before where a scope starts; rows without lineage stay."""
    starts = {} if scope is None else {place: start for place, (start, _) in scope.spans.items() if start > 0}
    conditions = [
        sql.SQL("(_hf_topic = {} AND _hf_partition = {} AND _hf_offset < {}) IS NOT TRUE").format(
            sql.Literal(place.topic), sql.Literal(place.partition), sql.Literal(start)
        )
        for place, start in starts.items()
    ]
    return sql.SQL(" WHERE ") + sql.SQL(" AND ").join(conditions) if conditions else sql.SQL("")


def _parsed(text: bytes, columns: Sequence[str], types: Mapping[str, pa.DataType]) -> pa.Table:
    return pyarrow.csv.read_csv(
        io.BytesIO(text),
        pyarrow.csv.ReadOptions(column_names=list(columns), block_size=max(len(text), 1)),
        pyarrow.csv.ParseOptions(newlines_in_values=True),
        pyarrow.csv.ConvertOptions(
            column_types=dict(types),
            null_values=[""],
            strings_can_be_null=True,
            quoted_strings_can_be_null=False,
            true_values=["t"],
            false_values=["f"],
        ),
    )


def _times(texts: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """`2026-01-01 10:00:00.5+00`; what lies outside what 64 bits of microseconds hold stays out, as null."""
    if kind == "timestamp without time zone":
        return texts.cast(pa.timestamp("us"))
    plain = pc.replace_substring_regex(texts, r"\+00$", "")
    return plain.cast(pa.timestamp("us")).cast(pa.timestamp("us", tz="UTC"))


def _first(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error).strip().split("\n")[0]
