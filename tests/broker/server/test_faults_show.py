"""A fault shows within seconds: in a metric, in a line of a log, and where it stops the broker's work, in `/readyz`.

The table of the guide "Watching it" says where. A full disk, a dead directory and a broker that starts are with the
tests of the endpoint, a lagging group with those of the exporter, a failing sink with those of pipelines.
"""

from __future__ import annotations

import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer as RawProducer
from prometheus_client.parser import text_string_to_metric_families

from holdfast import Broker
from holdfast.broker.node import node as node_module
from holdfast.broker.server import flusher, metrics_endpoint
from holdfast.client import Metrics, Producer, UndeliveredMessages
from holdfast.testing.engines import wait_until

SETTINGS = {
    "holdfast.metrics.listener": "0",
    "transaction.abort.timed.out.transaction.cleanup.interval.ms": "200",
}


class Watched:
    def __init__(self, broker: Broker, lines: list[str]) -> None:
        assert broker.server is not None
        assert broker.server.metrics is not None
        self.broker = broker
        self.lines = lines
        self._address = broker.server.metrics.address

    def get(self, path: str) -> tuple[int, str]:
        try:
            with urllib.request.urlopen(f"http://{self._address}{path}", timeout=30) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as refused:
            return refused.code, refused.read().decode()

    def value(self, name: str, **labels: str) -> float:
        return sum(
            sample.value
            for family in text_string_to_metric_families(self.get("/metrics")[1])
            for sample in family.samples
            if sample.name == name and labels.items() <= sample.labels.items()
        )

    def has_said(self, *words: str) -> bool:
        return any(all(word in line for word in words) for line in list(self.lines))


@pytest.fixture
def watched(tmp_path: Path) -> Iterator[Watched]:
    lines: list[str] = []
    with Broker(tmp_path / "data", settings=SETTINGS, say=lines.append) as broker:
        broker.create_topic("orders", settings={"max.message.bytes": "1000"})
        yield Watched(broker, lines)


def test_a_stuck_flush(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    carry_out = flusher.carry_out

    def stuck(job: Any) -> OSError | None:
        goes_on.wait(60)
        return carry_out(job)

    server = watched.broker.server
    assert server is not None
    monkeypatch.setattr(node_module, "FLUSH_STUCK_S", 1)
    monkeypatch.setattr(metrics_endpoint, "FLUSH_STUCK_S", 2)
    monkeypatch.setattr(flusher, "carry_out", stuck)
    server.flusher._average_seconds = 1.0  # as of a slow disk, whose flushes hold up no loop
    producer = RawProducer({"bootstrap.servers": watched.broker.bootstrap_servers})
    try:
        producer.produce("orders", b"x")
        producer.poll(0)
        wait_until(lambda: watched.get("/readyz")[0] == 503, "it is not ready", 30)
        assert "a flush has been under way" in watched.get("/readyz")[1]
        assert watched.get("/livez") == (200, "alive\n")
        assert watched.value("holdfast_flush_oldest_seconds") >= 2
        assert watched.value("holdfast_troubles", kind="flush-stuck") == 1
        assert watched.value("holdfast_ready") == 0
        assert watched.has_said("does not answer")
    finally:
        goes_on.set()
    assert producer.flush(30) == 0
    wait_until(lambda: watched.get("/readyz")[0] == 200, "it is ready again", 30)
    wait_until(lambda: watched.has_said("slow request: Produce", "flush "), "where the time went is said", 30)


@pytest.mark.check
def test_an_open_transaction(watched: Watched) -> None:
    settings = {"transactional.id": "billing", "transaction.timeout.ms": 1000}
    producer = RawProducer({"bootstrap.servers": watched.broker.bootstrap_servers, **settings})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce("orders", b"x")
    producer.flush(30)
    place = {"topic": "orders", "partition": "0"}
    assert watched.value("holdfast_open_transactions") == 1
    assert watched.value("holdfast_partition_last_stable_offset", **place) == 0
    assert watched.value("kafka_topic_partition_current_offset", **place) == 1
    wait_until(lambda: watched.has_said("'billing' is not ended after 1000 ms: aborted"), "it is said", 30)
    wait_until(lambda: watched.value("holdfast_open_transactions") == 0, "it is over", 30)


@pytest.mark.check
def test_a_message_set_aside(watched: Watched, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    metrics = Metrics()
    with caplog.at_level(logging.WARNING, "holdfast.client"):
        producer = Producer(watched.broker.bootstrap_servers, spool=tmp_path / "spool", metrics=metrics)
        producer.send("orders", b"x" * 2000)
        name = 'holdfast_spool_set_aside_messages{client="producer"}'
        wait_until(lambda: metrics.series()[name] == 1, "it is set aside", 30)
        with pytest.raises(UndeliveredMessages):
            producer.close()
    assert watched.value("holdfast_refusals_total", request="Produce", error="MESSAGE_TOO_LARGE") >= 1
    wait_until(
        lambda: watched.has_said("refused Produce of", "orders-0: MESSAGE_TOO_LARGE"), "it is said", 30
    )
    assert "orders" in caplog.text
