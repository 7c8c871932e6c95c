"""Static members, fencing, subscriptions by expression, groups that change their protocol while they work. C2, C3."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from tests.support.group_clients import ConfluentMember, Kind, Work, happened, pump

from holdfast.testing.engines import Engine, Scenario

pytestmark = pytest.mark.check

OnBoth = Callable[[Scenario], Any]

CLASSIC = Kind("confluent-kafka", "range")
COOPERATIVE = Kind("confluent-kafka", "cooperative-sticky")
CONSUMER = Kind("confluent-kafka", "uniform", "consumer")
STATIC = (CLASSIC, COOPERATIVE, CONSUMER, Kind("aiokafka", "range"))


def comes_back(kind: Kind, engine: Engine) -> Any:
    """A static member goes and comes back in time: it has what it had, and nobody else noticed."""
    with closing(Work(engine, f"static-{kind}")) as work:
        work.join(kind, instance_id="stays")
        goes = work.join(kind, instance_id="goes")
        work.share("both are there")
        work.write_and_read("before")
        stays = work.present[0]
        held, seen_by_other = goes.assignment, list(stays.events)
        work.leave(goes)
        work.write("while away")
        back = work.join(kind, instance_id="goes")
        work.share("it is back")
        assert back.assignment == held
        work.read("while away")
        work.commit()
        assert stays.events == seen_by_other
        return {"committed": engine.committed(work.group), "told": happened(back.events)}


@pytest.mark.parametrize("kind", STATIC, ids=str)
def test_a_static_member_that_comes_back_has_what_it_had(kind: Kind, on_both: OnBoth) -> None:
    on_both(lambda engine: comes_back(kind, engine))


def replaced(kind: Kind, engine: Engine) -> Any:
    """Two clients claim the same instance id."""
    with closing(Work(engine, f"twice-{kind}")) as work:
        first = work.join(kind, instance_id="only-one")
        work.share("the first is there")
        second = work.join(kind, instance_id="only-one")
        pump(work.present, lambda: first.errors or second.errors, "one of the two is refused")
        pump(work.present, lambda: first.errors or first.assignment, "the one that is not works on")
        return {"first": sorted(set(first.errors)), "second": sorted(set(second.errors))}


@pytest.mark.parametrize("kind", [CLASSIC, CONSUMER], ids=str)
def test_of_two_clients_with_one_instance_id_one_is_refused(kind: Kind, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: replaced(kind, engine))
    assert seen["first"] or seen["second"]


def expressions(kind: Kind, engine: Engine) -> Any:
    """A subscription by expression takes in what matches, and what is created later."""
    for name in ("a1", "a2", "b1"):
        engine.create_topic(f"regex-{kind.protocol}-{name}", 2)
    expression = f"^regex-{kind.protocol}-a[0-9]+$"
    group = f"group-regex-{kind.protocol}"
    member = ConfluentMember(
        engine.bootstrap_servers, group, [expression], assignor=kind.assignor, protocol=kind.protocol
    )
    with closing(member):

        def topics() -> list[str]:
            return sorted({topic for topic, _ in member.assignment})

        pump([member], lambda: len(member.assignment) == 4, "the topics that match")
        before = topics()
        engine.create_topic(f"regex-{kind.protocol}-a3", 1)
        pump([member], lambda: len(member.assignment) == 5, "a new topic that matches")
        return {"before": before, "after": topics()}


@pytest.mark.parametrize("kind", [CLASSIC, CONSUMER], ids=str)
def test_a_subscription_by_expression_follows_the_topics(kind: Kind, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: expressions(kind, engine))
    assert [topic[-2:] for topic in seen["after"]] == ["a1", "a2", "a3"]


def type_of(engine: Engine, group: str) -> str:
    described = engine.admin.describe_consumer_groups([group])[group].result(30)
    return str(described.type.name)


def migration(first: Kind, second: Kind, engine: Engine) -> Any:
    """Members of one protocol are replaced by members of the other, one by one, and back; no message is missed."""
    with closing(Work(engine, f"migrates-{first.protocol}-{first.assignor}")) as work:
        types: list[str] = []
        for kind in (first, second, first):
            new = [work.join(kind), work.join(kind)]
            work.share(f"with members of {kind}")
            work.write_and_read(f"phase {len(types)}")
            for member in [each for each in work.present if each not in new]:
                work.leave(member)
                work.share("one of the others has left")
            work.write_and_read(f"phase {len(types)} alone")
            types.append(type_of(engine, work.group))
        return {"types": types, "committed": engine.committed(work.group), "sizes": work.sizes()}


@pytest.mark.parametrize("first", [CLASSIC, CONSUMER], ids=str)
def test_a_group_changes_its_protocol_member_by_member_and_back(first: Kind, on_both: OnBoth) -> None:
    second = CLASSIC if first is CONSUMER else CONSUMER
    seen = on_both(lambda engine: migration(first, second, engine))
    names = {"classic": "CLASSIC", "consumer": "CONSUMER"}
    assert seen["types"] == [names[kind.protocol] for kind in (first, second, first)]


def restart_of_the_group(kind: Kind, engine: Engine) -> Any:
    """All members go; others, of the other protocol, take the group over where it stood."""
    other = CLASSIC if kind is CONSUMER else CONSUMER
    with closing(Work(engine, f"taken-over-{kind.protocol}")) as work:
        work.join(kind)
        work.share("one member")
        work.write_and_read("first")
        work.close()
        engine.await_state(work.group, "EMPTY")
        work.write("in between")
        work.join(other)
        work.share("one of the other protocol")
        work.read("in between")
        work.commit()
        return {"type": type_of(engine, work.group), "committed": engine.committed(work.group)}


@pytest.mark.parametrize("kind", [CLASSIC, CONSUMER], ids=str)
def test_an_empty_group_is_taken_over_by_the_other_protocol(kind: Kind, on_both: OnBoth) -> None:
    on_both(lambda engine: restart_of_the_group(kind, engine))
