"""The life of a record: what a trace says of every offset of small worlds, and of records that met with damage."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.support.audit_topics import Sent, append_transaction
from tests.support.audit_world_writer import World, WorldWriter
from tests.support.audit_worlds import WINDOW, Plan, Told, make_plan
from tests.support.fake_cluster import FakeCluster

from holdfast.audit.lives import Life, events
from holdfast.audit.stored import codec_name, look_up, offsets_of_key, place_of
from holdfast.audit.tracing import Tracer
from holdfast.errors import UsageError
from holdfast.pipeline.definition.naming import client_settings
from holdfast.reader import Cluster
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.codecs import Codec


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


@pytest.fixture
def writer(cluster: FakeCluster, tmp_path: Path) -> Iterator[WorldWriter]:
    with WorldWriter(cluster, str(tmp_path)) as writer:
        yield writer


def tracing(world: World) -> Tracer:
    settings = client_settings(world.definition)
    return Tracer(Cluster(settings), world.definition, settings)


def expected(plan: Plan, told: Told) -> str:
    """What the plan says became of an offset."""
    if told.kind != "record":
        return {"missing": "compacted"}.get(told.kind, told.kind)
    place = (told.partition, told.offset)
    taken = [
        number
        for number, made in enumerate(plan.batches)
        if told.partition in made.spans
        and made.spans[told.partition][0] <= told.offset < made.spans[told.partition][1]
    ]
    if not taken:
        return "pending"
    if any(row.lineage[1:3] == place for row in plan.dead.rows()):
        return "dead_letter"
    for each, route, _ in plan.aside[taken[0]]:
        if (each.partition, each.offset) == place and route != "late-for":
            return route
    return "output"


@pytest.mark.parametrize(("seed", "has_spool"), [(2, True), (4, False)])
def test_every_offset_of_a_world_is_told_as_it_was(seed: int, has_spool: bool, writer: WorldWriter) -> None:
    plan = make_plan(
        seed, kinds=("parquet", "kafka"), window_kinds=("delta",), has_spool=has_spool, records=18
    )
    plan.lags.clear()
    world = writer.write(plan)
    seen: set[str] = set()
    with tracing(world) as tracer:
        for told in (each for log in plan.log.values() for each in log):
            life = tracer.trace(world.places[told.partition], told.offset)
            assert life.fate == expected(plan, told), (told, life.conclusion)
            seen.add(life.fate)
            check_details(life, told)
    assert {"output", "dead_letter", "filtered", "duplicate", "compacted"} <= seen
    assert has_spool or {"aborted", "control"} <= seen


def check_details(life: Life, told: Told) -> None:
    if told.kind != "record":
        assert all(not sink.held for sink in life.sinks)
        return
    assert life.stored.key == told.key
    assert life.stored.value == told.value
    spool = life.stored.spool
    assert (f"{spool[0]}:{spool[1]}:{spool[2]}" if spool else "") == told.spool_id
    if life.fate == "output":
        held = {sink.name: sink.held for sink in life.sinks}
        assert len(held["parquet-sink"]) == len(held["kafka-sink"]) == 1
        assert "kafka-sink" in held["kafka-sink"][0]
    if life.fate == "dead_letter":
        assert life.dead_letters
        assert life.dead_letters[0].reason in life.conclusion


def test_a_window_that_holds_a_record_is_named(writer: WorldWriter) -> None:
    plan = next(
        plan
        for seed in range(50)
        if (plan := make_plan(seed, kinds=("parquet",), window_kinds=("delta",))).sinks["delta-totals"].rows()
    )
    world = writer.write(plan)
    window = plan.sinks["delta-totals"].rows()[0].values
    late = {
        (each.partition, each.offset) for left in plan.aside for each, route, _ in left if route == "late-for"
    }
    inside = [
        each
        for each in plan.taken()
        if each.row is not None
        and each.row["customer"] == window["customer"]
        and window["window_start"] <= each.row["at"] < window["window_end"]
        and expected(plan, each) == "output"
        and (each.partition, each.offset) not in late
    ]
    assert len(inside) == window["_hf_count"]
    with tracing(world) as tracer:
        for told in inside:
            life = tracer.trace(world.places[told.partition], told.offset)
            (totals,) = (sink for sink in life.sinks if sink.takes == WINDOW)
            assert len(totals.held) == 1
            assert f"customer={window['customer']}" in totals.held[0]
            assert f"made of {window['_hf_count']} rows" in totals.held[0]


def output_of(plan: Plan) -> Told:
    return next(each for each in plan.taken() if expected(plan, each) == "output")


def removed(world: World, told: Told) -> None:
    """A row disappears from the Parquet sink, without a trace in its ledger."""
    import pyarrow.parquet as pq

    for path in world.files["parquet-sink"]:
        table = pq.read_table(path)
        kept = [
            (place["partition"], place["offset"]) != (told.partition, told.offset)
            for place in table.column("_hf").to_pylist()
        ]
        if not all(kept):
            pq.write_table(table.filter(kept), path)


def test_a_record_whose_row_is_gone_is_lost(writer: WorldWriter) -> None:
    world = writer.write(make_plan(5, kinds=("parquet",)))
    told = output_of(world.plan)
    removed(world, told)
    with tracing(world) as tracer:
        life = tracer.trace(world.places[told.partition], told.offset)
    assert life.fate == "lost"
    assert life.is_fault
    assert "parquet-sink covers it" in life.conclusion


def test_a_record_that_one_of_two_sinks_lacks_is_lost_there(writer: WorldWriter) -> None:
    plan = make_plan(5, kinds=("parquet", "delta"))
    plan.lags.clear()
    world = writer.write(plan)
    told = output_of(world.plan)
    removed(world, told)
    with tracing(world) as tracer:
        life = tracer.trace(world.places[told.partition], told.offset)
    assert life.fate == "lost"
    assert "it is in delta-sink, and not in parquet-sink" in life.conclusion


def test_a_row_that_is_there_twice_is_duplicated(writer: WorldWriter) -> None:
    plan = make_plan(5, kinds=("delta",))
    told = output_of(plan)
    rows = next(
        rows
        for rows in plan.sinks["delta-sink"].batches
        if any(row.lineage[1:3] == (told.partition, told.offset) for row in rows)
    )
    rows.append(next(row for row in rows if row.lineage[1:3] == (told.partition, told.offset)))
    world = writer.write(plan)
    with tracing(world) as tracer:
        life = tracer.trace(world.places[told.partition], told.offset)
    assert life.fate == "duplicated"
    assert len(life.sinks[-1].held) == 2


def test_nothing_is_called_lost_where_the_record_of_what_left_is_missing(writer: WorldWriter) -> None:
    world = writer.write(make_plan(3, kinds=("parquet",)))
    filtered = next(each for each in world.plan.taken() if expected(world.plan, each) == "filtered")
    shutil.rmtree(os.path.join(world.directory, "home", "aside"))
    with tracing(world) as tracer:
        life = tracer.trace(world.places[filtered.partition], filtered.offset)
    assert life.fate == "unknown"
    assert "it may be one" in life.conclusion


def test_nothing_is_called_lost_where_a_sink_cannot_be_read(writer: WorldWriter) -> None:
    world = writer.write(make_plan(5, kinds=("parquet",)))
    told = output_of(world.plan)
    for path in world.files["parquet-sink"]:
        Path(path).write_bytes(b"PAR1")
    with tracing(world) as tracer:
        life = tracer.trace(world.places[told.partition], told.offset)
    assert life.fate == "unknown"
    assert any("cannot be read" in what for _, _, what in events(life))


def test_a_sink_that_lags_has_not_taken_it_yet(writer: WorldWriter) -> None:
    plan = make_plan(5, kinds=("parquet", "delta"))
    plan.lags = {"delta-sink": 1}
    world = writer.write(plan)
    last = plan.batches[-1].spans
    told = next(
        each
        for each in plan.taken()
        if expected(plan, each) == "output"
        and each.partition in last
        and last[each.partition][0] <= each.offset
    )
    with tracing(world) as tracer:
        life = tracer.trace(world.places[told.partition], told.offset)
    assert life.fate == "output"
    assert "delta-sink has not taken it yet" in life.conclusion


def test_nothing_is_called_lost_where_no_ledger_says_which_batch_took_it(writer: WorldWriter) -> None:
    """A topic's ledger keeps its newest entries: what left earlier batches is looked for in all that is recorded."""
    plan = next(
        plan
        for seed in range(50)
        if (plan := make_plan(seed, kinds=("kafka",), has_spool=False)).aside[0] and len(plan.batches) > 3
    )
    world = writer.write(plan)
    ledgers = [name for name in writer.cluster.topics if name.startswith("hf-ledger-")]
    for name in ledgers:
        for partition in writer.cluster.topics[name].partitions:
            partition.batches = partition.batches[-2:]
            partition.log_start = partition.batches[0][0].base_offset
    first = plan.batches[0].spans
    with tracing(world) as tracer:
        for told in plan.taken():
            if told.partition not in first or told.offset >= first[told.partition][1]:
                continue
            life = tracer.trace(world.places[told.partition], told.offset)
            assert life.fate == expected(plan, told), life.conclusion
        shutil.rmtree(os.path.join(world.directory, "home", "aside"))
        left = plan.aside[0][0][0]
        assert tracer.trace(world.places[left.partition], left.offset).fate == "unknown"


def test_a_topic_that_was_created_again_is_not_the_one_that_was_taken(writer: WorldWriter) -> None:
    world = writer.write(make_plan(5, kinds=("parquet",)))
    told = output_of(world.plan)
    old = writer.cluster.topics.pop("orders")
    new = writer.cluster.add_topic("orders", len(old.partitions))
    for number, partition in enumerate(old.partitions):
        new.partitions[number].batches = partition.batches
        new.partitions[number].log_start, new.partitions[number].log_end = (
            partition.log_start,
            partition.log_end,
        )
    with tracing(world) as tracer:
        life = tracer.trace(place_of(tracer.cluster, "orders", told.partition), told.offset)
    assert life.fate == "other"


def test_a_topic_that_the_pipeline_does_not_read_is_said_to_be_none_of_its(writer: WorldWriter) -> None:
    world = writer.write(make_plan(5, kinds=("parquet",)))
    topic = writer.cluster.add_topic("elsewhere", partitions=1)
    topic.partitions[0].append(build_batch([Record(0, 0, b"k", b"v")]))
    with tracing(world) as tracer:
        life = tracer.trace(place_of(tracer.cluster, "elsewhere", 0), 0)
    assert (life.fate, life.is_fault) == ("not_read", False)


# The log alone


def log_of(cluster: FakeCluster) -> tuple[Cluster, FakeCluster]:
    return Cluster({"bootstrap.servers": cluster.bootstrap_servers}), cluster


def test_a_record_is_told_with_its_batch_and_sender(cluster: FakeCluster) -> None:
    topic = cluster.add_topic("t", partitions=1)
    topic.partitions[0].epoch = 4
    records = [
        Record(at, at * 10, b"k", b"v%d" % at, (("hf-id", b"00ff00ff00ff00ff:0:7"),)) for at in range(3)
    ]
    topic.partitions[0].append(
        build_batch(
            records,
            base_timestamp=1_700_000_000_000,
            producer_id=9,
            producer_epoch=2,
            base_sequence=40,
            codec=Codec.LZ4,
        )
    )
    with log_of(cluster)[0] as reader, Tracer(reader) as tracer:
        life = tracer.trace(place_of(reader, "t", 0), 1)
    assert life.fate == "record"
    assert life.stored.timestamp_ms == 1_700_000_000_010
    assert life.stored.spool == ("00ff00ff00ff00ff", 0, 7)
    batch = life.stored.batch
    assert batch is not None
    assert (batch.base_offset, batch.last_offset, batch.leader_epoch, codec_name(batch)) == (0, 2, 4, "lz4")
    told = " ".join(what for _, _, what in events(life))
    assert "sent by spool 00ff00ff00ff00ff as its number 7, producer 9 epoch 2 sequence 41" in told


@pytest.mark.parametrize(
    ("is_commit", "outcome", "transaction"), [(True, "record", "committed"), (False, "aborted", "aborted")]
)
def test_the_end_of_a_transaction_is_found(
    cluster: FakeCluster, is_commit: bool, outcome: str, transaction: str
) -> None:
    partition = cluster.add_topic("t", partitions=1).partitions[0]
    sent = [Sent(b"k", b"v", ())] * 2
    append_transaction(partition, sent, producer_id=5, timestamp_ms=1_700_000_000_000)
    first = append_transaction(
        partition, sent, producer_id=5, timestamp_ms=1_700_000_009_000, is_commit=is_commit
    )
    with log_of(cluster)[0] as reader:
        place = place_of(reader, "t", 0)
        found = look_up(reader, place, first + 1)
        marker = look_up(reader, place, first + 2)
    assert (found.outcome, found.transaction) == (outcome, transaction)
    assert (found.marker_offset, found.marker_ms) == (first + 2, 1_700_000_009_000)
    assert (marker.outcome, marker.transaction) == ("control", transaction)


def test_a_transaction_that_has_not_ended_is_open(cluster: FakeCluster) -> None:
    partition = cluster.add_topic("t", partitions=1).partitions[0]
    partition.append(build_batch([Record(0, 0, b"k", b"v")], producer_id=5, is_transactional=True))
    partition.last_stable = 0
    with log_of(cluster)[0] as reader:
        found = look_up(reader, place_of(reader, "t", 0), 0)
    assert (found.outcome, found.transaction, found.key) == ("open", "open", b"k")


def test_offsets_that_the_log_does_not_hold_are_explained(cluster: FakeCluster) -> None:
    partition = cluster.add_topic("t", partitions=1).partitions[0]
    partition.log_start = partition.log_end = 100
    partition.append(build_batch([Record(0, 0, b"k", b"v"), Record(5, 0, b"k", b"v")]))
    with log_of(cluster)[0] as reader:
        place = place_of(reader, "t", 0)
        outcomes = {offset: look_up(reader, place, offset).outcome for offset in (99, 100, 103, 105, 106)}
    assert outcomes == {99: "expired", 100: "record", 103: "compacted", 105: "record", 106: "not_yet"}


def test_a_partition_that_is_not_there_is_a_mistake_of_the_caller(cluster: FakeCluster) -> None:
    cluster.add_topic("t", partitions=2)
    with log_of(cluster)[0] as reader, pytest.raises(UsageError, match="it has 0 to 1"):
        place_of(reader, "t", 2)


def test_records_are_found_by_key_the_newest_of_many(cluster: FakeCluster) -> None:
    topic = cluster.add_topic("t", partitions=2)
    for number in range(60):
        key = b"wanted" if number % 3 == 0 else b"other" if number % 3 == 1 else None
        topic.partitions[number % 2].append(
            build_batch([Record(0, 0, key, b"v")], base_timestamp=1000 + number)
        )
    with log_of(cluster)[0] as reader:
        found, count = offsets_of_key(reader, "t", b"wanted", most=4)
        assert [(place.partition, offset) for place, offset in found] == [(0, 24), (1, 25), (0, 27), (1, 28)]
        assert count == 20
        assert offsets_of_key(reader, "t", b"nobody", most=4) == ([], 0)
