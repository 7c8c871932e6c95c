"""What a pipeline's sinks hold, written without Spark: for tests of those who read it back.

Each builder commits one batch at a time, rows and ledger entry, in the sink's real format; where the sinks' own code
needs no Spark, it is that code. Rows come as an Arrow table with the lineage `_hf` first (`rows_of`), entries as
`holdfast.pipeline.ledger.Entry` (`Ledger` makes entries that follow each other). Nothing is flushed: a test's files
have to survive no loss of power.

Topics are written by `tests.support.audit_topics`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import pyarrow as pa

from holdfast.pipeline.definition.model import DeltaSink, PostgresSink
from holdfast.pipeline.ledger import NOWHERE, STATELESS, Entry, Intake, Routes
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span, to_text
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.parquet import ENTRIES, FORGOTTEN, LEDGER, SCHEMA, batch_directory
from holdfast.pipeline.sinks.writing import FileSet, FileWriter, WrittenFile

LINEAGE: Final = pa.struct(
    [("topic", pa.string()), ("partition", pa.int32()), ("offset", pa.int64()), ("index", pa.int32())]
)
BATCH_TIME_MS: Final = 1_700_000_000_000

Lineage = tuple[str, int, int, int]
"""Topic, partition, offset, index."""


def rows_of(lineage: Sequence[Lineage], columns: Mapping[str, Any] | None = None) -> pa.Table:
    """Rows with these places and columns (Arrow arrays, or what becomes one)."""
    names = ("topic", "partition", "offset", "index")
    parts = list(zip(*lineage, strict=True)) or [(), (), (), ()]
    fields = [LINEAGE.field(at) for at in range(4)]
    places = pa.StructArray.from_arrays(
        [pa.array(part, each.type) for part, each in zip(parts, fields, strict=True)], list(names)
    )
    found = {name: _array(values) for name, values in (columns or {}).items()}
    return pa.table({"_hf": places, **found})


def _array(values: Any) -> pa.Array:
    return values if isinstance(values, pa.Array | pa.ChunkedArray) else pa.array(values)


class QuickDisk(Disk):
    """Files that are not flushed."""

    def flush_file(self, path: str) -> None:
        pass

    def flush_directory(self, path: str) -> None:
        pass


# ------------------------------------------------------------------------ ledgers


@dataclass
class Ledger:
    """Entries of one sink that follow each other, from the opening on."""

    pipeline: str
    sink: str
    fingerprint: str = "f"
    last: Entry | None = None
    count: int = 0

    def opening(self, positions: Mapping[Place, int], state: int | None = None) -> Entry:
        """The entry by which a sink first knows these partitions: it takes no offset."""
        spans = {place: Span(offset, offset, -1) for place, offset in positions.items()}
        return self._next(BatchRange(spans), Intake(), Routes(), 0, BATCH_TIME_MS, {"state": state})

    def entry(
        self,
        spans: Mapping[Place, tuple[int, int]],
        *,
        rows: int,
        intake: Intake | None = None,
        routes: Routes | None = None,
        batch_time_ms: int = BATCH_TIME_MS,
        **more: Any,
    ) -> Entry:
        """The entry of the next batch; `more` are further fields of `Entry`."""
        taken = BatchRange({place: Span(start, end, 0) for place, (start, end) in spans.items()})
        return self._next(
            taken,
            intake or Intake(records=rows),
            routes or Routes(main=rows),
            rows,
            batch_time_ms,
            {"state": STATELESS, **more},
        )

    def _next(
        self, taken: BatchRange, intake: Intake, routes: Routes, rows: int, time_ms: int, more: dict[str, Any]
    ) -> Entry:
        standing = NOWHERE if self.last is None else self.last.positions
        after = {place: Position(span.end, span.leader_epoch) for place, span in taken.spans.items()}
        self.last = Entry(
            pipeline=self.pipeline,
            sink=self.sink,
            number=0 if self.last is None else self.last.number + 1,
            range=taken,
            positions=Positions({**standing.at, **after}),
            batch_time_ms=time_ms,
            fingerprint=self.fingerprint,
            intake=intake,
            routes=routes,
            rows=rows,
            **more,
        )
        return self.last


# ------------------------------------------------------------------------ files


_SPARK: Final = {
    pa.string(): "string",
    pa.large_string(): "string",
    pa.binary(): "binary",
    pa.bool_(): "boolean",
    pa.int32(): "integer",
    pa.int64(): "long",
    pa.float64(): "double",
    pa.date32(): "date",
}


def spark_type(kind: pa.DataType) -> Any:
    """A type in Spark's JSON."""
    if pa.types.is_struct(kind):
        return spark_schema(pa.schema(list(kind)))
    if pa.types.is_timestamp(kind):
        return "timestamp" if kind.tz else "timestamp_ntz"
    if pa.types.is_decimal(kind):
        return f"decimal({kind.precision},{kind.scale})"
    return _SPARK[kind]


def spark_schema(schema: pa.Schema) -> dict[str, Any]:
    return {
        "type": "struct",
        "fields": [
            {"name": each.name, "type": spark_type(each.type), "nullable": True, "metadata": {}}
            for each in schema
        ],
    }


def write_rows(
    rows: pa.Table, directory: str, *, files: int = 1, partition_by: tuple[str, ...] = ()
) -> list[WrittenFile]:
    """Files of these rows as the sinks' tasks write them, about as many as asked for; they lie in `directory`."""
    written: list[WrittenFile] = []
    file_set = FileSet(directory, disk=QuickDisk())
    for values, part in _parts(rows, partition_by):
        size = max(1, -(-part.num_rows // files))
        for start in range(0, part.num_rows, size):
            writer = FileWriter(file_set, values, part.schema)
            for batch in part.slice(start, size).combine_chunks().to_batches():
                writer.add(batch)
            written += writer.close()
    return written


def _parts(rows: pa.Table, by: tuple[str, ...]) -> Iterable[tuple[tuple[str | None, ...], pa.Table]]:
    """Rows by the values of these columns, as Spark prints them, and without the columns."""
    if not by:
        return [((), rows)]
    texts = [rows.column(name).cast(pa.string()).to_pylist() for name in by]
    kept = rows.drop_columns(list(by))
    found: dict[tuple[str | None, ...], list[int]] = {}
    for at, values in enumerate(zip(*texts, strict=True)):
        found.setdefault(values, []).append(at)
    return [(values, kept.take(places)) for values, places in found.items()]


@dataclass
class ParquetBuilder:
    """The directories of a Parquet sink."""

    path: str
    files: int = 1
    """Of a batch, or of each of its partitions."""
    partition_by: tuple[str, ...] = ()

    def commit(self, entry: Entry, rows: pa.Table | None = None) -> list[str]:
        """One batch; returns the paths of its files."""
        number = entry.number + self.forgotten()
        target = os.path.join(self.path, batch_directory(number))
        scratch = os.path.join(self.path, "_hf", "scratch")
        os.makedirs(scratch, exist_ok=True)
        os.makedirs(target)
        paths: list[str] = []
        if rows is not None:
            for file in write_rows(rows, scratch, files=self.files, partition_by=self.partition_by):
                folder = os.path.join(target, file.folder(self.partition_by))
                os.makedirs(folder, exist_ok=True)
                paths.append(os.path.normpath(os.path.join(folder, file.path)))
                os.rename(os.path.join(scratch, file.path), paths[-1])
            layout = {"columns": spark_schema(rows.schema), "partition_by": list(self.partition_by)}
            _write(os.path.join(target, SCHEMA), to_text(layout))
        _write(os.path.join(target, LEDGER), to_text(entry.as_json()))
        return paths

    def forgotten(self) -> int:
        try:
            with open(os.path.join(self.path, "_hf", FORGOTTEN), encoding="utf-8") as file:
                return int(json.load(file)["below"])
        except FileNotFoundError:
            return 0

    def forget(self) -> None:
        """As `pipeline reset` does: rows stay, entries do not count."""
        numbers = [int(name[6:]) for name in os.listdir(self.path) if name.startswith("batch=")]
        _write(os.path.join(self.path, "_hf", FORGOTTEN), to_text({"below": max(numbers) + 1}))

    def merge(self, first: int, last: int) -> list[str]:
        """As `pipeline compact` does with a run of small batches, by their directories' numbers."""
        target = os.path.join(self.path, "_hf", "merged")
        os.makedirs(target)
        entries: list[str] = []
        tables: dict[str, list[pa.Table]] = {}
        for number in range(first, last + 1):
            entries += self._move_from(os.path.join(self.path, batch_directory(number)), tables, target)
        paths = []
        final = os.path.join(self.path, batch_directory(last))
        for folder, parts in tables.items():
            os.makedirs(os.path.join(target, folder), exist_ok=True)
            rows = pa.concat_tables(parts, promote_options="default")
            written = write_rows(rows, os.path.join(target, folder))
            paths += [os.path.normpath(os.path.join(final, folder, file.path)) for file in written]
        _write(os.path.join(target, ENTRIES), "".join(line + "\n" for line in entries))
        _write(os.path.join(target, LEDGER), entries[-1])
        for number in range(first, last + 1):
            shutil.rmtree(os.path.join(self.path, batch_directory(number)))
        os.rename(target, final)
        return paths

    def _move_from(self, root: str, tables: dict[str, list[pa.Table]], target: str) -> list[str]:
        import pyarrow.parquet as pq

        for directory, _, names in os.walk(root):
            for name in sorted(names):
                path = os.path.join(directory, name)
                if name == SCHEMA:
                    shutil.copy(path, os.path.join(target, SCHEMA))
                elif not name.startswith("_"):
                    table = pq.ParquetFile(path).read()
                    tables.setdefault(os.path.relpath(directory, root), []).append(table)
        merged = os.path.join(root, ENTRIES)
        with open(merged if os.path.exists(merged) else os.path.join(root, LEDGER), encoding="utf-8") as file:
            return file.read().splitlines()


def _write(path: str, text: str) -> None:
    with open(path, "w", encoding="utf-8") as file:
        file.write(text)


@dataclass
class DeltaBuilder:
    """A Delta table and its ledger."""

    path: str
    pipeline: str
    name: str
    files: int = 1
    partition_by: tuple[str, ...] = ()
    _writer: Any = None

    def _sink(self) -> Any:
        from holdfast.pipeline.sinks.delta import DeltaSinkWriter

        if self._writer is None:
            definition = DeltaSink(self.path, self.name, self.partition_by)
            self._writer = DeltaSinkWriter(definition, self.pipeline, ".")
            self._writer.ledger.disk = QuickDisk()
        return self._writer

    def commit(self, entry: Entry, rows: pa.Table | None = None) -> list[str]:
        """One batch; returns the paths of its files. The first one needs rows, for the table's columns."""
        from deltalake import DeltaTable, Schema

        from holdfast.pipeline.sinks.delta import PreparedDelta

        sink = self._sink()
        os.makedirs(self.path, exist_ok=True)
        if sink.ledger.table() is None:
            assert rows is not None, "a table begins with its columns"
            schema = Schema.from_json(json.dumps(spark_schema(rows.schema)))
            DeltaTable.create(self.path, schema, partition_by=list(self.partition_by))
        has_rows = rows is not None and rows.num_rows > 0
        written = (
            write_rows(rows, self.path, files=self.files, partition_by=self.partition_by) if has_rows else []
        )
        PreparedDelta(sink, None, written).commit(entry)
        return [os.path.join(self.path, file.path) for file in written]

    def forget(self) -> None:
        self._sink().forget()

    def compact(self) -> None:
        """Merge small files, as `pipeline compact` does."""
        from holdfast.pipeline.definition.model import PipelineDefinition, Source
        from holdfast.pipeline.sinks.compacting import compact_delta

        sink = DeltaSink(os.path.abspath(self.path), self.name, self.partition_by)
        compact_delta(PipelineDefinition(self.pipeline, Source(), sinks=(sink,)), sink)

    def checkpoint(self) -> None:
        from deltalake import DeltaTable

        DeltaTable(self.path).create_checkpoint()


# ------------------------------------------------------------------------ tables


_POSTGRES: Final = {
    pa.string(): "text",
    pa.large_string(): "text",
    pa.bool_(): "boolean",
    pa.int32(): "integer",
    pa.int64(): "bigint",
    pa.float64(): "double precision",
    pa.date32(): "date",
}


def _postgres_type(kind: pa.DataType) -> str:
    if pa.types.is_timestamp(kind):
        return "timestamp with time zone" if kind.tz else "timestamp without time zone"
    if pa.types.is_decimal(kind):
        return f"numeric({kind.precision},{kind.scale})"
    return _POSTGRES[kind]


@dataclass
class PostgresBuilder:
    """A table and its ledger; with a key it is an upsert table."""

    sink: PostgresSink
    pipeline: str
    connection: Any = None

    def commit(self, entry: Entry, rows: pa.Table | None = None, gone: Sequence[bool] | None = None) -> None:
        """One batch; `gone` marks rows that delete their key."""
        import psycopg
        from psycopg import sql
        from psycopg.types.json import Jsonb

        from holdfast.pipeline.sinks import postgres_sql

        if self.connection is None or self.connection.closed:
            self.connection = psycopg.connect(self.sink.url, autocommit=True)
            self.connection.execute("SET synchronous_commit = off")
        connection = self.connection
        with connection.transaction():
            connection.execute(postgres_sql.create_ledger(self.sink.schema_name))
            columns = None if rows is None else Jsonb(spark_schema(rows.schema))
            connection.execute(
                sql.SQL(
                    "INSERT INTO {} (pipeline, sink, number, entry, columns) VALUES (%s, %s, %s, %s, %s)"
                ).format(postgres_sql.ledger(self.sink.schema_name)),
                (self.pipeline, self.sink.name, entry.number, Jsonb(entry.as_json()), columns),
            )
            if rows is not None and rows.num_rows:
                self._merge(connection, rows, gone)

    def _merge(self, connection: Any, rows: pa.Table, gone: Sequence[bool] | None) -> None:
        from psycopg import sql

        from holdfast.pipeline.sinks import postgres_sql
        from holdfast.pipeline.sinks.postgres_copy import as_csv

        values = {each.name: _postgres_type(each.type) for each in rows.schema if each.name != "_hf"}
        target = postgres_sql.Target(
            self.sink.schema_name,
            self.sink.table,
            {**postgres_sql.LINEAGE_COLUMNS, **values},
            self.sink.key if self.sink.mode == "upsert" else (),
            has_deletes=gone is not None,
        )
        connection.execute("SET LOCAL client_min_messages = warning")
        if connection.execute(
            "SELECT to_regclass(format('%%I.%%I', %s::text, %s::text))", (target.schema, target.table)
        ).fetchone() == (None,):
            connection.execute(target.create())
        stage = postgres_sql.stage_name(self.pipeline, self.sink.name, "building")
        connection.execute(target.create_stage(stage))
        places = rows.column("_hf").combine_chunks()
        flat = {"attempt": pa.repeat(pa.scalar(0, pa.int64()), rows.num_rows)}
        flat |= {f"_hf_{name}": places.field(name) for name in ("topic", "partition", "offset", "index")}
        flat |= {name: rows.column(name).combine_chunks() for name in values}
        if gone is not None:
            flat["gone"] = pa.array(gone, pa.bool_())
        with connection.cursor() as cursor, cursor.copy(target.copy(stage)) as copy:
            copy.write(as_csv(pa.table(flat)))
        statement = target.upsert(stage) if target.key else target.append(stage)
        connection.execute(statement, {"attempts": [0]})
        connection.execute(sql.SQL("DROP TABLE {}").format(target.stage(stage)))

    def forget(self) -> None:
        self.connection.execute(
            f'DELETE FROM "{self.sink.schema_name}".holdfast_ledger WHERE pipeline = %s AND sink = %s',
            (self.pipeline, self.sink.name),
        )

    def close(self) -> None:
        if self.connection is not None:
            self.connection.close()
