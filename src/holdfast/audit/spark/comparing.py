"""Places held against each other by Spark: one row for each place, with how often everybody has it.

The source, what the steps say of it, what the pipeline recorded of rows that left, dead letters and sinks become one
frame of places, grouped once. What is wrong is then a condition over numbers, by fate and sink; many places of it are
brought to the driver and named as ranges, the rest is counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Final

import numpy as np

from holdfast.audit.lineage import as_ranges
from holdfast.audit.model import Fate, Finding
from holdfast.audit.spark.steps import PLACE
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

NAMED_MAX: Final = 100_000
"""Places that are brought to the driver, of all that is wrong."""
WRONG: Final = "array<struct<fate: string, sink: string, why: string>>"


@dataclass(frozen=True)
class Held:
    """The rows of one sink, as places (`topic`, `partition`, `offset`), and since when it is held to the source."""

    name: str
    frame: DataFrame
    starts: Mapping[Place, int]
    """Of sinks that were added later."""


def place_counts(
    records: DataFrame,
    main: DataFrame | None,
    left: DataFrame,
    aside: DataFrame,
    dead: DataFrame,
    sinks: Sequence[Held],
) -> DataFrame:
    """By place: `record`, `current`, `_timestamp`, `e_main`, `e_<route>`, `a_<route>`, `dead`, `s_<n>` of each sink.

    `records` are all offsets of the source, `main` and `left` what the steps say, `aside` what was recorded.
    """
    from pyspark.sql import functions

    col = functions.col
    names = ["record", "current", "e_main", "dead", *(f"s_{number}" for number in range(len(sinks)))]
    routes = [str(each) for each in (Fate.DEAD_LETTER, Fate.FILTERED, Fate.DUPLICATE, Fate.LATE)]
    names += [f"{who}_{route}" for who in ("e", "a") for route in routes]

    def counted(frame: DataFrame, **ones: str) -> DataFrame:
        numbers = [functions.expr(ones.get(name, "0L")).cast("bigint").alias(name) for name in names]
        time = col("_timestamp") if "_timestamp" in frame.columns else functions.lit(None).cast("timestamp")
        return frame.select(*PLACE, time.alias("_timestamp"), *numbers)

    parts = [
        counted(
            records,
            record="if(kind = 'record', 1L, 0L)",
            current="if(is_current, 1L, 0L)",
        ),
        counted(left, **{f"e_{route}": f"if(route = '{route}', 1L, 0L)" for route in routes}),
        counted(aside, **{f"a_{route}": f"if(route = '{route}', 1L, 0L)" for route in routes}),
        counted(dead, dead="1L"),
        *(counted(held.frame, **{f"s_{number}": "1L"}) for number, held in enumerate(sinks)),
    ]
    if main is not None:
        parts.append(counted(main, e_main="1L"))
    everything = reduce(lambda one, other: one.unionByName(other), parts)
    return everything.groupBy(*PLACE).agg(
        functions.max("_timestamp").alias("_timestamp"),
        *(functions.sum(name).alias(name) for name in names),
    )


def judged(
    counts: DataFrame, sinks: Sequence[Held], dead_name: str, *, is_known: bool, expands: bool
) -> DataFrame:
    """With `due`, how often a sink must have the place; `wrong`, what is not as it must be; and `fate`."""
    sides = "(dead + a_filtered + a_duplicate + a_late)"
    held = [f"s_{number}" for number in range(len(sinks))]
    some = f"greatest({', '.join([*held, '1L'])})" if expands else "1L"
    recorded = (
        f"if({sides} > 0, 0L, {some})"
        if not expands
        else f"if({sides} > 0, {held[0] if held else '0L'}, {some})"
    )
    e_left = "(e_dead_letter + e_filtered + e_duplicate + e_late)"
    due = (
        f"if(current > 0, e_main, {recorded})"
        if is_known
        else (f"if(current > 0 AND {e_left} > 0, 0L, {recorded})")
    )
    frame = counts.selectExpr("*", f"if(record > 0, {due}, 0L) AS due")
    frame = frame.selectExpr(
        "*", f"if(current > 0 AND ({e_left} > 0 OR {str(is_known).lower()}), e_dead_letter, dead) AS due_dead"
    )
    wrong = [_fault("EXTRA", dead_name, "record = 0 AND dead > 0", "it is no record of the source")]
    wrong += [
        _fault("LOST", dead_name, "record > 0 AND dead < due_dead", "the steps make it a dead letter"),
        _fault(
            "DUPLICATED",
            dead_name,
            "record > 0 AND dead > greatest(due_dead, 1L)",
            "it is there more than once",
        ),
        _fault(
            "DUPLICATED",
            dead_name,
            "record > 0 AND dead > 0 AND dead > due_dead AND dead <= 1",
            "the steps let it pass, and it is a dead letter",
        ),
        _fault(
            "DUPLICATED",
            "",
            "record > 0 AND (dead > 0 AND (a_filtered + a_duplicate + a_late) > 0)"
            if not expands
            else "false",
            "it went by two routes",
        ),
        _fault(
            "EXTRA",
            "",
            "record = 0 AND (a_filtered + a_duplicate + a_late) > 0",
            "recorded as left, and no record",
        ),
        _fault(
            "LOST",
            "",
            "record > 0 AND current > 0 AND e_filtered > 0 AND a_filtered = 0 AND dead = 0"
            + "".join(f" AND {name} = 0" for name in held),
            "a step lets it go, and there is no record of that",
        ),
    ]
    for number, sink in enumerate(sinks):
        own = f"s_{number}"
        inside = _since(sink.starts)
        wrong += [
            _fault("LOST", sink.name, f"record > 0 AND {own} < due AND {inside}", ""),
            _fault(
                "DUPLICATED",
                sink.name,
                f"record > 0 AND due > 0 AND {own} > due",
                "it is there more than once",
            ),
            _fault(
                "DUPLICATED",
                sink.name,
                f"record > 0 AND due = 0 AND {own} > 0",
                "it is in the sink, and went another way",
            ),
            _fault("EXTRA", sink.name, f"record = 0 AND {own} > 0", "it is no record of the source"),
        ]
    frame = frame.selectExpr("*", f"filter(array({', '.join(wrong)}), each -> each IS NOT NULL) AS wrong")
    return frame.selectExpr("*", f"{_fate(bool(held))} AS fate")


def _fate(has_sinks: bool) -> str:
    found = "CASE WHEN record = 0 THEN NULL "
    for fate in ("lost", "duplicated"):
        found += f"WHEN exists(wrong, each -> each.fate = '{fate}') THEN '{fate}' "
    found += "WHEN dead > 0 THEN 'dead_letter' "
    for route in ("filtered", "duplicate", "late"):
        found += f"WHEN a_{route} > 0 AND due = 0 THEN '{route}' "
    return found + f"ELSE '{'output' if has_sinks else 'aggregated'}' END"


def _fault(fate: str, sink: str, condition: str, why: str) -> str:
    texts = (str(Fate[fate]), sink, why)
    values = ", ".join(
        f"'{name}', '{_quoted(text)}'" for name, text in zip(("fate", "sink", "why"), texts, strict=True)
    )
    return f"if({condition}, named_struct({values}), NULL)"


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _since(starts: Mapping[Place, int]) -> str:
    """Whether a place is not before these."""
    if not starts:
        return "true"
    cases = " ".join(
        f"WHEN topic = '{_quoted(place.topic)}' AND partition = {place.partition} THEN offset >= {start}"
        for place, start in starts.items()
    )
    return f"(CASE {cases} ELSE true END)"


def findings_of(wrong: DataFrame, places: Mapping[tuple[str, int], Place]) -> list[Finding]:
    """Of rows with `topic`, `partition`, `offset`, `fate`, `sink` and `why`: the findings, and how many each has."""
    counted = {
        (row["fate"], row["sink"], row["why"], row["topic"], row["partition"]): row["count"]
        for row in wrong.groupBy("fate", "sink", "why", "topic", "partition").count().collect()
    }
    if not counted:
        return []
    offsets: dict[tuple[str, str, str, str, int], list[int]] = {}
    for row in wrong.orderBy(*PLACE).limit(NAMED_MAX).collect():
        key = (row["fate"], row["sink"], row["why"], row["topic"], row["partition"])
        offsets.setdefault(key, []).append(row["offset"])
    found = []
    for key, count in sorted(counted.items()):
        fate, sink, why, topic, partition = key
        place = places.get((topic, partition))
        ranges = as_ranges(np.unique(np.array(offsets.get(key, []), np.int64)))
        where = "" if place is not None else f"of {topic}-{partition}, which is not in the source"
        detail = " ".join(each for each in (why, where) if each)
        found.append(
            Finding(Fate(fate), sink, place, tuple(ranges) if place is not None else (), count, detail=detail)
        )
    return found


def outside(
    spark: SparkSession, frame: DataFrame, spans: Mapping[Place, tuple[int, int]]
) -> tuple[DataFrame, DataFrame]:
    """Places within these spans; and those that are not, with `start` and `end` of their partition or null."""
    from pyspark.sql import functions

    bounds = spark.createDataFrame(
        [(place.topic, place.partition, start, end) for place, (start, end) in spans.items()],
        "topic string, partition int, start bigint, end bigint",
    )
    joined = frame.join(functions.broadcast(bounds), ["topic", "partition"], "left")
    is_inside = "start IS NOT NULL AND offset >= start AND offset < end"
    return joined.where(is_inside).drop("start", "end"), joined.where(f"NOT coalesce({is_inside}, false)")
