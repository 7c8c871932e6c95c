"""HF406 to HF410: records that vanish between source and sink, and batches that are not the same twice.

As in `hf4xx`: Spark's own connector, then a pipeline of ours.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from holdfast.lab.checking import ABORTED_READ, INCONSISTENT, UNSEEN
from holdfast.lab.experiment import Claim, Experiment, Lab
from holdfast.pipeline.definition.model import (
    Decoding,
    EventTime,
    Expect,
    Field,
    ParquetSink,
    Sql,
    Window,
)
from holdfast.testing.spark_scene import order

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

from holdfast.lab.experiments.hf4xx import SPARK, Job, begun, fails

# ---------------------------------------------------------------- HF406: what cannot be parsed

BROKEN: Final = (b"not json", b'{"id": "six", "amount": 1}', b'{"id": 7}{"id": 8}', b"{")
UNPARSEABLE: Final = "records that are no JSON of this schema"


def _with_broken_ones(lab: Lab) -> Job:
    job = begun(lab, UNPARSEABLE)
    job.send((f"broken-{number}", value) for number, value in enumerate(BROKEN))
    lab.fault(UNPARSEABLE)
    return job


def hf406_unsafe(lab: Lab) -> None:
    job = _with_broken_ones(lab)
    job.scene.query(job.scene.orders().where("id >= 0 AND amount > 0"))
    job.rows(job.sink())
    job.has_read_all()
    job.committed_offset(5 + len(BROKEN))
    job.scan()


def hf406_safe(lab: Lab) -> None:
    job = _with_broken_ones(lab)
    job.scene.run(steps=(Expect("positive", "amount > 0"),))
    job.rows(job.sink())
    for value in job.scene.values(f"{job.scene.topic}-dlt"):
        lab.note("keep", "dead letters", id=job.identify(value), where="the dead-letter topic")
    job.has_read_all()
    job.committed_offset(5 + len(BROKEN))
    job.scan()


# ---------------------------------------------------------------- HF407: late rows

PER_BATCH: Final = 3
LATE: Final = "an order of 12:00 comes after those of 12:20"
MINUTES: Final = (0, 0, 0, 10, 10, 10, 20, 20, 20, 0, 30, 30)
"""Three each, then a late one, then two that close all before them."""
DECIDED: Final = 10
"""Up to here windows are closed; the last two are still open."""
TIMED: Final = Decoding("json", (Field("id", "long"), Field("amount", "double"), Field("at", "timestamp")))


def _with_a_late_one(lab: Lab) -> Job:
    job = Job(lab)
    lab.plan(LATE, successes=len(MINUTES))
    job.send(
        (str(number), order(number, at=f"2026-01-01T12:{at:02d}:05Z")) for number, at in enumerate(MINUTES)
    )
    lab.fault(LATE)
    return job


def _counted(job: Job) -> None:
    frame = job.scene.spark.read.parquet(str(job.scene.out)).select("ids").collect()
    job.rows(sorted(each for row in frame for each in row.ids))


def hf407_unsafe(lab: Lab) -> None:
    from pyspark.sql import functions as f

    job = _with_a_late_one(lab)
    orders = job.scene.stream(startingOffsets="earliest", maxOffsetsPerTrigger=str(PER_BATCH)).selectExpr(
        "from_json(CAST(value AS STRING), 'id LONG, at TIMESTAMP') AS parsed"
    )
    timed = orders.select("parsed.*").withWatermark("at", "1 minute")
    job.scene.query(timed.groupBy(f.window("at", "1 minute")).agg(f.collect_list("id").alias("ids")))
    _counted(job)
    job.committed_offset(DECIDED)
    job.scan()


def hf407_safe(lab: Lab) -> None:
    job = _with_a_late_one(lab)
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
    job.committed_offset(DECIDED)
    job.scan()


# ---------------------------------------------------------------- HF408: a topic created again

AGAIN: Final = "the topic is deleted and created again"


def _create_again(job: Job) -> None:
    job.scene.create_again()
    job.topic = f"{job.scene.topic}#2"
    job.lab.fault(AGAIN)


def hf408_unsafe(lab: Lab) -> None:
    job = begun(lab, AGAIN, successes=10)
    job.scene.query(job.scene.orders(failOnDataLoss="true"))
    job.rows(job.sink())
    _create_again(job)
    job.orders(range(100, 109))
    job.scene.query(job.scene.orders(failOnDataLoss="true"))
    job.rows([each for each in job.sink() if each >= 100])
    job.has_read_all()
    job.scan()


def hf408_safe(lab: Lab) -> None:
    job = begun(lab, AGAIN, successes=10)
    lab.plan("it stops: the topic is another one")
    job.scene.run()
    job.rows(job.sink())
    _create_again(job)
    job.orders(range(100, 109))
    job.stops(job.scene.run, "it stops: the topic is another one")
    job.rows([each for each in job.sink() if each >= 100])
    job.scan()


# ---------------------------------------------------------------- HF409: messages that were taken back


def _with_two_transactions(lab: Lab) -> Job:
    job = Job(lab)
    lab.plan(successes=5)
    job.orders(range(5), txn="taken-back")
    job.orders(range(5, 10), txn="kept")
    return job


def hf409_unsafe(lab: Lab) -> None:
    job = _with_two_transactions(lab)
    job.scene.query(job.scene.orders())
    job.rows(job.sink())
    job.scan()


def hf409_safe(lab: Lab) -> None:
    job = _with_two_transactions(lab)
    job.scene.run()
    job.ends()


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
    fails(lambda: job.scene.query(frame, write_both), "killed between")
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


EXPERIMENTS: Final = (
    Experiment(
        "HF406",
        "what cannot be parsed vanishes",
        hf406_unsafe,
        hf406_safe,
        "from_json, and a filter",
        "a dead-letter route",
        **SPARK,
    ),
    Experiment(
        "HF407",
        "late records are dropped unseen",
        hf407_unsafe,
        hf407_safe,
        "withWatermark, and a window",
        "a route for late rows",
        **SPARK,
    ),
    Experiment(
        "HF408",
        "a recreated topic is taken for the old one",
        hf408_unsafe,
        hf408_safe,
        "offsets without the topic's id",
        "the topic's id stands with the offsets, and the pipeline stops",
        claim=Claim({UNSEEN: 1}),
        **SPARK,
    ),
    Experiment(
        "HF409",
        "the source reads uncommitted messages",
        hf409_unsafe,
        hf409_safe,
        "kafka.isolation.level=read_uncommitted, which is the default",
        "read_committed",
        claim=Claim({ABORTED_READ: 1}),
        **SPARK,
    ),
    Experiment(
        "HF410",
        "a replayed batch computes something else",
        hf410_unsafe,
        hf410_safe,
        "uuid() in a batch that is computed again",
        "steps that give the same each time, and others refused",
        claim=Claim({INCONSISTENT: 1}),
        **SPARK,
    ),
)
