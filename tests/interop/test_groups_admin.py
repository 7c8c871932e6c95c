"""Groups as librdkafka's admin client lists, describes, alters and deletes them, on both engines. C1, C5."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import (
    ConsumerGroupState,
    ConsumerGroupTopicPartitions,
    ConsumerGroupType,
    KafkaException,
    TopicPartition,
)
from tests.support.group_clients import Kind, Work

from holdfast.testing.engines import Engine, Scenario

pytestmark = pytest.mark.check

OnBoth = Callable[[Scenario], Any]
KINDS = (Kind("confluent-kafka", "range"), Kind("confluent-kafka", "uniform", "consumer"))


def outcome(futures: dict[Any, Any]) -> Any:
    """What the only future of an admin call brought: its result, or the name of its error."""
    (future,) = futures.values()
    try:
        return future.result(30)
    except KafkaException as error:
        return error.args[0].name()


def described(engine: Engine, group: str) -> Any:
    found = outcome(engine.admin.describe_consumer_groups([group]))
    if isinstance(found, str):
        return found
    members = [
        (
            member.group_instance_id,
            member.client_id,
            member.host,
            sorted((each.topic, each.partition) for each in member.assignment.topic_partitions),
        )
        for member in found.members
    ]
    return {
        "state": found.state.name,
        "type": found.type.name,
        "assignor": found.partition_assignor,
        "simple": found.is_simple_consumer_group,
        "coordinator": found.coordinator.id,
        "members": sorted(members),
    }


def listed(engine: Engine, group: str, **filters: Any) -> list[tuple[str, str, str, bool]]:
    found = engine.admin.list_consumer_groups(**filters).result(30)
    return [
        (each.group_id, each.state.name, each.type.name, each.is_simple_consumer_group)
        for each in found.valid
        if each.group_id == group
    ]


def life(kind: Kind, engine: Engine) -> Any:
    """A group at work, empty, altered and deleted."""
    seen: dict[str, Any] = {}
    with closing(Work(engine, f"admin-{kind.protocol}")) as work:
        group, admin = work.group, engine.admin
        member = work.join(kind, instance_id="the-one", settings={"client.id": "somebody"})
        work.share("one member")
        work.write_and_read("first")
        seen["at work"] = described(engine, group)
        seen["listed"] = listed(engine, group)
        seen["stable"] = listed(engine, group, states={ConsumerGroupState.STABLE})
        seen["empty"] = listed(engine, group, states={ConsumerGroupState.EMPTY})
        seen["classic"] = listed(engine, group, types={ConsumerGroupType.CLASSIC})
        seen["consumer"] = listed(engine, group, types={ConsumerGroupType.CONSUMER})
        topic = work.topics[0]
        positions = [ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0, 3)])]
        altered = outcome(admin.alter_consumer_group_offsets(positions))
        seen["altered while at work"] = [str(each.error) for each in altered.topic_partitions]
        seen["deleted while at work"] = outcome(admin.delete_consumer_groups([group]))
        seen["positions"] = engine.committed(group)
        work.leave(member)
        if kind.protocol == "classic":
            # A static member stays until its session is over; this is how one is sent away.
            work.join(kind, instance_id="the-one", settings={"session.timeout.ms": 300})
            work.share("it came back for a short session")
            work.leave(work.present[0])
    engine.await_state(group, "EMPTY") if kind.protocol == "classic" else None
    return seen


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_group_at_work_is_described_and_protected(kind: Kind, on_both: OnBoth) -> None:
    seen = on_both(lambda engine: life(kind, engine))
    assert seen["at work"]["state"] == "STABLE"
    assert seen["deleted while at work"] == "NON_EMPTY_GROUP"


def without_members(engine: Engine) -> Any:
    """A group that only ever had positions: altered, read, deleted, gone."""
    topic = engine.create_topic("only-positions", 3)
    engine.write(topic, {index: ["a", "b", "c"] for index in range(3)})
    group, admin = "only-positions", engine.admin
    seen: dict[str, Any] = {"before": described(engine, group)}

    def alter(*where: TopicPartition) -> list[tuple[int, int, str]]:
        found = outcome(
            admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, list(where))])
        )
        return sorted((each.partition, each.offset, str(each.error)) for each in found.topic_partitions)

    seen["altered"] = alter(*(TopicPartition(topic, index, index) for index in range(3)))
    seen["no such partition"] = alter(TopicPartition(topic, 9, 1))
    seen["no such topic"] = alter(TopicPartition("nowhere", 0, 1))
    seen["listed"] = listed(engine, group)
    seen["described"] = described(engine, group)
    seen["positions"] = engine.committed(group)
    seen["deleted"] = str(outcome(admin.delete_consumer_groups([group])))
    seen["deleted again"] = outcome(admin.delete_consumer_groups([group]))
    seen["positions after"] = engine.committed(group)
    seen["after"] = described(engine, group)
    return seen


def test_a_group_of_committed_offsets_alone_is_altered_and_deleted(on_both: OnBoth) -> None:
    seen = on_both(without_members)
    assert seen["positions"] == {f"only-positions-{index}": index for index in range(3)}
    assert seen["positions after"] == {}


def deleted_topic(engine: Engine) -> Any:
    """The positions of a topic go with the topic."""
    for name in ("stays", "goes"):
        engine.create_topic(f"positions-{name}", 1)
    where = [TopicPartition(f"positions-{name}", 0, 5) for name in ("stays", "goes")]
    group = "deleted-topic"
    outcome(engine.admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, where)]))
    before = engine.committed(group)
    engine.admin.delete_topics(["positions-goes"])["positions-goes"].result(30)
    engine.await_committed(group, {("positions-stays", 0): 5})
    engine.create_topic("positions-goes", 1)
    return {"before": before, "made anew": engine.committed(group)}


def test_committed_offsets_of_a_deleted_topic_are_gone(on_both: OnBoth) -> None:
    assert on_both(deleted_topic)["made anew"] == {"positions-stays-0": 5}
