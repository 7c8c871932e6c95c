"""Sending without a spool: librdkafka's memory is the only store, and nothing in it is forgotten silently.

Delivery reports are served without the application polling: by the thread that sends, every so many messages and when
some are due, by whoever waits, and by a thread of ours while nobody does either. A thread that serves hands Python's
lock back after every report, and gets it again only when the others let go of it: while the application is busy
sending, reports cost least where it is.

Every message that was handed over is remembered until its report has come; what is left when the producer is closed is
named. When the producer breaks (a fatal error) what it had under way has failed, and is reported so; a new one takes
what is sent from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as RawProducer

from holdfast.client.delivery import Delivery, Failures, Waiting
from holdfast.client.errors import DeliveryFailed, LeftBehind, ProducerClosed, SendTimeout, Undelivered
from holdfast.client.settings import Settings
from holdfast.client.spool.format import Headers

SERVE_SECONDS: Final = 0.02
ASIDE_SECONDS: Final = 0.005
"""How long our thread stays aside while the application sends, and so serves."""
IDLE_SECONDS: Final = 1.0
"""Between two looks at a producer that has nothing under way: it may have errors to log."""
SERVE_MASK: Final = 63
"""The thread that sends serves after every 64th message."""
FULL_WAIT_SECONDS: Final = 0.05
"""How long to serve reports before trying again to hand a message to a full queue."""
PURGE_SECONDS: Final = 10.0
"""How long a broken producer may take to report on what it had under way."""

REFUSED_CODES: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.TOPIC_EXCEPTION,
    )
)
"""Errors of a topic: none of its messages can arrive."""
BATCH_CODES: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
    )
)
"""Errors of a message that no attempt can mend; a broker may give them to a whole batch for one message's sake."""
FINAL_CODES: Final = REFUSED_CODES | BATCH_CODES
UNASSIGNED: Final = -1
"""librdkafka's word for a partition that it shall choose."""


def failure(error: KafkaError, topic: str, partition: int | None) -> DeliveryFailed:
    return DeliveryFailed(
        error.str(),
        code=error.name(),
        is_final=error.code() in FINAL_CODES,
        topic=topic,
        partition=partition,
    )


def is_fatal(error: KafkaError) -> bool:
    """Whether the producer that says so is of no more use."""
    return bool(error.fatal()) or error.code() == KafkaError._FATAL


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
        # The settling comes first: whoever finds nothing under way must find every outcome in its place.
        if error is None:
            self._place = (message.partition(), message.offset(), message.timestamp()[1])
            sender.delivered += 1
            if self._callbacks or self._stored_callbacks:
                self._call_back()
        else:
            sender.refuse(self, error)
        sender.under_way.discard(self)


class DirectSender:
    """Messages go straight to librdkafka."""

    def __init__(self, settings: Settings, make: Callable[[Settings], Any] = RawProducer) -> None:
        self._settings: Settings = {"partitioner": "murmur2_random", **settings}
        self._make = make
        self._producer: Any = make(self._settings)
        self._produce: Any = self._producer.produce
        self._replacing = threading.Lock()
        self._waiting = Waiting(self._serve)
        self._sent = 0
        self.under_way: set[Delivery] = set()
        """Handed over and not reported on."""
        self.delivered = 0
        self._failures = Failures()
        self._is_due = False
        """Whether the thread that sends next shall serve."""
        self._is_idle = False
        self._wake = threading.Event()
        self._is_closed = False
        self._poller = threading.Thread(target=self._run, name="holdfast-deliveries", daemon=True)
        self._poller.start()

    # Reports

    def _run(self) -> None:
        seen = 0
        while not self._is_closed:
            if self._sent != seen:
                seen = self._sent
                self._is_due = True
                time.sleep(ASIDE_SECONDS)
            elif self.under_way:
                if not self._waiting.serve(SERVE_SECONDS):
                    time.sleep(ASIDE_SECONDS)
            else:
                self._rest()

    def _rest(self) -> None:
        self._is_idle = True
        if not self.under_way:
            self._wake.wait(IDLE_SECONDS)
        self._is_idle = False
        self._wake.clear()
        self._waiting.serve(0)

    def _serve(self, seconds: float) -> None:
        producer = self._producer
        try:
            producer.poll(seconds)
        except KafkaException as broken:
            self._replace(producer, broken)

    def _replace(self, broken: Any, why: KafkaException) -> None:
        """The producer is of no more use: let it report on what it had, and go on with another."""
        if not is_fatal(why.args[0]):
            raise why
        with self._replacing:
            if self._producer is not broken:
                return
            self._producer = self._make(self._settings)
            self._produce = self._producer.produce
            broken.purge()
            deadline = time.monotonic() + PURGE_SECONDS
            while len(broken) and time.monotonic() < deadline:
                try:
                    broken.poll(FULL_WAIT_SECONDS)
                except KafkaException as again:
                    if not is_fatal(again.args[0]):
                        raise

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
        delivery = _DirectDelivery(self, self._waiting, topic, partition, key)
        self.under_way.add(delivery)
        try:
            self._produce(
                topic,
                value,
                key,
                UNASSIGNED if partition is None else partition,
                delivery.report,
                None,
                timestamp_ms if timestamp_ms > 0 else 0,
                list(headers) if headers else None,
            )
        except (BufferError, KafkaException) as problem:
            self._hand_over_again(delivery, problem, value, headers, timestamp_ms, timeout)
        except BaseException:
            self.under_way.discard(delivery)
            raise
        self._sent = sent = self._sent + 1
        if self._is_due or not sent & SERVE_MASK:
            self._is_due = False
            self._waiting.serve(0)
        if self._is_idle:
            self._wake.set()
        return delivery

    def _hand_over_again(
        self,
        delivery: _DirectDelivery,
        problem: BufferError | KafkaException,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        timeout: float,
    ) -> None:
        """The queue was full, the producer broken, or the message refused: try until it is clear which."""
        deadline = time.monotonic() + timeout
        producer = self._producer
        try:
            while self._may_try_again(producer, problem, delivery, deadline):
                producer = self._producer
                try:
                    producer.produce(
                        delivery.topic,
                        value,
                        delivery.key,
                        UNASSIGNED if delivery.partition is None else delivery.partition,
                        delivery.report,
                        None,
                        timestamp_ms if timestamp_ms > 0 else 0,
                        list(headers) if headers else None,
                    )
                except (BufferError, KafkaException) as again:
                    problem = again
                else:
                    return
        except BaseException:
            self.under_way.discard(delivery)
            raise

    def _may_try_again(
        self,
        producer: Any,
        problem: BufferError | KafkaException,
        delivery: _DirectDelivery,
        deadline: float,
    ) -> bool:
        if isinstance(problem, KafkaException):
            if not is_fatal(problem.args[0]):
                self.refuse(delivery, problem.args[0])
                self.under_way.discard(delivery)
                return False
            self._replace(producer, problem)
        else:
            self._serve(max(0.0, min(FULL_WAIT_SECONDS, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            raise SendTimeout(
                f"no room for a message for {delivery.topic}: {len(self.under_way) - 1} messages wait for the broker"
            ) from problem
        return True

    def refuse(self, delivery: Delivery, error: KafkaError) -> None:
        delivery.set_failed(failure(error, delivery.topic, delivery.partition))
        self._failures.add(delivery)

    # Ending

    def take_refused(self) -> tuple[list[Undelivered], int]:
        """What failed since the last call and nobody was told of, and how many."""
        return self._failures.take()

    @property
    def left(self) -> int:
        return len(self.under_way)

    def flush(self, timeout: float | None) -> int:
        """Wait until every message is reported on; returns how many are not."""
        self._waiting.wait(lambda: not self.under_way, timeout)
        return len(self.under_way)

    def close(self) -> LeftBehind:
        self._is_closed = True
        self._wake.set()
        self._poller.join()
        refused, count = self._failures.take()
        left = [delivery.as_undelivered() for delivery in list(self.under_way)]
        # What is still here has been named; whoever waits for it is told too.
        producer, self._producer, self._produce = self._producer, None, None
        producer.purge(blocking=False)
        producer.poll(0)
        return LeftBehind([*refused, *left], count + len(left))
