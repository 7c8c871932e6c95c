"""Sending message by message: confluent-kafka as its documentation shows it, and our producer, straight and spooled."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from confluent_kafka import KafkaError, Message
from confluent_kafka import Producer as BareProducer

from bench.load.payload import payloads
from bench.machine import resident_mb
from holdfast.client import Producer
from holdfast.client.settings import producer_settings

KEYS: Final = 10_000
TIMEOUT_S: Final = 300.0
SPARING: Final = 256
"""How many messages a bare loop that polls sparingly sends between two polls."""


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` messages of `size` bytes with keys, timed from the first call to the last acknowledgement."""
    values = payloads(spec["size"])
    keys = [b"%010d" % number for number in range(KEYS)]
    send: Callable[..., dict[str, Any]] = {"bare": _bare, "direct": _direct, "spooled": _spooled}[
        spec["client"]
    ]
    return {"count": spec["count"], **send(spec, keys, values)}


def _bare(spec: dict[str, Any], keys: list[bytes], values: list[bytes]) -> dict[str, Any]:
    """With our safe settings and a callback for each message, which a program needs to know what arrived."""
    delivered = 0
    failed: list[str] = []

    def report(error: KafkaError | None, message: Message) -> None:
        nonlocal delivered
        if error is None:
            delivered += 1
        else:
            failed.append(error.str())

    producer = BareProducer(
        producer_settings(
            spec["bootstrap_servers"], {"partitioner": "murmur2_random", **spec.get("settings", {})}
        )
    )
    topic, count, every = spec["topic"], spec["count"], spec["poll_every"]
    producer.produce(topic, values[0], keys[0], on_delivery=report)
    _check(producer.flush(TIMEOUT_S), failed)
    key_count, value_count = len(keys), len(values)
    begun_at = time.monotonic()
    for number in range(count):
        while True:
            try:
                producer.produce(
                    topic, values[number % value_count], keys[number % key_count], on_delivery=report
                )
                break
            except BufferError:
                producer.poll(0.05)
        if number % every == 0:
            producer.poll(0)
    left = producer.flush(TIMEOUT_S)
    seconds = time.monotonic() - begun_at
    _check(left, failed)
    if delivered != count + 1:
        raise SystemExit(f"{delivered} of {count + 1} were reported")
    return {"seconds": seconds}


def _direct(spec: dict[str, Any], keys: list[bytes], values: list[bytes]) -> dict[str, Any]:
    with Producer(spec["bootstrap_servers"], config=spec.get("settings", {})) as producer:
        return _timed(producer, spec, keys, values)


def _spooled(spec: dict[str, Any], keys: list[bytes], values: list[bytes]) -> dict[str, Any]:
    """Each message is flushed to disk before it is delivered; timed to the last acknowledgement as well."""
    with Producer(
        spec["bootstrap_servers"], spool=spec["spool"], config=spec.get("settings", {})
    ) as producer:
        return _timed(producer, spec, keys, values)


def _timed(
    producer: Producer, spec: dict[str, Any], keys: list[bytes], values: list[bytes]
) -> dict[str, Any]:
    topic, count = spec["topic"], spec["count"]
    send = producer.send
    last = send(topic, values[0], key=keys[0])
    last.wait(TIMEOUT_S)
    key_count, value_count = len(keys), len(values)
    begun_at = time.monotonic()
    for number in range(count):
        last = send(topic, values[number % value_count], key=keys[number % key_count])
    found: dict[str, Any] = {}
    if spec["client"] == "spooled":
        last.wait_stored(TIMEOUT_S)
        found["stored_seconds"] = time.monotonic() - begun_at
    report = producer.flush(TIMEOUT_S)
    found["seconds"] = time.monotonic() - begun_at
    if not report.is_complete or report.delivered != count + 1:
        raise SystemExit(f"not everything was delivered: {report.delivered}, {report.refused[:1]}")
    return found


def _check(left: int, failed: list[str]) -> None:
    if left or failed:
        raise SystemExit(f"{left} messages were not acknowledged, {len(failed)} failed: {failed[:1]}")


def memory(spec: dict[str, Any]) -> dict[str, Any]:
    """Resident memory of a spooled producer while the broker is away, and when it has come back.

    Says "away" and "back", each answered with a line when it is so.
    """
    values = payloads(spec["size"])
    count = spec["count"]
    found: dict[str, Any] = {}
    with Producer(spec["bootstrap_servers"], spool=Path(spec["spool"])) as producer:
        # A producer that runs: connected, and with everything imported and allocated that sending needs.
        for number in range(spec["warming"]):
            producer.send(spec["topic"], values[number % len(values)], key=b"%010d" % (number % KEYS))
        producer.flush(TIMEOUT_S)
        found["start_mb"] = resident_mb(os.getpid())
        _ask("away")
        for number in range(count):
            producer.send(spec["topic"], values[number % len(values)], key=b"%010d" % (number % KEYS))
            if number + 1 in (count // 4, count // 2, count):
                found[f"after_{100 * (number + 1) // count}_mb"] = resident_mb(os.getpid())
        _ask("back")
        begun_at = time.monotonic()
        most = 0.0
        while producer.wait_settled(0.2):
            most = max(most, resident_mb(os.getpid()))
            if time.monotonic() - begun_at > TIMEOUT_S:
                raise SystemExit(f"{producer.under_way} messages were not delivered within {TIMEOUT_S:.0f} s")
        found["delivering_mb"] = max(most, resident_mb(os.getpid()))
        found["delivered_seconds"] = time.monotonic() - begun_at
        found["delivered_mb"] = resident_mb(os.getpid())
        report = producer.flush(0)
        if not report.is_complete or report.delivered != count + spec["warming"]:
            raise SystemExit(f"{report.delivered} of {count + spec['warming']} were delivered")
    return found


def _ask(what: str) -> None:
    print(f'{{"{what}": true}}', flush=True)
    if not input():
        raise SystemExit("nobody answered")
