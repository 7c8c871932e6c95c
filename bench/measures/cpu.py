"""What a gigabyte costs the broker: its processor time while it takes half a gigabyte and gives it back."""

from __future__ import annotations

from typing import Final

from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.machine import cpu_seconds
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

COUNT: Final = 500_000
RECORD_BYTES: Final = 1_000
"""Half a gigabyte: the kernel counts processor time in hundredths of a second."""


class Cpu(Measure):
    """Records of 1 KB, one partition, uncompressed, idempotent; user and system time, children included."""

    name = "cpu"
    title = "Processor time"
    shares_brokers = True
    rows = tuple(
        Row(
            f"broker CPU seconds per GB {way}, {what}",
            "s",
            f"{ours}.{metric}",
            f"kafka_page_cache.{metric}",
            at_most=1.0,
        )
        for ours, what in (
            ("ours_page_cache", "page cache on both sides"),
            ("ours_flushed", "ours flushed, Kafka's not"),
        )
        for way, metric in (("in", "cpu_s_per_gb_in"), ("out", "cpu_s_per_gb_out"))
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Ours in both modes, Kafka in its own."""
        series = [
            _series(bench, "ours_page_cache", bench.pair.ours, "page cache"),
            _series(bench, "kafka_page_cache", bench.pair.kafka, "page cache"),
            _series(bench, "ours_flushed", bench.pair.ours, "flushed"),
        ]
        return bench.alternate(self.name, series)


def _series(bench: Bench, key: str, broker: Broker, durability: Durability) -> Series:
    def once() -> Metrics:
        with bench.topic(broker, "cpu", durability, file_delete_delay_ms="1000") as topic:
            spec = kafka_load("bulk_produce", broker.bootstrap_servers, topic, size=RECORD_BYTES)
            before = cpu_seconds(broker.pid)
            made = run_load({**spec, "count": bench.count(COUNT)})
            between = cpu_seconds(broker.pid)
            run_load({**spec, "kind": "bulk_consume", "count": made["count"]})
            after = cpu_seconds(broker.pid)
        gigabytes = made["count"] * RECORD_BYTES / 1e9
        return {
            "cpu_s_per_gb_in": (between - before) / gigabytes,
            "cpu_s_per_gb_out": (after - between) / gigabytes,
            "produced_per_s": made["count"] / made["seconds"],
        }

    return Series(key, once, rate="produced_per_s")
