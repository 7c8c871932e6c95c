"""HF401 to HF405: what a Spark job passes over, or writes twice.

In each unsafe half Spark's own connector is set as the risk says; in each safe half a pipeline of ours goes through the
same.

What the experiments HF401 to HF410 share: a topic, a Spark job that reads it, and its history.

A row in a sink is a message that was handled; the order in which a query reads is that of the log.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from holdfast.errors import HoldfastError
from holdfast.lab.checking import DUPLICATED, LOST, SKIPPED, UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.lab.watching import field_of
from holdfast.pipeline.definition.model import KafkaSink
from holdfast.pipeline.definition.naming import DIGEST_KEY_NAME
from holdfast.pipeline.guards import GuardTripped
from holdfast.testing.engines import QUIET, NotComeAbout
from holdfast.testing.spark_scene import SparkScene, order

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame
    from pyspark.sql.streaming.readwriter import DataStreamWriter

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
            self.scene.await_decided(self.scene.topic)
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

    def committed_offset(self, offset: int) -> None:
        """How far the job says that it has read."""
        self.lab.note("position", JOB, group=JOB, topic=self.topic, partition=0, offset=offset)

    def ends(self) -> None:
        """It is through with the topic: the rows of its sink, and the log."""
        self.rows(self.sink())
        self.has_read_all()
        self.scan()

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


def begun(lab: Lab, fault: str | None = None, successes: int = 5) -> Job:
    """A job whose topic has five orders, and what must come about."""
    job = Job(lab)
    lab.plan(fault, successes=successes)
    job.orders(range(5))
    return job


def fails(work: Callable[[], object], words: str) -> None:
    try:
        work()
    except Exception as error:  # Spark's errors have no class to name
        if words not in str(error):
            raise
        return
    raise NotComeAbout(f"it was to fail: {words}")


SPARK: Final[dict[str, Any]] = {"needs": frozenset({"java", "spark"}), "fast": False}


# ---------------------------------------------------------------- HF401: failOnDataLoss=false

EXPIRED: Final = "retention takes records that the job has not read"


def _expire(job: Job, before: int) -> None:
    for gone in job.scene.admin.delete_records([TopicPartition(job.scene.topic, 0, before)]).values():
        gone.result(WAIT_SECONDS)
    job.lab.fault(EXPIRED)


def hf401_unsafe(lab: Lab) -> None:
    job = begun(lab, EXPIRED)
    job.scene.query(job.scene.orders(failOnDataLoss="false"))
    job.orders(range(5, 20))
    _expire(job, 12)
    job.scene.query(job.scene.orders(failOnDataLoss="false"))
    job.rows(job.sink())
    job.committed_offset(20)
    job.scan(start=12)


def hf401_safe(lab: Lab) -> None:
    job = begun(lab, EXPIRED)
    lab.plan("it stops and names the range")
    job.scene.run()
    job.orders(range(5, 20))
    _expire(job, 12)
    job.stops(job.scene.run, "it stops and names the range")
    job.rows(job.sink())
    job.committed_offset(5)
    job.scan(start=12)


# ---------------------------------------------------------------- HF402: where a stream begins


def hf402_unsafe(lab: Lab) -> None:
    job = begun(lab)
    found: list[int] = []
    job.scene.query(job.scene.stream(), lambda rows, _: found.append(rows.count()))
    if sum(found) == 0:
        job.rows([])
    job.has_read_all()
    job.scan()


def hf402_safe(lab: Lab) -> None:
    job = begun(lab)
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
NAMED: Final = "it stops and names what the home had"


def _to_files(scene: SparkScene) -> None:
    """Spark's own sink for files, which calls itself exactly-once."""
    _runs_out(scene, scene.orders().writeStream.format("parquet").option("path", str(scene.out)))


def _runs_out(scene: SparkScene, writer: DataStreamWriter) -> None:
    """A query of Spark's own, until it has read all that is there."""
    query = writer.option("checkpointLocation", str(scene.checkpoint)).trigger(availableNow=True).start()
    if not query.awaitTermination(WAIT_SECONDS):
        raise NotComeAbout("the query did not end")


def hf403_unsafe(lab: Lab) -> None:
    job = begun(lab, GONE, successes=10)
    _to_files(job.scene)
    shutil.rmtree(job.scene.checkpoint)
    lab.fault(GONE)
    job.orders(range(5, 10))
    # The new batch 0 is taken for the old one, which the files know, and left out.
    _to_files(job.scene)
    job.ends()


def hf403_safe(lab: Lab) -> None:
    job = begun(lab, GONE, successes=10)
    lab.plan(NAMED)
    job.scene.run()
    shutil.rmtree(job.scene.directory / "home")
    lab.fault(GONE)
    job.orders(range(5, 10))
    # The sink knows its offsets; only the key of its rows' digests is not in it.
    job.stops(job.scene.run, NAMED)
    job.scene.run(accept_loss=(DIGEST_KEY_NAME,))
    job.ends()


# ---------------------------------------------------------------- HF404: a replayed batch

KILLED: Final = "the driver dies between the write and its note of it"


def hf404_unsafe(lab: Lab) -> None:
    job = begun(lab, KILLED)

    def append_and_die(rows: DataFrame, number: int) -> None:
        job.scene.append(rows, number)
        raise RuntimeError("killed between the write and Spark's commit")

    fails(lambda: job.scene.query(job.scene.orders(), append_and_die), "killed between")
    lab.fault(KILLED)
    job.scene.query(job.scene.orders())
    job.ends()


def hf404_safe(lab: Lab) -> None:
    job = begun(lab, KILLED)
    job.scene.crash("committed:parquet")
    lab.fault(KILLED)
    job.orders(range(5, 10))
    job.scene.run()
    job.ends()


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


def _widen(job: Job, target: str) -> None:
    entry = ConfigEntry("max.message.bytes", str(LARGE * 2), incremental_operation=AlterConfigOpType.SET)
    resource = ConfigResource(ConfigResource.Type.TOPIC, target, incremental_configs=[entry])
    job.scene.admin.incremental_alter_configs([resource])[resource].result(WAIT_SECONDS)


def _written(job: Job, target: str) -> None:
    def identify(value: bytes | None) -> str:
        return (value or b"").split(b'"id":')[1].split(b",")[0].strip().decode()

    job.scene.await_decided(target)
    job.lab.scan(job.lab.scene, target, identify=identify)


def hf405_unsafe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(REFUSED, successes=COUNT)
    target = _target(job)

    def to_topic() -> None:
        values = job.scene.stream(startingOffsets="earliest").select("value").writeStream.format("kafka")
        writer = values.option("kafka.bootstrap.servers", job.scene.bootstrap).option("topic", target)
        _runs_out(job.scene, writer)

    fails(to_topic, "RecordTooLarge")
    lab.fault(REFUSED)
    _widen(job, target)
    to_topic()
    _written(job, target)


def hf405_safe(lab: Lab) -> None:
    job = Job(lab)
    lab.plan(KILLED, successes=COUNT)
    target = _target(job)
    _widen(job, target)
    value = "concat('{\"id\":', id, ',\"note\":\"', repeat('x', 100 + 20000 * id), '\"}')"
    sinks = (KafkaSink(topic=target, value=value),)
    job.scene.crash("committed:kafka", sinks=sinks)
    lab.fault(KILLED)
    job.scene.run(sinks=sinks)
    _written(job, target)


EXPERIMENTS: Final = (
    Experiment(
        "HF401",
        "lost ranges are hidden",
        hf401_unsafe,
        hf401_safe,
        "failOnDataLoss=false",
        "the pipeline stops, and names the range",
        # They are gone in both halves; in the safe one nobody goes on as if they were not.
        claim=Claim({SKIPPED: 1}, tolerates=frozenset({LOST})),
        **SPARK,
    ),
    Experiment(
        "HF402",
        "a stream begins at the end",
        hf402_unsafe,
        hf402_safe,
        "startingOffsets=latest, which is the default",
        "from the earliest, and so for new partitions",
        claim=Claim({UNSEEN: 1}),
        **SPARK,
    ),
    Experiment(
        "HF403",
        "the checkpoint is lost",
        hf403_unsafe,
        hf403_safe,
        "offsets in a checkpoint that is lost, rows in files that are not",
        "offsets stand in the sink itself",
        claim=Claim({UNSEEN: 1}),
        **SPARK,
    ),
    Experiment(
        "HF404",
        "a replayed batch is written twice",
        hf404_unsafe,
        hf404_safe,
        "foreachBatch that appends",
        "a sink that knows which batches it has",
        claim=Claim({DUPLICATED: 1}),
        **SPARK,
    ),
    Experiment(
        "HF405",
        "Spark's own Kafka sink repeats",
        hf405_unsafe,
        hf405_safe,
        'writeStream.format("kafka")',
        "a transactional sink with a ledger",
        claim=Claim({DUPLICATED: 1}),
        **SPARK,
    ),
)
