"""Delivering a spool: in order, without giving up, and nothing twice that is known to have arrived.

One thread per spool reads messages in the spool's order and hands them to an idempotent producer that never times out.
What was just stored comes from memory while this thread keeps up, and from disk when it does not; both are bounded.
Every message carries the header `hf-id`: spool, partition, sequence.

When the producer breaks (a fatal error, an expired producer id, a broker that lost its memory of us) a new one is
made and everything unconfirmed is sent again, in order; readers recognise what they have seen by its `hf-id`. A message
that is refused for good is set aside with the reason, and the rest goes on. When the spool itself cannot be read, or a
refused message cannot be set aside, delivering stops, and whoever waits is told.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final
from weakref import WeakValueDictionary

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as RawProducer

from holdfast.client.delivery import Delivered, Delivery
from holdfast.client.direct import FINAL_CODES, failure
from holdfast.client.errors import Undelivered
from holdfast.client.settings import Settings
from holdfast.client.spool.format import Entry
from holdfast.client.spool.progress import Progress, read_progress, write_progress
from holdfast.client.spool.refused import Refused, RefusedMessages
from holdfast.client.spool.store import SpoolFailed, SpoolStore
from holdfast.client.spool.window import Window
from holdfast.client.spool.writer import StoredGroup
from holdfast.errors import StorageError
from holdfast.seams import FileSystem

ID_HEADER: Final = "hf-id"
WINDOW_BYTES_MAX: Final = 32 * 1024 * 1024
"""Bytes handed to the producer and not confirmed: what memory is needed however long the broker is away."""
FRESH_BYTES_MAX: Final = 16 * 1024 * 1024
PROGRESS_SECONDS: Final = 1.0
IDLE_SECONDS: Final = 0.05
BROKEN_SECONDS: Final = 1.0
"""Between the end of a broken producer and the making of the next."""


class Deliverer:
    def __init__(
        self,
        fs: FileSystem,
        store: SpoolStore,
        spool_id: str,
        settings: Settings,
        *,
        on_trimmed: Callable[[], None] = lambda: None,
        say: Callable[[str], None] = lambda line: None,
        make: Callable[[Settings], Any] = RawProducer,
    ) -> None:
        self._fs = fs
        self._store = store
        self._id = spool_id.encode()
        self._settings = settings
        self._on_trimmed = on_trimmed
        self._say = say
        self._make = make
        progress = read_progress(fs, store.directory)
        self._window = Window(max(progress.prefix, store.start), progress.confirmed)
        self._written = progress
        self._next = self._window.prefix
        self._refused_file = RefusedMessages(fs, store.directory)
        self._lock = threading.Lock()
        self._caught_up = threading.Condition(self._lock)
        self._fresh: deque[StoredGroup] = deque()
        self._fresh_bytes = 0
        self._held: WeakValueDictionary[int, Delivery] = WeakValueDictionary()
        """Deliveries of messages that are on disk alone, as long as somebody holds them."""
        self._called_back: dict[int, Delivery] = {}
        """Those of them that somebody wants to be called back about."""
        self._wake = threading.Event()
        self._broken: str | None = None
        self.failure: StorageError | None = None
        """Why nothing more is delivered, once that is so."""
        self._is_closing = False
        self.delivered = 0
        self._refused: list[Undelivered] = []
        self._producer = make(settings)
        self._thread = threading.Thread(target=self._run, name=f"holdfast-deliver-{spool_id}", daemon=True)
        self._thread.start()

    # From other threads

    def stored(self, group: StoredGroup) -> None:
        """A group is on disk: deliver it."""
        size = group.end - group.start
        with self._lock:
            if self._fresh_bytes + size <= FRESH_BYTES_MAX:
                self._fresh.append(group)
                self._fresh_bytes += size
            else:
                self._hold(group)
        self._wake.set()

    def _hold(self, group: StoredGroup) -> None:
        """The messages will be read from disk; whoever wants to hear of them is found by their position."""
        for entry, delivery in group.messages:
            if delivery.has_callbacks:
                self._called_back[entry.position] = delivery
            else:
                self._held[entry.position] = delivery

    def take_refused(self) -> list[Undelivered]:
        with self._lock:
            refused, self._refused = self._refused, []
            return refused

    @property
    def undelivered_bytes(self) -> int:
        return self._store.end - self._window.prefix

    def wait_delivered(self, timeout: float | None) -> bool:
        """Wait until everything stored so far is delivered or set aside."""
        end = self._store.end
        with self._lock:
            self._caught_up.wait_for(lambda: self._window.prefix >= end or self.failure is not None, timeout)
        if self.failure is not None:
            raise self.failure
        return self._window.prefix >= end

    def partitions_of(self, topic: str, timeout: float) -> int | None:
        """How many partitions the broker says a topic has; None when it cannot be asked or does not know it."""
        try:
            found = self._producer.list_topics(topic, timeout=timeout).topics.get(topic)
        except KafkaException:
            return None
        return len(found.partitions) or None if found is not None and found.error is None else None

    def close(self) -> None:
        """Stop sending; what is not confirmed stays in the spool."""
        self._is_closing = True
        self._wake.set()
        self._thread.join()
        if self.failure is None:
            self._save(durably=True)
        self._refused_file.close()

    # The thread

    def _run(self) -> None:
        try:
            self._deliver()
        except (StorageError, OSError) as error:
            self.failure = error if isinstance(error, StorageError) else SpoolFailed(str(error))
            self._say(f"spool {self._id.decode()}: nothing more is delivered: {error}")
            with self._lock:
                self._caught_up.notify_all()

    def _deliver(self) -> None:
        save_due = time.monotonic() + PROGRESS_SECONDS
        while not self._is_closing:
            sent = self._send_some()
            if self._broken is not None:
                self._begin_again()
            elif sent:
                self._producer.poll(0)
            else:
                self._wait_for_work()
            if time.monotonic() >= save_due:
                self._save(durably=False)
                save_due = time.monotonic() + PROGRESS_SECONDS

    def _wait_for_work(self) -> None:
        if self._window.bytes:
            self._producer.poll(IDLE_SECONDS)
            return
        with self._lock:
            self._caught_up.notify_all()
        self._wake.wait(IDLE_SECONDS)
        self._wake.clear()
        self._producer.poll(0)

    def _send_some(self) -> bool:
        """Hand the next messages to the producer; false when there are none or enough are under way."""
        if self._window.bytes >= WINDOW_BYTES_MAX:
            return False
        group = self._next_group()
        for entry, delivery in group:
            if self._broken is not None or self._is_closing:
                return False
            self._send(entry, delivery)
            self._next = entry.end
        return bool(group)

    def _next_group(self) -> Sequence[tuple[Entry, Delivery | None]]:
        with self._lock:
            while self._fresh and self._fresh[0].start <= self._next:
                group = self._fresh.popleft()
                self._fresh_bytes -= group.end - group.start
                if group.start == self._next:
                    return group.messages
                # Some of it was read from disk already, before it was handed over.
                self._hold(group)
        entries, following = self._store.read(self._next)
        if not entries:
            self._next = following
            self._window.skip_to(following)
        return [(entry, self._delivery_of(entry.position)) for entry in entries]

    def _delivery_of(self, position: int) -> Delivery | None:
        return self._called_back.pop(position, None) or self._held.get(position)

    def _send(self, entry: Entry, delivery: Delivery | None) -> None:
        window = self._window
        window.begin(entry)
        if window.is_done(entry):
            window.done(entry)
            return
        topic, partition, key, value, headers, timestamp_ms = entry.message
        arguments: dict[str, Any] = {
            "key": key,
            "partition": partition,
            "headers": [*headers, (ID_HEADER, b"%s:%d:%d" % (self._id, partition, entry.sequence))],
            "on_delivery": partial(self._report, entry, delivery),
        }
        if timestamp_ms >= 0:
            arguments["timestamp"] = timestamp_ms
        while not self._is_closing:
            try:
                self._producer.produce(topic, value, **arguments)
            except BufferError:
                self._producer.poll(IDLE_SECONDS)
                if self._broken is not None:
                    return
            except KafkaException as refused:
                self._failed(entry, delivery, refused.args[0])
                return
            else:
                return

    def _report(
        self, entry: Entry, delivery: Delivery | None, error: KafkaError | None, message: Any
    ) -> None:
        if error is not None:
            self._failed(entry, delivery, error)
            return
        self._window.done(entry)
        self.delivered += 1
        if delivery is not None:
            delivery.set_delivered(
                Delivered(entry.message.topic, message.partition(), message.offset(), message.timestamp()[1])
            )

    def _failed(self, entry: Entry, delivery: Delivery | None, error: KafkaError) -> None:
        if error.code() not in FINAL_CODES:
            # Unconfirmed: it goes out again with everything behind it, under a new producer.
            self._broken = self._broken or error.str()
            if delivery is not None:
                self._called_back[entry.position] = delivery
            return
        refusal = failure(error, entry.message.topic, entry.message.partition)
        self._refused_file.add(Refused(entry, refusal.code, refusal.reason, time.time_ns() // 1_000_000))
        self._window.done(entry)
        message = entry.message
        with self._lock:
            self._refused.append(Undelivered(message.topic, message.partition, message.key, refusal.reason))
        if delivery is not None:
            delivery.set_failed(refusal)

    def _begin_again(self) -> None:
        self._say(
            f"spool {self._id.decode()}: sending again what is not confirmed, with a new producer: {self._broken}"
        )
        self._producer.purge()
        # The reports of what was under way come now; none of them may be taken for the new producer's.
        self._producer.poll(0)
        self._broken = None
        with self._lock:
            for group in self._fresh:
                self._hold(group)
            self._fresh.clear()
            self._fresh_bytes = 0
        self._next = self._window.restart()
        if not self._is_closing:
            time.sleep(BROKEN_SECONDS)
        self._producer = self._make(self._settings)

    def _save(self, *, durably: bool) -> None:
        progress = Progress(self._window.prefix, dict(self._window.confirmed))
        if progress != self._written or durably:
            write_progress(self._fs, self._store.directory, progress, durably=durably)
            self._written = progress
            self._store.trim(progress.prefix)
            self._on_trimmed()
        with self._lock:
            self._caught_up.notify_all()
