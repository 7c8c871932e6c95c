"""HF401 to HF410: what a Spark job passes over, writes twice or computes anew.

In each unsafe half Spark's own connector is set as the risk says; in each safe half a pipeline of ours goes through the
same. A row in a sink is a message that was handled; the order in which a query reads is that of the log.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from holdfast.errors import HoldfastError
from holdfast.lab.checking import ABORTED_READ, DUPLICATED, INCONSISTENT, LOST, SKIPPED, UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.watching import field_of
from holdfast.pipeline.definition.model import (
    Decoding,
    EventTime,
    Expect,
    Field,
    KafkaSink,
    ParquetSink,
    Sql,
    Window,
)
from holdfast.pipeline.guards import GuardTripped
from holdfast.testing.engines import QUIET, NotComeAbout
from holdfast.testing.spark_scene import SparkScene, order

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame

JOB: Final = "job"
WAIT_SECONDS: Final = 120


class Job:
    """A topic, a Spark job that reads it, and its history."""

    def __init__(self, lab: Lab) -> None:
        self.lab = lab
        self.scene = SparkScene(lab.scene.bootstrap_servers, lab.engines.spark(), lab.directory)
        self.topic = self.scene.topic
        """As the history calls it: a topic that is created again has another name there."""
        self._ids: dict[bytes, str] = {}
        self._offsets: dict[str, int] = {}

    def identify(self, value: bytes | None) -> str:
        return self._ids.get(value or b"", (value or b"").decode(errors="replace"))

    def send(self, messages: Iterable[tuple[str, bytes]], partition: int = 0, txn: str | None = None) -> None:
        """Messages by name, acknowledged; in a transaction, if it is named: `end` says how that ended."""
        messages = list(messages)
        settings = {"transactional.id": self.scene.topic} if txn else {"enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self.scene.bootstrap, **settings, **QUIET})
        if txn:
            producer.init_transactions(WAIT_SECONDS)
            producer.begin_transaction()
            self.lab.note("begin", "program", txn=txn, ids=[name for name, _ in messages])

        def told(error: Any, message: Any) -> None:
            name = self.identify(message.value())
            if error is not None:
                self.lab.outcome("program", name, error)
                return
            self._offsets[name] = field_of(message, "offset")
            place = {"topic": self.topic, "partition": partition, "offset": self._offsets[name]}
            self.lab.note("ack", "program", id=name, txn=txn, **place)

        for name, value in messages:
            self._ids[value] = name
            self.lab.note("send", "program", id=name, topic=self.topic, txn=txn)
            producer.produce(self.scene.topic, value, partition=partition, on_delivery=told)
        if producer.flush(WAIT_SECONDS):
            raise NotComeAbout(f"not everything was sent to {self.scene.topic}")
        if txn:
            commits = not txn.startswith("taken-back")
            (producer.commit_transaction if commits else producer.abort_transaction)(WAIT_SECONDS)
            self.lab.note("end", "program", txn=txn, outcome="committed" if commits else "aborted")

    def orders(self, numbers: Iterable[int], partition: int = 0, txn: str | None = None) -> None:
        self.send(((str(number), order(number)) for number in numbers), partition, txn)

    # What came of it

    def rows(self, ids: Sequence[int | str], partition: int = 0) -> None:
        """The rows of the sink, in the order of the log."""
        names = [str(each) for each in ids]
        for name in sorted(set(names), key=lambda each: self._offsets.get(each, 0)):
            offset = self._offsets.get(name)
            if offset is not None:
                place = {"topic": self.topic, "partition": partition, "offset": offset}
                self.lab.note("deliver", JOB, id=name, group=JOB, **place)
        for name in names:
            self.lab.note("handle", JOB, id=name, group=JOB)

    def sink(self, path: Path | None = None) -> list[int]:
        target = path or self.scene.out
        return self.scene.ids(target) if target.exists() else []

    def position(self, offset: int) -> None:
        """How far the job says that it has read."""
        self.lab.note("position", JOB, group=JOB, topic=self.topic, partition=0, offset=offset)

    def has_read_all(self) -> None:
        self.lab.note("read-end", JOB, group=JOB, topic=self.topic)

    def scan(self, start: int | None = None, partitions: int = 1) -> None:
        self.lab.scan(
            self.lab.scene,
            self.scene.topic,
            partitions,
            called=self.topic,
            identify=self.identify,
            start=start,
        )

    def stops(self, work: Callable[[], object], why: str) -> None:
        """The job refuses to go on, and says why."""
        try:
            work()
        except (GuardTripped, HoldfastError) as error:
            self.lab.say(f"stopped: {error}")
            self.lab.fault(why)
            return
        raise NotComeAbout(f"the job went on: {why}")


# ---------------------------------------------------------------- HF401: failOnDataLoss=false

EXPIRED: Final = "retention takes records that the job has not read"


def _expire(job: Job, before: int) -> None:
    for gone in job.scene.admin.delete_records([TopicPartition(job.scene.topic, 0, before)]).values():
        gone.result(WAIT_SECONDS)
    job.lab.fault(EXPIRED)


def hf401_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(EXPIRED, successes=5)
    job.orders(range(5))
    job.scene.query(job.scene.orders(failOnDataLoss="false"))
    job.orders(range(5, 20))
    _expire(job, 12)
    job.scene.query(job.scene.orders(failOnDataLoss="false"))
    job.rows(job.sink())
    job.position(20)
    job.scan(start=12)


def hf401_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(EXPIRED, successes=5)
    lab.plan("it stops and names the range")
    job.orders(range(5))
    job.scene.run()
    job.orders(range(5, 20))
    _expire(job, 12)
    job.stops(job.scene.run, "it stops and names the range")
    job.rows(job.sink())
    job.position(5)
    job.scan(start=12)


# ---------------------------------------------------------------- HF402: where a stream begins


def hf402_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(successes=5)
    job.orders(range(5))
    found: list[int] = []
    job.scene.query(job.scene.stream(), lambda rows, _: found.append(rows.count()))
    if sum(found) == 0:
        job.rows([])
    job.has_read_all()
    job.scan()


def hf402_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(successes=5)
    job.orders(range(5))
    job.scene.run()
    topic = job.scene.topic
    job.scene.admin.create_partitions([NewPartitions(topic, 2)])[topic].result(WAIT_SECONDS)
    job.orders(range(5, 10), partition=1)
    job.scene.run()
    for each in job.sink():
        lab.note("handle", JOB, id=str(each), group=JOB)
    job.has_read_all()
    job.scan(partitions=2)


# ---------------------------------------------------------------- HF403: the checkpoint is lost

GONE: Final = "the checkpoint is gone"


def _to_files(scene: SparkScene) -> None:
    """Spark's own sink for files, which calls itself exactly-once."""
    query = (
        scene.orders()
        .writeStream.format("parquet")
        .option("path", str(scene.out))
        .option("checkpointLocation", str(scene.checkpoint))
        .trigger(availableNow=True)
        .start()
    )
    if not query.awaitTermination(WAIT_SECONDS):
        raise NotComeAbout("the query did not end")


def hf403_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(GONE, successes=10)
    job.orders(range(5))
    _to_files(job.scene)
    shutil.rmtree(job.scene.checkpoint)
    lab.fault(GONE)
    job.orders(range(5, 10))
    # The new batch 0 is taken for the old one, which the files know, and left out.
    _to_files(job.scene)
    job.rows(job.sink())
    job.has_read_all()
    job.scan()


def hf403_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(GONE, successes=10)
    job.orders(range(5))
    job.scene.run()
    shutil.rmtree(job.scene.directory / "home")
    lab.fault(GONE)
    job.orders(range(5, 10))
    job.scene.run()
    job.rows(job.sink())
    job.has_read_all()
    job.scan()


# ---------------------------------------------------------------- HF404: a replayed batch

KILLED: Final = "the driver dies between the write and its note of it"


def hf404_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(KILLED, successes=5)
    job.orders(range(5))

    def append_and_die(rows: DataFrame, number: int) -> None:
        job.scene.append(rows, number)
        raise RuntimeError("killed between the write and Spark's commit")

    _fails(lambda: job.scene.query(job.scene.orders(), append_and_die), "killed between")
    lab.fault(KILLED)
    job.scene.query(job.scene.orders())
    job.rows(job.sink())
    job.has_read_all()
    job.scan()


def hf404_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(KILLED, successes=5)
    job.orders(range(5))
    job.scene.crash("committed:parquet")
    lab.fault(KILLED)
    job.orders(range(5, 10))
    job.scene.run()
    job.rows(job.sink())
    job.has_read_all()
    job.scan()


def _fails(work: Callable[[], object], words: str) -> None:
    try:
        work()
    except Exception as error:  # Spark's errors have no class to name
        if words not in str(error):
            raise
        return
    raise NotComeAbout(f"it was to fail: {words}")


# ---------------------------------------------------------------- HF405: Spark's Kafka sink

LARGE: Final = 100_000
COUNT: Final = 6
REFUSED: Final = "the topic refuses a record in the middle of a batch"


def _target(job: Job) -> str:
    """A topic that does not take the last of the orders that are sent here."""
    target = f"{job.scene.topic}-out"
    job.scene.create(target, max_message_bytes=str(LARGE // 2))
    job.orders(range(COUNT - 1))
    job.send([(str(COUNT - 1), b'{"id": %d, "amount": 1, "note": "%s"}' % (COUNT - 1, b"x" * LARGE))])
    return target


def _make_room(job: Job, target: str) -> None:
    job.lab.fault(REFUSED)
    entry = ConfigEntry("max.message.bytes", str(LARGE * 2), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, target, incremental_configs=[entry])
    job.scene.admin.incremental_alter_configs([resource])[resource].result(WAIT_SECONDS)


def _written(job: Job, target: str) -> None:
    def identify(value: bytes | None) -> str:
        return (value or b"").split(b'"id":')[1].split(b",")[0].strip().decode()

    job.lab.scan(job.lab.scene, target, identify=identify)


def hf405_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(REFUSED, successes=COUNT)
    target = _target(job)

    def to_topic() -> None:
        query = (
            job.scene.stream(startingOffsets="earliest")
            .select("value")
            .writeStream.format("kafka")
            .option("kafka.bootstrap.servers", job.scene.bootstrap)
            .option("topic", target)
            .option("checkpointLocation", str(job.scene.checkpoint))
            .trigger(availableNow=True)
            .start()
        )
        if not query.awaitTermination(WAIT_SECONDS):
            raise NotComeAbout("the query did not end")

    _fails(to_topic, "RecordTooLarge")
    _make_room(job, target)
    to_topic()
    _written(job, target)


def hf405_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(REFUSED, successes=COUNT)
    target = _target(job)
    value = "concat('{\"id\":', id, ',\"note\":\"', repeat('x', 100 + 20000 * id), '\"}')"
    sinks = (KafkaSink(topic=target, value=value),)
    job.stops(lambda: job.scene.run(sinks=sinks), REFUSED)
    _make_room(job, target)
    job.scene.run(sinks=sinks)
    _written(job, target)


# ---------------------------------------------------------------- HF406: what cannot be parsed

BROKEN: Final = (b"not json", b'{"id": "six", "amount": 1}', b'{"id": 7}{"id": 8}', b"{")
UNPARSEABLE: Final = "records that are no JSON of this schema"


def _with_broken_ones(job: Job) -> None:
    job.lab.plan(UNPARSEABLE, successes=5)
    job.orders(range(5))
    job.send((f"broken-{number}", value) for number, value in enumerate(BROKEN))
    job.lab.fault(UNPARSEABLE)


def hf406_unsafe(lab: Lab) -> None:
    job = Job(lab)
    _with_broken_ones(job)
    job.scene.query(job.scene.orders().where("id >= 0 AND amount > 0"))
    job.rows(job.sink())
    job.has_read_all()
    job.position(5 + len(BROKEN))
    job.scan()


def hf406_safe(lab: Lab) -> None:
    job = Job(lab)
    _with_broken_ones(job)
    job.scene.run(steps=(Expect("positive", "amount > 0"),))
    job.rows(job.sink())
    for value in job.scene.values(f"{job.scene.topic}-dlt"):
        lab.note("keep", "dead letters", id=job.identify(value), where="the dead-letter topic")
    job.has_read_all()
    job.position(5 + len(BROKEN))
    job.scan()


# ---------------------------------------------------------------- HF407: late rows

PER_BATCH: Final = 3
LATE: Final = "an order of 12:00 comes after those of 12:20"
MINUTES: Final = (0, 0, 0, 10, 10, 10, 20, 20, 20, 0, 30, 30)
"""Three each, then a late one, then two that close all before them."""
DECIDED: Final = 10
"""Up to here windows are closed; the last two are still open."""
TIMED: Final = Decoding("json", (Field("id", "long"), Field("amount", "double"), Field("at", "timestamp")))


def _with_a_late_one(job: Job) -> None:
    job.lab.plan(LATE, successes=len(MINUTES))
    job.send(
        (str(number), order(number, at=f"2026-01-01T12:{at:02d}:05Z")) for number, at in enumerate(MINUTES)
    )
    job.lab.fault(LATE)


def _counted(job: Job) -> None:
    frame = job.scene.spark.read.parquet(str(job.scene.out)).select("ids").collect()
    job.rows(sorted(each for row in frame for each in row.ids))


def hf407_unsafe(lab: Lab) -> None:
    from pyspark.sql import functions as f

    job = Job(lab)
    _with_a_late_one(job)
    orders = job.scene.stream(startingOffsets="earliest", maxOffsetsPerTrigger=str(PER_BATCH)).selectExpr(
        "from_json(CAST(value AS STRING), 'id LONG, at TIMESTAMP') AS parsed"
    )
    timed = orders.select("parsed.*").withWatermark("at", "1 minute")
    job.scene.query(timed.groupBy(f.window("at", "1 minute")).agg(f.collect_list("id").alias("ids")))
    _counted(job)
    job.position(DECIDED)
    job.scan()


def hf407_safe(lab: Lab) -> None:
    job = Job(lab)
    _with_a_late_one(job)
    late = job.scene.directory / "late"
    source = replace(
        job.scene.definition().source,
        value=TIMED,
        event_time=EventTime("at", delay="1m"),
        batch_records=PER_BATCH,
    )
    job.scene.run(
        source=source,
        steps=(Window("per-minute", {"ids": "collect_list(id)"}, size="1m"),),
        sinks=(
            ParquetSink(str(job.scene.out), name="minutes", rows="per-minute"),
            ParquetSink(str(late), name="late", rows="per-minute.late"),
        ),
    )
    _counted(job)
    for number in job.sink(late):
        lab.note("keep", "late", id=str(number), where="the sink of late rows")
    job.position(DECIDED)
    job.scan()


# ---------------------------------------------------------------- HF408: a topic created again

AGAIN: Final = "the topic is deleted and created again"


def _create_again(job: Job) -> None:
    job.scene.create_again()
    job.topic = f"{job.scene.topic}#2"
    job.lab.fault(AGAIN)


def hf408_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(AGAIN, successes=10)
    job.orders(range(5))
    job.scene.query(job.scene.orders(failOnDataLoss="true"))
    job.rows(job.sink())
    _create_again(job)
    job.orders(range(100, 109))
    job.scene.query(job.scene.orders(failOnDataLoss="true"))
    job.rows([each for each in job.sink() if each >= 100])
    job.has_read_all()
    job.scan()


def hf408_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(AGAIN, successes=10)
    lab.plan("it stops: the topic is another one")
    job.orders(range(5))
    job.scene.run()
    job.rows(job.sink())
    _create_again(job)
    job.orders(range(100, 109))
    job.stops(job.scene.run, "it stops: the topic is another one")
    job.rows([each for each in job.sink() if each >= 100])
    job.scan()


# ---------------------------------------------------------------- HF409: messages that were taken back


def hf409_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(successes=5)
    job.orders(range(5), txn="taken-back")
    job.orders(range(5, 10), txn="kept")
    job.scene.query(job.scene.orders())
    job.rows(job.sink())
    job.scan()


def hf409_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(successes=5)
    job.orders(range(5), txn="taken-back")
    job.orders(range(5, 10), txn="kept")
    job.scene.run()
    job.rows(job.sink())
    job.has_read_all()
    job.scan()


# ---------------------------------------------------------------- HF410: a batch that is computed again

BETWEEN: Final = "the driver dies between two sinks of one batch"


def _chosen(job: Job, name: str) -> None:
    """What stands in one sink for each order: the same everywhere, or one order is two things."""
    for row in job.scene.spark.read.parquet(str(job.scene.directory / name)).collect():
        place = {"topic": "computed", "partition": 0, "offset": row.id}
        job.lab.note("deliver", name, id=f"{row.id}:{row.chosen}"[:40], group=name, **place)


def hf410_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(BETWEEN, successes=5)
    attempts: list[int] = []

    def write_both(rows: DataFrame, number: int) -> None:
        """Each target takes a batch once, which would be enough if the batch were the same."""
        attempts.append(number)
        for name in ("first", "second"):
            target = job.scene.directory / name / f"batch={number}"
            if not target.exists():
                rows.write.parquet(str(target))
            if len(attempts) == 1:
                raise RuntimeError("killed between the targets")

    job.orders(range(5))
    frame = job.scene.orders().selectExpr("id", "uuid() AS chosen")
    _fails(lambda: job.scene.query(frame, write_both), "killed between")
    lab.fault(BETWEEN)
    job.scene.query(job.scene.orders().selectExpr("id", "uuid() AS chosen"), write_both)
    _chosen(job, "first")
    _chosen(job, "second")


def hf410_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(BETWEEN, successes=5)
    targets = ("first", "second")
    sinks = tuple(ParquetSink(path=str(job.scene.directory / name), name=name) for name in targets)
    steps = (Sql("timed", "SELECT _hf, id, _batch_time AS chosen FROM input"),)
    job.orders(range(5))
    job.scene.crash("committed:first", sinks=sinks, steps=steps)
    lab.fault(BETWEEN)
    job.scene.run(sinks=sinks, steps=steps)
    _chosen(job, "first")
    _chosen(job, "second")


SPARK: Final[dict[str, Any]] = {"needs": frozenset({"java", "spark"}), "fast": False}
EXPERIMENTS: Final = (
    Experiment(
        "HF401",
        "lost ranges are hidden",
        hf401_unsafe,
        hf401_safe,
        # They are gone in both halves; in the safe one nobody goes on as if they were not.
        Claim({SKIPPED: 1}, tolerates=frozenset({LOST})),
        "failOnDataLoss=false",
        "the pipeline stops, and names the range",
        **SPARK,
    ),
    Experiment(
        "HF402",
        "a stream begins at the end",
        hf402_unsafe,
        hf402_safe,
        Claim({UNSEEN: 1}),
        "startingOffsets=latest, which is the default",
        "from the earliest, and so for new partitions",
        **SPARK,
    ),
    Experiment(
        "HF403",
        "the checkpoint is lost",
        hf403_unsafe,
        hf403_safe,
        Claim({UNSEEN: 1}),
        "positions in a checkpoint that is lost, rows in files that are not",
        "positions stand in the sink itself",
        **SPARK,
    ),
    Experiment(
        "HF404",
        "a replayed batch is written twice",
        hf404_unsafe,
        hf404_safe,
        Claim({DUPLICATED: 1}),
        "foreachBatch that appends",
        "a sink that knows which batches it has",
        **SPARK,
    ),
    Experiment(
        "HF405",
        "Spark's own Kafka sink repeats",
        hf405_unsafe,
        hf405_safe,
        Claim({DUPLICATED: 1}),
        'writeStream.format("kafka")',
        "a transactional sink with a ledger",
        **SPARK,
    ),
    Experiment(
        "HF406",
        "what cannot be parsed vanishes",
        hf406_unsafe,
        hf406_safe,
        Claim({LOST: 1}),
        "from_json, and a filter",
        "a dead-letter route",
        **SPARK,
    ),
    Experiment(
        "HF407",
        "late records are dropped unseen",
        hf407_unsafe,
        hf407_safe,
        Claim({LOST: 1}),
        "withWatermark, and a window",
        "a route for late rows",
        **SPARK,
    ),
    Experiment(
        "HF408",
        "a recreated topic is taken for the old one",
        hf408_unsafe,
        hf408_safe,
        Claim({UNSEEN: 1}),
        "offsets without the topic's id",
        "the topic's id stands with the offsets, and the pipeline stops",
        **SPARK,
    ),
    Experiment(
        "HF409",
        "the source reads uncommitted messages",
        hf409_unsafe,
        hf409_safe,
        Claim({ABORTED_READ: 1}),
        "kafka.isolation.level=read_uncommitted, which is the default",
        "read_committed",
        **SPARK,
    ),
    Experiment(
        "HF410",
        "a replayed batch computes something else",
        hf410_unsafe,
        hf410_safe,
        Claim({INCONSISTENT: 1}),
        "uuid() in a batch that is computed again",
        "steps that give the same each time, and others refused",
        **SPARK,
    ),
)
