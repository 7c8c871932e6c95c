"""Stateful steps against Spark's own stateful operators over RocksDB, from the same source; what state costs."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from random import Random
from statistics import median
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from bench import spark as sparks
from bench.driver import Bench, Measure, Series
from bench.measures.spark_pipeline import Stand, timed, tree_memory_mb
from bench.measures.spark_source import PARTITIONS
from bench.model import MeasureResult, Metrics, Row
from bench.servers import Broker

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from holdfast.pipeline import Pipeline
    from holdfast.pipeline.engine.progress import Event

SPARKS_OWN: Final = "Spark's own, RocksDB"
ROCKSDB: Final = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
WINDOW_ROWS: Final = 8_000_000
WINDOW_KEYS: Final = 100_000
DEDUPE_ROWS: Final = 4_000_000
DEDUPE_MINUTES: Final = 50
DEDUPE_WITHIN: Final = "1500s"
"""Half of the rows' time: two million keys are live."""
REPEATED: Final = 20
"""One row in so many has the key of one a little before it."""
BATCH: Final = 500_000
ROWS_PER_MINUTE: Final = 500_000
"""Of event time: a batch closes about one window of a minute."""
SCHEMA: Final = "k string, at timestamp"
FIELDS: Final = {"k": "string", "at": "timestamp"}
TOUCHED_KEYS: Final = 500_000
TOUCHED_BATCHES: Final = 40
GROWN_KEYS: Final = 9_000_000
"""Each with `GROWN_BYTES` that do not compress: 5 GB of state."""
GROWN_BYTES: Final = 560
GROWN_BATCHES: Final = 30
RESUME_KEYS: Final = 12_000_000
"""With `KEY_BYTES` that do not compress: about 1 GB of state."""
KEY_BYTES: Final = 56
Wide: TypeAlias = Literal["key", "value"] | None


def fill(
    broker: Broker,
    topic: str,
    rows: int,
    key: Callable[[int], int],
    minutes_per_row: float,
    wide: Wide = None,
) -> None:
    """Small JSON records whose event time goes on with their number, in order within each partition.

    Wide values have a text of `GROWN_BYTES` that does not compress, wide keys one of `KEY_BYTES`.
    """
    from confluent_kafka import Producer

    noise = b64encode(Random(7).randbytes(6_000_000)) if wide else b""

    producer = Producer(
        {
            "bootstrap.servers": broker.bootstrap_servers,
            "enable.idempotence": True,
            "linger.ms": 20,
            "batch.num.messages": 5_000,
            "queue.buffering.max.messages": 200_000,
        }
    )
    for number in range(rows):
        seconds, millis = divmod(int(number * minutes_per_row * 60_000), 1_000)
        minutes, second = divmod(seconds, 60)
        hours, minute = divmod(minutes, 60)
        name = b"k%09d" % key(number)
        if wide == "key":
            name += noise[(place := key(number) * 4_999 % (len(noise) - KEY_BYTES)) : place + KEY_BYTES]
        value = b'{"k":"%b","at":"2026-01-%02dT%02d:%02d:%02d.%03dZ"}' % (
            name,
            1 + hours // 24,
            hours % 24,
            minute,
            second,
            millis,
        )
        if wide == "value":
            place = number * 4_999 % (len(noise) - GROWN_BYTES)
            value = b'%b,"v":"%b"}' % (value[:-1], noise[place : place + GROWN_BYTES])
        while True:
            try:
                producer.produce(topic, value, partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.05)
        if number % 10_000 == 0:
            producer.poll(0)
    if producer.flush(300):
        raise RuntimeError(f"{topic} was not filled within five minutes")


class StateStand(Stand):
    """The same topic through our steps, and through Spark's."""

    def filled(
        self, stem: str, rows: int, key: Callable[[int], int], minutes_per_row: float, wide: Wide = None
    ) -> str:
        name = self._stack.enter_context(self._bench.topic(self.broker, stem, "page cache", PARTITIONS))
        self._bench.say(f"filling {name}")
        fill(self.broker, name, rows, key, minutes_per_row, wide)
        return name

    def start(
        self, topic: str, home: Path, batch: int = BATCH, fields: Mapping[str, str] = FIELDS
    ) -> Pipeline:
        from holdfast.pipeline import Pipeline

        return (
            Pipeline(f"bench-{self._runs}", home=str(home / "home"))
            .read(
                topic,
                value={"format": "json", "fields": dict(fields)},
                batch_records=batch,
                batch_bytes="2GiB",
                event_time={"field": "at", "delay": "10s", "ahead": "100000d"},
            )
            .dead_letter(f"{topic}-dlt")
        )

    def windows(self, topic: str) -> float:
        home = self.fresh()
        pipeline = (
            self.start(topic, home)
            .window({"n": "count(*)"}, size="1m", key=["k"], name="totals")
            .write("parquet", path=str(home / "out"), rows="totals")
        )
        return timed(lambda: self.run(pipeline))

    def dedupe(self, topic: str) -> float:
        home = self.fresh()
        pipeline = self.start(topic, home).dedupe("k", within=DEDUPE_WITHIN, name="once")
        return timed(lambda: self.run(pipeline.write("parquet", path=str(home / "out"))))

    def watched(self, pipeline: Pipeline, watch: StateWatch) -> None:
        """Run it, and look at its state after every batch."""
        from holdfast.pipeline.engine.progress import BatchDone
        from holdfast.pipeline.engine.running import run_pipeline

        def note(event: Event) -> None:
            if isinstance(event, BatchDone):
                watch.look()

        run_pipeline(
            pipeline.definition(),
            bootstrap=self.broker.bootstrap_servers,
            spark=self.spark,
            once=True,
            progress=note,
            signals=False,
        )

    def sparks_windows(self, topic: str) -> float:
        from pyspark.sql import functions as F  # noqa: N812

        rows = self._stateful(topic).withWatermark("at", "10 seconds")
        return self._spark_run(rows.groupBy(F.window("at", "1 minute"), "k").count())

    def sparks_dedupe(self, topic: str) -> float:
        rows = self._stateful(topic).withWatermark("at", "1500 seconds")
        return self._spark_run(rows.dropDuplicatesWithinWatermark(["k"]))

    def _stateful(self, topic: str) -> DataFrame:
        from pyspark.sql import functions as F  # noqa: N812

        frame = sparks.stream(self.spark, "ours", self.broker, topic, maxOffsetsPerTrigger=str(BATCH))
        return frame.select(F.from_json(F.col("value").cast("string"), SCHEMA).alias("row")).select("row.*")

    def _spark_run(self, rows: DataFrame) -> float:
        home = self.fresh()
        query = (
            rows.writeStream.format("parquet")
            .outputMode("append")
            .option("path", str(home / "out"))
            .option("checkpointLocation", str(home / "checkpoint"))
            .trigger(availableNow=True)
        )
        return timed(lambda: query.start().awaitTermination())


def with_rocksdb(spark: SparkSession) -> None:
    spark.conf.set("spark.sql.streaming.stateStore.providerClass", ROCKSDB)
    spark.conf.set("spark.sql.shuffle.partitions", str(spark.sparkContext.defaultParallelism))


class SparkWindows(Measure):
    """A tumbling count by key into Parquet, and deduplication by key, each against Spark's own over RocksDB."""

    name = "spark-windows"
    title = "Windows and deduplication"
    shares_brokers = False
    rows = (
        Row("tumbling count, 100,000 keys, 8 million rows in batches of 500,000", "rows/s", "ours_windows.per_s",
            "sparks_windows.per_s", against=SPARKS_OWN, at_least=1.4),
        Row("deduplication by key, 2 million keys live", "rows/s", "ours_dedupe.per_s", "sparks_dedupe.per_s",
            against=SPARKS_OWN, at_least=1.2),
    )  # fmt: skip

    def run(self, bench: Bench) -> MeasureResult:
        """One Apache Kafka, one session, everything in turn."""
        with ExitStack() as stack:
            stand = StateStand(bench, stack)
            with_rocksdb(stand.spark)
            rows, dedupe_rows = bench.count(WINDOW_ROWS), bench.count(DEDUPE_ROWS)
            counted = stand.filled("windows", rows, lambda n: n * 7 % WINDOW_KEYS, 1 / ROWS_PER_MINUTE)
            repeated = stand.filled(
                "dedupe",
                dedupe_rows,
                lambda n: n if n % REPEATED else max(0, n - 1_000 * REPEATED - 1),
                DEDUPE_MINUTES / dedupe_rows,
            )

            def series(key: str, count: int, work: Callable[[], float]) -> Series:
                return Series(key, lambda: {"per_s": count / work()})

            return bench.alternate(
                self.name,
                [
                    series("ours_windows", rows, lambda: stand.windows(counted)),
                    series("sparks_windows", rows, lambda: stand.sparks_windows(counted)),
                    series("ours_dedupe", dedupe_rows, lambda: stand.dedupe(repeated)),
                    series("sparks_dedupe", dedupe_rows, lambda: stand.sparks_dedupe(repeated)),
                ],
            )


class SparkState(Measure):
    """What a small batch writes of a large state, and what a growing state needs of memory."""

    name = "spark-state"
    title = "State"
    shares_brokers = False
    rows = (
        Row("state rewritten by a batch that touches 1 % of its keys, the mean", "%", "touched.mean_percent", below=10),
        Row("state rewritten by a batch that touches 1 % of its keys, the most", "%", "touched.most_percent"),
        Row("memory with 5 GB of state; with 2 GB", "MB", "grown.late_mb", "grown.early_mb", against="with 2 GB",
            at_most=1.1),
        Row("memory with 5 GB of state; with 0.5 GB", "MB", "grown.late_mb", "grown.first_mb", against="with 0.5 GB"),
        Row("state at its largest", "MB", "grown.state_mb"),
        Row("new keys taken into it", "rows/s", "grown.per_s"),
    )  # fmt: skip

    def run(self, bench: Bench) -> MeasureResult:
        """All keys in ten batches, then batches of a hundredth of them; then as many wide rows as make 5 GB."""
        with ExitStack() as stack:
            stand = StateStand(bench, stack)
            keys, grown = bench.count(TOUCHED_KEYS), bench.count(GROWN_KEYS)
            return bench.alternate(
                self.name,
                [
                    Series("touched", lambda: _touched(stand, keys)),
                    Series("grown", lambda: _grown(stand, grown)),
                ],
            )


def _touched(stand: StateStand, keys: int) -> Metrics:
    home = stand.fresh()
    state = home / "home" / "state"
    touched = max(1, keys // 100)

    def run(topic: str, batch: int) -> StateWatch:
        watch = StateWatch(state)
        counted = stand.start(topic, home, batch).window(
            {"n": "count(*)"}, size="30d", key=["k"], name="totals"
        )
        stand.watched(counted.write("parquet", path=str(home / "out"), rows="totals"), watch)
        return watch

    topic = stand.filled("touched", keys, lambda number: number, 1e-6)
    run(topic, max(1, keys // 10))
    # The keys that are touched lie everywhere.
    fill(stand.broker, topic, TOUCHED_BATCHES * touched, lambda number: number * 7919 % keys, 1e-6)
    small = run(topic, touched)
    return {
        "mean_percent": sum(small.percents) / len(small.percents),
        "most_percent": max(small.percents),
    }


def _grown(stand: StateStand, keys: int) -> Metrics:
    """The last payload of every key, in a window that does not close: each batch brings new keys only."""
    home = stand.fresh()
    topic = stand.filled("grown", keys, lambda number: number, 1e-6, wide="value")
    pipeline = (
        stand.start(topic, home, max(1, keys // GROWN_BATCHES), fields={**FIELDS, "v": "string"})
        .window({"v": "last(v)"}, size="30d", key=["k"], name="totals")
        .write("parquet", path=str(home / "out"), rows="totals")
    )
    watch = StateWatch(home / "home" / "state", apart=[stand.broker.pid])
    seconds = timed(lambda: stand.watched(pipeline, watch))

    def memory_at(share: float) -> float:
        """What Java's heap holds goes up and down, so three looks make one."""
        there = next(place for place, size in enumerate(watch.sizes) if size >= watch.largest * share)
        return median(watch.memory_mb[max(0, there - 1) : there + 2])

    # Java fills its heap up to its bound by the first merge of large segments, at about 1.4 GB of state.
    return {
        "first_mb": memory_at(0.1),
        "early_mb": memory_at(0.4),
        "late_mb": memory_at(1.0),
        "state_mb": watch.largest / 1e6,
        "per_s": keys / seconds,
    }


class StateWatch:
    """Looks at a state's files after every batch."""

    def __init__(self, state: Path, apart: Sequence[int] = ()) -> None:
        self._data = state / "data"
        self._apart = apart
        """Processes whose memory is not the pipeline's."""
        self._known = set(self._files())
        self.percents: list[float] = []
        """Bytes that a batch wrote, in hundredths of all that were there before it."""
        self.memory_mb: list[float] = []
        self.sizes: list[int] = []
        self.largest = 0

    def _files(self) -> dict[Path, int]:
        return {file: file.stat().st_size for file in self._data.rglob("*") if file.is_file()}

    def look(self) -> None:
        """A batch is done."""
        files = self._files()
        before = sum(size for file, size in files.items() if file in self._known)
        written = sum(size for file, size in files.items() if file not in self._known)
        if before:
            self.percents.append(100 * written / before)
        self._known = set(files)
        self.sizes.append(before + written)
        self.largest = max(self.largest, before + written)
        self.memory_mb.append(tree_memory_mb(self._apart))


class SparkResume(Measure):
    """A process killed with much state, and another that goes on: ours, and Spark's own deduplication."""

    name = "spark-resume"
    title = "Going on with a gigabyte of state"
    shares_brokers = False
    rows = (
        Row("start after SIGKILL to the next committed batch, 12 million keys live", "s", "ours.resume_s",
            "sparks.resume_s", against=SPARKS_OWN, at_most=1.0),
        Row("bytes of state", "MB", "ours.state_mb", "sparks.state_mb", against=SPARKS_OWN),
    )  # fmt: skip

    def run(self, bench: Bench) -> MeasureResult:
        """Each side builds its state, is killed, and is started again with a few more records."""
        with ExitStack() as stack:
            broker = bench.kafka("spark-resume")
            broker.start()
            stack.callback(broker.close)
            keys = bench.count(RESUME_KEYS)

            def once(side: str) -> Metrics:
                with bench.topic(broker, f"resume-{side}", "page cache", PARTITIONS) as topic:
                    fill(broker, topic, keys, lambda number: number, 50 / keys, "key")
                    home = bench.fresh_directory(f"resume-{side}")
                    job = Job(side, home, broker, topic)
                    job.run_to_end()
                    fill(broker, topic, 1_000, lambda number: number, 0.0, "key")
                    job.start_and_kill()
                    resume_s = job.time_to_next_commit()
                    return {"resume_s": resume_s, "state_mb": job.state_bytes() / 1e6}

            return bench.alternate(
                self.name,
                [Series("ours", lambda: once("ours")), Series("sparks", lambda: once("sparks"))],
            )


class Job:
    """`python -m bench.load.state_job` in a process group of its own."""

    def __init__(self, side: str, home: Path, broker: Broker, topic: str) -> None:
        self._side = side
        self._home = home
        self._command = [sys.executable, "-m", "bench.load.state_job", side, str(home)]
        self._command += [broker.bootstrap_servers, topic]

    def _start(self) -> subprocess.Popen[bytes]:
        with (self._home / "job.log").open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log, start_new_session=True)

    def _commits(self) -> int:
        places = {"ours": "out/batch=*", "sparks": "checkpoint/commits/[0-9]*"}
        return sum(1 for _ in self._home.glob(places[self._side]))

    def run_to_end(self) -> None:
        if self._start().wait():
            raise RuntimeError(f"the job failed; see {self._home / 'job.log'}")

    def start_and_kill(self) -> None:
        """Killed while it starts: its locks and leftovers are there, the records are not done."""
        process = self._start()
        time.sleep(3)
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    def time_to_next_commit(self) -> float:
        before, begun = self._commits(), time.monotonic()
        process = self._start()
        while self._commits() == before:
            if process.poll():
                raise RuntimeError(f"the job failed; see {self._home / 'job.log'}")
            time.sleep(0.02)
        seconds = time.monotonic() - begun
        process.wait()
        return seconds

    def state_bytes(self) -> int:
        place = self._home / {"ours": "home/state", "sparks": "checkpoint/state"}[self._side]
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())
