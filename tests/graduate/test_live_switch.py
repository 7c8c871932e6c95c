"""The switch under load, on one port: clients go on as after a restart, and nothing is lost or repeated."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer
from tests.support.tiers import by_tier

from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate, prepare
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.verifying import verify
from holdfast.manifest.model import decode
from holdfast.testing.apache import SHORT_LIVED_JVM
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, Engine, read_log, wait_until
from holdfast.testing.processes import free_ports

pytestmark = [pytest.mark.check, pytest.mark.java]

PARTITIONS = 3
AWAY = (
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError._TRANSPORT,
    KafkaError._WAIT_COORD,
    KafkaError._TIMED_OUT,
)
"""What a client hears while a broker is away and when it is back; a rebalance is not among it."""


class Load:
    """Clients on threads, from before the switch until after it."""

    def __init__(self, server: str) -> None:
        self._settings = {"bootstrap.servers": server, "reconnect.backoff.max.ms": 500, **QUIET}
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        self.failures: list[BaseException] = []
        self.acknowledged: set[str] = set()
        self.committed: set[str] = set()
        """Transactions that were committed; each wrote a message to two topics."""
        self.handled: Counter[str] = Counter()

    def begin(self) -> None:
        for work in (lambda: self._send("s1"), lambda: self._send("s2"), self._transact, self._consume):
            thread = threading.Thread(target=self._guarded, args=(work,), daemon=True)
            thread.start()
            self._threads.append(thread)

    def end(self) -> None:
        self._is_over.set()
        for thread in self._threads:
            thread.join(120)
            assert not thread.is_alive()
        assert self.failures == []

    def _guarded(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - shown by `end`
            self.failures.append(error)

    def _send(self, name: str) -> None:
        producer = Producer({**self._settings, "enable.idempotence": True, "linger.ms": 2})

        answered = 0

        def delivered(error: Any, message: Any) -> None:
            nonlocal answered
            assert error is None, error
            self.acknowledged.add(message.value().decode())
            answered += 1

        number = 0
        while not self._is_over.is_set():
            producer.produce("sent", f"{name}-{number}", on_delivery=delivered)
            number += 1
            producer.poll(0.002)
        assert producer.flush(100) == 0
        assert answered == number

    def _transact(self) -> None:
        producer = Producer({**self._settings, "transactional.id": "t", "transaction.timeout.ms": 600_000})
        producer.init_transactions(60)
        number = 0
        while not self._is_over.is_set():
            value = f"t-{number}"
            producer.begin_transaction()
            producer.produce("sent", value)
            producer.produce("paired", value)
            self._until_done(lambda: producer.commit_transaction(60))
            self.committed.add(value)
            number += 1

    def _until_done(self, act: Callable[[], None]) -> None:
        while True:
            try:
                act()
                return
            except KafkaException as error:
                if not error.args[0].retriable() and error.args[0].code() not in AWAY:
                    raise
                self._is_over.wait(0.1)

    def _consume(self) -> None:
        consumer = Consumer(
            {
                **self._settings,
                "group.id": "readers",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "session.timeout.ms": 180_000,
            }
        )
        consumer.subscribe(["sent"])
        while not self._is_over.is_set() or not self._has_all():
            for message in consumer.consume(100, 0.1):
                value = message.value()
                if message.error() is None and value is not None:
                    self.handled[value.decode()] += 1
            if self.handled:
                self._until_done(lambda: self._commit(consumer))
        consumer.close()

    def _commit(self, consumer: Consumer) -> None:
        places = [place for place in consumer.position(consumer.assignment()) if place.offset >= 0]
        if places:
            consumer.commit(offsets=places, asynchronous=False)

    def _has_all(self) -> bool:
        alive = any(each.is_alive() for each in self._threads[:3])
        return not alive and self.handled.keys() >= self.acknowledged | self.committed


def test_a_switch_under_load_loses_and_repeats_nothing(tmp_path: Path) -> None:
    port, controller = free_ports(2)
    data, output = str(tmp_path / "data"), str(tmp_path / "out")
    broker = BrokerProcess(data, listen=f"127.0.0.1:{port}").start()
    kafka = None
    try:
        engine = Engine("holdfast", broker.bootstrap_servers)
        for topic in ("sent", "paired"):
            engine.create_topic(topic, PARTITIONS)
        load = Load(broker.bootstrap_servers)
        load.begin()
        count = by_tier(quick=300, check=300, long=20_000)
        wait_until(lambda: sum(load.handled.values()) > count, "the group reads", 200)
        prepare([data], output)
        assert broker.stop() == 0
        at_switch = len(load.acknowledged)
        graduate(Request((data,), ("127.0.0.1", port), ("127.0.0.1", controller), output))
        kafka = start_kafka(output, is_detached=False, jvm_options=SHORT_LIVED_JVM)
        wait_until(lambda: len(load.acknowledged) > at_switch + count, "senders go on", 200)
        load.end()
        stored = Counter(message.value().decode() for message in read_log(kafka.bootstrap_servers, "sent"))
        paired = Counter(message.value().decode() for message in read_log(kafka.bootstrap_servers, "paired"))
        assert stored.keys() == load.acknowledged | load.committed
        assert paired.keys() == load.committed
        assert {*stored.values(), *paired.values(), *load.handled.values()} == {1}
        manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
        report = verify(manifest, output, {"bootstrap.servers": kafka.bootstrap_servers})
        assert report.findings == []
        assert report.counts.offsets_moved_on
        engine = Engine("kafka", kafka.bootstrap_servers)
        ends = engine.admin.list_topics().topics["sent"].partitions
        assert len(engine.committed("readers")) == len(ends)
    finally:
        broker.crash()
        if kafka is not None:
            kafka.close()
