"""HF401 to HF405: what a Spark job passes over, or writes twice.

In each unsafe half Spark's own connector is set as the risk says; in each safe half a pipeline of ours goes through the
same.
"""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING, Final

from confluent_kafka import TopicPartition
from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource, NewPartitions

from holdfast.lab.checking import DUPLICATED, LOST, SKIPPED, UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.pipeline.definition.model import (
    KafkaSink,
)
from holdfast.testing.engines import NotComeAbout
from holdfast.testing.spark_scene import SparkScene

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

from holdfast.lab.experiments.hf4xx_job import JOB, SPARK, WAIT_SECONDS, Job, fails

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

    fails(lambda: job.scene.query(job.scene.orders(), append_and_die), "killed between")
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
)
