"""Delivering exactly once: messages and the spool's progress in one transaction, and what was refused kept out of it.

Whole groups of the spool go out in one transaction together with a record of how far the spool is then (see
`ProgressTopic`). A message is delivered when its transaction is committed. After any doubt (a new process, a fatal
error, a commit without an answer) a new producer takes over the spool's transactional id, which ends whatever was open,
and reads back how far the spool was delivered: nothing is sent again that was, and nothing is left out that was not.
Readers must read committed.

The record also names the opening of the spool that wrote it. When the spool does not know that opening, more was stored
and delivered than it remembers: it is an older copy. Nothing more is delivered then, since nobody can tell which of its
messages were; see `_refuse_old_copy`.

A refused message ends its transaction. When it was alone, or the broker says which one it was, it is set aside and the
rest is sent again; when not, transactions get smaller until it is alone, and grow again behind it.

The progress of spools is in Kafka itself: one record for each spool, keyed by its id, in a compacted topic. A spool
that delivers exactly once writes its progress into the transaction that delivers the messages: both count, or
neither. So the record that was committed last tells how far the spool was delivered, whatever became of the process and
its files in between. It is read back after `init_transactions`, which has ended whatever was open.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from struct import Struct
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.direct import is_fatal
from holdfast.client.settings import INFINITE, Settings, admin_settings, shared_settings
from holdfast.client.spool.deliverer import BROKEN_SECONDS, IDLE_SECONDS, Deliverer
from holdfast.client.spool.format import DamagedSpool, frame, read_frame
from holdfast.client.spool.groups import SpooledDelivery
from holdfast.client.spool.marks import ID_HEADER, Marks
from holdfast.client.spool.progress import NOTHING, Progress, decode_progress, encode_progress, merged
from holdfast.client.spool.set_aside import (
    BATCH_CODES,
    FINAL_CODES,
    REFUSED_CODES,
    misdated_places,
    place_to_hold,
)

TRANSACTION_BYTES: Final = 8 * 1024 * 1024
"""About how much goes out in one transaction: what is sent again when one is taken back."""
TRANSACTION_TIMEOUT_MS: Final = 60_000
ANSWER_SECONDS: Final = 1.0
"""How long one call waits for brokers before it is looked whether it is time to end."""
SERVE_SECONDS: Final = 0.05
LOOK_SECONDS: Final = 2.0
"""Between two questions which cluster answers, while a transaction is under way."""
MESSAGES_MAX: Final = 1 << 30


PROGRESS_TOPIC: Final = "holdfast-spool-progress"
REPLICAS_MAX: Final = 3
TOPIC_SETTINGS: Final = {
    "cleanup.policy": "compact",
    # Small segments, so that compaction keeps up and reading back stays short.
    "segment.bytes": str(16 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
}
TOPIC_ANSWER_SECONDS: Final = 5.0
READ_SECONDS: Final = 0.5


_OPENING: Final = Struct(">q")


class Told(NamedTuple):
    """What brokers were told last of a spool."""

    progress: Progress = NOTHING
    opening: int = 0
    """Of the spool, by the process that told it; 0 when an earlier version did, or nobody."""


def encode_told(told: Told) -> bytes:
    return encode_progress(told.progress) + frame(_OPENING.pack(told.opening))


def decode_told(data: bytes) -> Told:
    """Earlier versions read and write the progress alone."""
    progress = decode_progress(data)
    following = data[len(encode_progress(progress)) :]
    body = read_frame(following, 0, 0)
    return Told(progress, _OPENING.unpack(body.data)[0] if body is not None else 0)


class ProgressTopic:
    """Reads and makes the topic. Every call may raise `KafkaException`; then nothing is known."""

    def __init__(self, settings: Settings) -> None:
        self._settings = shared_settings(settings)

    def make(self) -> None:
        """Create the topic when there is none."""
        admin = AdminClient(admin_settings(self._settings))
        found = admin.list_topics(timeout=TOPIC_ANSWER_SECONDS)
        if PROGRESS_TOPIC in found.topics and found.topics[PROGRESS_TOPIC].error is None:
            return
        replicas = min(REPLICAS_MAX, len(found.brokers))
        settings = dict(TOPIC_SETTINGS)
        if replicas == REPLICAS_MAX:
            settings["min.insync.replicas"] = str(REPLICAS_MAX - 1)
        made = admin.create_topics([NewTopic(PROGRESS_TOPIC, 1, replicas, config=settings)])
        try:
            made[PROGRESS_TOPIC].result(TOPIC_ANSWER_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def read(self, spool_id: str, is_over: Callable[[], bool]) -> Told | None:
        """How far the spool was delivered, by what was committed; None when it was `is_over` before that was known."""
        ends = self._ends()
        consumer = RawConsumer(
            {
                **self._settings,
                "group.id": f"{PROGRESS_TOPIC}-{spool_id}",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        try:
            consumer.assign([TopicPartition(PROGRESS_TOPIC, partition, 0) for partition in ends])
            return self._read_through(consumer, ends, spool_id.encode(), is_over)
        finally:
            consumer.close()

    def _ends(self) -> dict[int, int]:
        """Where each partition ends, open transactions included: everything committed until now is in front of it."""
        consumer = RawConsumer(
            {**self._settings, "group.id": PROGRESS_TOPIC, "isolation.level": "read_uncommitted"}
        )
        try:
            found = consumer.list_topics(PROGRESS_TOPIC, timeout=TOPIC_ANSWER_SECONDS).topics[PROGRESS_TOPIC]
            if found.error is not None:
                raise KafkaException(found.error)
            ends: dict[int, int] = {}
            for partition in found.partitions:
                where = TopicPartition(PROGRESS_TOPIC, partition)
                ends[partition] = consumer.get_watermark_offsets(where, timeout=TOPIC_ANSWER_SECONDS)[1]
            return ends
        finally:
            consumer.close()

    @staticmethod
    def _read_through(
        consumer: Any, ends: dict[int, int], key: bytes, is_over: Callable[[], bool]
    ) -> Told | None:
        left = {partition for partition, end in ends.items() if end > 0}
        told = Told()
        while left:
            if is_over():
                return None
            for message in consumer.consume(1000, READ_SECONDS):
                error = message.error()
                if error is not None and error.code() != KafkaError._PARTITION_EOF:
                    raise KafkaException(error)
                if error is None and message.key() == key and message.value():
                    # Progress only grows; the highest is the last, and one partition holds all records of a spool.
                    found = decode_told(message.value())
                    told = Told(merged(told.progress, found.progress), found.opening)
                reached = message.offset() + (error is None)
                if reached >= ends[message.partition()]:
                    left.discard(message.partition())
        return told


def wait_for_topic(
    topic: ProgressTopic, is_over: Callable[[float], bool], say: Callable[[str], None]
) -> bool:
    """Make the topic, however long it takes for brokers to answer; false when it was `is_over` before."""
    said = ""
    while True:
        try:
            topic.make()
        except KafkaException as error:
            reason = str(error.args[0].str())
            if reason != said:
                said = reason
                say(f"{PROGRESS_TOPIC} cannot be looked up or made yet: {reason}")
            if is_over(1.0):
                return False
        else:
            return True


class _Broken(Exception):
    """The producer is of no more use."""


class _TakenBack(Exception):
    """The transaction was aborted."""


class TransactionalDeliverer(Deliverer):
    def __init__(self, *arguments: Any, topic: ProgressTopic | None = None, **named: Any) -> None:
        super().__init__(*arguments, **named)
        timeout_ms = int(self._settings.get("transaction.timeout.ms", TRANSACTION_TIMEOUT_MS))
        self._transactional: Settings = {
            **self._settings,
            "transactional.id": f"holdfast-spool-{self.spool_id}",
            "transaction.timeout.ms": timeout_ms,
            # A transaction that takes longer is taken back, and its messages are sent in the next one.
            "message.timeout.ms": timeout_ms,
        }
        self._transactional.setdefault("partitioner", "murmur2_random")
        self._topic = topic or ProgressTopic(self._settings)
        self._producer: Any = None
        self._marks = Marks(self.spool_id)
        self._look_due = 0.0
        self._asking = self._make({**self._settings, "message.timeout.ms": INFINITE})
        self._messages_max = MESSAGES_MAX
        """How many messages the next transaction takes at most."""
        self._places: dict[SpooledDelivery, tuple[int, int, int]] = {}
        """Where the messages of the open transaction are, if it is committed."""
        self._refusals: list[tuple[SpooledDelivery, KafkaError]] = []
        self._lost: str | None = None
        """Why the transaction cannot be committed, when it is not for a message's sake."""

    def _metadata(self, topic: str | None, timeout: float) -> Any:
        asking = self._asking
        return None if asking is None else asking.list_topics(topic, timeout=timeout)

    def _is_confirmed(self) -> bool:
        """A transaction is committed by the cluster that it was begun with: `_take_over` has looked."""
        self.home.is_astray = False
        return True

    def _release(self) -> None:
        self._release_producer()

    # The thread

    def _deliver(self) -> None:
        while not self._closing.is_set():
            try:
                if self._is_at_home() and self._take_over():
                    self._transact_until_broken()
            except (_Broken, KafkaException) as broken:
                reason = broken.args[0].str() if isinstance(broken, KafkaException) else broken
                self.say(f"going on with a new producer: {reason}")
                self._release_producer()
                self._closing.wait(BROKEN_SECONDS)

    def _release_producer(self) -> None:
        producer, self._producer = self._producer, None
        if producer is not None:
            producer.purge()
            with suppress(KafkaException):
                producer.poll(0)

    def _is_at_home(self) -> bool:
        """Wait for brokers of the right cluster; false when it is time to end."""
        while not self._check_cluster():
            self._save_when_due()
            if self._closing.wait(IDLE_SECONDS):
                return False
        return wait_for_topic(self._topic, self._closing.wait, self.say)

    def _take_over(self) -> bool:
        """A new producer, and what the brokers know to be delivered; false when it is time to end."""
        self._producer = self._make(self._transactional)
        while True:
            try:
                self._producer.init_transactions(ANSWER_SECONDS)
                break
            except KafkaException as error:
                if not _may_retry(error):
                    raise
            if self._closing.is_set():
                return False
            self._save_when_due()
        told = self._topic.read(self.spool_id, self._closing.is_set)
        # Once more: from here on the producer's transactions are those of this cluster.
        if told is None or not self._check_cluster():
            return False
        self._resume(told)
        return True

    def _resume(self, told: Told) -> None:
        """What the brokers know to be delivered is done, whatever was noted here."""
        known, openings = told.progress, self.home.identity.now.openings
        if told.opening and told.opening not in openings:
            self._refuse_old_copy("a process that is not known here has delivered from it")
        later = openings[openings.index(told.opening) + 1 :] if told.opening else openings
        counters = self._store.counters_before(later)
        for where, following in known.confirmed.items():
            if following > counters.get(where, 0):
                self._refuse_old_copy(
                    f"message {following - 1} for {where[0]} was delivered, and is not known here"
                )
        self.home.identity.told(told.opening)
        for item in self.window.unsettled():
            if item.sequence < known.confirmed.get(item.where, 0):
                self._settle_delivered(item)
        self._places.clear()
        self._after_settling()
        self._rewind(merged(known, self.window.progress()))

    def _refuse_old_copy(self, why: str) -> None:
        raise DamagedSpool(
            f"{self._store.directory} is an older copy of this spool: {why}. Nobody can tell which of its messages "
            "were delivered since, so none of them is sent, and new ones are only stored. To have all of them sent, "
            "some perhaps a second time, end the producer and call `holdfast spool renew`"
        )

    # Transactions

    def _transact_until_broken(self) -> None:
        while not self._closing.is_set():
            self._save_when_due()
            self._look_at_places()
            self._gather()
            batch = self._to_send_again()
            batch = batch[: self._messages_max]
            if not batch:
                self._producer.poll(0)
                self._rest()
                continue
            try:
                self._transact(batch)
                self._messages_max = min(MESSAGES_MAX, self._messages_max * 2)
            except _TakenBack:
                self._look_at_refusals(batch)

    def _look_at_places(self) -> None:
        """Hold what takes no messages now, and release what takes them again."""
        released, hopeless = self._look_at_held() if self._topics.held else ((), {})
        if self.home.elsewhere is not None:
            raise _Broken("the brokers are of another cluster")
        self._look_due = time.monotonic() + LOOK_SECONDS
        if self._to_hold or released or hopeless or self._is_room_short():
            self._hold_and_release(released, hopeless)
            # The producer would go on taking a topic for missing; a new one looks for it.
            raise _Broken("what waits has changed")

    def _gather(self) -> None:
        """Whole groups, as many as one transaction takes."""
        while self.window.bytes < TRANSACTION_BYTES:
            group = self._feed.take(from_disk=True)
            if group is None:
                return
            self.window.add(group)
            if self.window.advance():
                self._waiting.wake()

    def _transact(self, batch: Sequence[SpooledDelivery]) -> None:
        self._places.clear()
        self._refusals.clear()
        self._lost = None
        self._producer.begin_transaction()
        refused_here: list[tuple[SpooledDelivery, KafkaError]] = []
        for item in batch:
            self._produce(item, refused_here)
        self._refuse(refused_here)
        # What could not be set aside for want of room is not counted as done.
        done = {item for item in batch if not item.is_settled} - self.aside.pending
        after = self.window.progress_with(done)
        self._produce_progress(after)
        self._wait_for_reports(len(done))
        self._commit()
        for item in done:
            self._settle_delivered(item)
        self._places.clear()
        self._after_settling()

    def _produce(self, item: SpooledDelivery, refused_here: list[tuple[SpooledDelivery, KafkaError]]) -> None:
        partition = item.partition
        assert partition is not None, "undecided messages are not sent"
        assert item.group is not None, "a message is stored before it is sent"
        mark = (ID_HEADER, self._marks[item.group.opening, item.topic, partition, item.line] % item.sequence)
        while True:
            try:
                self._producer.produce(
                    item.topic,
                    item.value,
                    item.key,
                    partition,
                    partial(self._reported, item),
                    None,
                    item.timestamp_ms,
                    [*item.headers, mark],
                )
            except BufferError:
                self._poll(self._producer, SERVE_SECONDS)
                self._look_at_doubts()
            except KafkaException as refused:
                error = refused.args[0]
                if is_fatal(error):
                    raise
                if self._is_to_wait(item, error) or error.code() not in FINAL_CODES:
                    self._lost = error.str()
                    self._look_at_doubts()
                refused_here.append((item, error))
                return
            else:
                return

    def _produce_progress(self, progress: Progress) -> None:
        while True:
            try:
                self._producer.produce(
                    PROGRESS_TOPIC,
                    encode_told(Told(progress, self.home.identity.opening)),
                    self.spool_id.encode(),
                    on_delivery=self._progress_reported,
                )
            except BufferError:
                self._poll(self._producer, SERVE_SECONDS)
                self._look_at_doubts()
            else:
                return

    def _reported(self, item: SpooledDelivery, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self._places[item] = (message.partition(), message.offset(), message.timestamp()[1])
        elif self._is_to_wait(item, error):
            self._lost = self._lost or error.str()
        elif error.code() in FINAL_CODES:
            self._refusals.append((item, error))
        else:
            self._lost = self._lost or error.str()

    def _is_to_wait(self, item: SpooledDelivery, error: KafkaError) -> bool:
        """Whether a message waits for what may pass. Timestamps are judged together (`_look_at_refusals`)."""
        place = place_to_hold(item, error)
        if place is None or error.code() == KafkaError.INVALID_TIMESTAMP:
            return False
        self._to_hold.setdefault(place, error.str())
        return True

    def _progress_reported(self, error: KafkaError | None, message: Any) -> None:
        if error is not None:
            self._lost = self._lost or f"{PROGRESS_TOPIC}: {error.str()}"

    def _wait_for_reports(self, count: int) -> None:
        while len(self._places) + len(self._refusals) < count or len(self._producer):
            self._poll(self._producer, SERVE_SECONDS)
            self._look_at_cluster()
            self._look_at_doubts()
        self._look_at_doubts()

    def _look_at_cluster(self) -> None:
        """A transaction takes its time where nobody answers; where another cluster does, it never ends."""
        if time.monotonic() >= self._look_due:
            self._check_cluster()
            self._look_due = time.monotonic() + LOOK_SECONDS
        if self.home.elsewhere is not None:
            raise _Broken("the brokers are of another cluster")

    def _look_at_doubts(self) -> None:
        """Take the transaction back when it cannot be committed."""
        if self._refusals or self._lost is not None or self._closing.is_set():
            self._abort()
            raise _TakenBack

    def _poll(self, producer: Any, seconds: float) -> None:
        try:
            producer.poll(seconds)
        except KafkaException as error:
            raise _Broken(error.args[0].str()) from error

    def _commit(self) -> None:
        while True:
            try:
                self._producer.commit_transaction(ANSWER_SECONDS)
                return
            except KafkaException as error:
                if error.args[0].txn_requires_abort():
                    self._lost = error.args[0].str()
                    self._abort()
                    raise _TakenBack from error
                if not _may_retry(error):
                    raise
            self._look_at_cluster()
            if self._closing.is_set():
                raise _Broken("the end came before the answer of the brokers")

    def _abort(self) -> None:
        while True:
            try:
                self._producer.abort_transaction(ANSWER_SECONDS)
                return
            except KafkaException as error:
                if not _may_retry(error):
                    raise
            self._look_at_cluster()
            if self._closing.is_set():
                # Whoever takes over ends it.
                raise _Broken("the end came before the answer of the brokers")

    # What became of messages

    def _settle_delivered(self, item: SpooledDelivery) -> None:
        group = item.group
        assert group is not None, "a message is stored before it is sent"
        partition, offset, timestamp_ms = self._places.get(item, (item.partition or 0, -1, item.timestamp_ms))
        item.value = None
        item.set_delivered(partition, offset, timestamp_ms)
        group.left -= 1

    def _after_settling(self) -> None:
        self.window.advance()
        self.window.forget()
        self._waiting.wake()

    def _look_at_refusals(self, batch: Sequence[SpooledDelivery]) -> None:
        """Set aside what was surely meant; when nothing was, the next transaction is smaller."""
        together = Counter((item.topic, item.partition) for item, _ in self._refusals)
        misdated = misdated_places(self._refusals)
        for item, error in self._refusals:
            if error.code() == KafkaError.INVALID_TIMESTAMP and (item.topic, item.partition) not in misdated:
                self._to_hold.setdefault((item.topic, item.partition), error.str())
        meant = [
            (item, error)
            for item, error in self._refusals
            if (item.topic, item.partition) not in self._to_hold
            and (
                error.code() in REFUSED_CODES
                or len(batch) == 1
                or (error.code() in BATCH_CODES and together[item.topic, item.partition] == 1)
            )
        ]
        if meant:
            self._refuse(meant)
            self._after_settling()
        elif self._refusals and not self._to_hold:
            self._messages_max = max(1, len(batch) // 2)
        elif not self._closing.is_set() and not self._to_hold:
            self.say(f"a transaction was taken back, and is sent again: {self._lost}")
            self._closing.wait(BROKEN_SECONDS)


def _may_retry(error: KafkaException) -> bool:
    """Whether the same call may succeed when it is repeated."""
    return bool(error.args[0].retriable()) or error.args[0].code() == KafkaError._TIMED_OUT
