"""What a group has worked on, remembered apart from its committed offsets.

A group that was away for longer than offsets.retention.minutes has no committed offsets any more, and looks like one
that never was. A new group begins at the beginning. One that was there before would handle everything again, and not
notice what left the log in the meantime (HF305, HF206, HF211): somebody has to decide. So the two must be told apart.

For each partition of which a group has committed an offset there is a mark in a compacted topic, keyed by group, topic
and partition, with the topic's id. A partition without a committed offset and with a mark of its id has lost it; one
without a mark is new to the group (HF304), and so is a topic that was deleted and recreated. A mark is written after a
committed offset was stored and never before, so a mark without a committed offset is no false alarm; that it was
written is noted beside the next committed offset, and a committed offset without that note has its mark written again.
So the topic is read only when a committed offset is missing, and written once for each partition.

What this cannot see: committed offsets that vanish before their mark was written, which takes a moment after the first
commit; groups that never ran with it; a topic of marks that may not be read or made, which is said once, or that
somebody has deleted. In all of these a group begins at the beginning: it repeats, and skips nothing that is still
there.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from queue import Empty, SimpleQueue
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka import Producer as RawProducer
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.process import say
from holdfast.client.settings import admin_settings, producer_settings
from holdfast.client.spool.format import PartitionKey
from holdfast.client.topic_ids import TopicIds

MARKS_TOPIC: Final = "holdfast-groups"
REPLICAS_MAX: Final = 3
TOPIC_SETTINGS: Final = {
    "cleanup.policy": "compact",
    # Small segments, so that compaction keeps up and reading stays short.
    "segment.bytes": str(16 * 1024 * 1024),
}
ANSWER_SECONDS: Final = 10.0
WRITE_SECONDS: Final = 30.0
AGAIN_SECONDS: Final = 30.0
"""How long to leave it after marks could not be written; the next commit asks again."""
CLOSE_SECONDS: Final = 5.0
"""How long marks may take when the member ends; those that are not written by then are written by the next one."""
NOT_ALLOWED: Final = frozenset(
    (
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.POLICY_VIOLATION,
        KafkaError.INVALID_REPLICATION_FACTOR,
    )
)
MISSING: Final = frozenset((KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC))


class Mark(NamedTuple):
    """That a group has had a committed offset of a partition."""

    group: str
    topic: str
    partition: int
    topic_id: str
    since_ms: int

    def encode(self) -> tuple[bytes, bytes]:
        """Key and value of its record."""
        key = json.dumps([self.group, self.topic, self.partition], separators=(",", ":"))
        value = {"topic_id": self.topic_id, "since_ms": self.since_ms}
        return key.encode(), json.dumps(value, separators=(",", ":")).encode()


def decode_mark(key: bytes | None, value: bytes | None) -> Mark | None:
    """The mark in a record; none when it is not one."""
    try:
        group, topic, partition = json.loads(key or b"")
        found = json.loads(value or b"")
        return Mark(str(group), str(topic), int(partition), str(found["topic_id"]), int(found["since_ms"]))
    except (ValueError, TypeError, KeyError):
        return None


def group_marks(topic: str | None, group: str, settings: Mapping[str, Any]) -> GroupMarks | None:
    """The marks of a group; None where it is to keep none."""
    return None if topic is None else GroupMarks(group, settings, say, topic)


class GroupMarks:
    """The marks of one group. `find` is for the thread that asks; `remember` only asks a thread of its own to write."""

    def __init__(
        self,
        group: str,
        settings: Mapping[str, Any],
        say: Callable[[str], None],
        topic: str = MARKS_TOPIC,
    ) -> None:
        self._group = group
        self._shared = admin_settings(settings)
        self._say = say
        self._topic = topic
        self._asked: set[PartitionKey] = set()
        """Marks that are written, or about to be."""
        self._written: set[PartitionKey] = set()
        self._not_before = 0.0
        self._is_off = False
        """Whether marks cannot be kept here at all."""
        self._work: SimpleQueue[list[PartitionKey] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    # Asking

    def find(self, keys: Collection[PartitionKey]) -> dict[PartitionKey, Mark]:
        """Of partitions without a committed offset those that this group had one of. Raises KafkaException when nobody
        answers."""
        if not keys or self._is_off:
            return {}
        try:
            every = self._read()
            marks = {key: every[key] for key in keys if key in every}
            if not marks:
                return {}
            ids = TopicIds(self._shared).ask({topic for topic, _ in marks})
        except KafkaException as problem:
            if not self._gives_up(problem):
                raise
            return {}
        for topic in sorted({topic for (topic, _), mark in marks.items() if mark.topic_id != ids[topic]}):
            self._say(
                f"topic '{topic}' was recreated since group '{self._group}' worked on it: beginning at its start"
            )
        return {key: mark for key, mark in marks.items() if mark.topic_id == ids[key[0]]}

    def _read(self) -> dict[PartitionKey, Mark]:
        """Every mark of this group."""
        reader = RawConsumer(
            {
                **self._shared,
                "group.id": f"{self._topic}-reader",
                "enable.auto.commit": False,
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
            }
        )
        try:
            found = reader.list_topics(self._topic, timeout=ANSWER_SECONDS).topics[self._topic]
            if found.error is not None:
                raise KafkaException(found.error)
            reader.assign([TopicPartition(self._topic, partition, 0) for partition in found.partitions])
            return self._read_through(reader, len(found.partitions))
        except KafkaException as problem:
            if problem.args[0].code() not in MISSING:
                raise
            return {}
        finally:
            reader.close()

    def _read_through(self, reader: Any, partitions: int) -> dict[PartitionKey, Mark]:
        marks: dict[PartitionKey, Mark] = {}
        ended: set[int] = set()
        deadline = time.monotonic() + ANSWER_SECONDS
        while len(ended) < partitions:
            if time.monotonic() > deadline:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            for raw in reader.consume(1000, 0.02):
                error = raw.error()
                if error is None:
                    mark = decode_mark(raw.key(), raw.value())
                    if mark is not None and mark.group == self._group:
                        marks[mark.topic, mark.partition] = mark
                elif error.code() == KafkaError._PARTITION_EOF:
                    ended.add(raw.partition())
                else:
                    raise KafkaException(error)
        return marks

    # Remembering

    def is_remembered(self, key: PartitionKey) -> bool:
        return key in self._written

    def known(self, key: PartitionKey) -> None:
        """A committed offset says that its mark was written."""
        self._asked.add(key)
        self._written.add(key)

    def remember(self, keys: Iterable[PartitionKey]) -> None:
        """Committed offsets of these partitions are stored: have their marks written, unless they are."""
        new = [key for key in keys if key not in self._asked]
        if not new or self._is_off or time.monotonic() < self._not_before:
            return
        self._asked.update(new)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="holdfast-group-marks", daemon=True)
            self._thread.start()
        self._work.put(new)

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what is left, as long as there is time."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join(seconds)
            self._thread = None

    def _run(self) -> None:
        producer: Any = None
        while (keys := self._work.get()) is not None:
            keys += self._more()
            try:
                if producer is None:
                    self._make_topic()
                    producer = self._make_producer()
                self._write(producer, keys)
            except KafkaException as problem:
                self._asked.difference_update(set(keys) - self._written)
                self._not_before = time.monotonic() + AGAIN_SECONDS
                self._gives_up(problem)

    def _more(self) -> list[PartitionKey]:
        """What else waits to be written; the end stays in the queue."""
        more: list[PartitionKey] = []
        while True:
            try:
                keys = self._work.get_nowait()
            except Empty:
                return more
            if keys is None:
                self._work.put(None)
                return more
            more += keys

    def _make_topic(self) -> None:
        admin = AdminClient(self._shared)
        found = admin.list_topics(timeout=ANSWER_SECONDS)
        if self._topic in found.topics and found.topics[self._topic].error is None:
            return
        replicas = min(REPLICAS_MAX, len(found.brokers))
        made = admin.create_topics([NewTopic(self._topic, 1, replicas, config=dict(TOPIC_SETTINGS))])
        try:
            made[self._topic].result(ANSWER_SECONDS)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise

    def _make_producer(self) -> Any:
        shared = {name: value for name, value in self._shared.items() if name != "bootstrap.servers"}
        settings = producer_settings(str(self._shared["bootstrap.servers"]), shared)
        settings["message.timeout.ms"] = int(WRITE_SECONDS * 1000)
        # A mark that is written twice is the same mark.
        settings["enable.idempotence"] = False
        return RawProducer(settings)

    def _write(self, producer: Any, keys: Collection[PartitionKey]) -> None:
        ids = TopicIds(self._shared).ask({topic for topic, _ in keys})
        now_ms = time.time_ns() // 1_000_000
        problems: list[KafkaError] = []
        for key in keys:

            def reported(error: KafkaError | None, _: Any, key: PartitionKey = key) -> None:
                if error is None:
                    self._written.add(key)
                else:
                    problems.append(error)

            record_key, value = Mark(self._group, *key, ids[key[0]], now_ms).encode()
            producer.produce(self._topic, value, key=record_key, on_delivery=reported)
        producer.flush(WRITE_SECONDS)
        if problems:
            raise KafkaException(problems[0])

    def _gives_up(self, problem: KafkaException) -> bool:
        """Say what is the matter; returns whether it will stay so."""
        error: KafkaError = problem.args[0]
        is_for_good = error.code() in NOT_ALLOWED
        if is_for_good and not self._is_off:
            self._is_off = True
            self._say(
                f"'{self._topic}' cannot be used ({error.str()}): if the committed offsets of group '{self._group}' "
                "expire, it will begin at the beginning without a word (HF305)"
            )
        return is_for_good
