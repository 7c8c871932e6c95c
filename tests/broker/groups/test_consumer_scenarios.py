"""Groups of the consumer protocol and their migration, told as scenarios; see `tests.support.consumer_scenarios`."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.consumer_scenarios import ConsumerInterpreter
from tests.support.group_scenarios import check_scenario, scenario_files


@pytest.mark.parametrize(
    "path", scenario_files(Path(__file__).parent / "scenarios" / "consumer"), ids=lambda path: path.stem
)
def test_scenario(path: Path) -> None:
    check_scenario(path, ConsumerInterpreter())
