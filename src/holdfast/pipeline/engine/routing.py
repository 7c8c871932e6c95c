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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final

from holdfast.pipeline.definition.model import Expect, Filter, PipelineDefinition, Python, Sql, Step
from holdfast.pipeline.digest import hash_sql, join_halves
from holdfast.pipeline.engine.failures import RuleBroken, StepError, Unbalanced, spark_message
from holdfast.pipeline.engine.inspection import Shape, inspect, quiet_spark, run_query
from holdfast.pipeline.engine.python_steps import apply_python
from holdfast.pipeline.engine.staging import KEY_PREFIX, Staged, Tally, file_schema, stage_schema
from holdfast.pipeline.ledger import Intake, Routes

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.types import StructType

LINEAGE: Final = "_hf"
ROUTE: Final = "_route"
ALIVE: Final = 0
"""The number of the route of rows that go on."""
ROWS_FOR_ONE_TASK: Final = 50_000
"""Batches up to this size are computed by one task: starting others, and a shuffle, would take longer."""
EXAMPLES: Final = 5
"""Of rows that break a rule, named in the error."""
PARSE: Final = "parse"
KEPT_RESERVED: Final = ("_unknown",)

NARROW: Final = (
    f"named_struct('topic', {LINEAGE}.topic, 'partition', {LINEAGE}.partition, 'offset', {LINEAGE}.offset, "
    f"'index', {LINEAGE}.index) AS {LINEAGE}"
)
RECORD: Final = (
    f"{LINEAGE}.key AS _key",
    f"{LINEAGE}.timestamp AS _timestamp",
    f"{LINEAGE}.tombstone AS _tombstone",
    f"{LINEAGE}.headers AS _headers",
)
DEAD_DDL: Final = (
    "_hf struct<topic:string,partition:int,offset:bigint,index:int>, _key binary, _raw binary, "
    "_headers array<struct<key:string,value:binary>>, _timestamp timestamp, _reason string, _error string"
)
WIDE: Final = (
    "named_struct('topic', _topic, 'partition', _partition, 'offset', _offset, 'index', 0, 'timestamp', _timestamp, "
    "'key', _key, 'headers', _headers, 'tombstone', _tombstone, 'raw', _raw)"
)

Rule = Expect | Filter


@dataclass(frozen=True)
class Routed:
    """The rows of a batch where they belong, and how many."""

    main: DataFrame
    dead: DataFrame
    main_tally: Tally
    dead_tally: Tally
    routes: Routes
    warned: Mapping[str, int]


@dataclass(frozen=True)
class Counted:
    """Rows of one route at one place of the walk."""

    tally: Tally
    firsts: Tally
    """Of those, the first row of each record: what the intake is compared with."""


NONE: Final = Counted(Tally(), Tally())


def plus(one: Counted, other: Counted) -> Counted:
    return Counted(one.tally + other.tally, one.firsts + other.firsts)


@dataclass
class Link:
    """One part of the walk: a run of rules, or one step that transforms."""

    given: DataFrame
    given_rows_are_first: bool
    rules: tuple[Rule, ...] = ()
    step: Sql | Python | None = None
    keeps_every_row: bool = True
    frame: DataFrame | None = None
    """What is counted after it, by `_route`; nothing when its count is known."""
    counts: dict[int, Counted] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)

    @property
    def turned_away(self) -> list[tuple[int, Rule]]:
        """The rules that turn rows away, with the number of their route."""
        rules = [rule for rule in self.rules if not is_warning(rule)]
        return [(number, rule) for number, rule in enumerate(rules, start=1)]

    @property
    def total(self) -> Counted:
        return reduce(plus, self.counts.values(), NONE)


def is_warning(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "warn"


def condition_of(rule: Rule) -> str:
    return f"coalesce(({rule.that if isinstance(rule, Expect) else rule.where}), false)"


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
    return _transform(spark, frame, step, directory)


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
        self.main_schema: StructType = narrow(spark.createDataFrame([], schema)).schema

    def empty_main(self) -> DataFrame:
        return self._spark.createDataFrame([], self.main_schema)

    def empty_dead(self) -> DataFrame:
        return self._spark.createDataFrame([], DEAD_DDL)

    def route(self, staged: Staged, batch_time_ms: int, scratch: str) -> Routed:
        """Walk the staged rows through the steps. `scratch` is a directory for what is written down on the way."""
        if not staged.intake.records:
            return Routed(self.empty_main(), self.empty_dead(), Tally(), Tally(), Routes(), {})
        rows = self._spark.read.schema(self._file_schema).parquet(*staged.files)
        if staged.intake.records <= ROWS_FOR_ONE_TASK:
            rows = rows.coalesce(1)  # nothing is shuffled then, and counting costs half
        alive = self._step_input(rows, batch_time_ms)
        links = list(self._links(alive, scratch))
        self._count(links, Counted(staged.decoded, staged.decoded))
        end = links[-1].counts[ALIVE] if links else Counted(staged.decoded, staged.decoded)
        last = self._alive_after(links[-1]) if links else alive
        routes, dead_tally = self._routes(links, staged, end)
        return Routed(
            main=narrow(last),
            dead=self._dead_letters(rows, links, staged),
            main_tally=end.tally,
            dead_tally=dead_tally,
            routes=routes,
            warned={name: count for link in links for name, count in link.warned.items()},
        )

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
        for number, part in enumerate(_parts(self._definition.steps)):
            if isinstance(part, tuple):
                link = Link(alive, not is_expanded, rules=part, frame=_tagged(alive, part))
                alive = self._alive_after(link)
            else:
                shape = self._shapes[part.name]
                is_expanded = is_expanded or part.expand
                after = _transform(self._spark, alive, part, self._definition.directory)
                if part.expand or not shape.is_cheap:
                    after = self._written_down(after, os.path.join(scratch, f"step-{number}"))
                link = Link(
                    alive,
                    not is_expanded,
                    step=part,
                    keeps_every_row=shape.keeps_every_row and not part.expand,
                )
                link.frame = after
                alive = after
            yield link

    def _written_down(self, frame: DataFrame, directory: str) -> DataFrame:
        frame.write.option("compression", "none").parquet(directory)
        return self._spark.read.schema(frame.schema).parquet(directory)

    def _alive_after(self, link: Link) -> DataFrame:
        assert link.frame is not None
        if not link.rules:
            return link.frame
        return link.frame.where(f"{ROUTE} = {ALIVE}").drop(ROUTE, *_warn_columns(link.rules))

    # -------------------------------------------------------------------- counting

    def _count(self, links: Sequence[Link], given: Counted) -> None:
        """Count what every part leaves and turns away, in one job, and account for what vanished in a query."""
        self._collect([link for link in links if link.rules or not link.keeps_every_row])
        for link in links:
            if link.step is not None and link.keeps_every_row:
                link.counts = {ALIVE: given}
            elif link.step is not None:
                self._account(link, given)
            elif link.total != given:
                raise Unbalanced(
                    f"{link.total.tally.rows} rows came out of the rules {_names(link)} and {given.tally.rows} "
                    "went in. Nothing was committed; please report this"
                )
            self._stop_if_broken(link)
            given = link.counts.get(ALIVE, NONE)
            link.counts.setdefault(ALIVE, NONE)

    def _collect(self, links: Sequence[Link]) -> None:
        if not links:
            return
        frames = [_counting(number, link) for number, link in enumerate(links)]
        for row in reduce(lambda one, other: one.unionAll(other), frames).collect():
            link = links[row["link"]]
            tally = Tally(row["n"], join_halves(row["low"], row["high"]))
            firsts = tally
            if not link.given_rows_are_first:
                firsts = Tally(row["first_n"], join_halves(row["first_low"], row["first_high"]))
            if tally.rows:
                link.counts[row["route"]] = Counted(tally, firsts)
            warnings = [rule for rule in link.rules if is_warning(rule)]
            for rule, broken in zip(warnings, row["warned"], strict=True):
                if broken:
                    link.warned[rule.name] = link.warned.get(rule.name, 0) + broken

    def _account(self, link: Link, given: Counted) -> None:
        """What a query or function left out is its filtered route, row by row."""
        assert link.step is not None
        assert link.frame is not None
        got = link.counts.get(ALIVE, NONE)
        wanted = given if not link.step.expand else Counted(given.firsts, given.firsts)
        found = got if not link.step.expand else Counted(got.firsts, got.firsts)
        if found != wanted:
            missing = _missing(link)
            self._collect([missing])
            vanished = missing.counts.get(ALIVE, NONE)
            if plus(found, vanished) != wanted:
                self._explain_surplus(link)
            link.counts[1] = vanished

    def _explain_surplus(self, link: Link) -> None:
        assert link.step is not None
        assert link.frame is not None
        place = [f"{LINEAGE}.{name}" for name in ("topic", "partition", "offset")]
        twice = (
            link.frame.selectExpr(*place, f"{LINEAGE}.index")
            .groupBy("topic", "partition", "offset", "index")
            .count()
        )
        example = twice.where("count > 1").orderBy("topic", "partition", "offset").first()
        if example is None:
            raise StepError(
                link.step.name,
                "it returned rows of records it was not given. Nothing was committed; keep `_hf` as it is",
            )
        raise StepError(
            link.step.name,
            f"it made {example['count']} rows of one (offset {example['offset']} of {example['topic']}-"
            f"{example['partition']}): a step that multiplies rows says `expand: true`. Nothing was committed",
        )

    def _stop_if_broken(self, link: Link) -> None:
        for number, rule in link.turned_away:
            if isinstance(rule, Expect) and rule.otherwise == "fail" and number in link.counts:
                assert link.frame is not None
                rows = link.frame.where(f"{ROUTE} = {number}").selectExpr(
                    f"{LINEAGE}.topic", f"{LINEAGE}.partition", f"{LINEAGE}.offset"
                )
                examples = [
                    f"{row.topic}-{row.partition} offset {row.offset}"
                    for row in rows.orderBy("topic", "partition", "offset").limit(EXAMPLES).collect()
                ]
                raise RuleBroken(
                    f"rule {rule.name!r} ({rule.that}) does not hold for {link.counts[number].tally.rows} rows, and it "
                    f"says `fail`: {', '.join(examples)}. Nothing of the batch was committed: correct the rule or the "
                    "source, or let it quarantine such rows"
                )

    # -------------------------------------------------------------------- routes

    def _routes(self, links: Sequence[Link], staged: Staged, end: Counted) -> tuple[Routes, Tally]:
        dead: dict[str, int] = {}
        filtered: dict[str, int] = {}
        dead_tally = staged.undecoded
        firsts = staged.undecoded + end.firsts
        if staged.undecoded.rows:
            dead[PARSE] = staged.undecoded.rows
        for link in links:
            if link.step is not None and 1 in link.counts:
                filtered[link.step.name] = link.counts[1].tally.rows
                firsts += link.counts[1].firsts
            for number, rule in link.turned_away:
                if number in link.counts:
                    counted = link.counts[number]
                    firsts += counted.firsts
                    if _is_quarantine(rule):
                        dead[rule.name] = counted.tally.rows
                        dead_tally += counted.tally
                    else:
                        filtered[rule.name] = counted.tally.rows
        balance(staged.intake, firsts)
        return Routes(main=end.tally.rows, dead_letter=dead, filtered=filtered), dead_tally

    def _dead_letters(self, rows: DataFrame, links: Sequence[Link], staged: Staged) -> DataFrame:
        frames: list[DataFrame] = []
        if staged.undecoded.rows:
            undecoded = rows.where("_error IS NOT NULL")
            frames.append(
                _dead(undecoded.selectExpr(f"{WIDE} AS {LINEAGE}", f"'{PARSE}' AS _reason", "_error"))
            )
        for link in links:
            chosen = [
                (number, rule)
                for number, rule in link.turned_away
                if isinstance(rule, Expect) and _is_quarantine(rule) and number in link.counts
            ]
            if chosen and link.frame is not None:
                frames.append(_quarantined(link.frame, chosen))
        if not frames:
            return self.empty_dead()
        return reduce(lambda one, other: one.unionAll(other), frames)


def balance(intake: Intake, routed: Tally) -> None:
    """Every record read is in one route: by number and by digest."""
    if routed != Tally(intake.records, intake.digest):
        raise Unbalanced(
            f"{intake.records} records were read and {routed.rows} are accounted for by the routes (digests "
            f"{intake.digest:016x} and {routed.digest:016x}). Nothing was committed: a step lost or repeated rows; "
            "please report this with its definition"
        )


# ---------------------------------------------------------------------------- expressions


def narrow(frame: DataFrame) -> DataFrame:
    """Rows as sinks get them: lineage, the record's own columns, then the user's."""
    own = [
        f"`{name}`"
        for name in frame.schema.names
        if not name.startswith("_") or name.startswith(KEY_PREFIX) or name in KEPT_RESERVED
    ]
    return frame.selectExpr(NARROW, *RECORD, *own)


def _parts(steps: Sequence[Step]) -> Iterator[tuple[Rule, ...] | Sql | Python]:
    rules: list[Rule] = []
    for step in steps:
        if isinstance(step, Expect | Filter):
            rules.append(step)
            continue
        if rules:
            yield tuple(rules)
            rules = []
        yield step
    if rules:
        yield tuple(rules)


def _transform(spark: SparkSession, frame: DataFrame, step: Sql | Python, directory: str) -> DataFrame:
    if isinstance(step, Python):
        after = apply_python(frame, step, directory)
    else:
        after = run_query(spark, step.name, step.query, frame)
    return _numbered(after) if step.expand else after


def _numbered(frame: DataFrame) -> DataFrame:
    """Rows of one record numbered by their content: equal rows are interchangeable, so any order of them will do."""
    names = [f"`{name}`" for name in frame.schema.names if not name.startswith("_")]
    content = f"to_json(named_struct({', '.join(_pair(name) for name in names)}))" if names else "0"
    place = f"{LINEAGE}.topic, {LINEAGE}.partition, {LINEAGE}.offset"
    number = f"row_number() OVER (PARTITION BY {place} ORDER BY {content}) - 1"
    others = [f"`{name}`" for name in frame.schema.names if name != LINEAGE]
    fields = ("topic", "partition", "offset", "index", "timestamp", "key", "headers", "tombstone", "raw")
    parts = ", ".join(f"'{name}', {'_index' if name == 'index' else f'{LINEAGE}.{name}'}" for name in fields)
    numbered = frame.selectExpr("*", f"CAST({number} AS INT) AS _index")
    return numbered.selectExpr(f"named_struct({parts}) AS {LINEAGE}", *others)


def _pair(quoted: str) -> str:
    text = quoted[1:-1].replace("\\", "\\\\").replace("'", "\\'")
    return f"'{text}', {quoted}"


def _tagged(frame: DataFrame, rules: Sequence[Rule]) -> DataFrame:
    """Every row with the number of the first rule that turns it away (0: none), and a flag for each warning."""
    branches: list[str] = []
    flags: list[str] = []
    passed: list[str] = []
    for rule in rules:
        condition = condition_of(rule)
        if is_warning(rule):
            reached = " AND ".join([*passed, f"NOT {condition}"])
            flags.append(f"CASE WHEN {reached} THEN 1L ELSE 0L END AS _warn{len(flags)}")
        else:
            branches.append(f"WHEN NOT {condition} THEN {len(branches) + 1}")
            passed.append(condition)
    route = f"CASE {' '.join(branches)} ELSE {ALIVE} END" if branches else str(ALIVE)
    return frame.selectExpr("*", f"{route} AS {ROUTE}", *flags)


def _warn_columns(rules: Sequence[Rule]) -> list[str]:
    return [f"_warn{number}" for number in range(sum(is_warning(rule) for rule in rules))]


def _counting(number: int, link: Link) -> DataFrame:
    """Count and digest of a part's rows by route, as one row each."""
    assert link.frame is not None
    warns = _warn_columns(link.rules)
    route = ROUTE if link.rules else str(ALIVE)
    rows = link.frame.selectExpr(
        f"CAST({route} AS INT) AS route",
        f"{LINEAGE}.index = 0 AS first",
        f"{hash_sql(LINEAGE)} AS hash",
        *warns,
    )
    low, high = "hash & 4294967295L", "shiftrightunsigned(hash, 32)"
    return rows.groupBy("route").agg(*_columns(low, high, link, warns)).selectExpr(f"{number} AS link", "*")


def _columns(low: str, high: str, link: Link, warns: Sequence[str]) -> list[Column]:
    from pyspark.sql import functions as f

    if link.given_rows_are_first:
        firsts = ["0L AS first_n", "0L AS first_low", "0L AS first_high"]
    else:
        firsts = [
            "count_if(first) AS first_n",
            f"coalesce(sum(CASE WHEN first THEN {low} END), 0L) AS first_low",
            f"coalesce(sum(CASE WHEN first THEN {high} END), 0L) AS first_high",
        ]
    texts = [
        "count(1) AS n",
        f"coalesce(sum({low}), 0L) AS low",
        f"coalesce(sum({high}), 0L) AS high",
        *firsts,
        f"CAST(array({', '.join(f'sum({name})' for name in warns)}) AS ARRAY<BIGINT>) AS warned",
    ]
    return [f.expr(text) for text in texts]


def _missing(link: Link) -> Link:
    """The rows that a step was given and did not give back, as a part of their own."""
    assert link.frame is not None
    assert link.step is not None
    keys = ["topic", "partition", "offset"] if link.step.expand else ["topic", "partition", "offset", "index"]
    left = link.given.selectExpr(LINEAGE, *(f"{LINEAGE}.{key} AS {key}" for key in keys))
    right = link.frame.selectExpr(*(f"{LINEAGE}.{key} AS {key}" for key in keys))
    vanished = left.join(right, keys, "left_anti").select(LINEAGE)
    return Link(link.given, link.given_rows_are_first, step=link.step, frame=vanished)


def _is_quarantine(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "quarantine"


def _quarantined(frame: DataFrame, chosen: Sequence[tuple[int, Expect]]) -> DataFrame:
    from pyspark.sql import functions as f

    reasons = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, rule.name)))
    errors = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, _breaks(rule))))
    rows = frame.where(f.col(ROUTE).isin([number for number, _ in chosen]))
    return _dead(
        rows.select(LINEAGE, reasons[f.col(ROUTE)].alias("_reason"), errors[f.col(ROUTE)].alias("_error"))
    )


def _breaks(rule: Expect) -> str:
    return f"it breaks the rule {rule.name!r}: {rule.that}"


def _dead(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(
        NARROW,
        f"{LINEAGE}.key AS _key",
        f"{LINEAGE}.raw AS _raw",
        f"{LINEAGE}.headers AS _headers",
        f"{LINEAGE}.timestamp AS _timestamp",
        "_reason",
        "_error",
    )


def _names(link: Link) -> str:
    return ", ".join(repr(rule.name) for rule in link.rules)
