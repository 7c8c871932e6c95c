"""Our consumer beside a bare poll loop with manual commits, and eight workers beside one, on either broker."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.measures.clients_producer import ENGINES
from bench.measures.groups import SIDES
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

COUNT: Final = 400_000
WAITED_COUNT: Final = 8_000
"""For eight workers that wait; one gets an eighth of them."""
PARTITIONS: Final = 4
SIZE_BYTES: Final = 100
WAIT_MS: Final = 5
WORKERS: Final = 8
KEYS: Final = 10_000


def _rows() -> list[Row]:
    rows: list[Row] = []
    for side, engine in ENGINES.items():
        rows += [
            Row(
                f"`Consumer`, one worker, {engine}",
                "messages/s",
                f"{side}_ours.per_s",
                f"{side}_bare.per_s",
                "bare poll loop",
                at_least=0.8,
            ),
            Row(
                f"`Consumer`, eight workers, handlers that wait 5 ms, {engine}",
                "messages/s",
                f"{side}_eight.per_s",
                f"{side}_one.per_s",
                "one worker",
                at_least=7.0,
            ),
            Row(
                f"`Consumer`, eight coroutines that wait 5 ms, {engine}",
                "messages/s",
                f"{side}_eight_coroutines.per_s",
                f"{side}_one.per_s",
                "one worker",
            ),
        ]
    return rows


class ClientConsumer(Measure):
    """One process, four partitions, messages of 100 B with keys, read from the beginning by a new group each time."""

    name = "clients-consumer"
    title = "Clients: handling"
    rows = _rows()
    shares_brokers = True

    def run(self, bench: Bench) -> MeasureResult:
        """Two topics on each broker: one to be read fast, a small one for handlers that wait."""
        with ExitStack() as stack:
            series = []
            for side, durability in SIDES:
                broker = bench.pair.ours if side == "ours" else bench.pair.kafka
                topic = stack.enter_context(bench.topic(broker, "clients", durability, PARTITIONS))
                count = _fill(broker, topic, bench.count(COUNT))
                fast = {"topic": topic, "count": count, "workers": 1, "order": "partition"}
                series.append(_series(f"{side}_bare", broker, "clients_consumer_bare", **fast))
                series.append(_series(f"{side}_ours", broker, "clients_consumer", **fast))
                many = min(max(int(WAITED_COUNT * bench.scale), 80), count)
                slow = {"topic": topic, "order": "key", "wait_ms": WAIT_MS}
                few = slow | {"workers": 1, "count": many // WORKERS}
                series.append(_series(f"{side}_one", broker, "clients_consumer", **few))
                slow |= {"workers": WORKERS, "count": many}
                series.append(_series(f"{side}_eight", broker, "clients_consumer", **slow))
                slow |= {"coroutines": True}
                series.append(_series(f"{side}_eight_coroutines", broker, "clients_consumer", **slow))
            return bench.alternate(self.name, series)


def _fill(broker: Broker, topic: str, count: int) -> int:
    spec = kafka_load(
        "bulk_produce",
        broker.bootstrap_servers,
        topic,
        partitions=PARTITIONS,
        size=SIZE_BYTES,
        count=count,
        keys=KEYS,
    )
    made = run_load(spec)
    # One more in each partition: what the load generator sends before its clock starts.
    return int(made["count"]) + PARTITIONS


def _series(key: str, broker: Broker, kind: str, **spec: Any) -> Series:
    whole = {"kind": kind, "bootstrap_servers": broker.bootstrap_servers, **spec}

    def once() -> Metrics:
        found = run_load(whole)
        # The clock starts with the first message.
        return {"per_s": (found["count"] - 1) / found["seconds"]}

    return Series(key, once, rate="per_s")
