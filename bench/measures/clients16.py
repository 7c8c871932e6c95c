"""Sixteen clients with one message in flight each, on one partition: how many are acknowledged per second."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench.driver import Bench, Measure, Series
from bench.load import kafka_load
from bench.measures.latency import MODES
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

CLIENTS: Final = 16
PROCESSES: Final = 2
"""Interpreters the sixteen threads share: one per core here; a single one is its own bottleneck."""
WINDOW_S: Final = 3.0
RECORD_BYTES: Final = 100


def _rows(generator: str, targets: bool) -> list[Row]:
    pairs = (
        ("page cache on both sides", "ours_page_cache", "kafka_page_cache", 1.8),
        ("flushed on both sides", "ours_flushed", "kafka_flushed", 5.0),
        ("**ours flushed, Kafka's not**", "ours_flushed", "kafka_page_cache", 1.2),
    )
    rows = [
        Row(
            f"acks=all, 16 clients, one partition, {what}{generator}",
            "/s",
            f"{ours}.requests_per_s",
            f"{kafka}.requests_per_s",
            at_least=target if targets else None,
        )
        for what, ours, kafka, target in pairs
    ]
    if targets:
        rows.append(clients_alone("16 clients, one partition", "ours_page_cache", "kafka_page_cache"))
        rows.append(flushing_first("16 clients, one partition"))
    return rows


def flushing_first(what: str) -> Row:
    """What a directory that was handed over costs until it has replicas: see `holdfast graduate`."""
    return Row(
        f"{what}: Apache Kafka that flushes before it acknowledges, against Apache Kafka that does not",
        "/s",
        "kafka_flushed.requests_per_s",
        "kafka_page_cache.requests_per_s",
    )


def clients_alone(what: str, ours: str, kafka: str) -> Row:
    """The bound of such a measure: all cores to the clients, which cost on `ours` what they cost."""
    return Row(
        f"{what}: a broker that costs nothing, against Kafka's {kafka.removeprefix('kafka_').replace('_', ' ')}",
        "/s",
        f"{ours}.clients_alone_per_s",
        f"{kafka}.requests_per_s",
    )


class Clients16(Measure):
    """With confluent-kafka, eight producers and threads in each of two processes."""

    name = "clients16"
    title = "Sixteen clients"
    kind = "closed_loop"
    processes = PROCESSES
    rows = _rows("", targets=True)
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """Both durabilities on both brokers."""
        with ExitStack() as stack:
            series = []
            for mode, durability in MODES:
                for side, broker in (("ours", bench.pair.ours), ("kafka", bench.pair.kafka)):
                    topic = stack.enter_context(bench.topic(broker, "clients16", durability))
                    series.append(
                        closed_loop_series(bench, f"{side}_{mode}", broker, topic, self.kind, self.processes)
                    )
            return bench.alternate(self.name, series)


class Clients16Raw(Clients16):
    """With sixteen bare sockets in one process."""

    name = "clients16-raw"
    title = "Sixteen clients, bare sockets"
    kind = "raw_closed_loop"
    processes = 1
    rows = _rows(", bare sockets", targets=False)


def closed_loop_series(
    bench: Bench, key: str, broker: Broker, topic: str, kind: str, processes: int, partitions: int = 1
) -> Series:
    """Sixteen clients against one topic."""
    servers = broker.bootstrap_servers
    spec = kafka_load(kind, servers, topic, partitions=partitions, size=RECORD_BYTES, clients=CLIENTS)

    def once() -> Metrics:
        return bench.closed_loop(spec, processes=processes, full_seconds=WINDOW_S)

    return Series(key, once, rate="requests_per_s")
