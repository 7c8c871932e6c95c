"""Combinations that are known to fail, each with its reason; a line goes when its defect does."""

from __future__ import annotations

from tests.endings.axes import Combination


def why_it_fails(each: Combination) -> str | None:
    return None
