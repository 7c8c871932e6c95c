"""Producer, spool and consumer against the real broker."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import Consumer, HandlerFailed
from holdfast.client.errors import ProducerClosed, UndeliveredMessages
from holdfast.client.messages import Message
from holdfast.client.producer import Producer
from holdfast.client.retries import RetryPolicy
from holdfast.client.serializers import as_json
from holdfast.testing.broker import BrokerProcess


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    directory = tmp_path_factory.mktemp("clients") / "broker"
    process = BrokerProcess(str(directory), settings={"group.initial.rebalance.delay.ms": "0"})
    process.start()
    yield process
    process.stop()


def create(broker: BrokerProcess, *topics: str, partitions: int = 1) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    made = admin.create_topics([NewTopic(topic, partitions, 1) for topic in topics])
    for future in made.values():
        future.result()


def read(broker: BrokerProcess, topic: str, count: int, partitions: int = 1) -> list[Any]:
    consumer = RawConsumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": "reader", "enable.auto.commit": False}
    )
    consumer.assign([TopicPartition(topic, index, 0) for index in range(partitions)])
    messages: list[Any] = []
    while len(messages) < count:
        got = consumer.consume(count - len(messages), timeout=10)
        assert got, f"only {len(messages)} of {count} messages are there"
        messages += got
    consumer.close()
    return messages


def test_a_delivery_says_where_the_message_is(broker: BrokerProcess) -> None:
    create(broker, "where")
    with Producer(broker.bootstrap_servers, value=as_json) as producer:
        first = producer.send("where", {"id": 1}, key="a", headers={"trace": "7"}).wait(30)
        second = producer.send("where", {"id": 2}).wait(30)
    assert (first.topic, first.partition, first.offset, second.offset) == ("where", 0, 0, 1)
    (message, _) = read(broker, "where", 2)
    assert (message.key(), message.value(), message.headers()) == (b"a", b'{"id":1}', [("trace", b"7")])


def test_leaving_with_a_refused_message_raises_and_names_it(broker: BrokerProcess) -> None:
    create(broker, "limits")
    with (
        pytest.raises(UndeliveredMessages, match="limits key b'big'"),
        Producer(broker.bootstrap_servers) as producer,
    ):
        producer.send("limits", b"x" * 2_000_000, key="big")
    with pytest.raises(ProducerClosed):
        producer.send("limits", b"late")


def test_a_spooled_message_is_stored_then_delivered_with_its_id(
    broker: BrokerProcess, tmp_path: Path
) -> None:
    create(broker, "spooled", partitions=3)
    with Producer(broker.bootstrap_servers, spool=tmp_path) as producer:
        deliveries = [
            producer.send("spooled", b"%d" % number, key=b"%d" % (number % 7)) for number in range(50)
        ]
        for delivery in deliveries:
            delivery.wait_stored(30)
        assert {delivery.wait(30).partition for delivery in deliveries} <= {0, 1, 2}
    messages = read(broker, "spooled", 50, partitions=3)
    ids = Counter(bytes(dict(message.headers())["hf-id"]) for message in messages)
    assert len(ids) == 50
    for message in messages:
        _, _, _, partition, sequence = dict(message.headers())["hf-id"].split(b":")
        assert (int(partition), int(sequence)) == (message.partition(), message.offset())


def test_what_a_spool_holds_is_delivered_by_the_next_process(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "later")
    with Producer(broker.bootstrap_servers, spool=tmp_path) as producer:
        producer.send("later", b"first").wait(30)
    # Nobody listens there: the message can be stored, and nothing else.
    away = Producer(broker.bootstrap_servers, spool=tmp_path, config={"security.protocol": "ssl"})
    delivery = away.send("later", b"second")
    delivery.wait_stored(30)
    away.close(timeout=0)
    assert delivery.delivered is None
    with Producer(broker.bootstrap_servers, spool=tmp_path) as producer:
        assert producer.flush(30).is_complete
    assert [message.value() for message in read(broker, "later", 2)] == [b"first", b"second"]


def test_a_refused_message_blocks_nothing_behind_it(broker: BrokerProcess, tmp_path: Path) -> None:
    create(broker, "mixed")
    with (
        pytest.raises(UndeliveredMessages, match="too large"),
        Producer(broker.bootstrap_servers, spool=tmp_path) as producer,
    ):
        producer.send("mixed", b"x" * 2_000_000)
        producer.send("mixed", b"fine")
    assert [message.value() for message in read(broker, "mixed", 1)] == [b"fine"]


def test_every_message_is_handled_and_positions_follow(broker: BrokerProcess) -> None:
    create(broker, "work", "work-dlt", partitions=4)
    with Producer(broker.bootstrap_servers) as producer:
        for number in range(400):
            producer.send("work", b"%d" % number, key=b"%d" % (number % 20))
    handled: list[int] = []
    consumer = Consumer(
        broker.bootstrap_servers,
        group="workers",
        topics=["work"],
        workers=4,
        order="key",
        retry=RetryPolicy(attempts=2, first_seconds=0.01),
    )

    def handle(message: Message) -> None:
        number = int(message.value or b"")
        handled.append(number)
        if number == 13:
            raise ValueError("unlucky")

    stopper = threading.Thread(target=lambda: stop_when(consumer, 400))
    stopper.start()
    consumer.run(handle)
    stopper.join()
    assert set(handled) == set(range(400))
    assert committed(broker, "workers", "work", 4) == 400
    (letter,) = read(broker, "work-dlt", 1, partitions=4)
    headers = dict(letter.headers())
    assert (letter.value(), headers["hf-dlt-error"], headers["hf-dlt-attempts"]) == (
        b"13",
        b"ValueError",
        b"2",
    )


def stop_when(consumer: Consumer, count: int) -> None:
    waiting = threading.Event()
    while consumer.handled < count:
        waiting.wait(0.02)
    consumer.stop()


def committed(broker: BrokerProcess, group: str, topic: str, partitions: int) -> int:
    raw = RawConsumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": group})
    positions = raw.committed([TopicPartition(topic, index) for index in range(partitions)], timeout=30)
    raw.close()
    return sum(max(position.offset, 0) for position in positions)


def test_a_message_that_may_not_be_set_aside_stops_the_consumer_where_it_is(broker: BrokerProcess) -> None:
    create(broker, "strict")
    with Producer(broker.bootstrap_servers) as producer:
        for number in range(5):
            producer.send("strict", b"%d" % number)
    consumer = Consumer(
        broker.bootstrap_servers,
        group="strict",
        topics=["strict"],
        retry=RetryPolicy(attempts=1, give_up="stop"),
    )

    def handle(message: Message) -> None:
        if message.offset == 3:
            raise ValueError("not this one")

    with pytest.raises(HandlerFailed, match="strict-0@3"):
        consumer.run(handle)
    assert committed(broker, "strict", "strict", 1) == 3
