"""Scenario files: read them, they are the documentation of how transactions go."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.support.group_scenarios import check_scenario, scenario_files
from tests.support.transaction_scenarios import TransactionInterpreter

SCENARIOS = scenario_files(Path(__file__).parent / "scenarios")


@pytest.mark.parametrize("path", SCENARIOS, ids=[path.stem for path in SCENARIOS])
def test_it_goes_as_written(path: Path) -> None:
    check_scenario(path, TransactionInterpreter())
