"""From produce() to the consumer: ours flushed before anyone sees it, Kafka's in the page cache."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.disk import disk_alone, small_flushes
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

WINDOW_S: Final = 3.0
RECORD_BYTES: Final = 100


class EndToEnd(Measure):
    """With confluent-kafka, producer and consumer in one process."""

    name = "end-to-end"
    title = "Produce to consume"
    shares_brokers = True
    rows = [
        Row(
            f"produce-to-consume latency, ours flushed, Kafka's not, {quantile}",
            "µs",
            f"ours_flushed.{quantile}_us",
            f"kafka_page_cache.{quantile}_us",
            at_most=target,
        )
        for quantile, target in (("p50", 1.5), ("p99", 1.0))
    ] + disk_alone("Kafka's page cache, produced and consumed", "kafka_page_cache")

    def run(self, bench: Bench) -> MeasureResult:
        """Each broker with its own default."""
        with ExitStack() as stack:
            ours = stack.enter_context(bench.topic(bench.pair.ours, "end-to-end", "flushed"))
            kafka = stack.enter_context(bench.topic(bench.pair.kafka, "end-to-end", "page cache"))
            series = [
                _series(bench, "ours_flushed", bench.pair.ours, ours),
                _series(bench, "kafka_page_cache", bench.pair.kafka, kafka),
                small_flushes(bench),
            ]
            return bench.alternate(self.name, series)


def _series(bench: Bench, key: str, broker: Broker, topic: str) -> Series:
    spec = kafka_load("end_to_end", broker.bootstrap_servers, topic, size=RECORD_BYTES, clients=1)

    def once() -> Metrics:
        return bench.closed_loop(spec, processes=1, full_seconds=WINDOW_S)

    return Series(key, once, rate="requests_per_s")
