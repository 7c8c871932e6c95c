"""`holdfast dlq`: dead letters counted, shown, and sent back to where they came from."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

from typer.exceptions import Exit

from holdfast.cli.client import Connection
from holdfast.cli.dlq_reading import Filter, Letter, TopicGone, TopicScan, make_reader
from holdfast.cli.exits import CommandFailed, Interrupts, complain, stop_when_unread
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, bytes_as_json, content_as_json, json_line, print_result
from holdfast.cli.redriving import Plan, Redrive, Redriven, default_group, read_progress
from holdfast.cli.topics import name_pattern, select_topics
from holdfast.client.dead_letter_dialects import PREFIXES
from holdfast.errors import ExitCode, UsageError

DEFAULT_TOPICS = r".*[-._](dlt|DLT|dlq|DLQ)"
READER_GROUP = "holdfast-dlq"

app = CommandGroup(
    no_args_is_help=True,
    help="Dead letters in topics, written by holdfast, Kafka Streams, Kafka Connect or Spring Kafka. Those that a "
    "pipeline keeps in Parquet, Delta or PostgreSQL are rows of a table, and not read here.",
)

FilterOption = Annotated[
    list[str] | None,
    option(
        "NAME=VALUE",
        "Only dead letters with this: topic, partition, offset, group, error, message, reason, attempts, "
        "redrives, time, dialect, key, value or header.NAME; with = != ~ !~ >= <=; may be repeated, all must hold.",
        "--filter",
    ),
]


@app.command(
    "list",
    epilog=examples(
        "holdfast dlq list",
        "holdfast dlq list --topic orders-dlt --filter 'time>=2026-11-15T08:00'",
    ),
)
def list_letters(
    topic: Annotated[
        str,
        option("REGEX", "Topics whose whole name matches; by default those whose name ends with dlt or dlq."),
    ] = DEFAULT_TOPICS,
    filters: FilterOption = None,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Count dead letters by where they came from and what went wrong. Reads the topics whole."""
    matches = Filter(filters or ())
    pattern = name_pattern(topic)
    connection = server.connect()
    reader = make_reader(connection, READER_GROUP)
    names = select_topics(connection.reach(reader).topics, pattern)
    reader.close()
    if not names and topic != DEFAULT_TOPICS:
        raise CommandFailed(
            f"no topic matches {topic!r}; 'holdfast topics list' shows which there are. This command reads topics "
            "only: a pipeline may keep its dead letters in Parquet, Delta or PostgreSQL"
        )
    rows: list[dict[str, Any]] = []
    for name in names:
        try:
            rows += _counts(connection, name, matches)
        except TopicGone:
            complain(f"topic {name!r} was deleted meanwhile, and is left out")
    texts = ("topic", "origin", "group", "error", "dialect")
    print_result(
        output,
        {"dead_letters": rows},
        (*(name.upper() for name in texts), "COUNT", "REDRIVEN", "FIRST", "LAST"),
        [
            (
                *(row[name] or "-" for name in texts),
                row["count"],
                row["redriven"],
                _moment(row["first_ms"]),
                _moment(row["last_ms"]),
            )
            for row in rows
        ],
    )


def _counts(connection: Connection, topic: str, matches: Filter) -> list[dict[str, Any]]:
    consumer = make_reader(connection, default_group(topic))
    try:
        scan = TopicScan(consumer, connection, topic)
        progress = read_progress(consumer, scan)
        rows: dict[tuple[str, ...], dict[str, Any]] = {}
        for letter in filter(matches, _letters(topic, scan.letters(), [])):
            failure = letter.failure
            dialect = failure.dialect if failure.topic is not None or failure.error is not None else None
            key = (failure.topic or "", failure.group or "", failure.error or "", dialect or "")
            row = rows.setdefault(
                key,
                {
                    "topic": topic,
                    "origin": failure.topic,
                    "group": failure.group,
                    "error": failure.error,
                    "dialect": dialect,
                    "count": 0,
                    "redriven": 0,
                    "first_ms": letter.time_ms,
                    "last_ms": letter.time_ms,
                },
            )
            row["count"] += 1
            row["redriven"] += letter.offset in progress[letter.partition]
            row["first_ms"] = min(row["first_ms"], letter.time_ms)
            row["last_ms"] = max(row["last_ms"], letter.time_ms)
    finally:
        consumer.close()
    return [rows[key] for key in sorted(rows)]


@app.command(
    epilog=examples(
        "holdfast dlq show --topic orders-dlt --max 1",
        "holdfast dlq show --topic orders-dlt --partition 0 --offset 42 --stack",
        "holdfast dlq show --topic orders-dlt --filter error=ValueError --output json",
    )
)
def show(
    topic: Annotated[str, option("NAME", "The dead-letter topic.")],
    partition: Annotated[int | None, option("N", "Only this partition of it.", min=0)] = None,
    offset: Annotated[
        int | None, option("N", "Only the dead letter there; needs --partition.", min=0)
    ] = None,
    filters: FilterOption = None,
    max_letters: Annotated[int | None, option("N", "Stop after so many.", "--max", min=1)] = None,
    stack: Annotated[bool, flag("Show where the error came from, too; JSON always has it.")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show dead letters: where they came from, what went wrong, and the message itself."""
    if offset is not None and partition is None:
        raise UsageError("--offset needs --partition: each partition counts its own")
    matches = Filter(filters or ())
    connection = server.connect()
    consumer = make_reader(connection, READER_GROUP)
    stop_when_unread()
    shown = 0
    others: list[Letter] = []
    try:
        scan = TopicScan(consumer, connection, topic)
        for letter in _letters(topic, _selected(scan, partition, offset), others):
            if not matches(letter):
                continue
            print(_as_json_line(letter) if output is Output.JSON else _as_text(letter, stack), end="")
            shown += 1
            if shown == max_letters:
                break
    finally:
        consumer.close()
    if others and not shown:
        raise CommandFailed(
            f"nothing in '{topic}' is a dead letter: no headers say so, nor does its name. "
            f"'holdfast consume --topic {topic}' shows messages"
        )
    if offset is not None and not shown:
        raise CommandFailed(f"there is no such dead letter at {topic}-{partition}@{offset}")


def _letters(topic: str, messages: Iterable[Letter], others: list[Letter]) -> Iterator[Letter]:
    """Those that are dead letters: by their headers, or by the topic's name, where their writer adds no headers. The
    first of the others is kept in `others`."""
    is_for_letters = re.fullmatch(DEFAULT_TOPICS, topic) is not None
    for message in messages:
        if is_for_letters or message.is_marked:
            yield message
        elif not others:
            others.append(message)


def _selected(scan: TopicScan, partition: int | None, offset: int | None) -> Iterable[Letter]:
    if partition is None:
        return scan.letters()
    if partition not in scan.bounds:
        raise CommandFailed(
            f"topic '{scan.topic}' has no partition {partition}; it has 0 to {len(scan.partitions) - 1}"
        )
    if offset is None:
        return scan.letters({partition: 0})
    scan.bounds[partition] = (scan.bounds[partition][0], min(offset + 1, scan.bounds[partition][1]))
    return (letter for letter in scan.letters({partition: offset}) if letter.offset == offset)


def _as_text(letter: Letter, with_stack: bool) -> str:
    failure = letter.failure
    lines = [f"{letter.place}  {_moment(letter.time_ms)}"]
    came = failure.place if failure.topic is not None else "unknown"
    if failure.group is not None:
        came += f", group {failure.group}"
    if failure.timestamp_ms is not None:
        came += f", {_moment(failure.timestamp_ms)}"
    facts: list[tuple[str, str | None]] = [
        ("from", came),
        ("error", ": ".join(filter(None, (failure.error, failure.message))) or None),
        ("reason", failure.reason),
        ("attempts", None if failure.attempts is None else str(failure.attempts)),
        ("redrives", str(letter.redrives) if letter.redrives else None),
        ("key", _readable(letter.key)),
        ("value", _readable(letter.value)),
        *(
            ("header", f"{name}={_readable(value)}")
            for name, value in letter.headers
            if not name.startswith(tuple(PREFIXES.values()))
        ),
    ]
    lines += [f"  {name:<9}{text}" for name, text in facts if text is not None]
    if with_stack and failure.stack:
        lines += [f"  | {line}" for line in failure.stack.splitlines()]
    return "\n".join(lines) + "\n\n"


def _as_json_line(letter: Letter) -> str:
    failure = letter.failure
    return json_line(
        {
            "topic": letter.topic,
            "partition": letter.partition,
            "offset": letter.offset,
            "timestamp_ms": letter.timestamp_ms,
            **content_as_json(letter.key, letter.value, letter.headers),
            "redrives": letter.redrives,
            "failure": asdict(failure),
        }
    )


@app.command(
    epilog=examples(
        "holdfast dlq redrive --topic orders-dlt",
        "holdfast dlq redrive --topic orders-dlt --filter error=ConnectionError --rate 50 --execute",
        "holdfast dlq redrive --topic orders-dlt --to orders-repair --max 1 --execute",
    )
)
def redrive(
    topic: Annotated[str, option("NAME", "The dead-letter topic.")],
    to: Annotated[str | None, option("NAME", "Send them there instead of where they came from.")] = None,
    filters: FilterOption = None,
    rate: Annotated[float | None, option("N", "At most so many per second.")] = None,
    max_letters: Annotated[int | None, option("N", "Stop after so many.", "--max", min=1)] = None,
    group: Annotated[
        str | None,
        option(
            "ID",
            "The group whose committed offsets say what was redriven (default: holdfast-redrive- and the topic); "
            "also the transactional id.",
        ),
    ] = None,
    dry_run: Annotated[bool, flag("Only tell what would be sent; the default.")] = False,
    execute: Annotated[bool, flag("Send them.")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send dead letters back to the topics they came from, each once.

    Without --execute the command only shows what it would send. Every group that reads the topic gets them, not
    only the one that failed.
    """
    if dry_run and execute:
        raise UsageError("choose one of --dry-run and --execute")
    if rate is not None and rate <= 0:
        raise UsageError(f"--rate {rate}: more than nothing per second")
    if to == topic:
        raise UsageError(f"--to {to}: that is where they are")
    plan = Plan(topic, group or default_group(topic), to, Filter(filters or ()), rate, max_letters, execute)
    connection = server.connect()
    with Interrupts() as interrupts:
        work = Redrive(connection, plan, interrupts)
        try:
            result = work.run()
        finally:
            if execute:
                complain(f"redrove {work.committed} dead letters of '{topic}'")
            work.close()
    _print_result(plan, result, output)
    if interrupts.count:
        raise Exit(ExitCode.INTERRUPTED)
    if result.without_origin:
        raise CommandFailed(
            f"{result.without_origin} dead letters do not tell where they came from; send them somewhere with --to"
        )


def _print_result(plan: Plan, result: Redriven, output: Output) -> None:
    destinations = dict(sorted(result.destinations.items()))
    document = {
        "topic": plan.topic,
        "group": plan.group,
        "executed": plan.is_executed,
        "redriven": result.count,
        "destinations": destinations,
        "redriven_before": result.done_before,
        "not_matching": result.not_matching,
        "without_origin": result.without_origin,
    }
    print_result(output, document, ("DESTINATION", "COUNT"), list(destinations.items()))
    if output is Output.TABLE and not plan.is_executed and result.count:
        complain("nothing was sent: this is the plan, --execute carries it out")


def _readable(data: bytes | None) -> str:
    text, encoding = bytes_as_json(data)
    if text is None:
        return "null"
    if encoding == "base64":
        return repr(data)
    return text if text.isprintable() else repr(text)


def _moment(timestamp_ms: int) -> str:
    if timestamp_ms < 0:
        return "-"
    moment = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    return moment.isoformat(sep=" ", timespec="milliseconds").replace("+00:00", "Z")
