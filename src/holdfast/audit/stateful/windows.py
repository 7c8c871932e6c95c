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
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.sinks.base import Values
from holdfast.audit.stateful.rows import Flags, Hashes, Numbers, sorting
from holdfast.audit.stateful.turns import Measure

Windows = npt.NDArray[np.void]
"""Windows, or states of windows, one beside the other (`WINDOW`)."""
WINDOW: Final = np.dtype(
    {
        "names": ("key", "start", "end", "turn", "index", "count", "digest", "at"),
        "formats": (*("i8",) * 6, "u8", "i8"),
    }
)
"""`turn`: the batch that gave it out, by its place in the chain, which has no more where the window is not given out
within the audit's scope; of a sink's row first by the number that its lineage has, and beside it its `index` there.
`at`: a row of the source that is in it, or the row of the sink's table."""


def windows(size: int, **columns: Numbers | Hashes) -> Windows:
    made = np.zeros(size, WINDOW)
    for name, values in columns.items():
        made[name] = values
    return made


def alike(found: Windows, *by: Numbers) -> Windows:
    """One for all that have the same numbers here, with their counts and digests together, in the order of these."""
    order = sorting(*by)
    begins = changes(*(column[order] for column in by))
    first = found[order[begins]]
    for name in ("count", "digest") if len(begins) else ():
        first[name] = np.add.reduceat(found[name][order], begins)
    return first


def given_out(measure: Measure, rows: Windows, ends_ms: Numbers, *, is_closed: bool) -> Windows:
    """Every row that windows give out, in the batches up to the end; of those that stay open, too (`WINDOW`).

    `rows` are those that are not late, as windows of one record each, from the last start of the windows they are in to
    the first; `ends_ms` is the watermark after each batch.
    """
    lasts, firsts, every = rows["start"], rows["end"], measure.every_ms
    pieces = alike(rows, rows["key"], lasts // every, (lasts - firsts) // every, rows["turn"])
    which, starts = assign(measure, pieces["end"], pieces["start"])
    states = pieces[which]
    states["start"], states["end"] = starts, starts + measure.size_ms
    if is_closed:
        closing = np.searchsorted(ends_ms, states["end"], side="left")
        states["turn"] = np.maximum(states["turn"], closing)
    states = alike(states, states["key"], starts // every, states["turn"])
    # Each state has what its window had before, too.
    begins = changes(states["key"], states["start"])
    sizes = np.diff(np.append(begins, len(states)))
    for name in ("count", "digest"):
        sums = np.cumsum(states[name], dtype=states[name].dtype)
        states[name] = sums - np.repeat(sums[begins] - states[name][begins], sizes)
    return states


def assign(measure: Measure, firsts: Numbers, lasts: Numbers) -> tuple[Numbers, Numbers]:
    """From a first to a last start: the number of what belongs there, and each of the starts."""
    if measure.kind != "sliding":
        return np.arange(len(lasts)), lasts
    counts = (lasts - firsts) // measure.every_ms + 1
    which = np.repeat(np.arange(len(lasts)), counts)
    number = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
    return which, firsts[which] + number * measure.every_ms


def sessions(measure: Measure, rows: Windows, ends_ms: Numbers) -> tuple[Windows, Numbers]:
    """The sessions of these rows, which start at their events, and the batch after which each was closed; and for each
    row the start of its session."""
    order = sorting(rows["key"], rows["start"])
    keys, events = rows["key"][order], rows["start"][order]
    is_first = np.ones(len(order), np.bool_)
    is_first[1:] = (np.diff(keys) != 0) | (np.diff(events) > measure.size_ms)
    numbers = np.zeros(len(order), np.int64)
    numbers[order] = np.cumsum(is_first) - 1
    begins = np.flatnonzero(is_first)
    found = alike(rows, numbers)
    found["start"] = events[begins]
    found["end"] = events[np.append(begins[1:], len(order))[: len(begins)] - 1] + measure.size_ms
    found["turn"] = np.searchsorted(ends_ms, found["end"] + measure.wait_ms, side="left")
    return found, found["start"][numbers]


def last_states(found: Windows) -> Numbers:
    """The numbers of the newest of each window: of those with its key and start."""
    order = sorting(*(found[name] for name in ("key", "start", "turn", "index")))
    return np.sort(lasts(order, found["key"], found["start"]))


def lasts(order: Numbers, *columns: Numbers) -> Numbers:
    """The last of all that are alike in these columns, which the order goes by first."""
    begins = changes(*(column[order] for column in columns))
    return order[np.append(begins[1:], len(order))[: len(begins)] - 1]


def changes(*columns: Numbers) -> Numbers:
    """Where, in sorted columns, something else begins."""
    differs = np.ones(len(columns[0]), np.bool_)
    differs[1:] = False
    for column in columns:
        differs[1:] |= column[1:] != column[:-1]
    return np.flatnonzero(differs)


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


def held_rows(batches: Iterable[Values]) -> tuple[pa.Table, Windows]:
    """A sink's rows of window steps: its table, and each row as the window it stands for."""
    found = [batch.table for batch in batches if batch.table.num_rows]
    if not found:
        return pa.table({}), windows(0)
    missing = [name for name in NEEDED if any(name not in rows.column_names for rows in found)]
    if missing:
        raise NotWindows(", ".join(missing))
    table = pa.concat_tables(found, promote_options="permissive").combine_chunks()
    return table, windows(
        table.num_rows,
        start=milliseconds(table.column(START)),
        end=milliseconds(table.column(END)),
        turn=_numbers(table.column(TURN)),
        index=_numbers(table.column(INDEX)),
        count=_numbers(table.column(COUNT)),
        digest=_numbers(table.column(DIGEST)).view(np.uint64),
        at=np.arange(table.num_rows),
    )


def rows_in_order(table: pa.Table, held: Windows, key: Sequence[str]) -> int:
    """How many rows are numbered within their batch by key and start, from 0 on. Of batches that many tasks gave out,
    rows have other numbers, which are not made again here."""
    if not len(held):
        return 0
    rows = table.take(pa.array(held["at"]))
    columns: dict[str, Any] = {"number": held["turn"]}
    for at, name in enumerate(key):
        columns |= {f"is {at}": rows.column(name).is_valid(), f"key {at}": rows.column(name)}
    columns["start"] = held["start"]
    try:
        order = pc.sort_indices(
            pa.table(columns), sort_keys=[(name, "ascending") for name in columns]
        ).to_numpy()
    except pa.ArrowException:
        return 0
    numbers = held["turn"][order]
    expected = np.arange(len(order)) - np.searchsorted(numbers, numbers)
    is_other = (held["index"][order] != expected) | (_numbers(rows.column(PARTITION))[order] != 0)
    return int((~np.isin(numbers, numbers[is_other])).sum())


def milliseconds(times: pa.ChunkedArray) -> Numbers:
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


def compare(expected: Windows, held: Windows, *by: str) -> tuple[Numbers, Flags]:
    """Of each row that is held the number of the one that is expected, -1: none is; and those that are there again."""
    of = found_at([(expected[name], held[name]) for name in by])
    is_again = of >= 0
    is_again[np.unique(of, return_index=True)[1]] = False
    return of, is_again


def among(found: Windows, others: Windows) -> Flags:
    """Those whose key and start others have."""
    return np.isin(*joint_ids([(found[name], others[name]) for name in ("key", "start")]))


def found_at(columns: Sequence[tuple[Numbers, Numbers]]) -> Numbers:
    """Of each on the right the number of the one on the left that has the same values; -1: none has."""
    ours, theirs = joint_ids(columns)
    at = np.full(len(ours) + len(theirs), -1, np.int64)
    at[ours] = np.arange(len(ours))
    return at[theirs]


def joint_ids(columns: Sequence[tuple[Numbers, Numbers]]) -> tuple[Numbers, Numbers]:
    """One number for each combination of values, from 0 on, the same on both sides."""
    joined = [np.concatenate(both) for both in columns]
    order = sorting(*joined)
    ids = np.zeros(len(order), np.int64)
    begins = np.zeros(len(order), np.int64)
    begins[changes(*(column[order] for column in joined))] = 1
    ids[order] = np.cumsum(begins) - 1
    size = len(columns[0][0])
    return ids[:size], ids[size:]
