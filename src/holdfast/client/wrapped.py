"""For programs that have a `confluent_kafka.Producer` already: one line changes, and no message is lost silently.

    producer = wrap({"bootstrap.servers": "localhost:9092", "compression.type": "zstd"}, spool="/var/spool/orders")
    producer.produce("orders", b"...", key=b"7", on_delivery=report)
    producer.poll(0)
    producer.flush()

`produce`, `poll`, `flush` and `len` are confluent-kafka's: callbacks come from `poll` and `flush`, in the thread that
calls them. What is different: settings that lose messages are refused with an explanation, failures without a callback
are named when the producer is closed or the program ends, a full queue makes `produce` wait before it raises
`BufferError`, and with a spool a message is safe on disk soon after `produce` returned.
Keys go to the partitions they have always gone to: without the setting `partitioner`, to librdkafka's own choice.

With a spool, the message that a callback gets has no value: it may be hours old, and is not kept in memory.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Final, TypeAlias

from confluent_kafka import OFFSET_INVALID, TIMESTAMP_CREATE_TIME, KafkaError, Message
from confluent_kafka.admin import AdminClient

from holdfast.client import exit_guard
from holdfast.client.delivery import Delivery, Waiting
from holdfast.client.errors import ClientError, DeliveryFailed, NotStored, SendTimeout
from holdfast.client.producer import (
    CLOSE_SECONDS,
    SEND_TIMEOUT_SECONDS,
    SPOOL_MAX_BYTES,
    EndsWithItsBlock,
    FlushReport,
    Guarantee,
    HeadersLike,
    Producer,
)
from holdfast.client.settings import ALIASES, admin_settings
from holdfast.client.spool.store import SpoolFull
from holdfast.errors import UsageError

Report: TypeAlias = Callable[[KafkaError | None, Message], None]

LIBRDKAFKA_PARTITIONER: Final = "consistent_random"
_BOOTSTRAP: Final = "bootstrap.servers"
_CALLBACKS: Final = ("on_delivery", "dr_cb", "dr_msg_cb")


def wrap(
    config: Mapping[str, Any],
    *,
    spool: str | Path | None = None,
    delivery: Guarantee = "at-least-once",
    unsafe: Collection[str] = (),
    send_timeout: float = SEND_TIMEOUT_SECONDS,
    spool_max_bytes: int = SPOOL_MAX_BYTES,
) -> WrappedProducer:
    """A producer with confluent-kafka's methods and our guarantees, from confluent-kafka's settings."""
    given = {ALIASES.get(name, name): value for name, value in config.items()}
    bootstrap = given.pop(_BOOTSTRAP, None)
    if not bootstrap:
        raise UsageError(f"{_BOOTSTRAP} is missing")
    on_delivery = next((given.pop(name) for name in _CALLBACKS if name in given), None)
    producer = Producer(
        str(bootstrap),
        spool=spool,
        delivery=delivery,
        partitioner=str(given.pop("partitioner", LIBRDKAFKA_PARTITIONER)),
        config=given,
        unsafe=unsafe,
        send_timeout=send_timeout,
        spool_max_bytes=spool_max_bytes,
    )
    return WrappedProducer(
        producer,
        {_BOOTSTRAP: bootstrap, **given},
        on_delivery=on_delivery,
        send_timeout=send_timeout,
        keeps_values=spool is None,
    )


class WrappedProducer(EndsWithItsBlock):
    def __init__(
        self,
        producer: Producer,
        settings: Mapping[str, Any],
        *,
        on_delivery: Report | None,
        send_timeout: float,
        keeps_values: bool,
    ) -> None:
        self._producer = producer
        self._settings = settings
        self._on_delivery = on_delivery
        self._send_timeout = send_timeout
        self._keeps_values = keeps_values
        self._reports: deque[tuple[Report, Delivery, bytes | None]] = deque()
        """What callbacks are to be called with; whoever polls calls them."""
        self._waiting = Waiting()
        """Those who poll."""
        self._called_back: set[object] = set()
        """Of each message with a callback that is under way, or waits for `poll`."""
        self._admin: Any = None
        # Watched here, with its callbacks, and not twice.
        exit_guard.unwatch(producer)
        exit_guard.watch(self)

    def __len__(self) -> int:
        """How many messages are under way, or have a callback to be called."""
        return self._producer.under_way + len(self._reports)

    @property
    def set_aside(self) -> int:
        """See `Producer.set_aside`."""
        return self._producer.set_aside

    @property
    def waiting(self) -> list[str]:
        """See `Producer.waiting`."""
        return self._producer.waiting

    # Sending

    def produce(
        self,
        topic: str,
        value: bytes | str | None = None,
        key: bytes | str | None = None,
        partition: int = -1,
        callback: Report | None = None,
        on_delivery: Report | None = None,
        timestamp: int = 0,
        headers: HeadersLike | None = None,
    ) -> None:
        """Raises `BufferError` when there was no room in time, and nothing was taken."""
        try:
            delivery = self._producer.send(
                topic,
                value,
                key=key,
                headers=headers or (),
                partition=None if partition < 0 else partition,
                timestamp_ms=timestamp or -1,
            )
        except (SendTimeout, SpoolFull) as full:
            raise BufferError(str(full)) from full
        report = callback or on_delivery or self._on_delivery
        if report is not None:
            kept = value.encode() if isinstance(value, str) else value
            self._attach(delivery, report, kept if self._keeps_values else None)

    def _attach(self, delivery: Delivery, report: Report, value: bytes | None) -> None:
        def keep(delivery: Delivery) -> None:
            self._reports.append((report, delivery, value))
            self._called_back.discard(keep)
            self._waiting.wake()

        self._called_back.add(keep)
        delivery.notify(keep)

    # Reports

    def poll(self, timeout: float = -1) -> int:
        """Call the callbacks of what was delivered or has failed; returns how many. Waits for one so many seconds."""
        if not self._reports and timeout:
            self._waiting.wait(lambda: bool(self._reports), None if timeout < 0 else timeout)
        served = 0
        while self._reports:
            report, delivery, value = self._reports.popleft()
            report(*_as_reported(delivery, value))
            # Only now: a signal may keep the callback from being called, or from its end.
            delivery.set_told()
            served += 1
        return served

    def flush(self, timeout: float = -1) -> int:
        """Wait until everything is delivered or has failed, and call the callbacks; returns how much is left."""
        deadline = None if timeout < 0 else time.monotonic() + timeout
        self._producer.wait_settled(None if timeout < 0 else timeout)
        self.poll(0)
        while self._called_back:
            # The last callbacks are on their way from the thread that settles.
            left = 0.1 if deadline is None else min(0.1, deadline - time.monotonic())
            if left <= 0 or (not self.poll(left) and not self._producer.under_way and not self._reports):
                break
        return len(self)

    def purge(self, *arguments: object, **named: object) -> None:
        """Refused: it gives messages up that somebody handed over."""
        raise UsageError("purge gives up messages that were handed over (HF101); close the producer instead")

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        if self._admin is None:
            self._admin = AdminClient(admin_settings(self._settings))
        return self._admin.list_topics(topic, timeout) if topic else self._admin.list_topics(timeout=timeout)

    # Ending

    def report(self, timeout: float | None = None) -> FlushReport:
        """What became of everything; see `Producer.flush`."""
        return self._producer.flush(timeout)

    def close(self, timeout: float | None = None) -> bool:
        """Deliver what is under way, call the callbacks, and end. Raises `UndeliveredMessages` for what has none."""
        if self._producer.is_closed and not self._reports:
            return True
        if timeout is None and not self._keeps_values:
            timeout = CLOSE_SECONDS
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            if not self._producer.is_closed:
                self.flush(-1 if timeout is None else timeout)
            self._producer.close(None if deadline is None else max(0.0, deadline - time.monotonic()))
        finally:
            if self._producer.is_closed:
                exit_guard.unwatch(self)
            self.poll(0)
        return True

    def abandon(self, timeout: float) -> int:
        """The program ends: callbacks that nobody called are called now; see `Producer.abandon`."""
        lost = self._producer.abandon(timeout)
        self.poll(0)
        return lost

    def orphan(self) -> None:
        """See `Producer.orphan`; what waits for `poll` is the parent's."""
        self._producer.orphan()
        self._reports.clear()
        self._called_back.clear()


def _as_reported(delivery: Delivery, value: bytes | None) -> tuple[KafkaError | None, Message]:
    """A delivery as confluent-kafka reports it."""
    place = delivery.delivered
    if place is not None:
        timestamp = (TIMESTAMP_CREATE_TIME, place.timestamp_ms)
        return None, Message(
            place.topic, place.partition, place.offset, delivery.key, value, None, None, timestamp
        )
    error = _as_error(delivery.error)
    partition = -1 if delivery.partition is None else delivery.partition
    return error, Message(delivery.topic, partition, OFFSET_INVALID, delivery.key, value, None, error)


def _as_error(failure: ClientError | None) -> KafkaError:
    if isinstance(failure, DeliveryFailed):
        return KafkaError(getattr(KafkaError, failure.code, KafkaError._FAIL), failure.reason)
    code = KafkaError._QUEUE_FULL if isinstance(failure, NotStored) else KafkaError._FAIL
    return KafkaError(code, str(failure))
