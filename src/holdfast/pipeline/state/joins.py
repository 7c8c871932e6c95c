"""Joins of two streams: pairs of rows with equal keys whose events are at most `within` apart.

Rows that the left condition is true for are the left ones, and so for the right; a row may be both, and is not paired
with itself. A pair comes out once, in the batch that brings its second row: new left rows meet remembered and new
right rows, and remembered left rows meet new right ones. Since both rows of a pair are judged by the log alone, batches
do not matter.

- A row is late when its time plus `within` is at or before its own watermark. One that is not can meet a row `within`
  older than itself, so rows are remembered for twice `within`.
- `kind: left`: a left row that nothing can come for any more (its time plus twice `within` is at or before the
  watermark where the batch ends) and nothing came for leaves alone, with nulls for the right. Whether something came is
  looked up once more among the right rows, which stay for three times `within` for that; so the state is a function of
  the rows, and has no marks that depend on batches.
- A row with a null in its key meets nothing.
- Of a row only what `select` names is remembered.
- Rows that come out are numbered in an order that follows from their places, not from where tasks ran.

The rows of a batch are written once, as the segment they are remembered in, and read from there. Times are whole
milliseconds.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.inspection import inspect
from holdfast.pipeline.core.sql import (
    HEADERS_DDL,
    LINEAGE_TYPE,
    NARROW,
    PLACE,
    ddl_schema,
    of_step,
    quoted,
    struct_of,
)
from holdfast.pipeline.definition.model import Join
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import Tally, hash_sql, tally_of, tally_sql
from holdfast.pipeline.state.operator import LATE, OperatorContext, OperatorResult
from holdfast.pipeline.state.segments import merged, write_segment

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.segments import Segment

NONE: Final = Tally()
LEFT, RIGHT = 0, 1
BUCKETS: Final = 64
"""Parts in which rows are numbered side by side; a constant, since the numbers follow from it."""
WHOLE: Final = ("tinyint", "smallint", "int", "bigint")
"""Types whose values are the same number in the wider one: keys of both sides may differ so."""
LEFT_PLACE, RIGHT_PLACE = "left_hf", "right_hf"
"""Columns of a pair: where its two rows came from."""


@dataclass(frozen=True)
class _Form:
    """What a join is over rows of one schema."""

    keys: tuple[tuple[str, str, str], ...]
    """Of each part of the key: SQL over left rows, over right rows, and the type of both."""
    left: StructType
    """Of a left row, what is remembered as `l`."""
    right: StructType
    state: StructType
    output: StructType

    @property
    def key_names(self) -> list[str]:
        return [f"_k{number}" for number in range(len(self.keys))]


class JoinOperator:
    """One `join` step, whose sides are SQL conditions over the rows."""

    has_own_rows = True

    def __init__(self, step: Join) -> None:
        self.name = step.name
        self._step = step
        self._within_ms = parse_duration_ms(step.within)
        self._known: tuple[StructType, _Form] | None = None
        for what in ("on", "select"):
            if not getattr(step, what):
                raise StepError(step.name, f"`{what}` names nothing")
        for name in step.select:
            if name.startswith("_") or name.lower() in (LEFT_PLACE, RIGHT_PLACE):
                raise StepError(step.name, f"a column cannot be called {name!r}: that name is ours")

    @property
    def _is_left_join(self) -> bool:
        return self._step.kind == "left"

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        return {"": self._form(spark, rows).output, LATE: rows}

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        form = self._form(context.spark, rows.schema)
        counted = self._count(rows)
        segment = write_segment(context, self.name, self._to_remember(rows, form))
        out, count = self._output(segment, form, context)
        expired = _count_expired(segment, context)
        known = context.state.segments
        segments = merged(context, self.name, form.state, known if segment is None else (*known, segment))
        return OperatorResult(
            rows=out,
            state=replace(context.state, segments=segments),
            taken=counted.sided + counted.neither,
            late=counted.late,
            duplicate=Tally(),
            row_count=count,
            streams={LATE: rows.where(f"({self._sided}) AND ({self._late})")},
            counters={"expired": expired, "neither": counted.neither.rows},
        )

    # -------------------------------------------------------------------- what is asked of a row

    @property
    def _conditions(self) -> tuple[str, str]:
        return f"coalesce(({self._step.left}), false)", f"coalesce(({self._step.right}), false)"

    @property
    def _sided(self) -> str:
        return " OR ".join(self._conditions)

    @property
    def _late(self) -> str:
        end = f"unix_millis(_hf.event_time) + {self._within_ms}L"
        return f"_hf.event_time IS NULL OR coalesce({end} <= unix_millis(_hf.watermark), false)"

    def _lives_ms(self, side: int) -> int:
        """How long a row of this side is remembered after its event."""
        return self._within_ms * (3 if self._is_left_join and side == RIGHT else 2)

    def _count(self, rows: DataFrame) -> _Counted:
        from pyspark.sql import functions as f

        route = f"CASE WHEN NOT ({self._sided}) THEN 'neither' WHEN {self._late} THEN 'late' ELSE 'sided' END"
        hashed = rows.selectExpr(f"{route} AS route", f"{hash_sql('_hf')} AS hash")
        sums = hashed.groupBy("route").agg(*map(f.expr, tally_sql("hash")))
        return _Counted(**{row["route"]: tally_of(row) for row in sums.collect()})

    # -------------------------------------------------------------------- the state

    def _to_remember(self, rows: DataFrame, form: _Form) -> DataFrame:
        """Rows of either side that are not late, once for each side they are on."""
        is_left, is_right = self._conditions
        sides = f"array_compact(array(IF({is_left}, {LEFT}, NULL), IF({is_right}, {RIGHT}, NULL)))"
        sided = rows.where(f"({self._sided}) AND NOT ({self._late})").selectExpr(
            "*", f"explode({sides}) AS _side", "unix_millis(_hf.event_time) AS _t"
        )
        keys = [
            f"CAST(CASE _side WHEN {LEFT} THEN {left} ELSE {right} END AS {of}) AS _k{number}"
            for number, (left, right, of) in enumerate(form.keys)
        ]
        until = f"_t + CASE _side WHEN {LEFT} THEN {self._lives_ms(LEFT)}L ELSE {self._lives_ms(RIGHT)}L END"
        kept = sided.selectExpr(
            "_side",
            *keys,
            "_t",
            f"{until} AS _until",
            NARROW,
            f"CASE _side WHEN {LEFT} THEN {_struct_sql(form.left)} END AS l",
            f"CASE _side WHEN {RIGHT} THEN {_struct_sql(form.right)} END AS r",
        )
        whole = " AND ".join(f"{name} IS NOT NULL" for name in form.key_names)
        return kept.where(f"({whole}) OR _side = {LEFT}" if self._is_left_join else whole)

    def _output(
        self, segment: Segment | None, form: _Form, context: OperatorContext
    ) -> tuple[DataFrame, int]:
        """The step's rows, written down and numbered, and how many there are."""
        parts = []
        new = None
        if segment is not None:
            new = context.store.frame(context.spark, [segment], form.state)
            assert new is not None
            parts += self._new_pairs(new, segment, form, context)
        # A row that is new cannot close where the watermark stands still: it would have been late.
        moved = context.next_watermark_ms != context.watermark_ms
        if self._is_left_join and moved and context.next_watermark_ms is not None:
            parts += self._alone(new, context.next_watermark_ms, form, context)
        if not parts:
            return context.spark.createDataFrame([], form.output), 0
        made = parts[0]
        for part in parts[1:]:
            made = made.unionAll(part)
        return self._numbered(made, form, context)

    def _new_pairs(
        self, new: DataFrame, segment: Segment, form: _Form, context: OperatorContext
    ) -> list[DataFrame]:
        # The new rows' times, as far as the segment's limits tell: of the state, what is near them is read.
        first_ms = segment.low_ms - max(self._lives_ms(LEFT), self._lives_ms(RIGHT))
        last_ms = segment.high_ms - min(self._lives_ms(LEFT), self._lives_ms(RIGHT))
        nearest = first_ms - self._within_ms + min(self._lives_ms(LEFT), self._lives_ms(RIGHT)) - 1
        furthest = last_ms + self._within_ms + max(self._lives_ms(LEFT), self._lives_ms(RIGHT))
        watermark_ms = context.watermark_ms
        above = nearest if watermark_ms is None else max(nearest, watermark_ms)
        old = context.frame(form.state, until_above=above, until_to=furthest)
        pairs = [self._pairs(new, new, form)]
        if old is not None:
            pairs += [self._pairs(new, old, form), self._pairs(old, new, form)]
        return pairs

    def _pairs(self, lefts: DataFrame, rights: DataFrame, form: _Form) -> DataFrame:
        return self._selected(self._met(lefts, rights, form, "inner"), form)

    def _alone(
        self, new: DataFrame | None, closed_ms: int, form: _Form, context: OperatorContext
    ) -> list[DataFrame]:
        """Left rows whose time is over and that nothing was found for."""
        from pyspark.sql import functions

        # A right row that a closing left one met is at most `within` later, and remembered for so much longer.
        reach_ms = closed_ms - self._lives_ms(LEFT) + self._within_ms + self._lives_ms(RIGHT)
        old = context.frame(form.state, until_above=context.watermark_ms, until_to=reach_ms)
        known = old if new is None else new if old is None else old.unionAll(new)
        if known is None:
            return []
        closing = known.where(f"_until <= {closed_ms}L")
        alone = self._met(closing, known, form, "left_anti")
        missing = [f"CAST(NULL AS {LINEAGE_TYPE}) AS _r", "CAST(NULL AS BIGINT) AS _rt"]
        nothing = functions.lit(None).cast(form.right).alias("r")
        return [self._selected(alone.selectExpr("*", *missing).select("*", nothing), form)]

    def _met(self, lefts: DataFrame, rights: DataFrame, form: _Form, kind: str) -> DataFrame:
        from pyspark.sql import functions as f

        left = lefts.where(f"_side = {LEFT}").selectExpr(*form.key_names, "_t AS _lt", "_hf AS _l", "l")
        right = rights.where(f"_side = {RIGHT}").selectExpr(
            *(f"{name} AS _r{name}" for name in form.key_names), "_t AS _rt", "_hf AS _r", "r"
        )
        equal = " AND ".join(f"{name} = _r{name}" for name in form.key_names)
        itself = " AND ".join(f"_l.`{part}` = _r.`{part}`" for part in PLACE)
        near = f"_lt - _rt BETWEEN -{self._within_ms}L AND {self._within_ms}L"
        return left.join(right, f.expr(f"{equal} AND {near} AND NOT ({itself})"), kind)

    def _selected(self, pairs: DataFrame, form: _Form) -> DataFrame:
        place = [f"_{side}.`{part}`" for side in ("l", "r") for part in PLACE]
        return pairs.selectExpr(
            f"CAST(pmod(xxhash64({', '.join(place)}), {BUCKETS}) AS INT) AS _bucket",
            f"{_key_sql(form)} AS _key",
            "timestamp_millis(greatest(_lt, _rt)) AS _timestamp",
            f"_l AS {LEFT_PLACE}",
            f"_r AS {RIGHT_PLACE}",
            *(f"{sql} AS {quoted(name)}" for name, sql in self._step.select.items()),
        )

    def _numbered(self, made: DataFrame, form: _Form, context: OperatorContext) -> tuple[DataFrame, int]:
        from pyspark.sql.types import StructField, StructType

        order = ", ".join(f"{side}.`{part}`" for side in (LEFT_PLACE, RIGHT_PLACE) for part in PLACE)
        number = f"row_number() OVER (PARTITION BY _bucket ORDER BY {order}) AS _number"
        path = os.path.join(context.scratch, f"{self.name}-{context.label}-rows")
        numbered = made.selectExpr("*", number)
        numbered.write.option("compression", "lz4_raw").parquet(path)
        schema = StructType([StructField(each.name, each.dataType) for each in numbered.schema.fields])
        written = context.spark.read.schema(schema).parquet(path)
        counts = {row["_bucket"]: row["count"] for row in written.groupBy("_bucket").count().collect()}
        before, total = [], 0
        for bucket in range(BUCKETS):
            before.append(total)
            total += counts.get(bucket, 0)
        starts = f"array({', '.join(map(str, before))})"
        index = f"CAST(get({starts}, _bucket) + _number - 1 AS INT)"
        return written.selectExpr(*self._narrow(context.number, index), *self._own_names), total

    @property
    def _own_names(self) -> list[str]:
        return [LEFT_PLACE, RIGHT_PLACE, *(quoted(name) for name in self._step.select)]

    def _narrow(self, version: int, index: str) -> list[str]:
        """What every sink takes of a row beside its own columns."""
        return [
            of_step(self.name, f"{version}L", index),
            "_key",
            "_timestamp",
            "false AS _tombstone",
            f"CAST(array() AS {HEADERS_DDL}) AS _headers",
        ]

    # -------------------------------------------------------------------- the form

    def _form(self, spark: SparkSession, rows: StructType) -> _Form:
        """What the definition means for such rows; `StepError` when it means nothing."""
        if self._known is None or self._known[0] != rows:
            self._known = rows, self._analysed(spark, rows)
        return self._known[1]

    def _analysed(self, spark: SparkSession, rows: StructType) -> _Form:
        """By Spark's own analysis."""
        try:
            empty = spark.createDataFrame([], rows)
            for condition in (self._step.left, self._step.right):
                inspect(self.name, empty.where(condition))
            keys = tuple(self._key(rows, left, right) for left, right in self._step.on.items())
            typed = empty.selectExpr(
                *(f"CAST({column} AS {of}) AS _k{number}" for number, (column, _, of) in enumerate(keys))
            )
            left, right = self._payload(rows, "l"), self._payload(rows, "r")
            self._check_select(spark, left, right)
            form = _Form(keys, left, right, _state_type(typed.schema, left, right), rows)
            remembered = spark.createDataFrame([], form.state)
            made = self._pairs(remembered, remembered, form)
            return replace(form, output=made.selectExpr(*self._narrow(0, "0"), *self._own_names).schema)
        except StepError:
            raise
        except Exception as error:
            raise StepError(self.name, spark_message(error)) from error

    def _check_select(self, spark: SparkSession, left: StructType, right: StructType) -> None:
        from pyspark.sql.types import StructField, StructType

        pair = spark.createDataFrame([], StructType([StructField("l", left), StructField("r", right)]))
        shape = inspect(self.name, pair.selectExpr(*self._step.select.values()))
        if not shape.keeps_every_row:
            raise StepError(self.name, "`select` makes other rows than one of each pair")

    def _key(self, rows: StructType, left: str, right: str) -> tuple[str, str, str]:
        types = []
        for name in (left, right):
            if name not in rows.names:
                raise StepError(self.name, f"`on`: the rows have no column {name!r}")
            types.append(rows[name].dataType.simpleString())
        if types[0] == types[1]:
            return quoted(left), quoted(right), types[0]
        if not all(each in WHOLE for each in types):
            raise StepError(
                self.name,
                f"`on`: {left!r} is {types[0]} and {right!r} is {types[1]}; cast one in a step before",
            )
        return quoted(left), quoted(right), max(types, key=WHOLE.index)

    def _payload(self, rows: StructType, letter: str) -> StructType:
        """The columns of a side that `select` can mean."""
        from pyspark.sql.types import IntegerType, StructField, StructType

        texts = " ; ".join(self._step.select.values())
        named = [field for field in rows.fields if field.name != "_hf"]
        if not re.search(rf"(?i)(?<![\w.`]){letter}(?!\w|\s*\.|`\s*\.)", texts):
            named = [field for field in named if _mentions(texts, letter, field.name)]
        fields = [StructField(field.name, field.dataType) for field in named]
        # A struct without fields cannot be written.
        return StructType(fields or [StructField("_none", IntegerType())])


@dataclass(frozen=True)
class _Counted:
    """Rows of a batch by what becomes of them."""

    sided: Tally = NONE
    late: Tally = NONE
    neither: Tally = NONE


def _count_expired(segment: Segment | None, context: OperatorContext) -> int:
    """Rows that the state lets go of in this batch, those included that it need not take at all."""
    if context.next_watermark_ms is None:
        return 0
    to_ms = context.next_watermark_ms
    over = [context.frame("_until bigint", until_above=context.watermark_ms, until_to=to_ms)]
    if segment is not None:
        over.append(context.store.frame(context.spark, [segment], "_until bigint", until_to=to_ms))
    return sum(frame.count() for frame in over if frame is not None)


def _state_type(keys: StructType, left: StructType, right: StructType) -> StructType:
    from pyspark.sql.types import IntegerType, LongType, StructField, StructType

    return StructType(
        [
            StructField("_side", IntegerType()),
            *keys.fields,
            StructField("_t", LongType()),
            StructField("_until", LongType()),
            *ddl_schema(f"_hf {LINEAGE_TYPE}").fields,
            StructField("l", left),
            StructField("r", right),
        ]
    )


def _mentions(texts: str, letter: str, name: str) -> bool:
    return re.search(rf"(?i)(?<![\w.])`?{letter}`?\s*\.\s*`?{re.escape(name)}`?(?!\w)", texts) is not None


def _struct_sql(fields: StructType) -> str:
    if fields.names == ["_none"]:
        return "named_struct('_none', 0)"
    return struct_of(fields.names)


def _key_sql(form: _Form) -> str:
    """The key of a pair as bytes: its text, or a JSON array of several."""
    if len(form.keys) == 1:
        return "_k0" if form.keys[0][2] == "binary" else "CAST(CAST(_k0 AS STRING) AS BINARY)"
    texts = ", ".join(
        f"base64({name})" if of == "binary" else f"CAST({name} AS STRING)"
        for name, (_, _, of) in zip(form.key_names, form.keys, strict=True)
    )
    return f"CAST(to_json(array({texts})) AS BINARY)"
