"""What a proof costs: the audit of a pipeline's Parquet sink and dead letters, in a process of its own.

Time is from the process's first import to the verdict, memory the most that was resident. The broker is ours.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any, Final

from bench.driver import Bench, Measure, Series
from bench.load import LoadFailed, kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

SMALL: Final = 2_000_000
LARGE: Final = 20_000_000
NEW: Final = 200_000
PARTITIONS: Final = 4
VALUE_BYTES: Final = 60
AT_ONCE: Final = 2_000_000
"""Orders that one process sends and writes."""


class Audit(Measure):
    """Three pipelines that never change while they are audited, and one that has grown since its proof."""

    name = "audit"
    title = "Audit"
    shares_brokers = False
    rows = (
        Row("audit of 2 million records", "s", "small.seconds", below=15.0),
        Row("its peak memory", "MB", "small.peak_mb", below=1000.0),
        Row("seconds per million records, 20 million; 2 million", "s", "large.per_million_s", "small.per_million_s",
            against="2 million", at_most=1.1),
        Row("peak memory, 20 million records", "MB", "large.peak_mb"),
        Row("200,000 new records behind 20 million that are proven; 200,000 alone", "s", "more.seconds", "new.seconds",
            against="200,000 alone", at_most=1.5),
    )  # fmt: skip

    def run(self, bench: Bench) -> MeasureResult:
        """Topics and sinks are made once."""
        with ExitStack() as stack:
            broker = bench.ours("audit")
            broker.start()
            stack.callback(broker.close)
            ground = Ground(bench, broker, stack)
            small, large, new = (
                ground.fill(name, bench.count(size))
                for name, size in (("small", SMALL), ("large", LARGE), ("new", NEW))
            )
            more = ground.grow(large, bench.count(LARGE), bench.count(NEW))
            return bench.alternate(
                self.name,
                [
                    Series("small", lambda: _audit(small, bench.count(SMALL))),
                    Series("new", lambda: _audit(new, bench.count(NEW))),
                    Series("more", lambda: _audit(more, bench.count(NEW))),
                    Series("large", lambda: _audit(large, bench.count(LARGE) + bench.count(NEW))),
                ],
            )


class Ground:
    """Topics, and what a pipeline wrote of them."""

    def __init__(self, bench: Bench, broker: Broker, stack: ExitStack) -> None:
        self._bench = bench
        self._broker = broker
        self._stack = stack

    def fill(self, name: str, count: int) -> dict[str, Any]:
        topic = self._stack.enter_context(self._bench.topic(self._broker, name, "page cache", PARTITIONS))
        self._bench.say(f"  {count:,} orders into {topic}")
        spec = kafka_load(
            "audit_fill",
            self._broker.bootstrap_servers,
            topic,
            partitions=PARTITIONS,
            size=VALUE_BYTES,
            directory=str(self._bench.fresh_directory(f"audit-{name}")),
        )
        ends: dict[str, int] = {}
        for first in range(0, count, AT_ONCE):
            ends = run_load({**spec, "first": first, "count": min(AT_ONCE, count - first)})["ends"]
        return {**spec, "kind": "audit", "ends": ends}

    def grow(self, filled: dict[str, Any], first: int, count: int) -> dict[str, Any]:
        """More orders, and from where on they are new."""
        run_load({**filled, "kind": "audit_fill", "first": first, "count": count})
        return {**filled, "since": filled["ends"]}


def _audit(spec: dict[str, Any], count: int) -> Metrics:
    found = run_load(spec)
    if found["count"] != count:
        raise LoadFailed(f"{found['count']} records were proven where {count} are")
    return {
        "seconds": found["seconds"],
        "per_million_s": found["seconds"] / count * 1_000_000,
        "cpu_s": found["cpu_seconds"],
        "peak_mb": found["peak_mb"],
    }
