"""10,000 members that do nothing but say they are alive: the broker's processor time per heartbeat."""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import SETTLE_S, RunningLoad, kafka_load
from bench.machine import cpu_seconds
from bench.measures.groups import PROTOCOLS
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

MEMBERS: Final = 10_000
GROUPS: Final = 100
HEARTBEAT_INTERVAL_S: Final = 5.0
"""The consumer protocol's default, for both protocols, so that they compare."""
WINDOW_S: Final = 5.0

PROPERTIES: Final = {
    # All members of a group ask within it, so that one rebalance takes them all.
    "group.initial.rebalance.delay.ms": "10000",
    "group.consumer.max.session.timeout.ms": "600000",
    "group.consumer.session.timeout.ms": "600000",
}


class Heartbeats(Measure):
    """A connection per member, a hundred members per group, heartbeats evenly spread."""

    name = "heartbeats"
    title = "10,000 members of groups"
    shares_brokers = False
    rows = tuple(
        Row(
            f"10,000 members, broker CPU per heartbeat, {protocol} protocol",
            "µs",
            f"ours_{protocol}.cpu_us",
            f"kafka_{protocol}.cpu_us",
            at_most=1.0,
        )
        for protocol in PROTOCOLS
    )

    def run(self, bench: Bench) -> MeasureResult:
        """One protocol after the other: the members of both at once need more connections than many systems allow."""
        results = [self._of_protocol(bench, protocol) for protocol in PROTOCOLS]
        whole = results[0]
        for other in results[1:]:
            whole.notes += other.notes
            for measured, more in zip(whole.rounds, other.rounds, strict=True):
                measured.update(more)
        return whole

    def _of_protocol(self, bench: Bench, protocol: str) -> MeasureResult:
        """Members join once and stay for all rounds."""
        with ExitStack() as stack:
            series = []
            for side in ("ours", "kafka"):
                start = bench.ours if side == "ours" else bench.kafka
                broker = start(f"heartbeats-{protocol}-{side}", PROPERTIES)
                stack.callback(broker.close)
                broker.start()
                topic = bench.topic_name(self.name)
                topics.create(broker, topic, 1, {})
                load = _members(bench, broker, topic, protocol)
                stack.callback(load.kill)
                load.wait_until_ready()
                bench.say(f"{self.name}: {protocol} members of {broker.label} have joined")
                series.append(_series(bench, f"{side}_{protocol}", broker, load))
            return bench.alternate(self.name, series)


def _members(bench: Bench, broker: Broker, topic: str, protocol: str) -> RunningLoad:
    groups = max(int(GROUPS * bench.scale), 1)
    spec = kafka_load("group_heartbeats", broker.bootstrap_servers, topic, size=0, protocol=protocol)
    members = groups * (MEMBERS // GROUPS)
    spec |= {"groups": groups, "members": members, "heartbeats_per_s": members / HEARTBEAT_INTERVAL_S}
    return RunningLoad(spec)


def _series(bench: Bench, key: str, broker: Broker, load: RunningLoad) -> Series:
    def once() -> Metrics:
        seconds = max(bench.seconds(WINDOW_S), 2.0)
        begin_at = time.monotonic() + SETTLE_S
        load.set_window(begin_at=begin_at, end_at=begin_at + seconds)
        time.sleep(begin_at - time.monotonic())
        before = cpu_seconds(broker.pid)
        time.sleep(begin_at + seconds - time.monotonic())
        spent = cpu_seconds(broker.pid) - before
        found = load.answer()
        return {"cpu_us": spent / found["heartbeats"] * 1e6, "per_s": found["heartbeats"] / seconds}

    return Series(key, once, rate="cpu_us")
