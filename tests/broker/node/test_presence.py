"""A file that is taken away while it is in use takes its log directory offline within a second."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node import failures
from holdfast.testing.bare_node import BareClient, BareNode
from holdfast.wire.batch import make_batch


def batch() -> bytes:
    return make_batch([b"value"], timestamp=1_700_000_000_000)


@pytest.fixture
def node() -> BareNode:
    return BareNode({"log.dirs": "/a,/b"})


@pytest.fixture
def client(node: BareNode) -> BareClient:
    client = node.connect()
    client.create_topic("t", 2)
    for index in (0, 1):
        assert not client.produce("t", batch(), index).error_code
    return client


def second(node: BareNode) -> None:
    node.advance(1000)
    node.settle()


def remove(node: BareNode, index: int) -> None:
    node.disk.remove(node.hosted("t", index).log.active.path())


def replace(node: BareNode, index: int) -> None:
    remove(node, index)
    node.disk.open(node.hosted("t", index).log.active.path(), "create").close()


def remove_directory(node: BareNode, index: int) -> None:
    node.disk.remove_tree(node.hosted("t", index).directory.path)


def where_the_metadata_is_not(node: BareNode) -> int:
    return next(i for i in (0, 1) if node.hosted("t", i).directory is not node.node.metadata.hosted.directory)


@pytest.mark.parametrize("taken", [remove, replace, remove_directory])
def test_a_segment_that_is_taken_away_in_use_takes_its_directory_offline(
    node: BareNode, client: BareClient, taken: object
) -> None:
    assert callable(taken)
    index = where_the_metadata_is_not(node)
    taken(node, index)
    second(node)
    assert client.produce("t", batch(), index).error_code is ErrorCode.kafka_storage_error
    assert not client.produce("t", batch(), 1 - index).error_code
    assert any("removed or replaced while in use" in line for line in node.said)


def test_a_topic_that_is_deleted_leaves_its_directory_online(node: BareNode, client: BareClient) -> None:
    client.ask(20, 5, topic_names=["t"], timeout=5000)
    second(node)
    client.create_topic("t", 2)
    second(node)
    assert not any(directory.offline for directory in node.node.directories)


def test_a_round_looks_at_a_bounded_number_of_partitions(
    node: BareNode, client: BareClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    second(node)
    monkeypatch.setattr(failures, "LOOKED_AT_MAX", 1)
    index = where_the_metadata_is_not(node)
    for number in (1 - index, index):
        client.produce("t", batch(), number)
    remove(node, index)
    node.node.failures.presence.look()
    assert not node.hosted("t", index).offline
    node.node.failures.presence.look()
    assert node.hosted("t", index).offline


def test_nothing_is_made_where_a_log_directory_was(node: BareNode, client: BareClient) -> None:
    """A new topic would be acknowledged into a directory that the right one hides when it is back."""
    path = node.hosted("t", where_the_metadata_is_not(node)).directory.path
    taken = node.disk.take_away(path)
    client.create_topic("new", 2)
    codes = [client.produce("new", batch(), index).error_code for index in (0, 1)]
    assert sorted(codes) == [ErrorCode.none, ErrorCode.kafka_storage_error]
    assert not node.disk.exists(path)
    second(node)
    assert any(f"{path}" in line and "while in use" in line for line in node.said)
    node = node.kill(lambda disk: disk.put_back(path, taken))
    stored = codes.index(ErrorCode.none)
    assert node.hosted("new", stored).log.end_offset == 1
    assert [node.hosted("t", index).log.end_offset for index in (0, 1)] == [1, 1]
