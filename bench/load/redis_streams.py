"""Redis Streams: XADD from redis-py, a connection and a thread per client, one message in flight each."""

from __future__ import annotations

import threading
import time
from typing import Any

import redis

from bench.load.payload import payloads
from bench.load.window import Window


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers like `closed_loop`."""
    found: list[list[int]] = []
    failures: list[str] = []
    window = Window(spec["clients"])
    threads = [
        threading.Thread(target=_guarded, args=(spec, window, found, failures), daemon=True)
        for _ in range(spec["clients"])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise SystemExit(failures[0])
    latencies = [value for each in found for value in each]
    return window.outcome(latencies)


def _guarded(spec: dict[str, Any], window: Window, found: list[list[int]], failures: list[str]) -> None:
    try:
        found.append(_client(spec, window))
    except Exception as error:  # noqa: BLE001 - carried to the main thread, which ends the process with it
        failures.append(repr(error))
        # The others would load for ever: the driver waits for this client to be ready.
        window.end_at = 0.0


def _client(spec: dict[str, Any], window: Window) -> list[int]:
    client = redis.Redis(host="127.0.0.1", port=spec["port"])
    fields: dict[Any, Any] = {b"value": payloads(spec["size"], 1)[0]}
    stream = spec["topic"]
    latencies: list[int] = []
    ready = False
    while not window.is_over():
        asked_at = time.monotonic()
        client.xadd(stream, fields)
        answered_at = time.monotonic()
        if not ready:
            ready = True
            window.client_is_ready()
        if window.holds(asked_at, answered_at):
            latencies.append(int((answered_at - asked_at) * 1e6))
    return latencies
