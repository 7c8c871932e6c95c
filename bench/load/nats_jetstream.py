"""NATS JetStream: publish and await the acknowledgement, a connection and a task of nats-py per client."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import nats

from bench.load.payload import payloads
from bench.load.window import Window


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers like `closed_loop`."""
    return asyncio.run(_run(spec))


async def _run(spec: dict[str, Any]) -> dict[str, Any]:
    window = Window(spec["clients"])
    found = await asyncio.gather(*(_client(spec, window) for _ in range(spec["clients"])))
    latencies = [value for each in found for value in each]
    return window.outcome(latencies)


async def _client(spec: dict[str, Any], window: Window) -> list[int]:
    connection = await nats.connect(f"nats://127.0.0.1:{spec['port']}")
    stream = connection.jetstream()
    value = payloads(spec["size"], 1)[0]
    subject = spec["topic"]
    latencies: list[int] = []
    ready = False
    while not window.is_over():
        asked_at = time.monotonic()
        await stream.publish(subject, value)
        answered_at = time.monotonic()
        if not ready:
            ready = True
            window.client_is_ready()
        if window.holds(asked_at, answered_at):
            latencies.append(int((answered_at - asked_at) * 1e6))
    await connection.close()
    return latencies
