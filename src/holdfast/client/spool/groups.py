"""Messages in the hands of the spool: one object each, from `send` to the report of the broker, in the groups that
they were stored in.

A group is filled by those who send, written by one thread, and sent by another; each has it for itself. Its messages
are stored together, so one flag says it of all of them. `left` counts those that are neither delivered nor set aside:
one thread hears reports, and only it changes `left`.
"""

from __future__ import annotations

from collections import deque
from typing import Any, TypeAlias

from confluent_kafka import KafkaError

from holdfast.client.delivery import Delivered, Delivery, Waiting
from holdfast.client.spool.format import UNDECIDED, Headers, Message, PartitionKey


class SpooledDelivery(Delivery):
    """A delivery with the message itself, as long as it is needed; called by the producer to report on it.

    `SpoolWriter.send` makes them, and `make_item` for what comes from disk.
    """

    __slots__ = ("group", "headers", "line", "sequence", "timestamp_ms", "value")

    group: StoredGroup | None
    headers: Headers
    line: int | None
    """None; or -1 when it was stored undecided, whatever its partition became since."""
    sequence: int
    timestamp_ms: int
    value: bytes | None

    @property
    def delivered(self) -> Delivered | None:
        """Where it is, once the broker has acknowledged it."""
        offset = self._place
        if offset.__class__ is not int:
            return super().delivered
        assert self.partition is not None, "a message has its partition before it is sent"
        return Delivered(self.topic, self.partition, offset, self.timestamp_ms)

    @property
    def is_stored(self) -> bool:
        group = self.group
        return group is not None and group.is_stored

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        """What the producer says of the message; failures are left to whoever delivers."""
        group: Any = self.group  # a message is stored before it is sent
        if error is None:
            if self._place is None and self.error is None:
                # Numbers in their places, no object that holds them: as long as a message is under way, each of its
                # objects costs the cycle collector as much as anything done here.
                self._place = message.offset()
                self.timestamp_ms = message.timestamp()[1]
                self.value = None
                group.left -= 1
                if self._hooks is not None:
                    self.call_back()
        else:
            group.failures.append((self, error))

    @property
    def where(self) -> PartitionKey:
        """What its sequence counts: the messages of its partition, or of its topic when it was stored undecided."""
        line = self.partition if self.line is None else self.line
        return self.topic, UNDECIDED if line is None else line

    def refill(self, message: Message) -> None:
        """The message comes back from disk."""
        if message.partition != UNDECIDED:
            self.partition = message.partition
        self.value = message.value
        self.headers = message.headers
        self.timestamp_ms = message.timestamp_ms
        self.sequence = message.sequence

    def spill(self) -> None:
        """The message is on disk, and needs no memory until it comes back."""
        self.value = None
        self.headers = ()

    def as_message(self) -> Message:
        topic, line = self.where
        return Message(topic, line, self.key, self.value, self.headers, self.timestamp_ms, self.sequence)


def make_item(message: Message, waiting: Waiting) -> SpooledDelivery:
    """A delivery for a message that comes from disk."""
    item = SpooledDelivery()
    item._waiting = waiting
    item.topic, item.partition, item.key, item.value, item.headers, item.timestamp_ms, item.sequence = message
    item.group = item.line = item.error = item._place = item._hooks = None
    if item.partition == UNDECIDED:
        item.partition, item.line = None, UNDECIDED
    return item


FailedItems: TypeAlias = deque[tuple[SpooledDelivery, KafkaError]]
_NO_FAILURES: FailedItems = deque(maxlen=0)


class StoredGroup:
    """Messages that are stored together."""

    __slots__ = (
        "bytes",
        "count",
        "end",
        "failures",
        "following",
        "held",
        "is_stored",
        "items",
        "left",
        "opening",
        "position",
        "start",
    )

    def __init__(self) -> None:
        self.items: list[SpooledDelivery] = []
        self.bytes = 0
        """About how much of them is in memory."""
        self.is_stored = False
        self.start = self.position = self.end = -1
        """See `store.Written`."""
        self.following: dict[PartitionKey, int] = {}
        """For each partition, -1 for undecided messages, the sequence behind its last message here."""
        self.count = self.left = 0
        """How many messages there are here to send, and how many of them are neither delivered nor set aside."""
        self.held = 0
        """How many messages there are here that are left out for now: they wait for their topics."""
        self.opening = 0
        """Which opening of the spool stored it."""
        self.failures = _NO_FAILURES
        """Where reports of failures go."""

    @property
    def is_done(self) -> bool:
        """Whether nothing here is needed any more."""
        return not self.left and not self.held

    def call_back_stored(self) -> None:
        for item in self.items:
            if item.awaits_storing:
                item.call_back_stored()

    def forget_settled(self) -> None:
        """Keep in memory only what is still needed."""
        if self.left < len(self.items):
            self.bytes = self.bytes * self.left // len(self.items)
            self.items = [item for item in self.items if not item.is_settled]

    def absorb(self, after: StoredGroup) -> None:
        """Take in the group behind this one, when neither has a message left to send."""
        self.end = after.end
        self.count += after.count
        self.following.update(after.following)
        self.held += after.held
