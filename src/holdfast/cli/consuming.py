"""The loop behind `holdfast consume`: what is printed, what is remembered, and when it ends.

The rules it keeps:

- Without a group the partitions are assigned, all of them, and those that appear later from their beginning:
  a partition added while we read must not lose its first messages. (HF304) What a group hands out begins as
  `GroupMember` says.
- An offset that no longer exists is said and skipped to the first that does; one that does not exist yet is
  an error. Neither is a silent jump. (HF305)
- With a group an offset is committed only after its message was written out, so that a crash or a closed pipe
  repeats messages rather than losing them (HF301); the last ones are committed, and that is waited for, before
  the command ends (HF309).
- Checksums are verified; a damaged message ends the command, after those in front of it were printed, unless it was
  told to skip.

Where reading begins: of a partition chosen by hand, and of one that a group hands to its member.

The client is told `auto.offset.reset=error`, so that it never jumps by itself; whatever it would jump over is
decided here, and said. For a member of a group the rules are:

- It goes on at the group's committed offset. One before the log's start goes on at that start, and the gap is
  named; one after the log's end stops the command, because the log is not the one the group has read. (HF305)
- Without a committed offset it begins at the log's end, or at its start when asked; a partition that appeared while we
  read begins at its start in any case: its first messages were written for somebody. (HF304)
- Where it begins becomes the group's committed offset at once, so that a member that saw no message comes back to the
  same place and not to a later end.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, BinaryIO

from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
)
from confluent_kafka.admin import OffsetSpec

from holdfast.cli.client import UNREACHABLE, Connection, describe_error, failure, in_background, no_such_topic
from holdfast.cli.exits import CannotConnect, CommandFailed, Interrupts, complain

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


NOT_YET = frozenset(
    {
        KafkaError._UNKNOWN_PARTITION,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
    }
)
"""What is said of a partition that not every broker has heard of."""
RETRY_S = 0.1

Place = tuple[str, int]
"""A topic and one of its partitions."""


@dataclass(frozen=True)
class Logs:
    """What the logs hold, as the consumer's broker tells."""

    consumer: Consumer
    connection: Connection

    def bounds(self, place: Place) -> tuple[int, int]:
        """The first offset, and the one after the last; to a reader of committed messages, the last that is decided.

        A group may hand out a partition that has just been made, before its leader has taken it.
        """
        topic, partition = place
        timeout_s = self.connection.connect_timeout_ms / 1000
        deadline_s = time.monotonic() + timeout_s
        while True:
            try:
                bounds = self.consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout_s)
            except KafkaException as error:
                if error.args[0].code() not in NOT_YET or time.monotonic() > deadline_s:
                    raise failure(error, f"cannot find the offsets of {topic}-{partition}", topic) from error
                time.sleep(RETRY_S)
                continue
            if bounds is None:
                raise CannotConnect(f"nobody told the offsets of {topic}-{partition} in time")
            return bounds

    def log_end(self, place: Place) -> int:
        """The offset after the last, of open transactions too."""
        topic, partition = place
        specs: Any = OffsetSpec
        admin = self.connection.admin()
        asked = admin.list_offsets(
            {TopicPartition(topic, partition): specs.latest()},
            request_timeout=self.connection.connect_timeout_ms / 1000,
        )
        try:
            (found,) = (future.result() for future in asked.values())
        except KafkaException as error:
            raise failure(error, f"cannot find the end of {topic}-{partition}", topic) from error
        return int(found.offset)

    def checked(self, place: Place, offset: int) -> int:
        """An offset chosen by hand; or the log's start, said, where that offset is gone."""
        first_offset, end_offset = self.bounds(place)
        if offset > end_offset and offset > (end_offset := self.log_end(place)):
            topic, partition = place
            raise CommandFailed(
                f"offset {offset} of {topic}-{partition} does not exist yet: the log ends at {end_offset}"
            )
        if offset < first_offset:
            tell_gone(place, offset, first_offset)
        return max(offset, first_offset)


def tell_gone(place: Place, offset: int, first_offset: int) -> None:
    topic, partition = place
    complain(
        f"offsets {offset} to {first_offset - 1} of {topic}-{partition} are gone (retention or deletion); "
        f"going on at {first_offset}"
    )


@dataclass
class GroupMember:
    """The partitions a group has handed to us, and where each begins."""

    logs: Logs
    group: str
    from_beginning: bool
    incremental: bool
    """Whether partitions come one by one (cooperative, or the new protocol) or all at once."""
    known: Collection[Place]
    """The partitions that were there when we began."""
    starts: dict[Place, int] = field(default_factory=dict)
    has_joined: bool = False

    def assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        """The client's callback: take the partitions, each at its place.

        Everything it asks is asked in this thread; from any other the client would wait for the callback.
        """
        self.has_joined = True
        positions = self._committed(consumer, partitions) if partitions else {}
        begun: list[TopicPartition] = []
        chosen: list[TopicPartition] = []
        if not self.incremental:
            self.starts.clear()
        for each in partitions:
            place = (each.topic, each.partition)
            offset = positions.get(place)
            start = self.starts[place] = self._first(place) if offset is None else self._next(place, offset)
            chosen.append(TopicPartition(each.topic, each.partition, start))
            if offset is None:
                begun.append(chosen[-1])
        if self.incremental:
            consumer.incremental_assign(chosen)
        else:
            consumer.assign(chosen)
        if begun:
            consumer.store_offsets(offsets=begun)

    def restart_at(self, consumer: Consumer, place: Place, offset: int) -> None:
        """Go on elsewhere in a partition whose position fell out of the log."""
        self.starts[place] = offset
        if self.incremental:
            consumer.incremental_unassign([TopicPartition(*place)])
            consumer.incremental_assign([TopicPartition(*place, offset)])
            return
        others = [each for each in consumer.assignment() if (each.topic, each.partition) != place]
        for each in consumer.position(others):
            # Without a position nothing of it has been read yet.
            self.starts[each.topic, each.partition] = max(
                each.offset, self.starts[each.topic, each.partition]
            )
        places = [place, *((each.topic, each.partition) for each in others)]
        consumer.assign([TopicPartition(*each, self.starts[each]) for each in places])

    def _committed(self, consumer: Consumer, partitions: list[TopicPartition]) -> dict[Place, int]:
        timeout_s = self.logs.connection.connect_timeout_ms / 1000
        try:
            found = consumer.committed(partitions, timeout=timeout_s)
        except KafkaException as error:
            what = f"cannot read the committed offsets of group '{self.group}'"
            raise failure(error, what, self.group) from error
        return {(each.topic, each.partition): each.offset for each in found if each.offset >= 0}

    def _first(self, place: Place) -> int:
        first_offset, end_offset = self.logs.bounds(place)
        if place not in self.known:
            topic, partition = place
            complain(f"reading new partition {topic}-{partition} from its beginning")
            return first_offset
        return first_offset if self.from_beginning else end_offset

    def _next(self, place: Place, offset: int) -> int:
        topic, partition = place
        first_offset, end_offset = self.logs.bounds(place)
        # It may have been set to the log's end while a transaction was open, behind what is decided.
        if offset > end_offset and offset > (end_offset := self.logs.log_end(place)):
            raise CommandFailed(
                f"group '{self.group}' is at offset {offset} of {topic}-{partition}, which ends at "
                f"{end_offset}: the log was cut, or the topic was deleted and created again; choose a place "
                f"with 'holdfast groups reset-offsets --group {self.group} --topic {topic}:{partition}'"
            )
        if offset < first_offset:
            tell_gone(place, offset, first_offset)
        return max(offset, first_offset)


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
    group: str | None
    write: Callable[[Message], bytes]
    out: BinaryIO
    interrupts: Interrupts
    max_messages: int | None = None
    timeout_ms: int | None = None
    skip_message_on_error: bool = False
    refresh_ms: int = REFRESH_MS
    printed: int = 0
    incremental: bool = False
    """Whether the group hands out partitions one by one."""
    _assigned: set[Place] = field(default_factory=set)
    _member: GroupMember | None = None
    _stepping: dict[Place, tuple[int, int]] = field(default_factory=dict)
    """Where the last damaged batch of a partition begins, and which of its offsets was tried last."""

    @property
    def _logs(self) -> Logs:
        return Logs(self.consumer, self.connection)

    def run(self) -> None:
        """Read until told to stop: by count, by silence, by a signal, or by an error."""
        if self.group is not None:
            self._subscribe(self.group)
        else:
            self._assign(self._wanted_partitions(), self.selection.start)
        began_s = last_message_s = last_refresh_s = time.monotonic()
        while not self.interrupts.count and not self._finished():
            messages = self.consumer.consume(self._wanted(), POLL_S)
            now_s = time.monotonic()
            if messages:
                self._print(messages)
                last_message_s = now_s
            elif self._is_joining(now_s - began_s):
                last_message_s = now_s
            elif self.timeout_ms is not None and (now_s - last_message_s) * 1000 >= self.timeout_ms:
                self._check_reachable()
                return
            if self.group is None and (now_s - last_refresh_s) * 1000 >= self.refresh_ms:
                self._assign_added()
                last_refresh_s = time.monotonic()

    def _is_joining(self, waited_s: float) -> bool:
        """Whether the group has yet to hand something out: that takes its time, and is no silence."""
        if self._member is None or self._member.has_joined:
            return False
        return waited_s * 1000 < self.connection.connect_timeout_ms

    def _finished(self) -> bool:
        return self.max_messages is not None and self.printed >= self.max_messages

    def _wanted(self) -> int:
        if self.max_messages is None:
            return BATCH_MESSAGES
        return min(BATCH_MESSAGES, self.max_messages - self.printed)

    def _subscribe(self, group: str) -> None:
        topic, include = self.selection.topic, self.selection.include
        found = self._partitions()
        if topic is not None and topic not in found:
            raise no_such_topic(topic)
        self._member = GroupMember(
            self._logs,
            group,
            from_beginning=self.selection.start == OFFSET_BEGINNING,
            incremental=self.incremental,
            known={(name, number) for name, numbers in found.items() for number in numbers},
        )
        names = [topic] if topic is not None else []
        if include is not None:
            names = [f"^({include.pattern})$"]
        self.consumer.subscribe(names, on_assign=self._member.assigned)

    def commit(self) -> None:
        """Make sure that what was printed is committed."""
        lost = f"group '{self.group}': the last offsets were not committed, their messages come again"
        try:
            if not self._waits_for(in_background(lambda: self.consumer.commit(asynchronous=False))):
                raise CannotConnect(f"{lost}: no broker answered in time")
        except KafkaException as error:
            if error.args[0].code() != KafkaError._NO_OFFSET:  # that is: nothing since the last time
                raise failure(error, lost, self.group or "") from error

    def close(self) -> None:
        """Leave the group in order; one whose broker is gone finds out by itself that we have left."""
        self._waits_for(in_background(self.consumer.close))

    def _waits_for(self, work: Future[Any]) -> bool:
        """Whether work ended before the time was up, or a second interrupt came."""
        deadline_s = time.monotonic() + self.connection.connect_timeout_ms / 1000
        while True:
            try:
                work.result(POLL_S)
                return True
            except TimeoutError:
                if self.interrupts.count > 1 or time.monotonic() > deadline_s:
                    return False

    def _partitions(self) -> dict[str, list[int]]:
        """The partitions of every topic we want; asking for all topics never creates one."""
        cluster = self.connection.reach(self.consumer)
        return {
            name: sorted(topic.partitions)
            for name, topic in cluster.topics.items()
            if self.selection.matches(name)
        }

    def _wanted_partitions(self) -> set[Place]:
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

    def _assign(self, partitions: Iterable[Place], start: int) -> None:
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
        offset = start if start < 0 else self._logs.checked((topic, partition), start)
        return TopicPartition(topic, partition, offset)

    def _print(self, messages: Iterable[Message]) -> None:
        done: dict[Place, int] = {}
        lines: list[bytes] = []
        try:
            for message in messages:
                error = message.error()
                if error is not None:
                    self._handle(error, message)
                    continue
                lines.append(self.write(message))
                place = (message.topic() or "", message.partition() or 0)
                done[place] = (message.offset() or 0) + 1
        finally:
            self._put_out(lines, done)

    def _put_out(self, lines: Sequence[bytes], done: Mapping[Place, int]) -> None:
        """Write messages out; only then does their place count as read."""
        self.out.write(b"".join(lines))
        self.out.flush()
        self.printed += len(lines)
        if self.group is not None and done:
            positions = [TopicPartition(*place, offset) for place, offset in done.items()]
            self.consumer.store_offsets(offsets=positions)

    def _handle(self, error: KafkaError, message: Message) -> None:
        code = error.code()
        topic, partition = message.topic() or "", message.partition() or 0
        if code == KafkaError._PARTITION_EOF or code in PASSING:
            return
        if code == KafkaError._AUTO_OFFSET_RESET:
            self._go_on_where_possible((topic, partition), message.offset())
            return
        what = f"cannot read {topic}-{partition}" if message.topic() else "cannot read"
        offset = message.offset()
        if offset is not None and offset >= 0:
            what += f" at offset {offset}"
        said = f"{what}: {describe_error(error, topic)}"
        if not self.skip_message_on_error or error.fatal():
            raise CommandFailed(said)
        if code != KafkaError._BAD_MSG or offset is None or offset < 0:
            complain(f"{said}; skipped")
        elif self._step_over((topic, partition), offset):
            complain(f"{said}; skipped, with what is in its batch")

    def _step_over(self, place: Place, offset: int) -> bool:
        """Go on behind what is damaged; whether it is not the same as last time.

        The client tells where a damaged batch begins, not where it ends, and would read it for ever: it is sent on by
        one message until it finds something else.
        """
        begins, reached = self._stepping.get(place, (-1, -1))
        is_new = begins != offset
        reached = offset + 1 if is_new else reached + 1
        self._stepping[place] = (offset, reached)
        self.consumer.seek(TopicPartition(*place, reached))
        return is_new

    def _go_on_where_possible(self, place: Place, offset: int | None) -> None:
        """Our position fell out of the log: messages expired before they were read, or the log was cut."""
        topic, partition = place
        (position,) = self.consumer.position([TopicPartition(topic, partition)])
        at = position.offset if position.offset >= 0 else offset
        first_offset, end_offset = self._logs.bounds(place)
        if at is not None and at > end_offset:
            raise CommandFailed(
                f"{topic}-{partition} ends at {end_offset}, before offset {at} where we were: "
                "the log was cut, or the topic was deleted and created again"
            )
        if at is not None and 0 <= at < first_offset:
            tell_gone(place, at, first_offset)
        if self._member is not None:
            self._member.restart_at(self.consumer, place, first_offset)
            return
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
