"""Where reading begins: of a partition chosen by hand, and of one that a group hands to its member.

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

import time
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import OffsetSpec

from holdfast.cli.client import Connection, failure
from holdfast.cli.exits import CannotConnect, CommandFailed, complain

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
