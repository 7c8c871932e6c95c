"""ConsumerGroupHeartbeat (68), versions 0 and 1: join, stay in, be assigned by and leave a group of the consumer
protocol (KIP-848).

Version 0 lets the coordinator choose the member's id and knows no regular expressions. Most of these requests say
nothing new and get an answer that says nothing new either.
"""

from __future__ import annotations

import struct
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.consumer_model import ConsumerHeartbeat, ConsumerReply
from holdfast.broker.groups.model import append_error
from holdfast.broker.node.context import Answer, Fields, Packed, RequestContext
from holdfast.broker.node.handlers.groups import client_host, milliseconds
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.varint import encode_uvarint

REGEX_FROM: Final = 1
PROTOCOL: Final = "consumer"
_NO_ERROR: Final = bytes(7)
"""Not throttled (4 bytes), no error (2), no message (null)."""
_EPOCH_AND_INTERVAL: Final = struct.Struct(">ii").pack
_NO_ASSIGNMENT: Final = b"\xff\x00"
"""Null, and no tagged fields."""


def handle(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    if PROTOCOL not in node.settings.broker.group_coordinator_rebalance_protocols:
        return _refusal(ErrorCode.unsupported_version)
    group_id = request.group_id
    if not group_id.strip():
        return _refusal(ErrorCode.invalid_request, "the group id is empty")
    try:
        journal, machine = node.groups.find(group_id, now)
    except ApiError as error:
        return _refusal(error.code, error.message)
    try:
        reply = machine.consumer_groups.heartbeat(_heartbeat(context, request), now)
    except ApiError as error:
        # A refusal tells of the group's state as any other answer does, and waits for it to be durable.
        return journal.answer(_refusal(append_error(error), error.message), _refusal)
    if reply.assignment is None and journal.is_durable:
        return Packed([pack_nothing_new(reply)])
    return journal.answer(_fields(reply), _refusal)


def pack_nothing_new(reply: ConsumerReply) -> bytes:
    """The answer to nearly every heartbeat, by hand: it takes a tenth of the general encoder's time."""
    member_id = reply.member_id.encode()
    return b"".join(
        (
            _NO_ERROR,
            encode_uvarint(len(member_id) + 1),
            member_id,
            _EPOCH_AND_INTERVAL(reply.member_epoch, reply.heartbeat_interval_ms),
            _NO_ASSIGNMENT,
        )
    )


def _heartbeat(context: RequestContext, request: Any) -> ConsumerHeartbeat:
    names, owned = request.subscribed_topic_names, request.topic_partitions
    return ConsumerHeartbeat(
        request.group_id,
        request.member_id,
        request.member_epoch,
        request.instance_id,
        request.rack_id,
        milliseconds(request.rebalance_timeout),
        names,
        request.subscribed_topic_regex if context.version >= REGEX_FROM else None,
        request.server_assignor,
        None if owned is None else [(each.topic_id, each.partitions) for each in owned],
        context.session.client_id or "",
        client_host(context),
        context.version,
    )


def _fields(reply: ConsumerReply) -> Fields:
    assignment = reply.assignment
    return {
        "throttle_time": 0,
        "error_code": ErrorCode.none,
        "error_message": None,
        "member_id": reply.member_id,
        "member_epoch": reply.member_epoch,
        "heartbeat_interval": reply.heartbeat_interval_ms,
        "assignment": None
        if assignment is None
        else {
            "topic_partitions": [
                {"topic_id": topic_id, "partitions": sorted(partitions)}
                for topic_id, partitions in assignment.items()
            ]
        },
    }


def _refusal(code: ErrorCode, message: str | None = None) -> Fields:
    return {
        "throttle_time": 0,
        "error_code": code,
        "error_message": message,
        "member_id": None,
        "member_epoch": 0,
        "heartbeat_interval": 0,
        "assignment": None,
    }
