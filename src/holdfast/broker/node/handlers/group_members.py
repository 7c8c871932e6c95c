"""Requests of the members of consumer groups, classic and of the consumer protocol."""

from __future__ import annotations

import struct
from datetime import timedelta
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups import model
from holdfast.broker.groups.consumer_member import ConsumerHeartbeat, ConsumerReply
from holdfast.broker.node.context import Answer, Fields, Later, Packed, RequestContext
from holdfast.broker.node.services import GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.varint import encode_uvarint

_MS: Final = timedelta(milliseconds=1)
MEMBER_ID_FIRST_FROM: Final = 4
NULLABLE_PROTOCOL_FROM: Final = 7
SKIP_ASSIGNMENT_FROM: Final = 9


def join_group(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """JoinGroup (11), versions 0 to 9: take part in the next generation of a classic group.

    Parked until everybody the group waits for has joined, too. From version 4 on a dynamic member is first given an
    id (MEMBER_ID_REQUIRED) and joins with it; from 5 on it may be static; from 9 on a leader may be told to assign
    nothing.
    """
    version = context.version

    def refusal(code: ErrorCode) -> Fields:
        return _join_fields(model.JoinReply(code, request.member_id), version)

    if not request.group_id:
        return refusal(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return refusal(error.code)
    session_timeout_ms = request.session_timeout // _MS
    rebalance_timeout = getattr(request, "rebalance_timeout", None)
    later = Later()
    machine.join(
        model.JoinRequest(
            request.group_id,
            request.member_id,
            getattr(request, "group_instance_id", None),
            context.session.client_id or "",
            _client_host(context),
            session_timeout_ms,
            session_timeout_ms if rebalance_timeout is None else rebalance_timeout // _MS,
            request.protocol_type,
            tuple(
                model.MemberProtocol(protocol.name, bytes(protocol.metadata))
                for protocol in request.protocols
            ),
            version >= MEMBER_ID_FIRST_FROM,
            version >= SKIP_ASSIGNMENT_FROM,
            getattr(request, "reason", None),
        ),
        later.step(lambda reply: journal.release(later, _join_fields(reply, version), refusal)),
        now,
    )
    return later


def _join_fields(reply: model.JoinReply, version: int) -> Fields:
    return {
        "error_code": reply.error,
        "generation_id": reply.generation,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name
        if version >= NULLABLE_PROTOCOL_FROM
        else reply.protocol_name or "",
        "leader": reply.leader,
        "skip_assignment": reply.skip_assignment,
        "member_id": reply.member_id,
        "members": [
            {"member_id": member_id, "group_instance_id": group_instance_id, "metadata": metadata}
            for member_id, group_instance_id, metadata in reply.members
        ],
    }


PROTOCOL_NAMED_FROM: Final = 5


def sync_group(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """SyncGroup (14), versions 0 to 5: a member asks for its part of the work; the leader brings everybody's.

    Parked until the leader's has come and is recorded. From version 5 on a member names the protocol it has agreed
    to.
    """
    if context.version >= PROTOCOL_NAMED_FROM and not (request.protocol_type and request.protocol_name):
        return _sync_refusal(ErrorCode.inconsistent_group_protocol)
    if not request.group_id:
        return _sync_refusal(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return _sync_refusal(error.code)
    later = Later()
    machine.sync(
        model.SyncRequest(
            request.group_id,
            request.generation_id,
            request.member_id,
            getattr(request, "group_instance_id", None),
            getattr(request, "protocol_type", None),
            getattr(request, "protocol_name", None),
            tuple((given.member_id, bytes(given.assignment)) for given in request.assignments),
        ),
        later.step(lambda reply: journal.release(later, _sync_fields(reply), _sync_refusal)),
        now,
    )
    return later


def _sync_refusal(code: ErrorCode) -> Fields:
    return _sync_fields(model.SyncReply(code))


def _sync_fields(reply: model.SyncReply) -> Fields:
    return {
        "error_code": reply.error,
        "protocol_type": reply.protocol_type,
        "protocol_name": reply.protocol_name,
        "assignment": reply.assignment,
    }


def heartbeat(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """Heartbeat (12), versions 0 to 4: a member of a classic group is alive, and learns whether to join again.

    The request a broker with many members gets most often: the answers are the same dictionaries over and over.
    """
    group_id = request.group_id
    if not group_id:
        return _error_fields(ErrorCode.invalid_group_id)
    try:
        journal, machine = node.groups.find(group_id, now)
    except ApiError as error:
        return _error_fields(error.code)
    instance_id = request.group_instance_id if context.version >= 3 else None
    outcome = machine.heartbeat(
        model.HeartbeatRequest(group_id, request.generation_id, request.member_id, instance_id), now
    )
    return journal.answer(_error_fields(outcome), _error_fields)


def _error_fields(code: ErrorCode) -> Fields:
    return {"error_code": code}


SEVERAL_FROM: Final = 3


def leave_group(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """LeaveGroup (13), versions 0 to 5: members go; from version 3 on several at once, static ones by their
    instance."""
    if not request.group_id:
        return _error_fields(ErrorCode.invalid_group_id)
    if context.version >= SEVERAL_FROM:
        members = tuple(
            model.LeavingMember(member.member_id, member.group_instance_id, getattr(member, "reason", None))
            for member in request.members
        )
    else:
        members = (model.LeavingMember(request.member_id, None),)
    try:
        journal, machine = node.groups.find(request.group_id, now)
    except ApiError as error:
        return _error_fields(error.code)
    try:
        fields = _leave_fields(
            machine.leave(model.LeaveRequest(request.group_id, members), now), context.version
        )
    except ApiError as error:
        fields = _error_fields(model.append_error(error))
    return journal.answer(fields, _error_fields)


def _leave_fields(reply: model.LeaveReply, version: int) -> Fields:
    error = reply.error
    if version < SEVERAL_FROM and reply.members:
        ((_, error),) = reply.members
    return {
        "error_code": error,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "error_code": outcome,
            }
            for member, outcome in reply.members
        ],
    }


REGEX_FROM: Final = 1
PROTOCOL: Final = "consumer"
_NO_ERROR: Final = bytes(7)
"""Not throttled (4 bytes), no error (2), no message (null)."""
_EPOCH_AND_INTERVAL: Final = struct.Struct(">ii").pack
_NO_ASSIGNMENT: Final = b"\xff\x00"
"""Null, and no tagged fields."""


def consumer_group_heartbeat(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """ConsumerGroupHeartbeat (68), versions 0 and 1: join, stay in, be assigned by and leave a group of the consumer
    protocol (KIP-848).

    Version 0 lets the coordinator choose the member's id and knows no regular expressions. Most of these requests say
    nothing new and get an answer that says nothing new either.
    """
    if PROTOCOL not in node.settings.broker.group_coordinator_rebalance_protocols:
        return _consumer_refusal(ErrorCode.unsupported_version)
    group_id = request.group_id
    if not group_id.strip():
        return _consumer_refusal(ErrorCode.invalid_request, "the group id is empty")
    try:
        journal, machine = node.groups.find(group_id, now)
    except ApiError as error:
        return _consumer_refusal(error.code, error.message)
    try:
        reply = machine.consumer_groups.heartbeat(_heartbeat(context, request), now)
    except ApiError as error:
        # A refusal tells of the group's state as any other answer does, and waits for it to be durable.
        return journal.answer(_consumer_refusal(model.append_error(error), error.message), _consumer_refusal)
    if reply.assignment is None and journal.is_durable:
        return Packed([pack_nothing_new(reply)])
    return journal.answer(_consumer_fields(reply), _consumer_refusal)


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
        request.rebalance_timeout // _MS,
        names,
        request.subscribed_topic_regex if context.version >= REGEX_FROM else None,
        request.server_assignor,
        None if owned is None else [(each.topic_id, each.partitions) for each in owned],
        context.session.client_id or "",
        _client_host(context),
        context.version,
    )


def _consumer_fields(reply: ConsumerReply) -> Fields:
    assignment = reply.assignment
    return {
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


def _consumer_refusal(code: ErrorCode, message: str | None = None) -> Fields:
    return {
        "error_code": code,
        "error_message": message,
        "member_id": None,
        "member_epoch": 0,
        "heartbeat_interval": 0,
        "assignment": None,
    }


def _client_host(context: RequestContext) -> str:
    """As Kafka writes an address without a name."""
    host, _, _ = context.session.address.rpartition(":")
    return "/" + host.strip("[]")
