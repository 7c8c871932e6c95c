"""What time does to a classic group: sessions end, and neither gathering for a rebalance nor waiting
for SyncGroup goes on for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from holdfast.broker.groups.classic_state import ClassicMember, Membership
from holdfast.broker.groups.model import CoordinatorContext
from holdfast.seams import Now, Schedule, Scheduled

AGAIN_MS: Final = 1000
"""How long after a member was found silent, and is still there, it is looked at again at the earliest."""


@dataclass(eq=False, repr=False)
class Sessions:
    """Watches members that must be heard of.

    Hearing of a member moves its `deadline_ms`; its timer stays where it is, looks when it fires, and is set again if
    the deadline has moved. So a heartbeat costs an assignment, and each member one timer per session time-out.
    """

    _schedule: Schedule
    _membership: Membership
    _silent: Callable[[ClassicMember, Now], None]

    def expect(self, member: ClassicMember, timeout_ms: int, now: Now) -> None:
        """A sign of life of this member, and when the next one is due."""
        member.deadline_ms = deadline_ms = now.monotonic_ms + timeout_ms
        if member.timer is not None:
            if member.timer_ms <= deadline_ms:
                return
            member.timer.cancel()
        self._watch(member, deadline_ms)

    def _watch(self, member: ClassicMember, at_ms: int) -> None:
        member.timer_ms = at_ms
        member.timer = self._schedule.at(at_ms, lambda now: self._look_at(member, now))

    def _look_at(self, member: ClassicMember, now: Now) -> None:
        member.timer = None
        if self._membership.members.get(member.member_id) is not member:
            return
        is_silent = member.deadline_ms <= now.monotonic_ms
        # Set first, so that a defect in what follows cannot keep a dead member for ever.
        later_ms = now.monotonic_ms + max(member.session_timeout_ms, AGAIN_MS)
        self._watch(member, later_ms if is_silent else member.deadline_ms)
        if is_silent:
            self._silent(member, now)


class Gathering:
    """How long a rebalance waits for members: `done` is called when time is up."""

    def __init__(self, context: CoordinatorContext, done: Callable[[Now], None]) -> None:
        self._context = context
        self._done = done
        self._timer: Scheduled | None = None
        self.newcomers = False
        """Somebody new has come since the last look."""

    def limit(self, timeout_ms: int, now: Now) -> None:
        self.end()
        self._timer = self._context.schedule.at(now.monotonic_ms + timeout_ms, self._done)

    def await_newcomers(self, rebalance_timeout_ms: int, now: Now) -> None:
        """A first rebalance: wait, and wait again while new ones come, no longer than the rebalance time-out."""
        self.newcomers = False
        delay_ms = self._delay_ms
        if delay_ms:
            self._look_in(delay_ms, max(rebalance_timeout_ms - delay_ms, 0), now)
        else:
            self._done(now)

    @property
    def _delay_ms(self) -> int:
        return max(self._context.settings().group_initial_rebalance_delay_ms, 0)

    def _look_in(self, delay_ms: int, remaining_ms: int, now: Now) -> None:
        def look(now: Now) -> None:
            if self.newcomers and remaining_ms:
                self.newcomers = False
                self._look_in(min(self._delay_ms, remaining_ms), max(remaining_ms - delay_ms, 0), now)
            else:
                self._done(now)

        self.end()
        self._timer = self._context.schedule.at(now.monotonic_ms + delay_ms, look)

    def end(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class SyncPhase:
    """The members of a generation that have not sent SyncGroup: `late` is called when time is up for them."""

    def __init__(self, schedule: Schedule, late: Callable[[Now], None]) -> None:
        self._schedule = schedule
        self._late = late
        self._timer: Scheduled | None = None
        self.due: set[str] = set()

    def begin(self, member_ids: Iterable[str], timeout_ms: int, now: Now) -> None:
        self.end()
        self.due = set(member_ids)
        self._timer = self._schedule.at(now.monotonic_ms + timeout_ms, self._time_is_up)

    def _time_is_up(self, now: Now) -> None:
        self._timer = None
        self._late(now)

    def rename(self, old_id: str, new_id: str) -> None:
        if old_id in self.due:
            self.due.discard(old_id)
            self.due.add(new_id)

    def came(self, member_id: str) -> None:
        self.due.discard(member_id)
        if not self.due:
            self.end()

    def end(self) -> None:
        self.due.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
