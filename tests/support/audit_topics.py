"""What a pipeline's Kafka sinks and dead letters hold, written without Spark: see `audit_sinks`.

Topics are written to a broker by a transactional producer, or into a `FakeCluster`, as the batches and markers that
such a producer leaves in the log.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

from tests.support.audit_sinks import BATCH_TIME_MS, Lineage
from tests.support.fake_cluster import FakeCluster, FakePartition

from holdfast.client.dead_letter_dialects import Failure, failure_headers
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.sinks.dead_letter import CANNOT_PARSE, NAME, PARSE, RULE_BROKEN
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord
from holdfast.wire.batch import Record, build_batch

SOURCE_HEADER: Final = "hf-source"
Header = tuple[str, bytes | None]


class Sent(NamedTuple):
    """One record of a topic sink or dead letter."""

    key: bytes | None
    value: bytes | None
    headers: tuple[Header, ...]
    partition: int = 0


class Topics(Protocol):
    """Where topics are written."""

    def ensure(self, topic: str, partitions: int) -> int:
        """Make a topic that is missing; returns how many partitions it has."""

    def transaction(self, transactional_id: str, records: Mapping[str, Sequence[Sent]]) -> None:
        """Commit records of several topics at once."""


class FakeTopics:
    """Topics of a `FakeCluster`: a batch and a marker in each partition."""

    def __init__(self, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self._producers: dict[str, int] = {}

    def ensure(self, topic: str, partitions: int) -> int:
        if topic not in self.cluster.topics:
            self.cluster.add_topic(topic, partitions)
        return len(self.cluster.topics[topic].partitions)

    def transaction(self, transactional_id: str, records: Mapping[str, Sequence[Sent]]) -> None:
        producer_id = self._producers.setdefault(transactional_id, 1000 + len(self._producers))
        for topic, sent in records.items():
            by_partition: dict[int, list[Sent]] = {}
            for each in sent:
                by_partition.setdefault(each.partition, []).append(each)
            for partition, each_sent in by_partition.items():
                append_transaction(
                    self.cluster.topics[topic].partitions[partition], each_sent, producer_id=producer_id
                )


def append_transaction(
    partition: FakePartition,
    records: Sequence[Sent],
    *,
    producer_id: int,
    timestamp_ms: int = BATCH_TIME_MS,
    is_commit: bool = True,
) -> int:
    """What a transaction leaves in a partition: its records and the marker that ends it; returns the first offset."""
    first = partition.log_end
    batch = [Record(at, 0, each.key, each.value, tuple(each.headers)) for at, each in enumerate(records)]
    options: dict[str, Any] = {"producer_id": producer_id, "producer_epoch": 0, "is_transactional": True}
    partition.append(build_batch(batch, base_timestamp=timestamp_ms, base_sequence=0, **options))
    marker = Record(0, 0, b"\0\0" + (b"\0\1" if is_commit else b"\0\0"), b"\0\0" + b"\0\0\0\0")
    if not is_commit:
        partition.aborted.append((producer_id, first))
    partition.append(build_batch([marker], base_timestamp=timestamp_ms, is_control=True, **options))
    return first


class BrokerTopics:
    """Topics of a real broker, through the sinks' own transactional writer."""

    def __init__(self, bootstrap: str) -> None:
        self.bootstrap = bootstrap
        self._writers: dict[str, Any] = {}

    def ensure(self, topic: str, partitions: int) -> int:
        from confluent_kafka import KafkaError, KafkaException
        from confluent_kafka.admin import AdminClient, NewTopic

        from holdfast.reader import Cluster

        config = {"cleanup.policy": "compact"} if topic.startswith("hf-ledger-") else {}
        admin = AdminClient({"bootstrap.servers": self.bootstrap})
        try:
            admin.create_topics([NewTopic(topic, partitions, 1, config=config)])[topic].result(30)
        except KafkaException as error:
            if error.args[0].code() != KafkaError.TOPIC_ALREADY_EXISTS:
                raise
        with Cluster({"bootstrap.servers": self.bootstrap}) as cluster:
            return len(cluster.topics([topic])[topic].partitions)

    def transaction(self, transactional_id: str, records: Mapping[str, Sequence[Sent]]) -> None:
        producer = self._producer(transactional_id)
        producer.begin_transaction()
        for topic, sent in records.items():
            for each in sent:
                producer.produce(topic, each.value, each.key, each.partition, headers=list(each.headers))
                producer.poll(0)
        producer.commit_transaction(30)

    def _producer(self, transactional_id: str) -> Any:
        from confluent_kafka import Producer

        if transactional_id not in self._writers:
            producer = Producer({"bootstrap.servers": self.bootstrap, "transactional.id": transactional_id})
            producer.init_transactions(30)
            self._writers[transactional_id] = producer
        return self._writers[transactional_id]


@dataclass
class TopicBuilder:
    """The topic of a Kafka sink and its ledger."""

    topics: Topics
    topic: str
    pipeline: str
    name: str
    partitions: int = 1
    writers: int = 1
    last: Entry | None = None
    _is_made: bool = field(default=False, repr=False)

    @property
    def ledger_topic(self) -> str:
        return f"hf-ledger-{self.pipeline}--{self.name}"

    def commit(
        self, entry: Entry, sent: Sequence[Sent] = (), *, writers_done: Sequence[int] | None = None
    ) -> None:
        """One batch; with several writers each record goes to one of them, and only those of `writers_done` commit."""
        self.make()
        ledger = LedgerRecord(entry, self.writers, self.last).encode()
        done = range(self.writers) if writers_done is None else writers_done
        for writer in done:
            own = [each for at, each in enumerate(sent) if at % self.writers == writer]
            note = Sent(str(writer).encode(), ledger, (), writer)
            self.topics.transaction(
                f"hf-{self.pipeline}--{self.name}-{writer}", {self.topic: own, self.ledger_topic: [note]}
            )
        if set(done) == set(range(self.writers)):
            self.last = entry

    def make(self) -> None:
        if not self._is_made:
            self._is_made = True
            self.partitions = self.topics.ensure(self.topic, self.partitions)
            self.topics.ensure(self.ledger_topic, self.writers)

    def forget(self) -> None:
        for writer in range(self.writers):
            note = Sent(str(writer).encode(), None, (), writer)
            self.topics.transaction(f"hf-{self.pipeline}--{self.name}-{writer}", {self.ledger_topic: [note]})
        self.last = None


def sink_record(
    lineage: Lineage, key: bytes | None, value: bytes | None, partition: int = 0, *more: Header
) -> Sent:
    """A record as a Kafka sink writes it."""
    topic, number, offset, index = lineage
    source = f"{topic}:{number}@{offset}#{index}".encode()
    return Sent(key, value, ((SOURCE_HEADER, source), *more), partition)


def dead_letters(topics: Topics, topic: str, pipeline: str, partitions: int = 1) -> TopicBuilder:
    """The dead letter topic of a pipeline and its ledger."""
    return TopicBuilder(topics, topic, pipeline, NAME, partitions)


def dead_letter(
    pipeline: str,
    place: tuple[str, int, int],
    key: bytes | None,
    value: bytes | None,
    *,
    reason: str = PARSE,
    error: str = "it is no JSON",
    own: Sequence[Header] = (),
    partitions: int = 1,
    timestamp_ms: int = BATCH_TIME_MS,
) -> Sent:
    """A record as the dead letter sink writes it; `own` are the headers it had."""
    topic, partition, offset = place
    failure = Failure(
        topic=topic,
        partition=partition,
        offset=offset,
        timestamp_ms=timestamp_ms,
        group=pipeline,
        error=CANNOT_PARSE if reason == PARSE else RULE_BROKEN,
        message=error,
        reason=reason,
        attempts=1,
        failed_ms=BATCH_TIME_MS,
    )
    headers = (*own, *failure_headers(failure))
    return Sent(key, value, headers, partition if partition < partitions else 0)
