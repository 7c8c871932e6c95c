"""Group commit: nothing is acknowledged before a flush that began after it has returned."""

from __future__ import annotations

import errno

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.write_ahead import FLUSHES_MIN
from holdfast.errors import LogDirectoryOffline
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.wire.batch import make_batch


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", partitions=2)
    return client


def batch(value: bytes = b"x") -> bytes:
    return make_batch([value], timestamp=1_700_000_000_000)


def test_an_append_is_acknowledged_after_its_flush_returned(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch())
    assert not client.frames
    node.turn()
    assert len(node.flusher.jobs) == 1
    assert not client.frames
    node.flusher.run_one()
    (answer,) = [client.answer(id_) for id_ in client.correlation_ids]
    assert answer.responses[0].partition_responses[0].base_offset == 0


def test_what_is_acknowledged_is_on_the_platters(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch(b"precious"))
    path = f"{node.hosted('t').log.directory}/{0:020d}.log"
    assert b"precious" not in node.disk.held(path)
    node.settle()
    assert client.frames
    assert b"precious" in node.disk.held(path)


def test_requests_of_one_turn_share_a_flush(node: BareNode, client: BareClient) -> None:
    other = node.connect()
    before = node.node.commit.flushes
    for _ in range(10):
        client.begin_produce("t", batch())
        other.begin_produce("t", batch())
    node.settle()
    assert node.node.commit.flushes == before + 1
    assert len(client.frames) == len(other.frames) == 10


@pytest.mark.parametrize(("partitions", "expected"), [(1, True), (2, True), (3, False)])
def test_space_is_written_ahead_where_few_partitions_are_flushed_at_a_time(
    node: BareNode, client: BareClient, partitions: int, expected: bool
) -> None:
    client.create_topic("several", partitions=partitions)
    for _ in range(2 * FLUSHES_MIN):
        for index in range(partitions):
            client.begin_produce("several", batch(), index)
        node.settle()
    for index in range(partitions):
        log = node.hosted("several", index).log
        assert (node.disk.size(log.active.path()) > log.size) is expected


def test_appends_before_the_flusher_begins_share_its_flush(node: BareNode, client: BareClient) -> None:
    before = node.node.commit.flushes
    client.begin_produce("t", batch())
    node.turn()
    second = client.begin_produce("t", batch())
    node.turn()
    node.flusher.run_one()
    assert client.correlation_ids[-1:] == [second]
    node.settle()
    assert node.node.commit.flushes == before + 1


def test_appends_during_a_flush_wait_for_the_next(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch())
    node.turn()
    node.flusher.begin_one()
    second = client.begin_produce("t", batch())
    third = client.begin_produce("t", batch())
    node.turn()
    assert len(node.flusher.jobs) == 1, "one flush of a file at a time"
    node.flusher.run_one()
    assert len(client.frames) == 1
    node.turn()
    assert len(node.flusher.jobs) == 1
    assert len(client.frames) == 1
    node.flusher.run_one()
    assert client.correlation_ids[-2:] == [second, third]


def test_partitions_are_flushed_and_completed_apart(node: BareNode, client: BareClient) -> None:
    other = node.connect()
    client.begin_produce("t", batch(), index=0)
    other.begin_produce("t", batch(), index=1)
    node.turn()
    assert len(node.flusher.jobs) == 2
    node.flusher.run_one(1)
    assert not client.frames
    assert len(other.frames) == 1


def test_a_request_over_two_partitions_is_answered_when_both_are_flushed(
    node: BareNode, client: BareClient
) -> None:
    asked = client.begin(0, 9, **client.produce_fields("t", {0: batch(), 1: batch()}))
    node.turn()
    node.flusher.run_one()
    assert not client.frames
    node.flusher.run_one()
    answer = client.answer(asked)
    assert [p.error_code for p in answer.responses[0].partition_responses] == [ErrorCode.none] * 2


def test_readers_see_nothing_before_the_flush(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch())
    node.turn()
    reader = node.connect()
    asked = reader.begin_fetch("t", 0)
    fetched = reader.answer(asked).responses[0].partitions[0]
    assert (fetched.high_watermark, fetched.records or b"") == (0, b"")
    node.settle()
    assert reader.fetch("t", 0).high_watermark == 1


def test_a_retried_batch_is_answered_only_when_the_first_is_durable(
    node: BareNode, client: BareClient
) -> None:
    sent = make_batch([b"x"], timestamp=1_700_000_000_000, producer_id=7, producer_epoch=0, base_sequence=0)
    client.begin_produce("t", sent)
    node.turn()
    again = node.connect()
    asked = again.begin_produce("t", sent)
    node.turn()
    assert not again.frames
    node.settle()
    assert again.answer(asked).responses[0].partition_responses[0].base_offset == 0
    assert node.hosted("t").log.end_offset == 1


def test_one_acknowledged_once_written_and_another_never_are_flushed_along(
    node: BareNode, client: BareClient
) -> None:
    asked = client.begin_produce("t", batch(), acks=1)
    assert client.answer(asked)
    client.begin_produce("t", batch(), acks=0)
    assert not client.frames
    assert node.hosted("t").offsets.durable_end.offset == 0
    node.settle()
    assert node.hosted("t").offsets.durable_end.offset == 2


def test_a_failed_flush_tells_everybody_in_the_directory(node: BareNode, client: BareClient) -> None:
    other = node.connect()
    first = client.begin_produce("t", batch(), index=0)
    second = other.begin_produce("t", batch(), index=1)
    node.turn()
    third = client.begin_produce("t", batch(), index=0)
    node.disk.plan(Fault("flush", path_contains="t-0"))
    node.flusher.run_one()
    for asking, asked in ((client, first), (other, second), (client, third)):
        (partition,) = asking.answer(asked).responses[0].partition_responses
        assert partition.error_code is ErrorCode.kafka_storage_error
    node.settle()
    refused = client.begin_produce("t", batch(), index=1)
    assert (
        client.answer(refused).responses[0].partition_responses[0].error_code is ErrorCode.kafka_storage_error
    )
    assert any("offline until restart" in line for line in node.said)


def test_a_later_flush_does_not_turn_a_failed_one_into_success(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch())
    node.turn()
    node.disk.plan(Fault("flush", path_contains="t-0"))
    node.settle()
    hosted = node.hosted("t")
    assert hosted.offsets.durable_end.offset == 0
    node.node.commit.request(hosted)
    node.settle()
    assert hosted.offsets.durable_end.offset == 0


def test_after_a_failed_flush_nothing_unacknowledged_is_promised_and_nothing_acknowledged_is_lost(
    node: BareNode, client: BareClient
) -> None:
    client.produce("t", batch(b"kept"))
    client.begin_produce("t", batch(b"doubtful"))
    node.turn()
    node.disk.plan(Fault("flush", path_contains="t-0"))
    node.settle()
    node = node.kill()
    log = node.hosted("t").log
    assert 1 <= log.end_offset <= 2
    assert b"kept" in node.connect().fetch("t", 0).records


def test_a_full_disk_refuses_the_batch_and_serves_again_when_there_is_room(
    node: BareNode, client: BareClient
) -> None:
    client.produce("t", batch())
    node.disk.plan(Fault("write", error=errno.ENOSPC, partial=True, path_contains="t-0"))
    assert client.produce("t", batch()).error_code is ErrorCode.kafka_storage_error
    done = client.produce("t", batch())
    assert (done.error_code, done.base_offset) == (ErrorCode.none, 1)
    assert not node.hosted("t").offline


def test_a_write_that_fails_otherwise_takes_the_directory_offline(node: BareNode, client: BareClient) -> None:
    node.disk.plan(Fault("write", error=errno.EIO, partial=True, path_contains="t-0"))
    asked = client.begin_produce("t", batch())
    assert (
        client.answer(asked).responses[0].partition_responses[0].error_code is ErrorCode.kafka_storage_error
    )
    assert node.hosted("t").offline


def test_with_the_page_cache_mode_an_append_is_committed_at_once(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("os", holdfast_flush="os")
    client.produce("os", batch())  # the first flush also makes the new directory durable
    asked = client.begin_produce("os", batch())
    assert client.answer(asked).responses[0].partition_responses[0].base_offset == 1
    node.turn()
    assert not node.flusher.jobs


def test_in_page_cache_mode_flush_messages_still_flushes(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("os", holdfast_flush="os", flush_messages="3")
    client.produce("os", batch())
    for _ in range(2):
        client.begin_produce("os", batch())
    node.turn()
    assert not node.flusher.jobs
    client.begin_produce("os", batch())
    node.turn()
    assert len(node.flusher.jobs) == 1


def test_a_stop_in_the_middle_of_a_flush_leaves_everything_durable(
    node: BareNode, client: BareClient
) -> None:
    """Whatever was begun or asked for when the node stops, a clean start may trust what it finds."""
    for acks in (1, -1, 1):
        client.begin_produce("t", batch(b"%d" % acks), acks=acks)
        node.turn()
    client.begin_produce("t", batch(b"last"), acks=1)
    # A flush is under way, one is wanted, one append came after both. The disk is slower than the stop.
    under_way = list(node.flusher.jobs)
    node.node.stop(node.clock.now())
    node.turn()
    node.disk.crash()
    del under_way
    again = BareNode(node.settings, disk=node.disk, clock=node.clock, boot_id="another boot")
    assert again.hosted("t").log.end_offset == 4
    assert not any("cut" in line for line in again.said), again.said


def test_flushes_that_return_after_the_stop_change_nothing(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", batch())
    node.turn()
    client.begin_produce("t", batch())
    node.node.stop(node.clock.now())
    node.settle()
    again = BareNode(node.settings, disk=node.disk, clock=node.clock, boot_id=node.boot_id)
    assert again.hosted("t").log.end_offset == 2
    assert not again.node.directories[0].torn_tail_expected
    assert again.node.directories[0].was_clean


def test_a_directory_that_turns_read_only_is_offline_and_the_other_serves() -> None:
    disk = SimulatedDisk()
    node = BareNode({"log.dirs": "/data,/second"}, disk=disk)
    client = node.connect()
    client.create_topic("t", partitions=4, internal_segment_bytes="300")
    second = [h.index for h in node.node.partitions if h.directory.path == "/second"]
    first = [h.index for h in node.node.partitions if h.directory.path == "/data"]
    assert first
    assert second
    for index in (*first, *second):
        assert client.produce("t", batch(), index).base_offset == 0
    for operation in ("write", "create", "truncate", "rename", "remove"):
        disk.plan(Fault(operation, error=errno.EROFS, path_contains="/second", times=1 << 30))
    codes = {index: client.produce("t", batch(), index).error_code for index in (*first, *second)}
    assert codes == dict.fromkeys(first, ErrorCode.none) | dict.fromkeys(
        second, ErrorCode.kafka_storage_error
    )
    assert any("/second is offline" in line and "Read-only" in line for line in node.said)
    disk.clear_faults()
    node = node.stop()
    assert all(node.hosted("t", index).log.end_offset == 1 for index in second)
    assert all(node.hosted("t", index).log.end_offset == 2 for index in first)


def test_a_full_disk_at_any_moment_costs_no_acknowledged_message_and_no_restart() -> None:
    """Room runs out after any number of bytes, rolls and checkpoints included, and comes back."""
    for room in range(0, 4000, 97):
        node = BareNode()
        client = node.connect()
        client.create_topic("t", internal_segment_bytes="500")
        acknowledged = [client.produce("t", batch(b"before")).base_offset]
        node.disk.capacity_bytes = node.disk.used_bytes + room
        for number in range(25):
            done = client.produce("t", batch(b"%d" % number * 20))
            if done.error_code is ErrorCode.none:
                acknowledged.append(done.base_offset)
            else:
                assert done.error_code is ErrorCode.kafka_storage_error
            node.advance(300)
            node.settle()
        node.disk.capacity_bytes = None
        done = client.produce("t", batch(b"after"))
        assert done.error_code is ErrorCode.none, (room, node.said)
        acknowledged.append(done.base_offset)
        assert acknowledged == list(range(len(acknowledged)))
        node = node.lose_power()
        assert node.hosted("t").log.end_offset == len(acknowledged)


def test_a_real_flush_can_be_waited_for_where_none_is_needed(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("fast", holdfast_flush="os")
    hosted = node.hosted("fast")
    told: list[Exception | None] = []
    commit = node.node.commit
    client.begin_produce("fast", batch())
    assert hosted.offsets.is_committed(1)
    commit.when_flushed(hosted, 1, told.append)
    node.turn()
    node.flusher.begin_one()
    client.begin_produce("fast", batch())
    commit.when_flushed(hosted, 2, told.append)
    assert told == []
    node.flusher.run_one()
    assert told == [None], "the flush under way began before the second batch"
    node.settle()
    assert told == [None, None]
    commit.when_flushed(hosted, 2, told.append)
    assert told == [None, None, None], "flushed already"


def test_who_waits_for_a_real_flush_is_told_that_it_failed(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("fast", holdfast_flush="os")
    hosted = node.hosted("fast")
    told: list[Exception | None] = []
    client.begin_produce("fast", batch())
    node.node.commit.when_flushed(hosted, 1, told.append)
    failure = OSError(errno.EIO, "broken")
    hosted.directory.take_offline(failure)
    node.node.commit.when_flushed(hosted, 1, told.append)
    assert len(told) == 2
    assert all(isinstance(error, LogDirectoryOffline) for error in told)


def test_in_group_commit_flushed_is_committed(node: BareNode, client: BareClient) -> None:
    told: list[Exception | None] = []
    client.begin_produce("t", batch())
    node.node.commit.when_flushed(node.hosted("t"), 1, told.append)
    assert told == []
    node.settle()
    assert told == [None]


def spoil(error: Exception | None) -> None:
    raise ValueError("spoilt")


@pytest.mark.parametrize("mode", ["group", "os"])
def test_one_who_raises_when_told_keeps_nobody_else_waiting(node: BareNode, mode: str) -> None:
    client = node.connect()
    client.create_topic("two", 2, holdfast_flush=mode)
    told: list[Exception | None] = []
    commit = node.node.commit
    for index in (0, 1):
        hosted = node.hosted("two", index)
        client.begin_produce("two", batch(), index)
        commit.when_flushed(hosted, 1, spoil)
        commit.when_flushed(hosted, 1, told.append)
    node.settle()
    assert told == [None, None]
    assert len([line for line in node.said if "defect in what waits for two-" in line]) == 2
    for index in (0, 1):
        hosted = node.hosted("two", index)
        client.begin_produce("two", batch(), index)
        commit.when_flushed(hosted, 2, spoil)
        commit.when_flushed(hosted, 2, told.append)
    hosted.directory.take_offline(OSError(errno.EIO, "broken"))
    assert [type(error) for error in told[2:]] == [LogDirectoryOffline] * 2


def test_what_was_acknowledged_without_a_flush_is_flushed_when_flushing_is_asked_for(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", holdfast_flush="os")
    client.produce("t", batch(b"first"))  # the first flush also makes the new directory durable
    client.produce("t", batch(b"second"))
    hosted = node.hosted("t")
    assert hosted.log.recovery_point == 1
    altered = {"name": "holdfast.flush", "config_operation": 0, "value": "group"}
    client.ask(
        44,
        1,
        resources=[{"resource_type": 2, "resource_name": "t", "configs": [altered]}],
        validate_only=False,
    )
    assert hosted.log.recovery_point == 2
    node = node.lose_power()
    assert node.hosted("t").log.end_offset == 2
