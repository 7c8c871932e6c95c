"""Single rules of classic groups that no scenario shows well."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups.classic_state import TRANSITIONS, ClassicMember, ClassicState, Membership
from holdfast.broker.groups.model import (
    HeartbeatRequest,
    JoinReply,
    JoinRequest,
    MemberProtocol,
    SyncReply,
    SyncRequest,
)
from holdfast.wire.consumer_protocol import ConsumerSubscription


def join_request(name: str, member_id: str = "", **fields: Any) -> JoinRequest:
    request = JoinRequest(
        group_id="group",
        member_id=member_id,
        group_instance_id=None,
        client_id=name,
        client_host="/10.0.0.9",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=60_000,
        protocol_type="consumer",
        protocols=(MemberProtocol("range", ConsumerSubscription(topics=("orders",)).encode()),),
        requires_known_member_id=False,
        supports_skipping_assignment=True,
    )
    return request._replace(**fields)


class Crowd:
    """Many members of one stable group."""

    def __init__(self, size: int) -> None:
        self.world = GroupWorld({"group.initial.rebalance.delay.ms": "1000"})
        self.joined: list[JoinReply] = []
        self.synced: list[SyncReply] = []
        for number in range(size):
            self.world.coordinator.join(join_request(f"member {number}"), self.joined.append, self.world.now)
        self.world.advance(2_000)
        for reply in self.joined:
            request = SyncRequest("group", reply.generation, reply.member_id, None, None, None, ())
            self.world.coordinator.sync(request, self.synced.append, self.world.now)


def test_a_heartbeat_sets_no_timer() -> None:
    crowd = Crowd(50)
    assert [reply.error for reply in crowd.synced] == [ErrorCode.none] * 50
    world = crowd.world
    pending = len(world.schedule._heap)
    for _ in range(20):
        world.clock.advance(100)
        for reply in crowd.joined:
            beat = HeartbeatRequest("group", reply.generation, reply.member_id, None)
            assert world.coordinator.heartbeat(beat, world.now) is ErrorCode.none
    assert len(world.schedule._heap) == pending


def test_each_member_costs_one_timer_for_each_session() -> None:
    crowd = Crowd(50)
    world = crowd.world
    set_before = world.schedule._count
    for _ in range(40):
        world.advance(1_000)
        for reply in crowd.joined:
            beat = HeartbeatRequest("group", reply.generation, reply.member_id, None)
            assert world.coordinator.heartbeat(beat, world.now) is ErrorCode.none
    assert world.schedule._count - set_before <= 50 * 5, "four sessions have passed"


def test_a_defect_while_a_silent_member_is_taken_out_does_not_keep_it_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = Crowd(2).world
    group = world.coordinator.groups["group"]
    monkeypatch.setattr(Membership, "remove", None)
    for _ in range(2):
        with pytest.raises(TypeError):
            world.advance(10_000)
    monkeypatch.undo()
    world.advance(20_000)
    assert group.is_empty


def test_everybody_is_answered_when_the_coordinator_goes() -> None:
    crowd = Crowd(2)
    parked: list[JoinReply] = []
    crowd.world.coordinator.join(join_request("late"), parked.append, crowd.world.now)
    assert not parked
    crowd.world.coordinator.unload()
    assert [reply.error for reply in parked] == [ErrorCode.not_coordinator]
    assert crowd.world.schedule.next_ms is None, "nothing is left that time drives"


def test_metadata_nobody_can_read_means_that_any_topic_may_be_read() -> None:
    world = GroupWorld({"group.initial.rebalance.delay.ms": "0"})
    replies: list[JoinReply] = []
    request = join_request("odd", protocols=(MemberProtocol("range", b"\x00"),))
    world.coordinator.join(request, replies.append, world.now)
    assert replies[0].error is ErrorCode.none
    group = world.coordinator.groups["group"]
    assert group.is_subscribed_to("whatever")
    assert group.expiry_base_ms(5) is None


def test_every_state_but_the_last_leads_somewhere_and_is_reached() -> None:
    assert set(TRANSITIONS) == set(ClassicState)
    reached = set().union(*TRANSITIONS.values())
    assert reached == set(ClassicState)
    assert all(TRANSITIONS[state] for state in ClassicState if state is not ClassicState.DEAD)


PROTOCOLS = st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True)


@given(st.lists(PROTOCOLS, min_size=1, max_size=6))
def test_the_protocol_chosen_is_one_that_all_follow_and_most_prefer(preferences: list[list[str]]) -> None:
    membership = Membership()
    taken: list[list[str]] = []
    for number, names in enumerate(preferences):
        if taken and not membership.supports_one_of(names):
            continue
        protocols = tuple(MemberProtocol(name, b"") for name in names)
        membership.add(ClassicMember(f"m{number}", None, "c", "/h", 1, 1, protocols))
        taken.append(names)
    candidates = set.intersection(*map(set, taken))
    votes = [next(name for name in names if name in candidates) for names in taken]
    chosen = membership.choose_protocol()
    assert chosen in candidates
    assert votes.count(chosen) == max(votes.count(name) for name in votes)


@given(st.lists(PROTOCOLS, min_size=1, max_size=6))
def test_support_is_forgotten_with_the_members(preferences: list[list[str]]) -> None:
    membership = Membership()
    members = [
        ClassicMember(f"m{number}", None, "c", "/h", 1, 1, tuple(MemberProtocol(name, b"") for name in names))
        for number, names in enumerate(preferences)
    ]
    for member in members:
        membership.add(member)
    for member in members:
        membership.remove(member)
    assert membership._support == {}
    assert membership.leader is None
