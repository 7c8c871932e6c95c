"""What a Kafka sink's topic and ledger hold, read by the auditor."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Producer
from tests.support.audit_topics import (
    BrokerTopics,
    FakeTopics,
    Sent,
    TopicBuilder,
    append_transaction,
    sink_record,
)
from tests.support.fake_cluster import LIST_OFFSETS, FakeCluster

from holdfast.audit import record_walk
from holdfast.audit.sinks.base import SinkUnreadable
from holdfast.audit.sinks.kafka import KafkaReader
from holdfast.audit.sinks.opening import open_sink
from holdfast.pipeline.definition.model import KafkaSink, Window
from holdfast.pipeline.sinks.kafka_ledger import Sent as Share
from holdfast.wire.batch import Record, build_batch

if TYPE_CHECKING:
    from tests.audit.sinks.conftest import Shop

    from holdfast.broker.server.embed import Broker


@pytest.fixture
def cluster() -> Iterator[FakeCluster]:
    with FakeCluster() as cluster:
        yield cluster


def builder_of(cluster: FakeCluster, writers: int = 1) -> TopicBuilder:
    return TopicBuilder(FakeTopics(cluster), "totals", "shop", "out", partitions=2, writers=writers)


def records(number: int) -> list[Sent]:
    return [
        sink_record(("orders", 0, number * 10 + each, 0), b"k", b"{}", each % 2, ("more", None))
        for each in range(10)
    ]


def filled(shop: Shop, builder: TopicBuilder, batches: int = 3) -> None:
    builder.commit(shop.opening())
    for number in range(batches):
        builder.commit(shop.entry(number), records(number))


def reader_of(shop: Shop, bootstrap: str, **changes: str) -> KafkaReader:
    sink = KafkaSink("totals", name=shop.sink, **changes)  # type: ignore[arg-type]
    definition = shop.definition(sink)
    if sink.rows:
        definition = replace(definition, steps=(Window(sink.rows, {"n": "count(*)"}, size="1m"),))
    reader = open_sink(definition, sink, {"bootstrap.servers": bootstrap})
    assert isinstance(reader, KafkaReader)
    return reader


def test_every_committed_record_is_read(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster))
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert shop.offsets(reader) == list(range(30))
    assert [entry.number for entry in reader.entries()] == [0, 1, 2, 3]
    assert reader.positions().at[shop.place].offset == 30
    assert list(reader.problems()) == []
    assert list(reader.gaps()) == []


@pytest.mark.holdfast(mode="thread")
def test_a_broker_and_its_transactions_are_read_alike(shop: Shop, holdfast_broker: Broker) -> None:
    bootstrap = holdfast_broker.bootstrap_servers
    builder = TopicBuilder(BrokerTopics(bootstrap), "totals", "shop", "out", partitions=2, writers=2)
    filled(shop, builder, 2)
    builder.commit(shop.entry(2), records(2), writers_done=[1])
    reader = reader_of(shop, bootstrap)
    assert [offset for offset in shop.offsets(reader) if offset < 20] == list(range(20))
    assert reader.positions().at[shop.place].offset == 20
    assert [entry.number for entry in reader.entries()] == [0, 1, 2]
    assert list(reader.problems()) == []


@pytest.mark.holdfast(mode="thread")
def test_a_ledger_with_something_undecided_is_of_no_one_moment(shop: Shop, holdfast_broker: Broker) -> None:
    bootstrap = holdfast_broker.bootstrap_servers
    builder = TopicBuilder(BrokerTopics(bootstrap), "totals", "shop", "out", partitions=2)
    filled(shop, builder, 1)
    assert reader_of(shop, bootstrap).is_exact
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "another"})
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(builder.ledger_topic, b"{}", b"0", 0)
    assert producer.flush(30) == 0
    undecided = reader_of(shop, bootstrap)
    assert not undecided.is_exact
    assert [entry.number for entry in undecided.entries()] == [0, 1]
    producer.abort_transaction(30)


def test_a_batch_that_only_some_writers_have_is_pending(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster, writers=3)
    filled(shop, builder, 1)
    builder.commit(shop.entry(1), records(1), writers_done=[0, 2])
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert reader.positions().at[shop.place].offset == 10
    assert [entry.number for entry in reader.entries()] == [0, 1]


def test_topic_and_ledger_are_of_one_moment_while_nothing_is_under_way(
    shop: Shop, cluster: FakeCluster
) -> None:
    builder = builder_of(cluster, writers=2)
    filled(shop, builder)
    assert reader_of(shop, cluster.bootstrap_servers).is_exact
    builder.commit(shop.entry(3), records(3), writers_done=[1])
    assert not reader_of(shop, cluster.bootstrap_servers).is_exact
    builder.commit(shop.ledger.last or shop.opening(), writers_done=[0])
    assert reader_of(shop, cluster.bootstrap_servers).is_exact


def test_a_ledger_that_grows_meanwhile_is_of_another_moment(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster)
    filled(shop, builder, 1)

    def grow(fields: dict[str, Any]) -> None:
        """When the ends of the topic were asked for."""
        builder.commit(shop.entry(1), records(1))

    keep = [lambda fields: None] * 5
    cluster.script(LIST_OFFSETS, *keep, grow)
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert not reader.is_exact
    assert reader.positions().at[shop.place].offset == 10


def test_markers_that_the_ledger_is_ahead_of_are_waited_for(shop: Shop, cluster: FakeCluster) -> None:
    """Apache Kafka ends a transaction in one partition after the other: here in the ledger first."""
    builder = builder_of(cluster)
    filled(shop, builder, 2)
    late = cluster.topics["totals"].partitions[1]
    late.last_stable = 6

    def mark(fields: dict[str, Any]) -> None:
        late.last_stable = None

    keep = [lambda fields: None] * 5
    cluster.script(LIST_OFFSETS, *keep, mark)
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert reader.undecided_offsets == 0
    assert sorted(shop.offsets(reader)) == list(range(20))


def test_what_stays_undecided_is_counted(
    shop: Shop, cluster: FakeCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record_walk, "DECIDED_SECONDS_MAX", 0.05)
    builder = builder_of(cluster)
    filled(shop, builder, 2)
    late = cluster.topics["totals"].partitions[1]
    late.last_stable = 6
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert reader.undecided_offsets == late.log_end - 6
    assert sorted(shop.offsets(reader)) == [each for each in range(20) if each < 10 or each % 2 == 0]


def test_reading_goes_on_where_an_earlier_audit_ended(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster)
    filled(shop, builder)
    ends = reader_of(shop, cluster.bootstrap_servers).ends
    builder.commit(shop.entry(3), records(3))
    reader = reader_of(shop, cluster.bootstrap_servers)
    reader.start_at(ends)
    assert shop.offsets(reader) == list(range(30, 40))
    assert list(reader.gaps()) == []


def test_what_was_aborted_is_not_there(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster), 1)
    partition = cluster.topics["totals"].partitions[0]
    append_transaction(partition, records(1), producer_id=9, is_commit=False)
    assert shop.offsets(reader_of(shop, cluster.bootstrap_servers)) == list(range(10))


def test_a_reset_ledger_begins_anew(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster, writers=2)
    filled(shop, builder)
    builder.forget()
    assert list(reader_of(shop, cluster.bootstrap_servers).entries()) == []
    shop.ledger.last = None
    builder.commit(shop.opening())
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert [entry.number for entry in reader.entries()] == [0]


def test_records_of_others_are_counted_and_no_more(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster), 1)
    partition = cluster.topics["totals"].partitions[0]
    strangers = [
        Record(0, 0, b"k", b"v"),
        Record(1, 0, b"k", b"v", (("hf-source", b"nonsense"),)),
        Record(2, 0, b"k", b"v", (("hf-source", None),)),
    ]
    partition.append(build_batch(strangers))
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert shop.offsets(reader) == list(range(10))
    [gap] = reader.gaps()
    assert gap.what.startswith("3 records")
    assert not gap.is_gap


def test_a_topic_that_dropped_its_head_is_a_gap(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster))
    partition = cluster.topics["totals"].partitions[1]
    partition.log_start = 6
    partition.batches = [each for each in partition.batches if each[0].base_offset >= 6]
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert len(shop.offsets(reader)) == 25
    [gap] = reader.gaps()
    assert gap.is_gap
    assert "6 of partition 1" in gap.why
    assert reader.gone_offsets == 6


def test_a_topic_that_was_compacted_is_a_gap(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster))
    partition = cluster.topics["totals"].partitions[0]
    del partition.batches[2]
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert len(shop.offsets(reader)) == 25
    [gap] = reader.gaps()
    assert gap.is_gap
    assert gap.what.startswith("5 offsets")
    assert reader.gone_offsets == 5


def test_a_ledger_that_is_gone_is_told(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster)
    filled(shop, builder)
    del cluster.topics[builder.ledger_topic]
    [finding] = shop.found(reader_of(shop, cluster.bootstrap_servers))
    assert "there is no ledger hf-ledger-shop--out" in finding.detail


def test_records_of_others_in_a_topic_that_was_never_written_are_no_fault(
    shop: Shop, cluster: FakeCluster
) -> None:
    cluster.add_topic("totals").partitions[0].append(build_batch([Record(0, 0, b"k", b"v")]))
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert shop.found(reader) == []
    assert [gap.is_gap for gap in reader.gaps()] == [False]


def test_a_topic_that_is_gone_is_told(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster))
    del cluster.topics["totals"]
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert shop.offsets(reader) == []
    [finding] = reader.problems()
    assert "the topic totals is gone" in finding.detail


def test_a_sink_that_was_never_written_is_empty(shop: Shop, cluster: FakeCluster) -> None:
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert shop.found(reader) == []
    assert list(reader.entries()) == []


def test_a_ledger_record_that_is_none_is_told(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster)
    filled(shop, builder, 1)
    partition = cluster.topics[builder.ledger_topic].partitions[0]
    append_transaction(partition, [Sent(b"0", b"no json", ())], producer_id=9)
    reader = reader_of(shop, cluster.bootstrap_servers)
    [finding] = shop.found(reader)
    assert "partition 0, offset 4" in finding.detail
    assert [entry.number for entry in reader.entries()] == [0, 1]


def test_writers_that_disagree_are_told(shop: Shop, cluster: FakeCluster) -> None:
    builder = builder_of(cluster, writers=2)
    builder.commit(shop.opening())
    entry = shop.entry(0)
    builder.commit(entry, writers_done=[0])
    builder.commit(
        replace(entry, range=shop.ledger.entry({shop.place: (0, 7)}, rows=1).range), writers_done=[1]
    )
    [finding] = shop.found(reader_of(shop, cluster.bootstrap_servers))
    assert "another entry 1" in finding.detail


@pytest.mark.parametrize(
    ("rows", "chain", "says"),
    [
        (6, "k:a", None),
        (5, "k:a", "have 9 rows of the entry 1, which has 10"),
        (6, "k:b", "shares of different batches"),
    ],
)
def test_the_shares_of_a_batch_are_added_up(
    shop: Shop, cluster: FakeCluster, rows: int, chain: str, says: str | None
) -> None:
    builder = builder_of(cluster, writers=2)
    builder.commit(shop.opening())
    entry = replace(shop.entry(0), chain="k:a")
    assert entry.rows == 10
    builder.commit(entry, records(0), writers_done=[0], share=Share(4, "0"))
    builder.commit(replace(entry, chain=chain), records(0), writers_done=[1], share=Share(rows, "0"))
    details = [finding.detail for finding in shop.found(reader_of(shop, cluster.bootstrap_servers))]
    assert [says in detail for detail in details] == [True] if says else details == []


def test_keys_and_values_come_beside_the_lineage(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster), 1)
    table = pa.concat_tables(reader_of(shop, cluster.bootstrap_servers).table_batches(["key", "value"]))
    assert sorted(table.column("_hf_offset").to_pylist()) == list(range(10))
    assert set(table.column("key").to_pylist()) == {b"k"}
    assert set(table.column("value").to_pylist()) == {b"{}"}


def test_windows_are_read_from_values_and_taken_back_by_keys(shop: Shop, cluster: FakeCluster) -> None:
    value = {
        "country": "nl",
        "window_start": "2026-01-01T00:00:00.000000Z",
        "window_end": "2026-01-01T00:01:00.000000Z",
    }
    value |= {"n": 3, "_hf_count": 3, "_hf_digest": -7}  # type: ignore[dict-item]
    builder = builder_of(cluster)
    builder.commit(shop.opening())
    sent = [
        sink_record(("per", 0, 1, 0), b'{"country":"nl"}', json.dumps(value).encode()),
        sink_record(("per", 0, 2, 0), b'{"country":"nl"}', None),
    ]
    builder.commit(shop.entry(0, 2), sent)
    [found] = reader_of(shop, cluster.bootstrap_servers, rows="per").values()
    rows = found.table.to_pylist()
    assert [(row["_hf_offset"], row["country"], row["_hf_count"], row["_hf_digest"]) for row in rows] == [
        (1, "nl", 3, -7),
        (2, "nl", 0, 0),
    ]
    assert rows[0]["window_end"].isoformat() == "2026-01-01T00:01:00+00:00"


def test_windows_whose_values_an_expression_makes_are_left_to_their_digests(
    shop: Shop, cluster: FakeCluster
) -> None:
    filled(shop, builder_of(cluster), 1)
    reader = reader_of(shop, cluster.bootstrap_servers, rows="per", value="country")
    assert list(reader.values()) == []
    assert not any(gap.is_gap for gap in reader.gaps())


def test_a_record_is_found_by_partition_and_offset(shop: Shop, cluster: FakeCluster) -> None:
    filled(shop, builder_of(cluster))
    reader = reader_of(shop, cluster.bootstrap_servers)
    assert reader.find(shop.place, 13) == ["totals-1@7"]
    assert reader.find(shop.place, 99) == []


def test_brokers_that_do_not_answer_are_no_empty_sink(shop: Shop) -> None:
    with pytest.raises(SinkUnreadable, match="out"):
        reader_of(shop, "127.0.0.1:1", settings={"socket.connection.setup.timeout.ms": "200"})  # type: ignore[arg-type]
