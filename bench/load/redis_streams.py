"""Redis Streams: XADD from redis-py, a connection and a thread per client, one message in flight each."""

from __future__ import annotations

import threading
import time
from typing import Any

import redis

from bench.load.payload import payloads


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """Answers like `closed_loop`."""
    found: list[list[int]] = []
    failures: list[str] = []
    threads = [
        threading.Thread(target=_guarded, args=(spec, found, failures)) for _ in range(spec["clients"])
    ]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    if failures:
        raise SystemExit(failures[0])
    latencies = [value for each in found for value in each]
    return {"latencies_us": latencies, "window_s": spec["end_at"] - spec["begin_at"]}


def _guarded(spec: dict[str, Any], found: list[list[int]], failures: list[str]) -> None:
    try:
        found.append(_client(spec))
    except Exception as error:  # noqa: BLE001 - carried to the main thread, which ends the process with it
        failures.append(repr(error))


def _client(spec: dict[str, Any]) -> list[int]:
    client = redis.Redis(host="127.0.0.1", port=spec["port"])
    fields: dict[Any, Any] = {b"value": payloads(spec["size"], 1)[0]}
    stream, begin_at, end_at = spec["topic"], spec["begin_at"], spec["end_at"]
    latencies: list[int] = []
    while True:
        asked_at = time.monotonic()
        client.xadd(stream, fields)
        answered_at = time.monotonic()
        if answered_at > end_at:
            return latencies
        if asked_at >= begin_at:
            latencies.append(int((answered_at - asked_at) * 1e6))
