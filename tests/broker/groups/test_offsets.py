"""Single rules of positions that no scenario shows well."""

from __future__ import annotations

from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups.model import (
    CommitRequest,
    PartitionCommit,
    TopicCommit,
    TopicFacts,
    TransactionalCommit,
)
from holdfast.broker.groups.offsets import BATCH_BYTES, OffsetReplay
from holdfast.errors import ApiError
from holdfast.wire.coordinator_records import LegacyOffsetCommitKey, OffsetCommitKey, OffsetCommitValue


def commit(world: GroupWorld, group: str, partitions: int, offset: int = 5) -> None:
    facts = world.topics.by_name("orders")
    assert facts is not None
    commits = tuple(PartitionCommit(index, offset, -1, None) for index in range(partitions))
    request = CommitRequest(group, "", None, -1, (TopicCommit("orders", facts.topic_id, commits),))
    world.coordinator.commit(request, world.now)


@pytest.mark.check
def test_many_committed_offsets_are_forgotten_in_batches_that_fit() -> None:
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


@pytest.mark.check
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
    assert any("expired committed offsets" in line for line in world.said)
    world.journal.refuses = None
    world.advance(60_000)
    assert not world.coordinator.groups


def test_a_defect_in_one_round_of_expiry_does_not_end_the_others() -> None:
    world = GroupWorld({"offsets.retention.minutes": "1", "offsets.retention.check.interval.ms": "60000"})
    world.topics.create("orders", 1)
    commit(world, "group", 1)
    append, world.journal.append = world.journal.append, None  # type: ignore[assignment]
    with pytest.raises(TypeError):
        world.advance(130_000)
    world.journal.append = append  # type: ignore[method-assign]
    world.advance(130_000)
    assert not world.coordinator.groups


def test_committed_offsets_written_long_ago_are_found() -> None:
    replay = OffsetReplay()
    old = OffsetCommitValue(offset=3, metadata="m", commit_timestamp=7, expire_timestamp=9, layout_version=1)
    key = LegacyOffsetCommitKey("group", "orders", 1).encode()
    assert OffsetReplay.is_about(key)
    replay.record(key, old.encode(), None)
    (found,) = replay.finish()
    assert (found.group_id, found.topic, found.partition) == ("group", "orders", 1)
    assert (found.committed.offset, found.committed.commit_ms, found.committed.expire_ms) == (3, 7, 9)


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


# Topics that are gone


def pending(world: GroupWorld, topic_id: UUID, offset: int, producer: int = 7) -> None:
    topics = (TopicCommit("orders", topic_id, (PartitionCommit(0, offset, -1, None),)),)
    world.coordinator.commit_in_transaction(
        TransactionalCommit("group", "", None, -1, topics, producer, 0), world.now
    )


def committed(world: GroupWorld) -> int | None:
    position = world.coordinator.offsets.of_group("group").get(("orders", 0))
    return None if position is None else position.offset


def made_anew(world: GroupWorld) -> UUID:
    """The topic under another id, and nobody has looked at positions yet."""
    facts = world.topics.by_name("orders")
    assert facts is not None
    topic_id = UUID(int=facts.topic_id.int + 1)
    world.topics._by_name["orders"] = facts._replace(topic_id=topic_id)
    return topic_id


def test_a_pending_offset_of_a_topic_that_is_gone_does_not_take_the_good_one_with_it() -> None:
    world = GroupWorld()
    old = world.topics.create("orders", 1)
    pending(world, old, 5)
    made_anew(world)
    commit(world, "group", 1, 6)
    world.coordinator.topics_deleted({"orders"}, world.now)
    assert committed(world) == 6
    assert not world.coordinator.offsets.is_pending("group", "orders", 0)
    world.reload()
    assert committed(world) == 6


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_committed_offset_of_a_topic_that_is_gone_does_not_take_the_pending_one_with_it(
    is_commit: bool,
) -> None:
    world = GroupWorld()
    world.topics.create("orders", 1)
    commit(world, "group", 1, 5)
    pending(world, made_anew(world), 6)
    world.coordinator.topics_deleted({"orders"}, world.now)
    assert committed(world) is None
    assert world.coordinator.offsets.is_pending("group", "orders", 0)
    world.reload()
    assert committed(world) is None
    assert world.coordinator.offsets.is_pending("group", "orders", 0)
    world.coordinator.end_transaction(7, is_commit, world.now)
    assert committed(world) == (6 if is_commit else None)


def test_what_is_pending_in_a_topic_that_is_gone_is_forgotten_and_what_another_has_pending_is_not() -> None:
    world = GroupWorld()
    old = world.topics.create("orders", 1)
    pending(world, old, 5, producer=7)
    pending(world, made_anew(world), 6, producer=8)
    world.coordinator.topics_deleted({"orders"}, world.now)
    world.coordinator.end_transaction(7, True, world.now)
    assert committed(world) is None
    world.coordinator.end_transaction(8, True, world.now)
    assert committed(world) == 6


def test_a_topic_is_looked_up_once_for_all_committed_offsets_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    world = GroupWorld()
    world.topics.create("orders", 100)
    for group in ("one", "two"):
        commit(world, group, 100)
    asked: list[str] = []
    by_name = world.topics.by_name

    def counted(name: str) -> TopicFacts | None:
        asked.append(name)
        return by_name(name)

    monkeypatch.setattr(world.topics, "by_name", counted)
    assert world.coordinator.offsets.strangers() == {}
    assert asked == ["orders"]
