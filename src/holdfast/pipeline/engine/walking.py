"""The parts of a walk through the steps, and the expressions they are made of.

A walk is a chain of links: a run of consecutive rules, one step that transforms rows, or one with a memory. Rules do
not take rows away: they tag each row with the number of its route, so that one pass over the rows serves all of them. A
step with a memory has taken its turn when its link is made, and says itself what became of each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final, cast

from holdfast.pipeline.core.inspection import run_query
from holdfast.pipeline.core.sql import LINEAGE, PLACE, literal, quoted, struct_of
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import Expect, Filter, Lookup, Python, Sql, Step
from holdfast.pipeline.digest import Tally, hash_sql
from holdfast.pipeline.engine.python_steps import apply_python

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, Observation, SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.state.operator import Turn

ROUTE: Final = "_route"
HASH: Final = "_hash"
ALIVE: Final = 0
"""The number of the route of rows that go on."""
DUPLICATE: Final = 1
LATE: Final = 2
"""Routes of a step that sets aside what it has seen, or what comes too late."""
LEFT: Final = "left"
"""What is observed of rows that filters turn away: their places."""
LEFT_NUMBERS: Final = 4
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
_WIDE_PARTS: Final = (
    "'topic', _topic, 'partition', _partition, 'offset', _offset, 'index', 0, 'timestamp', _timestamp, "
    "'key', _key, 'headers', _headers, 'tombstone', _tombstone, 'raw', _raw"
)
WIDE: Final = f"named_struct({_WIDE_PARTS})"

Rule = Expect | Filter


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
    frame: DataFrame
    """What it gives: for rules all rows with their `_route`."""
    given_rows_are_first: bool
    """No step before has made several rows of one record."""
    rules: tuple[Rule, ...] = ()
    step: Step | None = None
    keeps_every_row: bool = True
    flags: tuple[str, ...] = ()
    """Columns that only these rules look at."""
    turn: Turn | None = None
    """What a step with a memory made of its rows."""
    is_tap: bool = False
    """Its rows go on as they came, whatever the step makes of them."""
    observation: Observation | None = None
    """Counts the rules' routes while rows pass."""
    turned_away_text: str | None = None
    """What was observed of rows that filters turned away: `LEFT_NUMBERS` numbers for each."""
    counts: dict[int, Counted] = field(default_factory=dict)
    warned: dict[str, int] = field(default_factory=dict)

    @property
    def turned_away(self) -> list[tuple[int, Rule]]:
        """The rules that turn rows away, with the number of their route."""
        rules = [rule for rule in self.rules if not is_warning(rule)]
        return [(number, rule) for number, rule in enumerate(rules, start=1)]

    @property
    def alive(self) -> DataFrame:
        """The rows that go on."""
        if not self.rules:
            return self.frame
        return self.frame.where(f"{ROUTE} = {ALIVE}").drop(
            ROUTE, HASH, *warn_columns(self.rules), *self.flags
        )

    def __str__(self) -> str:
        return ", ".join(repr(rule.name) for rule in self.rules)

    @property
    def expands(self) -> bool:
        return isinstance(self.step, Sql | Python) and self.step.expand

    @property
    def total(self) -> Counted:
        return reduce(plus, self.counts.values(), NONE)


def is_warning(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "warn"


def condition_of(rule: Rule) -> str:
    return f"coalesce(({rule.that if isinstance(rule, Expect) else rule.where}), false)"


# ---------------------------------------------------------------------------- expressions


def narrow(frame: DataFrame) -> DataFrame:
    """Rows as sinks get them: lineage, the record's own columns, then the user's."""
    own = [
        quoted(name)
        for name in frame.schema.names
        if not name.startswith("_") or name.startswith(KEY_PREFIX) or name in KEPT_RESERVED
    ]
    return frame.selectExpr(NARROW, *RECORD, *own)


def wide_with_event(floors_ms: Sequence[int | None], delay_ms: int) -> str:
    """The wide lineage with event time and the row's own watermark, at least the floor of its piece of the stage.

    Floors differ in every batch: in an array they are handed to Spark's generated code, which as numbers would stand in
    it and have it compiled anew each time.
    """
    floors = ", ".join("NULL" if each is None else f"{each}L" for each in floors_ms)
    own = f"greatest(_seen - {delay_ms}L, get(CAST(array({floors}) AS ARRAY<BIGINT>), _piece))"
    return f"named_struct({_WIDE_PARTS}, 'event_time', _event_time, 'watermark', timestamp_millis({own}))"


def parts(steps: Sequence[Step]) -> Iterator[tuple[Rule, ...] | Step]:
    """Runs of rules, and the other steps one by one; a lookup may leave a rule behind it."""
    rules: list[Rule] = []
    for step in steps:
        if isinstance(step, Expect | Filter):
            rules.append(step)
            continue
        if rules:
            yield tuple(rules)
            rules = []
        yield step
        if isinstance(step, Lookup):
            rules = [rule for rule in [rule_of_lookup(step)] if rule is not None]
    if rules:
        yield tuple(rules)


def rule_of_lookup(step: Lookup) -> Rule | None:
    """What becomes of rows that the table has nothing for."""
    from holdfast.pipeline.state.lookups import rule_of

    return rule_of(step)


def flag_of_lookup(step: Lookup) -> tuple[str, ...]:
    """The column its rule looks at, if it has one."""
    from holdfast.pipeline.state.lookups import found_column

    return () if step.missing == "null" else (found_column(step),)


def transform(spark: SparkSession, frame: DataFrame, step: Sql | Python, directory: str) -> DataFrame:
    if isinstance(step, Python):
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


def tagged(frame: DataFrame, rules: Sequence[Rule]) -> DataFrame:
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
    return frame.selectExpr("*", f"{route} AS {ROUTE}", f"{hash_sql(LINEAGE)} AS {HASH}", *flags)


def observed(
    frame: DataFrame, rules: Sequence[Rule], topics: Sequence[str] = ()
) -> tuple[DataFrame, Observation]:
    """The same tagged rows, counted by route while they pass; with `topics`, places of rows that filters turn away
    are kept too."""
    from pyspark.sql import Observation
    from pyspark.sql import functions as f

    texts: list[str] = []
    for route in range(sum(not is_warning(rule) for rule in rules) + 1):
        here = f"CASE WHEN {ROUTE} = {route} THEN"
        texts += [
            f"count({here} 1 END) AS n{route}",
            f"coalesce(sum({here} {HASH} & 4294967295L END), 0L) AS low{route}",
            f"coalesce(sum({here} shiftrightunsigned({HASH}, 32) END), 0L) AS high{route}",
        ]
    for number, name in enumerate(warn_columns(rules)):
        texts.append(f"coalesce(sum({name}), 0L) AS warned{number:04d}")
    left = _left(rules, topics)
    if left is not None:
        texts.append(f"{left} AS {LEFT}")
    observation = Observation()
    return frame.observe(observation, *(f.expr(text) for text in texts)), observation


def _left(rules: Sequence[Rule], topics: Sequence[str]) -> str | None:
    """One text of the route, the topic's number, partition and offset of each row that a filter turned away."""
    counted = [rule for rule in rules if not is_warning(rule)]
    routes = [str(number) for number, rule in enumerate(counted, start=1) if not is_quarantine(rule)]
    if not routes or not topics:
        return None
    names = ", ".join(map(literal, topics))
    numbers = (
        ROUTE,
        f"array_position(array({names}), {LINEAGE}.topic)",
        f"{LINEAGE}.partition",
        f"{LINEAGE}.offset",
    )
    row = f"concat_ws(',', {', '.join(f'CAST({number} AS STRING)' for number in numbers)})"
    return f"concat_ws(',', collect_list(CASE WHEN {ROUTE} IN ({', '.join(routes)}) THEN {row} END))"


def warn_columns(rules: Sequence[Rule]) -> list[str]:
    return [f"_warn{number}" for number in range(sum(is_warning(rule) for rule in rules))]


def counting(number: int, link: Link) -> DataFrame:
    """Count and digest of a part's rows by route, as one row each."""
    warns = warn_columns(link.rules)
    route = ROUTE if link.rules else str(ALIVE)
    rows = link.frame.selectExpr(
        f"CAST({route} AS INT) AS route",
        f"{LINEAGE}.index = 0 AS first",
        f"{HASH if link.rules else hash_sql(LINEAGE)} AS hash",
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


def missing_rows(link: Link) -> Link:
    """The rows that a step was given and did not give back, as a part of their own."""
    assert link.step is not None
    keys = list(PLACE[:-1] if link.expands else PLACE)
    left = link.given.selectExpr(LINEAGE, *(f"{LINEAGE}.{key} AS {key}" for key in keys))
    right = link.frame.selectExpr(*(f"{LINEAGE}.{key} AS {key}" for key in keys))
    vanished = left.join(right, keys, "left_anti").select(LINEAGE)
    return Link(link.given, vanished, link.given_rows_are_first, step=link.step)


def is_quarantine(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "quarantine"


def quarantined(frame: DataFrame, chosen: Sequence[tuple[int, Expect]]) -> DataFrame:
    from pyspark.sql import functions as f

    reasons = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, rule.name)))
    errors = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, breaks(rule))))
    rows = frame.where(f.col(ROUTE).isin([number for number, _ in chosen]))
    return dead_letter(
        rows.select(LINEAGE, reasons[f.col(ROUTE)].alias("_reason"), errors[f.col(ROUTE)].alias("_error"))
    )


def breaks(rule: Expect) -> str:
    return f"it breaks the rule {rule.name!r}: {rule.that}"


def dead_letter(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(
        NARROW,
        f"{LINEAGE}.key AS _key",
        f"{LINEAGE}.raw AS _raw",
        f"{LINEAGE}.headers AS _headers",
        f"{LINEAGE}.timestamp AS _timestamp",
        "_reason",
        "_error",
    )
