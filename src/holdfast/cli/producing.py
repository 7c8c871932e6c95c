"""The loop behind `holdfast produce`: every line read is delivered or reported, whatever happens in between.

The rules it keeps:

- A line that was read is sent, or reported as failed with its number. A signal counts only between lines.
- A full queue makes the loop wait, never drop.
- The end is reached when each message has its result: delivered, or failed within `delivery.timeout.ms`.
- A second interrupt gives up what is still under way, and reports each of those lines too.

Lines of a file descriptor, with bounded memory and without sleeping through a signal.

Waiting for a keyboard and keeping a producer alive exclude each other with `readline`. Here the wait is a
`select` of at most 100 ms at a time, and between two of them the caller gets its turn.
"""

from __future__ import annotations

import os
import select
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from confluent_kafka import KafkaError, KafkaException, Message, Producer

from holdfast.cli.client import Connection, describe_error
from holdfast.cli.exits import Interrupts, complain
from holdfast.cli.formats import Headers, LineFormat, MalformedLine

POLL_S = 0.1


@dataclass
class Deliveries:
    """What became of the lines so far."""

    topic: str
    on_failure: Callable[[int, str, str], None]
    """Called with the line's number, the error's name and the message for people."""
    delivered: int = 0
    failed: int = 0
    partitions: dict[int, list[int]] = field(default_factory=dict)
    """Partition to count, smallest and largest offset; offsets are absent with acks=0."""

    def fail(self, line_number: int, name: str, message: str) -> None:
        self.failed += 1
        self.on_failure(line_number, name, message)

    def settle(self, line_number: int, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.fail(line_number, error.name(), describe_error(error, self.topic))
            return
        self.delivered += 1
        partition, offset = message.partition(), message.offset()
        if partition is None or offset is None or offset < 0:
            return
        entry = self.partitions.setdefault(partition, [0, offset, offset])
        entry[0] += 1
        entry[1] = min(entry[1], offset)
        entry[2] = max(entry[2], offset)

    def as_json(self) -> dict[str, Any]:
        return {
            "type": "summary",
            "topic": self.topic,
            "delivered": self.delivered,
            "failed": self.failed,
            "partitions": [
                {"partition": partition, "count": count, "first_offset": first, "last_offset": last}
                for partition, (count, first, last) in sorted(self.partitions.items())
            ],
        }


@dataclass
class Sending:
    """Hands messages to a producer and waits for their results."""

    producer: Producer
    connection: Connection
    deliveries: Deliveries
    interrupts: Interrupts

    def may_go_on(self) -> bool:
        return not self.interrupts.count and self.connection.fatal_error is None

    def send(
        self, number: int, value: bytes | None, key: bytes | None, headers: Headers | None = None
    ) -> None:
        """One message; `number` is its line's."""
        settle = partial(self.deliveries.settle, number)
        while True:
            try:
                self.producer.produce(
                    self.deliveries.topic, value=value, key=key, headers=headers or [], on_delivery=settle
                )
            except BufferError:
                if self.interrupts.count > 1:
                    self.deliveries.fail(number, "INTERRUPTED", "interrupted while the queue was full")
                    return
                self.producer.poll(POLL_S)
            except KafkaException as error:
                kafka_error: KafkaError = error.args[0]
                explanation = describe_error(kafka_error, self.deliveries.topic)
                self.deliveries.fail(number, kafka_error.name(), explanation)
                return
            else:
                self.producer.poll(0)
                return

    def drain(self) -> None:
        """Wait until every message has its result; each one's own time-out bounds the wait."""
        while len(self.producer):
            self.producer.flush(POLL_S)
            if self.interrupts.count > 1:
                self.producer.purge()
                self.producer.flush(POLL_S)
                return


@dataclass
class LineProducer:
    """Sends lines until the input ends, a signal comes, or the producer is beyond repair."""

    sending: Sending
    line_format: LineFormat
    sync: bool = False
    line_bytes_max: int = 1_048_576

    def run(self, descriptor: int, prompt: bool) -> None:
        if prompt:
            self._prompt()
        for line in read_lines(descriptor, self.line_bytes_max, self._turn):
            self._send(line)
            if self.sync:
                self.sending.drain()
            if not self.sending.may_go_on():
                complain(f"stopped after line {line.number}; what follows was not sent")
                break
            if prompt:
                self._prompt()
        self.sending.drain()

    def _turn(self) -> bool:
        self.sending.producer.poll(0)
        return self.sending.may_go_on()

    @staticmethod
    def _prompt() -> None:
        print("> ", end="", file=sys.stderr, flush=True)

    def _send(self, line: Line) -> None:
        if line.content is None:
            problem = f"the line is longer than {self.line_bytes_max} bytes (max.request.size)"
            self.sending.deliveries.fail(line.number, "MSG_SIZE_TOO_LARGE", problem)
            return
        try:
            parsed = self.line_format.parse(line.content)
        except MalformedLine as error:
            self.sending.deliveries.fail(line.number, "MALFORMED_LINE", str(error))
            return
        self.sending.send(line.number, parsed.value, parsed.key, parsed.headers)


CHUNK_BYTES = 64 * 1024
WAIT_S = 0.1


class Line(NamedTuple):
    number: int
    content: bytes | None
    """None when the line was longer than the bound; its bytes are gone."""


def read_lines(descriptor: int, line_bytes_max: int, turn: Callable[[], bool]) -> Iterator[Line]:
    """Lines without their ends (\\n or \\r\\n), the last one even without an end.

    `turn` is called while waiting and before each read; when it says False, reading ends.
    """
    pending = bytearray()
    too_long = False
    number = 0
    while turn():
        if not select.select([descriptor], [], [], WAIT_S)[0]:
            continue
        chunk = os.read(descriptor, CHUNK_BYTES)
        if not chunk:
            if pending or too_long:
                yield Line(number + 1, None if too_long else bytes(pending))
            return
        first, *others = chunk.split(b"\n")
        pending += first
        for other in others:
            number += 1
            fits = not too_long and len(pending) <= line_bytes_max
            yield Line(number, bytes(pending).removesuffix(b"\r") if fits else None)
            pending = bytearray(other)
            too_long = False
        if len(pending) > line_bytes_max:
            too_long = True
            pending.clear()
