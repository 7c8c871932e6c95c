"""Deadlines: what must happen when time passes and nothing else does."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heappop, heappush


class Timer:
    __slots__ = ("action", "deadline_ms")

    def __init__(self, deadline_ms: int, action: Callable[[], None]) -> None:
        self.deadline_ms = deadline_ms
        self.action: Callable[[], None] | None = action

    def cancel(self) -> None:
        self.action = None


class Timers:
    """A heap of timers by monotonic deadline. Cancelled ones stay until due or until they outnumber the rest."""

    def __init__(self, failed: Callable[[Callable[[], None], Exception], None]) -> None:
        """`failed` is told of an action that raised, and with what."""
        self._failed = failed
        self.is_stopped = False
        """The broker is on its way out: whatever comes back later begins nothing any more."""
        self._heap: list[tuple[int, int, Timer]] = []
        self._sequence = 0
        self._announced_ms: int | None = None
        self.on_earlier: Callable[[], None] | None = None
        """Called when a deadline earlier than all others is set outside `run_due`: the shell's alarm is late."""

    def at(self, deadline_ms: int, action: Callable[[], None]) -> Timer:
        timer = Timer(deadline_ms, action)
        self._sequence += 1
        heappush(self._heap, (deadline_ms, self._sequence, timer))
        if self._sequence % 4096 == 0:
            # In place: `run_due` may be in the middle of it.
            self._heap[:] = [entry for entry in self._heap if entry[2].action is not None]
            heapify(self._heap)
        if self.on_earlier is not None and (self._announced_ms is None or deadline_ms < self._announced_ms):
            self._announced_ms = deadline_ms
            self.on_earlier()
        return timer

    @property
    def next_deadline_ms(self) -> int | None:
        heap = self._heap
        while heap and heap[0][2].action is None:
            heappop(heap)
        self._announced_ms = heap[0][0] if heap else None
        return self._announced_ms

    def run_due(self, now_ms: int) -> None:
        """Run what is due, each whatever became of the others."""
        heap = self._heap
        while heap and heap[0][0] <= now_ms:
            action = heappop(heap)[2].action
            if action is not None:
                try:
                    action()
                except Exception as error:  # noqa: BLE001 - one action's defect must not stop the broker's clock
                    self._failed(action, error)
