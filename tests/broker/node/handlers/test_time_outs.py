"""The time-outs of administrative requests: an answer that may not leave in time is one that says so."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareClient, BareNode

TIMEOUT_MS = 7_000

Request = tuple[int, int, dict[str, Any]]


def codes_of(part: Any) -> list[ErrorCode]:
    """The error codes of every item of an answer."""
    if isinstance(part, tuple):
        return [code for item in part for code in codes_of(item)]
    names = getattr(part, "__dataclass_fields__", {})
    inner = [code for name in names for code in codes_of(getattr(part, name))]
    return inner or ([part.error_code] if "error_code" in names else [])


def create(*names: str) -> Request:
    topic = {"num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return 19, 7, {"topics": [{"name": name, **topic} for name in names]}


REQUESTS: dict[str, Request] = {
    "create topics": create("new", "old", "another"),
    "create topics, one of them twice": create("new", "new", "another"),
    "delete topics": (20, 5, {"topic_names": ["old", "missing"]}),
    "delete topics by name and id": (20, 6, {"topics": [{"name": "old", "topic_id": None}]}),
    "create partitions": (37, 3, {"topics": [{"name": "old", "count": 5, "assignments": None}]}),
    "elect leaders": (
        43,
        2,
        {"election_type": 0, "topic_partitions": [{"topic": "old", "partitions": [0, 7]}]},
    ),
    "elect all leaders": (43, 2, {"election_type": 0, "topic_partitions": None}),
}


@pytest.fixture(params=list(REQUESTS.values()), ids=list(REQUESTS))
def begin(request: pytest.FixtureRequest, node: BareNode) -> Callable[[BareClient], int]:
    """Sends the request while a change of the image is not durable."""
    key, version, fields = request.param
    first = node.connect()
    first.create_topic("old")
    other, other_version, other_fields = create("unflushed")
    first.begin(other, other_version, **other_fields, timeout=60_000)
    return lambda client: client.begin(key, version, **fields, timeout=TIMEOUT_MS)


def test_an_answer_that_may_not_leave_in_time_says_so(
    node: BareNode, begin: Callable[[BareClient], int]
) -> None:
    client = node.connect()
    asked = begin(client)
    node.turn()
    node.advance(TIMEOUT_MS - 1)
    assert not client.frames
    node.advance(1)
    answer = client.answer(asked)
    assert set(codes_of(answer)) == {ErrorCode.request_timed_out}
    node.settle()
    assert not client.frames, "answered once"
    assert "unflushed" in {topic.name for topic in client.ask(3, 9, topics=None).topics}


def test_an_answer_in_time_is_the_only_one(node: BareNode, begin: Callable[[BareClient], int]) -> None:
    client = node.connect()
    asked = begin(client)
    node.settle()
    assert ErrorCode.request_timed_out not in codes_of(client.answer(asked))
    node.advance(2 * TIMEOUT_MS)
    assert not client.frames


def test_a_metadata_log_that_fails_closes_only_those_that_were_not_answered(
    node: BareNode, begin: Callable[[BareClient], int]
) -> None:
    client, late = node.connect(), node.connect()
    begin(client)
    node.turn()
    node.advance(TIMEOUT_MS - 1)
    begin(late)
    node.advance(1)
    assert len(client.frames) == 1
    node.node.metadata.hosted.directory.take_offline(OSError(5, "broken"))
    assert late.closed
    assert not late.frames
    assert len(client.frames) == 1
