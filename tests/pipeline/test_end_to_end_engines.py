"""The same file on the embedded broker and on Apache Kafka: the same rows, the same dead letters, exactly once."""

from __future__ import annotations

import json
import uuid
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.progress import Summary
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.pipeline.ledger import Routes
from holdfast.reader import read
from holdfast.testing.engines import await_decided

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

FILE = """\
pipeline: ${NAME}
source:
  topics: [${NAME}]
  value:
    format: json
    fields:
      id: long
      amount: double
steps:
  - expect:
      that: amount > 0
      name: positive
  - filter:
      where: id % 2 = 0
      name: even
  - sql:
      query: SELECT _hf, id, amount * 2 AS twice FROM input
      name: doubled
sinks:
  - parquet:
      path: out
      name: files
  - kafka:
      topic: ${NAME}-out
      name: topic
      key: CAST(id AS STRING)
"""


class Crash(BaseException):
    """The driver is gone."""


class Orders:
    """A topic with committed, aborted and broken records, and the pipeline over it."""

    def __init__(self, bootstrap: str, spark: SparkSession, directory: Path) -> None:
        self.name = f"orders-{uuid.uuid4().hex[:8]}"
        self.bootstrap = bootstrap
        self.spark = spark
        self.directory = directory
        self.admin = AdminClient({"bootstrap.servers": bootstrap})
        for topic, partitions in ((self.name, 3), (f"{self.name}-out", 2)):
            self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)
        file = directory / "orders.yaml"
        file.write_text(FILE.replace("${NAME}", self.name))
        self.definition = load_pipeline(str(file)).definition

    def produce(self, first: int, count: int, *, commit: bool) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": self.name})
        producer.init_transactions(30)
        producer.begin_transaction()
        for number in range(first, first + count):
            value = json.dumps({"id": number, "amount": number % 10}).encode() if number % 25 else b"{broken"
            producer.produce(self.name, value, partition=number % 3)
        if commit:
            producer.commit_transaction(30)
        else:
            producer.flush(30)
            producer.abort_transaction(30)
        assert await_decided(self.bootstrap, self.name)

    def run(self, faults: Faults = no_faults) -> Summary:
        return run_pipeline(
            self.definition, bootstrap=self.bootstrap, spark=self.spark, signals=False, faults=faults
        )

    def crash(self, point: str) -> None:
        def fail(passed: str) -> None:
            if passed == point:
                raise Crash

        with pytest.raises(Crash):
            self.run(fail)

    def files(self) -> list[tuple[int, float]]:
        rows = self.spark.read.parquet(str(self.directory / "out")).select("id", "twice").collect()
        return sorted((row.id, row.twice) for row in rows)

    def topic(self, name: str) -> list[dict[str, Any]]:
        assert await_decided(self.bootstrap, name)
        return [row for batch in read(self.bootstrap, name) for row in batch.to_pylist()]


@pytest.fixture(params=[pytest.param("holdfast", marks=pytest.mark.long), "apache"])
def make_orders(request: pytest.FixtureRequest, spark: SparkSession, tmp_path: Path) -> Any:
    if request.param == "apache":
        kafka = request.getfixturevalue("apache_kafka")
        yield lambda: Orders(kafka.bootstrap_servers, spark, tmp_path)
        return
    with Broker(str(tmp_path / "broker")) as broker:
        yield lambda: Orders(broker.bootstrap_servers, spark, tmp_path)


def test_the_same_file_gives_the_same_result(make_orders: Callable[[], Orders]) -> None:
    orders = make_orders()
    orders.produce(0, 100, commit=True)
    orders.produce(1_000, 50, commit=False)
    orders.crash("committed:files")
    orders.produce(100, 100, commit=True)
    summary = orders.run()

    expected = [
        (number, number % 10 * 2.0)
        for number in range(200)
        if number % 25 and number % 10 and number % 2 == 0
    ]
    assert orders.files() == expected
    sent = [json.loads(row["value"]) for row in orders.topic(f"{orders.name}-out")]
    assert sorted((row["id"], row["twice"]) for row in sent) == expected
    letters = orders.topic(f"{orders.name}-dlt")
    assert len(letters) == 8 + sum(1 for number in range(200) if number % 25 and number % 10 == 0)
    assert Counter(row["value"] for row in letters)[b"{broken"] == 8
    # The second run: the topic's sink caught up alone with the first batch, then both took the second one.
    assert summary.batches == 2
    assert summary.intake.aborted == 50
    assert summary.rows_by_sink["files"] * 2 == len(expected)
    assert summary.rows_by_sink["topic"] == len(expected)
    again = orders.run()
    assert (again.batches, again.routes) == (0, Routes())
