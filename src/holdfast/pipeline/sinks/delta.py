"""The Delta sink: tasks write Parquet files, the driver names them in one commit together with the ledger.

The commit carries application transactions, which outlive the log's checkpoints:

    hf-<pipeline>--<sink>/<topic id>/<partition>    version: the offset the sink stands at
    hf-<pipeline>--<sink>/number                    version: the number of the last entry
    hf-<pipeline>--<sink>/entry                     version: the name of its file

and the entry itself is a file `_hf/<pipeline>--<sink>/<name>.json`, durable before the commit that names it; people
also find it in the commit's metadata. On reading, file and versions are compared.

`deltalake` does not refuse a version it has seen. So versions are checked on a handle of the table, and the commit is
made on that same handle for exactly the next version of the log, without retries of its own: if anybody has written
since, it fails, and everything is checked again. Data files are flushed by their writers, directory and entry before
the commit, the commit's own file after it and before it is reported.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, PostCommitHookProperties, Schema, Transaction
from deltalake.exceptions import CommitFailedError, DeltaError, TableNotFoundError
from deltalake.transaction import AddAction

from holdfast.pipeline.definition.model import DeltaSink
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.ledger import Entry, LedgerMismatch
from holdfast.pipeline.positions import Place, to_text
from holdfast.pipeline.sinks.base import Batch, Prepared, Problem, Sink, SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.columns import (
    check_columns,
    check_partitioning,
    fitting_schema,
    stored_schema,
)
from holdfast.pipeline.sinks.files import Disk, explained, files_for
from holdfast.pipeline.sinks.writing import FileSet, WrittenFile, reject_unreadable, write_batch, written_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

COMMIT_TRIES = 20
"""Others may write to the table too, or optimise it: each of them costs one try."""
CHECKPOINT_EVERY = 100
FORGOTTEN = -1
"""The number of a ledger that was reset."""
METADATA = "holdfast"


class DeltaLedger:
    """One sink's ledger in one table. Needs no Spark."""

    def __init__(self, name: str, pipeline: str, uri: str, disk: Disk) -> None:
        self.name = name
        self.uri = uri
        self.disk = disk
        self.application = f"hf-{pipeline}--{name}"
        self.directory = f"{uri}/_hf/{pipeline}--{name}"

    def table(self) -> DeltaTable | None:
        """A new handle: what the log says now."""
        try:
            return DeltaTable(self.uri)
        except TableNotFoundError:
            return None
        except (DeltaError, OSError) as error:
            raise SinkError(f"sink {self.name!r}: {self.uri}: {str(error).splitlines()[0]}") from error

    def number(self, table: DeltaTable) -> int | None:
        """Of the last entry; None when there is none."""
        number = table.transaction_version(f"{self.application}/number")
        return None if number is None or number == FORGOTTEN else int(number)

    def entry_name(self, table: DeltaTable) -> int | None:
        return table.transaction_version(f"{self.application}/entry")

    def last_entry(self, table: DeltaTable) -> Entry | None:
        number = self.number(table)
        if number is None:
            return None
        name = self.entry_name(table)
        try:
            with self.disk.open_existing(f"{self.directory}/{name}.json") as file:
                document = json.loads(file.read())
        except FileNotFoundError:
            document = self._from_history(table, number)
        entry = Entry.from_json(document)
        self._compare(table, entry, number)
        return entry

    def entries(self, table: DeltaTable) -> list[Entry]:
        """Those of today's ledger that the table's log tells, oldest first."""
        found: list[Entry] = []
        number = self.number(table)
        for _, document in self._commits(table, None) if number is not None else ():
            if document is not None and document["number"] == number:
                found.append(Entry.from_json(document))
                number = found[-1].number - 1
        return found[::-1]

    def _commits(self, table: DeltaTable, limit: int | None) -> Iterator[tuple[dict[str, Any], Any]]:
        """The newest of the log, the last one first, each with the entry of this ledger that it carries."""
        for commit in table.history(limit):
            document = json.loads(commit.get(METADATA, "null"))
            is_ours = document and f"hf-{document['pipeline']}--{document['sink']}" == self.application
            yield commit, document if is_ours else None

    def missing(self, table: DeltaTable, *, may_be_empty: bool = False) -> str | None:
        """What the table names and lacks, or no longer names; `may_be_empty`: where rows can delete."""
        files = pa.table(table.get_add_actions()).sort_by([("modification_time", "descending")])
        for file in files.slice(0, self.disk.looks_at).to_pylist():
            path = unquote(file["path"])
            if "://" not in path and not self.disk.has(f"{self.uri}/{path}", file["size_bytes"]):
                return f"the file {path} of {self.uri} is gone, cut short or cannot be read"
        had_rows = False
        for commit, entry in self._commits(table, self.disk.looks_at):
            if commit.get("operation") == "RESTORE":
                return f"{self.uri} was restored to an earlier version of its own, by version {commit['version']}"
            if entry is not None:
                had_rows = had_rows or entry["rows"] > 0
                if entry["number"] == 0 or "erased" in entry:
                    break  # what was before this ledger is not ours
        return (
            f"{self.uri} has no rows any more, and had some"
            if had_rows and not (files.num_rows or may_be_empty)
            else None
        )

    def _from_history(self, table: DeltaTable, number: int) -> Any:
        for _, document in self._commits(table, None):
            if document is not None and document["number"] == number:
                return document
        raise SinkError(
            f"sink {self.name!r}: the entry {number} of the ledger is missing from {self.directory}; bring the file "
            "back, or start over with `holdfast pipeline reset`"
        )

    def _compare(self, table: DeltaTable, entry: Entry, number: int) -> None:
        for place, position in entry.positions.at.items():
            held = table.transaction_version(self._of(place))
            if held != position.offset or entry.number != number:
                raise LedgerMismatch(
                    f"sink {self.name!r}: the entry says that {place.topic}-{place.partition} stands at "
                    f"{position.offset} after batch {entry.number}, and the table's application transactions say "
                    f"{held} after batch {number}; one of the two was changed by somebody else"
                )

    def _of(self, place: Place) -> str:
        return f"{self.application}/{place.topic_id}/{place.partition}"

    def transactions(self, entry: Entry, name: int) -> list[Transaction]:
        return [
            Transaction(f"{self.application}/number", entry.number),
            Transaction(f"{self.application}/entry", name),
            *(Transaction(self._of(place), at.offset) for place, at in entry.positions.at.items()),
        ]

    def flush_log(self, first: int, last: int) -> None:
        """Make commits durable that `deltalake` has written; the table itself may be new."""
        log = f"{self.uri}/_delta_log"
        for version in range(first, last + 1):
            self.disk.flush_file(f"{log}/{version:020d}.json")
        self.disk.flush_directory(log)
        if first == 0:
            self.disk.flush_directory(self.uri)


class PreparedDelta:
    """Files in the table's directory that no commit names yet."""

    def __init__(self, sink: DeltaSinkWriter, schema: StructType | None, files: list[WrittenFile]) -> None:
        self.rows = sum(file.rows for file in files)
        self.digest: int | None = sum(file.digest for file in files) & MASK
        self.written = written_of(files, schema, sink.key)
        self.schema = schema
        self.files = files
        self._sink = sink

    def commit(self, entry: Entry) -> Entry | None:
        return self._sink.commit(self, entry)

    def discard(self) -> None:
        # Files that stay are named by no commit; a vacuum of the table takes them.
        with contextlib.suppress(SinkError, OSError):
            self._sink.remove(self.files)


class DeltaSinkWriter(Sink):
    """The sink to the engine."""

    def __init__(self, definition: DeltaSink, pipeline: str, directory: str = ".") -> None:
        self.name = definition.name
        self._definition = definition
        self._pipeline = pipeline
        uri, disk = files_for(definition.path, directory)
        self.ledger = DeltaLedger(definition.name, pipeline, uri, disk)
        self._was_there = False
        """The table, when its ledger was read last."""

    def check(self, rows: StructType) -> list[Problem]:
        return check_partitioning(self._definition.partition_by, rows) + check_columns(rows)

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        table = self.ledger.table()
        if table is None:
            return
        by = tuple(table.metadata().partition_columns)
        if by != self._definition.partition_by:
            raise SinkError(
                f"sink {self.name!r}: the table {self.ledger.uri} is partitioned by {', '.join(by) or 'nothing'}, and "
                f"the definition says {', '.join(self._definition.partition_by) or 'nothing'}; that cannot be changed "
                "in a table that is there"
            )

    def last_entry(self) -> Entry | None:
        table = self.ledger.table()
        self._was_there = table is not None
        return None if table is None else self.ledger.last_entry(table)

    def missing(self) -> str | None:
        table = self.ledger.table()
        has_entry = table is not None and self.ledger.number(table) is not None
        if table is None or not has_entry:
            return None
        return self.ledger.missing(table, may_be_empty=self._definition.delete_when is not None)

    def holds_rows(self) -> bool:
        table = self.ledger.table()
        return table is not None and bool(table.file_uris())

    def forget(self) -> None:
        table = self.ledger.table()
        if table is not None and self.ledger.number(table) is not None:
            self.commit_actions(table, [], [Transaction(f"{self.ledger.application}/number", FORGOTTEN)], {})

    def close(self) -> None:
        """A table has nothing to let go of."""

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        stored = stored_schema(rows.schema)
        held = self._held(stored)
        if batch.is_empty:
            return PreparedDelta(self, None, [])
        schema = fitting_schema(self.name, held, stored, self._definition.schema)
        files = replace(self.file_set(), key=self.key)
        prepared = PreparedDelta(self, schema, write_batch(rows, schema, files, batch))
        try:
            reject_unreadable(self.name, rows, self._definition.partition_by, prepared.files, sys.maxsize)
        except BaseException:
            prepared.discard()
            raise
        return prepared

    def file_set(self) -> FileSet:
        ledger, sink = self.ledger, self._definition
        return FileSet(ledger.uri, sink.partition_by, sink.file_bytes, disk=ledger.disk)

    def _held(self, new: StructType) -> StructType:
        """The columns of the table; one that is not there is made with these."""
        from pyspark.sql.types import StructType

        table = self.ledger.table()
        if table is not None:
            return StructType.fromJson(json.loads(table.schema().to_json()))
        if self._was_there:
            raise self._vanished()
        with explained(self.name, self.ledger.uri):
            self._create(new)
        return new

    def _create(self, schema: StructType) -> None:
        self.ledger.disk.create_directory(self.ledger.uri)
        try:
            table = DeltaTable.create(
                self.ledger.uri,
                delta_schema(schema),
                mode="ignore",
                partition_by=list(self._definition.partition_by),
            )
        except DeltaError as error:
            raise SinkError(f"sink {self.name!r}: {self.ledger.uri}: {error}") from error
        self.ledger.flush_log(0, table.version())

    def remove(self, written: list[WrittenFile]) -> None:
        """Take files back, unless a commit names them after all."""
        table = self.ledger.table()
        named = set() if table is None else {path.rpartition("/")[2] for path in table.file_uris()}
        for file in written:
            if file.path not in named:
                self.ledger.disk.remove(f"{self.ledger.uri}/{file.path}")

    def commit(self, prepared: PreparedDelta, entry: Entry) -> Entry | None:
        name = self.keep(entry)
        actions = [self.named(file) for file in prepared.files]
        for _ in range(COMMIT_TRIES):
            table = self._checked(entry)
            if prepared.schema is not None:
                table = self._widened(table, prepared.schema)
            if self.commit_entry(table, actions, entry, name):
                return None
        raise self._crowded_out()

    def _crowded_out(self) -> SinkError:
        return SinkError(
            f"sink {self.name!r}: others wrote to {self.ledger.uri} each time this was to be committed; nothing was. "
            "Run again"
        )

    def keep(self, entry: Entry) -> int:
        """The name of the entry's file, which is durable before a commit names it."""
        ledger, name = self.ledger, secrets.randbits(62)
        with explained(self.name, ledger.uri):
            ledger.disk.create_directory(ledger.directory)
            ledger.disk.write(f"{ledger.directory}/{name}.json", to_text(entry.as_json()).encode())
            ledger.disk.flush_directory(ledger.directory)
            ledger.disk.flush_directory(ledger.uri)
        return name

    def commit_entry(self, table: DeltaTable, actions: list[Any], entry: Entry, name: int) -> bool:
        """Commit an entry that is kept; False when somebody else has written meanwhile."""
        metadata = {METADATA: to_text(entry.as_json())}
        if self.commit_actions(table, actions, self.ledger.transactions(entry, name), metadata):
            return True
        again = self.ledger.table()
        return again is not None and self.ledger.entry_name(again) == name

    def _checked(self, entry: Entry) -> DeltaTable:
        """A handle on which this entry is the next."""
        table = self.ledger.table()
        if table is None:
            raise self._vanished()
        self.require_next(table, entry)
        return table

    def require_next(self, table: DeltaTable, entry: Entry) -> None:
        """`SinkFenced` unless the entry follows the ledger."""
        number = self.ledger.number(table)
        if entry.number != (0 if number is None else number + 1):
            raise SinkFenced(
                f"sink {self.name!r}: entry {entry.number} does not follow the ledger of {self.ledger.uri}, which is "
                f"at {number}; another copy of the pipeline writes there. This copy has written nothing"
            )

    def _vanished(self) -> SinkError:
        return SinkError(
            f"sink {self.name!r}: the table {self.ledger.uri} has vanished; nothing was committed"
        )

    def _widened(self, table: DeltaTable, schema: StructType) -> DeltaTable:
        """The table with columns for all of these; a crash after this leaves columns that are null."""
        there = {field.name for field in table.schema().fields}
        missing = [field for field in delta_schema(schema).fields if field.name not in there]
        if missing:
            before = table.version()
            try:
                table.alter.add_columns(missing)
            except DeltaError as error:
                raise SinkError(f"sink {self.name!r}: columns cannot be added: {error}") from error
            table.update_incremental()
            self.ledger.flush_log(before + 1, table.version())
        return table

    def named(self, file: WrittenFile) -> AddAction:
        values = dict(zip(self._definition.partition_by, file.partition, strict=True))
        return AddAction(
            file.path,
            file.bytes,
            values,
            time.time_ns() // 1_000_000,
            True,
            json.dumps({"numRecords": file.rows}),
        )

    def commit_actions(
        self,
        table: DeltaTable,
        actions: list[Any],
        transactions: list[Transaction],
        metadata: dict[str, str],
    ) -> bool:
        """Write the next version of the log; False when somebody else has."""
        version = table.version() + 1
        try:
            table.create_write_transaction(
                actions,
                "append",
                table.schema(),
                list(self._definition.partition_by),
                commit_properties=CommitProperties(metadata, 0, transactions),
                post_commithook_properties=PostCommitHookProperties(False, False),
            )
        except CommitFailedError:
            return False
        except (DeltaError, OSError) as error:
            raise SinkError(f"sink {self.name!r}: {self.ledger.uri}: {error}") from error
        try:
            self.ledger.flush_log(version, version)
            if version % CHECKPOINT_EVERY == 0:
                self._checkpoint()
        except OSError as error:
            raise SinkError(
                f"sink {self.name!r}: version {version} of {self.ledger.uri} is written and could not be flushed "
                f"({error}): whether it survives a loss of power is not known. Run again: the ledger tells"
            ) from error
        return True

    def _checkpoint(self) -> None:
        table = self.ledger.table()
        if table is None:
            return
        table.create_checkpoint()
        log = f"{self.ledger.uri}/_delta_log"
        self.ledger.disk.flush_file(f"{log}/{table.version():020d}.checkpoint.parquet")
        self.ledger.disk.flush_file(f"{log}/_last_checkpoint")
        self.ledger.disk.flush_directory(log)


def delta_schema(schema: StructType) -> Schema:
    """Delta's schemas are written in Spark's JSON; every column may be null."""
    document = json.loads(schema.json())
    for field in document["fields"]:
        field["nullable"] = True
    return Schema.from_json(json.dumps(document))
