"""The steps of a definition evaluated again, by their own words: what must be in the sinks, and what must have left.

Rules, filters, queries and functions of mode `spark` are evaluated. What a deduplication took out is taken from the
record of the pipeline, and checked elsewhere. Behind a lookup, a Python step of another mode, or a function that has a
`udf` in it, nothing can be said without running what only the pipeline has: from there on rows are judged by what was
recorded.

The source as a frame: the records that the definition at hand has taken, read by Spark's tasks with our own reader.

A row is a record: its place, time, key and headers, the columns it decodes to, or why it does not, and the time that
stood for "now" in the batch that took it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.model import Fate
from holdfast.pipeline.core.frames import as_input
from holdfast.pipeline.core.sql import literal
from holdfast.pipeline.definition.functions import load_function
from holdfast.pipeline.definition.model import (
    Dedupe,
    Expect,
    Filter,
    Join,
    Keyed,
    Lookup,
    PipelineDefinition,
    Python,
    Source,
    Sql,
    Window,
)
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.packing import pack
from holdfast.pipeline.positions import BatchRange, Place, Span
from holdfast.reader import PartitionRange

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

OFFSETS_PER_TASK: Final = 500_000
"""Enough to make a task worth starting, few enough to try one again."""
TASKS_PER_CORE: Final = 8
FIXED: Final = (
    "topic string, partition int, offset bigint, _timestamp timestamp, _key binary, _headers array<struct<key: string, "
    "value: binary>>, _tombstone boolean, _batch_time timestamp, _error string"
)
HEADERS: Final = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
TIME: Final = pa.timestamp("us", tz="UTC")


Taken = tuple[int, int, int]
"""A batch of the definition at hand that took offsets of a partition: from, to, and the time of the batch."""


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
            if span.offsets and entry.fingerprint == fingerprint:
                by_start = found.setdefault((place.topic, place.partition), {})
                by_start[span.start] = (span.start, span.end, entry.batch_time_ms)
    return {place: tuple(sorted(by_start.values())) for place, by_start in found.items()}


def source_frame(spark: SparkSession, reading: Reading, spans: Mapping[Place, tuple[int, int]]) -> DataFrame:
    """The records between these."""
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
                for each in cluster.read(list(tasks[number]), headers=True):
                    yield _records(reading, decoder, each)


def _records(reading: Reading, decoder: SourceDecoder, batch: pa.RecordBatch) -> pa.RecordBatch:
    topic, partition = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
    offsets = batch.column("offset").to_numpy(zero_copy_only=False)
    times_ms, is_taken = _of_batches(reading.taken.get((topic, partition), ()), offsets)
    batch, times_ms = batch.filter(pa.array(is_taken)), times_ms[is_taken]
    decoded = decoder.decode(topic, batch)
    times = batch.column("timestamp").cast(TIME)
    return pa.RecordBatch.from_pydict(
        {
            "topic": pa.repeat(topic, batch.num_rows),
            "partition": pa.repeat(pa.scalar(partition, pa.int32()), batch.num_rows),
            "offset": batch.column("offset"),
            "_timestamp": pc.replace_with_mask(
                times, pc.less(times.cast(pa.int64()), 0), pa.scalar(None, TIME)
            ),  # -1: no time
            "_key": batch.column("key").cast(pa.binary()),
            "_headers": batch.column("headers").cast(HEADERS),
            "_tombstone": batch.column("value").is_null(),
            "_batch_time": pa.array(times_ms * 1000).cast(TIME),
            "_error": decoded.errors,
            **{name: decoded.columns[name] for name in decoder.types},
        }
    )


def _of_batches(taken: Sequence[Taken], offsets: Any) -> tuple[Any, Any]:
    """Of each offset: the time of the batch that took it, and whether one did."""
    if not taken:
        return np.zeros(len(offsets), np.int64), np.zeros(len(offsets), np.bool_)
    starts, ends, times_ms = np.array(taken, np.int64).T
    at = np.searchsorted(starts, offsets, side="right") - 1
    return times_ms[at], (at >= 0) & (offsets < ends[at])


# ---------------------------------------------------------------------------- steps


LINEAGE: Final = "_hf"
PLACE: Final = ("topic", "partition", "offset")
PARSE: Final = "parse"
_LEFT: Final = "topic string, partition int, offset bigint, route string, step string"


@dataclass
class Evaluated:
    """What the definition says of the records that it made itself."""

    main: DataFrame
    """The rows at the end of the steps, with `_hf` and their columns."""
    left: list[DataFrame] = field(default_factory=list)
    """Places of rows that left: topic, partition, offset, route, step."""
    unknown: str = ""
    """The step behind which nothing is known; nothing: all is."""
    expands: bool = False
    before: dict[str, DataFrame] = field(default_factory=dict)
    """By stateful step, the rows that reach it."""

    def rows_of(self, stream: str) -> DataFrame | None:
        """What a sink that takes this is made of; nothing where it is not known. Late rows and duplicates are as they
        reached their step, those of the step itself are not evaluated."""
        step, _, kind = stream.partition(".")
        if not step:
            return None if self.unknown else self.main
        return self.before.get(step) if kind else None

    def all_left(self, spark: SparkSession) -> DataFrame:
        nothing = spark.createDataFrame([], _LEFT)
        return reduce(lambda one, other: one.unionByName(other), self.left, nothing)


def evaluate(
    spark: SparkSession, definition: PipelineDefinition, records: DataFrame, aside: DataFrame
) -> Evaluated:
    """`records` are those made by this definition; `aside` is what the pipeline recorded (place, route, step)."""
    dead = records.where("_error IS NOT NULL")
    rows = records.where("_error IS NULL").selectExpr(
        "named_struct('topic', topic, 'partition', partition, 'offset', offset, 'index', 0) AS _hf",
        "*",
    )
    found = Evaluated(rows.drop(*PLACE, "_error"))
    found.left.append(_left(dead.selectExpr(*PLACE), Fate.DEAD_LETTER, PARSE))
    for step in definition.steps:
        if isinstance(step, Dedupe | Window | Keyed | Join):
            found.before[step.name] = found.main
        match step:
            case Expect():
                if step.otherwise in ("warn", "fail"):
                    continue
                fate = Fate.DEAD_LETTER if step.otherwise == "quarantine" else Fate.FILTERED
                _part(found, f"coalesce(({step.that}), false)", fate, step.name)
            case Filter():
                _part(found, f"coalesce(({step.where}), false)", Fate.FILTERED, step.name)
            case Sql():
                _query(spark, found, step)
            case Dedupe():
                _without(found, aside, step.name)
            case Python(mode="spark"):
                after = load_function(step, definition.directory)(found.main)
                if "PythonUDF" in after._jdf.queryExecution().analyzed().toJSON():
                    found.unknown = step.name
                    return found
                _took(found, after, step)
            case Python() | Lookup():
                found.unknown = step.name
                return found
    return found


def _places(frame: DataFrame) -> DataFrame:
    return frame.selectExpr(*(f"{LINEAGE}.{name} AS {name}" for name in PLACE))


def _left(places: DataFrame, fate: Fate, step: str) -> DataFrame:
    return places.selectExpr(*PLACE, f"{literal(fate)} AS route", f"{literal(step)} AS step")


def _part(found: Evaluated, condition: str, fate: Fate, step: str) -> None:
    found.left.append(_left(_places(found.main.where(f"NOT ({condition})")), fate, step))
    found.main = found.main.where(condition)


def _query(spark: SparkSession, found: Evaluated, step: Sql) -> None:
    with as_input(spark, found.main):
        after = spark.sql(step.query)
    _took(found, after, step)


def _took(found: Evaluated, after: DataFrame, step: Sql | Python) -> None:
    """A step has made these rows of those before it; what is missing has left."""
    given, found.main = found.main, after
    found.expands = found.expands or step.expand
    missing = _places(given).join(_places(found.main).distinct(), list(PLACE), "left_anti")
    found.left.append(_left(missing, Fate.FILTERED, step.name))


def _without(found: Evaluated, aside: DataFrame, step: str) -> None:
    """Rows that the step is recorded to have taken out."""
    from pyspark.sql import functions

    gone = aside.where(functions.col("step") == step).where("route IN ('duplicate', 'late')")
    found.left.append(gone.select(*PLACE, "route", "step"))
    taken = gone.select(*(functions.col(name).alias(f"_gone_{name}") for name in PLACE)).distinct()
    same = reduce(
        lambda one, other: one & other,
        (functions.col(f"{LINEAGE}.{name}") == functions.col(f"_gone_{name}") for name in PLACE),
    )
    found.main = found.main.join(taken, same, "left_anti")
