"""A clock that moves only when told."""

from __future__ import annotations

from holdfast.seams import Now

START_WALL_MS = 1_700_000_000_000


class ManualClock:
    """A `holdfast.seams.Clock`. `advance` moves both readings; `step_wall` moves what may step back."""

    def __init__(self, wall_ms: int = START_WALL_MS, monotonic_ms: int = 0) -> None:
        self._wall_ms = wall_ms
        self._monotonic_ms = monotonic_ms

    def now(self) -> Now:
        return Now(self._wall_ms, self._monotonic_ms)

    def since_boot_ms(self) -> int:
        return self._monotonic_ms

    def advance(self, ms: int) -> Now:
        """Let time pass, and return the new reading."""
        if ms < 0:
            raise ValueError(f"time does not run backwards by {-ms} ms; step_wall sets the wall clock back")
        self._wall_ms += ms
        self._monotonic_ms += ms
        return self.now()

    def step_wall(self, ms: int) -> Now:
        """Set the wall clock forward or back, as an operator or NTP does."""
        self._wall_ms += ms
        return self.now()
