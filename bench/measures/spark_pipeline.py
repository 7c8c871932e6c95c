"""A pipeline against plain Spark doing the same work with its own connector and sinks, at weaker guarantees."""

from __future__ import annotations

import itertools
import shutil
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Final

from bench import spark as sparks
from bench.driver import Bench, Measure, Series
from bench.measures.spark_source import CONNECTOR, PARTITIONS
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker
from bench.stats import percentile

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.pipeline import Pipeline
    from holdfast.pipeline.engine.progress import BatchDone, Summary

FIELDS: Final = {
    "id": "long",
    "customer": "string",
    "amount": "double",
    "quantity": "int",
    "at": "timestamp",
    "note": "string",
}
SCHEMA: Final = ", ".join(f"{name} {kind}" for name, kind in FIELDS.items())
RECORDS: Final = 2_000_000
BATCH_RECORDS: Final = 1_000_000
POSTGRES_RECORDS: Final = 400_000
SMALL_BATCH: Final = 1_000
SMALL_BATCHES: Final = 12
MANY_PARTITIONS: Final = 200
MANY_SINKS: Final = 10
PHASES: Final = {
    "plan": "the plan, flushed",
    "stage": "reading, decoding, staging",
    "route": "rules and routes",
    "prepare": "files of both sinks, written aside and flushed",
    "commit": "commits of both sinks",
}
"""Of a batch, by the names that the engine's log has for them."""


class SparkPipeline(Measure):
    """Parsing, rules, routes, lineage, ledgers and flushed files on our side; parsing and a write on the other."""

    name = "spark-pipeline"
    title = "Pipeline"
    shares_brokers = False
    rows = (
        Row(
            "pipeline to Parquet with parsing, routes, ledger and lineage; plain Spark with parsing",
            "records/s",
            "ours_parquet.records_per_s",
            "plain_parquet.records_per_s",
            against=CONNECTOR,
            at_least=2.0,
        ),
        Row(
            "pipeline to Kafka, exactly once; Spark's Kafka sink, at least once",
            "records/s",
            "ours_kafka.records_per_s",
            "plain_kafka.records_per_s",
            against=CONNECTOR,
            at_least=0.85,
        ),
        *(
            Row(
                f"where a batch of a million to Parquet spends its time: {what}",
                "ms",
                f"ours_parquet.{phase}_ms",
            )
            for phase, what in PHASES.items()
        ),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """One Apache Kafka, one warm session, all four in turn."""
        with ExitStack() as stack:
            stand = Stand(bench, stack)
            records = bench.count(RECORDS)
            topic = stand.topic("orders", records)

            def series(key: str, work: Callable[[], float]) -> Series:
                return Series(key, lambda: {"records_per_s": records / work()}, rate="records_per_s")

            def with_phases() -> Metrics:
                seconds = stand.ours_parquet(topic)
                return {"records_per_s": records / seconds, **stand.phases_ms()}

            return bench.alternate(
                self.name,
                [
                    Series("ours_parquet", with_phases, rate="records_per_s"),
                    series("plain_parquet", lambda: stand.plain_parquet(topic)),
                    series("ours_kafka", lambda: stand.ours_kafka(topic)),
                    series("plain_kafka", lambda: stand.plain_kafka(topic)),
                ],
            )


class SparkBatches(Measure):
    """What a small batch costs, whatever is in it."""

    name = "spark-batches"
    title = "Cost of a batch"
    shares_brokers = False
    rows = (
        Row(
            "batch of 1,000 rows to Parquet and dead letters, beyond plain foreachBatch to Parquet",
            "ms",
            "small.beyond_ms",
            below=300,
        ),
        Row(
            "batch of 1,000 rows to Parquet and dead letters",
            "ms",
            "small.ours_ms",
            "small.plain_ms",
            against=CONNECTOR,
        ),
        Row("batch of 200 partitions with 5 rows each", "s", "many.batch_s", below=1.0),
        Row(
            f"batch of 1,000 rows to {MANY_SINKS} Parquet sinks; to one",
            "ms",
            "sinks.many_ms",
            "sinks.one_ms",
            against="one sink",
            at_most=1.5,
        ),
    )

    def run(self, bench: Bench) -> MeasureResult:
        """Twelve batches of each kind; the first two warm it up."""
        with ExitStack() as stack:
            stand = Stand(bench, stack)
            small = stand.topic("small", SMALL_BATCH * SMALL_BATCHES)
            many = stand.topic("many", MANY_PARTITIONS * 5 * SMALL_BATCHES, partitions=MANY_PARTITIONS)

            def small_batches() -> Metrics:
                ours = _settled(stand.ours_batches(small, SMALL_BATCH))
                plain = _settled(stand.plain_batches(small, SMALL_BATCH))
                return {"ours_ms": ours, "plain_ms": plain, "beyond_ms": ours - plain}

            def many_partitions() -> Metrics:
                return {"batch_s": _settled(stand.ours_batches(many, MANY_PARTITIONS * 5)) / 1000}

            def many_sinks() -> Metrics:
                one = _settled(stand.ours_batches(small, SMALL_BATCH))
                return {
                    "one_ms": one,
                    "many_ms": _settled(stand.ours_batches(small, SMALL_BATCH, MANY_SINKS)),
                }

            return bench.alternate(
                self.name,
                [
                    Series("small", small_batches),
                    Series("many", many_partitions),
                    Series("sinks", many_sinks),
                ],
            )


class SparkPostgres(Measure):
    """With a primary key, upserting, the server's fsync on."""

    name = "spark-postgres"
    title = "Pipeline to PostgreSQL"
    shares_brokers = False
    rows = (Row("pipeline to PostgreSQL with a primary key", "rows/s", "ours.rows_per_s", above=40_000),)

    def run(self, bench: Bench) -> MeasureResult:
        """A server of its own, a table that grows from round to round."""
        from holdfast.testing.postgres import PostgresServer

        with ExitStack() as stack:
            stand = Stand(bench, stack)
            server = stack.enter_context(PostgresServer())
            records = bench.count(POSTGRES_RECORDS)
            topic = stand.topic("postgres", records)

            def once() -> Metrics:
                return {"rows_per_s": records / stand.ours_postgres(topic, server.url)}

            return bench.alternate(self.name, [Series("ours", once, rate="rows_per_s")])


class SparkSlope(Measure):
    """Twice as many records take twice as long, and no more memory."""

    name = "spark-slope"
    title = "Pipeline, from one million records to eight"
    shares_brokers = False
    rows = (
        Row("seconds per million records, from 4 to 8 million; from 1 to 4", "s", "ours.late_s", "ours.early_s",
            against="the first part", at_most=1.1),
        Row("memory of driver and workers after 8 million; after 1 million", "MB", "ours.late_mb", "ours.early_mb",
            against="the first part", at_most=1.1),
    )  # fmt: skip

    def run(self, bench: Bench) -> MeasureResult:
        """Three topics of growing size, each into a fresh Parquet table."""
        with ExitStack() as stack:
            stand = Stand(bench, stack)
            million = bench.count(1_000_000)
            topics = {size: stand.topic(f"slope-{size}", size * million) for size in (1, 4, 8)}

            def once() -> Metrics:
                seconds, memory = {}, {}
                for size, topic in topics.items():
                    seconds[size] = stand.ours_parquet(topic)
                    memory[size] = tree_memory_mb()
                return {
                    "early_s": (seconds[4] - seconds[1]) / 3,
                    "late_s": (seconds[8] - seconds[4]) / 4,
                    "early_mb": memory[1],
                    "late_mb": memory[8],
                }

            return bench.alternate(self.name, [Series("ours", once)])


class Stand:
    """An Apache Kafka, a warm Spark session, and the jobs that are compared."""

    def __init__(self, bench: Bench, stack: ExitStack, master: str | None = None) -> None:
        self._bench = bench
        self._stack = stack
        self.broker: Broker = bench.kafka("spark-pipeline")
        self.broker.start()
        stack.callback(self.broker.close)
        home = bench.fresh_directory("spark-home")
        self.spark: SparkSession = stack.enter_context(sparks.session(home, master))
        self._runs = 0
        self._batches: list[BatchDone] = []
        """Of the newest run of ours."""

    def phases_ms(self) -> Metrics:
        """What the newest run's batches spent on each phase, the median."""
        return {
            f"{phase}_ms": percentile(sorted(batch.times_ms.get(phase, 0) for batch in self._batches), 0.5)
            for phase in PHASES
        }

    def topic(self, stem: str, records: int, partitions: int = PARTITIONS) -> str:
        name = self._stack.enter_context(self._bench.topic(self.broker, stem, "page cache", partitions))
        self._bench.say(f"filling {name}")
        sparks.fill(self.broker, name, records, partitions=partitions)
        return name

    def fresh(self) -> Path:
        self._runs += 1
        for stale in self._bench.work_dir.glob("run-*"):
            shutil.rmtree(stale, ignore_errors=True)
        return self._bench.fresh_directory(f"run-{self._runs}")

    # -- ours

    def pipeline(self, topic: str, home: Path, batch_records: int = BATCH_RECORDS) -> Pipeline:
        from holdfast.pipeline import Pipeline

        value = {"format": "json", "fields": FIELDS}
        return (
            Pipeline(f"bench-{self._runs}", home=str(home / "home"))
            .read(topic, value=value, batch_records=batch_records, batch_bytes="2GiB")
            .expect("amount > 0", name="positive")
            .dead_letter(f"{topic}-dlt")
        )

    def run(self, pipeline: Pipeline) -> tuple[Summary, list[BatchDone]]:
        from holdfast.pipeline.engine.progress import BatchDone, Event
        from holdfast.pipeline.engine.running import run_pipeline

        batches = self._batches = []

        def note(event: Event) -> None:
            if isinstance(event, BatchDone):
                batches.append(event)

        summary = run_pipeline(
            pipeline.definition(),
            bootstrap=self.broker.bootstrap_servers,
            spark=self.spark,
            shared_filesystem=True,
            once=True,
            progress=note,
            signals=False,
        )
        return summary, batches

    def ours_parquet(self, topic: str) -> float:
        home = self.fresh()
        return timed(lambda: self.run(self.pipeline(topic, home).write("parquet", path=str(home / "out"))))

    def ours_kafka(self, topic: str) -> float:
        home = self.fresh()
        with self._bench.topic(self.broker, "out", "page cache", PARTITIONS) as out:
            return timed(lambda: self.run(self.pipeline(topic, home).write("kafka", topic=out)))

    def ours_postgres(self, topic: str, url: str) -> float:
        home = self.fresh()
        sink = {"url": url, "table": "orders", "mode": "upsert", "key": ["id"]}
        return timed(lambda: self.run(self.pipeline(topic, home).write("postgres", **sink)))

    def ours_batches(self, topic: str, records: int, sinks: int = 1) -> list[float]:
        home = self.fresh()
        pipeline = self.pipeline(topic, home, records)
        for number in range(sinks):
            pipeline = pipeline.write("parquet", path=str(home / f"out-{number}"), name=f"out-{number}")
        return [float(batch.duration_ms) for batch in self.run(pipeline)[1]]

    # -- plain Spark

    def _plain(self, topic: str, **options: str) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        frame = sparks.stream(self.spark, "connector", self.broker, topic, **options)
        return frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("order")).select(
            "order.*"
        )

    def plain_parquet(self, topic: str) -> float:
        home = self.fresh()

        def write(frame: DataFrame, _batch: int) -> None:
            frame.write.mode("append").parquet(str(home / "out"))

        query = self._plain(topic, maxOffsetsPerTrigger=str(BATCH_RECORDS)).writeStream.foreachBatch(write)
        return timed(lambda: _finish(query.option("checkpointLocation", str(home / "checkpoint"))))

    def plain_kafka(self, topic: str) -> float:
        home = self.fresh()
        with self._bench.topic(self.broker, "out", "page cache", PARTITIONS) as out:
            rows = self._plain(topic, maxOffsetsPerTrigger=str(BATCH_RECORDS)).selectExpr(
                "to_json(struct(*)) AS value"
            )
            query = rows.writeStream.format("kafka").options(
                **{"kafka.bootstrap.servers": self.broker.bootstrap_servers, "topic": out}
            )
            return timed(lambda: _finish(query.option("checkpointLocation", str(home / "checkpoint"))))

    def plain_batches(self, topic: str, records: int) -> list[float]:
        home = self.fresh()
        ended: list[float] = [time.perf_counter()]

        def write(frame: DataFrame, _batch: int) -> None:
            frame.write.mode("append").parquet(str(home / "out"))
            ended.append(time.perf_counter())

        query = self._plain(topic, maxOffsetsPerTrigger=str(records)).writeStream.foreachBatch(write)
        _finish(query.option("checkpointLocation", str(home / "checkpoint")))
        return [1000 * (after - before) for before, after in itertools.pairwise(ended)]


def _finish(query: object) -> None:
    query.trigger(availableNow=True).start().awaitTermination()  # type: ignore[attr-defined]


def timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _settled(batches_ms: list[float]) -> float:
    """The median batch, the first two left out."""
    return percentile(sorted(int(each) for each in batches_ms[2:]), 0.5)


def tree_memory_mb(apart: Sequence[int] = ()) -> float:
    """Resident memory of this process and every process below it, without those `apart` and theirs."""
    import os

    children: dict[int, list[int]] = {}
    resident: dict[int, int] = {}
    for directory in Path("/proc").iterdir():
        if not directory.name.isdigit():
            continue
        try:
            fields = (directory / "stat").read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue  # it has ended
        resident[int(directory.name)] = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")
        children.setdefault(int(fields[1]), []).append(int(directory.name))
    total, waiting = 0, [os.getpid()]
    while waiting:
        process = waiting.pop()
        if process in apart:
            continue
        total += resident.get(process, 0)
        waiting += children.get(process, [])
    return total / 1e6
