"""Aggregates of windows made again without Spark, where their SQL is one function of one column.

    count(*)  count(1)  count(x)  count(DISTINCT x)  sum(x)  min(x)  max(x)  avg(x)

`x` is a column of the rows. Whatever else an aggregate says is Spark's to evaluate. Numbers with a fraction are added
in another order here than there, so they are compared to nine digits; all others exactly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

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
    aggregates: Mapping[str, str], rows: pa.Table, groups: npt.NDArray[np.int64], count: int
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


def _grouped(call: Call, rows: pa.Table, groups: npt.NDArray[np.int64], count: int) -> list[Any] | None:
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
    listed = made.column(f"it_{function}").to_pylist()
    for group, value in zip(made.column(_GROUP).to_pylist(), listed, strict=True):
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


def different(held: Sequence[Any], made: Sequence[Any]) -> list[int]:
    """The numbers of those that are not the same."""
    return [at for at, pair in enumerate(zip(held, made, strict=True)) if not same_value(*pair)]
