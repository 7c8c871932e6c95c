"""Sessions of members over starts of the broker: however often it is killed, the dead go and the living stay."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node.group_service import NOTED_EVERY_MS, SILENCES_FILE
from holdfast.testing.bare_clients import BareMember
from holdfast.testing.bare_node import BareNode

SETTINGS = {
    "offsets.topic.num.partitions": "1",
    "group.initial.rebalance.delay.ms": "0",
    "group.min.session.timeout.ms": "1",
}
CONSUMER_GROUP_HEARTBEAT = 68
PATH = f"/data/{SILENCES_FILE}"
SESSION_MS = 45_000


def join(node: BareNode, name: str) -> BareMember:
    member = BareMember(node, name)
    assert not member.join(session_timeout=SESSION_MS).error_code
    assert not member.sync({member.member_id: b"all"}).error_code
    return member


def beat_consumer(node: BareNode, epoch: int) -> ErrorCode:
    """A member of the newer protocol, whose group is `new`."""
    fields = {"group_id": "new", "member_id": "m", "member_epoch": epoch}
    if epoch == 0:
        fields |= {"rebalance_timeout": 10_000, "subscribed_topic_names": ["t"], "topic_partitions": []}
    answer = node.connect().ask(CONSUMER_GROUP_HEARTBEAT, 1, **fields)
    return ErrorCode(answer.error_code)


def members(node: BareNode, group: str) -> int:
    (coordinator,) = node.node.groups
    return len(coordinator.machine.groups[group].members)


def killed_every(
    node: BareNode, interval_ms: int, times: int, meanwhile: Callable[[BareNode], None]
) -> BareNode:
    for _ in range(times):
        for _ in range(interval_ms // 1000):
            node.advance(1000)
            node.settle()
            meanwhile(node)
        node = node.kill()
    return node


@pytest.mark.parametrize("interval_ms", [12_000, 25_000, 44_000])
def test_a_dead_member_is_missed_although_the_broker_never_lives_as_long_as_a_session(
    interval_ms: int,
) -> None:
    node = BareNode(SETTINGS)
    node.connect().create_topic("t")
    living, dead = join(node, "living"), join(node, "dead")
    assert beat_consumer(node, 0) is ErrorCode.none

    def beat(node: BareNode) -> None:
        living.node, living.client = node, node.connect()
        assert living.beat() is ErrorCode.none

    assert [members(node, group) for group in ("living", "dead", "new")] == [1, 1, 1]
    node = killed_every(node, interval_ms, 2 + SESSION_MS // NOTED_EVERY_MS, beat)
    assert [members(node, group) for group in ("living", "dead", "new")] == [1, 0, 0]
    assert dead.member_id


def test_a_member_that_comes_back_has_its_whole_session_again() -> None:
    node = BareNode(SETTINGS)
    member = join(node, "group")
    node = killed_every(node.kill(), 35_000, 1, lambda node: None)
    member.node, member.client = node, node.connect()
    assert member.beat() is ErrorCode.none
    node = killed_every(node, 12_000, 1, lambda node: None)
    node.advance(SESSION_MS - 1000)
    assert members(node, "group") == 1


def test_nothing_is_written_where_everybody_is_alive_or_gone() -> None:
    node = BareNode(SETTINGS)
    member = join(node, "group")
    node = node.kill()
    member.node, member.client = node, node.connect()
    node.advance(3000)
    assert member.beat() is ErrorCode.none
    node.advance(NOTED_EVERY_MS)
    assert not node.disk.exists(PATH)
    node = killed_every(node.kill(), 2 * SESSION_MS, 1, lambda node: None)
    assert members(node, "group") == 0
    assert b"group" not in bytes(node.disk.open(PATH, "read").pread(1000, 0))


def test_a_member_that_waits_for_the_others_is_not_silent() -> None:
    node = BareNode(SETTINGS)
    ann, bob = BareMember(node, "group"), BareMember(node, "group")
    for member in (ann, bob):
        member.begin_join(session_timeout=SESSION_MS)
        node.settle()
        member.joined(member.client.correlation_ids[-1])
    asked = [(member, member.begin_join(session_timeout=SESSION_MS)) for member in (ann, bob, ann)]
    node.settle()
    bob.joined(asked[1][1])
    ann.joined(asked[2][1])
    assert not ann.sync({ann.member_id: b"all"}).error_code
    node = node.kill()
    ann.node, ann.client = node, node.connect()
    ann.begin_join(session_timeout=SESSION_MS)
    node.settle()
    (coordinator,) = node.node.groups
    assert list(coordinator.machine.silent_members()) == [("group", bob.member_id)]


@pytest.mark.parametrize("content", [b"", b"nonsense", b"{}", b'[["group"]]', b"\xff"])
def test_a_note_that_nobody_can_read_counts_for_nothing(content: bytes) -> None:
    def spoil(disk: object) -> None:
        file = node.disk.open(PATH, "create")
        file.pwritev([content], 0)
        file.close()

    node = BareNode(SETTINGS)
    join(node, "group")
    node = node.kill(spoil)
    node.advance(SESSION_MS - 1000)
    assert members(node, "group") == 1
