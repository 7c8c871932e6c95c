"""Ctrl-C and SIGTERM for commands that must finish what they began: a signal sets a flag, raising nothing.

`KeyboardInterrupt` can strike between reading a line and sending it, and the line is lost without a trace. A
command inside `Interrupts` looks at the flag where it is safe to stop.
"""

from __future__ import annotations

import signal
from types import FrameType, TracebackType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    def __init__(self) -> None:
        self.count = 0
        """One asks to finish in order, two to finish at once."""
        self._previous: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        for number in SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _note(self, number: int, frame: FrameType | None) -> None:
        self.count += 1
