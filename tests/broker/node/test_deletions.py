"""Topics deleted while the disk refuses the checkpoints: what is made under their names is never taken for them."""

from __future__ import annotations

import errno
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.checkpoints import LOG_START_FILE, RECOVERY_POINT_FILE, OffsetCheckpoint
from holdfast.broker.node.directories import DELETE_MARK, NAME_BYTES_MAX, marked_name
from holdfast.broker.node.node import CHECKPOINT_INTERVAL_MS
from holdfast.broker.node.partitions import STUCK_ROUNDS
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk
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
    assert node.node.checkpoints.persisted_recovery_point(node.hosted("t")) == 0
    assert delete_records(client, "t", 3) is ErrorCode.kafka_storage_error
    node.disk.clear_faults()
    second(node)
    second(node)
    assert node.node.checkpoints.persisted_recovery_point(node.hosted("t")) == 5
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
    node.node.checkpoints.write_log_starts(node.node.directories[0])
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


# Names


@pytest.mark.parametrize("length", [1, 100, 205, 206, 213, 214, 248, 249])
@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_topic_whose_name_is_long_is_deleted_like_any_other(length: int, end: str) -> None:
    node = BareNode(disk=SimulatedDisk(length))
    client = node.connect()
    name, beside = "n" * length, "n" * (length - 1) + "m"
    for topic in (name, beside):
        client.create_topic(topic, 2)
        assert client.produce(topic, batch(b"old", 5)).error_code is ErrorCode.none
    second(node)
    delete(client, name)
    node = getattr(node, end)()
    assert node.node.metadata.image.topic(name) is None
    assert leftovers(node.disk) == []
    assert node.hosted(beside).log.end_offset == 5
    client = node.connect()
    client.create_topic(name, 2)
    client.produce(name, batch(b"new", 3))
    assert getattr(node, end)().hosted(name).log.end_offset == 3


@pytest.mark.parametrize("seed", range(2))
def test_power_lost_while_a_topic_of_a_long_name_is_deleted_and_made_again_leaves_one_of_them_whole(
    seed: int,
) -> None:
    name = "n" * 249
    seen = set()
    for step in range(0, 60, 2):
        node = BareNode(disk=SimulatedDisk(seed))
        client = node.connect()
        client.create_topic(name)
        client.produce(name, batch(b"old", 20))
        second(node)
        old = node.hosted(name).topic_id
        node.disk.lose_power_after(step)
        acknowledged = 0
        try:
            delete(client, name)
            client.create_topic(name)
            client.produce(name, batch(b"new", 3))
            acknowledged = 3
        except PowerLost:
            pass
        node = node.lose_power()
        hosted = node.node.partitions.get(name, 0)
        assert (hosted is None) is (node.node.metadata.image.topic(name) is None), node.said
        if hosted is not None:
            seen.add(hosted.topic_id == old)
            assert hosted.log.end_offset in ((20,) if hosted.topic_id == old else {3, acknowledged})
    assert seen == {True, False}


def test_two_long_names_with_one_beginning_keep_their_checkpoints_apart(node: BareNode) -> None:
    one, two = "n" * 240 + "1", "n" * 240 + "2"
    client = node.connect()
    for topic in (one, two):
        client.create_topic(topic)
        client.produce(topic, batch(count=20))
        assert delete_records(client, topic, 10) is ErrorCode.none
    second(node)
    refuse(node.disk, RECOVERY_POINT_FILE, LOG_START_FILE)
    delete(client, one)
    client.create_topic(one)
    client.produce(one, batch(count=5))
    node = node.kill(SimulatedDisk.clear_faults)
    assert (node.hosted(one).log.start_offset, node.hosted(one).log.end_offset) == (0, 5)
    assert (node.hosted(two).log.start_offset, node.hosted(two).log.end_offset) == (10, 20)


def test_a_deletion_whose_record_was_lost_is_undone_though_its_name_was_cut() -> None:
    name = "n" * 249
    node = BareNode(disk=SimulatedDisk(7))
    client = node.connect()
    client.create_topic(name, 3)
    client.produce(name, batch(count=20), 2)
    second(node)
    topic_id = node.hosted(name).topic_id
    marked = marked_name(name, 2, topic_id.hex, DELETE_MARK)
    assert len(marked) == NAME_BYTES_MAX
    node = node.kill(lambda disk: disk.rename(f"/data/{name}-2", f"/data/{marked}"))
    assert node.hosted(name, 2).log.end_offset == 20


# What cannot be renamed or removed


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EPERM, errno.ENAMETOOLONG])
def test_a_directory_that_cannot_be_renamed_is_left_and_its_topic_is_deleted(
    node: BareNode, client: BareClient, error: int
) -> None:
    node.disk.plan(Fault("rename", error, times=FOR_EVER, path_contains="/t-0."))
    delete(client, "t")
    assert not node.node.directories[0].offline
    assert any("cannot be renamed" in line for line in node.said)
    client.create_topic("t")  # its name is not free yet
    assert client.produce("t", batch()).error_code is ErrorCode.kafka_storage_error
    node = node.kill()
    assert node.connect().produce("t", batch()).error_code is ErrorCode.kafka_storage_error
    node.disk.clear_faults()
    second(node)
    assert node.connect().produce("t", batch()).base_offset == 0
    assert node.kill().hosted("t").log.end_offset == 1


@pytest.mark.parametrize("error", [errno.EBUSY, errno.EPERM])
def test_a_directory_that_cannot_be_removed_is_said_once_and_tried_again(
    node: BareNode, client: BareClient, error: int
) -> None:
    fault = Fault("remove", error, times=FOR_EVER, path_contains=DELETE_MARK)
    node.disk.plan(fault)
    delete(client, "t")
    for _ in range(3):
        second(node)
    assert not node.node.directories[0].offline
    assert sum("cannot be removed" in line for line in node.said) == 1
    node = node.kill(lambda disk: None)
    assert sum("cannot be removed" in line for line in node.said) == 1
    client = node.connect()
    client.create_topic("t")
    assert client.produce("t", batch(count=3)).error_code is ErrorCode.none
    node = node.kill(SimulatedDisk.clear_faults)
    assert leftovers(node.disk) == []
    assert node.hosted("t").log.end_offset == 3
    node.disk.plan(fault)
    delete(node.connect(), "t")
    node.disk.clear_faults()
    for _ in range(STUCK_ROUNDS):
        second(node)
    assert leftovers(node.disk) == []
