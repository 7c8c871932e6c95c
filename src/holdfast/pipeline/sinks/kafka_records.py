"""Records on their way to Kafka: made by Spark's tasks, kept aside in Arrow files, read back in source order.

Keys, values and headers are computed once, in parallel, when a batch is prepared, and stand in files of the pipeline's
home until it is committed: a file of each task for each writer, which maps its own into memory. So a batch is never
computed inside a transaction, and what is sent is what was counted.

Order: by topic, partition, offset and fan-out index of the source. Files mostly hold long ascending runs of one
partition; runs that do not overlap are put in order as slices, without touching a row. Otherwise rows are sorted.
"""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.core.frames import reports_of
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.digest import MASK
from holdfast.pipeline.row_digest import MASK as CONTENT_MASK
from holdfast.pipeline.row_digest import DigestKey, hasher_of, total
from holdfast.pipeline.sinks.base import SinkUnavailable
from holdfast.pipeline.sinks.lineage import digest_of_lineage

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

REPORT = "path string, writer int, rows long, digest string, largest long, keyless long, content string"
REPORTED = pa.schema(
    [
        ("path", pa.string()), ("writer", pa.int32()), ("rows", pa.int64()), ("digest", pa.string()),
        ("largest", pa.int64()), ("keyless", pa.int64()), ("content", pa.string()),
    ]
)  # fmt: skip
WRITER = "_hf_writer"
SLICE_ROWS = 8192
"""Rows turned into Python objects at a time."""
RUNS_MAX = 20_000
"""More runs than this are cheaper to sort row by row."""


@dataclass(frozen=True)
class Share:
    """What one writer sends of a batch, aside."""

    paths: tuple[str, ...] = ()
    rows: int = 0
    digest: int = 0
    """Of the lineage of its rows."""

    def batches(self) -> Iterator[pa.RecordBatch]:
        """The records in source order, a slice at a time."""
        try:
            tables = [pa.ipc.open_file(pa.memory_map(path)).read_all() for path in self.paths]
        except FileNotFoundError as error:
            raise SinkUnavailable(f"records that were set aside for sending are gone: {error}") from error
        if sum(table.num_rows for table in tables) != self.rows:
            raise SinkUnavailable(
                f"records that were set aside are no longer the {self.rows} that were counted"
            )
        if tables:
            yield from in_source_order(pa.concat_tables(tables))


@dataclass(frozen=True)
class Records:
    """The records of one batch, aside."""

    directory: str
    shares: tuple[Share, ...]
    """By the number of the writer."""
    largest: int = 0
    """Bytes of key, value and headers, of the record that has most."""
    keyless: int = 0
    """Records whose key is null."""
    content: int = 0
    """The sum of the digests of the records, where a key was given."""

    @property
    def rows(self) -> int:
        return sum(share.rows for share in self.shares)

    @property
    def digest(self) -> int:
        return sum(share.digest for share in self.shares) & MASK

    def remove(self) -> None:
        shutil.rmtree(self.directory, ignore_errors=True)


class Digesting(Protocol):
    """How tasks take the digests of records."""

    def of(self, batch: pa.RecordBatch) -> int:
        """Their sum."""


@dataclass(frozen=True)
class RecordDigesting:
    """Of rows that become records."""

    key: DigestKey
    headers: tuple[str, ...]
    """The names of the headers whose values are the columns `source`, `header_0`, …"""

    def of(self, batch: pa.RecordBatch) -> int:
        values = [
            batch.column("source"),
            *(batch.column(f"header_{at}") for at in range(len(self.headers) - 1)),
        ]
        rows, width = batch.num_rows, len(values)
        order = np.arange(rows * width).reshape(width, rows).T.reshape(-1)
        flat = pa.concat_arrays([each.cast(pa.binary()) for each in values]).take(pa.array(order))
        names = pa.array(self.headers).take(pa.array(np.tile(np.arange(width), rows)))
        ends = pa.array(np.arange(0, rows * width + 1, width, dtype=np.int32))
        headers = pa.ListArray.from_arrays(ends, pa.StructArray.from_arrays([names, flat], ["key", "value"]))
        return content_of(
            self.key, batch.column(LINEAGE), batch.column("key"), batch.column("value"), headers
        )


def content_of(
    key: DigestKey, places: pa.StructArray, keys: pa.Array, values: pa.Array, headers: pa.ListArray
) -> int:
    """The sum of the digests of records: of their keys, values and all of their headers."""
    lineage = dict(zip((each.name for each in places.type), places.flatten(), strict=True))
    return total(hasher_of(key).digests({"key": keys, "value": values, "headers": headers}, lineage))


def set_aside(
    rows: DataFrame,
    directory: str,
    writers: int,
    digesting: Digesting | None = None,
    *,
    is_small: bool = False,
) -> Records:
    """Compute these records, once, into files below `directory`.

    A writer gets all records of a key, so that they stay in order; one without a key goes by where it came from. Both
    are the same whenever the batch is computed.
    """
    from pyspark.sql import functions

    os.makedirs(directory, exist_ok=True)
    if writers > 1:
        rows = rows.withColumn(
            WRITER, functions.expr(f"cast(pmod(xxhash64(coalesce(key, source)), {writers}) AS int)")
        )

    def task(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        return _write_task(batches, directory, digesting)

    found = reports_of(rows, task, REPORT, is_small=is_small)
    return Records(
        directory,
        tuple(_share([row for row in found if row["writer"] == writer]) for writer in range(writers)),
        max((row["largest"] for row in found), default=0),
        sum(row["keyless"] for row in found),
        sum(int(row["content"]) for row in found) & CONTENT_MASK,
    )


def _share(found: list[Any]) -> Share:
    return Share(
        tuple(sorted(row["path"] for row in found)),
        sum(row["rows"] for row in found),
        sum(int(row["digest"]) for row in found) & MASK,
    )


def sizes(batch: pa.RecordBatch) -> pa.Array:
    """Bytes of key, value and headers of each record."""
    total = pa.repeat(pa.scalar(0, pa.int64()), batch.num_rows)
    for column in batch.columns:
        if pa.types.is_binary(column.type):
            total = pc.add(total, pc.fill_null(pc.cast(pc.binary_length(column), pa.int64()), 0))
    return total


@dataclass
class _File:
    """What one task writes for one writer, and what it counts of it."""

    path: str
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys(("rows", "digest", "largest", "keyless", "content"), 0)
    )
    _writer: pa.ipc.RecordBatchFileWriter | None = None

    def write(self, batch: pa.RecordBatch, digesting: Digesting | None) -> None:
        if self._writer is None:
            self._writer = pa.ipc.new_file(self.path, batch.schema)
        self._writer.write_batch(batch)
        lineage = batch.column(batch.schema.get_field_index(LINEAGE))
        self.counts["rows"] += batch.num_rows
        self.counts["digest"] += digest_of_lineage(lineage)
        self.counts["largest"] = max(self.counts["largest"], pc.max(sizes(batch)).as_py())
        self.counts["keyless"] += batch.column("key").null_count
        self.counts["content"] += 0 if digesting is None else digesting.of(batch)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def report(self, writer: int) -> dict[str, Any]:
        sums = {"digest": str(self.counts["digest"] & MASK), "content": str(self.counts["content"])}
        return {"path": self.path, "writer": writer, **self.counts, **sums}


def _write_task(
    batches: Iterable[pa.RecordBatch], directory: str, digesting: Digesting | None = None
) -> Iterator[pa.RecordBatch]:
    name = uuid.uuid4().hex
    files: dict[int, _File] = {}
    try:
        for given in batches:
            for writer, batch in _by_writer(given):
                if writer not in files:
                    files[writer] = _File(os.path.join(directory, f"{name}-{writer}.arrow"))
                files[writer].write(batch, digesting)
    finally:
        for file in files.values():
            file.close()
    reports = [file.report(writer) for writer, file in files.items()]
    if reports:
        yield pa.RecordBatch.from_pylist(reports, REPORTED)


def _by_writer(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """The rows of each writer, without the column that tells."""
    if batch.num_rows == 0:
        return
    if WRITER not in batch.schema.names:
        yield 0, batch
        return
    writers = batch.column(WRITER)
    batch = batch.drop_columns([WRITER])
    for writer in sorted(pc.unique(writers).to_pylist()):
        yield writer, batch.filter(pc.equal(writers, writer))


def in_source_order(table: pa.Table) -> Iterator[pa.RecordBatch]:
    """The rows of a table by topic, partition, offset and index, in slices."""
    if table.num_rows == 0:
        return
    codes, offsets, indexes = _keys(table.column(LINEAGE).combine_chunks())
    ordered = _runs_in_order(codes, offsets, indexes)
    if ordered is None:
        order = np.lexsort((indexes, offsets, codes))
        for start in range(0, len(order), SLICE_ROWS):
            yield from table.take(pa.array(order[start : start + SLICE_ROWS])).combine_chunks().to_batches()
        return
    for begin, end in ordered:
        yield from table.slice(begin, end - begin).to_batches(max_chunksize=SLICE_ROWS)


_Numbers = npt.NDArray[np.int64]


def _keys(lineage: pa.StructArray) -> tuple[_Numbers, _Numbers, _Numbers]:
    """Topic and partition as one number that sorts like them, the offset, the index."""
    topics = pc.dictionary_encode(lineage.field(0))
    names = topics.dictionary.to_pylist()
    rank = np.empty(len(names), np.int64)
    rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
    codes = rank[topics.indices.to_numpy(zero_copy_only=False)] << 32
    codes |= lineage.field(1).to_numpy(zero_copy_only=False).astype(np.int64)
    offsets = lineage.field(2).to_numpy(zero_copy_only=False).astype(np.int64)
    return codes, offsets, lineage.field(3).to_numpy(zero_copy_only=False).astype(np.int64)


def _runs_in_order(codes: _Numbers, offsets: _Numbers, indexes: _Numbers) -> list[tuple[int, int]] | None:
    """The ascending runs, ordered, as ranges of rows; None when there are too many or they overlap."""
    goes_on = (codes[1:] == codes[:-1]) & (
        (offsets[1:] > offsets[:-1]) | ((offsets[1:] == offsets[:-1]) & (indexes[1:] >= indexes[:-1]))
    )
    cuts = np.flatnonzero(~goes_on) + 1
    if len(cuts) > RUNS_MAX:
        return None
    starts = np.concatenate(([0], cuts))
    ends = np.concatenate((cuts, [len(codes)]))
    order = np.lexsort((indexes[starts], offsets[starts], codes[starts]))
    starts, ends = starts[order], ends[order]
    lasts = ends - 1
    overlaps = (codes[starts[1:]] == codes[lasts[:-1]]) & (
        (offsets[starts[1:]] < offsets[lasts[:-1]])
        | ((offsets[starts[1:]] == offsets[lasts[:-1]]) & (indexes[starts[1:]] < indexes[lasts[:-1]]))
    )
    if overlaps.any():
        return None
    return list(zip(starts.tolist(), ends.tolist(), strict=True))
