"""How long the names may be that end up in records.

Requests of newer versions have room for names of any length. A key, and the one record of a classic group, have two
bytes for the length of each. What has no room there is refused before a group depends on it: a group that cannot be
recorded can never be stable.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.broker.groups.model import JoinRequest
from holdfast.errors import ApiError

NAME_BYTES_MAX: Final = 0x7FFF
MEMBER_ID_BYTES_ADDED: Final = 37
"""A dash and a UUID make a member's id of the name of its client or instance."""


def has_room(name: str | None, *, added: int = 0) -> bool:
    room = NAME_BYTES_MAX - added
    return name is None or len(name) <= room // 4 or len(name.encode()) <= room


def refuse_id_too_long(group_id: str) -> None:
    if not has_room(group_id):
        raise ApiError(ErrorCode.invalid_group_id, f"a group id of {len(group_id)} characters")


def refuse_long_names(request: JoinRequest) -> None:
    named = request.client_id if request.group_instance_id is None else request.group_instance_id
    others = (request.member_id, request.protocol_type, *(protocol.name for protocol in request.protocols))
    if not has_room(named, added=MEMBER_ID_BYTES_ADDED) or not all(map(has_room, others)):
        raise ApiError(ErrorCode.invalid_request, "a name that no record has room for")


def not_recorded(error: ValueError) -> ApiError:
    """What could not be written as a record, as the answer to whoever said it."""
    return ApiError(ErrorCode.invalid_request, f"no record has room for this: {error}")
