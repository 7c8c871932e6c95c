"""Requests about consumer groups: who coordinates them, which there are, who is in them; and forgetting them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.consumer_member import ConsumerMemberDescription, NamedPartitions
from holdfast.broker.groups.model import ClassicDescription, GroupType, append_error
from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordination import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.handlers.administration import brokers_on, group_operations
from holdfast.broker.node.handlers.group_members import PROTOCOL
from holdfast.broker.node.services import ClusterServices, GroupServices
from holdfast.errors import ApiError
from holdfast.seams import Now

if TYPE_CHECKING:
    from holdfast.broker.node.coordination import Coordination


BATCHED_FROM: Final = 4
GROUP_KEY: Final = 0
TRANSACTION_KEY: Final = 1


class FindServices(ClusterServices, GroupServices, Protocol):
    pass


def find_coordinator(node: FindServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """FindCoordinator (10), versions 0 to 6: who coordinates a group (key type 0) or a transactional id (1).

    On one node it is always this one; asking makes the internal topic when it is not there yet. Share groups (2)
    are not served.
    """
    key_type = getattr(request, "key_type", GROUP_KEY)
    if context.version >= BATCHED_FROM:
        return {
            "coordinators": [
                {"key": key, **_find(node, context, key_type, key, now)} for key in request.coordinator_keys
            ],
        }
    return _find(node, context, key_type, request.key, now)


def _find(node: FindServices, context: RequestContext, key_type: int, key: str, now: Now) -> Fields:
    try:
        _coordination(node, key_type).find(key, now)
        for broker_id, address in brokers_on(node, context.session.listener):
            if broker_id == node.identity.node_id:
                return {
                    "error_code": ErrorCode.none,
                    "error_message": "" if context.version >= BATCHED_FROM else "NONE",
                    "node_id": broker_id,
                    "host": address["host"],
                    "port": address["port"],
                }
        raise ApiError(ErrorCode.coordinator_not_available)
    except ApiError as error:
        return {
            "error_code": error.code,
            "error_message": error.message,
            "node_id": -1,
            "host": "",
            "port": -1,
        }


def _coordination(node: FindServices, key_type: int) -> Coordination[Any]:
    if key_type == GROUP_KEY:
        return node.groups
    if key_type == TRANSACTION_KEY:
        return node.transactions
    raise ApiError(ErrorCode.invalid_request, f"no coordinators of type {key_type} here")


def list_groups(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """ListGroups (16), versions 0 to 5: every group, or those in some states (from version 4) and of some types
    (5)."""
    states = {state.strip().lower() for state in getattr(request, "states_filter", ())}
    wanted = {name.strip().lower() for name in getattr(request, "types_filter", ())}
    types = {kind for kind in GroupType if kind.value.lower() in wanted}
    coordinators = list(node.groups)
    groups: list[Fields] = []
    if types or not wanted:
        groups = [
            {
                "group_id": group.group_id,
                "protocol_type": group.protocol_type,
                "group_state": group.state,
                "group_type": group.type.value,
            }
            for _, machine in coordinators
            for group in machine.list(states, types)
        ]
    answer: Fields = {"error_code": ErrorCode.none, "groups": groups}
    return answer_all([journal for journal, _ in coordinators], answer, _not_listed)


def _not_listed(code: ErrorCode) -> Fields:
    return {"error_code": code, "groups": []}


NOT_FOUND_FROM: Final = 6


def describe_groups(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """DescribeGroups (15), versions 0 to 6: classic groups and their members.

    A group that is not there is Dead; from version 6 on it is GROUP_ID_NOT_FOUND, with a message, as well.
    """
    operations = group_operations(getattr(request, "include_authorized_operations", False))
    journals: list[CoordinatorPartition] = []
    groups = [
        _classic_group(node, context, group_id, operations, journals, now) for group_id in request.groups
    ]

    def refusal(code: ErrorCode) -> Fields:
        return {
            "groups": [_classic_failed(group_id, ApiError(code)) for group_id in request.groups],
        }

    return answer_all(journals, {"groups": groups}, refusal)


def _classic_group(
    node: GroupServices,
    context: RequestContext,
    group_id: str,
    operations: int,
    journals: list[CoordinatorPartition],
    now: Now,
) -> Fields:
    try:
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        described = machine.describe(group_id)
    except ApiError as error:
        if error.code is not ErrorCode.group_id_not_found:
            return _classic_failed(group_id, error)
        if context.version >= NOT_FOUND_FROM:
            return {**_classic_failed(group_id, error), "group_state": "Dead"}
        described = ClassicDescription(group_id, "Dead", "", "", ())
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": described.state,
        "protocol_type": described.protocol_type,
        "protocol_data": described.protocol,
        "members": [
            {
                "member_id": member.member_id,
                "group_instance_id": member.group_instance_id,
                "client_id": member.client_id,
                "client_host": member.client_host,
                "member_metadata": member.metadata,
                "member_assignment": member.assignment,
            }
            for member in described.members
        ],
        "authorized_operations": operations,
    }


def _classic_failed(group_id: str, error: ApiError) -> Fields:
    return {
        "error_code": error.code,
        "error_message": error.message,
        "group_id": group_id,
        "authorized_operations": group_operations(False),
    }


CLASSIC_MEMBER, CONSUMER_MEMBER = 0, 1
NOT_ASKED: Final = group_operations(False)


def consumer_group_describe(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """ConsumerGroupDescribe (69), versions 0 and 1: groups of the consumer protocol, their members, what each has and
    shall have. Version 1 tells members of the classic protocol from those of the consumer protocol.
    """

    def refusal(code: ErrorCode) -> Fields:
        failed = [_consumer_failed(group_id, ApiError(code)) for group_id in request.group_ids]
        return {"groups": failed}

    if PROTOCOL not in node.settings.broker.group_coordinator_rebalance_protocols:
        return refusal(ErrorCode.unsupported_version)
    operations = group_operations(request.include_authorized_operations)
    journals: list[CoordinatorPartition] = []
    groups = [_consumer_group(node, group_id, operations, journals, now) for group_id in request.group_ids]
    return answer_all(journals, {"groups": groups}, refusal)


def _consumer_group(
    node: GroupServices, group_id: str, operations: int, journals: list[CoordinatorPartition], now: Now
) -> Fields:
    try:
        if not group_id:
            raise ApiError(ErrorCode.invalid_group_id)
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        group = machine.consumer_groups.describe(group_id)
    except ApiError as error:
        return _consumer_failed(group_id, error)
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "group_id": group_id,
        "group_state": group.state,
        "group_epoch": group.epoch,
        "assignment_epoch": group.assignment_epoch,
        "assignor_name": group.assignor,
        "members": [_member(member) for member in group.members],
        "authorized_operations": operations,
    }


def _member(member: ConsumerMemberDescription) -> Fields:
    return {
        "member_id": member.member_id,
        "instance_id": member.instance_id,
        "rack_id": member.rack_id,
        "member_epoch": member.member_epoch,
        "client_id": member.client_id,
        "client_host": member.client_host,
        "subscribed_topic_names": list(member.topic_names),
        "subscribed_topic_regex": member.topic_regex or "",
        "assignment": _assignment(member.assignment),
        "target_assignment": _assignment(member.target),
        "member_type": CLASSIC_MEMBER if member.is_classic else CONSUMER_MEMBER,
    }


def _assignment(partitions: tuple[NamedPartitions, ...]) -> Fields:
    return {
        "topic_partitions": [
            {"topic_id": each.topic_id, "topic_name": each.topic_name, "partitions": list(each.partitions)}
            for each in partitions
        ]
    }


def _consumer_failed(group_id: str, error: ApiError) -> Fields:
    return {
        "error_code": error.code,
        "error_message": error.message,
        "group_id": group_id,
        "group_state": "",
        "group_epoch": 0,
        "assignment_epoch": 0,
        "assignor_name": "",
        "members": [],
        "authorized_operations": NOT_ASKED,
    }


def delete_groups(node: GroupServices, context: RequestContext, request: Any, now: Now) -> Answer:
    """DeleteGroups (42), versions 0 to 2: forget groups without members, with their committed offsets."""
    journals: list[CoordinatorPartition] = []
    outcomes = {
        group_id: _delete(node, group_id, journals, now) for group_id in dict.fromkeys(request.groups_names)
    }

    def refusal(code: ErrorCode) -> Fields:
        return _deleted(dict.fromkeys(outcomes, code))

    return answer_all(journals, _deleted(outcomes), refusal)


def _delete(node: GroupServices, group_id: str, journals: list[CoordinatorPartition], now: Now) -> ErrorCode:
    try:
        journal, machine = node.groups.find(group_id, now)
        journals.append(journal)
        machine.delete(group_id, now)
    except ApiError as error:
        return append_error(error)
    return ErrorCode.none


def _deleted(outcomes: dict[str, ErrorCode]) -> Fields:
    return {
        "results": [{"group_id": group_id, "error_code": code} for group_id, code in outcomes.items()],
    }
