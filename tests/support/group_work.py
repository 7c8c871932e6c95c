"""Work for a consumer group of real clients: topics that get messages in phases, and members that read each once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final, NamedTuple

from tests.support.group_clients import MEMBERS, Event, Member, is_shared, pump
from tests.support.java_member import JavaMember

from holdfast.testing.engines import Engine, Place

MESSAGES: Final = 10
"""In each partition, in each phase."""
PARTITIONS: Final = 3


class Kind(NamedTuple):
    """A client and how it takes part."""

    client: str
    assignor: str
    protocol: str = "classic"

    def __str__(self) -> str:
        return f"{self.client}-{self.protocol}-{self.assignor}"

    def join(self, engine: Engine, group: str, topics: Sequence[str], **options: Any) -> Member:
        if self.protocol != "classic":
            options["protocol"] = self.protocol
        make = JavaMember if self.client == "java" else MEMBERS[self.client]
        return make(engine.bootstrap_servers, group, topics, assignor=self.assignor, **options)


class Work:
    """Topics that get ten messages a partition and phase, and the group that reads them."""

    def __init__(self, engine: Engine, name: str, topics: int = 2) -> None:
        self.engine = engine
        self.group = f"group-{name}"
        self.topics = [engine.create_topic(f"{name}-{which}", PARTITIONS) for which in "abcd"[:topics]]
        self.places: list[Place] = [(topic, index) for topic in self.topics for index in range(PARTITIONS)]
        self.written: list[str] = []
        self.members: list[Member] = []
        """Everybody who ever was a member."""
        self.present: list[Member] = []

    def join(self, kind: Kind, **options: Any) -> Member:
        member = kind.join(self.engine, self.group, self.topics, **options)
        self.members.append(member)
        self.present.append(member)
        return member

    def leave(self, member: Member) -> None:
        self.present.remove(member)
        member.close()

    def close(self) -> None:
        while self.present:
            self.leave(self.present[-1])

    def share(self, what: str, sizes: Sequence[int] | None = None) -> None:
        """Poll until the present members hold everything between them, and (if told) in shares of these sizes."""

        def is_settled() -> bool:
            if sizes is not None:
                held = [place for member in self.present for place in member.assignment]
                return self.sizes() == sorted(sizes) and sorted(held) == sorted(self.places)
            return is_shared(self.present, self.places)

        pump(self.present, is_settled, what)

    def write(self, phase: str) -> None:
        for topic in self.topics:
            values = {
                index: [f"{phase} {topic} {index} {number}" for number in range(MESSAGES)]
                for index in range(PARTITIONS)
            }
            self.engine.write(topic, values)
            self.written += [value for some in values.values() for value in some]

    def read(self, what: str) -> None:
        """Poll until as many messages were read as written so far, and see that each was read once."""

        def everything() -> bool:
            return sum(len(member.seen) for member in self.members) >= len(self.written)

        pump(self.present, everything, what)
        counts = Counter(seen.value for member in self.members for seen in member.seen)
        wrong = {value: counts[value] for value in {*counts, *self.written} if counts[value] != 1}
        assert not wrong, f"{what}: read not once but {wrong}"

    def write_and_read(self, phase: str) -> None:
        """A phase: written, read once by those present, committed."""
        self.write(phase)
        self.read(phase)
        self.commit()

    def commit(self) -> None:
        """Everybody commits, while the others are polled: a client may first have to take part in a rebalance."""
        with ThreadPoolExecutor(1) as pool:
            for member in self.present:
                others = [each for each in self.present if each is not member]
                committing = pool.submit(member.commit)
                pump(others, committing.done, "a member has committed")
                committing.result()

    def shape(self) -> list[list[list[int]]]:
        """Which partitions of each topic a member holds, for every member, without saying which is which."""
        return sorted(
            [sorted(index for topic, index in member.assignment if topic == each) for each in self.topics]
            for member in self.present
        )

    def sizes(self) -> list[int]:
        return sorted(len(member.assignment) for member in self.present)


def happened(events: Sequence[Event]) -> list[tuple[str, int]]:
    """What a member was told, with how many partitions."""
    return [(event.kind, len(event.places)) for event in events if event.places]
