"""What metrics cost: processor time of a produce request, counted and not; a scrape of a large broker."""

from __future__ import annotations

import sys
import time
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from confluent_kafka import Consumer, TopicPartition

from bench import topics
from bench.driver import Bench, Measure, Series
from bench.load import kafka_load, run_load
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Child, Durability, HoldfastBroker
from holdfast.testing.processes import free_ports

COUNT: Final = 40_000
CLIENTS: Final = 4
RECORD_BYTES: Final = 100
TOPICS: Final = 10
PARTITIONS: Final = 200
GROUPS: Final = 200
SCRAPES: Final = 10
MODES: Final[tuple[tuple[str, Durability], ...]] = (("page_cache", "page cache"), ("flushed", "flushed"))
QUIET: Final = {"holdfast.busy.poll.us": "0"}
"""Looking for requests before sleeping is processor time that no request is charged with."""


class Uncounted(HoldfastBroker):
    """The same with nothing counted."""

    label = "holdfast, uncounted"

    def launch(self) -> None:
        """See `bench.uncounted`."""
        command = [sys.executable, "-m", "bench.uncounted", "serve", "--data-dir", str(self.data_dir)]
        command += ["--listen", self.bootstrap_servers]
        for name, value in self.properties.items():
            command += ["--override", f"{name}={value}"]
        self._child = Child(command, self.directory / "holdfast.log")


class Observing(Measure):
    """Four bare sockets, a record of 100 B in each request, acks=all; scraped each round."""

    name = "observing"
    title = "Metrics"
    shares_brokers = False
    rows = (
        *(
            Row(
                f"broker CPU per produce request, {durability}: metrics on against off",
                "µs",
                f"on_{mode}.cpu_us",
                f"off_{mode}.cpu_us",
                against="uncounted",
                at_most=1.02,
            )
            for mode, durability in MODES
        ),
        Row("scrape of 2,000 partitions and 200 groups: broker CPU", "ms", "scrape.cpu_ms", below=50.0),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Both brokers side by side, and one with many partitions."""
        with ExitStack() as stack:
            (port,) = free_ports(1)
            shown = {**QUIET, "holdfast.metrics.listener": str(port)}
            on = HoldfastBroker(shown, directory=bench.fresh_directory("counted"))
            off = Uncounted(QUIET, directory=bench.fresh_directory("uncounted"))
            series = []
            for broker in (on, off):
                stack.callback(broker.close)
                broker.start()
            for mode, durability in MODES:
                for key, broker in (("on", on), ("off", off)):
                    topic = stack.enter_context(bench.topic(broker, "observing", durability))
                    series.append(_producing(bench, f"{key}_{mode}", broker, topic))
            (port,) = free_ports(1)
            large = HoldfastBroker(
                {**QUIET, "holdfast.metrics.listener": str(port)}, directory=bench.fresh_directory("large")
            )
            stack.callback(large.close)
            large.start()
            _fill(large)
            series.append(_scraping(large, port))
            return bench.alternate(self.name, series)


def _producing(bench: Bench, key: str, broker: HoldfastBroker, topic: str) -> Series:
    spec = kafka_load("counted_produce", broker.bootstrap_servers, topic, size=RECORD_BYTES, clients=CLIENTS)

    def once() -> Metrics:
        before = run_ns(broker.pid)
        made = run_load({**spec, "count": bench.count(COUNT)})
        spent_ns = run_ns(broker.pid) - before
        return {
            "cpu_us": spent_ns / made["count"] / 1000,
            "requests_per_s": made["count"] / made["seconds"],
        }

    return Series(key, once, rate="requests_per_s")


def _fill(broker: HoldfastBroker) -> None:
    names = [f"wide-{number}" for number in range(TOPICS)]
    for name in names:
        topics.create(broker, name, PARTITIONS, {})
    for number in range(GROUPS):
        consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": f"group-{number}"})
        place = TopicPartition(names[number % TOPICS], number % PARTITIONS, 0)
        consumer.commit(offsets=[place], asynchronous=False)
        consumer.close()


def _scraping(broker: HoldfastBroker, port: int) -> Series:
    def once() -> Metrics:
        before = run_ns(broker.pid)
        began = time.monotonic()
        for _ in range(SCRAPES):
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
                answer.read()
        seconds = time.monotonic() - began
        return {
            "cpu_ms": (run_ns(broker.pid) - before) / SCRAPES / 1e6,
            "ms": seconds / SCRAPES * 1000,
        }

    return Series("scrape", once)


def run_ns(pid: int) -> int:
    """Processor time of a process's threads in nanoseconds: the kernel's ticks are too coarse."""
    return sum(
        int((task / "schedstat").read_text(encoding="ascii").split()[0])
        for task in Path(f"/proc/{pid}/task").iterdir()
    )
