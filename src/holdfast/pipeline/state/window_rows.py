"""The rows that windows give out: their columns, and their places.

A row has the key's columns, `window_start` and `window_end`, the aggregates, and `_hf_count` and `_hf_digest`, by which
an audit tells which records are in it. Its lineage is the step's name and the number of the turn; within the turn, rows
are numbered by key and start. Many rows are numbered in `BUCKETS` sequences side by side, a key always in the same one,
so that many tasks can do it. Either way a turn repeated gives each row the same number, and windows of one key have
theirs in the order of their starts.

Its key, as a record's, is a JSON object of the key's columns and `window_start`: in a compacted topic every window is a
record of its own.

A session that was given out and has become part of another one is taken back: a row with `_tombstone`, its key, start
and end, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import HEADERS_DDL, of_step, quoted
from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.sinks.columns import JSON_OPTIONS
from holdfast.pipeline.state.window_state import steady

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

BUCKET: Final = "_bucket"
BUCKETS: Final = 64
WINDOW_START: Final = "window_start"
WINDOW_END: Final = "window_end"
GONE: Final = "_gone"
"""Of a session: what was given out, and is no more."""


def check_names(step: Window, rows: StructType) -> None:
    """`StepError` for keys that are not there, and for columns that would have one name."""
    for key in step.key:
        if key not in rows.names:
            having = ", ".join(name for name in rows.names if not name.startswith("_"))
            raise StepError(step.name, f"there is no column {key!r} for its key; the rows have {having}")
    if not step.aggregates:
        raise StepError(
            step.name, "it has no aggregates: name a column and its SQL, such as `total: sum(amount)`"
        )
    seen: set[str] = set()
    for name in (*step.key, WINDOW_START, WINDOW_END, *step.aggregates):
        if name.startswith("_"):
            raise StepError(step.name, f"{name!r}: names with an underscore before are ours")
        if name.lower() in seen:
            raise StepError(step.name, f"two of its columns would be named {name!r}; give one another name")
        seen.add(name.lower())


def bucket(keys: Sequence[str], *, is_small: bool) -> str:
    """Of a key, as SQL; `keys` are quoted names."""
    number = "0" if is_small or not keys else f"CAST(pmod(xxhash64({', '.join(keys)}), {BUCKETS}L) AS INT)"
    return f"{number} AS {BUCKET}"


def tap_rows(step: Window, windows: DataFrame, number: int, *, is_small: bool) -> DataFrame:
    """Windows as rows for sinks; given: `_bucket`, the key, `_begin`, `_finish`, `_is_gone`, `_n`, `_low`, `_high` and
    the aggregates."""
    keys = [quoted(key) for key in step.key]
    order = ", ".join([*keys, "_begin"])
    place = f"row_number() OVER (PARTITION BY {BUCKET} ORDER BY {order})"
    index = f"CAST(({place} - 1) * {1 if is_small else BUCKETS} + {BUCKET} AS INT)"
    lineage = of_step(step.name, steady(number, "_begin"), index)
    # Sums of halves: what the lower one has above 32 bits goes to the upper.
    digest = "shiftleft(_high + shiftrightunsigned(_low, 32), 32) | (_low & 4294967295L)"
    start = f"timestamp_millis(_begin) AS {WINDOW_START}"
    options = ", ".join(f'"{name}", "{value}"' for name, value in JSON_OPTIONS.items())
    json = f"to_json(struct({', '.join([*keys, start])}), map({options}))"
    return windows.selectExpr(
        lineage,
        f"CAST({json} AS BINARY) AS _key",
        "timestamp_millis(_finish) AS _timestamp",
        "_is_gone AS _tombstone",
        f"CAST(array() AS {HEADERS_DDL}) AS _headers",
        *keys,
        start,
        f"timestamp_millis(_finish) AS {WINDOW_END}",
        *(f"CASE WHEN NOT _is_gone THEN {quoted(name)} END AS {quoted(name)}" for name in step.aggregates),
        "CASE WHEN _is_gone THEN 0L ELSE _n END AS _hf_count",
        f"CASE WHEN _is_gone THEN 0L ELSE {digest} END AS _hf_digest",
    )


def written_down(
    spark: SparkSession, rows: DataFrame, directory: str, schema: StructType
) -> tuple[DataFrame, int]:
    """The rows as they are read from files, and how many they are."""
    import pyarrow.parquet as pq

    rows.write.mode("overwrite").option("compression", "none").parquet(directory)
    count = sum(
        pq.read_metadata(entry.path).num_rows
        for entry in os.scandir(directory)
        if entry.name.endswith(".parquet") and not entry.name.startswith((".", "_"))
    )
    if not count:
        return spark.createDataFrame([], schema), 0
    return spark.read.schema(schema).parquet(directory), count
