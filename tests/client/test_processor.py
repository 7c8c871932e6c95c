"""Consume, transform, produce: results and positions together, once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.messages import Message
from holdfast.client.processor import Output, Processor
from holdfast.client.producer import Producer
from holdfast.errors import UsageError
from holdfast.testing.broker import BrokerProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("processor") / "broker"
    with BrokerProcess(str(directory), settings={"group.initial.rebalance.delay.ms": "0"}) as process:
        yield process


def create(broker: BrokerProcess, *topics: str, partitions: int = 2) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for future in admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics]).values():
        future.result()


def fill(broker: BrokerProcess, topic: str, count: int) -> None:
    with Producer(broker.bootstrap_servers) as producer:
        for number in range(count):
            producer.send(topic, b"%d" % number, key=b"%d" % number)


def visible(broker: BrokerProcess, topic: str, partitions: int = 2) -> list[int]:
    """Everything a read_committed reader sees."""
    consumer = RawConsumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "reader",
            "isolation.level": "read_committed",
            "enable.auto.commit": False,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    found: list[int] = []
    ended = 0
    while ended < partitions:
        raw: Any = consumer.poll(10)
        assert raw is not None
        if raw.error():
            ended += 1
        else:
            found.append(int(raw.value()))
    consumer.close()
    return sorted(found)


def stop_after(processor: Processor, count: int) -> threading.Thread:
    def wait() -> None:
        pause = threading.Event()
        while processor.committed < count:
            pause.wait(0.02)
        processor.stop()

    thread = threading.Thread(target=wait)
    thread.start()
    return thread


def double(message: Message) -> list[Output]:
    return [Output("doubled", b"%d" % (2 * int(message.value or b"")), key=message.key)]


def test_every_message_is_processed_once(broker: BrokerProcess) -> None:
    create(broker, "numbers", "doubled")
    fill(broker, "numbers", 200)
    processor = Processor(
        broker.bootstrap_servers, group="doubler", topics=["numbers"], commit_seconds=0.05, commit_messages=20
    )
    stopper = stop_after(processor, 200)
    processor.run(double)
    stopper.join()
    assert visible(broker, "doubled") == [2 * number for number in range(200)]


def test_a_failure_takes_its_transaction_back_and_the_next_run_goes_on(broker: BrokerProcess) -> None:
    create(broker, "fragile", "halved")
    fill(broker, "fragile", 60)
    broken = [True]

    def halve(message: Message) -> list[Output]:
        number = int(message.value or b"")
        if number == 31 and broken[0]:
            raise ValueError("not today")
        return [Output("halved", b"%d" % number)]

    def run() -> None:
        processor = Processor(
            broker.bootstrap_servers,
            group="halver",
            topics=["fragile"],
            commit_seconds=0.0,
            commit_messages=7,
            consumer_config={"session.timeout.ms": 6000},
        )
        stopper = stop_after(processor, 60 - already) if not broken[0] else None
        processor.run(halve)
        if stopper is not None:
            stopper.join()

    already = 0
    with pytest.raises(ValueError, match="not today"):
        run()
    before = visible(broker, "halved")
    assert 31 not in before
    already = len(before)
    broken[0] = False
    run()
    assert visible(broker, "halved") == list(range(60))


def test_a_transaction_that_could_outlive_its_member_is_refused(broker: BrokerProcess) -> None:
    with pytest.raises(UsageError, match="session"):
        Processor(
            broker.bootstrap_servers,
            group="slow",
            topics=["numbers"],
            producer_config={"transaction.timeout.ms": 60_000},
        )
