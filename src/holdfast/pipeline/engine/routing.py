"""Each row to exactly one route: main, dead letter, filtered, duplicate or late, and the count and digest of each.

Rows enter as staged: those that could not be decoded go to the dead letter under `parse`, the others walk through the
steps. While they do, `_hf` is wider than sinks see it (`staging.LINEAGE_DDL`): it carries the record's key, headers,
time and value, so that a rule after any step can still send the whole record to the dead letter.

- Consecutive rules and filters are one pass: each row gets the number of the first of them that turned it away.
- A query keeps every row by its form (projections), or what it gives is counted; where that differs from what it was
  given, the rows that are missing are looked for by their lineage, and *they* are the filtered route under the step's
  name. More rows than given are an error, unless the step expands: then rows of one record are numbered in `_hf.index`
  by their content, the same on every replay.
- What costs much to compute twice (Python, joins, numbering) is written down in the stage before it is read.
- A step with a state runs where it stands (`engine.stateful`). Of deduplication the rows that go on, the duplicates and
  the late ones are routes. Windows, keyed functions and joins let every row go on: what they took and what was late for
  them is compared with what reached them, and is no route; their own rows are side outputs beside `main`, which sinks
  ask for.

No route is a difference of numbers: `balance` adds all of them up and compares with what the reader counted.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final, cast

from holdfast.pipeline.aside import DUPLICATE, FILTERED, LATE
from holdfast.pipeline.core.failures import DefinitionWrong, StepError, Unbalanced, spark_message
from holdfast.pipeline.core.frames import no_rows
from holdfast.pipeline.core.inspection import PlanShape, inspect, quiet_spark, run_query
from holdfast.pipeline.core.sql import LINEAGE, quoted, struct_of
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import (
    Dedupe,
    Expect,
    Filter,
    Lookup,
    PipelineDefinition,
    Python,
    Sql,
    Step,
)
from holdfast.pipeline.definition.streams import is_stateful
from holdfast.pipeline.digest import MASK, Tally, place_hash
from holdfast.pipeline.engine.aside import Gathering, route_digests
from holdfast.pipeline.engine.dataframe_steps import REPLAYED, apply_dataframe, replay
from holdfast.pipeline.engine.operators import (
    ALIVE,
    DEAD_DDL,
    DEAD_LETTER,
    KEPT_RESERVED,
    PARSE,
    WIDE,
    BatchOperator,
    Counted,
    LookupJoin,
    Rule,
    Rules,
    Stateful,
    Transformation,
    condition_of,
    count_operators,
    dead_letter,
    gather,
    is_warning,
    narrow,
    observed,
    parts,
    tagged,
    wide_with_event,
)
from holdfast.pipeline.engine.python_steps import apply_python
from holdfast.pipeline.engine.staging import REJECTED_BY, Staged, file_schema, stage_schema
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.sinks.staged import ROW, StagedRows
from holdfast.pipeline.state.operator import DUPLICATES, StatefulOperator, operator_of
from holdfast.pipeline.state.operator import LATE as LATE_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.engine.stateful import StateUpdate
    from holdfast.pipeline.state.lookups import Lookups

MAIN: Final = ""
"""The name of the stream of rows at the end of the steps."""
UNDECODED: Final = f"IF(startswith(_error, '{REJECTED_BY}'), substring_index(_error, ': ', 1), '{PARSE}')"
"""The reason of a record that counts as an error, as SQL."""
ROWS_FOR_ONE_TASK: Final = 50_000
"""Batches up to this size are computed by one task: starting others, and a shuffle, would take longer."""
ROWS_NOTED_MAX: Final = 200_000
"""Of batches up to this size, places of rows that filters turn away are noted while the routes are counted; they go
through the driver as text, of larger ones by a job of their own."""


@dataclass(frozen=True)
class Stream:
    """Rows that a sink can ask for, as sinks get them, and how many."""

    rows: DataFrame
    tally: Tally


@dataclass(frozen=True)
class Routed:
    """The rows of a batch where they belong, and how many."""

    streams: Mapping[str, Stream]
    """By what sinks call them in `rows`: `""` is main, then `<step>`, `<step>.late`, `<step>.duplicates`."""
    dead: Stream
    routes: Routes
    warned: Mapping[str, int]
    aside: tuple[Gathering, ...] = ()
    """The rows that left the chain, and those that were late for a step with rows of its own."""
    digests: Mapping[str, str] = field(default_factory=dict)
    """Of each route that has rows, for the ledger."""


# ---------------------------------------------------------------------------- checking


def side_outputs(spark: SparkSession, operator: StatefulOperator, schema: StructType) -> dict[str, DataFrame]:
    """No rows of each stream that a step with a state gives beside `main`, as sinks get them."""
    found: dict[str, DataFrame] = {}
    for name, given in operator.schemas(spark, schema).items():
        rows = spark.createDataFrame([], given)
        if name:
            found[f"{operator.name}.{name}"] = narrow(rows)
        elif operator.has_own_rows:
            found[operator.name] = rows
    return found


def apply_step(frame: DataFrame, step: Step, *, directory: str) -> DataFrame:
    """The rows that stay on the main route after this step; nothing is executed.

    Not for steps with a state, nor for lookups: those need more than their rows.
    """
    spark = frame.sparkSession
    if isinstance(step, Expect | Filter):
        _check_rule(spark, frame.schema, step)
        return frame if is_warning(step) else frame.where(condition_of(step))
    assert isinstance(step, Sql | Python)
    shape_of(spark, frame.schema, step, directory)
    return transform(spark, frame, step, directory)


def shape_of(
    spark: SparkSession, schema: StructType, step: Sql | Python, directory: str
) -> tuple[PlanShape, StructType]:
    """What a step does to rows of this schema, and the schema it gives."""
    empty = no_rows(spark, schema)
    if isinstance(step, Python) and step.mode == "spark":
        after, shape = apply_dataframe(empty, step, directory)
        return shape, after.schema
    if isinstance(step, Python):
        return PlanShape(keeps_every_row=False, is_cheap=False), apply_python(empty, step, directory).schema
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
    empty = no_rows(spark, schema)
    try:
        frame = empty.selectExpr(f"({sql}) AS verdict")
    except Exception as error:
        raise StepError(rule.name, spark_message(error)) from error
    if not isinstance(frame.schema[0].dataType, BooleanType):
        raise StepError(
            rule.name, f"{sql!r} gives {frame.schema[0].dataType.simpleString()}, not true or false"
        )
    inspect(rule.name, frame)


def _check_event_time(definition: PipelineDefinition, schema: StructType) -> None:
    from pyspark.sql.types import TimestampNTZType, TimestampType

    event = definition.source.event_time
    if event is None:
        return
    kind = schema[event.field].dataType if event.field in schema.names else None
    if not isinstance(kind, TimestampType | TimestampNTZType):
        what = "is no column of the records" if kind is None else f"is {kind.simpleString()}"
        raise DefinitionWrong(
            f"source.event_time names {event.field!r}, which {what}: name a field of type timestamp, or _timestamp"
        )


# ---------------------------------------------------------------------------- queries and functions


def transform(spark: SparkSession, frame: DataFrame, step: Sql | Python, directory: str) -> DataFrame:
    if isinstance(step, Python) and step.mode == "spark":
        after, _ = apply_dataframe(frame, step, directory)
    elif isinstance(step, Python):
        after = apply_python(frame, step, directory)
    else:
        after = run_query(spark, step.name, step.query, frame)
    return _numbered(after) if step.expand else after


def _numbered(frame: DataFrame) -> DataFrame:
    """Rows of one record numbered by their content: equal rows are interchangeable, so any order of them will do."""
    names = [name for name in frame.schema.names if not name.startswith("_")]
    content = f"to_json({struct_of(names)})" if names else "0"
    place = f"{LINEAGE}.topic, {LINEAGE}.partition, {LINEAGE}.offset"
    number = f"row_number() OVER (PARTITION BY {place} ORDER BY {content}) - 1"
    others = [quoted(name) for name in frame.schema.names if name != LINEAGE]
    fields = cast("StructType", frame.schema[LINEAGE].dataType).names
    parts = ", ".join(f"'{name}', {'_index' if name == 'index' else f'{LINEAGE}.{name}'}" for name in fields)
    numbered = frame.selectExpr("*", f"CAST({number} AS INT) AS _index")
    return numbered.selectExpr(f"named_struct({parts}) AS {LINEAGE}", *others)


# ---------------------------------------------------------------------------- the walk


class Router:
    """The steps of one definition, checked once, ready for batch after batch."""

    def __init__(
        self, spark: SparkSession, definition: PipelineDefinition, lookups: Lookups | None = None
    ) -> None:
        from holdfast.pipeline.state.lookups import Lookups

        quiet_spark()
        self._spark = spark
        self._definition = definition
        self._lookups = lookups or Lookups(definition)
        self._file_schema = file_schema(definition.source)
        self._shapes: dict[str, PlanShape] = {}
        self.operators: dict[str, StatefulOperator] = {}
        """The steps with a state, by name."""
        self._schemas: dict[str, StructType] = {}
        self.input_schema = stage_schema(definition.source)
        _check_event_time(definition, self.input_schema)
        self._input_columns = [
            name
            for name in self.input_schema.names
            if not name.startswith("_") or name.startswith(KEY_PREFIX)
        ]
        self._input_columns += [
            name for name in (*KEPT_RESERVED, "_event_time") if name in self.input_schema.names
        ]
        self._schemas[MAIN] = self._follow(self.input_schema)
        self.empty_main: DataFrame = spark.createDataFrame([], self._schemas[MAIN])
        self.empty_dead: DataFrame = spark.createDataFrame([], DEAD_DDL)
        for sink in definition.sinks:
            self._check_rows(sink.name, sink.rows)

    def _follow(self, schema: StructType) -> StructType:
        """Check every step, each with the schema that the one before gives; the last one's, as sinks see it."""
        spark, definition = self._spark, self._definition
        # A step with rows of its own may look at every column, also at the number that a staged row has.
        self.makes_values = not all(isinstance(step, Expect | Filter | Dedupe) for step in definition.steps)
        expanding: list[str] = []
        for step in definition.steps:
            if isinstance(step, Expect | Filter):
                _check_rule(spark, schema, step)
            elif is_stateful(step):
                self._add_operator(step, schema)
            elif isinstance(step, Lookup):
                schema = self._lookups.schema_after(schema, step)
                schema = no_rows(spark, schema).drop(*self._lookups.flags(step)).schema
            else:
                assert isinstance(step, Sql | Python)
                if step.expand:
                    expanding.append(step.name)
                self._shapes[step.name], schema = shape_of(spark, schema, step, definition.directory)
        if len(expanding) > 1:
            raise StepError(
                expanding[1], f"{expanding[0]!r} expands already, and one step of a pipeline may: join them"
            )
        is_plain = not expanding and not self.operators
        self._observes = is_plain and all(shape.keeps_every_row for shape in self._shapes.values())
        return narrow(no_rows(spark, schema)).schema

    def _add_operator(self, step: Step, schema: StructType) -> None:
        operator = self.operators[step.name] = operator_of(step, self._definition)
        outputs = side_outputs(self._spark, operator, schema)
        self._schemas |= {name: rows.schema for name, rows in outputs.items()}

    def _check_rows(self, sink: str, rows: str) -> None:
        if rows not in self._schemas:
            having = ", ".join(repr(name) for name in self._schemas if name) or "none but those of its end"
            raise DefinitionWrong(
                f"sink {sink!r} asks for the rows {rows!r}, and no step gives them; there are {having}"
            )

    def empty(self, rows: str) -> DataFrame:
        """No rows, of the schema of these."""
        return self.empty_main if rows == MAIN else self._spark.createDataFrame([], self._schemas[rows])

    def walk(
        self,
        staged: Staged,
        batch_time_ms: int,
        scratch: str,
        update: StateUpdate | None = None,
        lookups: Mapping[str, str] | None = None,
    ) -> MicroBatch:
        """The staged rows on their way through the steps. `scratch` is for what is written down on the way.

        Steps with a state run now, for the `update` of it; `lookups` are the versions of the tables.
        """
        if not staged.intake.records:
            rows, alive = self.empty_dead, self._spark.createDataFrame([], self.input_schema)
            if not self.operators:
                return MicroBatch(self, staged, rows, self.empty_main, ())
        else:
            rows = self._spark.read.schema(self._file_schema).parquet(*staged.files.values())
            if staged.intake.records <= ROWS_FOR_ONE_TASK:
                rows = rows.coalesce(1)  # nothing is shuffled then, and counting costs half
            alive = self._step_input(rows, batch_time_ms, update)
        noted = self._definition.source.topics if staged.intake.records <= ROWS_NOTED_MAX else ()
        operators = tuple(self._operators(alive, scratch, update, lookups or {}, noted))
        end = operators[-1].alive if operators else alive
        is_staged = bool(staged.files) and not self.makes_values
        numbered = StagedRows(end.select(ROW), staged.files) if is_staged else None
        return MicroBatch(self, staged, rows, narrow(end), operators, update, numbered)

    def _step_input(self, rows: DataFrame, batch_time_ms: int, update: StateUpdate | None) -> DataFrame:
        lineage = WIDE
        if update is not None:
            lineage = wide_with_event(update.floors_ms, update.state.clock.delay_ms)
        elif self._definition.source.event_time is not None:
            lineage = wide_with_event((), 0)
        return rows.where("_error IS NULL").selectExpr(
            f"{lineage} AS {LINEAGE}",
            "_timestamp",
            "_key",
            "_headers",
            "_tombstone",
            f"timestamp_millis({batch_time_ms}L) AS _batch_time",
            *([] if self.makes_values else [ROW]),
            *map(quoted, self._input_columns),
        )

    def _operators(
        self,
        alive: DataFrame,
        scratch: str,
        update: StateUpdate | None,
        lookups: Mapping[str, str],
        noted: Sequence[str],
    ) -> Iterator[BatchOperator]:
        """The parts of the way, each over what the one before leaves."""
        is_first = True
        flags: tuple[str, ...] = ()
        for number, part in enumerate(parts(self._definition.steps)):
            operator: BatchOperator
            if isinstance(part, tuple):
                operator = Rules(alive, tagged(alive, part), is_first, part, flags)
                flags = ()
                if self._observes:
                    operator.frame, operator.observation = observed(operator.frame, part, noted)
            elif part.name in self.operators:
                assert update is not None, "a step with a state runs without it"
                step = self.operators[part.name]
                result = update.run(step, alive)
                after = alive if step.has_own_rows else result.rows
                operator = Stateful(alive, after, is_first, part, result, step.has_own_rows)
            elif isinstance(part, Lookup):
                after = self._lookups.join(alive, part, lookups[part.name])
                operator = LookupJoin(alive, after, is_first)
                flags = self._lookups.flags(part)
            else:
                assert isinstance(part, Sql | Python)
                is_first = is_first and not part.expand
                operator = self._transformed(alive, part, is_first, os.path.join(scratch, f"step-{number}"))
            alive = operator.alive
            yield operator

    def _transformed(
        self, alive: DataFrame, step: Sql | Python, is_first: bool, scratch: str
    ) -> Transformation:
        shape = self._shapes[step.name]
        after = transform(self._spark, alive, step, self._definition.directory)
        if REPLAYED.get() and isinstance(step, Python) and step.mode == "spark":
            replay(alive, step, self._definition.directory)
        if step.expand or not shape.is_cheap:
            after = self._written_down(after, scratch)
        return Transformation(alive, after, is_first, step, shape.keeps_every_row and not step.expand)

    def _written_down(self, frame: DataFrame, directory: str) -> DataFrame:
        frame.write.option("compression", "none").parquet(directory)
        return self._spark.read.schema(frame.schema).parquet(directory)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one micro-batch between stage and sinks."""

    router: Router
    staged: Staged
    rows: DataFrame
    """As staged."""
    main: DataFrame
    """The rows that go to the sinks."""
    operators: tuple[BatchOperator, ...]
    update: StateUpdate | None = None
    staged_rows: StagedRows | None = None
    """Where `main` stands in the stage, if the steps only choose among its rows."""

    @property
    def is_observed(self) -> bool:
        """It is counted by whatever job passes over `main` first."""
        return any(isinstance(each, Rules) and each.observation is not None for each in self.operators)

    def settle(self, *, have_run: bool = False) -> Routed:
        """Count every route and balance them with the intake. `have_run`: a job has passed over `main`."""
        decoded = Counted(self.staged.decoded, self.staged.decoded)
        count_operators(self.operators, decoded, have_run=have_run)
        end = self.operators[-1].counts[ALIVE] if self.operators else decoded
        routes, dead_tally = self._routes(end)
        aside = gather(self.operators)
        return Routed(
            streams={MAIN: Stream(self.main, end.tally), **self._side_outputs()},
            dead=Stream(self._dead_letters(), dead_tally),
            routes=routes,
            warned={name: count for each in self.operators for name, count in each.warned.items()},
            aside=tuple(aside),
            digests=route_digests(aside, end.tally, dead_tally),
        )

    def _side_outputs(self) -> dict[str, Stream]:
        """The side outputs of stateful steps."""
        found: dict[str, Stream] = {}
        for operator in self.operators:
            if not isinstance(operator, Stateful) or self.update is None:
                continue
            name, result = operator.step.name, operator.result
            if operator.has_own_rows:
                # All of these rows have one place: the number of the version that the batch makes.
                digest = result.row_count * place_hash(name, 0, self.update.number) & MASK
                found[name] = Stream(result.rows, Tally(result.row_count, digest))
            for stream, tally in ((LATE_ROWS, result.late), (DUPLICATES, result.duplicate)):
                if stream in result.streams:
                    found[f"{name}.{stream}"] = Stream(narrow(result.streams[stream]), tally)
        return found

    def _routes(self, end: Counted) -> tuple[Routes, Tally]:
        staged = self.staged
        dead_tally = staged.undecoded
        firsts = staged.undecoded + end.firsts
        rows: dict[str, dict[str, int]] = {DEAD_LETTER: {}, FILTERED: {}, DUPLICATE: {}, LATE: {}}
        unparsed = staged.undecoded.rows - sum(staged.rejected.values())
        if unparsed:
            rows[DEAD_LETTER][PARSE] = unparsed
        rows[DEAD_LETTER] |= {f"{REJECTED_BY}{sink}": count for sink, count in staged.rejected.items()}
        for each in (leaving for operator in self.operators for leaving in operator.leaving()):
            firsts += each.counted.firsts
            rows[each.route][each.step] = each.counted.tally.rows
            if each.route == DEAD_LETTER:
                dead_tally += each.counted.tally
        balance(staged.intake, firsts)
        routes = Routes(
            main=end.tally.rows,
            dead_letter=rows[DEAD_LETTER],
            filtered=rows[FILTERED],
            duplicate=sum(rows[DUPLICATE].values()),
            late=sum(rows[LATE].values()),
        )
        return routes, dead_tally

    def _dead_letters(self) -> DataFrame:
        frames: list[DataFrame] = []
        if self.staged.undecoded.rows:
            undecoded = self.rows.where("_error IS NOT NULL")
            frames.append(
                dead_letter(undecoded.selectExpr(f"{WIDE} AS {LINEAGE}", f"{UNDECODED} AS _reason", "_error"))
            )
        rules = [operator for operator in self.operators if isinstance(operator, Rules)]
        frames += [letters for each in rules if (letters := each.dead_letters()) is not None]
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
