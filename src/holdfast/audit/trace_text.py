"""The life of a record in order, line by line, for people."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime

from holdfast.audit import words
from holdfast.audit.lives import ENDS, Life, SinkLife
from holdfast.audit.stored import Stored, shown_bytes
from holdfast.pipeline.aside import LATE_FOR


def events(life: Life) -> Iterator[tuple[str, str, str]]:
    """The life in order: when, where, what."""
    stored = life.stored
    yield from _origin(stored)
    if stored.batch is not None:
        yield from _in_log(stored)
    elif stored.outcome != "record":
        yield (
            "-",
            "log",
            ENDS[stored.outcome] + f" (the log holds {words.span_text(stored.log_start, stored.log_end)})",
        )
    seen: set[tuple[int, str]] = set()
    for sink in life.sinks:
        if sink.entry is not None and (sink.entry.batch_time_ms, str(sink.entry.range)) not in seen:
            seen.add((sink.entry.batch_time_ms, str(sink.entry.range)))
            span = sink.entry.range.spans[stored.place]
            offsets = words.span_text(span.start, span.end)
            taken = f"taken with offsets {offsets}, by definition {sink.entry.fingerprint[:12]}"
            yield _moment(sink.entry.batch_time_ms), f"batch of {life.pipeline}", taken
    for departure in life.departures:
        said = (
            "was too late for it, and went on" if departure.route == LATE_FOR else f"left: {departure.route}"
        )
        yield "-", f"step {departure.step}", said + _row_number(departure.index)
    for dead in life.dead_letters:
        yield "-", "dead letter", f"{dead.reason}: {dead.error} ({dead.where}){_row_number(dead.index)}"
    for sink in life.sinks:
        if sink.kind != "dead_letter" or sink.standing != "taken":
            yield from _in_sink(sink)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def _moment(milliseconds: int) -> str:
    at = datetime.fromtimestamp(milliseconds / 1000, UTC)
    return f"{at:%Y-%m-%d %H:%M:%S}.{milliseconds % 1000:03d} UTC"


def _row_number(index: int) -> str:
    return f", row {index} of those made of it" if index else ""


def _origin(stored: Stored) -> Iterator[tuple[str, str, str]]:
    if stored.batch is None or stored.outcome == "control":
        return
    at = "-" if stored.timestamp_ms is None or stored.is_append_time else _moment(stored.timestamp_ms)
    by = (
        "sent"
        if stored.spool is None
        else f"sent by spool {stored.spool[0]} as its number {stored.spool[2]:,}"
    )
    if stored.batch.producer_id >= 0:
        sequence = stored.batch.base_sequence + stored.offset - stored.batch.base_offset
        by += f", producer {stored.batch.producer_id} epoch {stored.batch.producer_epoch} sequence {sequence}"
    key = shown_bytes(stored.key)
    size = "no value" if stored.value is None else _count(len(stored.value), "byte")
    yield at, "sender", f"{by}; {'no key' if key is None else f'key {key}'}, {size}"


def _in_log(stored: Stored) -> Iterator[tuple[str, str, str]]:
    batch = stored.batch
    assert batch is not None
    at = _moment(stored.timestamp_ms) if stored.timestamp_ms is not None and stored.is_append_time else "-"
    packed = "" if batch.codec == "none" else f", {batch.codec}"
    whole = (
        f"in leader epoch {batch.leader_epoch}, batch {words.span_text(batch.base_offset, batch.last_offset + 1)} of "
        f"{_count(batch.records, 'record')} and {_count(batch.bytes, 'byte')}{packed}"
    )
    yield (
        at,
        f"log {stored.name}",
        f"stored {whole}" if stored.outcome != "compacted" else f"was stored {whole}",
    )
    if stored.outcome == "compacted":
        yield "-", f"log {stored.name}", ENDS["compacted"]
    elif stored.outcome == "control":
        yield "-", f"log {stored.name}", f"{ENDS['control']}: {stored.transaction}"
    elif stored.transaction != "none":
        when = "-" if stored.marker_ms is None else _moment(stored.marker_ms)
        marker = "" if stored.marker_offset is None else f", by the marker at {stored.marker_offset}"
        yield when, "transaction", f"{stored.transaction}{marker}"


def _absent(sink: SinkLife, number: str) -> str:
    instead = sink.instead
    if instead is not None and instead.topic:
        return f"no row of it{number}; for {instead.key} it has the row made of {instead.name}"
    if sink.takes:
        return f"no row that can be told to hold it: not closed yet, or its key is made by a step{number}"
    return f"no row of it{number}"


def _in_sink(sink: SinkLife) -> Iterator[tuple[str, str, str]]:
    where = f"sink {sink.name}"
    number = f", entry {sink.entry.number:,} of its ledger" if sink.entry is not None else ""
    for each in sink.held:
        yield "-", where, f"{each}{number}"
    if sink.problem:
        yield "-", where, f"cannot be read: {sink.problem}"
    elif not sink.held:
        said = {
            "taken": _absent(sink, number),
            "pending": "has not taken its offset yet",
            "before": "began behind it",
            "empty": "has taken nothing yet",
            "other": "was fed from an earlier topic of this name",
        }[sink.standing]
        yield "-", where, said
