"""A classic group as the one record it is kept in, and back."""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.broker.groups.classic_members import ClassicMember
from holdfast.broker.groups.model import MemberProtocol
from holdfast.broker.groups.names import not_recorded
from holdfast.wire.coordinator_records import GroupMetadataKey, GroupMetadataValue, MemberMetadata

if TYPE_CHECKING:
    from holdfast.broker.groups.classic import ClassicGroup


def group_record(
    group: ClassicGroup, state_since_ms: int, *, is_unsettled: bool = False
) -> tuple[bytes, bytes]:
    """The whole group as it is; without a leader if its members have to share their work out anew."""
    value = GroupMetadataValue(
        protocol_type=group.protocol_type or "",
        generation=group.generation,
        protocol=group.protocol_name,
        leader=None if is_unsettled else group.leader,
        current_state_timestamp=state_since_ms,
        members=tuple(
            MemberMetadata(
                member_id=member.member_id,
                group_instance_id=member.group_instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                rebalance_timeout=member.rebalance_timeout_ms,
                session_timeout=member.session_timeout_ms,
                subscription=member.metadata(group.protocol_name),
                assignment=member.assignment,
            )
            for member in group.members.values()
        ),
    )
    try:
        return GroupMetadataKey(group.group_id).encode(), value.encode()
    except ValueError as error:
        raise not_recorded(error) from error


def new_group_record(group_id: str, state_since_ms: int) -> tuple[bytes, bytes]:
    """A group that somebody is about to join."""
    value = GroupMetadataValue(
        protocol_type="", generation=0, protocol="", leader=None, current_state_timestamp=state_since_ms
    )
    return GroupMetadataKey(group_id).encode(), value.encode()


def group_tombstone(group_id: str) -> tuple[bytes, None]:
    return GroupMetadataKey(group_id).encode(), None


def restore_group(group: ClassicGroup, value: GroupMetadataValue) -> None:
    """Give a fresh group the state of its record."""
    group.is_unsettled = bool(value.members) and value.leader is None
    protocol = value.protocol or None
    group.restore(
        generation=value.generation,
        protocol_type=value.protocol_type or None,
        protocol_name=protocol,
        leader=value.leader,
        state_since_ms=None if value.current_state_timestamp < 0 else value.current_state_timestamp,
        members=[
            ClassicMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.session_timeout,
                # Before version 1 the session time-out stood for both.
                member.session_timeout if member.rebalance_timeout < 0 else member.rebalance_timeout,
                (MemberProtocol(protocol or "", member.subscription),),
                member.assignment,
            )
            for member in value.members
        ],
    )
