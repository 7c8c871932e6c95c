"""Single rules of positions that no scenario shows well."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError
from holdfast.groups.model import CommitRequest, PartitionCommit, TopicCommit
from holdfast.groups.offsets import BATCH_BYTES
from holdfast.groups.offsets_replay import OffsetReplay
from holdfast.testing.group_world import GroupWorld
from holdfast.wire.coordinator_records import LegacyOffsetCommitKey, OffsetCommitKey, OffsetCommitValue


def commit(world: GroupWorld, group: str, partitions: int, offset: int = 5) -> None:
    facts = world.topics.by_name("orders")
    assert facts is not None
    commits = tuple(PartitionCommit(index, offset, -1, None) for index in range(partitions))
    request = CommitRequest(group, "", None, -1, (TopicCommit("orders", facts.topic_id, commits),))
    world.coordinator.commit(request, world.now)


def test_many_positions_are_forgotten_in_batches_that_fit() -> None:
    world = GroupWorld()
    world.topics.create("orders", 40_000)
    for first in range(8):
        commit(world, "group", 5_000 * (first + 1))
    before = len(world.journal.batches)
    world.coordinator.delete("group", world.now)
    deleted = world.journal.batches[before:]
    assert len(deleted) > 1
    assert all(len(batch) < 2 * BATCH_BYTES for batch in deleted)
    world.reload()
    assert not world.coordinator.groups
    assert not world.coordinator.offsets.groups()


def test_a_log_that_refuses_in_the_middle_leaves_memory_and_log_alike() -> None:
    world = GroupWorld()
    world.topics.create("orders", 40_000)
    commit(world, "group", 40_000)
    append, appended = world.journal.append, 0

    def append_once(*arguments: object, **options: object) -> None:
        nonlocal appended
        if appended:
            raise ApiError(ErrorCode.coordinator_not_available)
        appended += 1
        append(*arguments, **options)  # type: ignore[arg-type]

    world.journal.append = append_once  # type: ignore[method-assign]
    with pytest.raises(ApiError):
        world.coordinator.delete("group", world.now)
    left = dict(world.coordinator.offsets.of_group("group"))
    assert 0 < len(left) < 40_000
    world.reload()
    assert world.coordinator.offsets.of_group("group").keys() == left.keys()


def test_a_log_that_refuses_expiry_is_asked_again_later() -> None:
    world = GroupWorld({"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "60000"})
    world.topics.create("orders", 1)
    commit(world, "group", 1)
    world.journal.refuses = ErrorCode.coordinator_not_available
    world.advance(130_000)
    assert "group" in world.coordinator.groups
    assert any("expired positions" in line for line in world.said)
    world.journal.refuses = None
    world.advance(60_000)
    assert not world.coordinator.groups


def test_positions_written_long_ago_are_found() -> None:
    replay = OffsetReplay()
    old = OffsetCommitValue(offset=3, metadata="m", commit_timestamp=7, expire_timestamp=9, layout_version=1)
    key = LegacyOffsetCommitKey("group", "orders", 1).encode()
    assert OffsetReplay.is_about(key)
    replay.record(key, old.encode(), None)
    (found,) = replay.finish()
    assert (found.group_id, found.topic, found.partition) == ("group", "orders", 1)
    assert (found.position.offset, found.position.commit_ms, found.position.expire_ms) == (3, 7, 9)


def test_values_of_a_version_to_come_are_passed_over() -> None:
    replay = OffsetReplay()
    replay.record(OffsetCommitKey("group", "orders", 1).encode(), b"\x00\x63 what may this be", None)
    assert list(replay.finish()) == []


def test_a_marker_without_a_transaction_ends_nothing() -> None:
    replay = OffsetReplay()
    value = OffsetCommitValue(offset=3, commit_timestamp=7).encode()
    replay.record(OffsetCommitKey("group", "orders", 1).encode(), value, 7)
    replay.end_transaction(8, is_commit=True)
    (found,) = replay.finish()
    assert found.producer_id == 7
