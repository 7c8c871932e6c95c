"""Steps of mode `spark`: what a function from DataFrame to DataFrame may do, and what becomes of its rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

from holdfast.audit.model import Verdict
from holdfast.audit.spark.auditing import audit_with_spark
from holdfast.audit.spark.steps import Reading, evaluate, source_frame
from holdfast.broker.server.embed import Broker
from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.definition.model import Expect, PipelineDefinition, Python
from holdfast.pipeline.engine.dataframe_steps import apply_dataframe
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.ledger import Routes
from holdfast.testing.pipelines import PipelineTester

from .test_routing import routed, run_steps  # noqa: F401  a fixture

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from .conftest import Bench

    Function = Callable[[DataFrame], Any]

COLUMNS = (
    "_hf struct<topic:string,partition:int,offset:bigint,index:int>, id long, name string, tags array<string>, "
    "_batch_time timestamp"
)


def _f() -> Any:
    from pyspark.sql import functions

    return functions


def _shout(frame: DataFrame) -> DataFrame:
    return frame.withColumn("loud", _f().udf(lambda text: text.upper(), "string")("name"))


TAKEN: dict[str, tuple[Function, bool, bool]] = {
    "nothing": (lambda frame: frame, True, True),
    "columns": (lambda frame: frame.withColumn("loud", _f().upper("name")).drop("tags"), True, True),
    "renamed": (lambda frame: frame.toDF("_hf", "a", "b", "c", "d"), True, True),
    "rows": (lambda frame: frame.where("id > 2").dropna(subset=["name"]), False, True),
    "alias": (lambda frame: frame.alias("a").select("a._hf", "a.id"), True, True),
    "lambda": (
        lambda frame: frame.withColumn("t", _f().transform("tags", lambda tag: _f().upper(tag))),
        True,
        True,
    ),
    "query": (
        lambda frame: frame.sparkSession.sql("SELECT _hf, id + 1 AS id FROM {given}", given=frame),
        True,
        True,
    ),
    "udf": (_shout, True, False),
    "explode": (lambda frame: frame.withColumn("tag", _f().explode("tags")), False, False),
}
REFUSED: dict[str, tuple[Function, str]] = {
    "aggregate": (lambda frame: frame.groupBy("_hf").count(), "aggregates rows.*plan has: Aggregate"),
    "sort": (lambda frame: frame.orderBy("id"), "sorts rows.*plan has: Sort"),
    "window": (
        lambda frame: frame.selectExpr("*", "row_number() OVER (PARTITION BY name ORDER BY id) AS n"),
        "looks at other rows.*plan has: Window",
    ),
    "join": (lambda frame: frame.join(frame.select("name"), "name"), "joins.*plan has: Join"),
    "broadcast": (
        lambda frame: frame.join(_f().broadcast(frame.sparkSession.range(3)), "id"),
        "joins.*plan has: Join Inner",
    ),
    "distinct": (lambda frame: frame.dropDuplicates(["name"]), "removes duplicates.*Deduplicate"),
    "limit": (lambda frame: frame.limit(3), "limits.*plan has: GlobalLimit 3"),
    "sample": (lambda frame: frame.sample(0.5), "takes a sample.*plan has: Sample"),
    "union": (lambda frame: frame.union(frame), "unites.*plan has: Union"),
    "repartition": (lambda frame: frame.repartition(2), "shuffles.*plan has: Repartition 2"),
    "batches": (lambda frame: frame.mapInPandas(lambda each: each, frame.schema), "mode pandas"),
    "another": (lambda frame: frame.sparkSession.createDataFrame([], frame.schema), "something else"),
    "subquery": (lambda frame: frame.where("id IN (SELECT id FROM range(3))"), "a query of its own"),
    "rand": (lambda frame: frame.withColumn("r", _f().rand(1)), r"rand\(\) gives another value.*Project"),
    "uuid": (lambda frame: frame.selectExpr("*", "uuid() AS r"), r"uuid\(\)"),
    "shuffle": (lambda frame: frame.withColumn("tags", _f().shuffle("tags")), r"shuffle\(\)"),
    "number": (lambda frame: frame.withColumn("r", _f().monotonically_increasing_id()), "monotonically"),
    "task": (lambda frame: frame.withColumn("r", _f().spark_partition_id()), "spark_partition_id"),
    "now": (lambda frame: frame.withColumn("r", _f().now()), r"now\(\).*_batch_time"),
    "unix": (lambda frame: frame.withColumn("r", _f().unix_timestamp()), "current_timestamp"),
    "today": (lambda frame: frame.where(_f().current_date() > _f().col("_batch_time")), "current_date"),
    "within": (
        lambda frame: frame.withColumn("t", _f().transform("tags", lambda _: _f().now())),
        r"now\(\)",
    ),
    "chance in Python": (
        lambda frame: frame.withColumn("r", _f().lit(random.random())),
        "something else each time.*plan has: Project",
    ),
    "clock in Python": (lambda frame: frame.withColumn("r", _f().lit(datetime.now())), "each time"),
    "udf by chance": (
        lambda frame: frame.withColumn("r", _f().udf(lambda: 1, "int").asNondeterministic()()),
        "gives another value",
    ),
    "job": (lambda frame: frame.where(f"id > {frame.sparkSession.range(1).count()}"), "runs a job"),
    "no lineage": (lambda frame: frame.select("id"), "does not keep `_hf`"),
    "lineage twice": (lambda frame: frame.select("_hf", "_hf"), "gives twice `_hf`"),
    "lineage made": (
        lambda frame: frame.withColumn("_hf", _f().col("_hf").withField("offset", _f().col("id"))),
        "makes `_hf` anew.*plan has: Project",
    ),
    "same name": (lambda frame: frame.withColumns({"x": _f().lit(1)}).select("*", "x"), "two columns.*'x'"),
    "nothing": (lambda frame: None, "returned NoneType"),
    "error": (lambda frame: frame.where("nope > 1"), "nope.*test_dataframe_steps.py, line"),
}  # fmt: skip


def step(function: Function) -> Python:
    return Python("clean", function=function, mode="spark")


@pytest.mark.spark
@pytest.mark.parametrize("name", TAKEN)
def test_what_maps_each_row_is_taken_and_its_form_known(name: str, spark: SparkSession) -> None:
    function, keeps_every_row, is_cheap = TAKEN[name]
    after, shape = apply_dataframe(spark.createDataFrame([], COLUMNS), step(function), ".")
    assert "_hf" in after.columns
    assert (shape.keeps_every_row, shape.is_cheap) == (keeps_every_row, is_cheap)


@pytest.mark.spark
@pytest.mark.parametrize("name", REFUSED)
def test_what_does_not_is_refused_with_its_line_of_the_plan(name: str, spark: SparkSession) -> None:
    function, says = REFUSED[name]
    with pytest.raises(StepError, match=f"(?s)'clean'.*{says}"):
        apply_dataframe(spark.createDataFrame([], COLUMNS), step(function), ".")


@pytest.mark.spark
@pytest.mark.long
def test_rows_that_it_drops_are_filtered_and_rules_behind_it_know_the_record(routed: Bench) -> None:  # noqa: F811
    def clean(frame: DataFrame) -> DataFrame:
        return frame.select("_hf", (_f().col("id") * 10).alias("id")).where("id <> 30")

    routed.produce_orders(8)
    routes = run_steps(routed, step(clean), Expect("low", "id < 60"))
    assert routes == Routes(main=5, dead_letter={"low": 2}, filtered={"clean": 1})
    assert routed.sinks["main"].ids == [0, 10, 20, 40, 50]
    assert {row["_raw"] for row in routed.sinks["dead-letter"].content} == {
        b'{"id": 6, "amount": 1.0}',
        b'{"id": 7, "amount": 1.0}',
    }


@pytest.mark.spark
@pytest.mark.long
def test_a_row_is_made_several_times_only_where_the_step_expands(routed: Bench) -> None:  # noqa: F811
    def double(frame: DataFrame) -> DataFrame:
        return frame.where("id <> 1").withColumn("copy", _f().explode(_f().expr("array(1, 2)")))

    routed.produce_orders(3)
    with pytest.raises(StepError, match="made 2 rows of one"):
        run_steps(routed, step(double))
    assert not routed.sinks["main"].content
    routes = run_steps(routed, Python("clean", function=double, mode="spark", expand=True))
    assert routes == Routes(main=4, filtered={"clean": 1})
    assert sorted((row["id"], row["_hf"]["index"]) for row in routed.sinks["main"].content) == [
        (0, 0), (0, 1), (2, 0), (2, 1),
    ]  # fmt: skip


DEFINITION = """\
pipeline: {function}
source: {{topics: [orders], bootstrap: "{bootstrap}", value: {{format: json, fields: {{id: long}}}}}}
home: home
steps:
  - python: {{name: clean, mode: spark, file: steps.py, function: {function}}}
sinks:
  - parquet: out
dead_letter: {{parquet: dead}}
"""
STEPS = """\
from pyspark.sql import DataFrame, functions
from factors import FACTOR


def clean(frame: DataFrame) -> DataFrame:
    return frame.withColumn("scaled", functions.col("id") * FACTOR).where("id <> 3")


def by_udf(frame: DataFrame) -> DataFrame:
    return frame.withColumn("scaled", functions.udf(lambda number: number * 2, "long")("id"))


def numbered(frame: DataFrame) -> DataFrame:
    def counted(number, seen=[]):
        seen.append(number)
        return len(seen)

    return frame.withColumn("n", functions.udf(counted, "long")("id"))
"""


@pytest.fixture
def files(tmp_path: Path) -> Path:
    (tmp_path / "steps.py").write_text(STEPS)
    (tmp_path / "factors.py").write_text("FACTOR = 2\n")
    return tmp_path


def _definition(directory: Path, function: str, bootstrap: str = "nowhere.invalid:1") -> PipelineDefinition:
    path = directory / "frames.yaml"
    path.write_text(DEFINITION.format(bootstrap=bootstrap, function=function))
    return load_pipeline(str(path)).definition


@pytest.mark.spark
def test_an_audit_by_spark_runs_it_again(files: Path, spark: SparkSession) -> None:
    with Broker() as broker:
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers, "linger.ms": 0})
        broker.create_topic("orders", 1)
        for number in range(6):
            producer.produce("orders", json.dumps({"id": number}))
        producer.produce("orders", "no JSON", key="k", headers=[("trace", b"t"), ("none", None)])
        producer.flush()
        definition = _definition(files, "clean", broker.bootstrap_servers)
        summary = run_pipeline(definition, spark=spark, once=True, signals=False)
        assert summary.routes == Routes(main=5, dead_letter={"parse": 1}, filtered={"clean": 1})
        sound = audit_with_spark(definition, spark=spark)
        (files / "factors.py").write_text(
            "FACTOR = 3\n"
        )  # the rows are not what the function makes of them now
        other = audit_with_spark(definition, spark=spark)
    # Why a dead letter is one is the pipeline's word; all else is made again from the log.
    assert sound.verdict is Verdict.UNALTERED, sound.reasons
    unaltered = {each.name for each in sound.coverage if each.unaltered or each.trusted}
    assert unaltered == {"dead-letter.reason", "dead-letter.step", "dead-letter.error"}
    assert {"parquet.scaled", "steps.clean"} <= {each.name for each in sound.coverage if each.recomputed}
    assert other.verdict is Verdict.FAILED
    [letter] = [each for path in (files / "dead").glob("batch=*/*.parquet") for each in read_rows(path)]
    assert letter["_hf"]["offset"] == 6
    assert letter["error"]
    assert letter["timestamp"]
    assert letter | {"_hf": None, "timestamp": None, "error": None} == {
        "_hf": None, "topic": "orders", "partition": 0, "offset": 6, "timestamp": None, "key": b"k",
        "value": b"no JSON", "headers": [{"key": "trace", "value": b"t"}, {"key": "none", "value": None}],
        "reason": "parse", "step": None, "error": None,
    }  # fmt: skip


def read_rows(path: Path) -> list[dict[str, Any]]:
    return list(pq.ParquetFile(path).read().to_pylist())


@pytest.mark.spark
@pytest.mark.parametrize(("function", "unknown"), [("clean", ""), ("by_udf", "clean")])
def test_an_audit_never_claims_what_a_udf_made(
    function: str, unknown: str, files: Path, spark: SparkSession
) -> None:
    definition = _definition(files, function)
    records = source_frame(spark, Reading({}, definition.source, {}), {})
    aside = spark.createDataFrame([], "topic string, partition int, offset bigint, route string, step string")
    assert evaluate(spark, definition, records, aside).unknown == unknown


@pytest.mark.spark
def test_a_trial_replays_it_with_its_rows_mixed(files: Path, spark: SparkSession) -> None:
    records = [{"value": {"id": number}} for number in range(5)]
    with PipelineTester(spark) as tester:
        trial = tester.run(_definition(files, "clean"), records)
        assert [row["scaled"] for row in trial.rows["parquet"]] == [0, 2, 4, 8]
        with pytest.raises(StepError, match="other rows when the same rows come in another order"):
            tester.run(_definition(files, "numbered"), records)
