"""Reading dead-letter topics from end to end, as they were when the reading began.

The end is fixed first: a dead letter that is redriven, fails and comes back is not read again by the same run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final, TypeVar

from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from holdfast.cli.advice import describe_error, failure, no_such_topic
from holdfast.cli.client import Connection
from holdfast.cli.consuming import PASSING
from holdfast.cli.dlq_filter import Letter
from holdfast.cli.exits import CommandFailed
from holdfast.cli.interrupts import Interrupts
from holdfast.client.dead_letter_dialects import Failure, read_failure
from holdfast.client.messages import headers_of

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
