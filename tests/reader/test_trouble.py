"""Brokers that move, stop, lie or say no: what was read stays right, and what cannot be read is said."""

from __future__ import annotations

import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from confluent_kafka.admin import AdminClient, NewTopic
from kio.schema.errors import ErrorCode
from tests.support.fake_cluster import (
    CLOSE,
    FETCH,
    GARBAGE,
    HALF,
    LIST_OFFSETS,
    METADATA,
    FakeCluster,
    FakePartition,
)
from tests.support.reader_cases import flush, make_producer, rows_of, whole

from holdfast import reader
from holdfast.reader import Cluster, PartitionRange, RangeReport, TopicPartition
from holdfast.reader.model import Isolation
from holdfast.wire.batch import Record, build_batch, make_batch

QUICK = {
    "default.api.timeout.ms": "400",
    "socket.connection.setup.timeout.ms": "400",
    "request.timeout.ms": "2000",
    "retry.backoff.ms": "10",
}
PATIENT = QUICK | {"default.api.timeout.ms": "20000", "socket.connection.setup.timeout.ms": "20000"}


@pytest.fixture
def fake() -> Iterator[FakeCluster]:
    with FakeCluster(brokers=2) as fake:
        yield fake


def connect(fake: FakeCluster, settings: dict[str, str] = PATIENT) -> Cluster:
    return Cluster({"bootstrap.servers": fake.bootstrap_servers, **settings})


def fill(partition: FakePartition, batches: int = 10, per_batch: int = 3) -> None:
    for number in range(batches):
        partition.append(make_batch([b"%d-%d" % (number, index) for index in range(per_batch)]))


def values(
    cluster: Cluster, ranges: list[PartitionRange], isolation: Isolation = "read_committed", **options: Any
) -> list[bytes | None]:
    reports: list[RangeReport] = []
    rows = rows_of(cluster.read(ranges, isolation=isolation, reports=reports, **options))
    for report in reports:
        assert report.records + report.control + report.aborted + report.missing == (
            report.range.end - report.range.start
        )
    return [row.value for row in rows]


ALL = [b"%d-%d" % (number, index) for number in range(10) for index in range(3)]


# ------------------------------------------------------------------------ leaders


def test_a_reading_follows_the_leader(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake) as cluster:
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        rows = rows_of([next(batches)])
        fake.move("t", 0, broker=1)
        rows += rows_of(batches)
    assert [row.value for row in rows] == ALL
    assert {broker for broker, api_key, _ in fake.asked if api_key == FETCH} == {0, 1}


def test_several_brokers_are_read_at_once(fake: FakeCluster) -> None:
    topic = fake.add_topic("t", partitions=5)
    for partition in topic.partitions:
        fill(partition)
    with connect(fake) as cluster:
        assert sorted(values(cluster, whole(cluster, "t"), batch_bytes=100), key=repr) == sorted(
            ALL * 5, key=repr
        )


@pytest.mark.parametrize("accident", [CLOSE, HALF, GARBAGE])
def test_a_connection_that_breaks_is_made_again(fake: FakeCluster, accident: str) -> None:
    topic = fake.add_topic("t", partitions=2)
    for partition in topic.partitions:
        fill(partition)
    with connect(fake) as cluster:
        ranges = whole(cluster, "t")
        fake.script(FETCH, accident, lambda fields: None, accident, accident)
        fake.script(METADATA, accident)
        assert sorted(values(cluster, ranges, batch_bytes=1), key=repr) == sorted(ALL * 2, key=repr)


def test_a_broker_that_restarts_is_waited_for(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake) as cluster:
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        rows = rows_of([next(batches)])
        fake.stop(0)
        timer = threading.Timer(0.2, fake.start, [0])
        timer.start()
        rows += rows_of(batches)
        timer.join()
    assert [row.value for row in rows] == ALL


def test_a_leader_that_stays_away_is_an_error_in_time(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake, QUICK) as cluster:
        ranges = whole(cluster, "t")
        fake.stop(0)
        with pytest.raises(reader.Unreachable, match=r"cannot reach the broker at 127\.0\.0\.1:\d+"):
            list(cluster.read(ranges))
        with pytest.raises(reader.Unreachable):
            cluster.offsets([TopicPartition("t", 0)], "latest")


def test_no_leader_at_all(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake, QUICK) as cluster:
        ranges = whole(cluster, "t")
        topic.partitions[0].leader = -1
        with pytest.raises(reader.Unreachable, match="t-0 has no leader"):
            list(cluster.read(ranges))


def test_records_read_before_an_election_that_cut_them_off_are_noticed(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake) as cluster:
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        rows = rows_of([next(batches), next(batches)])
        assert rows[-1].offset == 5
        topic.partitions[0].epoch_ends[0] = 2  # the new leader never had the rest of epoch 0
        fake.move("t", 0, broker=1)
        with pytest.raises(reader.OffsetGone, match="an election has cut the log") as gone:
            list(batches)
        assert gone.value.log_end == 2


def test_passing_errors_are_asked_again_and_lasting_ones_raised(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])

    def refuse(code: ErrorCode) -> Callable[[dict[str, Any]], None]:
        def change(fields: dict[str, Any]) -> None:
            fields["responses"][0]["partitions"][0] |= {"error_code": code, "records": b""}

        return change

    def refuse_offsets(fields: dict[str, Any]) -> None:
        fields["topics"][0]["partitions"][0]["error_code"] = ErrorCode.leader_not_available

    with connect(fake) as cluster:
        fake.script(LIST_OFFSETS, refuse_offsets, refuse_offsets)
        ranges = whole(cluster, "t")
        fake.script(
            FETCH,
            refuse(ErrorCode.unknown_leader_epoch),
            refuse(ErrorCode.offset_not_available),
            refuse(ErrorCode.kafka_storage_error),
            refuse(ErrorCode.unknown_topic_id),
        )
        assert values(cluster, ranges) == ALL
        fake.script(FETCH, refuse(ErrorCode.topic_authorization_failed))
        with pytest.raises(reader.NotAuthorised, match="topic 't' may not be read"):
            list(cluster.read(ranges))
        fake.script(FETCH, refuse(ErrorCode.unsupported_compression_type))
        with pytest.raises(reader.Refused, match="UNSUPPORTED_COMPRESSION_TYPE") as refused:
            list(cluster.read(ranges))
        assert refused.value.code is ErrorCode.unsupported_compression_type
        fake.script(FETCH, refuse(ErrorCode.corrupt_message))
        with pytest.raises(reader.CorruptBatch, match="finds its log damaged at offset 0"):
            list(cluster.read(ranges))
        fake.script(FETCH, lambda fields: fields.update(error_code=ErrorCode.invalid_request))
        with pytest.raises(reader.Refused, match="INVALID_REQUEST"):
            list(cluster.read(ranges))


def test_a_throttled_reader_waits_and_goes_on(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])

    def throttle(fields: dict[str, Any]) -> None:
        """As Kafka does: an answer without records, and a time in which not to ask."""
        fields["throttle_time"] = 50
        fields["responses"][0]["partitions"][0]["records"] = b""

    with connect(fake) as cluster:
        ranges = whole(cluster, "t")
        fake.script(FETCH, throttle, throttle, throttle, throttle, throttle)
        assert values(cluster, ranges) == ALL


# ------------------------------------------------------------------------ logs


def test_offsets_in_no_batch_at_the_end_of_a_log_are_missing_and_not_waited_for(fake: FakeCluster) -> None:
    topic = fake.add_topic("t", partitions=2)
    for partition in topic.partitions:
        partition.leader = 0
        fill(partition)
        partition.log_end = 50  # everything behind 30 was compacted away
    with connect(fake) as cluster:
        reports: list[RangeReport] = []
        rows = rows_of(cluster.read(whole(cluster, "t"), reports=reports))
    assert len(rows) == 60
    assert [(report.records, report.missing, report.is_complete) for report in reports] == [
        (30, 20, True)
    ] * 2


def empty(fields: dict[str, Any]) -> None:
    """As Kafka does when remote storage takes longer than a fetch may wait: nothing, and no error."""
    fields["responses"][0]["partitions"][0]["records"] = b""


def fetches(fake: FakeCluster) -> list[Any]:
    return [request for _, api_key, request in fake.asked if api_key == FETCH]


def test_remote_storage_that_is_slow_is_waited_for_and_its_records_are_not_missing(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    topic.partitions[0].local_start = 21
    with connect(fake) as cluster:
        ranges = whole(cluster, "t")
        fake.script(FETCH, *[empty] * 20)
        assert values(cluster, ranges) == ALL
    waits = [int(request.max_wait.total_seconds() * 1000) for request in fetches(fake)]
    assert waits[:5] == [100, 200, 400, 800, 1000]  # no longer than half of request.timeout.ms
    assert waits[20] == 1000


@pytest.mark.check
def test_remote_storage_that_stays_away_is_an_error_in_time(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    topic.partitions[0].local_start = 21
    topic.partitions[0].batches.clear()
    # Long enough for the few answers after which it is asked where the local log begins.
    with connect(fake, QUICK | {"default.api.timeout.ms": "4000"}) as cluster:
        reports: list[RangeReport] = []
        with pytest.raises(reader.EndNotReached, match="offsets before 21 are in remote storage"):
            list(cluster.read(whole(cluster, "t"), reports=reports))
    assert (reports[0].missing, reports[0].position) == (0, 0)


def test_the_wait_is_short_again_once_records_come(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake) as cluster:
        ranges = whole(cluster, "t")
        fake.script(FETCH, empty, empty)
        assert values(cluster, ranges, batch_bytes=1) == ALL
    waits = [int(request.max_wait.total_seconds() * 1000) for request in fetches(fake)]
    assert waits[:4] == [100, 200, 400, 100]


def test_records_that_became_remote_while_they_were_asked_for_are_not_missing(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])

    def leave(fields: dict[str, Any]) -> None:
        empty(fields)
        topic.partitions[0].local_start = 30

    with connect(fake) as cluster:
        ranges = whole(cluster, "t")
        fake.script(FETCH, empty, empty, empty, leave, empty, empty, empty, empty, empty)
        assert values(cluster, ranges) == ALL


def test_brokers_that_know_no_remote_storage_have_empty_ends_too() -> None:
    with FakeCluster(versions={LIST_OFFSETS: (1, 7)}) as fake:
        topic = fake.add_topic("t")
        fill(topic.partitions[0])
        topic.partitions[0].log_end = 50
        with connect(fake) as cluster:
            assert values(cluster, whole(cluster, "t")) == ALL


def test_gaps_inside_a_log_are_missing(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    log = topic.partitions[0]
    log.append(make_batch([b"a"]), base_offset=5)
    log.append(build_batch([Record(3, 0, None, b"b")], last_offset_delta=9), base_offset=10)
    log.append(make_batch([b"c"]), base_offset=100)
    with connect(fake) as cluster:
        (full,) = whole(cluster, "t")
        reports: list[RangeReport] = []
        assert len(rows_of(cluster.read([full], reports=reports))) == 3
        assert (reports[0].records, reports[0].missing) == (3, 98)
        assert values(cluster, [full._replace(start=20, end=90)]) == []


def test_a_batch_larger_than_what_was_asked_for_is_read_in_the_end(fake: FakeCluster) -> None:
    topic = fake.add_topic("t", partitions=3)
    for partition in topic.partitions:
        partition.leader = 0
        partition.append(make_batch([bytes(300_000)]))
        partition.append(make_batch([b"small"]))
        partition.append(make_batch([bytes(200_000)]))
    with connect(fake) as cluster:
        found = values(cluster, whole(cluster, "t"), batch_bytes=1000)
    assert sorted(map(len, filter(None, found))) == [5] * 3 + [200_000] * 3 + [300_000] * 3


def test_damage_in_the_log_is_named(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0], batches=2)
    header, batch = topic.partitions[0].batches[1]
    topic.partitions[0].batches[1] = (header, batch[:-1] + bytes([batch[-1] ^ 1]))
    with connect(fake) as cluster:
        (full,) = whole(cluster, "t")
        assert values(cluster, [full._replace(end=3)]) == ALL[:3]
        with pytest.raises(reader.CorruptBatch, match="t-0: the batch at offset 3 is damaged: its checksum"):
            list(cluster.read([full]))


def test_old_record_formats_are_refused(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    log = topic.partitions[0]
    log.append(make_batch([b"x"]))
    header, batch = log.batches[0]
    log.batches[0] = (header, batch[:16] + b"\x01" + batch[17:])
    with connect(fake) as cluster, pytest.raises(reader.CorruptBatch, match="not of record format 2"):
        list(cluster.read(whole(cluster, "t")))


def test_brokers_too_old_to_be_read_by_topic_id_are_refused() -> None:
    with FakeCluster(versions={FETCH: (4, 12)}) as fake:
        fill(fake.add_topic("t").partitions[0])
        with (
            connect(fake) as cluster,
            pytest.raises(reader.UnsupportedBroker, match="Fetch only up to version 12"),
        ):
            list(cluster.read(whole(cluster, "t")))
    with FakeCluster(versions={METADATA: (0, 9)}) as fake:
        fake.add_topic("t")
        with connect(fake) as cluster, pytest.raises(reader.UnsupportedBroker, match="Metadata"):
            cluster.topics(["t"])


@pytest.mark.parametrize("version", range(13, 19))
def test_every_version_of_fetch_is_spoken(version: int) -> None:
    with FakeCluster(versions={FETCH: (4, version)}) as fake:
        topic = fake.add_topic("t")
        fill(topic.partitions[0])
        topic.partitions[0].aborted = [(5, 3)]
        with connect(fake) as cluster:
            assert values(cluster, whole(cluster, "t")) == ALL


# ------------------------------------------------------------------------ topics of our broker


def test_a_recreated_topic_is_an_error_and_not_data(bootstrap: str, make_topic: Callable[..., str]) -> None:
    topic = make_topic("again")
    producer = make_producer(bootstrap)
    producer.produce(topic, b"old")
    flush(producer)
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    with Cluster({"bootstrap.servers": bootstrap}) as cluster:
        ranges = whole(cluster, topic)
        admin.delete_topics([topic])[topic].result(30)
        with pytest.raises(reader.TopicMissing, match=f"there is no topic '{topic}' any more"):
            list(cluster.read(ranges))
        admin.create_topics([NewTopic(topic, 1, 1)])[topic].result(30)
        producer.produce(topic, b"new")
        flush(producer)
        with pytest.raises(reader.TopicRecreated, match="was deleted and created again"):
            list(cluster.read(ranges))
        assert values(cluster, whole(cluster, topic)) == [b"new"]


def test_a_topic_recreated_between_two_fetches(fake: FakeCluster) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    with connect(fake) as cluster:
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        next(batches)
        fill(fake.add_topic("t").partitions[0])
        with pytest.raises(reader.TopicRecreated):
            list(batches)


def test_deleted_records_are_an_error(bootstrap: str, make_topic: Callable[..., str]) -> None:
    from confluent_kafka import TopicPartition as Place

    topic = make_topic("headless")
    producer = make_producer(bootstrap)
    for number in range(10):
        producer.produce(topic, b"%d" % number)
    flush(producer)
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": 0})
    with Cluster({"bootstrap.servers": bootstrap}) as cluster:
        (full,) = whole(cluster, topic)
        admin.delete_records([Place(topic, 0, 4)])[Place(topic, 0)].result(30)
        with pytest.raises(reader.OffsetGone, match="offsets 0 to 3 are gone") as gone:
            list(cluster.read([full]))
        assert (gone.value.offset, gone.value.log_start, gone.value.log_end) == (0, 4, 10)
        with pytest.raises(reader.OffsetGone, match="offset 12 does not exist: the log ends at 10"):
            list(cluster.read([full._replace(start=12, end=13)]))
        assert len(values(cluster, [full._replace(start=4)])) == 6


def test_errors_survive_the_way_between_processes() -> None:
    gone = pickle.loads(pickle.dumps(reader.OffsetGone("x", offset=1, log_start=2, log_end=3)))
    assert (str(gone), gone.offset, gone.log_start, gone.log_end) == ("x", 1, 2, 3)
    refused = pickle.loads(pickle.dumps(reader.Refused("y", ErrorCode.invalid_request)))
    assert (str(refused), refused.code) == ("y", ErrorCode.invalid_request)
    report = RangeReport(PartitionRange("t", FakeCluster().add_topic("t").topic_id, 0, 5, 9))
    assert pickle.loads(pickle.dumps(report)) == report


def test_time_the_caller_takes_is_not_counted(fake: FakeCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    topic = fake.add_topic("t")
    fill(topic.partitions[0])
    passed = [0.0]
    monotonic = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: monotonic() + passed[0])
    with connect(fake, QUICK) as cluster:
        fake.script(FETCH, lambda fields: None, CLOSE)
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        rows = rows_of([next(batches)])
        passed[0] = 3600.0  # an hour later the connection is gone
        rows += rows_of(batches)
    assert [row.value for row in rows] == ALL


def test_an_election_noticed_by_one_range_is_checked_for_the_others(fake: FakeCluster) -> None:
    topic = fake.add_topic("t", partitions=2)
    for partition in topic.partitions:
        fill(partition)
    with connect(fake) as cluster:
        batches = cluster.read(whole(cluster, "t"), batch_bytes=1)
        read: list[int] = []
        while sorted(set(read)) != [0, 1]:
            read += next(batches).column("partition").to_pylist()
        topic.partitions[1].epoch_ends[0] = 0
        fake.move("t", 1, broker=0)
        fake.move("t", 0, broker=1)
        cluster.topics(["t"])  # whoever asks, the cluster now knows the new leaders
        with pytest.raises(reader.OffsetGone, match=r"t-1: .* an election has cut the log"):
            list(batches)
