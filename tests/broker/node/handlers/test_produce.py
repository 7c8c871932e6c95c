"""Produce: what a client is told when its time-out passes before the flush."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.batch import make_batch

BATCH = make_batch([b"x"], timestamp=1_700_000_000_000)
TIMEOUT_MS = 30_000


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", partitions=3)
    return client


def begin(client: BareClient, *partitions: int) -> int:
    return client.begin(0, 9, **client.produce_fields("t", dict.fromkeys(partitions, BATCH)))


def outcomes(client: BareClient, asked: int) -> list[tuple[ErrorCode, int]]:
    (topic,) = client.answer(asked).responses
    return [(outcome.error_code, outcome.base_offset) for outcome in topic.partition_responses]


def test_a_time_out_reports_only_what_is_not_committed(node: BareNode, client: BareClient) -> None:
    """A producer that is not idempotent would store a committed batch again."""
    asked = begin(client, 0, 1, 7)
    node.turn()
    node.flusher.run_one(1)
    node.advance(TIMEOUT_MS + 1_000)
    assert outcomes(client, asked) == [
        (ErrorCode.request_timed_out, -1),
        (ErrorCode.none, 0),
        (ErrorCode.unknown_topic_or_partition, -1),
    ]
    node.settle()
    assert not client.frames, "answered once"


def test_a_request_whose_time_is_over_is_let_go_of(node: BareNode, client: BareClient) -> None:
    for index in (0, 1):
        begin(client, index, 2)
    node.advance(TIMEOUT_MS + 1_000)
    assert len(client.frames) == 2
    begin(client, 0)
    assert len(node.node.intake.parked) == 1
    node.settle()
    assert len(client.frames) == 3


def test_a_request_of_a_client_that_left_is_let_go_of_too(node: BareNode, client: BareClient) -> None:
    begin(client, 0, 1)
    client.connection.lost()
    node.advance(TIMEOUT_MS + 1_000)
    begin(node.connect(), 0)
    assert len(node.node.intake.parked) == 1
