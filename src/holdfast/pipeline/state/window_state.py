"""Windows of event time as SQL: which ones a row belongs to, when they close, and which rows are too late for them.

Times are milliseconds since the epoch, as Kafka's are; what an event time has below a millisecond plays no part. A
window of `size` starts at a multiple of `size` (sliding: of `every`). A session is what rows make together: each
reaches from its time to `gap` later, and those that touch are one.

- A row is late for a window that ends at or before the row's own watermark (`_hf.watermark`), and late altogether when
  that goes for every window it belongs to. A row without event time is late.
- Windows close when the pipeline's watermark reaches their end. Sessions wait `gap` longer: a row that is not late, for
  its own reach is not over, could still touch one that ended less than that before.
- With `late: correct` a window is remembered for `correct_within` more, and a row is late only after that.

So nothing that is not late can belong to something that is forgotten, however the rows are cut into batches.

Sessions: intervals of one key that touch, made one.

The state holds pieces of sessions, each a partial result (or a row) with the interval it covers. Pieces that touch are
one session; which ones do is found anew from all pieces alive, since a piece in between may come at any time.

A piece is forgotten when its own interval is over, unless its session goes on: then it is *carried*, written again with
the time at which the session as known now will be over.

The state of windows: what a batch adds to it, and how segments become one.

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
from functools import partial
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import Tally, hash_sql, join_halves, tally_of, tally_sql
from holdfast.pipeline.state.aggregates import DIGEST, ORDER, Aggregation, state_schema
from holdfast.pipeline.state.segments import UNTIL, Segment, alive, files_for, merged, write_segment

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.operator import OperatorContext


EVENT_MS: Final = "unix_millis(_hf.event_time)"
WATERMARK_MS: Final = "unix_millis(_hf.watermark)"
START: Final = "_start"
END: Final = "_end"
"""Of a session; other windows end where their size says."""
LAST: Final = "_last"
"""The start of the last of the sliding windows that a row belongs to; `_start` is that of the first."""


@dataclass(frozen=True)
class Spans:
    """The windows of one step."""

    kind: str
    size_ms: int
    """Session: the gap."""
    every_ms: int
    hold_ms: int
    """How long a window is remembered after it closed, to be corrected."""

    @property
    def is_session(self) -> bool:
        return self.kind == "session"

    @property
    def wait_ms(self) -> int:
        """From a window's end until it closes."""
        return self.size_ms if self.is_session else 0

    @property
    def is_sliding(self) -> bool:
        return self.kind == "sliding"

    @property
    def spread_ms(self) -> int:
        """How much earlier than a row of the state the first window it belongs to may be over."""
        return self.size_ms if self.is_sliding else 0

    @property
    def times(self) -> tuple[str, ...]:
        """The columns of a window's time in the state."""
        return (START, END) if self.is_session else (START, LAST) if self.is_sliding else (START,)

    @property
    def end(self) -> str:
        """When a window ends, as SQL."""
        return END if self.is_session else f"{START} + {self.size_ms}L"

    @property
    def until(self) -> str:
        """When a row of the state is over, as SQL: its window, or the last of them, is forgotten."""
        end = f"{LAST} + {self.size_ms}L" if self.is_sliding else self.end
        return f"{end} + {self.wait_ms + self.hold_ms}L"

    @property
    def latest_start(self) -> str:
        """Of the windows a row belongs to, as SQL over rows."""
        return EVENT_MS if self.is_session else f"{EVENT_MS} - pmod({EVENT_MS}, {self.every_ms}L)"

    @property
    def is_late(self) -> str:
        """Whether a row is late for every window it belongs to, as SQL over rows."""
        over = f"{self.latest_start} + {self.size_ms + self.hold_ms}L <= {WATERMARK_MS}"
        return f"coalesce({over}, _hf.event_time IS NULL)"

    def assigned(self, rows: DataFrame) -> DataFrame:
        """Rows with the times of their window, or of their first and last; a late row has null."""
        if not self.is_sliding:
            marked = rows.selectExpr(
                "*", f"CASE WHEN NOT {self.is_late} THEN {self.latest_start} END AS {START}"
            )
            return (
                marked.selectExpr("*", f"{START} + {self.size_ms}L AS {END}") if self.is_session else marked
            )
        holding = f"{EVENT_MS} - {self.size_ms - 1}L"
        in_time = f"{WATERMARK_MS} - {self.size_ms + self.hold_ms - 1}L"
        # `greatest` passes over null: without a watermark nothing is late.
        first = f"greatest({self._at_or_after(holding)}, {self._at_or_after(in_time)})"
        return rows.selectExpr(
            "*",
            f"CASE WHEN NOT {self.is_late} THEN {first} END AS {START}",
            f"CASE WHEN NOT {self.is_late} THEN {self.latest_start} END AS {LAST}",
        )

    def _at_or_after(self, time: str) -> str:
        """The first start of a window that is not before this time."""
        return f"({time}) + pmod(-({time}), {self.every_ms}L)"

    def spread(self, pieces: DataFrame) -> DataFrame:
        """Rows of the state, one for each window they belong to."""
        if not self.is_sliding:
            return pieces
        others = [quoted(name) for name in pieces.columns if name not in (START, LAST, UNTIL)]
        each = pieces.selectExpr(*others, f"explode(sequence({START}, {LAST}, {self.every_ms}L)) AS {START}")
        return each.selectExpr("*", f"{self.end} + {self.hold_ms}L AS {UNTIL}")


def spans_of(step: Window) -> Spans:
    hold_ms = parse_duration_ms(step.correct_within) if step.late == "correct" else 0
    size = step.gap if step.kind == "session" else step.size
    if size is None:
        raise StepError(
            step.name, f"a {step.kind} window needs `{'gap' if step.kind == 'session' else 'size'}`"
        )
    size_ms = parse_duration_ms(size)
    every_ms = size_ms
    if step.kind == "sliding":
        if step.every is None:
            raise StepError(step.name, "a sliding window needs `every`")
        every_ms = parse_duration_ms(step.every)
    if every_ms <= 0 or size_ms < every_ms:
        raise StepError(step.name, "a window is longer than nothing, and `every` is at most its `size`")
    return Spans(step.kind, size_ms, every_ms, hold_ms)


# ---------------------------------------------------------------------------- sessions


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


# ---------------------------------------------------------------------------- the state


IS_LATE: Final = "_late"
HASH: Final = "_hash"
IN_ORDER: Final = "_order"
ROWS_FOR_ONE_TASK: Final = 50_000
"""Fewer rows than this are merged in one task: nothing is shuffled."""
HALF: Final = "4294967295L"
OF_ROWS: Final = tally_sql(HASH, prefix="_")
OF_PIECES: Final = ("sum(_n) AS _n", "sum(_low) AS _low", "sum(_high) AS _high")
SETTLED: Final = (
    "_n",
    f"_low & {HALF} AS _low",
    f"(_high + shiftrightunsigned(_low, 32)) & {HALF} AS _high",
)
"""Sums of halves brought below 2**32 again, so that no number of batches makes them overflow."""


@dataclass(frozen=True)
class WindowLayout:
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
) -> WindowLayout:
    """`empty` has the columns of the rows."""
    schema = state_schema(aggregation, keys, empty.schema, (*spans.times, UNTIL))
    if aggregation.is_general:
        schema = schema.add(empty.selectExpr(f"named_struct({ORDER}) AS {IN_ORDER}").schema[IN_ORDER])
    return WindowLayout(step, tuple(map(quoted, keys)), spans, aggregation, schema)


def expressions(*texts: str) -> list[Column]:
    from pyspark.sql import functions as f

    return [f.expr(text) for text in texts]


def steady(value: int, column: str) -> str:
    """A number that is another one in each batch, as SQL that is not compiled anew for each.

    Spark writes numbers into the code it generates, and compiling that again costs more than running it; an array it
    hands over. `column` is any bigint of the row: without one the whole would be computed beforehand.
    """
    return f"get(array({value}L), CAST(pmod({column}, 1L) AS INT))"


# ---------------------------------------------------------------------------- what a batch adds


def add(layout: WindowLayout, rows: DataFrame, context: OperatorContext) -> Added:
    """Aggregate these rows into a segment of their own."""
    marked = layout.spans.assigned(rows).selectExpr("*", f"{hash_sql()} AS {HASH}")
    if layout.aggregation.is_general:
        taken, late = _counted(layout, rows)
        if not taken.rows:
            return Added(None, taken, late)
        pieces = _raw(layout, marked.where(f"{START} IS NOT NULL"))
        return Added(write_segment(context, layout.step, pieces), taken, late)
    return _written_apart(layout, _aggregated(layout, marked), context)


def _aggregated(layout: WindowLayout, marked: DataFrame) -> DataFrame:
    """Partial results by key and window; those of late rows have no start, and no results."""
    sums = expressions(*OF_ROWS, *layout.aggregation.partials())
    if layout.spans.is_session:
        pieces = numbered_sessions(marked, layout.keys).groupBy(*layout.keys, SESSION)
        found = pieces.agg(*expressions(f"min({START}) AS {START}", f"max({END}) AS {END}"), *sums)
    else:
        found = marked.groupBy(*layout.keys, *layout.spans.times).agg(*sums)
    until = f"{layout.spans.until} AS {UNTIL}"
    return found.selectExpr(*layout.keys, *layout.spans.times, until, *SETTLED, *layout.parts)


def _raw(layout: WindowLayout, kept: DataFrame) -> DataFrame:
    until = f"{layout.spans.until} AS {UNTIL}"
    sums = ("1L AS _n", f"{HASH} & {HALF} AS _low", f"shiftrightunsigned({HASH}, 32) AS _high")
    names = [quoted(name) for name in layout.aggregation.raw]
    order = f"named_struct({ORDER}) AS {IN_ORDER}"
    return kept.selectExpr(*layout.keys, *layout.spans.times, until, *sums, *names, order)


def _written_apart(layout: WindowLayout, pieces: DataFrame, context: OperatorContext) -> Added:
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


def _counted(layout: WindowLayout, rows: DataFrame) -> tuple[Tally, Tally]:
    """Taken and late, in a job of its own."""
    marked = rows.selectExpr(f"{layout.spans.is_late} AS {IS_LATE}", f"{hash_sql()} AS {HASH}")
    found = {False: Tally(), True: Tally()}
    for row in marked.groupBy(IS_LATE).agg(*expressions(*OF_ROWS)).collect():
        found[row[IS_LATE]] = tally_of(row, prefix="_")
    return found[False], found[True]


# ---------------------------------------------------------------------------- segments made one


def merged_pieces(layout: WindowLayout, pieces: DataFrame) -> DataFrame:
    """Pieces of the same window made one. Sessions: pieces carry the number of theirs."""
    sums = expressions(f"max({UNTIL}) AS {UNTIL}", *OF_PIECES, *layout.aggregation.merges())
    if layout.spans.is_session:
        times = expressions(f"min({START}) AS {START}", f"max({END}) AS {END}")
        found = pieces.groupBy(*layout.keys, SESSION).agg(*times, *sums)
    else:
        found = pieces.groupBy(*layout.keys, *layout.spans.times).agg(*sums)
    return found.selectExpr(*layout.keys, *layout.spans.times, UNTIL, *SETTLED, *layout.parts)


def settled(
    layout: WindowLayout, context: OperatorContext, segments: Sequence[Segment]
) -> tuple[tuple[Segment, ...], int]:
    """The segments without what is over, those that are due made one; and how many rows went as over."""
    living = alive(segments, context.next_watermark_ms)
    expired = sum(segment.rows for segment in segments) - sum(segment.rows for segment in living)
    return merged(context, layout.step, layout.schema, living, partial(_made_one, layout)), expired


def _made_one(layout: WindowLayout, pieces: DataFrame, segments: Sequence[Segment]) -> DataFrame:
    is_small = sum(segment.rows for segment in segments) <= ROWS_FOR_ONE_TASK
    pieces = pieces.coalesce(1) if is_small else pieces
    if layout.aggregation.is_general:
        return pieces if is_small else pieces.coalesce(files_for(segments))
    if layout.spans.is_session:
        pieces = numbered_sessions(pieces, layout.keys)
    return merged_pieces(layout, pieces)
