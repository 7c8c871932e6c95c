"""Storing: many senders, one thread that writes, one flush for all that gathered while the last one ran.

`put` hands a message over and returns; the message is stored when its delivery says so. The spool is bounded: when it
is full, `put` waits for room, which delivering makes, and gives up with `SpoolFull` when its time has passed.

The partition is fixed when a message is stored, so that its place and its `hf-id` stay what they are, however often it
is sent and however many partitions the topic gets meanwhile. Where nobody can say how many partitions a topic has, its
messages are stored undecided, and moved to their partitions later (`undecided`).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Final

from holdfast.client.delivery import Failures, Waiting
from holdfast.client.errors import NotStored
from holdfast.client.partitioner import Partitioner
from holdfast.client.spool.format import MESSAGE_OVERHEAD_BYTES
from holdfast.client.spool.groups import SpooledDelivery, StoredGroup
from holdfast.client.spool.store import SpoolFailed, SpoolFull, SpoolStore
from holdfast.client.spool.undecided import Mover
from holdfast.errors import StorageError

GROUP_BYTES_MAX: Final = 4 * 1024 * 1024
"""A larger group would make its first message wait for the writing of its last."""
PENDING_BYTES_MAX: Final = 64 * 1024 * 1024
"""What waits in memory to be written: a slow disk slows the senders down."""
OVERHEAD_BYTES: Final = MESSAGE_OVERHEAD_BYTES + 32
"""What a message takes beside its key and value, about."""
MOVE_RETRY_SECONDS: Final = 1.0


class SpoolWriter:
    def __init__(
        self,
        store: SpoolStore,
        max_bytes: int,
        waiting: Waiting,
        partitioner: Partitioner,
        mover: Mover,
        on_stored: Callable[[StoredGroup], None],
        on_full: Callable[[], None],
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._waiting = waiting
        self._partitioner = partitioner
        self._mover = mover
        self._on_stored = on_stored
        self._on_full = on_full
        self._lock = threading.Lock()
        self._something = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._filling = StoredGroup()
        self._pending: deque[StoredGroup] = deque((self._filling,))
        """Groups to be written; the last one is being filled."""
        self._pending_bytes = 0
        self._prefix = store.start
        self._stored_bytes = 0
        self._is_resting = False
        self._is_writing = False
        self._is_closing = False
        self._failure: str | None = None
        self.failures = Failures()
        self.stored_count = 0
        self._thread = threading.Thread(target=self._run, name="holdfast-spool", daemon=True)

    def start(self) -> None:
        self._thread.start()

    # From other threads

    def put(self, delivery: SpooledDelivery, size: int, timeout: float) -> None:
        """Hand a message over that takes about `size` bytes."""
        size += OVERHEAD_BYTES
        with self._lock:
            used = self._stored_bytes + self._pending_bytes + size
            if used > self._max_bytes or self._pending_bytes > PENDING_BYTES_MAX or self._is_closing:
                self._wait_for_room(size, timeout)
            group = self._filling
            if group.bytes >= GROUP_BYTES_MAX:
                self._filling = group = StoredGroup()
                self._pending.append(group)
            delivery.group = group
            group.items.append(delivery)
            group.bytes += size
            self._pending_bytes += size
            if self._is_resting:
                self._is_resting = False
                self._something.notify()

    def _wait_for_room(self, size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while True:
            if self._failure is not None or self._is_closing:
                raise SpoolFailed(self._failure or "the producer is being closed; the message was not taken")
            used = self._stored_bytes + self._pending_bytes
            if used + size <= self._max_bytes and self._pending_bytes <= PENDING_BYTES_MAX:
                return
            left = deadline - time.monotonic()
            if left <= 0 or size > self._max_bytes:
                raise SpoolFull(
                    f"{self._store.directory} holds {used} bytes that are not delivered yet, and spool_max_bytes is "
                    f"{self._max_bytes}; the message was not taken"
                )
            self._on_full()
            self._room.wait(left)

    def progressed(self, prefix: int) -> None:
        """Everything in front of `prefix` was let go of: there may be room."""
        with self._lock:
            self._prefix = prefix
            self._stored_bytes = self._store.end - prefix
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
        return self._waiting.wait(self._is_quiet, timeout)

    def _is_quiet(self) -> bool:
        with self._lock:
            return not self._pending_bytes

    def close(self) -> None:
        """Store what is left, and end."""
        with self._lock:
            self._is_closing = True
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
                self._filling = StoredGroup()
                self._pending.append(self._filling)
            return None if self._is_closing and not group.items else group

    def _write(self, group: StoredGroup) -> None:
        now_ms = time.time_ns() // 1_000_000
        counts, choose = self._mover.partitions_of, self._partitioner.choose
        for item in group.items:
            if item.timestamp_ms <= 0:
                item.timestamp_ms = now_ms
            if item.partition is None:
                count = counts(item.topic)
                if count is not None:
                    item.partition = choose(item.topic, item.key, len(item.value or b""), count)
        items = group.items
        try:
            self._store_group(group)
        except StorageError as error:
            self._refuse(items, error)
        else:
            self.stored_count += len(items)
            if self._waiting.kept:
                group.call_back_stored()
            self._on_stored(group)
        self._written()

    def _store_group(self, group: StoredGroup) -> None:
        written = self._store.write(group.items)
        group.start, group.position, group.end = written.start, written.position, written.end
        group.following = written.following
        group.is_stored = True

    def _written(self) -> None:
        with self._lock:
            self._pending.popleft()
            self._pending_bytes = sum(each.bytes for each in self._pending)
            self._stored_bytes = self._store.end - self._prefix
            self._room.notify_all()

    def _send_moved(self, group: StoredGroup) -> None:
        self._on_stored(group)
        with self._lock:
            self._stored_bytes = self._store.end - self._prefix

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
            self._pending_bytes = 0
            self._room.notify_all()
        for group in groups:
            if not group.is_stored:
                self._refuse(group.items, error)
        self._waiting.wake()
