"""ConsumerGroupHeartbeat and ConsumerGroupDescribe over the wire, on a node whose flushes wait to be told."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.tiers import examples

from holdfast.broker.groups.consumer_member import ConsumerReply
from holdfast.broker.node.handlers.group_members import _consumer_fields, pack_nothing_new
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault
from holdfast.wire.messages import encode_response

HEARTBEAT, DESCRIBE, ALTER_CONFIGS, OFFSET_COMMIT, OFFSET_FETCH, DELETE_GROUPS = 68, 69, 44, 8, 9, 42
SESSION_MS = 45_000


def fields(member_id: str, epoch: int, **said: Any) -> dict[str, Any]:
    request: dict[str, Any] = {
        "group_id": "group",
        "member_id": member_id,
        "member_epoch": epoch,
        "instance_id": None,
        "rack_id": None,
        "rebalance_timeout": 300_000 if epoch == 0 else -1,
        "subscribed_topic_names": ["orders"] if epoch == 0 else None,
        "subscribed_topic_regex": None,
        "server_assignor": None,
        "topic_partitions": [] if epoch == 0 else None,
    }
    return request | said


def beat(client: BareClient, member_id: str, epoch: int, version: int = 1, **said: Any) -> Any:
    return client.ask(HEARTBEAT, version, **fields(member_id, epoch, **said))


def partitions(answer: Any) -> list[int]:
    return sorted(index for topic in answer.assignment.topic_partitions for index in topic.partitions)


@pytest.fixture
def node() -> BareNode:
    node = BareNode()
    node.connect().create_topic("orders", 4)
    return node


def test_a_member_joins_and_is_told_its_partitions(node: BareNode) -> None:
    client = node.connect()
    answer = beat(client, "ann", 0)
    assert (answer.error_code, answer.member_id, answer.member_epoch) == (0, "ann", 2)
    assert answer.heartbeat_interval == timedelta(seconds=5)
    assert partitions(answer) == [0, 1, 2, 3]
    assert beat(client, "ann", 2).assignment is None


def test_version_0_lets_the_coordinator_choose_the_id(node: BareNode) -> None:
    client = node.connect()
    answer = beat(client, "", 0, version=0)
    assert len(answer.member_id) == 22
    assert beat(client, answer.member_id, answer.member_epoch, version=0).error_code == 0
    assert beat(client, "", 0, version=1).error_code is ErrorCode.invalid_request


def test_no_answer_leaves_before_what_it_tells_is_durable(node: BareNode) -> None:
    client, other = node.connect(), node.connect()
    beat(client, "ann", 0)
    leaving = client.begin(HEARTBEAT, 1, **fields("ann", -1))
    refused = other.begin(HEARTBEAT, 1, **fields("ann", 2))
    described = other.begin(DESCRIBE, 1, group_ids=["group"], include_authorized_operations=False)
    node.turn()
    assert not client.frames
    assert not other.frames
    node.settle()
    assert client.answer(leaving).member_epoch == -1
    assert other.answer(refused).error_code is ErrorCode.unknown_member_id
    assert other.answer(described).groups[0].group_state == "Empty"


def test_a_flush_that_fails_leaves_the_client_to_ask_again(node: BareNode) -> None:
    client = node.connect()
    beat(client, "warm", 0)
    joining = client.begin(HEARTBEAT, 1, **fields("ann", 0))
    node.disk.plan(Fault("flush", path_contains="__consumer_offsets"))
    node.settle()
    assert client.answer(joining).error_code is ErrorCode.coordinator_not_available


def test_a_silent_member_is_out_after_its_session(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0)
    node.advance(SESSION_MS - 1)
    node.settle()
    assert beat(client, "ann", 2).error_code == 0
    node.advance(SESSION_MS)
    node.settle()
    assert beat(client, "ann", 2).error_code is ErrorCode.unknown_member_id


def test_a_new_topic_reaches_members_by_their_heartbeat(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0, subscribed_topic_names=None, subscribed_topic_regex="pay.*")
    client.create_topic("payments", 2)
    node.advance(2_000)
    answer = beat(client, "ann", 2)
    assert partitions(answer) == [0, 1]


def test_settings_of_one_group_are_taken_while_it_runs(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0)
    change = {"name": "consumer.heartbeat.interval.ms", "config_operation": 0, "value": "7000"}
    resource = {"resource_type": 32, "resource_name": "group", "configs": [change]}
    (altered,) = client.ask(ALTER_CONFIGS, 1, resources=[resource], validate_only=False).responses
    assert altered.error_code == 0
    assert beat(client, "ann", 2).heartbeat_interval == timedelta(seconds=7)


def test_a_broker_without_the_protocol_says_so() -> None:
    client = BareNode({"group.coordinator.rebalance.protocols": "classic"}).connect()
    assert beat(client, "ann", 0).error_code is ErrorCode.unsupported_version
    described = client.ask(DESCRIBE, 1, group_ids=["group"], include_authorized_operations=False)
    assert described.groups[0].error_code is ErrorCode.unsupported_version


def test_describe_tells_what_members_have_and_shall_have(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0, rack_id="r1")
    node.advance(2_000)
    beat(client, "bob", 0)
    (group, missing, empty) = client.ask(
        DESCRIBE, 1, group_ids=["group", "none", ""], include_authorized_operations=True
    ).groups
    assert (group.group_state, group.group_epoch, group.assignment_epoch) == ("Reconciling", 3, 3)
    assert group.assignor_name == "uniform"
    ann, bob = sorted(group.members, key=lambda member: str(member.member_id))
    assert (ann.member_epoch, bob.member_epoch) == (2, 3)
    assert (ann.rack_id, ann.client_host, ann.member_type) == ("r1", "/10.0.0.9", 1)
    assert ann.subscribed_topic_names == ("orders",)
    assert ann.subscribed_topic_regex == ""
    (topic,) = ann.assignment.topic_partitions
    assert (topic.topic_name, topic.partitions) == ("orders", (0, 1, 2, 3))
    assert [topic.partitions for topic in bob.target_assignment.topic_partitions] == [(2, 3)]
    assert bob.assignment.topic_partitions == ()
    assert missing.error_code is ErrorCode.group_id_not_found
    assert empty.error_code is ErrorCode.invalid_group_id


def commit(client: BareClient, member_id: str, epoch: int, version: int = 9) -> Any:
    answer = client.ask(
        OFFSET_COMMIT,
        version,
        group_id="group",
        member_id=member_id,
        group_instance_id=None,
        generation_id_or_member_epoch=epoch,
        topics=[
            {
                "name": "orders",
                "partitions": [
                    {
                        "partition_index": 0,
                        "committed_offset": 5,
                        "committed_leader_epoch": -1,
                        "committed_metadata": None,
                    }
                ],
            }
        ],
    )
    return answer.topics[0].partitions[0].error_code


def fetch(client: BareClient, member_id: str | None, epoch: int) -> Any:
    group = {
        "group_id": "group",
        "member_id": member_id,
        "member_epoch": epoch,
        "topics": [{"name": "orders", "partition_indexes": [0]}],
    }
    return client.ask(OFFSET_FETCH, 9, groups=[group], require_stable=False).groups[0].error_code


def test_committed_offsets_are_committed_and_fetched_with_the_member_epoch(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0)
    assert commit(client, "ann", 2) == 0
    assert commit(client, "ann", 3) is ErrorCode.stale_member_epoch
    assert commit(client, "eve", 2) is ErrorCode.unknown_member_id
    assert commit(client, "ann", 2, version=8) is ErrorCode.unsupported_version
    assert fetch(client, "ann", 2) == 0
    assert fetch(client, "ann", 1) is ErrorCode.stale_member_epoch
    assert fetch(client, "eve", 1) is ErrorCode.unknown_member_id
    assert fetch(client, None, -1) == 0


def test_a_group_is_deleted_when_nobody_is_in_it(node: BareNode) -> None:
    client = node.connect()
    beat(client, "ann", 0)
    assert client.ask(DELETE_GROUPS, 2, groups_names=["group"]).results[0].error_code is (
        ErrorCode.non_empty_group
    )
    beat(client, "ann", -1)
    assert client.ask(DELETE_GROUPS, 2, groups_names=["group"]).results[0].error_code == 0
    again = node.kill().connect()
    described = again.ask(DESCRIBE, 1, group_ids=["group"], include_authorized_operations=False)
    assert described.groups[0].error_code is ErrorCode.group_id_not_found


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["ann", "bob", "cyd"]), st.sampled_from(["beat", "beat", "leave"])),
        min_size=1,
        max_size=8,
    ),
    ends=st.sampled_from(["kill", "lose_power", "stop"]),
    unanswered=st.booleans(),
)
@settings(max_examples=examples(40), deadline=None)
def test_what_was_answered_is_there_after_any_end(
    steps: list[tuple[str, str]], ends: str, unanswered: bool
) -> None:
    node = BareNode()
    client = node.connect()
    client.create_topic("orders", 4)
    epochs: dict[str, int] = {}
    for name, action in steps:
        node.clock.advance(2_000)
        epoch = -1 if action == "leave" and name in epochs else epochs.get(name, 0)
        answer = beat(client, name, epoch)
        assert answer.error_code == 0
        if epoch == -1:
            del epochs[name]
        else:
            epochs[name] = answer.member_epoch
    if unanswered:
        client.begin(HEARTBEAT, 1, **fields("dan", 0))
    again = getattr(node, ends)().connect()
    described = again.ask(DESCRIBE, 1, group_ids=["group"], include_authorized_operations=False).groups[0]
    found = {member.member_id: member.member_epoch for member in described.members}
    found.pop("dan", None)
    assert found == epochs
    owned = [
        (topic.topic_name, index)
        for member in described.members
        for topic in member.assignment.topic_partitions
        for index in topic.partitions
    ]
    assert len(owned) == len(set(owned))
    for name, epoch in epochs.items():
        assert beat(again, name, epoch).error_code == 0


@given(st.text(max_size=300), st.integers(-2, 2**31 - 1), st.integers(0, 2**31 - 1))
def test_the_answer_packed_by_hand_is_what_the_schema_says(
    member_id: str, epoch: int, interval_ms: int
) -> None:
    reply = ConsumerReply(member_id, epoch, interval_ms)
    for version in (0, 1):
        assert pack_nothing_new(reply) == encode_response(HEARTBEAT, version, _consumer_fields(reply))
