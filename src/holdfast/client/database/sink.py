"""Messages into a database, exactly once.

    def book(message: Message, connection: psycopg.Connection) -> None:
        order = json.loads(message.value)
        connection.execute("insert into orders values (%s, %s)", (order["id"], order["total"]))

    DatabaseSink("localhost:9092", group="orders", topics=["orders"], database="postgresql://…").run(book)

What handlers do on the connection they get, and the committed offsets of their messages, are one transaction of the
database. The group decides who reads what and nothing about what counts: committed offsets are read from the database
and advanced by compare-and-set, so a member that was replaced without knowing it rolls back.

A partition is *ours*, paused, when the group gives it; it is *claimed* when our name stands in its row and reading
began at the committed offset in it. Whatever goes wrong with a partition (another owner, a lost connection, a broker
that does not answer) ends its claim, forgets what was read and not stored, and claims it again when it is time: there
is one way in, and none around the database.

A handler that fails rolls its transaction back. Without a `RetryPolicy` the sink stops there. With one, what came
before the message is stored, and its partition rests until the next attempt; a message that is given up on goes to the
dead-letter topic, and only when it is safe there, the next transaction moves the committed offset past it. A sink that
dies between the two sets it aside a second time.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from confluent_kafka import OFFSET_BEGINNING, KafkaError, KafkaException, TopicPartition
from confluent_kafka import Consumer as RawConsumer

from holdfast.client.consuming.assignment import (
    ANSWER_SECONDS,
    Assignment,
    LostOffsets,
    Source,
    messages,
    seek,
)
from holdfast.client.database.store import (
    Advance,
    Database,
    HandlerFailure,
    Reconnecting,
    RefusedAtCommit,
    Share,
    Start,
    Stored,
    Superseded,
    Trouble,
    open_database,
)
from holdfast.client.dead_letter_dialects import Dialect
from holdfast.client.dead_letters import dead_letters_of
from holdfast.client.errors import ClientError
from holdfast.client.failures import FailureRouter, Failures
from holdfast.client.messages import (
    Message,
    UnusableHandler,
    check_handler,
    check_outcome,
    described,
    from_raw,
)
from holdfast.client.metrics import UNWATCHED, Metrics, watching
from holdfast.client.process import Runs, ending_in_child, say, stopping_on_signals
from holdfast.client.retries import Again, RetryPolicy
from holdfast.client.settings import SESSION_TIMEOUT_MS, consumer_settings
from holdfast.client.spool.format import PartitionKey
from holdfast.client.topic_ids import TopicIds, TopicRecreated
from holdfast.errors import UsageError

if TYPE_CHECKING:
    from holdfast.client.tracing import Tracing

POLL_SECONDS: Final = 0.05
RECLAIM_SECONDS: Final = 2.0
"""How long to stay away from a partition that somebody else moved: if it is still given to us then, it is ours."""
RETRY_SECONDS: Final = 1.0
BUSY_SECONDS: Final = 0.1
BUSY_ATTEMPTS: Final = 10
"""How often one transaction is tried while others are in its way, each of which waits for its locks as well."""
SHOW_SECONDS: Final = 5.0
"""How often committed offsets are shown to the group, for tools that tell how far it is; nothing depends on them."""

Handler: TypeAlias = Callable[[Message, Any], Any]
BatchHandler: TypeAlias = Callable[[Sequence[Message], Any], Any]


class DatabaseSink(Runs):
    def __init__(
        self,
        bootstrap: str,
        *,
        group: str,
        topics: Sequence[str],
        database: str,
        batch_messages: int = 1000,
        batch_seconds: float = 0.2,
        retry: RetryPolicy | None = None,
        dead_letter_topic: Callable[[str], str] = dead_letters_of,
        dead_letter_dialect: Dialect = "holdfast",
        create_topics: bool = False,
        lost_offsets: LostOffsets = "stop",
        pipeline: bool = False,
        config: Mapping[str, Any] | None = None,
        unsafe: Collection[str] = (),
        metrics: Metrics | None = None,
        tracing: Tracing | None = None,
    ) -> None:
        """A transaction holds up to `batch_messages`, and waits for more up to `batch_seconds`.

        Without `retry` a handler that fails stops the sink; the arguments beside it are those of `Consumer`.
        `pipeline` sends the statements of handlers to PostgreSQL without waiting for the answer to each, unless the
        handler does; it must make its cursors with `connection.cursor`. That is two to four times as fast, and stores
        as exactly, but PostgreSQL does not see the pauses of such a transaction: a member that sleeps in the middle of
        one holds its successor until it wakes or ends.

        `database` is `postgresql://…`, `sqlite:///path` or the path of a SQLite file; its tables are made by
        `holdfast sink migrate`. In PostgreSQL a transaction in which nothing happens for two thirds of
        `session.timeout.ms` is taken back, so that a member that sleeps does not hold its successor.
        """
        super().__init__("sink")
        self._metrics = metrics
        self._tracing = tracing
        if not topics:
            raise UsageError("a sink needs a topic")
        if batch_messages < 1:
            raise UsageError(f"batch_messages={batch_messages}: a transaction holds at least one message")
        self.group = group
        self.topics = list(topics)
        self.batch_messages = batch_messages
        self.batch_seconds = batch_seconds
        self.lost_offsets: LostOffsets = lost_offsets
        self.settings = consumer_settings(bootstrap, group, dict(config or {}), unsafe)
        self._database = open_database(database)
        self.pipeline = pipeline
        self.failures = None if retry is None else Failures(retry)
        self.dead_letter_topic = dead_letter_topic
        self.aside = FailureRouter(
            bootstrap,
            group,
            topics,
            retry or RetryPolicy(),
            self.settings,
            dead_letter_topic=dead_letter_topic,
            dialect=dead_letter_dialect,
            create=create_topics,
            is_wanted=lambda: not self.is_stopping,
        )
        session_ms = int(self.settings.get("session.timeout.ms", SESSION_TIMEOUT_MS))
        self._database.idle_timeout_ms = max(1000, session_ms * 2 // 3)
        self._running: _Running | None = None

    @property
    def stored(self) -> int:
        """Messages whose results are in the database by this run."""
        return self._running.stored if self._running is not None else 0

    def run(self, handler: Handler) -> None:
        """Hand over message by message until stopped. An exception of the handler rolls back; see `retry`."""
        check_handler(handler)
        handler = self._traced(handler)

        def work(batch: Sequence[Message], connection: Any) -> None:
            for index, message in enumerate(batch):
                try:
                    check_outcome(handler(message, connection))
                except Exception as error:
                    raise HandlerFailure(index, error) from error

        self._run(work)

    def run_batches(self, handler: BatchHandler) -> None:
        """Hand over all messages of a transaction at once: in order per partition, partitions mixed.

        A batch that fails is handed over again in smaller ones, down to the message that fails alone.
        """
        check_handler(handler)
        handler = self._traced(handler)

        def work(batch: Sequence[Message], connection: Any) -> None:
            try:
                check_outcome(handler(batch, connection))
            except Exception as error:
                raise HandlerFailure(0 if len(batch) == 1 else None, error) from error

        self._run(work)

    def _traced(self, handler: Callable[..., Any]) -> Callable[..., Any]:
        return handler if self._tracing is None else self._tracing.handling(handler, self.group)

    def _run(self, work: BatchHandler) -> None:
        with self._one_run():
            running = self._running = _Running(self, self._database, ending_in_child(work))
            with (
                watching(self._metrics, self.group, running.numbers) as running.tally,
                stopping_on_signals(self.stop),
            ):
                self.aside.tally = running.tally
                running.run()


def _trouble(database: Database, error: BaseException) -> Trouble:
    return database.trouble(error.error if isinstance(error, HandlerFailure) else error)


class _Running:
    """One run of a sink, on one thread. No transaction is open while it polls, so rebalances meet none."""

    def __init__(self, sink: DatabaseSink, database: Database, handler: BatchHandler) -> None:
        self._sink = sink
        self._database = database
        self._reasons: tuple[type[Exception], ...] = (HandlerFailure, RefusedAtCommit, *database.errors)
        """Why a transaction may be rolled back."""
        self._handler = handler
        self._owner = uuid.uuid4().hex
        self._consumer = RawConsumer(sink.settings)
        self._ids = TopicIds(sink.settings)
        self._assignment = Assignment(
            self._consumer,
            sink.lost_offsets,
            settings=sink.settings,
            ids=self._ids,
            sources=[Source(sink.topics, sink.dead_letter_topic)],
        )
        self._shares: dict[PartitionKey, Share] = {}
        self._pending: list[Message] = []
        self._pending_since = 0.0
        self._most = sink.batch_messages
        """How many messages the next transaction takes at most: fewer, after a batch failed and nobody knows why."""
        self._is_pipelined = sink.pipeline
        self._link = Reconnecting(database)
        self._missing: set[str] = set()
        """Topics that were said to be gone."""
        self._unshown: dict[PartitionKey, int] = {}
        """Committed offsets that moved since the group was last shown where it stands."""
        self._show_at = 0.0
        self._error: BaseException | None = None
        self.stored = 0
        self.tally = UNWATCHED

    def numbers(self) -> dict[str, float]:
        """For `metrics`."""
        return {
            "holdfast_consumer_handled_total": self.stored,
            "holdfast_consumer_partitions": len(self._shares),
            "holdfast_consumer_in_flight": len(self._pending),
        }

    def run(self) -> None:
        try:
            self._link.connect()
            self._consumer.subscribe(
                self._sink.topics, on_assign=self._assigned, on_revoke=self._gone, on_lost=self._gone
            )
            while not self._sink.is_stopping and self._error is None:
                self._turn()
            while self._error is None and self._pending and self._link.is_up:
                self._store()
            self._show_at = 0.0
            self._show()
        finally:
            self._consumer.close()
            self._assignment.close()
            self._database.close()
            self._sink.aside.close()
        if self._error is not None:
            raise self._error

    def _turn(self) -> None:
        room = self._sink.batch_messages - len(self._pending)
        wait = POLL_SECONDS
        if self._pending:
            wait = min(wait, max(0.0, self._due_at() - time.monotonic()))
        for raw in messages(self._consumer, wait, max(room, 1)):
            self._received(raw)
        if not self._link.is_up:
            self._link.connect()
        if self._link.is_up and self._error is None:
            self._claim()
            if self._is_due():
                self._store()
        self._show()

    # Messages

    def _received(self, raw: Any) -> None:
        error = raw.error()
        share = self._shares.get((raw.topic(), raw.partition()))
        if error is not None and error.code() == KafkaError._AUTO_OFFSET_RESET and share is not None:
            # The log does not hold what comes next any more: who claims it anew decides where to go on.
            self._retreat([(raw.topic(), raw.partition())], 0.0)
            return
        if error is not None:
            self._error = self._error or self._assignment.judge(raw, error)
            return
        if share is None or not share.is_claimed or raw.offset() < share.next_offset:
            return
        if not self._pending:
            self._pending_since = time.monotonic()
        self._pending.append(from_raw(raw))
        share.next_offset = raw.offset() + 1

    def _due_at(self) -> float:
        return self._pending_since + self._sink.batch_seconds

    def _is_due(self) -> bool:
        return bool(self._pending) and (
            len(self._pending) >= self._most or time.monotonic() >= self._due_at()
        )

    # The transaction

    def _store(self) -> None:
        batch = self._pending[: self._most]
        began = time.monotonic()
        failed = self._store_all(batch)
        if failed is None:
            self._most = min(self._most * 2, self._sink.batch_messages)
        elif self._sink.failures is None or isinstance(failed.error, UnusableHandler):
            if failed.index is not None:
                failed.error.add_note(f"while handling {batch[failed.index].place}")
            raise failed.error
        elif failed.index is None:
            self._most = max(1, len(batch) // 2)
        else:
            self._failed_on(batch, failed.index, failed.error, began)

    def _failed_on(self, batch: Sequence[Message], index: int, error: Exception, began: float) -> None:
        """What came before the message is stored; then it is judged."""
        message = batch[index]
        if index:
            failed = self._store_all(batch[:index])
            if failed is not None:
                # It did not fail a moment ago. Its turn comes first.
                if failed.index is None:
                    self._most = max(1, index // 2)
                    return
                message, error = batch[failed.index], failed.error
            elif self._pending[:1] != [message]:
                return
        failures = self._sink.failures
        assert failures is not None
        verdict = failures.judge(message, error, time.monotonic(), began)
        if isinstance(verdict, Again):
            say(f"{message.place} is tried again in {verdict.seconds:.1f} s: {described(error)}")
            self.tally.add("holdfast_consumer_retries_total")
            self._retreat([(message.topic, message.partition)], verdict.seconds)
            return
        try:
            self._sink.aside(message, verdict.reason, error, failures.attempts(message))
        except TimeoutError:
            # Told to stop while no broker answers: the message stays where it is.
            self._retreat([(message.topic, message.partition)], RETRY_SECONDS)
            return
        say(f"{message.place} was set aside: {verdict.reason}")
        failures.set_aside(message)

    def _store_all(self, batch: Sequence[Message]) -> HandlerFailure | None:
        """One transaction, if it can be; returns how the handler failed, if it did."""
        advances = self._advances(batch)
        if not self._are_the_same_topics(advances):
            return None
        failures = self._sink.failures
        wanted = batch if failures is None else [each for each in batch if not failures.is_set_aside(each)]
        try:
            self._store_patiently(advances, wanted)
        except self._reasons as error:
            return self._not_stored(error, batch, wanted)
        except Superseded as elsewhere:
            say(str(elsewhere))
            self._retreat(elsewhere.keys, RECLAIM_SECONDS)
            return None
        self._link.stored()
        self.tally.add("holdfast_consumer_commits_total")
        self._pending = self._pending[len(batch) :]
        self.stored += len(wanted)
        for each in advances:
            self._shares[each.key].position = each.new
            if failures is not None:
                failures.passed(each.key, each.new)
            self._unshown[each.key] = each.new
        return None

    def _not_stored(
        self, error: Exception, batch: Sequence[Message], wanted: Sequence[Message]
    ) -> HandlerFailure | None:
        """A transaction was rolled back: put it off where the database is to blame, or tell how the handler failed."""
        self.tally.add("holdfast_consumer_commit_failures_total")
        trouble = _trouble(self._database, error)
        if trouble is not Trouble.FAILED:
            self._disconnected(error, trouble)
            return None
        if isinstance(error, RefusedAtCommit) and wanted and isinstance(error.__cause__, Exception):
            # Whose it is shows when a message is alone in its transaction.
            error = HandlerFailure(0 if len(wanted) == 1 else None, error.__cause__)
        if not isinstance(error, HandlerFailure):
            raise error
        if error.index is None or len(wanted) == len(batch):
            return error
        return HandlerFailure(batch.index(wanted[error.index]), error.error)

    def _advances(self, batch: Iterable[Message]) -> list[Advance]:
        last = {(message.topic, message.partition): message.offset for message in batch}
        return [
            Advance(*key, self._shares[key].topic_id, self._shares[key].position, offset + 1)
            for key, offset in last.items()
        ]

    def _store_patiently(self, advances: Iterable[Advance], batch: Sequence[Message]) -> None:
        """A transaction that another one was in the way of is tried again."""
        is_pipelined = self._is_pipelined

        def work(connection: Any) -> None:
            if batch:
                with self._database.pipeline() if is_pipelined else nullcontext():
                    self._handler(batch, connection)

        attempts = 0
        while True:
            try:
                self._database.store(self._sink.group, self._owner, advances, work)
            except self._reasons as error:
                trouble = _trouble(self._database, error)
                if is_pipelined and trouble is Trouble.FAILED:
                    # It may be the answer to any statement before: whose it is shows without the pipeline.
                    is_pipelined = False
                    continue
                attempts += 1
                if trouble is not Trouble.AGAIN or attempts == BUSY_ATTEMPTS:
                    raise
                say(f"a transaction is tried again: {str(error).strip()}")
                time.sleep(BUSY_SECONDS * attempts)
            else:
                # A handler that fails in a pipeline alone does something that cannot be done in one, such as COPY.
                self._is_pipelined = is_pipelined
                return

    def _are_the_same_topics(self, advances: Iterable[Advance]) -> bool:
        """What was read last may be of another topic of the name. Who claims it anew decides whether to go on there."""
        expected = {each.topic: each.topic_id for each in advances}
        ids = self._topic_ids(expected)
        others = [key for key in self._shares if key[0] in expected and ids.get(key[0]) != expected[key[0]]]
        if others:
            self._retreat(others, RETRY_SECONDS if any(key[0] not in ids for key in others) else 0.0)
        return not others

    def _topic_ids(self, topics: Collection[str]) -> dict[str, str]:
        """The ids of these topics, without those that are gone; none when they cannot be had now."""
        ids: dict[str, str] = {}
        try:
            ids = self._ids.known(topics)
        except KafkaException as error:
            say(f"the topics cannot be looked up: {error.args[0].str()}; nothing is stored until they can")
        else:
            gone = set(topics) - ids.keys()
            for topic in sorted(gone - self._missing):
                say(f"topic '{topic}' is gone; nothing of it is stored, unless it comes back")
            self._missing = (self._missing | gone) - ids.keys()
        return ids

    def _recreated(self, topic: str, stored: str, now: str) -> TopicRecreated:
        return TopicRecreated(
            f"topic {topic} was deleted and recreated (id {now}; the committed offsets of group {self._sink.group} in "
            f"{self._database.name} are of {stored}). Going on would skip or repeat messages. If the new topic is to "
            f"be read from its beginning: lost_offsets='earliest', or delete from holdfast_positions "
            f"where group_id = '{self._sink.group}' and topic = '{topic}'"
        )

    def _show(self) -> None:
        if not self._unshown or time.monotonic() < self._show_at:
            return
        self._show_at = time.monotonic() + SHOW_SECONDS
        offsets = [TopicPartition(*key, position) for key, position in self._unshown.items()]
        self._unshown = {}
        try:
            self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            say(f"committed offsets cannot be shown to the group: {error.args[0].str()}")

    # The connection

    def _disconnected(self, error: BaseException, trouble: Trouble) -> None:
        what = "the connection is lost" if trouble is Trouble.LOST else "nothing can be stored now"
        self._link.lost(f"{what}: {str(error).strip()}")
        # Whether the last transaction was committed is not known here. The rows know.
        self._retreat(self._shares, 0.0)

    # Claims

    def _retreat(self, keys: Iterable[PartitionKey], seconds: float) -> None:
        """Forget what was read of these partitions and not stored, and claim them anew after so long."""
        if not (going := set(keys)):
            return
        claim_at = time.monotonic() + seconds
        self._consumer.pause([TopicPartition(*key) for key in going])
        for key in going:
            self._shares[key].is_claimed = False
            self._shares[key].claim_at = claim_at
        self._forget(going)

    def _forget(self, keys: Collection[PartitionKey]) -> None:
        self._pending = [each for each in self._pending if (each.topic, each.partition) not in keys]

    def _claim(self) -> None:
        now = time.monotonic()
        due = [key for key, share in self._shares.items() if not share.is_claimed and share.claim_at <= now]
        if not due:
            return
        ids = self._topic_ids({topic for topic, _ in due})
        self._retreat([key for key in due if key[0] not in ids], RETRY_SECONDS)
        due = [key for key in due if key[0] in ids]
        if not due:
            return
        try:
            stored = self._claimed(due, ids)
            for key in due:
                self._begin(key, stored[key], ids[key[0]])
        except Superseded as elsewhere:
            say(str(elsewhere))
            self._retreat(due, RECLAIM_SECONDS)
        except KafkaException as error:
            say(f"partitions cannot be begun: {error.args[0].str()}; trying again")
            self._retreat(due, RETRY_SECONDS)
        except ClientError as error:
            self._error = error
        except self._database.errors as error:
            trouble = self._database.judge(error)
            if trouble is Trouble.FAILED:
                raise
            if trouble is Trouble.AGAIN:
                self._retreat(due, RETRY_SECONDS)
            else:
                self._disconnected(error, trouble)

    def _claimed(self, keys: Sequence[PartitionKey], ids: Mapping[str, str]) -> dict[PartitionKey, Stored]:
        known = self._database.positions(self._sink.group, keys)
        starts = [
            Start(topic, partition, ids[topic], self._beginning(topic, partition))
            for topic, partition in keys
            if (topic, partition) not in known
        ]
        return self._database.claim(self._sink.group, self._owner, keys, starts)

    def _beginning(self, topic: str, partition: int) -> int:
        ends = self._consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=ANSWER_SECONDS)
        if ends is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return int(ends[0])

    def _begin(self, key: PartitionKey, stored: Stored, topic_id: str) -> None:
        """Read on from the committed offset in the database."""
        if stored.topic_id != topic_id:
            if self._sink.lost_offsets == "stop":
                raise self._recreated(key[0], stored.topic_id, topic_id)
            start = self._assignment.start_of_recreated(key, topic_id, stored.topic_id)
            begin = Start(*key, topic_id, start)
            self._database.begin_anew(self._sink.group, self._owner, begin, stored.topic_id)
        elif (start := self._assignment.start(TopicPartition(*key, stored.position))) != stored.position:
            # Somebody decided with `lost_offsets` where to go on.
            step = Advance(*key, topic_id, stored.position, start)
            self._database.store(self._sink.group, self._owner, [step], lambda connection: None)
        place = TopicPartition(*key, start)
        seek(self._consumer, place)
        self._consumer.resume([place])
        self._shares[key] = Share(topic_id, start, start, is_claimed=True)

    # Rebalances

    def _assigned(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        """Take partitions without reading: where reading begins is in the database, which may be away."""
        mine = [TopicPartition(each.topic, each.partition, OFFSET_BEGINNING) for each in partitions]
        self._assignment.assign(mine)
        consumer.pause(mine)
        try:
            _, taken = self._assignment.divide(partitions)
        except KafkaException as error:
            self._error = self._error or error
            return
        self._shares.update({(each.topic, each.partition): Share() for each in taken})

    def _gone(self, consumer: Any, partitions: list[TopicPartition]) -> None:
        """What was read and not stored is read again by whoever has the partition next."""
        keys = {(each.topic, each.partition) for each in partitions}
        for key in keys:
            self._shares.pop(key, None)
            self._unshown.pop(key, None)
        if self._sink.failures is not None:
            self._sink.failures.forget(keys)
        self._forget(keys)
        self._assignment.end(partitions)
