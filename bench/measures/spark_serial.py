"""What of a batch runs in the driver, however many workers there are: by processor time, of a batch of a million."""

from __future__ import annotations

import os
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from bench.driver import Bench, Measure, Series
from bench.measures.spark_pipeline import Stand
from bench.measures.spark_source import PARTITIONS
from bench.model import MeasureResult, Metrics, Row

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

RECORDS: Final = 1_000_000
WRITERS: Final = 2
KINDS: Final = {
    "parquet": "Parquet",
    "delta": "Delta",
    "postgres": "PostgreSQL",
    "kafka": "Kafka, one writer",
    "writers": f"Kafka, {WRITERS} writers",
    "letters": "Kafka, dead letters",
}
TASKS: Final = "Executor task l"
"""Begins the names of the JVM's threads that run tasks, as far as Linux keeps them."""
MACHINERY: Final = ("GC Thread", "G1 ", "C1 Compiler", "C2 Compiler", "VM ", "Common-Cleaner")
"""Of the JVM's own: they work for driver and tasks alike, and count for neither."""


class SparkSerial(Measure):
    """Processor time of the driver's Python and of the JVM's threads that run no task, beside that of the tasks."""

    name = "spark-serial"
    title = "What of a batch stays in the driver"
    shares_brokers = False
    rows = tuple(
        row
        for kind, name in KINDS.items()
        for row in (
            Row(f"batch of a million to {name}: processor time in the driver", "s", f"{kind}.driver_s"),
            Row(f"batch of a million to {name}: the driver's share of all", "", f"{kind}.share"),
        )
    )

    def run(self, bench: Bench) -> MeasureResult:
        """One batch into fresh sinks; the processor time is from its start to its end."""
        from holdfast.testing.postgres import PostgresServer

        with ExitStack() as stack:
            stand = Stand(bench, stack)
            url = stack.enter_context(PostgresServer()).url
            topic = stand.topic("serial", bench.count(RECORDS))
            return bench.alternate(
                self.name,
                [Series(kind, lambda kind=kind: once(bench, stand, topic, kind, url)) for kind in KINDS],
            )


def once(bench: Bench, stand: Stand, topic: str, kind: str, url: str) -> Metrics:
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
        before = processor_seconds(stand.spark)
        stand.run(pipeline.write(sinks[kind][0], **sinks[kind][1]))
        after = processor_seconds(stand.spark)
        driver, tasks = (after[whose] - before[whose] for whose in ("driver", "tasks"))
        return {"driver_s": driver, "share": driver / (driver + tasks)}


def processor_seconds(spark: SparkSession) -> dict[str, float]:
    """By whom it was spent for: driver, tasks or machinery."""
    jvm = int(spark.sparkContext._gateway.proc.pid)  # type: ignore[union-attr]
    spent = {"driver": _spent(_stat(Path("/proc/self"))[1]), "tasks": 0.0, "machinery": 0.0}
    for thread in Path(f"/proc/{jvm}/task").iterdir():
        try:
            name, fields = _stat(thread)
        except OSError:
            continue  # it has ended
        is_machinery = name.startswith(MACHINERY)
        whose = "machinery" if is_machinery else "tasks" if name.startswith(TASKS) else "driver"
        spent[whose] += _spent(fields)
    parents = {}
    for directory in Path("/proc").iterdir():
        if directory.name.isdigit():
            with suppress(OSError):
                parents[int(directory.name)] = _stat(directory)[1]
    for process, fields in parents.items():
        if jvm in _line(process, parents)[1:]:
            spent["tasks"] += _spent(fields, with_ended=True)
    return spent


def _line(process: int, stats: dict[int, list[str]]) -> list[int]:
    """The process and those above it."""
    found = [process]
    while found[-1] in stats:
        found.append(int(stats[found[-1]][1]))
    return found


def _spent(fields: list[str], *, with_ended: bool = False) -> float:
    """Seconds of a process or thread; `with_ended`: and of its children that have ended."""
    return sum(map(int, fields[11 : 15 if with_ended else 13])) / os.sysconf("SC_CLK_TCK")


def _stat(directory: Path) -> tuple[str, list[str]]:
    """The name, and the fields behind it."""
    text = (directory / "stat").read_text()
    return text[text.index("(") + 1 : text.rindex(")")], text.rsplit(")", 1)[1].split()
