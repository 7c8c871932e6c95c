"""Events of a dump as lines: batches, records and index entries as kafka-dump-log writes them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

Event = dict[str, Any]


def as_line(event: Event, *, skip_record_metadata: bool = False) -> str | None:
    """The line for an event, or None when text has nothing to say about it."""
    kind = event["type"]
    if kind == "record":
        return _record(event, skip_record_metadata)
    if kind in _LINES:
        return _LINES[kind](event)
    return " ".join(f"{_camel(name)}: {_plain(value)}" for name, value in event.items() if name != "type")


def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(word.capitalize() for word in rest)


def _plain(value: Any) -> str:
    return "none" if value is None else str(value)


def _boolean(value: bool) -> str:
    return "true" if value else "false"


def _file(event: Event) -> str:
    line = f"Dumping {event['path']}"
    if event["kind"] == "log":
        line += f"\nLog starting offset: {event['start_offset']}"
    elif event["kind"] == "checkpoint":
        line += f"\nSnapshot end offset: {event['start_offset']}, epoch: {event['epoch']}"
    return line


def _batch(event: Event) -> str:
    horizon = event["delete_horizon_ms"]
    shown = "OptionalLong.empty" if horizon is None else f"OptionalLong[{horizon}]"
    return (
        f"baseOffset: {event['base_offset']} lastOffset: {event['last_offset']} count: {event['count']} "
        f"baseSequence: {event['base_sequence']} lastSequence: {event['last_sequence']} "
        f"producerId: {event['producer_id']} producerEpoch: {event['producer_epoch']} "
        f"partitionLeaderEpoch: {event['leader_epoch']} "
        f"isTransactional: {_boolean(event['is_transactional'])} isControl: {_boolean(event['is_control'])} "
        f"deleteHorizonMs: {shown} position: {event['position']} "
        f"{event['timestamp_type']}: {event['max_timestamp_ms']} size: {event['size']} magic: {event['magic']} "
        f"compresscodec: {event['codec']} crc: {event['crc']} isvalid: {_boolean(event['is_valid'])}"
    )


def _record(event: Event, skip_metadata: bool) -> str | None:
    parts = []
    if not skip_metadata:
        parts.append(
            f"| offset: {event['offset']} {event['timestamp_type']}: {event['timestamp_ms']} "
            f"keySize: {event['key_size']} valueSize: {event['value_size']} sequence: {event['sequence']} "
            f"headerKeys: [{','.join(event['header_keys'])}]"
        )
    if "control" in event:
        if skip_metadata:
            return None
        parts.append(_control(event["control"]))
    if event.get("key") is not None:
        parts.append(f"key: {_content(event['key'])}")
    if "value" in event:
        is_removed = event["value"] is None and isinstance(event["key"], dict)
        parts.append(f"payload: {'<DELETE>' if is_removed else _content(event['value'])}")
    if "undecodable" in event:
        parts.append(f"(not decoded: {event['undecodable']})")
    return " ".join(parts)


def _content(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, dict):
        return json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    return str(value)


def _control(control: Event) -> str:
    if control["type"] in ("COMMIT", "ABORT"):
        return f"endTxnMarker: {control['type']} coordinatorEpoch: {control['data']['coordinator_epoch']}"
    name = {"LeaderChange": "LeaderChange:", "Voters": "KRaftVoters"}.get(control["type"], control["type"])
    return f"{name} {_content(control['data'])}"


def _finding(event: Event) -> str:
    where = "".join(f" {name} {event[name]}" for name in ("position", "offset") if event[name] is not None)
    return f"PROBLEM {event['path']}{',' + where if where else ''}: {event['message']}"


def _summary(event: Event) -> str:
    return (
        f"{event['path']}: {event['batches']} batches, {event['records']} records, {event['bytes']} bytes, "
        f"end offset {event['end_offset']}, {event['findings']} problems"
    )


_LINES: Mapping[str, Callable[[Event], str]] = {
    "file": _file,
    "batch": _batch,
    "finding": _finding,
    "summary": _summary,
    "index_entry": lambda event: f"offset: {event['offset']} position: {event['position']}",
    "time_index_entry": lambda event: f"timestamp: {event['timestamp_ms']} offset: {event['offset']}",
    "written_ahead": lambda event: f"{event['path']}: {event['bytes']} bytes written ahead",
    "sanity": lambda event: f"{event['path']} passed sanity check.",
}
