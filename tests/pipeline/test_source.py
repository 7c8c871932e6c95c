"""`format("holdfast")` in a real Spark, against the embedded broker."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from holdfast.pipeline.source import HoldfastSource
from holdfast.testing.broker import BrokerProcess

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, Row, SparkSession


@pytest.fixture(scope="module")
def bootstrap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with BrokerProcess(str(tmp_path_factory.mktemp("broker") / "data")) as broker:
        yield broker.bootstrap_servers


@pytest.fixture(scope="module")
def source(spark: SparkSession) -> SparkSession:
    spark.dataSource.register(HoldfastSource)
    return spark


def make_topic(bootstrap: str, name: str, partitions: int = 2, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(name, partitions, 1, config=config)])[name].result(30)


def send(bootstrap: str, topic: str, numbers: range, partitions: int = 2) -> None:
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    for number in numbers:
        producer.produce(
            topic,
            key=str(number),
            value=f"v{number}",
            partition=number % partitions,
            headers=[("n", str(number).encode())],
        )
    assert producer.flush(30) == 0


def options(bootstrap: str, topic: str, **more: str) -> dict[str, str]:
    return {"kafka.bootstrap.servers": bootstrap, "subscribe": topic, **more}


def values(rows: list[Row]) -> list[str]:
    return sorted((bytes(row.value).decode() for row in rows), key=lambda text: int(text[1:]))


def wanted(numbers: range) -> list[str]:
    return [f"v{number}" for number in numbers]


def run_available(frame: DataFrame, checkpoint: Path, each: Callable[[DataFrame, int], None]) -> None:
    query = (
        frame.writeStream.foreachBatch(each)
        .option("checkpointLocation", str(checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)


def test_a_batch_query_has_the_columns_of_the_connector(source: SparkSession, bootstrap: str) -> None:
    make_topic(bootstrap, "columns", 1)
    send(bootstrap, "columns", range(3), 1)
    rows = (
        source.read.format("holdfast")
        .options(**options(bootstrap, "columns"))
        .load()
        .orderBy("offset")
        .collect()
    )
    assert [
        (bytes(row.key), bytes(row.value), row.topic, row.partition, row.offset, row.timestampType)
        for row in rows
    ] == [(str(n).encode(), f"v{n}".encode(), "columns", 0, n, 0) for n in range(3)]
    assert [[(header.key, bytes(header.value)) for header in row.headers] for row in rows] == [
        [("n", str(n).encode())] for n in range(3)
    ]


def test_a_batch_query_takes_the_range_it_is_given(source: SparkSession, bootstrap: str) -> None:
    make_topic(bootstrap, "ranges", 1)
    send(bootstrap, "ranges", range(10), 1)
    frame = source.read.format("holdfast").options(
        **options(
            bootstrap, "ranges", startingOffsets='{"ranges":{"0":3}}', endingOffsets='{"ranges":{"0":7}}'
        )
    )
    assert values(frame.load().collect()) == wanted(range(3, 7))


def test_a_query_makes_as_many_tasks_as_go_on_the_cores_of_this_machine(
    source: SparkSession, bootstrap: str
) -> None:
    make_topic(bootstrap, "many", 3)
    send(bootstrap, "many", range(60_000), 3)
    given = options(bootstrap, "many")
    cores = source.sparkContext.defaultParallelism
    for more, tasks in (
        ({}, min(cores, 3)),
        ({"minPartitions": "5"}, 5),
        ({"maxRecordsPerPartition": "10000"}, 6),
    ):
        frame = source.read.format("holdfast").options(**given, **more).load()
        assert frame.rdd.getNumPartitions() == tasks
    assert frame.count() == 60_000


def test_a_stream_goes_on_where_its_checkpoint_says_and_takes_new_partitions(
    source: SparkSession, bootstrap: str, tmp_path: Path
) -> None:
    make_topic(bootstrap, "stream", 1)
    send(bootstrap, "stream", range(50), 1)

    def stream() -> DataFrame:
        return (
            source.readStream.format("holdfast")
            .options(**options(bootstrap, "stream", maxOffsetsPerTrigger="20"))
            .load()
        )

    seen: list[str] = []
    sizes: list[int] = []

    def collect(frame: DataFrame, _batch: int) -> None:
        found = values(frame.collect())
        seen.extend(found)
        sizes.append(len(found))

    run_available(stream(), tmp_path / "checkpoint", collect)
    assert seen == wanted(range(50))
    assert max(sizes) <= 21
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_partitions([NewPartitions("stream", 2)])["stream"].result(30)
    send(bootstrap, "stream", range(50, 60), 2)
    seen.clear()
    run_available(stream(), tmp_path / "checkpoint", collect)
    assert sorted(seen) == wanted(range(50, 60))


def test_a_topic_created_again_stops_the_stream(source: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    make_topic(bootstrap, "again", 1)
    send(bootstrap, "again", range(5), 1)
    frame = source.readStream.format("holdfast").options(**options(bootstrap, "again")).load()
    run_available(frame, tmp_path / "checkpoint", lambda rows, _: None)
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.delete_topics(["again"])["again"].result(30)
    make_topic(bootstrap, "again", 1)
    send(bootstrap, "again", range(9), 1)
    with pytest.raises(Exception, match="deleted and created again"):
        run_available(frame, tmp_path / "checkpoint", lambda rows, _: None)


def test_a_wrong_option_is_refused_before_anything_runs(source: SparkSession, bootstrap: str) -> None:
    with pytest.raises(Exception, match="HF401"):
        source.read.format("holdfast").options(**options(bootstrap, "columns", failOnDataLoss="false")).load()


def test_the_guides_queries_run(source: SparkSession, bootstrap: str, tmp_path: Path) -> None:
    make_topic(bootstrap, "orders")
    send(bootstrap, "orders", range(20))
    guide = Path(__file__).parents[2] / "docs" / "guides" / "reading-topics.md"
    texts = re.findall(r"^```python spark\n(.*?)^```$", guide.read_text(), re.DOTALL | re.MULTILINE)
    assert len(texts) == 2
    for text in texts:
        exec(text.replace("localhost:9092", bootstrap).replace('"orders-', f'"{tmp_path}/orders-'), {})
    written = source.read.parquet(str(tmp_path / "orders-out")).collect()
    assert sorted(row["value"] for row in written) == sorted(wanted(range(20)))
