"""`python -m bench.fixtures`: what a test waits for and what memory it takes, ours and Apache Kafka's, alternating.

A broker is ready when it answers a Metadata request. Processor time is that of everything started for it until then:
on a busy machine it says more than the time by the clock. Memory is looked at half a second after that: what is
resident, and how much of it is the broker's own share where others use the same pages (PSS).
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple, TypeAlias

from holdfast.testing.apache import SHORT_LIVED_JVM, ApacheKafka, broker_answers
from holdfast.testing.broker import BrokerProcess
from holdfast.testing.kafka_fixtures import HEAP_OPTIONS
from holdfast.testing.prepared import prepared

ROUNDS: Final = 5
SETTLED_SECONDS: Final = 0.5
TICKS_PER_SECOND: Final = os.sysconf("SC_CLK_TCK")
RECORDS: Final = 1000


class Figures(NamedTuple):
    seconds: float
    processor_seconds: float
    resident_mb: float
    share_mb: float


Start: TypeAlias = Callable[[Path], Iterator[BrokerProcess | ApacheKafka]]


def main() -> int:
    with tempfile.TemporaryDirectory(prefix="holdfast-bench-") as name:
        root = Path(name)
        ways = dict(_ways(root))
        measured: dict[str, list[Figures]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for at, (way, start) in enumerate(ways.items()):
                figures = measure(start, root / f"{number}-{at}")
                if number:  # the first of each fills caches
                    measured[way].append(figures)
    print("| a broker | ready after | processor time | resident | its share |\n|---|---|---|---|---|")
    for way, runs in measured.items():
        median = Figures(*(statistics.median(each) for each in zip(*runs, strict=True)))
        times = f"{median.seconds * 1000:,.0f} ms | {median.processor_seconds * 1000:,.0f} ms"
        print(f"| {way} | {times} | {median.resident_mb:.0f} MB | {median.share_mb:.0f} MB |")
    print(f"\nMedians of {ROUNDS}; load average at the end {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores.")
    return 0


def measure(start: Start, directory: Path) -> Figures:
    used = _used_by_children()
    begun = time.monotonic()
    with contextmanager(start)(directory) as broker:
        host, _, port = broker.bootstrap_servers.rpartition(":")
        while not broker_answers(host, int(port)):
            pass
        seconds = time.monotonic() - begun
        processor = _used_by_children() - used + _used_by(broker.pid)
        time.sleep(SETTLED_SECONDS)
        return Figures(seconds, processor, *_memory_mb(broker.pid))


def _ways(root: Path) -> Iterator[tuple[str, Start]]:
    made = prepared(_fill, root / "prepared")

    def cold(directory: Path) -> Iterator[BrokerProcess]:
        with BrokerProcess(directory) as broker:
            yield broker

    def warm(directory: Path) -> Iterator[BrokerProcess]:
        with BrokerProcess(directory, faults=True, warm=True) as broker:
            yield broker

    def copied(directory: Path) -> Iterator[BrokerProcess]:
        with made.broker(directory) as broker:
            yield broker

    def kafka(directory: Path) -> Iterator[ApacheKafka]:
        with ApacheKafka(
            directory=directory, heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
        ) as broker:
            yield broker

    with ApacheKafka(
        directory=root / "kafka", heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
    ) as broker:
        _fill(broker)
        broker.stop()

    def kafka_again(_: Path) -> Iterator[ApacheKafka]:
        with ApacheKafka(
            directory=root / "kafka", heap_options=HEAP_OPTIONS, jvm_options=SHORT_LIVED_JVM
        ) as broker:
            yield broker
            broker.stop()  # one that was killed has to wait until its last session is over

    yield "`holdfast_broker`, empty", warm
    yield f"`holdfast_broker`, prepared with {RECORDS:,} records", copied
    yield "`holdfast serve` from the start of Python", cold
    yield "Apache Kafka 4.3.1, directory formatted first", kafka
    yield f"Apache Kafka 4.3.1, on a directory with {RECORDS:,} records", kafka_again


def _fill(broker: BrokerProcess | ApacheKafka) -> None:
    broker.create_topic("orders", partitions=3)
    broker.produce("orders", *(b"%d" % number for number in range(RECORDS)))


def _used_by_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _used_by(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def _memory_mb(pid: int) -> tuple[float, float]:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text(encoding="ascii").splitlines()[1:]
    kilobytes = {line.split()[0]: int(line.split()[1]) for line in lines}
    return kilobytes["Rss:"] * 1024 / 1e6, kilobytes["Pss:"] * 1024 / 1e6


if __name__ == "__main__":
    sys.exit(main())
