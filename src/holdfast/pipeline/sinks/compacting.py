"""Merging the small files of old batches, so that readers open few and large ones.

*Parquet.* No file system replaces several directories by one in one step, but Linux exchanges two directories. So a
whole new table is built beside the old: batches that stay are linked into it, runs of small ones are merged into one
directory under the number of the last, which keeps all their entries. When it is complete, counted, compared and
flushed, the two directories change places, and the old one is removed. A crash before the exchange leaves the table as
it was, a crash after it leaves the new one; what is left beside it is removed by the next run. A reader sees the old
table or the new one, each row once; one that has listed the old table and opens its files after the exchange is told
that a file is gone, and never sees half of both.

*Delta.* The log does it: one commit removes small files and adds what they were merged to, as no change of data.

`pipeline compact` merges all there is; the pipeline must not be running, since the lock of a Parquet sink is taken.

A pipeline that runs merges the small batches of its Parquet sinks itself (`Merging`), by the same exchange, between two
batches. Neighbours of about one size are merged, so that a row is written again once for each of `SIZES` and no more;
the directories that are left are few of each size. `TURN_BYTES` and `TURN_FILES` bound what is read and written in one
turn; a turn links the files of the whole table, which `PART` and `SHARE` keep in proportion.
"""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction

from holdfast.pipeline.definition.model import DeltaSink, ParquetSink, PipelineDefinition
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.sinks import parquet
from holdfast.pipeline.sinks.base import SinkError
from holdfast.pipeline.sinks.delta import COMMIT_TRIES, DeltaSinkWriter
from holdfast.pipeline.sinks.files import explained
from holdfast.pipeline.sinks.writing import ROW_GROUP_ROWS, FileSet, FileWriter, WrittenFile, lineage_of

OURS = re.compile(r"part-[0-9a-f]{32}\.parquet")
SMALL = 0.5
"""A batch whose files are on average below this part of the wanted size is merged with its neighbours."""


SIZES = (256 << 10, 2 << 20, 16 << 20)
"""Of directories that a run merges: neighbours below the first of these, then below the next. Larger ones are left to
`pipeline compact`."""
TURN_BYTES = 32 << 20
"""Read, written and read again within about half a second."""
TURN_FILES = 512
"""Opened in one turn: about a millisecond each."""
PART = 16
"""A turn links every directory there is, so it waits until one of so many is small and is one of a run: each batch then
pays for about so many links, however large the table is."""
SHARE = 20
"""After a turn, a run goes on for so many times as long as the turn took before the next."""


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
            store = parquet.ParquetSinkWriter(each, definition.name, definition.directory).store
            found = compact_parquet(store, each)
        elif isinstance(each, DeltaSink):
            found = compact_delta(definition, each)
        elif sink is not None:
            raise SinkError(f"sink {sink!r} keeps no files; only Parquet and Delta sinks are merged")
        else:
            continue
        if found is not None:
            done.append(found)
    return done


def compact_parquet(store: parquet.ParquetStore, definition: ParquetSink) -> Compacted | None:
    """Merge the small batches of a Parquet sink; None when there is nothing to merge."""
    if not store.path:
        raise SinkError(f"sink {store.name!r}: {definition.path} is not on this machine")
    if not store.numbers():
        return None
    store.path = os.path.realpath(store.path)
    held = store.lock()
    try:
        with explained(store.name, store.path):
            sweep(store)
            runs = list(runs_of_small(store, definition.file_bytes))
            if not runs:
                return None
            return _rebuild(store, definition, runs)
    finally:
        held.release()


class Merging:
    """The small batches of one Parquet sink, while the pipeline runs and holds its lock."""

    def __init__(
        self, store: parquet.ParquetStore, definition: ParquetSink, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._definition = definition
        self._now = now
        self._sizes: dict[int, tuple[int, int]] = {}
        """Bytes and files of directories, which do not change once they are there."""
        self._not_before = 0.0
        self._is_swept = False

    def turn(self) -> Compacted | None:
        """After a batch: merge one run of neighbours if there is one; `SinkError`: nothing was changed."""
        began = self._now()
        if not self._definition.compact or began < self._not_before:
            return None
        store = self._store
        with explained(store.name, store.path):
            store.path = os.path.realpath(store.path)
            if not self._is_swept:
                sweep(store)
                self._is_swept = True
            run = self._neighbours()
            if not run:
                return None
            try:
                done = _rebuild(store, self._definition, [run])
            except Exception:
                sweep(store)
                raise
            for number in run:
                del self._sizes[number]
        self._not_before = self._now() + SHARE * (self._now() - began)
        return done

    def _neighbours(self) -> list[int]:
        """The oldest directories of one size that are to be one, as many as a turn takes."""
        numbers = self._store.numbers()
        for number in numbers:
            if number not in self._sizes:
                paths = self._store.data_files(number)
                self._sizes[number] = sum(map(self._store.disk.size, paths)), len(paths)
        enough = max(2, self._definition.compact, len(numbers) // PART)
        for size in SIZES:
            small = {number for number in numbers if self._sizes[number][0] < size}
            for run in _runs(self._store, small.__contains__):
                if len(run) >= enough:
                    return self._taken(run)
        return []

    def _taken(self, run: list[int]) -> list[int]:
        bytes_left, files_left = TURN_BYTES, TURN_FILES
        for place, number in enumerate(run):
            size, files = self._sizes[number]
            bytes_left, files_left = bytes_left - size, files_left - files
            if bytes_left < 0 or files_left < 0:
                return run[:place] if place > 1 else []
        return run


def _aside(store: parquet.ParquetStore) -> str:
    parent, name = os.path.split(store.path)
    return os.path.join(parent, f".{name}.compact-")


def sweep(store: parquet.ParquetStore) -> None:
    """Remove what a run that was cut short left beside the table; the lock is ours, so nobody uses it."""
    parent, prefix = os.path.split(_aside(store))
    for name in os.listdir(parent):
        if name.startswith(prefix):
            store.disk.remove_tree(os.path.join(parent, name))


def runs_of_small(store: parquet.ParquetStore, file_bytes: int) -> Iterator[list[int]]:
    """Runs of two or more neighbouring batches with small files, on one side of a reset."""
    for run in _runs(store, lambda number: _is_small(store, number, file_bytes)):
        if len(run) > 1:
            yield run


def _runs(store: parquet.ParquetStore, is_small: Callable[[int], bool]) -> Iterator[list[int]]:
    """Neighbouring batches that are small, on one side of a reset."""
    forgotten = store.forgotten()
    for (small, _), run in groupby(store.numbers(), lambda number: (is_small(number), number < forgotten)):
        if small:
            yield list(run)


def _is_small(store: parquet.ParquetStore, number: int, file_bytes: int) -> bool:
    sizes = [store.disk.size(path) for path in store.data_files(number)]
    return not sizes or sum(sizes) / len(sizes) < SMALL * file_bytes


def _rebuild(store: parquet.ParquetStore, definition: ParquetSink, runs: list[list[int]]) -> Compacted:
    merged = {number for run in runs for number in run}
    before = sum(len(store.data_files(number)) for number in merged)
    new = linked(store, {parquet.batch_directory(number) for number in merged})
    files: list[WrittenFile] = []
    for run in runs:
        files += _merge(store, definition, run, os.path.join(new, parquet.batch_directory(run[-1])))
    take_the_place(store, new)
    return Compacted(store.name, len(merged), before, len(files), sum(file.rows for file in files))


def linked(store: parquet.ParquetStore, left_out: set[str]) -> str:
    """All of the table but these directories and files, in a new directory, by other names for the same files."""
    new = _aside(store) + uuid.uuid4().hex
    without = left_out | {os.path.join(parquet.CONTROL, "scratch"), os.path.join(parquet.CONTROL, "aside")}
    for directory, folders, names in os.walk(store.path):
        below = os.path.relpath(directory, store.path)
        target = os.path.normpath(os.path.join(new, below))
        folders[:] = [name for name in folders if os.path.normpath(os.path.join(below, name)) not in without]
        os.mkdir(target)
        shutil.copystat(directory, target)
        for name in names:
            if os.path.normpath(os.path.join(below, name)) not in without:
                os.link(os.path.join(directory, name), os.path.join(target, name), follow_symlinks=False)
    return new


def take_the_place(store: parquet.ParquetStore, new: str) -> None:
    """The new table is the table, in one step; the old one goes."""
    store.disk.flush_tree(new)
    store.disk.exchange(new, store.path)
    store.disk.flush_directory(os.path.dirname(store.path))
    store.disk.remove_tree(new)


def _merge(
    store: parquet.ParquetStore, definition: ParquetSink, run: list[int], target: str
) -> list[WrittenFile]:
    """One directory with the rows and the entries of a run of batches."""
    disk = store.disk
    os.mkdir(target)
    folders: dict[str, list[str]] = {}
    for number in run:
        root = os.path.join(store.path, parquet.batch_directory(number))
        for path in store.data_files(number):
            folders.setdefault(os.path.dirname(os.path.relpath(path, root)), []).append(path)
    written: list[WrittenFile] = []
    for folder, paths in sorted(folders.items()):
        os.makedirs(os.path.join(target, folder), exist_ok=True)
        files = FileSet(
            os.path.join(target, folder), (), definition.file_bytes, definition.compression.lower(), disk
        )
        written += _compared(store.name, paths, files)
    entries = [entry for number in run for entry in store.entries_of(number)]
    lines = "".join(to_text(entry.as_json()) + "\n" for entry in entries)
    disk.write(os.path.join(target, parquet.ENTRIES), lines.encode())
    disk.write(os.path.join(target, parquet.LEDGER), to_text(entries[-1].as_json()).encode())
    schema = store.held_schema(run[-1])
    if schema is not None:
        disk.write(os.path.join(target, parquet.SCHEMA), schema.encode())
    return written


def _compared(sink: str, paths: list[str], files: FileSet) -> list[WrittenFile]:
    """What the files are merged to; it has the rows they have, or is taken back."""
    written = merge_files(paths, files)
    expected = [lineage_of(path, files.disk) for path in paths]
    rows, digest = sum(each[0] for each in expected), sum(each[1] for each in expected) & MASK
    found = sum(file.rows for file in written), sum(file.digest for file in written) & MASK
    if found != (rows, digest):
        for file in written:
            files.disk.remove(f"{files.directory}/{file.path}")
        raise SinkError(
            f"sink {sink!r}: merging {len(paths)} files gave {found[0]} rows for {rows}, or others; the table was left "
            "as it is"
        )
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


def compact_delta(definition: PipelineDefinition, sink: DeltaSink) -> Compacted | None:
    """Merge small files, partition by partition; None when there is nothing to merge.

    Only files the sink wrote itself are touched, known by their names, and only whole ones: a table in which somebody
    else deletes rows by deletion vectors is left alone. New files are flushed before the commit that names them; old
    ones stay for readers of older versions until a vacuum of the table. The ledger is not touched, so the pipeline may
    be running.
    """
    writer = DeltaSinkWriter(sink, definition.name, definition.directory)
    table = writer.ledger.table()
    if table is None:
        return None
    if "deletionVectors" in (table.protocol().reader_features or ()):
        raise SinkError(f"sink {sink.name!r}: {writer.ledger.uri} has deletion vectors; merge it with Spark")
    old: list[WrittenFile] = []
    new: list[WrittenFile] = []
    with explained(sink.name, writer.ledger.uri):
        for group in small_files(table, sink):
            old += group
            new += _merged(writer, sink, group)
        if not new:
            return None
        writer.ledger.disk.flush_directory(writer.ledger.uri)
    _commit(writer, sink, old, new)
    return Compacted(sink.name, None, len(old), len(new), sum(file.rows for file in new))


def small_files(table: DeltaTable, sink: DeltaSink) -> Iterator[list[WrittenFile]]:
    """Groups of small files of one partition, two or more, as much as fits one file."""
    groups: dict[tuple[str | None, ...], list[WrittenFile]] = {}
    for file in own_files(table, sink):
        if file.bytes < SMALL * sink.file_bytes:
            groups.setdefault(file.partition, []).append(file)
    for files in groups.values():
        if len(files) > 1:
            yield files


def own_files(table: DeltaTable, sink: DeltaSink) -> Iterator[WrittenFile]:
    """The files of the table that the sink wrote, known by their names."""
    return (file for file in table_files(table, sink.partition_by) if OURS.fullmatch(file.path))


def table_files(table: DeltaTable, partition_by: Sequence[str]) -> Iterator[WrittenFile]:
    """The files of the table: path, size and partition of each."""
    actions: Any = pa.table(table.get_add_actions(flatten=True))
    values = [_texts(actions.column(f"partition.{name}")) for name in partition_by]
    sizes = actions.column("size_bytes").to_pylist()
    for at, path in enumerate(actions.column("path").to_pylist()):
        yield WrittenFile(path, 0, sizes[at], 0, tuple(column[at] for column in values))


def _texts(column: Any) -> list[str | None]:
    """Values of a partition column as Delta writes them."""
    texts = pc.cast(column, pa.string()).to_pylist()
    if pa.types.is_timestamp(column.type):
        return [None if text is None else text.removesuffix("Z") for text in texts]
    return list(texts)


def _merged(writer: DeltaSinkWriter, sink: DeltaSink, group: list[WrittenFile]) -> list[WrittenFile]:
    ledger = writer.ledger
    files = FileSet(ledger.uri, (), sink.file_bytes, disk=ledger.disk)
    paths = [f"{ledger.uri}/{file.path}" for file in group]
    return [replace(file, partition=group[0].partition) for file in _compared(sink.name, paths, files)]


def _commit(writer: DeltaSinkWriter, sink: DeltaSink, old: list[WrittenFile], new: list[WrittenFile]) -> None:
    replace_files(
        writer, sink, old, new, lambda table, actions: writer.commit_actions(table, actions, [], {})
    )


def replace_files(
    writer: DeltaSinkWriter,
    sink: DeltaSink,
    old: list[WrittenFile],
    new: list[WrittenFile],
    commit: Callable[[DeltaTable, list[Any]], bool],
    *,
    is_change: bool = False,
) -> None:
    """One commit by which new files stand in the place of old ones; `is_change`: not with the same rows."""
    now_ms = time.time_ns() // 1_000_000
    actions: list[Any] = [replace(writer.named(file), data_change=is_change) for file in new]
    actions += [
        RemoveAction(
            file.path,
            is_change,
            now_ms,
            file.bytes,
            dict(zip(sink.partition_by, file.partition, strict=True)),
        )
        for file in old
    ]
    wanted = {file.path for file in old}
    for _ in range(COMMIT_TRIES):
        table = writer.ledger.table()
        there = set() if table is None else {path.rpartition("/")[2] for path in table.file_uris()}
        if table is None or not wanted <= there:
            break
        if commit(table, actions):
            return
    writer.remove(new)
    raise SinkError(
        f"sink {sink.name!r}: {writer.ledger.uri} was changed by somebody else meanwhile; try again"
    )
