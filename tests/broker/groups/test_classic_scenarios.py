"""Classic groups and positions, told as scenarios; see `tests.support.group_scenarios` for the language."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.group_scenarios import GroupInterpreter, check_scenario, scenario_files


@pytest.mark.parametrize(
    "path", scenario_files(Path(__file__).parent / "scenarios" / "classic"), ids=lambda path: path.stem
)
def test_scenario(path: Path) -> None:
    check_scenario(path, GroupInterpreter())
