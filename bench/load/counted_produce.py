"""So many produce requests of one small record from bare sockets, one in flight for each connection."""

from __future__ import annotations

import select
import time
from typing import Any

from bench.load.payload import payloads
from bench.load.raw_closed_loop import Client
from bench.protocol import produce_error, produce_frame, record_batch


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`count` requests over `clients` connections."""
    host, port = spec["bootstrap_servers"].rsplit(":", 1)
    topic = spec["topic"]
    batch = record_batch([payloads(spec["size"], 1)[0]], int(time.time() * 1000))
    frames = [produce_frame(topic, 0, batch)]
    clients = [Client(host, int(port), frames, 0) for _ in range(spec["clients"])]
    by_number = {each.socket.fileno(): each for each in clients}
    poll = select.epoll()
    asked = answered = 0
    began_at = time.monotonic()
    for each in clients:
        poll.register(each.socket.fileno(), select.EPOLLIN)
        each.ask()
        asked += 1
    while answered < spec["count"]:
        for number, _ in poll.poll(1.0):
            whole = by_number[number].answer()
            if whole is None:
                continue
            if (error := produce_error(whole, topic)) != 0:
                raise SystemExit(f"Produce was answered with error {error}")
            answered += 1
            if asked < spec["count"]:
                by_number[number].ask()
                asked += 1
    seconds = time.monotonic() - began_at
    for each in clients:
        each.socket.close()
    return {"count": answered, "seconds": seconds}
