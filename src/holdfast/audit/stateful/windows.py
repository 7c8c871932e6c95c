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

Aggregates of windows made again without Spark, where their SQL is one function of one column.

    count(*)  count(1)  count(x)  count(DISTINCT x)  sum(x)  min(x)  max(x)  avg(x)

`x` is a column of the rows. Whatever else an aggregate says is Spark's to evaluate. Numbers with a fraction are added
in another order here than there, so they are compared to nine digits; all others exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple, overload

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.sinks.base import Values
from holdfast.audit.stateful.rows import Flags, Numbers, sorting
from holdfast.audit.stateful.turns import Measure
from holdfast.pipeline.definition.model import Window

SUMS: Final = ("count", "digest")


class Windows:
    """Windows, or states of windows, one beside the other, as columns: `key`, `start`, `end`, `count`, `digest`, and

    - `turn`: the batch that gave it out, by its place in the chain, which has no more where the window is not given out
      within the audit's scope; of a sink's row first the number that its lineage has, and its `index` there;
    - `at`: a row of the source that is in it, or the row of the sink's table.

    A column that nobody has given is 0 throughout.
    """

    def __init__(self, **columns: npt.NDArray[Any]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return len(self.columns.get("start", ()))

    @overload
    def __getitem__(self, which: str) -> npt.NDArray[Any]: ...
    @overload
    def __getitem__(self, which: Numbers | Flags | slice | int) -> Windows: ...
    def __getitem__(self, which: str | Numbers | Flags | slice | int) -> npt.NDArray[Any] | Windows:
        """A column by its name, or some of the windows."""
        if not isinstance(which, str):
            return Windows(**{name: values[which] for name, values in self.columns.items()})
        return self.columns[which] if which in self.columns else np.zeros(len(self), np.int64)

    def __setitem__(self, name: str, values: npt.NDArray[Any]) -> None:
        self.columns[name] = values


def alike(found: Windows, *by: Numbers) -> Windows:
    """One for all that have the same numbers here, with their counts and digests together, in the order of these."""
    order = sorting(*by)
    begins = changes(*(column[order] for column in by))
    at = order[begins]
    first = Windows(**{name: each[at] for name, each in found.columns.items() if name not in SUMS})
    for name in SUMS:
        first[name] = np.add.reduceat(found[name][order], begins) if len(begins) else found[name][:0]
    return first


def given_out(measure: Measure, rows: Windows, ends_ms: Numbers, *, is_closed: bool) -> Windows:
    """Every row that windows give out, in the batches up to the end; of those that stay open, too (`WINDOW`).

    `rows` are those that are not late, as windows of one record each, from the last start of the windows they are in to
    the first; `ends_ms` is the watermark after each batch.
    """
    lasts, firsts, every = rows["start"], rows["end"], measure.every_ms
    pieces = alike(rows, rows["key"], lasts // every, (lasts - firsts) // every, rows["turn"])
    which, starts = assign(measure, pieces["end"], pieces["start"])
    kept = {name: pieces[name][which] for name in ("key", "turn", "count", "digest", "at")}
    states = Windows(start=starts, end=starts + measure.size_ms, **kept)
    if is_closed:
        closing = np.searchsorted(ends_ms, states["end"], side="left")
        states["turn"] = np.maximum(states["turn"], closing)
    states = alike(states, states["key"], starts // every, states["turn"])
    # Each state has what its window had before, too.
    begins = changes(states["key"], states["start"])
    sizes = np.diff(np.append(begins, len(states)))
    for name in SUMS:
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
    starts: Numbers = found["start"][numbers]
    return found, starts


def last_states(found: Windows) -> Numbers:
    """The numbers of the newest of each window: of those with its key and start."""
    order = sorting(*(found[name] for name in ("key", "start", "turn", "index")))
    return np.sort(lasts(order, found["key"], found["start"]))


def lasts(order: Numbers, *columns: Numbers) -> Numbers:
    """The last of all that are alike in these columns, which the order goes by first."""
    begins = changes(*(column[order] for column in columns))
    found: Numbers = order[np.append(begins[1:], len(order))[: len(begins)] - 1]
    return found


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
        return pa.table({}), Windows()
    missing = [name for name in NEEDED if any(name not in rows.column_names for rows in found)]
    if missing:
        raise NotWindows(", ".join(missing))
    table = pa.concat_tables(found, promote_options="permissive").combine_chunks()
    return table, Windows(
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


# ---------------------------------------------------------------------------- aggregates


TOLERANCE: Final = 1e-9
_CALL: Final = re.compile(
    r"\s*(?P<function>count|sum|min|max|avg|mean)\s*\(\s*(?P<distinct>distinct\s+)?"
    r"(?P<of>\*|1|`[^`]+`|[A-Za-z_]\w*)\s*\)\s*",
    re.IGNORECASE,
)
_GROUP: Final = "_group"


class Call(NamedTuple):
    """One function of one column; nothing for all rows."""

    function: str
    column: str | None


def call_of(text: str) -> Call | None:
    """What an aggregate's SQL says; nothing when it is more than one call."""
    match = _CALL.fullmatch(text)
    if match is None:
        return None
    function, of = match["function"].lower(), match["of"].strip("`")
    if of in ("*", "1"):
        return Call("count_all", None) if function == "count" and not match["distinct"] else None
    if match["distinct"]:
        return Call("count_distinct", of) if function == "count" else None
    return Call({"mean": "avg"}.get(function, function), of)


def columns_needed(aggregates: Mapping[str, str]) -> tuple[str, ...]:
    """The columns that `recompute` reads, of those aggregates it can make."""
    calls = (call_of(text) for text in aggregates.values())
    return tuple(dict.fromkeys(call.column for call in calls if call is not None and call.column is not None))


def recompute(
    aggregates: Mapping[str, str], rows: pa.Table, groups: Numbers, count: int
) -> dict[str, list[Any] | None]:
    """For each aggregate a value for each of `count` groups; nothing for one that cannot be made here.

    `groups` says which group a row is in. A group without rows has null, and 0 where rows are counted.
    """
    found: dict[str, list[Any] | None] = {}
    for name, text in aggregates.items():
        call = call_of(text)
        is_known = call is not None and (call.column is None or call.column in rows.column_names)
        found[name] = _grouped(call, rows, groups, count) if call is not None and is_known else None
    return found


def _grouped(call: Call, rows: pa.Table, groups: Numbers, count: int) -> list[Any] | None:
    if call.column is None:
        return [int(each) for each in np.bincount(groups, minlength=count)]
    column = rows.column(call.column)
    if pa.types.is_nested(column.type):
        return None
    function = {"avg": "mean"}.get(call.function, call.function)
    table = pa.table({_GROUP: groups, "it": column})
    values: list[Any] = [0 if function.startswith("count") else None] * count
    try:
        made = table.group_by(_GROUP).aggregate([("it", function)])
    except (pa.ArrowNotImplementedError, pa.ArrowInvalid):
        return None
    listed = zip(made.column(_GROUP).to_pylist(), made.column(f"it_{function}").to_pylist(), strict=True)
    for group, value in listed:
        values[group] = value
    return values


def same_value(held: Any, made: Any) -> bool:
    """Whether a sink's value is what was recomputed."""
    if held is None or made is None:
        return held is None and made is None
    if isinstance(held, float) or isinstance(made, float):
        try:
            one, other = float(held), float(made)
        except (TypeError, ValueError):
            return False
        return (
            one == other
            or (math.isnan(one) and math.isnan(other))
            or math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
        )
    if isinstance(held, Decimal | int) and isinstance(made, Decimal | int):
        return Decimal(held) == Decimal(made)
    return bool(held == made)


ROWS_AT_ONCE: Final = 2_000_000
"""Rows in windows, each counted in all it belongs to: some 100 MB. More are made key by key."""


def differing_values(
    step: Window,
    measure: Measure,
    plain: Mapping[str, pa.ChunkedArray],
    parts: Windows,
    expected: Windows,
    held: pa.Table,
    compared: dict[str, int],
    computed: Callable[[Mapping[str, str], Numbers, Numbers, int], dict[str, list[Any] | None]],
) -> Iterator[tuple[int, str]]:
    """Held rows, by number, whose aggregates are not those of the rows in their window (`parts`); and what differs.

    `compared` counts by aggregate how many were; `computed` makes those that are no plain function of a column. `held`
    has a row for each of the windows that are expected, which are in their last state: what a row said before it was
    replaced is not made again.
    """
    names = [name for name in columns_needed(step.aggregates) if name in plain]
    total = int(((parts["start"] - parts["end"]) // measure.every_ms + 1).sum())
    chunks = 1 + total // ROWS_AT_ONCE
    for number in range(chunks):
        rows, theirs = (each[each["key"] % chunks == number] for each in (parts, expected))
        if not len(rows) or not len(theirs):
            continue
        which, starts = assign(measure, rows["end"], rows["start"])
        group = found_at([(theirs["key"], rows["key"][which]), (theirs["start"], starts)])
        chosen, group = rows["at"][which][group >= 0], group[group >= 0]
        columns = {name: plain[name].take(pa.array(chosen)) for name in names}
        table = pa.table(columns or {"_": np.zeros(len(chosen), np.int8)})
        made = recompute(step.aggregates, table, group, len(theirs))
        others = {
            name: text
            for name, text in step.aggregates.items()
            if made[name] is None and "approx_" not in text.lower()
        }
        made |= computed(others, chosen, group, len(theirs)) if others else {}
        at = np.flatnonzero(expected["key"] % chunks == number)
        yield from _differing(step, made, held.take(pa.array(at)), at, compared)


def _differing(
    step: Window, made: Mapping[str, list[Any] | None], held: pa.Table, at: Numbers, compared: dict[str, int]
) -> Iterator[tuple[int, str]]:
    for name, values in made.items():
        if values is None or name not in held.column_names:
            continue
        for row, has, must in zip(at.tolist(), held.column(name).to_pylist(), values, strict=True):
            if not _can_compare(step.aggregates[name], has, must):
                continue
            compared[name] = compared.get(name, 0) + 1
            if not same_value(has, must):
                yield row, f"{name} is {has}, and its records make {must}"


def _can_compare(sql: str, held: Any, made: Any) -> bool:
    """Text stands for what a sink has in another form; the mean of decimals has digits of Spark's own."""
    call = call_of(sql)
    if call is not None and call.function == "avg" and not isinstance(made, float):
        return False
    return not isinstance(held, str) or isinstance(made, str)
