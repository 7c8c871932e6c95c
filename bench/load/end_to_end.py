"""From produce() to the consumer's poll(): one message at a time, producer and consumer in one process."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, Producer, TopicPartition

from bench.load.payload import payloads
from bench.load.window import Window

TIMEOUT_S = 30.0


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Latencies, in microseconds, of the messages asked for and read within the window."""
    servers, topic = spec["bootstrap_servers"], spec["topic"]
    producer = Producer(
        {"bootstrap.servers": servers, "acks": "all", "linger.ms": 0, "socket.nagle.disable": True}
    )
    consumer = Consumer(
        {
            "bootstrap.servers": servers,
            "group.id": "bench",
            "enable.auto.commit": False,
            "socket.nagle.disable": True,
        }
    )
    _, end = consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=TIMEOUT_S)
    consumer.assign([TopicPartition(topic, 0, end)])
    value = payloads(spec["size"], 1)[0]
    window = Window(clients=1)
    latencies: list[int] = []
    ready = False
    while not window.is_over():
        asked_at = time.monotonic()
        producer.produce(topic, value, partition=0)
        message = consumer.poll(TIMEOUT_S)
        read_at = time.monotonic()
        if message is None or message.error() is not None:
            raise SystemExit(f"the message did not come back: {message and message.error()}")
        producer.poll(0)
        if not ready:
            ready = True
            window.client_is_ready()
        if window.holds(asked_at, read_at):
            latencies.append(int((read_at - asked_at) * 1e6))
    producer.flush(TIMEOUT_S)
    consumer.close()
    return window.outcome(latencies)
