"""The demo of a hand-over: a sender writes all the while, and in the middle Apache Kafka takes the broker's place.

One port, one data directory, one producer. holdfast is stopped, `graduate` prepares the directory, Apache Kafka starts
on it, and the sender goes on. Then every record that holdfast wrote is held against the manifest, and every message
that was acknowledged, by either, is looked for.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from confluent_kafka import Producer
from rich.console import Console

from holdfast.demo.broker import Figures
from holdfast.graduate.handing_over import MANIFEST_FILE, Request, graduate, prepare
from holdfast.graduate.starting import start_kafka
from holdfast.graduate.verifying import verify
from holdfast.manifest.model import decode
from holdfast.testing.apache import jars
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.engines import QUIET, Engine, read_log, wait_until
from holdfast.testing.processes import free_ports

TOPIC = "orders"
PARTITIONS = 3


class Sender:
    """One idempotent producer on a thread of its own."""

    def __init__(self, server: str) -> None:
        self.acknowledged: list[str] = []
        self.longest_pause_s = 0.0
        self._failures: list[Any] = []
        self._last = time.monotonic()
        self._is_over = threading.Event()
        self._producer = Producer(
            {"bootstrap.servers": server, "enable.idempotence": True, "linger.ms": 2, **QUIET}
        )
        self._thread = threading.Thread(target=self._send, daemon=True)
        self._thread.start()

    def _send(self) -> None:
        number = 0
        while not self._is_over.is_set():
            try:
                self._producer.produce(TOPIC, str(number), on_delivery=self._delivered)
                number += 1
            except BufferError:
                pass  # as many wait as the client holds: the broker is away
            self._producer.poll(0.001)

    def _delivered(self, error: Any, message: Any) -> None:
        now = time.monotonic()
        self.longest_pause_s = max(self.longest_pause_s, now - self._last)
        self._last = now
        if error is None:
            self.acknowledged.append(message.value().decode())
        else:
            self._failures.append(error)

    def await_more(self, count: int) -> None:
        goal = len(self.acknowledged) + count
        wait_until(lambda: len(self.acknowledged) >= goal or self._failures, "messages are acknowledged", 120)

    def end(self) -> bool:
        """Whether every message was acknowledged."""
        self._is_over.set()
        self._thread.join()
        return self._producer.flush(60) == 0 and not self._failures


def hand_over(directory: Path, console: Console, messages: int) -> tuple[Figures, bool]:
    """The figures, and whether nothing was lost, nothing is there twice and everything is proven."""
    jars()  # fetched before anything is stopped
    port, controller = free_ports(2)
    data, output = str(directory / "data"), str(directory / "handover")
    with BrokerProcess(data, listen=f"127.0.0.1:{port}") as broker:
        server = broker.bootstrap_servers
        Engine("holdfast", server).create_topic(TOPIC, PARTITIONS)
        sender = Sender(server)
        with console.status("sending orders to holdfast"):
            sender.await_more(messages)
            prepare([data], output)
        with console.status("stopping holdfast; Apache Kafka takes over directory and port"):
            broker.stop()
            before = len(sender.acknowledged)
            outcome = graduate(Request((data,), ("127.0.0.1", port), ("127.0.0.1", controller), output))
            kafka = start_kafka(output, is_detached=False)
    try:
        with console.status("sending orders to Apache Kafka"):
            sender.await_more(messages)
            is_all = sender.end()
        with console.status("holding Apache Kafka against the manifest"):
            manifest = decode(Path(output, MANIFEST_FILE).read_bytes(), MANIFEST_FILE)
            report = verify(manifest, output, {"bootstrap.servers": server})
            stored = Counter(message.value().decode() for message in read_log(server, TOPIC))
    finally:
        kafka.close()
    lost = [each for each in sender.acknowledged if each not in stored]
    twice = [each for each, count in stored.items() if count > 1]
    figures = [
        ("acknowledged by holdfast", f"{before:,}"),
        ("acknowledged by Apache Kafka, same port, same directory", f"{len(sender.acknowledged) - before:,}"),
        ("lost", f"{len(lost):,}"),
        ("there twice", f"{len(twice):,}"),
        ("longest wait for an acknowledgement", f"{sender.longest_pause_s:.1f} s"),
        ("of it `holdfast graduate`", f"{outcome.seconds:.1f} s"),
        (
            "records of the manifest proven by digest",
            f"{report.counts.records_proven:,} of {report.counts.records:,}",
        ),
        ("verdict", report.verdict),
    ]
    return figures, is_all and not lost and not twice and report.verdict == "proven"
