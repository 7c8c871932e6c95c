"""The loop behind `holdfast consume`: what is printed, what is remembered, and when it ends.

The rules it keeps:

- Without a group the partitions are assigned, all of them, and those that appear later from their beginning:
  a partition added while we read must not lose its first messages. (HF304)
- An offset that no longer exists is said and skipped to the first that does; one that does not exist yet is
  an error. Neither is a silent jump. (HF305)
- With a group a position is stored only after its message was written out, so that a crash or a closed pipe
  repeats messages rather than losing them. (HF301)
- Checksums are verified; a damaged message ends the command unless it was told to skip.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import BinaryIO

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)

from holdfast.cli.advice import describe_error, failure, no_such_topic
from holdfast.cli.client import UNREACHABLE, Connection, interruptible
from holdfast.cli.exits import CannotConnect, CommandFailed, complain
from holdfast.cli.interrupts import Interrupts

POLL_S = 0.1
BATCH_MESSAGES = 1000
"""Messages taken from the client at once: enough to make the loop cheap, few enough to print soon."""
REFRESH_MS = 10_000
"""How often the cluster is asked for partitions that were added, unless metadata.max.age.ms says otherwise."""
PASSING = frozenset(
    {
        *UNREACHABLE,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
        KafkaError.REQUEST_TIMED_OUT,
        KafkaError.COORDINATOR_NOT_AVAILABLE,
        KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
        KafkaError.NOT_COORDINATOR,
    }
)
"""Errors the client overcomes by itself; reading goes on."""


@dataclass(frozen=True)
class Selection:
    """What to read, and from where."""

    topic: str | None
    include: re.Pattern[str] | None
    partition: int | None
    start: int
    """An offset, OFFSET_BEGINNING or OFFSET_END."""

    def matches(self, name: str) -> bool:
        if self.include is not None:
            return self.include.fullmatch(name) is not None
        return name == self.topic


@dataclass
class MessageReader:
    consumer: Consumer
    connection: Connection
    selection: Selection
    group: bool
    write: Callable[[Message], bytes]
    out: BinaryIO
    interrupts: Interrupts
    max_messages: int | None = None
    timeout_ms: int | None = None
    skip_message_on_error: bool = False
    refresh_ms: int = REFRESH_MS
    printed: int = 0
    _assigned: set[tuple[str, int]] = field(default_factory=set)

    def run(self) -> None:
        """Read until told to stop: by count, by silence, by a signal, or by an error."""
        if self.group:
            self._subscribe()
        else:
            self._assign(self._wanted_partitions(), self.selection.start)
        last_message_s = last_refresh_s = time.monotonic()
        while not self.interrupts.count and not self._finished():
            messages = self.consumer.consume(self._wanted(), POLL_S)
            now_s = time.monotonic()
            if messages:
                self._print(messages)
                last_message_s = now_s
            elif self.timeout_ms is not None and (now_s - last_message_s) * 1000 >= self.timeout_ms:
                self._check_reachable()
                return
            if not self.group and (now_s - last_refresh_s) * 1000 >= self.refresh_ms:
                self._assign_added()
                last_refresh_s = time.monotonic()

    def _finished(self) -> bool:
        return self.max_messages is not None and self.printed >= self.max_messages

    def _wanted(self) -> int:
        if self.max_messages is None:
            return BATCH_MESSAGES
        return min(BATCH_MESSAGES, self.max_messages - self.printed)

    def _subscribe(self) -> None:
        topic, include = self.selection.topic, self.selection.include
        if include is not None:
            self.consumer.subscribe([f"^({include.pattern})$"])
        else:
            assert topic is not None
            self._require_topic(topic)
            self.consumer.subscribe([topic])

    def _require_topic(self, topic: str) -> None:
        if topic not in self._partitions():
            raise no_such_topic(topic)

    def _partitions(self) -> dict[str, list[int]]:
        """The partitions of every topic we want; asking for all topics never creates one."""
        cluster = self.connection.reach(self.consumer)
        return {
            name: sorted(topic.partitions)
            for name, topic in cluster.topics.items()
            if self.selection.matches(name)
        }

    def _wanted_partitions(self) -> set[tuple[str, int]]:
        found = self._partitions()
        topic, partition = self.selection.topic, self.selection.partition
        if topic is not None and topic not in found:
            raise no_such_topic(topic)
        if topic is not None and partition is not None and partition not in found[topic]:
            raise CommandFailed(
                f"topic '{topic}' has no partition {partition}; it has 0 to {len(found[topic]) - 1}"
            )
        return {
            (name, number)
            for name, numbers in found.items()
            for number in numbers
            if partition is None or number == partition
        }

    def _assign(self, partitions: Iterable[tuple[str, int]], start: int) -> None:
        new = sorted(partitions)
        self.consumer.incremental_assign([self._position(name, number, start) for name, number in new])
        self._assigned.update(new)

    def _assign_added(self) -> None:
        try:
            added = self._wanted_partitions() - self._assigned
        except CannotConnect:
            return  # the client is reconnecting by itself; the next refresh will tell
        if added:
            names = ", ".join(f"{name}-{number}" for name, number in sorted(added))
            complain(f"reading new partitions {names}")
            self._assign(added, OFFSET_BEGINNING)

    def _position(self, topic: str, partition: int, start: int) -> TopicPartition:
        if start >= 0:
            first_offset, end_offset = self._bounds(topic, partition)
            if start > end_offset:
                raise CommandFailed(
                    f"offset {start} of {topic}-{partition} does not exist yet: the log ends at {end_offset}"
                )
            if start < first_offset:
                self._tell_gone(topic, partition, start, first_offset)
                start = first_offset
        return TopicPartition(topic, partition, start)

    def _bounds(self, topic: str, partition: int) -> tuple[int, int]:
        timeout_s = self.connection.connect_timeout_ms / 1000
        try:
            bounds = interruptible(
                lambda: self.consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout_s)
            )
        except KafkaException as error:
            raise failure(error, f"cannot find the offsets of {topic}-{partition}", topic) from error
        if bounds is None:
            raise CannotConnect(f"nobody told the offsets of {topic}-{partition} in time")
        return bounds

    @staticmethod
    def _tell_gone(topic: str, partition: int, start: int, first_offset: int) -> None:
        complain(
            f"offsets {start} to {first_offset - 1} of {topic}-{partition} are gone (retention or deletion); "
            f"going on at {first_offset}"
        )

    def _print(self, messages: Iterable[Message]) -> None:
        done: dict[tuple[str, int], int] = {}
        lines: list[bytes] = []
        for message in messages:
            error = message.error()
            if error is not None:
                self._handle(error, message)
                continue
            lines.append(self.write(message))
            place = (message.topic() or "", message.partition() or 0)
            done[place] = (message.offset() or 0) + 1
        self.out.write(b"".join(lines))
        self.out.flush()
        self.printed += len(lines)
        if self.group and done:
            positions = [TopicPartition(*place, offset) for place, offset in done.items()]
            self.consumer.store_offsets(offsets=positions)

    def _handle(self, error: KafkaError, message: Message) -> None:
        code = error.code()
        topic, partition = message.topic() or "", message.partition() or 0
        if code == KafkaError._PARTITION_EOF or code in PASSING:
            return
        if code == KafkaError._AUTO_OFFSET_RESET and not self.group:
            self._go_on_where_possible(topic, partition)
            return
        what = f"cannot read {topic}-{partition}" if message.topic() else "cannot read"
        offset = message.offset()
        if offset is not None and offset >= 0:
            what += f" at offset {offset}"
        said = f"{what}: {describe_error(error, topic)}"
        if not self.skip_message_on_error or error.fatal():
            raise CommandFailed(said)
        complain(f"{said}; skipped")

    def _go_on_where_possible(self, topic: str, partition: int) -> None:
        """Our position fell out of the log: messages expired before they were read, or the log was cut."""
        (position,) = self.consumer.position([TopicPartition(topic, partition)])
        first_offset, end_offset = self._bounds(topic, partition)
        if position.offset > end_offset:
            raise CommandFailed(
                f"{topic}-{partition} ends at {end_offset}, before offset {position.offset} where we were: "
                "the log was cut, or the topic was deleted and created again"
            )
        if position.offset >= 0:
            self._tell_gone(topic, partition, position.offset, first_offset)
        self.consumer.incremental_unassign([TopicPartition(topic, partition)])
        self.consumer.incremental_assign([TopicPartition(topic, partition, first_offset)])

    def _check_reachable(self) -> None:
        """Silence may mean an empty topic or a dead broker; only the first ends well."""
        if self.connection.all_brokers_down:
            self.connection.reach(self.consumer)


def parse_start(offset: str | None, from_beginning: bool) -> int:
    if offset is None:
        return OFFSET_BEGINNING if from_beginning else OFFSET_END
    if offset == "earliest":
        return OFFSET_BEGINNING
    if offset == "latest":
        return OFFSET_END
    return int(offset)
