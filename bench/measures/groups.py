"""Groups: how soon a member that joins, and one that succeeds to a dead one, has its first message."""

from __future__ import annotations

from contextlib import ExitStack
from typing import ClassVar, Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker, Durability
from bench.stats import percentile

PROTOCOLS: Final = ("classic", "consumer")
JOINS: Final = 50
CLIENT_JOINS: Final = 10
SUCCESSIONS: Final = 5
SESSION_TIMEOUT_MS: Final = 1_500
"""Longer than `group.consumer.assignment.interval.ms`: the last assignment must not delay the next."""
SIDES: Final[tuple[tuple[str, Durability], ...]] = (("ours", "flushed"), ("kafka", "page cache"))
"""Each broker with its own default."""

PROPERTIES: Final = {"group.initial.rebalance.delay.ms": "0"}
SHORT_SESSIONS: Final = PROPERTIES | {
    "group.min.session.timeout.ms": "500",
    "group.consumer.min.session.timeout.ms": "500",
    "group.consumer.session.timeout.ms": str(SESSION_TIMEOUT_MS),
    "group.consumer.min.heartbeat.interval.ms": "100",
    "group.consumer.heartbeat.interval.ms": "200",
}


class _GroupMeasure(Measure):
    """Brokers of its own, a topic with records, one kind of walk per protocol."""

    shares_brokers = False
    properties: ClassVar[dict[str, str]] = PROPERTIES
    kinds: ClassVar[dict[str, int]]
    """Generators with the walks each makes in a run."""

    def run(self, bench: Bench) -> MeasureResult:
        """Both protocols on both brokers."""
        with ExitStack() as stack:
            series = []
            for side, durability in SIDES:
                start = bench.ours if side == "ours" else bench.kafka
                broker = start(f"{self.name}-{side}", self.properties)
                stack.callback(broker.close)
                broker.start()
                topic = bench.topic_name(self.name)
                topics.create(broker, topic, 1, broker.topic_settings(durability))
                run_load(kafka_load("bulk_produce", broker.bootstrap_servers, topic, size=100, count=1))
                series += [
                    self._series(bench, side, broker, topic, kind, protocol)
                    for kind in self.kinds
                    for protocol in PROTOCOLS
                ]
            return bench.alternate(self.name, series)

    def _series(
        self, bench: Bench, side: str, broker: Broker, topic: str, kind: str, protocol: str
    ) -> Series:
        count = max(int(self.kinds[kind] * bench.scale), 1)
        spec = kafka_load(kind, broker.bootstrap_servers, topic, size=0, protocol=protocol, count=count)
        spec["session_timeout_ms"] = SESSION_TIMEOUT_MS

        def once() -> Metrics:
            seconds: list[float] = run_load(spec)["seconds"]
            return {"p50_ms": percentile(seconds, 0.5) * 1e3, "most_ms": max(seconds) * 1e3}

        return Series(f"{side}_{kind}_{protocol}", once, rate="p50_ms" if kind == "group_join" else None)


def _rows(what: str, kind: str, generator: str, target: float | None) -> list[Row]:
    return [
        Row(
            f"{what}, {protocol} protocol{generator}",
            "ms",
            f"ours_{kind}_{protocol}.p50_ms",
            f"kafka_{kind}_{protocol}.p50_ms",
            at_most=target,
        )
        for protocol in PROTOCOLS
    ]


class GroupJoin(_GroupMeasure):
    """A new group each time; positions and memberships are durable as each broker does it by default."""

    name = "group-join"
    title = "From joining a group to the first message"
    kinds: ClassVar[dict[str, int]] = {"group_join": JOINS, "group_client_join": CLIENT_JOINS}
    rows = (
        *_rows("join to first message", "group_join", ", bare sockets", 1.0),
        *_rows("join to first message", "group_client_join", ", confluent-kafka", 1.0),
    )


class GroupSuccession(_GroupMeasure):
    """Two members, one partition; its owner closes its connection and says nothing."""

    name = "group-succession"
    title = "From a member's death to its successor's first message"
    properties: ClassVar[dict[str, str]] = SHORT_SESSIONS
    kinds: ClassVar[dict[str, int]] = {"group_succeed": SUCCESSIONS}
    rows = tuple(
        _rows(
            "successor's first message, beyond the session time-out", "group_succeed", ", bare sockets", 1.0
        )
    )
