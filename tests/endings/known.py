"""Combinations that are known to fail, each with its reason; a line goes when its defect does."""

from __future__ import annotations

from tests.endings.axes import Combination


def why_it_fails(each: Combination) -> str | None:
    if each.client == "wrap" and each.way == "generator-left":
        return "a block that ends while the interpreter takes modules apart names an error that is gone"
    if each.client == "wrap" and each.way == "fork-idle":
        return "a forked child that leaves the block of its parent is told off, and ends with 70"
    return None
