"""Reading the range of a batch once, into Parquet files in the pipeline's home.

Tasks run in Spark's Python workers: each reads its ranges, decodes values and keys, writes files of its own and
reports what it wrote and counted. Rows do not cross between Python and the JVM: Spark reads the files. A task that
is run twice writes under another name, and only reported files are read, so a lost worker costs time and nothing else.
A small batch is staged by the driver itself, which is quicker than asking Spark.

What a task counts is the *intake*: every offset of a range is a record, a marker, aborted or missing, or the batch
fails. Count and digest of the records are taken here, before the first step, apart for those that could be decoded
and those that could not.

The files' columns: `_topic _partition _offset _timestamp _key _raw _headers _tombstone _error`, then the key's fields
as `_key_<name>`, then the value's. `_raw` is null for decoded rows when nothing can ask for it any more.
"""

from __future__ import annotations

import base64
import json
import os
import pickle
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import HoldfastError
from holdfast.pipeline.definition.model import Decoding, Expect, PipelineDefinition, Source
from holdfast.pipeline.digest import MASK, digest_of_offsets
from holdfast.pipeline.engine.failures import Unbalanced
from holdfast.pipeline.ledger import Intake
from holdfast.pipeline.packing import pack
from holdfast.pipeline.positions import BatchRange
from holdfast.reader import PartitionRange, RangeReport

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession
    from pyspark.sql.types import StructType

    from holdfast.pipeline.formats import Decoder
    from holdfast.reader.cluster import Cluster

OFFSETS_INLINE: Final = 4_000
"""Fewer than this the driver reads itself: a Spark job costs more."""
ROW_GROUP_BYTES: Final = 32 * 1024 * 1024
"""Decoded rows kept in memory before they go to the file."""
KEY_PREFIX: Final = "_key_"
HEADERS_DDL: Final = "array<struct<key:string,value:binary>>"
COMMON_DDL: Final = (
    "_topic string, _partition int, _offset bigint, _timestamp timestamp, _key binary, _raw binary, "
    f"_headers {HEADERS_DDL}, _tombstone boolean, _error string"
)
LINEAGE_DDL: Final = (
    f"struct<topic:string,partition:int,offset:bigint,index:int,timestamp:timestamp,key:binary,headers:{HEADERS_DDL},"
    "tombstone:boolean,raw:binary>"
)
"""`_hf` while steps run: wider than what sinks get, so that a step that keeps it keeps the whole record."""


@dataclass(frozen=True)
class Tally:
    """Rows, by number and by the digest of their places."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.digest + other.digest) & MASK)


@dataclass(frozen=True)
class StageSpec:
    """What a worker needs to know; pickled to it, never printed."""

    settings: Mapping[str, str]
    value: Decoding
    key: Decoding
    keeps_raw: bool
    directory: str = ""


@dataclass(frozen=True)
class Staged:
    """What a range holds, counted, and the files it stands in."""

    intake: Intake
    decoded: Tally
    undecoded: Tally
    files: tuple[str, ...]


def stage_spec(definition: PipelineDefinition, settings: Mapping[str, str]) -> StageSpec:
    """Of a definition whose secrets are expanded."""
    keeps_raw = any(isinstance(step, Expect) and step.otherwise == "quarantine" for step in definition.steps)
    return StageSpec(dict(settings), definition.source.value, definition.source.key, keeps_raw)


def warm_up(spec: StageSpec) -> None:
    """Have the machine code of reader and decoders made, once and here, before workers do it side by side."""
    from holdfast.pipeline.formats import compile_decoder
    from holdfast.reader import warm

    warm()
    compile_decoder(spec.value).prepare()
    key = key_decoder(spec.key)
    if key is not None:
        key.prepare()


def key_decoder(key: Decoding) -> Decoder | None:
    """Nothing for a key that is left as bytes: `_key` has it."""
    from holdfast.pipeline.formats import compile_decoder

    if key.format == "bytes" and not key.fields:
        return None
    return compile_decoder(key, prefix=KEY_PREFIX)


def file_schema(source: Source) -> StructType:
    """The columns of the staged files."""
    return ddl_schema(", ".join([COMMON_DDL, *_decoded_ddl(source.value, source.key)]))


def stage_schema(source: Source) -> StructType:
    """The columns that the first step gets."""
    parts = [
        f"_hf {LINEAGE_DDL}, _timestamp timestamp, _key binary, _headers {HEADERS_DDL}, _tombstone boolean, "
        "_batch_time timestamp",
        *_decoded_ddl(source.value, source.key),
    ]
    return ddl_schema(", ".join(parts))


def ddl_schema(text: str) -> StructType:
    """The schema that a text in Spark's words names."""
    from pyspark.sql.types import StructType

    schema = StructType.fromDDL(text)
    assert isinstance(schema, StructType)
    return schema


def _decoded_ddl(value: Decoding, key: Decoding) -> list[str]:
    from holdfast.pipeline.formats import compile_decoder

    keys = key_decoder(key)
    texts = [keys.spark_ddl if keys is not None else "", compile_decoder(value).spark_ddl]
    return [text for text in texts if text]


# ---------------------------------------------------------------------------- the driver's side


def stage(
    spark: SparkSession, cluster: Cluster, spec: StageSpec, batch: BatchRange, *, cores: int | None = None
) -> Staged:
    """Read the range into files below the spec's directory."""
    if batch.offsets <= OFFSETS_INLINE:
        reports = [stage_ranges(spec, task, cluster) for task in pack(batch, 1)]
    else:
        tasks = pack(batch, cores or spark.sparkContext.defaultParallelism)
        job = spark.range(0, len(tasks), 1, len(tasks)).mapInArrow(
            partial(_run_tasks, spec, tasks), "report string"
        )
        reports = [json.loads(row.report) for row in job.collect()]
    return _summarise(batch, reports)


def _summarise(batch: BatchRange, reports: Sequence[Mapping[str, Any]]) -> Staged:
    for report in reports:
        if "failure" in report:
            raise pickle.loads(base64.b64decode(report["failure"]))
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
    return Staged(total, decoded, undecoded, tuple(path for report in reports for path in report["files"]))


# ---------------------------------------------------------------------------- a task

_clusters: dict[tuple[tuple[str, str], ...], Cluster] = {}
"""Of this worker process, by settings: connections outlive a task, since workers are used again."""


def _run_tasks(
    spec: StageSpec, tasks: Sequence[tuple[PartitionRange, ...]], batches: Iterable[pa.RecordBatch]
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
                report = stage_ranges(spec, tasks[number], _clusters[known])
            except (HoldfastError, OSError) as error:
                _clusters.pop(known).close()
                # As a value: raised here, it would come back as a JVM exception around a Python traceback.
                report = {"failure": base64.b64encode(pickle.dumps(error)).decode("ascii")}
            reports.append(json.dumps(report))
    yield pa.RecordBatch.from_arrays([pa.array(reports, pa.string())], names=["report"])


def stage_ranges(spec: StageSpec, ranges: Sequence[PartitionRange], cluster: Cluster) -> dict[str, Any]:
    """Read, decode and write these ranges; what was counted, as plain values."""
    reports: list[RangeReport] = []
    file = _StageFile(spec)
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

    def __init__(self, spec: StageSpec) -> None:
        from holdfast.pipeline.formats import compile_decoder

        self._spec = spec
        self._value = compile_decoder(spec.value)
        self._key = key_decoder(spec.key)
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
        import pyarrow as pa
        import pyarrow.compute as pc

        values, keys = batch.column("value"), batch.column("key")
        columns, errors = self._value.decode(values)
        fields = list(self._value.arrow_fields)
        if self._key is not None:
            key_columns, key_errors = self._key.decode(keys)
            fields = [*self._key.arrow_fields, *fields]
            columns = [*key_columns, *columns]
            errors = pc.coalesce(errors, pc.binary_join_element_wise("key: ", key_errors, ""))
            columns = _null_where(columns, errors)
        failed = errors.is_valid()
        self._count(batch, failed)
        raw = values
        if not self._spec.keeps_raw:
            raw = pc.if_else(failed, values, pa.scalar(None, values.type))
        names = [*_COMMON_NAMES, *(field.name for field in fields)]
        common = [
            *(batch.column(name) for name in ("topic", "partition", "offset", "timestamp")),
            keys,
            raw,
            batch.column("headers"),
            values.is_null(),
            errors,
        ]
        return pa.RecordBatch.from_arrays([*common, *columns], names=names)

    def _count(self, batch: pa.RecordBatch, failed: pa.Array) -> None:
        """The reader gives rows of one partition in a batch."""
        topic, partition = batch.column("topic")[0].as_py(), batch.column("partition")[0].as_py()
        offsets = batch.column("offset").to_numpy()
        if failed.true_count == 0:
            self.decoded += Tally(len(offsets), digest_of_offsets(topic, partition, offsets))
            return
        mask = failed.to_numpy(zero_copy_only=False)
        for good, name in ((True, "decoded"), (False, "undecoded")):
            chosen = offsets[mask != good]
            tally = Tally(len(chosen), digest_of_offsets(topic, partition, chosen))
            setattr(self, name, getattr(self, name) + tally)


_COMMON_NAMES: Final = [part.split()[0] for part in COMMON_DDL.split(", ")]


def _null_where(columns: Sequence[pa.Array], errors: pa.Array) -> list[pa.Array]:
    """A record whose key cannot be read has no columns, as one whose value cannot."""
    import pyarrow as pa

    if errors.null_count == len(errors):
        return list(columns)
    indices = pa.compute.if_else(errors.is_null(), pa.array(range(len(errors)), pa.int64()), None)
    return [column.take(indices) for column in columns]
