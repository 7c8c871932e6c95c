"""What a step's SQL does, read from Spark's analysed plan.

A step may be replayed: for a sink that is behind, after a crash, on another machine. So what it computes must follow
from its input rows alone, and it must keep their lineage. Refused: functions whose result changes (`uuid`, `rand`,
`current_timestamp`, the place a task runs at), other tables, and what does not map rows to rows (aggregates, limits,
samples). Time is to be had from `_batch_time`, which is fixed with the batch's range.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import StepError, spark_message
from holdfast.pipeline.core.frames import as_input

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CHANGING: Final = {
    "Uuid": "uuid",
    "Rand": "rand",
    "Randn": "randn",
    "RandStr": "randstr",
    "Uniform": "uniform",
    "Shuffle": "shuffle",
    "CurrentTimestamp": "current_timestamp",
    "Now": "now",
    "CurrentDate": "current_date",
    "CurrentTime": "current_time",
    "LocalTimestamp": "localtimestamp",
    "CurrentBatchTimestamp": "current_timestamp",
    "MonotonicallyIncreasingID": "monotonically_increasing_id",
    "SparkPartitionID": "spark_partition_id",
    "InputFileName": "input_file_name",
    "InputFileBlockStart": "input_file_block_start",
    "InputFileBlockLength": "input_file_block_length",
    "CallMethodViaReflection": "reflect",
    "TryReflect": "try_reflect",
    "CurrentUser": "current_user",
    "First": "first",
    "Last": "last",
    "AnyValue": "any_value",
}
"""Expressions of Spark whose value does not follow from the row, and what SQL calls them."""

NOT_BY_ROW: Final = {
    "Aggregate": "aggregates rows",
    "Distinct": "removes duplicates",
    "Deduplicate": "removes duplicates",
    "GlobalLimit": "limits the number of rows",
    "LocalLimit": "limits the number of rows",
    "Tail": "limits the number of rows",
    "Offset": "leaves out the first rows",
    "Sample": "takes a sample",
    "Union": "unites queries",
    "Except": "subtracts queries",
    "Intersect": "intersects queries",
    "Pivot": "pivots",
}
KEEPING: Final = frozenset(
    {
        "Project",
        "SubqueryAlias",
        "View",
        "LogicalRDD",
        "LocalRelation",
        "WithCTE",
        "CTERelationDef",
        "CTERelationRef",
    }
)
"""Plans made of these alone give one row for each row."""
OWN_RELATIONS: Final = frozenset({"LogicalRDD", "LocalRelation", "OneRowRelation", "Range", "CTERelationRef"})

_LEADING: Final = re.compile(r"^(?:\s+|--[^\n]*\n|/\*.*?\*/)*", re.DOTALL)


@dataclass(frozen=True)
class PlanShape:
    """What the plan of a query says."""

    keeps_every_row: bool
    """One row out for each row in, by its form alone."""
    is_cheap: bool
    """Computing it twice costs less than writing it down."""


def quiet_spark() -> None:
    """Spark's Python side prints the JVM's stack of every error it raises; we raise it, in words."""
    for name in ("SQLQueryContextLogger", "DataFrameQueryContextLogger"):
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)


def run_query(spark: SparkSession, step: str, query: str, frame: DataFrame) -> DataFrame:
    """The query over `frame` as `input`, analysed and not executed."""
    _refuse_commands(spark, step, query)
    try:
        with as_input(spark, frame):
            return spark.sql(query)
    except Exception as error:
        raise StepError(step, spark_message(error)) from error


def inspect(step: str, frame: DataFrame) -> PlanShape:
    """Look at an analysed query over an empty input; `StepError` when it cannot be a step."""
    expressions, plans = classes_of(frame)
    for name in expressions:
        if name in CHANGING:
            raise StepError(
                step,
                f"{CHANGING[name]}() gives another value when the batch is replayed, and sinks would differ; "
                "take the time from `_batch_time`, and identifiers from `_hf` (topic, partition, offset)",
            )
    for name in plans:
        if name in NOT_BY_ROW:
            raise StepError(
                step,
                f"the query {NOT_BY_ROW[name]}: a step maps rows to rows, so that each record is accounted for",
            )
        if "Relation" in name and name not in OWN_RELATIONS:
            raise StepError(
                step,
                "the query reads another table, which may be another one on replay: a step reads `input` only",
            )
    return PlanShape(
        keeps_every_row=all(name in KEEPING for name in plans),
        is_cheap=all(name in KEEPING or name == "Filter" for name in plans),
    )


def _refuse_commands(spark: SparkSession, step: str, query: str) -> None:
    """`spark.sql` executes commands at once, so they must be seen before."""
    try:
        parsed = spark._jsparkSession.sessionState().sqlParser().parsePlan(query)
        kind = str(parsed.getClass().getSimpleName())
    except Exception as error:
        raise StepError(step, spark_message(error)) from error
    first = _LEADING.sub("", query)[:6].upper()
    if not first.startswith(("SELECT", "WITH", "FROM", "VALUES", "(", "TABLE")) or "Insert" in kind:
        raise StepError(step, "a step is a query: it begins with SELECT, or WITH … SELECT")


def classes_of(frame: DataFrame) -> tuple[list[str], list[str]]:
    """The expressions and the plan nodes of a frame's analysed plan, by class."""
    document = json.loads(frame._jdf.queryExecution().analyzed().toJSON())
    names: list[str] = []

    def walk(part: Any) -> None:
        if isinstance(part, dict):
            if isinstance(part.get("class"), str):
                names.append(part["class"])
            for each in part.values():
                walk(each)
        elif isinstance(part, list):
            for each in part:
                walk(each)

    walk(document)
    expressions = [name.rsplit(".", 1)[-1] for name in names if ".expressions." in name]
    plans = [name.rsplit(".", 1)[-1] for name in names if ".expressions." not in name]
    return expressions, plans
