"""Keyed state: a Python function that remembers something for each key (`holdfast.pipeline.keyed` is its side of it).

A micro-batch is one job. Rows are dealt by the hash of their key into buckets and sorted there; workers look their keys
up in the bucket's files, call the function and write rows and new versions of keys (`keyed_worker`, `keyed_files`). A
file counts only when its worker's report names it, so a task that ran twice leaves nothing behind.

How many buckets there are is fixed when the state is new and kept in its notes: rows are numbered by bucket, hash and
key, and a batch that is repeated with more cores must number them alike.

A row is late when its event is so far behind its own watermark that its key could have been forgotten: event time + ttl
at or before the watermark; and when it has no event time.
"""

from __future__ import annotations

import inspect
import itertools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.pipeline.core.failures import StepError, Unbalanced, spark_message
from holdfast.pipeline.core.frames import map_in_arrow, pickled, raise_reported
from holdfast.pipeline.core.sql import (
    HEADERS_DDL,
    LINEAGE,
    LINEAGE_TYPE,
    PLACE_COLUMNS,
    arrow_schema,
    ddl_schema,
    of_step,
    quoted,
)
from holdfast.pipeline.definition.columns import KEY_PREFIX
from holdfast.pipeline.definition.functions import load_function, name_of
from holdfast.pipeline.definition.model import EventTime, Keyed
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.digest import Tally, hash_sql
from holdfast.pipeline.state.keyed_files import NEVER, NUMBERS, STATE, Passed, bucket_of, state_schema
from holdfast.pipeline.state.keyed_worker import BUCKET, EVENT, HASH, OWN, PLACE, KeyedJob, run_buckets
from holdfast.pipeline.state.operator import LATE, OperatorContext, OperatorResult
from holdfast.pipeline.state.segments import (
    Segment,
    alive,
    check_present,
    merged_tier,
    segments_to_merge,
    with_merged,
)

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import StructField, StructType


BUCKETS: Final = 8
"""Of a new state: files of a segment, and the greatest number of tasks that can work side by side."""
KEY_TYPES: Final = (
    "string",
    "binary",
    "boolean",
    "tinyint",
    "smallint",
    "int",
    "bigint",
    "date",
    "timestamp",
    "timestamp_ntz",
    "decimal",
)
"""Of which two that are equal are also written alike; a double is not such a type."""
EVENT_TIME: Final = "_event_time"
ROWS_DDL: Final = f"_key binary, _timestamp timestamp, _tombstone boolean, _headers {HEADERS_DDL}"


@dataclass(frozen=True)
class Shapes:
    """The schemas of a step on certain rows."""

    key: tuple[str, ...]
    """As the rows spell it."""
    handed_out: tuple[str, ...]
    output: StructType
    """The step's columns alone."""
    output_arrow: pa.Schema
    state_arrow: pa.Schema


class KeyedOperator:
    """The `keyed` step of a pipeline."""

    has_own_rows = True

    def __init__(self, step: Keyed, event_time: EventTime, directory: str) -> None:
        self.name = step.name
        self._step = step
        self._directory = directory
        self._ahead_ms = parse_duration_ms(event_time.ahead)
        self._ttl_ms = parse_duration_ms(step.ttl)
        self._known: tuple[StructType, Shapes] | None = None

    @cached_property
    def _function(self) -> Callable[..., Any]:
        """Loaded once: a file that is changed while the pipeline runs does not change it."""
        return load_function(self._step, self._directory)

    @cached_property
    def _pickled_function(self) -> bytes:
        return pickled(self._function)

    def schemas(self, spark: SparkSession, rows: StructType) -> Mapping[str, StructType]:
        self._check_function(self._function)
        return {"": self._rows_schema(self._shapes_on(rows)), LATE: rows}

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        shapes = self._shapes_on(rows.schema)
        job, kept, merging = self._job(shapes, context)
        reports = _collect(self._dealt(rows, shapes, len(job.files)), job)
        segments = _segments(context, job, reports, kept, merging)
        return OperatorResult(
            rows=self._rows(context, shapes, reports),
            state=replace(context.state, segments=segments, notes=self._notes(context, job, reports)),
            taken=_tally(reports, "taken"),
            late=_tally(reports, "late"),
            duplicate=Tally(),
            row_count=sum(report["rows"] for report in reports),
            streams={LATE: rows.where(self._late_sql)},
            counters={
                "expired": sum(report["counters"]["expired"] for report in reports),
                "fired": sum(report["counters"]["fired"] for report in reports),
            },
        )

    def _check_function(self, function: Callable[..., Any]) -> None:
        try:
            signature = inspect.signature(function)
        except (TypeError, ValueError):  # one written in C may have none to show
            return
        try:
            signature.bind((), None, None)
        except TypeError as error:
            raise StepError(
                self.name,
                f"its function {name_of(function)}{signature} is called with key, rows and state: {error}",
            ) from error

    @property
    def _late_sql(self) -> str:
        event, own = "unix_millis(_hf.event_time)", "unix_millis(_hf.watermark)"
        return f"(_hf.event_time IS NULL OR coalesce({event} + {self._ttl_ms}L <= {own}, false))"

    # -------------------------------------------------------------------- schemas

    def _shapes_on(self, rows: StructType) -> Shapes:
        if self._known is None or self._known[0] != rows:
            self._known = rows, self._shapes(rows)
        return self._known[1]

    def _shapes(self, rows: StructType) -> Shapes:
        from pyspark.sql.types import StructType

        names = {field.name.lower(): field for field in rows.fields}
        keys = [self._key_field(name, names.get(name.lower())) for name in self._step.key]
        if not keys:
            raise StepError(self.name, "it has no key")
        own = [
            field.name
            for field in rows.fields
            if not field.name.startswith("_") or field.name.startswith(KEY_PREFIX) or field.name == "_unknown"
        ]
        output = self._declared("schema", self._step.schema)
        reserved = [field.name for field in output if field.name.startswith("_")]
        if reserved:
            raise StepError(
                self.name, f"its schema names {reserved[0]!r}: names with an underscore before are ours"
            )
        value = self._declared("state", self._step.state)
        return Shapes(
            tuple(field.name for field in keys),
            (*own, EVENT_TIME),
            output,
            self._arrow("schema", output),
            state_schema(list(self._arrow("key", StructType(keys))), _struct(self._arrow("state", value))),
        )

    def _key_field(self, name: str, field: StructField | None) -> StructField:
        if field is None:
            raise StepError(self.name, f"there is no column {name!r} to be its key")
        kind = field.dataType.simpleString()
        if kind.split("(")[0] not in KEY_TYPES:
            raise StepError(
                self.name, f"the column {name!r} is {kind}, which cannot be a key; cast it in a step before"
            )
        if field.name in (*NUMBERS, STATE):
            raise StepError(
                self.name, f"a key cannot have the name {field.name!r}: rename it in a step before"
            )
        return field

    def _declared(self, what: str, text: str) -> StructType:
        from pyspark.sql.types import StructField, StructType

        if not text.strip():
            raise StepError(self.name, f"its {what} names no columns")
        try:
            declared = ddl_schema(text)
        except Exception as error:
            raise StepError(self.name, f"its {what} {text!r}: {spark_message(error)}") from error
        for field in declared:
            kind = field.dataType.simpleString()
            if "variant" in kind or "interval" in kind:
                raise StepError(self.name, f"its {what} has {field.name!r} as {kind}, which cannot be kept")
        lowered = [field.name.lower() for field in declared]
        twice = next((name for name in lowered if lowered.count(name) > 1), None)
        if twice is not None:
            raise StepError(self.name, f"its {what} names {twice!r} twice")
        return StructType([StructField(field.name, field.dataType, True) for field in declared])

    def _arrow(self, what: str, schema: StructType) -> pa.Schema:
        try:
            return arrow_schema(schema)
        except Exception as error:
            raise StepError(self.name, f"its {what} cannot be kept: {spark_message(error)}") from error

    def _rows_schema(self, shapes: Shapes) -> StructType:
        from pyspark.sql.types import StructType

        return StructType(
            [*ddl_schema(f"{LINEAGE} {LINEAGE_TYPE}, {ROWS_DDL}").fields, *shapes.output.fields]
        )

    # -------------------------------------------------------------------- the job

    def _job(
        self, shapes: Shapes, context: OperatorContext
    ) -> tuple[KeyedJob, tuple[Segment, ...], Sequence[Segment]]:
        """What workers are told; the segments that matter where the batch ends, and those of them that become one."""
        notes = context.state.notes
        buckets = int(notes.get("buckets", BUCKETS))
        is_event = self._step.timers == "event"
        since = Passed(_number(notes.get("watermark_ms")), _number(notes.get("clock_ms")))
        now = Passed(_number(context.next_watermark_ms), context.batch_time_ms)
        known = kept = context.state.segments
        # A processing timer can hold a key past its `_until`: such rows are dropped by merging only.
        if is_event:
            known = alive(known, since.watermark_ms)  # what ends within this batch has its last say in it
            kept = alive(known, now.watermark_ms)
        merging = segments_to_merge(kept) or []
        for segment in known:
            check_present(context.store.path, segment)
        rows_directory = os.path.join(context.scratch, f"keyed-{self.name}")
        job = KeyedJob(
            step=self.name,
            function=self._pickled_function,
            function_name=self._step.function
            if isinstance(self._step.function, str)
            else name_of(self._function),
            key=shapes.key,
            handed_out=shapes.handed_out,
            output=shapes.output_arrow,
            state=shapes.state_arrow,
            ttl_ms=self._ttl_ms,
            is_event=is_event,
            number=context.number,
            since=since,
            now=now,
            files=_by_bucket(context, known, buckets),
            merging=_by_bucket(context, merging, buckets),
            merges_all=len(merging) == len(kept),
            rows_directory=rows_directory,
            state_directory=context.store.segment_dir(context.label, self.name),
            merged_directory=context.store.segment_dir(context.label, self.name),
        )
        for directory in (job.rows_directory, job.state_directory, job.merged_directory):
            os.makedirs(directory, exist_ok=True)
        return job, kept, merging

    def _dealt(self, rows: DataFrame, shapes: Shapes, buckets: int) -> DataFrame:
        """The rows bucket by bucket, each in the order the function gets them.

        Late ones are there to be counted, and have no hash. One row more for each bucket stands for the bucket, so that
        one without rows is handled too; it has no place either.
        """
        from pyspark.sql import functions as f

        keys = [quoted(name) for name in shapes.key]
        hashed = f"xxhash64({', '.join(keys)})"
        sent = [name for name in shapes.handed_out if name != EVENT_TIME]
        sent += [name for name in shapes.key if name not in sent]
        dealt = rows.selectExpr(
            f"CAST(pmod({hashed}, {buckets}) AS INT) AS {BUCKET}",
            f"CASE WHEN NOT {self._late_sql} THEN {hashed} END AS {HASH}",
            f"{hash_sql()} AS {PLACE}",
            # An event ahead of its record by a wrong clock would keep its key for ever.
            f"least(unix_millis(_hf.event_time), unix_millis(_hf.timestamp) + {self._ahead_ms}L) AS {EVENT}",
            f"unix_millis(_hf.watermark) AS {OWN}",
            *(f"_hf.{name.removeprefix('_hf_')} AS {name}" for name in PLACE_COLUMNS),
            f"_hf.event_time AS {EVENT_TIME}",
            *map(quoted, sent),
        )
        session = rows.sparkSession
        stand_ins = session.range(0, buckets, 1, 1).selectExpr(f"CAST(id AS INT) AS {BUCKET}")
        tasks = min(buckets, session.sparkContext.defaultParallelism)
        everything = dealt.unionByName(stand_ins, allowMissingColumns=True)
        sorted_rows = everything.repartitionById(tasks, f.expr(f"{BUCKET} % {tasks}")).sortWithinPartitions(
            BUCKET, HASH, *keys, *PLACE_COLUMNS
        )
        return sorted_rows.drop(*PLACE_COLUMNS)

    # -------------------------------------------------------------------- what came of it

    def _rows(
        self, context: OperatorContext, shapes: Shapes, reports: Sequence[Mapping[str, Any]]
    ) -> DataFrame:
        """The step's rows, numbered through."""
        schema = self._rows_schema(shapes)
        files = [report["rows_file"] for report in reports if report["rows_file"]]
        if not files:
            return context.spark.createDataFrame([], schema)
        stored = ddl_schema("_bucket int, _index bigint, _key binary, _timestamp timestamp")
        for field in shapes.output.fields:
            stored = stored.add(field)
        firsts = itertools.accumulate((report["rows"] for report in reports), initial=0)
        first = f"array({', '.join(f'{number}L' for number in firsts)})[_bucket]"
        return (
            context.spark.read.schema(stored)
            .parquet(*files)
            .selectExpr(
                of_step(self.name, f"{context.number}L", f"CAST({first} + _index AS INT)"),
                "_key",
                "_timestamp",
                "false AS _tombstone",
                f"CAST(NULL AS {HEADERS_DDL}) AS _headers",
                *(quoted(field.name) for field in shapes.output.fields),
            )
        )

    def _notes(
        self, context: OperatorContext, job: KeyedJob, reports: Sequence[Mapping[str, Any]]
    ) -> Mapping[str, Any]:
        counted = {
            name: int(context.state.notes.get(name, 0)) + sum(report["counters"][name] for report in reports)
            for name in ("keys", "expired", "fired")
        }
        return {
            **context.state.notes,
            **counted,
            "buckets": len(job.files),
            "watermark_ms": None if job.now.watermark_ms == NEVER else job.now.watermark_ms,
            "clock_ms": job.now.clock_ms,
        }


def _number(time_ms: int | None) -> int:
    return NEVER if time_ms is None else time_ms


def _struct(schema: pa.Schema) -> pa.StructType:
    import pyarrow as pa

    return pa.struct(list(schema))


def _by_bucket(
    context: OperatorContext, segments: Sequence[Segment], buckets: int
) -> tuple[tuple[str, ...], ...]:
    found: list[list[str]] = [[] for _ in range(buckets)]
    for segment in segments:
        for path in context.store.paths(segment):
            found[bucket_of(path)].append(path)
    return tuple(map(tuple, found))


def _collect(dealt: DataFrame, job: KeyedJob) -> list[dict[str, Any]]:
    """Each bucket's report, in the order of buckets."""
    collected = map_in_arrow(dealt, partial(run_buckets, job), "report string").collect()
    reports = [json.loads(row.report) for row in collected]
    raise_reported(reports)
    reports.sort(key=lambda report: int(report["bucket"]))
    if [report["bucket"] for report in reports] != list(range(len(job.files))):
        raise Unbalanced(
            f"step {job.step!r}: {len(reports)} of {len(job.files)} buckets were reported. Nothing was committed; "
            "please report this"
        )
    return reports


def _tally(reports: Sequence[Mapping[str, Any]], name: str) -> Tally:
    return sum((Tally(*report[name]) for report in reports), Tally())


def _segments(
    context: OperatorContext,
    job: KeyedJob,
    reports: Sequence[Mapping[str, Any]],
    kept: tuple[Segment, ...],
    merging: Sequence[Segment],
) -> tuple[Segment, ...]:
    """The state's segments where the batch ends."""
    added, merged = (
        context.store.adopt(directory, tier, reported=[report[name] for report in reports])
        for directory, tier, name in (
            (job.state_directory, 0, "state_file"),
            (job.merged_directory, merged_tier(merging) if merging else 0, "merged_file"),
        )
    )
    segments = with_merged(kept, merging, merged) if merging else kept
    return (*segments, *([added] if added else []))
