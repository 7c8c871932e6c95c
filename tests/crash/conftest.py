"""Crash tests: how often the broker is killed, and the seed of when."""

from __future__ import annotations

import random
import zlib

import pytest
from tests.support import tiers


@pytest.fixture
def crash_rounds(request: pytest.FixtureRequest) -> int:
    given = int(request.config.getoption("--crash-rounds"))
    return given or tiers.by_tier(quick=4, check=10, long=20)


@pytest.fixture
def chance(request: pytest.FixtureRequest) -> random.Random:
    """What decides when the broker dies: the same every time but in long runs. The seed is printed with a failure."""
    seed = request.config.getoption("--crash-seed")
    if seed is None:
        name = request.node.name.encode()
        seed = random.SystemRandom().randrange(1 << 32) if tiers.is_long() else zlib.crc32(name)
    print(f"repeat with --crash-seed={seed}")
    return random.Random(seed)
