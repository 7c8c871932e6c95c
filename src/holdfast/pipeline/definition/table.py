"""The one table of what a definition may hold: YAML is read by it, and the published JSON Schema is made from it.

Every key stands here once, with the shape of its value, what it is for, and the default that `model.py` gives it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final, get_args

from holdfast.pipeline.definition.documents import Findings
from holdfast.pipeline.definition.errors import Path
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    Expect,
    Field,
    Filter,
    Format,
    KafkaSink,
    OnBreak,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Python,
    SchemaChange,
    Source,
    Sql,
    Unknown,
)
from holdfast.pipeline.definition.shapes import (
    Choice,
    Count,
    Duration,
    Either,
    Function,
    Key,
    ListOf,
    MapOf,
    Raw,
    Record,
    Size,
    Text,
    Truth,
    Variants,
)

UNNAMED: Final = ""
"""The name of a step until it gets one from its place."""


def _make_fields(values: Mapping[str, str], path: Path, findings: Findings) -> tuple[Field, ...]:
    return tuple(
        Field(name, text.strip().removesuffix("?").strip(), required=not text.strip().endswith("?"))
        for name, text in values.items()
    )


def _make_columns(values: Mapping[str, str], path: Path, findings: Findings) -> str:
    """Columns given as a mapping, in Spark's one-line form."""
    columns = {name: text.strip().removesuffix("?").strip() for name, text in values.items()}
    return ", ".join(f"{_quoted(name)} {text}" for name, text in columns.items())


def _quoted(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z][A-Za-z0-9_]*", name) else f"`{name}`"


def _make_expect(that: str, name: str = UNNAMED, otherwise: OnBreak = "quarantine") -> Expect:
    return Expect(name, that, otherwise)


def _make_filter(where: str, name: str = UNNAMED) -> Filter:
    return Filter(name, where)


def _make_sql(query: str, name: str = UNNAMED, expand: bool = False) -> Sql:
    return Sql(name, query, expand)


def _make_python(name: str = UNNAMED, **values: Any) -> Python:
    return Python(name, **values)


def _make_decoding(
    schema_file: str | None = None, registry: str | Mapping[str, str] | None = None, **values: Any
) -> Any:
    decoding = Decoding(registry={"url": registry} if isinstance(registry, str) else registry, **values)
    return decoding if schema_file is None else SchemaFile(decoding, schema_file)


class SchemaFile:
    """A decoding whose schema is still in the file it names; the loader reads it."""

    def __init__(self, decoding: Decoding, file: str) -> None:
        self.decoding = decoding
        self.file = file


SETTINGS: Final = MapOf(Text(loose=True))
NAME_DOC: Final = "Letters and digits, with '.', '_' or '-' between them; rows are counted under it."
SQL: Final = Text("an SQL expression")

DECODING: Final = Record(
    "a decoding",
    (
        Key("format", Choice(get_args(Format)), "How the bytes are written.", required=True),
        Key(
            "fields",
            MapOf(Text("a type such as long, string? or array<string>"), _make_fields),
            "Columns by name: a type in Spark's words; a '?' behind it makes the field optional.",
        ),
        Key(
            "unknown",
            Choice(get_args(Unknown)),
            "Fields that are not listed: kept aside, ignored, or a reason for the dead letter.",
            default="ignore",
        ),
        Key("schema", Text("a schema"), "Avro or Protobuf: the schema itself."),
        Key(
            "schema_file",
            Text("a file"),
            "Avro or Protobuf: the file the schema stands in (.avsc, .proto, or protoc's .desc, .pb, .binpb).",
        ),
        Key(
            "message",
            Text("a message's name"),
            "Protobuf: the message's full name; not needed when the schema has one message.",
        ),
        Key(
            "registry",
            Either(Text("an address"), SETTINGS),
            "A schema registry: its address, or its client's settings ('url', 'basic.auth.user.info'…). "
            "Values then start with its five-byte header.",
        ),
        Key(
            "csv",
            Record(
                "csv",
                (
                    Key("delimiter", Raw("a character"), "Between two cells.", default=","),
                    Key("quote", Raw("a character"), "Around a cell.", default='"'),
                    Key("null", Raw(), "The text that means null."),
                ),
                dict,
                doc="How a line of CSV is cut.",
            ),
            "How a line of CSV is cut.",
        ),
    ),
    _make_decoding,
    shorthand="format",
)

SOURCE: Final = Record(
    "source",
    (
        Key("topics", ListOf(Text("a topic"), lone=True), "The topics to read."),
        Key(
            "pattern", Text("a regular expression"), "Topics whose whole name matches, found as they appear."
        ),
        Key(
            "bootstrap",
            Text("HOST:PORT"),
            "The brokers to ask first; without it --bootstrap-server, HOLDFAST_BOOTSTRAP_SERVER, 127.0.0.1:9092.",
        ),
        Key("settings", SETTINGS, "Kafka's client settings, by their dotted names."),
        Key("value", DECODING, "How a record's value becomes columns."),
        Key("key", DECODING, "How a record's key becomes columns; they are called `_key_<field>`."),
        Key(
            "starting",
            Text("earliest, latest or a time"),
            "Where a pipeline without a ledger begins: earliest, latest, or a time such as 2026-01-31T00:00:00Z.",
            default="earliest",
        ),
        Key("batch_records", Count(), "At most this many offsets in a batch.", default=Source.batch_records),
        Key("batch_bytes", Size(), "At most about this many bytes in a batch.", default="256MiB"),
    ),
    Source,
    doc="What is read.",
)

STEP: Final = Variants(
    "a step",
    {
        "expect": Record(
            "expect",
            (
                Key("that", SQL, "True for a good row; null counts as broken.", required=True),
                Key("name", Text("a name"), NAME_DOC),
                Key(
                    "else",
                    Choice(get_args(OnBreak)),
                    "What becomes of a row that breaks it: kept and counted, dropped and counted, sent to the "
                    "dead letter topic, or the pipeline stops.",
                    default="quarantine",
                    attribute="otherwise",
                ),
            ),
            _make_expect,
            shorthand="that",
            doc="A rule that every row should keep.",
        ),
        "filter": Record(
            "filter",
            (
                Key("where", SQL, "Rows for which this is true stay.", required=True),
                Key("name", Text("a name"), NAME_DOC),
            ),
            _make_filter,
            shorthand="where",
            doc="Rows that leave on purpose, counted by this step's name.",
        ),
        "sql": Record(
            "sql",
            (
                Key("query", Text("a query"), "SELECT … FROM input; `_hf` must be selected.", required=True),
                Key("name", Text("a name"), NAME_DOC),
                Key("expand", Truth(), "A row may become several.", default=False),
            ),
            _make_sql,
            shorthand="query",
            doc="A query over `input`, the rows of the step before.",
        ),
        "python": Record(
            "python",
            (
                Key("function", Function(), "The function, or module:function.", required=True),
                Key("file", Text("a file"), "The Python file it stands in, beside the definition."),
                Key("name", Text("a name"), NAME_DOC),
                Key(
                    "schema",
                    Either(Text("columns"), MapOf(Text("a type"), _make_columns)),
                    "The columns it returns, as 'id long, total double' or as a mapping; without it the same.",
                ),
                Key(
                    "mode",
                    Choice(("arrow", "pandas")),
                    "What it takes and returns: a pyarrow RecordBatch or a pandas DataFrame.",
                    default="arrow",
                ),
                Key("expand", Truth(), "A row may become several.", default=False),
            ),
            _make_python,
            shorthand="function",
            doc="A Python function over batches of rows.",
        ),
    },
)

_SINK_NAME: Final = Key("name", Text("a name"), "Unique in the pipeline; its ledger is kept under it.")
_PARTITION_BY: Final = Key(
    "partition_by", ListOf(Text("a column"), lone=True), "Columns that become directories."
)
_FILE_BYTES: Final = Key("file_bytes", Size(), "Size a file should have.", default="128MiB")
_SCHEMA_CHANGE: Final = Key(
    "schema",
    Choice(get_args(SchemaChange)),
    "When rows bring a new column: stop, or add it. A changed type always stops.",
    default="fail",
)
_KAFKA_PLACE: Final = (
    Key("bootstrap", Text("HOST:PORT"), "Another cluster than the source's."),
    Key("settings", SETTINGS, "Kafka's client settings, by their dotted names."),
)

SINK: Final = Variants(
    "a sink",
    {
        "parquet": Record(
            "parquet",
            (
                Key(
                    "path", Text("a directory"), "The directory; each batch is one inside it.", required=True
                ),
                _SINK_NAME,
                _PARTITION_BY,
                _FILE_BYTES,
                _SCHEMA_CHANGE,
                Key(
                    "compression",
                    Choice(("none", "snappy", "gzip", "lz4", "zstd")),
                    "Of the files.",
                    default="snappy",
                ),
            ),
            ParquetSink,
            shorthand="path",
            doc="Directories of Parquet files on a local file system.",
        ),
        "delta": Record(
            "delta",
            (
                Key("path", Text("a table"), "Directory or address of the table.", required=True),
                _SINK_NAME,
                _PARTITION_BY,
                _FILE_BYTES,
                _SCHEMA_CHANGE,
            ),
            DeltaSink,
            shorthand="path",
            doc="A Delta Lake table.",
        ),
        "postgres": Record(
            "postgres",
            (
                Key(
                    "url",
                    Text("an address"),
                    "postgresql://user:${PASSWORD}@host/database, or file:/path that holds it.",
                    required=True,
                ),
                Key("table", Text("a table"), "Made when it is missing.", required=True),
                _SINK_NAME,
                Key(
                    "mode",
                    Choice(("append", "upsert")),
                    "Every row is kept, or the last row of each key.",
                    default="append",
                ),
                Key("key", ListOf(Text("a column"), lone=True), "The primary key, for upsert."),
                Key("delete_when", SQL, "Upsert: a row for which this is true deletes its key."),
                _SCHEMA_CHANGE,
                Key(
                    "schema_name", Text("a schema"), "The database schema the table is in.", default="public"
                ),
            ),
            PostgresSink,
            doc="A table of a PostgreSQL database.",
        ),
        "kafka": Record(
            "kafka",
            (
                Key("topic", Text("a topic"), "Where rows are sent.", required=True),
                _SINK_NAME,
                *_KAFKA_PLACE,
                Key("key", SQL, "The record's key; without it the source record's."),
                Key("value", SQL, "The record's value; without it all columns as a JSON object."),
                Key("headers", MapOf(SQL), "Headers: SQL by name."),
                Key("writers", Count(most=64), "Transactional producers side by side.", default=1),
            ),
            KafkaSink,
            shorthand="topic",
            doc="A topic, written in transactions.",
        ),
    },
)

DEAD_LETTER: Final = Record(
    "dead_letter",
    (
        Key(
            "topic", Text("a topic"), "Where records go that cannot be parsed or break a rule.", required=True
        ),
        *_KAFKA_PLACE,
    ),
    DeadLetter,
    shorthand="topic",
    doc="Where records go that cannot be parsed or break a rule.",
)

PIPELINE: Final = Record(
    "a pipeline",
    (
        Key("pipeline", Text("a name"), "The pipeline's name.", required=True, attribute="name"),
        Key("source", SOURCE, "What is read.", required=True),
        Key(
            "steps",
            ListOf(STEP, stand_in=lambda place: Filter(f"step-{place}", "true")),
            "What happens to each row, in this order.",
        ),
        Key(
            "sinks",
            ListOf(SINK, stand_in=lambda place: ParquetSink(f"sink-{place}", f"sink-{place}")),
            "Where the rows go: each sink gets all of them.",
            required=True,
        ),
        Key(
            "dead_letter",
            DEAD_LETTER,
            "Where records go that cannot be parsed or break a rule; without it <pipeline>-dlt.",
        ),
        Key(
            "trigger",
            Duration(("available-now",)),
            "available-now ends when what was there is done; a duration such as 10s goes on, a batch each.",
            default="available-now",
        ),
        Key("home", Text("a directory"), "Plans, stages and logs; without it .holdfast/<pipeline>."),
        Key("monitoring_group", Text("a group"), "For lag tools; without it hf-<pipeline>."),
        Key("spark", SETTINGS, "Settings of the Spark session."),
    ),
    PipelineDefinition,
    doc="A pipeline of holdfast: from topics to exactly-once sinks.",
)
