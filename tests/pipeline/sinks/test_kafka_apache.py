"""The Kafka sink on Apache Kafka: its transactions, its fencing, its compacted ledger."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, KafkaError, TopicPartition

from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.sinks import kafka
from holdfast.pipeline.sinks.base import SinkContext, SinkError, SinkFenced, SinkUnavailable
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.kafka_writer import Writer
from holdfast.testing.engines import await_decided

from .test_kafka_reset import ROWS, WRITERS
from .test_kafka_sending import Jobs, Stage, places

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.long]


def committed(bootstrap: str, topic: str) -> list[int]:
    assert await_decided(bootstrap, topic)
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "reader",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
            "isolation.level": "read_committed",
        }
    )
    found = []
    for partition in consumer.list_topics(topic, timeout=10).topics[topic].partitions:
        consumer.assign([TopicPartition(topic, partition, 0)])
        while True:
            message = consumer.poll(10)
            assert message is not None
            error = message.error()
            if error is None:
                found.append(json.loads(message.value() or b"")["id"])
            elif error.code() == KafkaError._PARTITION_EOF:
                break
    consumer.close()
    return sorted(found)


def test_a_batch_cut_between_writers_is_finished_and_the_older_copy_fenced(
    apache_kafka: Any,
    context: SinkContext,
    spark: SparkSession,
    rows: Any,
    batches: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bootstrap = apache_kafka.bootstrap_servers
    topic = f"out-{uuid.uuid4().hex[:8]}"
    pipeline = f"shop-{topic}"
    cut = batches("kafka", pipeline)
    opened = replace(context, source={"bootstrap.servers": bootstrap})
    commit = Writer._commit

    def only_first(writer: Writer) -> None:
        if writer._id.endswith("-1"):
            raise SinkError("power cut")
        commit(writer)

    def values(start: int, end: int) -> Any:
        return rows([{"id": at} for at in range(start, end)], "id bigint", start=start)

    old = KafkaSinkWriter(KafkaSink(topic, writers=2), pipeline)
    old.open(opened, spark)
    first = cut.write(old, cut.at(0, 20), values(0, 20))
    with monkeypatch.context() as patch:
        patch.setattr(Writer, "_commit", only_first)
        with pytest.raises(SinkError, match="power cut"):
            cut.write(old, cut.at(20, 40), values(20, 40))
    assert old.last_entry() == first
    new = KafkaSinkWriter(KafkaSink(topic), pipeline)
    new.open(opened, spark)
    unfinished = new.unfinished()
    assert unfinished is not None
    assert unfinished.range == cut.at(20, 40).range
    with pytest.raises(SinkFenced):
        cut.write(old, cut.at(20, 40), values(20, 40))
    cut.write(new, cut.at(20, 40), values(20, 40))
    last = cut.write(new, cut.at(40, 45), values(40, 45))
    assert committed(bootstrap, topic) == list(range(45))
    assert new.last_entry() == last
    old.close()
    new.close()


def test_late_tasks_write_nothing_and_half_a_batch_is_finished(
    apache_kafka: Any, context: SinkContext, batches: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kafka, "TASK_ROWS", 0)
    bootstrap = apache_kafka.bootstrap_servers
    topic = f"out-{uuid.uuid4().hex[:8]}"
    pipeline = f"shop-{topic}"

    def make(jobs: Any) -> KafkaSinkWriter:
        sink = KafkaSinkWriter(KafkaSink(topic, writers=WRITERS), pipeline)
        sink.open(replace(context, source={"bootstrap.servers": bootstrap}), jobs)
        return sink

    stage = Stage(make, batches("kafka", pipeline), tmp_path, bootstrap, topic)
    jobs = Jobs(runs=())
    sink = make(jobs)
    with pytest.raises(SinkUnavailable):
        stage.send(sink)
    late = Jobs(tasks=jobs.tasks)
    jobs.runs = (2,)
    with pytest.raises(SinkUnavailable):
        stage.send(sink, ROWS)
    for number in range(WRITERS):
        with pytest.raises(SinkFenced):
            late.late(number)
    again = make(Jobs())
    stage.send(again, ROWS)
    again.close()
    assert await_decided(bootstrap, topic)
    assert stage.places == places(ROWS)
