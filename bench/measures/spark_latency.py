"""How long a record takes from the producer to a committed sink, and how long a killed pipeline takes to go on."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Final

from bench.driver import Bench, Measure, Series
from bench.measures.spark_source import PARTITIONS
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker
from bench.stats import percentile

RATE: Final = 500
"""Records sent in a second."""
SECONDS: Final = 30.0
SETTLE_SECONDS: Final = 10.0
"""Records of the first seconds find a session that is not warm."""
PATIENCE_SECONDS: Final = 180.0
INTERVAL: Final = "100ms"


class SparkLatency(Measure):
    """A pipeline that goes on, from a topic to a topic in transactions, read by a consumer of committed records."""

    name = "spark-latency"
    title = "Pipeline: from send to sink, and after a kill"
    shares_brokers = False
    rows = (
        Row("from send to a committed record of the sink, 500 records/s, p50", "ms", "run.p50_ms", below=400),
        Row("from send to a committed record of the sink, 500 records/s, p99", "ms", "run.p99_ms", below=900),
        Row("start of a pipeline to its first committed record", "s", "run.start_s"),
        Row("start after SIGKILL of all its processes to the next committed record", "s", "run.recovery_s"),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Each round: start, send at a steady rate, kill, start again."""
        with ExitStack() as stack:
            broker = bench.kafka("spark-latency")
            broker.start()
            stack.callback(broker.close)
            return bench.alternate(self.name, [Series("run", lambda: _round(bench, broker))])


class SparkStart(Measure):
    """The same few records into Parquet, by a pipeline and by plain Spark's `foreachBatch`, both as processes."""

    name = "spark-start"
    title = "Pipeline: start, and start after a kill"
    shares_brokers = False
    rows = tuple(
        Row(title, "s", f"ours.{key}", f"plain.{key}", against="Spark's foreachBatch", at_most=1.4)
        for title, key in (
            ("start to the first committed record in Parquet", "start_s"),
            ("start after SIGKILL to the next committed record in Parquet", "restart_s"),
        )
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Each side: start with a record waiting, kill, send one more, start again."""
        with ExitStack() as stack:
            broker = bench.kafka("spark-start")
            broker.start()
            stack.callback(broker.close)
            return bench.alternate(
                self.name,
                [
                    Series("ours", lambda: _starts(bench, broker, _ours)),
                    Series("plain", lambda: _starts(bench, broker, _plain)),
                ],
            )


def _ours(home: Path, bootstrap: str, topic: str) -> list[str]:
    file = _write_definition(home, topic, {"parquet": {"path": str(home / "out")}})
    return ["holdfast.cli", "pipeline", "run", str(file), "--bootstrap-server", bootstrap]


def _plain(home: Path, bootstrap: str, topic: str) -> list[str]:
    return ["bench.load.plain_follow", str(home), bootstrap, topic, "100 milliseconds"]


def _starts(bench: Bench, broker: Broker, command: Callable[[Path, str, str], list[str]]) -> Metrics:
    home = bench.fresh_directory("start")
    found: list[float] = []
    with bench.topic(broker, "in", "page cache", PARTITIONS) as topic:
        link = Link(broker.bootstrap_servers, topic, topic)
        for _ in range(2):
            link.send()
            before = _committed(home)
            with _process(home / "run.log", command(home, broker.bootstrap_servers, topic)) as process:
                begun = time.monotonic()
                while _committed(home) == before:
                    if process.poll() is not None or time.monotonic() - begun > PATIENCE_SECONDS:
                        raise RuntimeError(f"nothing was committed; see {home / 'run.log'}")
                    time.sleep(0.01)
                found.append(time.monotonic() - begun)
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    return {"start_s": found[0], "restart_s": found[1]}


def _committed(home: Path) -> int:
    """Files that readers of the table see."""
    return sum(1 for pattern in ("*.parquet", "batch=*/*.parquet") for _ in (home / "out").glob(pattern))


def _round(bench: Bench, broker: Broker) -> Metrics:
    seconds = max(3.0, SECONDS * min(bench.scale, 1.0))
    with (
        bench.topic(broker, "in", "page cache", PARTITIONS) as source,
        bench.topic(broker, "out", "page cache", 1) as sink,
    ):
        definition = _write_definition(bench.fresh_directory("latency"), source, {"kafka": {"topic": sink}})
        link = Link(broker.bootstrap_servers, source, sink)
        link.send()
        with _pipeline(definition, broker) as process:
            begun = time.monotonic()
            link.await_one(process)
            start_s = time.monotonic() - begun
            delays_ms = link.steady(seconds, process)
            # Something is under way when it is killed.
            link.send()
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        link.send()
        with _pipeline(definition, broker) as process:
            begun = time.monotonic()
            link.await_one(process)
            recovery_s = time.monotonic() - begun
    return {
        "p50_ms": percentile(delays_ms, 0.5),
        "p99_ms": percentile(delays_ms, 0.99),
        "start_s": start_s,
        "recovery_s": recovery_s,
    }


def _write_definition(directory: Path, source: str, sink: dict[str, dict[str, str]]) -> Path:
    definition = {
        "pipeline": source,  # no other round has had it, or the home would be taken for lost
        "source": {"topics": [source], "value": {"format": "json", "fields": {"sent_ns": "long"}}},
        "steps": [{"expect": {"that": "sent_ns > 0", "name": "sent"}}],
        "sinks": [sink],
        "trigger": INTERVAL,
    }
    file = directory / "latency.yaml"
    file.write_text(json.dumps(definition, indent=1))
    return file


@contextmanager
def _pipeline(file: Path, broker: Broker) -> Iterator[subprocess.Popen[bytes]]:
    where = ["--bootstrap-server", broker.bootstrap_servers, "--output", "json"]
    command = ["holdfast.cli", "pipeline", "run", str(file), *where]
    with _process(file.parent / "run.log", command) as process:
        yield process


@contextmanager
def _process(told_to: Path, command: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """A module that is run, in a process group of its own."""
    log = told_to.open("ab")
    process = subprocess.Popen(
        [sys.executable, "-m", *command],
        stdout=log,
        stderr=log,
        start_new_session=True,
    )
    try:
        yield process
    finally:
        log.close()
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


class Link:
    """Sends records that hold the time, and hears what comes out committed."""

    def __init__(self, bootstrap: str, source: str, sink: str) -> None:
        from confluent_kafka import Consumer, Producer, TopicPartition

        self._producer = Producer({"bootstrap.servers": bootstrap, "linger.ms": 1, "acks": "all"})
        self._consumer = Consumer(
            {
                "bootstrap.servers": bootstrap,
                "group.id": "bench-latency",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "fetch.wait.max.ms": 5,
            }
        )
        self._consumer.assign([TopicPartition(sink, 0, 0)])
        self._source = source
        self._sent = 0

    def send(self) -> None:
        self._produce()
        self._producer.flush(30)

    def _produce(self) -> None:
        self._producer.produce(
            self._source, b'{"sent_ns":%d}' % time.time_ns(), partition=self._sent % PARTITIONS
        )
        self._sent += 1

    def await_one(self, process: subprocess.Popen[bytes]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not self._heard(0.05):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError("the pipeline gave nothing; see run.log beside its definition")

    def steady(self, seconds: float, process: subprocess.Popen[bytes]) -> list[int]:
        """Send at the rate for so long; the delays, in whole milliseconds, of what was sent after it had settled."""
        begun = time.monotonic()
        settled_ns = time.time_ns() + int(min(SETTLE_SECONDS, seconds / 3) * 1e9)
        wanted, heard = self._sent, []
        while (passed := time.monotonic() - begun) < seconds:
            while self._sent - wanted < passed * RATE:
                self._produce()
            self._producer.poll(0)
            heard += self._heard(0.002)
        self._producer.flush(30)
        wanted = self._sent - wanted
        deadline = time.monotonic() + PATIENCE_SECONDS
        while len(heard) < wanted:
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{len(heard)} of {wanted} records came out; see run.log")
            heard += self._heard(0.05)
        return sorted(delay for sent_ns, delay in heard if sent_ns >= settled_ns)

    def _heard(self, seconds: float) -> list[tuple[int, int]]:
        messages = self._consumer.consume(1_000, seconds)
        now = time.time_ns()
        found = []
        for message in messages:
            if message.error() is None:
                sent_ns = json.loads(message.value() or b"{}")["sent_ns"]
                found.append((sent_ns, (now - sent_ns) // 1_000_000))
        return found
