"""The same load as `closed_loop` from bare sockets: requests encoded beforehand, all connections in one
loop.

A confluent-kafka producer costs the machine two threads and some 50 µs of processor time per message sent
alone, on the cores the broker needs. This costs about 10 µs, so that more of what is measured is the
broker.
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any

from bench.load.payload import payloads
from bench.load.window import Window
from bench.protocol import produce_error, produce_frame, record_batch

ANSWER_SIZE_MAX = 65_536
"""A Produce answer about one partition has less than a hundred bytes."""


class Client:
    """One connection, one request in flight."""

    def __init__(self, host: str, port: int, frames: list[bytes], first: int) -> None:
        self.socket = socket.create_connection((host, port), timeout=60.0)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames = frames
        self.next = first % len(frames)
        self.asked_at = 0.0
        self.is_ready = False
        self.received = b""

    def ask(self) -> None:
        self.asked_at = time.monotonic()
        self.socket.sendall(self.frames[self.next])
        self.next = (self.next + 1) % len(self.frames)

    def answer(self) -> bytes | None:
        """The whole answer, without its length, or None while some of it is still under way."""
        data = self.socket.recv(ANSWER_SIZE_MAX)
        if not data:
            raise ConnectionError("the broker closed the connection")
        self.received += data
        if len(self.received) < 4 or len(self.received) < 4 + struct.unpack_from(">i", self.received)[0]:
            return None
        whole, self.received = self.received[4:], b""
        return whole


def run(spec: dict[str, Any]) -> dict[str, Any]:
    """`clients` connections in one epoll loop; answers like `closed_loop`."""
    host, port = spec["bootstrap_servers"].rsplit(":", 1)
    topic = spec["topic"]
    batch = record_batch([payloads(spec["size"], 1)[0]], int(time.time() * 1000))
    frames = [produce_frame(topic, partition, batch) for partition in range(spec["partitions"])]
    clients = [Client(host, int(port), frames, index * 7) for index in range(spec["clients"])]
    by_number = {each.socket.fileno(): each for each in clients}
    window = Window(spec["clients"])
    latencies: list[int] = []
    poll = select.epoll()
    for each in clients:
        poll.register(each.socket.fileno(), select.EPOLLIN)
        each.ask()
    while not window.is_over():
        for number, _ in poll.poll(1.0):
            client = by_number[number]
            whole = client.answer()
            if whole is None:
                continue
            answered_at = time.monotonic()
            if (error := produce_error(whole, topic)) != 0:
                raise SystemExit(f"Produce was answered with error {error}")
            if not client.is_ready:
                client.is_ready = True
                window.client_is_ready()
            if window.holds(client.asked_at, answered_at):
                latencies.append(int((answered_at - client.asked_at) * 1e6))
            client.ask()
    for each in clients:
        each.socket.close()
    return window.outcome(latencies)
