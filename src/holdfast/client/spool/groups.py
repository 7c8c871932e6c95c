"""Messages in the hands of the spool: one object each, from `send` to the report of the broker, in the groups that
they were stored in.

A group is filled by those who send, written by one thread, and sent by another; each has it for itself. Its messages
are stored together, so one flag says it of all of them. `left` counts those that are neither delivered nor set aside:
one thread at a time hears reports, and only it changes `left`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

from confluent_kafka import KafkaError

from holdfast.client.delivery import Delivered, Delivery, Waiting
from holdfast.client.spool.format import MOVED, UNDECIDED, Headers, Message, PartitionKey


class SpooledDelivery(Delivery):
    """A delivery with the message itself, as long as it is needed; called by the producer to report on it."""

    __slots__ = ("group", "headers", "sequence", "timestamp_ms", "value")

    def __init__(
        self,
        waiting: Waiting,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
    ) -> None:
        # Everything the base has is set here: one call less for every message.
        self._waiting = waiting
        self.topic = topic
        self.partition = partition
        self.key = key
        self.value = value
        self.headers = headers
        self.timestamp_ms = timestamp_ms
        self.sequence = -1
        self.group: StoredGroup | None = None
        self.error = self._place = self._hooks = None

    has_spool = True

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

    def refill(self, message: Message) -> None:
        """The message comes back from disk."""
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
        partition = UNDECIDED if self.partition is None else self.partition
        return Message(
            self.topic, partition, self.key, self.value, self.headers, self.timestamp_ms, self.sequence
        )


def kind_of(waiting: Waiting) -> Callable[[], SpooledDelivery]:
    """Makes deliveries that are empty: whoever makes one sets all that there is to it, without a call.

    What all of them share, and nobody asks for often, stands with the kind and not in each of them.
    """
    shared = {"__slots__": (), "_waiting": waiting, "__init__": object.__init__}
    return type("SpooledDelivery", (SpooledDelivery,), shared)


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
        "is_stored",
        "items",
        "left",
        "position",
        "start",
        "undecided",
    )

    def __init__(self) -> None:
        self.items: list[SpooledDelivery] = []
        self.bytes = 0
        """About how much of them is in memory."""
        self.is_stored = False
        self.start = self.position = self.end = -1
        """See `store.Written`."""
        self.following: dict[PartitionKey, int] = {}
        """For each partition the sequence behind its last message here; undecided ones are counted below."""
        self.count = self.left = 0
        """How many messages there are here to send, and how many of them are neither delivered nor set aside."""
        self.undecided: dict[str, int] = {}
        """For each topic with undecided messages here, the sequence behind the last of them."""
        self.failures = _NO_FAILURES
        """Where reports of failures go."""

    def is_done(self, moved: Mapping[PartitionKey, int]) -> bool:
        """Whether nothing here is needed any more, given how far undecided messages are `moved` (the counters)."""
        return not self.left and self.is_moved(moved)

    def is_moved(self, moved: Mapping[PartitionKey, int]) -> bool:
        return not self.undecided or all(
            moved.get((topic, MOVED), 0) >= after for topic, after in self.undecided.items()
        )

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
        self.undecided.update(after.undecided)
