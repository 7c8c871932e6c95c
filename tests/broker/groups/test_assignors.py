"""The promises of the assignors, whatever members and topics they are given."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.groups.assignors import ASSIGNORS, Assignment, Subscriber, assign_range, assign_uniform

TOPICS = [UUID(int=number) for number in range(1, 6)]
NAMES = st.sampled_from(["a", "b", "c", "d", "e", "f", "g"])


@st.composite
def groups(draw: st.DrawFn, *, alike: bool = False) -> tuple[dict[str, Subscriber], dict[UUID, int]]:
    partitions = draw(st.dictionaries(st.sampled_from(TOPICS), st.integers(0, 9)))
    names = draw(st.sets(NAMES, min_size=1))
    common = draw(st.frozensets(st.sampled_from(TOPICS)))
    owners = {
        (topic, index): draw(st.sampled_from([*sorted(names), None]))
        for topic in TOPICS
        for index in range(4)
    }
    members = {}
    for name in names:
        target: dict[UUID, set[int]] = {}
        for (topic, index), owner in owners.items():
            if owner == name:
                target.setdefault(topic, set()).add(index)
        members[name] = Subscriber(
            common if alike else draw(st.frozensets(st.sampled_from(TOPICS))),
            {topic: frozenset(indexes) for topic, indexes in target.items()},
            draw(st.none() | st.just(f"instance-{name}")),
        )
    return members, partitions


def pairs(assignment: Assignment) -> set[tuple[UUID, int]]:
    return {(topic, index) for topic, indexes in assignment.items() for index in indexes}


def loads(assigned: Mapping[str, Assignment]) -> dict[str, int]:
    return {name: len(pairs(assignment)) for name, assignment in assigned.items()}


@pytest.mark.parametrize("name", ASSIGNORS)
@given(group=groups())
def test_every_partition_of_a_subscribed_topic_has_exactly_one_owner(
    name: str, group: tuple[dict[str, Subscriber], dict[UUID, int]]
) -> None:
    members, partitions = group
    assigned = ASSIGNORS[name](members, partitions)
    assert assigned.keys() == members.keys()
    given_out = [(topic, index) for each in assigned.values() for topic, index in pairs(each)]
    wanted = set().union(*(member.topics for member in members.values()))
    assert sorted(given_out) == sorted(
        (topic, index) for topic in wanted & partitions.keys() for index in range(partitions[topic])
    )
    for member, assignment in assigned.items():
        assert assignment.keys() <= members[member].topics
        assert all(assignment.values())


@pytest.mark.parametrize("name", ASSIGNORS)
@given(group=groups())
def test_the_order_of_members_does_not_matter(
    name: str, group: tuple[dict[str, Subscriber], dict[UUID, int]]
) -> None:
    members, partitions = group
    backwards = dict(reversed(members.items()))
    assert ASSIGNORS[name](members, partitions) == ASSIGNORS[name](backwards, partitions)


@given(group=groups(alike=True))
def test_uniform_shares_differ_by_one_at_most(group: tuple[dict[str, Subscriber], dict[UUID, int]]) -> None:
    members, partitions = group
    shares = loads(assign_uniform(members, partitions)).values()
    assert max(shares) - min(shares) <= 1


@given(group=groups(alike=True))
def test_uniform_moves_no_more_than_balance_asks(
    group: tuple[dict[str, Subscriber], dict[UUID, int]],
) -> None:
    members, partitions = group
    assigned = assign_uniform(members, partitions)
    valid = {
        name: {
            pair
            for pair in pairs(member.target)
            if pair[0] in member.topics and pair[1] < partitions.get(pair[0], 0)
        }
        for name, member in members.items()
    }
    kept = sum(len(pairs(assigned[name]) & valid[name]) for name in members)
    share, extra = divmod(sum(loads(assigned).values()), len(members))
    # The best there is: everybody keeps up to the small share, and as many as may have one more keep that too.
    best = sum(min(len(own), share) for own in valid.values())
    best += min(extra, sum(len(own) > share for own in valid.values()))
    assert kept == best


@given(group=groups())
def test_uniform_leaves_nothing_that_one_move_would_improve(
    group: tuple[dict[str, Subscriber], dict[UUID, int]],
) -> None:
    members, partitions = group
    assigned = assign_uniform(members, partitions)
    shares = loads(assigned)
    for name, assignment in assigned.items():
        for topic in assignment:
            for other, member in members.items():
                if topic in member.topics:
                    assert shares[name] - shares[other] <= 1


@given(group=groups())
def test_uniform_is_at_rest_once_reached(group: tuple[dict[str, Subscriber], dict[UUID, int]]) -> None:
    members, partitions = group
    assigned = assign_uniform(members, partitions)
    again = {name: member._replace(target=assigned[name]) for name, member in members.items()}
    assert assign_uniform(again, partitions) == assigned


def test_uniform_gives_a_newcomer_its_share_and_moves_nothing_else() -> None:
    topic = TOPICS[0]
    members = {
        "a": Subscriber(frozenset({topic}), {topic: frozenset({0, 2, 4})}),
        "b": Subscriber(frozenset({topic}), {topic: frozenset({1, 3, 5})}),
        "c": Subscriber(frozenset({topic})),
    }
    assigned = assign_uniform(members, {topic: 6})
    assert assigned["a"] == {topic: {0, 2}}
    assert assigned["b"] == {topic: {1, 3}}
    assert assigned["c"] == {topic: {4, 5}}


def test_range_gives_the_same_run_of_every_topic() -> None:
    topics = frozenset(TOPICS[:2])
    members = {"b": Subscriber(topics), "a": Subscriber(topics)}
    assigned = assign_range(members, dict.fromkeys(topics, 3))
    assert assigned["a"] == {topic: {0, 1} for topic in topics}
    assert assigned["b"] == {topic: {2} for topic in topics}


def test_range_orders_static_members_by_instance_and_before_others() -> None:
    topic = TOPICS[0]
    members = {
        "a": Subscriber(frozenset({topic})),
        "z": Subscriber(frozenset({topic}), instance_id="1"),
        "y": Subscriber(frozenset({topic}), instance_id="2"),
    }
    assigned = assign_range(members, {topic: 3})
    assert [assigned[name] for name in ("z", "y", "a")] == [{topic: {0}}, {topic: {1}}, {topic: {2}}]


def test_more_members_than_partitions_leaves_some_without() -> None:
    topic = TOPICS[0]
    members = {name: Subscriber(frozenset({topic})) for name in "abc"}
    for assignor in ASSIGNORS.values():
        assert sorted(loads(assignor(members, {topic: 2})).values()) == [0, 1, 1]
