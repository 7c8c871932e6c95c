"""Which record must stand in a table that keeps one row for each key, and which are superseded.

A batch writes, of the rows of a key, the last by topic, partition and offset; a later batch replaces it, and a row for
which `delete_when` is true removes the key. So the record that stands is the last of its key by batch, topic, partition
and offset, and every other one is superseded. Where the sink names an `order_by`, its column stands for the batch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.coverage import LINEAGE
from holdfast.audit.decoding import KEY_PREFIX
from holdfast.audit.lineage import partitions_of
from holdfast.audit.model import ColumnCoverage, Examined, Fate, Finding, Said
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.stateful.rows import Codes, Flags, KeysDiffer, KeySpace, Numbers, Rows, key_text, sorting
from holdfast.audit.stateful.windows import lasts
from holdfast.pipeline.definition.model import DeltaSink, PostgresSink
from holdfast.pipeline.definition.naming import IS_DELETED
from holdfast.pipeline.definition.streams import merge_key
from holdfast.pipeline.positions import Place

NAMED_MAX: Final = 20
_EQUALS: Final = re.compile(r"\s*`?(?P<column>[A-Za-z_]\w*)`?\s*={1,2}\s*'(?P<text>[^'\\]*)'\s*")
_IS_NULL: Final = re.compile(r"\s*`?(?P<column>[A-Za-z_]\w*)`?\s+is\s+null\s*", re.IGNORECASE)
_NAME: Final = re.compile(r"\s*`?(?P<column>[A-Za-z_]\w*)`?\s*")
TOMBSTONE: Final = "_tombstone"
DELETES: Final = "_deletes"
"""The column of what `delete_when` says, where it was evaluated again."""


@dataclass(frozen=True)
class Table:
    """What a table holds: for each of its rows the key, and the record it came from."""

    keys: Mapping[str, pa.ChunkedArray]
    records: Numbers
    """By row of the source; -1: none of the scope."""
    is_later: Flags
    """From a record past the audit's end."""
    is_stale: Flags
    """From a record that an earlier audit has proven, and that did not stand then."""

    def __len__(self) -> int:
        return len(self.records)


def read_table(
    reader: SinkReader,
    names: Sequence[str],
    rows: Rows,
    ends: Mapping[Place, int],
    starts: Mapping[Place, int],
) -> Table:
    batches: list[pa.Table] = []
    found: list[tuple[Numbers, Flags, Flags]] = []
    begins = {(place.topic, place.partition): start for place, start in starts.items()}
    limits = {(place.topic, place.partition): end for place, end in ends.items()}
    for table, _ in reader.values(names):
        there, size = set(table.column_names), table.num_rows
        batches.append(
            pa.table({name: table.column(name) if name in there else pa.nulls(size) for name in names})
        )
        records = np.full(size, -1, np.int64)
        later, stale = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
        for topic, partition, at, offsets in partitions_of(table):
            records[at] = rows.match(topic, partition, offsets)
            later[at] = offsets >= limits.get((topic, partition), 2**62)
            stale[at] = (offsets >= 0) & (offsets < begins.get((topic, partition), -1))
        found.append((records, later, stale & (records < 0)))
    if not batches:
        return Table({}, np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.bool_))
    whole = pa.concat_tables(batches, promote_options="permissive")
    columns = (np.concatenate(each) for each in zip(*found, strict=True))
    return Table({name: whole.column(name) for name in names}, *columns)


def condition_flags(sql: str, rows: Rows, columns: Mapping[str, pa.ChunkedArray]) -> Flags | None:
    """Rows for which a plain condition is true; nothing for one that only Spark can evaluate."""
    if DELETES in columns:
        return _flags(pc.fill_null(columns[DELETES], False))
    match = _NAME.fullmatch(sql)
    if match is not None and match["column"] == TOMBSTONE:
        return rows.is_tombstone
    for pattern in (_EQUALS, _IS_NULL, _NAME):
        match = pattern.fullmatch(sql)
        column = None if match is None else columns.get(match["column"])
        if match is None or column is None:
            continue
        if pattern is _IS_NULL:
            return _flags(column.is_null())
        if pattern is _EQUALS and pa.types.is_string(column.type):
            return _flags(pc.fill_null(pc.equal(column, match["text"]), False))
        if pattern is _NAME and pa.types.is_boolean(column.type):
            return _flags(pc.fill_null(column, False))
    return None


def _flags(column: pa.ChunkedArray) -> Flags:
    return np.asarray(column.to_numpy(), np.bool_)


def keys_of_tombstones(
    sink: PostgresSink | DeltaSink, rows: Rows, columns: Mapping[str, pa.ChunkedArray]
) -> dict[str, pa.ChunkedArray]:
    """The columns of the key in which records that delete and have no value take the record's key for it."""
    if sink.delete_when is None:
        return {}
    flags = condition_flags(sink.delete_when, rows, columns)
    deletes = pa.array(rows.is_tombstone if flags is None else rows.is_tombstone & flags)
    return {
        name: pc.if_else(deletes, pc.coalesce(columns[name], columns[KEY_PREFIX + name]), columns[name])
        for name in sink.key
        if name in columns and KEY_PREFIX + name in columns
    }


def ranks(column: pa.ChunkedArray) -> Numbers:
    """Of a column that says which row of a key wins: the greater, the later; null is before everything."""
    values = pc.unique(column.drop_null())
    found = pc.index_in(column, value_set=values.take(pc.sort_indices(values)))
    return np.asarray(pc.fill_null(found, -1).to_numpy(), np.int64)


def standing(keys: Codes, reaching: Numbers, turns: Numbers) -> Numbers:
    """Of each key the record that was written last; `reaching` are rows in the order of their places."""
    order = reaching[sorting(keys[reaching], turns[reaching], reaching)]
    return np.sort(lasts(order, keys))


class UpsertCheck:
    """One table against the records that reach it."""

    def __init__(
        self,
        sink: PostgresSink | DeltaSink,
        reader: SinkReader,
        rows: Rows,
        columns: Mapping[str, pa.ChunkedArray],
        reaching: Numbers,
        turns: Numbers | None,
        ends: Mapping[Place, int],
        starts: Mapping[Place, int],
    ) -> None:
        """`starts` say up to where an earlier audit has proven everything: of those records `rows` has the ones that
        stood then."""
        self._starts = starts
        self._sink = sink
        self._reader = reader
        self._rows = rows
        self._columns = columns
        self._reaching = reaching
        self._turns = turns
        self._ends = ends
        self.superseded: Flags = np.zeros(len(rows), np.bool_)
        self.is_standing: Flags = np.zeros(len(rows), np.bool_)
        """The record of each key that is in the table, where its key is known."""

    def examine(self) -> Examined:
        names = list(merge_key(self._sink))
        is_deleted = [IS_DELETED] if self._keeps_versions and self._sink.delete_when is not None else []
        table = read_table(self._reader, [*names, *is_deleted], self._rows, self._ends, self._starts)
        ordered = [] if self._sink.order_by is None else [self._sink.order_by]
        missing = [name for name in (*names, *ordered) if name not in self._columns]
        if missing:
            return self._without_key(table, missing[0])
        space = KeySpace([self._columns[name] for name in names], len(self._rows))
        try:
            theirs = space.codes_of([table.keys[name] for name in names]) if len(table) else table.records
        except KeysDiffer as error:
            return self._without_key(table, f"{names[0]} ({error})")
        said = [*self._compare(table, space.codes, theirs)]
        return Examined.of((*said, *self._deletions(table)) if is_deleted and len(table) else said)

    @property
    def _keeps_versions(self) -> bool:
        return self._sink.mode == "scd2"

    def _deletions(self, table: Table) -> Iterator[Said]:
        """Of versions: whether each row says of itself what `delete_when` says of its record."""
        condition = self._sink.delete_when or ""
        flags = condition_flags(condition, self._rows, self._columns)
        if flags is None:
            why = f"--spark evaluates `delete_when` ({condition}) again"
            yield ColumnCoverage(self._sink.name, IS_DELETED, why=why)
            return
        known = np.flatnonzero(table.records >= 0)
        records = table.records[known]
        said = pc.fill_null(table.keys[IS_DELETED].cast(pa.bool_()).combine_chunks(), False)
        wrong = records[np.asarray(said.to_numpy(zero_copy_only=False), np.bool_)[known] != flags[records]]
        yield from self._told(Fate.ALTERED, wrong, f"{IS_DELETED} is not what `delete_when` says")
        yield ColumnCoverage(self._sink.name, IS_DELETED, int((~table.is_later[known]).sum()))

    def _without_key(self, table: Table, name: str) -> Examined:
        """What the table has stands; what it has not may be superseded, or lost."""
        stands = np.zeros(len(self._rows), np.bool_)
        stands[table.records[table.records >= 0]] = True
        self.superseded[self._reaching] = ~stands[self._reaching]
        why = f"which row of a key is the newest is not known: {name} is computed by a step"
        return Examined.of([ColumnCoverage(self._sink.name, LINEAGE, why=why)])

    def _compare(self, table: Table, ours: Codes, theirs: Codes) -> Iterator[Said]:
        turns = np.zeros(len(self._rows), np.int64) if self._turns is None else self._turns
        last = standing(ours, self._reaching[~self._erased(ours)], turns)
        self.superseded[self._reaching] = True
        self.superseded[last] = False
        gone, why = self._deleted(last)
        self.superseded[last[gone]] = True
        self.is_standing[last[~gone]] = True
        later = np.isin(ours[last], theirs[table.is_later])
        unsure = self._unsure(ours)
        sorted_last = np.argsort(ours[last])
        at = np.searchsorted(ours[last][sorted_last], theirs)
        at = np.minimum(at, max(len(last) - 1, 0))
        of = sorted_last[at] if len(last) else np.full(len(theirs), -1, np.int64)
        known = (ours[last][of] == theirs) if len(last) else np.zeros(len(theirs), np.bool_)
        is_missing = ~np.isin(ours[last], theirs) & (not why)
        lost = np.flatnonzero(is_missing & ~gone & ~later)
        yield from self._told(Fate.LOST, last[lost], "its key is not in the table")
        wrong = (
            known & ~table.is_later & (table.records != np.where(known, last[of] if len(last) else -1, -1))
        )
        wrong &= ~np.isin(theirs, unsure)
        older = np.flatnonzero(wrong & (table.records >= 0))
        yield from self._told(Fate.LOST, last[of[older]], "the table holds an older record of its key")
        if not why:
            deleted = np.flatnonzero(known & ~wrong & (gone[of] if len(last) else False) & ~table.is_later)
            what = "it deletes its key, which stands in the table"
            yield from self._told(Fate.EXTRA, last[of[deleted]], what)
        if table.is_stale.any():
            detail = "rows of records that a newer one of their key had replaced when they were proven"
            count = int(table.is_stale.sum())
            yield Finding(Fate.ALTERED, self._sink.name, count=count, detail=detail)
        yield from self._strangers(table, theirs, known)
        count = 0 if why else int((~table.is_later).sum())
        yield ColumnCoverage(self._sink.name, LINEAGE, count, why=why)

    def _erased(self, keys: Codes) -> Flags:
        """Of the records that reach the table, those of keys whose row was taken out on purpose, up to that moment."""
        found = np.zeros(len(self._reaching), np.bool_)
        for each in self._reader.erased:
            matched = [self._rows.match(at.topic, at.partition, at.offsets) for at in each.places]
            records = np.concatenate(matched) if matched else np.zeros(0, np.int64)
            ends = np.array(
                [
                    at.offset if (at := each.entry.positions.at.get(place)) else 0
                    for place in self._rows.places
                ]
            )
            before = self._rows.offsets < ends[self._rows.place_numbers()]
            gone = before & np.isin(keys, keys[records[records >= 0]])
            found |= gone[self._reaching]
        return found

    def _deleted(self, last: Numbers) -> tuple[Flags, str]:
        condition = self._sink.delete_when
        if condition is None or self._keeps_versions:
            return np.zeros(len(last), np.bool_), ""
        flags = condition_flags(condition, self._rows, self._columns)
        if flags is not None:
            return flags[last], ""
        why = f"which keys are deleted is not known: --spark evaluates `delete_when` ({condition}) again"
        return np.zeros(len(last), np.bool_), why

    def _unsure(self, keys: Codes) -> Codes:
        """Keys of several partitions, where the ledger no longer says in which order batches took them."""
        if self._turns is not None or len(self._rows.places) < 2:
            return np.zeros(0, np.int64)
        places = self._rows.place_numbers()[self._reaching].astype(np.int64)
        codes = keys[self._reaching]
        order = np.lexsort((places, codes))
        changes = (np.diff(codes[order]) == 0) & (np.diff(places[order]) != 0)
        return np.unique(codes[order][1:][changes])

    def _strangers(self, table: Table, theirs: Codes, known: Flags) -> Iterator[Finding]:
        """Rows of keys that no record has, and keys that stand twice."""
        _, firsts = np.unique(theirs, return_index=True)
        again = np.setdiff1d(np.arange(len(theirs)), firsts)
        nobodys = np.flatnonzero(~known & (table.records >= 0))
        for fate, rows, detail in (
            (Fate.ALTERED, nobodys, "the record that the row names has another key"),
            (Fate.DUPLICATED, again, "its key stands twice"),
        ):
            for row in rows[:NAMED_MAX].tolist():
                keys = (key_text(list(self._sink.key), table.keys, row),)
                yield Finding(fate, self._sink.name, count=1, keys=keys, detail=detail)

    def _told(self, fate: Fate, which: Numbers, what: str) -> Iterator[Finding]:
        places = self._rows.place_numbers()
        for row in which[:NAMED_MAX].tolist():
            offset, place = int(self._rows.offsets[row]), self._rows.places[places[row]]
            keys = (key_text(list(self._sink.key), self._columns, row),)
            yield Finding(fate, self._sink.name, place, ((offset, offset),), 1, keys, what)
        more = len(which) - NAMED_MAX
        if more > 0:
            yield Finding(fate, self._sink.name, count=more, detail=f"more like these: {what}")
