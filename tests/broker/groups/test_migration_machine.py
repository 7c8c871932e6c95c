"""A group whose members change between the protocols while it lives, against one rule: nobody uses what another uses.

Classic clients here are as real ones: eager ones give up everything before they join, cooperative ones keep what they
have, say so, and give up what their assignment does not name. A leader shares out what it knows of. Consumers are as in
`test_consumer_machine`. The group goes from classic to consumer and back as they come and go.
"""

from __future__ import annotations

from dataclasses import dataclass, field
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

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.model import (
    HeartbeatRequest,
    JoinedMember,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    MemberProtocol,
    SyncReply,
    SyncRequest,
)
from holdfast.errors import ApiError
from holdfast.wire.consumer_protocol import (
    ConsumerAssignment,
    ConsumerSubscription,
    OwnedPartitions,
    decode_assignment,
    decode_subscription,
)

TOPIC, PARTITIONS = "orders", 5


@dataclass
class Consumer:
    name: str
    epoch: int = 0
    owned: set[int] = field(default_factory=set)
    told: set[int] = field(default_factory=set)

    @property
    def member_id(self) -> str:
        return self.name

    def start_over(self) -> None:
        self.epoch, self.owned, self.told = 0, set(), set()

    def settle(self) -> None:
        self.owned = set(self.told)


@dataclass
class Classic:
    name: str
    cooperates: bool
    member_id: str = ""
    generation: int = -1
    owned: set[int] = field(default_factory=set)
    wants: str = "join"
    """What it does next: join, wait (for the others), sync, beat."""
    leads: tuple[JoinedMember, ...] = ()

    def start_over(self) -> None:
        self.generation, self.owned, self.wants, self.leads = -1, set(), "join", ()

    def settle(self) -> None:
        """It has nothing to do later: what it gives up, it gives up when it is told."""


class MigrationMachine(RuleBasedStateMachine):
    people = Bundle("people")

    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld()
        self.topic_id: UUID = self.world.topics.create(TOPIC, PARTITIONS)
        self.alive: dict[str, Consumer | Classic] = {}
        self.count = 0
        self.cooperates = True

    @initialize(
        cooperates=st.booleans(),
        delay=st.sampled_from(["0", "0", "3000"]),
        interval=st.sampled_from(["0", "1000"]),
    )
    def configure(self, cooperates: bool, delay: str, interval: str) -> None:
        self.cooperates = cooperates
        self.world.configure(
            group_initial_rebalance_delay_ms=delay, group_consumer_assignment_interval_ms=interval
        )

    # People

    @rule(target=people, is_classic=st.booleans())
    def start(self, is_classic: bool) -> Consumer | Classic:
        self.count += 1
        name = f"m{self.count}"
        person = Classic(name, self.cooperates) if is_classic else Consumer(name)
        self.alive[name] = person
        self.act(person)
        return person

    @rule(person=people)
    def act(self, person: Consumer | Classic) -> None:
        if person.name not in self.alive:
            return
        if isinstance(person, Consumer):
            self.beat_consumer(person)
        else:
            self.act_classic(person)

    @rule(times=st.integers(1, 3))
    def everybody_acts(self, times: int) -> None:
        for _ in range(times):
            for person in list(self.alive.values()):
                self.act(person)

    @rule(person=people)
    def settle(self, person: Consumer | Classic) -> None:
        person.settle()

    @rule(person=consumes(people))
    def leave(self, person: Consumer | Classic) -> None:
        if self.alive.pop(person.name, None) is None:
            return
        if isinstance(person, Classic):
            leaving = LeavingMember(person.member_id, None)
            self.world.coordinator.leave(LeaveRequest("group", (leaving,)), self.world.now)
            return
        try:
            self.world.beat(person.name, -1)
        except ApiError as error:
            self.refused(person, error.code)

    @rule(person=consumes(people))
    def crash(self, person: Consumer | Classic) -> None:
        self.alive.pop(person.name, None)

    def refused(self, person: Consumer | Classic, code: ErrorCode) -> None:
        assert code in (
            ErrorCode.unknown_member_id,
            ErrorCode.fenced_member_epoch,
            ErrorCode.group_id_not_found,
            ErrorCode.illegal_generation,
            ErrorCode.rebalance_in_progress,
        ), code
        if code is not ErrorCode.rebalance_in_progress:
            person.start_over()
        if isinstance(person, Classic):
            person.wants = "join"
            if code is ErrorCode.unknown_member_id:
                person.member_id = ""

    # Consumers

    def beat_consumer(self, person: Consumer) -> None:
        joins = person.epoch == 0
        owned = {self.topic_id: frozenset(person.owned)} if person.owned and not joins else {}
        try:
            reply = self.world.beat(
                person.name,
                person.epoch,
                topics=[TOPIC] if joins else None,
                owned=owned if joins or person.owned == person.told else None,
                rebalance_timeout_ms=10_000 if joins else -1,
            )
        except ApiError as error:
            self.refused(person, error.code)
            return
        person.epoch = reply.member_epoch
        if reply.assignment is not None:
            person.told = set(reply.assignment.get(self.topic_id, ()))
            if not person.owned - person.told:
                person.owned = set(person.told)

    # Classic clients

    def act_classic(self, person: Classic) -> None:
        if person.wants == "join":
            self.join(person)
        elif person.wants == "sync":
            self.sync(person)
        elif person.wants == "beat":
            request = HeartbeatRequest("group", person.generation, person.member_id, None)
            code = self.world.coordinator.heartbeat(request, self.world.now)
            if code is not ErrorCode.none:
                self.refused(person, code)

    def join(self, person: Classic) -> None:
        if not person.cooperates:
            person.owned = set()
        owned = (OwnedPartitions(TOPIC, tuple(sorted(person.owned))),) if person.owned else ()
        metadata = ConsumerSubscription(topics=(TOPIC,), owned_partitions=owned).encode()
        person.wants = "wait"
        self.world.coordinator.join(
            JoinRequest(
                "group",
                person.member_id,
                None,
                person.name,
                "/10.0.0.9",
                45_000,
                10_000,
                "consumer",
                (MemberProtocol("cooperative" if person.cooperates else "eager", metadata),),
                True,
                True,
            ),
            lambda reply: self.joined(person, reply),
            self.world.now,
        )

    def joined(self, person: Classic, reply: JoinReply) -> None:
        if reply.error is ErrorCode.member_id_required:
            person.member_id, person.wants = reply.member_id, "join"
        elif reply.error is not ErrorCode.none:
            self.refused(person, reply.error)
        else:
            person.member_id, person.generation = reply.member_id, reply.generation
            person.wants, person.leads = "sync", reply.members

    def sync(self, person: Classic) -> None:
        person.wants = "wait"
        shares = self.shares(person) if person.leads else {}
        person.leads = ()
        request = SyncRequest(
            "group", person.generation, person.member_id, None, "consumer", None, tuple(shares.items())
        )
        self.world.coordinator.sync(request, lambda reply: self.synced(person, reply), self.world.now)

    def shares(self, leader: Classic) -> dict[str, bytes]:
        """A leader gives each its share; what another has not given up is nobody's for now."""
        owners: dict[int, str] = {}
        for member in leader.leads:
            _, subscription = decode_subscription(member.metadata)
            for each in subscription.owned_partitions:
                owners |= dict.fromkeys(each.partitions, member.member_id)
        parts: dict[str, list[int]] = {member.member_id: [] for member in leader.leads}
        for index in range(PARTITIONS):
            member_id = leader.leads[index % len(leader.leads)].member_id
            if owners.get(index, member_id) == member_id:
                parts[member_id].append(index)
        return {
            member_id: ConsumerAssignment(
                assigned_partitions=(OwnedPartitions(TOPIC, tuple(indexes)),)
            ).encode()
            for member_id, indexes in parts.items()
        }

    def synced(self, person: Classic, reply: SyncReply) -> None:
        if reply.error is not ErrorCode.none:
            self.refused(person, reply.error)
            return
        _, assignment = decode_assignment(reply.assignment)
        told = {index for each in assignment.assigned_partitions for index in each.partitions}
        gave_up = person.owned - told
        person.owned = told
        # A cooperative client that gave something up asks for another round, so that somebody gets it.
        person.wants = "join" if gave_up else "beat"

    # The world

    @rule(ms=st.sampled_from([100, 1_000, 5_000, 11_000, 46_000]))
    def wait(self, ms: int) -> None:
        self.world.advance(ms)
        self.notice_who_is_out()

    def notice_who_is_out(self) -> None:
        for person in self.alive.values():
            is_waiting = isinstance(person, Classic) and person.wants == "wait"
            if person.member_id not in self.members and not is_waiting:
                person.start_over()

    @rule(compacts=st.booleans())
    def kill_and_rebuild(self, compacts: bool) -> None:
        if compacts:
            self.world.journal.compact()
        self.world.reload()
        for person in self.alive.values():
            # Whoever waited for an answer has lost its connection, and asks again.
            if isinstance(person, Classic) and person.wants == "wait":
                person.wants = "join"
        self.notice_who_is_out()

    # What must always be true

    @property
    def members(self) -> set[str]:
        group = self.world.coordinator.groups.get("group")
        if isinstance(group, ClassicGroup | ConsumerGroup):
            return set(group.members)
        return set()

    @invariant()
    def nobody_uses_what_another_uses(self) -> None:
        users: dict[int, str] = {}
        for person in self.alive.values():
            if person.member_id in self.members:
                for index in person.owned:
                    assert index not in users, f"{person.name} and {users[index]} both use {index}"
                    users[index] = person.name

    @precondition(lambda self: self.alive)
    @rule()
    def in_the_end_all_is_shared_out(self) -> None:
        for _ in range(10):
            # All heartbeat far more often than a session lasts; who is dead is not waited for any longer.
            for _ in range(6):
                self.world.advance(2_500)
                for person in list(self.alive.values()):
                    self.act(person)
                    person.settle()
        assert self.members == {person.member_id for person in self.alive.values()}
        used = [index for person in self.alive.values() for index in person.owned]
        assert sorted(used) == list(range(PARTITIONS))
        kinds = {type(person) for person in self.alive.values()}
        group = self.world.coordinator.groups["group"]
        assert isinstance(group, ConsumerGroup if Consumer in kinds else ClassicGroup)


MigrationMachine.TestCase.settings = settings(
    max_examples=examples(300), stateful_step_count=50, deadline=None
)
TestMigration = MigrationMachine.TestCase
