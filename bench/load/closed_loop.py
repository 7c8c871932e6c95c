"""Clients that have one message in flight each: confluent-kafka, a producer and a thread per client."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from bench.load.payload import payloads
from bench.load.window import Window


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`clients` producers; answers with the latencies, in microseconds, of what fell into the window."""
    found: list[list[int]] = []
    failures: list[str] = []
    window = Window(spec["clients"])
    threads = [
        threading.Thread(target=_guarded, args=(spec, index, window, found, failures), daemon=True)
        for index in range(spec["clients"])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise SystemExit(failures[0])
    return window.outcome([value for each in found for value in each])


def _guarded(
    spec: dict[str, Any], index: int, window: Window, found: list[list[int]], failures: list[str]
) -> None:
    try:
        found.append(_client(spec, index, window))
    except Exception as error:  # noqa: BLE001 - carried to the main thread, which ends the process with it
        failures.append(f"client {index}: {error!r}")
        # The others would load for ever: the driver waits for this client to be ready.
        window.end_at = 0.0


def _client(spec: dict[str, Any], index: int, window: Window) -> list[int]:
    producer = Producer(
        {
            "bootstrap.servers": spec["bootstrap_servers"],
            "acks": "all",
            "linger.ms": 0,
            "socket.nagle.disable": True,
            "client.id": f"bench-{index}",
        }
    )
    outcome: list[KafkaError | None] = []

    def delivered(error: KafkaError | None, _: Message) -> None:
        outcome.append(error)

    topic, value = spec["topic"], payloads(spec["size"], 1)[0]
    latencies: list[int] = []
    # Clients start at different partitions, or they would walk over them in step.
    partitions = itertools.cycle(range(spec["partitions"]))
    for _ in range((spec.get("first_client", 0) + index) * 7 % spec["partitions"]):
        next(partitions)
    ready = False
    while not window.is_over():
        asked_at = time.monotonic()
        producer.produce(topic, value, partition=next(partitions), on_delivery=delivered)
        while not outcome:
            producer.poll(1.0)
        answered_at = time.monotonic()
        if (error := outcome.pop()) is not None:
            raise RuntimeError(error.str())
        if not ready:
            ready = True
            window.client_is_ready()
        if window.holds(asked_at, answered_at):
            latencies.append(int((answered_at - asked_at) * 1e6))
    return latencies
