"""The guide to moving a Spark job over holds: its job runs on Spark's own source, and its definition goes on there."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow.dataset as ds
import pytest
from tests.pipeline.absent.without_spark import PlainRouter, without_spark

from holdfast.audit.pipeline_audit import audit_pipeline
from holdfast.broker.server.embed import Broker
from holdfast.client import Producer
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.engine.spark_checkpoint import CheckpointUnfit, committed_offsets
from holdfast.testing.kafka_fixtures import unavailable

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "moving-a-spark-job.md").read_text(encoding="utf-8")
(JOB,) = re.findall(r"^```python\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
(DEFINITION,) = re.findall(r"^```yaml\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)
PLAIN = DEFINITION.replace("steps:\n  - filter: amount > 0\n", "")


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    with Broker(str(tmp_path / "broker")) as broker:
        broker.create_topic("orders", partitions=2)
        broker.create_topic("orders-dlt")
        monkeypatch.setenv("KAFKA", broker.bootstrap_servers)
        monkeypatch.chdir(tmp_path)
        yield tmp_path


def send(numbers: range) -> None:
    with Producer(os.environ["KAFKA"]) as producer:
        for number in numbers:
            producer.send(
                "orders", json.dumps({"id": number, "amount": number % 5}).encode(), key=str(number)
            )


def definition(place: Path, text: str = DEFINITION) -> PipelineDefinition:
    return parse_yaml(text, directory=str(place)).definition


def ids(directory: Path) -> list[int]:
    rows = ds.dataset(directory, format="parquet", partitioning="hive", exclude_invalid_files=True).to_table(
        ["id"]
    )
    return sorted(rows["id"].to_pylist())


def test_a_pipeline_begins_where_the_job_stopped(
    spark: SparkSession, connector: list[Path] | str, place: Path
) -> None:
    if isinstance(connector, str):
        unavailable(connector)
    send(range(50))
    here = JOB.replace('"old/', f'"{place}/old/')  # the JVM was started elsewhere
    exec(compile(here, "job.py", "exec"), {})
    send(range(50, 80))
    run_pipeline(definition(place), spark=spark, signals=False)
    assert ids(place / "old" / "orders") == [number for number in range(50) if number % 5]
    assert ids(place / "new" / "orders") == [number for number in range(50, 80) if number % 5]
    assert audit_pipeline(definition(place)).verdict.exit_code in (0, 4)


def checkpoint(place: Path, offsets: Any, commits: int = 1, version: str = "v1", name: str = "") -> None:
    """As Spark writes it."""
    for folder in ("offsets", "commits"):
        (place / "old" / "checkpoint" / folder).mkdir(parents=True, exist_ok=True)
    for number in range(2):
        text = f"{version}\n{{}}\n{name}{json.dumps(offsets)}\n"
        (place / "old" / "checkpoint" / "offsets" / str(number)).write_text(text.removesuffix("\n"))
    for number in range(commits + 1):
        (place / "old" / "checkpoint" / "commits" / str(number)).write_text("v1\n{}")


@pytest.mark.parametrize(("version", "name"), [("v1", ""), ("v2", "orders:")])
def test_the_newest_committed_offsets_are_where_it_begins(place: Path, version: str, name: str) -> None:
    send(range(20))
    checkpoint(place, {"orders": {"0": 3}, "other": {"0": 7}}, version=version, name=name)
    assert committed_offsets(str(place / "old" / "checkpoint"))["orders"] == {0: 3}
    with without_spark(PlainRouter) as session:
        first = run_pipeline(definition(place, PLAIN), spark=session, signals=False)
        (place / "old" / "checkpoint" / "offsets" / "1").unlink()  # it counts once
        second = run_pipeline(definition(place, PLAIN), spark=session, signals=False)
    assert (first.intake.records, second.intake.records) == (17, 0)


@pytest.mark.parametrize(
    ("offsets", "commits", "expected"),
    [
        ({"orders": {"0": 1}}, 0, r"batch 1 of the checkpoint \S+ was begun and not committed"),
        ({"ordres": {"0": 1}}, 1, r"has no offsets of topic 'orders'; did you mean 'ordres'\?"),
        (
            {"orders": {"0": 999}},
            1,
            r"stands at offset 999 of orders-0, and the log ends at \d+: this is another topic",
        ),
        ({"orders": {"0": 1}}, -1, r"was begun and not committed"),
    ],
)
@pytest.mark.check
def test_a_place_where_it_cannot_begin_is_refused(
    place: Path, offsets: Any, commits: int, expected: str
) -> None:
    send(range(20))
    checkpoint(place, offsets, commits)
    with without_spark(PlainRouter) as session, pytest.raises(CheckpointUnfit, match=expected) as refused:
        run_pipeline(definition(place, PLAIN), spark=session, signals=False)
    assert (refused.value.path, refused.value.exit_code) == (("source", "starting"), 2)


def test_records_that_the_job_never_read_and_are_gone_are_counted(place: Path) -> None:
    from confluent_kafka import TopicPartition
    from confluent_kafka.admin import AdminClient

    send(range(20))
    admin = AdminClient({"bootstrap.servers": os.environ["KAFKA"]})
    for future in admin.delete_records([TopicPartition("orders", 0, 5)]).values():
        future.result(30)
    checkpoint(place, {"orders": {"0": 2, "1": 0}})
    with (
        without_spark(PlainRouter) as session,
        pytest.raises(CheckpointUnfit, match=r"begins at 5: 3 records"),
    ):
        run_pipeline(definition(place, PLAIN), spark=session, signals=False)


def test_a_directory_that_is_no_checkpoint_is_named(place: Path) -> None:
    with without_spark(PlainRouter) as session, pytest.raises(CheckpointUnfit, match="is no checkpoint of"):
        run_pipeline(definition(place, PLAIN), spark=session, signals=False)
