"""Transactions as one partition shows them to clients: bounds, markers, aborted lists, restarts."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node.hosted import HostedPartition
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.committed_reader import Shown, read_answer, read_through
from holdfast.wire.batch import Record, build_batch, check_whole

FETCH, LIST_OFFSETS, DELETE_RECORDS, WRITE_TXN_MARKERS, DESCRIBE_PRODUCERS = 1, 2, 21, 27, 61
COMMIT, ABORT = True, False
LATEST = -1


class Bench:
    """A topic `t` of one partition, written to by transactional producers."""

    def __init__(self, node: BareNode | None = None, **configs: Any) -> None:
        self.node = node or BareNode()
        self.client = self.node.connect()
        self.reader = self.node.connect()
        if node is None:
            self.client.create_topic("t", **configs)
        self.sequences: dict[int, int] = {}

    @property
    def hosted(self) -> HostedPartition:
        return self.node.hosted("t")

    def write(self, producer_id: int, *values: bytes, epoch: int = 0, transactional: bool = True) -> int:
        """Append a batch without waiting for its flush; returns its first offset."""
        sequence = self.sequences.get(producer_id, 0)
        self.sequences[producer_id] = sequence + len(values)
        batch = build_batch(
            [Record(index, 0, None, value) for index, value in enumerate(values)],
            base_timestamp=self.node.clock.now().wall_ms,
            producer_id=producer_id,
            producer_epoch=epoch if producer_id >= 0 else -1,
            base_sequence=sequence if producer_id >= 0 else -1,
            is_transactional=transactional and producer_id >= 0,
        )
        hosted = self.hosted
        stored = hosted.log.append(check_whole(batch), batch, hosted.leader_epoch, self.node.clock.now())
        self.node.node.commit.appended(hosted)
        return stored.base_offset

    def begin_end(self, producer_id: int, result: bool, **fields: Any) -> int:
        return self.client.begin(WRITE_TXN_MARKERS, 2, markers=[marker(producer_id, result, **fields)])

    def end(self, producer_id: int, result: bool, **fields: Any) -> int:
        """Write a marker through the protocol and wait for it; returns the partition's error code."""
        answer = self.client.ask(WRITE_TXN_MARKERS, 2, markers=[marker(producer_id, result, **fields)])
        return int(answer.markers[0].topics[0].partitions[0].error_code)

    def settle(self) -> None:
        self.node.settle()

    def begin_fetch(self, offset: int, *, max_wait: int = 0, max_bytes: int = 1 << 20) -> int:
        wanted = {"partition": 0, "fetch_offset": offset, "partition_max_bytes": max_bytes}
        return self.reader.begin(
            FETCH,
            12,
            isolation_level=1,
            max_wait=max_wait,
            min_bytes=1,
            max_bytes=1 << 20,
            session_epoch=-1,
            topics=[{"topic": "t", "partitions": [wanted]}],
        )

    def fetch(self, offset: int, max_bytes: int = 1 << 20) -> Any:
        correlation_id = self.begin_fetch(offset, max_bytes=max_bytes)
        return self.reader.answer(correlation_id).responses[0].partitions[0]

    def committed(self, max_bytes: int = 1 << 20) -> list[bytes | None]:
        """What a read_committed consumer sees from the start."""

        def fetch(offset: int) -> tuple[bytes, list[tuple[int, int]]]:
            part = self.fetch(offset, max_bytes)
            assert not part.error_code
            return part.records or b"", [(a.producer_id, a.first_offset) for a in part.aborted_transactions]

        return [shown.value for shown in read_through(fetch, self.hosted.log.start_offset)]

    def latest(self, isolation_level: int) -> int:
        answer = self.client.ask(
            LIST_OFFSETS,
            7,
            replica_id=-1,
            isolation_level=isolation_level,
            topics=[{"name": "t", "partitions": [{"partition_index": 0, "timestamp": LATEST}]}],
        )
        return int(answer.topics[0].partitions[0].offset)

    def again(self, node: BareNode) -> Bench:
        return Bench(node)


def marker(
    producer_id: int,
    result: bool,
    *,
    epoch: int = 0,
    coordinator_epoch: int = 0,
    version: int = 0,
    **where: Any,
) -> dict[str, Any]:
    topic = {"name": where.get("topic", "t"), "partition_indexes": [where.get("index", 0)]}
    return {
        "producer_id": producer_id,
        "producer_epoch": epoch,
        "transaction_result": result,
        "topics": [topic],
        "coordinator_epoch": coordinator_epoch,
        "transaction_version": version,
    }


@pytest.fixture
def bench() -> Bench:
    return Bench()


def test_an_open_transaction_holds_back_committed_readers_alone(bench: Bench) -> None:
    bench.write(-1, b"before")
    bench.write(7, b"in")
    bench.write(-1, b"after")
    bench.settle()
    part = bench.fetch(0)
    assert (part.last_stable_offset, part.high_watermark) == (1, 3)
    assert bench.committed() == [b"before"]
    assert (bench.latest(0), bench.latest(1)) == (3, 1)


def test_a_transaction_is_shown_when_its_marker_is_committed_not_when_it_is_written(bench: Bench) -> None:
    bench.write(7, b"in")
    bench.settle()
    asked = bench.begin_end(7, COMMIT)
    assert bench.hosted.log.end_offset == 2
    assert not bench.hosted.log.producers.ongoing_transactions
    assert bench.hosted.offsets.last_stable_offset == 0
    assert bench.committed() == []
    assert asked not in bench.client.correlation_ids
    bench.settle()
    assert asked in bench.client.correlation_ids
    assert bench.hosted.offsets.last_stable_offset == 2
    assert bench.committed() == [b"in"]


def test_an_aborted_transaction_is_dropped_by_its_list(bench: Bench) -> None:
    bench.write(7, b"no")
    bench.write(-1, b"yes")
    bench.write(7, b"no")
    bench.end(7, ABORT)
    bench.write(7, b"yes too")
    bench.end(7, COMMIT)
    assert bench.committed() == [b"yes", b"yes too"]
    part = bench.fetch(0)
    assert [(a.producer_id, a.first_offset) for a in part.aborted_transactions] == [(7, 0)]
    assert bench.fetch(4).aborted_transactions == ()


def test_a_reader_of_everything_gets_no_list(bench: Bench) -> None:
    bench.write(7, b"no")
    bench.end(7, ABORT)
    part = bench.client.fetch("t", 0)
    assert part.aborted_transactions is None
    assert [shown.value for shown in read_answer(part.records, 0).records] == [b"no"]


def test_a_parked_committed_fetch_wakes_when_the_marker_is_committed(bench: Bench) -> None:
    bench.write(7, b"in")
    bench.settle()
    parked = bench.begin_fetch(0, max_wait=5000)
    bench.write(-1, b"after")
    bench.settle()
    assert parked not in bench.reader.correlation_ids
    bench.end(7, COMMIT)
    part = bench.reader.answer(parked).responses[0].partitions[0]
    assert read_answer(part.records, 0, []).records == [Shown(0, None, b"in"), Shown(1, None, b"after")]


def test_without_group_commit_a_marker_counts_at_once() -> None:
    bench = Bench(holdfast_flush="os")
    bench.write(7, b"in")
    assert bench.hosted.offsets.last_stable_offset == 0
    assert bench.hosted.offsets.high_watermark.offset == 1
    bench.begin_end(7, COMMIT)
    assert bench.hosted.offsets.last_stable_offset == 2


def test_interleaved_transactions_hold_back_from_the_oldest(bench: Bench) -> None:
    bench.write(7, b"a")
    bench.write(8, b"b")
    bench.end(8, COMMIT)
    assert bench.hosted.offsets.last_stable_offset == 0
    bench.write(9, b"c")
    bench.end(7, ABORT)
    assert bench.hosted.offsets.last_stable_offset == 3
    bench.end(9, COMMIT)
    assert bench.committed() == [b"b", b"c"]


@pytest.mark.parametrize("ending", ["stop", "kill", "lose_power"])
def test_restarts_keep_transactions_open_ended_and_aborted(bench: Bench, ending: str) -> None:
    bench.write(7, b"aborted")
    bench.end(7, ABORT)
    bench.write(8, b"open")
    bench.write(-1, b"behind")
    bench.settle()
    bench = bench.again(getattr(bench.node, ending)())
    assert bench.hosted.offsets.last_stable_offset == 2
    assert bench.committed() == []
    bench.end(8, COMMIT)
    assert bench.committed() == [b"open", b"behind"]
    bench = bench.again(getattr(bench.node, ending)())
    assert bench.committed() == [b"open", b"behind"]


def test_a_transaction_spans_segments_and_so_does_its_list() -> None:
    bench = Bench(internal_segment_bytes="1000", index_interval_bytes="100")
    for _ in range(30):
        bench.write(7, b"x" * 100)
        bench.write(-1, b"y" * 10)
    bench.end(7, ABORT)
    assert len(bench.hosted.log.segments) > 3
    assert bench.committed() == bench.committed(max_bytes=1) == [b"y" * 10] * 30
    node = bench.node.kill()
    assert bench.again(node).committed(max_bytes=1) == [b"y" * 10] * 30


def test_deleting_records_of_an_open_transaction_moves_where_it_holds_back(bench: Bench) -> None:
    for value in (b"a", b"b", b"c"):
        bench.write(7, value)
    bench.settle()
    topics = [{"name": "t", "partitions": [{"partition_index": 0, "offset": 2}]}]
    answer = bench.client.ask(DELETE_RECORDS, 2, topics=topics, timeout=1000)
    assert answer.topics[0].partitions[0].low_watermark == 2
    assert bench.hosted.offsets.last_stable_offset == 2
    assert bench.latest(1) == 2
    bench = bench.again(bench.node.kill())
    assert bench.hosted.offsets.last_stable_offset == 2
    bench.end(7, COMMIT)
    assert bench.committed() == [b"c"]


def test_an_open_transaction_is_described_and_never_expires(bench: Bench) -> None:
    bench.write(-1, b"before")
    bench.write(7, b"in", epoch=3)
    bench.settle()
    expired = bench.hosted.log.producers.remove_expired(1 << 62, 1)
    assert expired == 0

    def described() -> Any:
        answer = bench.client.ask(DESCRIBE_PRODUCERS, 0, topics=[{"name": "t", "partition_indexes": [0]}])
        (producer,) = answer.topics[0].partitions[0].active_producers
        return producer

    assert (described().current_txn_start_offset, described().coordinator_epoch) == (1, -1)
    bench.end(7, ABORT, epoch=3, coordinator_epoch=0)
    assert (described().current_txn_start_offset, described().coordinator_epoch) == (-1, 0)


def test_producers_are_described_when_what_is_told_of_them_is_committed(bench: Bench) -> None:
    bench.write(7, b"in")
    topics = [{"name": "t", "partition_indexes": [0, 5]}]
    asked = bench.reader.begin(DESCRIBE_PRODUCERS, 0, topics=topics)
    assert asked not in bench.reader.correlation_ids
    bench.settle()
    known, unknown = bench.reader.answer(asked).topics[0].partitions
    assert known.active_producers[0].current_txn_start_offset == 0
    assert unknown.error_code == ErrorCode.unknown_topic_or_partition
    bench.write(7, b"in")
    asked = bench.reader.begin(DESCRIBE_PRODUCERS, 0, topics=topics[:1])
    bench.hosted.directory.take_offline(OSError(5, "broken"))
    known, _ = bench.reader.answer(asked).topics[0].partitions
    assert (known.error_code, known.active_producers) == (ErrorCode.kafka_storage_error, ())


def test_markers_of_fenced_producers_and_coordinators_change_nothing(bench: Bench) -> None:
    bench.write(7, b"in", epoch=3)
    assert bench.end(7, COMMIT, epoch=2) == ErrorCode.invalid_producer_epoch
    assert bench.end(7, ABORT, epoch=3, version=2) == ErrorCode.invalid_producer_epoch
    bench.write(8, b"out")
    assert bench.end(8, ABORT, coordinator_epoch=0) == 0
    assert bench.end(8, ABORT, coordinator_epoch=-1) == ErrorCode.transaction_coordinator_fenced
    assert bench.end(7, COMMIT, topic="none") == ErrorCode.unknown_topic_or_partition
    assert bench.hosted.offsets.last_stable_offset == 0
    assert bench.end(7, COMMIT, epoch=4, version=2) == 0
    assert bench.committed() == [b"in"]


def test_markers_are_answered_for_each_partition_together(bench: Bench) -> None:
    bench.write(7, b"a")
    bench.write(8, b"b")
    client: BareClient = bench.client
    answer = client.ask(
        WRITE_TXN_MARKERS, 1, markers=[marker(7, COMMIT), marker(8, ABORT), marker(7, COMMIT, index=4)]
    )
    codes = {
        (result.producer_id, partition.partition_index): partition.error_code
        for result in answer.markers
        for topic in result.topics
        for partition in topic.partitions
    }
    assert codes == {(7, 0): 0, (8, 0): 0, (7, 4): ErrorCode.unknown_topic_or_partition}
    assert bench.committed() == [b"a"]
    assert client.ask(WRITE_TXN_MARKERS, 1, markers=[]).markers == ()


def test_a_marker_on_a_failing_disk_is_answered_with_a_storage_error(bench: Bench) -> None:
    bench.write(7, b"in")
    bench.settle()
    asked = bench.begin_end(7, COMMIT)
    bench.hosted.directory.take_offline(OSError(5, "broken"))
    answer = bench.client.answer(asked)
    assert answer.markers[0].topics[0].partitions[0].error_code == ErrorCode.kafka_storage_error
    assert bench.end(7, COMMIT) == ErrorCode.kafka_storage_error
