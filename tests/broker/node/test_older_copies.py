"""A directory that was restored from an older copy, or is somebody else's, is not taken for the one that was here."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.log.checkpoints import encode_uuid, write_partition_metadata
from holdfast.broker.node.directories import BrokerRun, decode_session, encode_session
from holdfast.errors import DataDirectoryError
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import make_batch

SETTINGS = {"log.dirs": "/a,/b"}


def copied(source: SimulatedDisk, target: SimulatedDisk, path: str) -> None:
    """Replace a directory by that of another disk."""
    if target.exists(path):
        target.remove_tree(path)
    target.make_directory(path)
    for name in source.list(path):
        below = f"{path}/{name}"
        if source.is_directory(below):
            copied(source, target, below)
        else:
            content = source.open(below, "read").pread(source.size(below), 0)
            target.open(below, "create").pwritev([content], 0)


def fill(node: BareNode, count: int = 3) -> None:
    client = node.connect()
    for index in (0, 1):
        for _ in range(count):
            done = client.produce("t", make_batch([b"value"], timestamp=node.clock.now().wall_ms), index)
            assert done.error_code is ErrorCode.none


@pytest.fixture
def node() -> BareNode:
    node = BareNode(SETTINGS)
    node.connect().create_topic("t", 2)
    fill(node)
    return node


def index_in(node: BareNode, path: str) -> int:
    return next(index for index in (0, 1) if node.hosted("t", index).directory.path == path)


def copy_of(node: BareNode) -> SimulatedDisk:
    """The disk after a clean stop, and the broker running again."""
    node.node.stop(node.clock.now())
    return node.disk.copy()


@pytest.mark.parametrize("end", ["stop", "kill"])
def test_a_directory_from_an_older_copy_is_offline_until_the_newer_is_back(node: BareNode, end: str) -> None:
    older = copy_of(node)
    node = BareNode(SETTINGS, disk=node.disk, clock=node.clock)
    fill(node)
    away, here = index_in(node, "/b"), index_in(node, "/a")
    newer = node.disk.copy()
    node = getattr(node, end)(lambda disk: copied(older, disk, "/b"))
    client = node.connect()
    assert client.fetch("t", 0, away).error_code is ErrorCode.kafka_storage_error
    assert client.fetch("t", 0, here).high_watermark == 6
    assert any("older than the metadata log" in line and "--accept-loss=" in line for line in node.said)
    node = node.stop(lambda disk: copied(newer, disk, "/b"))
    assert node.connect().fetch("t", 0, away).high_watermark == 6


def test_an_older_copy_is_served_when_what_it_lacks_is_given_up(node: BareNode) -> None:
    older = copy_of(node)
    node = BareNode(SETTINGS, disk=node.disk, clock=node.clock)
    fill(node)
    away = index_in(node, "/b")
    name = encode_uuid(node.hosted("t", away).directory.id.bytes)
    node.node.stop(node.clock.now())
    copied(older, node.disk, "/b")
    node = BareNode(SETTINGS, disk=node.disk, clock=node.clock, accept_loss=[name])
    assert node.connect().fetch("t", 0, away).high_watermark == 3
    assert node.stop().connect().fetch("t", 0, away).high_watermark == 3


def test_metadata_that_is_older_than_another_directory_ends_the_start(node: BareNode) -> None:
    older = copy_of(node)
    node = BareNode(SETTINGS, disk=node.disk, clock=node.clock)
    node.connect().create_topic("later", 2)
    with pytest.raises(DataDirectoryError, match="older than /b"):
        node.stop(lambda disk: copied(older, disk, "/a"))


def test_directories_that_are_all_of_one_age_are_a_restored_backup(node: BareNode) -> None:
    older = copy_of(node)
    node = BareNode(SETTINGS, disk=node.disk, clock=node.clock)
    fill(node)
    node = BareNode(SETTINGS, disk=older, clock=node.clock)
    assert [node.connect().fetch("t", 0, index).high_watermark for index in (0, 1)] == [3, 3]


def test_a_directory_that_was_away_for_some_starts_is_no_older_copy(node: BareNode) -> None:
    away = index_in(node, "/b")
    last = copy_of(node)
    node = (
        BareNode(SETTINGS, disk=node.disk, clock=node.clock).stop(lambda disk: disk.remove_tree("/b")).stop()
    )
    assert node.connect().fetch("t", 0, away).error_code is ErrorCode.kafka_storage_error
    assert node.node.partitions.offline_reason("t", away)
    # As of the last session that it was part of: the one before it came without.
    node = BareNode(SETTINGS, disk=last, clock=node.clock)
    kept = node.disk.copy()
    node = node.stop(lambda disk: disk.remove_tree("/b"))
    node = node.stop(lambda disk: copied(kept, disk, "/b"))
    assert node.connect().fetch("t", 0, away).high_watermark == 3


def test_the_metadata_log_of_another_cluster_ends_the_start(node: BareNode) -> None:
    other = SimulatedDisk()
    other.generation = 50
    stranger = BareNode(SETTINGS, disk=other)
    stranger.connect().create_topic("t", 2)
    stranger.node.stop(stranger.clock.now())
    with pytest.raises(DataDirectoryError, match=r"knows nothing of that directory|missing"):
        node.stop(lambda disk: copied(other, disk, "/a/__cluster_metadata-0"))


@pytest.mark.parametrize("index", [0, 1])
def test_a_partition_with_an_unknown_id_in_it_is_offline_and_stays_as_it_is(
    node: BareNode, index: int
) -> None:
    hosted = node.hosted("t", index)
    path, right = hosted.log.directory, hosted.topic_id.bytes
    node = node.stop(lambda disk: write_partition_metadata(disk, path, bytes(range(16))))
    assert node.connect().fetch("t", 0, index).error_code is ErrorCode.kafka_storage_error
    assert "another topic's id" in (node.node.partitions.offline_reason("t", index) or "")
    node = node.stop(lambda disk: write_partition_metadata(disk, path, right))
    assert node.connect().fetch("t", 0, index).high_watermark == 3


@pytest.mark.parametrize("data", [b"boot\n", b"boot", b"boot\nx\n\n", b"boot\n7\nnothing\n", b"boot\n7"])
def test_a_session_of_an_earlier_version_or_a_damaged_one_tells_the_boot_alone(data: bytes) -> None:
    assert decode_session(data) == BrokerRun("boot")


def test_a_session_is_read_as_it_was_written(node: BareNode) -> None:
    session = BrokerRun("boot", 7, frozenset(each.id for each in node.node.directories))
    assert decode_session(encode_session(session)) == session
