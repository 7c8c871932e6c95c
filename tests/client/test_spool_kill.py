"""Processes that are killed while they send: what they reported stored arrives, in order, once for each id."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.producer import Guarantee, Producer
from holdfast.testing.broker import BrokerProcess

PARTITIONS = 3
ROUNDS = 20

CHILD = """
import sys
from holdfast.client import Producer
bootstrap, home, name, guarantee = sys.argv[1:]
producer = Producer(bootstrap, spool=home, delivery=guarantee, config={"log_level": 0})
print("begun", flush=True)
number = 0
while True:
    deliveries = []
    for _ in range(7):
        deliveries.append(producer.send("kills", f"{name}:{number}", key=f"k{number % 10}"))
        number += 1
    for delivery in deliveries:
        delivery.wait_stored(60)
    print(number, flush=True)
"""


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[BrokerProcess]:
    process = BrokerProcess(str(tmp_path / "broker"))
    process.start()
    admin = AdminClient({"bootstrap.servers": process.bootstrap_servers})
    for future in admin.create_topics([NewTopic("kills", PARTITIONS, 1)]).values():
        future.result()
    yield process
    process.stop()


def run_and_kill(broker: BrokerProcess, home: Path, name: str, guarantee: Guarantee, seconds: float) -> int:
    """How many messages the process reported stored before it was killed, after about so many seconds of sending."""
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, broker.bootstrap_servers, str(home), name, guarantee],
        stdout=subprocess.PIPE,
        text=True,
    ) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "begun\n"
            time.sleep(seconds)
        finally:
            child.kill()
        counts = child.stdout.read().split("\n")
    # The last line may have been cut by the death.
    return int(counts[-2]) if len(counts) > 1 else 0


def read_all(broker: BrokerProcess) -> list[list[Any]]:
    """What a reader sees that reads committed."""
    consumer: Any = RawConsumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "fetch.wait.max.ms": 10,  # the end is told when a fetch comes back
        }
    )
    consumer.assign([TopicPartition("kills", index, 0) for index in range(PARTITIONS)])
    partitions: list[list[Any]] = [[] for _ in range(PARTITIONS)]
    at_end: set[int] = set()
    while len(at_end) < PARTITIONS:
        message = consumer.poll(30)
        assert message is not None, "the end of the log does not come"
        if message.error() is None:
            partitions[message.partition()].append(message)
        else:
            assert message.error().code() == KafkaError._PARTITION_EOF
            at_end.add(message.partition())
    consumer.close()
    return partitions


def without_repeats(messages: list[Any]) -> list[bytes]:
    """The values of a partition as a reader keeps them that drops what it has seen, by one number per spool."""
    following: dict[bytes, int] = {}
    values: list[bytes] = []
    for message in messages:
        spool, _, _, partition, sequence = dict(message.headers())["hf-id"].split(b":")
        assert int(partition) == message.partition()
        if int(sequence) >= following.get(spool, 0):
            assert int(sequence) == following.get(spool, 0), "a message is missing or was overtaken"
            following[spool] = int(sequence) + 1
            values.append(message.value())
    return values


@pytest.mark.check
@pytest.mark.parametrize("guarantee", [pytest.param("at-least-once", marks=pytest.mark.long), "exactly-once"])
def test_everything_reported_stored_arrives_in_order_and_once(
    guarantee: Guarantee, broker: BrokerProcess, tmp_path: Path
) -> None:
    chance = random.Random(5)
    home = tmp_path / "home"
    stored: dict[str, int] = {}
    for number in range(ROUNDS):
        name = f"r{number}"
        stored[name] = run_and_kill(broker, home, name, guarantee, chance.uniform(0.0, 0.3))
        if number == ROUNDS // 2:
            broker.crash()
            broker.start()
    with Producer(broker.bootstrap_servers, spool=home, delivery=guarantee) as producer:
        assert producer.flush(60).is_complete
    assert sum(stored.values()) > 100, "nothing was stored before the kills"
    arrived: list[bytes] = []
    for messages in read_all(broker):
        values = without_repeats(messages)
        if guarantee == "exactly-once":
            assert len(values) == len(messages), "a message is there twice"
        arrived += values
        for name in stored:
            numbers = [
                int(value.split(b":")[1]) for value in values if value.startswith(name.encode() + b":")
            ]
            assert numbers == sorted(numbers), f"{name} is out of order"
    assert len(arrived) == len(set(arrived))
    for name, count in stored.items():
        missing = {b"%s:%d" % (name.encode(), number) for number in range(count)} - set(arrived)
        assert not missing, f"{len(missing)} stored messages of {name} never arrived"
