"""Combinations that are known to fail, each with its reason; a line goes when its defect does."""

from __future__ import annotations

from typing import Final

from tests.endings.axes import PRODUCERS, Combination

HOLD: Final = ("return", "exception", "sigterm", "subprocess", "stderr-closed", "exec")
"""Ways in which producers hold whatever is under way."""


def why_it_fails(each: Combination) -> str | None:
    if each.client not in PRODUCERS or each.way in HOLD:
        return None
    if each.under_way in ("in-flight", "failed"):
        return "what nobody was told is forgotten, or the guard ends the process before files are flushed"
    if each.way.startswith("fork-"):
        return "a forked child uses what belongs to its parent"
    if each.way in ("daemon-close", "generator-left"):
        return "nobody waits for a close() that is under way when the program ends"
    if each.way in ("sigint-closes", "sigterm-closes", "sigint-exits", "sigterm-exits", "alarm-swallowed"):
        return "a signal's handler meets locks that the interrupted frame holds"
    return None
