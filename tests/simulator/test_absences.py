"""What is away is missed and never replaced, and everything is there when it is back; see `tests.support.estate`."""

from __future__ import annotations

import pytest
from tests.support.absences import KINDS
from tests.support.estate import play
from tests.support.tiers import by_tier

SEEDS = by_tier(quick=1, check=5, long=5)
MORE_SEEDS = 150
PARTS = 3


@pytest.mark.sim
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_away_is_missed_and_never_replaced(kind: str) -> None:
    for seed in range(SEEDS):
        play(seed, (kind,), rounds=1)


@pytest.mark.long
@pytest.mark.sim
@pytest.mark.parametrize("kind", KINDS)
def test_many_more_things_are_away(kind: str) -> None:
    """One after the other, in a few lives of one broker: with `make long`."""
    for seed in range(SEEDS, MORE_SEEDS):
        play(seed, (kind,))


@pytest.mark.long
@pytest.mark.sim
@pytest.mark.parametrize("part", range(PARTS))
def test_things_of_every_kind_are_away_in_turn(part: int) -> None:
    for seed in range(part, MORE_SEEDS, PARTS):
        play(seed, rounds=4)
