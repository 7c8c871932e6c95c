"""2,000 partitions with a record each and 500 idle connections: what standing still costs."""

from __future__ import annotations

import struct
import time
from contextlib import ExitStack
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.machine import cpu_seconds, resident_mb
from bench.model import MeasureResult, Metrics, Row
from bench.protocol import API_VERSIONS, Connection, ProtocolError, first_acknowledgement, frame
from bench.servers import START_TIMEOUT_S, Broker, Durability

TOPICS: Final = 10
PARTITIONS: Final = 200
CONNECTIONS: Final = 500
SETTLE_S: Final = 3.0
IDLE_S: Final = 5.0


class ManyPartitions(Measure):
    """Each broker with its own default durability."""

    name = "many"
    title = "2,000 partitions and 500 idle connections"
    shares_brokers = False
    rows = (
        Row("2,000 partitions, 500 idle connections: memory", "MB", "ours.mb", "kafka.mb", at_most=0.3),
        Row(
            "2,000 partitions, 500 idle connections: start time",
            "s",
            "ours.start_s",
            "kafka.start_s",
            at_most=0.5,
        ),
        Row(
            "2,000 partitions, 500 idle connections: idle CPU",
            "% of a core",
            "ours.idle_percent",
            "kafka.idle_percent",
            below=2.0,
        ),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Fill once, then start again and again."""
        with ExitStack() as stack:
            series = []
            sides: tuple[tuple[str, Broker, Durability], ...] = (
                ("ours", bench.ours("many-ours"), "flushed"),
                ("kafka", bench.kafka("many-kafka"), "page cache"),
            )
            for key, broker, durability in sides:
                stack.callback(broker.close)
                broker.start()
                for number in range(TOPICS):
                    _fill(broker, f"many-{number}", durability)
                broker.stop()
                series.append(_series(bench, key, broker))
            return bench.alternate(self.name, series)


def _fill(broker: Broker, topic: str, durability: Durability) -> None:
    topics.create(broker, topic, PARTITIONS, broker.topic_settings(durability))
    # The generator sends one record to each partition before its clock starts; more is not needed.
    servers = broker.bootstrap_servers
    run_load(kafka_load("bulk_produce", servers, topic, partitions=PARTITIONS, size=100, count=1))


def _series(bench: Bench, key: str, broker: Broker) -> Series:
    def once() -> Metrics:
        broker.prepare()
        begun_at = time.monotonic()
        broker.launch()
        first_acknowledgement(broker.host, broker.port, "many-0", begun_at + START_TIMEOUT_S)
        _wait_for_leaders(broker, begun_at + START_TIMEOUT_S)
        start_s = time.monotonic() - begun_at
        connections = [_idle_connection(broker) for _ in range(CONNECTIONS)]
        time.sleep(SETTLE_S)
        before, since = cpu_seconds(broker.pid), time.monotonic()
        time.sleep(max(bench.seconds(IDLE_S), 1.0))
        idle = (cpu_seconds(broker.pid) - before) / (time.monotonic() - since)
        memory_mb = resident_mb(broker.pid)
        for each in connections:
            each.close()
        broker.stop()
        return {"start_s": start_s, "mb": memory_mb, "idle_percent": idle * 100}

    return Series(key, once)


def _wait_for_leaders(broker: Broker, deadline: float) -> None:
    connection = Connection(broker.host, broker.port)
    try:
        while (found := connection.leaders()) < TOPICS * PARTITIONS:
            if time.monotonic() > deadline:
                raise ProtocolError(f"only {found} partitions of {broker.label} have a leader")
            time.sleep(0.01)
    finally:
        connection.close()


def _idle_connection(broker: Broker) -> Connection:
    """Connected, greeted, and then silent."""
    connection = Connection(broker.host, broker.port)
    answer = connection.ask(frame(API_VERSIONS, 0, b""))
    (error,) = struct.unpack_from(">h", answer, 4)
    if error != 0:
        raise ProtocolError(f"ApiVersions was answered with error {error}")
    return connection
