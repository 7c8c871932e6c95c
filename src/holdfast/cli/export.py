"""`holdfast export`: a topic, or a part of it, as one file for other tools: Parquet, Arrow, CSV or JSON lines.

The file appears when it is whole: it is written aside, flushed and renamed. Whatever goes wrong, interrupts included,
leaves nothing behind and whatever was there before as it was. What is exported is fixed when the command begins, so it
ends even while others write.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, BinaryIO

import typer

from holdfast.atomic import parent_of
from holdfast.cli.client import parse_assignments, read_properties
from holdfast.cli.consume import ISOLATION_LEVELS
from holdfast.cli.exits import CannotConnect, CommandFailed, complain, stop_when_unread
from holdfast.cli.options import SERVER, CommandGroup, ServerFlags, choice, examples, flag, option
from holdfast.errors import HoldfastError, UsageError
from holdfast.real import RealFileSystem, flush_descriptor

if TYPE_CHECKING:
    from holdfast.reader import Cluster, Isolation, PartitionRange, RangeReport

app = CommandGroup()


class ExportFormat(StrEnum):
    PARQUET = "parquet"
    JSONL = "jsonl"
    CSV = "csv"
    ARROW = "arrow"


ENDINGS = {
    ".parquet": ExportFormat.PARQUET,
    ".jsonl": ExportFormat.JSONL,
    ".ndjson": ExportFormat.JSONL,
    ".csv": ExportFormat.CSV,
    ".arrow": ExportFormat.ARROW,
    ".feather": ExportFormat.ARROW,
}


@app.command(
    epilog=examples(
        "holdfast export orders --output orders.parquet",
        "holdfast export orders --from 2026-11-01 --to 2026-11-02T12:00 --output day.csv",
        "holdfast export orders --from 0:100,3:250 --output tail.jsonl",
        "holdfast export orders --format jsonl --partitions 0,2-4 --output - | head",
    )
)
def export(
    topic: Annotated[str, typer.Argument(metavar="TOPIC", help="The topic to read.")],
    output: Annotated[str, option("FILE", "The file to write; - is standard output (not Parquet).")],
    format_: Annotated[
        ExportFormat | None,
        choice(
            "Parquet and Arrow keep bytes as they are. By default as the file's name ends, else Parquet.",
            "--format",
        ),
    ] = None,
    from_: Annotated[
        str,
        option(
            "PLACE",
            "Where to begin: earliest, latest, an offset, offsets by partition (0:15,1:20), or a time "
            "(ISO 8601; UTC unless it says otherwise).",
            "--from",
        ),
    ] = "earliest",
    to: Annotated[
        str, option("PLACE", "Where to end, in the same words; this place is left out.")
    ] = "latest",
    partitions: Annotated[str | None, option("N,N-N", "Read these partitions only.")] = None,
    isolation_level: Annotated[
        str,
        option(
            "LEVEL",
            "read_committed leaves out records of open and aborted transactions; or read_uncommitted.",
        ),
    ] = "read_committed",
    force: Annotated[bool, flag("Replace the file if it exists.")] = False,
    command_property: Annotated[
        list[str] | None,
        option("NAME=VALUE", "A setting of the client, over --command-config; may be repeated."),
    ] = None,
    server: ServerFlags = SERVER,
) -> None:
    """Write the records of a topic to a file: Parquet, Arrow, CSV or JSON lines.

    The file appears when it is whole.
    """
    if isolation_level not in ISOLATION_LEVELS:
        raise UsageError(f"--isolation-level {isolation_level!r} is not one of {', '.join(ISOLATION_LEVELS)}")
    chosen = parse_partitions(partitions)
    start, end = parse_place(from_, "--from"), parse_place(to, "--to")
    settings = read_properties(server.command_config) if server.command_config else {}
    settings |= parse_assignments(command_property or [], "--command-property")
    settings |= {
        "bootstrap.servers": server.bootstrap_server,
        "socket.connection.setup.timeout.ms": str(server.connect_timeout_ms),
        "client.id": settings.get("client.id", "holdfast-cli"),
    }
    with _reader_errors(topic):
        from holdfast.reader import Cluster

        kind = format_ or ENDINGS.get(os.path.splitext(output)[1].lower(), ExportFormat.PARQUET)
        with Cluster(settings) as cluster, _target(output, kind, force) as file:
            ranges = _ranges(cluster, topic, start, end, isolation_level, chosen)
            _export(cluster, ranges, isolation_level, kind, file, topic, output)


def _export(
    cluster: Cluster,
    ranges: list[PartitionRange],
    isolation_level: Any,
    format_: ExportFormat,
    file: BinaryIO,
    topic: str,
    output: str,
) -> None:
    from holdfast.cli.export_formats import WRITERS

    began_s = time.monotonic()
    reports: list[RangeReport] = []
    writer = WRITERS[format_](file)
    with _progress(topic, sum(each.end - each.start for each in ranges)) as show:
        for batch in cluster.read(ranges, isolation=isolation_level, reports=reports):
            writer.write(batch)
            show(sum(report.position - report.range.start for report in reports))
    writer.finish()
    complain(_summary(topic, reports, time.monotonic() - began_s, "" if output == "-" else f" to {output}"))


def _ranges(
    cluster: Cluster, topic: str, start: Any, end: Any, isolation_level: Any, chosen: Collection[int] | None
) -> list[PartitionRange]:
    from holdfast.reader import ranges_of

    isolation: Isolation = isolation_level
    if isinstance(start, EveryPartition) or isinstance(end, EveryPartition):
        numbers = chosen if chosen is not None else list(cluster.topics([topic])[topic].partitions)
        start, end = (
            dict.fromkeys(numbers, place.offset) if isinstance(place, EveryPartition) else place
            for place in (start, end)
        )
    return ranges_of(cluster, topic, start=start, end=end, isolation=isolation, partitions=chosen)


# ------------------------------------------------------------------------ what was asked for


class EveryPartition:
    """The same offset in every partition."""

    def __init__(self, offset: int) -> None:
        self.offset = offset


def parse_place(text: str, flag: str) -> str | datetime | dict[int, int] | EveryPartition:
    """earliest, latest, an offset, partition:offset pairs, or a time."""
    if text in ("earliest", "latest"):
        return text
    if text.isdigit():
        return EveryPartition(int(text))
    pairs = [pair.split(":") for pair in text.split(",")]
    if all(len(pair) == 2 and pair[0].isdigit() and pair[1].isdigit() for pair in pairs):
        return {int(partition): int(offset) for partition, offset in pairs}
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(
            f"{flag} {text!r} is no place: earliest, latest, an offset, PARTITION:OFFSET,… or a time "
            "such as 2026-11-01T12:00"
        ) from None
    return moment if moment.tzinfo else moment.replace(tzinfo=UTC)


def parse_partitions(text: str | None) -> set[int] | None:
    """0,2-4 as numbers."""
    if text is None:
        return None
    chosen: set[int] = set()
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdigit() or (dash and not last.isdigit()) or (dash and int(last) < int(first)):
            raise UsageError(f"--partitions {text!r} is no list such as 0,2-4")
        if dash and int(last) - int(first) > 1_000_000:
            raise UsageError(f"--partitions {text!r}: no topic has so many")
        chosen.update(range(int(first), int(last or first) + 1))
    return chosen


# ------------------------------------------------------------------------ where it goes


@contextmanager
def _target(output: str, format_: ExportFormat, force: bool) -> Iterator[BinaryIO]:
    """The file to write to, which gets its name when all is well and vanishes when not."""
    if output == "-":
        if format_ is ExportFormat.PARQUET:
            raise UsageError("Parquet cannot be written to standard output; name a file with --output")
        stop_when_unread()
        yield sys.stdout.buffer
        return
    if os.path.isdir(output):
        raise UsageError(f"--output {output} is a directory")
    if os.path.exists(output) and not force:
        raise UsageError(f"--output {output} exists; --force replaces it")
    directory = parent_of(output)
    # Named before it is made: whenever a signal comes, what is to be removed is known.
    aside = os.path.join(directory, f".{os.path.basename(output)}.{secrets.token_hex(8)}")
    try:
        with _new_file(aside, output) as file:
            yield file
            file.flush()
            flush_descriptor(file.fileno())
        if os.path.exists(output) and not force:
            raise CommandFailed(f"{output} has appeared meanwhile; it was not replaced")
        os.replace(aside, output)
    except BaseException:
        with suppress(FileNotFoundError):
            os.unlink(aside)
        raise
    RealFileSystem().flush_directory(directory)


def _new_file(path: str, output: str) -> BinaryIO:
    try:
        return open(path, "xb")
    except OSError as error:
        raise UsageError(f"--output {output}: {error.strerror}") from None


# ------------------------------------------------------------------------ what is said


@contextmanager
def _progress(topic: str, total: int) -> Iterator[Any]:
    """A bar on standard error, if somebody looks."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed:,} of {task.total:,} offsets"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(topic, total=total)
        yield lambda done: progress.update(task, completed=done)


def _summary(topic: str, reports: list[RangeReport], took_s: float, where: str) -> str:
    records = sum(report.records for report in reports)
    size = sum(report.bytes for report in reports)
    others = [
        f"{count:,} {what}"
        for what, count in (
            ("of aborted transactions left out", sum(report.aborted for report in reports)),
            ("transaction markers", sum(report.control for report in reports)),
            ("offsets without a record", sum(report.missing for report in reports)),
        )
        if count
    ]
    rate = records / took_s if took_s > 0 else 0
    return (
        f"{records:,} records of {len(reports)} partition{'' if len(reports) == 1 else 's'} of '{topic}'{where}: "
        f"{size / 1e6:,.1f} MB in {took_s:.1f} s, {rate:,.0f} records/s"
        + (f" ({', '.join(others)})" if others else "")
    )


# ------------------------------------------------------------------------ trouble


@contextmanager
def _reader_errors(topic: str) -> Iterator[None]:
    """The reader's errors under the exit codes of commands."""
    import pyarrow  # noqa: F401  asked for here, before anything is begun

    from holdfast.reader import NotAuthorised, TopicMissing, Unreachable

    try:
        yield
    except TopicMissing as error:
        advice = f"; see 'holdfast topics describe --topic {topic}' and 'holdfast topics list'"
        raise CommandFailed(f"{error}{advice}") from error
    except (Unreachable, NotAuthorised) as error:
        raise CannotConnect(f"{error} (--bootstrap-server, --command-config)") from error
    except HoldfastError:
        raise
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            raise
        raise CommandFailed(f"the file cannot be written: {error.strerror or error}") from error
