"""Aggregates of windows made again without Spark, where their SQL is one function of one column.

    count(*)  count(1)  count(x)  count(DISTINCT x)  sum(x)  min(x)  max(x)  avg(x)

`x` is a column of the rows. Whatever else an aggregate says is Spark's to evaluate. Numbers with a fraction are added
in another order here than there, so they are compared to nine digits; all others exactly.

The aggregates of windows, made again where their SQL is a plain function of a column of the source.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.audit.stateful.rows import Numbers
from holdfast.audit.stateful.turns import Measure
from holdfast.audit.stateful.windows import Windows, assign, found_at
from holdfast.pipeline.definition.model import Window

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


# ---------------------------------------------------------------------------- window values


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
