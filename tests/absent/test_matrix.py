"""docs/ABSENT.md says what happens to whatever is missing, and each of its cells is tried here."""

from __future__ import annotations

import pytest
from tests.absent.matrix import table, written
from tests.absent.trials import MOMENTS, THINGS, WAYS, try_out
from tests.support.tiers import by_tier

EACH_MOMENT = pytest.mark.parametrize(
    "moment", [pytest.param(each, marks=pytest.mark.xdist_group(f"absent {each}")) for each in MOMENTS]
)
"""One worker tries each cell once."""
TRIED = THINGS[:: by_tier(quick=4, check=1, long=1)]
UNNOTICED = frozenset(thing.name for thing in THINGS if "segment" in thing.name)
"""A file of the same name, length and offsets with sound checksums, of another cluster: nothing tells whose it is."""


@pytest.mark.check
@EACH_MOMENT
def test_every_cell_of_the_document_is_what_happens(moment: str) -> None:
    assert written(moment) == table(moment), "python -m tests.absent.matrix writes the tables anew"


@EACH_MOMENT
def test_nothing_is_lost_in_silence(moment: str) -> None:
    found = {
        (thing.name, way): outcome.detail
        for thing in TRIED
        for way in WAYS
        if (outcome := try_out(thing, way, moment)) is not None and outcome.is_loss
    }
    assert {key for key in found if key[1] != "another's" or key[0] not in UNNOTICED} == set(), found
