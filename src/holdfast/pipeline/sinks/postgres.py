"""The PostgreSQL sink: tasks copy into a staging table, one transaction merges it and moves the ledger.

Each task copies its rows, tagged with the attempt it is, into an unlogged table of this attempt at this batch, and
reports how many. The driver's transaction

1. adds the entry to `holdfast_ledger`, whose primary key (pipeline, sink, number) lets one of two copies through and
   holds the other until the first is done;
2. counts the staged rows of every attempt and gives up unless each has exactly what it reported: a server that crashed
   has emptied unlogged tables;
3. makes or widens the table, merges the reported attempts and no others, and drops the staging table.

`append` adds rows. `upsert` keeps the last row of each key by topic, partition and offset, and never lets an older
offset of a partition overwrite a newer one; with `order` it keeps the row whose column is greatest, then the last by
place, so that it does not matter how batches were cut. It deletes keys whose last row `delete_when` is true for. A row
that deletes and has no key among its columns, as a tombstone, takes it from the record's key, where that is decoded.
Places are compared within one life of the ledger only: when it is forgotten, so are the places of the rows, in the same
transaction. A topic that was made anew counts from the beginning, and a pipeline that was mended has other rows for the
same places.
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
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.ledger import Entry, Rejected
from holdfast.pipeline.sinks import postgres_copy, postgres_sql
from holdfast.pipeline.sinks.base import (
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
from holdfast.pipeline.sinks.columns import (
    check_columns,
    check_json_keys,
    column_named,
    fitting_schema,
    stored_schema,
)
from holdfast.pipeline.sinks.postgres_copy import Connection, first_line
from holdfast.pipeline.sinks.postgres_sql import Target

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

ORDERED = frozenset({"tinyint", "smallint", "int", "bigint", "decimal", "date", "timestamp", "timestamp_ntz"})
"""Types of an `order`."""
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

    def __post_init__(self) -> None:
        self.rows = sum(self.attempts.values())

    def commit(self, entry: Entry) -> None:
        self.sink.merge(self, entry)

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

    # Definition

    def check(self, rows: StructType) -> list[Problem]:
        stored = {field.name: field.dataType for field in stored_schema(rows).fields}
        problems = check_columns(rows) + check_json_keys(stored_schema(rows).fields)
        problems += [
            Problem("", f"column {name!r} is {kind.simpleString()}, which PostgreSQL has no type for")
            for name, kind in stored.items()
            if postgres_copy.postgres_type(kind) is None
        ]
        key, mode = self._definition.key, self._definition.mode
        if mode == "upsert" and not key:
            problems.append(Problem("key", "upsert needs the columns that make a row one of its own"))
        if mode == "append" and key:
            problems.append(Problem("key", "append keeps every row; a key is for `mode: upsert`"))
        problems += [Problem("key", f"there is no column {name!r}") for name in key if name not in stored]
        if mode == "upsert" and key and set(stored) - {LINEAGE} <= set(key):
            problems.append(
                Problem("key", "it names every column; rows that have nothing else need no upsert")
            )
        return problems + self._check_order(stored) + self._check_deletes(rows)

    def _check_order(self, stored: Mapping[str, DataType]) -> list[Problem]:
        """Values that Spark, PostgreSQL and the audit put in the same order."""
        order = self._definition.order
        if order is None:
            return []
        if order not in stored:
            return [Problem("order", f"there is no column {order!r}")]
        kind = stored[order].simpleString()
        if kind.partition("(")[0] in ORDERED:
            return []
        return [
            Problem(
                "order", f"column {order!r} is {kind}; rows are ordered by whole numbers, decimals or times"
            )
        ]

    def _check_deletes(self, rows: StructType) -> list[Problem]:
        from pyspark.errors import AnalysisException, ParseException
        from pyspark.sql import SparkSession

        text = self._definition.delete_when
        if text is None:
            return []
        if self._definition.mode != "upsert":
            return [Problem("delete_when", "only `mode: upsert` deletes")]
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
                f"sink {self.name!r}: PostgreSQL cannot be reached: {str(error).strip()}"
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
                "SELECT 1 FROM {} WHERE pipeline = %s AND sink = %s AND entry->>'rows' <> '0' LIMIT 1"
            ).format(postgres_sql.ledger(self._definition.schema_name))
            if connection.execute(written, (self._pipeline, self.name)).fetchone() is None:
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
            if definition.mode == "upsert" or self._oid(connection, definition.table) is None:
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
                definition.mode == "upsert"
                and postgres_sql.LINEAGE_COLUMNS.keys() <= (self._columns(connection) or {}).keys()
            ):
                connection.execute(postgres_sql.forget_places(definition.schema_name, definition.table))

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def drop(self, target: Target, stage: str) -> None:
        """Take back what was staged; where the server is gone, the next `open` does."""
        with contextlib.suppress(SinkError), self._explained() as connection:
            connection.execute(sql.SQL("DROP TABLE IF EXISTS {}").format(target.stage(stage)))

    # Batches

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        from pyspark.sql.types import StructType

        missing = self.missing()
        if missing is not None:
            raise SinkError(
                f"sink {self.name!r}: {missing}; nothing was committed. The next start names the ways on"
            )
        with self._explained() as connection:
            known = self._newest(connection, "columns")
            held = None if known is None else StructType.fromJson(known)
            if batch.is_empty:
                return PreparedTable(self, None, "", held, {}, 0)
            schema = fitting_schema(self.name, held, stored_schema(rows.schema), self._definition.schema)
            target = self._target(connection, schema)
            stage = postgres_sql.stage_name(self._pipeline, self.name, batch.label)
            connection.execute(target.create_stage(stage))
        try:
            reports = self._copy(rows, schema, target, stage)
            attempts = {row["attempt"]: row["rows"] for row in reports}
            self._reject_untaken(target, stage, list(attempts))
        except RowsRejected:
            self.drop(target, stage)
            raise
        digest = sum(int(row["digest"]) for row in reports) & MASK
        return PreparedTable(self, target, stage, schema, attempts, digest)

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
        key = definition.key if definition.mode == "upsert" else ()
        has_deletes = bool(key) and definition.delete_when is not None
        return Target(definition.schema_name, definition.table, columns, key, has_deletes, definition.order)

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

    def _copy(self, rows: DataFrame, schema: StructType, target: Target, stage: str) -> list[Any]:
        from pyspark.errors import PySparkException
        from pyspark.sql import functions

        url = self._definition.url
        present = set(rows.columns)
        columns = [functions.col(LINEAGE)]
        deletes = functions.coalesce(
            functions.expr(self._definition.delete_when or "false"), functions.lit(False)
        )
        for name in target.columns:
            if name in postgres_sql.LINEAGE_COLUMNS:
                columns.append(functions.col(f"{LINEAGE}.{name.removeprefix('_hf_')}").alias(name))
                continue
            kind = schema[name].dataType
            value = column_named(name) if name in present else functions.lit(None).cast(kind)
            if target.has_deletes and name in target.key and KEY_PREFIX + name in present:
                of_record = column_named(KEY_PREFIX + name).cast(kind)
                value = functions.when(deletes, functions.coalesce(value, of_record)).otherwise(value)
            columns.append(postgres_copy.travelling(value, kind).alias(name))
        if target.has_deletes:
            columns.append(deletes.alias(postgres_sql.DELETE))

        with self._explained() as connection:
            statement = target.copy(stage).as_string(connection)

        def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return postgres_copy.copy_task(batches, url, statement)

        try:
            return map_in_arrow(rows.select(*columns), task, postgres_copy.REPORT).collect()
        except PySparkException as error:
            told = postgres_copy.told_by_task(self.name, error)
            if told is None:
                raise
            if isinstance(told, postgres_copy.NotTaken):
                rejected = self._rejected(rows.select(*columns), statement)
                if rejected:
                    raise RowsRejected(rejected) from error
            raise told from error

    def _rejected(self, rows: DataFrame, statement: str) -> list[Rejected]:
        """The rows that the server does not take, each found by halving."""
        url = self._definition.url

        def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            return postgres_copy.rejected_task(batches, url, statement)

        found = map_in_arrow(rows, task, postgres_copy.REJECTED_REPORT).collect()
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

    def merge(self, prepared: PreparedTable, entry: Entry) -> None:
        """Everything becomes visible in one transaction, or nothing does."""
        try:
            with self._explained() as connection, connection.transaction():
                self._advance(connection, prepared, entry)
                if prepared.target is not None:
                    self._verify(connection, prepared, prepared.target)
                    self._change(connection, prepared, prepared.target)
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

    def _change(self, connection: Connection, prepared: PreparedTable, target: Target) -> None:
        self._make_room(connection, target)
        self._merge(connection, target, prepared.stage, list(prepared.attempts))
        connection.execute(sql.SQL("DROP TABLE {}").format(target.stage(prepared.stage)))

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
    ) -> None:
        try:
            connection.execute(target.merge(stage), {"attempts": attempts})
        except errors.InvalidColumnReference as error:
            raise SinkError(
                f"sink {self.name!r}: {self._table} has no primary key or unique constraint on "
                f"({', '.join(target.key)}), which upsert needs. Nothing was committed; add one"
            ) from error
