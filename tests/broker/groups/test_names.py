"""Names that have no room in a record are refused before anybody depends on them."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import GroupWorld

from holdfast.broker.groups import model
from holdfast.broker.groups.classic import ClassicGroup
from holdfast.broker.groups.model import (
    JoinReply,
    JoinRequest,
    MemberProtocol,
    SyncReply,
    SyncRequest,
)
from holdfast.errors import ApiError
from holdfast.wire.consumer_protocol import ConsumerSubscription

ROOM = 32_767
METADATA = ConsumerSubscription(topics=("orders",)).encode()
LONGEST: dict[str, dict[str, Any]] = {
    "instance": {"group_instance_id": "i" * (ROOM - 37)},
    "instance in three bytes each": {"group_instance_id": "€" * ((ROOM - 37) // 3)},
    "client": {"client_id": "c" * (ROOM - 37)},
    "protocol": {"protocols": (MemberProtocol("p" * ROOM, METADATA),)},
    "protocol type": {"protocol_type": "t" * ROOM},
}
TOO_LONG: dict[str, dict[str, Any]] = {
    "instance": {"group_instance_id": "i" * (ROOM - 36)},
    "instance in three bytes each": {"group_instance_id": "€" * ((ROOM - 37) // 3 + 1)},
    "client": {"client_id": "c" * (ROOM - 36)},
    "protocol": {"protocols": (MemberProtocol("p" * (ROOM + 1), METADATA),)},
    "second protocol": {
        "protocols": (MemberProtocol("range", METADATA), MemberProtocol("p" * (ROOM + 1), METADATA))
    },
    "protocol type": {"protocol_type": "t" * (ROOM + 1)},
    "member": {"member_id": "m" * (ROOM + 1)},
}


@pytest.fixture
def world() -> GroupWorld:
    world = GroupWorld(
        {"group.initial.rebalance.delay.ms": "0", "group.consumer.assignment.interval.ms": "0"}
    )
    world.topics.create("orders", 4)
    return world


def join(world: GroupWorld, fields: dict[str, Any]) -> JoinReply:
    request = JoinRequest(
        group_id="group",
        member_id="",
        group_instance_id=None,
        client_id="client",
        client_host="/10.0.0.9",
        session_timeout_ms=10_000,
        rebalance_timeout_ms=60_000,
        protocol_type="consumer",
        protocols=(MemberProtocol("range", METADATA),),
        requires_known_member_id=False,
        supports_skipping_assignment=True,
    )
    replies: list[JoinReply] = []
    world.coordinator.join(request._replace(**fields), replies.append, world.now)
    (reply,) = replies
    return reply


def sync(world: GroupWorld, joined: JoinReply) -> SyncReply:
    replies: list[SyncReply] = []
    request = SyncRequest("group", joined.generation, joined.member_id, None, None, None, ())
    world.coordinator.sync(request, replies.append, world.now)
    (reply,) = replies
    return reply


@pytest.mark.parametrize("what", LONGEST)
def test_the_longest_name_with_room_in_a_record_is_good(world: GroupWorld, what: str) -> None:
    joined = join(world, LONGEST[what])
    assert joined.error is ErrorCode.none
    assert sync(world, joined).error is ErrorCode.none
    world.reload()
    assert world.coordinator.groups["group"].state == "Stable"


@pytest.mark.parametrize("what", TOO_LONG)
def test_a_longer_name_is_refused_before_the_group_depends_on_it(world: GroupWorld, what: str) -> None:
    assert join(world, TOO_LONG[what]).error is ErrorCode.invalid_request
    assert "group" not in world.coordinator.groups
    world.beat("ann", 0, topics=["orders"])
    assert join(world, TOO_LONG[what]).error is ErrorCode.invalid_request
    assert set(world.consumer_group().members) == {"ann"}


@pytest.mark.parametrize(
    "fields",
    [
        {"member_id": "m" * (ROOM + 1)},
        {"group": "g" * (ROOM + 1)},
        {"instance_id": "i" * (ROOM - 36)},
        {"regex": "r" * (ROOM + 1)},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_a_heartbeat_with_a_name_that_no_record_has_room_for_is_refused(
    world: GroupWorld, fields: dict[str, Any]
) -> None:
    named: dict[str, Any] = {"member_id": "ann", "topics": ["orders"]} | fields
    with pytest.raises(ApiError) as refused:
        world.beat(named.pop("member_id"), 0, **named)
    assert refused.value.code is ErrorCode.invalid_request
    assert not world.coordinator.groups


def test_a_classic_member_that_cannot_be_recorded_after_all_holds_nobody_up(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "refuse_long_names", lambda request: None)
    joined = join(world, TOO_LONG["protocol"])
    assert sync(world, joined).error is ErrorCode.invalid_request
    group = world.coordinator.groups["group"]
    assert isinstance(group, ClassicGroup)
    assert group.state == "PreparingRebalance", "and not waiting for an assignment for ever"


def test_a_consumer_that_cannot_be_recorded_after_all_is_refused(
    world: GroupWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model, "refuse_long_names", lambda request: None)
    world.beat("ann", 0, topics=["orders"])
    assert join(world, TOO_LONG["member"]).error is ErrorCode.invalid_request
    assert set(world.consumer_group().members) == {"ann"}
