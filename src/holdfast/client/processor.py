"""Consume, transform, produce: all of it in transactions, exactly once.

    def double(message: Message) -> list[Output]:
        return [Output("doubled", str(2 * int(message.value)).encode(), key=message.key)]

    Processor("localhost:9092", group="doubler", topics=["numbers"]).run(double)

What is produced and the positions of what was consumed become visible together or not at all. The positions go with the
consumer's membership of its group (KIP-447), so a member that was replaced without knowing it cannot commit: the broker
refuses its transaction. Readers of the outputs must read committed, which our consumers do by default.

The transaction time-out lies below the session time-out: a member that dies in the middle of a transaction holds
readers back no longer than it takes the group to notice.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, Final, NamedTuple, TypeAlias

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Producer as RawProducer

from holdfast.client.consuming.assignment import Assignment, LostPositions, messages
from holdfast.client.errors import ClientError
from holdfast.client.messages import Message, from_raw
from holdfast.client.settings import SESSION_TIMEOUT_MS, consumer_settings, is_incremental, producer_settings
from holdfast.client.signals import say, stopping_on_signals
from holdfast.client.spool.format import Headers, PartitionKey
from holdfast.errors import UsageError

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 500
ANSWER_SECONDS: Final = 60.0


class Output(NamedTuple):
    """A message to produce."""

    topic: str
    value: bytes | None
    key: bytes | None = None
    headers: Headers = ()
    partition: int | None = None


Transform: TypeAlias = Callable[[Message], Iterable[Output] | None]


class ProcessorFenced(ClientError):
    """Another producer has taken this one's place: nothing of it can be committed any more. Start it anew."""


class Processor:
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        commit_seconds: float = 0.5,
        commit_messages: int = 5000,
        lost_positions: LostPositions = "stop",
        consumer_config: Mapping[str, Any] | None = None,
        producer_config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
    ) -> None:
        """A transaction ends after `commit_seconds` or `commit_messages`, whichever comes first."""
        if not topics:
            raise UsageError("a processor needs a topic")
        self._topics = list(topics)
        self._commit_seconds = commit_seconds
        self._commit_messages = commit_messages
        self._lost_positions = lost_positions
        self._consumer_settings = consumer_settings(bootstrap, group, dict(consumer_config or {}), unsafe)
        session_ms = int(self._consumer_settings.get("session.timeout.ms", SESSION_TIMEOUT_MS))
        given = dict(producer_config or {})
        given.setdefault("transactional.id", f"{group}-{uuid.uuid4().hex[:12]}")
        given.setdefault("transaction.timeout.ms", max(1000, session_ms * 2 // 3))
        if int(given["transaction.timeout.ms"]) >= session_ms:
            raise UsageError(
                f"transaction.timeout.ms={given['transaction.timeout.ms']} must be below session.timeout.ms="
                f"{session_ms}: a member that dies would hold readers back longer than its partitions have no owner"
            )
        self._producer_settings = producer_settings(bootstrap, given, unsafe)
        # A message that is late is taken back with its transaction, and processed again: nothing is lost by it.
        self._producer_settings["message.timeout.ms"] = given["transaction.timeout.ms"]
        self._is_stopping = False
        self._running: _Running | None = None

    def stop(self) -> None:
        """End `run` cleanly, with the open transaction committed; safe from any thread and from signal handlers."""
        self._is_stopping = True

    @property
    def committed(self) -> int:
        """Messages whose results are committed."""
        return self._running.committed if self._running is not None else 0

    def run(self, transform: Transform) -> None:
        """Process until stopped. An exception of `transform` aborts the open transaction and is raised."""
        running = self._running = _Running(self, transform)
        with stopping_on_signals(self.stop):
            running.run()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping


class _Running:
    """One run: a consumer and a transactional producer, on one thread."""

    def __init__(self, processor: Processor, transform: Transform) -> None:
        self._processor = processor
        self._transform = transform
        settings = processor._consumer_settings
        self._consumer = RawConsumer(settings)
        self._assignment = Assignment(
            self._consumer, processor._lost_positions, is_incremental=is_incremental(settings), say=say
        )
        self._producer = RawProducer(processor._producer_settings)
        self._next: dict[PartitionKey, int] = {}
        """Positions that the open transaction will commit."""
        self._starts: dict[PartitionKey, int] = {}
        """Where each partition of ours stands without the open transaction; negative: at the beginning of its log."""
        self._taken = 0
        self._began = 0.0
        self._is_open = False
        self._error: BaseException | None = None
        self.committed = 0

    def run(self) -> None:
        self._producer.init_transactions(ANSWER_SECONDS)
        self._consumer.subscribe(
            self._processor._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )
        try:
            while not self._processor.is_stopping and self._error is None:
                for raw in messages(self._consumer, POLL_SECONDS, BATCH_MESSAGES):
                    self._received(raw)
                if self._is_due():
                    self._commit()
        except BaseException:
            self._abort()
            raise
        else:
            if self._error is None:
                self._commit()
            else:
                self._abort()
        finally:
            self._consumer.close()
        if self._error is not None:
            raise self._error

    def _is_due(self) -> bool:
        processor = self._processor
        return self._is_open and (
            self._taken >= processor._commit_messages
            or time.monotonic() - self._began >= processor._commit_seconds
        )

    def _received(self, raw: Any) -> None:
        error = raw.error()
        if error is not None:
            self._error = self._error or self._assignment.judge(raw, error)
            return
        key = (raw.topic(), raw.partition())
        if key not in self._starts:
            return
        if not self._is_open:
            self._producer.begin_transaction()
            self._is_open, self._taken, self._began = True, 0, time.monotonic()
        for output in self._transform(from_raw(raw)) or ():
            self._produce(output)
        self._next[key] = raw.offset() + 1
        self._taken += 1

    def _produce(self, output: Output) -> None:
        arguments: dict[str, Any] = {"key": output.key, "headers": list(output.headers) or None}
        if output.partition is not None:
            arguments["partition"] = output.partition
        while True:
            try:
                self._producer.produce(output.topic, output.value, **arguments)
            except BufferError:
                self._producer.poll(POLL_SECONDS)
            else:
                self._producer.poll(0)
                return

    # Ending a transaction

    def _commit(self) -> None:
        if not self._is_open:
            return
        offsets = [TopicPartition(*key, offset) for key, offset in self._next.items()]
        try:
            self._producer.send_offsets_to_transaction(
                offsets, self._consumer.consumer_group_metadata(), ANSWER_SECONDS
            )
            self._until_done(self._producer.commit_transaction)
        except KafkaException as refused:
            self._refused(refused)
            return
        self._is_open = False
        self.committed += self._taken
        self._starts.update(self._next)
        self._next = {}

    @staticmethod
    def _until_done(end: Callable[[float], None]) -> None:
        """Ask again while the answer is only late: the call goes on where it was."""
        while True:
            try:
                end(ANSWER_SECONDS)
            except KafkaException as late:
                if not late.args[0].retriable():
                    raise
            else:
                return

    def _refused(self, refused: KafkaException) -> None:
        error: KafkaError = refused.args[0]
        if error.fatal():
            self._is_open = False
            self._error = ProcessorFenced(f"{error.name()}: {error.str()}")
        elif error.txn_requires_abort():
            say(f"a transaction was aborted and its messages are processed again: {error.str()}")
            self._abort()
            self._rewind(self._starts)
        else:
            raise refused

    def _abort(self) -> None:
        if self._is_open:
            self._is_open = False
            try:
                self._until_done(self._producer.abort_transaction)
            except KafkaException as refused:
                # Fenced: whoever replaced us has aborted it already.
                if not refused.args[0].fatal():
                    raise
        self._next = {}

    def _rewind(self, starts: Mapping[PartitionKey, int]) -> None:
        for key, offset in starts.items():
            self._consumer.seek(TopicPartition(*key, offset))

    # Rebalances

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            starts = self._assignment.begin(partitions)
        except (KafkaException, ClientError) as error:
            self._error = error
            return
        self._starts.update(starts)

    def _revoked(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        # Every message taken so far is transformed, so the transaction is whole.
        self._commit()
        self._let_go(partitions)
        self._assignment.end(partitions)

    def _lost(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        self._abort()
        self._let_go(partitions)
        self._rewind(self._starts)

    def _let_go(self, partitions: Iterable[TopicPartition]) -> None:
        for each in partitions:
            self._starts.pop((each.topic, each.partition), None)
            self._next.pop((each.topic, each.partition), None)
