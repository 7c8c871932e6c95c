"""What may stand below `source`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, get_args

from holdfast.pipeline.definition.documents import Findings
from holdfast.pipeline.definition.errors import Path
from holdfast.pipeline.definition.model import Decoding, EventTime, Field, Format, Source, Unknown
from holdfast.pipeline.definition.shapes import (
    Choice,
    Count,
    Duration,
    Either,
    Key,
    ListOf,
    MapOf,
    Raw,
    Record,
    Size,
    Text,
)
from holdfast.pipeline.definition.table_words import SETTINGS


def _make_fields(values: Mapping[str, str], path: Path, findings: Findings) -> tuple[Field, ...]:
    return tuple(
        Field(name, text.strip().removesuffix("?").strip(), required=not text.strip().endswith("?"))
        for name, text in values.items()
    )


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

EVENT_TIME: Final = Record(
    "event_time",
    (
        Key(
            "field",
            Text("a field"),
            "A field of the records, a timestamp; or _timestamp, the time Kafka keeps with each.",
            required=True,
        ),
        Key(
            "delay",
            Duration(least_ms=0),
            "How far behind the newest event of its partition a row may be before it is late.",
            default=EventTime.delay,
        ),
        Key(
            "idle",
            Duration(),
            "A partition without records for so long holds nothing up any more; without it, it always does.",
        ),
        Key(
            "ahead",
            Duration(),
            "An event further ahead of its record's own time does not make others late: its clock is wrong.",
            default=EventTime.ahead,
        ),
    ),
    EventTime,
    shorthand="field",
    doc="When things happened. Steps with a memory go by it.",
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
        Key(
            "values",
            MapOf(DECODING),
            "Values of topics that have a format of their own, by topic; rows get the columns of all.",
        ),
        Key("event_time", EVENT_TIME, "When things happened, for steps with a memory."),
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
