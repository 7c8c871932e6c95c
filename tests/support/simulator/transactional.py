"""Transactional producers of both protocols: they commit, abort, stall, die, and come back as zombies.

A session (`transactional_session`) knows nothing of other sessions of its transactional id and goes on until it is
told that it is fenced. `TransactionalProducer` replaces sessions: the old one may live on for a while beside the new
one, as a process does that was only thought to be dead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tests.support.simulator.transactional_session import Session

if TYPE_CHECKING:
    from tests.support.simulator.members import GroupOffsets
    from tests.support.simulator.world import World

ZOMBIE_ACTS_MAX = 12


@dataclass(slots=True)
class _Claim:
    """A session's last InitProducerId."""

    sent_at: int
    life: int
    """Of the broker it was sent to: it may be carried out as long as that one lives."""
    over_at: int | None = None
    """When it was answered; None while it is not, or never will be."""


class TransactionalProducer:
    """All sessions of one transactional id, in turn and sometimes at once."""

    def __init__(self, world: World, name: str, book: GroupOffsets | None = None) -> None:
        self.world = world
        self.name = name
        self.book = book
        self._sessions = 0
        self._zombies: list[tuple[Session, int]] = []
        """Sessions that were replaced and go on, with how often they may still act."""
        self._claims: dict[Session, _Claim] = {}
        self._moment = 0
        self._current = self._next()

    def _next(self) -> Session:
        self._sessions += 1
        return Session(self, self._sessions, implicit=self.world.rng.random() < 0.6)

    def initialising(self, session: Session) -> None:
        """A session asks to be the one."""
        self._moment += 1
        self._claims[session] = _Claim(sent_at=self._moment, life=self.world.report.restarts)

    def initialised(self, session: Session, answered: bool) -> None:
        self._moment += 1
        claim = self._claims[session]
        claim.over_at = self._moment if answered else None

    def may_be_fenced(self, session: Session) -> bool:
        """Whether another session's claim may have come after this one's."""
        mine = self._claims[session]
        return any(
            claim.over_at > mine.sent_at
            if claim.over_at is not None
            else claim.life in (mine.life, self.world.report.restarts) or claim.sent_at > mine.sent_at
            for other, claim in self._claims.items()
            if other is not session
        )

    def act(self) -> bool:
        rng = self.world.rng
        if self._zombies and rng.random() < 0.3:
            return self._let_zombie_act()
        if self._current.is_dead or rng.random() < 0.03:
            self._replace()
        return self._current.act()

    def _let_zombie_act(self) -> bool:
        zombie, left = self._zombies.pop(0)
        acted = zombie.act()
        if zombie.is_dead or left <= 0:
            zombie.retire()
        else:
            self._zombies.append((zombie, left - 1))
        return acted

    def _replace(self) -> None:
        gone = self._current
        if gone.is_dead or self.world.rng.random() < 0.3:
            gone.die("and nobody misses it")
            gone.retire()
        else:
            self.world.say(f"{gone.name}: thought to be dead, and goes on")
            self.world.report.faults["zombie producer"] += 1
            self._zombies.append((gone, ZOMBIE_ACTS_MAX))
        self._current = self._next()

    def settle(self) -> None:
        for zombie, _ in self._zombies:
            zombie.retire()
        self._zombies.clear()
        if self._current.is_dead:
            self._replace()
        self._current.settle()

    @property
    def is_settled(self) -> bool:
        return not self._zombies and not self._current.is_dead and self._current.is_settled
