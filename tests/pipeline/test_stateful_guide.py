"""The pipeline that the guide on memory begins with, run over generated orders and compared with a plain program."""

from __future__ import annotations

import datetime
import json
import re
import zlib
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.demo.generate import GenerateSettings, Generator
from holdfast.pipeline.definition.model import PipelineDefinition
from holdfast.pipeline.engine.running import run_pipeline
from holdfast.reader import read

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from holdfast.broker.server.embed import Broker

pytestmark = [pytest.mark.holdfast(mode="thread"), pytest.mark.long]

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "stateful-pipelines.md"
PARTITIONS = 3
DELAY = datetime.timedelta(minutes=10)
MINUTE = datetime.timedelta(minutes=1)
SETTINGS = GenerateSettings(
    "orders", count=1500, keys=40, spacing_ms=3000, disorder_ms=60_000, duplicates=0.05, late=0.05
)


class Order(NamedTuple):
    customer: str
    cents: int
    at: datetime.datetime

    @property
    def minute(self) -> datetime.datetime:
        return self.at.replace(second=0, microsecond=0)


class Expected:
    """What the guide says of windows and late rows, for each partition's log from its start."""

    def __init__(self) -> None:
        self.seen: set[int] = set()
        self.newest: dict[int, datetime.datetime] = {}
        self.late: list[int] = []
        self.windows: dict[tuple[str, datetime.datetime], Counter[str]] = {}

    def take(self, partition: int, value: dict[str, Any]) -> None:
        at = datetime.datetime.fromisoformat(value["at"])
        order = Order(value["customer"], round(value["amount"] * 100), at)
        newest = self.newest.get(partition)
        self.newest[partition] = at if newest is None else max(newest, at)
        if value["id"] in self.seen:
            return
        self.seen.add(value["id"])
        if newest is not None and order.minute + MINUTE <= newest - DELAY:
            self.late.append(value["id"])
            return
        window = self.windows.setdefault((order.customer, order.minute), Counter())
        window.update(orders=1, cents=order.cents)

    def closed(self) -> dict[tuple[str, datetime.datetime], Counter[str]]:
        watermark = min(self.newest.values()) - DELAY
        return {key: each for key, each in self.windows.items() if key[1] + MINUTE <= watermark}


def send(broker: Broker) -> Expected:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    topics = [NewTopic("orders", PARTITIONS, 1), NewTopic("orders-late", 1, 1)]
    for future in admin.create_topics(topics).values():
        future.result(30)
    producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
    expected = Expected()
    for message in Generator(SETTINGS):
        partition = zlib.crc32(message.key) % PARTITIONS
        producer.produce("orders", message.value, message.key, partition=partition)
        expected.take(partition, json.loads(message.value))
    assert producer.flush(30) == 0
    return expected


def guides_pipeline(broker: Broker, directory: Path) -> PipelineDefinition:
    names: dict[str, Any] = {}
    text = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.MULTILINE | re.DOTALL)[0]
    exec(text, names)
    definition: PipelineDefinition = names["shop"].definition(directory=str(directory))
    source = replace(definition.source, bootstrap=broker.bootstrap_servers, batch_records=800)
    return replace(definition, source=source)


def test_the_guides_pipeline_comes_to_what_it_says(
    holdfast_broker: Broker, spark: SparkSession, tmp_path: Path
) -> None:
    expected = send(holdfast_broker)
    assert expected.late
    assert expected.closed()
    summary = run_pipeline(guides_pipeline(holdfast_broker, tmp_path), spark=spark)
    assert summary.batches == 2

    orders = [row.id for row in spark.read.parquet(str(tmp_path / "out" / "orders")).select("id").collect()]
    assert sorted(orders) == sorted(expected.seen)
    late = [
        json.loads(row["value"])["id"]
        for batch in read(holdfast_broker.bootstrap_servers, "orders-late")
        for row in batch.to_pylist()
    ]
    assert sorted(late) == sorted(expected.late)
    windows = spark.read.parquet(str(tmp_path / "out" / "per-minute"))
    found = {
        (row.customer, datetime.datetime.fromtimestamp(row.start, datetime.UTC)): Counter(
            orders=row.orders, cents=round(row.total * 100)
        )
        for row in windows.selectExpr(
            "customer", "unix_seconds(window_start) AS start", "orders", "total"
        ).collect()
    }
    assert windows.count() == len(found)
    assert found == expected.closed()
