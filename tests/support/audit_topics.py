"""What a pipeline's Kafka sinks and dead letters hold, written without Spark: see `audit_sinks`.

Topics are written to a broker by a transactional producer, or into a `FakeCluster`, as the batches and markers that
such a producer leaves in the log.

`Growing` is a pipeline whose log and sinks grow batch by batch: for tests of audits that follow one another.

    with FakeCluster() as cluster:
        growing = begin(cluster, str(tmp_path))     # a definition in YAML, and sinks that are open and empty
        growing.grow()                              # twenty more records, each a row of every sink
        audit(growing.path)

Its sinks are Parquet, Delta and a topic, in their real formats; dead letters are there and stay empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, Protocol

import pyarrow as pa
from tests.support.audit_sinks import BATCH_TIME_MS, DeltaBuilder, Ledger, Lineage, ParquetBuilder, rows_of
from tests.support.fake_cluster import FakeCluster, FakePartition

from holdfast.client.dead_letter_dialects import Failure, failure_headers
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import Loaded, load_pipeline
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.ledger import Entry, Intake, Routes
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sinks.dead_letter import CANNOT_PARSE, NAME, PARSE, RULE_BROKEN
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord
from holdfast.pipeline.sinks.kafka_ledger import Sent as Share
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
        self,
        entry: Entry,
        sent: Sequence[Sent] = (),
        *,
        writers_done: Sequence[int] | None = None,
        share: Share | None = None,
    ) -> None:
        """One batch; with several writers each record goes to one of them, and only those of `writers_done` commit."""
        self.make()
        ledger = LedgerRecord(entry, self.writers, self.last, sent=share).encode()
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


PIPELINE: Final = "growing"
TOPIC: Final = "orders"
BATCH_RECORDS: Final = 20
BEGIN_MS: Final = 1_700_000_000_000
YAML: Final = """\
pipeline: growing
source:
  topics: [orders]
  bootstrap: {bootstrap}
  value:
    format: json
    fields: {{id: long}}
sinks:
  - parquet: files
  - delta: table
  - kafka: {{topic: copy, value: to_json(struct(id))}}
home: home
"""


@dataclass
class Growing:
    cluster: FakeCluster
    path: str
    """Of the definition."""
    loaded: Loaded
    place: Place
    parquet: ParquetBuilder
    delta: DeltaBuilder
    topic: TopicBuilder
    dead: TopicBuilder
    ledgers: dict[str, Ledger]
    end: int = 0
    files: list[str] = field(default_factory=list)
    """Of the Parquet sink, in order."""
    _waiting: list[Callable[[], object]] = field(default_factory=list)
    """Batches that the Delta sink has still to take."""

    @property
    def directory(self) -> str:
        return self.loaded.definition.directory

    def send(self) -> list[bytes]:
        """Twenty more records in the log, which no batch has taken."""
        offsets = range(self.end, self.end + BATCH_RECORDS)
        values = [json.dumps({"id": offset}).encode() for offset in offsets]
        records = [Record(at, at, b"k%d" % offset, values[at]) for at, offset in enumerate(offsets)]
        self.cluster.topics[TOPIC].partitions[0].append(build_batch(records, base_timestamp=BEGIN_MS))
        return values

    def grow(self, *, without: int | None = None, delta_waits: bool = False) -> None:
        """One more batch, of which the Parquet sink may lack an offset that its ledger counts."""
        values = self.send()
        start, self.end = self.end, self.end + BATCH_RECORDS
        offsets = list(range(start, self.end))
        digest = sum(place_hash(TOPIC, 0, offset) for offset in offsets) & MASK
        told: dict[str, Any] = {
            "intake": Intake(records=BATCH_RECORDS, bytes=BATCH_RECORDS, digest=digest),
            "routes": Routes(main=BATCH_RECORDS),
            "digests": {"main": f"{digest:016x}"},
        }
        span = {self.place: (start, self.end)}

        def entry(sink: str, rows: int) -> Any:
            return self.ledgers[sink].entry(span, rows=rows, **told)

        kept = [offset for offset in offsets if offset != without]
        self.files += self.parquet.commit(entry("parquet", BATCH_RECORDS), _rows(kept))
        self._waiting.append(lambda: self.delta.commit(entry("delta", BATCH_RECORDS), _rows(offsets)))
        if not delta_waits:
            self.catch_up()
        sent = [
            sink_record((TOPIC, 0, offset, 0), b"k%d" % offset, value)
            for offset, value in zip(offsets, values, strict=True)
        ]
        self.topic.commit(entry("kafka", BATCH_RECORDS), sent)
        self.dead.commit(entry("dead-letter", 0), [])

    def catch_up(self) -> None:
        """The Delta sink takes what it has not yet."""
        for take in self._waiting:
            take()
        self._waiting.clear()


def _rows(offsets: list[int]) -> pa.Table:
    return rows_of([(TOPIC, 0, offset, 0) for offset in offsets], {"id": pa.array(offsets, pa.int64())})


def begin(cluster: FakeCluster, directory: str) -> Growing:
    """The pipeline before its first batch."""
    log = cluster.add_topic(TOPIC, partitions=1)
    path = os.path.join(directory, "growing.yaml")
    with open(path, "w", encoding="utf-8") as file:
        file.write(YAML.format(bootstrap=cluster.bootstrap_servers))
    loaded = load_pipeline(path)
    mark = fingerprint(loaded.definition)
    topics = FakeTopics(cluster)
    place = Place(TOPIC, log.topic_id, 0)
    made = Growing(
        cluster,
        path,
        loaded,
        place,
        ParquetBuilder(os.path.join(directory, "files"), 2),
        DeltaBuilder(os.path.join(directory, "table"), PIPELINE, "delta", 2),
        TopicBuilder(topics, "copy", PIPELINE, "kafka"),
        dead_letters(topics, f"{PIPELINE}-dlt", PIPELINE),
        {name: Ledger(PIPELINE, name, mark) for name in ("parquet", "delta", "kafka", "dead-letter")},
    )
    made.parquet.commit(made.ledgers["parquet"].opening({place: 0}), None)
    made.delta.commit(made.ledgers["delta"].opening({place: 0}), _rows([]))
    made.topic.commit(made.ledgers["kafka"].opening({place: 0}))
    made.dead.commit(made.ledgers["dead-letter"].opening({place: 0}))
    return made
