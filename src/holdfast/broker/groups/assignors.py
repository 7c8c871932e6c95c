"""Who shall own which partition: the assignors a group of the consumer protocol can choose from.

An assignor is a function of the members (what they subscribe to, what they were meant to own before) and of the
number of partitions of each topic. It decides on the target only; how members get there one step after the other,
without two ever owning the same partition, is `consumer_member`'s business.

What every assignor promises, whatever it is given:

- every partition of a topic somebody subscribes to is given to exactly one of its subscribers;
- nothing else is given to anybody;
- the same input gives the same answer, on every machine.

`uniform` balances: where all members subscribe to the same topics, their shares differ by one at most; where they
do not, no single partition could move to a less loaded subscriber and make the two more equal. Among balanced
answers it takes one that moves as little as it can. `range` gives each member a run of neighbouring partitions of
each topic, the same run of each topic where counts and subscribers agree, which is what joins of streams rely on;
it is sticky only through its order: static members by instance id, then the others by member id.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sized
from heapq import heapify, heappop, heappush, heapreplace
from typing import Final, NamedTuple, TypeAlias
from uuid import UUID

Assignment: TypeAlias = Mapping[UUID, frozenset[int]]
"""Partitions by topic; a topic without partitions has no entry."""

NOTHING: Final[Assignment] = {}
BALANCING_ROUNDS_MAX: Final = 64
"""Over all topics of a mixed group. Every round but the last brings loads closer; real groups need two or three."""


class Subscriber(NamedTuple):
    """A member as an assignor sees it."""

    topics: frozenset[UUID]
    target: Assignment = NOTHING
    """What the last assignment meant it to own."""
    instance_id: str | None = None


Assignor: TypeAlias = Callable[[Mapping[str, Subscriber], Mapping[UUID, int]], dict[str, Assignment]]


def assign_uniform(
    members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]
) -> dict[str, Assignment]:
    if not members:
        return {}
    members = dict(sorted(members.items()))
    first = next(iter(members.values())).topics
    if all(member.topics is first or member.topics == first for member in members.values()):
        return _assign_alike(
            members, {topic: partitions[topic] for topic in sorted(first) if topic in partitions}
        )
    return _Mixed(members, partitions).assign()


def assign_range(members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]) -> dict[str, Assignment]:
    subscribers: dict[UUID, list[str]] = {}
    for name in sorted(members, key=lambda name: _range_order(name, members[name])):
        for topic in members[name].topics:
            if topic in partitions:
                subscribers.setdefault(topic, []).append(name)
    assigned: dict[str, dict[UUID, frozenset[int]]] = {name: {} for name in members}
    for topic in sorted(subscribers):
        names = subscribers[topic]
        share, extra = divmod(partitions[topic], len(names))
        start = 0
        for index, name in enumerate(names):
            end = start + share + (index < extra)
            if end > start:
                assigned[name][topic] = frozenset(range(start, end))
            start = end
    return dict(assigned)


def _range_order(name: str, member: Subscriber) -> tuple[bool, str]:
    return (False, member.instance_id) if member.instance_id is not None else (True, name)


ASSIGNORS: Final[Mapping[str, Assignor]] = {"uniform": assign_uniform, "range": assign_range}


# Uniform, everybody subscribed to the same topics


def _assign_alike(members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]) -> dict[str, Assignment]:
    """Shares are known beforehand: keep what fits into them, then fill up with what is left.

    Most members of a large group keep all they have; theirs is not even copied.
    """
    share, extra = divmod(sum(partitions.values()), len(members))
    free = {topic: set(range(count)) for topic, count in partitions.items()}
    kept = {name: _kept(member.target, free) for name, member in members.items()}
    sizes = {name: _size(own) for name, own in kept.items()}
    # A larger share goes to those who already have that much: it would move a partition to take it from them.
    larger = [name for name, size in sizes.items() if size > share][:extra]
    larger += [name for name, size in sizes.items() if size <= share][: extra - len(larger)]
    quotas = dict.fromkeys(members, share) | dict.fromkeys(larger, share + 1)
    changing = [name for name, size in sizes.items() if size != quotas[name]]
    own = {name: {topic: sorted(indexes) for topic, indexes in kept[name].items()} for name in changing}
    for name in changing:
        _give_back(own[name], sizes[name] - quotas[name], free)
    spare = [(topic, index) for topic, indexes in free.items() for index in sorted(indexes)]
    spare.reverse()
    for name in changing:
        for _ in range(quotas[name] - sizes[name]):
            topic, index = spare.pop()
            own[name].setdefault(topic, []).append(index)
    return kept | {name: _assignment(own[name]) for name in changing}


def _kept(target: Assignment, free: dict[UUID, set[int]]) -> Assignment:
    """Take what is still to be had of a member's last target; the target itself if that is all of it."""
    if all(topic in free and free[topic].issuperset(indexes) for topic, indexes in target.items()):
        for topic, indexes in target.items():
            free[topic] -= indexes
        return target
    return _assignment(_claim(target, free))


def _claim(target: Assignment, free: dict[UUID, set[int]]) -> dict[UUID, list[int]]:
    """The same, to be worked on."""
    own: dict[UUID, list[int]] = {}
    for topic in sorted(target):
        available = free.get(topic)
        if available is None:
            continue
        indexes = sorted(target[topic] & available)
        if indexes:
            own[topic] = indexes
            available.difference_update(indexes)
    return own


def _give_back(own: dict[UUID, list[int]], count: int, free: dict[UUID, set[int]]) -> None:
    while count > 0:
        topic = max(own)
        free[topic].add(own[topic].pop())
        if not own[topic]:
            del own[topic]
        count -= 1


def _size(own: Mapping[UUID, Sized]) -> int:
    size = 0
    for indexes in own.values():
        size += len(indexes)
    return size


def _assignment(own: Mapping[UUID, list[int]]) -> Assignment:
    return {topic: frozenset(indexes) for topic, indexes in own.items() if indexes}


# Uniform, subscriptions differ


class _Mixed:
    """Loads move towards each other topic by topic, until no topic has anything left to even out."""

    def __init__(self, members: Mapping[str, Subscriber], partitions: Mapping[UUID, int]) -> None:
        self._names = list(members)
        self._members = members
        self._subscribers: dict[UUID, list[int]] = {}
        for number, member in enumerate(members.values()):
            for topic in member.topics:
                if topic in partitions:
                    self._subscribers.setdefault(topic, []).append(number)
        # The topics with most partitions for each subscriber first: there is least choice in them.
        self._topics = sorted(
            self._subscribers,
            key=lambda topic: (-partitions[topic] / len(self._subscribers[topic]), topic),
        )
        self._free = {topic: set(range(partitions[topic])) for topic in self._topics}
        self._own: list[dict[UUID, list[int]]] = []
        self._loads: list[int] = []

    def assign(self) -> dict[str, Assignment]:
        for member in self._members.values():
            subscribed = {topic: kept for topic, kept in member.target.items() if topic in member.topics}
            own = _claim(subscribed, self._free)
            self._own.append(own)
            self._loads.append(_size(own))
        for topic in self._topics:
            self._hand_out(topic)
        for _ in range(BALANCING_ROUNDS_MAX):
            if not sum(self._even_out(topic) for topic in self._topics):
                break
        return {name: _assignment(self._own[number]) for number, name in enumerate(self._names)}

    def _hand_out(self, topic: UUID) -> None:
        """Give each free partition of a topic to the subscriber with least at that moment."""
        loads = self._loads
        least = [(loads[number], number) for number in self._subscribers[topic]]
        heapify(least)
        for index in sorted(self._free[topic]):
            load, number = least[0]
            self._own[number].setdefault(topic, []).append(index)
            loads[number] = load + 1
            heapreplace(least, (load + 1, number))

    def _even_out(self, topic: UUID) -> int:
        """Move partitions of a topic from its most to its least loaded subscriber; how many were moved."""
        loads, own = self._loads, self._own
        numbers = self._subscribers[topic]
        least = [(loads[number], number) for number in numbers]
        most = [(-loads[number], number) for number in numbers if own[number].get(topic)]
        heapify(least)
        heapify(most)
        moved = 0
        # An entry whose load is no longer true was pushed anew when the load changed.
        while most:
            giver_load, giver = -most[0][0], most[0][1]
            if giver_load != loads[giver] or not own[giver].get(topic):
                heappop(most)
                continue
            taker_load, taker = least[0]
            if taker_load != loads[taker]:
                heappop(least)
                continue
            if giver_load - taker_load < 2:
                break
            own[taker].setdefault(topic, []).append(own[giver][topic].pop())
            for number, change in ((giver, -1), (taker, 1)):
                loads[number] += change
                heappush(least, (loads[number], number))
                heappush(most, (-loads[number], number))
            moved += 1
        return moved
