"""A spool against the real broker: refusals of whole batches, and a broker that dies while it is being sent to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.producer import Guarantee, Producer
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import wait_until


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    process = BrokerProcess(str(tmp_path_factory.mktemp("spool") / "broker"))
    process.start()
    yield process
    process.stop()


def create(broker: BrokerProcess, topic: str, partitions: int = 1, **config: str) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    settings = {name.replace("_", "."): value for name, value in config.items()}
    for future in admin.create_topics([NewTopic(topic, partitions, 1, config=settings)]).values():
        future.result()


def read(broker: BrokerProcess, topic: str, partition: int = 0) -> list[Any]:
    settings = {
        "bootstrap.servers": broker.bootstrap_servers,
        "group.id": "reader",
        "enable.partition.eof": True,
    }
    consumer = RawConsumer(settings)
    consumer.assign([TopicPartition(topic, partition, 0)])
    messages: list[Any] = []
    while not messages or messages[-1].error() is None:
        message = consumer.poll(30)
        assert message is not None, f"no end after {len(messages)} messages"
        messages.append(message)
    consumer.close()
    assert messages[-1].error().code() == KafkaError._PARTITION_EOF
    return messages[:-1]


@pytest.mark.check
def test_one_invalid_message_of_a_batch_is_refused_and_its_neighbours_arrive_in_order(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    create(broker, "compacted", cleanup_policy="compact")
    with Producer(broker.bootstrap_servers, spool=tmp_path, config={"linger.ms": 200}) as producer:
        # Without a key, a message has no place in a compacted topic.
        deliveries = [
            producer.send("compacted", b"%d" % number, key=None if number in (5, 17, 18) else b"k%d" % number)
            for number in range(30)
        ]
        report = producer.flush(60)
        assert (report.under_way, report.refused_count) == (0, 3)
        assert [number for number, each in enumerate(deliveries) if each.error is not None] == [5, 17, 18]
    values = [message.value() for message in read(broker, "compacted")]
    assert values == [b"%d" % number for number in range(30) if number not in (5, 17, 18)]


@pytest.mark.check
def test_batches_larger_than_a_topic_takes_are_made_smaller(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "small-batches", max_message_bytes="20000")
    with Producer(broker.bootstrap_servers, spool=tmp_path, config={"linger.ms": 100}) as producer:
        for number in range(2000):
            producer.send("small-batches", b"%06d" % number + b"x" * 100)
        large = producer.send("small-batches", b"y" * 30_000)
        producer.send("small-batches", b"last")
        report = producer.flush(60)
        assert (report.under_way, report.refused_count) == (0, 1)
        assert large.error is not None
    values = [message.value() for message in read(broker, "small-batches")]
    assert [value[:6] for value in values] == [*(b"%06d" % number for number in range(2000)), b"last"]


def test_a_broker_that_dies_and_comes_back_is_sent_everything_in_order(tmp_path: Path) -> None:
    broker = BrokerProcess(str(tmp_path / "broker"))
    broker.start()
    try:
        create(broker, "deaths", partitions=2)
        with Producer(broker.bootstrap_servers, spool=tmp_path / "home") as producer:
            for number in range(6000):
                producer.send("deaths", b"%d" % number, partition=number % 2)
                if number in (1000, 3000):
                    broker.crash()
                if number in (2000, 4000):
                    broker.start()
            assert producer.flush(120).is_complete
        for partition in range(2):
            following = 0
            for message in read(broker, "deaths", partition):
                sequence = int(dict(message.headers())["hf-id"].split(b":")[4])
                if sequence >= following:
                    assert sequence == following
                    assert int(message.value()) == 2 * sequence + partition
                    following += 1
            assert following == 3000
    finally:
        broker.stop()


def test_an_invalid_topic_name_is_refused_and_delivering_goes_on(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    create(broker, "fine")
    with Producer(broker.bootstrap_servers, spool=tmp_path) as producer:
        bad = producer.send("no such name!", b"x", partition=0)
        producer.send("fine", b"1").wait(60)
        report = producer.flush(60)
        assert (report.under_way, report.refused_count) == (0, 1)
        assert bad.error is not None


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_a_broker_that_comes_up_on_an_empty_directory_costs_nothing(
    tmp_path: Path, delivery: Guarantee
) -> None:
    right = BrokerProcess(str(tmp_path / "right"))
    right.start()
    wrong = BrokerProcess(str(tmp_path / "wrong"), listen=right.bootstrap_servers)
    try:
        create(right, "orders", 2)
        with Producer(right.bootstrap_servers, spool=tmp_path / "spool", delivery=delivery) as producer:
            for number in range(200):
                producer.send("orders", b"%d" % number, partition=number % 2)
            assert producer.flush(60).is_complete
            right.crash()
            wrong.start()
            for number in range(200, 400):
                producer.send("orders", b"%d" % number, partition=number % 2).wait_stored(30)
            wait_until(lambda: any("belong to cluster" in line for line in producer.waiting), "it is noticed")
            wrong.stop()
            right.start()
            assert producer.flush(60).is_complete
            assert producer.set_aside == 0
        for partition in range(2):
            messages = read(right, "orders", partition)
            once = {dict(message.headers())["hf-id"]: int(message.value()) for message in messages}
            assert list(once.values()) == list(range(partition, 400, 2))
            assert delivery == "at-least-once" or len(messages) == 200
    finally:
        right.stop()
        wrong.stop()
