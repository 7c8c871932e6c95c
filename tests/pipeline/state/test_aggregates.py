"""Aggregates as partial results: merged they come to what Spark's own SQL says of all rows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.state.aggregates import compile_aggregates

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

DDL = (
    "_hf struct<topic:string,partition:int,offset:bigint,index:int,event_time:timestamp>, k string, i int, l bigint, "
    "d double, m decimal(10,2), s string, b boolean, t timestamp, piece int"
)
SAME = {
    "n": "count(*)",
    "rows": "COUNT(1)",
    "given": "count(i)",
    "both": "count(i, s)",
    "some_of": "count(*) FILTER (WHERE i > 2 AND s <> 'sum(i)')",
    "total": "sum(i)",
    "total_m": "sum(m)",
    "total_d": "sum(d)",
    "few": "sum(i * 2 + 1) FILTER (WHERE b)",
    "none": "sum(i) FILTER (WHERE false)",
    "low": "min(s)",
    "high": "max(t)",
    "avg_i": "avg(i)",
    "avg_l": "mean(l)",
    "avg_m": "avg(m)",
    "avg_d": "avg(d)",
    "avg_none": "avg(i) FILTER (WHERE false)",
    "different": "count(DISTINCT s)",
    "pairs": "count(DISTINCT i, i + 1, s)",
    "all_of": "bool_and(b)",
    "any_of": "some(b)",
    "bits": "bit_xor(i)",
    "when": "count_if(i > 2)",
    "set": "array_sort(collect_set(s))",
    "ratio": "round(sum(m) / count(*), 3)",
    "text": "concat(k, ':', CAST(max(i) AS STRING), ' of sum(i)')",
    "branch": "CASE WHEN count(*) > 3 THEN max(i) ELSE min(i) END",
    "spread": "max(i) - min(i) + count(*)",
}
BY_ORDER = {
    "opening": ("first(s)", "min_by(s, o)"),
    "opening_given": ("first(s) IGNORE NULLS", "min_by(s, o) FILTER (WHERE s IS NOT NULL)"),
    "final": ("last(s)", "max_by(s, o)"),
    "final_given": (
        "last_value(s, true) FILTER (WHERE b)",
        "max_by(s, o) FILTER (WHERE b AND s IS NOT NULL)",
    ),
    "any": ("any_value(s)", "min_by(s, o)"),
    "largest": ("max_by(s, i)", "max_by(s, struct(i, o)) FILTER (WHERE i IS NOT NULL)"),
    "list": (
        "collect_list(s)",
        "transform(array_sort(collect_list(struct(o, s)) FILTER (WHERE s IS NOT NULL)), e -> e.s)",
    ),
}


@pytest.fixture(scope="module")
def rows(spark: SparkSession) -> DataFrame:
    table = ", ".join(
        f"(named_struct('topic', 't', 'partition', {n % 2}, 'offset', {n}L, 'index', 0, 'event_time', "
        f"timestamp_millis({100 - n * 7 % 30})), '{'ab'[n % 2]}', {'NULL' if n % 5 == 1 else n % 6}, "
        f"{2**62}L, {n / 8}D, CAST({n * 1.37:.2f} AS DECIMAL(10, 2)), {'NULL' if n % 7 == 2 else repr('xyz'[n % 3])}, "
        f"{n % 4 != 3}, timestamp_millis({n * 1000}), {n % 3})"
        for n in range(24)
    )
    names = ", ".join(part.split(" ")[0] for part in ("_hf", "k", "i", "l", "d", "m", "s", "b", "t", "piece"))
    return spark.sql(f"SELECT * FROM VALUES {table} AS t({names})").coalesce(1)


def through_parts(
    spark: SparkSession, rows: DataFrame, aggregates: dict[str, str]
) -> tuple[list[dict[str, Any]], StructType]:
    """Aggregated in pieces, merged, and finished."""
    from pyspark.sql import functions as f

    ready = compile_aggregates(spark, "w", aggregates, ("k",), rows.schema)
    assert not ready.is_general
    started = rows.selectExpr("*", "0L AS _start")
    pieces = started.groupBy("k", "piece").agg(f.expr("count(1) AS _n"), *map(f.expr, ready.partials()))
    merged = pieces.groupBy("k").agg(f.expr("sum(_n) AS _n"), *map(f.expr, ready.merges()))
    found = merged.selectExpr("k", *(f"{sql} AS `{name}`" for name, sql in ready.finishes.items()))
    return [row.asDict() for row in found.orderBy("k").collect()], found.schema


def directly(rows: DataFrame, aggregates: dict[str, str]) -> tuple[list[dict[str, Any]], StructType]:
    from pyspark.sql import functions as f

    ordered = rows.selectExpr("*", "struct(_hf.event_time, _hf.topic, _hf.partition, _hf.offset) AS o")
    found = ordered.groupBy("k").agg(*(f.expr(sql).alias(name) for name, sql in aggregates.items()))
    return [row.asDict() for row in found.orderBy("k").collect()], found.schema


def test_partial_results_come_to_what_one_query_says(spark: SparkSession, rows: DataFrame) -> None:
    written = SAME | {name: sql for name, (sql, _) in BY_ORDER.items()}
    meant = SAME | {name: sql for name, (_, sql) in BY_ORDER.items()}

    found, schema = through_parts(spark, rows, written)
    wanted, wanted_schema = directly(rows, meant)

    for ours, theirs in zip(found, wanted, strict=True):
        assert {name: ours[name] for name in theirs if ours[name] != theirs[name]} == {}
    assert schema.simpleString() == wanted_schema.simpleString()


def test_a_count_needs_no_column_of_its_own_and_equal_parts_share_one(
    spark: SparkSession, rows: DataFrame
) -> None:
    ready = compile_aggregates(
        spark, "w", {"n": "count(*)", "a": "sum(i)", "b": "sum(i) / count(*)"}, ("k",), rows.schema
    )

    assert len(ready.parts) == 1


def test_a_sketch_knows_one_zero(spark: SparkSession, rows: DataFrame) -> None:
    # Spark takes branches that are literals of both zeros for equal, and makes them one: these are none.
    zero = "CAST(concat(CASE WHEN piece = 1 THEN '-' ELSE '' END, CAST(piece * 0 AS STRING)) AS DOUBLE) AS d"
    zeros = rows.selectExpr("* EXCEPT (d)", zero)
    found, _ = through_parts(
        spark, zeros, {"d": "approx_count_distinct(d)", "f": "approx_count_distinct(float(d))"}
    )
    assert [(row["d"], row["f"]) for row in found] == [(1, 1), (1, 1)]


def test_sketches_count_alike_whether_they_were_merged_or_not(spark: SparkSession) -> None:
    from pyspark.sql import functions as f

    numbers = spark.range(0, 20_000, 1, 1).selectExpr(
        "id AS l", "CAST(id AS DOUBLE) AS d", "id % 13 AS piece", "0L AS _start"
    )
    ready = compile_aggregates(
        spark,
        "w",
        {
            "l": "approx_count_distinct(l)",
            "d": "approx_count_distinct(d, 0.05)",
            "no": "approx_count_distinct(l) FILTER (WHERE l < 0)",
        },
        (),
        ddl_schema("l bigint, d double, piece bigint"),
    )

    def estimates(by: str) -> Any:
        pieces = numbers.groupBy(f.expr(by)).agg(f.expr("count(1) AS _n"), *map(f.expr, ready.partials()))
        merged = pieces.agg(f.expr("sum(_n) AS _n"), *map(f.expr, ready.merges()))
        return merged.selectExpr(*ready.finishes.values()).collect()[0]

    at_once, in_pieces = estimates("piece - piece"), estimates("piece")

    assert tuple(at_once) == tuple(in_pieces)
    assert abs(at_once[0] - 20_000) < 1_000
    assert abs(at_once[1] - 20_000) < 4_000
    assert at_once[2] == 0


@pytest.mark.parametrize(
    "sql",
    [
        "percentile(i, 0.5)",
        "stddev(d)",
        "sum(DISTINCT i)",
        "sum(i) + median(i)",
        "first(map(k, i))",
        "listagg(s, ',') WITHIN GROUP (ORDER BY s)",
    ],
)
def test_other_aggregates_keep_the_columns_they_name(spark: SparkSession, rows: DataFrame, sql: str) -> None:
    ready = compile_aggregates(spark, "w", {"x": sql, "n": "count(*)"}, ("k",), rows.schema)

    assert ready.is_general
    assert set(ready.raw) <= {"i", "d", "s"}
    assert ready.raw


@pytest.mark.parametrize(
    ("sql", "told"),
    [
        ("sum(rand())", "rand"),
        ("max(current_timestamp())", "current_timestamp"),
        ("sum(nothing)", "nothing"),
        ("i", ""),
        ("1 + 1", "no aggregate"),
        ("sum(i) OVER (PARTITION BY k)", ""),
        ("explode(collect_list(i))", ""),
        ("sum(", ""),
    ],
)
def test_what_is_no_aggregate_of_the_rows_is_refused(
    spark: SparkSession, rows: DataFrame, sql: str, told: str
) -> None:
    with pytest.raises(StepError, match="aggregate 'x'") as refused:
        compile_aggregates(spark, "w", {"x": sql}, ("k",), rows.schema)

    assert told in str(refused.value)
