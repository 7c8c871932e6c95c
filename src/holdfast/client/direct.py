"""Sending without a spool: librdkafka's memory is the only store, and nothing in it is forgotten silently.

Delivery reports are served by a thread of ours, without the application polling: no signal handler runs there, so none
can interrupt the settling of a message. A thread that serves hands Python's lock back after every report, and gets it
again only when the others let go of it. So while the application is busy sending, it gives our thread a *turn* every so
many messages: it waits until what is there was served. A signal interrupts this waiting, and nothing else.

librdkafka remembers every message that was handed over until its report has come, and reports on what is left when the
producer is closed: it is named. When the producer breaks (a fatal error) what it had under way has failed, and is
reported so; a new one takes what is sent from then on.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import Any, Final

from confluent_kafka import KafkaError, KafkaException
from confluent_kafka import Producer as RawProducer

from holdfast.client.delivery import Bell, Delivery, Failures, Seen, Waiting
from holdfast.client.errors import (
    ClientError,
    DeliveryFailed,
    LeftBehind,
    ProducerClosed,
    SendTimeout,
)
from holdfast.client.settings import Settings
from holdfast.client.spool.format import Headers

_log = logging.getLogger(__name__)

LOOK_SECONDS: Final = 0.005
"""How long our thread waits for a report at a time, while an application that sends little has some under way."""
ASIDE_SECONDS: Final = 0.005
"""How long our thread waits for its turn while the application sends much."""
IDLE_SECONDS: Final = 1.0
"""Between two looks at a producer that has nothing under way: it may have errors to log."""
BUSY_MESSAGES: Final = 16
"""An application that sends so many between two looks is busy."""
FAST_MESSAGES: Final = 200
"""And one that sends so many between two turns is fast. See `evenly`."""
BEHIND_SHARE: Final = 256
"""What part of all that is under way a fast application hears of at a time beside: after a broker was away, what it is
behind melts within a second."""
TURN_MASK: Final = 511
"""The application gives our thread a turn after every 512th message, or when our thread says that it is time: seldom
enough that changing threads costs little, and before Python's cycle collector sets to work (see `evenly`)."""
TURN_SECONDS: Final = 1.0
"""The longest turn that a sender waits for: nothing depends on its end."""
FULL_WAIT_SECONDS: Final = 0.05
"""How long to wait for room before trying again to hand a message to a full queue."""
PURGE_SECONDS: Final = 10.0
"""How long a broken producer may take to report on what it had under way."""

DEFAULTS: Final[Settings] = {
    "partitioner": "murmur2_random",
    # How long a topic that no broker knows may take to become known, before its messages fail. librdkafka's 30 s are
    # long for whoever has mistyped a name; a new topic is known everywhere within a second or two.
    "topic.metadata.propagation.max.ms": 5000,
}

NO_TOPIC_CODES: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))
FINAL_CODES: Final = NO_TOPIC_CODES | {
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError._UNKNOWN_PARTITION,
    KafkaError.TOPIC_EXCEPTION,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
    KafkaError.POLICY_VIOLATION,
    KafkaError.UNSUPPORTED_COMPRESSION_TYPE,
}
"""Errors that the next attempt would meet as well."""
PURGED_CODES: Final = frozenset((KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT))
UNASSIGNED: Final = -1
"""librdkafka's word for a partition that it shall choose."""


def failure(error: KafkaError, topic: str, partition: int | None) -> DeliveryFailed:
    advice = f" (create it: holdfast topics create --topic {topic})" if error.code() in NO_TOPIC_CODES else ""
    return DeliveryFailed(
        error.str() + advice,
        code=error.name(),
        is_final=error.code() in FINAL_CODES,
        topic=topic,
        partition=partition,
    )


def is_fatal(error: KafkaError) -> bool:
    """Whether the producer that says so is of no more use."""
    return bool(error.fatal()) or error.code() == KafkaError._FATAL


def evenly(sent: int) -> int:
    """How many messages to be done with, for an application that has sent so many since it was asked last.

    Reports come by the batch, ten thousand at a time. Python's cycle collector goes by how many more objects were made
    than freed: an application that frees about as many messages as it makes does not set it to work, and one that frees
    them ten thousand at a time has it walk over all that is under way. Nor does the application stand still for long.
    """
    return sent + sent // 16 + 1


class _Enough(Exception):
    """So many reports were served; librdkafka keeps the others, in their order, for the next poll."""


_ENOUGH: Final = _Enough()
"""confluent-kafka keeps a reference to each exception that leaves a callback, so this is always the same one."""


class Reports(Waiting):
    """What a sender's thread hears of its messages, and whom it tells."""

    __slots__ = ("delivered", "enough", "failures", "is_ending", "refused", "refused_count")

    def __init__(self) -> None:
        super().__init__()
        self.delivered = 0
        self.enough = 0
        """At which number of delivered messages no more are heard of for now."""
        self.failures = Failures()
        self.is_ending = False
        """Whether reports are of messages that are given up."""
        self.refused: deque[tuple[Delivery, KafkaError]] = deque()
        """What librdkafka did not take, and our thread has yet to settle."""
        self.refused_count = 0
        """How many messages failed for good."""

    def refuse(self, delivery: Delivery, error: KafkaError) -> None:
        failed = failure(error, delivery.topic, delivery.partition)
        if self.is_ending and error.code() in PURGED_CODES:
            failed = DeliveryFailed(
                "no answer when the producer was closed",
                code=error.name(),
                is_final=False,
                topic=delivery.topic,
                partition=delivery.partition,
            )
        delivery.set_failed(failed)
        self.refused_count += 1
        # Who hears of it only now, because the producer ends, could not do anything about it.
        self.failures.add(delivery, although_told=self.is_ending)

    def settle_refused(self) -> None:
        while self.refused:
            self.refuse(*self.refused[0])
            # Counted as under way until now.
            self.refused.popleft()


class DirectDelivery(Delivery):
    """Called by librdkafka, in our thread, to report on its message."""

    __slots__ = ()
    _waiting: Reports

    def __call__(self, error: KafkaError | None, message: Any) -> None:
        reports = self._waiting
        if error is not None:
            reports.refuse(self, error)
            return
        # Whoever holds the delivery shall not hold the value with it.
        message.set_value(None)
        self._place = message
        if self._hooks is not None:
            self.call_back()
        reports.delivered = delivered = reports.delivered + 1
        if delivered == reports.enough:
            raise _ENOUGH


class _Ended:
    """In place of librdkafka's producer when all is over."""

    def __init__(self, unheard: int) -> None:
        self._unheard = unheard

    def __len__(self) -> int:
        return self._unheard

    def produce(self, topic: str, *_: object) -> None:
        raise ProducerClosed(f"a message for {topic} was sent after the producer was closed")


class DirectSender:
    """Messages go straight to librdkafka."""

    def __init__(self, settings: Settings, make: Callable[[Settings], Any] = RawProducer) -> None:
        self._settings: Settings = {**DEFAULTS, **settings}
        self._make = make
        self._producer: Any = make(self._settings)
        self._produce: Any = self._producer.produce
        self.reports = Reports()
        self._sent = 0
        self._turns: SimpleQueue[Bell | None] = SimpleQueue()
        """Who wants our thread to serve now, and to be told when it has; None wants no answer."""
        self._seen = self._turn_at = 0
        """What had been sent at the last turn."""
        self.set_aside = 0
        self.waiting: list[str] = []
        """Nothing is kept here, so nothing is set aside and nothing waits."""
        self._is_due = False
        """Whether whoever sends next shall give our thread a turn."""
        self._is_idle = False
        self._flushing: set[object] = set()
        """Who waits for everything: nothing waits for company (linger.ms) meanwhile."""
        self._is_closing = False
        self._left: LeftBehind | None = None
        """What was left behind, once our thread has ended."""
        self._thread = threading.Thread(target=self._run, name="holdfast-deliveries", daemon=True)
        self._thread.start()

    # Our thread: it alone hears reports, replaces a broken producer and settles deliveries

    def _run(self) -> None:
        with self.reports.settling():
            while not self._is_closing:
                try:
                    self._look()
                except Exception:  # noqa: BLE001  nobody else serves: what is wrong is logged, and it goes on
                    _log.exception("serving delivery reports failed; it is tried again")
                    time.sleep(LOOK_SECONDS)
            left = self._end()
        self._left = left
        self.reports.wake()
        self._answer()
        # librdkafka's goes, with its connections, however long ours is held: it would log that a broker ended later.
        self._producer = _Ended(len(self._producer))
        self._produce = self._producer.produce

    def _look(self) -> None:
        sent, self._seen = self._sent - self._seen, self._sent
        if sent >= BUSY_MESSAGES:
            self._take_turn(ASIDE_SECONDS)
        elif self.left:
            self._serve(LOOK_SECONDS)
            self._take_turn(0)
        else:
            self._is_idle = self._is_due = True  # the next to send ends the rest
            self._take_turn(0 if self.left else IDLE_SECONDS)
            self._is_idle = False

    def _take_turn(self, seconds: float) -> None:
        """Serve whoever gives us a turn within the time."""
        try:
            bell = self._turns.get(timeout=seconds) if seconds else self._turns.get_nowait()
        except Empty:
            self._is_due = True
            return
        sent, self._turn_at = self._sent - self._turn_at, self._sent
        if sent >= FAST_MESSAGES:
            self.reports.enough = self.reports.delivered + evenly(sent) + self.left // BEHIND_SHARE
        self._serve(0)
        self.reports.enough = 0
        if bell is not None:
            bell.ring()

    def _answer(self) -> None:
        with suppress(Empty):
            while True:
                bell = self._turns.get_nowait()
                if bell is not None:
                    bell.ring()

    def _serve(self, seconds: float) -> None:
        self.reports.settle_refused()
        producer = self._producer
        try:
            if self._flushing:
                producer.flush(seconds)
            else:
                producer.poll(seconds)
        except _Enough as enough:
            enough.__traceback__ = None  # its frames would hold the producer
        except KafkaException as broken:
            self._replace(producer, broken)
        self.reports.wake()

    def _replace(self, broken: Any, why: KafkaException) -> None:
        """The producer is of no more use: let it report on what it had, and go on with another."""
        if not is_fatal(why.args[0]):
            raise why
        if self._producer is broken:
            self._producer = self._make(self._settings)
            self._produce = self._producer.produce
            self._empty(broken)

    def _empty(self, producer: Any) -> int:
        """Have a producer report on all that it has, and give it up; returns how many it did not report on."""
        producer.purge()
        deadline = time.monotonic() + PURGE_SECONDS
        while len(producer) and time.monotonic() < deadline:
            try:
                producer.poll(FULL_WAIT_SECONDS)
            except KafkaException as error:
                if not is_fatal(error.args[0]):
                    raise
        return len(producer)

    def _end(self) -> LeftBehind:
        self.reports.is_ending = True
        self.reports.enough = 0
        unheard = 0
        try:
            self.reports.settle_refused()
            unheard = self._empty(self._producer)
        except Exception:  # noqa: BLE001  whoever closes is told of what is left, in any case
            _log.exception("closing the producer failed")
            unheard = len(self._producer)
        refused = self.reports.failures.seen()
        return LeftBehind(refused.named, refused.total + unheard)

    def numbers(self) -> dict[str, float]:
        """For `metrics`."""
        return {
            "holdfast_producer_delivered_total": self.delivered,
            "holdfast_producer_refused_total": self.reports.refused_count,
            "holdfast_producer_under_way": self.left,
        }

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
        delivery = DirectDelivery()
        delivery._waiting = self.reports
        delivery.topic = topic
        delivery.key = key
        delivery.partition = partition
        delivery.error = delivery._place = delivery._hooks = None
        try:
            if partition is None and not headers and timestamp_ms <= 0:
                # Most messages; what is not said need not be looked at.
                self._produce(topic, value, key, UNASSIGNED, delivery)
            else:
                self._produce(*_arguments(delivery, value, headers, timestamp_ms))
        except (BufferError, KafkaException) as problem:
            self._hand_over_again(delivery, problem, value, headers, timestamp_ms, timeout)
        self._sent = sent = self._sent + 1
        if self._is_due or not sent & TURN_MASK:
            self._give_turn(delivery)
        return delivery

    def _give_turn(self, delivery: Delivery) -> None:
        """Let our thread serve. A report takes Python's lock, and is quickly done with while nobody else wants it."""
        self._is_due = False
        if self.reports.is_ours:
            return
        if self._is_closing:
            self._refuse_late(delivery)
        elif self._is_idle:
            self._is_idle = False
            self._turns.put(None)
        else:
            bell = Bell()
            self._turns.put(bell)
            bell.wait(TURN_SECONDS)

    def _refuse_late(self, delivery: Delivery) -> None:
        """The message was handed over while the producer was being closed: perhaps nobody saw it."""
        self._is_due = True
        self.reports.wait(lambda: self._left is not None, None)
        if not delivery.is_settled:
            raise ProducerClosed(
                f"a message for {delivery.topic} was sent while the producer was being closed: it is not delivered"
            )

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
        # Whose problem the first one was is not known: our thread may have put a new producer in its place.
        producer: Any = None
        while self._may_try_again(producer, problem, delivery, deadline):
            producer = self._producer
            try:
                producer.produce(*_arguments(delivery, value, headers, timestamp_ms))
            except (BufferError, KafkaException) as again:
                problem = again.with_traceback(None)  # which would hold this frame, and so the producer
            else:
                return

    def _may_try_again(
        self,
        producer: Any,
        problem: BufferError | KafkaException,
        delivery: Delivery,
        deadline: float,
    ) -> bool:
        if self._is_closing:
            raise ProducerClosed(f"a message for {delivery.topic} was sent after the producer was closed")
        seconds = max(0.0, min(FULL_WAIT_SECONDS, deadline - time.monotonic()))
        if isinstance(problem, KafkaException):
            if not is_fatal(problem.args[0]):
                self.reports.refused.append((delivery, problem.args[0]))
                self._turns.put(None)
                return False
            if producer is not None:
                self._wait(lambda: self._producer is not producer, seconds)
        else:
            before = self.left
            self._wait(lambda: self.left < before, seconds)
        if time.monotonic() >= deadline or self.reports.is_ours:
            raise SendTimeout(
                f"no room for a message for {delivery.topic}: {self.left} messages wait for the broker"
            ) from problem
        return True

    def _wait(self, is_over: Callable[[], bool], seconds: float) -> None:
        """For something that our thread does while it serves."""
        if not self.reports.is_ours:
            self._turns.put(None)
            self.reports.wait(is_over, seconds)

    # From other threads

    @property
    def delivered(self) -> int:
        return self.reports.delivered

    def seen_refused(self) -> Seen:
        return self.reports.failures.seen()

    @property
    def left(self) -> int:
        """How many messages are handed over and not reported on."""
        return len(self._producer) + len(self.reports.refused)

    def flush(self, timeout: float | None) -> int:
        """Wait until every message is reported on; returns how many are not."""
        waiting = object()
        self._flushing.add(waiting)
        self._turns.put(None)
        try:
            self.reports.wait(lambda: not self.left or self._left is not None, timeout)
        finally:
            self._flushing.discard(waiting)
        return self.left

    def close(self) -> LeftBehind:
        """End; may be called again, by a signal handler too, and then says the same."""
        self._is_closing = self._is_due = True
        self._turns.put(None)
        self.reports.wait(lambda: self._left is not None, None)
        assert self._left is not None
        return self._left

    def check_thread(self) -> None:
        self.reports.check_thread()

    def orphan(self, why: ClientError) -> None:
        self.reports.orphaned = why


def _arguments(
    delivery: Delivery, value: bytes | None, headers: Headers, timestamp_ms: int
) -> tuple[Any, ...]:
    """Of `produce`, for a message of any kind."""
    partition = UNASSIGNED if delivery.partition is None else delivery.partition
    return (
        delivery.topic,
        value,
        delivery.key,
        partition,
        delivery,
        None,
        max(timestamp_ms, 0),
        list(headers) if headers else None,
    )
