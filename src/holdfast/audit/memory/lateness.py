"""Which rows are late for which step: by their event time, the step's own measure and the watermark they met.

    window    the last window it belongs to (and the time to correct it) is over; so is one without an event
    dedupe    event + within is over; a row without a key goes on whenever it comes
    keyed     event + ttl is over
    join      event + within is over, of rows that are on one of its sides

Over: at or before the row's watermark. What a pipeline has recorded as late must be exactly these.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from holdfast.audit.memory.rows import NOTHING, Flags, Times
from holdfast.pipeline.definition.model import Dedupe, Join, Keyed, Window
from holdfast.pipeline.definition.units import parse_duration_ms


@dataclass(frozen=True)
class Measure:
    """The windows of one step, in milliseconds."""

    kind: str
    size_ms: int
    """Session: the gap."""
    every_ms: int
    hold_ms: int
    """How long after its end a window may be corrected."""

    @classmethod
    def of(cls, step: Window) -> Measure:
        size = step.gap if step.kind == "session" else step.size
        assert size is not None
        size_ms = parse_duration_ms(size)
        every_ms = parse_duration_ms(step.every) if step.kind == "sliding" and step.every else size_ms
        hold_ms = parse_duration_ms(step.correct_within) if step.late == "correct" else 0
        return cls(step.kind, size_ms, every_ms, hold_ms)

    @property
    def wait_ms(self) -> int:
        """From a window's end until it closes: a session may be touched by a row of its gap."""
        return self.size_ms if self.kind == "session" else 0

    def last_starts(self, events: Times) -> Times:
        """Of the windows a row belongs to, the last one's start."""
        return events if self.kind == "session" else events - np.mod(events, self.every_ms)

    def first_starts(self, events: Times, watermarks: Times) -> Times:
        """Sliding: the start of the first that the row belongs to and is not late for."""
        holding = _at_or_after(events - (self.size_ms - 1), self.every_ms)
        far = np.iinfo(np.int64).min // 2
        over = np.maximum(watermarks, far) - (self.size_ms + self.hold_ms - 1)
        return np.maximum(holding, _at_or_after(over, self.every_ms))

    def is_late(self, events: Times, watermarks: Times) -> Flags:
        known = events != NOTHING
        ends = self.last_starts(np.where(known, events, 0)) + self.size_ms + self.hold_ms
        return np.asarray(~known | (ends <= watermarks), np.bool_)


def _at_or_after(times: Times, every_ms: int) -> Times:
    return times + np.mod(-times, every_ms)


def is_past(events: Times, watermarks: Times, reach_ms: int) -> Flags:
    """Rows whose event lies that far behind their watermark, and those without one."""
    known = events != NOTHING
    return np.asarray(~known | (np.where(known, events, 0) + reach_ms <= watermarks), np.bool_)


def reach_ms(step: Dedupe | Keyed | Join) -> int:
    return parse_duration_ms(step.ttl if isinstance(step, Keyed) else step.within)
