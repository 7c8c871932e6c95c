"""Sessions: intervals of one key that touch, made one.

The state holds pieces of sessions, each a partial result (or a row) with the interval it covers. Pieces that touch are
one session; which ones do is found anew from all pieces alive, since a piece in between may come at any time.

A piece is forgotten when its own interval is over, unless its session goes on: then it is *carried*, written again with
the time at which the session as known now will be over.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.state.spans import END, START

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SESSION: Final = "_session"
"""The number of the session of a key that a piece belongs to, where it stands among others."""


def numbered_sessions(pieces: DataFrame, keys: Sequence[str]) -> DataFrame:
    """Pieces with the number of their session; 0 for those without a start. `keys` are quoted names.

    A piece begins a session when it starts after everything before it has ended.
    """
    by = f"PARTITION BY {', '.join(keys)} " if keys else ""
    over = f"{by}ORDER BY {START} NULLS FIRST, {END}"
    reach = f"max({END}) OVER ({over} ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING)"
    reached = pieces.selectExpr("*", f"{reach} AS _reach")
    begins = f"CASE WHEN {START} IS NOT NULL AND (_reach IS NULL OR {START} > _reach) THEN 1L ELSE 0L END"
    number = f"sum({begins}) OVER ({over} ROWS BETWEEN UNBOUNDED PRECEDING AND CURRENT ROW)"
    return reached.selectExpr("*", f"{number} AS {SESSION}").drop("_reach")
