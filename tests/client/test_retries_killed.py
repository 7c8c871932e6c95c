"""A consumer with retry topics, killed again and again: every message is handled in the end, or a dead letter."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.producer import Producer
from holdfast.testing.broker import BrokerProcess

MESSAGES = 200
KILLS = 4
PATIENCE_SECONDS = 90.0
WORKER = """
import os, sys
from holdfast.client import Consumer, RetryTopics

bootstrap, done = sys.argv[1:]
file = os.open(done, os.O_WRONLY | os.O_APPEND)

def handle(message):
    number = int(message.value)
    if number % 7 == 0 or (number % 3 == 0 and message.topic == message.origin.topic):
        raise ConnectionError("away")
    os.write(file, b"%d %s\\n" % (number, message.topic.encode()))

Consumer(
    bootstrap, group="worker", topics=["work"], workers=4, order="key", commit_seconds=0.05,
    retry=RetryTopics(delays=[0.1, 0.2]), config={"session.timeout.ms": 1500, "heartbeat.interval.ms": 300},
).run(handle)
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    settings = {"group.initial.rebalance.delay.ms": "0", "group.min.session.timeout.ms": "1000"}
    with BrokerProcess(str(tmp_path / "broker"), settings=settings) as process:
        yield process


def values(broker: BrokerProcess, topic: str, partitions: int) -> list[int]:
    consumer = RawConsumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
        }
    )
    consumer.assign([TopicPartition(topic, at, 0) for at in range(partitions)])
    found: list[int] = []
    ends = 0
    while ends < partitions:
        message: Any = consumer.poll(10)
        assert message is not None
        if message.error() is not None:
            ends += 1
        else:
            found.append(int(message.value()))
    consumer.close()
    return found


@pytest.mark.check
def test_no_message_is_lost_however_often_its_consumer_is_killed(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    names = ("work", "work-retry-0", "work-retry-1", "work-dlt")
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic(name, 2, 1) for name in names]).values():
        future.result()
    with Producer(broker.bootstrap_servers) as producer:
        for number in range(MESSAGES):
            producer.send("work", b"%d" % number, key=b"%d" % (number % 10), partition=number % 2)
    file = tmp_path / "done"
    file.touch()
    looks = threading.Event()

    def done() -> list[int]:
        return [int(line.split()[0]) for line in file.read_text().splitlines()]

    def start() -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            [sys.executable, "-c", WORKER, broker.bootstrap_servers, os.fspath(file)],
            stderr=subprocess.DEVNULL,
        )

    def waits_for(process: subprocess.Popen[bytes], enough: Any) -> None:
        for _ in range(int(PATIENCE_SECONDS / 0.01)):
            if enough():
                return
            assert process.poll() is None, "the consumer ended by itself"
            looks.wait(0.01)
        raise AssertionError(f"not done in time: {sorted(set(range(MESSAGES)) - set(done()))}")

    dead = {number for number in range(MESSAGES) if number % 7 == 0}
    handled = set(range(MESSAGES)) - dead
    process = start()
    try:
        for kill in range(KILLS):
            threshold = (kill + 1) * len(handled) // (KILLS + 1)
            waits_for(process, lambda threshold=threshold: len(set(done())) >= threshold)
            process.kill()
            process.wait()
            process = start()
        waits_for(process, lambda: set(done()) == handled)
        waits_for(process, lambda: set(values(broker, "work-dlt", 2)) == dead)
    finally:
        process.kill()
        process.wait()
