"""A node has the parts that each kind of request sees of it: the type checker reads this."""

from __future__ import annotations

import pytest

from holdfast.broker.node.connection import RequestServices
from holdfast.broker.node.handlers.group_admin import FindServices
from holdfast.broker.node.node import Node
from holdfast.broker.node.services import (
    ClusterServices,
    CoordinatorServices,
    DataServices,
    GroupServices,
    TransactionServices,
    UpkeepServices,
)
from holdfast.testing.bare_node import BareNode


def serves(
    node: Node,
) -> tuple[
    RequestServices,
    CoordinatorServices,
    UpkeepServices,
    ClusterServices,
    DataServices,
    GroupServices,
    TransactionServices,
    FindServices,
]:
    return node, node, node, node, node, node, node, node


@pytest.mark.parametrize(
    "protocol", [RequestServices, CoordinatorServices, UpkeepServices, ClusterServices, DataServices]
)
def test_a_node_has_every_part_that_requests_see(protocol: type) -> None:
    node = BareNode().node
    assert protocol.__annotations__
    assert [name for name in protocol.__annotations__ if not hasattr(node, name)] == []


def test_a_node_has_at_most_25_fields() -> None:
    assert len(vars(BareNode().node)) <= 25
