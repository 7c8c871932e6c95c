"""Topics deleted while the disk refuses the checkpoints: what is made under their names is never taken for them."""

from __future__ import annotations

import errno
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.log.checkpoints import LOG_START_FILE, RECOVERY_POINT_FILE, OffsetCheckpoint
from holdfast.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.node.partitions import DELETE_MARK
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.wire.batch import Record, build_batch

DELETE_TOPICS, DELETE_RECORDS = 20, 21
FOR_EVER = 1_000_000
SEGMENT = "00000000000000000000.log"


def batch(value: bytes = b"x", count: int = 1) -> bytes:
    return build_batch([Record(index, 0, None, value) for index in range(count)], base_timestamp=0)


def delete(client: BareClient, topic: str) -> None:
    (answer,) = client.ask(DELETE_TOPICS, 6, topics=[{"name": topic}], timeout=1000).responses
    assert answer.error_code is ErrorCode.none


def delete_records(client: BareClient, topic: str, offset: int) -> ErrorCode:
    partitions = [{"partition_index": 0, "offset": offset}]
    answer = client.ask(DELETE_RECORDS, 2, topics=[{"name": topic, "partitions": partitions}], timeout=1000)
    code = answer.topics[0].partitions[0].error_code
    assert isinstance(code, ErrorCode)
    return code


def refuse(disk: SimulatedDisk, *files: str) -> None:
    for file in files:
        disk.plan(Fault("write", errno.ENOSPC, times=FOR_EVER, path_contains=file))


def written(disk: SimulatedDisk, file: str) -> dict[tuple[str, int], int]:
    return OffsetCheckpoint(disk, f"/data/{file}").read()


def leftovers(disk: SimulatedDisk) -> list[str]:
    return [name for name in disk.list("/data") if name.endswith(DELETE_MARK)]


def second(node: BareNode) -> None:
    node.advance(CHECKPOINT_INTERVAL_MS)
    node.settle()


@pytest.fixture
def client(node: BareNode) -> BareClient:
    """Of a node whose topic t has 20 messages, of which ten are deleted, and checkpoints that say so."""
    client = node.connect()
    client.create_topic("t")
    client.produce("t", batch(b"old", 20))
    assert delete_records(client, "t", 10) is ErrorCode.none
    second(node)
    assert written(node.disk, RECOVERY_POINT_FILE)["t", 0] == 20
    assert written(node.disk, LOG_START_FILE)["t", 0] == 10
    return client


@pytest.mark.parametrize(
    "refused", [(RECOVERY_POINT_FILE, LOG_START_FILE), (RECOVERY_POINT_FILE,), (LOG_START_FILE,)]
)
@pytest.mark.parametrize("ends", ["kill", "power", "stop"])
def test_a_topic_made_again_is_not_taken_for_the_deleted_one(
    node: BareNode, client: BareClient, refused: tuple[str, ...], ends: str
) -> None:
    refuse(node.disk, *refused)
    delete(client, "t")
    client.create_topic("t")
    assert client.produce("t", batch(b"new", 5)).error_code is ErrorCode.none
    if ends == "kill":
        node = node.kill(SimulatedDisk.clear_faults)
    elif ends == "power":
        node = node.lose_power()
    else:
        node = node.stop(SimulatedDisk.clear_faults)
    log = node.hosted("t").log
    assert (log.start_offset, log.end_offset) == (0, 5)
    assert b"new" in node.connect().fetch("t", 0).records
    assert leftovers(node.disk) == []


def test_the_files_of_a_deleted_topic_make_room_although_its_checkpoints_cannot_be_written(
    node: BareNode, client: BareClient
) -> None:
    refuse(node.disk, RECOVERY_POINT_FILE, LOG_START_FILE)
    delete(client, "t")
    (left,) = leftovers(node.disk)
    assert node.disk.list(f"/data/{left}") == []
    second(node)
    assert leftovers(node.disk) == [left]
    node.disk.clear_faults()
    second(node)
    assert leftovers(node.disk) == []
    assert ("t", 0) not in written(node.disk, RECOVERY_POINT_FILE)
    assert ("t", 0) not in written(node.disk, LOG_START_FILE)


@pytest.mark.parametrize("seed", range(12))
def test_power_lost_while_the_files_go_brings_no_part_of_them_back_as_another_topic(seed: int) -> None:
    node = BareNode(disk=SimulatedDisk(seed))
    client = node.connect()
    client.create_topic("t")
    client.produce("t", batch(b"old", 20))
    second(node)
    refuse(node.disk, RECOVERY_POINT_FILE)
    delete(client, "t")
    client.create_topic("t")
    node = node.lose_power()
    assert node.hosted("t").log.end_offset == 0
    assert node.connect().produce("t", batch()).error_code is ErrorCode.none


def test_the_checkpoints_tell_of_the_new_topic_once_they_have_forgotten_the_old(
    node: BareNode, client: BareClient
) -> None:
    refuse(node.disk, LOG_START_FILE)
    delete(client, "t")
    client.create_topic("t")
    client.produce("t", batch(b"new", 5))
    second(node)
    # Compaction below a recovery point that the next start forgets would look like a lost tail to it.
    assert node.node.persisted_recovery_point(node.hosted("t")) == 0
    assert delete_records(client, "t", 3) is ErrorCode.kafka_storage_error
    node.disk.clear_faults()
    second(node)
    second(node)
    assert node.node.persisted_recovery_point(node.hosted("t")) == 5
    assert delete_records(client, "t", 3) is ErrorCode.none
    assert written(node.disk, RECOVERY_POINT_FILE)["t", 0] == 5
    assert written(node.disk, LOG_START_FILE)["t", 0] == 3


def test_a_topic_deleted_twice_under_one_name(node: BareNode, client: BareClient) -> None:
    refuse(node.disk, RECOVERY_POINT_FILE)
    for _ in range(2):
        delete(client, "t")
        client.create_topic("t")
        client.produce("t", batch(b"new", 3))
    assert len(leftovers(node.disk)) == 2
    node.disk.clear_faults()
    second(node)
    second(node)
    assert leftovers(node.disk) == []
    assert node.kill().hosted("t").log.end_offset == 3


def test_the_files_of_a_damaged_partition_go_with_its_topic(node: BareNode, client: BareClient) -> None:
    def damage(disk: SimulatedDisk) -> None:
        disk.open(f"/data/t-0/{SEGMENT}", "write").truncate(0)

    node = node.kill(damage)
    assert node.node.partitions.offline_reason("t", 0) is not None
    client = node.connect()
    asked = client.begin(DELETE_TOPICS, 6, topics=[{"name": "t"}], timeout=1000)
    assert len(leftovers(node.disk)) == 1
    node.node.write_log_starts(node.node.directories[0])
    assert written(node.disk, LOG_START_FILE)["t", 0] == 10  # a crash may bring it back
    node.settle()
    assert client.answer(asked).responses[0].error_code is ErrorCode.none
    assert leftovers(node.disk) == []
    assert ("t", 0) not in written(node.disk, RECOVERY_POINT_FILE)


def test_a_disk_that_fails_while_a_deletion_is_carried_out_takes_the_directory_offline(
    node: BareNode, client: BareClient
) -> None:
    topic_id = node.hosted("t").topic_id
    assert isinstance(topic_id, UUID)
    node.disk.plan(Fault("remove", errno.EIO, path_contains=topic_id.hex))
    client.begin(DELETE_TOPICS, 6, topics=[{"name": "t"}], timeout=1000)
    node.settle()
    assert node.node.directories[0].offline
