"""Every risk of reading, writing and replaying with Spark has both halves."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Final

import pytest

RISKS: Final = [f"hf{number}" for number in range(401, 411)]
NAME: Final = re.compile(r"test_(hf\d{3})_\w+?_(plain_spark|ours)_\w+")


def halves() -> dict[str, set[str]]:
    """Which halves each risk has, by the names of the tests in this directory."""
    found: dict[str, set[str]] = {}
    for path in Path(__file__).parent.glob("test_*.py"):
        for node in ast.parse(path.read_text(encoding="utf-8")).body:
            if isinstance(node, ast.FunctionDef) and (name := NAME.fullmatch(node.name)):
                found.setdefault(name[1], set()).add(name[2])
    return found


@pytest.mark.parametrize("risk", RISKS)
def test_a_risk_is_shown_with_plain_spark_and_not_with_ours(risk: str) -> None:
    assert halves().get(risk) == {"plain_spark", "ours"}


def test_no_test_is_named_for_a_risk_that_is_not_shown_here() -> None:
    assert set(halves()) == set(RISKS)
