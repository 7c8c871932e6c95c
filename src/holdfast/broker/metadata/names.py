"""Names of topics: which are legal, and which could not be told apart.

A name becomes a directory and part of metric names, which is where every rule here comes from.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError

TOPIC_NAME_LENGTH_MAX: Final = 249
"""With "-" and a partition number it still fits a file name of 255 bytes."""
METADATA_TOPIC: Final = "__cluster_metadata"
INTERNAL_TOPICS: Final = frozenset({"__consumer_offsets", "__transaction_state", "__share_group_state"})
COMPACTED: Final = {"cleanup.policy": "compact"}
REQUIRED_SETTINGS: Final = {"__consumer_offsets": COMPACTED, "__transaction_state": COMPACTED}
"""In force whatever is stored: retention would delete committed offsets, and what fences producers, by their age."""

_LEGAL_CHARACTERS: Final = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._-")


def check_topic_name(name: str) -> None:
    if not name:
        raise ApiError(ErrorCode.invalid_topic_exception, "a topic name must not be empty")
    if name in (".", ".."):
        raise ApiError(ErrorCode.invalid_topic_exception, f"{name!r} cannot be a topic name")
    if len(name) > TOPIC_NAME_LENGTH_MAX:
        raise ApiError(
            ErrorCode.invalid_topic_exception,
            f"topic name of {len(name)} characters: at most {TOPIC_NAME_LENGTH_MAX} are allowed",
        )
    if not _LEGAL_CHARACTERS.issuperset(name):
        raise ApiError(
            ErrorCode.invalid_topic_exception,
            f"topic name {name!r} has characters other than ASCII letters, digits, '.', '_' and '-'",
        )


def refuse_internal(name: str, reason: str) -> None:
    """Clients change nothing that would lose the state of groups and transactions."""
    if name in INTERNAL_TOPICS:
        raise ApiError(ErrorCode.invalid_topic_exception, f"{name} {reason}")


def has_collision_characters(name: str) -> bool:
    return "." in name or "_" in name


def folded(name: str) -> str:
    """The name as a metric would show it, where '.' and '_' are one."""
    return name.replace(".", "_")
