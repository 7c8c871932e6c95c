"""A range is read once and whole, whatever its offsets are, in few tasks."""

from __future__ import annotations

import errno
import os
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import UUID

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from confluent_kafka import Producer

import holdfast.pipeline.engine.staging as staging
from holdfast.pipeline.core.failures import EnvironmentFails, Unbalanced
from holdfast.pipeline.definition.model import Decoding, EventTime, Field, Source
from holdfast.pipeline.ledger import Intake
from holdfast.pipeline.packing import pack
from holdfast.pipeline.positions import BatchRange, Place, Span
from holdfast.reader import Cluster, TopicPartition, TopicRecreated
from holdfast.reader.arrow import SCHEMA

if TYPE_CHECKING:
    from .conftest import Bench


@pytest.fixture
def by_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even few records are staged by Spark's workers."""
    monkeypatch.setattr(staging, "SMALL_OFFSETS", -1)


def whole_range(cluster: Cluster, topic: str) -> BatchRange:
    info = cluster.topics([topic])[topic]
    ends = cluster.offsets([TopicPartition(topic, number) for number in info.partitions], "last-stable")
    return BatchRange(
        {Place(topic, info.topic_id, at.partition): Span(0, answer.offset) for at, answer in ends.items()}
    )


def spec_of(bench: Bench, directory: Path, **changes: Any) -> staging.StageSpec:
    directory.mkdir(exist_ok=True)
    spec = staging.stage_spec(bench.definition, {"bootstrap.servers": bench.broker.bootstrap_servers})
    return replace(spec, directory=str(directory), **changes)


def test_a_record_without_a_time_has_none(tmp_path: Path) -> None:
    source = Source(("t",))
    record = {
        "topic": "t",
        "partition": 0,
        "offset": 7,
        "value": b"x",
        "timestampType": 0,
        "headers": [],
    }
    times = [datetime.fromtimestamp(5, UTC), datetime.fromtimestamp(-0.001, UTC)]  # Kafka's -1
    batch = pa.RecordBatch.from_pylist([record | {"timestamp": time} for time in times], SCHEMA())
    file = staging._StageFile(staging.StageSpec({}, source, False, str(tmp_path)), {("t", 0): 0})
    file.add(batch)
    file.finish()
    assert pq.read_table(file.path).column("_timestamp").to_pylist() == [times[0], None]


def test_workers_and_the_driver_stage_the_same(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.produce_orders(50)
    bench.produce([b"broken", None])
    with Cluster({"bootstrap.servers": bench.broker.bootstrap_servers}) as cluster:
        batch = whole_range(cluster, "orders")
        inline = staging.stage(bench.spark, cluster, spec_of(bench, tmp_path / "a"), batch)
        monkeypatch.setattr(staging, "SMALL_OFFSETS", -1)
        staged = staging.stage(bench.spark, cluster, spec_of(bench, tmp_path / "b"), batch)
    assert (staged.intake, staged.decoded, staged.undecoded) == (
        inline.intake,
        inline.decoded,
        inline.undecoded,
    )
    assert (staged.intake.records, staged.decoded.rows, staged.undecoded.rows) == (52, 51, 1)
    schema = staging.file_schema(bench.definition.source)
    rows = [
        sorted(
            bench.spark.read.schema(schema).parquet(*each.files.values()).collect(),
            key=lambda row: (row._partition, row._offset),
        )
        for each in (staged, inline)
    ]
    assert rows[0] == rows[1]
    [broken] = [row for row in rows[0] if row._error]
    assert (broken.id, bytes(broken._raw)) == (None, b"broken")
    assert [row._raw for row in rows[0] if not row._error] == [None] * 51  # nothing can ask for it any more
    [tombstone] = [row for row in rows[0] if row._tombstone]
    assert tombstone._error is None


def test_aborted_markers_and_open_transactions_are_told_apart(bench: Bench) -> None:  # HF409
    settings = {"bootstrap.servers": bench.broker.bootstrap_servers, "transactional.id": "t"}
    producer = Producer(settings)
    producer.init_transactions()
    for ends in (producer.commit_transaction, producer.abort_transaction, None):
        producer.begin_transaction()
        for number in range(5):
            producer.produce("orders", f'{{"id": {number}}}'.encode(), partition=0)
        producer.flush()
        if ends is not None:
            ends()
    [done] = bench.run_batches()
    assert (done.intake.records, done.intake.aborted, done.intake.control) == (5, 5, 2)
    assert bench.sinks["main"].ids == list(range(5))
    assert bench.run_batches() == []  # the open one holds what comes behind it
    producer.commit_transaction()
    [done] = bench.run_batches()
    assert (done.intake.records, done.intake.control) == (5, 1)


@pytest.mark.usefixtures("by_workers")
def test_two_hundred_partitions_are_a_few_tasks(bench: Bench) -> None:
    bench.create("wide", 200)
    bench.change(source=replace(bench.definition.source, topics=("wide",)))
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers})
    for number in range(1000):
        producer.produce("wide", f'{{"id": {number}}}'.encode(), partition=number % 200)
    assert producer.flush(30) == 0
    with Cluster({"bootstrap.servers": bench.broker.bootstrap_servers}) as cluster:
        assert len(pack(whole_range(cluster, "wide"), 8)) == 1
    [done] = bench.run_batches()
    assert done.intake.records == 1000
    assert bench.sinks["main"].ids == list(range(1000))


@pytest.mark.usefixtures("by_workers")
def test_what_a_worker_cannot_do_arrives_as_it_was_raised(bench: Bench, tmp_path: Path) -> None:
    bench.produce_orders(5)
    with Cluster({"bootstrap.servers": bench.broker.bootstrap_servers}) as cluster:
        batch = whole_range(cluster, "orders")
        bench.admin.delete_topics(["orders"])["orders"].result(30)
        bench.create("orders", 2)
        bench.produce_orders(5)
        with pytest.raises(TopicRecreated, match="orders") as caught:
            staging.stage(bench.spark, cluster, spec_of(bench, tmp_path / "a"), batch)
    assert "java" not in str(caught.value)
    assert os.listdir(tmp_path / "a") == []


def test_keys_are_decoded_beside_values_and_their_errors_are_dead_letters(bench: Bench) -> None:
    key = Decoding("json", (Field("customer", "string"),))
    bench.change(source=replace(bench.definition.source, key=key))
    producer = Producer({"bootstrap.servers": bench.broker.bootstrap_servers})
    producer.produce("orders", b'{"id": 1}', key=b'{"customer": "ada"}')
    producer.produce("orders", b'{"id": 2}', key=b"ada")
    assert producer.flush(30) == 0
    bench.run()
    [row] = bench.sinks["main"].content
    assert (row["id"], row["_key_customer"]) == (1, "ada")
    [letter] = bench.sinks["dead-letter"].content
    assert letter["_error"].startswith("key: ")
    assert letter["_raw"] == b'{"id": 2}'


def test_a_full_disk_says_so_and_loses_nothing(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/home/stage")

    bench.produce_orders(5)
    with monkeypatch.context() as patched:
        patched.setattr(staging._StageFile, "_write", full)
        with pytest.raises(EnvironmentFails, match="no space left on the disk at /home/stage") as caught:
            bench.run()
    assert caught.value.exit_code == 3
    bench.run()
    assert bench.sinks["main"].ids == list(range(5))


class TestSummary:
    RANGE = BatchRange({Place("t", UUID(int=1), 0): Span(0, 10)})
    REPORT: dict[str, Any] = {  # noqa: RUF012
        "first_piece": 0,
        "files": ["f"],
        "decoded": [6, 3],
        "undecoded": [1, 4],
        "offsets": 10,
        "control": 1,
        "aborted": 1,
        "missing": 1,
        "bytes": 99,
    }

    def test_every_offset_is_something(self) -> None:
        staged = staging._summarise(self.RANGE, [self.REPORT])
        assert staged.intake == Intake(records=7, control=1, aborted=1, missing=1, bytes=99, digest=7)

    @pytest.mark.parametrize("change", [{"missing": 0}, {"decoded": [7, 3]}, {"offsets": 9}])
    def test_an_offset_that_is_nothing_stops_the_batch(self, change: dict[str, Any]) -> None:
        with pytest.raises(Unbalanced, match="covers 10 offsets"):
            staging._summarise(self.RANGE, [{**self.REPORT, **change}])


def test_event_time_is_seen_alike_wherever_a_partition_is_cut(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The greatest event before each row: of the piece, and of what the driver knows was before the piece."""
    seconds = [5, 3, 9, 1, 12, 7, 30, 8, 2, 31]
    bench.change(
        source=replace(
            bench.definition.source,
            value=Decoding("json", (Field("at", "timestamp"),)),
            event_time=EventTime("at"),
        )
    )
    bench.produce([f'{{"at": "2026-03-01T00:00:{second:02d}Z"}}'.encode() for second in seconds], partition=0)
    midnight_ms = 1_772_323_200_000
    wanted = [None, *(midnight_ms + 1000 * max(seconds[: at + 1]) for at in range(len(seconds) - 1))]
    schema = staging.file_schema(bench.definition.source)
    with Cluster({"bootstrap.servers": bench.broker.bootstrap_servers}) as cluster:
        batch = whole_range(cluster, "orders")
        for name, tasks in (("inline", 1), ("cut", 3)):
            if tasks > 1:
                monkeypatch.setattr(staging, "SMALL_OFFSETS", -1)
                monkeypatch.setattr(staging, "pack", lambda given, cores: pack(given, cores, at_least=3))
            staged = staging.stage(bench.spark, cluster, spec_of(bench, tmp_path / name), batch)
            assert len(staged.pieces) == tasks
            assert list(staged.greatest_ms.values()) == [midnight_ms + 31_000]
            before = staged.seen_before_ms({})
            rows = (
                bench.spark.read.schema(schema).parquet(*staged.files.values()).orderBy("_offset").collect()
            )
            found = [
                max((each for each in (row._seen, before[row._piece]) if each is not None), default=None)
                for row in rows
            ]
            assert found == wanted
            assert [row._event_time.second for row in rows] == seconds
