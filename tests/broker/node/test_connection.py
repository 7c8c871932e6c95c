"""A connection: requests begun and answered in order, a limit on those under way, bad frames, the barrier."""

from __future__ import annotations

import struct

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node import dispatch, production
from holdfast.broker.node.handlers import cluster
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.testing.disk import Fault
from holdfast.wire.batch import make_batch

BATCH = make_batch([b"x"], timestamp=1_700_000_000_000)
METADATA_FIELDS = {"topics": None}


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t")
    return client


def test_a_response_that_is_ready_waits_behind_one_that_is_not(node: BareNode, client: BareClient) -> None:
    produce = client.begin_produce("t", BATCH)
    metadata = client.begin(3, 9, **METADATA_FIELDS)
    versions = client.begin(18, 3)
    assert client.frames == []
    node.settle()
    assert client.correlation_ids == [produce, metadata, versions]


def test_another_connection_does_not_wait(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", BATCH)
    other = node.connect()
    asked = other.begin(3, 9, **METADATA_FIELDS)
    assert other.correlation_ids == [asked]


def test_a_request_without_response_keeps_its_place_and_leaves_no_gap(
    node: BareNode, client: BareClient
) -> None:
    parked = client.begin_produce("t", BATCH)
    client.begin_produce("t", BATCH, acks=0)
    last = client.begin(18, 3)
    node.settle()
    assert client.correlation_ids == [parked, last]
    assert client.connection.requests_under_way == 0


def test_past_the_limit_the_shell_is_asked_to_stop_reading() -> None:
    node = BareNode({"holdfast.requests.in.flight.max": "3"})
    client = node.connect()
    client.create_topic("t")
    seen = []
    for _ in range(3):
        client.begin_produce("t", BATCH)
        seen.append(client.connection.is_saturated)
    node.settle()
    seen.append(client.connection.is_saturated)
    assert seen == [False, False, True, False]
    assert len(client.frames) == 3


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"",
        b"\0",
        b"\0\x03\0\x09\0\0\0\x01",  # a header cut before the client id
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff",
        struct.pack(">hhih", 18, 3, 1, 200) + b"short",
        struct.pack(">hhih", 3, 9, 1, -1) + b"\0" + b"\xff" * 40,
        struct.pack(">hhih", 12345, 0, 1, -1),
        struct.pack(">hhih", 3, 99, 1, -1) + b"\0\0",
        struct.pack(">hhih", -1, -1, 1, -1),
        struct.pack(">hhih", 0, 2, 1, -1) + bytes(12),  # produce of a version advertised and not served
    ],
)
def test_a_frame_that_is_no_request_closes_its_connection_and_no_other(
    node: BareNode, client: BareClient, request_bytes: bytes
) -> None:
    other = node.connect()
    client.send(request_bytes)
    assert len(client.closed) == 1
    assert not client.frames
    assert other.ask(3, 9, **METADATA_FIELDS).topics
    assert not other.closed


def test_nothing_leaves_on_a_connection_that_is_closed(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", BATCH)
    client.send(b"nonsense")
    assert client.closed
    node.settle()
    assert client.frames == []
    assert node.hosted("t").log.end_offset == 1, "what was begun is finished all the same"


def test_a_client_that_left_is_not_answered(node: BareNode, client: BareClient) -> None:
    client.begin_produce("t", BATCH)
    client.begin_fetch("t", 0, max_wait_ms=1000)
    client.connection.lost()
    node.settle()
    node.advance(2000)
    assert client.frames == []
    assert client.connection.requests_under_way == 0


@pytest.mark.parametrize("end", ["lost", "closed"])
def test_a_parked_fetch_waits_no_longer_than_its_client(node: BareNode, client: BareClient, end: str) -> None:
    """However long it said it would wait: otherwise clients that come and go would fill the memory."""
    waiters = node.hosted("t").offsets.fetch_waiters
    asking = [node.connect() for _ in range(3)]
    for one in asking:
        one.begin_fetch("t", 0, max_wait_ms=2**31 - 1)
    assert len(waiters) == 3
    for one in asking[:2]:
        if end == "lost":
            one.connection.lost()
        else:
            one.send(b"nonsense")
    assert len(waiters) == 1
    client.produce("t", BATCH)
    assert [len(one.frames) for one in asking] == [0, 0, 1]
    assert not waiters


def test_an_unknown_version_of_api_versions_is_answered_in_version_0(node: BareNode) -> None:
    client = node.connect()
    client.send(struct.pack(">hhih", 18, 99, 5, -1) + b"\0")
    (answer,) = client.frames
    correlation_id, error_code, count = struct.unpack_from(">ihi", answer)
    assert (correlation_id, error_code) == (5, ErrorCode.unsupported_version)
    assert count >= 1
    assert not client.closed


def test_an_error_with_acks_0_closes_the_connection(node: BareNode, client: BareClient) -> None:
    client.begin_produce("nowhere", BATCH, acks=0)
    assert client.closed
    assert not client.frames


def test_a_defect_in_a_handler_closes_one_connection_and_is_told(
    node: BareNode, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object) -> None:
        raise KeyError("defect")

    monkeypatch.setattr(cluster, "api_versions", broken)
    monkeypatch.setattr(dispatch, "_handlers", {})
    client.begin(18, 3)
    assert client.closed
    assert any("defect" in line for line in node.said)
    monkeypatch.undo()
    assert node.connect().ask(18, 0).error_code == ErrorCode.none


def test_a_defect_in_one_answer_costs_no_other_that_waits_for_the_same_flush(
    node: BareNode, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    others = [node.connect() for _ in range(3)]
    real = production.Production.response
    broken: list[object] = []

    def response(self: production.Production) -> object:
        if not broken:
            broken.append(self)
            return {"responses": [{"name": object()}]}
        return real(self)

    monkeypatch.setattr(production.Production, "response", response)
    for asking in (client, *others):
        asking.begin(0, 8, **client.produce_fields("t", {0: BATCH}))
    node.settle()
    assert client.closed
    assert [len(other.frames) for other in others] == [1, 1, 1]
    assert others[0].produce("t", BATCH).base_offset == 4


# The barrier: nothing leaves that was built on a change of metadata which is not durable


def create(client: BareClient, name: str) -> int:
    topic = {"name": name, "num_partitions": 1, "replication_factor": 1, "assignments": [], "configs": []}
    return client.begin(19, 5, topics=[topic], timeout=5000)


def test_a_change_is_answered_when_it_is_durable(node: BareNode, client: BareClient) -> None:
    asked = create(client, "new")
    node.turn()
    assert not client.frames
    node.settle()
    assert client.answer(asked).topics[0].error_code == ErrorCode.none


def test_a_reader_of_metadata_waits_for_changes_that_are_not_durable(
    node: BareNode, client: BareClient
) -> None:
    create(client, "new")
    reader = node.connect()
    asked = reader.begin(3, 9, topics=[{"name": "new"}], allow_auto_topic_creation=False)
    node.turn()
    assert not reader.frames
    node.settle()
    assert reader.answer(asked).topics[0].error_code == ErrorCode.none


def test_a_read_that_came_after_a_flush_began_waits_for_the_next(node: BareNode, client: BareClient) -> None:
    create(client, "one")
    node.turn()
    node.flusher.begin_one()
    create(client, "two")
    reader = node.connect()
    asked = reader.begin(3, 9, **METADATA_FIELDS)
    node.flusher.run_one()
    assert not reader.frames, "topic two is in the answer and not on disk"
    node.settle()
    assert {topic.name for topic in reader.answer(asked).topics} >= {"one", "two"}


def test_when_the_metadata_log_fails_no_answer_built_on_it_leaves(node: BareNode, client: BareClient) -> None:
    create(client, "new")
    reader = node.connect()
    reader.begin(3, 9, **METADATA_FIELDS)
    node.turn()
    node.disk.plan(Fault("flush", path_contains="__cluster_metadata", times=100))
    node.settle()
    assert not client.frames
    assert not reader.frames
    assert client.closed
    assert reader.closed, "nobody is left hanging"
    assert node.node.failures.fatal
    late = node.connect()
    late.begin(3, 9, **METADATA_FIELDS)
    assert late.closed
    assert not late.frames
