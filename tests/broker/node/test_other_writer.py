"""Another program that writes to the metadata log in use is noticed before the next append, and takes nothing away."""

from __future__ import annotations

import pytest
from tests.broker.node.test_inherited import METADATA, NOW, TOPIC_ID, content, start

from holdfast.broker.node.node import Node
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import Record, build_batch
from holdfast.wire.control_records import LeaderChange, Voter
from holdfast.wire.metadata_records import Config, Topic


@pytest.fixture
def disk() -> SimulatedDisk:
    made = SimulatedDisk(1)
    made.make_directory("/")
    return made


def change(node: Node, value: str, at_ms: int = 0) -> None:
    node.metadata.append(
        [Config(resource_type=4, resource_name="1", name="log.retention.ms", value=value)],
        Now(NOW.wall_ms, at_ms),
    )


def setting(node: Node) -> str | None:
    for resource, settings in node.metadata.image.configs.items():
        if resource.name == "1":
            return settings.get("log.retention.ms")
    return None


def intrude(disk: SimulatedDisk, node: Node, position: int, offset: int) -> None:
    """What Kafka does: an election, and the first record of the epoch at what was the end when it looked."""
    state = disk.open(f"{METADATA}/quorum-state", "create")
    state.pwritev([b'{"leaderId":1,"leaderEpoch":99}'], 0)
    state.close()
    leads = LeaderChange(leader_id=1, voters=(Voter(1),), granting_voters=(Voter(1),))
    batch = build_batch(
        [Record(0, 0, leads.encode_key(), leads.encode_value())],
        base_offset=offset,
        leader_epoch=99,
        base_timestamp=NOW.wall_ms,
        is_control=True,
    )
    file = disk.open(node.metadata.hosted.log.active.path(), "write")
    file.pwritev([batch], position)
    file.close()


def test_records_behind_ours_end_the_broker_and_are_kept(disk: SimulatedDisk) -> None:
    node = start(disk)
    change(node, "1000")
    log = node.metadata.hosted.log
    intrude(disk, node, log.active.size, log.end_offset)
    before = content(disk)[log.active.path()]
    with pytest.raises(ApiError, match="offline"):
        change(node, "2000")
    assert node.failures.fatal is not None
    assert "Apache Kafka was probably started" in node.failures.fatal
    node.stop(NOW)
    assert content(disk)[log.active.path()] == before
    again = start(disk)
    assert setting(again) == "1000"
    assert again.metadata.hosted.leader_epoch > 99
    assert "holdfast.appended" not in disk.list(METADATA)


def test_what_was_written_over_is_put_back(disk: SimulatedDisk) -> None:
    node = start(disk)
    change(node, "1000")
    log = node.metadata.hosted.log
    position, offset = log.active.size, log.end_offset
    change(node, "2000")
    change(node, "3000")
    ours = content(disk)[log.active.path()]
    intrude(disk, node, position, offset)
    node.metadata.require_alone()
    assert node.failures.fatal is not None
    node.stop(NOW)
    said: list[str] = []
    again = start(disk, said=said)
    assert setting(again) == "3000"
    assert content(disk)[log.active.path()].startswith(ours)
    assert any("It is put back" in str(line) for line in said)
    assert any(name.endswith(".cut") for name in disk.list(METADATA))


def test_an_election_alone_is_noticed(disk: SimulatedDisk) -> None:
    node = start(disk)
    state = disk.open(f"{METADATA}/quorum-state", "create")
    state.pwritev([b"{}"], 0)
    state.close()
    with pytest.raises(ApiError):
        node.metadata.append([Topic(name="a", topic_id=TOPIC_ID)], NOW)
    assert node.failures.fatal is not None
    assert "quorum-state was written" in node.failures.fatal


def test_what_was_appended_long_ago_is_not_kept(disk: SimulatedDisk) -> None:
    node = start(disk)
    for number in range(50):
        change(node, str(number + 1), at_ms=number * 100_000)
    other_writer = node.metadata._other_writer
    assert other_writer is not None
    assert len(other_writer._appended) == 2
