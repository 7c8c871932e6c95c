"""The PostgreSQL sink: its ledger and its table, in one snapshot of a transaction that may only read.

The transaction is REPEATABLE READ, READ ONLY and stays open until the reader is closed, so ledger and rows are of one
moment however long it takes. A role with USAGE on the schema and SELECT on the table and on
`holdfast_ledger` is enough.

A row for itself costs the server and us more to hand over than to read: so the server puts the rows of a topic into
one value for each column. A table is taken some blocks at a time, which bounds that value.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import psycopg
import pyarrow as pa
import pyarrow.compute as pc
from psycopg import errors, sql

from holdfast.audit.lineage import COLUMNS as LINEAGE_COLUMNS
from holdfast.audit.lineage import NOWHERE, LineageBatch, split_columns
from holdfast.audit.model import Fate, Finding, Unproven, gap
from holdfast.audit.sinks.base import (
    CONTENT,
    EVERYTHING,
    ContentBatch,
    SinkReader,
    SinkScope,
    SinkUnreadable,
    Values,
    erased_at,
    number_holes,
    read_entry,
)
from holdfast.audit.sinks.files import arrow_kinds
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.row_digest import database_form, from_database

LEDGER: Final = "holdfast_ledger"
SLICE_BYTES: Final = 32 * 1024 * 1024
"""Of a table, as it lies on the server's disk, put into one value."""
BLOCKS_BY_NUMBER: Final = 140_000
"""The version of the server from which on it finds blocks by their number."""
TRANSACTIONS_LIMITED: Final = 170_000
"""The version from which on a server may end a transaction for its age."""
OFFSETS_TOGETHER: Final = 18
"""Bits: rows of a table without blocks of its own (a view, one in partitions) are put together by their offsets."""
CONNECT_SECONDS: Final = 10

TEXT: Final = "({0})::text"
_SPARK: Final = {
    **{name: name for name in ("boolean", "smallint", "integer", "bigint", "real", "date")},
    "double precision": "double",
}
"""Of columns in windows and keys; anything else comes as text, numbers with a scale and times apart."""


class PostgresReader(SinkReader):
    """One PostgreSQL sink, as it stood when it was opened."""

    kind = "postgres"

    def __init__(self, definition: PipelineDefinition, sink: PostgresSink) -> None:
        super().__init__(definition.name, sink.name, sink.rows)
        self._sink = sink
        self._connection = self._connect()
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
        self._has_lineage = all(name in self.column_types for name in LINEAGE_COLUMNS)
        if sink.mode != "append":
            self.keeps_digests = CONTENT in self.column_types

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
            # An audit takes as long as the log is long.
            for limit in ("statement_timeout", "idle_in_transaction_session_timeout"):
                connection.execute(sql.SQL("SET LOCAL {} = 0").format(sql.Identifier(limit)))
            if connection.info.server_version >= TRANSACTIONS_LIMITED:
                connection.execute("SET LOCAL transaction_timeout = 0")
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
            (self.pipeline, self.name),
        ).fetchall()
        entries = []
        for number, text in found:
            try:
                entries.append(read_entry(text, self.pipeline, self.name))
            except ValueError as error:
                self._altered(f"entry {number} of {LEDGER}: {error}")
                continue
            if entries[-1].number != number:
                self._altered(f"entry {number} of {LEDGER} says that it is {entries[-1].number}")
        return entries

    def columns(self) -> Sequence[str]:
        names = ("_hf" if name in LINEAGE_COLUMNS else name for name in self.column_types)
        return [name for name in dict.fromkeys(names) if name != CONTENT]

    # -------------------------------------------------------------------- rows

    @property
    def _table(self) -> sql.Identifier:
        return sql.Identifier(self._sink.schema_name, self._sink.table)

    @property
    def _where(self) -> str:
        return f"{self._sink.schema_name}.{self._sink.table}"

    def rows(self, scope: SinkScope) -> Iterator[LineageBatch]:
        self.rows_seen = 0
        for table in self._texts(LINEAGE_COLUMNS, scope=scope) if self._has_lineage else ():
            self.rows_seen += table.num_rows
            yield from split_columns(
                *(table.column(name).combine_chunks() for name in LINEAGE_COLUMNS), where=self._where
            )
        # Rows of a table without lineage are somebody else's, if the pipeline never wrote there.
        if not self._has_lineage and self.column_types and self._entries:
            with self._explained():
                statement = sql.SQL("SELECT count(*) FROM {}").format(self._table)
                [(self.rows_seen,)] = self._connection.execute(statement)
            if self.rows_seen:
                nowhere = np.full(self.rows_seen, -1, np.int64)
                yield LineageBatch(NOWHERE, -1, nowhere, nowhere.astype(np.int32), self._where)

    def _slices(self) -> tuple[list[sql.Composable], sql.Composable]:
        """Conditions that cut the table into slices of bounded size; and, where there are none, what else to group
        rows by."""
        oid = self._oid(self._sink.table) or 0
        found = self._connection.execute(
            "SELECT c.relkind::text, current_setting('block_size')::int FROM pg_class c WHERE c.oid = %s",
            (oid,),
        ).fetchone()
        kind, block_size = ("", 1) if found is None else found
        if kind not in ("r", "p") or self._connection.info.server_version < BLOCKS_BY_NUMBER:
            whole: list[sql.Composable] = [sql.SQL("true")]
            by_offset = ", _hf_offset::int8 >> {}" if self._has_lineage else ""
            return whole, sql.SQL(by_offset).format(sql.Literal(OFFSETS_TOGETHER))
        # A slice of a table in partitions is those blocks of each of them.
        parts = "SELECT relid FROM pg_partition_tree(%s) WHERE isleaf" if kind == "p" else "SELECT %s::oid"
        sizes = self._connection.execute(
            f"SELECT pg_relation_size(relid), pg_table_size(relid) FROM ({parts}) AS parts(relid)", (oid,)
        ).fetchall()
        blocks = -(-max((size for size, _ in sizes), default=0) // block_size)
        step = max(1, SLICE_BYTES * blocks // max(sum(size for _, size in sizes), 1))
        return [
            sql.SQL("ctid >= {}::tid AND ctid < {}::tid").format(
                sql.Literal(f"({first},0)"), sql.Literal(f"({first + step},0)")
            )
            for first in range(0, blocks, step)
        ], sql.SQL("")

    def _texts(
        self,
        columns: Sequence[str],
        form: Callable[[str], str] = lambda kind: TEXT,
        scope: SinkScope = EVERYTHING,
    ) -> Iterator[pa.Table]:
        """Columns of the table as text, in the form that their type has, a slice at a time; lineage as numbers."""
        if not columns or not self.column_types:
            return
        packed = [name for name in columns if name != LINEAGE_COLUMNS[0]]
        taken = sql.SQL(", ").join(self._packed(name, form(self.column_types[name])) for name in packed)
        many, together = self._slices()
        for blocks in many:
            statement = sql.SQL("SELECT {}, {} FROM {} WHERE {}{} GROUP BY 1{}").format(
                sql.SQL("_hf_topic" if self._has_lineage else "NULL::text"),
                taken,
                self._table,
                blocks,
                _not_below(scope if self._has_lineage else EVERYTHING),
                together,
            )
            with self._explained(), self._connection.cursor(binary=True) as cursor:
                for topic, *values in cursor.execute(statement):
                    found = _columns_of(packed, values)
                    if len(packed) < len(columns):
                        size = len(next(iter(found.values())))
                        found = {LINEAGE_COLUMNS[0]: pa.repeat(pa.scalar(topic, pa.string()), size), **found}
                    yield pa.table(found)

    def _packed(self, name: str, form: str) -> sql.Composable:
        """Numbers one behind the other; of a text the lengths, -1 for null, and the bytes."""
        if name in LINEAGE_COLUMNS[1:]:
            packed = "string_agg(int8send(coalesce({0}::int8, -1)), ''::bytea)"
        else:
            text = f"convert_to({form}, 'UTF8')"
            packed = (
                f"string_agg(int4send(coalesce(octet_length({text}), -1)), ''::bytea), "
                f"string_agg(coalesce({text}, ''::bytea), ''::bytea)"
            )
        return sql.SQL(packed).format(sql.Identifier(name))

    def table_batches(self, columns: Sequence[str], scope: SinkScope = EVERYTHING) -> Iterator[pa.Table]:
        """Lineage, and these columns as text in the form of COPY, in UTC."""
        lineage = [name for name in LINEAGE_COLUMNS if name in self.column_types]
        wanted = [name for name in columns if name in self.column_types and name not in lineage]
        yield from self._texts([*lineage, *wanted], _copied, scope)

    def _kinds(self) -> dict[str, pa.DataType]:
        """What columns are on the server, where that is no text and no time."""
        return arrow_kinds(
            {
                name: kind if kind.startswith("numeric(") else _SPARK.get(kind, "")
                for name, kind in self.column_types.items()
                if name not in LINEAGE_COLUMNS
            }
        )

    def values(self, columns: Sequence[str] | None = None, scope: SinkScope = EVERYTHING) -> Iterator[Values]:
        missing = [name for name in columns or () if name not in self.column_types]
        if columns is not None and (missing or not self._has_lineage):
            if self.column_types:
                self._altered(f"{self._sink.table} has no column {', '.join(missing) or LINEAGE_COLUMNS[0]}")
            return
        kinds = self._kinds()
        wanted = self.column_types if columns is None else (*LINEAGE_COLUMNS, *columns)
        for table in self._texts([name for name in wanted if name != CONTENT]):
            found = dict(zip(table.column_names, table.columns, strict=True))
            found |= {name: found[name].cast(kinds[name]) for name in found.keys() & kinds.keys()}
            found |= {
                name: _times(column, self.column_types[name])
                for name, column in found.items()
                if self.column_types[name] in TIMES
            }
            yield Values(pa.table(found), self._where)

    def contents(self, types: Mapping[str, str], scope: SinkScope = EVERYTHING) -> Iterator[ContentBatch]:
        if not self._has_lineage:
            return
        wanted = [name for name in types if name in self.column_types]
        kept = [CONTENT] if self.keeps_digests else []
        for table in self._texts([*LINEAGE_COLUMNS, *wanted, *kept], database_form, scope):
            columns = {name: table.column(name).combine_chunks() for name in table.column_names}
            yield ContentBatch(
                {name: from_database(columns[name], types[name]) for name in wanted},
                {name.removeprefix("_hf_"): columns[name] for name in LINEAGE_COLUMNS},
                digests=[_whole(each) for each in columns[CONTENT].to_pylist()] if kept else None,
            )

    def find(self, place: Place, offset: int) -> list[str]:
        if not self._has_lineage:
            return []
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
        rows = erased_at(self.erased, place, offset)
        for ctid, index, *values in found:
            keys = ", ".join(f"{name}={value}" for name, value in zip(shown, values, strict=True))
            number = f" #{index}" if index else ""
            rows.append(f"{self._where} row {ctid}" + (f" ({keys})" if keys else "") + number)
        return rows

    # -------------------------------------------------------------------- what is wrong

    def problems(self) -> Iterator[Finding]:
        yield from self._found
        where = f"{self._sink.schema_name}.{LEDGER}"
        yield from number_holes(self.name, self._entries, where)
        counted = sum(entry.rows for entry in self._entries)
        if not self.column_types and counted:
            detail = f"the table {self._where} is gone; its ledger counts {counted:,} rows"
            yield Finding(Fate.ALTERED, self.name, detail=detail)
        if not self._has_ledger and self.rows_seen:
            detail = f"{where} is gone, and {self._sink.table} holds {self.rows_seen:,} rows of the pipeline"
            yield Finding(Fate.ALTERED, self.name, detail=detail)

    def gaps(self) -> Iterator[Unproven]:
        if self.column_types and not self._has_lineage and not self._entries:
            why = "they were there before the pipeline: the table has no lineage, and its ledger no entry"
            yield Unproven(f"rows of {self._where}", why)
        elif self._has_ledger and not self._entries and self.rows_seen:
            why = f"{LEDGER} has no entry of the sink: it was reset, or somebody removed them"
            yield gap(f"{self.rows_seen:,} rows of {self._where}", why)

    def close(self) -> None:
        self._connection.close()


def _whole(text: str | None) -> int | None:
    """A number; one that is none is no digest either."""
    return None if text is None else int(text) if text.isdigit() else -1


def _copied(kind: str) -> str:
    """In SQL, the text of a column `{0}` as COPY gives it."""
    return "(CASE {0} WHEN true THEN 't' WHEN false THEN 'f' END)" if kind == "boolean" else TEXT


def _not_below(scope: SinkScope) -> sql.Composable:
    """Leaves out rows from before where a scope starts; rows without lineage stay."""
    behind = " AND (_hf_topic = {} AND _hf_partition = {} AND _hf_offset < {}) IS NOT TRUE"
    return sql.SQL("").join(
        sql.SQL(behind).format(place.topic, place.partition, start)
        for place, (start, _) in scope.spans.items()
        if start > 0
    )


def _columns_of(names: Sequence[str], values: Sequence[bytes]) -> dict[str, pa.Array]:
    """Columns as `_packed` packs them."""
    left = iter(values)
    return {
        name: _numbers(next(left)) if name in LINEAGE_COLUMNS[1:] else _strings(next(left), next(left))
        for name in names
    }


def _numbers(packed: bytes) -> pa.Array:
    return pa.array(np.frombuffer(packed, ">i8").astype(np.int64))


def _strings(packed_lengths: bytes, content: bytes) -> pa.Array:
    lengths = np.frombuffer(packed_lengths, ">i4").astype(np.int64)
    ends = np.concatenate(([0], np.cumsum(np.maximum(lengths, 0))))
    buffers = [None, pa.py_buffer(ends), pa.py_buffer(content)]
    nulls = int((lengths < 0).sum())
    if nulls:
        buffers[0] = pa.py_buffer(np.packbits(lengths >= 0, bitorder="little"))
    found = pa.Array.from_buffers(pa.large_string(), len(lengths), buffers, nulls)
    return found.cast(pa.string())


TIMES: Final = {
    "timestamp with time zone": pa.timestamp("us", tz="UTC"),
    "timestamp without time zone": pa.timestamp("us"),
}
TIME: Final = r"^\d{4}-\d\d-\d\d \d\d:\d\d:\d\d(\.\d+)?(\+00)?$"


def _times(texts: pa.ChunkedArray, kind: str) -> pa.ChunkedArray:
    """`2026-01-01 10:00:00.5+00`; `infinity`, and years that have more or less than four digits, become null."""
    is_time = pc.match_substring_regex(texts, TIME)
    plain = pc.replace_substring_regex(pc.if_else(is_time, texts, None), r"\+00$", "")
    return plain.cast(pa.timestamp("us")).cast(TIMES[kind])


def _first(error: psycopg.Error) -> str:
    return error.diag.message_primary or str(error).strip().split("\n")[0]
