"""A classic group under everything that can happen to it, against what must always be true.

Clients here behave as real ones do and as broken ones do: they join, sync and heartbeat, restart with or without their
instance id, use old ids and generations, go silent, come back late. The coordinator is killed and rebuilt, and its log
refuses to be written. A leader gives each partition to one member of those it was told of.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld
from tests.support.tiers import examples

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.model import (
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    LeaveRequest,
    LeavingMember,
    MemberProtocol,
    SyncReply,
    SyncRequest,
)

GROUP = "group"
PARTITIONS = 6
SESSION_MS = 10_000
REBALANCE_MS = 20_000
MAX_WAIT_MS = 400_000
"""Longer than any deadline a group has."""


@dataclass
class Client:
    name: str
    instance_id: str | None
    version: int
    member_id: str = ""
    generation: int = -1
    leads: tuple[str, ...] = ()
    """The members it was told of as the leader of its generation."""
    parked: set[int] = field(default_factory=set)
    """Numbers of its requests that were not answered yet."""
    past: list[tuple[str, int]] = field(default_factory=list)
    """Ids and generations it had before."""
    next: str = "join"
    """What a client that works as it should does next: join, sync or beat."""


names = st.sampled_from(["ann", "bob", "cid", "dan"])


class ClassicMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.world = GroupWorld({"group.initial.rebalance.delay.ms": "3000", "group.max.size": "3"})
        self.clients = {
            "ann": Client("ann", None, 9),
            "bob": Client("bob", None, 3),
            "cid": Client("cid", "c", 9),
            "dan": Client("dan", "d", 5),
        }
        self.requests = 0
        self.answered: set[int] = set()
        self.owners: dict[int, dict[str, str]] = {}
        """Of each generation ever shared out, which member was given which part."""

    # What cannot be seen from outside

    @property
    def group(self) -> ClassicGroup | None:
        group = self.world.coordinator.groups.get(GROUP)
        assert group is None or isinstance(group, ClassicGroup)
        return group

    def fingerprint(self) -> object:
        group = self.group
        if group is None:
            return None
        members = {
            member.member_id: (member.protocols, member.assignment, member.is_waiting)
            for member in group.members.values()
        }
        pending = frozenset(group.membership.pending)
        return group.state, group.generation, group.leader, members, pending, len(self.world.journal.batches)

    def _park(self, client: Client) -> int:
        self.requests += 1
        client.parked.add(self.requests)
        return self.requests

    def _answer(self, client: Client, number: int) -> None:
        assert number not in self.answered, "a request was answered twice"
        self.answered.add(number)
        client.parked.discard(number)

    # Working as one should

    @rule(name=names)
    def live_on(self, name: str) -> None:
        client = self.clients[name]
        if client.parked:
            return
        if client.next == "join":
            self.join(name, b"x", False)
        elif client.next == "sync":
            self.sync(name)
        else:
            self.beat(name)

    @rule(chosen=st.lists(names, min_size=1, max_size=4, unique=True))
    def come_to_rest(self, chosen: list[str]) -> None:
        """Those chosen do what they should until it is quiet; the others are silent."""
        for _ in range(8):
            for name in chosen:
                self.live_on(name)
            self.world.advance(3_000)

    # Joining

    @rule(name=names, wants=st.sampled_from([b"x", b"y"]), forgets=st.booleans())
    def join(self, name: str, wants: bytes, forgets: bool) -> None:
        client = self.clients[name]
        if forgets and client.member_id:
            client.past.append((client.member_id, client.generation))
            client.member_id = ""
        number = self._park(client)
        request = JoinRequest(
            GROUP,
            client.member_id,
            client.instance_id,
            name,
            "/10.0.0.9",
            SESSION_MS,
            REBALANCE_MS,
            "consumer",
            (MemberProtocol("range", wants),),
            client.version >= 4,
            client.version >= 9,
        )
        self.world.coordinator.join(
            request, lambda reply: self._joined(client, number, reply), self.world.now
        )

    def _joined(self, client: Client, number: int, reply: JoinReply) -> None:
        self._answer(client, number)
        client.next = "sync" if reply.error is ErrorCode.none else "join"
        if reply.error is ErrorCode.member_id_required:
            client.member_id = reply.member_id
        elif reply.error is ErrorCode.none:
            if client.member_id not in ("", reply.member_id):
                client.past.append((client.member_id, client.generation))
            client.member_id, client.generation = reply.member_id, reply.generation
            client.leads = tuple(member.member_id for member in reply.members)
            if reply.skip_assignment:
                client.leads = ()
            assert (reply.leader == reply.member_id) == bool(reply.members)
        elif reply.error in (ErrorCode.unknown_member_id, ErrorCode.group_max_size_reached):
            client.member_id = ""
        else:
            assert reply.error in (
                ErrorCode.fenced_instance_id,
                ErrorCode.rebalance_in_progress,
                ErrorCode.coordinator_not_available,
            )

    # Syncing

    @rule(name=names)
    def sync(self, name: str) -> None:
        client = self.clients[name]
        number = self._park(client)
        shares: dict[str, list[str]] = {member_id: [] for member_id in client.leads}
        for part in range(PARTITIONS if shares else 0):
            shares[list(shares)[part % len(shares)]].append(str(part))
        assignments = tuple((who, ",".join(parts).encode()) for who, parts in shares.items())
        request = SyncRequest(
            GROUP, client.generation, client.member_id, client.instance_id, "consumer", "range", assignments
        )
        asked_as = (client.member_id, client.generation)
        self.world.coordinator.sync(
            request, lambda reply: self._synced(client, number, asked_as, reply), self.world.now
        )

    def _synced(self, client: Client, number: int, asked_as: tuple[str, int], reply: SyncReply) -> None:
        self._answer(client, number)
        client.next = "beat" if reply.error is ErrorCode.none else "join"
        if reply.error is not ErrorCode.none:
            return
        member_id, generation = asked_as
        given = reply.assignment.decode()
        owners = self.owners.setdefault(generation, {})
        for part in filter(None, given.split(",")):
            # A static member that restarts owns what its former self owned.
            requester = client.instance_id or member_id
            assert owners.setdefault(part, requester) == requester, (
                f"{part} of generation {generation} has two owners"
            )

    # Staying and leaving

    @rule(name=names)
    def beat(self, name: str) -> None:
        client = self.clients[name]
        request = HeartbeatRequest(GROUP, client.generation, client.member_id, client.instance_id)
        before = self.fingerprint()
        outcome = self.world.coordinator.heartbeat(request, self.world.now)
        assert self.fingerprint() == before
        if outcome is not ErrorCode.none:
            client.next = "join"
        group = self.group
        if group is None or client.member_id not in group.members:
            assert outcome in (ErrorCode.unknown_member_id, ErrorCode.fenced_instance_id)
        elif client.generation != group.generation:
            assert outcome is ErrorCode.illegal_generation
        else:
            preparing = group.state == "PreparingRebalance"
            assert outcome is (ErrorCode.rebalance_in_progress if preparing else ErrorCode.none)

    @rule(name=names)
    def leave(self, name: str) -> None:
        client = self.clients[name]
        leaving = LeavingMember(client.member_id, client.instance_id)
        reply = self.world.coordinator.leave(LeaveRequest(GROUP, (leaving,)), self.world.now)
        ((_, outcome),) = reply.members
        if outcome is ErrorCode.none and self.group is not None:
            assert client.member_id not in self.group.members
        client.past.append((client.member_id, client.generation))
        client.member_id = ""

    # Whoever should not speak any more

    @rule(name=names, data=st.data())
    @precondition(lambda self: any(client.past for client in self.clients.values()))
    def speak_as_before(self, name: str, data: st.DataObject) -> None:
        """With ids and generations of the past: nothing changes, whatever is said."""
        client = self.clients[name]
        group = self.group
        if not client.past or group is None:
            return
        member_id, generation = data.draw(st.sampled_from(client.past))
        if member_id in group.members and generation == group.generation:
            return
        if member_id in group.membership.pending or not member_id:
            return
        before = self.fingerprint()
        now = self.world.now
        answers: list[ErrorCode] = []
        what = data.draw(st.sampled_from(["beat", "sync", "leave"]))
        if what == "beat":
            request = HeartbeatRequest(GROUP, generation, member_id, client.instance_id)
            answers.append(self.world.coordinator.heartbeat(request, now))
        elif what == "sync":
            stale = SyncRequest(
                GROUP, generation, member_id, client.instance_id, None, None, ((member_id, b"9"),)
            )
            self.world.coordinator.sync(stale, lambda reply: answers.append(reply.error), now)
        elif member_id not in group.members:
            gone = LeaveRequest(GROUP, (LeavingMember(member_id, client.instance_id),))
            answers.append(self.world.coordinator.leave(gone, now).members[0][1])
        assert ErrorCode.none not in answers
        assert self.fingerprint() == before

    # The world

    @rule(ms=st.sampled_from([1, 1_000, 3_000, 9_999, 10_000, 20_000]))
    def time_passes(self, ms: int) -> None:
        self.world.advance(ms)

    @rule()
    def everybody_waits(self) -> None:
        """Nothing waits for ever: when nobody says anything any more, all are answered and nobody is left."""
        self.world.advance(MAX_WAIT_MS)
        assert not any(client.parked for client in self.clients.values())
        assert self.group is None or not self.group.members

    @rule()
    @precondition(lambda self: self.world.journal.refuses is None)
    def coordinator_dies(self) -> None:
        self.world.reload()
        for client in self.clients.values():
            client.parked.clear()
        group = self.group
        assert group is None or group.state in ("Stable", "Empty")

    @rule()
    def log_refuses_or_accepts(self) -> None:
        journal = self.world.journal
        journal.refuses = None if journal.refuses else ErrorCode.coordinator_not_available

    # What is always true

    @invariant()
    def membership_agrees_with_itself(self) -> None:
        group = self.group
        if group is None:
            # Forgotten after a while without members and positions; a new one counts from one again.
            self.owners.clear()
            return
        members = group.members
        waiting = [member for member in members.values() if member.join_reply is not None]
        assert group.membership.awaiting_join == len(waiting)
        assert (group.leader in members) if members else group.leader is None
        statics = {member.group_instance_id: member.member_id for member in members.values()}
        statics.pop(None, None)
        assert group.membership.static == statics
        assert not set(group.membership.pending) & set(members)
        if group.state == "Empty":
            assert not members
        elif group.state == "Stable":
            assert members
            assert not any(member.is_waiting for member in members.values())
        elif group.state == "CompletingRebalance":
            assert members
            assert not waiting
        for member in members.values():
            assert member.timer is not None or member.is_waiting, "nobody would notice its silence"


TestClassicGroup = ClassicMachine.TestCase
TestClassicGroup.settings = settings(max_examples=examples(60), stateful_step_count=50, deadline=None)
