"""One client, one message in flight, acks=all: how long until it is acknowledged."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.disk import disk_alone, small_flushes
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

WINDOW_S: Final = 3.0
RECORD_BYTES: Final = 100
MODES: Final[tuple[tuple[str, Durability], ...]] = (("page_cache", "page cache"), ("flushed", "flushed"))


def _rows(generator: str, targets: bool) -> list[Row]:
    wanted = {("page_cache", "p50"): 0.85, ("page_cache", "p99"): 0.5}
    wanted |= {("flushed", "p50"): 0.65, ("flushed", "p99"): 0.4}
    rows = [
        Row(
            f"acks=all, one in flight, {durability} on both sides, {quantile}{generator}",
            "µs",
            f"ours_{mode}.{quantile}_us",
            f"kafka_{mode}.{quantile}_us",
            at_most=wanted[mode, quantile] if targets else None,
        )
        for mode, durability in MODES
        for quantile in ("p50", "p99")
    ]
    return rows + disk_alone("Kafka flushed", "kafka_flushed") if targets else rows


class Latency(Measure):
    """With confluent-kafka."""

    name = "latency"
    title = "One message in flight"
    kind = "closed_loop"
    rows = _rows("", targets=True)
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """Both durabilities on both brokers."""
        with ExitStack() as stack:
            series = []
            for mode, durability in MODES:
                for side, broker in (("ours", bench.pair.ours), ("kafka", bench.pair.kafka)):
                    topic = stack.enter_context(bench.topic(broker, "latency", durability))
                    series.append(self._series(bench, f"{side}_{mode}", broker, topic))
            series.append(small_flushes(bench))
            return bench.alternate(self.name, series)

    def _series(self, bench: Bench, key: str, broker: Broker, topic: str) -> Series:
        spec = kafka_load(self.kind, broker.bootstrap_servers, topic, size=RECORD_BYTES, clients=1)

        def once() -> Metrics:
            return bench.closed_loop(spec, processes=1, full_seconds=WINDOW_S)

        return Series(key, once, rate="requests_per_s")


class LatencyRaw(Latency):
    """With bare sockets, which add less of their own."""

    name = "latency-raw"
    title = "One message in flight, bare sockets"
    kind = "raw_closed_loop"
    rows = _rows(", bare sockets", targets=False)
