"""`holdfast generate`: seeded sample data to a topic or a file, with what results over it must come to.

The same flags give the same bytes. Messages are made as they are sent, so any number of them takes the same memory. A
topic must exist; what is sent is acknowledged by all replicas, or counted as failed.
"""

from __future__ import annotations

import datetime
import sys
import time
from collections.abc import Iterator
from enum import StrEnum
from typing import Annotated, Any

import typer
from confluent_kafka import Producer
from typer.exceptions import Exit

from holdfast.cli.client import Connection, no_such_topic
from holdfast.cli.exits import Interrupts, complain, stop_when_unread
from holdfast.cli.options import SERVER, CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, print_json
from holdfast.cli.producing import Deliveries, Sending
from holdfast.demo.generate import KINDS, GenerateSettings, Generator
from holdfast.demo.generate import GeneratedMessage as Generated
from holdfast.errors import ExitCode, UsageError
from holdfast.pipeline.definition.units import parse_duration_ms

app = CommandGroup()

POLL_S = 0.1
STANDARD_OUTPUT = "-"

Kind = StrEnum("Kind", {name.upper(): name for name in KINDS})  # type: ignore[misc]


@app.command(
    epilog=examples(
        "holdfast generate orders --topic orders --count 100000 --malformed 0.01",
        "holdfast generate activity --to activity.jsonl --count 5000000 --late 0.02 --late-by 2h",
        "holdfast generate payments --topic payments --rate 200 --start now",
    )
)
def generate(
    kind: Annotated[Kind, typer.Argument(help="What to make.", show_default=False)],
    topic: Annotated[str | None, option("NAME", "The topic to send to; it must exist.")] = None,
    to: Annotated[
        str | None, option("FILE", "A file to write instead, a message a line; - is the output.")
    ] = None,
    count: Annotated[int, option("N", "Messages in all, copies and malformed included.", min=0)] = 10_000,
    seed: Annotated[int, option("N", "Another seed makes other data.")] = 0,
    rate: Annotated[
        float | None, option("N", "Messages a second (default: as fast as it goes).", min=0.001)
    ] = None,
    keys: Annotated[
        int | None, option("N", "How many customers, services, rows, cards; users at a time.", min=1)
    ] = None,
    start: Annotated[
        str, option("TIME", "When the first event happened: an ISO time, or now.")
    ] = "2026-01-01T00:00:00Z",
    spacing: Annotated[str, option("TIME", "Between two events, on average.")] = "100ms",
    disorder: Annotated[str, option("TIME", "How far behind the newest an event may be.")] = "0s",
    malformed: Annotated[float, option("PART", "Part that cannot be parsed.", min=0, max=1)] = 0.0,
    duplicates: Annotated[float, option("PART", "Part that is a copy of one before.", min=0, max=1)] = 0.0,
    late: Annotated[float, option("PART", "Part that happened long before it came.", min=0, max=1)] = 0.0,
    late_by: Annotated[str, option("TIME", "How late those are: so much, up to twice that.")] = "1h",
    with_keys: Annotated[bool, flag("In a file: the key and a tab before each message.")] = False,
    server: ServerFlags = SERVER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send or write seeded sample data, with the results expected of it.

    There are orders, activity (of users), logs, changes (of a table's rows) and payments. The same flags give
    the same bytes, and the summary says what results over them must come to.
    """
    if (topic is None) == (to is None):
        raise UsageError("give --topic, or --to and a file: one of the two")
    settings = GenerateSettings(
        kind=kind.value,
        seed=seed,
        count=count,
        keys=keys,
        start_ms=_time_ms(start),
        spacing_ms=_duration_ms("--spacing", spacing),
        disorder_ms=_duration_ms("--disorder", disorder),
        malformed=malformed,
        duplicates=duplicates,
        late=late,
        late_by_ms=_duration_ms("--late-by", late_by),
    )
    generator = Generator(settings)
    with Interrupts() as interrupts:
        messages = _paced(generator, rate, interrupts)
        if topic is not None:
            sent = _send(messages, topic, server.connect(), interrupts)
            failed = sent.failed
            where: dict[str, Any] = {"topic": topic, "delivered": sent.delivered, "failed": sent.failed}
        else:
            assert to is not None
            _write(messages, to, with_keys)
            failed, where = 0, {"file": to}
    summary = {**generator.summary(), **where}
    _tell(summary, output, to == STANDARD_OUTPUT)
    if interrupts.count:
        raise Exit(ExitCode.INTERRUPTED)
    raise Exit(ExitCode.FINDINGS if failed else ExitCode.FINE)


def _time_ms(text: str) -> int:
    if text == "now":
        return time.time_ns() // 1_000_000
    try:
        moment = datetime.datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"--start {text!r} is no time such as 2026-01-31T00:00:00Z, nor 'now'") from None
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return int(moment.timestamp() * 1000)


def _duration_ms(flag: str, text: str) -> int:
    try:
        return parse_duration_ms(text)
    except ValueError as error:
        raise UsageError(f"{flag}: {error}") from None


def _paced(generator: Generator, rate: float | None, interrupts: Interrupts) -> Iterator[Generated]:
    """Messages, no faster than the rate; none after an interrupt."""
    started_s = time.monotonic()
    for number, message in enumerate(generator):
        if rate is not None:
            while not interrupts.count and (wait_s := started_s + number / rate - time.monotonic()) > 0:
                time.sleep(min(wait_s, POLL_S))
        yield message
        if interrupts.count:
            return


def _write(messages: Iterator[Generated], to: str, with_keys: bool) -> None:
    stop_when_unread()
    file = sys.stdout.buffer if to == STANDARD_OUTPUT else open(to, "wb")  # noqa: SIM115  closed below
    try:
        for message in messages:
            file.write(message.key + b"\t" if with_keys else b"")
            file.write(message.value + b"\n")
        file.flush()
    finally:
        if to != STANDARD_OUTPUT:
            file.close()


def _send(
    messages: Iterator[Generated], topic: str, connection: Connection, interrupts: Interrupts
) -> Deliveries:
    """Send messages; the first that fails is told, all are counted."""
    settings = {"acks": "all", "enable.idempotence": True, "linger.ms": 20, "partitioner": "murmur2_random"}
    producer = connection.make(Producer, settings)
    if topic not in connection.reach(producer).topics:
        raise no_such_topic(topic)

    def failed(number: int, name: str, message: str) -> None:
        if deliveries.failed == 1:
            complain(f"not delivered to '{topic}': {message}")

    deliveries = Deliveries(topic, failed)
    sending = Sending(producer, connection, deliveries, interrupts)
    for number, message in enumerate(messages):
        sending.send(number, message.value, message.key)
        if connection.fatal_error is not None:
            complain(f"the producer cannot go on: {connection.fatal_error.str()}")
            deliveries.failed += 1
            break
    sending.drain()
    return deliveries


def _tell(summary: dict[str, Any], output: Output, is_aside: bool) -> None:
    """On standard output, unless the messages went there."""
    if output is Output.JSON and not is_aside:
        print_json(summary)
        return
    shown = {name: value for name, value in summary.items() if name != "results"} | summary["results"]
    lines = [f"{name.replace('_', ' ')}: {_text(value)}" for name, value in shown.items()]
    print("\n".join(lines), file=sys.stderr if is_aside else sys.stdout)


def _text(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name} {_text(each)}" for name, each in value.items())
    return f"{value:,}" if isinstance(value, int) else str(value)
