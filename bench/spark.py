"""Spark for the measures: one warm session with both sources, Spark's own connector fetched by Maven.

The connector's jars for Spark 4.3.0 are not in every mirror. `CONNECTOR` names what is used in their place: the nearest
version that can be had, with the versions of its parts that can be had beside it. The report names it.
"""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench.servers import Broker, ServerUnavailable
from holdfast.testing.apache import cache_directory, exclusive_lock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

CONNECTOR_VERSION: Final = "4.2.0"
CONNECTOR: Final = (
    f"org.apache.spark:spark-sql-kafka-0-10_2.13:{CONNECTOR_VERSION}",
    "org.apache.spark:spark-token-provider-kafka-0-10_2.13:4.0.0",
    "org.apache.kafka:kafka-clients:3.9.1",
    "org.apache.commons:commons-pool2:2.12.1",
)
MAVEN_GOAL: Final = "org.apache.maven.plugins:maven-dependency-plugin:3.6.1:copy"
DOWNLOAD_TIMEOUT_S: Final = 600.0
SOURCES: Final = {"ours": "holdfast", "connector": "kafka"}


def connector_jars() -> list[Path]:
    """The jars of Spark's connector, fetched when they are not there yet."""
    target = cache_directory() / f"spark-connector-{CONNECTOR_VERSION}"
    target.parent.mkdir(parents=True, exist_ok=True)
    with exclusive_lock(target.parent / "spark-connector.lock"):
        if not target.is_dir():
            _fetch(target)
    return sorted(target.glob("*.jar"))


def _fetch(target: Path) -> None:
    maven = shutil.which("mvn")
    if maven is None:
        raise ServerUnavailable("Spark's Kafka connector is fetched by Maven: 'mvn' is not on the PATH")
    aside = Path(tempfile.mkdtemp(prefix="spark-connector-", dir=target.parent))
    try:
        for artifact in CONNECTOR:
            command = [maven, "-B", "-q", MAVEN_GOAL, f"-Dartifact={artifact}", f"-DoutputDirectory={aside}"]
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=DOWNLOAD_TIMEOUT_S, cwd=aside, check=False
            )
            if done.returncode != 0:
                raise ServerUnavailable(f"Maven could not fetch {artifact}: {done.stdout[-500:]}")
        aside.rename(target)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


@contextmanager
def session(home: Path, **settings: str) -> Iterator[SparkSession]:
    """A Spark session on every core, with both sources."""
    from holdfast.pipeline.session import spark_session
    from holdfast.pipeline.source import HoldfastSource

    jars = {"spark.jars": ",".join(str(jar) for jar in connector_jars()), "spark.driver.memory": "2g"}
    spark = spark_session("bench", str(home), settings={**jars, **settings})
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
    return spark.readStream.format(SOURCES[side]).options(**options, **more).load()


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
