"""What a node does when there is no room: it refuses, loses nothing, and goes on when there is room again."""

from __future__ import annotations

import errno

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.checkpoints import LOG_START_FILE, RECOVERY_POINT_FILE, OffsetCheckpoint
from holdfast.broker.node.directories import RESERVE_FILE
from holdfast.broker.node.housekeeping import FIRST_CHECK_MS
from holdfast.broker.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.errors import DataDirectoryError
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.wire.batch import Record, build_batch

FOR_EVER = 1_000_000
SEGMENT = "00000000000000000000.log"


def batch(node: BareNode, value: bytes = b"x") -> bytes:
    return build_batch([Record(0, 0, None, value)], base_timestamp=node.clock.now().wall_ms)


def second(node: BareNode) -> None:
    node.advance(CHECKPOINT_INTERVAL_MS)
    node.settle()


# ---- partitions that cannot be made


@pytest.mark.parametrize("refused", ["/t-0", "partition.metadata", SEGMENT])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EDQUOT, errno.EMFILE])
def test_a_partition_that_could_not_be_made_is_made_when_there_is_room(
    node: BareNode, refused: str, error: int
) -> None:
    client = node.connect()
    node.disk.plan(Fault("create", error, times=FOR_EVER, path_contains=refused))
    client.create_topic("t", 2)
    for _ in range(2):
        assert client.produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
        second(node)
    node.disk.clear_faults()
    second(node)
    for index in (0, 1):
        done = client.produce("t", batch(node), index)
        assert (done.error_code, done.base_offset) == (ErrorCode.none, 0)
    assert len([said for said in node.said if "t-0 is offline" in said]) == 1
    assert any(said.startswith("partition t-0 is online") for said in node.said)
    node = node.lose_power()
    assert [node.hosted("t", index).log.end_offset for index in (0, 1)] == [1, 1]


def test_a_partition_of_which_half_was_written_is_made_whole(node: BareNode) -> None:
    client = node.connect()
    node.disk.plan(Fault("write", errno.ENOSPC, partial=True, path_contains="partition.metadata"))
    client.create_topic("t")
    second(node)
    topic_id = node.hosted("t").topic_id
    assert client.produce("t", batch(node)).error_code is ErrorCode.none
    node = node.lose_power()
    assert (node.hosted("t").topic_id, node.hosted("t").log.end_offset) == (topic_id, 1)


def test_a_partition_that_was_not_made_is_none_that_was_found_damaged(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("kept")
    client.produce("kept", batch(node))
    node.disk.plan(Fault("create", errno.ENOSPC, times=FOR_EVER, path_contains="/t-0"))
    client.create_topic("t")
    node = node.stop(SimulatedDisk.clear_faults)
    assert node.node.directories[0].was_clean
    assert node.connect().produce("t", batch(node)).error_code is ErrorCode.none


def test_a_topic_that_was_not_made_can_be_deleted_and_made_again(node: BareNode) -> None:
    client = node.connect()
    node.disk.plan(Fault("create", errno.ENOSPC, times=FOR_EVER, path_contains=f"/t-0/{SEGMENT}"))
    client.create_topic("t")
    (gone,) = client.ask(20, 6, topics=[{"name": "t"}], timeout=1000).responses
    assert gone.error_code is ErrorCode.none
    assert not [name for name in node.disk.list("/data") if name.startswith("t-0")]
    node.disk.clear_faults()
    second(node)
    assert not [name for name in node.disk.list("/data") if name.startswith("t-0")]
    client.create_topic("t")
    assert client.produce("t", batch(node)).error_code is ErrorCode.none


def test_a_log_that_is_there_and_cannot_be_opened_is_left_alone(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t")
    client.produce("t", batch(node))
    client.produce("t", batch(node))
    second(node)
    path = f"/data/t-0/{SEGMENT}"

    def damage(disk: SimulatedDisk) -> None:
        disk.open(path, "write").truncate(disk.size(path) - 1)

    node = node.kill(damage)
    size = node.disk.size(path)
    second(node)
    assert node.connect().produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
    assert node.disk.size(path) == size > 0


def test_a_log_that_no_descriptor_is_left_for_at_the_start_is_opened_later(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t")
    client.produce("t", batch(node))
    path = f"/data/t-0/{SEGMENT}"

    def refuse(disk: SimulatedDisk) -> None:
        disk.plan(Fault("read", errno.EMFILE, path_contains=path))

    node = node.kill(refuse)
    assert node.node.partitions.offline_reason("t", 0) is not None
    assert node.connect().produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
    second(node)
    assert node.connect().produce("t", batch(node)).base_offset == 1
    node = node.kill()
    assert node.hosted("t").log.end_offset == 2


# ---- retention


@pytest.mark.parametrize("seed", range(12))
def test_what_retention_keeps_survives_a_power_failure_on_a_full_disk(seed: int) -> None:
    node = BareNode(disk=SimulatedDisk(seed))
    client = node.connect()
    for file in (RECOVERY_POINT_FILE, LOG_START_FILE):
        node.disk.plan(Fault("write", errno.ENOSPC, times=FOR_EVER, path_contains=file))
    client.create_topic("t", internal_segment_bytes="100", retention_ms=str(FIRST_CHECK_MS - 1))
    for number in range(5):
        client.produce("t", batch(node, b"old %d" % number))
    node.clock.advance(FIRST_CHECK_MS // 2)
    for number in range(3):
        client.produce("t", batch(node, b"young %d" % number))
    node.clock.advance(FIRST_CHECK_MS // 2)
    node.node.tick(node.clock.now())
    log = node.hosted("t").log
    assert log.start_offset == 5
    assert ("t", 0) not in OffsetCheckpoint(node.disk, f"/data/{LOG_START_FILE}").read()
    node = node.lose_power()
    log = node.hosted("t").log
    assert (log.start_offset, log.end_offset) == (5, 8)
    client = node.connect()
    for number in range(3):
        assert b"young %d" % number in client.fetch("t", 5 + number).records


def test_a_segment_lost_behind_those_that_retention_took_on_a_full_disk_is_missed(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", internal_segment_bytes="100", retention_ms=str(FIRST_CHECK_MS - 1))
    for number in range(3):
        client.produce("t", batch(node, b"old %d" % number))
    node.clock.advance(FIRST_CHECK_MS // 2)
    for number in range(3):
        client.produce("t", batch(node, b"young %d" % number))
    second(node)
    node.disk.plan(Fault("write", errno.ENOSPC, times=FOR_EVER, path_contains=LOG_START_FILE))
    node.clock.advance(FIRST_CHECK_MS // 2)
    node.node.tick(node.clock.now())
    assert node.hosted("t").log.start_offset == 3

    def lose(disk: SimulatedDisk) -> None:
        disk.clear_faults()
        disk.remove(f"/data/t-0/{3:020d}.log")

    node = node.kill(lose)
    refused = node.connect().produce("t", batch(node))
    assert refused.error_code is ErrorCode.kafka_storage_error
    assert "offsets from 3 to 3 are missing" in str(node.node.partitions.offline_reason("t", 0))


# ---- starting


def filled(*, with_reserve: bool = True) -> BareNode:
    """A node whose topic t has segments that retention may delete, on a disk that is full to the last byte."""
    node = BareNode()
    client = node.connect()
    client.create_topic("t", 40, internal_segment_bytes="400", retention_ms="60000", cleanup_policy="delete")
    client.create_topic("gone")
    client.produce("gone", batch(node))
    for number in range(20):
        assert client.produce("t", batch(node, b"%d" % number)).error_code is ErrorCode.none
    if with_reserve:
        node.advance(FIRST_CHECK_MS)
        node.settle()
        assert node.disk.exists(f"/data/{RESERVE_FILE}")
    second(node)
    node.disk.capacity_bytes = node.disk.used_bytes
    assert client.produce("t", batch(node)).error_code is ErrorCode.kafka_storage_error
    return node


def started_again(node: BareNode, end: str) -> BareNode:
    capacity = node.disk.capacity_bytes

    def fill(disk: SimulatedDisk) -> None:
        disk.capacity_bytes = capacity if capacity is None else max(0, min(capacity, disk.used_bytes))

    again: BareNode = getattr(node, end)(fill)
    return again


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_full_disk_does_not_prevent_starts_and_retention_makes_room(end: str) -> None:
    node = filled()
    for _ in range(4):
        node = started_again(node, end)
        assert not any("is offline" in line for line in node.said), node.said
        assert node.hosted("t").log.end_offset == 20
        assert node.connect().fetch("t", 19).high_watermark == 20
    node.clock.advance(120_000)
    for _ in range(12):
        node.advance(FIRST_CHECK_MS)
        node.settle()
    assert node.hosted("t").log.start_offset > 10, "retention has made room"
    assert node.connect().produce("t", batch(node)).error_code is ErrorCode.none


@pytest.mark.parametrize("refused", [".index", RECOVERY_POINT_FILE, ".kafka_cleanshutdown"])
def test_a_stop_for_which_there_is_no_room_fails_no_directory_and_loses_nothing(
    node: BareNode, refused: str
) -> None:
    client = node.connect()
    client.create_topic("t")
    for number in range(3):
        assert client.produce("t", batch(node, b"%d" % number)).error_code is ErrorCode.none
    node.disk.plan(Fault("create", errno.ENOSPC, times=FOR_EVER, path_contains=refused))
    node.disk.plan(Fault("write", errno.ENOSPC, times=FOR_EVER, path_contains=refused))
    again = node.stop(SimulatedDisk.clear_faults)
    assert not any("offline" in line for line in node.said), node.said
    assert any("could not be left as a clean stop does" in line for line in node.said)
    assert (node.node.failures.is_left_clean, node.node.failures.fatal) == (False, None)
    assert again.connect().fetch("t", 0).high_watermark == 3


def test_on_a_full_disk_a_topic_can_be_deleted_after_a_start() -> None:
    node = started_again(filled(), "kill")
    client = node.connect()
    used = node.disk.used_bytes
    (answer,) = client.ask(20, 5, topic_names=["gone"], timeout=5000).responses
    assert answer.error_code is ErrorCode.none
    assert node.disk.used_bytes < used


def test_without_a_reserve_a_start_on_a_full_disk_says_what_it_lacks() -> None:
    node = filled(with_reserve=False)
    with pytest.raises(DataDirectoryError, match=r"cannot use /data: .*No space left"):
        started_again(node, "kill")
    node.disk.clear_faults()
    node = BareNode(node.settings, disk=node.disk, clock=node.clock)
    assert node.hosted("t").log.end_offset == 20


def test_a_log_that_cannot_be_recovered_for_want_of_room_is_when_there_is_some(node: BareNode) -> None:
    client = node.connect()
    client.create_topic("t", internal_segment_bytes="400")
    for number in range(20):
        assert client.produce("t", batch(node, b"%d" % number)).error_code is ErrorCode.none

    def refuse(disk: SimulatedDisk) -> None:
        disk.remove("/data/recovery-point-offset-checkpoint")
        for path in disk.list("/data/t-0"):
            if not path.endswith((".log", ".metadata")):
                disk.remove(f"/data/t-0/{path}")
        disk.plan(Fault("create", errno.ENOSPC, times=FOR_EVER, path_contains="/t-0/"))
        disk.plan(Fault("create", errno.ENOSPC, times=FOR_EVER, path_contains="holdfast.session"))

    node = node.lose_power(refuse)
    assert node.connect().fetch("t", 0).error_code is ErrorCode.kafka_storage_error
    second(node)
    node = node.kill()
    assert node.node.directories[0].torn_tail_expected, "the logs of this boot are not recovered yet"
    node.disk.clear_faults()
    second(node)
    assert node.hosted("t").log.end_offset == 20
    second(node)
    assert not node.kill().node.directories[0].torn_tail_expected
