"""The bare-socket member's own encoding, checked against the broker's codec of Kafka's schemas."""

from __future__ import annotations

import struct
import uuid
from typing import Any

import pytest
from bench.group_protocol import (
    Beat,
    Joined,
    assigned_partitions,
    assignment,
    consumer_heartbeat_frame,
    find_coordinator_frame,
    heartbeat_error,
    heartbeat_frame,
    join_frame,
    read_beat,
    read_join,
    subscription,
    sync_frame,
)

from bench import group_protocol
from holdfast.wire.consumer_protocol import decode_assignment, decode_subscription
from holdfast.wire.messages import (
    decode_request,
    encode_response,
    parse_request_header,
    response_header_version,
)

TOPIC_ID = uuid.UUID(int=7)


def asked(frame: bytes) -> Any:
    """The request in a frame, which must hold nothing else."""
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    header = parse_request_header(frame[4:])
    assert header.client_id == "holdfast-bench"
    return decode_request(header.api_key, header.version, frame[4:], header.body_offset)


def answered(api_key: int, version: int, **fields: Any) -> bytes:
    """An answer as it comes off the wire, without its length."""
    tags = b"\0" if response_header_version(api_key, version) == 1 else b""
    return struct.pack(">i", 1) + tags + encode_response(api_key, version, fields)


def test_a_group_is_asked_for() -> None:
    request = asked(find_coordinator_frame("group"))
    assert (request.key, request.key_type) == ("group", 0)


@pytest.mark.parametrize("version", [3, 5])
def test_joining_says_what_is_read(version: int) -> None:
    request = asked(join_frame("group", "member", 10_000, subscription("topic"), version))
    assert (request.group_id, request.member_id, request.protocol_type) == ("group", "member", "consumer")
    assert request.session_timeout.total_seconds() == 10
    (protocol,) = request.protocols
    assert protocol.name == "range"
    assert decode_subscription(protocol.metadata)[1].topics == ("topic",)


@pytest.mark.parametrize("version", [3, 5])
def test_the_answer_to_joining_is_read(version: int) -> None:
    members = [{"member_id": each, "metadata": b"data"} for each in ("a", "b")]
    answer = answered(
        group_protocol.JOIN_GROUP,
        version,
        error_code=0,
        generation_id=4,
        protocol_name="range",
        leader="a",
        member_id="b",
        members=members,
    )
    assert read_join(answer, version) == Joined(0, 4, "a", "b", ["a", "b"])


def test_the_leader_shares_out() -> None:
    request = asked(sync_frame("group", 3, "a", {"b": assignment("topic", [0, 2])}))
    assert (request.generation_id, request.member_id, request.group_instance_id) == (3, "a", None)
    (given,) = request.assignments
    assert given.member_id == "b"
    (owned,) = decode_assignment(given.assignment)[1].assigned_partitions
    assert (owned.topic, owned.partitions) == ("topic", (0, 2))
    assert assigned_partitions(given.assignment) == [0, 2]
    assert assigned_partitions(b"") == []


def test_a_heartbeat_and_its_error() -> None:
    request = asked(heartbeat_frame("group", 3, "a"))
    assert (request.group_id, request.generation_id, request.member_id) == ("group", 3, "a")
    assert heartbeat_error(answered(group_protocol.HEARTBEAT, 3, error_code=27)) == 27
    assert heartbeat_error(answered(group_protocol.SYNC_GROUP, 3, error_code=25, assignment=b"")) == 25


def test_a_consumer_joins_and_then_says_only_what_changed() -> None:
    joining = asked(consumer_heartbeat_frame("group", "m", 0, "topic", []))
    assert (joining.member_epoch, joining.subscribed_topic_names, joining.topic_partitions) == (
        0,
        ("topic",),
        (),
    )
    owning = asked(consumer_heartbeat_frame("group", "m", 2, None, [(TOPIC_ID.bytes, [0, 1])]))
    (owned,) = owning.topic_partitions
    assert (owned.topic_id, owned.partitions) == (TOPIC_ID, (0, 1))
    beating = asked(consumer_heartbeat_frame("group", "m", 2, None, None))
    assert (beating.member_epoch, beating.subscribed_topic_names, beating.topic_partitions) == (2, None, None)


def test_what_a_consumer_is_given_is_read() -> None:
    key = group_protocol.CONSUMER_GROUP_HEARTBEAT
    given = {"topic_partitions": [{"topic_id": TOPIC_ID, "partitions": [0, 1]}]}
    answer = answered(key, 1, error_code=0, member_id="m", member_epoch=2, assignment=given)
    assert read_beat(answer) == Beat(0, "", 2, [(TOPIC_ID.bytes, [0, 1])])
    answer = answered(key, 1, error_code=0, member_id="m", member_epoch=2, assignment=None)
    assert read_beat(answer) == Beat(0, "", 2, None)
    answer = answered(key, 1, error_code=110, error_message="old", member_epoch=0)
    assert read_beat(answer)[:2] == (110, "old")
