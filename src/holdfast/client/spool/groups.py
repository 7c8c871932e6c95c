"""Messages in the hands of the spool: one object each, from `send` to the report of the broker, in the groups that
they were stored in.

A group is filled by those who send, written by one thread, and sent by another; each has it for itself. Its messages
are stored together, so one flag says it of all of them. `left` counts those that are neither delivered nor set aside:
one thread hears reports, and only it changes `left`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from threading import Lock
from time import sleep
from typing import Any, TypeAlias

from confluent_kafka import KafkaError

from holdfast.client.delivery import Delivered, Delivery, Waiting
from holdfast.client.spool.format import UNDECIDED, Headers, PartitionKey, SpooledMessage
from holdfast.client.spool.progress import Progress, messages_left


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

    def refill(self, message: SpooledMessage) -> None:
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

    def as_message(self) -> SpooledMessage:
        topic, line = self.where
        return SpooledMessage(
            topic, line, self.key, self.value, self.headers, self.timestamp_ms, self.sequence
        )


def make_item(message: SpooledMessage, waiting: Waiting) -> SpooledDelivery:
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


class Window:
    """What is on its way to the broker: groups in the order of the spool, and how far all of them have arrived.

    Confirmations come in any order. The spool can let go of its beginning only up to the first group that is not done:
    `prefix`. Behind it, each partition has a prefix of its own: the sequence of its first message that is not done.
    With both, a process that takes over sends nothing again but what nobody knows to have arrived, and one stuck
    partition does not make the others' messages be sent twice.

    One thread sends, which adds; another may hear reports, which lets go: the lock is taken once for a group. Only
    threads of ours take it; the application, which a signal may interrupt anywhere, looks without it (`_steady`).
    """

    def __init__(self, progress: Progress) -> None:
        self.prefix = progress.prefix
        """Every message in front of this position is done."""
        self.confirmed = dict(progress.confirmed)
        """For each partition the sequence up to which all is done, but for what groups here say."""
        self._lock = Lock()
        self._version = 0
        """Odd while groups are being added or let go of."""
        self._groups: deque[StoredGroup] = deque()
        self.bytes = 0
        """About how much of messages that are not done is in memory."""
        self.messages = 0
        """How many messages are in groups that are not done; see `recount`."""
        self._gone = 0
        """How many messages were done in groups that have been let go of."""
        self._let_go: deque[list[SpooledDelivery]] = deque()
        """Their messages; see `forget`."""

    def __len__(self) -> int:
        return len(self._groups)

    @property
    def done(self) -> int:
        """How many messages are done, delivered or set aside, of those that were sent from here."""
        return self._steady(lambda: self._gone + self._done_here())

    def _done_here(self) -> int:
        return sum(group.count - group.left for group in self._groups.copy())

    def _steady(self, look: Callable[[], int]) -> int:
        """What is seen while nothing is added or let go of."""
        while True:
            version = self._version
            if not version & 1:
                try:
                    seen = look()
                except RuntimeError:
                    # Changed while it was looked at.
                    continue
                if version == self._version:
                    return seen
            sleep(0)

    @contextmanager
    def _changing(self) -> Iterator[None]:
        with self._lock:
            self._version += 1
            try:
                yield
            finally:
                self._version += 1

    def add(self, group: StoredGroup) -> None:
        """The group, next in the spool, is being sent."""
        with self._changing():
            last = self._groups[-1] if self._groups else None
            if last is not None and not group.left and not last.left:
                last.absorb(group)
                return
            self.bytes += group.bytes
            self.messages += group.left
            self._groups.append(group)

    def advance(self) -> bool:
        """Let go of what is done; whether that was anything."""
        if not self._groups or self._groups[0].left:
            return False
        with self._changing():
            before = self.prefix
            while self._groups and self._groups[0].is_done:
                first = self._groups.popleft()
                # Messages and their group know each other: without this, only the cycle collector would free them.
                self._let_go.append(first.items)
                first.items = []
                self._gone += first.count
                self.bytes -= first.bytes
                self.messages -= min(first.count, self.messages)
                _raise(self.confirmed, first.following)
                self.prefix = first.end
            return self.prefix != before

    def forget(self, count: int | None = None) -> None:
        """Forget messages of groups that were let go of, all of them or about so many.

        Python's cycle collector goes by how many more objects were made than freed. While an application sends, as
        many messages are freed as it makes, and the collector need not look at those that are under way.
        """
        while self._let_go and (count is None or count > 0):
            try:
                items = self._let_go[0]
                if count is not None and len(items) > count:
                    del items[-count:]
                    return
                self._let_go.popleft()
            except IndexError:
                # Another thread forgets, too.
                return
            if count is not None:
                count -= len(items)

    def recount(self) -> None:
        """Count only what is really left: in one group, some may be done and others wait for long."""
        with self._lock:
            self._recount()

    def _recount(self) -> None:
        self.bytes = self.messages = 0
        for group in self._groups:
            self.messages += group.left
            self.bytes += group.bytes * group.left // max(1, len(group.items))

    def progress(self) -> Progress:
        """How far everything is; keeps in memory only what is still needed."""
        stuck: dict[PartitionKey, int] = {}
        with self._lock:
            confirmed = dict(self.confirmed)
            for group in self._groups:
                group.forget_settled()
                for item in group.items:
                    stuck.setdefault(item.where, item.sequence)
                following = group.following.items()
                _raise(confirmed, {where: after for where, after in following if where not in stuck})
            self._recount()
            _raise(confirmed, stuck)
            return Progress(self.prefix, confirmed)

    def progress_with(self, done: Collection[SpooledDelivery]) -> Progress:
        """How far everything will be when these messages are done too."""
        stuck: dict[PartitionKey, int] = {}
        with self._lock:
            confirmed = dict(self.confirmed)
            prefix = self.prefix
            is_whole = True
            for group in self._groups:
                left = [item for item in group.items if not item.is_settled and item not in done]
                for item in left:
                    stuck.setdefault(item.where, item.sequence)
                following = group.following.items()
                _raise(confirmed, {where: after for where, after in following if where not in stuck})
                is_whole = is_whole and not left and not group.held
                if is_whole:
                    prefix = group.end
            _raise(confirmed, stuck)
            return Progress(prefix, confirmed)

    def is_held_up(self) -> bool:
        """Whether all that keeps the spool from letting go of its beginning are messages that wait for their topics."""
        with self._lock:
            return bool(self._groups) and not self._groups[0].left and self._groups[0].held > 0

    def rewind(self, progress: Progress) -> list[SpooledDelivery]:
        """Begin again at this progress, with nothing under way; returns what is not known to have arrived."""
        with self._changing():
            unsettled = [item for group in self._groups for item in group.items if not item.is_settled]
            self._gone += sum(group.count - group.left for group in self._groups)
            self._groups.clear()
            self.bytes = self.messages = 0
            self.prefix, self.confirmed = progress.prefix, dict(progress.confirmed)
            return unsettled

    def left(self, counters: Mapping[PartitionKey, int]) -> int:
        """How many messages of those counted are not done."""
        return self._steady(lambda: max(0, messages_left(counters, self.confirmed) - self._done_here()))

    def unsettled(self) -> list[SpooledDelivery]:
        """Every message that is not known to have arrived, in order."""
        with self._lock:
            return [item for group in self._groups for item in group.items if not item.is_settled]


def _raise(counters: dict[PartitionKey, int], following: Mapping[PartitionKey, int]) -> None:
    for where, after in following.items():
        if after > counters.get(where, 0):
            counters[where] = after
