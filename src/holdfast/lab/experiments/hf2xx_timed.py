"""HF206, HF210, HF211, HF411 in real time: short settings, on brokers whose clock is their own.

How long is long enough is not guessed: beside the topic there is another with the short setting, and the experiment
goes on when that one has lost what it was to lose.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import Consumer, KafkaError, TopicPartition

from holdfast.lab.experiment import Lab
from holdfast.lab.watching import committed
from holdfast.testing.engines import QUIET, read_log, wait_until
from holdfast.testing.risks import Scene

SETTINGS: Final = {"log.retention.check.interval.ms": "300", "log.cleaner.backoff.ms": "300"}
SEGMENTS: Final = {"segment.ms": "200", "file.delete.delay.ms": "0"}
ROLL_SECONDS: Final = 0.3
"""Longer than segment.ms: the next message begins a segment."""
SHORT_MS: Final = "8000"
LONG_MS: Final = "604800000"
PATIENCE_SECONDS: Final = 180.0


class Reader:
    """A group of one, that handles what it reads and commits."""

    def __init__(self, lab: Lab, scene: Scene, topic: str) -> None:
        self.lab = lab
        self.topic = topic
        self.group = lab.name("readers")
        # A broker that has just started takes its time until it coordinates groups; what is kept for seconds does not.
        committed(scene.bootstrap_servers, self.group, topic, 0)
        self._settings: dict[str, Any] = {
            "bootstrap.servers": scene.bootstrap_servers,
            "group.id": self.group,
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 50,
            **QUIET,
        }

    def read(self, limit: int | None = None, start: int | None = None) -> int:
        """Handle so many, or all there is, from its committed offset or from this one; returns how many that were."""
        consumer = Consumer(self._settings)
        count = 0
        try:
            place = TopicPartition(self.topic, 0) if start is None else TopicPartition(self.topic, 0, start)
            consumer.assign([place])

            def read_on() -> bool:
                nonlocal count
                message: Any = consumer.poll(0.5)
                if message is None:
                    return False
                error = message.error()
                if error is not None:
                    return bool(error.code() == KafkaError._PARTITION_EOF)
                self.lab.reads(self.group, "reader", message)
                consumer.commit(message=message, asynchronous=False)
                count += 1
                return count == limit

            wait_until(read_on, f"{self.topic} is read", PATIENCE_SECONDS)
        finally:
            consumer.close()
        return count


def start_of(scene: Scene, topic: str) -> int:
    consumer = Consumer({"bootstrap.servers": scene.bootstrap_servers, "group.id": "looks", **QUIET})
    try:
        low, _ = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=30)
        return int(low)
    finally:
        consumer.close()


def write_slowly(
    lab: Lab, scene: Scene, topics: tuple[str, str], ids: list[str], key: str | None = None
) -> None:
    """Each a segment of its own, to the topic and to its twin."""
    topic, twin = topics
    producer = scene.producer()
    for message in ids:
        lab.produce(producer, topic, message, key)
        producer.produce(twin, message, key=key)
        producer.flush(30)
        threading.Event().wait(ROLL_SECONDS)


def made(lab: Lab, scene: Scene, config: dict[str, str], short: dict[str, str]) -> tuple[str, str]:
    topic = lab.topic(config={**SEGMENTS, **config}, scene=scene)
    return topic, lab.topic("twin", config={**SEGMENTS, **short}, scene=scene)


def away(lab: Lab, fault: str, has_lost: Callable[[], bool]) -> None:
    wait_until(has_lost, fault, PATIENCE_SECONDS)
    lab.fault(fault)


def hf206_timed(lab: Lab, retention_ms: str, fault: str) -> None:
    lab.plan(fault, successes=4)
    scene = lab.engines.scene(lab.engine, SETTINGS)
    topics = made(lab, scene, {"retention.ms": retention_ms}, {"retention.ms": SHORT_MS})
    ids = [str(number) for number in range(lab.random.randint(5, 8))]
    reader = Reader(lab, scene, topics[0])
    write_slowly(lab, scene, topics, ids[:2])
    reader.read(2)
    write_slowly(lab, scene, topics, ids[2:])
    away(lab, fault, lambda: start_of(scene, topics[1]) >= len(ids) - 1)
    write_slowly(lab, scene, topics, ["later"])
    reader.read()
    lab.committed_offset(scene, reader.group, topics[0])
    lab.scan(scene, topics[0], start=lambda: start_of(scene, topics[0]))


def hf210_timed(lab: Lab, lag_ms: str, fault: str) -> None:
    lab.plan(fault, successes=4)
    scene = lab.engines.scene(lab.engine, SETTINGS)
    compacted = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.01"}
    topics = made(
        lab,
        scene,
        {**compacted, "min.compaction.lag.ms": lag_ms},
        {**compacted, "min.compaction.lag.ms": "0"},
    )
    reader = Reader(lab, scene, topics[0])
    write_slowly(lab, scene, topics, ["balance-0"], key="account")
    reader.read(1)
    ids = [f"balance-{number}" for number in range(1, lab.random.randint(6, 9))]
    write_slowly(lab, scene, topics, ids, key="account")
    away(lab, fault, lambda: len(list(read_log(scene.bootstrap_servers, topics[1]))) <= 3)
    reader.read()
    lab.committed_offset(scene, reader.group, topics[0])
    lab.scan(scene, topics[0], compacted=True)


def hf211_timed(lab: Lab, minutes: int, fault: str) -> None:
    """A group on a broker that keeps committed offsets for a minute tells when that is over."""
    lab.plan(fault, successes=4)
    keeps = {"offsets.retention.check.interval.ms": "1000", "offsets.retention.minutes": "1"}
    short = lab.engines.scene(lab.engine, keeps)
    scene = lab.engines.scene(lab.engine, {**keeps, "offsets.retention.minutes": str(minutes)})
    topic, twin = lab.topic(scene=scene), lab.topic("twin", scene=short)
    ids = [str(number) for number in range(lab.random.randint(5, 8))]
    lab.write(scene, topic, ids)
    short.write(twin, {0: ["one"]})
    reader, forgotten = Reader(lab, scene, topic), Reader(lab.unwatched(), short, twin)
    reader.read(2)
    forgotten.read()
    lab.committed_offset(scene, reader.group, topic)
    away(lab, fault, lambda: committed(short.bootstrap_servers, forgotten.group, twin, 0) < 0)
    if minutes == 1:
        wait_until(lambda: committed(scene.bootstrap_servers, reader.group, topic, 0) < 0, fault)
    position = lab.committed_offset(scene, reader.group, topic)
    if position < 0:
        lab.say("no committed offset: auto.offset.reset=latest begins at the end")
    lab.write(scene, topic, ["later"])
    reader.read(start=len(ids) if position < 0 else position)
    lab.committed_offset(scene, reader.group, topic)
    lab.scan(scene, topic)


def hf411_timed(lab: Lab, timeout_ms: int, fault: str) -> None:
    lab.plan(fault, successes=4)
    scene = lab.engines.scene(lab.engine, SETTINGS)
    topics = made(lab, scene, {"retention.ms": SHORT_MS}, {"retention.ms": SHORT_MS})
    reader = Reader(lab, scene, topics[0])
    hanging = scene.producer({"transactional.id": topics[0], "transaction.timeout.ms": timeout_ms})
    hanging.init_transactions(30)
    hanging.begin_transaction()
    lab.note("begin", "hanging", txn="open", ids=["held"])
    lab.sends("hanging", topics[0], ["held"], txn="open")
    hanging.produce(topics[0], "held")
    hanging.flush(30)
    lab.fault(fault)
    ids = [str(number) for number in range(lab.random.randint(4, 6))]
    write_slowly(lab, scene, topics, ids)

    def has_lost() -> bool:
        # A reader that is always there, and reads what it may.
        reader.read()
        return start_of(scene, topics[1]) >= len(ids) - 1

    wait_until(has_lost, "retention has passed them", PATIENCE_SECONDS)
    lab.committed_offset(scene, reader.group, topics[0])
    lab.scan(scene, topics[0], start=lambda: start_of(scene, topics[0]))
