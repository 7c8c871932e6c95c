"""`holdfast consume`: messages of topics to standard output, with the flags of kafka-console-consumer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Final

from confluent_kafka import Consumer, Message
from typer.exceptions import Exit

from holdfast.cli.client import Connection, parse_assignments, read_properties, whole_number
from holdfast.cli.consuming import REFRESH_MS, MessageReader, Selection, parse_start
from holdfast.cli.exits import Interrupts, complain, stop_when_unread
from holdfast.cli.formats import MessageFormat, as_json_line
from holdfast.cli.options import CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output
from holdfast.errors import ExitCode, UsageError

app = CommandGroup()

ISOLATION_LEVELS = ("read_uncommitted", "read_committed")
SKIP_BACKOFF_MS = 10
"""Damaged messages are stepped over one by one, each of them an error after which the client pauses."""


@dataclass(frozen=True)
class WhatToRead:
    """The topics and partitions that the flags name, and where reading begins."""

    topic: Annotated[str | None, option("NAME", "The topic to read.")] = None
    include: Annotated[str | None, option("REGEX", "Read every topic whose whole name matches.")] = None
    from_beginning: Annotated[
        bool,
        flag(
            "Start at the first message instead of the end; with --group, where it has no committed offset yet."
        ),
    ] = False
    partition: Annotated[int | None, option("N", "Read this partition only.", min=0)] = None
    offset: Annotated[str | None, option("N|earliest|latest", "Where to start (default: latest).")] = None
    group: Annotated[
        str | None,
        option(
            "ID", "Join this consumer group: go on at its committed offsets, and commit what was printed."
        ),
    ] = None

    def within(self, settings: Mapping[str, str]) -> WhatToRead:
        """With what the consumer's settings say of it, where they do not contradict the flags."""
        reset, group_id = settings.get("auto.offset.reset"), settings.get("group.id")
        from_beginning = reset in ("earliest", "beginning", "smallest")
        if self.from_beginning and reset is not None and not from_beginning:
            raise UsageError(f"--from-beginning and auto.offset.reset={reset} contradict each other")
        if self.group is not None and group_id not in (None, self.group):
            raise UsageError(f"--group {self.group} and group.id={group_id} contradict each other")
        return replace(
            self, from_beginning=self.from_beginning or from_beginning, group=self.group or group_id
        )

    def selection(self) -> Selection:
        if (self.topic is None) == (self.include is None):
            raise UsageError("say what to read: --topic NAME or --include REGEX, one of them")
        if self.partition is not None and self.topic is None:
            raise UsageError("--partition needs --topic")
        if self.group is not None and (self.partition is not None or self.offset is not None):
            raise UsageError(
                "--group keeps its committed offsets: it goes with neither --partition nor --offset"
            )
        if self.offset is not None:
            if self.offset not in ("earliest", "latest") and not self.offset.isdecimal():
                raise UsageError(f"--offset {self.offset!r} is not a number from 0, 'earliest' or 'latest'")
            if self.offset.isdecimal() and self.partition is None:
                raise UsageError("--offset with a number needs --partition: each partition counts its own")
            if self.from_beginning and self.offset != "earliest":
                raise UsageError("--from-beginning and --offset contradict each other")
        pattern = None
        if self.include is not None:
            try:
                pattern = re.compile(self.include.replace(",", "|"))
            except re.error as error:
                raise UsageError(
                    f"--include {self.include!r} is not a regular expression: {error}"
                ) from error
        return Selection(self.topic, pattern, self.partition, parse_start(self.offset, self.from_beginning))


@dataclass(frozen=True)
class Printing:
    """What is printed of a message."""

    formatter_property: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "What is printed: print.timestamp, print.partition, print.offset, print.epoch, "
            "print.headers, print.key, print.value, key.separator, line.separator, headers.separator, "
            "null.literal; may be repeated.",
            "--formatter-property",
            "--property",
        ),
    ] = None
    formatter_config: Annotated[
        str | None, option("FILE", "A properties file with formatter properties.")
    ] = None
    output: OutputOption = Output.TABLE

    def writer(self) -> Callable[[Message], bytes]:
        properties = read_properties(self.formatter_config) if self.formatter_config is not None else {}
        properties |= parse_assignments(self.formatter_property or [], "--formatter-property")
        message_format = MessageFormat.from_properties(properties, "--formatter-property")
        return as_json_line if self.output is Output.JSON else message_format.as_text


@dataclass(frozen=True)
class ConsumerFlags(ServerFlags):
    """Which cluster is asked, and the consumer's own settings."""

    command_config: Annotated[
        str | None,
        option("FILE", "A properties file for the consumer.", "--command-config", "--consumer.config"),
    ] = None
    command_property: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "A setting of the consumer, over --command-config; may be repeated.",
            "--command-property",
            "--consumer-property",
        ),
    ] = None


WHAT: Final = WhatToRead()
PRINTING: Final = Printing()
CONSUMER: Final = ConsumerFlags()


@app.command(
    epilog=examples(
        "holdfast consume --topic orders --from-beginning --timeout-ms 5000",
        "holdfast consume --topic orders --partition 0 --offset 42 --max-messages 1 --output json",
        "holdfast consume --topic orders --group billing --from-beginning --isolation-level read_committed",
        "holdfast consume --include 'orders.*' --group audit --command-property group.protocol=consumer",
        "holdfast consume --topic orders --formatter-property print.key=true",
    )
)
def consume(
    what: WhatToRead = WHAT,
    max_messages: Annotated[int | None, option("N", "Stop after so many messages.", min=1)] = None,
    timeout_ms: Annotated[
        int | None,
        option("MS", "Stop when no message came for this long; joining a group is not counted.", min=0),
    ] = None,
    isolation_level: Annotated[
        str,
        option(
            "LEVEL",
            "read_committed leaves out messages of open and aborted transactions; or read_uncommitted.",
        ),
    ] = "read_uncommitted",
    printing: Printing = PRINTING,
    skip_message_on_error: Annotated[bool, flag("Report a message that cannot be read, and go on.")] = False,
    server: ConsumerFlags = CONSUMER,
) -> None:
    """Print the messages of topics.

    Without --group the command reads every partition and commits no offset. With --group it shares the
    partitions with the group's other members and commits the offsets of what it printed.
    """
    if isolation_level not in ISOLATION_LEVELS:
        raise UsageError(f"--isolation-level {isolation_level!r} is not one of {', '.join(ISOLATION_LEVELS)}")
    write = printing.writer()
    connection = server.connect(parse_assignments(server.command_property or [], "--command-property"))
    what = what.within(connection.settings)
    selection = what.selection()
    defaults = _consumer_defaults(connection, what.group, isolation_level)
    if skip_message_on_error:
        defaults["fetch.error.backoff.ms"] = SKIP_BACKOFF_MS
    consumer = connection.make(Consumer, defaults)
    connection.reach(consumer)
    stop_when_unread()
    with Interrupts() as interrupts:
        reader = MessageReader(
            consumer,
            connection,
            selection,
            group=what.group,
            write=write,
            out=sys.stdout.buffer,
            interrupts=interrupts,
            max_messages=max_messages,
            timeout_ms=timeout_ms,
            skip_message_on_error=skip_message_on_error,
            refresh_ms=whole_number(connection.settings, "metadata.max.age.ms", REFRESH_MS),
            incremental=_is_incremental(connection),
        )
        try:
            reader.run()
            if what.group is not None and connection.settings.get("enable.auto.commit") != "false":
                reader.commit()
        finally:
            complain(f"processed a total of {reader.printed} messages")
            reader.close()
    if interrupts.count:
        raise Exit(ExitCode.INTERRUPTED)


def _is_incremental(connection: Connection) -> bool:
    strategies = connection.settings.get("partition.assignment.strategy", "")
    return connection.settings.get("group.protocol") == "consumer" or "cooperative" in strategies


def _consumer_defaults(connection: Connection, group: str | None, isolation_level: str) -> dict[str, Any]:
    """`auto.offset.reset=error` makes the client tell us what it would jump over; we choose where it goes on."""
    connection.settings = {
        name: value
        for name, value in connection.settings.items()
        if name not in ("auto.offset.reset", "enable.auto.offset.store")
        and (group is not None or name != "enable.auto.commit")
    }
    refresh_ms = whole_number(connection.settings, "metadata.max.age.ms", REFRESH_MS)
    return {
        "group.id": group or "holdfast-consume",
        "enable.auto.commit": group is not None,
        "enable.auto.offset.store": False,
        "auto.offset.reset": "error",
        "topic.metadata.refresh.interval.ms": refresh_ms,
        "check.crcs": True,
        "isolation.level": isolation_level,
    }
