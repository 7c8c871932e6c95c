"""Merging the rows of a batch into the files of a Delta table, by key: what goes, what comes, and the files for it.

The rows of a batch lie in staged files that no commit names. Of those and of the table only keys, order, places and
digests are read at first, file by file; of the table, only rows whose key the batch has are kept in memory. They say
which row of each key stands (`standing`). Files that lose a row are written again without it, together with the rows
that came, one partition after the other. Nothing here commits: the caller names new files and removes old ones in one
commit, for exactly the version of the table that was read.

Which row stands: with `order_by` the one with its greatest value, null before everything; of equal ones, and without
it, the last by topic, partition, offset and index. Without `order_by`, a row of a later batch takes the place of one
from another partition. A row whose place is forgotten, or that somebody else added, is before everything. Where
versions are kept (`scd2`), one row stands for each value of `order_by`, and its span ends where the next one begins.
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
from holdfast.pipeline.definition.naming import IS_CURRENT, IS_DELETED, VALID_TO
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
    keeps_versions: bool = False


class Keys:
    """The keys of a batch as numbers; of other rows, the same numbers, and -1 for keys that it does not have."""

    def __init__(self, columns: Sequence[pa.ChunkedArray]) -> None:
        columns = [_comparable(column) for column in columns]
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
            held = _comparable(column if column.type == kind else column.cast(kind))
            at = _numbers(pc.index_in(held, value_set=values))
            wide = codes * len(values) + at
            place = np.minimum(np.searchsorted(known, wide), len(known) - 1)
            codes = np.where((codes >= 0) & (at >= 0) & (known[place] == wide), place, -1)
        return codes


def _comparable(column: pa.ChunkedArray) -> pa.ChunkedArray:
    """Of -0 and 0 one."""
    return pc.add(column, pa.scalar(0.0, column.type)) if pa.types.is_floating(column.type) else column


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
    where a version ends (`until`) and whether it `counts`, and where the row is: `file` and `row`. A column that the
    table is partitioned by is as the log writes it."""
    delete = IS_DELETED if rules.keeps_versions else DELETE
    spans = (VALID_TO, IS_CURRENT) if rules.keeps_versions else ()
    wanted = [*rules.key, *((rules.order_by,) if rules.order_by else ()), LINEAGE, delete, CONTENT, *spans]
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
    if rules.keeps_versions:
        found["until"] = column(VALID_TO, found["order"].type)
        found["counts"] = column(IS_CURRENT, pa.bool_()).cast(pa.bool_())
    found["delete"] = pc.fill_null(column(delete, pa.bool_()).cast(pa.bool_()), False)
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
    spans: Spans | None = None

    @property
    def changes(self) -> Flags:
        """Of the table's rows, those that stay and end elsewhere now."""
        if self.spans is None:
            return np.zeros(len(self.goes), np.bool_)
        return self.spans.is_other[len(self.comes) :] & ~self.goes


@dataclass(frozen=True)
class Spans:
    """Of the rows of a batch, then of the table's: where a version ends, and whether it counts now."""

    until: pa.Array
    counts: Flags
    is_other: Flags
    """Not as it stands there."""


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
    order = ranks(both.column("order")) if rules.order_by is not None else np.zeros(0, np.int64)
    of_key = codes
    if rules.keeps_versions:
        codes = codes * (int(order.max(initial=0)) + 2) + order + 1
        first: list[Any] = [is_known]
    elif rules.order_by is not None:
        first = [is_known, order]
    else:
        # Of one partition offsets decide; of others, the later batch.
        first = [is_known & _is_behind(codes, topics, partitions, offsets, indexes, is_held)]
    sorting = np.lexsort((indexes, offsets, partitions, topics, *reversed(first), codes))
    is_last = np.ones(len(codes), np.bool_)
    is_last[:-1] = np.diff(codes[sorting]) != 0
    wins = np.zeros(len(codes), np.bool_)
    wins[sorting[is_last]] = True
    deletes = np.asarray(both.column("delete").to_numpy(), np.bool_)
    if rules.keeps_versions:
        return Standing(wins[:size], ~wins[size:], _spans(both, wins, of_key, order, deletes))
    return Standing(wins[:size] & ~deletes[:size], ~wins[size:])


def _spans(both: pa.Table, wins: Flags, codes: Numbers, order: Numbers, deletes: Flags) -> Spans:
    """Versions of a key follow each other by their order; a deletion ends where it begins."""
    at = np.flatnonzero(wins)
    at = at[np.lexsort((order[at], codes[at]))]
    has_next = np.zeros(len(at), np.bool_)
    has_next[:-1] = np.diff(codes[at]) == 0
    ends = np.full(len(codes), -1, np.int64)
    ends[at[:-1][has_next[:-1]]] = at[1:][has_next[:-1]]
    counts = wins & ~deletes & (ends < 0)
    ends = np.where(wins & deletes, np.arange(len(codes)), ends)
    until = both.column("order").combine_chunks().take(pa.array(ends, mask=ends < 0))
    held = both.column("until").combine_chunks().cast(until.type)
    is_same = pc.fill_null(pc.equal(until, held), False)
    is_same = pc.or_(is_same, pc.and_(until.is_null(), held.is_null()))
    stored = pc.fill_null(both.column("counts").combine_chunks(), False)
    is_other = ~np.asarray(is_same.to_numpy(zero_copy_only=False), np.bool_)
    is_other |= np.asarray(stored.to_numpy(zero_copy_only=False), np.bool_) != counts
    return Spans(until, counts, is_other)


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
    spans: tuple[Numbers, pa.Array, Flags] | None = None
    """By row, in their order: where its version ends, and whether it counts."""


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
                if source.spans is not None:
                    made = _with_spans(made, row - batch.num_rows, *source.spans)
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


def _with_spans(
    batch: pa.RecordBatch, first: int, rows: Numbers, until: pa.Array, counts: Flags
) -> pa.RecordBatch:
    chosen = np.flatnonzero((rows >= first) & (rows < first + batch.num_rows))
    mask = np.zeros(batch.num_rows, np.bool_)
    mask[rows[chosen] - first] = True
    for name, values in ((VALID_TO, until), (IS_CURRENT, pa.array(counts))):
        at = batch.schema.get_field_index(name)
        held = batch.column(at)
        new = pc.replace_with_mask(held, pa.array(mask), values.take(pa.array(chosen)).cast(held.type))
        batch = batch.set_column(at, batch.schema.field(at), new)
    return batch


def _without_place(lineage: pa.StructArray) -> pa.StructArray:
    """Before every place."""
    columns = []
    for at, each in enumerate(lineage.type):
        column = lineage.field(at)
        if each.name in ("offset", "index"):
            column = pa.array(np.full(len(column), FORGOTTEN), each.type)
        columns.append(column)
    return pa.StructArray.from_arrays(columns, fields=list(lineage.type), mask=lineage.is_null())
