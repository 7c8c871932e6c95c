"""An exception that nobody expects, out of any function the broker calls while it does something."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

BROKER = (
    "/holdfast/broker/node/",
    "/holdfast/broker/groups/",
    "/holdfast/broker/transactions/",
    "/holdfast/broker/partition/",
    "/holdfast/broker/log/",
)
PLUMBING = tuple(
    f"/holdfast/broker/node/{name}.py"
    for name in ("timers", "context", "connection", "troubles", "wall_clock")
)
"""What calls the others and catches what they raise, and what tells the time."""
GUARDS = frozenset(
    {
        "ProvenSchedule.at",
        "Production._resolve",
        "Sessions._look_at",
        "Sessions._watch",
        "TransactionCoordinator._abort_timed_out",
    }
)
"""Functions that set a timer, or catch what is raised below them, and do nothing else that could fail."""
DEPTH_MIN = 3
"""Below what runs timers: a timer, what it does, and what that calls."""


class Injected(RuntimeError):
    """No error that anybody has thought of."""


class Injection:
    def __init__(self, call: int) -> None:
        self.left = call
        self.where = ""
        """The function that raised instead of being called; empty while none has."""

    def trace(self, frame: FrameType, event: str, argument: object) -> None:
        path = frame.f_code.co_filename
        if event != "call" or path.endswith(PLUMBING) or not any(part in path for part in BROKER):
            return
        if frame.f_code.co_qualname in GUARDS or self._depth(frame) < DEPTH_MIN:
            return
        self.left -= 1
        if self.left < 0:
            self.where = f"{path.rpartition('/holdfast/')[2]}:{frame.f_code.co_qualname}"
            raise Injected(self.where)

    @staticmethod
    def _depth(frame: FrameType | None) -> int:
        """How many calls below `Timers.run_due`; 0 elsewhere, and where a defect is being told."""
        depth = 0
        while frame is not None and frame.f_code.co_name != "_timer_failed":
            if frame.f_code.co_qualname == "Timers.run_due":
                return depth
            depth += 1
            frame = frame.f_back
        return 0


@contextmanager
def raising_at(call: int) -> Iterator[Injection]:
    """The `call`th function of the broker that is called within raises `Injected` instead."""
    injection = Injection(call)
    before = sys.gettrace()
    sys.settrace(injection.trace)
    try:
        yield injection
    finally:
        sys.settrace(before)
