"""The demo's first half: what a producer and a consumer get from a broker, and what a SIGKILL takes away: nothing.

It measures bulk and single messages, then kills the broker while messages are in flight, starts it again and reads
everything back: every acknowledged message must be there once, in order.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic
from rich.console import Console

from holdfast.errors import HoldfastError
from holdfast.testing.broker import BrokerProcess

SINGLE_MESSAGES = 2_000
CRASH_MESSAGES = 20_000
VALUE_BYTES = 100

Figures = list[tuple[str, str]]


def try_broker(broker: BrokerProcess, console: Console, messages: int) -> tuple[Figures, bool]:
    """Its figures, and whether everything acknowledged was there after the kill."""
    figures: Figures = []
    _create_topics(broker)
    with console.status(f"producing {messages:,} messages of {VALUE_BYTES} bytes, acks=all, flushed"):
        figures.append(("bulk produce", f"{_bulk_produce(broker, messages):,.0f} messages/s"))
    with console.status("reading them back"):
        figures.append(("bulk consume", f"{_bulk_consume(broker, messages):,.0f} messages/s"))
    with console.status("one message at a time, each on disk before it is acknowledged"):
        p50, p99 = _single(broker)
        figures.append(("one at a time, flushed", f"p50 {p50 * 1e6:,.0f} µs, p99 {p99 * 1e6:,.0f} µs"))
    with console.status("killing the broker while messages are in flight"):
        acknowledged = _produce_and_crash(broker)
        broker.restart()
        stored = list(_read_all(broker, "crash"))
    missing = set(acknowledged).difference(stored)
    in_order = stored == sorted(stored) and len(stored) == len(set(stored))
    figures.append(("acknowledged before SIGKILL", f"{len(acknowledged):,}"))
    figures.append(("of these read back after restart", f"{len(acknowledged) - len(missing):,}"))
    figures.append(("read back in order, none twice", "yes" if in_order else "NO"))
    return figures, not missing and in_order


def _create_topics(broker: BrokerProcess) -> None:
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers, "log_level": 0})
    for future in admin.create_topics([NewTopic(name, 1) for name in ("bulk", "single", "crash")]).values():
        future.result(30)


def _producer(broker: BrokerProcess, **settings: object) -> Producer:
    return Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "enable.idempotence": True,
            "acks": "all",
            "log_level": 0,
            **{name.replace("_", "."): value for name, value in settings.items()},
        }
    )


def _bulk_produce(broker: BrokerProcess, messages: int) -> float:
    producer = _producer(broker, linger_ms=5, queue_buffering_max_messages=1_000_000)
    failures: list[KafkaError] = []
    value = b"x" * VALUE_BYTES

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            failures.append(error)

    began = time.perf_counter()
    for _ in range(messages):
        while True:
            try:
                producer.produce("bulk", value, on_delivery=delivered)
                break
            except BufferError:
                producer.poll(0.1)
        producer.poll(0)
    producer.flush()
    elapsed = time.perf_counter() - began
    if failures:
        raise HoldfastError(f"{len(failures)} of {messages} messages were not delivered: {failures[0]}")
    return messages / elapsed


def _consumer(broker: BrokerProcess, topic: str) -> Consumer:
    consumer = Consumer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "group.id": "demo",
            "enable.auto.commit": False,
            "queued.min.messages": 1_000_000,  # below this librdkafka pauses for a second once it is reached
            "log_level": 0,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    return consumer


def _bulk_consume(broker: BrokerProcess, messages: int) -> float:
    consumer = _consumer(broker, "bulk")
    seen = 0
    began = time.perf_counter()
    while seen < messages:
        seen += len(consumer.consume(10_000, 1.0))
    elapsed = time.perf_counter() - began
    consumer.close()
    return messages / elapsed


def _single(broker: BrokerProcess) -> tuple[float, float]:
    producer = _producer(broker, linger_ms=0)
    times = []
    for _ in range(SINGLE_MESSAGES):
        began = time.perf_counter()
        producer.produce("single", b"x" * VALUE_BYTES)
        producer.flush()
        times.append(time.perf_counter() - began)
    times.sort()
    return times[len(times) // 2], times[int(len(times) * 0.99)]


def _produce_and_crash(broker: BrokerProcess) -> list[int]:
    """Values acknowledged before the broker died; those that failed or hung are nobody's promise."""
    producer = _producer(broker, linger_ms=1, message_timeout_ms=3000, max_in_flight=5)
    acknowledged: list[int] = []

    def delivered(error: KafkaError | None, message: Message) -> None:
        if error is None:
            value = message.value()
            assert value is not None
            acknowledged.append(int(value))

    number = 0
    while len(acknowledged) < CRASH_MESSAGES:
        producer.produce("crash", str(number).encode(), on_delivery=delivered)
        number += 1
        # A bounded number is under way, so that the kill below finds some of them unanswered.
        producer.poll(0.001 if number - len(acknowledged) > 1000 else 0)
    broker.crash()
    producer.flush(10)
    return acknowledged


def _read_all(broker: BrokerProcess, topic: str) -> Iterator[int]:
    consumer = _consumer(broker, topic)
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)
    position = 0
    while position < end:
        for message in consumer.consume(10_000, 1.0):
            value, offset = message.value(), message.offset()
            assert value is not None
            assert offset is not None
            position = offset + 1
            yield int(value)
    consumer.close()
