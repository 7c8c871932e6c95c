"""A pipeline whose log and sinks grow batch by batch, without Spark: for tests of audits that follow one another.

    with FakeCluster() as cluster:
        growing = begin(cluster, str(tmp_path))     # a definition in YAML, and sinks that are open and empty
        growing.grow()                              # twenty more records, each a row of every sink
        audit(growing.path)

Its sinks are Parquet, Delta and a topic, in their real formats; dead letters are there and stay empty.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final

import pyarrow as pa
from tests.support.audit_sinks import DeltaBuilder, Ledger, ParquetBuilder, rows_of
from tests.support.audit_topics import FakeTopics, TopicBuilder, dead_letters, sink_record
from tests.support.fake_cluster import FakeCluster

from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import Loaded, load_pipeline
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.ledger import Intake, Routes
from holdfast.pipeline.positions import Place
from holdfast.wire.batch import Record, build_batch

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
