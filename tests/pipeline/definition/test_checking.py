"""`pipeline check` with Spark: the schema followed from step to step, over no rows."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast.pipeline import Pipeline
from holdfast.pipeline.checking import check_definition
from holdfast.pipeline.definition.example import write_files
from holdfast.pipeline.definition.loading import load_pipeline

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


BASE = Pipeline("p").read(
    "t",
    value={
        "format": "json",
        "unknown": "reject",
        "fields": {"id": "long", "name": "string", "at": "timestamp"},
    },
    key={"format": "json", "fields": {"shard": "int"}},
)
WITH_SINK = BASE.write("parquet", path="out")


def findings(spark: SparkSession, pipeline: Pipeline) -> list[str]:
    found, _ = check_definition(pipeline.definition(), spark, environment={})
    return [str(finding) for finding in found]


def test_the_example_passes_and_its_columns_are_told(spark: SparkSession, tmp_path: Path) -> None:
    definition = load_pipeline(write_files(str(tmp_path))[0]).definition
    found, schemas = check_definition(definition, spark, environment={})
    assert found == []
    assert [field.name for field in schemas[""].fields if not field.name.startswith("_")] == [
        "id",
        "customer",
        "amount",
        "at",
        "note",
        "day",
        "tax",
    ]


def test_types_flow_from_step_to_step(spark: SparkSession) -> None:
    pipeline = WITH_SINK.sql("SELECT _hf, id * 2 AS double_id, upper(name) AS name, at FROM input").sql(
        "SELECT *, date_trunc('DAY', at) AS day, _hf.offset AS source_offset FROM input"
    )
    found, schemas = check_definition(pipeline.definition(), spark, environment={})
    assert found == []
    types = {field.name: field.dataType.simpleString() for field in schemas[""].fields}
    assert types["double_id"] == "bigint"
    assert types["day"] == "timestamp"
    assert "id" not in types


def test_the_batch_time_the_key_and_the_timestamp_can_be_used(spark: SparkSession) -> None:
    pipeline = (
        WITH_SINK.expect("at <= _batch_time")
        .filter("_key_shard = 1")
        .sql("SELECT *, _timestamp AS ts FROM input")
    )
    assert findings(spark, pipeline) == []


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (
            WITH_SINK.filter("nmae = 'x'"),
            "steps[0].filter.where: there is no column 'nmae'; did you mean 'name'?",
        ),
        (
            WITH_SINK.sql("SELECT *, zzz + 1 AS y FROM input"),
            "steps[0].sql.query: there is no column 'zzz'; the nearest are at, id, name",
        ),
        (WITH_SINK.expect("id"), "steps[0].expect.that: 'id' gives bigint, not true or false"),
        (WITH_SINK.filter("id > > 1"), "steps[0].filter.where: this is not SQL: Spark cannot read on at '>'"),
        (WITH_SINK.filter("nofunction(id)"), "steps[0].filter.where: Spark has no function 'nofunction'"),
        (WITH_SINK.sql("SELECT _hf.offset * 1 AS n FROM input"), "_hf"),
        (WITH_SINK.sql("SELECT *, id AS _mine FROM input"), "it makes the column '_mine'"),
        (WITH_SINK.sql("SELECT *, id AS ID FROM input"), "two columns"),
        (WITH_SINK.sql("SELECT *, first(id) OVER (PARTITION BY name) AS f FROM input"), "replayed"),
        (WITH_SINK.sql("SELECT _hf, count(*) AS n FROM input GROUP BY _hf"), "aggregates rows"),
        (WITH_SINK.python(len, schema="id lnog"), "steps[0].python.function: its schema 'id lnog'"),
        (BASE.write("parquet", path="o", partition_by="dya"), "sinks[0].parquet.partition_by"),
        (
            BASE.write("kafka", topic="o", key="nmae"),
            "sinks[0].kafka.key: there is no column 'nmae'; did you mean",
        ),
        (
            BASE.write("kafka", topic="o", headers={"h": "nmae"}),
            "sinks[0].kafka.headers.h: there is no column",
        ),
    ],
)
def test_what_is_wrong_is_said_with_its_place(spark: SparkSession, pipeline: Pipeline, expected: str) -> None:
    found = findings(spark, pipeline)
    assert any(expected in line for line in found), found


def test_rules_that_fail_do_not_hide_what_comes_behind(spark: SparkSession) -> None:
    pipeline = BASE.filter("nmae = 1").expect("idd > 0").write("parquet", path="o", partition_by="dya")
    assert [line.split(": ")[0] for line in findings(spark, pipeline)] == [
        "steps[0].filter.where",
        "steps[1].expect.that",
        "sinks[0].parquet.partition_by",
    ]


def test_steps_behind_a_query_that_fails_are_named_as_unchecked(spark: SparkSession) -> None:
    found = findings(spark, WITH_SINK.sql("SELECT *, nmae FROM input").expect("also_wrong", name="later"))
    assert found[1:] == ["warning: steps[1]: not checked, since they stand behind step 'sql-1': later"]


def test_a_missing_secret_is_a_warning(spark: SparkSession) -> None:
    found, _ = check_definition(
        BASE.write("parquet", path="${NOWHERE}/o").definition(), spark, environment={}
    )
    assert [finding.level for finding in found] == ["warning"]
    assert "NOWHERE" in str(found[0])


WITH_TIME = Pipeline("p").read(
    *("t", "u"),
    value={
        "format": "json",
        "unknown": "reject",
        "fields": {"id": "long", "name": "string", "amount": "double", "at": "timestamp"},
    },
    event_time="at",
)


def test_every_sink_is_checked_against_the_rows_it_takes(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "cities.csv").write_text("id,city\n1,Graz\n")
    (tmp_path / "steps.py").write_text("def watch(key, rows, state):\n    return None\n")
    pipeline = (
        WITH_TIME.dedupe("id", name="once")
        .lookup("cities.csv", on={"name": "id"}, columns="city")
        .window({"n": "count(*)", "total": "sum(amount)"}, size="1m", key="city", name="totals")
        .join("t", "u", on="id", select=["l.id", "r.amount AS paid"], name="pairs")
        .keyed("watch", file="steps.py", key="name", schema="score double", state="n long", name="watch")
        .write("kafka", topic="a", name="a", key="city")
        .write("kafka", topic="b", name="b", rows="totals", key="city", value="to_json(struct(n, total))")
        .write("kafka", topic="c", name="c", rows="totals.late", key="name")
        .write("kafka", topic="d", name="d", rows="once.duplicates", key="amount")
        .write("kafka", topic="e", name="e", rows="pairs", key="paid")
        .write("kafka", topic="f", name="f", rows="watch", key="scoer")
        .write("kafka", topic="g", name="g", rows="totals", key="amount")
        .write("kafka", topic="h", name="h", rows="once.late", key="city")
    )
    found, schemas = check_definition(pipeline.definition(directory=str(tmp_path)), spark, environment={})
    assert "city" in schemas[""].names
    assert "total" in schemas["totals"].names
    assert [str(finding).split("; ")[0] for finding in found] == [
        "sinks[5].kafka.key: there is no column 'scoer'",
        "sinks[6].kafka.key: there is no column 'amount'",
        "sinks[7].kafka.key: there is no column 'city'",
    ]


@pytest.mark.parametrize(
    ("pipeline", "expected"),
    [
        (WITH_TIME.window({"n": "sum(amuont)"}, size="1m"), "steps[0].window.aggregates"),
        (WITH_TIME.window({"n": "amount + 1"}, size="1m"), "steps[0].window.aggregates"),
        (WITH_TIME.join("idd > 1", "u", on="id", select=["l.id"]), "steps[0].join.select"),
        (WITH_TIME.join("t", "u", on="id", select=["l.idd"]), "steps[0].join.select"),
        (WITH_TIME.sql("SELECT _hf, id FROM input").dedupe("name"), "steps[1].dedupe.key"),
        (WITH_TIME.lookup("nowhere.parquet", on="id", columns="city"), "steps[0].lookup.table"),
    ],
)
def test_a_step_with_a_memory_that_cannot_work_is_said(
    spark: SparkSession, pipeline: Pipeline, expected: str
) -> None:
    found = findings(spark, pipeline.write("parquet", path="o"))
    assert any(line.startswith(expected) for line in found), found


def test_what_stands_behind_a_tap_that_fails_is_checked_all_the_same(spark: SparkSession) -> None:
    pipeline = WITH_TIME.window({"n": "sum(amuont)"}, size="1m").filter("idd > 0").write("parquet", path="o")
    assert [line.split(": ")[0] for line in findings(spark, pipeline)] == [
        "steps[0].window.aggregates",
        "steps[1].filter.where",
    ]


def test_a_table_that_cannot_be_found_from_here_is_a_warning(spark: SparkSession) -> None:
    pipeline = WITH_TIME.lookup("${TABLES}/cities.csv", on="id", columns="city").write("parquet", path="o")
    found, _ = check_definition(pipeline.definition(), spark, environment={})
    assert {finding.level for finding in found} == {"warning"}
