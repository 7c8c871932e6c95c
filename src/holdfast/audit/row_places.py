"""Rows that do not name the record they were made of, found by what is in it: windows, and rows that replaced others.

A window's row names its step and turn; a table that keeps one row for each key names the last record alone. Where the
key, and for windows the event time, are fields of the record that no step has made, the row is the one that has them.
Otherwise nobody can tell without running the steps, and nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.sinks.base import SinkReader
from holdfast.pipeline.definition.model import PipelineDefinition, PostgresSink, Window
from holdfast.pipeline.definition.plain_columns import plain_columns

RECORD_TIME = "_timestamp"


@dataclass(frozen=True)
class Content:
    """A record's fields, as the source decodes them."""

    fields: Mapping[str, Any]
    timestamp: datetime
    plain: Mapping[str, str]
    """Columns of rows that are fields, unchanged."""

    def key(self, names: Sequence[str]) -> dict[str, Any] | None:
        """Its key in the rows; nothing where a step makes part of it."""
        if any(name not in self.plain for name in names):
            return None
        return {name: self.fields[self.plain[name]] for name in names}


def content_of(definition: PipelineDefinition, record: pa.RecordBatch, rows: str) -> Content:
    """Of a record as the reader of logs gives it; `rows` says which rows its columns are compared with."""
    decoder = SourceDecoder(definition.source)
    columns = decoder.decode(record.column("topic")[0].as_py(), record).columns
    fields = {name: column[0].as_py() for name, column in columns.items()}
    plain = plain_columns(definition, decoder.types, rows).columns
    return Content(fields, record.column("timestamp")[0].as_py(), plain)


# ------------------------------------------------------------------------ windows


def windows_of(definition: PipelineDefinition, reader: SinkReader, record: pa.RecordBatch) -> Iterator[str]:
    """The windows of this sink that hold the record."""
    step = next(
        (each for each in definition.steps if isinstance(each, Window) and each.name == reader.takes), None
    )
    event_time = definition.source.event_time
    if step is None or event_time is None:
        return
    content = content_of(definition, record, step.name)
    key = content.key(step.key)
    event = content.timestamp if event_time.field == RECORD_TIME else content.fields.get(event_time.field)
    if key is None or event is None:
        return
    moment = _moment(event)
    for batch in reader.windows():
        names = set(batch.rows.schema.names)
        wanted = [name for name in ("window_start", "window_end", "_hf_count", *step.key) if name in names]
        for row in batch.rows.select(wanted).to_pylist():
            if row.get("_hf_count") == 0 or not _holds(step, row, moment):
                continue
            if all(_same(row.get(name), value) for name, value in key.items()):
                yield _told(batch.where, row, key)


def _holds(step: Window, row: Mapping[str, Any], moment: datetime) -> bool:
    start, end = _moment(row["window_start"]), _moment(row["window_end"])
    return start <= moment <= end if step.kind == "session" else start <= moment < end


def _moment(value: Any) -> datetime:
    if isinstance(value, str):
        value = datetime.fromisoformat(value)
    assert isinstance(value, datetime)
    return value if value.tzinfo is not None else value.replace(tzinfo=UTC)


def _same(held: Any, wanted: Any) -> bool:
    """Sinks that keep text keep numbers as text too."""
    return held == wanted or (held is not None and wanted is not None and str(held) == str(wanted))


def _told(where: str, row: Mapping[str, Any], key: Mapping[str, Any]) -> str:
    named = key_text(key)
    span = f"{_moment(row['window_start']):%Y-%m-%d %H:%M:%S} to {_moment(row['window_end']):%H:%M:%S}"
    count = row.get("_hf_count")
    of = "" if count is None else f", made of {count:,} rows"
    return f"window {span}{f' of {named}' if named else ''}{of} ({where})"


def key_text(key: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in key.items())


# ------------------------------------------------------------------------ rows that replaced others


@dataclass(frozen=True)
class Standing:
    """The row that a table has for a record's key."""

    key: str
    topic: str = ""
    """Nothing: it has none."""
    partition: int = -1
    offset: int = -1

    @property
    def name(self) -> str:
        return f"{self.topic}:{self.partition}@{self.offset}"

    def is_older_than(self, topic: str, partition: int, offset: int) -> bool:
        """Whether it comes for certain before that record: order holds within a partition."""
        return (self.topic, self.partition) == (topic, partition) and self.offset < offset


def standing_for(
    definition: PipelineDefinition, sink: PostgresSink, reader: SinkReader, record: pa.RecordBatch
) -> Standing | None:
    """What stands for this record's key in a table that is upserted; nothing where its key cannot be told."""
    key = content_of(definition, record, sink.rows).key(sink.key)
    if key is None:
        return None
    named = key_text(key)
    for batch in reader.keys_of(sink.key):
        rows = batch.keys.to_pylist()
        for at, row in enumerate(rows):
            if all(_same(row.get(name), value) for name, value in key.items()):
                lineage = batch.lineage
                return Standing(named, lineage.topic, lineage.partition, int(lineage.offsets[at]))
    return Standing(named)
