"""Fixtures for the log's tests."""

from __future__ import annotations

import pytest

from holdfast.testing.disk import SimulatedDisk


@pytest.fixture
def disk() -> SimulatedDisk:
    """A simulated disk with the durable directory `/data`."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    return disk
