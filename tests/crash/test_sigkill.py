"""SIGKILL at random moments, real processes and real clients: what was acknowledged is read back, once, in order. B6.

Producers run through all of it: idempotent, acks=all, one per compression, some sharing a partition. They never
learn of the kills but by a broken connection, and send again what was under way. A history of what they sent and
were told goes to the same checkers as the simulator's.
"""

from __future__ import annotations

import random
import threading
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from tests.support import history
from tests.support.checkers import Checkers

from holdfast.testing.broker import BrokerProcess

pytestmark = [pytest.mark.crash, pytest.mark.timeout(1800)]

TOPIC = "crash"
PARTITIONS = 4
COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
ACKNOWLEDGED_PER_ROUND_MAX = 400
WAIT_SECONDS_MAX = 60.0
QUEUED_MAX = 200
"""Messages one producer has under way: enough for several batches in each partition."""


class Observer:
    """Everything the clients saw, in the order they saw it."""

    def __init__(self) -> None:
        self._checkers = Checkers()
        self._changed = threading.Condition()
        self.acknowledged = 0
        self.failures: list[str] = []

    def observe(self, event: Any) -> None:
        with self._changed:
            self._checkers.observe(event)

    def acknowledge(self, event: history.BatchAcknowledged) -> None:
        with self._changed:
            self._checkers.observe(event)
            self.acknowledged += 1
            self._changed.notify_all()

    def fail(self, what: str) -> None:
        with self._changed:
            self.failures.append(what)
            self._changed.notify_all()

    def wait_for(self, acknowledged: int) -> None:
        with self._changed:
            done = self._changed.wait_for(
                lambda: self.failures or self.acknowledged >= acknowledged, WAIT_SECONDS_MAX
            )
            assert not self.failures, self.failures
            assert done, (
                f"only {self.acknowledged} of {acknowledged} acknowledged within {WAIT_SECONDS_MAX:.0f} s"
            )


class Sender(threading.Thread):
    """One producer that sends until told to stop, whatever happens to the broker."""

    def __init__(
        self, bootstrap_servers: str, compression: str, partitions: list[int], observer: Observer
    ) -> None:
        super().__init__(name=f"sender-{compression}", daemon=True)
        self._producer = Producer(
            {
                "bootstrap.servers": bootstrap_servers,
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": compression,
                "linger.ms": 2,
                "batch.num.messages": 25,
                "message.timeout.ms": 600_000,
                "reconnect.backoff.ms": 10,
                "reconnect.backoff.max.ms": 50,
                "retry.backoff.ms": 10,
                "retry.backoff.max.ms": 50,
                "socket.keepalive.enable": True,
                "log_level": 0,
            }
        )
        self._compression = compression
        self._partitions = partitions
        self._observer = observer
        self._stopping = threading.Event()
        self._random = random.Random(compression)
        self._number = 0
        self._under_way = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            if self._under_way >= QUEUED_MAX:
                self._producer.poll(0.05)
                continue
            self._send()
            self._producer.poll(0)
        left = self._producer.flush(WAIT_SECONDS_MAX)
        if left:
            self._observer.fail(f"{self.name}: {left} messages were never answered")

    def _send(self) -> None:
        self._number += 1
        number = self._number
        partition = self._random.choice(self._partitions)
        filler = self._random.randbytes(self._random.randrange(40)) * self._random.randrange(30)
        value = b"%s %d %s" % (self._compression.encode(), number, filler)
        where = (TOPIC, partition)
        self._observer.observe(history.BatchSent(where, self.name, number, (value,)))
        self._under_way += 1

        def answered(error: KafkaError | None, message: Message) -> None:
            self._under_way -= 1
            if error is not None:
                self._observer.fail(f"{self.name}: message {number}: {error}")
                return
            offset = message.offset()
            assert offset is not None
            self._observer.acknowledge(
                history.BatchAcknowledged(where, self.name, number, offset, durable=True)
            )

        self._producer.produce(TOPIC, value, partition=partition, on_delivery=answered)

    def stop(self) -> None:
        self._stopping.set()
        self.join(2 * WAIT_SECONDS_MAX)
        assert not self.is_alive()


def read_everything(bootstrap_servers: str, observer: Observer, reader: str) -> int:
    """Read every partition from its beginning to its end, and have it checked; returns how many messages."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap_servers,
            "group.id": reader,
            "enable.auto.commit": False,
            "check.crcs": True,
            "log_level": 0,
        }
    )
    count = 0
    try:
        for partition in range(PARTITIONS):
            where = (TOPIC, partition)
            observer.observe(history.ReadBegun(reader, where))
            low, high = consumer.get_watermark_offsets(TopicPartition(TOPIC, partition), timeout=30)
            stored = read_partition(consumer, partition, low, high)
            # The producers go on, so that more may come than was there when the reader asked.
            end = max(high, low + len(stored))
            observer.observe(history.BatchesRead(reader, where, low, tuple(stored), end, low))
            count += len(stored)
    finally:
        consumer.close()
    return count


def read_partition(consumer: Consumer, partition: int, low: int, high: int) -> list[history.StoredBatch]:
    stored: list[history.StoredBatch] = []
    consumer.assign([TopicPartition(TOPIC, partition, low)])
    while low + len(stored) < high:
        message = consumer.poll(WAIT_SECONDS_MAX)
        assert message, f"nothing came at {low + len(stored)} of partition {partition}, which ends at {high}"
        assert message.error() is None, message.error()
        offset, value = message.offset(), message.value()
        assert offset is not None
        assert isinstance(value, bytes)
        stored.append(history.StoredBatch(offset, (value,)))
    consumer.unassign()
    return stored


def create_topic(bootstrap_servers: str, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": bootstrap_servers, "log_level": 0})
    settings = {name.replace("_", "."): value for name, value in config.items()}
    for made in admin.create_topics([NewTopic(TOPIC, PARTITIONS, 1, config=settings)]).values():
        made.result(30)


def test_every_acknowledged_message_is_read_once_in_order_after_many_kills(
    tmp_path: Path, chance: random.Random, crash_rounds: int
) -> None:
    observer = Observer()
    broker = BrokerProcess(str(tmp_path / "data"))
    with broker:
        create_topic(broker.bootstrap_servers, internal_segment_bytes="65536")
        senders = [
            Sender(
                broker.bootstrap_servers,
                compression,
                [index % PARTITIONS, (index + 1) % PARTITIONS],
                observer,
            )
            for index, compression in enumerate(COMPRESSIONS)
        ]
        for sender in senders:
            sender.start()
        read_at = set(range(0, crash_rounds, max(1, crash_rounds // 4)))
        for round_ in range(crash_rounds):
            observer.wait_for(observer.acknowledged + chance.randrange(1, ACKNOWLEDGED_PER_ROUND_MAX))
            # Not only right after an acknowledgement: anywhere in the few milliseconds a flush takes.
            threading.Event().wait(chance.random() * 0.02)
            broker.crash()
            broker.start()
            if round_ in read_at:
                read_everything(broker.bootstrap_servers, observer, f"after kill {round_ + 1}")
        for sender in senders:
            sender.stop()
        assert not observer.failures, observer.failures
        count = read_everything(broker.bootstrap_servers, observer, "in the end")
        assert count == observer.acknowledged, "nothing is there that was not acknowledged, and nothing twice"
        broker.crash()
        broker.start()
        again = read_everything(broker.bootstrap_servers, observer, "once more")
        assert again == count
        assert broker.stop() == 0
    segments = sorted(Path(broker.data_dir, f"{TOPIC}-0").glob("*.log"))
    assert len(segments) > 1, "segments were rolled"
    assert "is offline" not in broker.log()


@pytest.mark.check
def test_kills_while_it_starts_lose_nothing(tmp_path: Path, chance: random.Random, crash_rounds: int) -> None:
    """A start that is killed half-way through recovery leaves nothing that the next cannot recover from."""
    observer = Observer()
    broker = BrokerProcess(str(tmp_path / "data"))
    with broker:
        create_topic(broker.bootstrap_servers, internal_segment_bytes="65536")
        sender = Sender(broker.bootstrap_servers, "lz4", list(range(PARTITIONS)), observer)
        sender.start()
        observer.wait_for(1000)
        broker.crash()
        for _ in range(max(5, crash_rounds // 2)):
            broker.begin_start()
            threading.Event().wait(chance.random() * 0.2)
            broker.crash()
        broker.start()
        sender.stop()
        assert not observer.failures, observer.failures
        count = read_everything(broker.bootstrap_servers, observer, "in the end")
        assert count == observer.acknowledged
