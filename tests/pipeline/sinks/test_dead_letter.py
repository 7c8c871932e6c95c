"""The dead-letter sink: as it came, with where from and why, for `holdfast dlq`."""

from __future__ import annotations

import datetime
import json
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource, NewTopic

from holdfast.pipeline.definition.model import PipelineDefinition, Source
from holdfast.pipeline.engine.operators import DEAD_DDL
from holdfast.pipeline.sinks.base import SinkContext
from holdfast.pipeline.sinks.building import build_dead_letter
from holdfast.pipeline.sinks.dead_letter import NO_TIME_FROM_MS, as_rows

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.holdfast(mode="thread")]


def dlq(bootstrap: str, *arguments: str) -> Any:
    command = [sys.executable, "-m", "holdfast.cli", "dlq", *arguments]
    done = subprocess.run(
        [*command, "--bootstrap-server", bootstrap, "--output", "json"],
        capture_output=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_dead_letters_are_listed_shown_and_sent_back(
    holdfast_broker: Any, context: SinkContext, spark: SparkSession, rows: Any, batches: Any
) -> None:
    bootstrap = holdfast_broker.bootstrap_servers
    admin = AdminClient({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic("orders", 2, 1)])["orders"].result(10)
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True})
    producer.produce("orders", b"{broken", b"k", partition=0, headers=[("trace", b"1")])
    assert producer.flush(10) == 0

    sink = build_dead_letter(PipelineDefinition("shop", Source(topics=("orders",))))
    sink.open(replace(context, source={"bootstrap.servers": bootstrap}), spark)
    try:
        cut = batches("dead-letter")
        time = datetime.datetime(2026, 1, 2, 3, 4, 5, 678000)
        own = [("trace", b"1"), ("hf-id", b"00ff:1:1")]
        values: list[dict[str, Any]] = [
            {"_key": b"k", "_raw": b"{broken", "_reason": "parse", "_error": "no closing brace"},
            {"_key": None, "_raw": None, "_reason": "positive", "_error": "amount > 0 is not true"},
        ]
        frame = rows([{**value, "_headers": own, "_timestamp": time} for value in values])
        entry = cut.write(sink, cut.at(0, 2), frame)
        assert (entry.rows, sink.last_entry()) == (2, entry)
    finally:
        sink.close()

    resource = ConfigResource(ConfigResource.Type.TOPIC, "shop-dlt")
    assert admin.describe_configs([resource])[resource].result(10)["retention.ms"].value == "-1"
    listed = dlq(bootstrap, "list", "--topic", "shop-dlt")["dead_letters"]
    assert {(row["origin"], row["error"], row["count"]) for row in listed} == {
        ("orders", "holdfast.pipeline.CannotParse", 1),
        ("orders", "holdfast.pipeline.RuleBroken", 1),
    }
    shown = dlq(bootstrap, "show", "--topic", "shop-dlt", "--filter", "error=holdfast.pipeline.CannotParse")
    failure = shown["failure"]
    assert (failure["topic"], failure["partition"], failure["offset"]) == ("orders", 0, 0)
    assert (failure["reason"], failure["message"]) == ("parse", "no closing brace")
    assert failure["timestamp_ms"] == 1_767_323_045_678
    done = dlq(bootstrap, "redrive", "--topic", "shop-dlt", "--execute")
    assert done["destinations"] == {"orders": 2}

    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "reader"})
    consumer.assign([TopicPartition("orders", 0, 1)])
    messages = consumer.consume(2, 10)
    consumer.close()
    assert [(message.key(), message.value()) for message in messages] == [(b"k", b"{broken"), (None, None)]
    assert ("trace", b"1") in (messages[0].headers() or [])
    assert ("hf-origin-id", b"00ff:1:1") in (messages[0].headers() or [])


def test_as_rows_they_fit_every_table(spark: SparkSession) -> None:
    """A NUL and a time beyond the year 9999 are nothing that every database keeps."""
    from pyspark.sql import functions

    place = {"topic": "t", "partition": 1, "offset": 7, "index": 0}
    letters = spark.createDataFrame(
        [
            (place, b"k", b"\x00", [("a", b"1")], None, "positive", "amount \x00 is no number"),
            (place, None, None, None, None, "parse", "it ends"),
            (place, None, None, None, None, "sink:table", "too long"),
        ],
        DEAD_DDL,
    )
    rows = as_rows(letters).drop("_hf").collect()
    assert rows[0].asDict(recursive=True) == {
        "topic": "t", "partition": 1, "offset": 7, "timestamp": None, "key": b"k", "value": b"\x00",
        "headers": [{"key": "a", "value": b"1"}], "reason": "positive", "step": "positive",
        "error": "amount \ufffd is no number",
    }  # fmt: skip
    assert [(row.reason, row.step, row.headers) for row in rows[1:]] == [
        ("parse", None, []),
        ("sink:table", None, []),
    ]
    moments = [
        letters.limit(1).withColumn("_timestamp", functions.expr(f"timestamp_millis({moment}L)"))
        for moment in (NO_TIME_FROM_MS - 1, NO_TIME_FROM_MS)
    ]
    told = [as_rows(each).select(functions.expr("unix_millis(timestamp)")).first() for each in moments]
    assert told == [(NO_TIME_FROM_MS - 1,), (None,)]
