"""A source, and sinks in memory that keep the rules of real ones."""

from __future__ import annotations

import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic
from tests.pipeline.absent.without_spark import PlainRouter, without_spark

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.model import Decoding, Field, ParquetSink, PipelineDefinition, Source
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.progress import BatchDone, Event, Summary
from holdfast.pipeline.engine.running import RETRIES_MAX, run_pipeline
from holdfast.pipeline.ledger import Decision, Entry, decide
from holdfast.pipeline.positions import Positions
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sealing import Written
from holdfast.pipeline.sinks.base import Batch, Problem, SinkContext

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

ORDERS = Decoding("json", (Field("id", "long"), Field("amount", "double", required=False)))


class Crash(BaseException):
    """The driver is gone: nothing of it may catch this."""


@dataclass
class MemoryPrepared:
    sink: MemorySink
    content: list[dict[str, Any]]
    rows: int
    digest: int | None
    written: Written | None = None

    def commit(self, entry: Entry) -> None:
        self.sink.take(self.content, entry)

    def discard(self) -> None:
        self.content = []


@dataclass
class MemorySink:
    """What it holds outlives every run of the pipeline, as a database would."""

    name: str
    content: list[dict[str, Any]] = field(default_factory=list)
    ledger: list[Entry] = field(default_factory=list)
    loses_a_row: bool = False
    fails_after_commit: bool = False
    key: DigestKey | None = None

    def check(self, rows: StructType) -> list[Problem]:
        return []

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        return

    def last_entry(self) -> Entry | None:
        return self.ledger[-1] if self.ledger else None

    def prepare(self, batch: Batch, rows: DataFrame) -> MemoryPrepared:
        given = [] if batch.is_empty else rows.collect()
        content = [row.asDict(recursive=True) for row in given][1 if self.loses_a_row else 0 :]
        places = [row["_hf"] for row in content]
        digest = sum(place_hash(at["topic"], at["partition"], at["offset"]) for at in places) & MASK
        return MemoryPrepared(self, content, len(content), digest)

    def take(self, content: list[dict[str, Any]], entry: Entry) -> None:
        standing = self.ledger[-1].positions if self.ledger else Positions({})
        assert decide(self.name, standing, entry.range) is Decision.WRITE
        assert entry.number == len(self.ledger)
        self.content += content
        self.ledger.append(entry)
        if self.fails_after_commit:
            self.fails_after_commit = False
            raise Crash

    def unfinished(self) -> Entry | None:
        return None

    def missing(self) -> str | None:
        return None

    def holds_rows(self) -> bool:
        return bool(self.content)

    def forget(self) -> None:
        self.ledger.clear()

    def close(self) -> None:
        return

    @property
    def places(self) -> Counter[tuple[str, int, int, int]]:
        return Counter(
            (row["_hf"]["topic"], row["_hf"]["partition"], row["_hf"]["offset"], row["_hf"]["index"])
            for row in self.content
        )

    @property
    def ids(self) -> list[int]:
        return sorted(row["id"] for row in self.content)


@dataclass
class Bench:
    """One topic, one pipeline, and sinks that stay while the pipeline comes and goes."""

    broker: Broker
    spark: SparkSession
    definition: PipelineDefinition
    sinks: dict[str, MemorySink]
    produced: int = 0
    admin: AdminClient = field(init=False)

    def __post_init__(self) -> None:
        self.admin = AdminClient({"bootstrap.servers": self.broker.bootstrap_servers})

    def produce(
        self, values: list[bytes | None], topic: str = "orders", partition: int | None = None
    ) -> None:
        producer = Producer({"bootstrap.servers": self.broker.bootstrap_servers})
        failed: list[Any] = []
        for value in values:
            where: dict[str, Any] = {} if partition is None else {"partition": partition}
            producer.produce(
                topic,
                value,
                key=str(self.produced),
                on_delivery=lambda error, _: failed.append(error) if error else None,
                **where,
            )
            self.produced += 1
        assert producer.flush(30) == 0
        assert not failed

    def produce_orders(self, count: int, **where: Any) -> None:
        first = self.produced
        self.produce([order(number) for number in range(first, first + count)], **where)

    def create(self, topic: str, partitions: int) -> None:
        self.admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(30)

    def change(self, **changes: Any) -> None:
        self.definition = replace(self.definition, **changes)

    def run(
        self, faults: Faults = no_faults, progress: Callable[[Event], None] | None = None, **more: Any
    ) -> Summary:
        return run_pipeline(
            self.definition,
            spark=self.spark,
            faults=faults,
            progress=progress,
            signals=False,
            build=lambda _: dict(self.sinks),
            **more,
        )

    def run_until_crash(self, faults: Faults) -> None:
        """A run that ends without getting to the point fails the test."""
        with pytest.raises(Crash):
            self.run(faults)

    def run_batches(self, **more: Any) -> list[BatchDone]:
        events: list[Event] = []
        self.run(progress=events.append, **more)
        return [event for event in events if isinstance(event, BatchDone)]

    def lose_home(self) -> None:
        shutil.rmtree(self.definition.home)

    @property
    def log(self) -> list[dict[str, Any]]:
        with open(os.path.join(self.definition.home, "log.jsonl"), encoding="utf-8") as file:
            return [json.loads(line) for line in file]


def order(number: int, amount: float | None = 1.0, **more: Any) -> bytes:
    return json.dumps({"id": number, "amount": amount, **more}).encode()


@contextmanager
def made_bench(spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    with Broker(str(tmp_path / "broker")) as broker:
        definition = PipelineDefinition(
            name="orders",
            source=Source(topics=("orders",), bootstrap=broker.bootstrap_servers, value=ORDERS),
            sinks=(ParquetSink(path="unused", name="main"),),
            home=str(tmp_path / "home"),
            directory=str(tmp_path),
        )
        sinks = {name: MemorySink(name) for name in ("dead-letter", "main", "second")}
        made = Bench(broker, spark, definition, sinks)
        made.create("orders", 2)
        yield made


@pytest.fixture
def spark_bench(spark: SparkSession, tmp_path: Path) -> Iterator[Bench]:
    with made_bench(spark, tmp_path) as made:
        yield made


@pytest.fixture
def arrow_bench(tmp_path: Path) -> Iterator[Bench]:
    """Arrow tables in the place of Spark's frames, for definitions without steps: all but Spark is real."""
    with without_spark(PlainRouter, retries=RETRIES_MAX) as session, made_bench(session, tmp_path) as made:
        yield made


@pytest.fixture
def bench(spark_bench: Bench) -> Bench:
    """On Spark; a module whose rules do not need it takes `either_bench`."""
    return spark_bench


@pytest.fixture(
    params=["arrow_bench", pytest.param("spark_bench", marks=(pytest.mark.long, pytest.mark.spark))]
)
def either_bench(request: pytest.FixtureRequest) -> Bench:
    made: Bench = request.getfixturevalue(request.param)
    return made


@pytest.fixture
def crash_at() -> Callable[[str, int], Faults]:
    """A hook that ends the driver when it passes a point for the n-th time."""

    def make(point: str, times: int = 1) -> Faults:
        passed = Counter[str]()

        def hook(name: str) -> None:
            passed[name] += 1
            if name == point and passed[name] == times:
                raise Crash

        return hook

    return make
