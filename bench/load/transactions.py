"""One transactional producer, one transaction after the other: confluent-kafka."""

from __future__ import annotations

import time
import uuid
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from bench.load.payload import payloads
from bench.load.window import Window

TIMEOUT_S = 60.0


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Latencies, in microseconds, of the transactions begun and committed within the window."""
    failed: list[str] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        if error is not None:
            failed.append(error.str())

    producer = Producer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "transactional.id": f"bench-{uuid.uuid4()}",
            "linger.ms": 0,
            "socket.nagle.disable": True,
            "delivery.report.only.error": True,
        }
    )
    producer.init_transactions(TIMEOUT_S)
    values = payloads(spec["size"], spec["messages"])
    window = Window(clients=1)
    latencies: list[int] = []
    ready = False
    while not window.is_over():
        asked_at = time.monotonic()
        producer.begin_transaction()
        for value in values:
            producer.produce(spec["topic"], value, partition=0, on_delivery=delivered)
        producer.commit_transaction(TIMEOUT_S)
        answered_at = time.monotonic()
        if failed:
            raise SystemExit(f"a message failed: {failed[0]}")
        if not ready:
            ready = True
            window.client_is_ready()
        if window.holds(asked_at, answered_at):
            latencies.append(int((answered_at - asked_at) * 1e6))
    return window.outcome(latencies)
