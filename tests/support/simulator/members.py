"""Groups: what their members of both protocols have in common, and the offsets they commit.

A member heartbeats, commits, stalls, dies and comes back late. It is one process: it believes what it was told last and
goes on with that until it is told otherwise. A `Membership` keeps one place in a group filled: it lets its member stall
beyond its session, replaces it while it may still be running, and lets the old one act on beside the new one for a
while.

`GroupOffsets` is a group's committed offsets as clients see them: what is committed next, under which name, and what
is read back. The numbers are not offsets of records that were read. To the coordinator they are numbers, and the
checkers want to know which commit one came from, not whether it is useful.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from kio.schema.errors import ErrorCode
from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.link import NOT_NOW, REFUSED_MEMBER, Client, Link

from holdfast.wire.api_keys import OFFSET_COMMIT, OFFSET_FETCH

if TYPE_CHECKING:
    from tests.support.simulator.world import World


class Committer(NamedTuple):
    """In whose name a group's committed offsets are committed or fetched; by default in nobody's."""

    member_id: str = ""
    generation: int = -1
    """Or the member's epoch."""
    instance_id: str | None = None


NOBODY = Committer()


class GroupOffsets:
    """The offsets of one group."""

    def __init__(self, world: World, group: str, topics: tuple[str, ...]) -> None:
        self.world = world
        self.group = group
        self.topic_names = topics
        self.lend_member: Callable[[], Committer] = lambda: NOBODY
        """A member in whose name a transaction may send offsets, if the group has one."""
        self.instances: dict[str, str] = {}
        """The member id that each static member of the group was last given."""
        self._next: dict[Partition, int] = {}
        self._commits = 0

    def partitions(self) -> list[Partition]:
        """Every partition of the group's topics that is known to exist."""
        topics = [self.world.topics[name] for name in self.topic_names if name in self.world.topics]
        return [(topic.topic_id, index) for topic in topics for index in range(topic.partitions)]

    def next_offsets(self, among: Iterable[Partition] | None = None) -> dict[Partition, int]:
        """Some offsets, each beyond the last that was accepted."""
        candidates = sorted(among) if among is not None else self.partitions()
        if not candidates:
            return {}
        rng = self.world.rng
        chosen = rng.sample(candidates, rng.randint(1, len(candidates)))
        return {partition: self._next.get(partition, 0) + rng.randint(1, 5) for partition in chosen}

    def accepted(self, offsets: Mapping[Partition, int]) -> None:
        for partition, offset in offsets.items():
            self._next[partition] = max(self._next.get(partition, 0), offset)

    def name(self, committer: str) -> str:
        """A name that no other commit of the group has."""
        self._commits += 1
        return f"{committer}/{self._commits}"

    def to_topics(
        self, offsets: Mapping[Partition, int], commit: str, by_id: bool = False
    ) -> list[dict[str, Any]]:
        """Offsets as OffsetCommit and TxnOffsetCommit have them."""
        topics: dict[str, dict[str, Any]] = {}
        for partition, offset in offsets.items():
            known = self.world.known(partition)
            name = {"topic_id": known.topic.uuid} if by_id else {"name": known.topic.name}
            topic = topics.setdefault(known.topic.name, {**name, "partitions": []})
            topic["partitions"].append(
                {
                    "partition_index": known.index,
                    "committed_offset": offset,
                    "committed_leader_epoch": -1,
                    "committed_metadata": commit,
                }
            )
        return list(topics.values())

    def error_of(self, response: Any) -> ErrorCode:
        """The one error of an answer; all partitions of it are in the same boat."""
        errors: set[ErrorCode] = {
            partition.error_code for topic in response.topics for partition in topic.partitions
        }
        if len(errors) != 1:
            self.world.unexpected(f"{self.group}: offsets were answered {sorted(errors)}")
        return next(iter(errors))

    def show(self, offsets: Mapping[Partition, int]) -> str:
        return ", ".join(f"{self.world.known(partition)}={offset}" for partition, offset in offsets.items())

    # OffsetCommit

    def commit(
        self,
        link: Link,
        offsets: Mapping[Partition, int],
        committer: Committer,
        versions: tuple[int, ...],
        then: Callable[[ErrorCode | None], None],
    ) -> None:
        """Send offsets; `then` gets the answer's error, None when there was no answer."""
        commit = self.name(link.name)
        version = self.world.rng.choice(versions)
        self.world.observe(
            history.OffsetsCommitSent(
                self.group, commit, dict(offsets), committer.member_id, committer.generation
            )
        )
        self.world.say(f"{link.name}: {commit} of {self.group} {self.show(offsets)}")
        self.world.faults.bad_moment(0.02)
        fields = {
            "group_id": self.group,
            "generation_id_or_member_epoch": committer.generation,
            "member_id": committer.member_id,
            "group_instance_id": committer.instance_id,
            "topics": self.to_topics(offsets, commit, by_id=version >= 10),
        }
        answered = partial(self._committed, link, commit, dict(offsets), then)
        link.request(OFFSET_COMMIT, version, fields, answered)

    def _committed(
        self,
        link: Link,
        commit: str,
        offsets: dict[Partition, int],
        then: Callable[[ErrorCode | None], None],
        response: Any | None,
    ) -> None:
        if response is None:
            self.world.count("commit offsets", "unknown")
            then(None)
            return
        error = self.error_of(response)
        self.world.count("commit offsets", error.name)
        self.world.say(f"{link.name}: {commit} {error.name}")
        if error == ErrorCode.none:
            self.accepted(offsets)
            self.world.observe(history.OffsetsCommitAnswered(self.group, commit, accepted=tuple(offsets)))
        elif error in REFUSED_MEMBER:
            self.world.observe(history.OffsetsCommitAnswered(self.group, commit, refused=tuple(offsets)))
        elif error not in NOT_NOW and error != ErrorCode.rebalance_in_progress:
            self.world.refused(f"{link.name}: commit of {self.group}", error)
        then(error)

    # OffsetFetch

    def fetch(
        self,
        link: Link,
        committer: Committer,
        then: Callable[[Mapping[Partition, tuple[int, str] | None] | None], None],
        stable_only: bool | None = None,
    ) -> None:
        """Ask for all offsets of the group's topics; `then` gets those that are stable, None for no answer."""
        rng = self.world.rng
        stable = rng.random() < 0.5 if stable_only is None else stable_only
        version = rng.choice((7, 8, 9, 10) if stable else (5, 7, 8, 9, 10))
        names = [name for name in self.topic_names if name in self.world.topics]
        topics = [
            {
                **({"topic_id": self.world.topics[name].uuid} if version >= 10 else {"name": name}),
                "partition_indexes": list(range(self.world.topics[name].partitions)),
            }
            for name in names
        ]
        group: dict[str, Any] = {"group_id": self.group, "topics": topics}
        if version >= 9:
            group |= {"member_id": committer.member_id or None, "member_epoch": committer.generation}
        fields = {"require_stable": stable, **({"groups": [group]} if version >= 8 else group)}
        self.world.observe(history.OffsetsFetchBegun(link.name, self.group))
        link.request(OFFSET_FETCH, version, fields, partial(self._fetched, link, version, then))

    def _fetched(
        self,
        link: Link,
        version: int,
        then: Callable[[Mapping[Partition, tuple[int, str] | None] | None], None],
        response: Any | None,
    ) -> None:
        if response is None:
            self.world.count("fetch offsets", "unknown")
            then(None)
            return
        answer = response.groups[0] if version >= 8 else response
        self.world.count("fetch offsets", answer.error_code.name)
        if answer.error_code != ErrorCode.none:
            if answer.error_code not in NOT_NOW and answer.error_code not in REFUSED_MEMBER:
                self.world.refused(f"{link.name}: committed offsets of {self.group}", answer.error_code)
            then(None)
            return
        found: dict[Partition, tuple[int, str] | None] = {}
        for topic in answer.topics:
            topic_id = topic.topic_id.hex if version >= 10 else self.world.topics[topic.name].topic_id
            for each in topic.partitions:
                if each.error_code == ErrorCode.unstable_offset_commit:
                    self.world.count("fetch offsets", "unstable")
                elif each.error_code != ErrorCode.none:
                    self.world.refused(f"{link.name}: committed offsets of {self.group}", each.error_code)
                elif each.committed_offset < 0:
                    found[topic_id, each.partition_index] = None
                else:
                    found[topic_id, each.partition_index] = (each.committed_offset, each.metadata)
        self.world.observe(history.OffsetsFetched(link.name, self.group, found))
        then(found)


class OffsetsReading:
    """All offsets of a group, once no transaction is open any more."""

    def __init__(self, book: GroupOffsets, link: Link) -> None:
        self._book = book
        self._link = link
        self._waiting = False
        self._done = False

    def __str__(self) -> str:
        return f"committed offsets of {self._book.group}"

    def act(self) -> None:
        self._link.deliver()
        if not self._waiting and not self._done:
            self._waiting = True
            self._book.fetch(self._link, NOBODY, self._fetched, stable_only=True)

    def _fetched(self, found: Mapping[Partition, tuple[int, str] | None] | None) -> None:
        self._waiting = False
        self._done = found is not None and set(found) == set(self._book.partitions())

    def is_done(self) -> bool:
        return self._done


ZOMBIE_ACTS_MAX = 8


class Member(Client, ABC):
    """One process that is, or thinks it is, a member of a group."""

    commit_versions: tuple[int, ...] = (9,)

    def __init__(self, world: World, name: str, book: GroupOffsets, instance: str | None) -> None:
        super().__init__(world, name)
        self.book = book
        self.instance = instance
        self.is_dead = False
        self.member_id = ""
        self.owned: frozenset[Partition] = frozenset()
        """What it believes to own."""
        self.stalled_until_ms = -1
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
        if self.is_dead or self.is_waiting or self.now_ms() < self.stalled_until_ms:
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
            return self._fetch_offsets()
        if draw < 0.54:
            return self.leave()
        return self.heartbeat()

    def settle(self) -> None:
        """Get to a stable state and stay a member."""
        if self.is_dead or self.is_waiting or self.world.steps < self._wait_until:
            return
        self.stalled_until_ms = -1
        if not self.is_stable:
            self.go_on()
        elif self.heartbeat_is_due:
            self.heartbeat()

    @property
    def is_settled(self) -> bool:
        return not self.is_dead and not self.is_waiting and self.is_stable

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

    def tell(
        self,
        kind: str,
        api_key: int,
        version: int,
        fields: Mapping[str, Any],
        then: Callable[[Any], ErrorCode],
        lost: Callable[[], None] = lambda: None,
    ) -> bool:
        """Ask; `then` takes the answer, and after an error the member backs off."""

        def answered(response: Any) -> None:
            error = then(response)
            self.world.count(kind, error.name)
            if error != ErrorCode.none:
                self.world.say(f"{self.name}: {kind}: {error.name}")
                self.back_off()

        return self.ask(kind, api_key, version, fields, answered, lost)

    # Committed offsets

    def _commit(self) -> bool:
        offsets = self.book.next_offsets(self.owned & set(self.book.partitions()))
        if not offsets:
            return False  # of topics that nobody has told the client the names of
        self.is_waiting = True

        def then(error: ErrorCode | None) -> None:
            self.is_waiting = False
            if error in REFUSED_MEMBER:
                assert error is not None
                self._dismissed(error)

        self.book.commit(self.link, offsets, self.committer, self.commit_versions, then)
        return True

    def _fetch_offsets(self) -> bool:
        self.is_waiting = True

        def then(_: object) -> None:
            self.is_waiting = False

        self.book.fetch(self.link, self.committer, then)
        return True


class MakeMember(Protocol):
    def __call__(self, world: World, name: str, book: GroupOffsets, instance: str | None) -> Member: ...


class Membership:
    """One place in a group, filled by one process after another."""

    def __init__(
        self, world: World, name: str, book: GroupOffsets, make: MakeMember, *, is_static: bool
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

    def __init__(self, book: GroupOffsets, places: list[Membership]) -> None:
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
