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
from typing import Any, Final, Protocol, TypeAlias

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaException, TopicPartition

from holdfast.client.consuming.assignment import Assignment, LostPositions, messages
from holdfast.client.consuming.seeking import is_member, seek
from holdfast.client.messages import Message, from_raw
from holdfast.client.settings import SESSION_TIMEOUT_MS, consumer_settings, is_incremental, producer_settings
from holdfast.client.signals import say, stopping_on_signals
from holdfast.client.spool.format import PartitionKey
from holdfast.client.transactional import Output, ProcessorFenced, TakenBack, TransactionalProducer
from holdfast.errors import HoldfastError, UsageError

__all__ = ["Companion", "Output", "Processor", "ProcessorFenced", "Transform"]

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 500
ANSWER_SECONDS: Final = 60.0


Transform: TypeAlias = Callable[[Message], Iterable[Output] | None]


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
        if commit_seconds * 1000 * 2 > int(given["transaction.timeout.ms"]):
            raise UsageError(
                f"commit_seconds={commit_seconds} must be at most half of transaction.timeout.ms="
                f"{given['transaction.timeout.ms']}: the broker would take transactions back while they are used"
            )
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
        self._run(transform, None)

    def _run(self, transform: Transform, companion: Companion | None) -> None:
        running = self._running = _Running(self, transform, companion)
        with stopping_on_signals(self.stop):
            running.run()

    @property
    def is_stopping(self) -> bool:
        return self._is_stopping


class Companion(Protocol):
    """Something that goes along with the transactions of a run: the state of a stateful one."""

    def given(self, keys: Collection[PartitionKey]) -> None:
        """Partitions were assigned; none of their messages comes before they are ready."""

    def prepare(self) -> Collection[PartitionKey]:
        """Get on with making partitions ready, for a moment; returns those that became ready."""

    def changes(self) -> Iterable[tuple[Output, Callable[[Any, Any], None]]]:
        """What the open transaction is to hold besides its outputs, and who wants to know where each went."""

    def committed(self) -> Collection[PartitionKey]:
        """The transaction was committed; returns partitions that have to be made ready again."""

    def taken_back(self) -> None:
        """Nothing since the last commit has happened."""

    def let_go(self, keys: Collection[PartitionKey]) -> None:
        """Partitions were taken away."""


class _Running:
    """One run: a consumer and a transactional producer, on one thread.

    Rebalances are told to us between two messages, never within one: an open transaction is whole whenever it ends.
    """

    def __init__(self, processor: Processor, transform: Transform, companion: Companion | None) -> None:
        self._processor = processor
        self._transform = transform
        self._companion = companion
        settings = processor._consumer_settings
        self._consumer = RawConsumer(settings)
        self._assignment = Assignment(
            self._consumer, processor._lost_positions, is_incremental=is_incremental(settings), say=say
        )
        self._producer = TransactionalProducer(processor._producer_settings, lambda: processor.is_stopping)
        self._next: dict[PartitionKey, int] = {}
        """Positions that the open transaction will commit."""
        self._starts: dict[PartitionKey, int] = {}
        """Where each partition of ours stands without the open transaction; negative: at the beginning of its log."""
        self._preparing: set[PartitionKey] = set()
        """Partitions of ours that are paused because the companion is not ready for them."""
        self._taken = 0
        self._began = 0.0
        self._error: BaseException | None = None
        self.committed = 0

    def run(self) -> None:
        try:
            self._producer.start()
            self._consumer.subscribe(
                self._processor._topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
            )
            while not self._processor.is_stopping and self._error is None:
                self._turn()
            if self._error is None:
                self._commit()
        finally:
            # An exception, raised or noted, takes back what is open, before leaving hands the partitions on.
            try:
                self._producer.abort()
            finally:
                self._consumer.close()
        if self._error is not None:
            raise self._error

    def _turn(self) -> None:
        for raw in messages(self._consumer, 0 if self._preparing else POLL_SECONDS, BATCH_MESSAGES):
            self._received(raw)
            if self._is_due() or self._error is not None:
                break
        if self._error is None and self._is_due():
            self._commit()
        if self._preparing:
            self._prepare()

    def _is_due(self) -> bool:
        processor = self._processor
        return self._producer.is_open and (
            self._taken >= processor._commit_messages
            or time.monotonic() - self._began >= processor._commit_seconds
        )

    def _received(self, raw: Any) -> None:
        error = raw.error()
        if error is not None:
            self._error = self._error or self._assignment.judge(raw, error)
            return
        key = (raw.topic(), raw.partition())
        if key not in self._starts or key in self._preparing:
            return
        try:
            if not self._producer.is_open:
                self._producer.begin()
                self._taken, self._began = 0, time.monotonic()
            for output in self._transform(from_raw(raw)) or ():
                self._producer.produce(output)
        except TakenBack as taken_back:
            self._go_back(taken_back)
        else:
            self._next[key] = raw.offset() + 1
            self._taken += 1

    # Ending a transaction

    def _commit(self) -> None:
        if not self._producer.is_open:
            return
        try:
            self._commit_once()
        except TakenBack as taken_back:
            self._go_back(taken_back)
            return
        self.committed += self._taken
        self._starts.update(self._next)
        self._next = {}
        if self._companion is not None:
            self._hold_back(self._companion.committed())

    def _commit_once(self) -> None:
        metadata = self._consumer.consumer_group_metadata()
        if not is_member(self._consumer, metadata):
            self._producer.abort()
            raise TakenBack("this member is no longer one of its group")
        if self._companion is not None:
            for output, on_delivery in self._companion.changes():
                self._producer.produce(output, on_delivery)
        self._producer.commit([TopicPartition(*key, offset) for key, offset in self._next.items()], metadata)

    def _go_back(self, taken_back: TakenBack) -> None:
        """Process again what was taken back, from where the group stands."""
        say(f"a transaction was taken back and its messages are processed again: {taken_back}")
        wanted, self._next = self._next, {}
        if self._companion is not None:
            self._companion.taken_back()
        if not taken_back.is_known:
            self._ask_where_we_are(wanted)
        for key in self._starts.keys() - self._preparing:
            seek(self._consumer, TopicPartition(*key, self._starts[key]))

    def _ask_where_we_are(self, wanted: Mapping[PartitionKey, int]) -> None:
        """The group says how far the last transaction got, once nothing of it is under way any more."""
        asked = [TopicPartition(*key) for key in wanted if key in self._starts]
        if not asked:
            return
        for each in self._consumer.committed(asked, timeout=ANSWER_SECONDS):
            if each.error is not None:
                raise KafkaException(each.error)
            if each.offset >= 0:
                self._starts[each.topic, each.partition] = each.offset
        if all(self._starts.get(key) == position for key, position in wanted.items()):
            self.committed += self._taken
        if self._companion is not None:
            # It may have been committed after all: what the companion knows has to be read again.
            self._hold_back(list(self._starts))

    # Getting ready

    def _hold_back(self, keys: Collection[PartitionKey]) -> None:
        assert self._companion is not None
        if not keys:
            return
        self._consumer.pause([TopicPartition(*key) for key in keys])
        self._preparing.update(keys)
        self._companion.given(keys)

    def _prepare(self) -> None:
        assert self._companion is not None
        for key in self._companion.prepare():
            if key in self._preparing:
                self._preparing.discard(key)
                place = TopicPartition(*key, self._starts[key])
                seek(self._consumer, place)
                self._consumer.resume([place])

    # Rebalances. What goes wrong in them is noted, and raised by the loop.

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            starts = self._assignment.begin(partitions)
            self._starts.update(starts)
            if self._companion is not None:
                self._hold_back(list(starts))
        except (KafkaException, HoldfastError) as error:
            self._error = self._error or error

    def _revoked(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            if self._error is None:
                self._commit()
            self._producer.abort()
        except (KafkaException, HoldfastError) as error:
            self._error = self._error or error
        self._let_go(partitions)
        self._assignment.end(partitions)

    def _lost(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        """They may have a new owner already, who begins before the open transaction."""
        is_open = self._producer.is_open
        self._let_go(partitions)
        try:
            self._producer.abort()
            if is_open:
                self._go_back(TakenBack("partitions were lost"))
        except (KafkaException, HoldfastError) as error:
            self._error = self._error or error

    def _let_go(self, partitions: Iterable[TopicPartition]) -> None:
        keys = [(each.topic, each.partition) for each in partitions]
        for key in keys:
            self._starts.pop(key, None)
            self._next.pop(key, None)
            self._preparing.discard(key)
        if self._companion is not None:
            self._companion.let_go(keys)
