"""However a program ends: what was accepted is delivered, kept, or named, and then the exit code is not 0.

Each combination is a process of its own; see `axes` for what there is. Here a sample that holds most pairs, all of them
with `--long` or `python -m tests.endings`.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
from tests.endings.axes import Combination, every, sample
from tests.endings.judging import World, table

pytestmark = [pytest.mark.check, pytest.mark.xdist_group("endings")]

AT_A_TIME = 16
"""Most programs wait for most of their time."""


def sampled() -> list[object]:
    return [pytest.param(each, id=each.id) for each in sample()]


@pytest.fixture(scope="module")
def faults(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[Combination, list[str]]:
    """All that are asked for, run side by side."""
    asked: list[Combination] = [
        cast(Combination, item.callspec.params["each"])
        for item in request.session.items
        if isinstance(item, pytest.Function) and item.function is test_nothing_is_lost_in_silence
    ]
    with World(tmp_path_factory.mktemp("endings")) as world:
        return world.run(asked, AT_A_TIME)


@pytest.mark.parametrize("each", sampled())
def test_nothing_is_lost_in_silence(each: Combination, faults: dict[Combination, list[str]]) -> None:
    assert faults[each] == []


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_combination(tmp_path: Path) -> None:
    with World(tmp_path) as world:
        results = world.run(every(), AT_A_TIME)
    print(table(results))
    assert {each.id: found for each, found in results.items() if found} == {}
