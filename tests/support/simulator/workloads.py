"""Which clients a seed has, and how often each acts.

Not each seed does everything: a seed draws one of the workloads, so that its 200 operations are enough to get
somewhere with each of its clients.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from tests.support import history
from tests.support.history import Partition
from tests.support.simulator.consumers import EARLIEST, Consumer, SessionConsumer
from tests.support.simulator.group_members import COOPERATIVE, EAGER, ClassicMember, ConsumerMember
from tests.support.simulator.link import Link
from tests.support.simulator.members import Group, GroupOffsets, MakeMember, Membership, OffsetsReading
from tests.support.simulator.operators import Administrator, GroupTool, Stranger
from tests.support.simulator.producers import IdempotentProducer, PlainProducer
from tests.support.simulator.transactional import TransactionalProducer

if TYPE_CHECKING:
    from tests.support.simulator.world import World


LASTING = ("orders", "payments")
"""Topics that groups read: never deleted, since a group's committed offsets go with them."""
Kind: TypeAlias = Literal["records", "transactions", "groups", "everything"]
KINDS: tuple[Kind, ...] = ("records", "transactions", "groups", "everything")


class Actor(Protocol):
    """A client, or several that belong together."""

    def act(self) -> bool:
        """Send one request of its own accord; false when there is nothing to send."""
        ...

    def settle(self) -> None:
        """Faults are over: bring what is under way to its end, begin nothing."""
        ...

    @property
    def is_settled(self) -> bool: ...


class Reading(Protocol):
    """Something to find out after a restart."""

    def act(self) -> None: ...

    def is_done(self) -> bool: ...


class Workload:
    def __init__(self, world: World) -> None:
        self._world = world
        self._actors: list[Actor] = []
        self._weights: list[int] = []
        self._books: list[GroupOffsets] = []
        self.kind = world.rng.choice(KINDS)
        self.flushes_max = 1 if self.kind == "records" else 4
        """How much the disk gets done in a step at best: what coordinators do takes several flushes in turn."""
        self._plain = [PlainProducer(world, "q1"), PlainProducer(world, "q2")]
        if self.kind == "records":
            self._admin = Administrator(world, "admin")
            self._add(15, IdempotentProducer(world, "p1"), IdempotentProducer(world, "p2"))
            self._add(10, *self._plain)
            self._add(10, Consumer(world, "c1"), Consumer(world, "c2"), SessionConsumer(world, "c3"))
            self._add(20, self._admin)
        else:
            has_transactions = self.kind != "groups"
            self._admin = Administrator(world, "admin", LASTING, likes_compacted=has_transactions)
            self._add(5, IdempotentProducer(world, "p1"), *self._plain)
            self._add(15, self._admin)
            self._add(3, Stranger(world, "stranger"))
        if self.kind in ("groups", "everything"):
            self._add_groups()
        if self.kind in ("transactions", "everything"):
            self._add_transactions()

    def _book(self, group: str, topics: tuple[str, ...] = LASTING) -> GroupOffsets:
        book = GroupOffsets(self._world, group, topics)
        self._books.append(book)
        return book

    def _add_groups(self) -> None:
        world = self._world
        self._mixes_eager = world.rng.random() < 0.5
        drawn = world.rng.sample(("eager", "cooperative", "consumer", "consumer 2", "mixed"), 2)
        for name in drawn:
            book = self._book(name, LASTING if world.rng.random() < 0.7 else LASTING[:1])
            places = [
                Membership(
                    world,
                    f"{name} {number}",
                    book,
                    self._make_member(name, number),
                    is_static=world.rng.random() < 0.3,
                )
                for number in range(world.rng.randint(2, 3))
            ]
            self._add(35, Group(book, places))
        self._add(8, GroupTool(world, "tool", list(self._books), self._book("loner")))

    def _make_member(self, group: str, number: int) -> MakeMember:
        if group.startswith("consumer") or (group == "mixed" and number == 0):
            return ConsumerMember
        protocol = EAGER if group == "eager" or (group == "mixed" and self._mixes_eager) else COOPERATIVE
        return partial(ClassicMember, protocol=protocol, is_mixed=group == "mixed")

    def _add_transactions(self) -> None:
        world = self._world
        groups = list(self._books) or [self._book("copy x1"), self._book("copy x2")]
        first = TransactionalProducer(world, "x1", groups[0])
        second = TransactionalProducer(world, "x2", groups[1])
        self._add(25, first, second)
        self._add(6, Consumer(world, "c1"), SessionConsumer(world, "c2", committed_only=True))
        self._add(6, Consumer(world, "c3", committed_only=True))

    def _add(self, weight: int, *actors: Actor) -> None:
        self._actors += actors
        self._weights += [weight] * len(actors)
        self._bounds = list(accumulate(self._weights))

    def act(self) -> bool:
        """Let one client act."""
        return self._world.rng.choices(self._actors, cum_weights=self._bounds)[0].act()

    def settle(self) -> None:
        for actor in self._actors:
            actor.settle()

    @property
    def is_settled(self) -> bool:
        return all(actor.is_settled for actor in self._actors)

    def leave_unflushed(self) -> None:
        """Something written and not flushed, for the next start to find in the page cache."""
        for producer in self._plain:
            producer.act()
            producer.link.deliver()

    def readings(self, when: str) -> Iterator[Reading]:
        """What readers that know nothing find out after a restart, one after the other."""
        yield MetadataReading(self._admin)
        yield LogReading(self._world, f"reader {when}")
        yield LogReading(self._world, f"reader of committed {when}", committed_only=True)
        self._world.observe(history.EverythingSettled())
        link = Link(self._world, f"reader of committed offsets {when}")
        for book in self._books:
            yield OffsetsReading(book, link)


class MetadataReading:
    def __init__(self, admin: Administrator) -> None:
        self._admin = admin
        self._asked = False

    def __str__(self) -> str:
        return "metadata"

    def act(self) -> None:
        self._admin.link.deliver()
        self._asked = self._admin.act(may_change=False) or self._asked

    def is_done(self) -> bool:
        return self._asked and self._admin.is_settled


class LogReading:
    """Every partition from its start to its end."""

    def __init__(self, world: World, name: str, committed_only: bool = False) -> None:
        self._world = world
        self._reader = Consumer(world, name, committed_only)
        self._waiting = world.all_partitions()
        self._asked: set[Partition] = set()
        if committed_only:
            for known in self._waiting:
                world.observe(history.ScanBegun(name, known.partition))

    def __str__(self) -> str:
        return f"read {', '.join(map(str, self._waiting))}"

    def act(self) -> None:
        reader = self._reader
        reader.link.deliver()
        if reader.is_waiting:
            return
        unknown = [known for known in self._waiting if known.partition not in self._asked]
        if unknown:
            self._asked.update(known.partition for known in unknown)
            reader.list_offsets(unknown, EARLIEST)
        else:
            reader.fetch(self._waiting)

    def is_done(self) -> bool:
        for known in [known for known in self._waiting if self._is_read(known.partition)]:
            self._waiting.remove(known)
            if self._reader.committed_only:
                shown = tuple(self._reader.shown.get(known.partition, ()))
                self._world.observe(history.PartitionScanned(self._reader.name, known.partition, shown))
        return not self._waiting and not self._reader.is_waiting

    def _is_read(self, partition: Partition) -> bool:
        end = self._reader.ends.get(partition)
        return end is not None and self._reader.positions.get(partition, 0) >= end
