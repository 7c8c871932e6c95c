"""The Parquet sink: a batch is one directory, and a rename is its commit.

    <path>/batch=00000000000000000007/part-….parquet      rows (below `column=value/` with partition_by)
    <path>/batch=00000000000000000007/_ledger.json        the entry of the ledger
    <path>/batch=00000000000000000007/_schema.json        the columns, in Spark's JSON, and what they are nested by
    <path>/_hf/lock                                       held by the pipeline that writes
    <path>/_hf/scratch/, <path>/_hf/aside/                a batch before its commit
    <path>/_hf/forgotten.json                             after `pipeline reset`: entries up to here do not count

Tasks write into scratch; the driver moves the files they report, and no others, into a directory no task knows, where
it writes those of a small batch itself. It adds entry and schema, flushes everything and renames the directory to its
number. A rename does not replace a directory that has something in it, and every batch has an entry in it: of two
writers of one number exactly one wins, without a lock.
The lock only tells a second copy sooner.

Plain readers skip names that start with an underscore, so they see whole batches: `spark.read.parquet(path)`, pandas,
or DuckDB on `path/batch=*/**/*.parquet`. Spark shows the number as a column `batch`. The number of a directory is the
number of its entry, counted on after a reset.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.atomic import read_named
from holdfast.pipeline.definition.model import COMPRESSIONS, ParquetSink
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.ledger import Entry, erased_rows
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sinks.base import Batch, Prepared, Problem, Sink, SinkContext, SinkError, SinkFenced
from holdfast.pipeline.sinks.columns import (
    check_columns,
    check_partitioning,
    fitting_schema,
    stored_schema,
)
from holdfast.pipeline.sinks.files import Disk, Held, explained, files_below, hold, local_path
from holdfast.pipeline.sinks.writing import (
    NAME_BYTES_MAX,
    FileSet,
    WrittenFile,
    is_put,
    reject_unreadable,
    write_batch,
    written_of,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

CONTROL = "_hf"
LEDGER = "_ledger.json"
ENTRIES = "_entries.jsonl"
"""Beside the ledger of merged batches: every entry they had, oldest first."""
SCHEMA = "_schema.json"
FORGOTTEN = "forgotten.json"
BATCH = re.compile(r"batch=(\d{20})")


def batch_directory(number: int) -> str:
    return f"batch={number:020d}"


class ParquetStore:
    """The directories of one sink: what is committed, and the ledger in it. Needs no Spark."""

    def __init__(self, name: str, pipeline: str, path: str, disk: Disk | None = None) -> None:
        self.name = name
        self.pipeline = pipeline
        self.path = path
        self.disk = disk or Disk()

    @property
    def control(self) -> str:
        return os.path.join(self.path, CONTROL)

    def numbers(self) -> list[int]:
        """Every committed batch, forgotten ones too, in order."""
        try:
            names = os.listdir(self.path)
        except FileNotFoundError:
            return []
        return sorted(int(match[1]) for match in map(BATCH.fullmatch, names) if match)

    def forgotten(self) -> int:
        """Directories below this number do not count in the ledger."""
        try:
            with open(os.path.join(self.control, FORGOTTEN), encoding="utf-8") as file:
                return int(json.load(file)["below"])
        except FileNotFoundError:
            return 0

    def last_entry(self) -> Entry | None:
        numbers = self.numbers()
        return self.entry_of(numbers[-1]) if numbers and numbers[-1] >= self.forgotten() else None

    def entry_of(self, number: int) -> Entry:
        try:
            entry = Entry.from_json(json.loads(self._read(number, LEDGER)))
        except (OSError, ValueError, KeyError) as error:
            raise SinkError(
                f"sink {self.name!r}: {batch_directory(number)} in {self.path} has no ledger entry that can be read "
                f"({error}); somebody else changed it. Bring {LEDGER} back, or start over with "
                "`holdfast pipeline reset`"
            ) from error
        if (entry.pipeline, entry.sink) != (self.pipeline, self.name):
            raise SinkError(
                f"sink {self.name!r}: {self.path} holds batches of the sink {entry.sink!r} of the pipeline "
                f"{entry.pipeline!r}; give each sink a path of its own"
            )
        return entry

    def entries(self) -> Iterator[Entry]:
        """The whole ledger, oldest first, entries of merged batches included."""
        forgotten = self.forgotten()
        for number in self.numbers():
            if number >= forgotten:
                yield from self.entries_of(number)

    def entries_of(self, number: int) -> list[Entry]:
        """The entries of one directory: several when batches were merged into it."""
        if not os.path.exists(os.path.join(self.path, batch_directory(number), ENTRIES)):
            return [self.entry_of(number)]
        lines = self._read(number, ENTRIES).splitlines()
        return [Entry.from_json(json.loads(line)) for line in lines]

    def data_files(self, number: int) -> list[str]:
        root = os.path.join(self.path, batch_directory(number))
        return sorted(
            os.path.join(root, path)
            for path in files_below(root)
            if not os.path.basename(path).startswith("_")
        )

    def missing(self) -> str | None:
        """A batch's directory that is not there, or rows that one of the newest lacks."""
        numbers = [number for number in self.numbers() if number >= self.forgotten()]
        expected = self.forgotten()
        for number in numbers:
            if number != expected and number - len(self.entries_of(number)) != expected - 1:
                return f"{batch_directory(expected)} is gone from {self.path}, and later batches are there"
            expected = number + 1
        looked_at = {number: self.entries_of(number) for number in numbers[-self.disk.looks_at :]}
        erased = erased_rows(entry for entries in looked_at.values() for entry in entries)
        for number, entries in looked_at.items():
            if not entries[-1].positions.at.keys() <= self.entry_of(numbers[-1]).positions.at.keys():
                return f"{batch_directory(number)} in {self.path} is of another source: it is another's"
            had = sum(entry.rows - erased[str(entry.number)] for entry in entries)
            try:
                has = sum(pq.read_metadata(path).num_rows for path in self.data_files(number))
            except (OSError, pa.ArrowException) as error:
                return f"{batch_directory(number)} in {self.path} cannot be read: {error}"
            if has != had:
                return f"{batch_directory(number)} in {self.path} has {has} rows, and had {had}"
        return None

    def held_schema(self, up_to: int | None = None) -> str | None:
        """What the newest batch that has any says about its columns: see `Layout`."""
        for number in reversed(self.numbers()):
            if up_to is None or number <= up_to:
                with contextlib.suppress(FileNotFoundError):
                    return self._read(number, SCHEMA)
        return None

    def forget(self) -> None:
        numbers = self.numbers()
        if numbers:
            self.disk.create_directory(self.control)
            content = to_text({"below": numbers[-1] + 1}).encode()
            self.disk.replace(os.path.join(self.control, FORGOTTEN), content)

    def lock(self) -> Held:
        self.disk.create_directory(self.control)
        held = hold(os.path.join(self.control, "lock"))
        if held is None:
            raise SinkFenced(
                f"sink {self.name!r}: another process writes to {self.path}; two copies of a pipeline cannot run at "
                "once. Stop the other one first"
            )
        return held

    def _read(self, number: int, name: str) -> str:
        return read_named(os.path.join(self.path, batch_directory(number), name)).decode()


@dataclass(frozen=True)
class Layout:
    """The columns of a batch, and those its directories are named by."""

    columns: StructType
    partition_by: tuple[str, ...]

    @cached_property
    def encoded(self) -> bytes:
        document = {"columns": json.loads(self.columns.json()), "partition_by": list(self.partition_by)}
        return to_text(document).encode()

    @classmethod
    def decode(cls, text: str) -> Layout:
        from pyspark.sql.types import StructType

        document = json.loads(text)
        return cls(StructType.fromJson(document["columns"]), tuple(document["partition_by"]))


class PreparedParquet:
    """Files of one batch in a directory of their own."""

    def __init__(
        self,
        store: ParquetStore,
        aside: str,
        layout: Layout | None,
        files: list[WrittenFile],
        key: DigestKey | None = None,
    ) -> None:
        self.rows = sum(file.rows for file in files)
        self.digest: int | None = sum(file.digest for file in files) & MASK
        self.written = written_of(files, None if layout is None else layout.columns, key)
        self._store = store
        self._aside = aside
        self._layout = layout

    def commit(self, entry: Entry) -> None:
        store, disk = self._store, self._store.disk
        number = entry.number + store.forgotten()
        target = os.path.join(store.path, batch_directory(number))
        with explained(store.name, store.path):
            self._check_turn(number)
            if self._layout is not None:
                disk.write(os.path.join(self._aside, SCHEMA), self._layout.encoded)
            disk.write(os.path.join(self._aside, LEDGER), to_text(entry.as_json()).encode())
            disk.flush_tree(self._aside)
            try:
                disk.rename(self._aside, target)
            except OSError as error:
                if error.errno in (errno.EEXIST, errno.ENOTEMPTY):
                    raise self._fenced(number) from error
                raise
        try:
            disk.flush_directory(store.path)
        except OSError as error:
            raise SinkError(
                f"sink {store.name!r}: batch {number} is in place and flushing {store.path} failed ({error}): whether "
                "it survives a loss of power is not known. Run again: the ledger tells"
            ) from error

    def _check_turn(self, number: int) -> None:
        numbers = self._store.numbers()
        expected = numbers[-1] + 1 if numbers else 0
        if number < expected:
            raise self._fenced(number)
        if number > expected:
            raise SinkError(
                f"sink {self._store.name!r}: batch {number} would leave out the number {expected} in "
                f"{self._store.path}; its directories were changed by somebody else"
            )

    def _fenced(self, number: int) -> SinkFenced:
        return SinkFenced(
            f"sink {self._store.name!r}: batch {number} is in {self._store.path} already; another copy of the "
            "pipeline wrote it. This copy has written nothing"
        )

    def discard(self) -> None:
        self._store.disk.remove_tree(self._aside)


class ParquetSinkWriter(Sink):
    """The sink to the engine."""

    def __init__(
        self, definition: ParquetSink, pipeline: str, directory: str = ".", disk: Disk | None = None
    ) -> None:
        self.name = definition.name
        self.definition = definition
        path = local_path(definition.path)
        where = os.path.abspath(os.path.join(directory, path)) if path is not None else ""
        self._is_local = path is not None
        self.store = ParquetStore(definition.name, pipeline, where, disk)
        self._lock: Held | None = None
        self._is_to_be_made = False
        """Nothing was there when it was opened."""
        self._fitting: tuple[tuple[str | None, StructType | None], Layout | None] | None = None
        """What the newest batch had found about columns, and what follows from that: mostly the next finds the same."""
        self._open: list[str] = []

    def check(self, rows: StructType) -> list[Problem]:
        problems = check_partitioning(self.definition.partition_by, rows) + check_columns(rows)
        if not self._is_local:
            problems.append(Problem("path", self._elsewhere()))
        problems += [
            Problem(
                "",
                f"column {name!r}: readers take `batch` from the names of directories; give it another name",
            )
            for name in stored_schema(rows).fieldNames()
            if name.lower() == "batch"
        ]
        compression = self.definition.compression
        if compression.lower() not in COMPRESSIONS:
            message = f"{compression!r} is not one of {', '.join(COMPRESSIONS)}"
            problems.append(Problem("compression", message))
        return problems

    def _elsewhere(self) -> str:
        return (
            f"{self.definition.path} is not on a file system of this machine, and a batch is committed by renaming a "
            "directory, which object stores do not do in one step; use Delta (`delta:`) there"
        )

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        if not self._is_local:
            raise SinkError(f"sink {self.name!r}: {self._elsewhere()}")
        if spark is None:
            return
        # A path that is not there may be lost: nothing is made until it is known to be new.
        self._is_to_be_made = not os.path.isdir(self.store.path)
        if not self._is_to_be_made:
            self._take_over()

    def _take_over(self) -> None:
        with explained(self.name, self.store.path):
            self._lock = self.store.lock()
            # Whoever made these is gone: the lock was free.
            for name in ("scratch", "aside"):
                self.store.disk.remove_tree(os.path.join(self.store.control, name))

    def last_entry(self) -> Entry | None:
        return self.store.last_entry()

    def missing(self) -> str | None:
        return self.store.missing()

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        store = self.store
        if self._is_to_be_made:
            self._take_over()
            self._is_to_be_made = False
        seen = store.held_schema(), None if batch.is_empty else rows.schema
        if self._fitting is None or self._fitting[0] != seen:
            self._fitting = seen, self._layout(*seen)
        layout = self._fitting[1]
        aside = self._directory("aside", batch)
        self._open = [*(each for each in self._open if os.path.isdir(each)), aside]
        if batch.is_empty or layout is None:
            return PreparedParquet(store, aside, layout, [], self.key)
        written = self._write(batch, rows, layout.columns, aside)
        return PreparedParquet(store, aside, layout, written, self.key)

    def _directory(self, what: str, batch: Batch) -> str:
        """Of this attempt alone: it is not durable, and goes at the next start."""
        above = os.path.join(self.store.control, what)
        made = os.path.join(above, batch.label)
        with explained(self.name, self.store.path):
            self.store.disk.make_directory(above)
            self.store.disk.make_directory(made)
        return made

    def _layout(self, text: str | None, rows: StructType | None) -> Layout | None:
        """For rows with these columns, beside those that the sink says it has; what it has, for none."""
        try:
            held = None if text is None else Layout.decode(text)
        except (ValueError, KeyError) as error:
            raise SinkError(
                f"sink {self.name!r}: {SCHEMA} of the newest batch in {self.store.path} cannot be read ({error}); "
                "nothing was committed. Bring it back"
            ) from error
        if rows is None:
            return held
        by = self.definition.partition_by
        if held is not None and held.partition_by != by:
            was, now = (", ".join(names) or "nothing" for names in (held.partition_by, by))
            raise SinkError(
                f"sink {self.name!r}: {self.store.path} is partitioned by {was}, and the definition says {now}; "
                "readers cannot make sense of both. Write to another path"
            )
        columns = None if held is None else held.columns
        return Layout(fitting_schema(self.name, columns, stored_schema(rows), self.definition.schema), by)

    def _write(self, batch: Batch, rows: DataFrame, columns: StructType, aside: str) -> list[WrittenFile]:
        definition, disk, by = self.definition, self.store.disk, self.definition.partition_by
        files = FileSet(aside, by, definition.file_bytes, definition.compression.lower(), disk, self.key)
        if is_put(rows, by, batch):
            return write_batch(rows, columns, files, batch)
        scratch = self._directory("scratch", batch)
        files = replace(files, directory=scratch)
        try:
            written = write_batch(rows, columns, files, batch)
            reject_unreadable(self.name, rows, by, written, NAME_BYTES_MAX)
            with explained(self.name, self.store.path):
                for file in written:
                    folder = os.path.join(aside, file.folder(by))
                    if not os.path.isdir(folder):
                        os.makedirs(folder)
                    disk.rename(os.path.join(scratch, file.path), os.path.join(folder, file.path))
        finally:
            disk.remove_tree(scratch)
        return written

    def holds_rows(self) -> bool:
        store = self.store
        return any(entry.rows for number in store.numbers() for entry in store.entries_of(number))

    def forget(self) -> None:
        with explained(self.name, self.store.path):
            held = None if self._lock is not None else self.store.lock()
            try:
                self.store.forget()
            finally:
                if held is not None:
                    held.release()

    def close(self) -> None:
        for aside in self._open:
            self.store.disk.remove_tree(aside)
        self._open.clear()
        if self._lock is not None:
            self._lock.release()
            self._lock = None
