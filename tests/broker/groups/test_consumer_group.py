"""Groups of the consumer protocol: what scenarios cannot show well."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups import consumer, regex
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.consumer_member import ConsumerReply
from holdfast.broker.groups.consumer_state import ConsumerMember
from holdfast.broker.groups.model import JoinReply, JoinRequest, MemberProtocol
from holdfast.errors import ApiError
from holdfast.wire.batch import iterate_records
from holdfast.wire.consumer_protocol import ConsumerSubscription
from holdfast.wire.coordinator_records import (
    ConsumerGroupCurrentMemberAssignmentKey,
    ConsumerGroupCurrentMemberAssignmentValue,
    ConsumerGroupMemberMetadataKey,
    ConsumerGroupMemberMetadataValue,
    ConsumerGroupPartitionMetadataKey,
    ConsumerGroupPartitionMetadataValue,
    CoordinatorRecord,
    CurrentTopicPartitions,
    decode_group_record,
)


@pytest.fixture
def world() -> GroupWorld:
    world = GroupWorld()
    world.topics.create("orders", 4)
    return world


def replay(world: GroupWorld, *records: tuple[CoordinatorRecord, CoordinatorRecord | None]) -> None:
    for key, value in records:
        world.coordinator.consumer_groups.replay(key, value)


def test_a_defect_while_a_silent_member_is_put_out_does_not_keep_it_for_ever(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.beat("m", 0, topics=["orders"])
    monkeypatch.setattr(world.journal, "append", None)
    with pytest.raises(TypeError):
        world.advance(60_000)
    monkeypatch.undo()
    world.advance(60_000)
    assert not world.consumer_group().members


def test_a_heartbeat_that_says_nothing_costs_no_timer_no_record_and_no_look_at_topics(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(3):
        world.beat(f"m{number}", 0, topics=["orders"])
        world.advance(2_000)
    group = world.consumer_group()
    while group.state != "Stable":
        for name, member in group.members.items():
            owned = {topic: frozenset(indexes) for topic, indexes in member.current.assigned.items()}
            world.beat(name, member.current.epoch, owned=owned)
    for name in group.members:
        acknowledge(world, name)
    appended = len(world.journal.batches)

    def must_not(*_: object) -> None:
        raise AssertionError("a keep-alive must cost nothing")

    monkeypatch.setattr(world.schedule, "at", must_not)
    monkeypatch.setattr(world.topics, "by_name", must_not)
    for _ in range(20):
        world.clock.advance(5_000)
        for name, member in group.members.items():
            reply = world.beat(name, member.current.epoch)
            assert (reply.member_epoch, reply.assignment) == (member.current.epoch, None)
    assert len(world.journal.batches) == appended
    monkeypatch.undo()
    world.advance(44_000)
    assert len(group.members) == 3
    world.advance(1_000)
    assert not group.members


def acknowledge(world: GroupWorld, name: str) -> ConsumerReply:
    """A member says that it holds what it was given."""
    current = world.consumer_group().members[name].current
    owned = {topic: frozenset(indexes) for topic, indexes in current.assigned.items()}
    return world.beat(name, current.epoch, owned=owned)


def test_a_member_that_missed_the_answer_with_its_epoch_is_told_its_assignment(world: GroupWorld) -> None:
    world.beat("m0", 0, topics=["orders"])
    world.advance(2_000)
    told = acknowledge(world, "m0")
    world.beat("m1", 0, topics=["orders"])
    world.advance(2_000)
    before = world.consumer_group().members["m0"].current
    kept = {topic: frozenset(sorted(these)[:2]) for topic, these in before.assigned.items()}
    world.beat("m0", told.member_epoch)  # to give up two partitions
    world.beat("m0", told.member_epoch, owned=kept)  # a new epoch, and the answer is lost
    now = world.consumer_group().members["m0"].current
    assert now.epoch > told.member_epoch
    # librdkafka repeats what it said, and does not say everything, when a request timed out.
    again = world.beat("m0", told.member_epoch, owned=kept)
    assert again.member_epoch == now.epoch
    assert again.assignment is not None


def test_a_member_that_says_nothing_of_its_assignment_is_told_again_ever_more_rarely(
    world: GroupWorld,
) -> None:
    joined = world.beat("m0", 0, topics=["orders"])
    assert joined.assignment is not None
    epoch, told = joined.member_epoch, []
    for beat in range(50):
        world.clock.advance(5_000)
        if world.beat("m0", epoch).assignment is not None:
            told.append(beat + 1)
    assert told == [3, 9, 21, 45]
    acknowledge(world, "m0")
    for _ in range(50):
        world.clock.advance(5_000)
        assert world.beat("m0", epoch).assignment is None


def test_a_member_that_does_not_give_up_what_it_must_is_told_again(world: GroupWorld) -> None:
    world.beat("m0", 0, topics=["orders"])
    world.advance(2_000)
    epoch = acknowledge(world, "m0").member_epoch
    world.beat("m1", 0, topics=["orders"])
    world.advance(2_000)
    lost = world.beat("m0", epoch)
    assert lost.assignment is not None
    replies = []
    for _ in range(3):
        world.clock.advance(5_000)
        replies.append(world.beat("m0", epoch).assignment)
    assert replies == [None, None, lost.assignment]


def test_what_does_not_fit_a_batch_is_appended_in_parts(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "BATCH_BYTES", 60)
    for number in range(10):
        world.beat(f"m{number}", 0, topics=["orders"])
    world.advance(2_000)
    before = len(world.journal.batches)
    world.beat("m3", 2)
    assert len(world.journal.batches) > before + 1
    group = world.consumer_group()
    assert group.assignment_epoch == group.epoch
    # Killed between two parts: whatever is there is a group, and its next heartbeat computes the target anew.
    whole = list(world.journal.batches)
    for kept in range(before, len(whole)):
        world.reload(whole[:kept])
        world.advance(2_000)
        reply = world.beat("m3", world.consumer_group().members["m3"].current.epoch)
        assert reply.member_epoch == 11
        targets = [
            (topic, index)
            for target in world.consumer_group().targets.values()
            for topic, indexes in target.items()
            for index in indexes
        ]
        assert len(targets) == len(set(targets)) == 4


def test_a_part_that_is_refused_leaves_what_was_appended_before_it(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(consumer, "BATCH_BYTES", 1)
    append, room = world.journal.append, 3

    def append_some(*arguments: object, **named: object) -> None:
        nonlocal room
        if not room:
            raise ApiError(ErrorCode.coordinator_not_available)
        room -= 1
        append(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(world.journal, "append", append_some)
    with pytest.raises(ApiError):
        world.beat("ann", 0, topics=["orders"])
    monkeypatch.undo()
    group = world.consumer_group()
    seen = (group.epoch, group.assignment_epoch, dict(group.targets), set(group.members))
    world.reload()
    again = world.consumer_group()
    assert (again.epoch, again.assignment_epoch, dict(again.targets), set(again.members)) == seen
    assert world.beat("ann", 0, topics=["orders"]).member_epoch == 2


def test_a_wall_clock_set_back_does_not_stop_assignments(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["orders"])
    world.clock.step_wall(-3_600_000)
    assert world.beat("bob", 0, topics=["orders"]).member_epoch == 3


def test_settings_of_a_group_outside_of_the_broker_s_bounds_are_taken_as_the_bound(world: GroupWorld) -> None:
    world.overrides["group"] = {
        "consumer.heartbeat.interval.ms": "1",
        "consumer.session.timeout.ms": "90000000",
    }
    assert world.beat("ann", 0, topics=["orders"]).heartbeat_interval_ms == 5_000
    world.advance(60_000)
    assert not world.consumer_group().members


def test_assignors_may_be_named_by_kafka_s_classes(world: GroupWorld) -> None:
    world.configure(
        group_consumer_assignors="org.apache.kafka.coordinator.group.assignor.RangeAssignor,uniform"
    )
    world.beat("ann", 0, topics=["orders"])
    assert world.coordinator.consumer_groups.describe("group").assignor == "range"
    world.beat("bob", 0, topics=["orders"], server_assignor="uniform")
    assert world.coordinator.consumer_groups.describe("group").assignor == "uniform"


def test_most_members_decide_on_the_assignor(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["orders"], server_assignor="range")
    world.beat("bob", 0, topics=["orders"], server_assignor="range")
    world.beat("cyd", 0, topics=["orders"], server_assignor="uniform")
    assert world.coordinator.consumer_groups.describe("group").assignor == "range"


def test_committed_offsets_are_read_with_the_right_epoch_or_none(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["orders"])
    group = world.consumer_group()
    group.check_offset_fetch("ann", 2)
    group.check_offset_fetch(None, -1)
    for member_id, epoch, code in (
        ("ann", 1, ErrorCode.stale_member_epoch),
        ("bob", 2, ErrorCode.unknown_member_id),
        (None, 2, ErrorCode.unknown_member_id),
    ):
        with pytest.raises(ApiError) as refused:
            group.check_offset_fetch(member_id, epoch)
        assert refused.value.code is code


def test_committed_offsets_of_topics_that_somebody_reads_do_not_expire(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["payments"], regex="ord.*")
    group = world.consumer_group()
    assert group.is_subscribed_to("orders")
    assert group.is_subscribed_to("payments")
    assert not group.is_subscribed_to("other")


def test_records_may_come_in_any_order_that_compaction_leaves(world: GroupWorld) -> None:
    topic_id = world.topics.create("stored", 2)
    held = CurrentTopicPartitions(topic_id, (0, 1))
    replay(
        world,
        (
            ConsumerGroupCurrentMemberAssignmentKey("group", "ann"),
            ConsumerGroupCurrentMemberAssignmentValue(
                member_epoch=7, previous_member_epoch=6, state=0, assigned_partitions=(held,)
            ),
        ),
        (
            ConsumerGroupMemberMetadataKey("group", "ann"),
            ConsumerGroupMemberMetadataValue(
                client_id="c", client_host="/h", subscribed_topic_names=("stored", "stored")
            ),
        ),
        (ConsumerGroupMemberMetadataKey("group", "gone"), None),
        (ConsumerGroupCurrentMemberAssignmentKey("group", "gone"), None),
        (ConsumerGroupMemberMetadataKey("never was", "gone"), None),
    )
    group = world.consumer_group()
    ann = group.members["ann"]
    # What a version before 4.3 stored has no epoch for each partition.
    assert ann.current.assigned == {topic_id: {0: 7, 1: 7}}
    assert ann.profile.topic_names == ("stored",)
    assert group.owner_of(topic_id, 1) == "ann"
    assert list(world.coordinator.groups) == ["group"]


def test_what_brokers_before_4_1_wrote_is_taken_out(world: GroupWorld) -> None:
    key = ConsumerGroupPartitionMetadataKey("group")
    replay(world, (key, ConsumerGroupPartitionMetadataValue()))
    world.beat("ann", 0, topics=["orders"])
    keys = [
        decode_group_record(record.key, record.value)
        for batch in world.journal.batches
        for record in iterate_records(batch)
    ]
    assert (key, None) in keys
    assert not world.consumer_group().has_legacy_metadata


def test_a_member_that_is_gone_leaves_no_timer_behind() -> None:
    world = GroupWorld({"offsets.retention.check.interval.ms": "86400000"})
    world.topics.create("orders", 2)
    idle_ms = world.schedule.next_ms
    world.beat("ann", 0, topics=["orders"], rebalance_timeout_ms=60_000)
    world.advance(2_000)
    world.beat("bob", 0, topics=["orders"])
    world.beat("ann", 2)
    world.beat("ann", -1)
    world.beat("bob", -1)
    assert world.schedule.next_ms == idle_ms


def test_timers_of_a_member_can_be_cancelled_twice() -> None:
    member = ConsumerMember("ann")
    member.cancel_timers()
    member.cancel("join_timer")
    assert member.session_timer is None


def refuse_after(world: GroupWorld, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
    """The log takes so many batches, of one record each, and no more."""
    monkeypatch.setattr(consumer, "BATCH_BYTES", 1)
    append = world.journal.append

    def append_some(*arguments: object, **named: object) -> None:
        nonlocal room
        if not room:
            raise ApiError(ErrorCode.coordinator_not_available)
        room -= 1
        append(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(world.journal, "append", append_some)


def test_a_member_of_whom_only_a_part_was_appended_goes_when_it_is_not_heard_of_again(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse_after(world, monkeypatch, 3)
    with pytest.raises(ApiError):
        world.beat("ann", 0, topics=["orders"])
    monkeypatch.undo()
    assert set(world.consumer_group().members) == {"ann"}
    world.advance(60_000)
    assert not world.consumer_group().members


def test_a_classic_member_of_whom_only_a_part_was_appended_goes_after_its_own_session(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.beat("ann", 0, topics=["orders"])
    world.advance(2_000)
    refuse_after(world, monkeypatch, 1)
    replies: list[JoinReply] = []
    world.coordinator.join(join_request("bob"), replies.append, world.now)
    monkeypatch.undo()
    assert [reply.error for reply in replies] == [ErrorCode.coordinator_not_available]
    assert set(world.consumer_group().members) == {"ann", "bob"}
    world.advance(10_000)
    assert set(world.consumer_group().members) == {"ann"}


def test_a_classic_group_of_which_only_a_part_was_converted_is_no_more(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.configure(group_initial_rebalance_delay_ms="0")
    replies: list[JoinReply] = []
    for name in ("", ""):
        world.coordinator.join(join_request(name), replies.append, world.now)
    assert [reply.error for reply in replies] == [ErrorCode.none], "the second waits for the first"
    refuse_after(world, monkeypatch, 2)
    with pytest.raises(ApiError):
        world.beat("ann", 0, topics=["orders"])
    monkeypatch.undo()
    members = world.consumer_group().members
    assert [reply.error for reply in replies] == [ErrorCode.none, ErrorCode.rebalance_in_progress]
    assert len(members) == 3
    world.advance(60_000)
    assert not world.consumer_group().members
    world.reload()
    assert isinstance(world.coordinator.groups["group"], ConsumerGroup)


def join_request(member_id: str) -> JoinRequest:
    metadata = ConsumerSubscription(topics=("orders",)).encode()
    return JoinRequest(
        "group",
        member_id,
        None,
        "client",
        "/10.0.0.9",
        10_000,
        60_000,
        "consumer",
        (MemberProtocol("range", metadata),),
        False,
        True,
    )


@pytest.mark.parametrize("restarts", [False, True])
def test_a_static_member_that_is_away_is_not_waited_for_to_give_anything_up(
    world: GroupWorld, restarts: bool
) -> None:
    first = world.beat("sam", 0, topics=["orders"], instance_id="seat", rebalance_timeout_ms=10_000)
    world.advance(2_000)
    world.beat("ann", 0, topics=["orders"])
    world.beat("sam", first.member_epoch, instance_id="seat")
    assert world.consumer_group().members["sam"].current.revoking
    world.beat("sam", -2, instance_id="seat")
    if restarts:
        world.reload()
    for _ in range(6):
        world.advance(5_000)
        acknowledge(world, "ann")
    assert "sam" in world.consumer_group().members, "its session has not ended"
    world.advance(20_000)
    assert "sam" not in world.consumer_group().members


def test_groups_with_the_same_expression_match_each_name_once(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(20):
        world.topics.create(f"order-{number}", 1)
    matched: list[str] = []
    matching = regex.matching

    def counted(expression: str, names: Iterable[str]) -> frozenset[str]:
        names = list(names)
        matched.extend(names)
        return matching(expression, names)

    monkeypatch.setattr(regex, "matching", counted)
    groups = [f"group {number}" for number in range(5)]
    for group in groups:
        world.beat("ann", 0, group=group, regex="order.*")
    assert len(matched) == 21
    matched.clear()
    world.topics.create("order-new", 1)
    world.topics.create("other", 1)
    world.topics.delete("order-0")
    for group in groups:
        world.advance(2_000)
        world.beat("ann", world.consumer_group(group).members["ann"].current.epoch, group=group)
        (found,) = world.consumer_group(group).resolutions.values()
        assert found.topics == {"orders", "order-new", *(f"order-{number}" for number in range(1, 20))}
    assert sorted(matched) == ["order-new", "other"]
