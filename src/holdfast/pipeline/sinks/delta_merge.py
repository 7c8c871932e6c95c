"""Merging the rows of a batch into the files of a Delta table, by key: what goes, what comes, and the files for it.

The rows of a batch lie in staged files that no commit names. Of those and of the table only keys, order, places and
digests are read at first, file by file; of the table, only rows whose key the batch has are kept in memory. They say
which row of each key stands (`standing`). Files that lose a row are written again without it, together with the rows
that came, one partition after the other. Nothing here commits: the caller names new files and removes old ones in one
commit, for exactly the version of the table that was read.

Which row stands: with `order_by` the one with its greatest value, null before everything; of equal ones, and without
it, the last by topic, partition, offset and index. Without `order_by`, a row of a later batch takes the place of one
from another partition. A row whose place is forgotten, or that somebody else added, is before everything.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.row_digest import total
from holdfast.pipeline.sinks.files import Disk
from holdfast.pipeline.sinks.writing import CONTENT, ROW_GROUP_ROWS, FileSet, FileWriter, WrittenFile

DELETE: Final = "_hf_delete"
"""In staged files: whether the row deletes its key."""
PLACE: Final = ("topic", "partition", "offset", "index")
FORGOTTEN: Final = -1
"""The offset and the index of a row whose place is forgotten."""
Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Rules:
    """What makes a row one of its own, and which of them stands."""

    key: tuple[str, ...]
    order_by: str | None = None


class Keys:
    """The keys of a batch as numbers; of other rows, the same numbers, and -1 for keys that it does not have."""

    def __init__(self, columns: Sequence[pa.ChunkedArray]) -> None:
        self._types = [column.type for column in columns]
        self._values = [pc.unique(column) for column in columns]
        self._known: list[Numbers] = []
        """After each column, the numbers that there are, in order."""
        codes = np.zeros(len(columns[0]), np.int64)
        for column, values in zip(columns, self._values, strict=True):
            wide = codes * len(values) + _numbers(pc.index_in(column, value_set=values))
            known, codes = np.unique(wide, return_inverse=True)
            self._known.append(known)
        self.codes: Numbers = codes.astype(np.int64)

    def codes_of(self, columns: Sequence[pa.ChunkedArray]) -> Numbers:
        codes = np.zeros(len(columns[0]), np.int64)
        for column, kind, values, known in zip(columns, self._types, self._values, self._known, strict=True):
            held = column if column.type == kind else column.cast(kind)
            at = _numbers(pc.index_in(held, value_set=values))
            wide = codes * len(values) + at
            place = np.minimum(np.searchsorted(known, wide), len(known) - 1)
            codes = np.where((codes >= 0) & (at >= 0) & (known[place] == wide), place, -1)
        return codes


def _numbers(column: pa.ChunkedArray | pa.Array, null: int = -1) -> Numbers:
    filled = pc.fill_null(column.cast(pa.int64()), null)
    return np.asarray(filled.to_numpy(), np.int64) if len(filled) else np.zeros(0, np.int64)


def ranks(column: pa.ChunkedArray) -> Numbers:
    """The greater, the later; null is before everything. Texts are compared byte by byte."""
    values = pc.unique(column.drop_null())
    return _numbers(pc.index_in(column, value_set=values.take(pc.sort_indices(values))))


# ---------------------------------------------------------------------------- what is read


def heads(path: str, texts: Mapping[str, str | None], number: int, rules: Rules, disk: Disk) -> pa.Table:
    """The rows of one file, without what the merge does not go by: `key 0`…, `order`, the place, `delete`, `digest`,
    and `file` and `row`, where they are. A column that the table is partitioned by is as the log writes it."""
    wanted = [*rules.key, *((rules.order_by,) if rules.order_by else ()), LINEAGE, DELETE, CONTENT]
    with disk.open_existing(path) as handle, pq.ParquetFile(handle) as file:
        there = file.schema_arrow
        names = [name for name in wanted if name in there.names]
        held = file.read(columns=names)
        rows = file.metadata.num_rows

    def column(name: str, kind: pa.DataType | None = None) -> pa.ChunkedArray:
        if name in names:
            return held.column(name)
        if name in texts:
            return pa.chunked_array([pa.repeat(pa.scalar(texts[name], pa.string()), rows)])
        return pa.chunked_array([pa.nulls(rows, kind or pa.null())])

    found = {f"key {at}": column(name) for at, name in enumerate(rules.key)}
    if rules.order_by:
        found["order"] = column(rules.order_by)
    place = column(LINEAGE)
    for name in PLACE:
        is_known = pa.types.is_struct(place.type)
        kind = pa.string() if name == "topic" else pa.int64()
        part = pc.struct_field(place, name) if is_known else pa.chunked_array([pa.nulls(rows, kind)])
        found[name] = part.cast(kind)
    found["delete"] = pc.fill_null(column(DELETE, pa.bool_()).cast(pa.bool_()), False)
    found["digest"] = column(CONTENT, pa.binary()).cast(pa.binary())
    found["file"] = pa.array(np.full(rows, number, np.int64))
    found["row"] = pa.array(np.arange(rows, dtype=np.int64))
    return pa.table(found)


def held_heads(batch: pa.Table, files: Iterable[pa.Table], rules: Rules) -> pa.Table:
    """Of the rows of the table, those whose key the batch has; `code` is the number of the key."""
    names = [f"key {at}" for at in range(len(rules.key))]
    keys = Keys([batch.column(name) for name in names])
    found = [batch.slice(0, 0).append_column("code", pa.array([], pa.int64()))]
    for table in files:
        codes = keys.codes_of([table.column(name) for name in names])
        chosen = table.append_column("code", pa.array(codes)).filter(pa.array(codes >= 0))
        if chosen.num_rows:
            found.append(chosen.select(found[0].column_names).cast(found[0].schema))
    return pa.concat_tables(found)


def digest_sum(digests: pa.ChunkedArray) -> int:
    """Of digests as they stand in files; rows without one have none."""
    raw = b"".join(digests.drop_null().to_pylist())
    return total(np.frombuffer(raw, "<u8").astype(np.uint64).reshape(-1, 2))


# ---------------------------------------------------------------------------- which row stands


@dataclass(frozen=True)
class Standing:
    """Which rows of a batch come into the table, and which of the table's go."""

    comes: Flags
    goes: Flags


def standing(batch: pa.Table, held: pa.Table, rules: Rules) -> Standing:
    """`batch` and `held` are heads; `held` has only rows of keys that the batch has."""
    names = [f"key {at}" for at in range(len(rules.key))]
    codes = Keys([batch.column(name) for name in names]).codes
    size = len(codes)
    # The table's rows are behind the batch's: of two from the same place the one that is there stays.
    codes = np.concatenate([codes, _numbers(held.column("code"))])
    both = pa.concat_tables([batch, held.select(batch.column_names)])
    topics = ranks(both.column("topic"))
    partitions, offsets, indexes = (_numbers(both.column(name)) for name in PLACE[1:])
    is_known = (topics >= 0) & (offsets >= 0)
    is_held = np.arange(len(codes)) >= size
    if rules.order_by is not None:
        first = [is_known, ranks(both.column("order"))]
    else:
        # Of one partition offsets decide; of others, the later batch.
        first = [is_known & _is_behind(codes, topics, partitions, offsets, indexes, is_held)]
    sorting = np.lexsort((indexes, offsets, partitions, topics, *reversed(first), codes))
    is_last = np.ones(len(codes), np.bool_)
    is_last[:-1] = np.diff(codes[sorting]) != 0
    wins = np.zeros(len(codes), np.bool_)
    wins[sorting[is_last]] = True
    deletes = np.asarray(both.column("delete").to_numpy(), np.bool_)
    return Standing(wins[:size] & ~deletes[:size], ~wins[size:])


def _is_behind(
    codes: Numbers, topics: Numbers, partitions: Numbers, offsets: Numbers, indexes: Numbers, is_held: Flags
) -> Flags:
    """Every row of the batch; of the table's, those that are not before the last row that the batch has of their key,
    in the same partition."""
    new = np.flatnonzero(~is_held)
    order = new[np.lexsort((indexes[new], offsets[new], partitions[new], topics[new], codes[new]))]
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = np.diff(codes[order]) != 0
    last = np.zeros(int(codes.max(initial=-1)) + 1, np.int64)
    last[codes[order[is_last]]] = order[is_last]
    of = last[codes]
    is_same = (topics == topics[of]) & (partitions == partitions[of])
    is_later = (offsets > offsets[of]) | ((offsets == offsets[of]) & (indexes >= indexes[of]))
    return np.asarray(~is_held | (is_same & is_later), np.bool_)


# ---------------------------------------------------------------------------- what is written


@dataclass
class Source:
    """A file whose rows are written again."""

    path: str
    partition: tuple[str | None, ...]
    kept: Flags | None = None
    """By row; nothing: all of them."""
    is_ours: bool = True
    """The sink wrote it; of others, the rest is known by its name as theirs."""
    without_digests: bool = False
    without_places: bool = False


@dataclass
class Rewriting:
    """New files for some rows of others, partition by partition."""

    files: FileSet
    schema: pa.Schema
    """Of the new files."""
    written: list[WrittenFile] = field(default_factory=list)

    def write(self, sources: Sequence[Source]) -> list[WrittenFile]:
        by_partition: dict[tuple[bool, tuple[str | None, ...]], list[Source]] = {}
        for source in sources:
            by_partition.setdefault((source.is_ours, source.partition), []).append(source)
        for (is_ours, partition), together in by_partition.items():
            files = self.files if is_ours else replace(self.files, prefix="rest")
            writer = FileWriter(files, partition, self.schema)
            try:
                for source in together:
                    for batch in self._batches(source):
                        writer.add(batch)
                self.written += writer.close()
            except BaseException:
                writer.abandon()
                raise
        return self.written

    def _batches(self, source: Source) -> Iterator[pa.RecordBatch]:
        row = 0
        disk = self.files.disk
        with disk.open_existing(source.path) as handle, pq.ParquetFile(handle) as file:
            for batch in file.iter_batches(batch_size=ROW_GROUP_ROWS):
                kept = None if source.kept is None else source.kept[row : row + batch.num_rows]
                row += batch.num_rows
                if kept is not None and not kept.any():
                    continue
                made = self._aligned(batch, source)
                yield made if kept is None or kept.all() else made.filter(pa.array(kept))

    def _aligned(self, batch: pa.RecordBatch, source: Source) -> pa.RecordBatch:
        there = set(batch.schema.names)
        columns: list[Any] = []
        for each in self.schema:
            if each.name not in there or (each.name == CONTENT and source.without_digests):
                columns.append(pa.nulls(batch.num_rows, each.type))
                continue
            column = batch.column(each.name)
            if each.name == LINEAGE and source.without_places:
                column = _without_place(column)
            columns.append(column if column.type == each.type else column.cast(each.type))
        return pa.RecordBatch.from_arrays(columns, schema=self.schema)


def _without_place(lineage: pa.StructArray) -> pa.StructArray:
    """Before every place."""
    columns = []
    for at, each in enumerate(lineage.type):
        column = lineage.field(at)
        if each.name in ("offset", "index"):
            column = pa.array(np.full(len(column), FORGOTTEN), each.type)
        columns.append(column)
    return pa.StructArray.from_arrays(columns, fields=list(lineage.type), mask=lineage.is_null())
