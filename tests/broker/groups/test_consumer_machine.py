"""A group of the consumer protocol under everything that can happen to it, against what must always be true.

The clients here behave as real ones do: they use a partition from the answer that gave it to them until they have given
it up by their own doing, some time after they were told to. They crash, lose answers, come back; topics come and go;
the coordinator is killed and rebuilt, from a compacted log too; its log refuses to be written.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    initialize,
    invariant,
    precondition,
    rule,
)
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld
from tests.support.tiers import examples

from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import ConsumerReply
from holdfast.errors import ApiError

Partitions = dict[UUID, frozenset[int]]
LATE = (ErrorCode.unknown_member_id, ErrorCode.fenced_member_epoch, ErrorCode.group_id_not_found)
TOPICS = ("a", "b", "ab", "c")
SUBSCRIPTIONS = st.sampled_from([("a",), ("a",), ("a", "b"), ("a", "c"), ("c",), ()])
EXPRESSIONS = st.sampled_from([None, None, None, "a.*", ".*"])
INSTANCES = st.sampled_from([None, None, "i", "j"])


def pairs(partitions: Partitions) -> set[tuple[UUID, int]]:
    return {(topic_id, index) for topic_id, indexes in partitions.items() for index in indexes}


def as_partitions(owned: set[tuple[UUID, int]]) -> Partitions:
    topics: dict[UUID, set[int]] = {}
    for topic_id, index in owned:
        topics.setdefault(topic_id, set()).add(index)
    return {topic_id: frozenset(indexes) for topic_id, indexes in topics.items()}


@dataclass
class Client:
    """One consumer process."""

    name: str
    instance_id: str | None
    names: tuple[str, ...]
    regex: str | None
    epoch: int = 0
    owned: set[tuple[UUID, int]] = field(default_factory=set)
    told: set[tuple[UUID, int]] = field(default_factory=set)
    """What the last answer that said anything told it to use."""
    is_unsure: bool = True
    """It has lost track, and says everything with its next heartbeat."""

    def topics(self, world: GroupWorld) -> dict[UUID, int]:
        """What it subscribes to that exists, with the number of partitions."""
        names = [
            name
            for name in world.topics.names()
            if name in self.names or (self.regex is not None and re.fullmatch(self.regex, name))
        ]
        found = [facts for name in names if (facts := world.topics.by_name(name)) is not None]
        return {facts.topic_id: facts.partitions for facts in found}

    def request(self) -> dict[str, Any]:
        fields: dict[str, Any] = {"instance_id": self.instance_id}
        if self.is_unsure or self.epoch == 0:
            fields |= {
                "topics": list(self.names),
                "regex": self.regex or "",
                "rebalance_timeout_ms": 10_000,
                "owned": as_partitions(self.owned),
            }
        elif self.owned == self.told:
            fields["owned"] = as_partitions(self.owned)
        return fields

    def hear(self, reply: ConsumerReply) -> None:
        self.is_unsure = False
        self.epoch = reply.member_epoch
        if reply.assignment is not None:
            self.told = pairs(dict(reply.assignment))
            # What is new can be used at once only when nothing has to be given up first.
            if not self.owned - self.told:
                self.owned = set(self.told)

    def give_up(self) -> None:
        """Stop using what it was told to give up; then it may use what it was given."""
        self.owned = set(self.told)

    def start_over(self) -> None:
        self.epoch, self.owned, self.told, self.is_unsure = 0, set(), set(), True


class ConsumerGroupMachine(RuleBasedStateMachine):
    clients = Bundle("clients")

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()
        self.alive: dict[str, Client] = {}
        self.count = 0
        for topic in TOPICS[:2]:
            self.world.topics.create(topic, 3)

    @initialize(interval_ms=st.sampled_from(["0", "0", "1000"]))
    def configure(self, interval_ms: str) -> None:
        self.world.configure(group_consumer_assignment_interval_ms=interval_ms)

    # Clients

    @rule(target=clients, instance=INSTANCES, names=SUBSCRIPTIONS, regex=EXPRESSIONS)
    def start(self, instance: str | None, names: tuple[str, ...], regex: str | None) -> Client:
        self.count += 1
        client = Client(f"m{self.count}", instance, names, regex)
        self.alive[client.name] = client
        self.beat(client)
        return client

    @rule(client=clients)
    def beat(self, client: Client) -> None:
        if client.name not in self.alive:
            return
        try:
            reply = self.world.beat(client.name, client.epoch, **client.request())
        except ApiError as error:
            self.refused(client, error)
        else:
            client.hear(reply)
            if reply.assignment is not None:
                assert {topic for topic, _ in client.told} <= client.topics(self.world).keys()

    @rule(backwards=st.booleans())
    def everybody_beats(self, backwards: bool) -> None:
        for client in sorted(self.alive.values(), key=lambda client: client.name, reverse=backwards):
            self.beat(client)

    @rule()
    def everybody_gives_up(self) -> None:
        for client in self.alive.values():
            client.give_up()

    def refused(self, client: Client, error: ApiError) -> None:
        if error.code in (*LATE, ErrorCode.fenced_instance_id):
            client.start_over()
        else:
            assert error.code in (ErrorCode.unreleased_instance_id, ErrorCode.coordinator_not_available), (
                error
            )

    @rule(client=clients)
    def give_up(self, client: Client) -> None:
        client.give_up()

    @rule(client=clients)
    def lose_an_answer(self, client: Client) -> None:
        """The coordinator has acted on a heartbeat, and the client does not know."""
        if client.name not in self.alive:
            return
        try:
            self.world.beat(client.name, client.epoch, **client.request())
        except ApiError:
            return
        client.is_unsure = True

    @rule(client=clients, names=SUBSCRIPTIONS)
    def subscribe_to_other_topics(self, client: Client, names: tuple[str, ...]) -> None:
        client.names, client.is_unsure = names, True

    @rule(client=consumes(clients))
    def leave(self, client: Client) -> None:
        if self.alive.pop(client.name, None) is None:
            return
        try:
            self.world.beat(client.name, -1, instance_id=client.instance_id)
        except ApiError as error:
            self.refused(client, error)

    @rule(client=consumes(clients), target=clients, names=st.none() | SUBSCRIPTIONS)
    def restart_static(self, client: Client, names: tuple[str, ...] | None) -> Client:
        """A static member goes and comes back as another process."""
        if client.instance_id is None or self.alive.pop(client.name, None) is None:
            return client
        try:
            self.world.beat(client.name, -2, instance_id=client.instance_id)
        except ApiError as error:
            self.refused(client, error)
        self.count += 1
        again = Client(
            f"m{self.count}", client.instance_id, client.names if names is None else names, client.regex
        )
        self.alive[again.name] = again
        self.beat(again)
        return again

    @rule(client=consumes(clients))
    def crash(self, client: Client) -> None:
        self.alive.pop(client.name, None)

    # The world

    @rule(ms=st.sampled_from([100, 1_000, 5_000, 20_000, 46_000]))
    def wait(self, ms: int) -> None:
        self.world.advance(ms)
        self.notice_who_is_out()

    def notice_who_is_out(self) -> None:
        """Whoever was put out has had its time to stop: what it goes on using is its own fault."""
        members = self.group.members if self.group is not None else {}
        for client in self.alive.values():
            if client.name not in members:
                client.start_over()

    @rule(topic=st.sampled_from(TOPICS), partitions=st.integers(1, 4))
    def change_topic(self, topic: str, partitions: int) -> None:
        facts = self.world.topics.by_name(topic)
        if facts is None:
            self.world.topics.create(topic, partitions)
        elif partitions > facts.partitions:
            self.world.topics.grow(topic, partitions)
        else:
            self.world.topics.delete(topic)

    @rule(compacts=st.booleans())
    def kill_and_rebuild(self, compacts: bool) -> None:
        before = self.snapshot()
        if compacts:
            self.world.journal.compact()
        self.world.reload()
        assert self.snapshot() == before

    @rule(client=clients)
    def refuse_to_write(self, client: Client) -> None:
        """Nothing that was refused has happened."""
        before = self.snapshot()
        self.world.journal.refuses = ErrorCode.coordinator_not_available
        self.beat(client)
        self.world.journal.refuses = None
        assert self.snapshot() == before
        client.is_unsure = True

    # What must always be true

    @property
    def group(self) -> ConsumerGroup | None:
        group = self.world.coordinator.groups.get("group")
        return group if isinstance(group, ConsumerGroup) else None

    def snapshot(self) -> object:
        group = self.group
        if group is None:
            return None
        return (
            group.epoch,
            group.metadata_hash,
            group.assignment_epoch,
            group.assigned_at_ms,
            {name: (member.profile, member.current) for name, member in group.members.items()},
            dict(group.targets),
            dict(group.resolutions),
            dict(group.static),
            {topic_id: dict(owners) for topic_id, owners in group.owners.items()},
            dict(group.names),
            dict(group.expressions),
        )

    @invariant()
    def nobody_uses_what_another_member_uses(self) -> None:
        members = self.group.members if self.group is not None else {}
        users: dict[tuple[UUID, int], str] = {}
        for client in self.alive.values():
            if client.name in members:
                for partition in client.owned:
                    assert partition not in users, (
                        f"{client.name} and {users[partition]} both use {partition}"
                    )
                    users[partition] = client.name

    @invariant()
    def holdings_do_not_overlap(self) -> None:
        if self.group is None:
            return
        owners: dict[UUID, dict[int, str]] = {}
        for name, member in self.group.members.items():
            for held in (member.current.assigned, member.current.revoking):
                for topic_id, partitions in held.items():
                    for partition in partitions:
                        assert partition not in owners.get(topic_id, {})
                        owners.setdefault(topic_id, {})[partition] = name
        assert owners == self.group.owners

    @invariant()
    def nobody_is_ahead_of_the_group(self) -> None:
        if self.group is not None:
            assert self.group.assignment_epoch <= self.group.epoch
            for member in self.group.members.values():
                assert member.current.epoch <= self.group.assignment_epoch

    @precondition(lambda self: self.alive)
    @rule()
    def in_the_end_all_is_shared_out(self) -> None:
        """Left in peace, the living reach their target, and it is all there is."""
        for _ in range(4):
            self.world.advance(20_000)
            self.notice_who_is_out()
            for _ in range(3):
                for client in self.alive.values():
                    self.beat(client)
                    client.give_up()
        group = self.group
        assert group is not None
        # Who is alive and no member is refused because another has its instance id.
        assert group.members.keys() <= self.alive.keys()
        assert group.members or not self.alive
        assert group.state in ("Stable", "Empty")
        living = [self.alive[name] for name in group.members]
        used = [partition for client in living for partition in client.owned]
        assert len(used) == len(set(used))
        wanted: dict[UUID, int] = {}
        for client in living:
            wanted |= client.topics(self.world)
        assert set(used) == {(topic, index) for topic, count in wanted.items() for index in range(count)}


ConsumerGroupMachine.TestCase.settings = settings(
    max_examples=examples(400), stateful_step_count=50, deadline=None
)
TestConsumerGroup = ConsumerGroupMachine.TestCase
