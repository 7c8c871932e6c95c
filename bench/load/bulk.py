"""As many records as the client can push or pull: confluent-kafka, one process."""

from __future__ import annotations

import time
from typing import Any

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from bench.load.payload import payloads

CHUNK = 1_000
"""Records per call into librdkafka, in one partition: the call's own cost is spread over them."""
TIMEOUT_S = 120.0


def produce(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` records of `size` bytes, acks=all; timed from the first call to the last acknowledgement."""
    failed: list[str] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error.str())

    producer = Producer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "acks": "all",
            "enable.idempotence": spec.get("idempotent", True),
            "compression.type": spec.get("codec", "none"),
            # Room for the whole run, so that the generator never waits for room.
            "queue.buffering.max.messages": 10_000_000,
            "queue.buffering.max.kbytes": 2_097_151,
            "delivery.report.only.error": True,
            **spec.get("settings", {}),
        }
    )
    topic, partitions, keys = spec["topic"], spec["partitions"], spec.get("keys")
    values = payloads(spec["size"])
    # Connections and the producer id are there before the clock starts.
    for partition in range(partitions):
        producer.produce(
            topic, values[0], key=b"0" if keys else None, partition=partition, on_delivery=delivered
        )
    _flush(producer)
    chunks = _chunks(spec["count"], values, keys)
    begun_at = time.monotonic()
    for index, chunk in enumerate(chunks):
        while producer.produce_batch(topic, chunk, partition=index % partitions, on_delivery=delivered) < len(
            chunk
        ):
            raise SystemExit("librdkafka's queue is smaller than the run")
        producer.poll(0)
    _flush(producer)
    seconds = time.monotonic() - begun_at
    if failed:
        raise SystemExit(f"{len(failed)} records failed, the first with: {failed[0]}")
    return {"seconds": seconds, "count": sum(len(chunk) for chunk in chunks)}


def _flush(producer: Producer) -> None:
    if left := producer.flush(TIMEOUT_S):
        raise SystemExit(f"{left} records were not acknowledged within {TIMEOUT_S:.0f} s")


def _chunks(count: int, values: list[bytes], keys: int | None) -> list[list[dict[str, bytes]]]:
    """The calls of the run, made before the clock starts; those without keys share one list of records."""
    if keys is None:
        chunk = [{"value": values[place % len(values)]} for place in range(CHUNK)]
        return [chunk] * max(count // CHUNK, 1)
    return [
        [
            {"key": b"%010d" % ((first + place) * 7919 % keys), "value": values[place % len(values)]}
            for place in range(CHUNK)
        ]
        for first in range(0, max(count, CHUNK), CHUNK)
    ]


def consume(spec: dict[str, Any]) -> dict[str, Any]:
    """Read `count` records from the beginning; timed from the first records to the last."""
    consumer = Consumer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "group.id": "bench",
            "enable.auto.commit": False,
            "auto.offset.reset": "earliest",
            "queued.max.messages.kbytes": 262_144,
            # With 100,000 records waiting librdkafka would pause its fetches for a second, whoever the broker is.
            "queued.min.messages": 10_000_000,
        }
    )
    consumer.assign([TopicPartition(spec["topic"], each, 0) for each in range(spec["partitions"])])
    total, count = spec["count"], 0
    deadline = time.monotonic() + TIMEOUT_S
    first = _some(consumer, 1, deadline)
    begun_at = time.monotonic()
    while count < total:
        # Asked for more than there is, librdkafka would wait for it to the end of its timeout.
        count += _some(consumer, min(10_000, total - count), deadline)
    seconds = time.monotonic() - begun_at
    consumer.close()
    return {"seconds": seconds, "count": count, "first": first}


def _some(consumer: Consumer, most: int, deadline: float) -> int:
    while time.monotonic() < deadline:
        messages = consumer.consume(most, 1.0)
        for each in messages:
            if each.error() is not None:
                raise SystemExit(f"consuming failed: {each.error()}")
        if messages:
            return len(messages)
    raise SystemExit(f"not all records were read within {TIMEOUT_S:.0f} s")
