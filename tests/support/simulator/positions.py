"""Committed positions as clients see them: what is committed next, under which name, and what is read back.

The numbers are not offsets of records that were read. To the coordinator they are numbers, and the checkers want to
know which commit one came from, not whether it is useful.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from kio.schema.errors import ErrorCode
from tests.support.simulator.retriable import NOT_NOW, REFUSED_MEMBER

from holdfast.testing import history
from holdfast.testing.history import Partition

if TYPE_CHECKING:
    from tests.support.simulator.link import Link
    from tests.support.simulator.world import World

OFFSET_COMMIT = 8
OFFSET_FETCH = 9


class Committer(NamedTuple):
    """In whose name a group's positions are committed or fetched; by default in nobody's."""

    member_id: str = ""
    generation: int = -1
    """Or the member's epoch."""
    instance_id: str | None = None


NOBODY = Committer()


class PositionBook:
    """The positions of one group."""

    def __init__(self, world: World, group: str, topics: tuple[str, ...]) -> None:
        self.world = world
        self.group = group
        self.topic_names = topics
        self.lend_member: Callable[[], Committer] = lambda: NOBODY
        """A member in whose name a transaction may send positions, if the group has one."""
        self.instances: dict[str, str] = {}
        """The member id that each static member of the group was last given."""
        self._next: dict[Partition, int] = {}
        self._commits = 0

    def partitions(self) -> list[Partition]:
        """Every partition of the group's topics that is known to exist."""
        topics = [self.world.topics[name] for name in self.topic_names if name in self.world.topics]
        return [(topic.topic_id, index) for topic in topics for index in range(topic.partitions)]

    def next_positions(self, among: Iterable[Partition] | None = None) -> dict[Partition, int]:
        """Some positions, each beyond the last that was accepted."""
        candidates = sorted(among) if among is not None else self.partitions()
        if not candidates:
            return {}
        rng = self.world.rng
        chosen = rng.sample(candidates, rng.randint(1, len(candidates)))
        return {partition: self._next.get(partition, 0) + rng.randint(1, 5) for partition in chosen}

    def accepted(self, positions: Mapping[Partition, int]) -> None:
        for partition, offset in positions.items():
            self._next[partition] = max(self._next.get(partition, 0), offset)

    def name(self, committer: str) -> str:
        """A name that no other commit of the group has."""
        self._commits += 1
        return f"{committer}/{self._commits}"

    def to_topics(
        self, positions: Mapping[Partition, int], commit: str, by_id: bool = False
    ) -> list[dict[str, Any]]:
        """Positions as OffsetCommit and TxnOffsetCommit have them."""
        topics: dict[str, dict[str, Any]] = {}
        for partition, offset in positions.items():
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
            self.world.unexpected(f"{self.group}: positions were answered {sorted(errors)}")
        return next(iter(errors))

    def show(self, positions: Mapping[Partition, int]) -> str:
        return ", ".join(f"{self.world.known(partition)}={offset}" for partition, offset in positions.items())

    # OffsetCommit

    def commit(
        self,
        link: Link,
        positions: Mapping[Partition, int],
        committer: Committer,
        versions: tuple[int, ...],
        then: Callable[[ErrorCode | None], None],
    ) -> None:
        """Send positions; `then` gets the answer's error, None when there was no answer."""
        commit = self.name(link.name)
        version = self.world.rng.choice(versions)
        self.world.observe(
            history.PositionsCommitSent(
                self.group, commit, dict(positions), committer.member_id, committer.generation
            )
        )
        self.world.say(f"{link.name}: {commit} of {self.group} {self.show(positions)}")
        self.world.faults.bad_moment(0.02)
        fields = {
            "group_id": self.group,
            "generation_id_or_member_epoch": committer.generation,
            "member_id": committer.member_id,
            "group_instance_id": committer.instance_id,
            "topics": self.to_topics(positions, commit, by_id=version >= 10),
        }
        answered = partial(self._committed, link, commit, dict(positions), then)
        link.request(OFFSET_COMMIT, version, fields, answered)

    def _committed(
        self,
        link: Link,
        commit: str,
        positions: dict[Partition, int],
        then: Callable[[ErrorCode | None], None],
        response: Any | None,
    ) -> None:
        if response is None:
            self.world.count("commit positions", "unknown")
            then(None)
            return
        error = self.error_of(response)
        self.world.count("commit positions", error.name)
        self.world.say(f"{link.name}: {commit} {error.name}")
        if error == ErrorCode.none:
            self.accepted(positions)
            self.world.observe(history.PositionsCommitAnswered(self.group, commit, accepted=tuple(positions)))
        elif error in REFUSED_MEMBER:
            self.world.observe(history.PositionsCommitAnswered(self.group, commit, refused=tuple(positions)))
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
        """Ask for all positions of the group's topics; `then` gets those that are stable, None for no answer."""
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
        self.world.observe(history.PositionsFetchBegun(link.name, self.group))
        link.request(OFFSET_FETCH, version, fields, partial(self._fetched, link, version, then))

    def _fetched(
        self,
        link: Link,
        version: int,
        then: Callable[[Mapping[Partition, tuple[int, str] | None] | None], None],
        response: Any | None,
    ) -> None:
        if response is None:
            self.world.count("fetch positions", "unknown")
            then(None)
            return
        answer = response.groups[0] if version >= 8 else response
        self.world.count("fetch positions", answer.error_code.name)
        if answer.error_code != ErrorCode.none:
            if answer.error_code not in NOT_NOW and answer.error_code not in REFUSED_MEMBER:
                self.world.refused(f"{link.name}: positions of {self.group}", answer.error_code)
            then(None)
            return
        found: dict[Partition, tuple[int, str] | None] = {}
        for topic in answer.topics:
            topic_id = topic.topic_id.hex if version >= 10 else self.world.topics[topic.name].topic_id
            for each in topic.partitions:
                if each.error_code == ErrorCode.unstable_offset_commit:
                    self.world.count("fetch positions", "unstable")
                elif each.error_code != ErrorCode.none:
                    self.world.refused(f"{link.name}: positions of {self.group}", each.error_code)
                elif each.committed_offset < 0:
                    found[topic_id, each.partition_index] = None
                else:
                    found[topic_id, each.partition_index] = (each.committed_offset, each.metadata)
        self.world.observe(history.PositionsFetched(link.name, self.group, found))
        then(found)


class PositionsReading:
    """All positions of a group, once no transaction is open any more."""

    def __init__(self, book: PositionBook, link: Link) -> None:
        self._book = book
        self._link = link
        self._waiting = False
        self._done = False

    def __str__(self) -> str:
        return f"positions of {self._book.group}"

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
