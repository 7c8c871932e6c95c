"""What was mended and is put back is noticed."""

from __future__ import annotations

import pytest
from tests.support.mended import MENDED, Mended

SEEDS_MAX = 200


@pytest.mark.sim
@pytest.mark.parametrize("mended", MENDED, ids=lambda mended: mended.name)
def test_a_defect_that_is_back_is_noticed(mended: Mended) -> None:
    seeds = sorted(range(SEEDS_MAX), key=lambda seed: seed != mended.seed)
    assert any(mended.net(mended.plant, seed) for seed in seeds), f"unnoticed for {SEEDS_MAX} seeds"
