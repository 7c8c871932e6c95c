"""Our producer beside a bare confluent-kafka with the same settings, message by message, on either broker.

The bare loop has a callback for each message and polls after every 256th; one that polls after each message, as
confluent-kafka's examples do, is reported beside it. Times run to the last acknowledgement, so what a spool stores is
delivered as well.
"""

from __future__ import annotations

import shutil
from contextlib import ExitStack
from typing import Final

from bench.driver import Bench, Measure, Series
from bench.load import RunningLoad, kafka_load, run_load
from bench.load.clients_producer import SPARING
from bench.measures.groups import SIDES
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

COUNTS: Final = {100: 400_000, 1_000: 200_000}
PARTITIONS: Final = 3
BARE: Final = "bare confluent-kafka"
ENGINES: Final = {"ours": "our broker", "kafka": "Apache Kafka"}
MEMORY_COUNT: Final = 1_000_000
WARMING_COUNT: Final = 20_000
"""Messages before the broker goes away: buffers and arenas have their size then."""
MEMORY_BYTES: Final = 100


def _rows() -> list[Row]:
    rows: list[Row] = []
    for side, engine in ENGINES.items():
        for size in COUNTS:
            what, key = f"{'1 KB' if size == 1_000 else '100 B'}, {engine}", f"{side}_{{}}_{size}b.per_s"
            bare = key.format("bare")
            rows += [
                Row(f"`Producer`, {what}", "messages/s", key.format("direct"), bare, BARE, at_least=0.8),
                Row(
                    f"`Producer` with a spool, stored before delivered, {what}",
                    "messages/s",
                    key.format("spooled"),
                    bare,
                    BARE,
                    at_least=0.4,
                ),
                Row(
                    f"`Producer` with a spool, until all is stored, {what}",
                    "messages/s",
                    f"{side}_spooled_{size}b.stored_per_s",
                    bare,
                    BARE,
                ),
                Row(
                    f"`Producer`, beside a bare loop that polls after each message, {what}",
                    "messages/s",
                    key.format("direct"),
                    key.format("polling"),
                    BARE,
                ),
            ]
    return rows


class ClientProducer(Measure):
    """One process, one thread that sends, keys of ten bytes, three partitions."""

    name = "clients-producer"
    title = "Clients: sending"
    rows = _rows()
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """Four ways to send, two sizes, both brokers with their own default durability."""
        brokers = {"ours": bench.pair.ours, "kafka": bench.pair.kafka}
        series = [
            _series(bench, side, brokers[side], durability, size, way)
            for side, durability in SIDES
            for size in COUNTS
            for way in ("bare", "direct", "spooled", "polling")
        ]
        return bench.alternate(self.name, series)


def _series(bench: Bench, side: str, broker: Broker, durability: Durability, size: int, way: str) -> Series:
    def once() -> Metrics:
        spool = bench.fresh_directory("clients-spool")
        with bench.topic(broker, "clients", durability, PARTITIONS, file_delete_delay_ms="1000") as topic:
            spec = kafka_load("clients_producer", broker.bootstrap_servers, topic, size=size)
            spec |= {"client": "bare" if way == "polling" else way, "count": bench.count(COUNTS[size])}
            spec |= {"poll_every": 1 if way == "polling" else SPARING, "spool": str(spool)}
            found = run_load(spec)
        shutil.rmtree(spool)
        metrics = {"per_s": found["count"] / found["seconds"]}
        if "stored_seconds" in found:
            metrics["stored_per_s"] = found["count"] / found["stored_seconds"]
        return metrics

    return Series(f"{side}_{way}_{size}b", once, rate="per_s")


def _memory_rows() -> list[Row]:
    rows: list[Row] = []
    for side, engine in ENGINES.items():
        first = f"{side}.after_25_mb"
        rows += [
            Row(f"memory before the broker goes away, {engine}", "MB", f"{side}.start_mb"),
            Row(f"memory after 250,000 messages, {engine}", "MB", first, f"{side}.start_mb", "before"),
            Row(
                f"memory after 500,000 messages, {engine}",
                "MB",
                f"{side}.after_50_mb",
                first,
                "after 250,000",
            ),
            Row(
                f"memory after 1,000,000 messages, {engine}",
                "MB",
                f"{side}.after_100_mb",
                first,
                "after 250,000",
                at_most=1.1,
            ),
            Row(
                f"memory while they are delivered, the most, {engine}",
                "MB",
                f"{side}.delivering_mb",
                first,
                "after 250,000",
            ),
            Row(
                f"memory when they are delivered, {engine}",
                "MB",
                f"{side}.delivered_mb",
                first,
                "after 250,000",
                at_most=1.25,
            ),
            Row(f"time to deliver 1,000,000 messages, {engine}", "s", f"{side}.delivered_seconds"),
        ]
    return rows


class ClientMemory(Measure):
    """A spooled producer that nobody holds deliveries of: a million messages with the broker away, then back."""

    name = "clients-memory"
    title = "Clients: memory with the broker away"
    rows = _memory_rows()
    shares_brokers = False

    def run(self, bench: Bench) -> MeasureResult:
        """Brokers of its own, stopped and started in every round."""
        with ExitStack() as stack:
            series = []
            for side, durability in SIDES:
                broker = (bench.ours if side == "ours" else bench.kafka)(f"clients-memory-{side}")
                stack.callback(broker.close)
                broker.start()
                topic = stack.enter_context(bench.topic(broker, "clients-memory", durability, PARTITIONS))
                series.append(_memory_series(bench, side, broker, topic))
            return bench.alternate(self.name, series)


def _memory_series(bench: Bench, side: str, broker: Broker, topic: str) -> Series:
    def once() -> Metrics:
        spool = bench.fresh_directory("clients-spool")
        spec = kafka_load("clients_memory", broker.bootstrap_servers, topic, size=MEMORY_BYTES)
        spec |= {
            "count": bench.count(MEMORY_COUNT),
            "warming": bench.count(WARMING_COUNT),
            "spool": str(spool),
        }
        running = RunningLoad(spec)
        try:
            running.answer()
            broker.stop()
            running.set_window(away=1.0)
            running.answer()
            broker.start()
            running.set_window(back=1.0)
            found = running.result()
        finally:
            running.kill()
        shutil.rmtree(spool)
        return {name: float(value) for name, value in found.items()}

    return Series(side, once)
