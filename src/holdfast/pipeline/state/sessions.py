"""Sessions: intervals of one key that touch, made one.

The state holds pieces of sessions, each a partial result (or a row) with the interval it covers. Pieces that touch are
one session; which ones do is found anew from all pieces alive, since a piece in between may come at any time.

A piece is forgotten when its own interval is over, unless its session goes on: then it is *carried*, written again with
the time at which the session as known now will be over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.state.segments import UNTIL
from holdfast.pipeline.state.spans import END, START

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SESSION: Final = "_session"
"""The number of the session of a key that a piece belongs to, where it stands among others."""
EARLIER: Final = "_earlier"
NO_SESSION: Final = "CAST(NULL AS STRUCT<s: BIGINT, e: BIGINT>)"


def numbered_sessions(pieces: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Pieces with the number of their session; 0 for those without a start. `keys` are quoted names."""
    return _numbered(pieces, keys, f"{START} IS NOT NULL", SESSION)


def earlier_sessions(pieces: DataFrame, keys: Sequence[str], is_earlier: str, was_given: str) -> DataFrame:
    """Pieces with `EARLIER`: the session an earlier piece was in, by earlier ones alone, if it was given out.

    `is_earlier` is SQL over pieces; `was_given` over `_u`, the time at which that session would have been forgotten.
    """
    numbered = _numbered(pieces, keys, is_earlier, "_before")
    over = f"OVER (PARTITION BY {', '.join([*keys, '_before'])})"
    times = [
        f"{function}(CASE WHEN {is_earlier} THEN {column} END) {over} AS {name}"
        for function, column, name in (("min", START, "_s"), ("max", END, "_e"), ("max", UNTIL, "_u"))
    ]
    session = f"CASE WHEN {is_earlier} AND {was_given} THEN named_struct('s', _s, 'e', _e) END AS {EARLIER}"
    known = [quoted(name) for name in pieces.columns]
    return numbered.selectExpr("*", *times).selectExpr(*known, session)


def _numbered(pieces: DataFrame, keys: Sequence[str], counts: str, name: str) -> DataFrame:
    """A piece begins a session when it starts after everything before it has ended, of those that count."""
    by = f"PARTITION BY {', '.join(keys)} " if keys else ""
    over = f"{by}ORDER BY {START} NULLS FIRST, {END}"
    reach = f"max(CASE WHEN {counts} THEN {END} END) OVER ({over} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    begins = f"CASE WHEN {counts} AND (_reach IS NULL OR {START} > _reach) THEN 1L ELSE 0L END"
    number = f"sum({begins}) OVER ({over} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    return pieces.selectExpr("*", f"{reach} AS _reach").selectExpr("*", f"{number} AS {name}").drop("_reach")
