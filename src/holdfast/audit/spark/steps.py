"""The steps of a definition evaluated again, by their own SQL: what must be in the sinks, and what must have left.

Rules, filters and queries are evaluated. What a deduplication took out is taken from the record of the pipeline, and
checked elsewhere. Behind a Python step or a lookup nothing can be said without running what only the pipeline has: from
there on rows are judged by what was recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import TYPE_CHECKING, Final

from holdfast.audit.model import Fate
from holdfast.pipeline.core.frames import as_input
from holdfast.pipeline.definition.model import (
    Dedupe,
    Expect,
    Filter,
    Lookup,
    PipelineDefinition,
    Python,
    Sql,
)

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

LINEAGE: Final = "_hf"
PLACE: Final = ("topic", "partition", "offset")
PARSE: Final = "parse"
_LEFT: Final = "topic string, partition int, offset bigint, route string, step string"


@dataclass
class Evaluated:
    """What the definition says of the records that it made itself."""

    main: DataFrame
    """The rows at the end of the steps, with `_hf` and their columns."""
    left: list[DataFrame] = field(default_factory=list)
    """Places of rows that left: topic, partition, offset, route, step."""
    unknown: str = ""
    """The step behind which nothing is known; nothing: all is."""
    expands: bool = False

    def all_left(self, spark: SparkSession) -> DataFrame:
        nothing = spark.createDataFrame([], _LEFT)
        return reduce(lambda one, other: one.unionByName(other), self.left, nothing)


def evaluate(
    spark: SparkSession, definition: PipelineDefinition, records: DataFrame, aside: DataFrame
) -> Evaluated:
    """`records` are those made by this definition; `aside` is what the pipeline recorded (place, route, step)."""
    dead = records.where("_error IS NOT NULL")
    rows = records.where("_error IS NULL").selectExpr(
        "named_struct('topic', topic, 'partition', partition, 'offset', offset, 'index', 0) AS _hf",
        "*",
    )
    found = Evaluated(rows.drop(*PLACE, "kind", "is_current", "_raw", "_error"))
    found.left.append(_left(dead.selectExpr(*PLACE), Fate.DEAD_LETTER, PARSE))
    for step in definition.steps:
        match step:
            case Expect():
                if step.otherwise in ("warn", "fail"):
                    continue
                fate = Fate.DEAD_LETTER if step.otherwise == "quarantine" else Fate.FILTERED
                _part(found, f"coalesce(({step.that}), false)", fate, step.name)
            case Filter():
                _part(found, f"coalesce(({step.where}), false)", Fate.FILTERED, step.name)
            case Sql():
                _query(spark, found, step)
            case Dedupe():
                _without(found, aside, step.name)
            case Python() | Lookup():
                found.unknown = step.name
                return found
    return found


def _places(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(*(f"{LINEAGE}.{name} AS {name}" for name in PLACE))


def _left(places: DataFrame, fate: Fate, step: str) -> DataFrame:
    from pyspark.sql import functions

    return places.select(*PLACE, functions.lit(str(fate)).alias("route"), functions.lit(step).alias("step"))


def _part(found: Evaluated, condition: str, fate: Fate, step: str) -> None:
    found.left.append(_left(_places(found.main.where(f"NOT ({condition})")), fate, step))
    found.main = found.main.where(condition)


def _query(spark: SparkSession, found: Evaluated, step: Sql) -> None:
    given = found.main
    with as_input(spark, given):
        found.main = spark.sql(step.query)
    found.expands = found.expands or step.expand
    missing = _places(given).join(_places(found.main).distinct(), list(PLACE), "left_anti")
    found.left.append(_left(missing, Fate.FILTERED, step.name))


def _without(found: Evaluated, aside: DataFrame, step: str) -> None:
    """Rows that the step is recorded to have taken out."""
    from pyspark.sql import functions

    gone = aside.where(functions.col("step") == step).where("route IN ('duplicate', 'late')")
    found.left.append(gone.select(*PLACE, "route", "step"))
    taken = gone.select(*(functions.col(name).alias(f"_gone_{name}") for name in PLACE)).distinct()
    same = reduce(
        lambda one, other: one & other,
        (functions.col(f"{LINEAGE}.{name}") == functions.col(f"_gone_{name}") for name in PLACE),
    )
    found.main = found.main.join(taken, same, "left_anti")


def stored(names: Sequence[str]) -> list[str]:
    """The columns that sinks keep, but for the lineage."""
    return [name for name in names if not name.startswith("_")]
