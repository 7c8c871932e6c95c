"""Our broker with nothing counted: what `observing` compares with. No such switch exists for users.

Clocks are not read for durations, nothing is noted or added up, no refusal is looked for in a response. Everything else
is the broker's own code: `python -m bench.uncounted serve …` takes the arguments of `holdfast serve`.
"""

from __future__ import annotations

import sys
from typing import Any

from holdfast.broker.node import meter
from holdfast.broker.node import node as node_module
from holdfast.broker.node.meter import Meter
from holdfast.broker.server import flusher, transport
from holdfast.cli.serve import serve_command
from holdfast.exposition import Histogram
from holdfast.seams import Clock

forget: Any = abs
"""Nothing, in as little time as a call takes."""


class Blank(Histogram):
    """What is observed or noted is gone."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.note = forget

    def observe(self, value: float) -> None:
        """Nothing."""


class StoppedClock:
    """For durations alone; `now` is the real one's."""

    read_ns = 0
    monotonic_ns = staticmethod(int)
    """0, in as little time as a call takes."""

    def __init__(self, clock: Clock) -> None:
        self.now = clock.now
        self.since_boot_ms = clock.since_boot_ms


class Uncounted(Meter):
    """A meter that counts nothing."""

    def __init__(self, clock: Clock, say: Any) -> None:
        super().__init__(StoppedClock(clock), say)

    def answered(self, exchange: Any, left_ns: int) -> None:
        """Nothing."""

    def took(self, topic: str, version: int) -> Any:
        """Nothing."""
        return forget, forget

    def look_through(self, *_: Any) -> None:
        """Nothing."""

    def every_second(self, slow_ms: int) -> None:
        """Nothing."""


def stop_counting() -> None:
    """Put the uncounted parts in their places."""
    setattr(node_module, "Meter", Uncounted)  # noqa: B010 - no name of these modules is meant to be replaced
    setattr(transport, "monotonic_ns", int)  # noqa: B010
    for module in (meter, flusher):
        setattr(module, "Histogram", Blank)  # noqa: B010


def main() -> None:
    """Serve without counting."""
    stop_counting()
    sys.exit(serve_command(sys.argv[2:]))


if __name__ == "__main__":
    main()
