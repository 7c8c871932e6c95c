"""Large messages, messages too large, batches larger than what is fetched, and many partitions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioTopicPartition
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaConsumer
from kafka import TopicPartition as PythonTopicPartition
from tests.support.clients import CLIENTS, Client, Message

from holdfast.testing.kafka_fixtures import require_apache_kafka

pytestmark = [pytest.mark.check, pytest.mark.java]

MakeTopic = Callable[..., str]
MEGABYTE = 1_000_000
ROOMY: dict[str, dict[str, Any]] = {
    "confluent-kafka": {"message.max.bytes": 30 * MEGABYTE},
    "kafka-python": {"max_request_size": 30 * MEGABYTE},
    "aiokafka": {"max_request_size": 30 * MEGABYTE},
    "java": {"max.request.size": 30 * MEGABYTE, "buffer.memory": 60 * MEGABYTE},
}
"""Settings under which a client itself lets large messages pass."""
TOO_LARGE = {
    "confluent-kafka": "MSG_SIZE_TOO_LARGE",
    "kafka-python": "MessageSizeTooLarge",
    "aiokafka": "MessageSizeTooLarge",
    "java": "RecordTooLargeException",
}
SMALL_FETCHES: dict[str, dict[str, Any]] = {
    "confluent-kafka": {
        "fetch.message.max.bytes": 1000,
        "fetch.max.bytes": 1000,
        "message.max.bytes": 1000,
        "receive.message.max.bytes": 40 * MEGABYTE,
    },
    "kafka-python": {"max_partition_fetch_bytes": 1000, "fetch_max_bytes": 1000},
    "aiokafka": {"max_partition_fetch_bytes": 1000, "fetch_max_bytes": 1000},
    "java": {"max.partition.fetch.bytes": 1000, "fetch.max.bytes": 1000},
}
JAVA = "java"
clients = pytest.mark.parametrize("client", CLIENTS, ids=lambda client: client.name)


@clients
def test_a_message_too_large_is_an_error_the_client_sees(
    client: Client, bootstrap: str, make_topic: MakeTopic
) -> None:
    # HF107
    if client.name == JAVA:
        require_apache_kafka()
    topic = make_topic("too-large")
    client.produce(bootstrap, topic, [Message(b"k", b"x" * MEGABYTE)], settings=ROOMY[client.name])
    with pytest.raises(Exception) as refused:
        client.produce(bootstrap, topic, [Message(b"k", b"y" * 2 * MEGABYTE)], settings=ROOMY[client.name])
    said = f"{type(refused.value).__name__} {refused.value!r} {refused.value}"
    assert TOO_LARGE[client.name] in said
    [kept] = CLIENTS[0].consume(bootstrap, topic, 1)
    assert kept.value == b"x" * MEGABYTE


@clients
def test_a_batch_larger_than_what_is_fetched_is_read_all_the_same(
    client: Client, bootstrap: str, make_topic: MakeTopic
) -> None:
    if client.name == JAVA:
        require_apache_kafka()
    topic = make_topic("large", config={"max.message.bytes": str(30 * MEGABYTE)})
    sent = [Message(b"%d" % number, b"%d" % number * 5 * MEGABYTE) for number in range(2)]
    writer = CLIENTS[0]
    writer.produce(bootstrap, topic, sent, settings=ROOMY[writer.name])
    found = client.consume(bootstrap, topic, 2, settings=SMALL_FETCHES[client.name])
    assert [(each.key, each.value) for each in found] == [(each.key, each.value) for each in sent]


@pytest.mark.parametrize("client", CLIENTS[1:3], ids=lambda client: client.name)
def test_other_clients_write_large_batches_too(client: Client, bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("large", config={"max.message.bytes": str(30 * MEGABYTE)})
    sent = [Message(b"k", b"z" * 12 * MEGABYTE)]
    client.produce(bootstrap, topic, sent, settings=ROOMY[client.name])
    [found] = CLIENTS[0].consume(bootstrap, topic, 1)
    assert found.value == sent[0].value


PARTITIONS = 120
MESSAGES = 3_000


def written_to_many(bootstrap: str, topic: str) -> dict[bytes, int]:
    """Write keyed messages over all partitions; the partition of each value."""
    producer = Producer({"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 20})
    places: dict[bytes, int] = {}
    failures: list[Any] = []

    def delivered(error: Any, message: Any) -> None:
        if error is not None:
            failures.append(error)
        else:
            places[message.value()] = message.partition()

    for number in range(MESSAGES):
        producer.produce(topic, b"%d" % number, key=b"key %d" % number, on_delivery=delivered)
    assert producer.flush(60) == 0
    assert not failures
    assert len(places) == MESSAGES
    return places


def test_many_partitions_are_read_by_every_client(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("many", PARTITIONS)
    places = written_to_many(bootstrap, topic)
    assert len(set(places.values())) == PARTITIONS
    for read in (with_confluent, with_kafka_python, with_aiokafka):
        assert read(bootstrap, topic) == places, read.__name__


def with_confluent(bootstrap: str, topic: str) -> dict[bytes, int]:
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "none", "enable.auto.commit": False})
    found: dict[bytes, int] = {}
    try:
        consumer.assign([TopicPartition(topic, index, 0) for index in range(PARTITIONS)])
        while len(found) < MESSAGES:
            batch: Any = consumer.consume(1000, timeout=30.0)
            assert batch, f"{len(found)} of {MESSAGES} found"
            for message in batch:
                assert message.error() is None
                found[message.value()] = message.partition()
    finally:
        consumer.close()
    return found


def with_kafka_python(bootstrap: str, topic: str) -> dict[bytes, int]:
    consumer = KafkaConsumer(bootstrap_servers=bootstrap, group_id=None)
    found: dict[bytes, int] = {}
    try:
        partitions = [PythonTopicPartition(topic, index) for index in range(PARTITIONS)]
        consumer.assign(partitions)
        consumer.seek_to_beginning(*partitions)
        while len(found) < MESSAGES:
            batches = consumer.poll(timeout_ms=30_000)
            assert batches, f"{len(found)} of {MESSAGES} found"
            for batch in batches.values():
                found.update({message.value: message.partition for message in batch})
    finally:
        consumer.close()
    return found


def with_aiokafka(bootstrap: str, topic: str) -> dict[bytes, int]:
    async def run() -> dict[bytes, int]:
        consumer = AIOKafkaConsumer(bootstrap_servers=bootstrap, group_id=None, enable_auto_commit=False)
        await consumer.start()
        found: dict[bytes, int] = {}
        try:
            partitions = [AioTopicPartition(topic, index) for index in range(PARTITIONS)]
            consumer.assign(partitions)
            await consumer.seek_to_beginning(*partitions)
            while len(found) < MESSAGES:
                batches = await consumer.getmany(timeout_ms=30_000)
                assert batches, f"{len(found)} of {MESSAGES} found"
                for batch in batches.values():
                    found.update({message.value: message.partition for message in batch})
        finally:
            await consumer.stop()
        return found

    return asyncio.run(run())
