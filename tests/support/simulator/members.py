"""What members of both group protocols have in common: they heartbeat, commit, stall, die and come back late.

A member is one process: it believes what it was told last and goes on with that until it is told otherwise. A
`Membership` keeps one place in a group filled: it lets its member stall beyond its session, replaces it while it may
still be running, and lets the old one act on beside the new one for a while.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Protocol

from kio.schema.errors import ErrorCode
from tests.support.simulator.link import Link
from tests.support.simulator.positions import Committer, PositionBook
from tests.support.simulator.retriable import REFUSED_MEMBER

from holdfast.testing.history import Partition

if TYPE_CHECKING:
    from tests.support.simulator.world import World

ZOMBIE_ACTS_MAX = 8


class Member(ABC):
    """One process that is, or thinks it is, a member of a group."""

    commit_versions: tuple[int, ...] = (9,)

    def __init__(self, world: World, name: str, book: PositionBook, instance: str | None) -> None:
        self.world = world
        self.name = name
        self.book = book
        self.instance = instance
        self.link = Link(world, name)
        self.is_dead = False
        self.member_id = ""
        self.owned: frozenset[Partition] = frozenset()
        """What it believes to own."""
        self.stalled_until_ms = -1
        self._waiting = False
        self._wait_until = 0
        """The step before which it does not try again."""

    @property
    def group(self) -> str:
        return self.book.group

    @property
    @abstractmethod
    def committer(self) -> Committer: ...

    @property
    @abstractmethod
    def is_stable(self) -> bool:
        """It has nothing to do but heartbeat."""
        ...

    @property
    @abstractmethod
    def session_ms(self) -> int: ...

    def now_ms(self) -> int:
        return self.world.clock.now().monotonic_ms

    def die(self, why: str) -> None:
        if not self.is_dead:
            self.world.say(f"{self.name}: gone, {why}")
            self.is_dead = True

    def retire(self) -> None:
        self.is_dead = True
        self.link.retire()

    def show(self, partitions: frozenset[Partition]) -> str:
        return ", ".join(self.world.show(partition) for partition in sorted(partitions)) or "nothing"

    def back_off(self) -> None:
        self._wait_until = self.world.later(6)

    # Acting

    def act(self) -> bool:
        if self.is_dead or self._waiting or self.now_ms() < self.stalled_until_ms:
            return False
        if self.world.steps < self._wait_until:
            return False
        if not self.is_stable:
            return self.go_on()
        if self.stalled_until_ms >= 0:
            # Back, and unaware of it: what it was about to do before it stalled.
            self.stalled_until_ms = -1
            if self.owned and self.world.rng.random() < 0.7:
                return self._commit()
        draw = self.world.rng.random()
        if draw < 0.35 and self.owned:
            return self._commit()
        if draw < 0.5:
            return self._fetch_positions()
        if draw < 0.54:
            return self.leave()
        return self.heartbeat()

    def settle(self) -> None:
        """Get to a stable state and stay a member."""
        if self.is_dead or self._waiting or self.world.steps < self._wait_until:
            return
        self.stalled_until_ms = -1
        if not self.is_stable:
            self.go_on()
        elif self.heartbeat_is_due:
            self.heartbeat()

    @property
    def is_settled(self) -> bool:
        return not self.is_dead and not self._waiting and self.is_stable

    @property
    @abstractmethod
    def heartbeat_is_due(self) -> bool: ...

    @abstractmethod
    def go_on(self) -> bool:
        """The next request towards a stable state."""
        ...

    @abstractmethod
    def heartbeat(self) -> bool: ...

    @abstractmethod
    def notice_new_partitions(self) -> None:
        """Nobody reads some partitions: see to it, if that is a member's business."""
        ...

    @abstractmethod
    def leave(self) -> bool: ...

    @abstractmethod
    def _dismissed(self, error: ErrorCode) -> None:
        """Told that it is no member, or not with this generation or epoch."""
        ...

    def ask(
        self,
        kind: str,
        api_key: int,
        version: int,
        fields: Mapping[str, Any],
        then: Callable[[Any], ErrorCode],
        lost: Callable[[], None] | None = None,
    ) -> bool:
        """Send one request; nothing else is sent before it is answered."""
        self._waiting = True

        def answered(response: Any | None) -> None:
            self._waiting = False
            if response is None:
                self.world.count(kind, "unknown")
                if lost is not None:
                    lost()
                return
            error = then(response)
            self.world.count(kind, error.name)
            if error != ErrorCode.none:
                self.world.say(f"{self.name}: {kind}: {error.name}")
                self.back_off()

        self.link.request(api_key, version, fields, answered)
        return True

    # Positions

    def _commit(self) -> bool:
        positions = self.book.next_positions(self.owned & set(self.book.partitions()))
        if not positions:
            return False  # of topics that nobody has told the client the names of
        self._waiting = True

        def then(error: ErrorCode | None) -> None:
            self._waiting = False
            if error in REFUSED_MEMBER:
                assert error is not None
                self._dismissed(error)

        self.book.commit(self.link, positions, self.committer, self.commit_versions, then)
        return True

    def _fetch_positions(self) -> bool:
        self._waiting = True

        def then(_: object) -> None:
            self._waiting = False

        self.book.fetch(self.link, self.committer, then)
        return True


class MakeMember(Protocol):
    def __call__(self, world: World, name: str, book: PositionBook, instance: str | None) -> Member: ...


class Membership:
    """One place in a group, filled by one process after another."""

    def __init__(
        self, world: World, name: str, book: PositionBook, make: MakeMember, *, is_static: bool
    ) -> None:
        self._world = world
        self._name = name
        self._book = book
        self._make = make
        self._instance = f"instance {name}" if is_static else None
        self._lives = 0
        self._zombies: list[tuple[Member, int]] = []
        self.member = self._next()

    def _next(self) -> Member:
        self._lives += 1
        return self._make(self._world, f"{self._name}.{self._lives}", self._book, self._instance)

    def act(self) -> bool:
        rng = self._world.rng
        if self._zombies and rng.random() < 0.25:
            return self._let_zombie_act()
        draw = rng.random()
        if self.member.is_dead or draw < 0.015:
            self._replace()
        elif draw < 0.04 and self.member.is_stable and self.member.stalled_until_ms < 0:
            self._stall()
        return self.member.act()

    def _stall(self) -> None:
        member = self.member
        member.stalled_until_ms = member.now_ms() + int(
            member.session_ms * self._world.rng.choice((0.5, 1.2, 2))
        )
        self._world.say(f"{member.name}: stalls until {member.stalled_until_ms}")
        self._world.report.faults["member stalled"] += 1

    def _let_zombie_act(self) -> bool:
        zombie, left = self._zombies.pop(0)
        acted = zombie.act()
        if zombie.is_dead or left <= 0:
            zombie.retire()
        else:
            self._zombies.append((zombie, left - 1))
        return acted

    def _replace(self) -> None:
        gone = self.member
        if gone.is_dead or self._world.rng.random() < 0.5:
            if not gone.is_dead:
                self._world.say(f"{gone.name}: dies")
                self._world.report.faults["member died"] += 1
            gone.retire()
        else:
            self._world.say(f"{gone.name}: thought to be dead, and goes on")
            self._world.report.faults["zombie member"] += 1
            self._zombies.append((gone, ZOMBIE_ACTS_MAX))
        self.member = self._next()

    def settle(self) -> None:
        for zombie, _ in self._zombies:
            zombie.retire()
        self._zombies.clear()
        if self.member.is_dead:
            self._replace()
        self.member.settle()

    @property
    def is_settled(self) -> bool:
        return not self._zombies and self.member.is_settled


class Group:
    """The places of one group: settled when the members own every partition between them, each once."""

    def __init__(self, book: PositionBook, places: list[Membership]) -> None:
        self.book = book
        self._places = places
        book.lend_member = self._lend_member

    def _lend_member(self) -> Committer:
        stable = [place.member for place in self._places if place.member.is_stable]
        return self.book.world.rng.choice(stable).committer if stable else Committer()

    def act(self) -> bool:
        return self.book.world.rng.choice(self._places).act()

    def settle(self) -> None:
        if not self.is_settled and all(place.is_settled for place in self._places):
            self._places[0].member.notice_new_partitions()
        for place in self._places:
            place.settle()

    @property
    def is_settled(self) -> bool:
        if not all(place.is_settled for place in self._places):
            return False
        owned = [partition for place in self._places for partition in place.member.owned]
        return sorted(owned) == sorted(self.book.partitions())
