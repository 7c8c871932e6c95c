"""Values of records and values of rows, held against each other as multisets in bounded memory.

A value is bytes, or null. Records come with where they stand in the log and in which zone: before the scope, in it,
or after it; rows with where they were found. Nothing is decided by a hash: when a heap grows past `bytes_in_memory`, a
hash deals values out into files, so that equal ones meet in the same, and each is compared value by value.

The rules, for a value that the log has `before`, `scope` and `after` times, and the sink `rows` times:

- fewer rows than `scope`: the difference is *lost*, whatever the rows stand for;
- more rows than `before + scope + after`: the difference is *duplicated* where the log has the value at all, and
  *extra* where it does not;
- enough rows for the scope and too few for what came before it as well: *unsure*, since the rows may stand for either.

Where a sink keeps one row for each value (`is_distinct`), the log's records of one value are one, the last of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.model import BUCKETS_MAX, Fate, Timeline
from holdfast.pipeline.dealt import DealtRows

BYTES_IN_MEMORY: Final = 64 << 20
"""Of one heap, before it goes to files: comparing takes several times as much."""
ROWS_TOGETHER: Final = 65_536
"""Ten thousand files of ten rows are not ten thousand tables."""
EXAMPLES_MAX: Final = 5
KEPT_EXTRA_MAX: Final = 100_000
"""Extra values that are looked for among records taken back; more than that is one finding anyway."""
_WEIGHTS: Final = np.random.default_rng(17).integers(1, 1 << 62, 1024, dtype=np.uint64) | np.uint64(1)

Numbers = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Zone(IntEnum):
    BEFORE = 0
    SCOPE = 1
    AFTER = 2


RECORD_COLUMNS: Final = ("place", "offset", "zone", "time_ms")
ROW_COLUMNS: Final = ("source", "row")


class Heap:
    """Values with numbers beside them."""

    def __init__(
        self, columns: Sequence[str], directory: str, *, bytes_in_memory: int = BYTES_IN_MEMORY
    ) -> None:
        self.size = 0
        self._schema = pa.schema([("value", pa.large_binary()), *((name, pa.int64()) for name in columns)])
        self._rows = DealtRows(
            self._schema, directory, lambda rows: buckets_of(rows.column("value").combine_chunks())
        )
        self._bytes_in_memory = bytes_in_memory
        self._few: list[pa.Table] = []
        """What came last, until it is enough to be worth a table of its own."""
        self._few_rows = 0
        self._held_bytes = 0

    @property
    def is_spilled(self) -> bool:
        return self._rows.is_spilled

    def add(self, values: pa.Array, numbers: Mapping[str, npt.NDArray[Any]]) -> None:
        columns = [values, *(pa.array(numbers[name], pa.int64()) for name in self._schema.names[1:])]
        rows = pa.table(columns, schema=self._schema)
        self.size += rows.num_rows
        self._few.append(rows)
        self._few_rows += rows.num_rows
        if self._few_rows >= ROWS_TOGETHER:
            self.settle()

    def settle(self) -> None:
        """Keep what came last, in one piece."""
        if not self._few:
            return
        rows = pa.concat_tables(self._few).combine_chunks()
        self._few, self._few_rows = [], 0
        self._rows.add(rows)
        self._held_bytes += rows.nbytes
        if self._held_bytes > self._bytes_in_memory:
            self.spill()

    def spill(self) -> None:
        """Everything to files, from here on."""
        self._rows.spill()

    def buckets(self) -> Iterator[pa.Table]:
        """All there is: at once, or bucket by bucket. Only once."""
        self.settle()
        for rows in self._rows.buckets():
            yield rows.combine_chunks()


def together(one: Heap, other: Heap) -> None:
    """Both in memory, or both in files: only then do their buckets belong together."""
    one.settle()
    other.settle()
    if one.is_spilled or other.is_spilled:
        one.spill()
        other.spill()


def buckets_of(values: pa.Array) -> Numbers:
    """The same number for equal values."""
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    rows = len(values)
    if rows == 0:
        return np.zeros(0, np.int64)
    _, ends_buffer, data_buffer = values.buffers()
    ends = np.frombuffer(ends_buffer, np.int64)[values.offset : values.offset + rows + 1]
    lengths = np.diff(ends)
    hashes = lengths.astype(np.uint64)
    full = np.flatnonzero(lengths)
    if len(full):
        data = np.frombuffer(data_buffer, np.uint8)[ends[0] : ends[-1]].astype(np.uint64)
        begins = (ends[:-1] - ends[0])[full]
        places = np.arange(len(data)) - np.repeat(begins, lengths[full])
        with np.errstate(over="ignore"):
            hashes[full] += np.add.reduceat((data + np.uint64(1)) * _WEIGHTS[places & 1023], begins)
    if values.null_count:
        hashes[pc.is_null(values).to_numpy(zero_copy_only=False)] = 0
    with np.errstate(over="ignore"):
        mixed = (hashes ^ (hashes >> np.uint64(31))) * np.uint64(0x9E3779B97F4A7C15)
    return (mixed >> np.uint64(58)).astype(np.int64)


@dataclass
class Extra:
    """A row that no record explains."""

    value: bytes | None
    source: int
    row: int


@dataclass
class Outcome:
    """What two heaps say of each other."""

    rows: int = 0
    fates: dict[int, dict[Fate, int]] = field(default_factory=dict)
    """Of the records of the scope, by place."""
    lost: dict[int, list[Numbers]] = field(default_factory=dict)
    """Offsets by place."""
    last_there: dict[int, int] = field(default_factory=dict)
    """By place: the greatest offset of the scope that a row stands for."""
    duplicated: dict[int, list[Numbers]] = field(default_factory=dict)
    duplicated_rows: dict[int, int] = field(default_factory=dict)
    """How many rows there are too many, by the place of the record they repeat."""
    extra: int = 0
    extra_examples: list[Extra] = field(default_factory=list)
    extra_values: list[pa.Array] = field(default_factory=list)
    """The values of extra rows, at most `KEPT_EXTRA_MAX`."""
    extra_counts: list[Numbers] = field(default_factory=list)
    """How many rows each of them has."""
    null_rows: int = 0
    """Rows whose value is null and which no record explains; they are not among the extra ones."""
    unsure: int = 0
    repeats: int = 0
    """How many records have a value that another one has too."""
    times: dict[Fate, Numbers] = field(default_factory=dict)
    """Records of the scope by fate, one number for each bucket of time."""

    def offsets(self, found: Mapping[int, list[Numbers]], place: int) -> Numbers:
        parts = found.get(place, [])
        return np.sort(np.concatenate(parts)) if parts else np.zeros(0, np.int64)


@dataclass(frozen=True)
class Buckets:
    """Of time, for the plots."""

    start_ms: int
    step_ms: int
    count: int

    @classmethod
    def between(cls, first_ms: int, last_ms: int) -> Buckets:
        span = max(0, last_ms - first_ms) + 1
        step = max(1, -(-span // BUCKETS_MAX))
        return cls(first_ms, step, -(-span // step))

    def counted(self, times_ms: Numbers) -> Numbers:
        places = np.clip((times_ms - self.start_ms) // self.step_ms, 0, self.count - 1)
        return np.bincount(places, minlength=self.count).astype(np.int64)

    def timeline(self, times: Mapping[Fate, Numbers]) -> Timeline:
        starts = tuple(self.start_ms + self.step_ms * place for place in range(self.count))
        counts = {str(fate): tuple(numbers.tolist()) for fate, numbers in times.items() if numbers.any()}
        return Timeline(self.step_ms, starts, counts) if counts else Timeline()


def compare(
    records: Heap, rows: Heap, buckets: Buckets, *, is_distinct: bool = False, nulls_apart: bool = False
) -> Outcome:
    """`nulls_apart`: rows that are null and have no record are counted, not called extra."""
    together(records, rows)
    outcome = Outcome(rows.size)
    for one, other in zip(records.buckets(), rows.buckets(), strict=True):
        _Bucket(one, other, outcome, buckets, is_distinct, nulls_apart).compare()
    return outcome


@dataclass
class _Bucket:
    records: pa.Table
    rows: pa.Table
    outcome: Outcome
    buckets: Buckets
    is_distinct: bool
    nulls_apart: bool
    codes: Numbers = field(init=False)
    """Of each record: the same for equal values, and for no others."""
    row_codes: Numbers = field(init=False)
    values: pa.Array = field(init=False)
    """By code."""
    there: Numbers = field(init=False)
    """By code: how many rows."""
    zones: Numbers = field(init=False)

    def compare(self) -> None:
        both = pa.chunked_array(
            [*self.records.column("value").chunks, *self.rows.column("value").chunks], pa.large_binary()
        ).combine_chunks()
        if isinstance(both, pa.ChunkedArray):
            both = pa.concat_arrays(both.chunks) if both.num_chunks else pa.array([], pa.large_binary())
        encoded = pc.dictionary_encode(both, null_encoding="encode")
        codes = encoded.indices.to_numpy(zero_copy_only=False).astype(np.int64)
        self.codes, self.row_codes = codes[: self.records.num_rows], codes[self.records.num_rows :]
        self.values = encoded.dictionary
        size = len(self.values)
        self.zones = _numbers(self.records, "zone")
        per_zone = [np.bincount(self.codes[self.zones == zone], minlength=size) for zone in Zone]
        before, scope, _ = per_zone
        total = sum(per_zone[1:], per_zone[0])
        there = self.there = np.bincount(self.row_codes, minlength=size)
        self.outcome.repeats += int(total[total > 1].sum())
        if self.is_distinct:
            lost = ((scope > 0) & (there == 0)).astype(np.int64)
            surplus = np.where(total > 0, np.maximum(there - 1, 0), 0)
        else:
            lost = np.maximum(scope - there, 0)
            surplus = np.where(total > 0, np.maximum(there - total, 0), 0)
            unsure = np.where((scope > 0) & (lost == 0), np.maximum(before + scope - there, 0), 0)
            self.outcome.unsure += int(np.minimum(unsure, scope).sum())
        self._records(lost, surplus)
        self._extra((total == 0) & (there > 0))

    def _records(self, lost: Numbers, surplus: Numbers) -> None:
        """What became of each record."""
        count = self.records.num_rows
        is_lost, is_twice, is_old = (np.zeros(count, np.bool_) for _ in range(3))
        in_scope = self.zones == Zone.SCOPE
        at = np.flatnonzero(in_scope & (lost[self.codes] > 0)) if count else np.zeros(0, np.int64)
        if len(at):
            is_lost[at] = self._rank(at, from_end=True) < lost[self.codes[at]]
        at = np.flatnonzero(surplus[self.codes] > 0) if count else np.zeros(0, np.int64)
        if len(at):
            rank = self._rank(at, from_end=self.is_distinct)
            is_twice[at] = rank < (1 if self.is_distinct else surplus[self.codes[at]])
            self._surplus(at[rank == 0], surplus)
        if self.is_distinct and count:
            at = np.flatnonzero(in_scope)
            is_old[at] = self._rank(at, from_end=True) > 0
        self._note(in_scope, is_lost, is_twice, is_old)

    def _rank(self, at: Numbers, *, from_end: bool) -> Numbers:
        """Of each of these records, how many with its value stand in front of it (or behind it)."""
        keys = self.codes[at]
        order = np.argsort(keys, kind="stable")
        if from_end:
            order = order[::-1]
        ordered = keys[order]
        starts = np.flatnonzero(np.append(True, np.diff(ordered) != 0))
        within = np.arange(len(ordered)) - np.repeat(starts, np.diff(np.append(starts, len(ordered))))
        ranks = np.empty(len(at), np.int64)
        ranks[order] = within
        return ranks

    def _surplus(self, firsts: Numbers, surplus: Numbers) -> None:
        places = _numbers(self.records, "place")[firsts]
        rows = np.bincount(places, weights=surplus[self.codes[firsts]])
        for place in np.flatnonzero(rows).tolist():
            found = self.outcome.duplicated_rows
            found[place] = found.get(place, 0) + int(rows[place])

    def _note(self, in_scope: Flags, is_lost: Flags, is_twice: Flags, is_old: Flags) -> None:
        places, offsets, times = (_numbers(self.records, name) for name in ("place", "offset", "time_ms"))
        fine = in_scope & ~is_lost & ~is_twice & ~is_old
        flags = {
            Fate.LOST: is_lost,
            Fate.DUPLICATED: is_twice & in_scope & ~is_lost,
            Fate.SUPERSEDED: is_old & in_scope & ~is_twice & ~is_lost,
            Fate.OUTPUT: fine,
        }
        for fate, chosen in flags.items():
            if not chosen.any():
                continue
            counts = np.bincount(places[chosen])
            for place in np.flatnonzero(counts).tolist():
                known = self.outcome.fates.setdefault(place, {})
                known[fate] = known.get(fate, 0) + int(counts[place])
            counted = self.buckets.counted(times[chosen])
            self.outcome.times[fate] = self.outcome.times.get(fate, 0) + counted
        there = in_scope & ~is_lost
        last = np.full(int(places.max(initial=-1)) + 1, -1, np.int64)
        np.maximum.at(last, places[there], offsets[there])
        for place in np.flatnonzero(last >= 0).tolist():
            self.outcome.last_there[place] = max(int(last[place]), self.outcome.last_there.get(place, -1))
        for target, chosen in ((self.outcome.lost, is_lost), (self.outcome.duplicated, is_twice)):
            for place, found in _by_place(places[chosen], offsets[chosen]):
                target.setdefault(place, []).append(found)

    def _extra(self, is_extra: Flags) -> None:
        """Values that only rows have."""
        outcome = self.outcome
        at = np.flatnonzero(is_extra[self.row_codes]) if len(self.row_codes) else np.zeros(0, np.int64)
        if not len(at):
            return
        if self.nulls_apart and self.values.null_count:
            is_null = pc.is_null(self.values).to_numpy(zero_copy_only=False)
            outcome.null_rows += int(is_null[self.row_codes[at]].sum())
            at = at[~is_null[self.row_codes[at]]]
            is_extra = is_extra & ~is_null
        outcome.extra += len(at)
        sources, rows = _numbers(self.rows, "source"), _numbers(self.rows, "row")
        for place in at[: EXAMPLES_MAX - len(outcome.extra_examples)].tolist():
            value = self.values[int(self.row_codes[place])].as_py()
            outcome.extra_examples.append(Extra(value, int(sources[place]), int(rows[place])))
        if sum(map(len, outcome.extra_values)) < KEPT_EXTRA_MAX:
            outcome.extra_values.append(self.values.filter(pa.array(is_extra)))
            outcome.extra_counts.append(self.there[is_extra])


def _by_place(places: Numbers, offsets: Numbers) -> Iterator[tuple[int, Numbers]]:
    order = np.argsort(places, kind="stable")
    cuts = np.flatnonzero(np.diff(places[order])) + 1
    for chosen in np.split(order, cuts) if len(order) else ():
        yield int(places[chosen[0]]), offsets[chosen]


def _numbers(table: pa.Table, name: str) -> Numbers:
    return np.asarray(table.column(name).to_numpy(), np.int64)
