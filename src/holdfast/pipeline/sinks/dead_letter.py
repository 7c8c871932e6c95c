"""The dead-letter sink: records that were set aside, as they came, with where from and why.

In a topic, that stands in headers, which are those of holdfast's own consumers, so `holdfast dlq list`, `show` and
`redrive` work on it. Key, value and headers stay as they were; the record goes to the partition with the number it came
from where there is one. The topic is made to keep what it has: a dead letter waits for somebody to look.

Where no topic may be written, dead letters are the rows of another sink, with its ledger and its guarantees
(`LettersAsRows`): a column for each part of the record, and `reason`, `step` and `error`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.client.dead_letter_dialects import Failure, failure_headers
from holdfast.client.messages import away_from_home
from holdfast.client.retries import without_history
from holdfast.pipeline.core.sql import LINEAGE
from holdfast.pipeline.definition.model import DeadLetter, KafkaSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.row_digest import DigestKey
from holdfast.pipeline.sinks.base import Batch, Prepared, Problem, Sink, SinkContext
from holdfast.pipeline.sinks.kafka import KafkaSinkWriter
from holdfast.pipeline.sinks.kafka_records import Digesting, content_of
from holdfast.pipeline.sinks.kafka_sending import Envelope
from holdfast.pipeline.sinks.kafka_writer import Message

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructType

NAME = "dead-letter"
PARSE = "parse"
"""The reason of a record that could not be read; `sink:<name>` is that of one whose rows a sink does not take. Every
other reason is a rule's name."""
CANNOT_PARSE = "holdfast.pipeline.CannotParse"
RULE_BROKEN = "holdfast.pipeline.RuleBroken"


REJECTED = "holdfast.pipeline.RejectedBySink"
HEADERS = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))


NO_TIME_FROM_MS = 253_402_300_800_000
"""The year 10000: a time from there on is in no table, since not every database has it."""
AS_ROW = {
    "topic": f"{LINEAGE}.topic",
    "partition": f"{LINEAGE}.partition",
    "offset": f"{LINEAGE}.offset",
    "timestamp": f"IF(unix_millis(_timestamp) < {NO_TIME_FROM_MS}L, _timestamp, NULL)",
    "key": "_key",
    "value": "_raw",
    "headers": "transform(coalesce(_headers, array()), h -> struct(h.key AS key, h.value AS value))",
    "reason": "_reason",
    "step": f"IF(_reason = '{PARSE}' OR startswith(_reason, 'sink:'), NULL, _reason)",
    "error": r"translate(_error, '\u0000', '\uFFFD')",
}
"""The columns of a dead letter in a table, as SQL. A NUL is no part of a text in PostgreSQL."""


def _error_of(reason: str) -> str:
    if reason.startswith("sink:"):
        return REJECTED
    return CANNOT_PARSE if reason == PARSE else RULE_BROKEN


class DeadLetterSink(KafkaSinkWriter):
    rejects = False
    topic_config: Mapping[str, str] = {"retention.ms": "-1", "retention.bytes": "-1"}

    def __init__(self, definition: DeadLetter, pipeline: str) -> None:
        super().__init__(
            KafkaSink(
                definition.topic, name=NAME, bootstrap=definition.bootstrap, settings=definition.settings
            ),
            pipeline,
        )

    def check(self, rows: StructType) -> list[Problem]:
        return []

    def records(self, rows: DataFrame) -> DataFrame:
        from pyspark.sql import functions

        return rows.select(
            LINEAGE,
            functions.col("_key").alias("key"),
            functions.col("_raw").alias("value"),
            functions.expr(
                "transform(coalesce(_headers, array()), h -> struct(h.key AS key, h.value AS value))"
            ).alias("headers"),
            functions.expr("unix_millis(_timestamp)").alias("timestamp_ms"),
            functions.col("_reason").alias("reason"),
            functions.col("_error").alias("error"),
        )

    def envelope(self, batch_time_ms: int) -> LetterEnvelope:
        return LetterEnvelope(self._pipeline, batch_time_ms, self.partitions)

    def _digesting(self, envelope: Envelope) -> Digesting | None:
        return None if self.key is None else LetterDigesting(self.key, envelope)


@dataclass(frozen=True)
class LetterEnvelope:
    """Dead letters of a batch; its time stands for "now", so that a batch that is repeated writes the same."""

    pipeline: str
    batch_time_ms: int
    partitions: int
    """Of the topic."""

    def messages(self, batch: pa.RecordBatch) -> Iterator[Message]:
        for row in batch.to_pylist():
            place = row[LINEAGE]
            reason = row["reason"]
            failure = Failure(
                topic=place["topic"],
                partition=place["partition"],
                offset=place["offset"],
                timestamp_ms=row["timestamp_ms"],
                group=self.pipeline,
                error=_error_of(reason),
                message=row["error"],
                reason=reason,
                attempts=1,
                failed_ms=self.batch_time_ms,
            )
            own = tuple((header["key"], header["value"]) for header in row["headers"])
            headers: list[tuple[str, str | bytes | None]] = [
                *away_from_home(without_history(own)),
                *failure_headers(failure),
            ]
            partition = place["partition"] if place["partition"] < self.partitions else -1
            yield row["key"], row["value"], headers, partition


@dataclass(frozen=True)
class LetterDigesting:
    """Of records that become dead letters: of what is sent for them."""

    key: DigestKey
    envelope: Envelope

    def of(self, batch: pa.RecordBatch) -> int:
        messages = list(self.envelope.messages(batch))
        headers = [
            [
                {"key": name, "value": each.encode() if isinstance(each, str) else each}
                for name, each in given or ()
            ]
            for _, _, given, _ in messages
        ]
        places = [{**place, "index": 0} for place in batch.column(LINEAGE).to_pylist()]  # a letter names none
        return content_of(
            self.key,
            pa.array(places, batch.schema.field(LINEAGE).type),
            pa.array([message[0] for message in messages], pa.binary()),
            pa.array([message[1] for message in messages], pa.binary()),
            pa.array(headers, HEADERS),
        )


def as_rows(letters: DataFrame) -> DataFrame:
    """Dead letters as the rows of a table."""
    from pyspark.sql import functions

    return letters.select(LINEAGE, *(functions.expr(text).alias(name) for name, text in AS_ROW.items()))


class LettersAsRows(Sink):
    """A sink of rows that gets dead letters."""

    def __init__(self, sink: Sink) -> None:
        self.name = sink.name
        self._sink = sink

    @property
    def key(self) -> DigestKey | None:
        return self._sink.key

    @key.setter
    def key(self, key: DigestKey | None) -> None:
        self._sink.key = key

    def check(self, rows: StructType) -> list[Problem]:
        return []

    def open(self, context: SinkContext, spark: SparkSession | None) -> None:
        self._sink.open(context, spark)

    def last_entry(self) -> Entry | None:
        return self._sink.last_entry()

    def prepare(self, batch: Batch, rows: DataFrame) -> Prepared:
        return self._sink.prepare(batch, as_rows(rows))

    def unfinished(self) -> Entry | None:
        return self._sink.unfinished()

    def missing(self) -> str | None:
        return self._sink.missing()

    def holds_rows(self) -> bool:
        return self._sink.holds_rows()

    def forget(self) -> None:
        self._sink.forget()

    def close(self) -> None:
        self._sink.close()
