"""Findings about windows and rows, told one by one as long as they are few."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from typing import Final

import numpy as np

from holdfast.audit.lineage import as_ranges
from holdfast.audit.memory.rows import Numbers, Rows
from holdfast.audit.model import Fate, Finding

NAMED_MAX: Final = 20
"""Findings of one kind that are told one by one; the rest is told as a number."""
RANGES_MAX: Final = 1000

Describe = Callable[[int], tuple[str, str]]
"""Of something by its number: its key, and what is wrong with it."""


class Told:
    """Findings of one step in one sink."""

    def __init__(self, sink: str, step: str) -> None:
        self._sink = sink
        self._step = step
        self.found: list[Finding] = []

    def add(self, fate: Fate, which: Numbers, describe: Describe) -> None:
        for number in which[:NAMED_MAX].tolist():
            key, detail = describe(number)
            keys = (key,) if key else ()
            self.found.append(
                Finding(fate, self._sink, count=1, keys=keys, detail=f"step {self._step!r}: {detail}")
            )
        more = len(which) - NAMED_MAX
        if more > 0:
            self.found.append(
                Finding(fate, self._sink, count=more, detail=f"step {self._step!r}: {more} more like these")
            )


def record_findings(fate: Fate, sink: str, rows: Rows, which: Numbers, detail: str) -> list[Finding]:
    """Records that were wrongly treated, by partition."""
    found = []
    for number, place in enumerate(rows.places):
        part = rows.slice_of(number)
        offsets = rows.offsets[which[(which >= part.start) & (which < part.stop)]]
        if len(offsets):
            ranges = tuple(as_ranges(np.sort(offsets))[:RANGES_MAX])
            found.append(Finding(fate, sink, place, ranges, len(offsets), detail=detail))
    return found


def time_text(time_ms: int) -> str:
    """In UTC; a time that no calendar has, as its number."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


def span_text(start_ms: int, end_ms: int) -> str:
    return f"{time_text(start_ms)} to {time_text(end_ms)}"
