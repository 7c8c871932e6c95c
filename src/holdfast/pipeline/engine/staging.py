"""Reading the range of a batch once, into Parquet files in the pipeline's home.

Tasks run in Spark's Python workers: each reads its ranges, decodes values and keys, writes files of its own and
reports what it wrote and counted. Rows do not cross between Python and the JVM: Spark reads the files. A task that
is run twice writes under another name, and only reported files are read, so a lost worker costs time and nothing else.
A small batch is staged by the driver itself, which is quicker than asking Spark.

What a task counts is the *intake*: every offset of a range is a record, a marker, aborted or missing, or the batch
fails. Count and digest of the records are taken here, before the first step, apart for those that could be decoded
and those that could not.

The files' columns: `_topic _partition _offset _timestamp _key _raw _headers _tombstone _error _row`, then the key's
fields as `_key_<name>`, then the value's. `_row` is the number of the row (`sinks.staged`). `_raw` is null for decoded
rows when nothing can ask for it any more. A source with an event time adds `decoding.EVENT_DDL`, and `Staged` says what
of it was seen before each piece of a partition.
"""

from __future__ import annotations

import json
import os
import uuid
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.core.failures import Unbalanced
from holdfast.pipeline.core.frames import failure_report, raise_reported
from holdfast.pipeline.core.sql import HEADERS_DDL, ddl_schema
from holdfast.pipeline.definition.model import Expect, Lookup, PipelineDefinition, Source
from holdfast.pipeline.digest import Tally, digest_of_offsets
from holdfast.pipeline.engine.decoding import EVENT_DDL, RecordDecoder, decoded_ddl, record_times
from holdfast.pipeline.ledger import Intake, Rejected
from holdfast.pipeline.packing import Task, pack
from holdfast.pipeline.positions import BatchRange, Place
from holdfast.pipeline.sinks.staged import ROW, SMALL_BYTES, SMALL_OFFSETS, row_numbers
from holdfast.reader import PartitionRange, RangeReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from holdfast.reader.cluster import Cluster

ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""Decoded rows kept in memory before they go to the file."""
COMMON_DDL: Final = (
    "_topic string, _partition int, _offset bigint, _timestamp timestamp, _key binary, _raw binary, "
    f"_headers {HEADERS_DDL}, _tombstone boolean, _error string, {ROW} bigint"
)
LINEAGE_DDL: Final = (
    f"struct<topic:string,partition:int,offset:bigint,index:int,timestamp:timestamp,key:binary,headers:{HEADERS_DDL},"
    "tombstone:boolean,raw:binary>"
)
"""`_hf` while steps run: wider than what sinks get, so that a step that keeps it keeps the whole record."""
EVENT_LINEAGE_DDL: Final = LINEAGE_DDL[:-1] + ",event_time:timestamp,watermark:timestamp>"
"""The same with an event time: when it happened, and what its row is late for (`state.watermarks`)."""


REJECTED_BY: Final = "sink:"
"""Before the name of the sink, in the error and the reason of a record that is a dead letter for its sake."""


@dataclass(frozen=True)
class StageSpec:
    """What a worker needs to know; pickled to it, never printed."""

    settings: Mapping[str, str]
    source: Source
    keeps_raw: bool
    directory: str = ""
    rejected: tuple[Rejected, ...] = ()
    """Records that count as errors whatever they hold: a sink does not take what is made of them."""


@dataclass(frozen=True)
class Piece:
    """Part of a partition's span that one task read; those of a partition are in the order of offsets."""

    place: Place
    records: int
    greatest_ms: int | None
    """Of its events that count for the watermark."""


@dataclass(frozen=True)
class Staged:
    """What a range holds, counted, and the files it stands in."""

    intake: Intake
    decoded: Tally
    undecoded: Tally
    files: Mapping[int, str]
    """By number: that of the first piece of the task that wrote it."""
    pieces: tuple[Piece, ...] = ()
    """By their number; of a source with an event time."""
    rejected: Mapping[str, int] = field(default_factory=dict)
    """By sink: how many of the undecoded are so for its sake."""

    @property
    def is_small(self) -> bool:
        """What follows is for the driver to do, where Spark's tasks would do it."""
        records = self.intake.records
        return records <= SMALL_OFFSETS and sum(map(os.path.getsize, self.files.values())) <= SMALL_BYTES

    def seen_before_ms(self, seen: Mapping[Place, int | None]) -> list[int | None]:
        """For each piece the greatest event time before it: of the pieces before it and of what was `seen` before."""
        latest = dict(seen)
        found = []
        for piece in self.pieces:
            before = latest.get(piece.place)
            found.append(before)
            if piece.greatest_ms is not None:
                latest[piece.place] = max(piece.greatest_ms, piece.greatest_ms if before is None else before)
        return found

    @property
    def greatest_ms(self) -> dict[Place, int | None]:
        """By partition that had records: the greatest event time that counts."""
        found: dict[Place, int | None] = {}
        for piece in self.pieces:
            if piece.records:
                known = [each for each in (found.get(piece.place), piece.greatest_ms) if each is not None]
                found[piece.place] = max(known, default=None)
        return found


def stage_spec(definition: PipelineDefinition, settings: Mapping[str, str]) -> StageSpec:
    """Of a definition whose secrets are expanded."""
    keeps_raw = any(
        (isinstance(step, Expect) and step.otherwise == "quarantine")
        or (isinstance(step, Lookup) and step.missing == "quarantine")
        for step in definition.steps
    )
    return StageSpec(dict(settings), definition.source, keeps_raw)


def warm_up(spec: StageSpec) -> None:
    """Have the machine code of reader and decoders made, once and here, before workers do it side by side."""
    from holdfast.reader import warm

    warm()
    RecordDecoder(spec.source).prepare()


def file_schema(source: Source) -> StructType:
    """The columns of the staged files."""
    event = [] if source.event_time is None else [EVENT_DDL]
    return ddl_schema(", ".join([COMMON_DDL, *decoded_ddl(source), *event]))


def stage_schema(source: Source) -> StructType:
    """The columns that the first step gets."""
    has_event = source.event_time is not None
    parts = [
        f"_hf {EVENT_LINEAGE_DDL if has_event else LINEAGE_DDL}, _timestamp timestamp, _key binary, "
        f"_headers {HEADERS_DDL}, _tombstone boolean, _batch_time timestamp",
        *(["_event_time timestamp"] if has_event else []),
        *decoded_ddl(source),
    ]
    return ddl_schema(", ".join(parts))


# ---------------------------------------------------------------------------- the driver's side


def stage(spark: SparkSession, cluster: Cluster, spec: StageSpec, batch: BatchRange) -> Staged:
    """Read the range into files below the spec's directory."""
    if batch.offsets <= SMALL_OFFSETS:
        tasks = pack(batch, 1)
        reports = [stage_ranges(spec, task, cluster) for task in tasks]  # one at most
    else:
        tasks = pack(batch, spark.sparkContext.defaultParallelism)
        job = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(
            partial(_run_tasks, spec, tasks), "report string"
        )
        reports = [json.loads(row.report) for row in job.collect()]
    staged = replace(_summarise(batch, reports), rejected=Counter(each.sink for each in spec.rejected))
    if spec.source.event_time is None:
        return staged
    return replace(staged, pieces=_pieces(tasks, reports))


def _pieces(tasks: Sequence[Task], reports: Sequence[Mapping[str, Any]]) -> tuple[Piece, ...]:
    """In the order of their numbers: tasks count theirs on from those of the tasks before."""
    by_task = {report["first_piece"]: report["pieces"] for report in reports}
    found: list[Piece] = []
    for task in tasks:
        for each, (records, greatest_ms) in zip(task, by_task[len(found)], strict=True):
            found.append(Piece(Place(each.topic, each.topic_id, each.partition), records, greatest_ms))
    return tuple(found)


def _summarise(batch: BatchRange, reports: Sequence[Mapping[str, Any]]) -> Staged:
    raise_reported(reports)
    total = Intake()
    decoded = undecoded = Tally()
    offsets = 0
    for report in reports:
        decoded += Tally(*report["decoded"])
        undecoded += Tally(*report["undecoded"])
        offsets += report["offsets"]
        counts = {
            name: getattr(total, name) + report[name] for name in ("control", "aborted", "missing", "bytes")
        }
        total = replace(total, **counts)
    all_rows = decoded + undecoded
    total = replace(total, records=all_rows.rows, digest=all_rows.digest)
    found = total.records + total.control + total.aborted + total.missing
    if offsets != batch.offsets or found != batch.offsets:
        raise Unbalanced(
            f"the batch {batch} covers {batch.offsets} offsets, and its tasks account for {found}: {total.records} "
            f"records, {total.control} markers, {total.aborted} aborted, {total.missing} missing. Nothing was "
            "committed; please report this"
        )
    files = {report["first_piece"]: path for report in reports for path in report["files"]}
    return Staged(total, decoded, undecoded, files)


# ---------------------------------------------------------------------------- a task

_clusters: dict[tuple[tuple[str, str], ...], Cluster] = {}
"""Of this worker process, by settings: connections outlive a task, since workers are used again."""


def _run_tasks(
    spec: StageSpec, tasks: Sequence[Task], batches: Iterable[pa.RecordBatch]
) -> Iterator[pa.RecordBatch]:
    import pyarrow as pa

    from holdfast.reader import Cluster

    reports = []
    for batch in batches:
        for number in batch.column(0).to_pylist():
            known = tuple(sorted(spec.settings.items()))
            if known not in _clusters:
                _clusters[known] = Cluster(spec.settings)
            try:
                first_piece = sum(len(task) for task in tasks[:number])
                report = stage_ranges(spec, tasks[number], _clusters[known], first_piece)
            except (HoldfastError, OSError) as error:
                _clusters.pop(known).close()
                report = failure_report(error)
            reports.append(json.dumps(report))
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], names=["report"])


def stage_ranges(
    spec: StageSpec, ranges: Sequence[PartitionRange], cluster: Cluster, first_piece: int = 0
) -> dict[str, Any]:
    """Read, decode and write these ranges; what was counted, as plain values.

    A partition is in at most one of the ranges; their numbers count on from `first_piece`.
    """
    reports: list[RangeReport] = []
    pieces = {(each.topic, each.partition): first_piece + at for at, each in enumerate(ranges)}
    file = _StageFile(spec, pieces, first_piece)
    try:
        for batch in cluster.read(ranges, reports=reports):
            file.add(batch)
        file.finish()
    except BaseException:
        file.abandon()
        raise
    for report in reports:
        _check_report(report)
    if file.rows != sum(report.records for report in reports):
        raise Unbalanced(
            f"{file.rows} rows were staged of {sum(report.records for report in reports)} records read from "
            f"{_names(ranges)}. Nothing was committed; please report this"
        )
    return {
        "files": [file.path] if file.rows else [],
        "decoded": [file.decoded.rows, file.decoded.digest],
        "undecoded": [file.undecoded.rows, file.undecoded.digest],
        "first_piece": first_piece,
        "pieces": [
            [report.records, file.greatest_ms(report.range.topic, report.range.partition)]
            for report in reports
        ],
        "offsets": sum(report.range.end - report.range.start for report in reports),
        **{
            name: sum(getattr(report, name) for report in reports)
            for name in ("control", "aborted", "missing", "bytes")
        },
    }


def _check_report(report: RangeReport) -> None:
    asked = report.range
    found = report.records + report.control + report.aborted + report.missing
    if not report.is_complete or found != asked.end - asked.start:
        raise Unbalanced(
            f"of {asked.topic}-{asked.partition} the offsets {asked.start} to {asked.end - 1} were asked for and "
            f"{found} of {asked.end - asked.start} accounted for, up to {report.position}. Nothing was committed; "
            "please report this"
        )


def _names(ranges: Sequence[PartitionRange]) -> str:
    return ", ".join(f"{each.topic}-{each.partition} [{each.start}, {each.end})" for each in ranges)


class _StageFile:
    """One task's file: created with its first rows."""

    def __init__(self, spec: StageSpec, pieces: Mapping[tuple[str, int], int], number: int = 0) -> None:
        self._spec = spec
        self._number = number
        self._pieces = pieces
        self._decoder = RecordDecoder(spec.source)
        self.greatest_ms = self._decoder.greatest_ms
        self.path = os.path.join(spec.directory, f"{uuid.uuid4().hex}.parquet")
        self.rows = 0
        self.decoded = Tally()
        self.undecoded = Tally()
        self._writer: Any = None
        self._waiting: list[pa.RecordBatch] = []
        self._waiting_bytes = 0

    def add(self, batch: pa.RecordBatch) -> None:
        if batch.num_rows == 0:
            return
        rows = self._decode(batch)
        self.rows += rows.num_rows
        self._waiting.append(rows)
        self._waiting_bytes += rows.nbytes
        if self._waiting_bytes >= ROW_GROUP_BYTES:
            self._write()

    def finish(self) -> None:
        self._write()
        if self._writer is not None:
            self._writer.close()

    def abandon(self) -> None:
        if self._writer is not None:
            self._writer.close()
            os.unlink(self.path)

    def _write(self) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        if not self._waiting:
            return
        table = pa.Table.from_batches(self._waiting)
        if self._writer is None:
            self._writer = pq.ParquetWriter(
                self.path, table.schema, compression="none", use_dictionary=["_topic"], write_statistics=False
            )
        self._writer.write_table(table)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _decode(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """The reader gives rows of one partition in a batch."""
        import pyarrow as pa
        import pyarrow.compute as pc

        place = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
        values = batch.column("value")
        columns, errors = self._decoder.decode(batch, *place, self._pieces[place])
        errors = self._with_rejected(place, batch.column("offset"), errors)
        failed = errors.is_valid()
        self._count(place, batch.column("offset").to_numpy(), failed)
        raw = values
        if not self._spec.keeps_raw:
            raw = pc.if_else(failed, values, pa.scalar(None, values.type))
        common = [
            *(batch.column(name) for name in ("topic", "partition", "offset")),
            record_times(batch),
            batch.column("key"),
            raw,
            batch.column("headers"),
            values.is_null(),
            errors,
            row_numbers(self._number, self.rows, batch.num_rows),
        ]
        return pa.RecordBatch.from_arrays([*common, *columns], names=[*_COMMON_NAMES, *self._decoder.names])

    def _with_rejected(self, place: tuple[str, int], offsets: pa.Array, errors: pa.Array) -> pa.Array:
        import pyarrow as pa
        import pyarrow.compute as pc

        for each in self._spec.rejected:
            if (each.topic, each.partition) == place:
                why = pa.scalar(f"{REJECTED_BY}{each.sink}: {each.why}", errors.type)
                errors = pc.if_else(pc.equal(offsets, each.offset), why, errors)
        return errors

    def _count(self, place: tuple[str, int], offsets: Any, failed: pa.Array) -> None:
        if failed.true_count == 0:
            self.decoded += Tally(len(offsets), digest_of_offsets(*place, offsets))
            return
        mask = failed.to_numpy(zero_copy_only=False)
        for good, name in ((True, "decoded"), (False, "undecoded")):
            chosen = offsets[mask != good]
            tally = Tally(len(chosen), digest_of_offsets(*place, chosen))
            setattr(self, name, getattr(self, name) + tally)


_COMMON_NAMES: Final = [part.split()[0] for part in COMMON_DDL.split(", ")]
