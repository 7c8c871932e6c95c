"""Answers that say "not now": a client tries again, later or elsewhere."""

from __future__ import annotations

from kio.schema.errors import ErrorCode

NOT_NOW = frozenset(
    {
        ErrorCode.request_timed_out,
        ErrorCode.not_leader_or_follower,
        ErrorCode.leader_not_available,
        ErrorCode.not_enough_replicas,
        ErrorCode.not_enough_replicas_after_append,
        ErrorCode.coordinator_not_available,
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.not_coordinator,
        ErrorCode.concurrent_transactions,
    }
)

REFUSED_MEMBER = frozenset(
    {
        ErrorCode.unknown_member_id,
        ErrorCode.illegal_generation,
        ErrorCode.fenced_instance_id,
        ErrorCode.stale_member_epoch,
        ErrorCode.fenced_member_epoch,
        ErrorCode.group_id_not_found,
    }
)
"""Answers to a member that is none, or not with this generation or epoch: nothing was changed."""
