"""The progress of spools in Kafka itself: one record for each spool, keyed by its id, in a compacted topic.

A spool that delivers exactly once writes its progress into the transaction that delivers the messages: both count, or
neither. So the record that was committed last tells how far the spool was delivered, whatever became of the process and
its files in between. It is read back after `init_transactions`, which has ended whatever was open.
"""

from __future__ import annotations

from collections.abc import Callable
from struct import Struct
from typing import Any, Final, NamedTuple

from confluent_kafka import Consumer as RawConsumer
from confluent_kafka import KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, NewTopic

from holdfast.client.settings import Settings, admin_settings, shared_settings
from holdfast.client.spool.format import frame, read_frame
from holdfast.client.spool.progress import NOTHING, Progress, decode_progress, encode_progress, merged

PROGRESS_TOPIC: Final = "holdfast-spool-progress"
REPLICAS_MAX: Final = 3
TOPIC_SETTINGS: Final = {
    "cleanup.policy": "compact",
    # Small segments, so that compaction keeps up and reading back stays short.
    "segment.bytes": str(16 * 1024 * 1024),
    "min.cleanable.dirty.ratio": "0.1",
}
ANSWER_SECONDS: Final = 5.0
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
        found = admin.list_topics(timeout=ANSWER_SECONDS)
        if PROGRESS_TOPIC in found.topics and found.topics[PROGRESS_TOPIC].error is None:
            return
        replicas = min(REPLICAS_MAX, len(found.brokers))
        settings = dict(TOPIC_SETTINGS)
        if replicas == REPLICAS_MAX:
            settings["min.insync.replicas"] = str(REPLICAS_MAX - 1)
        made = admin.create_topics([NewTopic(PROGRESS_TOPIC, 1, replicas, config=settings)])
        try:
            made[PROGRESS_TOPIC].result(ANSWER_SECONDS)
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
            found = consumer.list_topics(PROGRESS_TOPIC, timeout=ANSWER_SECONDS).topics[PROGRESS_TOPIC]
            if found.error is not None:
                raise KafkaException(found.error)
            ends: dict[int, int] = {}
            for partition in found.partitions:
                where = TopicPartition(PROGRESS_TOPIC, partition)
                ends[partition] = consumer.get_watermark_offsets(where, timeout=ANSWER_SECONDS)[1]
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
