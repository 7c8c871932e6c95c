"""`holdfast dump-log`: what the files of a log hold and what is wrong with them; no broker, nothing written.

Events of a dump as lines: batches, records and index entries as kafka-dump-log writes them.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any

from typer.exceptions import Exit

from holdfast.broker.dump.batches import INT32_MAX, Decoder, DumpOptions, Event
from holdfast.broker.dump.decoders import decode_cluster_metadata, decode_offsets, decode_transactions
from holdfast.broker.dump.path import dump_path
from holdfast.cli.exits import complain, stop_when_unread
from holdfast.cli.options import CommandGroup, choice, examples, flag, option
from holdfast.cli.output import json_line
from holdfast.errors import ExitCode, UsageError
from holdfast.real import RealFileSystem
from holdfast.wire.batch import RECORDS_BYTES_MAX

app = CommandGroup()


class DumpOutput(StrEnum):
    TEXT = "text"
    JSON = "json"


@app.command(
    epilog=examples(
        "holdfast dump-log --files data/orders-0/00000000000000000000.log --print-data-log",
        "holdfast dump-log --files data/orders-0 --verify",
        "holdfast dump-log --files data/__cluster_metadata-0 --cluster-metadata-decoder --output json",
    )
)
def dump_log(
    files: Annotated[str, option("PATH,…", "Files to read; a directory means all its files.")],
    print_data_log: Annotated[bool, flag("Show keys, values and headers of records.")] = False,
    deep_iteration: Annotated[bool, flag("List the records inside batches.")] = False,
    skip_record_metadata: Annotated[bool, flag("Of records, show keys and values only.")] = False,
    verify: Annotated[bool, flag("Check everything, records and indexes; show only what is wrong.")] = False,
    verify_index_only: Annotated[bool, flag("Check indexes against the log without listing them.")] = False,
    index_sanity_check: Annotated[bool, flag("Check only that index files are whole and in order.")] = False,
    max_message_size: Annotated[
        int,
        option(
            "BYTES", "Batches that unpack to more are not opened; their checksum is still checked.", min=1
        ),
    ] = RECORDS_BYTES_MAX,
    max_bytes: Annotated[int, option("BYTES", "Read no further in each log file.", min=1)] = INT32_MAX,
    offsets_decoder: Annotated[bool, flag("Read records as those of __consumer_offsets.")] = False,
    transaction_log_decoder: Annotated[bool, flag("Read records as those of __transaction_state.")] = False,
    cluster_metadata_decoder: Annotated[bool, flag("Read records as those of __cluster_metadata.")] = False,
    output: Annotated[
        DumpOutput, choice("Lines as kafka-dump-log writes them, or JSON lines.")
    ] = DumpOutput.TEXT,
) -> None:
    """Show what the files of a log hold, and every damage in them. Needs no broker and changes nothing."""
    decoders: list[Decoder] = [
        decoder
        for wanted, decoder in (
            (offsets_decoder, decode_offsets),
            (transaction_log_decoder, decode_transactions),
            (cluster_metadata_decoder, decode_cluster_metadata),
        )
        if wanted
    ]
    if len(decoders) > 1:
        raise UsageError("records can be read in one way only: choose one decoder")
    options = DumpOptions(
        deep=deep_iteration,
        payload=print_data_log,
        decoder=decoders[0] if decoders else None,
        verify=verify,
        verify_index_only=verify_index_only,
        index_sanity_check=index_sanity_check,
        message_bytes_max=max_message_size,
        bytes_max=max_bytes,
    )
    paths = [path for path in files.split(",") if path]
    if not paths:
        raise UsageError("--files names no file")
    write: Callable[[Event], str | None] = json_line
    if output is DumpOutput.TEXT:
        write = _text_writer(skip_record_metadata, verify)
    stop_when_unread()
    findings = _dump(paths, options, write)
    if findings:
        complain(f"{findings} problem{'s' if findings > 1 else ''} found")
        raise Exit(ExitCode.FINDINGS)


def _text_writer(skip_record_metadata: bool, verify: bool) -> Callable[[Event], str | None]:
    def write(event: Event) -> str | None:
        if event["type"] == ("file" if verify else "summary"):
            return None
        line = as_line(event, skip_record_metadata=skip_record_metadata)
        return None if line is None else line + "\n"

    return write


def _dump(paths: list[str], options: DumpOptions, write: Callable[[Event], str | None]) -> int:
    fs = RealFileSystem()
    findings = 0
    for path in paths:
        for event in dump_path(fs, path, options):
            findings += event["type"] == "finding"
            line = write(event)
            if line is not None:
                sys.stdout.write(line)
    return findings


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
