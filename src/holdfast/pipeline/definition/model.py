"""A pipeline's definition as plain, frozen values: what YAML and the Python builder both become.

Nothing here knows Spark. Values hold texts as they were written, `${…}` and `file:` references included: secrets are
expanded at run time only, by whoever opens a connection, so that a definition can be printed, hashed and kept.
It is also the one table of what a definition may hold: YAML is read by it, and the published JSON Schema is made from
it. A field with a description is a key; its type says what may stand there (`shapes`) and whether references are
expanded in it (`secrets`), its default what is meant where it is absent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Final, Literal, NamedTuple

from holdfast.pipeline.definition.shapes import (
    Choice,
    Count,
    Duration,
    Either,
    Expansion,
    Function,
    Given,
    Key,
    ListOf,
    MapOf,
    Raw,
    Record,
    Size,
    Text,
    Variants,
    listed_columns,
    pairs,
    selected,
)
from holdfast.pipeline.definition.sink_words import (
    ColumnName,
    DeleteWhen,
    Expression,
    FileBytes,
    Mode,
    OnSchemaChange,
    OrderBy,
    PartitionBy,
    Rows,
    SinkName,
    TableKey,
    Unordered,
)

Format = Literal["json", "avro", "protobuf", "csv", "text", "bytes"]
Unknown = Literal["keep", "ignore", "reject"]
OnBreak = Literal["warn", "drop", "quarantine", "fail"]
PythonMode = Literal["arrow", "pandas", "spark"]
Missing = Literal["null", "filter", "quarantine", "fail"]

COMPRESSIONS: Final = ("none", "snappy", "gzip", "lz4", "zstd")
"""Of Parquet files: those that Spark reads without more libraries."""
UNNAMED: Final = ""
"""The name of a step until it gets one from its place."""

# ------------------------------------------------------------------------ words that several parts share

VARIABLES: Final = Expansion.VARIABLES
TopicName = Annotated[str, Text("a topic"), VARIABLES]
ColumnList = Annotated[str, Either(Text("columns"), MapOf(Text("a type"), listed_columns))]
Span = Annotated[str, Duration()]
Setting = Annotated[str, Text(loose=True), Expansion.SECRET]
Settings = Mapping[str, Setting]
ClientSettings = Annotated[Settings, "Kafka's client settings, by their dotted names."]
OtherCluster = Annotated[str | None, Text("HOST:PORT"), VARIABLES, "Another cluster than the source's."]
FunctionOf = Annotated[
    str | Callable[..., Any], Function(), "The function, or module:function.", Given(required=True)
]
FileOf = Annotated[str | None, Text("a file"), "The Python file it stands in, beside the definition."]
StepName = Annotated[
    str,
    Text("a name"),
    "Letters and digits, with '.', '_' or '-' between them; rows are counted under it.",
    Given(absent=UNNAMED),
]
Expands = Annotated[bool, "A row may become several."]
Side = Annotated[str, Text("a topic, or an SQL condition")]

# ------------------------------------------------------------------------ the source


@dataclass(frozen=True)
class Field:
    """One column a record is parsed to."""

    name: str
    type: str
    """In Spark's words: `string`, `long`, `double`, `decimal(10,2)`, `timestamp`, `array<string>`, `struct<a:int>`…"""
    required: bool = True
    """Absent or null is a dead letter."""


def _fields(values: Mapping[str, str]) -> tuple[Field, ...]:
    return tuple(
        Field(name, text.strip().removesuffix("?").strip(), required=not text.strip().endswith("?"))
        for name, text in values.items()
    )


FIELDS: Final = MapOf(Text("a type such as long, string? or array<string>"), _fields)
CSV: Final = Record(
    "csv",
    (
        Key("delimiter", Raw("a character"), "Between two cells.", default=","),
        Key("quote", Raw("a character"), "Around a cell.", default='"'),
        Key("null", Raw(), "The text that means null."),
    ),
    dict,
    doc="How a line of CSV is cut.",
)


@dataclass(frozen=True)
class Decoding:
    """How the bytes of a value, or of a key, become columns."""

    format: Annotated[Format, "How the bytes are written.", Given(required=True)] = "bytes"
    fields: Annotated[
        tuple[Field, ...],
        FIELDS,
        "Columns by name: a type in Spark's words; a '?' behind it makes the field optional.",
    ] = ()
    unknown: Annotated[
        Unknown,
        "Fields that are not listed: kept in a column of their own, ignored, or a reason for the dead letter.",
    ] = "ignore"
    schema: Annotated[str | None, Text("a schema"), "Avro or Protobuf: the schema itself."] = None
    """The writer's schema as text (`.avsc`, `.proto`), which may come from the file that the definition names."""
    message: Annotated[
        str | None,
        Text("a message's name"),
        "Protobuf: the message's full name; not needed when the schema has one message.",
    ] = None
    registry: Annotated[
        Settings | None,
        Either(Text("an address"), MapOf(Text(loose=True))),
        "A schema registry: its address, or its client's settings ('url', 'basic.auth.user.info'…). "
        "Values then start with its five-byte header.",
    ] = None
    csv: Annotated[Mapping[str, str], CSV, "How a line of CSV is cut."] = field(default_factory=dict)


class SchemaFile(NamedTuple):
    """A decoding whose schema is still in the file it names; the loader reads it."""

    decoding: Decoding
    file: str


def _decoding(
    schema_file: str | None = None, registry: str | Mapping[str, str] | None = None, **values: Any
) -> Decoding | SchemaFile:
    decoding = Decoding(registry={"url": registry} if isinstance(registry, str) else registry, **values)
    return decoding if schema_file is None else SchemaFile(decoding, schema_file)


SCHEMA_FILE: Final = Key(
    "schema_file",
    Text("a file"),
    "Avro or Protobuf: the file the schema stands in (.avsc, .proto, or protoc's .desc, .pb, .binpb).",
)
DECODING: Final = Record.of("a decoding", Decoding, "format", make=_decoding, extra=[SCHEMA_FILE])


@dataclass(frozen=True)
class EventTime:
    """When a record's event happened, and how long rows may be out of order before they are late."""

    field: Annotated[
        str,
        Text("a field"),
        "A field of the records, a timestamp; or _timestamp, the time Kafka keeps with each.",
    ]
    delay: Annotated[
        str,
        Duration(least_ms=0),
        "How far behind the newest event of its partition a row may be before it is late.",
    ] = "0s"
    idle: Annotated[
        Span | None,
        "A partition without records for so long holds nothing up any more; without it, it always does.",
    ] = None
    ahead: Annotated[
        Span, "An event further ahead of its record's own time does not make others late: its clock is wrong."
    ] = "1h"


EVENT_TIME: Final = Record.of("event_time", EventTime, "field")


@dataclass(frozen=True)
class Source:
    """What is read."""

    topics: Annotated[tuple[TopicName, ...], "The topics to read."] = ()
    pattern: Annotated[
        str | None,
        Text("a regular expression"),
        VARIABLES,
        "Topics whose whole name matches, found as they appear.",
    ] = None
    bootstrap: Annotated[
        str | None,
        Text("HOST:PORT"),
        VARIABLES,
        "The brokers to ask first; without it --bootstrap-server, HOLDFAST_BOOTSTRAP_SERVER, 127.0.0.1:9092.",
    ] = None
    settings: ClientSettings = field(default_factory=dict)
    """Security, time-outs."""
    value: Annotated[Decoding, DECODING, "How a record's value becomes columns."] = Decoding()
    key: Annotated[
        Decoding, DECODING, "How a record's key becomes columns; they are called `_key_<field>`."
    ] = Decoding()
    starting: Annotated[
        str,
        Text("earliest, latest, a time or a checkpoint"),
        VARIABLES,
        "Where a pipeline without a ledger begins: earliest, latest, a time such as 2026-01-31T00:00:00Z, or "
        "checkpoint:DIRECTORY, where the Spark job stands that has its checkpoint there.",
    ] = "earliest"
    values: Annotated[
        Mapping[TopicName, Decoding],
        MapOf(DECODING),
        "Values of topics that have a format of their own, by topic; rows get the columns of all.",
    ] = field(default_factory=dict)
    """A column is null in rows of topics that have none of it."""
    event_time: Annotated[EventTime | None, EVENT_TIME, "When things happened, for stateful steps."] = None
    batch_records: Annotated[int, "At most this many offsets in a batch."] = 1_000_000
    batch_bytes: Annotated[
        int, Size(), "At most about this many bytes in a batch.", Given(shown="256MiB")
    ] = 256 * 1024 * 1024


# ------------------------------------------------------------------------ steps


@dataclass(frozen=True)
class Expect:
    """A rule that every row should keep."""

    name: StepName
    that: Annotated[Expression, "True for a good row; null counts as broken."]
    otherwise: Annotated[
        OnBreak,
        "What becomes of a row that breaks it: kept and counted, dropped and counted, sent to the "
        "dead letter topic, or the pipeline stops.",
        Given("else"),
    ] = "quarantine"


@dataclass(frozen=True)
class Filter:
    """Rows that leave on purpose, into the filtered route, counted by this step's name."""

    name: StepName
    where: Annotated[Expression, "Rows for which this is true stay."]


@dataclass(frozen=True)
class Sql:
    """A query over `input`, the rows of the step before. One row at most per input row, unless it expands."""

    name: StepName
    query: Annotated[str, Text("a query"), "SELECT … FROM input; `_hf` must be selected."]
    expand: Expands = False


@dataclass(frozen=True)
class Python:
    """A Python function over batches of rows, or over a Spark DataFrame."""

    name: StepName
    file: FileOf = None
    function: FunctionOf = ""
    schema: Annotated[
        ColumnList,
        "The columns it returns, as 'id long, total double' or as a mapping; without it the same.",
    ] = ""
    """Without `_hf`."""
    mode: Annotated[
        PythonMode,
        "What it takes and returns: a pyarrow RecordBatch, a pandas DataFrame, or a Spark DataFrame.",
    ] = "arrow"
    expand: Expands = False


@dataclass(frozen=True)
class Dedupe:
    """The first row of a key goes on; those that come after it within a time leave, counted, as duplicates."""

    name: StepName
    key: Annotated[tuple[ColumnName, ...], "Columns: rows that have the same in all of them are one."] = ()
    by: Annotated[
        Literal["key", "hf-id"],
        "By those columns, or by the number that a spooling producer gives each message.",
    ] = "key"
    within: Annotated[Span, "How long a key is remembered, in event time."] = "1d"
    unordered: Unordered = False
    """The author knows that it depends on batches."""


@dataclass(frozen=True)
class Lookup:
    """Columns of a reference table, of one version for each batch."""

    name: StepName
    table: Annotated[
        str,
        Text("a table"),
        VARIABLES,
        "A Parquet file or directory, a CSV file with a header, a Delta table, or "
        "postgresql://user:${PASSWORD}@host/database with a 'query'.",
    ]
    on: Annotated[
        Mapping[str, str],
        pairs("a column of the table"),
        "Columns of the rows with the table's they must equal; a list when they are called the same.",
        Given(required=True),
    ] = field(default_factory=dict)
    columns: Annotated[tuple[ColumnName, ...], "What the rows get of the table.", Given(required=True)] = ()
    query: Annotated[str | None, Text("a query"), "PostgreSQL: what is read."] = None
    missing: Annotated[
        Missing,
        "A row that the table has nothing for: gets nulls, leaves counted, is a dead letter, "
        "or stops the pipeline.",
    ] = "null"
    refresh: Annotated[Span, "How old a version of the table may be before it is read again."] = "1h"


@dataclass(frozen=True)
class Window:
    """Aggregates by key and windows of event time: rows of its own, for sinks with 'rows'."""

    name: StepName
    aggregates: Annotated[
        Mapping[str, Expression],
        "SQL by the name of its column: count(*), sum(amount), approx_count_distinct(user)…",
    ]
    kind: Annotated[
        Literal["tumbling", "sliding", "session"],
        "Side by side, overlapping, or as long as rows keep coming; without it what 'size', "
        "'every' or 'gap' mean.",
        Given(shown=None),
    ] = "tumbling"
    size: Annotated[Span | None, "How long a window is."] = None
    every: Annotated[Span | None, "Sliding: a window begins each time this has passed."] = None
    gap: Annotated[Span | None, "Session: it ends when nothing came for so long."] = None
    key: Annotated[tuple[ColumnName, ...], "Columns; windows are apart for each of their values."] = ()
    emit: Annotated[Literal["closed", "changes"], "A row when a window is over, or each time it changes."] = (
        "closed"
    )
    late: Annotated[
        Literal["route", "correct"],
        "Rows for windows that are over: into <step>.late, or the window is opened again and corrected.",
    ] = "route"
    correct_within: Annotated[Span, "How long after its end a window can still be corrected."] = "1d"


def _window(name: str, kind: Any = None, **values: Any) -> Window:
    """Without a kind it is the one its other words mean."""
    if kind is None:
        kind = "session" if "gap" in values else "sliding" if "every" in values else "tumbling"
    return Window(name, kind=kind, **values)


@dataclass(frozen=True)
class Keyed:
    """A Python function with a state for each key: rows of its own, for sinks with 'rows'."""

    name: StepName
    key: Annotated[tuple[ColumnName, ...], "Columns; each of their values has a state."]
    file: FileOf = None
    function: FunctionOf = ""
    schema: Annotated[
        ColumnList, "The columns of its rows, as 'id long, total double'.", Given(required=True)
    ] = ""
    state: Annotated[ColumnList, "The columns of a key's state.", Given(required=True)] = ""
    ttl: Annotated[Span, "How long a key is remembered that nothing comes for."] = "7d"
    timers: Annotated[
        Literal["event", "processing"], "Whether its timers go by event time or by the time of batches."
    ] = "event"
    unordered: Unordered = False
    """The function may get rows of a key from several partitions in any order."""


@dataclass(frozen=True)
class Join:
    """Pairs of rows that happened near each other: rows of its own, for sinks with 'rows'."""

    name: StepName
    left: Annotated[Side, "A topic of the source, or SQL that is true for left rows."]
    right: Annotated[Side, "A topic of the source, or SQL that is true for right rows."]
    on: Annotated[
        Mapping[str, str],
        pairs("a column of the right"),
        "Columns of the left with the right's they must equal; a list when they are called the same.",
        Given(required=True),
    ] = field(default_factory=dict)
    within: Annotated[Span, "How far apart the two events may be, either one first."] = "10m"
    select: Annotated[
        Mapping[str, str],
        Either(
            ListOf(Text("a column such as l.id"), lone=True, make=selected),
            MapOf(Text("an SQL expression")),
        ),
        "Columns of the pair: SQL over l and r by name, or a list such as [l.id, r.amount].",
        Given(required=True),
    ] = field(default_factory=dict)
    kind: Annotated[
        Literal["inner", "left"], "Pairs alone, or left rows without one too, when their time is over."
    ] = "inner"


Step = Expect | Filter | Sql | Python | Dedupe | Lookup | Window | Keyed | Join
STEP: Final = Variants(
    "a step",
    {
        "expect": Record.of("expect", Expect, "that"),
        "filter": Record.of("filter", Filter, "where"),
        "sql": Record.of("sql", Sql, "query"),
        "python": Record.of("python", Python, "function"),
        "dedupe": Record.of("dedupe", Dedupe, "key"),
        "lookup": Record.of("lookup", Lookup),
        "window": Record.of("window", Window, make=_window),
        "keyed": Record.of("keyed", Keyed),
        "join": Record.of("join", Join),
    },
)

# ------------------------------------------------------------------------ sinks


@dataclass(frozen=True)
class ParquetSink:
    """Directories of Parquet files on a local file system."""

    path: Annotated[str, Text("a directory"), VARIABLES, "The directory; each batch is one inside it."]
    name: SinkName = "parquet"
    partition_by: PartitionBy = ()
    file_bytes: FileBytes = 128 * 1024 * 1024
    schema: OnSchemaChange = "fail"
    compression: Annotated[str, Choice(COMPRESSIONS), "Of the files."] = "snappy"
    rows: Rows = ""
    compact: Annotated[int, Count(0), "A run merges small batches when there are so many; 0: never."] = 64


@dataclass(frozen=True)
class DeltaSink:
    """A Delta Lake table."""

    path: Annotated[str, Text("a table"), VARIABLES, "Directory or address of the table."]
    name: SinkName = "delta"
    partition_by: PartitionBy = ()
    file_bytes: FileBytes = 128 * 1024 * 1024
    schema: OnSchemaChange = "fail"
    rows: Rows = ""
    mode: Mode = "append"
    key: TableKey = ()
    delete_when: DeleteWhen = None
    order_by: OrderBy = None
    unordered: Unordered = False


@dataclass(frozen=True)
class PostgresSink:
    """A table of a PostgreSQL database."""

    url: Annotated[
        str,
        Text("an address"),
        Expansion.SECRET,
        "postgresql://user:${PASSWORD}@host/database, or file:/path that holds it.",
    ]
    table: Annotated[str, Text("a table"), VARIABLES, "Made when it is missing."]
    name: SinkName = "postgres"
    mode: Mode = "append"
    key: TableKey = ()
    delete_when: DeleteWhen = None
    schema: OnSchemaChange = "fail"
    schema_name: Annotated[str, Text("a schema"), VARIABLES, "The database schema the table is in."] = (
        "public"
    )
    rows: Rows = ""
    order_by: OrderBy = None
    unordered: Unordered = False


@dataclass(frozen=True)
class KafkaSink:
    """A topic, written in transactions."""

    topic: Annotated[TopicName, "Where rows are sent."]
    name: SinkName = "kafka"
    bootstrap: OtherCluster = None
    settings: ClientSettings = field(default_factory=dict)
    key: Annotated[Expression | None, "The record's key; without it the source record's."] = None
    value: Annotated[Expression | None, "The record's value; without it all columns as a JSON object."] = None
    headers: Annotated[Mapping[str, Expression], "Headers: SQL by name."] = field(default_factory=dict)
    writers: Annotated[int, Count(most=64), "Transactional producers side by side."] = 1
    rows: Rows = ""
    unordered: Unordered = False


SinkDefinition = ParquetSink | DeltaSink | PostgresSink | KafkaSink
LETTERS_NAME: Final = "dead-letter"


def _letters(sink: type, shorthand: str | None = None) -> Record:
    """A sink of rows as the place of dead letters: where it is, and how its files are."""
    only = ("path", "file_bytes", "compression", "url", "table", "schema_name")
    return Record.of("dead_letter", sink, shorthand, make=partial(sink, name=LETTERS_NAME), only=only)


@dataclass(frozen=True)
class DeadLetter:
    """Where records go that cannot be parsed or break a rule: a topic, or a table where no topic may be written."""

    topic: Annotated[TopicName, "The topic that they are sent to."] = ""
    bootstrap: OtherCluster = None
    settings: ClientSettings = field(default_factory=dict)
    parquet: Annotated[ParquetSink | None, _letters(ParquetSink, "path"), "Or Parquet files."] = None
    delta: Annotated[DeltaSink | None, _letters(DeltaSink, "path"), "Or a Delta table."] = None
    postgres: Annotated[PostgresSink | None, _letters(PostgresSink), "Or a table of PostgreSQL."] = None


SINK: Final = Variants(
    "a sink",
    {
        "parquet": Record.of("parquet", ParquetSink, "path"),
        "delta": Record.of("delta", DeltaSink, "path"),
        "postgres": Record.of("postgres", PostgresSink),
        "kafka": Record.of("kafka", KafkaSink, "topic"),
    },
)
SOURCE: Final = Record.of("source", Source)
DEAD_LETTER: Final = Record.of("dead_letter", DeadLetter, "topic")
STEPS: Final = ListOf(STEP, stand_in=lambda place: Filter(f"step-{place}", "true"))
SINKS: Final = ListOf(SINK, stand_in=lambda place: ParquetSink(f"sink-{place}", f"sink-{place}"))

# ------------------------------------------------------------------------ the whole


@dataclass(frozen=True)
class PipelineDefinition:
    """A pipeline of holdfast: from topics to exactly-once sinks."""

    name: Annotated[str, Text("a name"), "The pipeline's name.", Given("pipeline")]
    source: Annotated[Source, SOURCE, "What is read."]
    steps: Annotated[tuple[Step, ...], STEPS, "What happens to each row, in this order."] = ()
    sinks: Annotated[
        tuple[SinkDefinition, ...],
        SINKS,
        "Where the rows go: each sink gets all of those it takes.",
        Given(required=True),
    ] = ()
    dead_letter: Annotated[
        DeadLetter | None,
        DEAD_LETTER,
        "Where records go that cannot be parsed or break a rule; without it <pipeline>-dlt.",
    ] = None
    """Of the source's cluster."""
    trigger: Annotated[
        str,
        Duration(("available-now",)),
        "available-now ends when what was there is done; a duration such as 10s goes on, a batch each.",
    ] = "available-now"
    home: Annotated[
        str, Text("a directory"), VARIABLES, "Plans, stages and logs; without it .holdfast/<pipeline>."
    ] = ""
    """Beside the file, or in the working directory."""
    monitoring_group: Annotated[
        str | None, Text("a group"), VARIABLES, "For lag tools; without it hf-<pipeline>."
    ] = None
    digest_key: Annotated[
        str | None,
        Text("a key"),
        Expansion.SECRET,
        "The key of the digests of rows; without it <home>/digest.key.",
    ] = None
    spark: Annotated[Settings, "Settings of the Spark session."] = field(default_factory=dict)
    directory: str = "."
    """Where relative paths of the definition start; not part of its fingerprint."""


PIPELINE: Final = Record.of("a pipeline", PipelineDefinition)
