"""What windows must hold, recomputed from the log: number and digest of their rows, and in which batch they appear.

A row that is not late adds one and its hash to each window it belongs to, in the batch that took it. From that, and
from the watermark after each batch, follows which rows a window step gave out and when:

- `emit: changes`: a window is given out in every batch that added to it, with all it has by then.
- `emit: closed`: it is given out in the first batch after which the watermark has passed its end; and again in each
  later one that still added to it (`late: correct`).

Sessions are rows of a key whose events are no more than the gap apart; they close a gap after their end. Given out once
closed, they never change; given out while they grow, only what stands in the end is recomputed.

The rows of windows as a sink holds them, and their comparison with what must be there.

A row stands for one window (key and start) as it was after one batch (the `offset` in its lineage). What a sink that
appends must hold is every row that was given out, once; of a sink that keeps one row for each key, the last of each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.sinks.base import Values
from holdfast.audit.stateful.rows import Codes, Flags, Hashes, Numbers, Times, sorting
from holdfast.audit.stateful.turns import Measure

NEVER: Final = 2**31 - 1
"""In place of a batch: not within the audit's scope."""


@dataclass(frozen=True)
class Windows:
    """Windows, or states of windows, one beside the other."""

    keys: Codes
    starts: Times
    ends: Times
    turns: Numbers
    """The batch, by its place in the chain, in which this was given out."""
    counts: Numbers
    digests: Hashes
    sample: Numbers
    """A row that is in it."""

    def __len__(self) -> int:
        return len(self.keys)

    def where(self, chosen: Flags | Numbers) -> Windows:
        return Windows(*(getattr(self, each.name)[chosen] for each in fields(self)))


@dataclass(frozen=True)
class Parts:
    """Rows in windows: one for each window a row belongs to."""

    rows: Numbers
    keys: Codes
    starts: Times


@dataclass(frozen=True)
class Pieces:
    """Rows of one batch and one key that belong to the same windows, taken together."""

    keys: Codes
    firsts: Times
    lasts: Times
    turns: Numbers
    counts: Numbers
    digests: Hashes
    sample: Numbers


def pieces(
    measure: Measure,
    rows: Numbers,
    keys: Codes,
    events: Times,
    watermarks: Times,
    turns: Numbers,
    hashes: Hashes,
) -> Pieces:
    """Of these rows, none of which is late; tumbling and sliding. All arrays are by row of the source but `rows`."""
    keys, turns = keys[rows], turns[rows]
    lasts = measure.last_starts(events[rows])
    firsts = measure.first_starts(events[rows], watermarks[rows]) if measure.kind == "sliding" else lasts
    behind = (lasts - firsts) // measure.every_ms
    order = sorting(keys, lasts // measure.every_ms, behind, turns)
    keys, lasts, firsts, turns = keys[order], lasts[order], firsts[order], turns[order]
    begins = changes(keys, lasts, firsts, turns)
    digests = np.add.reduceat(hashes[rows[order]], begins) if len(begins) else np.zeros(0, np.uint64)
    return Pieces(
        keys[begins],
        firsts[begins],
        lasts[begins],
        turns[begins],
        np.diff(np.append(begins, len(keys))),
        digests,
        rows[order][begins],
    )


def assign(measure: Measure, firsts: Times, lasts: Times) -> tuple[Numbers, Times]:
    """From a first to a last start: the number of what belongs there, and each of the starts."""
    if measure.kind != "sliding":
        return np.arange(len(lasts)), lasts
    counts = (lasts - firsts) // measure.every_ms + 1
    which = np.repeat(np.arange(len(lasts)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, firsts[which] + number * measure.every_ms


def given_out(measure: Measure, found: Pieces, ends_ms: Times, *, is_closed: bool) -> Windows:
    """Every row that windows give out, in the batches up to the end; those that stay open are given out `NEVER`.

    `ends_ms` is the watermark after each batch.
    """
    which, starts = assign(measure, found.firsts, found.lasts)
    keys, when = found.keys[which], found.turns[which].astype(np.int64)
    if is_closed:
        closing = np.searchsorted(ends_ms, starts + measure.size_ms, side="left").astype(np.int64)
        closing[closing == len(ends_ms)] = NEVER
        when = np.maximum(when, closing)
    order = sorting(keys, starts // measure.every_ms, np.where(when == NEVER, len(ends_ms), when))
    keys, starts, when, which = keys[order], starts[order], when[order], which[order]
    begins = changes(keys, starts, when)
    nothing = np.zeros(0, np.int64)
    states = Windows(
        keys[begins],
        starts[begins],
        starts[begins] + measure.size_ms,
        when[begins],
        np.add.reduceat(found.counts[which], begins) if len(begins) else nothing,
        np.add.reduceat(found.digests[which], begins) if len(begins) else nothing.view(np.uint64),
        found.sample[which][begins],
    )
    return _accumulated(states)


def _accumulated(states: Windows) -> Windows:
    """Each state with what its window had before."""
    if len(states) == 0:
        return states
    begins = changes(states.keys, states.starts)
    sizes = np.diff(np.append(begins, len(states)))
    counts, digests = np.cumsum(states.counts), np.cumsum(states.digests, dtype=np.uint64)
    return replace(
        states,
        counts=counts - np.repeat(counts[begins] - states.counts[begins], sizes),
        digests=digests - np.repeat(digests[begins] - states.digests[begins], sizes),
    )


def sessions(measure: Measure, parts: Parts, hashes: Hashes, ends_ms: Times) -> tuple[Windows, Times]:
    """The sessions of these rows, which start at their events, and the batch after which each was closed; and for each
    row the start of its session."""
    nothing = np.zeros(0, np.int64)
    if len(parts.rows) == 0:
        return Windows(nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.uint64), nothing), nothing
    order = sorting(parts.keys, parts.starts)
    keys, events, rows = parts.keys[order], parts.starts[order], parts.rows[order]
    begins = np.concatenate(([True], (np.diff(keys) != 0) | (np.diff(events) > measure.size_ms)))
    firsts = np.flatnonzero(begins)
    lasts = np.append(firsts[1:], len(keys)) - 1
    ends = events[lasts] + measure.size_ms
    closing = np.searchsorted(ends_ms, ends + measure.wait_ms, side="left").astype(np.int64)
    closing[closing == len(ends_ms)] = NEVER
    counts = np.diff(np.append(firsts, len(keys)))
    starts = np.zeros(len(rows), np.int64)
    starts[order] = np.repeat(events[firsts], counts)
    digests = np.add.reduceat(hashes[rows], firsts)
    return Windows(keys[firsts], events[firsts], ends, closing, counts, digests, rows[firsts]), starts


def last_states(windows: Windows) -> Windows:
    """Of each window the newest of these."""
    if len(windows) == 0:
        return windows
    order = sorting(windows.keys, windows.starts, windows.turns)
    return windows.where(lasts(order, windows.keys, windows.starts))


def lasts(order: Numbers, *columns: Numbers) -> Numbers:
    """The last of all that are alike in these columns, which the order goes by first."""
    begins = changes(*(column[order] for column in columns))
    ends = np.append(begins[1:], len(order)) if len(order) else begins
    return np.asarray(order[ends - 1], np.int64)


def changes(*columns: Numbers) -> Numbers:
    """Where, in sorted columns, something else begins."""
    if len(columns[0]) == 0:
        return np.zeros(0, np.int64)
    differs = np.zeros(len(columns[0]) - 1, np.bool_)
    for column in columns:
        differs |= column[1:] != column[:-1]
    return np.concatenate(([0], np.flatnonzero(differs) + 1))


# ---------------------------------------------------------------------------- held


COUNT: Final = "_hf_count"
DIGEST: Final = "_hf_digest"
START: Final = "window_start"
END: Final = "window_end"
STEP: Final = "_hf_topic"
PARTITION: Final = "_hf_partition"
TURN: Final = "_hf_offset"
INDEX: Final = "_hf_index"
NO_TIME: Final = -(2**62)
NEEDED: Final = (COUNT, DIGEST, START, END, STEP, PARTITION, TURN, INDEX)


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
        arrays = (getattr(self, each.name)[at] for each in fields(self)[2:])
        return Held(self.table.take(pa.array(at)), [self.steps[each] for each in at.tolist()], *arrays)


def held_rows(batches: Iterable[Values]) -> Held:
    found = [batch.table for batch in batches if batch.table.num_rows]
    if not found:
        nothing = np.zeros(0, np.int64)
        return Held(pa.table({}), [], nothing, nothing, nothing, nothing, nothing, np.zeros(0, np.uint64))
    missing = [name for name in NEEDED if any(name not in rows.column_names for rows in found)]
    if missing:
        raise NotWindows(", ".join(missing))
    table = pa.concat_tables(found, promote_options="permissive").combine_chunks()
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


def rows_in_order(held: Held, key: Sequence[str]) -> int:
    """How many rows are numbered within their batch by key and start, from 0 on. Of batches that many tasks gave out,
    rows have other numbers, which are not made again here."""
    columns: dict[str, Any] = {"number": held.numbers}
    for at, name in enumerate(key if len(held) else ()):
        columns |= {f"is {at}": held.table.column(name).is_valid(), f"key {at}": held.table.column(name)}
    table = pa.table({**columns, "start": held.starts})
    by = [(name, "ascending") for name in table.column_names]
    try:
        order = pc.sort_indices(table, sort_keys=by).to_numpy()
    except pa.ArrowException:
        return 0
    numbers = held.numbers[order]
    expected = np.arange(len(order)) - np.searchsorted(numbers, numbers)
    is_other = held.indexes[order] != expected
    if len(held):
        is_other |= _numbers(held.table.column(PARTITION))[order] != 0
    return int((~np.isin(numbers, numbers[is_other])).sum())


def milliseconds(times: pa.ChunkedArray) -> Times:
    """Of a timestamp, or of a text that is one; what no window has is before everything: anything else, or a part of a
    millisecond."""
    kind = pa.timestamp("us", tz=times.type.tz if pa.types.is_timestamp(times.type) else "UTC")
    micros = _numbers(_cast(times, kind), NO_TIME)
    return np.where(micros % 1000 == 0, micros, NO_TIME) // 1000


def _cast(column: pa.ChunkedArray, kind: pa.DataType) -> pa.ChunkedArray:
    """What is no such value is null."""
    try:
        return column.cast(kind)
    except pa.ArrowException:
        return pa.chunked_array([_cast_one(value, kind) for value in column], kind)


def _cast_one(value: pa.Scalar, kind: pa.DataType) -> pa.Array:
    try:
        return pa.array([value.cast(kind)], kind)
    except pa.ArrowException:
        return pa.nulls(1, kind)


def _numbers(column: pa.ChunkedArray, null: int = -1) -> Numbers:
    filled = pc.fill_null(_cast(column, pa.int64()), null)
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
    return np.sort(lasts(order, keys, held.starts))
