"""Keys of a definition that several kinds of sinks share: what may stand there, and what it means."""

from __future__ import annotations

from typing import Annotated, Literal

from holdfast.pipeline.definition.shapes import Given, Size, Text

ColumnName = Annotated[str, Text("a column")]
Expression = Annotated[str, Text("an SQL expression")]
SinkName = Annotated[str, Text("a name"), "Unique in the pipeline; its ledger is kept under it."]
Rows = Annotated[
    str,
    Text("a step's name"),
    "The step whose rows it takes: that of a window, keyed or join step, <step>.late or <step>.duplicates; "
    "without it the rows at the end of the steps.",
]
Unordered = Annotated[
    bool,
    "Rows of one key may lie in several partitions, and whichever is read first (dedupe) or last (upsert, compacted "
    "topic) may count.",
]
PartitionBy = Annotated[tuple[ColumnName, ...], "Columns that become directories."]
FileBytes = Annotated[int, Size(), "Size a file should have.", Given(shown="128MiB")]
SchemaChange = Literal["fail", "add-columns"]
OnSchemaChange = Annotated[
    SchemaChange, "When rows bring a new column: stop, or add it. A changed type always stops."
]
Mode = Annotated[
    Literal["append", "upsert", "scd2"],
    "Every row is kept, or the last row of each key, or a row for each version of a key, with its span of validity.",
]
TableKey = Annotated[
    tuple[ColumnName, ...], "Upsert and scd2: what makes a row one of its own, or a version of it."
]
DeleteWhen = Annotated[
    Expression | None, "Upsert: a row for which this is true deletes its key; scd2: it ends the version."
]
OrderBy = Annotated[
    ColumnName | None,
    "Upsert: the row with its greatest value wins, then the last by topic, partition and offset, wherever and whenever "
    "it was read; without it the row that was read last. Scd2: since when a version is valid.",
]
