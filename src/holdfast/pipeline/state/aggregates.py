"""SQL aggregates that can be kept as partial results, and those for which rows have to be kept.

A batch adds what its own rows come to, and what several batches added is merged when a window closes. That works for
aggregates whose partial results form a monoid: each is written here as SQL over rows (`partial`), SQL over partial
results (`merge`) and SQL over the merged ones (the `finish` of its column). An expression over such aggregates,
`sum(a) / count(*)`, is split into them. A step with any other aggregate keeps the rows themselves, the columns that its
aggregates name, and computes it by Spark's own SQL when the window closes: *general* mode.

What follows from the rows alone must not depend on how they were cut into batches:

- `first`, `last`, `any_value`, `collect_list`, `max_by` and `min_by` go by event time, then by topic, partition, offset
  and index. In general mode rows are aggregated in that order too.
- `count(distinct …)` is exact, a set; `approx_count_distinct` is a HyperLogLog sketch that is united with itself before
  it is read, since one that was never merged is estimated in another way.
- Sums of longs and decimals are exact, and too large ones stop the pipeline. Sums of doubles are not associative: their
  last digits can differ with the batches. Who minds casts to decimal.
- Functions whose value does not follow from the rows (`rand`, `current_timestamp`) are refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.inspection import CHANGING, classes_of, quiet_spark
from holdfast.pipeline.core.sql import PLACE
from holdfast.pipeline.sinks.columns import column_named

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

COUNT: Final = "_n"
DIGEST: Final = ("_low", "_high")
"""The halves of the digest's sum, each below 2**32."""
START: Final = "_start"
"""Null in rows that take no part: they are counted with the others and aggregated by nobody."""
ORDER: Final = ", ".join(f"'{name}', _hf.{name}" for name in ("event_time", *PLACE))
"""Fields of a struct by which rows are first and last."""
IN_ORDER: Final = frozenset({"First", "Last", "AnyValue"})
"""Refused in other steps; here rows have an order."""
SKETCH_LOG_SIZE: Final = 12
"""4096 registers: an error of about 1.6 %."""
SKETCH_LOG_SIZES: Final = (4, 21)
SKETCH_PLAIN: Final = frozenset({"int", "bigint", "string", "binary"})
"""What Spark's sketches take as it is."""
EXACT_SUMS: Final = frozenset({"tinyint", "smallint", "int"})


@dataclass(frozen=True)
class Part:
    """One column of partial results."""

    partial: str
    """SQL aggregate over rows."""
    merge: str
    """SQL aggregate over partial results; `{}` is the column."""
    keeps_type: bool = False
    """The merged one has to be cast to the type it had: sums of decimals widen."""


@dataclass(frozen=True)
class Split:
    """An aggregate as partial results; in `finish`, `{0}`, `{1}`… are their merged columns."""

    parts: tuple[Part, ...]
    finish: str


@dataclass(frozen=True)
class Aggregation:
    """The aggregates of one step, ready to be used."""

    is_general: bool
    parts: Mapping[str, Part] = field(default_factory=dict)
    """By the name of the column in the state."""
    finishes: Mapping[str, str] = field(default_factory=dict)
    """SQL by the name of its column: over merged partial results; general: aggregates over rows."""
    raw: tuple[str, ...] = ()
    """General: the columns that are kept of each row."""
    types: Mapping[str, DataType] = field(default_factory=dict)
    """Of the partial results."""

    def partials(self) -> list[str]:
        return [f"{part.partial} AS {name}" for name, part in self.parts.items()]

    def merges(self) -> list[str]:
        texts = []
        for name, part in self.parts.items():
            text = part.merge.format(name)
            texts.append(f"{self._cast(name, text) if part.keeps_type else text} AS {name}")
        return texts

    def _cast(self, name: str, text: str) -> str:
        return f"CAST({text} AS {self.types[name].simpleString()})"


@dataclass(frozen=True)
class Call:
    """A function as it stands in the SQL."""

    name: str
    arguments: tuple[str, ...]
    is_distinct: bool
    ignores_nulls: bool
    condition: str | None
    is_plain: bool
    """Nothing else is said of it, such as an order within the group."""
    begin: int
    end: int

    def filter(self, *more: str) -> str:
        conditions = [f"{START} IS NOT NULL", *([f"({self.condition})"] if self.condition else []), *more]
        return f"FILTER (WHERE {' AND '.join(conditions)})"


# ---------------------------------------------------------------------------- a step's aggregates


def compile_aggregates(
    spark: SparkSession, step: str, aggregates: Mapping[str, str], keys: Sequence[str], rows: StructType
) -> Aggregation:
    """`StepError` for SQL that is no aggregate, or gives another value on replay."""
    quiet_spark()
    empty = spark.createDataFrame([], rows)
    wanted: dict[str, str] = {}
    for name, sql in aggregates.items():
        wanted[name] = _checked_type(empty, step, keys, name, sql)

    def typed(sql: str) -> str:
        return empty.selectExpr(f"{sql} AS _x").schema["_x"].dataType.simpleString()

    parts: dict[str, Part] = {}
    finishes: dict[str, str] = {}
    for name, sql in aggregates.items():
        finish = _split_expression(spark, sql, typed, parts)
        if finish is None:
            return _general(spark, aggregates, keys, rows)
        finishes[name] = finish
    types = _partial_types(empty, parts)
    if types is None:
        return _general(spark, aggregates, keys, rows)
    ready = Aggregation(False, parts, finishes, (), types)
    cast = _cast_finishes(spark, ready, keys, rows, wanted)
    return cast if cast is not None else _general(spark, aggregates, keys, rows)


def _general(
    spark: SparkSession, aggregates: Mapping[str, str], keys: Sequence[str], rows: StructType
) -> Aggregation:
    by_name = {name.lower(): name for name in rows.names}
    named: dict[str, None] = {}
    for sql in aggregates.values():
        for node in _nodes(_parsed(spark, sql)):
            if node.getClass().getSimpleName() == "UnresolvedAttribute":
                first = str(node.nameParts().apply(0)).lower()
                if first in by_name:
                    named[by_name[first]] = None
            elif node.getClass().getSimpleName() == "UnresolvedStar":
                named.update(dict.fromkeys(name for name in rows.names if not name.startswith("_")))
    raw = tuple(name for name in named if name not in keys)
    return Aggregation(True, {}, dict(aggregates), raw, {})


def _checked_type(empty: DataFrame, step: str, keys: Sequence[str], name: str, sql: str) -> str:
    """The type of an aggregate's column."""
    from pyspark.sql import functions as f

    def wrong(what: str) -> StepError:
        return StepError(step, f"aggregate {name!r} ({sql}): {what}")

    try:
        frame = empty.groupBy(*(column_named(key) for key in keys), f.lit(1)).agg(f.expr(sql).alias("_x"))
    except Exception as error:
        raise wrong(spark_message(error)) from error
    classes = _classes(frame)
    for each in classes:
        if each in CHANGING and each not in IN_ORDER:
            raise wrong(
                f"{CHANGING[each]}() gives another value when the batch is replayed, and sinks would differ; take "
                "the time from the rows"
            )
    if "AggregateExpression" not in classes:
        raise wrong("it is no aggregate of the window's rows: write count(*), sum(amount), max(price)…")
    if (
        "WindowExpression" in classes
        or "Generate" in classes
        or any(each.endswith("Subquery") for each in classes)
    ):
        raise wrong("an aggregate gives one value for a window: no OVER, explode or query can be in it")
    return frame.schema["_x"].dataType.simpleString()


def _cast_finishes(
    spark: SparkSession, ready: Aggregation, keys: Sequence[str], rows: StructType, wanted: Mapping[str, str]
) -> Aggregation | None:
    """With every finish of the type that the SQL itself has; None when one does not work on merged results."""
    from pyspark.errors import AnalysisException

    merged = spark.createDataFrame([], state_schema(ready, keys, rows, ()))
    finishes: dict[str, str] = {}
    for name, sql in ready.finishes.items():
        try:
            frame = merged.selectExpr(f"{sql} AS _x")
        except AnalysisException:
            # Another aggregate, or a column of the rows: Spark's own SQL will do it, over rows.
            return None
        if "AggregateExpression" in _classes(frame):
            return None
        found = frame.schema["_x"].dataType.simpleString()
        finishes[name] = sql if found == wanted[name] else f"CAST({sql} AS {wanted[name]})"
    return Aggregation(False, ready.parts, finishes, (), ready.types)


def state_schema(
    aggregation: Aggregation, keys: Sequence[str], rows: StructType, times: Sequence[str]
) -> StructType:
    """The columns of a step's state: keys, these times in milliseconds, what aggregates need, count and digest."""
    from pyspark.sql.types import LongType, StructField, StructType

    longs = [StructField(name, LongType()) for name in (*times, COUNT, *DIGEST)]
    kept = [StructField(name, rows[name].dataType) for name in (*keys, *aggregation.raw)]
    parts = [StructField(name, kind) for name, kind in aggregation.types.items()]
    return StructType([*kept[: len(keys)], *longs, *kept[len(keys) :], *parts])


def _partial_types(empty: DataFrame, parts: Mapping[str, Part]) -> dict[str, DataType] | None:
    """None when Spark cannot keep one of them: values without an order, such as maps."""
    from pyspark.errors import AnalysisException
    from pyspark.sql import functions as f

    if not parts:
        return {}
    rows = empty.withColumn(START, f.lit(0).cast("bigint"))
    try:
        frame = rows.groupBy(f.lit(1)).agg(
            *(f.expr(part.partial).alias(name) for name, part in parts.items())
        )
    except AnalysisException:
        return None
    return {name: frame.schema[name].dataType for name in parts}


Types: TypeAlias = Callable[[str], str]
"""Of expressions over rows: the type, in Spark's words."""


# ---------------------------------------------------------------------------- reading the SQL


def _parsed(spark: SparkSession, sql: str) -> Any:
    return spark._jsparkSession.sessionState().sqlParser().parseExpression(sql)


def _children(node: Any) -> list[Any]:
    children = node.children()
    return [children.apply(number) for number in range(children.size())]


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    for child in _children(node):
        yield from _nodes(child)


def _range(node: Any) -> tuple[int, int] | None:
    """Where in the text a part of the parsed SQL stands."""
    origin = node.origin()
    begin, end = origin.startIndex(), origin.stopIndex()
    return (int(begin.get()), int(end.get()) + 1) if begin.isDefined() and end.isDefined() else None


def _split_expression(spark: SparkSession, sql: str, typed: Types, parts: dict[str, Part]) -> str | None:
    """The finish of an expression, whose parts are added to `parts`; None for one that cannot be split."""
    pieces: list[str] = []
    position = 0
    for call in _calls(_parsed(spark, sql), sql):
        split = _split_call(call, typed)
        if split is None:
            return None
        names = [_part_name(part, parts) for part in split.parts]
        pieces += [sql[position : call.begin], f"({split.finish.format(*names)})"]
        position = call.end
    return "".join([*pieces, sql[position:]])


def _part_name(part: Part, parts: dict[str, Part]) -> str:
    """Of the column that holds it: two aggregates may share one."""
    for name, other in parts.items():
        if other == part:
            return name
    parts[name := f"_p{len(parts)}"] = part
    return name


def _calls(node: Any, sql: str) -> Iterator[Call]:
    """The outermost functions of this SQL that can be split, as they stand in it."""
    if node.getClass().getSimpleName() == "UnresolvedFunction":
        call = _call(node, sql)
        if call is not None and call.name in SPLITS:
            yield call
            return
    elif node.getClass().getSimpleName() == "AggregateExpression":
        # The parser has words of its own for first, last and any_value, and makes an aggregate of them at once.
        function, place = node.aggregateFunction(), _range(node)
        name = str(function.prettyName()).lower()
        if place is not None and name in ("first", "last", "any_value"):
            value = _text(function.child(), place, sql)
            yield Call(name, (value,), False, bool(function.ignoreNulls()), None, True, *place)
            return
    for child in _children(node):
        yield from _calls(child, sql)


def _call(node: Any, sql: str) -> Call | None:
    place = _range(node)
    if place is None or node.nameParts().size() != 1:
        return None
    arguments = node.arguments()
    texts = [_text(arguments.apply(number), place, sql) for number in range(arguments.size())]
    condition = node.filter()
    nulls = node.ignoreNulls()
    return Call(
        name=str(node.nameParts().apply(0)).lower(),
        arguments=tuple(texts),
        is_distinct=bool(node.isDistinct()),
        ignores_nulls=bool(nulls.isDefined() and nulls.get()),
        condition=_text(condition.get(), place, sql) if condition.isDefined() else None,
        is_plain=node.orderingWithinGroup().isEmpty(),
        begin=place[0],
        end=place[1],
    )


def _text(node: Any, parent: tuple[int, int], sql: str) -> str:
    """A part as the user wrote it; what the parser put in itself, such as the 1 of count(*), in Spark's words."""
    place = _range(node)
    return str(node.sql()) if place is None or place == parent else sql[place[0] : place[1]]


def _classes(frame: DataFrame) -> set[str]:
    expressions, plans = classes_of(frame)
    return {*expressions, *plans}


# ---------------------------------------------------------------------------- the ones that can be split


def _split_call(call: Call, typed: Types) -> Split | None:
    if not call.is_plain:
        return None
    if call.is_distinct and call.name not in ("count", "min", "max", "collect_set"):
        return None
    return SPLITS[call.name](call, typed)


def _count(call: Call, typed: Types) -> Split | None:
    if call.is_distinct:
        return _count_distinct(call)
    if call.condition is None and call.arguments == ("1",):
        return Split((), COUNT)
    part = Part(f"count({', '.join(call.arguments)}) {call.filter()}", "sum({})")
    return Split((part,), "{0}")


def _count_distinct(call: Call) -> Split:
    given = [f"({argument}) IS NOT NULL" for argument in call.arguments]
    value = call.arguments[0]
    if len(call.arguments) > 1:
        fields = ", ".join(f"'c{number}', {argument}" for number, argument in enumerate(call.arguments))
        value = f"named_struct({fields})"
    return Split((_set(f"collect_set({value}) {call.filter(*given)}"),), "CAST(size({0}) AS BIGINT)")


def _set(partial: str) -> Part:
    return Part(partial, "array_distinct(flatten(collect_list({})))")


def _sum(call: Call, typed: Types) -> Split | None:
    if len(call.arguments) != 1 or not _is_number(typed(call.arguments[0])):
        return None
    part = Part(f"sum({call.arguments[0]}) {call.filter()}", "sum({})", keeps_type=True)
    return Split((part,), "{0}")


def _average(call: Call, typed: Types) -> Split | None:
    if len(call.arguments) != 1:
        return None
    value = call.arguments[0]
    kind = typed(value)
    if not _is_number(kind):
        return None
    # A long may overflow its sum though not its average; as decimals the sum is still exact.
    summed = f"CAST({value} AS DECIMAL(20, 0))" if kind == "bigint" else value
    total = Part(f"sum({summed}) {call.filter()}", "sum({})", keeps_type=True)
    number = Part(f"count({value}) {call.filter()}", "sum({})")
    is_decimal = kind.startswith("decimal")
    return Split(
        (total, number), "try_divide({0}, {1})" if is_decimal else "try_divide(CAST({0} AS DOUBLE), {1})"
    )


def _is_number(kind: str) -> bool:
    return kind in EXACT_SUMS | {"bigint", "float", "double"} or kind.startswith("decimal")


def _itself(merge: str) -> Callable[[Call, Types], Split | None]:
    """Aggregates whose partial results are merged by one that is as simple."""

    def split(call: Call, typed: Types) -> Split | None:
        if len(call.arguments) != 1:
            return None
        return Split((Part(f"{call.name}({call.arguments[0]}) {call.filter()}", merge),), "{0}")

    return split


def _extreme(side: str, *, by: bool = False) -> Callable[[Call, Types], Split | None]:
    """`first` and `last` by the rows' own order; `max_by` and `min_by` by a value, and then by that order."""

    def split(call: Call, typed: Types) -> Split | None:
        if len(call.arguments) not in ((2,) if by else (1, 2)):
            return None
        value = call.arguments[0]
        ignores_nulls = call.ignores_nulls
        if not by and len(call.arguments) == 2:
            if call.arguments[1].lower() not in ("true", "false"):
                return None
            ignores_nulls = call.arguments[1].lower() == "true"
        more = []
        if by:
            more.append(f"({call.arguments[1]}) IS NOT NULL")
        elif ignores_nulls:
            more.append(f"({value}) IS NOT NULL")
        first = f"'by', {call.arguments[1]}, " if by else ""
        struct = f"named_struct({first}{ORDER}, 'v', {value})"
        return Split((Part(f"{side}({struct}) {call.filter(*more)}", f"{side}({{}})"),), "{0}.v")

    return split


def _list(call: Call, typed: Types) -> Split | None:
    if len(call.arguments) != 1:
        return None
    value = call.arguments[0]
    partial = f"collect_list(named_struct({ORDER}, 'v', {value})) {call.filter(f'({value}) IS NOT NULL')}"
    return Split((Part(partial, "flatten(collect_list({}))"),), "transform(array_sort({0}), e -> e.v)")


def _distinct_list(call: Call, typed: Types) -> Split | None:
    if len(call.arguments) != 1:
        return None
    return Split((_set(f"collect_set({call.arguments[0]}) {call.filter()}"),), "array_sort({0})")


def _sketch(call: Call, typed: Types) -> Split | None:
    if len(call.arguments) not in (1, 2):
        return None
    size = SKETCH_LOG_SIZE
    if len(call.arguments) == 2:
        try:
            wanted = float(call.arguments[1].rstrip("dDbB"))
            size = min(max(math.ceil(2 * math.log2(1.04 / wanted)), SKETCH_LOG_SIZES[0]), SKETCH_LOG_SIZES[1])
        except (ValueError, ZeroDivisionError):
            return None
    value = call.arguments[0]
    kind = typed(value)
    if kind in EXACT_SUMS:
        value = f"CAST({value} AS BIGINT)"
    elif kind in ("float", "double"):
        value = f"CAST(({value}) + CAST(0 AS {kind}) AS STRING)"  # -0.0 is 0.0, and spelled otherwise
    elif kind not in SKETCH_PLAIN:
        value = f"to_json(struct({value} AS v))" if "<" in kind else f"CAST({value} AS STRING)"
    part = Part(
        f"hll_sketch_agg({value}, {size}) {call.filter(f'({call.arguments[0]}) IS NOT NULL')}",
        "hll_union_agg({})",
    )
    return Split((part,), "coalesce(hll_sketch_estimate(hll_union({0}, {0})), 0L)")


SPLITS: Final[Mapping[str, Callable[[Call, Types], Split | None]]] = {
    "count": _count,
    "count_if": _itself("sum({})"),
    "sum": _sum,
    "avg": _average,
    "mean": _average,
    "min": _itself("min({})"),
    "max": _itself("max({})"),
    "bool_and": _itself("min({})"),
    "every": _itself("min({})"),
    "bool_or": _itself("max({})"),
    "some": _itself("max({})"),
    "any": _itself("max({})"),
    "bit_and": _itself("bit_and({})"),
    "bit_or": _itself("bit_or({})"),
    "bit_xor": _itself("bit_xor({})"),
    "first": _extreme("min"),
    "first_value": _extreme("min"),
    "any_value": _extreme("min"),
    "last": _extreme("max"),
    "last_value": _extreme("max"),
    "max_by": _extreme("max", by=True),
    "min_by": _extreme("min", by=True),
    "collect_list": _list,
    "array_agg": _list,
    "collect_set": _distinct_list,
    "approx_count_distinct": _sketch,
}
