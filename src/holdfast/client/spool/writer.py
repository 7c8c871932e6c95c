"""Storing: many senders, one thread that writes, one flush for all that gathered while the last one ran.

Senders hand messages over without a lock, which would cost them more than all else they do here together, and which a
signal handler could leave held: a message is counted and appended to a queue, each in one step that no other thread can
divide. Two flags keep this safe, whoever is interrupted where: the thread says that it rests, or is over, before it
looks at the queue for the last time, and a sender asks for that after its message is in the queue. So a message is seen
by the thread, or its sender sees that it has to wake the thread, or to take the message back. What was counted and
never handed over, because a signal came in between, is forgotten when the thread rests.

`send` hands a message over and returns; the message is stored when its delivery says so. The spool is bounded: when it
is full, `send` waits for room, which delivering makes, and gives up with `SpoolFull` when its time has passed.

The partition is fixed when a message is stored, so that its place and its `hf-id` stay what they are, however often it
is sent and however many partitions the topic gets meanwhile. Where nobody can say how many partitions a topic has, its
messages are stored undecided, and get them when they are sent (`topics`).

What was set aside is sent once more when somebody asks for it: it is stored again, as new messages at the end.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Iterator, Mapping
from itertools import islice
from operator import index
from typing import Final

from holdfast.client.delivery import Bell, Delivery, Failures, Waiting
from holdfast.client.errors import NotStored, ProducerClosed
from holdfast.client.partitioner import Partitioner
from holdfast.client.spool import format as frames
from holdfast.client.spool.deliverer import Deliverer
from holdfast.client.spool.format import MESSAGE_BYTES_MAX, Headers
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup, make_item
from holdfast.client.spool.progress import stored
from holdfast.client.spool.refused import Refused, RefusedMessages
from holdfast.client.spool.store import SpoolFailed, SpoolFull, SpoolStore, Written
from holdfast.client.spool.topics import SpoolTopics
from holdfast.errors import StorageError, UsageError

GROUP_BYTES_MAX: Final = 1024 * 1024
"""A larger group would make its first message wait for the writing of its last."""
PENDING_BYTES_MAX: Final = 4 * 1024 * 1024
"""What waits in memory to be written: a slow disk slows the senders down."""
OVERHEAD_BYTES: Final = frames.MESSAGE_OVERHEAD_BYTES + 32
"""What a message takes beside its key and value, about."""
TURN_MASK: Final = 255
"""Whoever sends gives the thread that delivers a turn after every 256th message, or when it is due."""
REST_SECONDS: Final = 1.0
"""How long the thread rests at most: whoever was interrupted by a signal may not have woken it."""


class SpoolWriter:
    def __init__(
        self,
        store: SpoolStore,
        max_bytes: int,
        waiting: Waiting,
        partitioner: Partitioner,
        topics: SpoolTopics,
        deliverer: Deliverer,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._waiting = waiting
        self._partitioner = partitioner
        self._layout = topics
        self._deliverer = deliverer
        self._retry: Iterator[Refused] | None = None
        """What was set aside and is to be stored again; what is set aside meanwhile is not."""
        self._topics: set[str] = set()
        """Names that were found good; none once the writer is closed."""
        self._handed: deque[SpooledDelivery] = deque()
        """What was handed over and not taken by the thread yet, in order."""
        self._handed_bytes = 0
        """What was ever handed over."""
        self._handed_max = 0
        """How far that may go before somebody looks for room; see `_measure`."""
        self._is_wanted = False
        """Whether whoever hands a message over has to look after it; see `_look`."""
        self._something = Bell()
        self._measuring = threading.Lock()
        """Held by threads of ours alone."""
        self._taken_bytes = 0
        """What the thread has taken of all that was handed over."""
        self._writing: StoredGroup | None = None
        """What the thread has taken and not written yet."""
        self._prefix = store.start
        self._stored_bytes = 0
        self._is_closing = False
        self._is_over = False
        """Whether the thread will take nothing more."""
        self._has_ended = False
        self._failure: str | None = None
        self.failures = Failures()
        self._thread = threading.Thread(target=self._run, name="holdfast-spool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From other threads

    def send(
        self,
        topic: str,
        partition: int | None,
        key: bytes | None,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        timeout: float,
    ) -> Delivery:
        size = OVERHEAD_BYTES + (len(value) if value.__class__ is bytes else _length("value", value, topic))
        if key is not None:
            size += len(key) if key.__class__ is bytes else _length("key", key, topic)
        if (
            topic not in self._topics
            or headers
            or partition is not None
            or timestamp_ms != -1
            or size > MESSAGE_BYTES_MAX
        ):
            size = self._check(topic, partition, headers, timestamp_ms, size)
        delivery = SpooledDelivery()
        delivery._waiting = self._waiting
        delivery.topic = topic
        delivery.partition = partition
        delivery.key = key
        delivery.value = value
        delivery.headers = headers
        delivery.timestamp_ms = timestamp_ms
        delivery.group = delivery.line = delivery.error = delivery._place = delivery._hooks = None
        handed_bytes = self._handed_bytes + size
        if handed_bytes > self._handed_max:
            self._reserve(size, timeout)
        else:
            self._handed_bytes = handed_bytes
        self._handed.append(delivery)
        if self._is_wanted:
            self._look(delivery)
        deliverer = self._deliverer
        deliverer.sends = sends = deliverer.sends + 1
        if deliverer.is_due or not sends & TURN_MASK:
            deliverer.give_turn()
        return delivery

    def _check(
        self,
        topic: str,
        partition: int | None,
        headers: Headers,
        timestamp_ms: int,
        size: int,
    ) -> int:
        """Refuse what no frame can hold, before anything of it is written; returns about how much it takes."""
        if self._is_closing:
            raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")
        try:
            frames.check_topic(topic)
            if partition is not None and not 0 <= index(partition) < 2**31:
                raise ValueError(f"partition {partition}")
            if index(timestamp_ms) >= 2**63:
                raise ValueError(f"timestamp_ms {timestamp_ms}")
            size += frames.check_headers(headers)
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"{size} bytes")
        except ValueError as error:
            raise UsageError(f"no Kafka message can have {error}") from error
        except TypeError as error:
            raise UsageError(f"a message for {topic}: {error}") from error
        self._topics.add(topic)
        return size

    def _reserve(self, size: int, timeout: float) -> None:
        """Count a message for which there may be no room; waits until there is."""
        if size > MESSAGE_BYTES_MAX:
            raise UsageError(f"no Kafka message can have {size} bytes")
        deadline = time.monotonic() + timeout
        while not self._has_room(size):
            if self._failure is not None or self._is_closing:
                raise SpoolFailed(self._failure or "the producer is being closed; the message was not taken")
            left = deadline - time.monotonic()
            if left <= 0 or size > self._max_bytes or self._waiting.is_ours:
                raise SpoolFull(
                    f"{self._store.directory} holds {self._stored_bytes} bytes that are not delivered yet, and "
                    f"spool_max_bytes is {self._max_bytes}; the message was not taken"
                )
            self._deliverer.hurry()
            self._deliverer.give_turn()
            self._waiting.wait(lambda: self._has_room(size) or self._is_closing, left)
        self._handed_bytes += size

    def _has_room(self, size: int) -> bool:
        pending = self._handed_bytes - self._taken_bytes + self._writing_bytes
        return (
            not self._is_closing
            and self._stored_bytes + pending + size <= self._max_bytes
            and pending <= PENDING_BYTES_MAX
        )

    def _look(self, delivery: SpooledDelivery) -> None:
        """After a message was handed over: wake the thread; or take the message back when there is none any more."""
        # In this order: if a signal comes in between, whoever sends next does it again.
        self._something.ring()
        self._is_wanted = False
        if not self._is_over:
            return
        self._is_wanted = True
        try:
            self._handed.remove(delivery)
        except ValueError:
            # Taken, or refused with the others.
            return
        raise SpoolFailed(self._failure or "the producer is being closed; the message was not taken")

    @property
    def _writing_bytes(self) -> int:
        return 0 if self._writing is None else self._writing.bytes

    def _measure(self) -> None:
        """How much may be handed over until somebody looks for room. Needs `_measuring`."""
        self._stored_bytes = self._store.end - self._prefix
        room = min(self._max_bytes - self._stored_bytes, PENDING_BYTES_MAX)
        self._handed_max = -1 if self._is_closing else self._taken_bytes - self._writing_bytes + room

    def progressed(self, prefix: int) -> None:
        """Everything in front of `prefix` was let go of: there may be room."""
        with self._measuring:
            self._prefix = prefix
            self._measure()
        self._waiting.wake()

    def retry(self, refused: RefusedMessages) -> None:
        """Store again what was set aside until now."""
        if self._retry is None:
            self._retry = islice(iter(list(refused)), self._store.counters.get(frames.RETRIED, 0), None)
        self._something.ring()

    @property
    def is_retrying(self) -> bool:
        return self._retry is not None and not self._has_ended

    @property
    def unstored(self) -> int:
        """How many messages were handed over and are not on disk yet."""
        # In this order: the thread says what it is writing before it takes it from the queue.
        handed = len(self._handed)
        writing = self._writing
        return handed if writing is None or writing.is_stored else handed + writing.count

    def wait_stored(self, timeout: float | None) -> bool:
        """Wait until everything put so far is stored or refused."""
        self._something.ring()
        return self._waiting.wait(
            lambda: (not self._handed and self._writing is None) or self._is_over, timeout
        )

    def close(self) -> None:
        """Store what is left, and end."""
        self._is_closing = True
        self._topics.clear()
        self._handed_max = -1
        self._something.ring()
        self._waiting.wake()
        self._waiting.wait(lambda: self._has_ended, None)

    # The thread

    def _run(self) -> None:
        with self._waiting.settling():
            try:
                self._write_all()
            except Exception as error:  # noqa: BLE001  whatever it is: nobody may wait for this thread any longer
                self._end(error)
        self._has_ended = True
        self._waiting.wake()

    def _write_all(self) -> None:
        while (group := self._next_group()) is not None:
            if group.items:
                self._write(group)
            if self._retry is not None:
                self._store_again(self._retry)
            self._waiting.wake()

    def _next_group(self) -> StoredGroup | None:
        """What gathered meanwhile, empty when there is only something to move; None when it is time to end."""
        if not self._handed and not self._is_closing and self._retry is None:
            self._rest()
        if not self._handed and self._is_closing:
            # In this order: whoever sees that it is wanted sees that it is over.
            self._is_over = True
            self._is_wanted = True
        # Looked at once more: whoever handed something over before that was said takes it for taken.
        if self._handed:
            return self._take()
        return None if self._is_over else StoredGroup()

    def _rest(self) -> None:
        """Wait for something to do."""
        self._is_wanted = True
        # Whoever hands something over from now on wakes this thread; what was handed over before is seen here.
        if not self._handed:
            # Nothing is on its way: what was counted and never handed over, by a call that was interrupted, is not.
            with self._measuring:
                self._taken_bytes = self._handed_bytes
                self._measure()
            self._something.wait(REST_SECONDS)
        self._is_wanted = False

    def _take(self) -> StoredGroup:
        """A group of what was handed over, about as large as a group may be."""
        group = StoredGroup()
        group.bytes = max(0, self._handed_bytes - self._taken_bytes)
        count = len(self._handed)
        if group.bytes > GROUP_BYTES_MAX and count > 1:
            part = max(1, count * GROUP_BYTES_MAX // group.bytes)
            group.bytes = group.bytes * part // count
            count = part
        group.count = count
        self._writing = group
        take = self._handed.popleft
        group.items = [take() for _ in range(count)]
        self._taken_bytes += group.bytes
        return group

    def _write(self, group: StoredGroup) -> None:
        items = group.items
        self._complete(group)
        try:
            self._store_group(group)
        except StorageError as error:
            self._refuse(items, error)
        else:
            if self._waiting.kept:
                group.call_back_stored()
            self._deliverer.stored(group)
        self._written()

    def _complete(self, group: StoredGroup) -> None:
        """Give every message its group, its time and its partition."""
        now_ms = time.time_ns() // 1_000_000
        choose = self._partitioner.choose
        topic, count = "", None
        known: Mapping[bytes | None, int] = {}
        for item in group.items:
            item.group = group
            if item.timestamp_ms <= 0:
                item.timestamp_ms = now_ms
            if item.partition is None:
                if item.topic != topic:
                    topic = item.topic
                    count = self._layout.partitions_of(topic)
                    known = self._partitioner.known(count or 0)
                partition = known.get(item.key)
                if partition is None and count is not None:
                    partition = choose(topic, item.key, len(item.value or b""), count) if count > 1 else 0
                item.partition = partition
                if partition is None:
                    item.line = frames.UNDECIDED

    def _store_group(self, group: StoredGroup) -> None:
        self._place(group, self._store.write(group.items))

    def _place(self, group: StoredGroup, written: Written) -> None:
        group.start, group.position, group.end = written.start, written.position, written.end
        group.following = stored(written.following)
        group.opening = self._store.opening
        group.is_stored = True

    def _store_again(self, refused: Iterator[Refused]) -> None:
        """One group of what was set aside: a crash finds each message there or here, and never in both."""
        done = self._store.counters.get(frames.RETRIED, 0)
        group = StoredGroup()
        for each in refused:
            item = make_item(each.message, self._waiting)
            item.line = None
            group.items.append(item)
            group.bytes += OVERHEAD_BYTES + len(item.value or b"") + len(item.key or b"")
            if group.bytes >= GROUP_BYTES_MAX:
                break
        if not group.items:
            self._retry = None
            return
        self._complete(group)
        try:
            written = self._store.write(group.items, frames.Moved(frames.RETRIED[0], done + len(group.items)))
        except StorageError as error:
            # They stay where they are.
            self._deliverer.say(f"no message that was set aside is stored again: {error}")
            self._retry = None
            return
        self._place(group, written)
        self._deliverer.stored_again(group)
        with self._measuring:
            self._measure()

    def _written(self) -> None:
        with self._measuring:
            self._writing = None
            self._measure()

    def _refuse(self, items: list[SpooledDelivery], error: Exception) -> None:
        refusal = NotStored(str(error))
        refusal.__cause__ = error
        for item in items:
            item.value = None
            item.set_failed(refusal)
            self.failures.add(item)

    def _end(self, error: Exception) -> None:
        """Nothing more is stored: everybody is told."""
        self._failure = f"nothing more is stored: {error!r}"
        self._is_closing = self._is_over = True
        self._is_wanted = True
        self._handed_max = -1
        # One by one: whoever hands something over behind the last of them sees that it is over.
        handed: list[SpooledDelivery] = []
        while self._handed:
            handed.append(self._handed.popleft())
        writing, self._writing = self._writing, None
        if writing is not None and not writing.is_stored:
            self._refuse(writing.items, error)
        self._refuse(handed, error)


def _length(what: str, value: bytes | None, topic: str) -> int:
    """How long a key or value is that is not simply bytes; none is 0 bytes long."""
    try:
        frames.check_bytes(what, value)
    except TypeError as error:
        raise UsageError(f"a message for {topic}: {error}") from error
    return len(value or b"")
