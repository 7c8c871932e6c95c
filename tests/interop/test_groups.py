"""Consumer groups of real clients: the same scenario, the same outcome, on Apache Kafka and here. C1, C2, C3."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from tests.support.group_clients import MESSAGES, Kind, Work

from holdfast.testing.engines import Engine, NotComeAbout, Scenario

pytestmark = pytest.mark.check

OnBoth = Callable[[Scenario], Any]

KINDS = (
    Kind("confluent-kafka", "range"),
    Kind("confluent-kafka", "roundrobin"),
    Kind("confluent-kafka", "cooperative-sticky"),
    Kind("confluent-kafka", "uniform", "consumer"),
    Kind("confluent-kafka", "range", "consumer"),
    Kind("aiokafka", "range"),
    Kind("aiokafka", "roundrobin"),
    Kind("aiokafka", "sticky"),
    Kind("kafka-python", "range"),
    Kind("kafka-python", "roundrobin"),
    Kind("kafka-python", "sticky"),
)
INCREMENTAL = ("cooperative-sticky", "uniform")
BY_ORDER = ("range", "roundrobin")
"""Assignors whose shares have the same shape whatever ids the members were given."""


def share_the_work(kind: Kind, engine: Engine, attempt: int = 1) -> Any:
    """A member, a second beside it, the second leaves: every message is read once, from where the group stood."""
    with closing(Work(engine, f"shared-{attempt}-{kind}")) as work:
        first = work.join(kind)
        work.share("the first member has everything")
        work.write_and_read("alone")
        second = work.join(kind)
        work.share("two members share")
        shape, sizes = work.shape(), work.sizes()
        kept = first.assignment
        work.write_and_read("together")
        work.leave(second)
        work.share("the first has everything again")
        work.write_and_read("alone again")
        if kind.assignor in INCREMENTAL:
            revoked = {place for event in first.events if event.kind != "assigned" for place in event.places}
            assert len(revoked) == 3
            assert not revoked & kept, "what stays with its member is never taken from it"
    committed = engine.committed(work.group)
    assert committed == {f"{topic}-{index}": 3 * MESSAGES for topic, index in work.places}
    engine.await_state(work.group, "EMPTY")
    return {"sizes": sizes, "shape": shape if kind.assignor in BY_ORDER else None}


def share_patiently(kind: Kind, engine: Engine) -> Any:
    """kafka-python 3.0 now and then misses a wake-up and stands still, on Apache Kafka as here: it may try once more,
    and the run's last lines say that it had to."""
    try:
        return share_the_work(kind, engine)
    except NotComeAbout as stall:
        if kind.client != "kafka-python":
            raise
        warnings.warn(f"{kind} stood still on {engine.name} and tried again: {stall}", stacklevel=2)
        return share_the_work(kind, engine, attempt=2)


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_members_share_the_work_and_go_on_where_they_stood(kind: Kind, on_both: OnBoth) -> None:
    on_both(lambda engine: share_patiently(kind, engine))


SHARES_OF_EIGHT = {"range": [0, 0, 0, 0, 0, 2, 2, 2], "uniform": [0, 0, 1, 1, 1, 1, 1, 1]}


def many_members(kind: Kind, engine: Engine) -> Any:
    """Members come one after the other without waiting, more of them than partitions, then most go at once."""
    with closing(Work(engine, f"many-{kind}")) as work:
        for _ in range(8):
            work.join(kind)
        work.share("eight members", SHARES_OF_EIGHT[kind.assignor])
        work.write_and_read("first")
        for member in work.present[1:7]:
            work.leave(member)
        work.share("two are left")
        work.write_and_read("second")
        return {"left": work.sizes(), "committed": engine.committed(work.group)}


@pytest.mark.parametrize("kind", [KINDS[0], KINDS[3]], ids=str)
def test_more_members_than_partitions_come_and_go_at_once(kind: Kind, on_both: OnBoth) -> None:
    on_both(lambda engine: many_members(kind, engine))


MIXED = tuple(Kind(client, "range") for client in ("confluent-kafka", "aiokafka", "kafka-python"))


def different_clients(engine: Engine) -> Any:
    """Three clients are members of one group and understand each other's subscriptions and assignments."""
    with closing(Work(engine, "mixed")) as work:
        for kind in MIXED:
            work.join(kind)
        work.share("three clients share")
        shape = work.shape()
        work.write_and_read("three")
        work.leave(work.present[0])
        work.share("two clients share")
        work.write_and_read("two")
        return {"three": shape, "two": work.shape(), "committed": engine.committed(work.group)}


def test_different_clients_are_members_of_one_group(on_both: OnBoth) -> None:
    seen = on_both(different_clients)
    assert seen["three"] == [[[0], [0]], [[1], [1]], [[2], [2]]]
    assert seen["two"] == [[[0, 1], [0, 1]], [[2], [2]]]


def subscribed_to_less(engine: Engine) -> Any:
    """Members of one group that want different topics get what they want and nothing else."""
    with closing(Work(engine, "uneven")) as work:
        kind = KINDS[1]
        both = work.join(kind)
        one = kind.join(engine, work.group, work.topics[:1])
        work.members.append(one)
        work.present.append(one)
        work.share("they share")
        work.write_and_read("uneven")
        assert {topic for topic, _ in one.assignment} == {work.topics[0]}
        # How the shared topic is divided follows the members' ids, which are random.
        return {"other topic": len([t for t, _ in both.assignment if t == work.topics[1]])}


def test_members_get_only_topics_they_subscribed_to(on_both: OnBoth) -> None:
    assert on_both(subscribed_to_less)["other topic"] == 3


def growth(kind: Kind, engine: Engine) -> None:
    """A topic that gains partitions, and one that is deleted, change the assignment of a group that is at work."""
    from confluent_kafka.admin import NewPartitions

    with closing(Work(engine, f"growth-{kind}")) as work:
        work.join(kind)
        work.join(kind)
        work.share("before")
        work.write_and_read("before")
        grown, deleted = work.topics
        engine.admin.create_partitions([NewPartitions(grown, PARTITIONS_GROWN)])[grown].result(30)
        work.places += [(grown, index) for index in range(3, PARTITIONS_GROWN)]
        work.share("after it grew", [5, 5])
        engine.admin.delete_topics([deleted])[deleted].result(30)
        work.places = [place for place in work.places if place[0] != deleted]
        work.share("after the other was deleted", [3, 4])


PARTITIONS_GROWN = 7


@pytest.mark.parametrize("kind", [KINDS[1], KINDS[3]], ids=str)
def test_topics_that_grow_and_go_change_the_assignment(kind: Kind, on_both: OnBoth) -> None:
    on_both(lambda engine: growth(kind, engine))
