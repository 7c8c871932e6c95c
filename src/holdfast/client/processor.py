"""Consume, transform, produce: all of it in transactions, exactly once.

    def double(message: Message) -> list[Output]:
        return [Output("doubled", str(2 * int(message.value)).encode(), key=message.key)]

    Processor("localhost:9092", group="doubler", topics=["numbers"]).run(double)

What is produced and the committed offsets of what was consumed become visible together or not at all. The offsets go
with the consumer's membership of its group (KIP-447), so a member that was replaced without knowing it cannot commit:
the broker refuses its transaction. Readers of the outputs must read committed, which our consumers do by default.

The transaction time-out lies below the session time-out: a member that dies in the middle of a transaction holds
readers back no longer than it takes the group to notice.

Without a `RetryPolicy` an exception of the transform stops the processor. With one, the message is held and its
partition paused until the next attempt, while the others go on; what is before it is committed. A message that is given
up on becomes a dead letter in the very transaction that moves the committed offset past it: there is one, or none.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from holdfast.client.consuming.assignment import Assignment, LostOffsets, Source, is_member, messages, seek
from holdfast.client.consuming.marks import MARKS_TOPIC, group_marks
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dead_letters import OutputLetters, dead_letters_of
from holdfast.client.errors import DeliveryFailed, HandlerFailed
from holdfast.client.failures import Failures
from holdfast.client.messages import (
    DeadLetter,
    Message,
    Origin,
    Retry,
    check_handler,
    check_outcome,
    described,
    from_raw,
)
from holdfast.client.metrics import UNWATCHED, Metrics, watching
from holdfast.client.process import Runs, ending_in_child, say, stopping_on_signals
from holdfast.client.retries import Again, RetryPolicy
from holdfast.client.settings import (
    SESSION_TIMEOUT_MS,
    consumer_settings,
    producer_settings,
    shared_settings,
)
from holdfast.client.side_topics import TOO_LARGE, SideTopics, TooLargeToSetAside
from holdfast.client.spool.format import PartitionKey
from holdfast.client.transactional import (
    Output,
    ProcessorFenced,
    TakenBack,
    TransactionalProducer,
)
from holdfast.errors import HoldfastError, UsageError

if TYPE_CHECKING:
    from holdfast.client.state import States
    from holdfast.client.tracing import Tracing

__all__ = ["Output", "Processor", "ProcessorFenced", "Transform"]

POLL_SECONDS: Final = 0.05
BATCH_MESSAGES: Final = 500
ANSWER_SECONDS: Final = 60.0
REFUSED: Final = TOO_LARGE | {"INVALID_RECORD", "TOPIC_EXCEPTION", "_UNKNOWN_PARTITION"}
"""Why a broker or the client refuses an output for what it is, and not for where we are or who."""


Outcome: TypeAlias = Iterable[Output] | Retry | DeadLetter | None
Transform: TypeAlias = Callable[[Message], Outcome]


class Processor(Runs):
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        commit_seconds: float = 0.5,
        commit_messages: int = 5000,
        retry: RetryPolicy | None = None,
        dead_letter_topic: Callable[[str], str] = dead_letters_of,
        dead_letter_dialect: Dialect = "holdfast",
        create_topics: bool = False,
        lost_offsets: LostOffsets = "stop",
        marks_topic: str | None = MARKS_TOPIC,
        config: Mapping[str, Any] | None = None,
        producer_config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """A transaction ends after `commit_seconds` or `commit_messages`, whichever comes first.

        Without `retry` an exception of the transform stops the processor; the arguments beside it are those of
        `Consumer`. `config` are settings of its consumer; those that say how to reach the brokers, such as `sasl.` and
        `ssl.`, hold for its producer too, which gets `producer_config` besides.
        """
        super().__init__("processor")
        self._metrics = metrics
        self._tracing = tracing
        config = dict(config or {})
        if not topics:
            raise UsageError("a processor needs a topic")
        self._topics = list(topics)
        self._commit_seconds = commit_seconds
        self._commit_messages = commit_messages
        self._lost_offsets: LostOffsets = lost_offsets
        self._marks_topic = marks_topic
        self._retry = retry
        self._bootstrap, self._group = bootstrap, group
        self._dead_letter_topic = dead_letter_topic
        self._dead_letter_dialect: Dialect = dead_letter_dialect
        self._create_topics = create_topics
        self._consumer_settings = consumer_settings(bootstrap, group, config, unsafe)
        session_ms = int(self._consumer_settings.get("session.timeout.ms", SESSION_TIMEOUT_MS))
        given = {**shared_settings(config), **(producer_config or {})}
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
        self._running: _Running | None = None

    @property
    def committed(self) -> int:
        """Messages whose results are committed."""
        return self._running.committed if self._running is not None else 0

    def run(self, transform: Transform) -> None:
        """Process until stopped. Without `retry` an exception of `transform` aborts the open transaction and is
        raised."""
        self._run(transform, None)

    def _run(self, transform: Transform, participant: States | None) -> None:
        check_handler(transform, iterates=True)
        if self._tracing is not None:
            transform = self._tracing.transforming(transform, self._group)
        with self._one_run():
            running = self._running = _Running(self, transform, participant)
            with (
                watching(self._metrics, self._group, running.numbers) as running.tally,
                stopping_on_signals(self.stop),
            ):
                running.run()


def made(outcome: Outcome) -> list[Output]:
    """What a transform made; an outcome that was returned counts like one that was raised."""
    check_outcome(outcome, iterates=True)
    assert not isinstance(outcome, Retry | DeadLetter)
    return list(outcome or ())


class _Running:
    """One run: a consumer and a transactional producer, on one thread.

    Rebalances are told to us between two messages, never within one: an open transaction is whole whenever it ends.
    """

    def __init__(self, processor: Processor, transform: Transform, participant: States | None) -> None:
        self._processor = processor
        self._transform = ending_in_child(transform)
        self._participant = participant
        settings = processor._consumer_settings
        self._consumer = RawConsumer(settings)
        self._marks = group_marks(processor._marks_topic, processor._group, settings)
        self._assignment = Assignment(
            self._consumer,
            processor._lost_offsets,
            marks=self._marks,
            settings=settings,
            sources=[Source(processor._topics, processor._dead_letter_topic)],
        )
        self._producer = TransactionalProducer(processor._producer_settings, lambda: processor.is_stopping)
        self._next: dict[PartitionKey, int] = {}
        """Offsets that the open transaction will commit."""
        self._starts: dict[PartitionKey, int] = {}
        """Where each partition of ours stands without the open transaction; negative: at the beginning of its log."""
        self._unstored: set[PartitionKey] = set()
        """Partitions of ours whose start was decided on and not committed yet."""
        self._preparing: set[PartitionKey] = set()
        """Partitions of ours that are paused because the participant is not ready for them."""
        self._held: dict[PartitionKey, tuple[Message, float]] = {}
        """Messages that the transform failed on, and when each is tried again; their partitions are paused."""
        self._failures = None if processor._retry is None else Failures(processor._retry)
        self._refusals: dict[PartitionKey, tuple[int, DeliveryFailed]] = {}
        """Messages whose outputs were refused: each counts as failed when its turn comes again."""
        self._most = processor._commit_messages
        """How many messages the next transaction takes: fewer, after an output was refused and nobody knows whose."""
        self._letters = OutputLetters(
            processor._group,
            SideTopics(
                processor._bootstrap,
                settings,
                create=processor._create_topics,
                is_wanted=lambda: not processor.is_stopping,
            ),
            processor._dead_letter_topic,
            processor._dead_letter_dialect,
        )
        self._taken = 0
        self._began = 0.0
        self._error: BaseException | None = None
        self.committed = 0
        self.tally = UNWATCHED

    def numbers(self) -> dict[str, float]:
        """For `metrics`."""
        return {
            "holdfast_consumer_handled_total": self.committed,
            "holdfast_consumer_partitions": len(self._starts),
            "holdfast_consumer_in_flight": (self._taken if self._producer.is_open else 0) + len(self._held),
        }

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
                self._assignment.close()
                self._letters.close()
                if self._marks is not None:
                    self._marks.close()
        if self._error is not None:
            raise self._error

    def _turn(self) -> None:
        for raw in messages(self._consumer, 0 if self._preparing else POLL_SECONDS, BATCH_MESSAGES):
            self._received(raw)
            if self._is_due() or self._error is not None:
                break
        if self._held and self._error is None:
            self._try_again()
        if self._unstored and self._error is None and not self._producer.is_open:
            self._begin()
        if self._error is None and self._is_due():
            self._commit()
        if self._preparing:
            self._prepare()

    def _is_due(self) -> bool:
        processor = self._processor
        return self._producer.is_open and (
            self._taken >= self._most or time.monotonic() - self._began >= processor._commit_seconds
        )

    def _received(self, raw: Any) -> None:
        error = raw.error()
        key = (raw.topic(), raw.partition())
        if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET and key in self._starts:
            self._out_of_range(key, raw.offset())
            return
        if error is not None:
            self._error = self._error or self._assignment.judge(raw, error)
            return
        if key not in self._starts or key in self._preparing or key in self._held:
            return
        if raw.offset() < self._next.get(key, self._starts[key]):
            # librdkafka may read a partition that came back from where an earlier assignment would have begun.
            return
        self._process(from_raw(raw))

    def _out_of_range(self, key: PartitionKey, offset: int) -> None:
        """The log does not hold what comes next any more, or the topic is another one of the same name."""
        if self._next.get(key, self._starts[key]) == offset:
            self._begin_anew({key: lambda: self._assignment.elsewhere(TopicPartition(*key, offset))})
        else:
            self._go_on(key)

    def _process(self, message: Message) -> None:
        # All that it makes before any of it is produced: a transform may fail in the middle.
        began = time.monotonic() if self._failures is not None else 0.0
        try:
            outputs = made(self._transform(message)) if not self._refusals else self._made(message)
        except Exception as error:
            if self._failures is None:
                raise
            self._failed(self._failures, message, error, began)
        else:
            self._take(message, lambda: self._produce(outputs))

    def _made(self, message: Message) -> list[Output]:
        key = (message.topic, message.partition)
        offset, refused = self._refusals.get(key, (-1, None))
        if refused is not None and offset == message.offset:
            del self._refusals[key]
            raise refused
        return made(self._transform(message))

    def _take(self, message: Message, produce: Callable[[], None]) -> None:
        """Make a message's results part of the transaction."""
        try:
            if not self._producer.is_open:
                self._begin()
            produce()
        except TakenBack as taken_back:
            self._go_back(taken_back)
        except DeliveryFailed as refused:
            # Where the transaction is over already, it may be the answer to an output of an earlier message.
            is_ours = self._producer.is_open or self._taken == 0
            self._refused(refused, message.here if is_ours else None)
        else:
            self._next[message.topic, message.partition] = message.offset + 1
            self._taken += 1

    def _begin(self) -> None:
        self._producer.begin()
        self._taken, self._began = 0, time.monotonic()

    def _produce(self, outputs: Iterable[Output]) -> None:
        for output in outputs:
            self._producer.produce(output)

    # Messages that the transform fails on

    def _failed(self, failures: Failures, message: Message, error: Exception, began: float) -> None:
        verdict = failures.judge(message, error, time.monotonic(), began)
        if isinstance(verdict, Again):
            say(f"{message.place} is tried again in {verdict.seconds:.1f} s: {described(error)}")
            self.tally.add("holdfast_consumer_retries_total")
            self._hold(message, time.monotonic() + verdict.seconds)
            return
        if failures.policy.give_up == "stop" and not isinstance(error, DeadLetter):
            raise HandlerFailed(f"{message.place}: {verdict.reason}") from error
        letters = self._letters.compose(message, verdict.reason, error, failures.attempts(message))
        if not letters:
            self._hold(message, time.monotonic())
            return
        say(f"{message.place} is set aside: {verdict.reason}")
        self.tally.add("holdfast_consumer_dead_letters_total")
        self._take(message, lambda: self._produce_letter(message, letters))

    def _produce_letter(self, message: Message, letters: Iterable[Output]) -> None:
        """The fullest form that the client takes; whether the broker takes it shows later."""
        refused: DeliveryFailed | None = None
        for letter in letters:
            try:
                self._producer.produce(letter)
            except DeliveryFailed as failed:
                if failed.code not in TOO_LARGE:
                    raise
                refused = failed
            else:
                return
        raise TooLargeToSetAside(
            f"{message.place} does not fit its dead-letter topic: {refused}. Its committed offset was not moved; give "
            "the producer a larger message.max.bytes"
        ) from refused

    def _refused(self, refused: DeliveryFailed, culprit: Origin | None = None) -> None:
        """An output was refused, and its transaction is over; raises unless there is another way.

        Whose output it was is known when the client refuses it, and when a message is alone in its transaction.
        """
        if culprit is None and self._taken == 1:
            culprit = next(Origin(*key, following - 1, 0) for key, following in self._next.items())
        if self._letters.are_shorter_after(refused):
            reason = f"a dead letter is too large for {refused.topic}, and is made shorter"
        elif self._failures is None or refused.code not in REFUSED or self._letters.go_to(refused.topic):
            raise refused
        elif culprit is not None:
            reason = f"an output was refused: {refused}"
            self._refusals[culprit.topic, culprit.partition] = (culprit.offset, refused)
        elif self._taken:
            reason = f"an output was refused, and whose it is shows in smaller transactions: {refused}"
            self._most = max(1, self._taken // 2)
        else:
            raise refused
        self._producer.abort()
        self._go_back(TakenBack(reason))

    def _hold(self, message: Message, until: float) -> None:
        """Keep a message for later, and let nothing behind it overtake."""
        self._held[message.topic, message.partition] = (message, until)
        self._consumer.pause([TopicPartition(message.topic, message.partition)])

    def _try_again(self) -> None:
        now = time.monotonic()
        for key, (message, until) in list(self._held.items()):
            if until > now or key not in self._held or key in self._preparing:
                continue
            del self._held[key]
            self._process(message)
            if key not in self._held:
                self._go_on(key)

    def _go_on(self, key: PartitionKey) -> None:
        """Read a partition that was paused from where it stands; one that is being prepared goes on when it is."""
        if key in self._preparing:
            return
        place = TopicPartition(*key, self._next.get(key, self._starts[key]))
        seek(self._consumer, place)
        self._consumer.resume([place])

    # Ending a transaction

    def _commit(self) -> None:
        if not self._producer.is_open:
            return
        recreated = self._assignment.recreated(self._next, waits=True)
        if recreated:
            # What we read last may be of the new topic: nothing of it counts.
            again = self._assignment.start_of_recreated
            self._begin_anew({key: partial(again, key, new) for key, new in recreated.items()})
            return
        try:
            self._commit_once()
        except TakenBack as taken_back:
            self._go_back(taken_back)
            return
        except DeliveryFailed as refused:
            self._refused(refused)
            return
        self.committed += self._taken
        self.tally.add("holdfast_consumer_commits_total")
        self._most = min(self._most * 2, self._processor._commit_messages)
        self._letters.committed()
        self._starts.update(self._next)
        if self._failures is not None:
            for key, position in self._next.items():
                self._failures.passed(key, position)
        self._remember({key: self._starts[key] for key in self._next.keys() | self._unstored})
        self._unstored.clear()
        self._next = {}
        if self._participant is not None:
            self._hold_back(self._participant.committed())

    def _begin_anew(self, starts: Mapping[PartitionKey, Callable[[], int]]) -> None:
        """Take back what is open, and read these partitions from where somebody has decided; raises if nobody has."""
        self._producer.abort()
        for key, decide in starts.items():
            self._starts[key] = decide()
            self._unstored.add(key)
        self._go_back(
            TakenBack(f"{', '.join(f'{topic}-{number}' for topic, number in starts)} begins elsewhere")
        )

    def _commit_once(self) -> None:
        metadata = self._consumer.consumer_group_metadata()
        if not is_member(self._consumer, metadata):
            self._producer.abort()
            raise TakenBack("this member is no longer one of its group")
        if self._participant is not None:
            for output, on_delivery in self._participant.changes():
                self._producer.produce(output, on_delivery)
        positions = {key: self._starts[key] for key in self._unstored} | self._next
        self._producer.commit([self._asking(key, offset) for key, offset in positions.items()], metadata)

    def _asking(self, key: PartitionKey, offset: int) -> TopicPartition:
        changelog = self._participant.note(key) if self._participant is not None else ""
        note = self._assignment.note(key, changelog=changelog)
        return TopicPartition(*key, offset, metadata=note) if note else TopicPartition(*key, offset)

    def _remember(self, positions: Mapping[PartitionKey, int]) -> None:
        """That this group has committed offsets."""
        if self._marks is not None:
            self._marks.remember(key for key, position in positions.items() if position >= 0)

    def _go_back(self, taken_back: TakenBack) -> None:
        """Process again what was taken back, from where the group stands."""
        say(f"a transaction was taken back and its messages are processed again: {taken_back}")
        self.tally.add("holdfast_consumer_commit_failures_total")
        wanted, self._next = self._next, {}
        if self._participant is not None:
            self._participant.taken_back()
        if not taken_back.is_known:
            self._ask_where_we_are(wanted)
        for key in self._starts.keys() - self._preparing - self._held.keys():
            seek(self._consumer, TopicPartition(*key, self._starts[key]))
        for key in list(self._held):
            del self._held[key]
            self._go_on(key)

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
        if self._participant is not None:
            # It may have been committed after all: what the participant knows has to be read again.
            self._hold_back(list(self._starts))

    # Getting ready

    def _hold_back(self, keys: Collection[PartitionKey]) -> None:
        assert self._participant is not None
        if not keys:
            return
        self._consumer.pause([TopicPartition(*key) for key in keys])
        self._preparing.update(keys)
        self._participant.given(keys)

    def _prepare(self) -> None:
        assert self._participant is not None
        for key in self._participant.prepare():
            if key in self._preparing:
                self._preparing.discard(key)
                place = TopicPartition(*key, self._starts[key])
                seek(self._consumer, place)
                self._consumer.resume([place])

    # Rebalances. What goes wrong in them is noted, and raised by the loop.

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        try:
            taken = self._assignment.take_over(partitions)
            starts = {key: start.offset for key, start in taken.items()}
            self._starts.update(starts)
            self._unstored.update(
                key for key, start in taken.items() if start.offset >= 0 and not start.is_stored
            )
            self._remember({key: position for key, position in starts.items() if key not in self._unstored})
            if self._participant is not None:
                for key, start in taken.items():
                    self._participant.noted(key, start.changelog)
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
            self._unstored.discard(key)
            self._preparing.discard(key)
            self._refusals.pop(key, None)
            if self._held.pop(key, None) is not None:
                # The client would remember it if the partition came back.
                self._consumer.resume([TopicPartition(*key)])
        if self._failures is not None:
            self._failures.forget(keys)
        if self._participant is not None:
            self._participant.let_go(keys)
