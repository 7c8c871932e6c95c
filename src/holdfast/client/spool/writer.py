"""Storing: many senders, one thread that writes, one flush for all that gathered while the last one ran.

`put` hands a message over and returns; the message is stored when its delivery says so. The spool is bounded: when it
is full, `put` waits for room, which delivering makes, and gives up with `SpoolFull` when its time has passed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

from holdfast.client.delivery import Delivery
from holdfast.client.errors import ClientError
from holdfast.client.spool.format import Entry, Message
from holdfast.client.spool.store import SpoolFull, SpoolStore
from holdfast.errors import StorageError

GROUP_BYTES_MAX: Final = 4 * 1024 * 1024
"""A larger group would make its first message wait for the writing of its last."""
OVERHEAD_BYTES: Final = 64
"""What a frame adds to a message, about."""


class NotStored(ClientError):
    """The spool did not take the message; the reason is its cause."""


class StoredGroup(NamedTuple):
    """Messages on disk, with whoever wants to hear of them."""

    start: int
    end: int
    messages: list[tuple[Entry, Delivery]]


class SpoolWriter:
    def __init__(
        self,
        store: SpoolStore,
        max_bytes: int,
        on_stored: Callable[[StoredGroup], None],
    ) -> None:
        self._store = store
        self._max_bytes = max_bytes
        self._on_stored = on_stored
        self._lock = threading.Lock()
        self._something = threading.Condition(self._lock)
        self._room = threading.Condition(self._lock)
        self._quiet = threading.Condition(self._lock)
        self._pending: list[tuple[Message, Delivery]] = []
        self._pending_bytes = 0
        self._stored_bytes = store.used_bytes
        self._is_writing = False
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="holdfast-spool", daemon=True)
        self._thread.start()

    def put(self, message: Message, delivery: Delivery, timeout: float) -> None:
        size = OVERHEAD_BYTES + len(message.key or b"") + len(message.value or b"")
        with self._lock:
            if self._stored_bytes + self._pending_bytes + size > self._max_bytes:
                self._wait_for_room(size, timeout)
            self._pending.append((message, delivery))
            self._pending_bytes += size
            if len(self._pending) == 1:
                self._something.notify()

    def _wait_for_room(self, size: int, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        while self._stored_bytes + self._pending_bytes + size > self._max_bytes:
            left = deadline - time.monotonic()
            if left <= 0 or self._is_closing:
                raise SpoolFull(
                    f"{self._store.directory} holds {self._stored_bytes} bytes that are not delivered yet, and "
                    f"spool_max_bytes is {self._max_bytes}; the message was not taken"
                )
            self._room.wait(left)

    def trimmed(self) -> None:
        """Something was delivered and let go of: there may be room."""
        with self._lock:
            self._stored_bytes = self._store.used_bytes
            self._room.notify_all()

    def wait_stored(self, timeout: float | None) -> bool:
        """Wait until everything put so far is stored or refused."""
        with self._lock:
            return self._quiet.wait_for(lambda: not self._pending and not self._is_writing, timeout)

    def close(self) -> None:
        """Store what is left, and end."""
        with self._lock:
            self._is_closing = True
            self._something.notify()
            self._room.notify_all()
        self._thread.join()

    def _run(self) -> None:
        while group := self._next_group():
            self._write(group)
            with self._lock:
                self._is_writing = False
                self._stored_bytes = self._store.used_bytes
                if not self._pending:
                    self._quiet.notify_all()

    def _next_group(self) -> list[tuple[Message, Delivery]]:
        """What gathered meanwhile, up to a bound; nothing when it is time to end."""
        with self._lock:
            while not self._pending and not self._is_closing:
                self._something.wait()
            if self._pending_bytes <= GROUP_BYTES_MAX:
                group, self._pending = self._pending, []
                self._pending_bytes = 0
            else:
                group = self._cut_group()
            self._is_writing = bool(group)
            return group

    def _cut_group(self) -> list[tuple[Message, Delivery]]:
        size = count = 0
        for message, _ in self._pending:
            size += OVERHEAD_BYTES + len(message.key or b"") + len(message.value or b"")
            count += 1
            if size >= GROUP_BYTES_MAX:
                break
        group = self._pending[:count]
        del self._pending[:count]
        self._pending_bytes -= size
        return group

    def _write(self, group: Sequence[tuple[Message, Delivery]]) -> None:
        try:
            stored = self._store.write([message for message, _ in group])
        except StorageError as error:
            refusal = NotStored(str(error))
            refusal.__cause__ = error
            for _, delivery in group:
                delivery.set_failed(refusal)
            return
        deliveries = [delivery for _, delivery in group]
        for delivery in deliveries:
            delivery.set_stored()
        self._on_stored(
            StoredGroup(stored.start, stored.end, list(zip(stored.entries, deliveries, strict=True)))
        )
