"""Tasks that send: one writer's share of a batch, in a transaction of its own, by whichever task Spark gives it to.

A task takes the writer's transactional id, which fences whoever had it, and so may a task that comes late: one of a
driver that is dead, or of a job that was given up, with a batch that was cut otherwise since. So taking the id is not
enough. Every take-over of the driver has a name, the holder, and before its first task is started the driver writes
it, by the writer's own id, to the writer's partition of the ledger (again with what the partition said). The rule:

- a task takes the id, then reads the last record of its partition, which is settled by then: whoever had the id can
  commit no more;
- the record is the one the task is to write: an earlier attempt of the task has committed, and nothing is left to do;
- the record has the holder that started the task, and says what the driver has read: the task writes rows and record;
- anything else: a later take-over has written its name. The task writes nothing.

A take-over takes every id, too, before it reads the ledger and writes its name. A task of an earlier holder that has
its id already is fenced by that, and one that takes it later finds the new name. So of a batch's shares, all come from
one cut of it, each exactly once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, Protocol

import pyarrow as pa

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import spark_message
from holdfast.pipeline.core.frames import failure_report, raise_reported
from holdfast.pipeline.sinks.base import SinkFenced, SinkUnavailable
from holdfast.pipeline.sinks.kafka_ledger import HOLDER, Last, LedgerTopic
from holdfast.pipeline.sinks.kafka_records import Share
from holdfast.pipeline.sinks.kafka_writer import Message, Note, Writer

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

TASK_ROWS: Final = 20_000
"""Fewer than this the driver sends itself: starting a job, taking the ids twice and reading the ledger cost more."""


class Envelope(Protocol):
    """Makes the records of a topic of what was set aside; pickled to workers."""

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        """What is sent for these rows."""


@dataclass(frozen=True)
class Holding:
    """What it takes to be one of a sink's writers; pickled to workers, never printed."""

    sink: str
    pipeline: str
    ledger: str
    settings: Mapping[str, Any]
    batch_bytes: int

    def writer(self, number: int) -> Writer:
        name = f"hf-{self.pipeline}--{self.sink}-{number}"
        return Writer(self.sink, name, self.settings, self.batch_bytes)

    def note(self, number: int, value: bytes | None, holder: str) -> Note:
        return Note(self.ledger, number, value, [(HOLDER, holder)] if holder else None)


@dataclass(frozen=True)
class Sending:
    """One writer's part of a batch."""

    number: int
    share: Share
    value: bytes
    """The record that goes to the ledger with it."""
    before: Last
    """What the ledger has to say until then."""


def send_by_tasks(
    spark: SparkSession, holding: Holding, topic: str, envelope: Envelope, sendings: Sequence[Sending]
) -> None:
    """Every share by a task of its own; what failed may have left some of them committed."""
    from py4j.protocol import Py4JJavaError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException

    job = spark.range(0, len(sendings), 1, len(sendings)).mapInArrow(
        partial(_run_tasks, holding, topic, envelope, sendings), "report string"
    )
    try:
        reports = [json.loads(row.report) for row in job.collect()]
    except (PySparkException, Py4JJavaError) as error:
        raise SinkUnavailable(
            f"sink {holding.sink!r}: a task that was sending failed; the ledger tells what it has committed: "
            f"{spark_message(error)}"
        ) from error
    try:
        raise_reported(reports)
    except SinkFenced as fenced:
        # By another copy of the pipeline, or by a late task of ours: the next take-over tells the two apart.
        raise SinkUnavailable(str(fenced)) from fenced


def _run_tasks(
    holding: Holding,
    topic: str,
    envelope: Envelope,
    sendings: Sequence[Sending],
    batches: Iterable[pa.RecordBatch],
) -> Iterator[pa.RecordBatch]:
    reports = []
    for batch in batches:
        for at in batch.column(0).to_pylist():
            try:
                send_share(holding, topic, envelope, sendings[at])
                report: dict[str, Any] = {"writer": sendings[at].number}
            except (HoldfastError, OSError) as error:
                report = failure_report(error)
            reports.append(json.dumps(report))
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], names=["report"])


def send_share(holding: Holding, topic: str, envelope: Envelope, sending: Sending) -> None:
    """Commit the share, unless an earlier attempt of this task has; `SinkFenced` when it may not be."""
    ledger = LedgerTopic(holding.ledger, holding.sink, holding.pipeline, holding.settings)
    writer = holding.writer(sending.number)
    try:
        writer.start()
        if is_sent(holding, sending, ledger.read_one(sending.number)):
            return
        messages = (each for batch in sending.share.batches() for each in envelope.messages(batch))
        writer.write(topic, messages, holding.note(sending.number, sending.value, sending.before.holder))
    finally:
        writer.close()


def is_sent(holding: Holding, sending: Sending, found: Last) -> bool:
    """Whether the share is committed already, by what the ledger says once the writer's id is taken."""
    if found.holder == sending.before.holder:
        if found.value == sending.value:
            return True
        if found.value == sending.before.value:
            return False
    raise SinkFenced(
        f"sink {holding.sink!r}: a later start of the pipeline has taken over the writer {sending.number}. This task "
        "wrote nothing"
    )
