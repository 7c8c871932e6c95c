"""Waking a thread without a lock that a signal could leave held.

The application's threads run signal handlers at any moment, and a handler may raise or call us again. So they never
hold anything that a thread of ours needs: what they hand over goes into queues by one call into C, and they wait for,
and ring, a `Bell`. Everything else is done by threads of ours, where no signal handler ever runs.
"""

from __future__ import annotations

from _thread import TIMEOUT_MAX, allocate_lock


class Bell:
    """One thread waits for it; whoever rings wakes it, now or at its next wait. Several rings are one."""

    __slots__ = ("_silence",)

    def __init__(self) -> None:
        self._silence = allocate_lock()
        self._silence.acquire()

    def ring(self) -> None:
        if self._silence.locked():
            try:
                self._silence.release()
            except RuntimeError:
                # Another thread rang at the same moment.
                return

    def wait(self, timeout: float | None = None) -> bool:
        """Whether it rang, before the seconds had passed."""
        return self._silence.acquire(timeout=-1 if timeout is None else min(max(0.0, timeout), TIMEOUT_MAX))
