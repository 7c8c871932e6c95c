"""Merging the small files of old batches, so that readers open few and large ones.

*Parquet.* No file system replaces several directories by one in one step, but Linux exchanges two directories. So a
whole new table is built beside the old: batches that stay are linked into it, runs of small ones are merged into one
directory under the number of the last, which keeps all their entries. When it is complete, counted, compared and
flushed, the two directories change places, and the old one is removed. A crash before the exchange leaves the table as
it was, a crash after it leaves the new one; what is left beside it is removed by the next run. A reader sees the old
table or the new one, each row once; one that has listed the old table and opens its files after the exchange is told
that a file is gone, and never sees half of both.

*Delta.* The log does it: one commit removes small files and adds what they were merged to, as no change of data.

The pipeline must not be running: the lock of a Parquet sink is taken.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.files import explained
from holdfast.pipeline.sinks.parquet import (
    CONTROL,
    ENTRIES,
    LEDGER,
    SCHEMA,
    ParquetSinkWriter,
    ParquetStore,
    batch_directory,
)
from holdfast.pipeline.sinks.writing import ROW_GROUP_ROWS, FileSet, FileWriter, WrittenFile, lineage_of

SMALL = 0.5
"""A batch whose files are on average below this part of the wanted size is merged with its neighbours."""


@dataclass(frozen=True)
class Compacted:
    """What was merged in one sink."""

    sink: str
    batches: int | None
    """None where files are not kept by batch."""
    files_before: int
    files_after: int
    rows: int

    def __str__(self) -> str:
        of = "" if self.batches is None else f" of {self.batches:,} batches"
        return f"{self.sink}: {self.files_before:,} files{of} merged into {self.files_after:,}, {self.rows:,} rows"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def compact(definition: PipelineDefinition, *, sink: str | None = None) -> list[Compacted]:
    """Merge what is small in the file sinks of this pipeline, or in the one of this name."""
    done = []
    for each in definition.sinks:
        if sink is not None and each.name != sink:
            continue
        if isinstance(each, ParquetSink):
            store = ParquetSinkWriter(each, definition.name, definition.directory).store
            found = compact_parquet(store, each)
        elif isinstance(each, DeltaSink):
            from holdfast.pipeline.sinks.delta_compacting import compact_delta

            found = compact_delta(definition, each)
        elif sink is not None:
            raise SinkError(f"sink {sink!r} keeps no files; only Parquet and Delta sinks are merged")
        else:
            continue
        if found is not None:
            done.append(found)
    return done


def compact_parquet(store: ParquetStore, definition: ParquetSink) -> Compacted | None:
    """Merge the small batches of a Parquet sink; None when there is nothing to merge."""
    if not store.path:
        raise SinkError(f"sink {store.name!r}: {definition.path} is not on this machine")
    if not store.numbers():
        return None
    store.path = os.path.realpath(store.path)
    held = store.lock()
    try:
        with explained(store.name, store.path):
            _sweep(store)
            runs = list(runs_of_small(store, definition.file_bytes))
            if not runs:
                return None
            return _rebuild(store, definition, runs)
    finally:
        held.release()


def _aside(store: ParquetStore) -> str:
    parent, name = os.path.split(store.path)
    return os.path.join(parent, f".{name}.compact-")


def _sweep(store: ParquetStore) -> None:
    """Remove what a run that was cut short left beside the table; the lock is ours, so nobody uses it."""
    parent, prefix = os.path.split(_aside(store))
    for name in os.listdir(parent):
        if name.startswith(prefix):
            store.disk.remove_tree(os.path.join(parent, name))


def runs_of_small(store: ParquetStore, file_bytes: int) -> Iterator[list[int]]:
    """Runs of two or more neighbouring batches with small files, on one side of a reset."""
    forgotten = store.forgotten()
    run: list[int] = []
    for number in store.numbers():
        if run and run[-1] < forgotten <= number:
            if len(run) > 1:
                yield run
            run = []
        if _is_small(store, number, file_bytes):
            run.append(number)
            continue
        if len(run) > 1:
            yield run
        run = []
    if len(run) > 1:
        yield run


def _is_small(store: ParquetStore, number: int, file_bytes: int) -> bool:
    sizes = [store.disk.size(path) for path in store.data_files(number)]
    return not sizes or sum(sizes) / len(sizes) < SMALL * file_bytes


def _rebuild(store: ParquetStore, definition: ParquetSink, runs: list[list[int]]) -> Compacted:
    new = _aside(store) + uuid.uuid4().hex
    merged = {number for run in runs for number in run}
    before = sum(len(store.data_files(number)) for number in merged)
    _link(store, new, {batch_directory(number) for number in merged})
    files: list[WrittenFile] = []
    for run in runs:
        files += _merge(store, definition, run, os.path.join(new, batch_directory(run[-1])))
    store.disk.flush_tree(new)
    store.disk.exchange(new, store.path)
    store.disk.flush_directory(os.path.dirname(store.path))
    store.disk.remove_tree(new)
    return Compacted(store.name, len(merged), before, len(files), sum(file.rows for file in files))


def _link(store: ParquetStore, new: str, left_out: set[str]) -> None:
    """Everything of the table that is not merged, in a new directory, by other names for the same files."""
    passing = {os.path.join(CONTROL, "scratch"), os.path.join(CONTROL, "aside")}
    for directory, folders, names in os.walk(store.path):
        below = os.path.relpath(directory, store.path)
        target = os.path.normpath(os.path.join(new, below))
        folders[:] = [
            name for name in folders if os.path.normpath(os.path.join(below, name)) not in left_out | passing
        ]
        os.mkdir(target)
        shutil.copystat(directory, target)
        for name in names:
            os.link(os.path.join(directory, name), os.path.join(target, name), follow_symlinks=False)


def _merge(store: ParquetStore, definition: ParquetSink, run: list[int], target: str) -> list[WrittenFile]:
    """One directory with the rows and the entries of a run of batches."""
    disk = store.disk
    os.mkdir(target)
    folders: dict[str, list[str]] = {}
    for number in run:
        root = os.path.join(store.path, batch_directory(number))
        for path in store.data_files(number):
            folders.setdefault(os.path.dirname(os.path.relpath(path, root)), []).append(path)
    written: list[WrittenFile] = []
    expected_rows, expected_digest = 0, 0
    for folder, paths in sorted(folders.items()):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
        files = FileSet(
            os.path.join(target, folder), (), definition.file_bytes, definition.compression.lower(), disk
        )
        written += merge_files(paths, files)
        for path in paths:
            rows, digest = lineage_of(path, disk)
            expected_rows += rows
            expected_digest += digest
    found = sum(file.rows for file in written), sum(file.digest for file in written) & MASK
    if found != (expected_rows, expected_digest & MASK):
        raise SinkError(
            f"sink {store.name!r}: merging batches {run[0]} to {run[-1]} gave {found[0]} rows for {expected_rows}, or "
            "others; the table was left as it is"
        )
    entries = [entry for number in run for entry in store.entries_of(number)]
    lines = "".join(to_text(entry.as_json()) + "\n" for entry in entries)
    disk.write(os.path.join(target, ENTRIES), lines.encode())
    disk.write(os.path.join(target, LEDGER), to_text(entries[-1].as_json()).encode())
    schema = store.held_schema(run[-1])
    if schema is not None:
        disk.write(os.path.join(target, SCHEMA), schema.encode())
    return written


def merge_files(paths: Iterable[str], files: FileSet) -> list[WrittenFile]:
    """The rows of these Parquet files, in order, in files of the wanted size."""
    paths = list(paths)
    schema = pa.unify_schemas([_schema_of(path, files) for path in paths])
    writer = FileWriter(files, (), schema)
    try:
        for path in paths:
            with files.disk.open_existing(path) as handle, pq.ParquetFile(handle) as file:
                for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS):
                    writer.add(_aligned(batch, schema))
        return writer.close()
    except BaseException:
        writer.abandon()
        raise


def _schema_of(path: str, files: FileSet) -> pa.Schema:
    with files.disk.open_existing(path) as handle, pq.ParquetFile(handle) as file:
        return file.schema_arrow.remove_metadata()


def _aligned(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    there = set(batch.schema.names)
    columns = [
        batch.column(field.name) if field.name in there else pa.nulls(batch.num_rows, field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)
