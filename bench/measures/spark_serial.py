"""What of a batch runs in the driver, however many workers there are: by processor time, of a batch of a million.

Tasks run in executors of their own, of a standalone master with three workers of one core each: all that an executor
and its Python spend is the tasks', and what is left in the driver is its own.
"""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from bench.driver import Bench, Measure, Series
from bench.measures.spark_pipeline import Stand
from bench.measures.spark_source import PARTITIONS
from bench.model import MeasureResult, Metrics, Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from tests.support.spark_cluster import SparkCluster

Spent: TypeAlias = dict[tuple[str, int], float]
RECORDS: Final = 1_000_000
WORKERS: Final = 3
"""Of one core each."""
SHARE_MAX: Final = 18.0
WRITERS: Final = 2
KINDS: Final = {
    "parquet": "Parquet",
    "delta": "Delta",
    "postgres": "PostgreSQL",
    "kafka": "Kafka, one writer",
    "writers": f"Kafka, {WRITERS} writers",
    "letters": "Kafka, dead letters",
}
MACHINERY: Final = ("GC Thread", "G1 ", "C1 Compiler", "C2 Compiler", "VM ", "Common-Cleaner")
"""Of a JVM's own threads: they work for whatever runs in it, and count for neither driver nor tasks."""


class SparkSerial(Measure):
    """Processor time of the driver, Python and JVM, beside that of the executors and their Python."""

    name = "spark-serial"
    title = "What of a batch stays in the driver"
    shares_brokers = False
    rows = tuple(
        row
        for kind, name in KINDS.items()
        for row in (
            Row(f"batch of a million to {name}: processor time in the driver", "s", f"{kind}.driver_s"),
            Row(
                f"batch of a million to {name}: the driver's share of all",
                "%",
                f"{kind}.share_percent",
                below=SHARE_MAX,
            ),
        )
    )

    def run(self, bench: Bench) -> MeasureResult:
        """One batch into fresh sinks; the processor time is from its start to its end."""
        from tests.support.spark_cluster import SparkCluster

        from holdfast.pipeline.java import find_java
        from holdfast.testing.postgres import PostgresServer

        with ExitStack() as stack:
            directory = bench.fresh_directory("spark-cluster")
            cluster = stack.enter_context(SparkCluster(directory, workers=WORKERS, java_home=find_java()))
            stand = Stand(bench, stack, cluster.url)
            url = stack.enter_context(PostgresServer()).url
            topic = stand.topic("serial", bench.count(RECORDS))
            return bench.alternate(
                self.name,
                [Series(kind, partial(once, bench, stand, cluster, topic, kind, url)) for kind in KINDS],
            )


def once(bench: Bench, stand: Stand, cluster: SparkCluster, topic: str, kind: str, url: str) -> Metrics:
    with bench.topic(stand.broker, "serial-out", "page cache", PARTITIONS) as out:
        home = stand.fresh()
        table = f"t{home.name.replace('-', '')}"
        sinks: dict[str, tuple[str, dict[str, Any]]] = {
            "parquet": ("parquet", {"path": str(home / "out")}),
            "delta": ("delta", {"path": str(home / "out")}),
            "postgres": ("postgres", {"url": url, "table": table, "mode": "upsert", "key": ["id"]}),
            "kafka": ("kafka", {"topic": out}),
            "writers": ("kafka", {"topic": out, "writers": WRITERS}),
            "letters": ("parquet", {"path": str(home / "out")}),
        }
        pipeline = stand.pipeline(topic, home)
        if kind == "letters":
            pipeline = pipeline.expect("amount < 0", name="none")
        # Looking around takes some 15 ms that are no batch's: its own time is read last here, and first behind.
        before = processor_seconds(stand.spark, cluster) | own_seconds()
        stand.run(pipeline.write(sinks[kind][0], **sinks[kind][1]))
        driver, tasks = spent_since(before, processor_seconds(stand.spark, cluster))
        return {"driver_s": driver, "share_percent": 100 * driver / (driver + tasks)}


def spent_since(before: Spent, now: Spent) -> tuple[float, float]:
    """Driver and tasks; of a worker that has ended since, nothing is known."""
    spent = {"driver": 0.0, "tasks": 0.0}
    for (whose, number), seconds in now.items():
        spent[whose] += max(0.0, seconds - before.get((whose, number), 0.0))
    return spent["driver"], spent["tasks"]


def processor_seconds(spark: SparkSession, cluster: SparkCluster) -> Spent:
    """Of every thread of the JVMs and every process, by whom it works for."""
    spent = own_seconds()
    spent |= _threads("driver", int(spark.sparkContext._gateway.proc.pid))  # type: ignore[union-attr]
    executors = {process for worker in cluster.workers for process in worker.executors()}
    for process in executors:
        spent |= _threads("tasks", process)
    stats = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):  # it has ended
                stats[int(directory.name)] = _stat(directory)[1]
    for process, fields in stats.items():
        if executors.intersection(_line(process, stats)[1:]):
            spent["tasks", process] = _spent(fields)
    return spent


def own_seconds() -> Spent:
    """Of this process, the driver's Python."""
    return {("driver", os.getpid()): _spent(_stat(Path("/proc/self"))[1])}


def _threads(whose: str, jvm: int) -> Spent:
    """Of a JVM, without its machinery."""
    spent: Spent = {}
    for thread in Path(f"/proc/{jvm}/task").iterdir():
        with suppress(OSError):  # it has ended
            name, fields = _stat(thread)
            if not name.startswith(MACHINERY):
                spent[whose, int(thread.name)] = _spent(fields)
    return spent


def _line(process: int, stats: dict[int, list[str]]) -> list[int]:
    """The process and those above it."""
    found = [process]
    while found[-1] in stats:
        found.append(int(stats[found[-1]][1]))
    return found


def _spent(fields: list[str]) -> float:
    """Seconds, of a process or a thread."""
    return sum(map(int, fields[11:13])) / os.sysconf("SC_CLK_TCK")


def _stat(directory: Path) -> tuple[str, list[str]]:
    """The name, and the fields behind it."""
    text = (directory / "stat").read_text()
    return text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
