"""Sending without a spool: librdkafka's memory is the only store, and nothing in it is forgotten silently.

Delivery reports are served without the application polling: by the thread that sends, every so many messages and when
some are due, by whoever waits, and by a thread of ours while nobody does either. A thread that serves hands Python's
lock back after every report, and gets it again only when the others let go of it: while the application is busy
sending, reports cost least where it is.

librdkafka remembers every message that was handed over until its report has come, and reports on what is left when the
producer is closed: it is named. When the producer breaks (a fatal error) what it had under way has failed, and is
reported so; a new one takes what is sent from then on.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from sys import getrefcount
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as RawProducer

from holdfast.client.delivery import Delivery, Failures, SendMethod, Waiting
from holdfast.client.errors import DeliveryFailed, LeftBehind, ProducerClosed, SendTimeout, Undelivered
from holdfast.client.settings import Settings
from holdfast.client.spool.format import Headers

LOOK_SECONDS: Final = 0.002
ASIDE_SECONDS: Final = 0.005
"""How long our thread stays aside while the application sends, and so serves."""
IDLE_SECONDS: Final = 1.0
"""Between two looks at a producer that has nothing under way: it may have errors to log."""
BUSY_MESSAGES: Final = 16
"""An application that sends so many between two looks is busy."""
FAST_MESSAGES: Final = 500
"""And one that sends so many is fast: more than about fifty thousand a second. See `evenly`."""
BEHIND_SHARE: Final = 256
"""What part of all that is under way a fast application hears of at a time beside: after a broker was away, what it is
behind melts within a second."""
SERVE_MASK: Final = 255
"""The thread that sends serves after every 256th message, or when our thread says that it is time."""
FULL_WAIT_SECONDS: Final = 0.05
"""How long to serve reports before trying again to hand a message to a full queue."""
UNHELD_REFERENCES: Final = 3
"""To a delivery that nobody holds, while it is reported on: librdkafka's, the call's and that of whoever counts. Were
they fewer than counted, values would be kept as long as their deliveries, and nothing else would be wrong."""
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
PURGED_CODES: Final = frozenset((KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT))
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


def _refuse_late(topic: str, *message: object) -> None:
    raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")


def evenly(sent: int) -> int:
    """How many messages to be done with, for an application that has sent so many since it was asked last.

    Reports come by the batch, ten thousand at a time. Python's cycle collector goes by how many more objects were made
    than freed: an application that frees about as many messages as it makes does not set it to work, and one that frees
    them ten thousand at a time has it walk over all that is under way. Nor does the application stand still for long.
    """
    return sent + sent // 16 + 1


class _Enough(Exception):
    """So many reports were served; librdkafka keeps the others, in their order, for the next poll."""


def _kind_of(sender: DirectSender, waiting: Waiting) -> Callable[[], Delivery]:
    """Makes deliveries that librdkafka calls to report on their messages.

    They are empty: whoever makes one sets all that there is to it, without a call. What all of them share stands with
    the kind and not in each of them.
    """

    def report(self: Delivery, error: KafkaError | None, message: Any) -> None:
        if error is None:
            if getrefcount(self) > UNHELD_REFERENCES:
                # Somebody holds the delivery, and shall not hold the value with it.
                message.set_value(None)
            self._place = message
            if self._hooks is not None:
                self.call_back()
            sender.delivered = delivered = sender.delivered + 1
            if delivered == sender.enough:
                raise _Enough
        else:
            sender.refuse(self, error)

    shared = {"__slots__": (), "_waiting": waiting, "__init__": object.__init__, "__call__": report}
    return type("Delivery", (Delivery,), shared)


class DirectSender:
    """Messages go straight to librdkafka."""

    def __init__(self, settings: Settings, make: Callable[[Settings], Any] = RawProducer) -> None:
        self._settings: Settings = {"partitioner": "murmur2_random", **settings}
        self._make = make
        self._producer: Any = make(self._settings)
        self._produce: Any = self._producer.produce
        self._replacing = threading.Lock()
        self._waiting = Waiting(self._serve)
        self._kind = _kind_of(self, self._waiting)
        self._sent = 0
        self.delivered = 0
        self.enough = 0
        """At which number of delivered messages no more are heard of for now."""
        self._failures = Failures()
        self._is_ending = False
        """Whether reports are of messages that are given up."""
        self._is_due = False
        """Whether the thread that sends next shall serve."""
        self._is_idle = False
        self._is_fast = False
        self._attended_at = 0
        """What had been sent when the application served last."""
        self._counting = threading.Lock()
        self._flushing = 0
        """How many wait for everything: nothing waits for company (linger.ms) meanwhile."""
        self._wake = threading.Event()
        self._is_closed = False
        self._poller = threading.Thread(target=self._run, name="holdfast-deliveries", daemon=True)
        self._poller.start()

    # Reports

    def _run(self) -> None:
        seen = 0
        while not self._is_closed:
            self._is_fast = self._sent - seen >= FAST_MESSAGES
            if self._sent - seen >= BUSY_MESSAGES:
                seen = self._sent
                self._is_due = True
                time.sleep(ASIDE_SECONDS)
                continue
            seen = self._sent
            if not self.left:
                self._rest()
                continue
            # Reports are looked for, not waited for: the application may become busy meanwhile.
            self._waiting.serve(0)
            time.sleep(LOOK_SECONDS)

    def _rest(self) -> None:
        self._is_idle = True
        self._is_due = True  # the next to send wakes this thread
        if not self.left:
            self._wake.wait(IDLE_SECONDS)
        self._is_idle = False
        self._wake.clear()
        self._waiting.serve(0)

    def _serve(self, seconds: float) -> None:
        producer = self._producer
        try:
            if self._flushing and seconds:
                producer.flush(seconds)
            else:
                producer.poll(seconds)
        except _Enough:
            pass
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
            self._empty(broken)

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
        delivery = self._kind()
        delivery.topic = topic
        delivery.key = key
        delivery.partition = partition
        delivery.error = delivery._place = delivery._hooks = None
        try:
            if partition is None and not headers and timestamp_ms <= 0:
                # Most messages; what is not said need not be looked at.
                self._produce(topic, value, key, UNASSIGNED, delivery)
            else:
                self._produce(
                    topic,
                    value,
                    key,
                    UNASSIGNED if partition is None else partition,
                    delivery,
                    None,
                    max(timestamp_ms, 0),
                    list(headers) if headers else None,
                )
        except (BufferError, KafkaException) as problem:
            self._hand_over_again(delivery, problem, value, headers, timestamp_ms, timeout)
        self._sent = sent = self._sent + 1
        if self._is_due or not sent & SERVE_MASK:
            self._attend()
        return delivery

    def method(self, otherwise: SendMethod, timeout: float) -> SendMethod:
        """`Producer.send` in one call for messages that are bytes and nothing unusual; `otherwise` sends the others.

        A message costs about two microseconds in all; a call of one Python function by another, and the making of an
        object by its `__init__`, are a tenth of that each.
        """
        kind = self._kind

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
                or timestamp_ms > 0
            ):
                return otherwise(
                    topic, value, key=key, headers=headers, partition=partition, timestamp_ms=timestamp_ms
                )
            delivery = kind()
            delivery.topic = topic
            delivery.key = key
            delivery.partition = delivery.error = delivery._place = delivery._hooks = None
            try:
                self._produce(topic, value, key, UNASSIGNED, delivery)
            except (BufferError, KafkaException) as problem:
                self._hand_over_again(delivery, problem, value, (), 0, timeout)
            self._sent = sent = self._sent + 1
            if self._is_due or not sent & SERVE_MASK:
                self._attend()
            return delivery

        return send

    def _attend(self) -> None:
        """What the thread that sends does now and then: serve reports, and wake our own thread."""
        self._is_due = False
        sent, self._attended_at = self._sent - self._attended_at, self._sent
        if self._is_fast:
            self.enough = self.delivered + evenly(sent) + self.left // BEHIND_SHARE
        self._waiting.serve(0)
        self.enough = 0
        if self._is_idle:
            self._is_idle = False
            self._wake.set()

    def _hand_over_again(
        self,
        delivery: Delivery,
        problem: BufferError | KafkaException,
        value: bytes | None,
        headers: Headers,
        timestamp_ms: int,
        timeout: float,
    ) -> None:
        """The queue was full, the producer broken, or the message refused: try until it is clear which."""
        deadline = time.monotonic() + timeout
        # Whose problem the first one was is not known: another thread may have put a new producer in its place.
        producer: Any = None
        while self._may_try_again(producer, problem, delivery, deadline):
            producer = self._producer
            try:
                producer.produce(
                    delivery.topic,
                    value,
                    delivery.key,
                    UNASSIGNED if delivery.partition is None else delivery.partition,
                    delivery,
                    None,
                    max(timestamp_ms, 0),
                    list(headers) if headers else None,
                )
            except (BufferError, KafkaException) as again:
                problem = again
            else:
                return

    def _may_try_again(
        self,
        producer: Any,
        problem: BufferError | KafkaException,
        delivery: Delivery,
        deadline: float,
    ) -> bool:
        if isinstance(problem, KafkaException):
            if not is_fatal(problem.args[0]):
                self.refuse(delivery, problem.args[0])
                return False
            if producer is not None:
                self._replace(producer, problem)
        else:
            self._serve(max(0.0, min(FULL_WAIT_SECONDS, deadline - time.monotonic())))
        if time.monotonic() >= deadline:
            raise SendTimeout(
                f"no room for a message for {delivery.topic}: {self.left} messages wait for the broker"
            ) from problem
        return True

    def refuse(self, delivery: Delivery, error: KafkaError) -> None:
        failed = failure(error, delivery.topic, delivery.partition)
        if self._is_ending and error.code() in PURGED_CODES:
            failed = DeliveryFailed(
                "no answer when the producer was closed",
                code=error.name(),
                is_final=False,
                topic=delivery.topic,
                partition=delivery.partition,
            )
        delivery.set_failed(failed)
        # Who hears of it only now, because the producer ends, could not do anything about it.
        self._failures.add(delivery, although_told=self._is_ending)

    # Ending

    def take_refused(self) -> tuple[list[Undelivered], int]:
        """What failed since the last call and nobody was told of, and how many."""
        return self._failures.take()

    @property
    def left(self) -> int:
        """How many messages are handed over and not reported on."""
        producer = self._producer
        return 0 if producer is None else len(producer)

    def flush(self, timeout: float | None) -> int:
        """Wait until every message is reported on; returns how many are not."""
        with self._counting:
            self._flushing += 1
        try:
            self._waiting.wait(lambda: not self.left, timeout)
        finally:
            with self._counting:
                self._flushing -= 1
        return self.left

    def close(self) -> LeftBehind:
        self._is_closed = True
        self._wake.set()
        self._poller.join()
        self._is_ending = True
        producer, self._producer, self._produce = self._producer, None, _refuse_late
        unheard = self._empty(producer)
        named, total = self._failures.take()
        self._waiting.wake()
        return LeftBehind(named, total + unheard)

    def _empty(self, producer: Any) -> int:
        """Have a producer report on all that it has, and give it up; returns how many it did not report on."""
        producer.purge()
        deadline = time.monotonic() + PURGE_SECONDS
        while len(producer) and time.monotonic() < deadline:
            try:
                producer.poll(FULL_WAIT_SECONDS)
            except _Enough:
                # Somebody else is still sending.
                continue
            except KafkaException as error:
                if not is_fatal(error.args[0]):
                    raise
        return len(producer)
