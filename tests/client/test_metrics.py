"""What clients tell of themselves: numbers that Prometheus reads, that are right, and that outlast the client."""

from __future__ import annotations

import threading
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families
from tests.support.running_clients import run_until

from holdfast import Broker
from holdfast.client import (
    Consumer,
    DatabaseSink,
    Message,
    Metrics,
    Output,
    Processor,
    Producer,
    RetryPolicy,
    RetryTopics,
    UndeliveredMessages,
)
from holdfast.client.metrics import FAMILIES
from holdfast.testing.engines import wait_until

ONCE = RetryPolicy(attempts=2, first_seconds=0.01)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    settings = {"group.initial.rebalance.delay.ms": "0"}
    with Broker(tmp_path_factory.mktemp("metrics") / "data", settings=settings) as broker:
        for topic in ("orders", "orders-dlt", "small", "made"):
            broker.create_topic(topic, settings={"max.message.bytes": "1000"} if topic == "small" else None)
        yield broker


def value(metrics: Metrics, name: str, client: str) -> float:
    return metrics.series()[f'holdfast_{name}{{client="{client}"}}']


def shown(metrics: Metrics) -> set[str]:
    return {series.partition("{")[0] for series in metrics.series()}


def send(broker: Broker, *values: bytes) -> None:
    with Producer(broker.bootstrap_servers) as producer:
        producer.send_many("orders", values)


def fail_on_bad(message: Message) -> None:
    if message.value == b"bad":
        raise ValueError("bad")


def test_a_producer_counts_what_arrived_and_what_did_not(broker: Broker) -> None:
    metrics = Metrics()
    with pytest.raises(UndeliveredMessages), Producer(broker.bootstrap_servers, metrics=metrics) as producer:
        producer.send_many("made", [b"x"] * 3)
        producer.send("small", b"x" * 2000)
    assert value(metrics, "producer_delivered_total", "producer") == 3
    assert value(metrics, "producer_refused_total", "producer") == 1
    assert value(metrics, "producer_under_way", "producer") == 0
    with Producer(broker.bootstrap_servers, metrics=metrics, config={"client.id": "billing"}):
        assert value(metrics, "producer_delivered_total", "billing") == 0


def test_a_spool_shows_what_waits_how_long_and_what_was_set_aside(broker: Broker, tmp_path: Path) -> None:
    metrics = Metrics()
    away = Producer("127.0.0.1:1", spool=tmp_path / "away", metrics=metrics, config={"client.id": "away"})
    for _ in range(3):
        away.send("made", b"x").wait_stored(30)
    assert value(metrics, "spool_messages", "away") == 3
    assert value(metrics, "spool_bytes", "away") > 0
    wait_until(lambda: value(metrics, "spool_oldest_seconds", "away") > 0, "time passes", 30)
    away.close(0)
    assert value(metrics, "spool_messages", "away") == 3  # as it left it
    producer = Producer(broker.bootstrap_servers, spool=tmp_path / "here", metrics=metrics)
    producer.send("small", b"x" * 2000)
    producer.send("made", b"x").wait(30)
    wait_until(lambda: value(metrics, "spool_set_aside_messages", "producer") == 1, "it is set aside", 30)
    assert value(metrics, "spool_messages", "producer") == 0
    assert value(metrics, "producer_refused_total", "producer") == 1
    assert shown(metrics) == {name for name in FAMILIES if not name.startswith("holdfast_consumer")}
    with pytest.raises(UndeliveredMessages):
        producer.close()


def test_a_consumer_counts_retries_dead_letters_and_commits(broker: Broker) -> None:
    send(broker, b"good", b"bad", b"good")
    with Metrics(listen=0) as metrics:
        consumer = Consumer(
            broker.bootstrap_servers,
            group="mailer",
            topics=["orders"],
            retry=ONCE,
            commit_seconds=0.05,
            metrics=metrics,
        )
        run_until(
            consumer,
            lambda: consumer.run(fail_on_bad),
            lambda: (
                metrics.series().get('holdfast_consumer_commits_total{client="mailer"}', 0) > 0
                and value(metrics, "consumer_handled_total", "mailer") >= 3
            ),
        )
        with urllib.request.urlopen(f"http://127.0.0.1:{metrics.port}/metrics", timeout=30) as answer:
            families = {family.name for family in text_string_to_metric_families(answer.read().decode())}
    assert "holdfast_consumer_handled" in families
    assert value(metrics, "consumer_handled_total", "mailer") == 3
    assert value(metrics, "consumer_retries_total", "mailer") == 1
    assert value(metrics, "consumer_dead_letters_total", "mailer") == 1
    assert value(metrics, "consumer_in_flight", "mailer") == 0
    assert value(metrics, "consumer_duplicates_total", "mailer") == 0
    not_here = {"holdfast_consumer_retry_topic_messages_total", "holdfast_consumer_commit_failures_total"}
    assert shown(metrics) >= {name for name in FAMILIES if name.startswith("holdfast_consumer")} - not_here


@pytest.mark.check
def test_a_processor_and_a_sink_count_alike(broker: Broker, tmp_path: Path) -> None:
    send(broker, b"good", b"bad")
    metrics = Metrics()
    processor = Processor(
        broker.bootstrap_servers, group="doubler", topics=["orders"], retry=ONCE, metrics=metrics
    )

    def transform(message: Message) -> list[Output]:
        fail_on_bad(message)
        return [Output("made", message.value)]

    def letters(client: str) -> float:
        return metrics.series().get(f'holdfast_consumer_dead_letters_total{{client="{client}"}}', 0)

    def is_committed(client: str) -> bool:
        return letters(client) > 0 and value(metrics, "consumer_handled_total", client) >= 2

    run_until(processor, lambda: processor.run(transform), lambda: is_committed("doubler"))
    assert value(metrics, "consumer_commits_total", "doubler") >= 1
    assert value(metrics, "consumer_retries_total", "doubler") >= 1
    database = str(tmp_path / "sink.sqlite")
    sink = prepared(broker, database, metrics)
    run_until(
        sink,
        lambda: sink.run(lambda message, _: fail_on_bad(message)),
        lambda: letters("booking") > 0 and value(metrics, "consumer_handled_total", "booking") >= 1,
    )
    assert value(metrics, "consumer_commits_total", "booking") >= 1
    assert value(metrics, "consumer_commit_failures_total", "booking") >= 1
    assert value(metrics, "consumer_retries_total", "booking") >= 1


def prepared(broker: Broker, database: str, metrics: Metrics) -> DatabaseSink:
    from holdfast.client.database.store import open_database

    opened = open_database(database)
    opened.connect()
    opened.migrate()
    opened.close()
    return DatabaseSink(
        broker.bootstrap_servers,
        group="booking",
        topics=["orders"],
        database=database,
        retry=ONCE,
        metrics=metrics,
    )


@pytest.mark.check
def test_a_retry_topic_is_counted(broker: Broker) -> None:
    send(broker, b"bad")
    metrics = Metrics()
    retry = RetryTopics(delays=[0.05], create=True)
    consumer = Consumer(
        broker.bootstrap_servers, group="later", topics=["orders"], retry=retry, metrics=metrics
    )
    name = 'holdfast_consumer_retry_topic_messages_total{client="later"}'
    run_until(consumer, lambda: consumer.run(fail_on_bad), lambda: metrics.series().get(name, 0) > 0)


def test_a_callback_gets_every_series() -> None:
    told: list[Mapping[str, float]] = []
    heard = threading.Event()

    def tell(series: Mapping[str, float]) -> None:
        told.append(series)
        heard.set()

    with Metrics(callback=tell, every_seconds=0.01) as metrics:
        metrics.watch("one", lambda: {"holdfast_producer_under_way": 7})
        second = metrics.watch("one", lambda: {"holdfast_producer_under_way": 8})
        wait_until(lambda: bool(told and len(told[-1]) == 2), "both are told", 30)
        second.end()
    assert heard.is_set()
    assert told[-1] == {
        'holdfast_producer_under_way{client="one"}': 7,
        'holdfast_producer_under_way{client="one-2"}': 8,
    }
