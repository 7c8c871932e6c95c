"""From the start of the process to the first acknowledged message, and its memory then and after work.

The data directory is made beforehand, with one topic, and shut down cleanly; each round starts on it
again. The client is a bare socket that tries every two milliseconds: librdkafka's reconnect backoff would
be most of the figure.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.machine import resident_mb
from bench.measures.bulk import CELLS, bulk_run
from bench.model import MeasureResult, Metrics, Row
from bench.protocol import first_acknowledgement
from bench.servers import START_TIMEOUT_S, Broker, Durability

TOPIC: Final = "first"
BULK_CELLS: Final = tuple(cell for cell in CELLS if cell.partitions == 8)
"""Four of the eight bulk runs, those that keep most buffers busy."""


class Startup(Measure):
    """Each broker with its own default durability."""

    name = "startup"
    title = "Start and memory"
    shares_brokers = False
    rows = (
        Row("start to first acknowledged message", "s", "ours.start_s", "kafka.start_s", at_most=0.2),
        Row("memory after start", "MB", "ours.started_mb", "kafka.started_mb", at_most=0.15),
        Row("memory after the bulk run", "MB", "ours.bulk_mb", "kafka.bulk_mb", at_most=0.15),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """A fresh process for each figure."""
        with ExitStack() as stack:
            series = []
            sides: tuple[tuple[str, Broker, Durability], ...] = (
                ("ours", bench.ours("startup-ours"), "flushed"),
                ("kafka", bench.kafka("startup-kafka"), "page cache"),
            )
            for key, broker, durability in sides:
                stack.callback(broker.close)
                broker.start()
                topics.create(broker, TOPIC, 1, broker.topic_settings(durability))
                broker.stop()
                series.append(_series(bench, key, broker, durability))
            return bench.alternate(self.name, series)


def _series(bench: Bench, key: str, broker: Broker, durability: Durability) -> Series:
    def once() -> Metrics:
        broker.prepare()
        begun_at = time.monotonic()
        broker.launch()
        first_acknowledgement(broker.host, broker.port, TOPIC, begun_at + START_TIMEOUT_S)
        start_s = time.monotonic() - begun_at
        started_mb = resident_mb(broker.pid)
        for cell in BULK_CELLS:
            bulk_run(bench, broker, durability, cell, consume=True)
        bulk_mb = resident_mb(broker.pid)
        broker.stop()
        return {"start_s": start_s, "started_mb": started_mb, "bulk_mb": bulk_mb}

    return Series(key, once)
