"""The ledger of a Kafka sink: a compacted topic with one partition per writer.

The last committed record of partition w says which batch writer w has; it was written in the transaction that wrote the
rows. A record holds the entry, the number of writers the batch was made with, and the entry before it: when only some
of its writers have a batch, the sink as a whole stands at the one before, and the batch is finished with its own number
of writers. It also names the topic of the rows with its id: one that was deleted, or created again, lacks them; and it
counts and digests the writer's own share of the batch, so that whoever finishes the batch can see that shares are still
what they were.

The header `hf-holder` of a record names the driver's take-over since which nobody else may write there
(`kafka_sending`). A driver that lets no task write leaves it out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicCollection, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

from holdfast.client.settings import RECOVERY, shared_settings
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import to_text
from holdfast.pipeline.sinks.base import SinkError, SinkUnavailable
from holdfast.pipeline.sinks.kafka_writer import AWAY, LOGGER

ANSWER_SECONDS = 30.0
LOOK_SECONDS = 10.0
"""How long somebody waits who only wants to look."""
LOOK_BACK = 64
"""Offsets read from the end first; a transaction of a writer takes two. Compaction keeps the rest short."""


HOLDER = "hf-holder"
"""The header that names a take-over."""


class Topic(NamedTuple):
    """One incarnation of a topic."""

    name: str
    id: str


class Sent(NamedTuple):
    """What one writer has of a batch."""

    rows: int
    digest: str
    """Of the lineage of its rows, in hexadecimal."""


@dataclass(frozen=True)
class LedgerRecord:
    """What one writer wrote last."""

    entry: Entry
    writers: int
    previous: Entry | None
    topic: Topic | None = None
    """That has the rows; nothing: an earlier holdfast wrote this, or the brokers give no ids."""
    sent: Sent | None = None
    """Nothing: an earlier holdfast wrote this."""

    def encode(self) -> bytes:
        return to_text(
            {
                **({} if self.topic is None else {"topic": list(self.topic)}),
                **({} if self.sent is None else {"sent": list(self.sent)}),
                "entry": self.entry.as_json(),
                "writers": self.writers,
                "previous": None if self.previous is None else self.previous.as_json(),
            }
        ).encode()

    @classmethod
    def decode(cls, data: bytes) -> LedgerRecord:
        """`ValueError` or `KeyError` for what is none."""
        document = json.loads(data)
        previous = document["previous"]
        return cls(
            Entry.from_json(document["entry"]),
            int(document["writers"]),
            None if previous is None else Entry.from_json(previous),
            Topic(*document["topic"]) if "topic" in document else None,
            Sent(*document["sent"]) if "sent" in document else None,
        )


class Last(NamedTuple):
    """The last committed record of a partition of the ledger."""

    value: bytes | None = None
    record: LedgerRecord | None = None
    holder: str = ""
    """Empty: no task may write there."""


@dataclass(frozen=True)
class Standing:
    """Where the sink as a whole stands."""

    last: Entry | None = None
    """The newest batch that every writer of it has."""
    unfinished: LedgerRecord | None = None
    """A batch some of its writers have and others have not."""
    done: frozenset[int] = frozenset()
    """Those that have it."""
    topic: Topic | None = None
    """That has the rows."""
    sent: Mapping[int, Sent] = field(default_factory=dict)
    """By writer that has the unfinished batch, its share of it."""


def standing_of(records: Sequence[LedgerRecord | None]) -> Standing:
    """What the last records of all writers say together."""
    found = [record for record in records if record is not None]
    if not found:
        return Standing()
    newest = max(found, key=lambda record: record.entry.number)
    number = newest.entry.number
    done = frozenset(
        writer for writer, record in enumerate(records) if record and record.entry.number == number
    )
    if done >= set(range(newest.writers)):
        return Standing(newest.entry, topic=newest.topic)
    sent = {at: record.sent for at, record in enumerate(records) if record and at in done and record.sent}
    return Standing(newest.previous, newest, done, newest.topic, sent)


class LedgerTopic:
    """Creates and reads the topic."""

    def __init__(
        self, name: str, sink: str, pipeline: str, settings: Mapping[str, Any], *, is_writing: bool = True
    ) -> None:
        self.name = name
        self._sink = sink
        self._pipeline = pipeline
        self._settings = {**shared_settings(settings), **RECOVERY}
        self._seconds = ANSWER_SECONDS if is_writing else LOOK_SECONDS
        self._admin: AdminClient | None = None
        self._kept: ExitStack | None = None
        self._shared: Consumer | None = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Reads inside share a client: to make one costs more than to read a ledger."""
        with ExitStack() as self._kept:
            try:
                yield
            finally:
                self._kept = self._shared = None

    @contextmanager
    def _reader(self) -> Iterator[Consumer]:
        if self._kept is None:
            with closing(self._consumer()) as consumer:
                yield consumer
            return
        if self._shared is None:
            self._shared = self._kept.enter_context(closing(self._consumer()))
        yield self._shared

    @property
    def admin(self) -> AdminClient:
        if self._admin is None:
            self._admin = AdminClient(dict(self._settings), logger=LOGGER)
        return self._admin

    def partitions(self, topic: str) -> int:
        """How many partitions a topic has; 0 when there is no such topic."""
        metadata = self._ask(lambda: self.admin.list_topics(topic, timeout=self._seconds))
        found = metadata.topics.get(topic)
        if found is None or found.error is not None:
            if found is not None and found.error.code() not in (
                KafkaError.UNKNOWN_TOPIC_OR_PART,
                KafkaError._UNKNOWN_TOPIC,
            ):
                raise SinkError(f"sink {self._sink!r}: topic {topic!r}: {found.error.str()}")
            return 0
        return len(found.partitions)

    def topics(self) -> list[str]:
        return list(self._ask(lambda: self.admin.list_topics(timeout=self._seconds)).topics)

    def topic_id(self, topic: str) -> str | None:
        """Nothing when there is no such topic; empty when its brokers give no ids."""
        asked = self.admin.describe_topics(TopicCollection([topic]), request_timeout=self._seconds)
        try:
            found = asked[topic].result(self._seconds).topic_id
        except KafkaException as error:
            if error.args[0].code() == KafkaError.UNKNOWN_TOPIC_OR_PART:
                return None
            raise self._said(error, "the brokers do not answer") from error
        has_id = found.get_most_significant_bits() or found.get_least_significant_bits()
        return str(found) if has_id else ""

    def create(self, topic: str, partitions: int, config: Mapping[str, str]) -> int:
        """Make a topic with the cluster's default of replicas; one that is there already is fine. Returns how many
        partitions it has."""
        new = NewTopic(topic, num_partitions=partitions, replication_factor=-1, config=dict(config))
        self._await(self.admin.create_topics([new]), KafkaError.TOPIC_ALREADY_EXISTS)
        return self._until(topic, 1)

    def ensure(self, writers: int) -> int:
        """The ledger has a partition for each writer, at least; returns how many it has."""
        have = self.partitions(self.name)
        if have >= writers:
            return have
        if have == 0:
            self.create(self.name, writers, {"cleanup.policy": "compact"})
        else:
            self._await(
                self.admin.create_partitions([NewPartitions(self.name, writers)]),
                KafkaError.INVALID_PARTITIONS,
            )
        self._shared = None  # a client that has seen fewer partitions does not find the new ones at once
        return self._until(self.name, writers)

    def _until(self, topic: str, partitions: int) -> int:
        """Wait for a change of a topic to be known, with leaders."""
        deadline = time.monotonic() + self._seconds
        while True:
            have = self.partitions(topic)
            if have >= partitions:
                return have
            if time.monotonic() > deadline:
                raise SinkError(f"sink {self._sink!r}: topic {topic!r} did not appear")
            time.sleep(0.02)

    def topic_settings(self, topic: str) -> dict[str, str | None]:
        from confluent_kafka.admin import ConfigResource

        resource = ConfigResource(ConfigResource.Type.TOPIC, topic)
        future = self.admin.describe_configs([resource], request_timeout=self._seconds)[resource]
        return {name: found.value for name, found in self._ask(future.result).items()}

    def read(self) -> list[Last]:
        """The last committed record of every partition; none when there is no ledger."""
        count = self.partitions(self.name)
        if count == 0:
            return []
        with self._reader() as consumer:
            return [self._last(consumer, partition) for partition in range(count)]

    def read_one(self, partition: int) -> Last:
        with self._reader() as consumer:
            return self._last(consumer, partition)

    def has_records(self, topic: str) -> bool:
        """Whether a partition of the topic has any."""
        with self._reader() as consumer:
            for partition in range(self.partitions(topic)):
                low, high = self._watermarks(consumer, topic, partition)
                if high > low:
                    return True
        return False

    def _watermarks(self, consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
        place = TopicPartition(topic, partition)
        low, high = self._ask(lambda: consumer.get_watermark_offsets(place, timeout=self._seconds))
        return low, high

    def _consumer(self) -> Consumer:
        return Consumer(
            {
                **self._settings,
                "group.id": f"hf-ledger-reader-{self._pipeline}",
                "enable.auto.commit": False,
                "isolation.level": "read_committed",
                "auto.offset.reset": "earliest",
                "enable.partition.eof": True,
                "fetch.wait.max.ms": 10,
            },
            logger=LOGGER,
        )

    def _last(self, consumer: Consumer, partition: int) -> Last:
        low, high = self._watermarks(consumer, self.name, partition)
        back = LOOK_BACK
        while high > low:
            start = max(low, high - back)
            found = self._last_from(consumer, partition, start)
            try:
                if found is not None:
                    value, holder = found
                    return Last(value, None if value is None else self._decoded(value), holder)
            except (ValueError, KeyError) as error:
                raise SinkError(
                    f"sink {self._sink!r}: the last record of {self.name}-{partition} is no entry of a ledger: "
                    f"somebody else wrote to the topic ({type(error).__name__}: {error})"
                ) from error
            if start == low:
                return Last()
            back *= 8
        return Last()

    def _last_from(self, consumer: Consumer, partition: int, start: int) -> tuple[bytes | None, str] | None:
        """Value and holder of the last record from `start` to the end of what is committed."""
        consumer.assign([TopicPartition(self.name, partition, start)])
        found: tuple[bytes | None, str] | None = None
        deadline = time.monotonic() + self._seconds
        while time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is None:
                continue
            error = message.error()
            if error is None:
                headers: Any = message.headers() or ()
                found = message.value(), dict(headers).get(HOLDER, b"").decode()
            elif error.code() == KafkaError._PARTITION_EOF:
                consumer.unassign()  # it would ask for more
                return found
            elif not error.retriable() and error.code() != KafkaError._TRANSPORT:
                raise SinkError(f"sink {self._sink!r}: reading {self.name}: {error.str()}")
        raise SinkUnavailable(
            f"sink {self._sink!r}: the ledger {self.name} could not be read within {self._seconds:.0f} s"
        )

    def _decoded(self, value: bytes) -> LedgerRecord:
        record = LedgerRecord.decode(value)
        if (record.entry.pipeline, record.entry.sink) != (self._pipeline, self._sink):
            raise SinkError(
                f"sink {self._sink!r}: the ledger {self.name} belongs to the sink {record.entry.sink!r} of the "
                f"pipeline {record.entry.pipeline!r}; rename one of the two"
            )
        return record

    def _await(self, futures: Mapping[str, Any], fine: int) -> None:
        for name, future in futures.items():
            try:
                future.result(timeout=self._seconds)
            except KafkaException as error:
                if error.args[0].code() != fine:
                    raise self._said(error, f"topic {name!r} cannot be made") from error

    def _ask(self, question: Any) -> Any:
        try:
            return question()
        except KafkaException as error:
            raise self._said(error, "the brokers do not answer") from error

    def _said(self, error: KafkaException, what: str) -> SinkError:
        where = self._settings.get("bootstrap.servers")
        reason = error.args[0]
        kind = SinkUnavailable if reason.retriable() or reason.code() in AWAY else SinkError
        return kind(f"sink {self._sink!r}: {what} ({where}): {reason.str()}")
