"""The aggregates of windows, made again where their SQL is a plain function of a column of the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

import numpy as np
import pyarrow as pa

from holdfast.audit.aggregates import call_of, columns_needed, recompute, same_value
from holdfast.audit.memory.held import Held, compare, joint_ids
from holdfast.audit.memory.keys import Codes
from holdfast.audit.memory.lateness import Measure
from holdfast.audit.memory.rows import Numbers, Times
from holdfast.audit.memory.windows import Parts, Windows, assign
from holdfast.pipeline.definition.model import Window

ROWS_AT_ONCE: Final = 2_000_000
"""Rows in windows, each counted in all it belongs to: some 100 MB. More are made key by key."""


def differing_values(
    step: Window,
    measure: Measure,
    plain: Mapping[str, pa.ChunkedArray],
    windows: Windows,
    parts: Parts,
    firsts: Times,
    held: Held,
    keys: Codes,
    turns: Numbers | None,
) -> Iterator[tuple[int, str]]:
    """Held rows, by number, whose aggregates are not those of the rows in their window; and what differs.

    `windows` are the last states of windows: what a row said before it was replaced is not made again.
    """
    calls = [call_of(text) for text in step.aggregates.values()]
    if len(windows) == 0 or len(held) == 0 or not any(calls):
        return
    found = compare(windows, held, keys, turns)
    row_of = np.full(len(windows), -1, np.int64)
    row_of[found.matched_of] = found.matched
    names = [name for name in columns_needed(step.aggregates) if name in plain]
    total = int(((parts.starts - firsts) // measure.every_ms + 1).sum())
    chunks = 1 + total // ROWS_AT_ONCE
    for number in range(chunks):
        ours = np.flatnonzero(parts.keys % chunks == number) if chunks > 1 else np.arange(len(parts.keys))
        theirs = np.flatnonzero((windows.keys % chunks == number) & (row_of >= 0))
        if len(ours) == 0 or len(theirs) == 0:
            continue
        which, starts = assign(measure, firsts[ours], parts.starts[ours])
        rows, group = _grouped(windows.where(theirs), parts.keys[ours][which], starts)
        chosen = parts.rows[ours][which][rows]
        columns = {name: plain[name].take(pa.array(chosen)) for name in names}
        table = pa.table(columns) if columns else pa.table({"_": np.zeros(len(chosen), np.int8)})
        made = recompute(step.aggregates, table, group, len(theirs))
        yield from _differing(step, made, held, row_of[theirs])


def _grouped(windows: Windows, keys: Codes, starts: Times) -> tuple[Numbers, Numbers]:
    """Of rows in windows those that are in one of these, and the number of it."""
    ids, of_windows, count = joint_ids([(keys, windows.keys), (starts, windows.starts)])
    at_window = np.full(count, -1, np.int64)
    at_window[of_windows] = np.arange(len(windows))
    group = at_window[ids]
    chosen = np.flatnonzero(group >= 0)
    return chosen, group[chosen]


def _differing(
    step: Window, made: Mapping[str, list[Any] | None], held: Held, rows: Numbers
) -> Iterator[tuple[int, str]]:
    for name, values in made.items():
        if values is None or name not in held.table.column_names:
            continue
        theirs = held.table.column(name).take(pa.array(rows)).to_pylist()
        for at, (has, must) in enumerate(zip(theirs, values, strict=True)):
            if _can_compare(step.aggregates[name], has, must) and not same_value(has, must):
                yield int(rows[at]), f"{name} is {has}, and its records make {must}"


def _can_compare(sql: str, held: Any, made: Any) -> bool:
    """Text stands for what a sink has in another form; the mean of decimals has digits of Spark's own."""
    call = call_of(sql)
    if call is not None and call.function == "avg" and not isinstance(made, float):
        return False
    return not isinstance(held, str) or isinstance(made, str)
