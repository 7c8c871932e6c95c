"""Sending without a spool: librdkafka's memory is the only store, and nothing in it is forgotten silently.

Delivery reports are served without the application polling: by the thread that sends, every so many messages, by
whoever waits, and by a thread of ours while nobody does either. Two threads that serve at once would hand Python's lock
to and fro for every report, which costs more than all the rest.

Every message that was handed over is remembered until its report has come; what is left when the producer is closed is
named.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import TIMESTAMP_NOT_AVAILABLE, KafkaError, KafkaException
from confluent_kafka import Producer as RawProducer

from holdfast.client.delivery import Delivered, Delivery, Waiting
from holdfast.client.errors import DeliveryFailed, ProducerClosed, SendTimeout, Undelivered
from holdfast.client.settings import Settings
from holdfast.client.spool.format import Headers

SERVE_SECONDS: Final = 0.05
ASIDE_SECONDS: Final = 0.005
"""How long our thread stays aside while the application sends, and so serves."""
SERVE_EVERY: Final = 64
"""Messages between two servings by the thread that sends."""
FULL_WAIT_SECONDS: Final = 0.05
"""How long to serve reports before trying again to hand a message to a full queue."""

FINAL_CODES: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.INVALID_RECORD,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    )
)
"""Errors that no further attempt can mend: the message itself is refused."""


def failure(error: KafkaError, topic: str, partition: int | None) -> DeliveryFailed:
    return DeliveryFailed(
        error.str(),
        code=error.name(),
        is_final=error.code() in FINAL_CODES,
        topic=topic,
        partition=partition,
    )


class _DirectDelivery(Delivery):
    """A delivery that librdkafka reports on."""

    __slots__ = ("_sender",)

    def __init__(
        self, sender: DirectSender, waiting: Waiting, topic: str, partition: int | None, key: bytes | None
    ) -> None:
        super().__init__(waiting, topic, partition, key)
        self._sender = sender

    def report(self, error: KafkaError | None, message: Any) -> None:
        sender = self._sender
        if error is None:
            sender.delivered += 1
            kind, timestamp_ms = message.timestamp()
            if kind == TIMESTAMP_NOT_AVAILABLE:
                timestamp_ms = -1
            # The settling comes first: whoever finds nothing under way must find every outcome in its place.
            self.set_delivered(Delivered(self.topic, message.partition(), message.offset(), timestamp_ms))
        else:
            sender.refuse(self, error)
        sender.under_way.discard(self)


class DirectSender:
    """Messages go straight to librdkafka."""

    def __init__(self, settings: Settings, make: Callable[[Settings], Any] = RawProducer) -> None:
        self._producer = make({"partitioner": "murmur2_random", **settings})
        self._waiting = Waiting(self._producer.poll)
        self._sent = 0
        self.under_way: set[Delivery] = set()
        """Handed over and not reported on."""
        self.delivered = 0
        self._refused: list[Undelivered] = []
        self._is_closed = False
        self._poller = threading.Thread(target=self._serve, name="holdfast-deliveries", daemon=True)
        self._poller.start()

    def _serve(self) -> None:
        seen = 0
        while not self._is_closed:
            if self._sent != seen:
                seen = self._sent
                time.sleep(ASIDE_SECONDS)
            elif not self._waiting.serve(SERVE_SECONDS):
                time.sleep(ASIDE_SECONDS)

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
        delivery = _DirectDelivery(self, self._waiting, topic, partition, key)
        arguments: dict[str, Any] = {"key": key, "on_delivery": delivery.report}
        if headers:
            arguments["headers"] = list(headers)
        if partition is not None:
            arguments["partition"] = partition
        if timestamp_ms >= 0:
            arguments["timestamp"] = timestamp_ms
        self.under_way.add(delivery)
        try:
            self._hand_over(topic, value, arguments, timeout)
        except KafkaException as refused:
            self.refuse(delivery, refused.args[0])
            self.under_way.discard(delivery)
        except BaseException:
            self.under_way.discard(delivery)
            raise
        self._sent += 1
        if self._sent % SERVE_EVERY == 0:
            self._producer.poll(0)
        return delivery

    def refuse(self, delivery: Delivery, error: KafkaError) -> None:
        delivery.set_failed(failure(error, delivery.topic, delivery.partition))
        self._refused.append(delivery.as_undelivered())

    def _hand_over(self, topic: str, value: bytes | None, arguments: dict[str, Any], timeout: float) -> None:
        try:
            self._producer.produce(topic, value, **arguments)
        except BufferError:
            self._hand_over_when_there_is_room(topic, value, arguments, time.monotonic() + timeout)

    def _hand_over_when_there_is_room(
        self, topic: str, value: bytes | None, arguments: dict[str, Any], deadline: float
    ) -> None:
        while True:
            self._producer.poll(FULL_WAIT_SECONDS)
            try:
                self._producer.produce(topic, value, **arguments)
            except BufferError as full:
                if time.monotonic() >= deadline:
                    raise SendTimeout(
                        f"no room for a message for {topic}: {len(self.under_way)} messages wait for the broker"
                    ) from full
            else:
                return

    # Ending

    def take_refused(self) -> list[Undelivered]:
        """What failed since the last call."""
        refused, self._refused = self._refused, []
        return refused

    @property
    def undelivered(self) -> list[Undelivered]:
        return [delivery.as_undelivered() for delivery in list(self.under_way)]

    def flush(self, timeout: float | None) -> int:
        """Wait until every message is reported on; returns how many are not."""
        self._waiting.wait(lambda: not self.under_way, timeout)
        return len(self.under_way)

    def close(self) -> None:
        self._is_closed = True
        self._poller.join()
        self._producer.poll(0)
