"""The source as a frame: every offset of the scope, read by Spark's tasks with holdfast's own reader.

A row is an offset. A record has its time, key, headers and value, the columns it decodes to, or why it does not, and
of the batch that took it the time that stood for "now" and whether the definition at hand made it. Markers and aborted
records have their kind and nothing else; what is in no row was compacted away.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.decoding import SourceDecoder
from holdfast.pipeline.definition.model import Source
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.packing import pack
from holdfast.pipeline.positions import BatchRange, Place, Span
from holdfast.reader import PartitionRange, RangeReport

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OFFSETS_PER_TASK: Final = 500_000
"""Enough to make a task worth starting, few enough to try one again."""
TASKS_PER_CORE: Final = 8
FIXED: Final = (
    "topic string, partition int, offset bigint, kind string, is_current boolean, _timestamp timestamp, _key binary, "
    "_raw binary, _headers array<struct<key: string, value: binary>>, _tombstone boolean, _batch_time timestamp, "
    "_error string"
)
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME: Final = pa.timestamp("us", tz="UTC")


@dataclass(frozen=True)
class Taken:
    """A batch that took offsets of a partition."""

    start: int
    end: int
    batch_time_ms: int
    is_current: bool
    """Made by the definition at hand."""


@dataclass(frozen=True)
class Reading:
    """What a task needs; it is pickled to workers."""

    settings: Mapping[str, str]
    source: Source
    taken: Mapping[tuple[str, int], tuple[Taken, ...]]
    """By topic and partition, ascending."""


def batches_taken(entries: Sequence[Entry], fingerprint: str) -> dict[tuple[str, int], tuple[Taken, ...]]:
    found: dict[tuple[str, int], dict[int, Taken]] = {}
    for entry in entries:
        for place, span in entry.range.spans.items():
            if span.offsets:
                taken = Taken(span.start, span.end, entry.batch_time_ms, entry.fingerprint == fingerprint)
                found.setdefault((place.topic, place.partition), {})[span.start] = taken
    return {place: tuple(each for _, each in sorted(by.items())) for place, by in found.items()}


def source_frame(spark: SparkSession, reading: Reading, spans: Mapping[Place, tuple[int, int]]) -> DataFrame:
    """Every offset between these, but for those in no batch of the log."""
    ddl = ", ".join(
        [FIXED, *(f"`{name}` {kind}" for name, kind in SourceDecoder(reading.source).ddl.items())]
    )
    whole = BatchRange({place: Span(start, end) for place, (start, end) in spans.items()})
    cores = spark.sparkContext.defaultParallelism
    at_least = min(cores * TASKS_PER_CORE, -(-whole.offsets // OFFSETS_PER_TASK))
    tasks = pack(whole, cores, at_least=max(1, at_least))
    if not tasks:
        return spark.createDataFrame([], ddl)
    return spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(partial(_run_tasks, reading, tasks), ddl)


def _run_tasks(
    reading: Reading, tasks: Sequence[tuple[PartitionRange, ...]], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    from holdfast.reader.cluster import Cluster

    decoder = SourceDecoder(reading.source)
    for batch in batches:
        for number in batch.column(0).to_pylist():
            with Cluster(dict(reading.settings)) as cluster:
                reports: list[RangeReport] = []
                found = cluster.read(list(tasks[number]), headers=True, reports=reports)
                for report in reports:
                    report.set_aside = []
                for each in found:
                    yield _records(reading, decoder, each)
                for report in reports:
                    yield from _others(report, decoder)


def _records(reading: Reading, decoder: SourceDecoder, batch: pa.RecordBatch) -> pa.RecordBatch:
    topic = batch.column("topic")[0].as_py()
    partition = batch.column("partition")[0].as_py()
    rows = batch.num_rows
    decoded = decoder.decode(topic, batch)
    offsets = batch.column("offset").to_numpy(zero_copy_only=False)
    times_ms, is_current = _of_batches(reading.taken.get((topic, partition), ()), offsets)
    times = batch.column("timestamp").cast(TIME)
    columns: list[Any] = [
        pa.repeat(topic, rows),
        pa.array(np.full(rows, partition, np.int32)),
        pa.array(offsets),
        pa.repeat("record", rows),
        pa.array(is_current),
        pc.replace_with_mask(times, pc.less(times.cast(pa.int64()), 0), pa.scalar(None, TIME)),  # -1: no time
        batch.column("key").cast(pa.binary()),
        batch.column("value").cast(pa.binary()),
        batch.column("headers").cast(HEADERS),
        batch.column("value").is_null(),
        pa.array(times_ms * 1000).cast(TIME),
        decoded.errors,
        *(decoded.columns[name] for name in decoder.types),
    ]
    return pa.RecordBatch.from_arrays(columns, names=_names(decoder))


def _of_batches(taken: Sequence[Taken], offsets: Any) -> tuple[Any, Any]:
    """Of each offset: the time of the batch that took it, and whether this definition made it."""
    if not taken:
        return np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.bool_)
    at = np.searchsorted(np.array([each.start for each in taken]), offsets, side="right") - 1
    inside = (at >= 0) & (offsets < np.array([each.end for each in taken])[at])
    times = np.array([each.batch_time_ms for each in taken], np.int64)[at]
    current = np.array([each.is_current for each in taken], np.bool_)[at]
    return times, current & inside


def _others(report: RangeReport, decoder: SourceDecoder) -> Iterator[pa.RecordBatch]:
    """Offsets that are no records."""
    for kind, first, last in report.set_aside or ():
        offsets = np.arange(max(first, report.range.start), min(last, report.range.end - 1) + 1)
        rows = len(offsets)
        if not rows:
            continue
        columns: list[Any] = [
            pa.repeat(report.range.topic, rows),
            pa.array(np.full(rows, report.range.partition, np.int32)),
            pa.array(offsets, pa.int64()),
            pa.repeat(kind, rows),
            pa.repeat(False, rows),
            *(
                pa.nulls(rows, each)
                for each in (TIME, pa.binary(), pa.binary(), HEADERS, pa.bool_(), TIME, pa.string())
            ),
            *(pa.nulls(rows, each) for each in decoder.types.values()),
        ]
        yield pa.RecordBatch.from_arrays(columns, names=_names(decoder))


def _names(decoder: SourceDecoder) -> list[str]:
    fixed = (
        "topic",
        "partition",
        "offset",
        "kind",
        "is_current",
        "_timestamp",
        "_key",
        "_raw",
        "_headers",
        "_tombstone",
        "_batch_time",
        "_error",
    )
    return [*fixed, *decoder.types]
