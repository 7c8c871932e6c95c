"""The APIs of groups, at all their versions, and what they say to bad input."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_clients import (
    DELETE_GROUPS,
    DESCRIBE_GROUPS,
    HEARTBEAT,
    JOIN_GROUP,
    LEAVE_GROUP,
    LIST_GROUPS,
    OFFSET_COMMIT,
    OFFSET_DELETE,
    OFFSET_FETCH,
    SYNC_GROUP,
    BareMember,
)
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.apis import BY_KEY
from holdfast.wire.metadata_records import RemoveTopic

SETTINGS = {"group.initial.rebalance.delay.ms": "0", "offsets.topic.num.partitions": "3"}
NOWHERE = UUID(int=99)


@pytest.fixture
def node() -> BareNode:
    node = BareNode(SETTINGS)
    node.connect().create_topic("orders", 2)
    node.settle()
    return node


@pytest.fixture
def client(node: BareNode) -> BareClient:
    return node.connect()


@pytest.fixture
def ann(node: BareNode) -> BareMember:
    ann = BareMember(node, "group")
    ann.settle_alone()
    return ann


def versions(api_key: int) -> list[int]:
    return list(range(BY_KEY[api_key].served_from, BY_KEY[api_key].max + 1))


# The classic protocol


@pytest.mark.parametrize("version", versions(JOIN_GROUP))
def test_join_at_every_version(node: BareNode, version: int) -> None:
    member = BareMember(node, "group")
    first = member.client.ask(JOIN_GROUP, version, **member.join_fields())
    if version >= 4:
        assert first.error_code is ErrorCode.member_id_required
        assert first.generation_id == -1
        member.member_id = first.member_id
        first = member.client.ask(JOIN_GROUP, version, **member.join_fields())
    assert first.error_code is ErrorCode.none
    assert (first.generation_id, first.protocol_name, first.leader) == (1, "range", first.member_id)
    assert first.member_id.startswith("holdfast-wire-client-")
    assert [member.member_id for member in first.members] == [first.member_id]


@pytest.mark.parametrize("version", versions(JOIN_GROUP))
def test_a_refused_join_at_every_version(node: BareNode, version: int) -> None:
    member = BareMember(node, "group")
    answer = member.client.ask(JOIN_GROUP, version, **member.join_fields(session_timeout=1))
    assert answer.error_code is ErrorCode.invalid_session_timeout
    assert answer.protocol_name == (None if version >= 7 else "")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"group_id": "g" * 40_000}, ErrorCode.invalid_group_id),
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
        ({"protocols": []}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_type": ""}, ErrorCode.inconsistent_group_protocol),
        ({"session_timeout": 5_999}, ErrorCode.invalid_session_timeout),
        ({"session_timeout": 1_800_001}, ErrorCode.invalid_session_timeout),
    ],
)
def test_bad_joins_make_no_member(node: BareNode, fields: dict[str, Any], error: ErrorCode) -> None:
    member = BareMember(node, "group")
    answer = member.client.ask(JOIN_GROUP, 9, **{**member.join_fields(), **fields})
    assert answer.error_code is error
    described = member.client.ask(DESCRIBE_GROUPS, 5, groups=["group"]).groups[0]
    assert not described.members


@pytest.mark.parametrize("version", versions(SYNC_GROUP))
def test_sync_at_every_version(node: BareNode, version: int) -> None:
    member = BareMember(node, "group")
    member.join()
    answer = member.sync({member.member_id: b"all"}, version)
    assert answer.error_code is ErrorCode.none
    assert answer.assignment == b"all"
    if version >= 5:
        assert (answer.protocol_type, answer.protocol_name) == ("consumer", "range")


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"group_id": ""}, ErrorCode.invalid_group_id),
        ({"group_id": "unknown"}, ErrorCode.unknown_member_id),
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
        ({"generation_id": 7}, ErrorCode.illegal_generation),
        ({"protocol_name": "sticky"}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_type": "connect"}, ErrorCode.inconsistent_group_protocol),
        ({"protocol_name": None}, ErrorCode.inconsistent_group_protocol),
        ({"group_instance_id": "i"}, ErrorCode.unknown_member_id),
    ],
)
def test_bad_syncs_assign_nothing(node: BareNode, fields: dict[str, Any], error: ErrorCode) -> None:
    member = BareMember(node, "group")
    member.join()
    assert member.sync({member.member_id: b"all"}, **fields).error_code is error
    described = member.client.ask(DESCRIBE_GROUPS, groups=["group"]).groups[0]
    assert described.group_state == "CompletingRebalance"
    assert described.members[0].member_assignment == b""


def test_an_assignment_too_large_for_the_log_is_refused_and_the_group_goes_on(node: BareNode) -> None:
    member = BareMember(node, "group")
    member.join()
    assert member.sync({member.member_id: b"x" * 1_100_000}).error_code is ErrorCode.unknown_server_error
    assert member.beat() is ErrorCode.rebalance_in_progress
    member.settle_alone(b"less")
    assert member.generation == 2
    assert member.sync().assignment == b"less"


@pytest.mark.parametrize("version", versions(HEARTBEAT))
def test_heartbeat_at_every_version(ann: BareMember, version: int) -> None:
    assert ann.beat(version) is ErrorCode.none
    assert ann.beat(version, generation_id=7) is ErrorCode.illegal_generation
    assert ann.beat(version, member_id="nobody") is ErrorCode.unknown_member_id
    assert ann.beat(version, group_id="unknown") is ErrorCode.unknown_member_id
    assert ann.beat(version, group_id="") is ErrorCode.invalid_group_id


def test_a_silent_member_is_out_and_a_heard_one_is_not(node: BareNode, ann: BareMember) -> None:
    for _ in range(5):
        node.advance(9_000)
        assert ann.beat() is ErrorCode.none
    node.advance(10_000)
    assert ann.beat() is ErrorCode.unknown_member_id


@pytest.mark.parametrize("version", versions(LEAVE_GROUP))
def test_leave_at_every_version(ann: BareMember, version: int) -> None:
    answer = ann.leave(version)
    assert answer.error_code is ErrorCode.none
    if version >= 3:
        assert [(member.member_id, member.error_code) for member in answer.members] == [
            (ann.member_id, ErrorCode.none)
        ]
    again = ann.leave(version)
    gone = again.error_code if version < 3 else again.members[0].error_code
    assert gone is ErrorCode.unknown_member_id
    assert ann.client.ask(DESCRIBE_GROUPS, groups=["group"]).groups[0].group_state == "Empty"


def test_several_leave_at_once_and_each_is_answered(node: BareNode) -> None:
    members = [BareMember(node, "group", instance_id=name) for name in ("a", "b")]
    joining = [member.begin_join() for member in members]
    node.settle()
    members[0].joined(joining[0])
    members[0].join()
    members[1].joined(joining[1])
    answer = members[0].client.ask(
        LEAVE_GROUP,
        group_id="group",
        members=[
            {"member_id": "", "group_instance_id": "b"},
            {"member_id": "nobody", "group_instance_id": "a"},
            {"member_id": "", "group_instance_id": "c"},
            {"member_id": "nobody"},
        ],
    )
    assert [member.error_code for member in answer.members] == [
        ErrorCode.none,
        ErrorCode.fenced_instance_id,
        ErrorCode.unknown_member_id,
        ErrorCode.unknown_member_id,
    ]
    assert members[0].beat() is ErrorCode.rebalance_in_progress


# Positions


@pytest.mark.parametrize("version", versions(OFFSET_COMMIT))
def test_commit_at_every_version(ann: BareMember, version: int) -> None:
    assert ann.commit({("orders", 0): 5, ("orders", 1): 6}, version) == [ErrorCode.none] * 2
    assert ann.committed_offsets() == {("orders", 0): 5, ("orders", 1): 6}


@pytest.mark.parametrize("version", [2, 9, 10])
def test_commits_to_what_does_not_exist_are_refused_and_the_others_stored(
    node: BareNode, ann: BareMember, version: int
) -> None:
    fields = ann.commit_fields({("orders", 7): 1, ("orders", 0): 5, ("nowhere", 0): 2})
    fields["topics"][1]["topic_id"] = NOWHERE
    answer = ann.client.ask(OFFSET_COMMIT, version, **fields)
    codes = [[partition.error_code for partition in topic.partitions] for topic in answer.topics]
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.unknown_topic_or_partition
    assert codes == [[ErrorCode.unknown_topic_or_partition, ErrorCode.none], [unknown]]
    assert ann.committed_offsets() == {("orders", 0): 5}


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"generation_id_or_member_epoch": 7}, ErrorCode.illegal_generation),
        ({"generation_id_or_member_epoch": -1}, ErrorCode.illegal_generation),
        ({"member_id": "nobody"}, ErrorCode.unknown_member_id),
        ({"member_id": "", "generation_id_or_member_epoch": -1}, ErrorCode.unknown_member_id),
        ({"group_instance_id": "i"}, ErrorCode.unknown_member_id),
        ({"group_id": "unknown"}, ErrorCode.group_id_not_found),
        ({"group_id": "g" * 40_000}, ErrorCode.invalid_group_id),
        ({"metadata": "m" * 4097}, ErrorCode.offset_metadata_too_large),
    ],
)
def test_bad_commits_store_nothing(ann: BareMember, fields: dict[str, Any], error: ErrorCode) -> None:
    ann.commit({("orders", 0): 5})
    assert ann.commit({("orders", 0): 9}, **fields) == [error]
    assert ann.committed_offsets() == {("orders", 0): 5}


def test_an_unknown_group_is_an_illegal_generation_to_older_clients(ann: BareMember) -> None:
    assert ann.commit({("orders", 0): 9}, 8, group_id="unknown") == [ErrorCode.illegal_generation]


@pytest.mark.parametrize("version", versions(OFFSET_FETCH))
def test_fetch_at_every_version(node: BareNode, ann: BareMember, version: int) -> None:
    ann.commit({("orders", 0): 5}, metadata="so far")
    facts = node.node.groups.topics.by_name("orders")
    assert facts is not None
    topics: list[dict[str, Any]] = [
        {"name": "orders", "topic_id": facts.topic_id, "partition_indexes": [0, 1]},
        {"name": "nowhere", "topic_id": NOWHERE, "partition_indexes": [3]},
    ]
    for topic in topics:
        topic.pop("name" if version >= 10 else "topic_id")
    if version >= 8:
        answer = ann.client.ask(
            OFFSET_FETCH,
            version,
            groups=[{"group_id": "group", "topics": topics}, {"group_id": "other", "topics": topics[:1]}],
        )
        group, other = answer.groups
        assert other.topics[0].partitions[0].committed_offset == -1
    else:
        group = ann.client.ask(OFFSET_FETCH, version, group_id="group", topics=topics)
    orders, nowhere = group.topics
    first, second = orders.partitions
    assert (first.committed_offset, first.metadata, first.error_code) == (5, "so far", ErrorCode.none)
    assert (second.committed_offset, second.metadata, second.error_code) == (-1, "", ErrorCode.none)
    if version >= 5:
        assert (first.committed_leader_epoch, second.committed_leader_epoch) == (0, -1)
    unknown = ErrorCode.unknown_topic_id if version >= 10 else ErrorCode.none
    assert (nowhere.partitions[0].committed_offset, nowhere.partitions[0].error_code) == (-1, unknown)


@pytest.mark.parametrize("version", [2, 7, 8, 10])
def test_no_topics_named_means_all(ann: BareMember, version: int) -> None:
    ann.commit({("orders", 0): 5, ("orders", 1): 6})
    if version >= 8:
        group = ann.client.ask(OFFSET_FETCH, version, groups=[{"group_id": "group", "topics": None}]).groups[
            0
        ]
    else:
        group = ann.client.ask(OFFSET_FETCH, version, group_id="group", topics=None)
    (orders,) = group.topics
    assert [partition.committed_offset for partition in orders.partitions] == [5, 6]


def test_committed_offsets_of_a_topic_go_with_it(node: BareNode, ann: BareMember) -> None:
    ann.commit({("orders", 0): 5})
    ann.client.ask(20, 5, topic_names=["orders"], timeout=5000)
    ann.client.create_topic("orders", 2)
    assert ann.committed_offsets() == {}
    assert BareMember(node.kill(), "group").committed_offsets() == {}


def test_a_simple_group_commits_without_members(node: BareNode) -> None:
    nobody = BareMember(node, "simple")
    assert nobody.commit({("orders", 0): 5}) == [ErrorCode.none]
    described = nobody.client.ask(DESCRIBE_GROUPS, groups=["simple"]).groups[0]
    assert (described.error_code, described.group_state) == (ErrorCode.none, "Empty")
    again = BareMember(node.kill(), "simple")
    assert again.committed_offsets() == {("orders", 0): 5}


@pytest.mark.parametrize("group_id", ["", "with spaces / and * signs", "ünïcödé 🦉"])
def test_committed_offsets_of_groups_with_odd_names(node: BareNode, group_id: str) -> None:
    nobody = BareMember(node, group_id)
    assert nobody.commit({("orders", 0): 5}) == [ErrorCode.none]
    assert nobody.committed_offsets() == {("orders", 0): 5}


# Looking after groups


@pytest.mark.parametrize("version", versions(DESCRIBE_GROUPS))
def test_describe_at_every_version(ann: BareMember, version: int) -> None:
    answer = ann.client.ask(DESCRIBE_GROUPS, version, groups=["group", "unknown"])
    group, unknown = answer.groups
    assert (group.group_state, group.protocol_type, group.protocol_data) == ("Stable", "consumer", "range")
    (member,) = group.members
    assert (member.member_id, member.client_id) == (ann.member_id, "holdfast-wire-client")
    assert (member.client_host, member.member_assignment) == ("/10.0.0.9", b"all")
    assert unknown.group_state == "Dead"
    if version >= 6:
        assert unknown.error_code is ErrorCode.group_id_not_found
        assert unknown.error_message == "Group unknown not found."
    else:
        assert unknown.error_code is ErrorCode.none


@pytest.mark.parametrize("asked", [True, False])
def test_authorised_operations_when_asked(ann: BareMember, asked: bool) -> None:
    answer = ann.client.ask(DESCRIBE_GROUPS, groups=["group"], include_authorized_operations=asked)
    assert answer.groups[0].authorized_operations == (3400 if asked else -(2**31))


@pytest.mark.parametrize("version", versions(LIST_GROUPS))
def test_list_at_every_version(node: BareNode, ann: BareMember, version: int) -> None:
    BareMember(node, "simple").commit({("orders", 0): 5})
    groups = {group.group_id: group for group in ann.client.ask(LIST_GROUPS, version).groups}
    assert groups.keys() == {"group", "simple"}
    assert (groups["group"].protocol_type, groups["simple"].protocol_type) == ("consumer", "")
    if version >= 4:
        assert (groups["group"].group_state, groups["simple"].group_state) == ("Stable", "Empty")
    if version >= 5:
        assert groups["group"].group_type == "classic"


@pytest.mark.parametrize(
    ("states", "types", "found"),
    [
        ([], [], {"group", "simple"}),
        (["STABLE"], [], {"group"}),
        ([" empty ", "Stable"], [], {"group", "simple"}),
        (["Sleeping"], [], set()),
        ([], ["Classic"], {"group", "simple"}),
        ([], ["consumer"], set()),
        ([], ["bogus"], set()),
        (["Empty"], ["classic"], {"simple"}),
    ],
)
def test_list_filters(
    node: BareNode, ann: BareMember, states: list[str], types: list[str], found: set[str]
) -> None:
    BareMember(node, "simple").commit({("orders", 0): 5})
    answer = ann.client.ask(LIST_GROUPS, states_filter=states, types_filter=types)
    assert {group.group_id for group in answer.groups} == found


@pytest.mark.parametrize("version", versions(DELETE_GROUPS))
def test_delete_groups(node: BareNode, ann: BareMember, version: int) -> None:
    BareMember(node, "simple").commit({("orders", 0): 5})
    names = ["group", "simple", "unknown"]
    answer = ann.client.ask(DELETE_GROUPS, version, groups_names=names)
    assert [(result.group_id, result.error_code) for result in answer.results] == [
        ("group", ErrorCode.non_empty_group),
        ("simple", ErrorCode.none),
        ("unknown", ErrorCode.group_id_not_found),
    ]
    assert ann.beat() is ErrorCode.none
    assert BareMember(node, "simple").committed_offsets() == {}
    assert BareMember(node.kill(), "simple").committed_offsets() == {}


def test_delete_offsets(node: BareNode, client: BareClient) -> None:
    ann = BareMember(node, "group")
    client.create_topic("payments", 1)
    ann.join(topics=["orders"])
    ann.sync({ann.member_id: b"all"})
    ann.commit({("orders", 0): 5, ("payments", 0): 6})
    topics = [
        {"name": name, "partitions": [{"partition_index": 0}, {"partition_index": 9}]}
        for name in ("orders", "payments", "nowhere")
    ]
    answer = client.ask(OFFSET_DELETE, group_id="group", topics=topics)
    outcomes = {
        (topic.name, partition.partition_index): partition.error_code
        for topic in answer.topics
        for partition in topic.partitions
    }
    assert outcomes == {
        ("orders", 0): ErrorCode.group_subscribed_to_topic,
        ("payments", 0): ErrorCode.none,
        **{(name, 9): ErrorCode.unknown_topic_or_partition for name in ("orders", "payments", "nowhere")},
        ("nowhere", 0): ErrorCode.unknown_topic_or_partition,
    }
    assert ann.committed_offsets() == {("orders", 0): 5}
    assert client.ask(OFFSET_DELETE, group_id="", topics=[]).error_code is ErrorCode.invalid_group_id
    assert client.ask(OFFSET_DELETE, group_id="no", topics=[]).error_code is ErrorCode.group_id_not_found


def test_groups_whose_partition_is_gone_are_forgotten_and_come_back(node: BareNode, ann: BareMember) -> None:
    ann.commit({("orders", 0): 5})
    # No client can ask for this.
    topic_id = node.node.metadata.image.topics["__consumer_offsets"].topic_id
    node.node.metadata.append([RemoveTopic(topic_id=topic_id)], node.clock.now())
    node.settle()
    assert ann.beat() is ErrorCode.unknown_member_id
    assert ann.committed_offsets() == {}
    ann.member_id = ""
    ann.settle_alone()
    assert ann.commit({("orders", 0): 6}) == [ErrorCode.none]
