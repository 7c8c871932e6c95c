"""`holdfast dump-log`: what the files of a log hold and what is wrong with them; no broker, nothing written."""

from __future__ import annotations

import sys
from collections.abc import Callable
from enum import StrEnum
from typing import Annotated

from typer.exceptions import Exit

from holdfast.broker.dump.batches import INT32_MAX, Decoder, DumpOptions, Event
from holdfast.broker.dump.decoders import decode_cluster_metadata, decode_offsets, decode_transactions
from holdfast.broker.dump.path import dump_path
from holdfast.cli.dump_text import as_line
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
