"""A transactional producer that knows what its errors mean.

librdkafka's errors say one of three things, and each has one answer here:

    retriable         the answer is only late: the same call goes on where it was, until it is answered
    requires abort    the transaction is lost, the producer is not: it is aborted, `TakenBack` is raised
    fatal             the producer was fenced: a new one takes over its transactional id, which settles whatever the old
                      one left, and `TakenBack` is raised with `is_known` false: the group knows how it ended

A producer that is fenced again and again has a rival with the same transactional id, or transactions that outlast their
time-out. That does not get better by itself: `ProcessorFenced` says so.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Producer as RawProducer

from holdfast.client.errors import ClientError, DeliveryFailed
from holdfast.client.messages import forwarded
from holdfast.client.spool.format import Headers

ANSWER_SECONDS: Final = 10.0
STUCK_SECONDS: Final = 30.0
"""After so long without an answer to a commit a new producer is tried."""
POLL_SECONDS: Final = 0.05
FENCED_MAX: Final = 3
FENCED_SECONDS: Final = 300.0
"""More than so many new producers in so long are a rival's doing, or that of work that takes too long."""
HOPELESS: Final = frozenset(
    (
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,
        KafkaError._UNKNOWN_PARTITION,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_RECORD,
    )
)
"""An output refused with one of these is refused at every attempt."""


class Output(NamedTuple):
    """A message to produce."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None


class TakenBack(ClientError):
    """A transaction did not happen, or is not known to have: its messages are to be processed again."""

    def __init__(self, reason: str, *, is_known: bool = True) -> None:
        super().__init__(reason)
        self.is_known = is_known
        """Whether it is certain that nothing of it was committed."""


class ProcessorFenced(ClientError):
    """Other producers take this one's place again and again: nothing of it gets committed."""


class TransactionUnanswered(ClientError):
    """Told to stop while the broker does not say how a transaction ended; it is committed as a whole, or not at all."""


class _Stuck(ClientError):
    """A call was not answered for long. A new producer asks over new connections, and settles the transaction."""


class TransactionalProducer:
    def __init__(self, settings: Mapping[str, Any], is_stopping: Callable[[], bool]) -> None:
        self._settings = {**settings, "on_delivery": self._delivered}
        self._is_stopping = is_stopping
        self._fenced_at: deque[float] = deque()
        self._refusal: DeliveryFailed | None = None
        self._raw: Any = None
        self.is_open = False

    def start(self) -> None:
        """Take the transactional id, which ends whatever an earlier producer left open."""
        self._raw = RawProducer(self._settings)
        self._until_done(self._raw.init_transactions)

    def begin(self) -> None:
        self._raw.begin_transaction()
        self.is_open = True

    def produce(self, output: Output, on_delivery: Callable[[Any, Any], None] | None = None) -> None:
        arguments: dict[str, Any] = {"key": output.key, "headers": list(forwarded(output.headers)) or None}
        if output.partition is not None:
            arguments["partition"] = output.partition
        if on_delivery is not None:
            # It is called instead of the one that hears of refusals.
            arguments["on_delivery"] = partial(self._reported, on_delivery)
        is_fresh = False
        while True:
            try:
                self._raw.produce(output.topic, output.value, **arguments)
            except BufferError:
                self._raw.poll(POLL_SECONDS)
            except KafkaException as refused:
                if refused.args[0].code() == KafkaError._UNKNOWN_PARTITION and not is_fresh:
                    # The topic may have grown since the client looked at it.
                    self._look_at(output.topic)
                    is_fresh = True
                    continue
                if refused.args[0].code() not in (KafkaError._STATE, KafkaError._FATAL):
                    raise self._as_refusal(refused.args[0], output.topic, output.partition) from refused
                self._judge(refused)
            else:
                self._raw.poll(0)
                return

    def _look_at(self, topic: str) -> None:
        """Have the client learn of a topic's partitions anew."""
        while True:
            try:
                self._raw.list_topics(topic, ANSWER_SECONDS)
            except KafkaException as away:
                if self._is_stopping():
                    raise TransactionUnanswered(str(away.args[0])) from away
            else:
                return

    def commit(self, offsets: Sequence[TopicPartition], group_metadata: bytes) -> None:
        """Commit what was produced and these offsets together; raises `TakenBack` if that cannot be."""
        try:
            if offsets:
                self._until_done(
                    lambda seconds: self._raw.send_offsets_to_transaction(offsets, group_metadata, seconds),
                    STUCK_SECONDS,
                )
            self._until_done(self._raw.commit_transaction, STUCK_SECONDS)
        except _Stuck as stuck:
            self.is_open = False
            self.start()
            raise TakenBack(str(stuck), is_known=False) from stuck
        except KafkaException as refused:
            self._judge(refused)
        self.is_open = False
        self._raw.poll(0)

    def abort(self) -> None:
        """Take the open transaction back. A producer that was fenced has nothing to take back any more."""
        if not self.is_open:
            return
        self.is_open = False
        try:
            self._until_done(self._raw.abort_transaction)
        except KafkaException as refused:
            if not refused.args[0].fatal():
                raise
            self._replace(refused.args[0])

    def _judge(self, refused: KafkaException) -> None:
        """Always raises, with the producer ready for the next transaction where there can be one."""
        error: KafkaError = refused.args[0]
        if error.fatal() or error.code() == KafkaError._FATAL:
            self.is_open = False
            self._replace(error)
            raise TakenBack(f"{error.name()}: {error.str()}", is_known=False) from refused
        if not error.txn_requires_abort() and error.code() != KafkaError._STATE:
            raise refused
        self.abort()
        refusal, self._refusal = self._refusal, None
        if refusal is not None:
            raise refusal from refused
        raise TakenBack(f"{error.name()}: {error.str()}") from refused

    def _replace(self, why: KafkaError) -> None:
        now = time.monotonic()
        self._fenced_at.append(now)
        while self._fenced_at[0] < now - FENCED_SECONDS:
            self._fenced_at.popleft()
        if len(self._fenced_at) > FENCED_MAX:
            raise ProcessorFenced(
                f"{why.name()}: {why.str()}, {len(self._fenced_at)} times in {FENCED_SECONDS:.0f} s. Either another "
                f"producer uses transactional.id={self._settings.get('transactional.id')}, or transactions take "
                f"longer than transaction.timeout.ms={self._settings.get('transaction.timeout.ms')}"
            )
        self.start()

    def _until_done(self, call: Callable[[float], Any], seconds_max: float | None = None) -> None:
        began = time.monotonic()
        while True:
            try:
                call(ANSWER_SECONDS)
            except KafkaException as late:
                error: KafkaError = late.args[0]
                if not error.retriable() or error.fatal() or error.txn_requires_abort():
                    raise
                if self._is_stopping():
                    raise TransactionUnanswered(f"{error.name()}: {error.str()}") from late
                if seconds_max is not None and time.monotonic() - began >= seconds_max:
                    raise _Stuck(f"no answer within {seconds_max:.0f} s: {error.str()}") from late
            else:
                return

    def _reported(
        self, on_delivery: Callable[[Any, Any], None], error: KafkaError | None, message: Any
    ) -> None:
        self._delivered(error, message)
        on_delivery(error, message)

    def _delivered(self, error: KafkaError | None, message: Any) -> None:
        if error is not None and error.code() in HOPELESS and self._refusal is None:
            self._refusal = self._as_refusal(error, message.topic(), message.partition())

    @staticmethod
    def _as_refusal(error: KafkaError, topic: str, partition: int | None) -> DeliveryFailed:
        return DeliveryFailed(error.str(), code=error.name(), is_final=True, topic=topic, partition=partition)
