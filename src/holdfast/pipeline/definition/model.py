"""A pipeline's definition as plain, frozen values: what YAML and the Python builder both become.

Nothing here knows Spark. Values hold texts as they were written, `${…}` and `file:` references included: secrets are
expanded at run time only, by whoever opens a connection, so that a definition can be printed, hashed and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

Format = Literal["json", "avro", "protobuf", "csv", "text", "bytes"]
Unknown = Literal["keep", "ignore", "reject"]
OnBreak = Literal["warn", "drop", "quarantine", "fail"]
SchemaChange = Literal["fail", "add-columns"]


@dataclass(frozen=True)
class Field:
    """One column a record is parsed to."""

    name: str
    type: str
    """In Spark's words: `string`, `long`, `double`, `decimal(10,2)`, `timestamp`, `array<string>`, `struct<a:int>`…"""
    required: bool = True
    """Absent or null is a dead letter."""


@dataclass(frozen=True)
class Decoding:
    """How the bytes of a value, or of a key, become columns."""

    format: Format = "bytes"
    fields: tuple[Field, ...] = ()
    unknown: Unknown = "ignore"
    schema: str | None = None
    """Avro or Protobuf: the writer's schema as text (`.avsc`, `.proto`), read from the file the definition names."""
    message: str | None = None
    """Protobuf: the message's full name."""
    registry: Mapping[str, str] | None = None
    """Settings of a schema registry (`url`, `basic.auth.user.info`…): values carry its five-byte header."""
    csv: Mapping[str, str] = field(default_factory=dict)
    """`delimiter`, `quote`, `null`."""


@dataclass(frozen=True)
class Source:
    topics: tuple[str, ...] = ()
    pattern: str | None = None
    bootstrap: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    """Kafka's dotted client settings: security, time-outs."""
    value: Decoding = Decoding()
    key: Decoding = Decoding()
    starting: str = "earliest"
    """Where a pipeline without a ledger begins: `earliest`, `latest`, or an ISO time."""
    batch_records: int = 1_000_000
    batch_bytes: int = 256 * 1024 * 1024


@dataclass(frozen=True)
class Expect:
    """A rule on rows: SQL that is true for a good one. Null counts as broken."""

    name: str
    that: str
    otherwise: OnBreak = "quarantine"


@dataclass(frozen=True)
class Filter:
    """Rows for which the SQL is not true leave, into the filtered route under this name."""

    name: str
    where: str


@dataclass(frozen=True)
class Sql:
    """A query over `input`; it keeps `_hf`. One row at most per input row, unless it expands."""

    name: str
    query: str
    expand: bool = False


@dataclass(frozen=True)
class Python:
    """A function over batches of rows: `arrow` (RecordBatch → RecordBatch) or `pandas` (DataFrame → DataFrame)."""

    name: str
    file: str | None = None
    function: str | Callable[..., Any] = ""
    schema: str = ""
    """The columns it returns, in Spark's words, without `_hf`; empty: the same columns."""
    mode: Literal["arrow", "pandas"] = "arrow"
    expand: bool = False


Step = Expect | Filter | Sql | Python


@dataclass(frozen=True)
class ParquetSink:
    path: str
    name: str = "parquet"
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 1024 * 1024
    schema: SchemaChange = "fail"
    compression: str = "snappy"


@dataclass(frozen=True)
class DeltaSink:
    path: str
    name: str = "delta"
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 1024 * 1024
    schema: SchemaChange = "fail"


@dataclass(frozen=True)
class PostgresSink:
    url: str
    table: str
    name: str = "postgres"
    mode: Literal["append", "upsert"] = "append"
    key: tuple[str, ...] = ()
    """The columns of the primary key, for `upsert`."""
    delete_when: str | None = None
    """SQL; upsert: a row for which it is true deletes its key."""
    schema: SchemaChange = "fail"
    schema_name: str = "public"


@dataclass(frozen=True)
class KafkaSink:
    topic: str
    name: str = "kafka"
    bootstrap: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    key: str | None = None
    """SQL for the record's key; nothing: the source record's key."""
    value: str | None = None
    """SQL for the record's value (string or binary); nothing: all columns as a JSON object."""
    headers: Mapping[str, str] = field(default_factory=dict)
    writers: int = 1


@dataclass(frozen=True)
class DeadLetter:
    """Where records go that cannot be parsed or break a quarantine rule."""

    topic: str
    bootstrap: str | None = None
    settings: Mapping[str, str] = field(default_factory=dict)


SinkDefinition = ParquetSink | DeltaSink | PostgresSink | KafkaSink


@dataclass(frozen=True)
class PipelineDefinition:
    name: str
    source: Source
    steps: tuple[Step, ...] = ()
    sinks: tuple[SinkDefinition, ...] = ()
    dead_letter: DeadLetter | None = None
    """Nothing: the topic `<pipeline>-dlt` of the source's cluster."""
    trigger: str = "available-now"
    """`available-now` ends when what was there at the start is done; a duration (`10s`) goes on."""
    home: str = ""
    """Plans and stages; nothing: `.holdfast/<name>` beside the file (or in the working directory)."""
    monitoring_group: str | None = None
    """The consumer group that lag tools read; nothing: `hf-<name>`."""
    spark: Mapping[str, str] = field(default_factory=dict)
    """Settings of the Spark session."""
    directory: str = "."
    """Where relative paths of the definition start; not part of its fingerprint."""
