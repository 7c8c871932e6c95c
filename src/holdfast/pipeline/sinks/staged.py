"""Rows that a sink does not take from tasks of Spark's: it has them from the stage, or in the driver.

Where no step changes a column, only the numbers of the rows that stay cross between Spark and Python, and not what is
in them.

A row of the stage has a number: that of its file in the upper bits, its place in the file in the lower ones. Spark
decides which rows go on and hands over their numbers; the writing task reads those rows from the files, a row group at
a time. Each row group says the numbers of its rows itself, and they are compared with those that were asked for.

The rows of a small batch, or their numbers, come to the driver in one job for all the sinks that take them, and the
driver does there what the writing task does. What one sink has made of them serves the others that want the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.core.sql import LINEAGE, PLACE

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

ROW: Final = "_row"
FILE_SHIFT: Final = 40
"""A file holds fewer rows than this many bits count."""
SMALL_OFFSETS: Final = 4_000
"""A batch of as many at most may be small: the driver reads and writes it itself, since a job of workers costs more."""
SMALL_BYTES: Final = 4 * 1024 * 1024
"""In the stage, uncompressed, of a small batch: steps may make much more of it, and all of it is in memory at once."""
SMALL_ROWS: Final = 10_000
"""Of a small batch, behind steps that make several rows of one."""
Numbers = npt.NDArray[np.int64]
_PLACE: Final = [f"_{part}" for part in PLACE[:-1]]
"""The columns of the stage that lineage is made of."""


@dataclass(frozen=True)
class StagedRows:
    """Rows of the stage that are to be written as they are."""

    numbers: DataFrame
    """The number of each row, as `ROW`."""
    files: Mapping[int, str]
    """By number."""


@dataclass(frozen=True)
class LocalRows:
    """The rows of a small batch, collected when a sink first asks for them."""

    rows: DataFrame
    staged: StagedRows | None = None
    """The same rows in the stage, where they stand there as they are."""
    made: list[Any] = dataclasses.field(default_factory=list, compare=False)
    """The files that sinks have made of these rows, each with what they depend on: others are alike (`writing`)."""

    @cached_property
    def _collected(self) -> list[pa.RecordBatch]:
        batches: list[pa.RecordBatch] = (
            (self.staged.numbers if self.staged else self.rows).toArrow().to_batches()
        )
        return batches

    def batches(self, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        """With these columns: null where the rows have none."""
        if self.staged is not None:
            yield from read_staged(self._collected, self.staged.files, schema)
            return
        for batch in self._collected:
            columns, fields = [], []
            for field in schema:
                at = batch.schema.get_field_index(field.name)
                columns.append(pa.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at))
                fields.append(field.with_nullable(True) if at < 0 else batch.schema.field(at))
            yield pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))


def row_numbers(file: int, first: int, count: int) -> pa.Array:
    """Of `count` rows of a file from `first` on."""
    begin = (file << FILE_SHIFT) + first
    numbers = np.arange(begin, begin + count, dtype=np.int64)
    return pa.Array.from_buffers(pa.int64(), count, [None, pa.py_buffer(numbers)], 0)


def read_staged(
    chosen: Iterable[pa.RecordBatch], files: Mapping[int, str], schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    """The rows of these numbers in the order of the stage, with these columns: null where the stage has none."""
    found: list[Numbers] = [batch.column(0).to_numpy() for batch in chosen]
    # Spark gives them in order, mostly: a merge sort is done with one look at them.
    numbers = np.sort(np.concatenate([*found, np.empty(0, np.int64)]), kind="stable")
    for file, path in sorted(files.items()):
        begin, end = np.searchsorted(numbers, [file << FILE_SHIFT, (file + 1) << FILE_SHIFT])
        if begin != end:
            with pq.ParquetFile(path, memory_map=True, read_dictionary=[_PLACE[0]]) as stage:
                yield from _read_file(stage, numbers[begin:end], file << FILE_SHIFT, schema)


def _read_file(
    file: pq.ParquetFile, numbers: Numbers, first: int, schema: pa.Schema
) -> Iterator[pa.RecordBatch]:
    there = set(file.schema_arrow.names)
    wanted = [ROW, *_PLACE, *(name for name in schema.names if name in there)]
    for group in range(file.num_row_groups):
        behind = first + file.metadata.row_group(group).num_rows
        begin, end = np.searchsorted(numbers, [first, behind])
        if begin != end:
            asked = numbers[begin:end]
            (batch,) = file.read_row_group(group, columns=wanted).combine_chunks().to_batches()
            if len(asked) != batch.num_rows:
                batch = batch.take(pa.array(asked - first))
            if not np.array_equal(batch.column(ROW).to_numpy(), asked):
                raise Unbalanced(
                    f"the rows {asked[0]} to {asked[-1]} of the stage were to be written, and others are there. "
                    "Nothing was committed; please report this"
                )
            yield _as_stored(batch, schema)
        first = behind


def _as_stored(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """With the topic as a dictionary, as it was read: it is the same for all rows of a file's run."""
    topics, *others = (batch.column(name) for name in _PLACE)
    zeros = pa.py_buffer(np.zeros(batch.num_rows, np.int32))
    index = pa.Array.from_buffers(pa.int32(), batch.num_rows, [None, zeros], 0)
    parts = [topics, *others, index]
    kinds = [kind.with_type(part.type) for kind, part in zip(schema.field(LINEAGE).type, parts, strict=True)]
    lineage = pa.StructArray.from_arrays(parts, fields=kinds)
    columns, fields = [], []
    for field in schema:
        if field.name == LINEAGE:
            columns.append(lineage)
            fields.append(field.with_type(lineage.type))
            continue
        at = batch.schema.get_field_index(field.name)
        column = pa.nulls(batch.num_rows, field.type) if at < 0 else batch.column(at)
        columns.append(column if column.type == field.type else column.cast(field.type))
        # A column that a step made of nothing null is null where that step is gone.
        fields.append(field.with_nullable(True) if at < 0 else field)
    return pa.RecordBatch.from_arrays(columns, schema=pa.schema(fields))
