"""The PostgreSQL sink: tasks copy into a staging table, one transaction merges it and moves the ledger.

Each task copies its rows, tagged with the attempt it is, into an unlogged table of this attempt at this batch, and
reports how many. The driver's transaction

1. adds the entry to `holdfast_ledger`, whose primary key (pipeline, sink, number) lets one of two copies through and
   holds the other until the first is done;
2. counts the staged rows of every attempt and gives up unless each has exactly what it reported: a server that crashed
   has emptied unlogged tables;
3. makes or widens the table, merges the reported attempts and no others, and drops the staging table.

`append` adds rows. `upsert` keeps the last row of each key by topic, partition and offset, and never lets an older
offset of a partition overwrite a newer one; with `order_by` it keeps the row whose column is greatest, then the last by
place, so that it does not matter how batches were cut. It deletes keys whose last row `delete_when` is true for. A row
that deletes and has no key among its columns, as a tombstone, takes it from the record's key, where that is decoded.
`scd2` keeps the last row of a key for each value of `order_by`, and sets where the spans of the batch's keys end.
Places are compared within one life of the ledger only: when it is forgotten, so are the places of the rows, in the same
transaction. A recreated topic counts from the beginning, and a mended pipeline has other rows for the same places.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import psycopg
import pyarrow as pa
from psycopg import errors, sql
from psycopg.types.json import Jsonb

from holdfast.pipeline.core.frames import map_in_arrow
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import PostgresSink
from holdfast.pipeline.definition.streams import merge_key
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.row_digest import MASK as CONTENT_MASK
from holdfast.pipeline.sealing import Written, goes_on_from, resealed
from holdfast.pipeline.sinks import columns as shapes
from holdfast.pipeline.sinks import postgres_copy, postgres_rules, postgres_sql
from holdfast.pipeline.sinks.base import (
    REJECTED_MAX,
    Batch,
    Prepared,
    Problem,
    RowsRejected,
    SchemaChanged,
    Sink,
    SinkContext,
    SinkError,
    SinkFenced,
    SinkUnavailable,
)
from holdfast.pipeline.sinks.postgres_copy import Connection, first_line
from holdfast.pipeline.sinks.postgres_sql import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

REASON_MAX = 500
"""Characters of what a table says against a row; it may repeat the row."""
MERGE_MEMORY = "64MB"
"""For sorting a batch by key: one transaction at a time has it."""


@dataclass
class PreparedTable:
    """Rows in a staging table."""

    sink: PostgresSinkWriter
    target: Target | None
    """None for a batch that has nothing to write by its range."""
    stage: str
    schema: StructType | None
    attempts: dict[int, int]
    digest: int | None
    written: Written | None = None

    def __post_init__(self) -> None:
        self.rows = sum(self.attempts.values())

    def commit(self, entry: Entry) -> Entry:
        return self.sink.merge(self, entry)

    def discard(self) -> None:
        if self.target is not None:
            self.sink.drop(self.target, self.stage)


class PostgresSinkWriter(Sink):
    """The sink to the engine."""

    def __init__(self, definition: PostgresSink, pipeline: str) -> None:
        self.name = definition.name
        self._definition = definition
        self._pipeline = pipeline
        self._connection: Connection | None = None

    def check(self, rows: StructType) -> list[Problem]:
        return postgres_rules.problems_of(self._definition, rows)

    # Life

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        self._connection = self._connect()
        if spark is None:
            return
        with self._explained() as connection:
            if self._oid(connection, postgres_sql.LEDGER) is None:
                with contextlib.suppress(errors.UniqueViolation, errors.DuplicateTable):  # made meanwhile
                    connection.execute(postgres_sql.create_ledger(self._definition.schema_name))
            # Of earlier attempts: whoever made them is gone, or is fenced at its next merge.
            found = connection.execute(
                "SELECT tablename FROM pg_tables WHERE schemaname = %s AND starts_with(tablename, %s)",
                (self._definition.schema_name, postgres_sql.stage_prefix(self._pipeline, self.name)),
            ).fetchall()
            for (table,) in found:
                name = sql.Identifier(self._definition.schema_name, table)
                connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(name))

    def _connect(self) -> Connection:
        try:
            return postgres_copy.connect(
                self._definition.url, autocommit=True, application_name=f"holdfast {self._pipeline}"
            )
        except psycopg.Error as error:
            raise SinkUnavailable(
                f"sink {self.name!r}: PostgreSQL cannot be reached: {' '.join(str(error).split())}"
            ) from error

    @contextlib.contextmanager
    def _explained(self) -> Iterator[Connection]:
        """A connection that works, and what the server refuses in words."""
        if self._connection is None or self._connection.closed:
            self._connection = self._connect()
        try:
            yield self._connection
        except errors.InsufficientPrivilege as error:
            raise SinkError(
                f"sink {self.name!r}: {first_line(error)}; nothing was committed. The pipeline's user needs the right "
                f"to use and create tables in the schema {self._definition.schema_name!r}"
            ) from error
        except errors.DiskFull as error:
            raise SinkError(
                f"sink {self.name!r}: PostgreSQL's disk is full; nothing was committed"
            ) from error
        except psycopg.OperationalError as error:
            raise SinkUnavailable(f"sink {self.name!r}: {first_line(error)}") from error
        except psycopg.Error as error:
            raise SinkError(f"sink {self.name!r}: {first_line(error)}") from error

    def last_entry(self) -> Entry | None:
        with self._explained() as connection:
            document = self._newest(connection, "entry")
        return None if document is None else Entry.from_json(document)

    def missing(self) -> str | None:
        with self._explained() as connection:
            known = self._newest(connection, "columns")
            if known is None:
                return None
            (table, beside), now = known.get("oids", (None, None)), self._oids(connection)
            if now[0] is None:
                return f"the table {self._table} is gone, and the ledger says that it has rows"
            # Where the ledger is another one too, both were restored or moved together.
            if table is not None and table != now[0] and beside == now[1]:
                return f"the table {self._table} is not the one that was written to: it was dropped and created again"
            # Where rows can delete, a table may be empty for their sake.
            if self._definition.delete_when is not None or self._has_rows(connection):
                return None
            written = sql.SQL(
                "SELECT coalesce(bool_or(entry->>'rows' <> '0') AND NOT bool_or(entry ? 'erased'), false) "
                "FROM {} WHERE pipeline = %s AND sink = %s"
            ).format(postgres_sql.ledger(self._definition.schema_name))
            if connection.execute(written, (self._pipeline, self.name)).fetchone() == (False,):
                return None
        return f"the table {self._table} is empty, and the ledger says that rows were written to it"

    def _has_rows(self, connection: Connection) -> bool:
        table = sql.Identifier(self._definition.schema_name, self._definition.table)
        return connection.execute(sql.SQL("SELECT 1 FROM {} LIMIT 1").format(table)).fetchone() is not None

    def _newest(self, connection: Connection, column: str) -> Any:
        if self._oid(connection, postgres_sql.LEDGER) is None:
            return None
        found = connection.execute(
            sql.SQL(
                "SELECT {0} FROM {1} WHERE pipeline = %s AND sink = %s AND {0} IS NOT NULL "
                "ORDER BY number DESC LIMIT 1"
            ).format(sql.Identifier(column), postgres_sql.ledger(self._definition.schema_name)),
            (self._pipeline, self.name),
        ).fetchone()
        return None if found is None else found[0]

    def holds_rows(self) -> bool:
        """Rows of an upsert give way to those of their keys."""
        definition = self._definition
        with self._explained() as connection:
            if definition.mode != "append" or self._oid(connection, definition.table) is None:
                return False
            return self._has_rows(connection)

    def forget(self) -> None:
        definition = self._definition
        with self._explained() as connection, connection.transaction():
            if self._oid(connection, postgres_sql.LEDGER) is None:
                return
            connection.execute(
                sql.SQL("DELETE FROM {} WHERE pipeline = %s AND sink = %s").format(
                    postgres_sql.ledger(definition.schema_name)
                ),
                (self._pipeline, self.name),
            )
            if (
                definition.mode != "append"
                and postgres_sql.LINEAGE_COLUMNS.keys() <= (there := self._columns(connection) or {}).keys()
            ):
                has_digests = postgres_sql.CONTENT in there
                connection.execute(
                    postgres_sql.forget_places(
                        definition.schema_name, definition.table, has_digests=has_digests
                    )
                )

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def drop(self, target: Target, stage: str) -> None:
        """Take back what was staged; where the server is gone, the next `open` does."""
        with contextlib.suppress(SinkError), self._explained() as connection:
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(target.stage(stage)))

    # Erasing

    @contextlib.contextmanager
    def erasing(self) -> Iterator[tuple[Connection, list[Entry], dict[str, str]]]:
        """A transaction that sees one moment, with the ledger and the types of the table's columns."""
        with self._explained() as connection, connection.transaction():
            connection.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            for setting in ("TIME ZONE 'UTC'", "extra_float_digits = 1", "statement_timeout = 0"):
                connection.execute(f"SET LOCAL {setting}")
            found = connection.execute(
                sql.SQL("SELECT entry FROM {} WHERE pipeline = %s AND sink = %s ORDER BY number").format(
                    postgres_sql.ledger(self._definition.schema_name)
                ),
                (self._pipeline, self.name),
            ).fetchall()
            entries = [Entry.from_json(document) for (document,) in found]
            yield connection, entries, self._columns(connection) or {}

    def advance(self, connection: Connection, entry: Entry) -> None:
        """Add an entry that no batch made, in the transaction at hand."""
        self._advance(connection, PreparedTable(self, None, "", None, {}, None), entry)

    # Batches

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        from pyspark.sql.types import StructType

        rows = shapes.with_versions(rows, self._definition)
        missing = self.missing()
        if missing is not None:
            raise SinkError(
                f"sink {self.name!r}: {missing}; nothing was committed. The next start names the ways on"
            )
        with self._explained() as connection:
            known = self._newest(connection, "columns")
            held = None if known is None else StructType.fromJson(known)
            if batch.is_empty:
                has_content = self.key is not None and self._has_content(connection)
                return PreparedTable(self, None, "", held, {}, 0, Written(0, {}) if has_content else None)
            stored = shapes.stored_schema(rows.schema)
            schema = shapes.fitting_schema(self.name, held, stored, self._definition.schema)
            target = self._target(connection, schema)
            stage = postgres_sql.stage_name(self._pipeline, self.name, batch.label)
            connection.execute(target.create_stage(stage))
        digesting = self._digesting(schema, target)
        try:
            reports = self._copy(rows, schema, target, stage, digesting)
            attempts = {row["attempt"]: row["rows"] for row in reports}
            self._reject_untaken(target, stage, list(attempts))
        except RowsRejected:
            self.drop(target, stage)
            raise
        digest = sum(int(row["digest"]) for row in reports) & MASK
        written = None
        if digesting is not None:
            content = sum(int(row["content"]) for row in reports) & CONTENT_MASK
            written = Written(content, digesting.columns)
        return PreparedTable(self, target, stage, schema, attempts, digest, written)

    def _has_content(self, connection: Connection) -> bool:
        """Whether digests of rows are of use: of an upsert, they stand in the table."""
        there = self._columns(connection)
        return self._definition.mode == "append" or there is None or postgres_sql.CONTENT in there

    def _digesting(self, schema: StructType, target: Target) -> postgres_copy.Digesting | None:
        """Over the columns that come back from the table as they were written."""
        if self.key is None or (target.key and not target.keeps_digests):
            return None
        columns = {
            field.name: field.dataType.simpleString()
            for field in schema.fields
            if field.name not in (LINEAGE, *(shapes.SPANS if target.versions_of else ()))
            and postgres_copy.comes_back(
                target.columns[field.name], postgres_copy.postgres_type(field.dataType) or ""
            )
        }
        return postgres_copy.Digesting(self.key, columns, target.keeps_digests)

    def _target(self, connection: Connection, schema: StructType) -> Target:
        """The table with its columns as they are, or will be."""
        there = self._columns(connection)
        columns = dict(postgres_sql.LINEAGE_COLUMNS)
        for field in schema.fields:
            if field.name != LINEAGE:
                kind = postgres_copy.postgres_type(field.dataType)
                if kind is None:
                    raise SinkError(
                        f"sink {self.name!r}: column {field.name!r} is {field.dataType.simpleString()}, which "
                        "PostgreSQL has no type for"
                    )
                columns[field.name] = kind
        for name, kind in columns.items():
            held = None if there is None else there.get(name)
            if held is not None and not postgres_copy.is_fitting(held, kind):
                raise SchemaChanged(
                    f"sink {self.name!r}: column {name!r} of {self._table} is {held}, which cannot hold {kind} as the "
                    "rows bring it; widen the column, cast it in a step, or give it another name"
                )
            columns[name] = held or kind
        missing = [name for name in columns if there is not None and name not in there]
        if missing and self._definition.schema == "fail":
            raise SchemaChanged(
                f"sink {self.name!r}: {self._table} lacks the columns {', '.join(map(repr, missing))}. Allow them to "
                "be added with `schema: add-columns`, or add them"
            )
        definition = self._definition
        key = merge_key(definition)
        versions_of = definition.key if definition.mode == "scd2" else ()
        if key and (postgres_sql.CONTENT in there if there is not None else self.key is not None):
            columns[postgres_sql.CONTENT] = postgres_sql.CONTENT_TYPE
        has_deletes = definition.mode == "upsert" and definition.delete_when is not None
        table = definition.schema_name, definition.table
        return Target(*table, columns, key, has_deletes, definition.order_by, versions_of)

    @property
    def _table(self) -> str:
        return f"{self._definition.schema_name}.{self._definition.table}"

    def _oid(self, connection: Connection, table: str) -> int | None:
        found = connection.execute(
            "SELECT c.oid FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace "
            "WHERE n.nspname = %s AND c.relname = %s AND c.relkind IN ('r', 'p')",
            (self._definition.schema_name, table),
        ).fetchone()
        return None if found is None else int(found[0])

    def _oids(self, connection: Connection) -> list[int | None]:
        """Of the table and of the ledger."""
        return [self._oid(connection, name) for name in (self._definition.table, postgres_sql.LEDGER)]

    def _columns(self, connection: Connection) -> dict[str, str] | None:
        """Types by column, as PostgreSQL prints them; None when there is no table."""
        oid = self._oid(connection, self._definition.table)
        if oid is None:
            return None
        found = connection.execute(
            "SELECT attname, format_type(atttypid, atttypmod) FROM pg_attribute "
            "WHERE attrelid = %s AND attnum > 0 AND NOT attisdropped",
            (oid,),
        ).fetchall()
        return {str(name): str(kind) for name, kind in found}

    def _copy(
        self,
        rows: DataFrame,
        schema: StructType,
        target: Target,
        stage: str,
        digesting: postgres_copy.Digesting | None,
    ) -> list[Any]:
        from pyspark.errors import PySparkException
        from pyspark.sql import functions

        url = self._definition.url
        present = set(rows.columns)
        columns = [functions.col(LINEAGE)]
        deletes = shapes.deletes_of(self._definition.delete_when or "false")
        for name in target.columns:
            if name == postgres_sql.CONTENT:
                continue
            if name in postgres_sql.LINEAGE_COLUMNS:
                columns.append(functions.col(f"{LINEAGE}.{name.removeprefix('_hf_')}").alias(name))
                continue
            kind = schema[name].dataType
            value = shapes.column_named(name) if name in present else functions.lit(None).cast(kind)
            if self._definition.delete_when and name in self._definition.key and KEY_PREFIX + name in present:
                of_record = shapes.column_named(KEY_PREFIX + name).cast(kind)
                value = functions.when(deletes, functions.coalesce(value, of_record)).otherwise(value)
            columns.append(postgres_copy.travelling(value, kind).alias(name))
        if target.has_deletes:
            columns.append(deletes.alias(postgres_sql.DELETE))

        with self._explained() as connection:
            statement = target.copy(stage).as_string(connection)

        def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return postgres_copy.copy_task(batches, url, statement, digesting)

        try:
            return map_in_arrow(rows.select(*columns), task, postgres_copy.REPORT).collect()
        except PySparkException as error:
            told = postgres_copy.told_by_task(self.name, error)
            if told is None:
                raise
            if isinstance(told, postgres_copy.NotTaken):
                rejected = self._rejected(rows.select(*columns), statement, digesting)
                if rejected:
                    raise RowsRejected(rejected) from error
            raise told from error

    def _rejected(
        self, rows: DataFrame, statement: str, digesting: postgres_copy.Digesting | None
    ) -> list[Rejected]:
        """The rows that the server does not take, each found by halving."""
        url = self._definition.url

        def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return postgres_copy.rejected_task(batches, url, statement, digesting)

        found = map_in_arrow(rows, task, postgres_copy.REJECTED_REPORT).limit(REJECTED_MAX + 1).collect()
        return [
            Rejected(row["topic"], row["partition"], row["offset"], self.name, row["why"]) for row in found
        ]

    def _reject_untaken(self, target: Target, stage: str, attempts: list[int]) -> None:
        """`RowsRejected` for rows that fit their columns and that the table's own rules refuse, beside what it has.

        Only a table with such rules is tried: the batch is merged, by halves where it fails, and all is taken back.
        """
        found: list[Rejected] = []
        with self._explained() as connection, connection.transaction(force_rollback=True):
            oid = self._oid(connection, self._definition.table)
            given = {"key": list(target.key), "oid": oid}
            if connection.execute(target.may_refuse(stage), given).fetchone() == (False,):
                return
            self._make_room(connection, target)
            connection.execute("SET CONSTRAINTS ALL IMMEDIATE")

            def look(numbers: list[int], places: Mapping[int, tuple[Any, ...]]) -> None:
                try:
                    with connection.transaction():
                        self._merge(connection, target, stage, numbers)
                except postgres_copy.OF_TABLE as error:
                    if not places:
                        rows = connection.execute(target.number(stage), {"attempts": numbers}).fetchall()
                        places = {row[0]: row[1:] for row in rows}
                        numbers = sorted(places, reverse=True)
                    if len(numbers) == 1:
                        topic, partition, offset = places[numbers[0]]
                        why = f"{first_line(error)}: {error.diag.message_detail or ''}"[:REASON_MAX]
                        found.append(Rejected(topic, partition, offset, self.name, why))
                        return
                    half = len(numbers) // 2
                    for part in (numbers[:half], numbers[half:]):
                        look(part, places)

            look(attempts, {})
        if found:
            raise RowsRejected(found)

    def merge(self, prepared: PreparedTable, entry: Entry) -> Entry:
        """Everything becomes visible in one transaction, or nothing does; the entry, as it was committed."""
        try:
            with self._explained() as connection, connection.transaction():
                document = self._newest(connection, "entry")
                self._advance(connection, prepared, entry)
                if prepared.target is not None:
                    self._verify(connection, prepared, prepared.target)
                    previous = None if document is None else Entry.from_json(document)
                    return self._change(connection, prepared, prepared.target, entry, previous)
                return entry
        except SinkError as error:
            cause = error.__cause__
            if isinstance(cause, errors.UniqueViolation) and cause.diag.table_name == "holdfast_ledger":
                raise self._fenced(entry) from cause
            if isinstance(cause, psycopg.OperationalError):
                raise SinkUnavailable(
                    f"{error}. If the connection broke, whether the batch was committed is not known; run again: the "
                    "ledger tells"
                ) from cause
            raise

    def _advance(self, connection: Connection, prepared: PreparedTable, entry: Entry) -> None:
        table = postgres_sql.ledger(self._definition.schema_name)
        columns = None
        if prepared.schema is not None:
            columns = Jsonb({**json.loads(prepared.schema.json()), "oids": self._oids(connection)})
        connection.execute(
            sql.SQL(
                "INSERT INTO {} (pipeline, sink, number, entry, columns) VALUES (%s, %s, %s, %s, %s)"
            ).format(table),
            (self._pipeline, self.name, entry.number, Jsonb(entry.as_json()), columns),
        )
        found = connection.execute(
            sql.SQL("SELECT max(number) FROM {} WHERE pipeline = %s AND sink = %s AND number <> %s").format(
                table
            ),
            (self._pipeline, self.name, entry.number),
        ).fetchone()
        before = -1 if found is None or found[0] is None else int(found[0])
        if before != entry.number - 1:
            raise self._fenced(entry)

    def _fenced(self, entry: Entry) -> SinkFenced:
        return SinkFenced(
            f"sink {self.name!r}: entry {entry.number} does not follow the ledger in {self._table}; another copy of "
            "the pipeline writes there. This copy has written nothing"
        )

    def _verify(self, connection: Connection, prepared: PreparedTable, target: Target) -> None:
        try:
            counted = connection.execute(target.count(prepared.stage)).fetchall()
        except errors.UndefinedTable as error:
            raise SinkError(
                f"sink {self.name!r}: the staging table of this batch is gone: another copy of the pipeline has "
                "started. Nothing was committed"
            ) from error
        found: dict[int, int] = dict(counted)
        for attempt, rows in prepared.attempts.items():
            if found.get(attempt, 0) != rows:
                raise SinkUnavailable(
                    f"sink {self.name!r}: {rows} rows were staged and {found.get(attempt, 0)} are there: the server "
                    "was restarted in between. Nothing was committed; run again"
                )

    def _change(
        self,
        connection: Connection,
        prepared: PreparedTable,
        target: Target,
        entry: Entry,
        previous: Entry | None,
    ) -> Entry:
        self._make_room(connection, target)
        is_sealed = target.keeps_digests and entry.content is not None and self.key is not None
        if is_sealed and not goes_on_from(entry, previous):
            connection.execute(postgres_sql.forget_digests(target.schema, target.table))
        sums = self._merge(connection, target, prepared.stage, list(prepared.attempts))
        if is_sealed and self.key is not None:
            entry = resealed(entry, previous, *sums, self.key)
            self._replace(connection, entry)
        connection.execute(sql.SQL("DROP TABLE {}").format(target.stage(prepared.stage)))
        return entry

    def _replace(self, connection: Connection, entry: Entry) -> None:
        """The entry of this transaction, completed by what the merge has told."""
        connection.execute(
            sql.SQL("UPDATE {} SET entry = %s WHERE pipeline = %s AND sink = %s AND number = %s").format(
                postgres_sql.ledger(self._definition.schema_name)
            ),
            (Jsonb(entry.as_json()), self._pipeline, self.name, entry.number),
        )

    def _make_room(self, connection: Connection, target: Target) -> None:
        """The table has every column."""
        there = self._columns(connection)
        if there is None:
            connection.execute(target.create())
        elif missing := [name for name in target.columns if name not in there]:
            connection.execute(target.add(missing))
        connection.execute(sql.SQL("SET LOCAL work_mem = {}").format(MERGE_MEMORY))

    def _merge(
        self,
        connection: Connection,
        target: Target,
        stage: str,
        attempts: list[int],
    ) -> tuple[int, int]:
        """The sums of the digests that came and went, where the table has them."""
        try:
            done = connection.execute(target.merge(stage), {"attempts": attempts})
            came, went = (done.fetchone() if target.keeps_digests else None) or (0, 0)
            if target.versions_of:
                connection.execute(target.spans(stage), {"attempts": attempts})
            return int(came), int(went)
        except errors.InvalidColumnReference as error:
            raise SinkError(
                f"sink {self.name!r}: {self._table} has no primary key or unique constraint on "
                f"({', '.join(target.key)}), which upsert needs. Nothing was committed; add one"
            ) from error
