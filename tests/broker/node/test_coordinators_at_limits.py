"""Names, numbers and settings at their limits: coordinators answer, and keep what they accepted over a restart."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from holdfast.config.catalog import BROKER
from holdfast.errors import ConfigError
from holdfast.testing.bare_clients import (
    BareMember,
    TransactionalProducer,
    committed_offset_of,
    committed_values,
)
from holdfast.testing.bare_node import BareNode

OFFSET_COMMIT, OFFSET_FETCH, FIND_COORDINATOR, JOIN_GROUP, HEARTBEAT, LEAVE_GROUP, SYNC_GROUP = range(8, 15)
DESCRIBE_GROUPS, LIST_GROUPS, INIT_PRODUCER_ID, ADD_PARTITIONS_TO_TXN, ADD_OFFSETS_TO_TXN = 15, 16, 22, 24, 25
END_TXN, TXN_OFFSET_COMMIT, DELETE_GROUPS, DESCRIBE_TRANSACTIONS, LIST_TRANSACTIONS = 26, 28, 42, 65, 66
CONSUMER_GROUP_HEARTBEAT, CONSUMER_GROUP_DESCRIBE = 68, 69
ONE_SHARD = {"offsets.topic.num.partitions": "1", "transaction.state.log.num.partitions": "1"}
OLD_OFFSET_FETCH = 5
"""Has room for as much as most records have."""
JOINING = {
    "group_id": "c",
    "member_id": "c",
    "member_epoch": 0,
    "rebalance_timeout": 10_000,
    "subscribed_topic_names": ["t"],
    "topic_partitions": [],
}
Request = tuple[int, int, dict[str, Any]]
"""API, version and fields."""
ROOM = 2**15 - 1
"""Bytes of a name in most records."""

texts = st.sampled_from(("a", "b")) | st.builds(
    lambda letter, size, more: letter * (size // len(letter.encode()) + more),
    st.sampled_from(("x", "ü", "\U0001f600")),
    st.sampled_from((0, 249, ROOM - 37, ROOM, 2 * ROOM)),
    st.integers(0, 1),
)
shorts, ints, longs = (
    st.sampled_from((0, 1, -1, 2 ** (bits - 1) - 1, -(2 ** (bits - 1)))) for bits in (16, 32, 64)
)


def positions(draw: st.DrawFn) -> list[dict[str, Any]]:
    return [
        {
            "partition_index": draw(st.sampled_from((0, -1, 2**31 - 1))),
            "committed_offset": draw(longs),
            "committed_leader_epoch": draw(ints),
            "committed_metadata": draw(texts),
        }
    ]


@st.composite
def requests(draw: st.DrawFn) -> Request:
    """A request of the coordinators, with its version: what it says is at a limit, or beyond."""
    group = {"group_id": draw(texts)}
    member = {"member_id": draw(texts), "group_instance_id": draw(st.none() | texts)}
    producer = {
        "transactional_id": draw(texts),
        "producer_id": draw(longs),
        "producer_epoch": draw(shorts),
    }
    topics = [{"name": "t", "partitions": positions(draw)}]
    partitions = [{"name": draw(st.sampled_from(("t", "t" * 249, "t" * 250))), "partitions": [draw(ints)]}]
    protocols = [{"name": draw(texts), "metadata": b"\0\0\0\0\0\0\0\0\0\0"}]
    generation = {"generation_id": draw(ints)}
    kinds: list[Request] = [
        (
            OFFSET_COMMIT,
            9,
            {**group, **member, "generation_id_or_member_epoch": -1, "topics": topics},
        ),
        (OFFSET_FETCH, 9, {"groups": [{**group, "member_id": member["member_id"], "topics": None}]}),
        (
            FIND_COORDINATOR,
            6,
            {"key_type": draw(st.integers(0, 2)), "coordinator_keys": [draw(texts)]},
        ),
        (
            JOIN_GROUP,
            9,
            {
                **group,
                **member,
                "session_timeout": 10_000,
                "rebalance_timeout": draw(st.sampled_from((1, 2**31 - 1))),
                "protocol_type": draw(texts),
                "protocols": protocols,
                "reason": draw(texts),
            },
        ),
        (HEARTBEAT, 4, {**group, **member, **generation}),
        (LEAVE_GROUP, 5, {**group, "members": [member]}),
        (SYNC_GROUP, 5, {**group, **member, **generation, "assignments": []}),
        (DESCRIBE_GROUPS, 6, {"groups": [draw(texts)]}),
        (LIST_GROUPS, 5, {"states_filter": [draw(texts)], "types_filter": [draw(texts)]}),
        (DELETE_GROUPS, 2, {"groups_names": [draw(texts)]}),
        (
            INIT_PRODUCER_ID,
            5,
            {**producer, "transaction_timeout": draw(st.sampled_from((0, 1, 2**31 - 1)))},
        ),
        (
            ADD_PARTITIONS_TO_TXN,
            5,
            {"transactions": [{**producer, "verify_only": False, "topics": partitions}]},
        ),
        (ADD_OFFSETS_TO_TXN, 4, {**producer, **group}),
        (END_TXN, 5, {**producer, "committed": draw(st.booleans())}),
        (TXN_OFFSET_COMMIT, 5, {**producer, **group, **member, **generation, "topics": topics}),
        (DESCRIBE_TRANSACTIONS, 0, {"transactional_ids": [draw(texts)]}),
        (
            LIST_TRANSACTIONS,
            2,
            {"transactional_id_pattern": draw(texts), "duration_filter": draw(longs)},
        ),
        (
            CONSUMER_GROUP_HEARTBEAT,
            1,
            {
                **group,
                "member_id": member["member_id"],
                "member_epoch": draw(st.sampled_from((0, -1, -2, 2**31 - 1))),
                "instance_id": member["group_instance_id"],
                "rack_id": draw(st.none() | texts),
                "rebalance_timeout": draw(st.sampled_from((1, 2**31 - 1))),
                "subscribed_topic_names": draw(st.none() | st.lists(texts, max_size=1)),
                "subscribed_topic_regex": draw(st.none() | texts),
                "server_assignor": draw(st.none() | texts),
                "topic_partitions": [],
            },
        ),
        (CONSUMER_GROUP_DESCRIBE, 1, {"group_ids": [draw(texts)]}),
    ]
    return draw(st.sampled_from(kinds))


@settings(max_examples=12)
@given(asked=st.lists(requests(), min_size=5, max_size=30), metadata_max=st.sampled_from((4096, 2**31 - 1)))
def test_names_and_numbers_at_their_limits_are_answered_and_kept(
    asked: list[Request], metadata_max: int
) -> None:
    node = BareNode({**ONE_SHARD, "offset.metadata.max.bytes": str(metadata_max)})
    client = node.connect()
    client.create_topic("t")
    client.create_topic("t" * 249)
    for api_key, version, fields in asked:
        client = node.connect()
        client.begin(api_key, version, **fields)
        node.settle()
        assert not client.closed, (api_key, client.closed)
    for group in ("a", "b"):
        node.connect().ask(OFFSET_FETCH, OLD_OFFSET_FETCH, group_id=group, topics=None)
    before = known(node)
    said = node.said
    node = node.kill()
    assert not [line for line in said + node.said if "defect" in line or "coordinates nothing" in line]
    assert known(node) == before


def known(node: BareNode) -> tuple[Any, ...]:
    """All positions and transactional ids."""
    return (
        [
            (group, key, position.offset, position.metadata)
            for coordinator in node.node.groups
            for group in sorted(coordinator.machine.offsets.groups())
            for key, position in coordinator.machine.offsets.of_group(group).items()
        ],
        sorted(known for coordinator in node.node.transactions for known in coordinator.machine),
    )


@pytest.mark.parametrize(
    ("letter", "count", "expected"),
    [
        ("x", ROOM, ErrorCode.none),
        ("x", ROOM + 1, ErrorCode.offset_metadata_too_large),
        ("ü", ROOM // 2, ErrorCode.none),
        ("ü", ROOM // 2 + 1, ErrorCode.offset_metadata_too_large),
    ],
)
def test_what_goes_with_a_committed_offset_has_room_in_every_answer(
    letter: str, count: int, expected: ErrorCode
) -> None:
    node = BareNode({**ONE_SHARD, "offset.metadata.max.bytes": str(2**31 - 1)})
    client = node.connect()
    client.create_topic("t")
    producer = TransactionalProducer(node.connect())
    assert producer.init() is ErrorCode.none
    partition = {"partition_index": 0, "committed_offset": 7, "committed_metadata": letter * count}
    topics = [{"name": "t", "partitions": [partition]}]
    who = {"group_id": "a", "generation_id_or_member_epoch": -1, "member_id": ""}
    answer = client.ask(OFFSET_COMMIT, 9, **who, topics=topics)
    assert answer.topics[0].partitions[0].error_code is expected
    answer = client.ask(OFFSET_FETCH, OLD_OFFSET_FETCH, group_id="a", topics=None)
    assert [each.committed_offset for topic in answer.topics for each in topic.partitions] == (
        [7] if expected is ErrorCode.none else []
    )


AT_LIMITS = [
    (name, value)
    for name, setting in sorted(BROKER.items())
    if setting.acted_on
    and name.startswith(("transaction", "offset", "group."))
    and type(setting.default) is int
    and "num.partitions" not in name
    for value in (1, 2**31 - 1)
]


@pytest.mark.parametrize(("name", "value"), AT_LIMITS)
def test_settings_at_their_limits_lose_nothing(name: str, value: int) -> None:
    try:
        node = BareNode({**ONE_SHARD, name: str(value)})
    except ConfigError:
        return  # it does not go with the others
    client = node.connect()
    client.create_topic("t")
    who = {"group_id": "a", "generation_id_or_member_epoch": -1, "member_id": ""}
    position = {"partition_index": 0, "committed_offset": 7, "committed_metadata": ""}
    topics = [{"name": "t", "partitions": [position]}]
    answer = client.ask(OFFSET_COMMIT, 9, **who, topics=topics)
    assert answer.topics[0].partitions[0].error_code is ErrorCode.none
    member = BareMember(node, "b")
    member.begin_join()
    member.client.begin(CONSUMER_GROUP_HEARTBEAT, 1, **JOINING)
    producer = TransactionalProducer(node.connect())
    timeout_ms = min(60_000, node.node.settings.broker.transaction_max_timeout_ms)
    assert producer.init(transaction_timeout=timeout_ms) is ErrorCode.none
    assert producer.produce("t", 0, b"kept") is ErrorCode.none
    assert producer.end(is_commit=True) is ErrorCode.none
    for _ in range(3):
        node.advance(10_000)
        node.settle()
    node = node.kill()
    client = node.connect()
    assert committed_offset_of(client, "a", "t") == 7
    assert committed_values(client, "t") == [b"kept"]


def test_an_internal_topic_that_cannot_be_made_is_told_to_the_operator() -> None:
    node = BareNode({"offsets.topic.num.partitions": "10001"})
    client = node.connect()
    client.create_topic("t")
    for _ in range(2):
        answer = client.ask(FIND_COORDINATOR, 4, key_type=0, coordinator_keys=["a"])
        assert answer.coordinators[0].error_code is ErrorCode.coordinator_not_available
    (line,) = (line for line in node.said if "cannot be made" in line)
    assert "10001 partitions" in line
