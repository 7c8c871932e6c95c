"""The drop-in: confluent-kafka's methods, our guarantees."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import KafkaError
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support.fake_producer import FakeCluster, Verdict

from holdfast.client import direct
from holdfast.client.errors import UndeliveredMessages, UnsafeSetting
from holdfast.client.exit_guard import EXIT_UNDELIVERED
from holdfast.client.spool import sender as sender_module
from holdfast.client.wrapped import wrap
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess

CONFIG = {"bootstrap.servers": "fake"}


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> FakeCluster:
    """Every producer made in the test is one of this cluster."""
    cluster = FakeCluster({"orders": 1})
    real_direct, real_spooled = direct.DirectSender, sender_module.SpooledSender
    monkeypatch.setattr(direct, "DirectSender", lambda settings: real_direct(settings, make=cluster.make))
    monkeypatch.setattr(
        sender_module, "SpooledSender", lambda *args, **named: real_spooled(*args, make=cluster.make, **named)
    )
    return cluster


class Reports:
    """What callbacks were called with, and in which threads."""

    def __init__(self) -> None:
        self.seen: list[tuple[KafkaError | None, Any]] = []
        self.threads: set[int] = set()

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        self.seen.append((error, message))
        self.threads.add(threading.get_ident())


@pytest.mark.parametrize("has_spool", [False, True])
def test_callbacks_come_from_poll_and_flush_in_the_thread_that_calls(
    has_spool: bool, cluster: FakeCluster, tmp_path: Path
) -> None:
    reports = Reports()
    producer = wrap(CONFIG, spool=tmp_path if has_spool else None)
    for number in range(100):
        producer.produce("orders", b"%d" % number, b"k", on_delivery=reports)
        producer.poll(0)
    assert producer.flush(30) == 0
    assert len(producer) == 0
    assert [message.offset() for _, message in reports.seen] == list(range(100))
    first = reports.seen[0][1]
    assert (first.topic(), first.partition(), first.key()) == ("orders", 0, b"k")
    assert first.value() == (None if has_spool else b"0")
    assert reports.threads == {threading.get_ident()}
    assert producer.close()


def test_a_failure_is_reported_with_kafkas_error(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    reports = Reports()
    with wrap({**CONFIG, "on_delivery": reports}) as producer:
        producer.produce("orders", "text", headers={"trace": "1"})
        producer.flush()
    ((error, message),) = reports.seen
    assert error is not None
    assert error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert (message.error(), message.value()) == (error, b"text")


def test_a_failure_without_a_callback_is_named_at_the_end(cluster: FakeCluster) -> None:
    cluster.refuse(lambda topic, partition, message: Verdict(KafkaError.TOPIC_AUTHORIZATION_FAILED))
    producer = wrap(CONFIG)
    producer.produce("orders", b"x")
    producer.flush()
    with pytest.raises(UndeliveredMessages, match="orders"):
        producer.close()


def test_callbacks_nobody_polled_for_are_called_at_the_end(cluster: FakeCluster) -> None:
    reports = Reports()
    with wrap(CONFIG) as producer:
        producer.produce("orders", b"x", callback=reports)
    assert len(reports.seen) == 1


def test_without_room_in_time_it_raises_what_confluent_kafka_raises(
    cluster: FakeCluster, tmp_path: Path
) -> None:
    cluster.queue_max = 1
    cluster.away()
    producer = wrap(CONFIG, send_timeout=0.01)
    producer.produce("orders", b"1")
    with pytest.raises(BufferError):
        producer.produce("orders", b"2")
    assert len(producer) == 1
    cluster.back()
    producer.close()
    cluster.away()
    spooled = wrap(CONFIG, send_timeout=0.01, spool=tmp_path, spool_max_bytes=4096)
    with pytest.raises(BufferError):
        for _ in range(100):
            spooled.produce("orders", b"x" * 100, partition=0)
    cluster.back()
    spooled.close()


def test_keys_stay_where_librdkafka_put_them(cluster: FakeCluster) -> None:
    wrap(CONFIG).close()
    wrap({**CONFIG, "partitioner": "murmur2"}).close()
    assert [settings["partitioner"] for settings in cluster.settings] == ["consistent_random", "murmur2"]


def test_what_loses_messages_is_refused() -> None:
    with pytest.raises(UnsafeSetting, match="HF102"):
        wrap({"metadata.broker.list": "fake", "request.required.acks": 1})
    with pytest.raises(UsageError, match=r"bootstrap\.servers"):
        wrap({})


def test_purge_is_refused(cluster: FakeCluster) -> None:
    with wrap(CONFIG) as producer, pytest.raises(UsageError, match="HF101"):
        producer.purge()


SCRIPT = """
from holdfast.client import exit_guard
from holdfast.client.wrapped import wrap
exit_guard.LAST_CHANCE_SECONDS = 0.1
producer = wrap({"bootstrap.servers": "127.0.0.1:1", "log_level": 0})
producer.produce("orders", b"x", on_delivery=lambda error, message: print("called back:", error.name()))
"""


def test_a_program_that_ends_without_flush_says_so_and_the_callback_is_called() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == EXIT_UNDELIVERED
    assert "1 message had not been delivered" in done.stderr
    assert "called back: _PURGE_QUEUE" in done.stdout


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(str(tmp_path / "broker"))
    process.start()
    yield process
    process.stop()


def test_the_same_program_runs_on_confluent_kafka_and_on_the_drop_in(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    from confluent_kafka import Producer as RawProducer

    config: Any = {"bootstrap.servers": broker.bootstrap_servers}
    admin = AdminClient(config)
    for future in admin.create_topics([NewTopic("same", 8, 1)]).values():
        future.result()

    def program(producer: Any) -> dict[bytes, int]:
        places: dict[bytes, int] = {}

        def note(error: KafkaError | None, message: Any) -> None:
            assert error is None
            places[message.key()] = message.partition()

        for number in range(50):
            producer.produce("same", b"v", key=b"key-%d" % number, on_delivery=note)
            producer.poll(0)
        assert producer.flush(60) == 0
        assert "same" in producer.list_topics("same", timeout=10).topics
        return places

    plain = program(RawProducer(config))
    with wrap(config) as producer:
        assert program(producer) == plain
    with wrap(config, spool=tmp_path / "home") as producer:
        assert program(producer) == plain
