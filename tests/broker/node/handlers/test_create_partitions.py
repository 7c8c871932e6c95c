"""CreatePartitions."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode

CREATE_PARTITIONS = 37


def more(name: str, count: int, assignments: list[list[int]] | None = None) -> dict[str, Any]:
    placed = None if assignments is None else [{"broker_ids": brokers} for brokers in assignments]
    return {"name": name, "count": count, "assignments": placed}


@pytest.mark.parametrize("version", range(4))
def test_partitions_are_added_in_every_version(desk: Any, version: int) -> None:
    desk.create("orders", 2)
    topics = [more("orders", 5), more("unknown", 2)]
    added, unknown = desk.ask(CREATE_PARTITIONS, version, topics=topics, timeout=1000).results
    assert (added.name, added.error_code, added.error_message) == ("orders", ErrorCode.none, None)
    assert unknown.error_code == ErrorCode.unknown_topic_or_partition
    assert len(desk.node.metadata.image.topics["orders"].partitions) == 5
    assert desk.node.partitions.get("orders", 4) is not None


def test_impossible_wishes_are_refused_one_by_one(desk: Any) -> None:
    for name in ("same", "fewer", "place", "fine"):
        desk.create(name, 2)
    topics = [more("same", 2), more("fewer", 1), more("place", 3, [[9]]), more("fine", 3, [[1]])]
    answer = desk.ask(CREATE_PARTITIONS, topics=topics, timeout=1000)
    assert [result.error_code for result in answer.results] == [
        ErrorCode.invalid_partitions,
        ErrorCode.invalid_partitions,
        ErrorCode.invalid_replica_assignment,
        ErrorCode.none,
    ]
    assert {len(topic.partitions) for topic in desk.node.metadata.image.topics.values()} == {2, 3}


def test_validating_adds_nothing(desk: Any) -> None:
    desk.create("orders")
    (result,) = desk.ask(
        CREATE_PARTITIONS, topics=[more("orders", 9)], timeout=1000, validate_only=True
    ).results
    assert result.error_code == ErrorCode.none
    assert len(desk.node.metadata.image.topics["orders"].partitions) == 1


def test_a_topic_named_twice_is_left_alone(desk: Any) -> None:
    desk.create("orders")
    topics = [more("orders", 2), more("orders", 3)]
    (result,) = desk.ask(CREATE_PARTITIONS, topics=topics, timeout=1000).results
    assert result.error_code == ErrorCode.invalid_request
    assert len(desk.node.metadata.image.topics["orders"].partitions) == 1


def test_a_request_without_time_is_not_begun(desk: Any) -> None:
    desk.create("orders")
    (result,) = desk.ask(CREATE_PARTITIONS, topics=[more("orders", 2)], timeout=0).results
    assert result.error_code == ErrorCode.request_timed_out
    assert len(desk.node.metadata.image.topics["orders"].partitions) == 1
