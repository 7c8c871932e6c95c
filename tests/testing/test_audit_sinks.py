"""What the builders of sinks write is what the pipeline's own sinks would go on from."""

from __future__ import annotations

import uuid
from pathlib import Path

import pyarrow as pa
from tests.support.audit_sinks import DeltaBuilder, Ledger, ParquetBuilder, QuickDisk, rows_of
from tests.support.audit_topics import FakeTopics, TopicBuilder, sink_record
from tests.support.fake_cluster import FakeCluster

from holdfast.pipeline.definition.model import DeltaSink, ParquetSink
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place
from holdfast.pipeline.sinks.delta import DeltaSinkWriter
from holdfast.pipeline.sinks.kafka_ledger import LedgerRecord, standing_of
from holdfast.pipeline.sinks.parquet import ParquetSinkWriter
from holdfast.pipeline.sinks.writing import lineage_of
from holdfast.reader import read

PLACE = Place("orders", uuid.UUID(int=7), 0)
ROWS = rows_of([("orders", 0, offset, 0) for offset in range(10)], {"id": list(range(10))})


def entries(sink: str) -> tuple[Entry, Entry]:
    ledger = Ledger("shop", sink)
    return ledger.opening({PLACE: 0}), ledger.entry({PLACE: (0, 10)}, rows=10)


def test_a_parquet_sink_goes_on_from_what_was_built(tmp_path: Path) -> None:
    builder = ParquetBuilder(str(tmp_path / "out"))
    opening, first = entries("parquet")
    builder.commit(opening)
    [path] = builder.commit(first, ROWS)
    store = ParquetSinkWriter(ParquetSink(builder.path), "shop").store
    assert list(store.entries()) == [opening, first]
    assert '"name":"id"' in (store.held_schema() or "")
    assert lineage_of(path, QuickDisk())[0] == 10
    builder.merge(0, 1)
    assert list(store.entries()) == [opening, first]
    builder.forget()
    assert store.last_entry() is None


def test_a_delta_sink_goes_on_from_what_was_built(tmp_path: Path) -> None:
    builder = DeltaBuilder(str(tmp_path / "out"), "shop", "delta")
    opening, first = entries("delta")
    builder.commit(opening, ROWS.slice(0, 0))
    builder.commit(first, ROWS)
    assert DeltaSinkWriter(DeltaSink(builder.path), "shop").last_entry() == first
    builder.forget()
    assert DeltaSinkWriter(DeltaSink(builder.path), "shop").last_entry() is None


def test_a_kafka_sink_goes_on_from_what_was_built() -> None:
    with FakeCluster() as cluster:
        builder = TopicBuilder(FakeTopics(cluster), "out", "shop", "kafka", writers=2)
        opening, first = entries("kafka")
        builder.commit(opening)
        builder.commit(first, [sink_record(("orders", 0, 0, 0), None, b"{}")], writers_done=[1])
        ledger = pa.Table.from_batches(read(cluster.bootstrap_servers, builder.ledger_topic))
        last = {row["partition"]: LedgerRecord.decode(row["value"]) for row in ledger.to_pylist()}
        standing = standing_of([last[0], last[1]])
        assert standing.last == opening
        assert standing.unfinished is not None
        assert standing.unfinished.entry == first
