"""One topic, what plain Spark makes of it, and what a pipeline does: for the risks HF401 to HF410.

Spark's own connector is set as the risk says; our pipeline is not set at all. A pipeline is crashed at a point by name,
as `holdfast.pipeline.engine.faults` lists them.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.pipeline.definition.model import Decoding, Field, ParquetSink, PipelineDefinition, Source
from holdfast.pipeline.engine.faults import Faults, no_faults
from holdfast.pipeline.engine.progress import Summary
from holdfast.reader import read
from holdfast.testing.engines import QUIET, NotComeAbout, await_decided

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_SECONDS: Final = 120
ORDERS: Final = Decoding("json", (Field("id", "long"), Field("amount", "double")))


class Crash(BaseException):
    """The driver is gone."""


class SparkScene:
    """One topic, what plain Spark makes of it, and what a pipeline does."""

    def __init__(self, bootstrap: str, spark: SparkSession, directory: Path) -> None:
        self.bootstrap = bootstrap
        self.spark = spark
        self.directory = directory
        self.topic = f"orders-{uuid.uuid4().hex[:8]}"
        self.out = directory / "out"
        self.checkpoint = directory / "checkpoint"
        self.admin = AdminClient({"bootstrap.servers": bootstrap, **QUIET})
        self.create(self.topic)

    # The topic

    def create(self, topic: str, partitions: int = 1, **config: str) -> None:
        new = NewTopic(topic, partitions, 1, config={name.replace("_", "."): config[name] for name in config})
        self.admin.create_topics([new])[topic].result(WAIT_SECONDS)

    def create_again(self) -> None:
        self.admin.delete_topics([self.topic])[self.topic].result(WAIT_SECONDS)
        self.create(self.topic)

    def send(self, *values: bytes, partition: int = 0) -> None:
        producer = Producer({"bootstrap.servers": self.bootstrap, "enable.idempotence": True, **QUIET})
        for value in values:
            producer.produce(self.topic, value, partition=partition)
        if producer.flush(WAIT_SECONDS):
            raise NotComeAbout(f"not everything was sent to {self.topic}")

    def send_orders(self, numbers: range, partition: int = 0) -> None:
        self.send(*(order(number) for number in numbers), partition=partition)

    def await_decided(self, topic: str) -> None:
        """Return when all of a topic is committed or aborted."""
        if not await_decided(self.bootstrap, topic, WAIT_SECONDS):
            raise NotComeAbout(f"a transaction in {topic} stays open")

    def values(self, topic: str) -> list[bytes]:
        """All that a reader of committed records finds."""
        self.await_decided(topic)
        return [row["value"] for batch in read(self.bootstrap, topic) for row in batch.to_pylist()]

    # Plain Spark

    def stream(self, source: str = "kafka", **options: str) -> DataFrame:
        """The topic as a stream, by Spark's own connector."""
        given = {"kafka.bootstrap.servers": self.bootstrap, "subscribe": self.topic, **options}
        return self.spark.readStream.format(source).options(**given).load()

    def orders(self, **options: str) -> DataFrame:
        """The stream's values as the documentation of Spark parses them."""
        return (
            self.stream(**{"startingOffsets": "earliest", **options})
            .selectExpr("from_json(CAST(value AS STRING), 'id LONG, amount DOUBLE') AS parsed")
            .select("parsed.*")
        )

    def query(self, frame: DataFrame, each: Callable[[DataFrame, int], None] | None = None) -> None:
        """Run a query until it has read what there is; without a function it appends to files."""
        query = (
            frame.writeStream.foreachBatch(each or self.append)
            .option("checkpointLocation", str(self.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(WAIT_SECONDS):
            raise NotComeAbout("the query did not end")

    def append(self, rows: DataFrame, number: int) -> None:
        rows.write.mode("append").parquet(str(self.out))

    # The pipeline

    def definition(self, **changes: Any) -> PipelineDefinition:
        values: dict[str, Any] = {
            "source": Source(topics=(self.topic,), bootstrap=self.bootstrap, value=ORDERS),
            "sinks": (ParquetSink(path=str(self.out)),),
            "home": str(self.directory / "home"),
            "directory": str(self.directory),
            **changes,
        }
        return PipelineDefinition(name=self.topic, **values)

    def run(self, faults: Faults = no_faults, accept_loss: tuple[str, ...] = (), **changes: Any) -> Summary:
        # With Arrow, which other experiments do without.
        from holdfast.pipeline.engine.running import run_pipeline

        definition = self.definition(**changes)
        return run_pipeline(
            definition, spark=self.spark, signals=False, faults=faults, accept_loss=accept_loss
        )

    def crash(self, point: str, **changes: Any) -> None:
        """Run until the driver passes this point, and no further."""

        def fail(passed: str) -> None:
            if passed == point:
                raise Crash

        try:
            self.run(fail, **changes)
        except Crash:
            return
        raise NotComeAbout(f"the pipeline did not pass {point}")

    # What came of it

    def ids(self, path: Path | None = None) -> list[int]:
        rows = self.spark.read.parquet(str(path or self.out)).select("id").collect()
        return sorted(row.id for row in rows)


def order(number: int, **more: Any) -> bytes:
    return json.dumps({"id": number, "amount": 1.0, **more}).encode()
