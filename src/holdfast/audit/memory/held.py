"""The rows of windows as a sink holds them, and their comparison with what must be there.

A row stands for one window (key and start) as it was after one batch (the `offset` in its lineage). What a sink that
appends must hold is every row that was given out, once; of a sink that keeps one row for each key, the last of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.memory.keys import Codes, sorting
from holdfast.audit.memory.rows import Flags, Hashes, Numbers, Times
from holdfast.audit.memory.windows import Windows
from holdfast.audit.sinks.base import WindowBatch

COUNT: Final = "_hf_count"
DIGEST: Final = "_hf_digest"
START: Final = "window_start"
END: Final = "window_end"
STEP: Final = "_hf_topic"
TURN: Final = "_hf_offset"
INDEX: Final = "_hf_index"
NEEDED: Final = (COUNT, DIGEST, START, END, STEP, TURN, INDEX)


class NotWindows(ValueError):
    """A sink's rows lack the columns by which windows can be told."""


@dataclass(frozen=True)
class Held:
    """A sink's rows of one window step."""

    table: pa.Table
    steps: Sequence[str]
    """Of each row, the step its lineage names."""
    numbers: Numbers
    """Of the batches they were given out in."""
    indexes: Numbers
    starts: Times
    ends: Times
    counts: Numbers
    digests: Hashes

    def __len__(self) -> int:
        return len(self.numbers)

    def where(self, chosen: Flags | Numbers) -> Held:
        at = np.flatnonzero(chosen) if chosen.dtype == np.bool_ else chosen
        if len(self) == 0 or (len(at) == len(self) and chosen.dtype == np.bool_):
            return self
        return Held(
            self.table.take(pa.array(at, pa.int64())),
            [self.steps[each] for each in at.tolist()],
            self.numbers[at],
            self.indexes[at],
            self.starts[at],
            self.ends[at],
            self.counts[at],
            self.digests[at],
        )


def held_rows(batches: Iterable[WindowBatch]) -> Held:
    found = [batch.rows for batch in batches if batch.rows.num_rows]
    if not found:
        nothing = np.zeros(0, np.int64)
        return Held(pa.table({}), [], nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.uint64))
    missing = [name for name in NEEDED if any(name not in rows.schema.names for rows in found)]
    if missing:
        raise NotWindows(", ".join(missing))
    table = pa.concat_tables(
        (pa.Table.from_batches([rows]) for rows in found), promote_options="permissive"
    ).combine_chunks()
    return Held(
        table,
        table.column(STEP).cast(pa.string()).to_pylist(),
        _numbers(table.column(TURN)),
        _numbers(table.column(INDEX)),
        milliseconds(table.column(START)),
        milliseconds(table.column(END)),
        _numbers(table.column(COUNT)),
        _numbers(table.column(DIGEST)).view(np.uint64),
    )


def milliseconds(times: pa.ChunkedArray) -> Times:
    """Of a timestamp, or of a text that is one; null, which no window has, is before everything."""
    kind = pa.timestamp("us", tz=times.type.tz) if pa.types.is_timestamp(times.type) else None
    if kind is None:
        kind = pa.timestamp("us", tz="UTC")
    return _numbers(times.cast(kind).cast(pa.int64()), -(2**62)) // 1000


def _numbers(column: pa.ChunkedArray, null: int = -1) -> Numbers:
    filled = pc.fill_null(column.cast(pa.int64()), null)
    return np.asarray(filled.to_numpy(), np.int64)


@dataclass(frozen=True)
class Compared:
    """Numbers of expected windows and of held rows."""

    missing: Numbers
    """Expected, and not held."""
    extra: Numbers
    """Held, and not expected."""
    repeated: Numbers
    """Held more than once: all but the first."""
    altered: Numbers
    """Held rows that do not say what the source says; with `of`."""
    altered_of: Numbers
    """The expected window of each."""
    matched: Numbers
    """Held rows that are expected, and the expected windows they are."""
    matched_of: Numbers


def compare(expected: Windows, held: Held, keys: Codes, turns: Numbers | None) -> Compared:
    """By key and start, and by batch where `turns` has that of each held row in the chain."""
    columns = [(expected.keys, keys), (expected.starts, held.starts)]
    if turns is not None:
        columns.append((expected.turns, turns))
    ours, theirs, count = joint_ids(columns)
    expected_at = np.full(count, -1, np.int64)
    expected_at[ours] = np.arange(len(expected))
    times = np.bincount(theirs, minlength=count)
    of = expected_at[theirs]
    rows = np.arange(len(held))
    _, firsts = np.unique(theirs, return_index=True)
    is_first = np.zeros(len(held), np.bool_)
    is_first[firsts] = True
    known = of >= 0
    there = rows[known]
    at = of[known]
    differs = (
        (held.counts[there] != expected.counts[at])
        | (held.digests[there] != expected.digests[at])
        | (held.ends[there] != expected.ends[at])
    )
    return Compared(
        missing=np.flatnonzero(times[ours] == 0),
        extra=rows[~known],
        repeated=rows[known & ~is_first],
        altered=there[differs],
        altered_of=at[differs],
        matched=there[~differs],
        matched_of=at[~differs],
    )


def joint_ids(columns: Sequence[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers, int]:
    """One number for each combination of values, the same on both sides; and how many there are."""
    size = len(columns[0][0])
    joined = [np.concatenate((one, other)) for one, other in columns]
    total = len(joined[0])
    if total == 0:
        nothing = np.zeros(0, np.int64)
        return nothing, nothing, 0
    order = sorting(*joined)
    changes = np.zeros(total, np.bool_)
    for column in joined:
        changes[1:] |= np.diff(column[order]) != 0
    ids = np.zeros(total, np.int64)
    ids[order] = np.cumsum(changes)
    return ids[:size], ids[size:], int(ids.max()) + 1


def last_of_each(held: Held, keys: Codes) -> Numbers:
    """Of each key and start the row that was given out last."""
    order = sorting(keys, held.starts, held.numbers, held.indexes)
    if len(order) == 0:
        return order
    is_last = np.ones(len(order), np.bool_)
    is_last[:-1] = (np.diff(keys[order]) != 0) | (np.diff(held.starts[order]) != 0)
    return np.sort(order[is_last])
