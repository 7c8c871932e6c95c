"""What groups see of the cluster's topics, and what becomes of positions in deleted ones."""

from __future__ import annotations

from collections.abc import Container

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.groups.offsets import OffsetStore
from holdfast.testing.bare_clients import BareMember, TransactionalProducer
from holdfast.testing.bare_node import BareClient, BareNode

DELETE_TOPICS, CREATE_PARTITIONS = 20, 37
SETTINGS = {"offsets.topic.num.partitions": "1", "group.initial.rebalance.delay.ms": "0"}


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """The names that all positions were looked through for."""
    seen: list[set[str]] = []
    look = OffsetStore.strangers

    def counted(store: OffsetStore, names: Container[str] | None = None) -> dict[str, list[tuple[str, int]]]:
        if isinstance(names, set):
            seen.append(set(names))
        return look(store, names)

    monkeypatch.setattr(OffsetStore, "strangers", counted)
    return seen


def reader_of(node: BareNode, *topics: str) -> BareMember:
    client = node.connect()
    for topic in topics:
        client.create_topic(topic)
    member = BareMember(node, "group")
    member.settle_alone()
    member.commit({(topic, 0): 5 for topic in topics})
    return member


def begin_delete(client: BareClient, *topics: str) -> int:
    return client.begin(DELETE_TOPICS, topics=[{"name": topic} for topic in topics], timeout=1000)


def test_topics_deleted_together_cost_one_look_through_all_committed_offsets(scans: list[set[str]]) -> None:
    node = BareNode(SETTINGS)
    names = [f"t{number}" for number in range(20)]
    member = reader_of(node, *names, "kept")
    scans.clear()
    asked = begin_delete(member.client, *names)
    node.settle()
    assert {each.error_code for each in member.client.answer(asked).responses} == {ErrorCode.none}
    assert scans == [set(names)]
    assert member.committed_offsets() == {("kept", 0): 5}


def test_a_deletion_that_is_not_durable_yet_takes_no_committed_offsets(scans: list[set[str]]) -> None:
    node = BareNode(SETTINGS)
    member = reader_of(node, "a", "b", "c")
    scans.clear()
    begin_delete(member.client, "a")
    node.turn()
    node.flusher.begin_one()
    begin_delete(member.client, "b")
    begin_delete(member.client, "c")
    node.flusher.run_one()
    assert scans == [{"a"}], "the flush that has returned began before the others"
    node.settle()
    assert scans == [{"a"}, {"b", "c"}]
    assert member.committed_offsets() == {}


def test_a_topic_is_described_once_for_all_who_ask_until_it_changes() -> None:
    node = BareNode({**SETTINGS, "broker.rack": "north"})
    client = node.connect()
    client.create_topic("t", 2)
    topics = node.node.groups.topics
    facts = topics.by_name("t")
    assert facts is not None
    assert facts.racks == (("north",), ("north",))
    assert topics.by_name("t") is facts
    assert topics.by_id(facts.topic_id) is facts
    wanted = [{"name": "t", "count": 3, "assignments": None}]
    client.ask(CREATE_PARTITIONS, topics=wanted, timeout=1000, validate_only=False)
    grown = topics.by_name("t")
    assert grown is not None
    assert grown.racks == (("north",),) * 3
    begin_delete(client, "t")
    assert topics.by_name("t") is None
    client.create_topic("t", 1)
    fresh = topics.by_name("t")
    assert fresh is not None
    assert (fresh.partitions, fresh.topic_id == facts.topic_id) == (1, False)


def test_a_topic_made_anew_while_its_committed_offsets_are_enrolled_is_the_one_they_are_for() -> None:
    node = BareNode({**SETTINGS, "transaction.state.log.num.partitions": "1"})
    client = node.connect()
    client.create_topic("t")
    producer = TransactionalProducer(node.connect())
    assert producer.init() is ErrorCode.none
    asked = producer.begin_commit_offset("group", "t", 0, 5)
    begin_delete(client, "t")
    node.settle()
    (topic,) = producer.client.answer(asked).topics
    assert [each.error_code for each in topic.partitions] == [ErrorCode.unknown_topic_or_partition]
    (coordinator,) = node.node.groups
    assert not coordinator.machine.offsets.groups()
