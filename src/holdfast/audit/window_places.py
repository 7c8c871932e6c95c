"""Which windows of a sink one record counts in, found by its event time and its key.

A window's row names its step and turn, never the records it was made of. Where event time and key are fields of the
record that no step in front of the window has made, the row is the one whose key is the record's and whose time holds
the record's event. Otherwise nobody can tell without running the steps, and nothing is found.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa

from holdfast.audit.decoding import SourceDecoder
from holdfast.audit.plain_columns import plain_columns
from holdfast.audit.sinks.base import SinkReader
from holdfast.pipeline.definition.model import PipelineDefinition, Window

RECORD_TIME = "_timestamp"


def windows_of(definition: PipelineDefinition, reader: SinkReader, record: pa.RecordBatch) -> Iterator[str]:
    """The windows of this sink that hold the record, which is given as the reader of logs gives it."""
    step = next(
        (each for each in definition.steps if isinstance(each, Window) and each.name == reader.takes), None
    )
    event_time = definition.source.event_time
    if step is None or event_time is None:
        return
    decoder = SourceDecoder(definition.source)
    topic = record.column("topic")[0].as_py()
    columns = decoder.decode(topic, record).columns
    plain = plain_columns(definition, decoder.types, step.name).columns
    if any(name not in plain for name in step.key):
        return
    event = (
        record.column("timestamp")[0].as_py()
        if event_time.field == RECORD_TIME
        else columns[event_time.field][0].as_py()
        if event_time.field in columns
        else None
    )
    if event is None:
        return
    key = {name: columns[plain[name]][0].as_py() for name in step.key}
    moment = _moment(event)
    for batch in reader.windows():
        names = set(batch.rows.schema.names)
        wanted = [name for name in ("window_start", "window_end", "_hf_count", *step.key) if name in names]
        for row in batch.rows.select(wanted).to_pylist():
            if row.get("_hf_count") == 0 or not _holds(step, row, moment):
                continue
            if all(_same(row.get(name), value) for name, value in key.items()):
                yield _told(batch.where, row, key)


def _holds(step: Window, row: dict[str, Any], moment: datetime) -> bool:
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


def _told(where: str, row: dict[str, Any], key: dict[str, Any]) -> str:
    named = ", ".join(f"{name}={value}" for name, value in key.items())
    span = f"{_moment(row['window_start']):%Y-%m-%d %H:%M:%S} to {_moment(row['window_end']):%H:%M:%S}"
    count = row.get("_hf_count")
    of = "" if count is None else f", made of {count:,} rows"
    return f"window {span}{f' of {named}' if named else ''}{of} ({where})"
