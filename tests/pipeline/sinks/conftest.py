"""What tests of sinks share: rows with lineage, batches and entries that follow each other."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import pytest

from holdfast.pipeline.ledger import Entry, Intake
from holdfast.pipeline.positions import BatchRange, Place, Positions, Span
from holdfast.pipeline.sinks.base import Batch, SinkContext

if TYPE_CHECKING:
    from pathlib import Path

    from pyspark.sql import DataFrame, SparkSession

    from holdfast.pipeline.sinks.base import Sink

TOPIC_ID = uuid.UUID(int=7)
RESERVED = (
    "_hf struct<topic:string,partition:int,offset:bigint,index:int>, _key binary, _raw binary, _timestamp timestamp, "
    "_tombstone boolean, _headers array<struct<key:string,value:binary>>, _reason string, _error string"
)


@dataclass
class Rows:
    """Makes frames as the engine gives them to a sink."""

    spark: SparkSession

    def __call__(
        self,
        values: Sequence[dict[str, Any]],
        columns: str = "id bigint, name string",
        *,
        start: int = 0,
        partitions: int = 1,
    ) -> DataFrame:
        """Rows of `orders`, value by value at consecutive offsets, spread over `partitions` of the topic."""
        names = [part.split()[0] for part in columns.split(", ")]
        data = []
        for at, value in enumerate(values):
            place = ("orders", at % partitions, start + at // partitions, 0)
            reserved = (
                place,
                value.get("_key", f"key-{at}".encode()),
                value.get("_raw", b"raw"),
                value.get("_timestamp"),
                value.get("_tombstone", False),
                value.get("_headers", []),
                value.get("_reason"),
                value.get("_error"),
            )
            data.append((*reserved, *(value.get(name) for name in names)))
        return self.spark.createDataFrame(data, f"{RESERVED}, {columns}")


@dataclass
class Batches:
    """Cuts ranges that follow each other, and makes the entries for them."""

    sink: str
    pipeline: str = "shop"
    place: Place = field(default_factory=lambda: Place("orders", TOPIC_ID, 0))
    labels: Any = field(default_factory=itertools.count)

    def at(self, start: int, end: int) -> Batch:
        spans = {self.place: Span(start, end, 3)}
        return Batch(BatchRange(spans), 1_700_000_000_000, f"attempt-{next(self.labels)}")

    def entry(self, batch: Batch, before: Entry | None, rows: int = 0) -> Entry:
        standing = before.positions if before else Positions({})
        return Entry(
            pipeline=self.pipeline,
            sink=self.sink,
            number=before.number + 1 if before else 0,
            range=batch.range,
            positions=standing.moved(batch.range),
            batch_time_ms=batch.batch_time_ms,
            fingerprint="f",
            intake=Intake(records=rows),
            rows=rows,
        )

    def write(self, sink: Sink, batch: Batch, rows: DataFrame) -> Entry:
        """What the engine does with one sink and one batch."""
        prepared = sink.prepare(batch, rows)
        entry = self.entry(batch, sink.last_entry(), prepared.rows)
        prepared.commit(entry)
        return entry


@pytest.fixture
def rows(spark: SparkSession) -> Rows:
    return Rows(spark)


@pytest.fixture
def batches() -> Callable[..., Batches]:
    return Batches


@pytest.fixture
def context(tmp_path: Path) -> SinkContext:
    return SinkContext("shop", str(tmp_path / "home"), {}, "attempt")
