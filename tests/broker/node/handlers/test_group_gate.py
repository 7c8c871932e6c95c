"""Answers about groups leave once what they tell is durable, refusals and reads included; what has left survives."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_clients import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    HEARTBEAT,
    LEAVE_GROUP,
    LIST_GROUPS,
    OFFSET_DELETE,
    BareMember,
)
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk
from holdfast.testing.fakes import ManualClock

SETTINGS = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "3"}


@pytest.fixture
def node() -> BareNode:
    node = BareNode(SETTINGS)
    node.connect().create_topic("orders", 4)
    node.settle()
    return node


@pytest.fixture
def ann(node: BareNode) -> BareMember:
    ann = BareMember(node, "group")
    ann.settle_alone()
    return ann


def assert_waits_for_the_flush(node: BareNode, client: BareClient, correlation_id: int) -> Any:
    node.turn()
    assert node.flusher.jobs, "nothing is being flushed"
    assert correlation_id not in client.correlation_ids, "the answer left before the flush returned"
    node.settle()
    return client.answer(correlation_id)


def test_first_join_waits(node: BareNode) -> None:
    BareMember(node, "other").settle_alone()
    ann = BareMember(node, "group")
    answer = assert_waits_for_the_flush(node, ann.client, ann.begin_join())
    assert answer.error_code is ErrorCode.member_id_required


def test_assignments_wait(node: BareNode) -> None:
    ann = BareMember(node, "group")
    ann.join()
    answer = assert_waits_for_the_flush(node, ann.client, ann.begin_sync({ann.member_id: b"all"}))
    assert answer.assignment == b"all"


def test_commits_wait(node: BareNode, ann: BareMember) -> None:
    answer = assert_waits_for_the_flush(node, ann.client, ann.begin_commit({("orders", 1): 5}))
    assert answer.topics[0].partitions[0].error_code is ErrorCode.none


Ask = Callable[[BareMember], int]
READS: dict[str, Ask] = {
    "fetch": lambda member: member.begin_fetch(),
    "describe": lambda member: member.client.begin(DESCRIBE_GROUPS, groups=["group"]),
    "list": lambda member: member.client.begin(LIST_GROUPS),
    "heartbeat": lambda member: member.client.begin(HEARTBEAT, **member.beat_fields()),
    "refused heartbeat": lambda member: member.client.begin(HEARTBEAT, **member.beat_fields(generation_id=9)),
    "refused commit": lambda member: member.begin_commit({("orders", 0): 9}, generation_id_or_member_epoch=9),
    "refused sync": lambda member: member.begin_sync(generation_id=9),
    "refused deletion": lambda member: member.client.begin(DELETE_GROUPS, groups_names=["group"]),
    "refused leave": lambda member: member.client.begin(
        LEAVE_GROUP, group_id="group", members=[{"member_id": "nobody"}]
    ),
    "refused deletion of a position": lambda member: member.client.begin(
        OFFSET_DELETE,
        group_id="group",
        topics=[{"name": "orders", "partitions": [{"partition_index": 0}]}],
    ),
}


@pytest.mark.parametrize("what", READS)
def test_whatever_is_told_after_a_commit_waits_for_it(node: BareNode, ann: BareMember, what: str) -> None:
    ann.begin_commit({("orders", 0): 5})
    reader = BareMember(node, "group")
    reader.member_id, reader.generation = ann.member_id, ann.generation
    assert_waits_for_the_flush(node, reader.client, READS[what](reader))


def test_leaving_waits(node: BareNode, ann: BareMember) -> None:
    correlation_id = ann.client.begin(LEAVE_GROUP, **ann.leave_fields())
    assert_waits_for_the_flush(node, ann.client, correlation_id)


def test_answers_about_other_partitions_do_not_wait(node: BareNode, ann: BareMember) -> None:
    others = (BareMember(node, f"other {number}") for number in range(50))
    other = next(
        other
        for other in others
        if node.node.groups.partition_of(other.group) != node.node.groups.partition_of("group")
    )
    other.settle_alone()
    ann.begin_commit({("orders", 0): 5})
    correlation_id = other.client.begin(HEARTBEAT, **other.beat_fields())
    assert other.client.answer(correlation_id).error_code is ErrorCode.none


def test_a_failed_flush_leaves_the_outcome_open_and_nothing_is_told_any_more(
    node: BareNode, ann: BareMember
) -> None:
    node.disk.plan(Fault("flush", path_contains="__consumer_offsets"))
    commit = ann.begin_commit({("orders", 0): 5})
    reader = BareMember(node, "group")
    fetch = reader.begin_fetch()
    node.settle()
    answer = ann.client.answer(commit)
    assert answer.topics[0].partitions[0].error_code is ErrorCode.coordinator_not_available
    assert reader.client.answer(fetch).groups[0].error_code is ErrorCode.coordinator_not_available
    assert ann.beat() is ErrorCode.coordinator_not_available
    assert ann.commit({("orders", 0): 6}) == [ErrorCode.coordinator_not_available]


def test_a_full_disk_refuses_and_nothing_changes(node: BareNode, ann: BareMember) -> None:
    ann.commit({("orders", 0): 5})
    node.disk.plan(Fault("write", error=28, path_contains="__consumer_offsets", times=2))
    assert ann.commit({("orders", 0): 6}) == [ErrorCode.coordinator_not_available]
    assert ann.committed_offsets() == {("orders", 0): 5}
    node.disk.clear_faults()
    assert ann.commit({("orders", 0): 6}) == [ErrorCode.none]


@pytest.mark.parametrize("end", ["stop", "kill", "lose_power"])
def test_a_restart_keeps_generation_members_assignments_and_committed_offsets(end: str) -> None:
    node = BareNode(SETTINGS)
    node.connect().create_topic("orders", 4)
    ann = BareMember(node, "group")
    bob = BareMember(node, "group", instance_id="b")
    ann.settle_alone()
    joining = bob.begin_join()
    node.settle()
    ann.join()
    bob.joined(joining)
    syncing = bob.begin_sync()
    ann.sync({ann.member_id: b"0,1", bob.member_id: b"2,3"})
    assert bob.client.answer(syncing).assignment == b"2,3"
    ann.commit({("orders", 0): 5}, metadata="so far")
    before = ann.client.ask(DESCRIBE_GROUPS, groups=["group"])

    again = getattr(node, end)()
    for member in (ann, bob):
        member.node, member.client = again, again.connect()
    assert ann.client.ask(DESCRIBE_GROUPS, groups=["group"]) == before
    assert ann.committed_offsets() == {("orders", 0): 5}
    assert ann.beat() is ErrorCode.none
    assert bob.sync().assignment == b"2,3"
    again.advance(9_000)
    assert bob.beat() is ErrorCode.none, "members get a whole session after a start"


def test_committed_offsets_outlive_a_deletion_that_a_crash_undoes(node: BareNode, ann: BareMember) -> None:
    ann.commit({("orders", 0): 5})
    journal = node.node.groups.find("group", node.clock.now()).journal
    end_offset = journal.hosted.log.end_offset
    ann.client.begin(20, 5, topic_names=["orders"], timeout=5000)
    node.turn()
    assert journal.hosted.log.end_offset == end_offset, "positions were forgotten before the topic was gone"
    again = node.lose_power()
    gone = again.node.metadata.image.topic("orders") is None
    assert BareMember(again, "group").committed_offsets() == ({} if gone else {("orders", 0): 5})


def test_committed_offsets_go_once_the_deletion_is_durable(node: BareNode, ann: BareMember) -> None:
    ann.commit({("orders", 0): 5})
    ann.client.begin(20, 5, topic_names=["orders"], timeout=5000)
    ann.client.begin(
        19,
        5,
        topics=[
            {"name": "orders", "num_partitions": 4, "replication_factor": 1, "assignments": [], "configs": []}
        ],
        timeout=5000,
    )
    # The new topic has the name, and not the positions, of the old one, even before they are forgotten.
    correlation_id = ann.begin_fetch()
    node.settle()
    assert not ann.client.answer(correlation_id).groups[0].topics
    assert not node.node.groups.find("group", node.clock.now()).machine.offsets.of_group("group")
    assert BareMember(node.lose_power(), "group").committed_offsets() == {}


# Power loss and kills at every operation


class Copier:
    """Commits one position after the other and remembers which were acknowledged."""

    def __init__(self) -> None:
        self.acknowledged = -1
        self.tried = -1
        self.seen = -1

    def work(self, node: BareNode) -> None:
        """Until the power goes."""
        member = BareMember(node, "group")
        member.settle_alone()
        for offset in range(8):
            self.tried = offset
            assert member.commit({("orders", 0): offset}) == [ErrorCode.none]
            self.acknowledged = offset
            self.seen = member.committed_offsets()["orders", 0]


def crash_after(operations: int, seed: int, end: str) -> tuple[Copier, BareNode]:
    clock = ManualClock()
    disk = SimulatedDisk(seed, clock)
    node = BareNode(SETTINGS, disk=disk, clock=clock)
    node.connect().create_topic("orders", 1)
    node.settle()
    copier = Copier()
    disk.lose_power_after(operations)
    with suppress(PowerLost):
        copier.work(node)
    disk.clear_faults()
    again: BareNode = getattr(node, end)()
    return copier, again


@pytest.mark.parametrize("end", ["kill", "lose_power"])
def test_acknowledged_offsets_survive_an_end_at_any_operation(end: str) -> None:
    outcomes = set()
    for operations in range(1, 120, 1 if end == "kill" else 2):
        copier, node = crash_after(operations, operations, end)
        found = BareMember(node, "group").committed_offsets().get(("orders", 0), -1)
        assert max(copier.acknowledged, copier.seen) <= found <= copier.tried, (
            f"after {operations} operations"
        )
        outcomes.add(copier.acknowledged)
        if copier.acknowledged == 7:
            break
    assert {-1, 0, 7} <= outcomes, f"the crashes did not reach every stage: {outcomes}"
