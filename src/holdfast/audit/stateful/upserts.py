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
from holdfast.audit.stateful.rows import Flags, KeysDiffer, Numbers, Rows, key_codes, key_text, sorting
from holdfast.audit.stateful.windows import found_at, lasts
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


@dataclass
class UpsertCheck:
    """One table against the records that reach it."""

    sink: PostgresSink | DeltaSink
    reader: SinkReader
    rows: Rows
    columns: Mapping[str, pa.ChunkedArray]
    reaching: Numbers
    """Records in the order of their places."""
    turns: Numbers | None
    ends: Mapping[Place, int]
    starts: Mapping[Place, int]
    """Up to where an earlier audit has proven everything: of those records `rows` has the ones that stood then."""

    def __post_init__(self) -> None:
        self.superseded: Flags = np.zeros(len(self.rows), np.bool_)
        self.is_standing: Flags = np.zeros(len(self.rows), np.bool_)
        """The record of each key that is in the table, where its key is known."""

    def examine(self) -> Examined:
        names = list(merge_key(self.sink))
        is_deleted = [IS_DELETED] if self._keeps_versions and self.sink.delete_when is not None else []
        self._read([*names, *is_deleted])
        ordered = [] if self.sink.order_by is None else [self.sink.order_by]
        missing = [name for name in (*names, *ordered) if name not in self.columns]
        if missing:
            return self._without_key(missing[0])
        sides = [(len(self.rows), [self.columns[name] for name in names])]
        if len(self._records):
            sides.append((len(self._records), [self._table.column(name) for name in names]))
        try:
            ours, *theirs = key_codes(*sides)
        except KeysDiffer as error:
            return self._without_key(f"{names[0]} ({error})")
        said = [*self._compare(ours, theirs[0] if theirs else self._records)]
        return Examined.of((*said, *self._deletions()) if is_deleted and theirs else said)

    def _read(self, names: Sequence[str]) -> None:
        """What the table holds: the key of each row, and the row of the source it came from, -1: none of the scope;
        whether that is of a record past the audit's end; and whether of one that an earlier audit has proven, and that
        did not stand then."""
        tables: list[pa.Table] = []
        found = [(np.zeros(0, np.int64), np.zeros(0, np.bool_), np.zeros(0, np.bool_))]
        begins = {(place.topic, place.partition): start for place, start in self.starts.items()}
        limits = {(place.topic, place.partition): end for place, end in self.ends.items()}
        for table, _ in self.reader.values(names):
            there, size = set(table.column_names), table.num_rows
            columns = {name: table.column(name) if name in there else pa.nulls(size) for name in names}
            tables.append(pa.table(columns))
            records = np.full(size, -1, np.int64)
            later, stale = np.zeros(size, np.bool_), np.zeros(size, np.bool_)
            for topic, partition, at, offsets in partitions_of(table):
                records[at] = self.rows.match(topic, partition, offsets)
                later[at] = offsets >= limits.get((topic, partition), 2**62)
                stale[at] = (offsets >= 0) & (offsets < begins.get((topic, partition), -1))
            found.append((records, later, stale & (records < 0)))
        self._table = pa.concat_tables(tables or [pa.table({})], promote_options="permissive")
        self._records, self._is_later, self._is_stale = (
            np.concatenate(each) for each in zip(*found, strict=True)
        )

    @property
    def _keeps_versions(self) -> bool:
        return self.sink.mode == "scd2"

    def _deletions(self) -> Iterator[Said]:
        """Of versions: whether each row says of itself what `delete_when` says of its record."""
        condition = self.sink.delete_when or ""
        flags = condition_flags(condition, self.rows, self.columns)
        if flags is None:
            why = f"--spark evaluates `delete_when` ({condition}) again"
            yield ColumnCoverage(self.sink.name, IS_DELETED, why=why)
            return
        known = np.flatnonzero(self._records >= 0)
        records = self._records[known]
        said = _flags(pc.fill_null(self._table.column(IS_DELETED).cast(pa.bool_()), False))
        wrong = records[said[known] != flags[records]]
        yield from self._told(Fate.ALTERED, wrong, f"{IS_DELETED} is not what `delete_when` says")
        yield ColumnCoverage(self.sink.name, IS_DELETED, int((~self._is_later[known]).sum()))

    def _without_key(self, name: str) -> Examined:
        """What the table has stands; what it has not may be superseded, or lost."""
        stands = np.zeros(len(self.rows), np.bool_)
        stands[self._records[self._records >= 0]] = True
        self.superseded[self.reaching] = ~stands[self.reaching]
        why = f"which row of a key is the newest is not known: {name} is computed by a step"
        return Examined.of([ColumnCoverage(self.sink.name, LINEAGE, why=why)])

    def _compare(self, ours: Numbers, theirs: Numbers) -> Iterator[Said]:
        turns = np.zeros(len(self.rows), np.int64) if self.turns is None else self.turns
        reaching = self.reaching[~self._erased(ours)]
        order = reaching[sorting(ours[reaching], turns[reaching], reaching)]
        last = np.sort(lasts(order, ours))
        self.superseded[self.reaching] = True
        self.superseded[last] = False
        gone, why = self._deleted(last)
        self.superseded[last[gone]] = True
        self.is_standing[last[~gone]] = True
        # Of each row of the table the record that must stand, -1: its key has none.
        of = np.append(last, -1)[found_at([(ours[last], theirs)])]
        known, is_now = of >= 0, ~self._is_later
        if not why:
            missing = last[~gone & ~np.isin(ours[last], theirs)]
            yield from self._told(Fate.LOST, missing, "its key is not in the table")
        wrong = known & is_now & (self._records != of) & ~np.isin(theirs, self._unsure(ours))
        older = of[wrong & (self._records >= 0)]
        yield from self._told(Fate.LOST, older, "the table holds an older record of its key")
        if not why:
            deleted = of[known & ~wrong & is_now & np.isin(of, last[gone])]
            yield from self._told(Fate.EXTRA, deleted, "it deletes its key, which stands in the table")
        if self._is_stale.any():
            detail = "rows of records that a newer one of their key had replaced when they were proven"
            yield Finding(Fate.ALTERED, self.sink.name, count=int(self._is_stale.sum()), detail=detail)
        yield from self._strangers(theirs, known)
        yield ColumnCoverage(self.sink.name, LINEAGE, 0 if why else int(is_now.sum()), why=why)

    def _erased(self, keys: Numbers) -> Flags:
        """Of the records that reach the table, those of keys whose row was taken out on purpose, up to that moment."""
        found = np.zeros(len(self.reaching), np.bool_)
        for each in self.reader.erased:
            matched = [self.rows.match(at.topic, at.partition, at.offsets) for at in each.places]
            records = np.concatenate(matched) if matched else np.zeros(0, np.int64)
            positions = each.entry.positions.at
            ends = np.array([at.offset if (at := positions.get(place)) else 0 for place in self.rows.places])
            before = self.rows.offsets < ends[self.rows.place_numbers()]
            gone = before & np.isin(keys, keys[records[records >= 0]])
            found |= gone[self.reaching]
        return found

    def _deleted(self, last: Numbers) -> tuple[Flags, str]:
        condition = self.sink.delete_when
        if condition is None or self._keeps_versions:
            return np.zeros(len(last), np.bool_), ""
        flags = condition_flags(condition, self.rows, self.columns)
        if flags is not None:
            return flags[last], ""
        why = f"which keys are deleted is not known: --spark evaluates `delete_when` ({condition}) again"
        return np.zeros(len(last), np.bool_), why

    def _unsure(self, keys: Numbers) -> Numbers:
        """Keys of several partitions, where the ledger no longer says in which order batches took them."""
        if self.turns is not None or len(self.rows.places) < 2:
            return np.zeros(0, np.int64)
        places = self.rows.place_numbers()[self.reaching].astype(np.int64)
        codes = keys[self.reaching]
        order = np.lexsort((places, codes))
        changes = (np.diff(codes[order]) == 0) & (np.diff(places[order]) != 0)
        return np.unique(codes[order][1:][changes])

    def _strangers(self, theirs: Numbers, known: Flags) -> Iterator[Finding]:
        """Rows of keys that no record has, and keys that stand twice."""
        _, firsts = np.unique(theirs, return_index=True)
        again = np.setdiff1d(np.arange(len(theirs)), firsts)
        columns = {name: self._table.column(name) for name in self.sink.key if len(theirs)}
        nobodys = np.flatnonzero(~known & (self._records >= 0))
        for fate, rows, detail in (
            (Fate.ALTERED, nobodys, "the record that the row names has another key"),
            (Fate.DUPLICATED, again, "its key stands twice"),
        ):
            for row in rows[:NAMED_MAX].tolist():
                keys = (key_text(list(self.sink.key), columns, row),)
                yield Finding(fate, self.sink.name, count=1, keys=keys, detail=detail)

    def _told(self, fate: Fate, which: Numbers, what: str) -> Iterator[Finding]:
        places = self.rows.place_numbers()
        for row in which[:NAMED_MAX].tolist():
            offset, place = int(self.rows.offsets[row]), self.rows.places[places[row]]
            keys = (key_text(list(self.sink.key), self.columns, row),)
            yield Finding(fate, self.sink.name, place, ((offset, offset),), 1, keys, what)
        more = len(which) - NAMED_MAX
        if more > 0:
            yield Finding(fate, self.sink.name, count=more, detail=f"more like these: {what}")
