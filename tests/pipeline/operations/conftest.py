"""A topic of clicks, and a pipeline that counts them in windows."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.model import (
    Decoding,
    EventTime,
    Field,
    Filter,
    ParquetSink,
    PipelineDefinition,
    Source,
    Window,
)
from holdfast.pipeline.positions import Place
from holdfast.reader.cluster import Cluster

CLICKS = Decoding("json", (Field("id", "long"), Field("user", "string"), Field("at", "timestamp")))
TOTALS = Window("totals", {"n": "count(*)", "ids": "sum(id)"}, size="1m", key=("user",))
REAL = Filter("real", "id >= 0")


@dataclass
class Shop:
    """A topic of two partitions, and pipelines over it."""

    broker: Broker
    directory: Path
    produced: int = 0
    settings: dict[str, Any] = field(init=False)
    admin: AdminClient = field(init=False)

    def __post_init__(self) -> None:
        self.settings = {"bootstrap.servers": self.broker.bootstrap_servers}
        self.admin = AdminClient(self.settings)
        self.admin.create_topics([NewTopic("clicks", 2, 1)])["clicks"].result(30)

    def produce(self, count: int) -> None:
        """Some come late, and every id comes twice."""
        producer = Producer(self.settings)
        for number in range(self.produced, self.produced + count):
            second = max(0, number * 9 - (95 if number % 7 == 3 else 0))
            at = f"2026-03-01T{second // 3600:02d}:{second // 60 % 60:02d}:{second % 60:02d}Z"
            value = {"id": number // 2, "user": "ann" if number % 3 else "bob", "at": at}
            producer.produce("clicks", json.dumps(value).encode(), partition=number // 2 % 2)
        self.produced += count
        assert producer.flush(30) == 0

    def pipeline(self, name: str = "shop", steps: tuple[Any, ...] = (REAL, TOTALS)) -> PipelineDefinition:
        source = Source(
            topics=("clicks",),
            bootstrap=self.broker.bootstrap_servers,
            value=CLICKS,
            event_time=EventTime("at", delay="10s"),
            batch_records=30,
        )
        sinks = (
            ParquetSink(f"{name}-rows", name="rows"),
            ParquetSink(f"{name}-totals", name="totals", rows="totals"),
        )
        return PipelineDefinition(name, source, steps, sinks, directory=str(self.directory))

    def place(self, partition: int) -> Place:
        with Cluster(self.settings) as cluster:
            return Place("clicks", cluster.topics(["clicks"])["clicks"].topic_id, partition)

    def truncate(self, partition: int, offset: int) -> None:
        where = TopicPartition("clicks", partition, offset)
        for future in self.admin.delete_records([where]).values():
            future.result(30)


@pytest.fixture
def shop(tmp_path: Path) -> Iterator[Shop]:
    with Broker(str(tmp_path / "broker")) as broker:
        yield Shop(broker, tmp_path)
