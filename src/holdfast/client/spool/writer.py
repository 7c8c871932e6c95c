"""Storing: many senders, one thread that writes, one flush for all that gathered while the last one ran.

`send` hands a message over and returns; the message is stored when its delivery says so. The spool is bounded: when it
is full, `send` waits for room, which delivering makes, and gives up with `SpoolFull` when its time has passed.

The partition is fixed when a message is stored, so that its place and its `hf-id` stay what they are, however often it
is sent and however many partitions the topic gets meanwhile. Where nobody can say how many partitions a topic has, its
messages are stored undecided, and moved to their partitions later (`undecided`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

from holdfast.client.delivery import Delivery, Failures, SendMethod, Waiting
from holdfast.client.errors import NotStored, ProducerClosed
from holdfast.client.partitioner import Partitioner
from holdfast.client.spool.deliverer import Deliverer
from holdfast.client.spool.format import (
    MESSAGE_BYTES_MAX,
    MESSAGE_OVERHEAD_BYTES,
    Headers,
    check_headers,
    check_topic,
)
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup
from holdfast.client.spool.store import SpoolFailed, SpoolFull, SpoolStore
from holdfast.client.spool.undecided import Mover
from holdfast.errors import StorageError, UsageError

GROUP_BYTES_MAX: Final = 1024 * 1024
"""A larger group would make its first message wait for the writing of its last."""
PENDING_BYTES_MAX: Final = 4 * 1024 * 1024
"""What waits in memory to be written: a slow disk slows the senders down."""
OVERHEAD_BYTES: Final = MESSAGE_OVERHEAD_BYTES + 32
"""What a message takes beside its key and value, about."""
MOVE_RETRY_SECONDS: Final = 1.0
ASSIST_MASK: Final = 255
"""Whoever sends assists in delivering after every 256th message, or when it is due."""


class SpoolWriter:
    def __init__(
        self,
        store: SpoolStore,
        max_bytes: int,
        waiting: Waiting,
        partitioner: Partitioner,
        mover: Mover,
        deliverer: Deliverer,
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._waiting = waiting
        self._partitioner = partitioner
        self._mover = mover
        self._deliverer = deliverer
        self._topics: set[str] = set()
        """Names that were found good; none once the writer is closed."""
        self._lock = threading.Lock()
        self._something = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._filling = StoredGroup()
        self._pending: deque[StoredGroup] = deque((self._filling,))
        """Groups to be written; the last one is being filled."""
        self._filling_max = GROUP_BYTES_MAX
        """How large the group may get that is being filled, before somebody looks for room."""
        self._waiting_bytes = 0
        """What the groups in front of it take."""
        self._prefix = store.start
        self._stored_bytes = 0
        self._is_resting = False
        self._is_closing = False
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
        size = OVERHEAD_BYTES
        if value is not None:
            size += len(value)
        if key is not None:
            size += len(key)
        if topic not in self._topics or headers or partition is not None or size > MESSAGE_BYTES_MAX:
            size = self._check(topic, partition, headers, size)
        delivery = SpooledDelivery(self._waiting, topic, partition, key, value, headers, timestamp_ms)
        with self._lock:
            group = self._filling
            total = group.bytes + size
            if total > self._filling_max:
                group = self._find_room(size, timeout)
                total = group.bytes + size
            delivery.group = group
            group.items.append(delivery)
            group.bytes = total
            if self._is_resting:
                self._is_resting = False
                self._something.notify()
        deliverer = self._deliverer
        deliverer.sends = sends = deliverer.sends + 1
        if deliverer.is_due or not sends & ASSIST_MASK:
            deliverer.assist()
        return delivery

    def method(self, otherwise: SendMethod, timeout: float) -> SendMethod:
        """`Producer.send` in one call for messages that are bytes and nothing unusual; `otherwise` sends the others.

        See `DirectSender.method`: every step that is left out here is seen in how many messages a second go through.
        """
        new = object.__new__
        kind = SpooledDelivery
        waiting, topics, lock, deliverer = self._waiting, self._topics, self._lock, self._deliverer

        def send(
            topic: str,
            value: Any,
            *,
            key: Any = None,
            headers: Any = (),
            partition: int | None = None,
            timestamp_ms: int = -1,
        ) -> Delivery:
            if (
                value.__class__ is not bytes
                or (key is not None and key.__class__ is not bytes)
                or headers
                or partition is not None
                or topic not in topics
            ):
                return otherwise(
                    topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
                )
            delivery = new(kind)
            delivery._waiting = waiting
            delivery.topic = topic
            delivery.key = key
            delivery.value = value
            delivery.headers = ()
            delivery.timestamp_ms = timestamp_ms
            delivery.sequence = -1
            delivery.partition = delivery.error = delivery._place = delivery._hooks = None
            size = OVERHEAD_BYTES + len(value)
            if key is not None:
                size += len(key)
            with lock:
                delivery.group = group = self._filling
                total = group.bytes + size
                if total > self._filling_max:
                    delivery.group = group = self._find_room(size, timeout)
                    total = group.bytes + size
                group.items.append(delivery)
                group.bytes = total
                if self._is_resting:
                    self._is_resting = False
                    self._something.notify()
            deliverer.sends = sends = deliverer.sends + 1
            if deliverer.is_due or not sends & ASSIST_MASK:
                deliverer.assist()
            return delivery

        return send

    def _check(self, topic: str, partition: int | None, headers: Headers, size: int) -> int:
        """Refuse what no frame can hold, before anything of it is written; returns about how much it takes."""
        if self._is_closing:
            raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")
        try:
            check_topic(topic)
            if partition is not None and not 0 <= partition < 2**31:
                raise ValueError(f"partition {partition}")
            size += check_headers(headers)
            if size > MESSAGE_BYTES_MAX:
                raise ValueError(f"{size} bytes")
        except ValueError as error:
            raise UsageError(f"no Kafka message can have {error}") from error
        self._topics.add(topic)
        return size

    def _find_room(self, size: int, timeout: float) -> StoredGroup:
        """The group for a message that does not fit into what is being filled; waits until there is room."""
        if size > MESSAGE_BYTES_MAX:
            raise UsageError(f"no Kafka message can have {size} bytes")
        deadline = time.monotonic() + timeout
        has_assisted = False
        while True:
            if self._failure is not None or self._is_closing:
                raise SpoolFailed(self._failure or "the producer is being closed; the message was not taken")
            pending = self._waiting_bytes + self._filling.bytes
            used = self._stored_bytes + pending
            if used + size <= self._max_bytes and pending <= PENDING_BYTES_MAX:
                if self._filling.items:
                    self._fill_another()
                return self._filling
            left = deadline - time.monotonic()
            if left <= 0 or size > self._max_bytes:
                raise SpoolFull(
                    f"{self._store.directory} holds {used} bytes that are not delivered yet, and spool_max_bytes is "
                    f"{self._max_bytes}; the message was not taken"
                )
            if has_assisted:
                self._deliverer.hurry()
                self._room.wait(left)
            else:
                # There is something better to do than to wait.
                self._lock.release()
                try:
                    self._deliverer.assist()
                finally:
                    self._lock.acquire()
            has_assisted = not has_assisted

    def _fill_another(self) -> None:
        """What was filled until now is complete."""
        self._waiting_bytes += self._filling.bytes
        self._filling = StoredGroup()
        self._pending.append(self._filling)
        self._measure()

    def _measure(self) -> None:
        """How much the group that is being filled may take; the first message of a group always looks for room."""
        self._stored_bytes = self._store.end - self._prefix
        room = min(self._max_bytes - self._stored_bytes, PENDING_BYTES_MAX) - self._waiting_bytes
        self._filling_max = -1 if self._is_closing else min(room, GROUP_BYTES_MAX)

    def progressed(self, prefix: int) -> None:
        """Everything in front of `prefix` was let go of: there may be room."""
        with self._lock:
            self._prefix = prefix
            self._measure()
            self._room.notify_all()

    def learnt(self) -> None:
        """Somebody knows more about topics: there may be something to move."""
        with self._lock:
            self._is_resting = False
            self._something.notify()

    @property
    def unstored(self) -> list[SpooledDelivery]:
        """What was handed over and is not on disk yet."""
        with self._lock:
            return [item for group in self._pending for item in group.items]

    def wait_stored(self, timeout: float | None) -> bool:
        """Wait until everything put so far is stored or refused."""
        return self._waiting.wait(self._is_quiet, timeout, reports=False)

    def _is_quiet(self) -> bool:
        with self._lock:
            return not self._waiting_bytes and not self._filling.items

    def close(self) -> None:
        """Store what is left, and end."""
        with self._lock:
            self._is_closing = True
            self._topics.clear()
            self._measure()
            self._something.notify()
            self._room.notify_all()
        self._thread.join()

    # The thread

    def _run(self) -> None:
        try:
            self._write_all()
        except Exception as error:  # noqa: BLE001  whatever it is: nobody may wait for this thread any longer
            self._end(error)

    def _write_all(self) -> None:
        while (group := self._next_group()) is not None:
            if group.items:
                self._write(group)
            self._mover.move_some(self._send_moved)
            self._waiting.wake()

    def _next_group(self) -> StoredGroup | None:
        """What gathered meanwhile, empty when there is only something to move; None when it is time to end."""
        with self._lock:
            if not self._filling.items and not self._is_closing and not self._mover.has_work:
                self._is_resting = True
                self._something.wait(MOVE_RETRY_SECONDS if self._mover.is_waiting else None)
                self._is_resting = False
            group = self._pending[0]
            if group.items and group is self._filling:
                self._fill_another()
            return None if self._is_closing and not group.items else group

    def _write(self, group: StoredGroup) -> None:
        items = group.items
        self._complete(items)
        try:
            self._store_group(group)
        except StorageError as error:
            self._refuse(items, error)
        else:
            if self._waiting.kept:
                group.call_back_stored()
            self._deliverer.stored(group)
        self._written()

    def _complete(self, items: list[SpooledDelivery]) -> None:
        """Give every message its time and its partition."""
        now_ms = time.time_ns() // 1_000_000
        choose = self._partitioner.choose
        topic, count = "", None
        known: Mapping[bytes | None, int] = {}
        for item in items:
            if item.timestamp_ms <= 0:
                item.timestamp_ms = now_ms
            if item.partition is None:
                if item.topic != topic:
                    topic = item.topic
                    count = self._mover.partitions_of(topic)
                    known = self._partitioner.known(count or 0)
                partition = known.get(item.key)
                if partition is None and count is not None:
                    partition = choose(topic, item.key, len(item.value or b""), count) if count > 1 else 0
                item.partition = partition

    def _store_group(self, group: StoredGroup) -> None:
        written = self._store.write(group.items)
        group.start, group.position, group.end = written.start, written.position, written.end
        group.following = written.following
        group.is_stored = True

    def _written(self) -> None:
        with self._lock:
            self._pending.popleft()
            self._waiting_bytes = sum(each.bytes for each in self._pending if each is not self._filling)
            self._measure()
            self._room.notify_all()

    def _send_moved(self, group: StoredGroup) -> None:
        self._deliverer.stored(group)
        with self._lock:
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
        with self._lock:
            self._failure = f"nothing more is stored: {error!r}"
            self._is_closing = True
            groups, self._pending = self._pending, deque((StoredGroup(),))
            self._filling = self._pending[0]
            self._waiting_bytes = 0
            self._measure()
            self._room.notify_all()
        for group in groups:
            if not group.is_stored:
                self._refuse(group.items, error)
        self._waiting.wake()
