"""Sending through a spool: the partition is chosen, the message is stored, and a thread delivers it.

The partition is fixed when a message is stored, so that its place and its `hf-id` stay what they are, however often it
is sent and however many partitions the topic gets meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import Producer as RawProducer

from holdfast.atomic import read_whole, write_atomically
from holdfast.client.delivery import Delivery, Waiting
from holdfast.client.errors import ProducerClosed, SendTimeout, Undelivered
from holdfast.client.partitioner import StickyPartitioner, partition_of_key
from holdfast.client.settings import Settings
from holdfast.client.spool.deliverer import Deliverer
from holdfast.client.spool.format import Headers, Message, check_message
from holdfast.client.spool.home import REFUSED_DIRECTORY, OwnedSpool, SpoolHome
from holdfast.client.spool.store import SpoolStore
from holdfast.client.spool.writer import SpoolWriter
from holdfast.errors import UsageError
from holdfast.seams import FileSystem, Randomness

LAYOUT_FILE: Final = "topics.json"
LAYOUT_REFRESH_SECONDS: Final = 300.0
ASK_SECONDS: Final = 5.0


class TopicLayout:
    """How many partitions topics have: asked for once, remembered in the home for when no broker can be asked."""

    def __init__(self, fs: FileSystem, home: str) -> None:
        self._fs = fs
        self._path = f"{home}/{LAYOUT_FILE}"
        self._counts: dict[str, int] = {}
        self._asked: dict[str, float] = {}
        if fs.exists(self._path):
            try:
                known = json.loads(read_whole(fs, self._path))
                self._counts = {str(topic): int(count) for topic, count in known.items()}
            except (ValueError, AttributeError):
                self._counts = {}

    def known(self, topic: str) -> int | None:
        return self._counts.get(topic)

    def is_fresh(self, topic: str) -> bool:
        return time.monotonic() - self._asked.get(topic, -LAYOUT_REFRESH_SECONDS) < LAYOUT_REFRESH_SECONDS

    def learn(self, topic: str, count: int) -> None:
        self._asked[topic] = time.monotonic()
        if self._counts.get(topic) != count:
            self._counts[topic] = count
            write_atomically(self._fs, self._path, json.dumps(self._counts).encode())


class SpooledSender:
    def __init__(
        self,
        fs: FileSystem,
        home_path: str,
        randomness: Randomness,
        settings: Settings,
        max_bytes: int,
        *,
        say: Callable[[str], None] = lambda line: None,
        make: Callable[[Settings], Any] = RawProducer,
    ) -> None:
        self._fs = fs
        self._home = SpoolHome(fs, home_path, randomness)
        self._waiting = Waiting()
        self._sticky = StickyPartitioner(randomness)
        self._lock = threading.Lock()
        self._is_closed = False
        fs.make_directory(home_path)
        self._layout = TopicLayout(fs, home_path)
        spools = list(self._home.take_abandoned()) or [self._home.create()]
        self._own, *adopted = spools
        self._adopted: list[tuple[OwnedSpool, SpoolStore, Deliverer]] = []
        for owned in adopted:
            say(f"spool {owned.id}: its owner is gone; delivering what it left")
            store = SpoolStore(fs, owned.directory, say=say)
            deliverer = Deliverer(fs, store, owned.id, settings, say=say, make=make)
            self._adopted.append((owned, store, deliverer))
        self._store = SpoolStore(fs, self._own.directory, say=say)
        self._deliverer = Deliverer(
            fs, self._store, self._own.id, settings, on_trimmed=self._trimmed, say=say, make=make
        )
        self._writer = SpoolWriter(self._store, max_bytes, self._deliverer.stored)

    def _trimmed(self) -> None:
        writer = getattr(self, "_writer", None)
        if writer is not None:
            writer.trimmed()

    @property
    def id(self) -> str:
        return self._own.id

    # Sending

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
        if self._is_closed:
            raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")
        if partition is None:
            partition = self._choose(topic, key, value, timeout)
        message = Message(topic, partition, key, value, headers, timestamp_ms)
        try:
            check_message(message)
        except ValueError as error:
            raise UsageError(f"no Kafka message can have {error}") from error
        delivery = Delivery(self._waiting, topic, partition, key)
        self._writer.put(message, delivery, timeout)
        return delivery

    def _choose(self, topic: str, key: bytes | None, value: bytes | None, timeout: float) -> int:
        count = self._layout.known(topic) if self._layout.is_fresh(topic) else self._ask(topic, timeout)
        if key is not None:
            return partition_of_key(key, count or 1)
        return self._sticky.choose(topic, len(value or b""), count or 1)

    def _ask(self, topic: str, timeout: float) -> int:
        with self._lock:
            known = self._layout.known(topic)
            if self._layout.is_fresh(topic) and known is not None:
                return known
            count = self._deliverer.partitions_of(topic, min(timeout, ASK_SECONDS))
            if count is not None:
                self._layout.learn(topic, count)
                return count
            if known is not None:
                self._layout.learn(topic, known)
                return known
            raise SendTimeout(
                f"no broker could say how many partitions {topic} has, and this spool has never known"
            )

    # Ending

    @property
    def delivered(self) -> int:
        return self._deliverer.delivered

    def take_refused(self) -> list[Undelivered]:
        return [
            *self._deliverer.take_refused(),
            *(refused for _, _, deliverer in self._adopted for refused in deliverer.take_refused()),
        ]

    @property
    def undelivered(self) -> list[Undelivered]:
        """Nothing that is stored can be lost, so nothing here is in danger."""
        return []

    def flush(self, timeout: float | None) -> int:
        """Wait until everything is delivered; returns how many bytes of the spool are not."""
        deadline = None if timeout is None else time.monotonic() + timeout
        self._writer.wait_stored(timeout)
        for deliverer in (self._deliverer, *(each for _, _, each in self._adopted)):
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            deliverer.wait_delivered(left)
        return self._deliverer.undelivered_bytes

    def close(self) -> None:
        self._is_closed = True
        self._writer.close()
        self._deliverer.close()
        for owned, store, deliverer in self._adopted:
            deliverer.close()
            store.close()
            is_empty = deliverer.undelivered_bytes == 0 and deliverer.failure is None
            if is_empty and not self._fs.exists(f"{owned.directory}/{REFUSED_DIRECTORY}"):
                self._home.remove(owned)
            else:
                owned.lock.release()
        # Our own stays, empty or not: the next process that opens the home goes on with it, and with its id.
        self._store.close()
        self._own.lock.release()
