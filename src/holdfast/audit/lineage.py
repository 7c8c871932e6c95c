"""The places that rows name, as arrays: what every sink's reader gives and every comparison takes.

A row says from which record it was made: topic, partition, offset, and the number of the row among those the record
was expanded to. Readers hand them over as runs of one partition, so that what follows is done on whole arrays.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.pipeline.erased_places import by_partition

Offsets = npt.NDArray[np.int64]
Indexes = npt.NDArray[np.int32]

PARTS: Final = ("topic", "partition", "offset", "index")
COLUMNS: Final = tuple(f"_hf_{part}" for part in PARTS)
"""The lineage of rows in a table."""
NOWHERE: Final = ""
"""In place of a topic: the row names no record."""
FEW_RUNS: Final = 1024
"""Rows mostly come partition by partition; beyond this many changes of partition they are sorted first."""


@dataclass(frozen=True)
class LineageBatch:
    """Rows of one sink that came from one partition."""

    topic: str
    """`NOWHERE` for rows without lineage: nobody's, and so not the source's."""
    partition: int
    offsets: Offsets
    indexes: Indexes
    where: str = ""
    """What holds them: a file, a table, a topic's partition."""

    def __len__(self) -> int:
        return len(self.offsets)


def split_struct(lineage: pa.Array, where: str = "") -> Iterator[LineageBatch]:
    """Of a column of structs with topic, partition, offset and index; null structs are rows from nowhere."""
    yield from split_columns(*(pc.struct_field(lineage, name) for name in PARTS), where=where)


def split_columns(
    topics: pa.Array, partitions: pa.Array, offsets: pa.Array, indexes: pa.Array, *, where: str = ""
) -> Iterator[LineageBatch]:
    """Of four columns; a row of which any is null, or negative, is from nowhere."""
    if len(topics) == 0:
        return
    if not pa.types.is_dictionary(topics.type):
        topics = pc.dictionary_encode(topics)
    names = topics.dictionary.to_pylist()
    codes = _whole(topics.indices)
    numbers, places, order = (_whole(column) for column in (partitions, offsets, indexes))
    known = (codes >= 0) & (numbers >= 0) & (places >= 0) & (order >= 0)
    mixed = np.where(known, (codes << 32) | numbers, -1)
    starts = np.flatnonzero(np.diff(mixed)) + 1
    if len(starts) > FEW_RUNS:
        sorting = np.argsort(mixed, kind="stable")
        mixed, places, order = mixed[sorting], places[sorting], order[sorting]
        starts = np.flatnonzero(np.diff(mixed)) + 1
    for begin, end in pairwise([0, *starts.tolist(), len(mixed)]):
        code = int(mixed[begin])
        topic, partition = (NOWHERE, -1) if code < 0 else (str(names[code >> 32]), code & 0xFFFFFFFF)
        yield LineageBatch(topic, partition, places[begin:end], order[begin:end].astype(np.int32), where)


def partitions_of(table: pa.Table) -> Iterator[tuple[str, int, Offsets, Offsets]]:
    """Which rows of a table are from each partition, and their offsets; those without a lineage are from nowhere."""
    nothing, there = pa.nulls(table.num_rows, pa.int64()), table.column_names
    parts = (table.column(name).combine_chunks() if name in there else nothing for name in COLUMNS)
    yield from by_partition(dict(zip(PARTS, parts, strict=True)))


def _whole(column: Any) -> Offsets:
    """Numbers, with -1 for null."""
    filled = pc.fill_null(column.cast(pa.int64()), -1)
    return np.asarray(filled.to_numpy(zero_copy_only=False), np.int64)


def as_ranges(offsets: Offsets) -> list[tuple[int, int]]:
    """Ascending offsets as ranges, both ends included; repeated ones count once."""
    if len(offsets) == 0:
        return []
    cuts = np.flatnonzero(np.diff(offsets) > 1)
    firsts = offsets[np.concatenate(([0], cuts + 1))]
    lasts = offsets[np.concatenate((cuts, [len(offsets) - 1]))]
    return list(zip(firsts.tolist(), lasts.tolist(), strict=True))
