"""Fixtures for the node's tests: a node on a simulated disk whose flushes wait until told."""

from __future__ import annotations

import pytest

from holdfast.testing.bare_node import BareNode


@pytest.fixture
def node() -> BareNode:
    return BareNode()
