"""A pattern does not take the topics that the member's own dead letters go to."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from uuid import uuid4

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.consumer import Consumer
from holdfast.client.consuming.assignment import Source, own_dead_letters
from holdfast.client.dead_letters import dead_letters_of
from holdfast.client.messages import Message
from holdfast.testing.broker import BrokerProcess

THERE = ("orders", "orders-dlt", "orders-dlt-dlt", "invoices", "invoices-dlt", "all-dead")


class Cluster:
    def list_topics(self, timeout: float) -> Any:
        return SimpleNamespace(topics=dict.fromkeys(THERE))


def by_table(topic: str) -> str:
    return {"orders": "all-dead"}[topic]


@pytest.mark.parametrize(
    ("topics", "letters", "expected"),
    [
        (["orders"], dead_letters_of, set()),
        (["^orders"], dead_letters_of, {"orders-dlt", "orders-dlt-dlt", "orders-dlt-dlt-dlt"}),
        (["^.*-dlt$"], dead_letters_of, {"orders-dlt-dlt", "orders-dlt-dlt-dlt", "invoices-dlt-dlt"}),
        (["^orders", "orders-dlt"], dead_letters_of, {"orders-dlt-dlt", "orders-dlt-dlt-dlt"}),
        (["^.*"], by_table, {"all-dead"}),
    ],
)
def test_dead_letters_of_what_is_taken_are_left_alone(
    topics: list[str], letters: Callable[[str], str], expected: set[str]
) -> None:
    assert own_dead_letters([Source(topics, letters)], Cluster()) == expected


def test_a_consumer_by_pattern_does_not_read_its_own_dead_letters(holdfast_broker: BrokerProcess) -> None:
    address = {"bootstrap.servers": holdfast_broker.bootstrap_servers}
    topic = f"orders-{uuid4().hex[:8]}"
    admin = AdminClient(dict(address))
    for made in admin.create_topics([NewTopic(topic, 1), NewTopic(f"{topic}-dlt", 1)]).values():
        made.result()
    producer = Producer(dict(address))
    consumer = Consumer(
        holdfast_broker.bootstrap_servers,
        group=topic,
        topics=[f"^{topic}"],
        config={"fetch.wait.max.ms": 20},
    )
    seen: list[tuple[str, bytes | None]] = []

    def send(number: int) -> None:
        producer.produce(topic, b"%d" % number)
        assert producer.flush(30) == 0

    def handle(message: Message) -> None:
        seen.append((message.topic, message.value))
        if message.value == b"5":
            consumer.stop()
        elif message.topic == topic:
            send(int(message.value or b"") + 1)

    producer.produce(f"{topic}-dlt", b"an old dead letter")
    send(0)
    consumer.run(handle)
    assert seen == [(topic, b"%d" % number) for number in range(6)]
