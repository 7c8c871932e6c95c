"""A pipeline as its user runs it, against the embedded broker."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.pipeline.definition.model import (
    Decoding,
    Expect,
    Field,
    Filter,
    ParquetSink,
    PipelineDefinition,
    Source,
    Sql,
)
from holdfast.pipeline.engine.progress import BatchDone, Event
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.reader import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.broker.server.embed import Broker

pytestmark = pytest.mark.holdfast(mode="thread")

ORDERS = Decoding(
    "json", (Field("id", "long"), Field("amount", "double"), Field("note", "string", required=False))
)


@pytest.fixture(autouse=True)
def _orders(holdfast_broker: Broker) -> None:
    admin = AdminClient({"bootstrap.servers": holdfast_broker.bootstrap_servers})
    admin.create_topics([NewTopic("orders", 3, 1)])["orders"].result(30)


def produce(broker: Broker, topic: str, values: list[bytes | None]) -> None:
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    for number, value in enumerate(values):
        producer.produce(topic, value, key=str(number))
    assert producer.flush(30) == 0


def order(number: int, amount: float = 1.0, **more: Any) -> bytes:
    return json.dumps({"id": number, "amount": amount, **more}).encode()


def definition_of(broker: Broker, tmp_path: Path, **changes: Any) -> PipelineDefinition:
    source = Source(topics=("orders",), bootstrap=broker.bootstrap_servers, value=ORDERS)
    values: dict[str, Any] = {
        "source": source,
        "sinks": (ParquetSink(path=str(tmp_path / "out")),),
        "home": str(tmp_path / "home"),
        "directory": str(tmp_path),
        **changes,
    }
    return PipelineDefinition(name="orders", **values)


def rows_of(spark: SparkSession, path: Path) -> list[Any]:
    return spark.read.parquet(str(path)).orderBy("id").collect()


def dead_letters(broker: Broker, topic: str = "orders-dlt") -> list[dict[str, Any]]:
    return [row for batch in read(broker.bootstrap_servers, topic) for row in batch.to_pylist()]


@pytest.mark.quick
def test_every_record_ends_in_one_route(holdfast_broker: Broker, spark: SparkSession, tmp_path: Path) -> None:
    values: list[bytes | None] = [order(number, amount=float(number)) for number in range(100)]
    values += [b'{"id": 1}{"id": 2}', b"", b"not json", b'{"id": "one", "amount": 1}']
    produce(holdfast_broker, "orders", values)
    definition = definition_of(
        holdfast_broker,
        tmp_path,
        steps=(
            Expect("positive", "amount > 0"),
            Expect("small", "amount < 98", otherwise="warn"),
            Expect("known", "id <> 50", otherwise="drop"),
            Filter("even", "id % 2 = 0"),
            Sql("doubled", "SELECT _hf, id, amount * 2 AS twice, _batch_time AS at FROM input WHERE id <> 4"),
        ),
    )
    events: list[Event] = []

    summary = run_pipeline(definition, spark=spark, progress=events.append)

    assert summary.intake.records == 104
    assert summary.routes.dead_letter == {"parse": 4, "positive": 1}
    assert summary.routes.filtered == {"known": 1, "even": 50, "doubled": 1}
    assert summary.routes.main == 47
    assert summary.warned == {"small": 2}
    assert summary.lag == 0
    rows = rows_of(spark, tmp_path / "out")
    assert [row.id for row in rows] == [n for n in range(2, 100, 2) if n not in (4, 50)]
    assert all(row.twice == row.id * 2 for row in rows)
    assert len({row._hf for row in rows}) == 47
    assert len(dead_letters(holdfast_broker)) == 5
    assert [type(event).__name__ for event in events] == ["Warned", "Started", "BatchDone", "Ended"]
    assert "there was no topic 'orders-dlt', and it was created" in str(events[0])
    again = run_pipeline(definition, spark=spark)
    assert again.batches == 0
    assert len(rows_of(spark, tmp_path / "out")) == 47


def test_what_comes_later_is_added_once(holdfast_broker: Broker, spark: SparkSession, tmp_path: Path) -> None:
    definition = definition_of(holdfast_broker, tmp_path)
    produce(holdfast_broker, "orders", [order(number) for number in range(10)])
    run_pipeline(definition, spark=spark)
    produce(holdfast_broker, "orders", [order(number) for number in range(10, 25)])
    events: list[Event] = []
    run_pipeline(definition, spark=spark, progress=events.append)
    assert [row.id for row in rows_of(spark, tmp_path / "out")] == list(range(25))
    [done] = [event for event in events if isinstance(event, BatchDone)]
    assert done.intake.records == 15
    assert done.rows_by_sink == {"dead-letter": 0, "parquet": 15}
