"""Sixteen clients that spread their messages over a hundred partitions: a flush now means many files."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.driver import Bench, Measure
from bench.measures.clients16 import PROCESSES, clients_alone, closed_loop_series, flushing_first
from bench.model import MeasureResult, Row
from bench.servers import Durability

PARTITIONS: Final = 100


class Partitions100(Measure):
    """With confluent-kafka."""

    name = "partitions100"
    title = "Sixteen clients over a hundred partitions"
    shares_brokers = True
    rows = (
        Row(
            "acks=all, 16 clients over 100 partitions, flushed on both sides",
            "/s",
            "ours_flushed.requests_per_s",
            "kafka_flushed.requests_per_s",
            at_least=3.0,
        ),
        Row(
            "acks=all, 16 clients over 100 partitions, ours flushed, Kafka's not",
            "/s",
            "ours_flushed.requests_per_s",
            "kafka_page_cache.requests_per_s",
        ),
        clients_alone("16 clients over 100 partitions", "ours_flushed", "kafka_flushed"),
        flushing_first("16 clients over 100 partitions"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Ours flushed, Kafka flushed and not."""
        sides: list[tuple[str, Durability]] = [
            ("ours", "flushed"),
            ("kafka", "flushed"),
            ("kafka", "page cache"),
        ]
        with ExitStack() as stack:
            series = []
            for side, durability in sides:
                broker = bench.pair.ours if side == "ours" else bench.pair.kafka
                topic = stack.enter_context(bench.topic(broker, "partitions100", durability, PARTITIONS))
                key = f"{side}_{durability.replace(' ', '_')}"
                series.append(
                    closed_loop_series(bench, key, broker, topic, "closed_loop", PROCESSES, PARTITIONS)
                )
            return bench.alternate(self.name, series)
