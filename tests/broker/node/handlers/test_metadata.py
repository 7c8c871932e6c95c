"""Metadata, at every version."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.saying import Level

METADATA = 3
NOT_ASKED = -(2**31)


def asked(version: int, *names: str, **more: Any) -> dict[str, Any]:
    fields: dict[str, Any] = {"topics": [{"name": name} for name in names]}
    if version >= 4:
        fields["allow_auto_topic_creation"] = True
    return {**fields, **more}


@pytest.mark.parametrize("version", range(14))
def test_topics_and_brokers_are_told_in_every_version(desk: Any, version: int) -> None:
    desk.create("orders", 2)
    answer = desk.ask(METADATA, version, **asked(version, "orders", "unknown", "bad name"))
    (broker,) = answer.brokers
    assert (broker.node_id, broker.host, broker.port) == (1, "127.0.0.1", 9092)
    orders, unknown, bad = answer.topics
    assert (orders.name, orders.error_code) == ("orders", ErrorCode.none)
    assert (unknown.name, unknown.error_code) == ("unknown", ErrorCode.unknown_topic_or_partition)
    assert (bad.name, bad.error_code) == ("bad name", ErrorCode.invalid_topic_exception)
    for index, partition in enumerate(orders.partitions):
        assert (partition.partition_index, partition.leader_id, partition.error_code) == (index, 1, 0)
        assert partition.replica_nodes == partition.isr_nodes == (1,)
        if version >= 7:
            assert partition.leader_epoch == 0
    if version >= 1:
        assert answer.controller_id == 1
    if version >= 2:
        assert answer.cluster_id == desk.node.identity.cluster_id
    if version >= 10:
        assert orders.topic_id == desk.node.metadata.image.topics["orders"].topic_id


def test_in_version_0_no_topics_means_all(desk: Any) -> None:
    desk.create("a")
    desk.create("b")
    assert {topic.name for topic in desk.ask(METADATA, 0, topics=[]).topics} == {"a", "b"}


@pytest.mark.parametrize("version", range(1, 14))
def test_later_null_means_all_and_none_means_none(desk: Any, version: int) -> None:
    desk.create("a")
    assert [topic.name for topic in desk.ask(METADATA, version, topics=None).topics] == ["a"]
    assert desk.ask(METADATA, version, topics=[]).topics == ()


def test_a_topic_asked_for_twice_is_told_once(desk: Any) -> None:
    topic_id = desk.create("orders").topic_id
    by_name_and_id = [{"name": "orders"}, {"name": "orders"}, {"name": None, "topic_id": topic_id}]
    assert len(desk.ask(METADATA, 12, topics=by_name_and_id).topics) == 1


@pytest.mark.parametrize("version", [12, 13])
def test_topics_are_found_by_id(desk: Any, version: int) -> None:
    topic_id = desk.create("orders").topic_id
    stranger = UUID(int=99)
    answer = desk.ask(
        METADATA,
        version,
        topics=[{"name": None, "topic_id": topic_id}, {"name": None, "topic_id": stranger}],
    )
    found, missing = answer.topics
    assert (found.name, found.topic_id, found.error_code) == ("orders", topic_id, ErrorCode.none)
    assert (missing.name, missing.topic_id) == (None, stranger)
    assert missing.error_code == ErrorCode.unknown_topic_id


@pytest.mark.parametrize("version", [10, 11])
def test_versions_10_and_11_refuse_ids(desk: Any, version: int) -> None:
    topic_id = desk.create("orders").topic_id
    (topic,) = desk.ask(METADATA, version, topics=[{"name": None, "topic_id": topic_id}]).topics
    assert topic.error_code == ErrorCode.invalid_request


def test_a_topic_without_name_and_id_is_refused(desk: Any) -> None:
    (topic,) = desk.ask(METADATA, 12, topics=[{"name": None}]).topics
    assert topic.error_code == ErrorCode.invalid_request


@pytest.mark.parametrize("version", [8, 9, 10])
def test_authorised_operations_are_told_when_asked_for(desk: Any, version: int) -> None:
    desk.create("orders")
    plain = desk.ask(METADATA, version, **asked(version, "orders"))
    assert plain.cluster_authorized_operations == NOT_ASKED
    assert plain.topics[0].topic_authorized_operations == NOT_ASKED
    full = desk.ask(
        METADATA,
        version,
        **asked(version, "orders"),
        include_cluster_authorized_operations=True,
        include_topic_authorized_operations=True,
    )
    # The numbers Apache Kafka answers without an authorizer.
    assert full.cluster_authorized_operations == 8096
    assert full.topics[0].topic_authorized_operations == 3576


def test_internal_topics_are_marked(desk: Any) -> None:
    desk.create("__consumer_offsets")
    offsets, state = desk.ask(METADATA, 13, **asked(13, "__consumer_offsets", "__transaction_state")).topics
    assert offsets.is_internal
    assert state.is_internal
    assert state.error_code == ErrorCode.unknown_topic_or_partition


def test_asking_does_not_create_and_the_operator_is_told_once(desk: Any) -> None:  # HF207
    for _ in range(3):
        desk.ask(METADATA, 13, **asked(13, "mistyped"))
    assert desk.node.metadata.image.topics == {}
    told = [line for line in desk.said if "mistyped" in line and line.level > Level.DEBUG]
    assert len(told) == 1
    assert "desk" in told[0]
    assert "10.0.0.9" in told[0]


def test_what_is_told_is_bounded(desk: Any) -> None:
    for start in range(0, 1500, 500):
        desk.ask(METADATA, 13, **asked(13, *(f"topic-{number}" for number in range(start, start + 500))))
    assert sum("which does not exist" in line for line in desk.said) == 1000


def test_with_auto_creation_asking_creates(make_desk: Any) -> None:
    desk = make_desk({"auto.create.topics.enable": "true", "num.partitions": "3"})
    (topic,) = desk.ask(METADATA, 13, **asked(13, "fresh")).topics
    assert topic.error_code == ErrorCode.none
    assert len(topic.partitions) == 3
    (again,) = desk.ask(METADATA, 0, **asked(0, "older")).topics
    assert again.error_code == ErrorCode.none


def test_with_auto_creation_a_client_can_still_ask_without_creating(make_desk: Any) -> None:
    desk = make_desk({"auto.create.topics.enable": "true"})
    (topic,) = desk.ask(METADATA, 13, **asked(13, "fresh", allow_auto_topic_creation=False)).topics
    assert topic.error_code == ErrorCode.unknown_topic_or_partition
    names = ("__cluster_metadata", "__consumer_offsets", "bad name")
    for topic in desk.ask(METADATA, 13, **asked(13, *names)).topics:
        assert topic.error_code != ErrorCode.none
    assert desk.node.metadata.image.topics == {}


def test_auto_creation_refuses_a_name_that_collides(make_desk: Any) -> None:
    desk = make_desk({"auto.create.topics.enable": "true"})
    desk.create("a.b")
    (topic,) = desk.ask(METADATA, 13, **asked(13, "a_b")).topics
    assert topic.error_code == ErrorCode.invalid_topic_exception


def test_a_partition_in_an_offline_directory_has_no_leader(desk: Any) -> None:
    desk.create("orders")
    desk.node.directories[0].take_offline(OSError("gone"))
    (topic,) = desk.ask(METADATA, 13, **asked(13, "orders")).topics
    (partition,) = topic.partitions
    assert (partition.error_code, partition.leader_id) == (ErrorCode.leader_not_available, -1)
    assert partition.offline_replicas == (1,)
