"""The state of windows: what a batch adds to it, and how segments become one.

A row of the state, a *piece*: the key's columns, `_start` (and a session's `_end`, or the `_last` start of the sliding
windows it belongs to), `_until`, of the rows in it their number `_n`
and both halves of their digest, `_low` and `_high`, and partial results. In general mode it is a row as it came: the
columns that aggregates name, and `_order`, by which rows are first and last.

Late rows are counted in the job that aggregates the others: they have no window and are written apart. `taken` and
`late` are what the job wrote, not what it was believed to write.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.digest import Tally, hash_sql, join_halves
from holdfast.pipeline.state.aggregates import DIGEST, ORDER, Aggregation, state_schema
from holdfast.pipeline.state.merging import (
    FILE_BYTES,
    merged_tier,
    segments_to_merge,
    with_merged,
    write_segment,
)
from holdfast.pipeline.state.segments import UNTIL, Segment, alive
from holdfast.pipeline.state.sessions import SESSION, numbered_sessions
from holdfast.pipeline.state.spans import END, START, Spans

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.operator import OperatorContext

IS_LATE: Final = "_late"
HASH: Final = "_hash"
IN_ORDER: Final = "_order"
ROWS_FOR_ONE_TASK: Final = 50_000
"""Fewer rows than this are merged in one task: nothing is shuffled."""
HALF: Final = "4294967295L"
OF_ROWS: Final = (
    "count(1) AS _n",
    f"sum({HASH} & {HALF}) AS _low",
    f"sum(shiftrightunsigned({HASH}, 32)) AS _high",
)
OF_PIECES: Final = ("sum(_n) AS _n", "sum(_low) AS _low", "sum(_high) AS _high")
SETTLED: Final = (
    "_n",
    f"_low & {HALF} AS _low",
    f"(_high + shiftrightunsigned(_low, 32)) & {HALF} AS _high",
)
"""Sums of halves brought below 2**32 again, so that no number of batches makes them overflow."""


@dataclass(frozen=True)
class Layout:
    """How the windows of a step are kept."""

    step: str
    keys: tuple[str, ...]
    """Quoted."""
    spans: Spans
    aggregation: Aggregation
    schema: StructType
    """Of the state."""

    @property
    def parts(self) -> list[str]:
        return list(self.aggregation.parts)


@dataclass(frozen=True)
class Added:
    """What a batch's own rows came to."""

    segment: Segment | None
    taken: Tally
    late: Tally


def layout_of(
    step: str, keys: Sequence[str], spans: Spans, aggregation: Aggregation, empty: DataFrame
) -> Layout:
    """`empty` has the columns of the rows."""
    schema = state_schema(aggregation, keys, empty.schema, (*spans.times, UNTIL))
    if aggregation.is_general:
        schema = schema.add(empty.selectExpr(f"named_struct({ORDER}) AS {IN_ORDER}").schema[IN_ORDER])
    return Layout(step, tuple(map(quoted, keys)), spans, aggregation, schema)


def expressions(*texts: str) -> list[Column]:
    from pyspark.sql import functions as f

    return [f.expr(text) for text in texts]


def steady(value: int, column: str) -> str:
    """A number that is another one in each turn, as SQL that is not compiled anew for each.

    Spark writes numbers into the code it generates, and compiling that again costs more than running it; an array it
    hands over. `column` is any bigint of the row: without one the whole would be computed beforehand.
    """
    return f"get(array({value}L), CAST(pmod({column}, 1L) AS INT))"


# ---------------------------------------------------------------------------- what a batch adds


def add(layout: Layout, rows: DataFrame, context: OperatorContext) -> Added:
    """Aggregate these rows into a segment of their own."""
    marked = layout.spans.assigned(rows).selectExpr("*", f"{hash_sql()} AS {HASH}")
    if layout.aggregation.is_general:
        taken, late = _counted(layout, rows)
        if not taken.rows:
            return Added(None, taken, late)
        pieces = _raw(layout, marked.where(f"{START} IS NOT NULL"))
        return Added(write_segment(context, layout.step, pieces), taken, late)
    return _written_apart(layout, _aggregated(layout, marked), context)


def _aggregated(layout: Layout, marked: DataFrame) -> DataFrame:
    """Partial results by key and window; those of late rows have no start, and no results."""
    sums = expressions(*OF_ROWS, *layout.aggregation.partials())
    if layout.spans.is_session:
        pieces = numbered_sessions(marked, layout.keys).groupBy(*layout.keys, SESSION)
        found = pieces.agg(*expressions(f"min({START}) AS {START}", f"max({END}) AS {END}"), *sums)
    else:
        found = marked.groupBy(*layout.keys, *layout.spans.times).agg(*sums)
    until = f"{layout.spans.until} AS {UNTIL}"
    return found.selectExpr(*layout.keys, *layout.spans.times, until, *SETTLED, *layout.parts)


def _raw(layout: Layout, kept: DataFrame) -> DataFrame:
    until = f"{layout.spans.until} AS {UNTIL}"
    sums = ("1L AS _n", f"{HASH} & {HALF} AS _low", f"shiftrightunsigned({HASH}, 32) AS _high")
    names = [quoted(name) for name in layout.aggregation.raw]
    order = f"named_struct({ORDER}) AS {IN_ORDER}"
    return kept.selectExpr(*layout.keys, *layout.spans.times, until, *sums, *names, order)


def _written_apart(layout: Layout, pieces: DataFrame, context: OperatorContext) -> Added:
    """Write what was taken as a segment, and count what was late from what is written beside it."""
    aside = context.store.segment_dir(context.label, f"{layout.step}-aside")
    marked = pieces.selectExpr("*", f"{START} IS NULL AS {IS_LATE}")
    marked.write.option("compression", "lz4_raw").partitionBy(IS_LATE).parquet(aside)
    segment, taken = None, Tally()
    if os.path.isdir(found := os.path.join(aside, f"{IS_LATE}=false")):
        directory = context.store.segment_dir(context.label, layout.step)
        os.rename(found, directory)
        taken = _tally(directory)
        segment = context.store.adopt(directory)
    return Added(segment, taken, _tally(os.path.join(aside, f"{IS_LATE}=true")))


def _tally(directory: str) -> Tally:
    """Of the rows that partial results in these files are of."""
    import numpy as np
    import pyarrow.parquet as pq

    total = Tally()
    for entry in os.scandir(directory) if os.path.isdir(directory) else ():
        if entry.name.endswith(".parquet") and not entry.name.startswith((".", "_")):
            table = pq.ParquetFile(entry.path).read(columns=["_n", *DIGEST])
            count, low, high = (int(np.sum(column.to_numpy())) for column in table.columns)
            total += Tally(count, join_halves(low, high))
    return total


def _counted(layout: Layout, rows: DataFrame) -> tuple[Tally, Tally]:
    """Taken and late, in a job of its own."""
    marked = rows.selectExpr(f"{layout.spans.is_late} AS {IS_LATE}", f"{hash_sql()} AS {HASH}")
    found = {False: Tally(), True: Tally()}
    for row in marked.groupBy(IS_LATE).agg(*expressions(*OF_ROWS)).collect():
        found[row[IS_LATE]] = Tally(row["_n"], join_halves(row["_low"], row["_high"]))
    return found[False], found[True]


# ---------------------------------------------------------------------------- segments made one


def merged_pieces(layout: Layout, pieces: DataFrame) -> DataFrame:
    """Pieces of the same window made one. Sessions: pieces carry the number of theirs."""
    sums = expressions(f"max({UNTIL}) AS {UNTIL}", *OF_PIECES, *layout.aggregation.merges())
    if layout.spans.is_session:
        times = expressions(f"min({START}) AS {START}", f"max({END}) AS {END}")
        found = pieces.groupBy(*layout.keys, SESSION).agg(*times, *sums)
    else:
        found = pieces.groupBy(*layout.keys, *layout.spans.times).agg(*sums)
    return found.selectExpr(*layout.keys, *layout.spans.times, UNTIL, *SETTLED, *layout.parts)


def settled(
    layout: Layout, context: OperatorContext, segments: Sequence[Segment]
) -> tuple[tuple[Segment, ...], int]:
    """The segments without what is over, those that are due made one; and how many rows went as over."""
    dead_to_ms = context.next_watermark_ms
    living = alive(segments, dead_to_ms)
    expired = sum(segment.rows for segment in segments) - sum(segment.rows for segment in living)
    merging = segments_to_merge(living)
    if merging is None:
        return living, expired
    result: Segment | None = None
    pieces = context.store.frame(context.spark, merging, layout.schema, until_above=dead_to_ms)
    if pieces is not None:
        count = sum(segment.rows for segment in merging)
        if count <= ROWS_FOR_ONE_TASK:
            pieces = pieces.coalesce(1)
        if not layout.aggregation.is_general:
            if layout.spans.is_session:
                pieces = numbered_sessions(pieces, layout.keys)
            pieces = merged_pieces(layout, pieces)
        elif count > ROWS_FOR_ONE_TASK:
            pieces = pieces.coalesce(1 + sum(segment.bytes for segment in merging) // FILE_BYTES)
        result = write_segment(context, layout.step, pieces, merged_tier(merging))
    return with_merged(living, merging, result), expired
