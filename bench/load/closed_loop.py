"""Clients that have one message in flight each: confluent-kafka, a producer and a thread per client."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

from confluent_kafka import KafkaError, Message, Producer

from bench.load.payload import payloads

CHECK_STOP_EVERY = 64
"""Messages between two looks for the stop file: a look costs a system call."""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`clients` producers; answers with the latencies, in microseconds, of what fell into the window."""
    found: list[list[int]] = []
    failures: list[str] = []
    threads = [
        threading.Thread(target=_guarded, args=(spec, index, found, failures))
        for index in range(spec["clients"])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise SystemExit(failures[0])
    return {"latencies_us": [value for each in found for value in each], "window_s": _window_s(spec)}


def _window_s(spec: dict[str, Any]) -> float:
    ended_at = min(spec["end_at"], time.monotonic())
    return float(ended_at - spec["begin_at"])


def _guarded(spec: dict[str, Any], index: int, found: list[list[int]], failures: list[str]) -> None:
    try:
        found.append(_client(spec, index))
    except Exception as error:  # noqa: BLE001 - carried to the main thread, which ends the process with it
        failures.append(f"client {index}: {error!r}")


def _client(spec: dict[str, Any], index: int) -> list[int]:
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
    begin_at, end_at, stop_file = spec["begin_at"], spec["end_at"], spec.get("stop_file")
    latencies: list[int] = []
    # Clients start at different partitions, or they would walk over them in step.
    partitions = itertools.cycle(range(spec["partitions"]))
    for _ in range(index * 7 % spec["partitions"]):
        next(partitions)
    for count in itertools.count():
        asked_at = time.monotonic()
        producer.produce(topic, value, partition=next(partitions), on_delivery=delivered)
        while not outcome:
            producer.poll(1.0)
        answered_at = time.monotonic()
        if (error := outcome.pop()) is not None:
            raise RuntimeError(error.str())
        if answered_at > end_at:
            break
        if asked_at >= begin_at:
            latencies.append(int((answered_at - asked_at) * 1e6))
        if stop_file is not None and count % CHECK_STOP_EVERY == 0 and os.path.exists(stop_file):
            break
    return latencies
