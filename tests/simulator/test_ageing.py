"""Topics that grow old lose only what their settings give up; see `tests.support.ageing`."""

from __future__ import annotations

import pytest
from tests.support.ageing import play
from tests.support.tiers import by_tier

SEEDS = by_tier(quick=20, check=120, long=120)
MORE_SEEDS = 4_000


@pytest.mark.sim
def test_what_was_acknowledged_goes_only_by_what_its_topic_says() -> None:
    for seed in range(SEEDS):
        play(seed)


@pytest.mark.long
@pytest.mark.sim
def test_many_more_topics_grow_old() -> None:
    """With `make long`."""
    for seed in range(SEEDS, MORE_SEEDS):
        play(seed)
