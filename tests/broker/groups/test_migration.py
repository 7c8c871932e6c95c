"""Between the protocols: what scenarios cannot show well."""

from __future__ import annotations

import pytest
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.consumer_group import ConsumerGroup
from holdfast.broker.groups.model import (
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
)

PARKED = JoinReply(ErrorCode.none, "waits for the others")


@pytest.fixture
def world() -> GroupWorld:
    world = GroupWorld(
        {"group.initial.rebalance.delay.ms": "0", "group.consumer.assignment.interval.ms": "0"}
    )
    world.topics.create("orders", 4)
    return world


def join(
    world: GroupWorld, member_id: str, protocol: str, metadata: bytes, instance: str | None
) -> JoinReply:
    replies: list[JoinReply] = []
    world.coordinator.join(
        JoinRequest(
            "group",
            member_id,
            instance,
            "client",
            "/10.0.0.9",
            45_000,
            300_000,
            "consumer",
            (MemberProtocol(protocol, metadata),),
            False,
            True,
        ),
        replies.append,
        world.now,
    )
    return replies[0] if replies else PARKED


def sync(world: GroupWorld, reply: JoinReply, assignment: bytes, instance: str | None = None) -> SyncReply:
    replies: list[SyncReply] = []
    world.coordinator.sync(
        SyncRequest(
            "group",
            reply.generation,
            reply.member_id,
            instance,
            "consumer",
            reply.protocol_name,
            ((reply.member_id, assignment),),
        ),
        replies.append,
        world.now,
    )
    (answer,) = replies
    return answer


def classic_group(
    world: GroupWorld, protocol: str = "range", user_data: bytes | None = None, instance: str | None = None
) -> JoinReply:
    """One classic member that has everything."""
    joined = join(world, "", protocol, ConsumerSubscription(topics=("orders",)).encode(), instance)
    everything = (OwnedPartitions("orders", (0, 1, 2, 3)),)
    sync(
        world,
        joined,
        ConsumerAssignment(assigned_partitions=everything, user_data=user_data).encode(),
        instance,
    )
    return joined


def kind(world: GroupWorld) -> type:
    return type(world.coordinator.groups["group"])


@pytest.mark.parametrize("protocol", ["range", "roundrobin", "sticky", "cooperative-sticky"])
def test_what_a_standard_assignor_added_to_its_assignments_is_not_missed(
    world: GroupWorld, protocol: str
) -> None:
    classic_group(world, protocol, b"a generation and more")
    assert world.beat("ann", 0, topics=["orders"]).member_epoch == 2
    assert kind(world) is ConsumerGroup


def test_what_a_custom_assignor_added_would_be_lost(world: GroupWorld) -> None:
    classic_group(world, "ours", b"precious")
    with pytest.raises(ApiError) as refused:
        world.beat("ann", 0, topics=["orders"])
    assert refused.value.code is ErrorCode.group_id_not_found
    assert kind(world) is ClassicGroup


def test_what_a_cooperative_member_was_told_to_give_up_is_free_once_it_joined_without_it(
    world: GroupWorld,
) -> None:
    """Its assignment, without a partition that it owned and that nobody has yet, may still be on its way to it."""
    owned = ConsumerSubscription(topics=("orders",), owned_partitions=(OwnedPartitions("orders", (0, 1)),))
    joined = join(world, "", "cooperative-sticky", owned.encode(), None)
    less = ConsumerAssignment(assigned_partitions=(OwnedPartitions("orders", (0,)),))
    sync(world, joined, less.encode())
    given = world.beat("ann", 0, topics=["orders"]).assignment or {}
    assert kind(world) is ConsumerGroup
    assert [sorted(partitions) for partitions in given.values()] == [[2, 3]]
    rest = ConsumerSubscription(topics=("orders",), owned_partitions=(OwnedPartitions("orders", (0,)),))
    again = join(world, joined.member_id, "cooperative-sticky", rest.encode(), None)
    assert again.error is ErrorCode.none


def test_a_join_that_fails_leaves_the_classic_group_as_it_was(world: GroupWorld) -> None:
    joined = classic_group(world)
    before = list(world.journal.batches)
    with pytest.raises(ApiError):
        world.beat("ann", 0, topics=["orders"], regex="(")
    world.journal.refuses = ErrorCode.coordinator_not_available
    with pytest.raises(ApiError):
        world.beat("ann", 0, topics=["orders"])
    world.journal.refuses = None
    assert world.journal.batches == before
    assert kind(world) is ClassicGroup
    assert sync(world, joined, b"").error is ErrorCode.none


def test_a_leave_that_fails_leaves_the_consumer_group_as_it_was(world: GroupWorld) -> None:
    classic_group(world)
    world.beat("ann", 0, topics=["orders"])
    world.journal.refuses = ErrorCode.coordinator_not_available
    with pytest.raises(ApiError):
        world.beat("ann", -1)
    world.journal.refuses = None
    assert kind(world) is ConsumerGroup
    assert "ann" in world.consumer_group().members


def test_an_upgrade_is_one_batch_and_so_is_a_downgrade(world: GroupWorld) -> None:
    classic_group(world)
    before = len(world.journal.batches)
    world.beat("ann", 0, topics=["orders"])
    assert len(world.journal.batches) == before + 1
    world.beat("ann", -1)
    assert len(world.journal.batches) == before + 2
    for count, expected in ((before, ClassicGroup), (before + 1, ConsumerGroup), (before + 2, ClassicGroup)):
        whole = list(world.journal.batches)
        world.reload(whole[:count])
        assert kind(world) is expected
        world.reload(whole)


def test_a_classic_static_member_with_other_topics_takes_the_last_consumer_s_seat_and_all_rebalance(
    world: GroupWorld,
) -> None:
    world.topics.create("payments", 1)
    classic = classic_group(world)
    world.beat("ann", 0, topics=["orders"], instance_id="seat")
    joined = join(world, "", "range", ConsumerSubscription(topics=("payments",)).encode(), "seat")
    assert joined.error is ErrorCode.none
    group = world.coordinator.groups["group"]
    assert isinstance(group, ClassicGroup)
    assert group.state == "PreparingRebalance"
    assert set(group.members) == {classic.member_id, joined.member_id}


def test_an_operator_removes_the_last_consumer(world: GroupWorld) -> None:
    classic_group(world)
    world.beat("ann", 0, topics=["orders"], instance_id="seat")
    reply = world.coordinator.leave(LeaveRequest("group", (LeavingMember("", "seat"),)), world.now)
    assert [error for _, error in reply.members] == [ErrorCode.none]
    assert kind(world) is ClassicGroup


def test_a_classic_group_too_large_for_the_other_protocol_stays_what_it_is(world: GroupWorld) -> None:
    classic_group(world)
    waits = join(world, "", "range", ConsumerSubscription(topics=("orders",)).encode(), "second")
    assert waits is PARKED
    world.configure(group_initial_rebalance_delay_ms="0", group_consumer_max_size="1")
    with pytest.raises(ApiError) as refused:
        world.beat("ann", 0, topics=["orders"])
    assert refused.value.code is ErrorCode.group_id_not_found


def test_assignments_have_the_layout_of_the_member_s_subscription(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["orders"])
    for version in range(4):
        world.beat("ann", -1)
        world.beat("ann", 0, topics=["orders"])
        metadata = ConsumerSubscription(topics=("orders",)).encode(version)
        joined = join(world, f"classic-{version}", "range", metadata, None)
        answer = sync(world, joined, b"")
        assert answer.error is ErrorCode.none
        assert decode_assignment(answer.assignment)[0] == version
        leaving = LeavingMember(joined.member_id, None)
        world.coordinator.leave(LeaveRequest("group", (leaving,)), world.now)


def test_metadata_that_is_no_subscription_is_refused_in_a_consumer_group(world: GroupWorld) -> None:
    world.beat("ann", 0, topics=["orders"])
    reply = join(world, "", "range", b"\x00", None)
    assert reply.error is ErrorCode.inconsistent_group_protocol
    assert set(world.consumer_group().members) == {"ann"}


def test_what_nobody_has_when_the_last_consumer_becomes_classic_is_shared_out_anew() -> None:
    world = unsettled()
    orders = world.topics.by_name("orders")
    assert orders is not None
    (kept,) = world.consumer_group().members["sam"].current.assigned[orders.topic_id]
    joined = join(world, "", "range", ConsumerSubscription(topics=("orders",)).encode(), "seat")
    assert joined.error is ErrorCode.none
    group = world.coordinator.groups["group"]
    assert isinstance(group, ClassicGroup)
    held = [decode_assignment(member.assignment)[1].assigned_partitions for member in group.members.values()]
    assert sorted(held) == [(), (OwnedPartitions("orders", (kept,)),)], "one of two partitions is nobody's"
    assert group.state == "PreparingRebalance"
    world.reload()
    (restored,) = world.coordinator.groups.values()
    assert isinstance(restored, ClassicGroup)
    assert restored.state == "PreparingRebalance", "after a crash its members join again as well"


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_a_crash_amid_the_rebalance_of_a_downgrade_leaves_no_partition_without_an_owner(rounds: int) -> None:
    world = settled()
    (member_id,) = (each for each in world.consumer_group().members if each != "sam")
    world.beat("sam", -1, instance_id="seat")
    for number in range(rounds):
        subscription = ConsumerSubscription(topics=("orders",), user_data=b"%d" % number).encode()
        joined = join(world, member_id, "range", subscription, None)
        assert joined.error is ErrorCode.none
    world.reload()
    assert sync(world, joined, b"all of it").error is ErrorCode.illegal_generation, "so it joins again"


def test_a_target_that_is_to_be_computed_yet_is_a_reason_to_rebalance() -> None:
    world = settled()
    world.topics.grow("orders", 3)
    joined = join(world, "", "range", ConsumerSubscription(topics=("orders",)).encode(), "seat")
    assert joined.error is ErrorCode.none
    assert world.coordinator.groups["group"].state == "PreparingRebalance"


def test_a_group_in_which_everybody_has_its_part_goes_on_when_the_last_consumer_becomes_classic() -> None:
    world = settled()
    joined = join(world, "", "range", ConsumerSubscription(topics=("orders",)).encode(), "seat")
    assert joined.error is ErrorCode.none
    assert kind(world) is ClassicGroup
    assert world.coordinator.groups["group"].state == "Stable"


def unsettled() -> GroupWorld:
    """A consumer that has both partitions, is to give one of them to a classic member, and goes away for a while."""
    world = GroupWorld({"group.consumer.assignment.interval.ms": "0"})
    orders = world.topics.create("orders", 2)
    first = world.beat("sam", 0, topics=["orders"], instance_id="seat")
    both = {orders: frozenset((0, 1))}
    assert first.assignment == both
    joined = join(world, "ann", "range", ConsumerSubscription(topics=("orders",)).encode(), None)
    assert sync(world, joined, b"").error is ErrorCode.none
    world.beat("sam", first.member_epoch, owned=both, instance_id="seat")
    assert world.consumer_group().members["sam"].current.revoking
    world.beat("sam", -2, instance_id="seat")
    return world


def settled() -> GroupWorld:
    """The same, after the classic member was given its partition."""
    world = GroupWorld({"group.consumer.assignment.interval.ms": "0"})
    orders = world.topics.create("orders", 2)
    metadata = ConsumerSubscription(topics=("orders",)).encode()
    world.beat("sam", 0, topics=["orders"], instance_id="seat")
    join(world, "ann", "range", metadata, None)
    sam = world.consumer_group().members["sam"]
    for _ in range(2):
        kept = {topic: frozenset(partitions) for topic, partitions in sam.current.assigned.items()}
        world.beat("sam", sam.current.epoch, owned=kept, instance_id="seat")
    joined = join(world, "ann", "range", metadata, None)
    assert sync(world, joined, b"").error is ErrorCode.none
    assert world.consumer_group().state == "Stable"
    assert world.consumer_group().members["ann"].current.assigned[orders]
    world.beat("sam", -2, instance_id="seat")
    return world
