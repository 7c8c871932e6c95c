"""FindCoordinator: this node, at the address of the listener that was asked."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode

from holdfast.testing.bare_node import BareNode

FIND_COORDINATOR = 10


@pytest.mark.parametrize("version", range(7))
def test_a_group_is_coordinated_here(version: int) -> None:
    client = BareNode().connect()
    if version < 4:
        found = client.ask(FIND_COORDINATOR, version, key="a group", key_type=0)
    else:
        answer = client.ask(FIND_COORDINATOR, version, coordinator_keys=["a group", "another"], key_type=0)
        assert [coordinator.key for coordinator in answer.coordinators] == ["a group", "another"]
        found = answer.coordinators[0]
    assert (found.error_code, found.node_id, found.host, found.port) == (ErrorCode.none, 1, "127.0.0.1", 9092)


def test_asking_makes_the_internal_topic_with_its_settings() -> None:
    node = BareNode({"offsets.topic.num.partitions": "7", "offsets.topic.segment.bytes": "1048576"})
    node.connect().ask(FIND_COORDINATOR, 6, coordinator_keys=["g"], key_type=0)
    topic = node.node.metadata.image.topic("__consumer_offsets")
    assert topic is not None
    assert len(topic.partitions) == 7
    config = node.hosted("__consumer_offsets", 3).log.config
    assert config.cleanup_policy == frozenset({"compact"})
    assert config.segment_bytes == 1048576


def test_an_unknown_kind_of_coordinator_is_refused() -> None:
    answer = BareNode().connect().ask(FIND_COORDINATOR, 6, coordinator_keys=["g"], key_type=9)
    assert answer.coordinators[0].error_code is ErrorCode.invalid_request
    assert answer.coordinators[0].node_id == -1
