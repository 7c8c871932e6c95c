"""A classic group as others see it: the members that join it, and operators."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.classic_members import ClassicMember
from holdfast.broker.groups.model import ClassicDescription, DescribedMember, JoinedMember, JoinReply

if TYPE_CHECKING:
    from holdfast.broker.groups.classic import ClassicGroup


def joined(group: ClassicGroup, member: ClassicMember) -> JoinReply:
    """What a member is told of the generation it is in; the leader is told who the others are."""
    others: tuple[JoinedMember, ...] = ()
    if group.leader == member.member_id:
        others = tuple(
            JoinedMember(other.member_id, other.group_instance_id, other.metadata(group.protocol_name))
            for other in group.members.values()
        )
    return JoinReply(
        ErrorCode.none,
        member.member_id,
        group.generation,
        group.protocol_type,
        group.protocol_name,
        group.leader or "",
        False,
        others,
    )


def described(group: ClassicGroup) -> ClassicDescription:
    """What members said is shown while it holds; what they were given, until they are given something else."""
    stable = group.is_stable
    return ClassicDescription(
        group.group_id,
        group.state,
        group.protocol_type or "",
        (group.protocol_name or "") if stable else "",
        tuple(
            DescribedMember(
                member.member_id,
                member.group_instance_id,
                member.client_id,
                member.client_host,
                member.metadata(group.protocol_name) if stable else b"",
                member.assignment,
            )
            for member in group.members.values()
        ),
    )
