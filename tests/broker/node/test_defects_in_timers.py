"""Whatever a timer calls may raise what nobody has thought of: everything else goes on, and nothing waits for ever.

One call after the other, of all that a tick with much to do makes, is made to raise; then time goes on.
"""

from __future__ import annotations

from itertools import count

import pytest
from tests.support.defects import Scene, check_call


def check_every(step: int, first: int = 0) -> int:
    """Check every so many calls; how many there are."""
    return next(call for call in count(first, step) if not check_call(call))


@pytest.mark.check
def test_a_defect_anywhere_in_a_tick_ends_nothing_else() -> None:
    assert check_every(13, first=5) > 400


@pytest.mark.long
def test_a_defect_everywhere_in_a_tick_ends_nothing_else() -> None:
    """Every call, one by one: with `make long`."""
    assert check_every(1) > 400


@pytest.mark.parametrize("call", [0, 100])
def test_the_defect_is_told(call: int) -> None:
    scene = Scene()
    where = scene.run(call)
    assert where
    assert any(line.startswith("defect") and where in line for line in scene.node.said)
