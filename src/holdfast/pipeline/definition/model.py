"""A pipeline's definition as plain, frozen values: what YAML and the Python builder both become.

Nothing here knows Spark. Values hold texts as they were written, `${…}` and `file:` references included: secrets are
expanded at run time only, by whoever opens a connection, so that a definition can be printed, hashed and kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Format = Literal["json", "avro", "protobuf", "csv", "text", "bytes"]
Unknown = Literal["keep", "ignore", "reject"]
OnBreak = Literal["warn", "drop", "quarantine", "fail"]
SchemaChange = Literal["fail", "add-columns"]
Missing = Literal["null", "filter", "quarantine", "fail"]


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
class EventTime:
    """When a record's event happened, and how long rows may be out of order before they are late."""

    field: str
    """A field of the record, a timestamp; or `_timestamp`, the time Kafka keeps with it."""
    delay: str = "0s"
    idle: str | None = None
    """A partition without records for so long is left out of the watermark; nothing: never."""
    ahead: str = "1h"
    """An event further than this ahead of its record's own time does not move the watermark: its clock is wrong."""


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
    values: Mapping[str, Decoding] = field(default_factory=dict)
    """Decodings of topics that have one of their own; rows have the columns of all, null where the topic has none."""
    event_time: EventTime | None = None
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


@dataclass(frozen=True)
class Dedupe:
    """Rows whose key was seen within a time leave, into the duplicate route. The first one stays."""

    name: str
    key: tuple[str, ...] = ()
    """Columns; nothing when it is by `hf-id`, the number a spooling producer gives each message."""
    by: Literal["key", "hf-id"] = "key"
    within: str = "1d"
    unordered: bool = False
    """Whichever row of a key is read first may stay: the author knows that it depends on batches."""


@dataclass(frozen=True)
class Lookup:
    """Columns of a reference table, whose version is pinned for each batch."""

    name: str
    table: str
    """A Parquet file or directory, a CSV file with a header, a Delta table, or a PostgreSQL address."""
    on: Mapping[str, str] = field(default_factory=dict)
    """Columns of the rows, each with the table's column it must equal."""
    columns: tuple[str, ...] = ()
    """What the rows get of the table."""
    query: str | None = None
    """PostgreSQL: what is read."""
    missing: Missing = "null"
    """What becomes of a row that the table has nothing for."""
    refresh: str = "1h"
    """How old a version may be before the table is read again."""


@dataclass(frozen=True)
class Window:
    """Aggregates of rows by key and by windows of event time: rows of its own, for sinks that ask for them."""

    name: str
    aggregates: Mapping[str, str]
    """SQL by the name of its column: `count(*)`, `sum(amount)`…"""
    kind: Literal["tumbling", "sliding", "session"] = "tumbling"
    size: str | None = None
    every: str | None = None
    """Sliding: a window of `size` starts each time this has passed."""
    gap: str | None = None
    """Session: it ends when nothing came for so long."""
    key: tuple[str, ...] = ()
    emit: Literal["closed", "changes"] = "closed"
    late: Literal["route", "correct"] = "route"
    correct_within: str = "1d"
    """`correct`: how long after its end a window can still be reopened."""


@dataclass(frozen=True)
class Keyed:
    """A Python function with a state for each key: rows of its own, for sinks that ask for them."""

    name: str
    key: tuple[str, ...]
    file: str | None = None
    function: str | Callable[..., Any] = ""
    schema: str = ""
    """The columns of its rows, in Spark's words."""
    state: str = ""
    """The columns of a key's state."""
    ttl: str = "7d"
    """How long a key is remembered that nothing comes for."""
    timers: Literal["event", "processing"] = "event"
    unordered: bool = False
    """The function may get rows of a key from several partitions in any order."""


@dataclass(frozen=True)
class Join:
    """Pairs of rows of two streams that happened near each other: rows of its own, for sinks that ask for them."""

    name: str
    left: str
    """A topic of the source, or SQL that is true for the left rows."""
    right: str
    on: Mapping[str, str] = field(default_factory=dict)
    """Columns of the left, each with the right's column it must equal."""
    within: str = "10m"
    """How far the right one's event may be from the left one's, to either side."""
    select: Mapping[str, str] = field(default_factory=dict)
    """SQL over `l` and `r` by the name of its column."""
    kind: Literal["inner", "left"] = "inner"
    """`left`: a left row that nothing was found for leaves alone when its time is over."""


Step = Expect | Filter | Sql | Python | Dedupe | Lookup | Window | Keyed | Join


COMPRESSIONS: Final = ("none", "snappy", "gzip", "lz4", "zstd")
"""Of Parquet files: those that Spark reads without more libraries."""


@dataclass(frozen=True)
class ParquetSink:
    path: str
    name: str = "parquet"
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 1024 * 1024
    schema: SchemaChange = "fail"
    compression: str = "snappy"
    rows: str = ""
    """The step whose rows it takes (`totals`, `totals.late`); nothing: those at the end of the steps."""


@dataclass(frozen=True)
class DeltaSink:
    path: str
    name: str = "delta"
    partition_by: tuple[str, ...] = ()
    file_bytes: int = 128 * 1024 * 1024
    schema: SchemaChange = "fail"
    rows: str = ""
    """The step whose rows it takes (`totals`, `totals.late`); nothing: those at the end of the steps."""


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
    rows: str = ""
    """The step whose rows it takes (`totals`, `totals.late`); nothing: those at the end of the steps."""
    order: str | None = None
    """Upsert: the row with this column's greatest value wins, whenever it is read; without it, the one read last."""
    unordered: bool = False
    """Upsert: whichever row of a key is read last may win."""


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
    rows: str = ""
    """The step whose rows it takes (`totals`, `totals.late`); nothing: those at the end of the steps."""
    unordered: bool = False
    """Records of one key may be written in any order."""


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
