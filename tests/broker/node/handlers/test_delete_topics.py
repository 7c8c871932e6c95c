"""DeleteTopics, by name and by id."""

from __future__ import annotations

from typing import Any
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

DELETE_TOPICS = 20


def by_name(*names: str) -> list[dict[str, Any]]:
    return [{"name": name} for name in names]


@pytest.mark.parametrize("version", range(1, 7))
def test_a_topic_is_deleted_by_name_in_every_version(desk: Any, version: int) -> None:
    topic_id = desk.create("orders").topic_id
    wanted = (
        {"topics": by_name("orders", "unknown")} if version >= 6 else {"topic_names": ["orders", "unknown"]}
    )
    gone, unknown = desk.ask(DELETE_TOPICS, version, **wanted, timeout=1000).responses
    assert (gone.name, gone.error_code) == ("orders", ErrorCode.none)
    assert (unknown.name, unknown.error_code) == ("unknown", ErrorCode.unknown_topic_or_partition)
    if version >= 6:
        assert gone.topic_id == topic_id
    assert desk.node.metadata.image.topics == {}


def test_a_topic_is_deleted_by_id_and_its_name_is_told(desk: Any) -> None:
    topic_id = desk.create("orders").topic_id
    answer = desk.ask(DELETE_TOPICS, 6, topics=[{"name": None, "topic_id": topic_id}], timeout=1000)
    (gone,) = answer.responses
    assert (gone.name, gone.topic_id, gone.error_code) == ("orders", topic_id, ErrorCode.none)
    assert desk.node.metadata.image.topics == {}


def test_bad_ways_to_name_a_topic_are_refused(desk: Any) -> None:
    topic_id = desk.create("orders").topic_id
    wanted = [
        {"name": None},
        {"name": "orders", "topic_id": topic_id},
        {"name": None, "topic_id": UUID(int=99)},
    ]
    answer = desk.ask(DELETE_TOPICS, 6, topics=wanted, timeout=1000)
    assert [(r.name, r.topic_id, r.error_code) for r in answer.responses] == [
        (None, None, ErrorCode.invalid_request),
        ("orders", topic_id, ErrorCode.invalid_request),
        (None, UUID(int=99), ErrorCode.unknown_topic_id),
    ]
    assert set(desk.node.metadata.image.topics) == {"orders"}


def test_a_topic_named_twice_stays(desk: Any) -> None:
    desk.create("orders")
    (refused,) = desk.ask(DELETE_TOPICS, 6, topics=by_name("orders", "orders"), timeout=1000).responses
    assert refused.error_code == ErrorCode.invalid_request
    (refused,) = desk.ask(DELETE_TOPICS, 5, topic_names=["orders", "orders"], timeout=1000).responses
    assert refused.error_code == ErrorCode.invalid_request
    assert set(desk.node.metadata.image.topics) == {"orders"}


def test_a_topic_named_by_name_and_by_id_stays(desk: Any) -> None:
    topic_id = desk.create("orders").topic_id
    desk.create("other")
    wanted = [*by_name("orders", "other"), {"name": None, "topic_id": topic_id}]
    answer = desk.ask(DELETE_TOPICS, 6, topics=wanted, timeout=1000)
    assert [(r.name, r.error_code) for r in answer.responses] == [
        ("orders", ErrorCode.invalid_request),
        ("other", ErrorCode.none),
        ("orders", ErrorCode.invalid_request),
    ]
    assert set(desk.node.metadata.image.topics) == {"orders"}


@pytest.mark.parametrize(
    ("version", "code"), [(1, ErrorCode.invalid_request), (6, ErrorCode.topic_deletion_disabled)]
)
def test_deletion_can_be_disabled(make_desk: Any, version: int, code: ErrorCode) -> None:
    desk = make_desk({"delete.topic.enable": "false"})
    desk.create("orders")
    wanted = {"topics": by_name("orders")} if version >= 6 else {"topic_names": ["orders"]}
    (refused,) = desk.ask(DELETE_TOPICS, version, **wanted, timeout=1000).responses
    assert refused.error_code == code
    assert set(desk.node.metadata.image.topics) == {"orders"}


def test_a_request_without_time_is_not_begun(desk: Any) -> None:
    desk.create("orders")
    (refused,) = desk.ask(DELETE_TOPICS, 6, topics=by_name("orders"), timeout=0).responses
    assert refused.error_code == ErrorCode.request_timed_out
    assert set(desk.node.metadata.image.topics) == {"orders"}


def test_files_go_only_once_the_deletion_is_durable(desk: Any) -> None:
    desk.create("orders")
    desk.begin(DELETE_TOPICS, 6, topics=by_name("orders"), timeout=1000)
    (doomed,) = [name for name in desk.disk.list("/data") if name.startswith("orders-0.")]
    assert desk.disk.exists(f"/data/{doomed}/00000000000000000000.log")
    assert desk.sent == []
    desk.settle()
    assert not [name for name in desk.disk.list("/data") if name.startswith("orders")]
    assert len(desk.sent) == 1


def test_a_deleted_topic_stays_deleted_after_a_restart(desk: Any) -> None:
    desk.create("orders")
    desk.create("kept")
    desk.ask(DELETE_TOPICS, 6, topics=by_name("orders"), timeout=1000)
    assert set(desk.restart().node.metadata.image.topics) == {"kept"}
