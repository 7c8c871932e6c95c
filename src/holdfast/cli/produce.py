"""`holdfast produce`: lines of standard input to a topic, with the flags of kafka-console-producer.

The defaults are the safe ones: acks=all, idempotent, two minutes for a delivery, Kafka's own partitioner, and
a topic that does not exist is an error rather than created by accident. (HF102, HF103, HF106, HF207)
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Final

from confluent_kafka import Producer
from typer.exceptions import Exit

from holdfast.cli.client import no_such_topic, parse_assignments, read_properties, whole_number
from holdfast.cli.exits import Interrupts, complain
from holdfast.cli.formats import LineFormat
from holdfast.cli.options import CommandGroup, OutputOption, ServerFlags, examples, flag, option
from holdfast.cli.output import Output, json_line
from holdfast.cli.producing import Deliveries, LineProducer, Sending
from holdfast.errors import ExitCode, UsageError

app = CommandGroup()

MAX_REQUEST_BYTES = 1_048_576
"""Java's default for max.request.size; librdkafka's own is smaller."""

STANDARD_INPUT = 0
ACKS_ALL = ("all", "-1")


@dataclass(frozen=True)
class LineFlags:
    """How a line is read."""

    reader_property: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "How a line is read: parse.key, key.separator, parse.headers, headers.delimiter, "
            "headers.separator, headers.key.separator, null.marker, ignore.error; may be repeated.",
            "--reader-property",
            "--property",
        ),
    ] = None
    reader_config: Annotated[str | None, option("FILE", "A properties file with reader properties.")] = None

    def line_format(self) -> LineFormat:
        properties = read_properties(self.reader_config) if self.reader_config is not None else {}
        properties |= parse_assignments(self.reader_property or [], "--reader-property")
        return LineFormat.from_properties(properties, "--reader-property")


@dataclass(frozen=True)
class ProducerFlags(ServerFlags):
    """Which cluster is sent to, and the producer's own settings."""

    command_config: Annotated[
        str | None,
        option("FILE", "A properties file for the producer.", "--command-config", "--producer.config"),
    ] = None
    command_property: Annotated[
        list[str] | None,
        option(
            "NAME=VALUE",
            "A setting of the producer, over --command-config; may be repeated.",
            "--command-property",
            "--producer-property",
        ),
    ] = None
    compression_codec: Annotated[
        str | None, option("CODEC", "none, gzip, snappy, lz4 or zstd (default: none).")
    ] = None
    request_required_acks: Annotated[
        str,
        option(
            "0|1|all", "Whose confirmation counts; with 0 or 1 an acknowledged message may still be lost."
        ),
    ] = "all"
    batch_size: Annotated[int | None, option("BYTES", "Largest batch for one partition.", min=1)] = None
    timeout: Annotated[int | None, option("MS", "How long a message waits for its batch to fill.", min=0)] = (
        None
    )
    request_timeout_ms: Annotated[
        int | None, option("MS", "How long a broker may take to confirm.", min=1)
    ] = None
    message_send_max_retries: Annotated[
        int | None,
        option("N", "Retries of one message within delivery.timeout.ms (default: no limit).", min=0),
    ] = None
    retry_backoff_ms: Annotated[int | None, option("MS", "Wait before a retry.", min=1)] = None
    max_memory_bytes: Annotated[
        int | None, option("BYTES", "Memory for lines not yet confirmed.", min=1024)
    ] = None

    def defaults(self, given: Mapping[str, str]) -> dict[str, Any]:
        """Safe settings with the flags' over them; acks among the given settings decide as the flag does."""
        acks = self.request_required_acks
        if acks not in (*ACKS_ALL, "0", "1"):
            raise UsageError(f"--request-required-acks {acks!r} is not 0, 1 or all")
        acks = given.get("acks", given.get("request.required.acks", acks))
        settings = {
            "acks": acks,
            "enable.idempotence": acks in ACKS_ALL,
            "delivery.timeout.ms": 120_000,
            "message.max.bytes": MAX_REQUEST_BYTES,
            "partitioner": "murmur2_random",
            "compression.type": self.compression_codec,
            "batch.size": self.batch_size,
            "linger.ms": self.timeout,
            "request.timeout.ms": self.request_timeout_ms,
            "retries": self.message_send_max_retries,
            "retry.backoff.ms": self.retry_backoff_ms,
            "queue.buffering.max.kbytes": self.max_memory_bytes and self.max_memory_bytes // 1024,
        }
        return {name: value for name, value in settings.items() if value is not None}


LINES: Final = LineFlags()
PRODUCER: Final = ProducerFlags()


@app.command(
    epilog=examples(
        "echo hello | holdfast produce --topic orders",
        "holdfast produce --topic t --reader-property parse.key=true --reader-property key.separator=: < in",
    )
)
def produce(
    topic: Annotated[str, option("NAME", "The topic to send to.")],
    lines: LineFlags = LINES,
    sync: Annotated[bool, flag("Send one line and wait for its result.")] = False,
    server: ProducerFlags = PRODUCER,
    output: OutputOption = Output.TABLE,
) -> None:
    """Send lines of standard input to a topic. Each is confirmed by the broker or reported as failed."""
    line_format = lines.line_format()
    connection = server.connect(parse_assignments(server.command_property or [], "--command-property"))
    defaults = server.defaults(connection.settings)
    producer = connection.make(Producer, defaults)
    if topic not in connection.reach(producer).topics:
        raise no_such_topic(topic)

    def report(line_number: int, name: str, message: str) -> None:
        complain(f"line {line_number} was not delivered to '{topic}': {message}")
        if output is Output.JSON:
            failure = {"type": "failure", "line": line_number, "error": name, "message": message}
            sys.stdout.write(json_line(failure))

    bound = whole_number(connection.settings, "message.max.bytes", MAX_REQUEST_BYTES)
    deliveries = Deliveries(topic, report)
    with Interrupts() as interrupts:
        sending = Sending(producer, connection, deliveries, interrupts)
        LineProducer(sending, line_format, sync, bound).run(STANDARD_INPUT, prompt=os.isatty(STANDARD_INPUT))
    if connection.fatal_error is not None:
        complain(f"the producer cannot go on: {connection.fatal_error.str()}")
    acks = str(defaults["acks"])
    confirmed = "nobody confirmed them, acks=0" if acks == "0" else f"acks={acks}"
    complain(f"{deliveries.delivered} delivered to '{topic}' ({confirmed}), {deliveries.failed} failed")
    if output is Output.JSON:
        sys.stdout.write(json_line(deliveries.as_json()))
    if interrupts.count:
        raise Exit(ExitCode.INTERRUPTED)
    if deliveries.failed or connection.fatal_error is not None:
        raise Exit(ExitCode.FINDINGS)
