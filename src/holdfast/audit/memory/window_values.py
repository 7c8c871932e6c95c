"""The aggregates of windows, made again where their SQL is a plain function of a column of the source."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.audit.aggregates import call_of, columns_needed, recompute, same_value
from holdfast.audit.memory.held import Held, compare, joint_ids
from holdfast.audit.memory.keys import Codes
from holdfast.audit.memory.rows import Numbers
from holdfast.audit.memory.windows import Parts, Windows
from holdfast.pipeline.definition.model import Window


def differing_values(
    step: Window,
    plain: Mapping[str, pa.ChunkedArray],
    windows: Windows,
    parts: Parts,
    held: Held,
    keys: Codes,
    turns: Numbers | None,
) -> Iterator[tuple[int, str]]:
    """Held rows, by number, whose aggregates are not those of the rows in their window; and what differs.

    `windows` are the last states of windows: what a row said before it was replaced is not made again.
    """
    if len(windows) == 0 or len(held) == 0:
        return
    ids, of_windows, count = joint_ids([(parts.keys, windows.keys), (parts.starts, windows.starts)])
    at_window = np.full(count, -1, np.int64)
    at_window[of_windows] = np.arange(len(windows))
    group = at_window[ids]
    chosen = group >= 0
    rows = parts.rows[chosen]
    columns = {
        name: plain[name].take(pa.array(rows)) for name in columns_needed(step.aggregates) if name in plain
    }
    table = pa.table(columns) if columns else pa.table({"_": np.zeros(len(rows), np.int8)})
    made = recompute(step.aggregates, table, group[chosen], len(windows))
    found = compare(windows, held, keys, turns)
    for name, values in made.items():
        if values is None or name not in held.table.column_names:
            continue
        theirs = held.table.column(name)
        for row, at in zip(found.matched.tolist(), found.matched_of.tolist(), strict=True):
            has, must = theirs[row].as_py(), values[at]
            if _can_compare(step.aggregates[name], has, must) and not same_value(has, must):
                yield row, f"{name} is {has}, and the records of the window make {must}"


def _can_compare(sql: str, held: Any, made: Any) -> bool:
    """Text stands for what a sink has in another form; the mean of decimals has digits of Spark's own."""
    call = call_of(sql)
    if call is not None and call.function == "avg" and not isinstance(made, float):
        return False
    return not isinstance(held, str) or isinstance(made, str)
