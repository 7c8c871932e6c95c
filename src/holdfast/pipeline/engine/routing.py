"""Each row to exactly one route: main, dead letter, or filtered, and the count and digest of each.

Rows enter as staged: those that could not be decoded go to the dead letter under `parse`, the others walk through the
steps. While they do, `_hf` is wider than sinks see it (`staging.LINEAGE_DDL`): it carries the record's key, headers,
time and value, so that a rule after any step can still send the whole record to the dead letter.

- Consecutive rules and filters are one pass: each row gets the number of the first of them that turned it away.
- A query keeps every row by its form (projections), or what it gives is counted; where that differs from what it was
  given, the rows that are missing are looked for by their lineage, and *they* are the filtered route under the step's
  name. More rows than given are an error, unless the step expands: then rows of one record are numbered in `_hf.index`
  by their content, the same on every replay.
- What costs much to compute twice (Python, joins, numbering) is written down in the stage before it is read.

No route is a difference of numbers: `balance` adds all of them up and compares with what the reader counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.definition.model import Expect, Filter, PipelineDefinition, Python, Sql, Step
from holdfast.pipeline.engine.counting import count_links
from holdfast.pipeline.engine.failures import StepError, Unbalanced, spark_message
from holdfast.pipeline.engine.inspection import Shape, inspect, quiet_spark, run_query
from holdfast.pipeline.engine.python_steps import apply_python
from holdfast.pipeline.engine.staging import KEY_PREFIX, Staged, Tally, file_schema, stage_schema
from holdfast.pipeline.engine.walking import (
    ALIVE,
    DEAD_DDL,
    KEPT_RESERVED,
    LINEAGE,
    PARSE,
    WIDE,
    Counted,
    Link,
    Rule,
    condition_of,
    dead_letter,
    is_quarantine,
    is_warning,
    narrow,
    observed,
    parts,
    quarantined,
    tagged,
    transform,
)
from holdfast.pipeline.ledger import Intake, Routes

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ROWS_FOR_ONE_TASK: Final = 50_000
"""Batches up to this size are computed by one task: starting others, and a shuffle, would take longer."""


@dataclass(frozen=True)
class Routed:
    """The rows of a batch where they belong, and how many."""

    main: DataFrame
    dead: DataFrame
    main_tally: Tally
    dead_tally: Tally
    routes: Routes
    warned: Mapping[str, int]


# ---------------------------------------------------------------------------- checking


def check_steps(spark: SparkSession, definition: PipelineDefinition) -> StructType:
    """The schema of the rows that sinks will get; `StepError` for the first step that cannot work."""
    return Router(spark, definition).main_schema


def apply_step(frame: DataFrame, step: Step, *, directory: str, batch_time_ms: int) -> DataFrame:
    """The rows that stay on the main route after this step; nothing is executed.

    `batch_time_ms` is in the frame already, as `_batch_time`; it is a column like others.
    """
    spark = frame.sparkSession
    if isinstance(step, Expect | Filter):
        _check_rule(spark, frame.schema, step)
        return frame if is_warning(step) else frame.where(condition_of(step))
    shape_of(spark, frame.schema, step, directory)
    return transform(spark, frame, step, directory)


def shape_of(
    spark: SparkSession, schema: StructType, step: Sql | Python, directory: str
) -> tuple[Shape, StructType]:
    """What a step does to rows of this schema, and the schema it gives."""
    empty = spark.createDataFrame([], schema)
    if isinstance(step, Python):
        return Shape(keeps_every_row=False, is_cheap=False), apply_python(empty, step, directory).schema
    frame = run_query(spark, step.name, step.query, empty)
    shape = inspect(step.name, frame)
    _check_lineage(step, schema, frame.schema)
    return shape, frame.schema


def _check_lineage(step: Sql, before: StructType, after: StructType) -> None:
    if LINEAGE not in after.names:
        raise StepError(
            step.name,
            f"the query does not keep `{LINEAGE}`, the lineage of its rows: select it (SELECT {LINEAGE}, … FROM input)",
        )
    if after.names.count(LINEAGE) > 1 or after[LINEAGE].dataType != before[LINEAGE].dataType:
        raise StepError(step.name, f"`{LINEAGE}` must be the input's own, once and unchanged")
    lowered = [name.lower() for name in after.names]
    twice = next((name for name in lowered if lowered.count(name) > 1), None)
    if twice is not None:
        raise StepError(step.name, f"the query gives two columns the name {twice!r}: rename one")


def _check_rule(spark: SparkSession, schema: StructType, rule: Rule) -> None:
    from pyspark.sql.types import BooleanType

    sql = rule.that if isinstance(rule, Expect) else rule.where
    empty = spark.createDataFrame([], schema)
    try:
        frame = empty.selectExpr(f"({sql}) AS verdict")
    except Exception as error:
        raise StepError(rule.name, spark_message(error)) from error
    if not isinstance(frame.schema[0].dataType, BooleanType):
        raise StepError(
            rule.name, f"{sql!r} gives {frame.schema[0].dataType.simpleString()}, not true or false"
        )
    inspect(rule.name, frame)


# ---------------------------------------------------------------------------- the walk


class Router:
    """The steps of one definition, checked once, ready for batch after batch."""

    def __init__(self, spark: SparkSession, definition: PipelineDefinition) -> None:
        quiet_spark()
        self._spark = spark
        self._definition = definition
        self._file_schema = file_schema(definition.source)
        self._shapes: dict[str, Shape] = {}
        schema = stage_schema(definition.source)
        self._input_columns = [
            name for name in schema.names if not name.startswith("_") or name.startswith(KEY_PREFIX)
        ]
        self._input_columns += [name for name in KEPT_RESERVED if name in schema.names]
        expanding: list[str] = []
        for step in definition.steps:
            if isinstance(step, Expect | Filter):
                _check_rule(spark, schema, step)
                continue
            if step.expand:
                expanding.append(step.name)
            self._shapes[step.name], schema = shape_of(spark, schema, step, definition.directory)
        if len(expanding) > 1:
            raise StepError(
                expanding[1], f"{expanding[0]!r} expands already, and one step of a pipeline may: join them"
            )
        self._observes = all(shape.keeps_every_row for shape in self._shapes.values()) and not expanding
        self.empty_main: DataFrame = narrow(spark.createDataFrame([], schema))
        self.empty_dead: DataFrame = spark.createDataFrame([], DEAD_DDL)

    @property
    def main_schema(self) -> StructType:
        """Of the rows that sinks get."""
        return self.empty_main.schema

    def walk(self, staged: Staged, batch_time_ms: int, scratch: str) -> Walk:
        """The staged rows on their way through the steps. `scratch` is for what is written down on the way."""
        if not staged.intake.records:
            return Walk(self, staged, self.empty_dead, self.empty_main, ())
        rows = self._spark.read.schema(self._file_schema).parquet(*staged.files)
        if staged.intake.records <= ROWS_FOR_ONE_TASK:
            rows = rows.coalesce(1)  # nothing is shuffled then, and counting costs half
        alive = self._step_input(rows, batch_time_ms)
        links = tuple(self._links(alive, scratch))
        return Walk(self, staged, rows, narrow(links[-1].alive if links else alive), links)

    def _step_input(self, rows: DataFrame, batch_time_ms: int) -> DataFrame:
        return rows.where("_error IS NULL").selectExpr(
            f"{WIDE} AS {LINEAGE}",
            "_timestamp",
            "_key",
            "_headers",
            "_tombstone",
            f"timestamp_millis({batch_time_ms}L) AS _batch_time",
            *(f"`{name}`" for name in self._input_columns),
        )

    def _links(self, alive: DataFrame, scratch: str) -> Iterator[Link]:
        """The parts of the walk, each over what the one before leaves."""
        is_expanded = False
        for number, part in enumerate(parts(self._definition.steps)):
            if isinstance(part, tuple):
                link = Link(alive, tagged(alive, part), not is_expanded, rules=part)
                if self._observes:
                    link.frame, link.observation = observed(link.frame, part)
            else:
                shape = self._shapes[part.name]
                is_expanded = is_expanded or part.expand
                after = transform(self._spark, alive, part, self._definition.directory)
                if part.expand or not shape.is_cheap:
                    after = self._written_down(after, os.path.join(scratch, f"step-{number}"))
                keeps = shape.keeps_every_row and not part.expand
                link = Link(alive, after, not is_expanded, step=part, keeps_every_row=keeps)
            alive = link.alive
            yield link

    def _written_down(self, frame: DataFrame, directory: str) -> DataFrame:
        frame.write.option("compression", "none").parquet(directory)
        return self._spark.read.schema(frame.schema).parquet(directory)


@dataclass(frozen=True)
class Walk:
    """The rows of one batch between stage and sinks."""

    router: Router
    staged: Staged
    rows: DataFrame
    """As staged."""
    main: DataFrame
    """The rows that go to the sinks."""
    links: tuple[Link, ...]

    @property
    def is_observed(self) -> bool:
        """It is counted by whatever job passes over `main` first."""
        return any(link.observation is not None for link in self.links)

    def settle(self, *, have_run: bool = False) -> Routed:
        """Count every route and balance them with the intake. `have_run`: a job has passed over `main`."""
        decoded = Counted(self.staged.decoded, self.staged.decoded)
        count_links(self.links, decoded, have_run=have_run)
        end = self.links[-1].counts[ALIVE] if self.links else decoded
        routes, dead_tally = self._routes(end)
        return Routed(
            main=self.main,
            dead=self._dead_letters(),
            main_tally=end.tally,
            dead_tally=dead_tally,
            routes=routes,
            warned={name: count for link in self.links for name, count in link.warned.items()},
        )

    def _routes(self, end: Counted) -> tuple[Routes, Tally]:
        staged = self.staged
        dead: dict[str, int] = {}
        filtered: dict[str, int] = {}
        dead_tally = staged.undecoded
        firsts = staged.undecoded + end.firsts
        if staged.undecoded.rows:
            dead[PARSE] = staged.undecoded.rows
        for link in self.links:
            if link.step is not None and 1 in link.counts:
                filtered[link.step.name] = link.counts[1].tally.rows
                firsts += link.counts[1].firsts
            for number, rule in link.turned_away:
                if number in link.counts:
                    counted = link.counts[number]
                    firsts += counted.firsts
                    if is_quarantine(rule):
                        dead[rule.name] = counted.tally.rows
                        dead_tally += counted.tally
                    else:
                        filtered[rule.name] = counted.tally.rows
        balance(staged.intake, firsts)
        return Routes(main=end.tally.rows, dead_letter=dead, filtered=filtered), dead_tally

    def _dead_letters(self) -> DataFrame:
        frames: list[DataFrame] = []
        if self.staged.undecoded.rows:
            undecoded = self.rows.where("_error IS NOT NULL")
            frames.append(
                dead_letter(undecoded.selectExpr(f"{WIDE} AS {LINEAGE}", f"'{PARSE}' AS _reason", "_error"))
            )
        for link in self.links:
            chosen = [
                (number, rule)
                for number, rule in link.turned_away
                if isinstance(rule, Expect) and is_quarantine(rule) and number in link.counts
            ]
            if chosen:
                frames.append(quarantined(link.frame, chosen))
        if not frames:
            return self.router.empty_dead
        return reduce(lambda one, other: one.unionAll(other), frames)


def balance(intake: Intake, routed: Tally) -> None:
    """Every record read is in one route: by number and by digest."""
    if routed != Tally(intake.records, intake.digest):
        raise Unbalanced(
            f"{intake.records} records were read and {routed.rows} are accounted for by the routes (digests "
            f"{intake.digest:016x} and {routed.digest:016x}). Nothing was committed: a step lost or repeated rows; "
            "please report this with its definition"
        )
