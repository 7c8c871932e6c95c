"""The steps by which members reach their targets, whatever the targets and whoever moves when."""

from __future__ import annotations

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode

from holdfast.broker.groups.assignors import Assignment
from holdfast.broker.groups.consumer_member import (
    CurrentAssignment,
    MemberState,
    Owned,
    Step,
    TargetAssignment,
    away,
    is_within,
    reconcile,
    returned,
)
from holdfast.errors import ApiError

TOPICS = [UUID(int=1), UUID(int=2)]
PARTITIONS = [(topic, index) for topic in TOPICS for index in range(3)]
NAMES = ["a", "b", "c"]
OWNERS = st.tuples(*(st.sampled_from([*NAMES, None]) for _ in PARTITIONS))
Owners = tuple[str | None, ...]


def share(owners: Owners, name: str) -> Assignment:
    own: dict[UUID, set[int]] = {}
    for (topic, index), owner in zip(PARTITIONS, owners, strict=True):
        if owner == name:
            own.setdefault(topic, set()).add(index)
    return {topic: frozenset(indexes) for topic, indexes in own.items()}


def held(assignment: Assignment, epoch: int) -> dict[UUID, dict[int, int]]:
    return {topic: dict.fromkeys(indexes, epoch) for topic, indexes in assignment.items()}


def owned(assignment: Assignment) -> Owned:
    return [(topic, sorted(indexes)) for topic, indexes in assignment.items()]


def pairs(current: CurrentAssignment) -> set[tuple[UUID, int]]:
    both = (current.assigned, current.revoking)
    return {(topic, index) for each in both for topic, indexes in each.items() for index in indexes}


class Members:
    """Members on their way to a target, with what each really uses."""

    def __init__(self, before: Owners) -> None:
        self.holdings = {
            name: CurrentAssignment(1, 1, assigned=held(share(before, name), 1)) for name in NAMES
        }
        self.used = {name: pairs(self.holdings[name]) for name in NAMES}

    def step(self, name: str, target: TargetAssignment, *, gives_up: bool, reports: bool) -> None:
        current = self.holdings[name]
        assigned = {(topic, index) for topic, indexes in current.assigned.items() for index in indexes}
        if gives_up:
            self.used[name] &= assigned
        using: dict[UUID, set[int]] = {}
        for topic, index in self.used[name]:
            using.setdefault(topic, set()).add(index)
        others = set().union(*(pairs(other) for who, other in self.holdings.items() if who != name))
        following = reconcile(
            current,
            Step(
                target,
                [(topic, sorted(indexes)) for topic, indexes in using.items()] if reports else None,
                frozenset(TOPICS),
                lambda topic, index: (topic, index) in others,
            ),
        )
        self.holdings[name] = following
        # A client uses what is new only when it has given up what it had to.
        told = {(topic, index) for topic, indexes in following.assigned.items() for index in indexes}
        if not self.used[name] - told:
            self.used[name] = told

    def check(self) -> None:
        taken: set[tuple[UUID, int]] = set()
        in_use: set[tuple[UUID, int]] = set()
        for name, current in self.holdings.items():
            assert not taken & pairs(current)
            taken |= pairs(current)
            assert not in_use & self.used[name]
            in_use |= self.used[name]


@given(
    before=OWNERS,
    targets=st.lists(OWNERS, min_size=1, max_size=3),
    moves=st.lists(
        st.tuples(st.sampled_from(NAMES), st.booleans(), st.booleans(), st.integers(0, 2)), max_size=25
    ),
)
def test_a_partition_never_has_two_owners_and_everybody_arrives(
    before: Owners, targets: list[Owners], moves: list[tuple[str, bool, bool, int]]
) -> None:
    members = Members(before)
    current = 0
    for name, gives_up, reports, wanted in moves:
        # Targets follow each other while members are still on their way to the one before.
        current = max(current, min(wanted, len(targets) - 1))
        target = TargetAssignment(2 + current, share(targets[current], name))
        members.step(name, target, gives_up=gives_up, reports=reports)
        members.check()
    final = len(targets) - 1
    for _ in range(4):
        for name in NAMES:
            target = TargetAssignment(2 + final, share(targets[final], name))
            members.step(name, target, gives_up=True, reports=True)
            members.check()
    for name in NAMES:
        reached = members.holdings[name]
        assert reached.is_at(2 + final)
        assert {topic: frozenset(indexes) for topic, indexes in reached.assigned.items()} == share(
            targets[final], name
        )


@given(before=OWNERS, target=OWNERS)
def test_what_stays_is_held_since_it_was_given(before: Owners, target: Owners) -> None:
    members = Members(before)
    for _ in range(4):
        for name in NAMES:
            members.step(name, TargetAssignment(7, share(target, name)), gives_up=True, reports=True)
    for name in NAMES:
        for topic, indexes in members.holdings[name].assigned.items():
            for index, since in indexes.items():
                assert since == (1 if index in share(before, name).get(topic, ()) else 7)


def test_silence_gives_nothing_up() -> None:
    topic = TOPICS[0]
    current = CurrentAssignment(1, 1, assigned={topic: {0: 1, 1: 1}})
    step = Step(TargetAssignment(2, {topic: frozenset({0})}), None, frozenset({topic}), lambda *_: False)
    told = reconcile(current, step)
    assert (told.state, told.epoch, told.revoking) == (MemberState.UNREVOKED, 1, {topic: {1: 1}})
    assert reconcile(told, step) is told
    assert reconcile(told, step._replace(owned=[(topic, [0, 1])])) is told
    done = reconcile(told, step._replace(owned=[(topic, [0])]))
    assert (done.state, done.epoch, done.previous_epoch) == (MemberState.STABLE, 2, 1)


def test_what_was_to_be_given_up_and_is_wanted_again_stays() -> None:
    topic = TOPICS[0]
    told = CurrentAssignment(1, 1, MemberState.UNREVOKED, {topic: {0: 1}}, {topic: {1: 1}})
    step = Step(TargetAssignment(3, {topic: frozenset({0, 1})}), [], frozenset({topic}), lambda *_: False)
    again = reconcile(told, step)
    assert again.assigned == {topic: {0: 1, 1: 3}}
    assert again.is_at(3)


def test_topics_a_member_has_left_are_taken_from_it_before_the_target_knows() -> None:
    kept, left = TOPICS
    current = CurrentAssignment(2, 1, assigned={kept: {0: 2}, left: {0: 2}})
    target = TargetAssignment(2, {kept: frozenset({0}), left: frozenset({0})})
    step = Step(target, None, frozenset({kept}), lambda *_: False, drops_unsubscribed=True)
    told = reconcile(current, step)
    assert (told.state, told.assigned, told.revoking) == (
        MemberState.UNREVOKED,
        {kept: {0: 2}},
        {left: {0: 2}},
    )
    gone = reconcile(current, step._replace(owned=[(kept, [0])]))
    assert (gone.state, gone.assigned, gone.revoking) == (MemberState.STABLE, {kept: {0: 2}}, {})


def test_a_state_nobody_knows_any_more_is_begun_anew_with_nothing() -> None:
    topic = TOPICS[0]
    current = CurrentAssignment(5, 4, MemberState.UNKNOWN, {topic: {0: 5}})
    step = Step(TargetAssignment(6), None, frozenset({topic}), lambda *_: False)
    for report in (None, [(topic, [0])]):
        with pytest.raises(ApiError) as refused:
            reconcile(current, step._replace(owned=report))
        assert refused.value.code is ErrorCode.fenced_member_epoch
    assert reconcile(current, step._replace(owned=[])).is_at(6)


def test_a_member_reports_no_more_than_it_was_given() -> None:
    topic, other = TOPICS
    given_to_it = {topic: {0: 1, 1: 1}}
    assert is_within([(topic, [0])], given_to_it)
    assert is_within([], given_to_it)
    assert not is_within([(topic, [2])], given_to_it)
    assert not is_within([(other, [0])], given_to_it)
    assert not is_within(None, given_to_it)


def test_a_static_member_away_keeps_what_it_has() -> None:
    topic = TOPICS[0]
    current = CurrentAssignment(5, 4, MemberState.UNREVOKED, {topic: {0: 5}}, {topic: {1: 5}})
    gone = away(current)
    assert (gone.epoch, gone.assigned, gone.revoking) == (-2, {topic: {0: 5}}, {})
    assert returned(gone).epoch == returned(gone).previous_epoch == 0
