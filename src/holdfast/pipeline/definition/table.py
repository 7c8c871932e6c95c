"""The one table of what a definition may hold: YAML is read by it, and the published JSON Schema is made from it.

Every key stands here once, with the shape of its value, what it is for, and the default that `model.py` gives it: the
source in `table_source.py`, the steps in `table_steps.py`, sinks and the whole in this module.
"""

from __future__ import annotations

from typing import Final, get_args

from holdfast.pipeline.definition.model import (
    COMPRESSIONS,
    DeadLetter,
    DeltaSink,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    SchemaChange,
)
from holdfast.pipeline.definition.shapes import (
    Choice,
    Count,
    Duration,
    Key,
    ListOf,
    MapOf,
    Record,
    Size,
    Text,
    Variants,
)
from holdfast.pipeline.definition.table_source import SOURCE
from holdfast.pipeline.definition.table_steps import STEP
from holdfast.pipeline.definition.table_words import COLUMN_NAMES, SETTINGS, SQL, UNORDERED

__all__ = ["DEAD_LETTER", "PIPELINE", "SINK", "SOURCE", "STEP"]

_SINK_NAME: Final = Key("name", Text("a name"), "Unique in the pipeline; its ledger is kept under it.")
_ROWS: Final = Key(
    "rows",
    Text("a step's name"),
    "The step whose rows it takes: that of a window, keyed or join step, <step>.late or <step>.duplicates; "
    "without it the rows at the end of the steps.",
)
_PARTITION_BY: Final = Key("partition_by", COLUMN_NAMES, "Columns that become directories.")
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
                _ROWS,
                _PARTITION_BY,
                _FILE_BYTES,
                _SCHEMA_CHANGE,
                Key(
                    "compression",
                    Choice(COMPRESSIONS),
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
                _ROWS,
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
                _ROWS,
                Key(
                    "mode",
                    Choice(("append", "upsert")),
                    "Every row is kept, or the last row of each key.",
                    default="append",
                ),
                Key("key", COLUMN_NAMES, "The primary key, for upsert."),
                Key(
                    "order",
                    Text("a column"),
                    "Upsert: the row with its greatest value wins, wherever and whenever it was read; without it "
                    "the row that was read last.",
                ),
                UNORDERED,
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
                _ROWS,
                *_KAFKA_PLACE,
                Key("key", SQL, "The record's key; without it the source record's."),
                Key("value", SQL, "The record's value; without it all columns as a JSON object."),
                Key("headers", MapOf(SQL), "Headers: SQL by name."),
                UNORDERED,
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
            "Where the rows go: each sink gets all of those it takes.",
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
