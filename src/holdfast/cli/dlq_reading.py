"""Reading dead-letter topics from end to end, as they were when the reading began.

The end is fixed first: a dead letter that is redriven, fails and comes back is not read again by the same run.

`--filter`: which dead letters are meant.

    error=ValueError  group!=audit  message~time.?out  attempts>=3  time<=2026-11-15T08:00  header.tenant=acme

`=` and `!=` compare whole texts, `~` and `!~` search for a regular expression, `>=` and `<=` compare numbers and times.
What a dead letter does not tell is empty text, and no number. All filters must hold.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from holdfast.cli.client import Connection, describe_error, failure, no_such_topic
from holdfast.cli.consuming import PASSING
from holdfast.cli.exits import CommandFailed, Interrupts
from holdfast.client.dead_letter_dialects import Failure, Header, read_failure
from holdfast.client.messages import headers_of
from holdfast.errors import UsageError

POLL_S: Final = 0.1
BATCH_MESSAGES: Final = 500
ANSWER_S: Final = 30.0

GONE: Final = frozenset(
    {KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC, KafkaError._UNKNOWN_PARTITION}
)

T = TypeVar("T")


class TopicGone(CommandFailed):
    """The topic is not there, or not any more."""


def patiently(call: Callable[[float], T]) -> T:
    """Ask with the seconds that are left, and again while a leader or a coordinator is only changing."""
    deadline_s = time.monotonic() + ANSWER_S
    while True:
        try:
            return call(max(POLL_S, deadline_s - time.monotonic()))
        except KafkaException as error:
            if error.args[0].code() not in PASSING or time.monotonic() + POLL_S > deadline_s:
                raise
        time.sleep(POLL_S)


def make_reader(connection: Connection, group: str) -> Consumer:
    """A consumer that joins nothing, commits nothing and reads only what is committed."""
    return connection.make(
        Consumer,
        {
            "group.id": group,
            "enable.auto.commit": False,
            "auto.offset.reset": "error",
            "enable.partition.eof": True,
            "isolation.level": "read_committed",
            "check.crcs": True,
        },
    )


class TopicScan:
    """The dead letters of one topic, from `starts` (its beginning by default) to its end."""

    def __init__(
        self, consumer: Consumer, connection: Connection, topic: str, interrupts: Interrupts | None = None
    ) -> None:
        self._consumer = consumer
        self._connection = connection
        self._interrupts = interrupts
        self.topic = topic
        found = connection.reach(consumer).topics.get(topic)
        if found is None:
            raise TopicGone(str(no_such_topic(topic)))
        self.partitions = sorted(found.partitions)
        self.bounds: dict[int, tuple[int, int]] = {
            partition: self._bounds(partition) for partition in self.partitions
        }
        """The first offset of each partition and the one behind its last."""

    def _bounds(self, partition: int) -> tuple[int, int]:
        try:
            place = TopicPartition(self.topic, partition)
            first, end = patiently(
                lambda seconds: self._consumer.get_watermark_offsets(place, timeout=seconds)
            )
        except KafkaException as error:
            if error.args[0].code() in GONE:
                raise TopicGone(str(no_such_topic(self.topic))) from error
            raise failure(error, f"cannot read {self.topic}-{partition}", self.topic) from error
        return first, end

    @property
    def size(self) -> int:
        """About how many messages there are; markers and gaps are counted too."""
        return sum(end - first for first, end in self.bounds.values())

    def letters(self, starts: Mapping[int, int] | None = None) -> Iterator[Letter]:
        """Every message up to the end, each partition in order."""
        begin = {
            partition: max(first, (starts or {}).get(partition, first))
            for partition, (first, _) in self.bounds.items()
            if starts is None or partition in starts
        }
        left = {partition for partition, start in begin.items() if start < self.bounds[partition][1]}
        places = [TopicPartition(self.topic, partition, begin[partition]) for partition in sorted(left)]
        if not places:
            return
        self._consumer.assign(places)
        try:
            yield from self._until_the_end(left)
        finally:
            self._consumer.unassign()

    def _until_the_end(self, left: set[int]) -> Iterator[Letter]:
        silent_since_s = time.monotonic()
        while left and not (self._interrupts is not None and self._interrupts.count):
            messages = self._consumer.consume(BATCH_MESSAGES, POLL_S)
            if messages:
                silent_since_s = time.monotonic()
            elif (time.monotonic() - silent_since_s) * 1000 > self._connection.connect_timeout_ms:
                self._connection.reach(self._consumer)
                silent_since_s = time.monotonic()
            for message in messages:
                partition = message.partition() or 0
                error = message.error()
                if error is not None:
                    self._judge(message, error, left)
                    continue
                offset = message.offset() or 0
                if partition in left and offset < self.bounds[partition][1]:
                    yield as_letter(message)
                if offset + 1 >= self.bounds[partition][1]:
                    left.discard(partition)

    def _judge(self, message: Message, error: KafkaError, left: set[int]) -> None:
        if error.code() == KafkaError._PARTITION_EOF:
            left.discard(message.partition() or 0)
        elif error.code() in GONE:
            raise TopicGone(str(no_such_topic(self.topic)))
        elif error.code() not in PASSING:
            raise CommandFailed(
                f"cannot read {message.topic()}-{message.partition()}: {describe_error(error, self.topic)}"
            )


def as_letter(message: Message) -> Letter:
    own = headers_of(message)
    return Letter(
        message.topic() or "",
        message.partition() or 0,
        message.offset() or 0,
        message.timestamp()[1],
        message.key(),
        message.value(),
        own,
        read_failure(own) or Failure(),
    )


REDRIVES_HEADER: Final = "hf-redrives"
TEXTS: Final = ("topic", "group", "error", "message", "reason", "dialect", "key", "value")
NUMBERS: Final = ("partition", "offset", "attempts", "redrives", "time")
_SHAPE: Final = re.compile(r"([a-z]+|header\.[^=!~<>]+)(!=|!~|>=|<=|=|~)(.*)", re.DOTALL)


@dataclass(frozen=True)
class Letter:
    """A message of a dead-letter topic, understood as far as possible."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    failure: Failure

    @property
    def is_marked(self) -> bool:
        """Whether its headers say, in any dialect, that it is a dead letter."""
        return read_failure(self.headers) is not None

    @property
    def redrives(self) -> int:
        """How often it was redriven before."""
        return redrives_of(self.headers)

    @property
    def time_ms(self) -> int:
        """When it was given up on."""
        return self.failure.failed_ms if self.failure.failed_ms is not None else self.timestamp_ms

    @property
    def place(self) -> str:
        return f"{self.topic}-{self.partition}@{self.offset}"

    def text(self, name: str) -> str:
        if name.startswith("header."):
            found = [value for header, value in self.headers if header == name[len("header.") :]]
            return _text(found[-1]) if found else ""
        if name in ("key", "value"):
            return _text(self.key if name == "key" else self.value)
        if name in NUMBERS:
            number = self.number(name)
            return "" if number is None else str(number)
        return getattr(self.failure, name) or ""

    def number(self, name: str) -> int | None:
        if name == "redrives":
            return self.redrives
        if name == "time":
            return self.time_ms
        found: int | None = getattr(self.failure, name)
        return found


def redrives_of(headers: Iterable[Header]) -> int:
    found = [value for name, value in headers if name == REDRIVES_HEADER]
    return int(found[-1]) if found and found[-1] is not None and found[-1].isdigit() else 0


class Filter:
    def __init__(self, expressions: Iterable[str]) -> None:
        self._tests = [_parse(expression) for expression in expressions]

    def __call__(self, letter: Letter) -> bool:
        return all(test(letter) for test in self._tests)


def _parse(expression: str) -> Callable[[Letter], bool]:
    shape = _SHAPE.fullmatch(expression)
    if shape is None:
        raise UsageError(f"--filter {expression!r} is not NAME=VALUE, with one of = != ~ !~ >= <= between")
    name, operator, operand = shape[1], shape[2], shape[3]
    if name not in TEXTS and name not in NUMBERS and not name.startswith("header."):
        raise UsageError(
            f"--filter {expression!r}: there is no {name}; there are {', '.join((*TEXTS, *NUMBERS))}, header.NAME"
        )
    if operator in (">=", "<="):
        if name not in NUMBERS:
            raise UsageError(f"--filter {expression!r}: {name} is text, and is compared with = != ~ !~")
        return _comparison(name, operator, _number(name, operand, expression))
    if operator in ("~", "!~"):
        try:
            pattern = re.compile(operand)
        except re.error as error:
            raise UsageError(
                f"--filter {expression!r}: {operand!r} is not a regular expression: {error}"
            ) from error
        return lambda letter: (pattern.search(letter.text(name)) is not None) == (operator == "~")
    if name in NUMBERS:
        number = _number(name, operand, expression)
        return lambda letter: (letter.number(name) == number) == (operator == "=")
    return lambda letter: (letter.text(name) == operand) == (operator == "=")


def _comparison(name: str, operator: str, limit: int) -> Callable[[Letter], bool]:
    def holds(letter: Letter) -> bool:
        number = letter.number(name)
        return number is not None and (number >= limit if operator == ">=" else number <= limit)

    return holds


def _number(name: str, text: str, expression: str) -> int:
    if text.isdecimal():
        return int(text)
    if name == "time":
        try:
            moment = datetime.fromisoformat(text)
        except ValueError:
            raise UsageError(
                f"--filter {expression!r}: {text!r} is neither a time like 2026-11-15T08:00 nor milliseconds"
            ) from None
        return round((moment if moment.tzinfo else moment.replace(tzinfo=UTC)).timestamp() * 1000)
    raise UsageError(f"--filter {expression!r}: {text!r} is not a number")


def _text(data: Any) -> str:
    return "" if data is None else bytes(data).decode("utf-8", "replace")
