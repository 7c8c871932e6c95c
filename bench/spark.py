"""Spark for the measures: one warm session with both sources. The report names the version of Spark's connector."""

from __future__ import annotations

import json
import random
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.servers import Broker
from holdfast.testing.spark_connector import connector_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SOURCES: Final = {"ours": "holdfast", "connector": "kafka"}


@contextmanager
def session(home: Path, master: str | None = None, **settings: str) -> Iterator[SparkSession]:
    """A Spark session on every core, or where the master says, with both sources."""
    from holdfast.pipeline.session import spark_session
    from holdfast.pipeline.source import HoldfastSource

    jars = {"spark.jars": ",".join(str(jar) for jar in connector_jars()), "spark.driver.memory": "2g"}
    spark = spark_session("bench", str(home), master=master, settings={**jars, **settings})
    spark.dataSource.register(HoldfastSource)
    try:
        yield spark
    finally:
        spark.stop()


def stream(spark: SparkSession, side: str, broker: Broker, topic: str, **more: str) -> DataFrame:
    """The topic as a stream, by our source or by Spark's connector, with the same guarantees asked of both."""
    options = {
        "kafka.bootstrap.servers": broker.bootstrap_servers,
        "subscribe": topic,
        "startingOffsets": "earliest",
        "kafka.isolation.level": "read_committed",
        "includeHeaders": "true",
    }
    if side == "ours":
        options["maxOffsetsPerTrigger"] = "100000000"
    return spark.readStream.format(SOURCES[side]).options(**(options | more)).load()


def drain(frame: DataFrame, checkpoint: Path) -> float:
    """Seconds until the stream has read everything there is, into nothing."""
    shutil.rmtree(checkpoint, ignore_errors=True)
    begun = time.perf_counter()
    query = (
        frame.writeStream.format("noop")
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    return time.perf_counter() - begun


def fill(
    broker: Broker, topic: str, records: int, *, size: int = 200, partitions: int = 4, codec: str = "none"
) -> None:
    """Orders as JSON of about this many bytes, keyed, one header, spread over the partitions."""
    from confluent_kafka import Producer

    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.num.messages": 5_000,
            "compression.type": codec,
            "queue.buffering.max.messages": 200_000,
        }
    )
    bodies = [order(number, size) for number in range(20_000)]
    for number in range(records):
        value = bodies[number % len(bodies)]
        while True:
            try:
                producer.produce(topic, value, key=b"%d" % number, partition=number % partitions)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 10_000 == 0:
            producer.poll(0)
    if producer.flush(300):
        raise RuntimeError(f"{topic} was not filled within five minutes")


def order(number: int, size: int) -> bytes:
    """One order; its note fills it up."""
    chance = random.Random(number)
    content = {
        "id": number,
        "customer": f"c-{chance.randrange(100_000):06d}",
        "amount": round(chance.uniform(1, 500), 2),
        "quantity": chance.randrange(1, 9),
        "at": f"2026-01-{1 + number % 28:02d}T12:{number % 60:02d}:00Z",
    }
    bare = len(json.dumps({**content, "note": ""}, separators=(",", ":")))
    if size < bare:
        return json.dumps(content, separators=(",", ":")).encode()[:size]
    note = "".join(chance.choices("abcdefghijklmnop ", k=size - bare))
    return json.dumps({**content, "note": note}, separators=(",", ":")).encode()
