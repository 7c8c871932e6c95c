"""Transactions per second: one producer, ten messages each, one transaction after the other."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load
from bench.measures.latency import MODES
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability

MESSAGES: Final = 10
RECORD_BYTES: Final = 100
WINDOW_S: Final = 3.0
STATE_TOPIC: Final = "__transaction_state"


class Transactions(Measure):
    """With confluent-kafka. Flushed means messages, markers and the coordinator's own records alike."""

    name = "transactions"
    title = "Transactions"
    shares_brokers = True
    rows = (
        *(
            Row(
                f"transactions of ten messages, {durability} on both sides",
                "transactions/s",
                f"ours_{mode}.requests_per_s",
                f"kafka_{mode}.requests_per_s",
                at_least=1.0,
            )
            for mode, durability in MODES
        ),
        Row(
            "transactions of ten messages, ours flushed, Kafka's not",
            "transactions/s",
            "ours_flushed.requests_per_s",
            "kafka_page_cache.requests_per_s",
        ),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Both durabilities on both brokers."""
        with ExitStack() as stack:
            series = []
            for side, broker in (("ours", bench.pair.ours), ("kafka", bench.pair.kafka)):
                # The first transaction makes the coordinator's topic, whose settings each run changes.
                topic = stack.enter_context(bench.topic(broker, "transactions", "page cache"))
                bench.closed_loop(_spec(broker, topic), processes=1, full_seconds=0)
                for mode, durability in MODES:
                    topic = stack.enter_context(bench.topic(broker, "transactions", durability))
                    series.append(_series(bench, f"{side}_{mode}", broker, topic, durability))
            return bench.alternate(self.name, series)


def _spec(broker: Broker, topic: str) -> dict[str, object]:
    servers = broker.bootstrap_servers
    return kafka_load("transactions", servers, topic, size=RECORD_BYTES, messages=MESSAGES, clients=1)


def _series(bench: Bench, key: str, broker: Broker, topic: str, durability: Durability) -> Series:
    def once() -> Metrics:
        topics.alter(broker, STATE_TOPIC, _settings(broker, durability))
        return bench.closed_loop(_spec(broker, topic), processes=1, full_seconds=WINDOW_S)

    return Series(key, once, rate="requests_per_s")


def _settings(broker: Broker, durability: Durability) -> dict[str, str]:
    """The settings of a durability, said so that they replace those of the other one."""
    settings = broker.topic_settings(durability)
    return settings or dict.fromkeys(broker.topic_settings("flushed"), str(2**63 - 1))
