"""Handling message by message: a bare poll loop with manual commits, and our consumer."""

from __future__ import annotations

import asyncio
import threading
import time
import uuid
from typing import Any, Final

from confluent_kafka import Consumer as BareConsumer

from holdfast.client import Consumer, Message
from holdfast.client.consumer import FETCH_BACKOFF_MS
from holdfast.client.settings import consumer_settings

COMMIT_S: Final = 1.0
"""Between two commits, as our consumer does."""
TIMEOUT_S: Final = 300.0


def bare(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` messages with our settings, timed from the first to the last."""
    settings = consumer_settings(spec["bootstrap_servers"], f"bench-{uuid.uuid4()}", {})
    # A position counts when the next message is asked for, which in one thread is when the work is done.
    settings |= {"auto.offset.reset": "earliest", "enable.auto.offset.store": True}
    settings["fetch.queue.backoff.ms"] = FETCH_BACKOFF_MS
    consumer = BareConsumer(settings)
    consumer.subscribe([spec["topic"]])
    handled = handled_bytes = 0
    deadline = time.monotonic() + TIMEOUT_S
    begun_at = commit_at = 0.0
    while handled < spec["count"]:
        message: Any = consumer.poll(1.0)
        if message is None:
            if time.monotonic() > deadline:
                raise SystemExit(f"{handled} of {spec['count']} messages came within {TIMEOUT_S:.0f} s")
            continue
        if message.error() is not None:
            raise SystemExit(f"consuming failed: {message.error()}")
        if not handled:
            begun_at = time.monotonic()
            commit_at = begun_at + COMMIT_S
        handled_bytes += len(message.value())
        handled += 1
        if time.monotonic() >= commit_at:
            consumer.commit(asynchronous=True)
            commit_at += COMMIT_S
    seconds = time.monotonic() - begun_at
    consumer.commit(asynchronous=False)
    consumer.close()
    return {"seconds": seconds, "count": handled, "bytes": handled_bytes}


def ours(spec: dict[str, Any]) -> dict[str, Any]:
    """The same with `Consumer`; with `wait_ms`, by a handler that waits so long."""
    count, wait_s = spec["count"], spec.get("wait_ms", 0) / 1e3
    handled = handled_bytes = 0
    begun_at = ended_at = 0.0
    consumer = Consumer(
        spec["bootstrap_servers"],
        group=f"bench-{uuid.uuid4()}",
        topics=[spec["topic"]],
        workers=spec["workers"],
        order=spec["order"],
    )

    def note(message: Message) -> None:
        nonlocal handled, handled_bytes, begun_at, ended_at
        if not begun_at:
            begun_at = time.monotonic()
        assert message.value is not None
        handled_bytes += len(message.value)
        handled += 1
        if handled == count:
            ended_at = time.monotonic()
            consumer.stop()

    lock = threading.Lock()

    def wait(message: Message) -> None:
        time.sleep(wait_s)
        with lock:
            note(message)

    async def wait_together(message: Message) -> None:
        await asyncio.sleep(wait_s)
        note(message)

    consumer.run(note if not wait_s else wait_together if spec.get("coroutines") else wait)
    return {"seconds": ended_at - begun_at, "count": handled, "bytes": handled_bytes}
