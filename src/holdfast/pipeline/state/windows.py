"""Windows: aggregates of rows by key and event time, with partial results as state.

A batch aggregates its own rows by key and window and adds them as one segment; it reads nothing for that, and when no
window closes it is the only job. What all batches gave the windows that close in this one is then merged: only segments
that hold something of them are read. A window that has closed is dead by its `_until` alone; nothing is deleted.

What is given out: windows that close, once each; with `late: correct` also those that a late row reopened, whole; with
`emit: changes` every window that the batch touched, as it stands. A batch repeated from the same state gives the same
rows in the same places.

The rows that windows give out: their columns, and their places.

A row has the key's columns, `window_start` and `window_end`, the aggregates, and `_hf_count` and `_hf_digest`, by which
an audit tells which records are in it. Its lineage is the step's name and the number of the batch; within it, rows
are numbered by key and start. Many rows are numbered in `BUCKETS` sequences side by side, a key always in the same one,
so that many tasks can do it. Either way a repeated batch gives each row the same number, and windows of one key have
theirs in the order of their starts.

Its key, as a record's, is a JSON object of the key's columns and `window_start`: in a compacted topic every window is a
record of its own.

A session that was given out and has become part of another one is taken back: a row with `_tombstone`, its key, start
and end, and nothing else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.sql import HEADERS_DDL, of_step, quoted
from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.digest import Tally
from holdfast.pipeline.sinks.columns import JSON_OPTIONS
from holdfast.pipeline.state.aggregates import compile_aggregates
from holdfast.pipeline.state.operator import LATE, OperatorContext, OperatorResult
from holdfast.pipeline.state.segments import UNTIL, Segment, write_segment
from holdfast.pipeline.state.window_state import (
    EARLIER,
    END,
    IN_ORDER,
    NO_SESSION,
    OF_PIECES,
    ROWS_FOR_ONE_TASK,
    SESSION,
    START,
    Added,
    WindowLayout,
    add,
    earlier_sessions,
    expressions,
    layout_of,
    merged_pieces,
    numbered_sessions,
    settled,
    spans_of,
    steady,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType


NEW: Final = "_new"
"""In rows of state: they are of this batch."""
ROWS_TO_LOOK_UP: Final = 10_000
"""A batch that touched fewer windows than this looks only for those in a large state."""
LATE_WINDOWS_KEPT: Final = 100
"""For so many windows, the latest, the state's notes say how many late rows they had."""


class WindowOperator:
    """A window step."""

    has_own_rows = True

    def __init__(self, step: Window) -> None:
        self.name = step.name
        self._step = step
        spans_of(step)  # a step whose windows make no sense is refused at once
        self._plans: dict[str, _Plan] = {}

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        return {"": self._plan(spark, rows).schema, LATE: rows}

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        plan = self._plan(context.spark, rows.schema)
        with telling(self.name):
            return plan.run(rows, context)

    def _plan(self, spark: SparkSession, rows: StructType) -> _Plan:
        known = rows.json()
        if known not in self._plans:
            with telling(self.name):
                self._plans[known] = _Plan(spark, self._step, rows)
        return self._plans[known]


@dataclass(frozen=True)
class Range:
    """Which windows a batch gives out, by `_until`."""

    above: int | None
    """At or before this they are not read."""
    to: int | None
    closed: int | None
    """At or before this they had closed before the batch: given out again only if it touched them."""
    tracks: bool
    """Whether it matters what the batch touched."""


class _Plan:
    """A window step over rows of certain columns."""

    def __init__(self, spark: SparkSession, step: Window, rows: StructType) -> None:
        check_names(step, rows)
        self._step = step
        self._spans = spans_of(step)
        empty = spark.createDataFrame([], rows)
        aggregation = compile_aggregates(spark, step.name, step.aggregates, step.key, rows)
        self._layout: WindowLayout = layout_of(step.name, step.key, self._spans, aggregation, empty)
        pieces = spark.createDataFrame([], self._layout.schema).selectExpr("*", f"true AS {NEW}")
        everything = Range(None, None, None, tracks=True)
        self.schema = window_rows(
            step, self._windows(pieces, everything, is_small=True), 0, is_small=True
        ).schema
        self._nothing = spark.createDataFrame([], self.schema)

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        added = add(self._layout, rows, context)
        new = [added.segment] if added.segment is not None else []
        wanted = self._range(added, context)
        given, count = self._give(context, new, wanted)
        carried = self._carried(context, new) if self._spans.is_session else []
        segments, expired = settled(self._layout, context, [*context.state.segments, *new, *carried])
        notes, late_windows = self._note_late(rows, context.state.notes, added.late)
        return OperatorResult(
            rows=given,
            state=replace(context.state, segments=segments, notes=notes),
            taken=added.taken,
            late=added.late,
            duplicate=Tally(),
            row_count=count,
            streams={LATE: rows.where(self._spans.is_late)},
            counters={
                **self._counters(given, count, wanted),
                "expired": expired,
                "late_windows": late_windows,
            },
        )

    # -------------------------------------------------------------------- what is given out

    def _range(self, added: Added, context: OperatorContext) -> Range | None:
        """None where no window can be given out."""
        now, later = context.watermark_ms, context.next_watermark_ms
        hold, spread, new = self._spans.hold_ms, self._spans.spread_ms, added.segment
        closed = None if now is None else now + hold
        first = None if new is None else new.low_ms - spread - 1
        touched = first if now is None or first is None else max(now, first)
        if self._step.emit == "changes":
            return None if new is None else Range(touched, new.high_ms + spread, closed, tracks=True)
        if later is None:
            return None
        if closed is None or new is None or first is None:
            return Range(closed, later + hold + spread, closed, tracks=False)
        # A piece of a session may touch what has closed though it reaches further itself.
        reopens = first < closed if not self._spans.is_session else hold > 0
        if hold == 0 or not reopens:
            return Range(closed, later + hold + spread, closed, tracks=False)
        return Range(now if self._spans.is_session else touched, later + hold + spread, closed, tracks=True)

    def _give(
        self, context: OperatorContext, new: Sequence[Segment], wanted: Range | None
    ) -> tuple[DataFrame, int]:
        nothing = self._nothing, 0
        if wanted is None:
            return nothing
        above, to = wanted.above, wanted.to
        segments = [*context.state.segments, *new]
        chosen = [segment for segment in segments if segment.may_hold(above, to)]
        if not chosen:
            return nothing
        if self._spans.is_session:
            # A session is made of pieces of any time: all that are alive.
            above, to = context.watermark_ms, None
            chosen = [segment for segment in segments if segment.may_hold(above, to)]
        count = sum(segment.rows for segment in chosen)
        old = self._pieces(context, [segment for segment in chosen if segment not in new], above, to)
        ours = self._pieces(context, [segment for segment in chosen if segment in new], above, to)
        if self._step.emit == "changes" and old is not None and ours is not None:
            # Of a large state, only the windows that the batch touched.
            old = self._looked_up(old, ours) if new[0].rows <= ROWS_TO_LOOK_UP < count else old
        pieces = _united(old, ours)
        if pieces is None:
            return nothing
        is_small = count <= ROWS_FOR_ONE_TASK
        windows = self._windows(pieces, wanted, is_small=is_small)
        rows = window_rows(self._step, windows, context.number, is_small=is_small)
        directory = os.path.join(context.scratch, f"{self._step.name}-{context.number}-rows")
        return written_down(context.spark, rows, directory, self.schema)

    def _pieces(
        self, context: OperatorContext, segments: Sequence[Segment], above: int | None, to: int | None
    ) -> DataFrame | None:
        """Rows of these segments whose `_until` is above the one and not past the other."""
        pieces = context.store.frame(context.spark, segments, self._layout.schema)
        if pieces is not None and above is not None:
            pieces = pieces.where(f"{UNTIL} > {steady(above, UNTIL)}")
        if pieces is not None and to is not None:
            pieces = pieces.where(f"{UNTIL} <= {steady(to, UNTIL)}")
        return pieces

    def _looked_up(self, old: DataFrame, ours: DataFrame) -> DataFrame:
        """What is of the same windows; where a piece is not of one window, of the same keys."""
        from pyspark.sql import functions as f

        by = [*self._layout.keys, *([START] if self._spans.kind == "tumbling" else [])]
        if not by:
            return old
        touched = ours.selectExpr(*(f"{name} AS _t{number}" for number, name in enumerate(by))).distinct()
        same = " AND ".join(f"{name} <=> _t{number}" for number, name in enumerate(by))
        return old.join(f.broadcast(touched), f.expr(same), "left_semi")

    def _windows(self, pieces: DataFrame, wanted: Range, *, is_small: bool) -> DataFrame:
        """Whole windows of these pieces, those that are wanted, with the columns `window_rows` needs."""
        layout = self._layout
        pieces = pieces.selectExpr("*", bucket(layout.keys, is_small=is_small))
        # One exchange serves the merging, the sessions and the numbering: all go by bucket first.
        pieces = self._spans.spread(pieces.coalesce(1) if is_small else pieces.repartition(BUCKET))
        more = [f"max({NEW}) AS {NEW}"]
        by = [BUCKET, *layout.keys, START]
        if self._spans.is_session:
            pieces, gone = self._in_sessions(pieces, wanted)
            by[-1] = SESSION
            more += [f"min({START}) AS {START}", f"max({END}) AS {END}", gone]
        sums = [f"max({UNTIL}) AS {UNTIL}", *OF_PIECES, *more]
        finishes = [f"{sql} AS {quoted(name)}" for name, sql in layout.aggregation.finishes.items()]
        if layout.aggregation.is_general:
            # By the step's own SQL, over rows in their order.
            ordered = pieces.sortWithinPartitions(*by, IN_ORDER)
            windows = ordered.groupBy(*by).agg(*expressions(*sums, *finishes))
        else:
            merged = pieces.groupBy(*by).agg(*expressions(*sums, *layout.aggregation.merges()))
            windows = merged.selectExpr("*", *finishes)
        return self._chosen(windows, wanted)

    def _in_sessions(self, pieces: DataFrame, wanted: Range) -> tuple[DataFrame, str]:
        """Pieces with the number of their session; and, as SQL, the sessions given out before that are in it."""
        keys = (BUCKET, *self._layout.keys)
        if wanted.tracks:
            was_given = "true"
            if self._step.emit == "closed":
                was_given = "false" if wanted.closed is None else f"_u <= {steady(wanted.closed, '_u')}"
            known = earlier_sessions(pieces, keys, f"NOT {NEW}", was_given)
        else:
            known = pieces.selectExpr("*", f"{NO_SESSION} AS {EARLIER}")
        return numbered_sessions(known, keys), f"collect_set({EARLIER}) AS {GONE}"

    def _chosen(self, windows: DataFrame, wanted: Range) -> DataFrame:
        conditions = []
        if self._step.emit == "changes":
            conditions.append(NEW)
        else:
            if wanted.to is not None:
                conditions.append(f"{UNTIL} <= {steady(wanted.to - self._spans.spread_ms, UNTIL)}")
            if wanted.closed is not None:
                conditions.append(f"({UNTIL} > {steady(wanted.closed, UNTIL)} OR {NEW})")
        is_chosen = " AND ".join(conditions) or "true"
        if not self._spans.is_session:
            return windows.where(is_chosen).selectExpr(
                "*", f"{START} AS _begin", f"{self._spans.end} AS _finish", "false AS _is_gone"
            )
        itself = f"filter(array(named_struct('s', {START}, 'e', {END}, 'gone', false)), x -> {is_chosen})"
        others = f"filter({GONE}, g -> {NEW} AND g.s <> {START})"
        parted = f"transform({others}, g -> named_struct('s', g.s, 'e', g.e, 'gone', true))"
        one_each = windows.selectExpr("*", f"explode(concat({itself}, {parted})) AS _one")
        return one_each.selectExpr("*", "_one.s AS _begin", "_one.e AS _finish", "_one.gone AS _is_gone")

    # -------------------------------------------------------------------- sessions that go on

    def _carried(self, context: OperatorContext, new: Sequence[Segment]) -> list[Segment]:
        """Pieces whose own time is over and whose session goes on, written again with its time."""
        over = context.next_watermark_ms
        segments = [*context.state.segments, *new]
        if over is None or not any(segment.may_hold(context.watermark_ms, over) for segment in segments):
            return []
        living = [segment for segment in segments if segment.may_hold(context.watermark_ms, None)]
        pieces = self._pieces(context, living, context.watermark_ms, None)
        if pieces is None:
            return []
        layout, now = self._layout, steady(over, UNTIL)
        if sum(segment.rows for segment in living) <= ROWS_FOR_ONE_TASK:
            pieces = pieces.coalesce(1)
        numbered = numbered_sessions(pieces, layout.keys)
        session = f"max({UNTIL}) OVER (PARTITION BY {', '.join([*layout.keys, SESSION])}) AS _goes_on"
        going_on = numbered.selectExpr("*", session).where(f"{UNTIL} <= {now} AND _goes_on > {now}")
        columns = [f"_goes_on AS {UNTIL}" if name == UNTIL else quoted(name) for name in layout.schema.names]
        going_on = going_on.selectExpr(*columns, SESSION)
        is_general = layout.aggregation.is_general
        rows = going_on.drop(SESSION) if is_general else merged_pieces(layout, going_on)
        segment = write_segment(context, layout.step, rows)
        return [segment] if segment is not None else []

    # -------------------------------------------------------------------- counters

    def _counters(self, given: DataFrame, count: int, wanted: Range | None) -> dict[str, int]:
        if self._step.emit == "changes":
            return {"changed": count}
        corrected = 0
        if count and wanted is not None and wanted.tracks and wanted.closed is not None:
            end_ms = wanted.closed - self._spans.hold_ms - self._spans.wait_ms
            corrected = given.where(f"_tombstone OR unix_millis({WINDOW_END}) <= {end_ms}L").count()
        return {"closed": count - corrected, "corrected": corrected}

    def _note_late(
        self, rows: DataFrame, notes: Mapping[str, Any], late: Tally
    ) -> tuple[Mapping[str, Any], int]:
        """The notes with these late rows: their number, and how many each of the latest windows had."""
        if not late.rows:
            return notes, 0
        known: dict[str, int] = dict(notes.get("late_windows", {}))
        windows = 0
        if not self._spans.is_session:
            found = (
                rows.where(self._spans.is_late)
                .selectExpr(f"{self._spans.latest_start} AS w")
                .groupBy("w")
                .count()
            )
            latest = (
                f"slice(sort_array(collect_list(struct(w, count)), false), 1, {LATE_WINDOWS_KEPT}) AS latest"
            )
            row = found.agg(*expressions("count(w) AS windows", latest)).collect()[0]
            windows = row["windows"]
            for each in row["latest"]:
                if each["w"] is not None:
                    known[str(each["w"])] = known.get(str(each["w"]), 0) + each["count"]
        kept = sorted(known, key=int)[-LATE_WINDOWS_KEPT:]
        total = int(notes.get("late", 0)) + late.rows
        return {**notes, "late": total, "late_windows": {start: known[start] for start in kept}}, windows


def _united(old: DataFrame | None, ours: DataFrame | None) -> DataFrame | None:
    """Pieces of the state and of the batch, told apart."""
    before = None if old is None else old.selectExpr("*", f"false AS {NEW}")
    after = None if ours is None else ours.selectExpr("*", f"true AS {NEW}")
    if before is None or after is None:
        return before if after is None else after
    return before.unionByName(after)


@contextmanager
def telling(step: str) -> Iterator[None]:
    """What Spark finds wrong with a step's SQL or with its numbers is told with the step's name."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        names = {kind.__name__ for kind in type(error).__mro__}
        if "ArithmeticException" in names or "ARITHMETIC_OVERFLOW" in str(error):
            raise StepError(
                step,
                f"a number is too large for its type: {spark_message(error)} Cast it in the aggregate, such as "
                "sum(CAST(amount AS DECIMAL(38, 2))), and rebuild. Nothing of the batch was committed",
            ) from error
        if names & {"AnalysisException", "ParseException", "SparkRuntimeException", "NumberFormatException"}:
            raise StepError(step, spark_message(error)) from error
        raise


# ---------------------------------------------------------------------------- the rows that windows give out


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


def window_rows(step: Window, windows: DataFrame, number: int, *, is_small: bool) -> DataFrame:
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
