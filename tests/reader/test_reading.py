"""What the reader reads is what confluent-kafka reads, whatever is in the topic."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from datetime import UTC, datetime
from itertools import chain
from typing import Any

import pyarrow as pa
import pytest
from tests.support.reader_cases import (
    consumed,
    fill,
    fill_transactions,
    flush,
    make_producer,
    read_rows,
    rows_of,
    whole,
)

from holdfast import reader
from holdfast.errors import UsageError
from holdfast.reader import Cluster, PartitionRange, RangeReport, TopicPartition
from holdfast.reader.model import Isolation

MakeTopic = Callable[..., str]
BOTH: tuple[Isolation, ...] = ("read_committed", "read_uncommitted")


@pytest.fixture
def cluster(bootstrap: str) -> Any:
    with Cluster({"bootstrap.servers": bootstrap, "default.api.timeout.ms": "20000"}) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def mixed_topic(bootstrap: str, make_topic: MakeTopic) -> str:
    """Messages of every kind in three partitions."""
    topic = make_topic("mixed", 3)
    fill(bootstrap, topic, 3, seed=1)
    return topic


@pytest.mark.parametrize("batch_bytes", [1, 10_000, 4 << 20])
def test_all_codecs_nulls_headers_huge_and_empty_records(
    bootstrap: str, cluster: Cluster, mixed_topic: str, batch_bytes: int
) -> None:
    rows, reports = read_rows(cluster, whole(cluster, mixed_topic), batch_bytes=batch_bytes)
    assert rows == consumed(bootstrap, mixed_topic, range(3), "read_committed")
    assert sum(report.records for report in reports) == 300
    assert all(report.bytes > 0 for report in reports)


def test_random_ranges_are_cut_exactly(cluster: Cluster, mixed_topic: str) -> None:
    chance = random.Random(2)
    everything, _ = read_rows(cluster, whole(cluster, mixed_topic))
    ranges = []
    for _ in range(12):  # several of one partition too
        full = chance.choice(whole(cluster, mixed_topic))
        start = chance.randrange(full.end)
        ranges.append(full._replace(start=start, end=chance.randrange(start, full.end) + 1))
    reports: list[RangeReport] = []
    seen: list[tuple[int, int]] = []
    for batch in cluster.read(ranges, reports=reports):
        offsets = batch.column("offset").to_pylist()
        assert offsets == sorted(offsets)
        seen += [(batch.column("partition")[0].as_py(), offset) for offset in offsets]
    expected = [
        (each.partition, row.offset)
        for each in ranges
        for row in everything[each.partition]
        if each.start <= row.offset < each.end
    ]
    assert sorted(seen) == sorted(expected)
    assert [report.range for report in reports] == ranges
    assert all(report.is_complete for report in reports)


@pytest.mark.parametrize("seed", [1, 2])
def test_committed_aborted_and_interleaved_transactions(
    bootstrap: str, cluster: Cluster, make_topic: MakeTopic, seed: int
) -> None:
    topic = make_topic("transactions", 2)
    fill_transactions(bootstrap, topic, 2, seed)
    for isolation in BOTH:
        for batch_bytes in (1, 4 << 20):
            rows, reports = read_rows(
                cluster, whole(cluster, topic, isolation), isolation=isolation, batch_bytes=batch_bytes
            )
            assert rows == consumed(bootstrap, topic, range(2), isolation)
            assert sum(report.control for report in reports) > 0
            assert (sum(report.aborted for report in reports) > 0) == (isolation == "read_committed")
            assert sum(report.missing for report in reports) == 0


def test_ranges_that_cut_through_transactions(
    bootstrap: str, cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic("cut")
    fill_transactions(bootstrap, topic, 1, seed=5)
    expected = consumed(bootstrap, topic, [0], "read_committed")[0]
    (full,) = whole(cluster, topic)
    for start in range(0, full.end, 7):
        end = min(start + 11, full.end)
        rows, _ = read_rows(cluster, [full._replace(start=start, end=end)])
        assert rows[0] == [row for row in expected if start <= row.offset < end]


def test_an_open_transaction_holds_the_end_and_a_range_beyond_it_is_not_answered_with_less(
    bootstrap: str, make_topic: MakeTopic
) -> None:
    topic = make_topic("open")
    kept = fill_transactions(bootstrap, topic, 1, seed=3, leave_open=True)
    assert kept
    with Cluster({"bootstrap.servers": bootstrap, "default.api.timeout.ms": "300"}) as cluster:
        (stable,) = whole(cluster, topic)
        rows, _ = read_rows(cluster, [stable])
        assert rows == consumed(bootstrap, topic, [0], "read_committed")
        latest = cluster.offsets([TopicPartition(topic, 0)], "latest")[TopicPartition(topic, 0)].offset
        assert latest > stable.end
        read: list[pa.RecordBatch] = []
        with pytest.raises(reader.EndNotReached, match="a transaction is still open"):
            for batch in cluster.read([stable._replace(end=latest)]):
                read.append(batch)  # noqa: PERF402  what came before the error counts
        assert rows_of(read) == rows[0]
        rows, _ = read_rows(cluster, whole(cluster, topic, "read_uncommitted"), isolation="read_uncommitted")
        assert rows == consumed(bootstrap, topic, [0], "read_uncommitted")


def test_a_range_beyond_the_logs_end_waits_and_then_says_so(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("short")
    producer = make_producer(bootstrap)
    producer.produce(topic, b"one")
    flush(producer)
    with Cluster({"bootstrap.servers": bootstrap, "default.api.timeout.ms": "300"}) as cluster:
        (full,) = whole(cluster, topic)
        with pytest.raises(reader.EndNotReached, match="but the log ends at 1"):
            list(cluster.read([full._replace(end=5)]))


def test_a_range_is_completed_by_what_is_written_while_it_waits(
    bootstrap: str, cluster: Cluster, make_topic: MakeTopic
) -> None:
    topic = make_topic("growing")
    producer = make_producer(bootstrap)
    producer.produce(topic, b"one")
    flush(producer)
    (full,) = whole(cluster, topic)
    batches = cluster.read([full._replace(end=2)])
    assert rows_of([next(batches)])[0].value == b"one"
    producer.produce(topic, b"two")
    flush(producer)
    assert [row.value for row in rows_of(batches)] == [b"two"]


def test_compacted_topics_have_their_gaps_counted(
    bootstrap: str, cluster: Cluster, make_topic: MakeTopic
) -> None:
    config = {
        "cleanup.policy": "compact",
        "segment.ms": "50",
        "min.cleanable.dirty.ratio": "0",
        "max.compaction.lag.ms": "1",
    }
    topic = make_topic("compacted", 1, config)
    deadline = time.monotonic() + 60
    number = 0
    missing = 0
    while not missing:
        assert time.monotonic() < deadline, "the cleaner never came"
        for codec in ("none", "zstd"):
            producer = make_producer(bootstrap, codec)
            for _ in range(20):
                producer.produce(topic, key=b"%d" % (number % 7), value=b"%d" % number)
                number += 1
            flush(producer)
        (full,) = whole(cluster, topic)
        rows, (report,) = read_rows(cluster, [full])
        missing = report.missing
    assert report.records + missing == number == full.end
    # The cleaner may go on between the two readings: what is left of each key's last record is the same.
    theirs = consumed(bootstrap, topic, [0], "read_committed")[0]
    assert {row.key: row for row in rows[0]} == {row.key: row for row in theirs}
    assert set(theirs) <= set(rows[0])
    gap = next(n for n in range(full.end) if n not in {row.offset for row in rows[0]})
    only_gap, (report,) = read_rows(cluster, [full._replace(start=gap, end=gap + 1)])
    assert (only_gap[0], report.missing) == ([], 1)


def test_many_small_ranges_of_a_large_topic(bootstrap: str, cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic("many", 40)
    producer = make_producer(bootstrap)
    for number in range(40 * 30):
        producer.produce(topic, b"%d" % number, partition=number % 40)
    flush(producer)
    ranges = [each._replace(start=10, end=15) for each in whole(cluster, topic)]
    rows, reports = read_rows(cluster, ranges)
    assert all([row.offset for row in rows[each]] == [10, 11, 12, 13, 14] for each in range(40))
    assert len(reports) == 40


def test_empty_ranges_and_empty_topics(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic("empty", 2)
    ranges = whole(cluster, topic)
    assert [(each.start, each.end) for each in ranges] == [(0, 0), (0, 0)]
    assert list(cluster.read(ranges)) == []
    assert list(cluster.read([])) == []


def test_log_append_time(bootstrap: str, cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic("appended", 1, {"message.timestamp.type": "LogAppendTime"})
    producer = make_producer(bootstrap)
    producer.produce(topic, b"x", timestamp=1000)
    flush(producer)
    rows, _ = read_rows(cluster, whole(cluster, topic))
    assert rows == consumed(bootstrap, topic, [0], "read_committed")
    assert rows[0][0].timestamp_type == 1


def test_other_questions_may_be_asked_while_records_are_read(
    bootstrap: str, cluster: Cluster, mixed_topic: str
) -> None:
    place = TopicPartition(mixed_topic, 0)
    batches = []
    for batch in cluster.read(whole(cluster, mixed_topic), batch_bytes=20_000):
        assert cluster.offsets([place], "earliest")[place].offset == 0
        assert mixed_topic in cluster.topics()
        batches.append(batch)
    expected = consumed(bootstrap, mixed_topic, range(3), "read_committed")
    assert sorted(rows_of(batches), key=repr) == sorted(chain(*expected.values()), key=repr)


def test_a_reading_given_up_leaves_the_cluster_usable(cluster: Cluster, mixed_topic: str) -> None:
    batches = cluster.read(whole(cluster, mixed_topic), batch_bytes=1)
    next(batches)
    batches.close()  # type: ignore[attr-defined]
    rows, _ = read_rows(cluster, whole(cluster, mixed_topic))
    assert sum(map(len, rows.values())) == 300


# ------------------------------------------------------------------------ places


def test_offsets_epochs_and_times(bootstrap: str, cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic("places", 2)
    producer = make_producer(bootstrap)
    for number in range(10):
        producer.produce(topic, b"x", partition=0, timestamp=1000 + 100 * number)
    flush(producer)
    first, second = TopicPartition(topic, 0), TopicPartition(topic, 1)
    assert {place: answer.offset for place, answer in cluster.offsets([first, second], "latest").items()} == {
        first: 10,
        second: 0,
    }
    found = cluster.offsets([first, second], 1450)
    assert (found[first].offset, found[first].timestamp_ms, found[second].offset) == (5, 1500, -1)
    epoch = cluster.topics([topic])[topic].partitions[0].leader_epoch
    assert cluster.epoch_ends({first: epoch}) == {first: (epoch, 10)}
    with pytest.raises(UsageError, match="no place in a log"):
        cluster.offsets([first], "middle")  # type: ignore[arg-type]


def test_read_by_offsets_times_and_partitions(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("front-door", 2)
    producer = make_producer(bootstrap)
    for number in range(20):
        producer.produce(topic, b"%d" % number, partition=number % 2, timestamp=10_000 + 1000 * number)
    flush(producer)

    def values(**options: Any) -> list[int]:
        batches = reader.read(bootstrap, topic, **options)
        return sorted(int(row.value or b"") for row in rows_of(batches))

    assert values() == list(range(20))
    assert values(partitions=[1]) == list(range(1, 20, 2))
    assert values(start={0: 8, 1: 9}) == [16, 18, 19]
    assert values(start={0: 8}, end={0: 9}) == [16]
    assert values(start=20_000, end=datetime(1970, 1, 1, 0, 0, 25, tzinfo=UTC)) == list(range(10, 15))
    assert values(start=60_000) == []
    assert values(start="latest") == []
    with pytest.raises(UsageError, match="no offset is given for partition 1"):
        values(start={0: 1}, partitions=[1])
    with pytest.raises(reader.OffsetGone, match="the log holds 0 to 10"):
        values(start={0: 3}, end={0: 11})
    with pytest.raises(reader.TopicMissing, match="has no partition 2"):
        values(partitions=[2])


def test_a_topic_is_a_stream_that_tables_are_made_of(bootstrap: str, make_topic: MakeTopic) -> None:
    topic = make_topic("as-a-table", 2)
    producer = make_producer(bootstrap)
    for number in range(20):
        producer.produce(topic, b"%d" % number, partition=number % 2)
    flush(producer)
    found = reader.read(bootstrap, topic)
    assert isinstance(found, pa.RecordBatchReader)
    assert found.schema == reader.SCHEMA()
    frame = found.read_pandas()
    assert sorted(int(value) for value in frame["value"]) == list(range(20))
    with pytest.raises(reader.TopicMissing):
        reader.read(bootstrap, "nowhere")


def test_topics_by_name_pattern_and_all(cluster: Cluster, make_topic: MakeTopic) -> None:
    names = [make_topic(f"pattern-{number}", number) for number in (1, 2)]
    found = cluster.topics(names)
    assert [len(found[name].partitions) for name in names] == [1, 2]
    assert set(cluster.topics(pattern=r"pattern-[12]-.*")) == set(names)
    assert cluster.topics(pattern="pattern") == {}
    assert set(names) <= set(cluster.topics())
    assert not any(name.startswith("__") for name in cluster.topics())
    with pytest.raises(reader.TopicMissing, match="there is no topic 'nowhere'"):
        cluster.topics(["nowhere"])
    with pytest.raises(UsageError, match="no regular expression"):
        cluster.topics(pattern="(")


def test_range_of_a_partition_that_does_not_exist(cluster: Cluster, make_topic: MakeTopic) -> None:
    topic = make_topic("few")
    info = cluster.topics([topic])[topic]
    with pytest.raises(reader.TopicMissing, match="has no partition 5; it has 1"):
        list(cluster.read([PartitionRange(topic, info.topic_id, 5, 0, 1)]))
