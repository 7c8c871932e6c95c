"""Parquet files written by Spark's Python workers, for the sinks that keep files.

Each task writes files of its own under names nobody else has, flushes them, reads their lineage back and reports what
it found: path, rows, bytes, digest. Only reported files count. A task that failed and ran again leaves files that
nobody reports; they stay in a scratch directory that is never read and is removed with the batch. The driver looks at
each of them before it goes on: a worker on a machine that does not share the file system reports what only it has.

A task holds one open file and one row group of rows. With `partition_by` Spark sorts the rows of each task by those
columns first, so that one file is open at a time whatever the number of values.
"""

from __future__ import annotations

import contextlib
import json
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import IO, TYPE_CHECKING, Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.pipeline.core.frames import reported, reports_of
from holdfast.pipeline.core.sql import LINEAGE, arrow_schema
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.ledger import Rejected
from holdfast.pipeline.row_digest import MASK as CONTENT_MASK
from holdfast.pipeline.row_digest import DigestKey, RowHasher, hasher_of, total
from holdfast.pipeline.sealing import Written
from holdfast.pipeline.sinks.base import Batch, RowsRejected, SinkError
from holdfast.pipeline.sinks.columns import column_named, projected, rejected_where
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.lineage import digest_of_lineage
from holdfast.pipeline.sinks.staged import read_staged

if TYPE_CHECKING:
    from pyspark.sql import DataFrame
    from pyspark.sql.types import StructType


ROW_GROUP_ROWS = 256 * 1024
ROW_GROUP_BYTES = 64 * 1024 * 1024
"""A row group is held in memory, decoded: this bounds a worker, whatever the width of a row."""
REPORT = "path string, rows long, bytes long, digest string, partition string, content string"
PLACELESS = Disk()
"""In place of the disk, where it is left open: of files that several sinks have."""
NO_VALUE = "__HIVE_DEFAULT_PARTITION__"
"""What Hive, Spark and Arrow call the directory of rows whose column is null."""
NAME_BYTES_MAX = 255
"""Of a directory's name, on the file systems of Linux."""
VALUE = "_hf_by_"
CONTENT = "_hf_content"
"""Of a table that keeps one row for each key: the digest of each row beside it, 16 bytes, the lowest first."""


@dataclass(frozen=True)
class FileSet:
    """Where and how one batch's files are written."""

    directory: str
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 1024 * 1024
    compression: str = "snappy"
    disk: Disk = field(default_factory=Disk)
    key: DigestKey | None = None
    """Of the digests of rows; nothing: none are taken."""
    keeps_digests: bool = False
    """Each row gets its digest beside it, or null without a key."""
    undigested: frozenset[str] = frozenset()
    """Columns that are no part of the digest."""
    prefix: str = "part"
    """Of the files' names."""
    has_lineage: bool = True
    """Every row is known to have a place."""


@dataclass(frozen=True)
class WrittenFile:
    """One durable file, as its writer found it on reading it back."""

    path: str
    """Relative to the set's directory."""
    rows: int
    bytes: int
    digest: int
    partition: tuple[str | None, ...] = ()
    """The values of the columns it is partitioned by, in Spark's words for them."""
    content: int = 0
    """The sum of the digests of its rows."""

    def folder(self, partition_by: tuple[str, ...]) -> str:
        """The directory for these values, as Hive and Spark name it: `country=nl/day=2026-01-01`."""
        return "/".join(
            f"{_escaped(name)}={NO_VALUE if value is None else _escaped(value)}"
            for name, value in zip(partition_by, self.partition, strict=True)
        )


def _escaped(text: str) -> str:
    """As Spark does it: it reads each escape as one character, so those beyond ASCII stay as they are."""
    return "".join(each if ord(each) > 127 else quote(each, safe=" -_.~@+,;()&!$<>|") for each in text)


def reject_unreadable(
    sink: str,
    rows: DataFrame,
    partition_by: tuple[str, ...],
    written: Sequence[WrittenFile],
    name_bytes_max: int,
) -> None:
    """`RowsRejected` for rows with a partition value that readers would take for another, or that no name can have."""
    from pyspark.sql import functions

    found: list[Rejected] = []
    for at, name in enumerate(partition_by):
        for value in sorted({file.partition[at] or "" for file in written if file.partition[at] is not None}):
            if value in ("", NO_VALUE):
                why = f"column {name!r} is {value!r}, which readers of its partition take for null"
            elif len(f"{_escaped(name)}={_escaped(value)}".encode()) > name_bytes_max:
                why = f"column {name!r} has {len(value):,} characters, and names a directory"
            else:
                continue
            is_chosen = column_named(name).cast("string") == functions.lit(value)
            found += rejected_where(sink, rows, is_chosen, why)
    if found:
        raise RowsRejected(found)


def write_batch(rows: DataFrame, columns: StructType, files: FileSet, batch: Batch) -> list[WrittenFile]:
    """Write these columns of a batch's rows, null where the rows have none; returns what counts."""
    if batch.local is None or not is_put(rows, files.partition_by, batch):
        if batch.staged is not None and not files.partition_by:
            task = partial(_take_staged, staged=batch.staged.files, schema=arrow_schema(columns), files=files)
            return _written(reports_of(batch.staged.numbers, task, REPORT), files)
        return write_files(projected(rows, columns), files, is_small=batch.local is not None)
    alike = replace(files, directory="", disk=PLACELESS), columns
    for made, written, contents in batch.local.made:
        if made == alike:
            for file in written:
                _put(files, file, contents[file.path])
            return list(written)
    written = _written(reported(write_task(batch.local.batches(arrow_schema(columns)), files)), files)
    batch.local.made.append((alike, written, {file.path: _content(files, file) for file in written}))
    return written


def is_put(rows: DataFrame, partition_by: tuple[str, ...], batch: Batch) -> bool:
    """Whether the driver alone writes these rows, once for all sinks that are alike: no task knows their places."""
    # A sink may have made others of the rows.
    return batch.local is not None and not partition_by and batch.local.rows is rows


def _put(files: FileSet, file: WrittenFile, content: bytes) -> None:
    """Make a file durable that another sink has too: what was counted there counts here, as the bytes are read back."""
    path = os.path.join(files.directory, file.path)
    files.disk.write(path, content)
    if _content(files, file) != content:
        raise SinkError(f"{path} holds other bytes than were written to it; nothing was committed")


def _content(files: FileSet, file: WrittenFile) -> bytes:
    with files.disk.open_existing(os.path.join(files.directory, file.path)) as handle:
        return handle.read()


def write_files(rows: DataFrame, files: FileSet, *, is_small: bool = False) -> list[WrittenFile]:
    """Write these rows; returns what counts. Columns of `partition_by` go into the report and not into the files."""
    values = [
        column_named(name).cast("string").alias(f"{VALUE}{at}") for at, name in enumerate(files.partition_by)
    ]
    if values:
        kept = [column_named(name) for name in rows.columns if name not in files.partition_by]
        rows = rows.select(*kept, *values).sortWithinPartitions(
            *(f"{VALUE}{at}" for at in range(len(values)))
        )
    return _written(reports_of(rows, partial(write_task, files=files), REPORT, is_small=is_small), files)


def _written(reports: Iterable[Mapping[str, Any]], files: FileSet) -> list[WrittenFile]:
    written = [
        WrittenFile(
            row["path"],
            row["rows"],
            row["bytes"],
            int(row["digest"]),
            tuple(json.loads(row["partition"])),
            int(row["content"]),
        )
        for row in reports
    ]
    for file in written:
        require_there(files, file)
    return written


def _take_staged(
    numbers: Iterable[pa.RecordBatch], staged: Mapping[int, str], schema: pa.Schema, files: FileSet
) -> Iterator[pa.RecordBatch]:
    return write_task(read_staged(numbers, staged, schema), files)


def require_there(files: FileSet, file: WrittenFile) -> None:
    """The file that a worker reports is the one that is found from here."""
    path = os.path.join(files.directory, file.path)
    try:
        size = files.disk.size(path)
    except FileNotFoundError:
        size = -1
    if size != file.bytes:
        raise SinkError(
            f"a worker wrote {file.bytes:,} bytes to {path}, and the driver finds "
            f"{'no such file' if size < 0 else f'{size:,} bytes'}: it is not on a file system that all machines share. "
            "Nothing was committed"
        )


def write_task(batches: Iterable[pa.RecordBatch], files: FileSet) -> Iterator[pa.RecordBatch]:
    """What one task does: rows in, files written, reports out."""
    done: list[WrittenFile] = []
    current: FileWriter | None = None
    try:
        for batch in batches:
            for values, part in _runs(batch, len(files.partition_by)):
                if current is not None and current.partition != values:
                    done += current.close()
                    current = None
                if current is None:
                    current = FileWriter(files, values, part.schema)
                current.add(part)
        if current is not None:
            done += current.close()
    except BaseException:
        if current is not None:
            current.abandon()
        raise
    if done:
        yield pa.RecordBatch.from_pylist(
            [
                {
                    **asdict(file),
                    "digest": str(file.digest),
                    "partition": json.dumps(file.partition),
                    "content": str(file.content),
                }
                for file in done
            ]
        )


def _runs(
    batch: pa.RecordBatch, partition_columns: int
) -> Iterator[tuple[tuple[str | None, ...], pa.RecordBatch]]:
    """A batch in slices of equal partition values, which it is sorted by."""
    if batch.num_rows == 0:
        return
    if not partition_columns:
        yield (), batch
        return
    width = batch.num_columns - partition_columns
    ends = {batch.num_rows}
    for at in range(partition_columns):
        ends.update(pc.run_end_encode(batch.column(width + at)).run_ends.to_pylist())
    rows = batch.select(list(range(width)))
    start = 0
    for end in sorted(ends):
        values = tuple(batch.column(width + at)[start].as_py() for at in range(partition_columns))
        yield values, rows.slice(start, end - start)
        start = end


class FileWriter:
    """Rows of one partition, in one file after another of about the wanted size."""

    def __init__(self, files: FileSet, partition: tuple[str | None, ...], schema: pa.Schema) -> None:
        self.partition = partition
        self._files = files
        self._schema = schema
        if files.keeps_digests:
            self._schema = schema.append(pa.field(CONTENT, pa.binary()))
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_rows = 0
        self._waiting_bytes = 0
        self._name = ""
        self._handle: IO[bytes] | None = None
        self._writer: Any = None
        self._done: list[WrittenFile] = []
        self._hasher = None if files.key is None else hasher_of(files.key)
        self._content = 0
        """Of the rows that are in the file, or wait for it."""

    def add(self, batch: pa.RecordBatch) -> None:
        beside = pa.nulls(batch.num_rows, pa.binary())
        if self._hasher is not None:
            constants = dict(zip(self._files.partition_by, self.partition, strict=True))
            made = _digests(self._hasher, batch, constants, self._files.undigested)
            self._content += total(made)
            beside = _as_bytes(made)
        if self._files.keeps_digests:
            batch = batch.append_column(pa.field(CONTENT, pa.binary()), beside)
        self._waiting.append(batch)
        self._waiting_rows += batch.num_rows
        self._waiting_bytes += batch.nbytes
        # What waits counts towards the file decoded, which is more than it takes there: a file is never much too large.
        if self._waiting_rows >= ROW_GROUP_ROWS or self._waiting_bytes >= min(
            ROW_GROUP_BYTES, max(self._files.file_bytes, 1)
        ):
            self._write_group()

    def close(self) -> list[WrittenFile]:
        self._write_group()
        self._finish()
        return self._done

    def abandon(self) -> None:
        if self._handle is not None:
            with contextlib.suppress(OSError):
                self._handle.close()

    def _write_group(self) -> None:
        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        self._waiting, self._waiting_rows, self._waiting_bytes = [], 0, 0
        if self._handle is None:
            self._name = f"{self._files.prefix}-{uuid.uuid4().hex}.parquet"
            self._handle = self._files.disk.open_new(os.path.join(self._files.directory, self._name))
            self._writer = pq.ParquetWriter(
                self._handle, self._schema, compression=self._files.compression, store_schema=False
            )
        self._writer.write_table(table, row_group_size=ROW_GROUP_ROWS)
        if self._handle.tell() >= self._files.file_bytes:
            self._finish()

    def _finish(self) -> None:
        if self._handle is None:
            return
        self._writer.close()
        self._handle.close()
        self._handle = None
        path = os.path.join(self._files.directory, self._name)
        self._files.disk.flush_file(path)
        rows, digest = lineage_of(path, self._files.disk, with_digest=self._files.has_lineage)
        size = self._files.disk.size(path)
        self._done.append(
            WrittenFile(self._name, rows, size, digest, self.partition, self._content & CONTENT_MASK)
        )
        self._content = 0


def _digests(
    hasher: RowHasher,
    batch: pa.RecordBatch,
    constants: Mapping[str, str | None] | None,
    without: frozenset[str],
) -> npt.NDArray[np.uint64]:
    """Of each row: all columns, those of `constants` too, under their lineage."""
    places = batch.column(batch.schema.get_field_index(LINEAGE))
    lineage = dict(zip((each.name for each in places.type), places.flatten(), strict=True))
    columns = {
        name: batch.column(at)
        for at, name in enumerate(batch.schema.names)
        if name != LINEAGE and name not in without
    }
    return hasher.digests(columns, lineage, constants)


def _as_bytes(digests: npt.NDArray[np.uint64]) -> pa.Array:
    ends = np.arange(0, 16 * len(digests) + 1, 16, dtype=np.int32)
    content = np.ascontiguousarray(digests, "<u8").tobytes()
    return pa.Array.from_buffers(pa.binary(), len(digests), [None, pa.py_buffer(ends), pa.py_buffer(content)])


def written_of(
    files: Iterable[WrittenFile], schema: StructType | None, key: DigestKey | None
) -> Written | None:
    """What these files hold, for the ledger; nothing without a key."""
    if key is None:
        return None
    columns = {} if schema is None else column_types(schema)
    return Written(sum(file.content for file in files) & CONTENT_MASK, columns)


def column_types(schema: StructType) -> dict[str, str]:
    return {each.name: each.dataType.simpleString() for each in schema.fields if each.name != LINEAGE}


def lineage_of(path: str, disk: Disk, *, with_digest: bool = True) -> tuple[int, int]:
    """How many rows a file holds and the digest of their lineage, from the file itself."""
    rows, total = 0, 0
    with disk.open_existing(path) as handle, pq.ParquetFile(handle) as file:
        if not with_digest:
            return file.metadata.num_rows, 0
        for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS, columns=[LINEAGE]):
            rows += batch.num_rows
            total += digest_of_lineage(batch.column(0))
    return rows, total & MASK
