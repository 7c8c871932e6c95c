"""The parts of a micro-batch's way through the steps: four kinds of operators, and how each accounts for its rows.

- `Rules`: consecutive rules and filters. They take no rows away but tag each row with the number of its route, so that
  one pass over the rows serves all of them.
- `Transformation`: a query or a Python function. What it does not give back is its filtered route, row by row.
- `LookupJoin`: columns of a reference table; every row goes on.
- `Stateful`: a step with a state. It has run when it is made, and says itself what became of each row.

Rows are counted by number and by digest, each row where it stands. Rules and projections alone are counted while their
rows are written: Spark observes each run of rules as rows pass. That is one pass less, and worth having only if it is
right: what was observed is taken when it adds up to what was given, else everything is counted in a job of its own.
Batches with other steps are always counted so, before any sink sees a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, ClassVar, Final, NamedTuple

from holdfast.pipeline.aside import DUPLICATE, FILTERED, LATE, LATE_FOR
from holdfast.pipeline.core.failures import RuleBroken, StepError, Unbalanced
from holdfast.pipeline.core.frames import metrics_of
from holdfast.pipeline.core.sql import LINEAGE, NARROW, PLACE, literal, quoted
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.model import Expect, Filter, Lookup, Python, Sql, Step
from holdfast.pipeline.digest import Tally, hash_sql, tally_of, tally_sql
from holdfast.pipeline.engine.aside import Gathering, SideOutput
from holdfast.pipeline.state.operator import DUPLICATES
from holdfast.pipeline.state.operator import LATE as LATE_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Observation

    from holdfast.pipeline.state.operator import OperatorResult

ROUTE: Final = "_route"
HASH: Final = "_hash"
ALIVE: Final = 0
"""The number of the route of rows that go on."""
DEAD_LETTER: Final = "dead_letter"
LEFT: Final = "left"
"""What is observed of rows that filters turn away: their places."""
PARSE: Final = "parse"
KEPT_RESERVED: Final = ("_unknown",)
EXAMPLES: Final = 5
"""Of rows that break a rule, named in the error."""

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
    """Rows of one route at one place of the way."""

    tally: Tally
    firsts: Tally
    """Of those, the first row of each record: what the intake is compared with."""

    def __add__(self, other: Counted) -> Counted:
        return Counted(self.tally + other.tally, self.firsts + other.firsts)


NONE: Final = Counted(Tally(), Tally())


class Leaving(NamedTuple):
    """Rows that leave the steps at one of them."""

    number: int
    """Of their route among those of the operator."""
    route: str
    step: str
    counted: Counted

    @property
    def output(self) -> SideOutput:
        return SideOutput(self.route, self.step, self.counted.tally)


# ---------------------------------------------------------------------------- the four kinds


@dataclass
class BatchOperator:
    """One part of the way: what goes in, what comes out, and how many rows went where."""

    given: DataFrame
    frame: DataFrame
    """What it gives: rules give all rows with their `_route`."""
    given_rows_are_first: bool
    """No step before has made several rows of one record."""
    counts: dict[int, Counted] = field(default_factory=dict, kw_only=True)
    """By the number of the route, without those that have no rows."""
    warned: dict[str, int] = field(default_factory=dict, kw_only=True)

    @property
    def alive(self) -> DataFrame:
        """The rows that go on."""
        return self.frame

    @property
    def is_counted_by_job(self) -> bool:
        """Its rows have to be counted, because it cannot say itself what became of them."""
        return False

    def settle(self, given: Counted) -> None:
        """Fill in the counts, which are all of what was given; `Unbalanced`, or the step's error, else."""
        self.counts = {ALIVE: given}

    def leaving(self) -> list[Leaving]:
        """The routes off the steps that have rows, once the counts are settled."""
        return [
            Leaving(number, route, step, self.counts[number])
            for number, route, step in self._routes()
            if number in self.counts
        ]

    def _routes(self) -> Iterator[tuple[int, str, str]]:
        return iter(())

    def gatherings(self, base: int) -> list[Gathering]:
        """The rows that an audit will ask for, under codes from `base` on."""
        return []

    def counting(self) -> DataFrame:
        """Count and digest of its rows by route, as one row each."""
        from pyspark.sql import functions as f

        rows = self.frame.selectExpr(f"{LINEAGE}.index = 0 AS first", *self._counted_columns())
        firsts = ["0L AS first_n", "0L AS first_low", "0L AS first_high"]
        if not self.given_rows_are_first:
            firsts = tally_sql("hash", when="first", prefix="first_")
        warns = ", ".join(f"sum({name})" for name in rows.columns if name.startswith("_warn"))
        sums = [*tally_sql("hash"), *firsts, f"CAST(array({warns}) AS ARRAY<BIGINT>) AS warned"]
        return rows.groupBy("route").agg(*(f.expr(text) for text in sums))

    def _counted_columns(self) -> Sequence[str]:
        return f"CAST({ALIVE} AS INT) AS route", f"{hash_sql(LINEAGE)} AS hash"

    def take_count(self, row: Any) -> None:
        """One row of what `counting` gave."""
        tally = tally_of(row)
        if tally.rows:
            firsts = tally if self.given_rows_are_first else tally_of(row, prefix="first_")
            self.counts[row["route"]] = Counted(tally, firsts)


@dataclass
class Rules(BatchOperator):
    """A run of consecutive rules: each row has the number of the first one that turns it away."""

    rules: tuple[Rule, ...]
    flags: tuple[str, ...] = ()
    """Columns that only these rules look at."""
    observation: Observation | None = None
    """Counts the routes while rows pass."""
    turned_away_text: str | None = None
    """What was observed of rows that filters turned away: four numbers for each."""

    is_counted_by_job: ClassVar[bool] = True

    @property
    def turning(self) -> list[tuple[int, Rule]]:
        """The rules that turn rows away, with the number of their route."""
        return list(enumerate((rule for rule in self.rules if not is_warning(rule)), start=1))

    @property
    def alive(self) -> DataFrame:
        dropped = (ROUTE, HASH, *_warn_columns(self.rules), *self.flags)
        return self.frame.where(f"{ROUTE} = {ALIVE}").drop(*dropped)

    def _routes(self) -> Iterator[tuple[int, str, str]]:
        for number, rule in self.turning:
            yield number, DEAD_LETTER if is_quarantine(rule) else FILTERED, rule.name

    def _counted_columns(self) -> Sequence[str]:
        return f"CAST({ROUTE} AS INT) AS route", f"{HASH} AS hash", *_warn_columns(self.rules)

    def take_count(self, row: Any) -> None:
        super().take_count(row)
        self._add_warnings(row["warned"])

    def _add_warnings(self, broken: Sequence[int]) -> None:
        for rule, count in zip(filter(is_warning, self.rules), broken, strict=True):
            if count:
                self.warned[rule.name] = self.warned.get(rule.name, 0) + count

    def take_observed(self, given: Counted) -> bool:
        """Take what Spark observed, if all of it is there and adds up."""
        metrics = metrics_of(self.observation) if self.observation is not None else None
        if metrics is None:
            return False
        for route in range(len(self.turning) + 1):
            tally = tally_of(metrics, prefix=f"r{route}_")
            if tally.rows:
                self.counts[route] = Counted(tally, tally)
        if self._total != given:
            return False
        self._add_warnings([metrics[name] for name in sorted(metrics) if name.startswith("warned")])
        self.turned_away_text = metrics.get(LEFT)
        return True

    @property
    def _total(self) -> Counted:
        return sum(self.counts.values(), NONE)

    def settle(self, given: Counted) -> None:
        if self._total != given:
            names = ", ".join(repr(rule.name) for rule in self.rules)
            raise Unbalanced(
                f"{self._total.tally.rows} rows came out of the rules {names} and {given.tally.rows} went in. Nothing "
                "was committed; please report this"
            )
        for number, rule in self.turning:
            if isinstance(rule, Expect) and rule.otherwise == "fail" and number in self.counts:
                raise self._broken(number, rule)

    def _broken(self, number: int, rule: Expect) -> RuleBroken:
        places = [f"{LINEAGE}.{name}" for name in PLACE[:-1]]
        rows = self.frame.where(f"{ROUTE} = {number}").selectExpr(*places).orderBy(*PLACE[:-1])
        examples = [
            f"{row.topic}-{row.partition} offset {row.offset}" for row in rows.limit(EXAMPLES).collect()
        ]
        return RuleBroken(
            f"rule {rule.name!r} ({rule.that}) does not hold for {self.counts[number].tally.rows} rows, and it "
            f"says `fail`: {', '.join(examples)}. Nothing of the batch was committed: correct the rule or the "
            "source, or let it quarantine such rows"
        )

    def gatherings(self, base: int) -> list[Gathering]:
        codes = {base + each.number: each.output for each in self.leaving() if each.route != DEAD_LETTER}

        def turned_away() -> DataFrame:
            # Tagged anew: the frame may carry the counting that another job had.
            rows = tagged(self.given, self.rules).selectExpr(LINEAGE, f"{ROUTE} + {base} AS code")
            return rows.where(f"code IN ({', '.join(map(str, codes))})")

        return [Gathering(turned_away, codes, base, self.turned_away_text)] if codes else []

    def dead_letters(self) -> DataFrame | None:
        """The rows that a rule sends to the dead letter sink, if there are any."""
        from pyspark.sql import functions as f

        chosen = [
            (number, rule)
            for number, rule in self.turning
            if isinstance(rule, Expect) and is_quarantine(rule) and number in self.counts
        ]
        if not chosen:
            return None
        reasons = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, rule.name)))
        errors = f.create_map(*(f.lit(part) for number, rule in chosen for part in (number, breaks(rule))))
        rows = self.frame.where(f.col(ROUTE).isin([number for number, _ in chosen]))
        return dead_letter(
            rows.select(LINEAGE, reasons[f.col(ROUTE)].alias("_reason"), errors[f.col(ROUTE)].alias("_error"))
        )


@dataclass
class Transformation(BatchOperator):
    """One query or Python function."""

    step: Sql | Python
    keeps_every_row: bool

    @property
    def is_counted_by_job(self) -> bool:
        return not self.keeps_every_row

    def _routes(self) -> Iterator[tuple[int, str, str]]:
        yield 1, FILTERED, self.step.name

    def settle(self, given: Counted) -> None:
        """What it left out is its filtered route, row by row."""
        if self.keeps_every_row:
            super().settle(given)
            return
        found = self.counts.get(ALIVE, NONE)
        if self.step.expand:
            given, found = (Counted(each.firsts, each.firsts) for each in (given, found))
        if found != given:
            missing = BatchOperator(self.given, self._missing(), self.given_rows_are_first)
            collect([missing])
            vanished = missing.counts.get(ALIVE, NONE)
            if found + vanished != given:
                raise self._surplus()
            self.counts[1] = vanished

    def _missing(self) -> DataFrame:
        """The rows that it was given and did not give back."""
        keys = list(PLACE[:-1] if self.step.expand else PLACE)
        left = self.given.selectExpr(LINEAGE, *(f"{LINEAGE}.{key} AS {key}" for key in keys))
        right = self.frame.selectExpr(*(f"{LINEAGE}.{key} AS {key}" for key in keys))
        return left.join(right, keys, "left_anti").select(LINEAGE)

    def _surplus(self) -> StepError:
        twice = self.frame.selectExpr(*(f"{LINEAGE}.{name}" for name in PLACE)).groupBy(*PLACE).count()
        example = twice.where("count > 1").orderBy("topic", "partition", "offset").first()
        if example is None:
            return StepError(
                self.step.name,
                "it returned rows of records it was not given. Nothing was committed; keep `_hf` as it is",
            )
        return StepError(
            self.step.name,
            f"it made {example['count']} rows of one (offset {example['offset']} of {example['topic']}-"
            f"{example['partition']}): a step that multiplies rows says `expand: true`. Nothing was committed",
        )

    def gatherings(self, base: int) -> list[Gathering]:
        return [
            Gathering(lambda: _coded(self._missing(), base), {base: each.output}) for each in self.leaving()
        ]


@dataclass
class LookupJoin(BatchOperator):
    """Columns of a reference table, whose keys are unique: whatever follows would not add up else."""


@dataclass
class Stateful(BatchOperator):
    """A step with a state, and what it made of the rows."""

    step: Step
    result: OperatorResult
    has_own_rows: bool
    """The rows go on as they came, whatever the step makes of them."""

    _STREAMS: ClassVar = {1: (DUPLICATE, DUPLICATES), 2: (LATE, LATE_ROWS)}
    """By the number of the route: what it is called, and the stream of its rows."""

    def _routes(self) -> Iterator[tuple[int, str, str]]:
        for number, (route, _) in self._STREAMS.items():
            yield number, route, self.step.name

    def settle(self, given: Counted) -> None:
        """What the step says became of its rows is all of them."""
        result = self.result
        told = result.taken + result.late + result.duplicate
        if told != given.tally:
            raise Unbalanced(
                f"step {self.step.name!r} accounts for {told.rows} rows and {given.tally.rows} reached it (digests "
                f"{told.digest:016x} and {given.tally.digest:016x}). Nothing was committed; please report this"
            )
        if self.has_own_rows:
            super().settle(given)
            return
        tallies = enumerate((result.taken, result.duplicate, result.late))
        self.counts = {route: Counted(tally, tally) for route, tally in tallies if tally.rows}
        if not self.given_rows_are_first:
            self._count_firsts()

    def _count_firsts(self) -> None:
        """Rows of one record may have gone different ways: the first of each is counted where it went."""
        streams = {number: self.result.streams.get(name) for number, (_, name) in self._STREAMS.items()}
        chosen = {
            route: BatchOperator(self.given, frame, given_rows_are_first=False)
            for route, frame in {ALIVE: self.result.rows, **streams}.items()
            if route in self.counts and frame is not None
        }
        collect(list(chosen.values()))
        for route, part in chosen.items():
            self.counts[route] = Counted(self.counts[route].tally, part.counts.get(ALIVE, NONE).firsts)

    def gatherings(self, base: int) -> list[Gathering]:
        outputs = {self._STREAMS[each.number][1]: each.output for each in self.leaving()}
        if self.has_own_rows and self.result.late.rows:
            outputs = {LATE_ROWS: SideOutput(LATE_FOR, self.step.name, self.result.late)}
        frames = {**self.result.streams, **self.result.places}
        return [
            Gathering(partial(_coded, frames[stream], code), {code: output})
            for code, (stream, output) in enumerate(outputs.items(), start=base)
        ]


def gather(operators: Sequence[BatchOperator]) -> list[Gathering]:
    """What left at these operators, once they are counted; empty when every row stayed."""
    found: list[Gathering] = []
    for operator in operators:
        base = 1 + max((code for each in found for code in each.codes), default=-1)
        found += operator.gatherings(base)
    return found


def _coded(frame: DataFrame, code: int) -> DataFrame:
    return frame.selectExpr(LINEAGE, f"{code} AS code")


# ---------------------------------------------------------------------------- counting


def count_operators(operators: Sequence[BatchOperator], given: Counted, *, have_run: bool) -> None:
    """Fill in the counts of every operator; `have_run`: a job over the last one's rows is done, and was observed."""
    if not (have_run and _observed(operators, given)):
        collect([operator for operator in operators if operator.is_counted_by_job])
    for operator in operators:
        operator.settle(given)
        given = operator.counts.setdefault(ALIVE, NONE)


def collect(operators: Sequence[BatchOperator]) -> None:
    """Count these in one job."""
    if not operators:
        return
    frames = []
    for number, operator in enumerate(operators):
        operator.counts.clear()
        operator.warned.clear()
        frames.append(operator.counting().selectExpr(f"{number} AS operator", "*"))
    for row in reduce(lambda one, other: one.unionAll(other), frames).collect():
        operators[row["operator"]].take_count(row)


def _observed(operators: Sequence[BatchOperator], given: Counted) -> bool:
    for operator in operators:
        if isinstance(operator, Rules):
            if not operator.take_observed(given):
                return False
            given = operator.counts.get(ALIVE, NONE)
    return True


# ---------------------------------------------------------------------------- rules


def is_warning(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "warn"


def is_quarantine(rule: Rule) -> bool:
    return isinstance(rule, Expect) and rule.otherwise == "quarantine"


def condition_of(rule: Rule) -> str:
    return f"coalesce(({rule.that if isinstance(rule, Expect) else rule.where}), false)"


def breaks(rule: Expect) -> str:
    return f"it breaks the rule {rule.name!r}: {rule.that}"


def _warn_columns(rules: Sequence[Rule]) -> list[str]:
    return [f"_warn{number}" for number in range(sum(map(is_warning, rules)))]


def parts(steps: Sequence[Step]) -> Iterator[tuple[Rule, ...] | Step]:
    """Runs of rules, and the other steps one by one; a lookup may leave a rule behind it."""
    from holdfast.pipeline.state.lookups import rule_of

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
            rules = [rule for rule in [rule_of(step)] if rule is not None]
    if rules:
        yield tuple(rules)


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
        texts += tally_sql(HASH, when=f"{ROUTE} = {route}", prefix=f"r{route}_")
    for number, name in enumerate(_warn_columns(rules)):
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
    topic = f"array_position(array({', '.join(map(literal, topics))}), {LINEAGE}.topic)"
    numbers = (ROUTE, topic, f"{LINEAGE}.partition", f"{LINEAGE}.offset")
    row = f"concat_ws(',', {', '.join(f'CAST({number} AS STRING)' for number in numbers)})"
    return f"concat_ws(',', collect_list(CASE WHEN {ROUTE} IN ({', '.join(routes)}) THEN {row} END))"


# ---------------------------------------------------------------------------- rows


def narrow(frame: DataFrame) -> DataFrame:
    """Rows as sinks get them: lineage, the record's own columns, then the user's."""
    own = [
        quoted(name)
        for name in frame.schema.names
        if not name.startswith("_") or name.startswith(KEY_PREFIX) or name in KEPT_RESERVED
    ]
    return frame.selectExpr(NARROW, *RECORD, *own)


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


def wide_with_event(floors_ms: Sequence[int | None], delay_ms: int) -> str:
    """The wide lineage with event time and the row's own watermark, at least the floor of its piece of the stage.

    Floors differ in every batch: in an array they are handed to Spark's generated code, which as numbers would stand in
    it and have it compiled anew each time.
    """
    floors = ", ".join("NULL" if each is None else f"{each}L" for each in floors_ms)
    own = f"greatest(_seen - {delay_ms}L, get(CAST(array({floors}) AS ARRAY<BIGINT>), _piece))"
    return f"named_struct({_WIDE_PARTS}, 'event_time', _event_time, 'watermark', timestamp_millis({own}))"
