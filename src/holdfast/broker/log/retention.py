"""Which segments a log no longer has to keep, and when an idle one ends. Decisions only; the node carries them out.

Segments go oldest first, whole, and while the rule holds for the next one:

- `retention.bytes`: as long as what remains is at least that much.
- `retention.ms`: when the segment's largest timestamp is older. Timestamps are the records' own, so a
  segment with a record from the future stays. One with records that have none counts from its last append.

Both apply to topics whose `cleanup.policy` has "delete". What lies below the log start goes from any topic.

Nothing goes that is not below the high watermark, and no segment before the flush that sealed it has
returned. So the active segment, when its turn comes, is only rolled here; it goes at a later check.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.broker.log.log import Log
from holdfast.seams import Now
from holdfast.wire.positions import LogPosition


class Expired(NamedTuple):
    """What retention asks for."""

    start_offset: int
    """Where the log shall begin: the base of the first segment that stays."""
    segments: int
    rolls_active: bool
    """The active segment's time has come as well: it must be rolled before it can go."""
    reason: str


def expired(log: Log, high_watermark: LogPosition, now: Now) -> Expired | None:
    """What the topic's settings no longer keep, or None."""
    config = log.config
    if "delete" not in config.cleanup_policy:
        return None
    count, reason = 0, ""
    if config.retention_bytes >= 0:
        count = _over_size(log, config.retention_bytes)
        reason = f"retention.bytes={config.retention_bytes}"
    if config.retention_ms >= 0:
        by_age = _over_age(log, now.wall_ms - config.retention_ms)
        if by_age > count:
            count, reason = by_age, f"retention.ms={config.retention_ms}"
    count = min(count, _below(log, high_watermark))
    rolls_active = count == len(log.segments)
    if rolls_active:
        count -= 1
    sealed = min(count, sum(segment.base_offset < log.flushed_base for segment in log.segments))
    if not sealed and not rolls_active:
        return None
    return Expired(log.segments[sealed].base_offset, sealed, rolls_active, reason)


def _over_size(log: Log, retention_bytes: int) -> int:
    excess = log.size - retention_bytes
    count = 0
    for segment in log.segments:
        excess -= segment.size
        if excess < 0:
            break
        count += 1
    return count


def _over_age(log: Log, keep_from_ms: int) -> int:
    count = 0
    for segment in log.segments:
        if segment.newest_ms >= keep_from_ms:
            break
        count += 1
    return count


def _below(log: Log, high_watermark: LogPosition) -> int:
    """How many segments hold nothing at or above the high watermark; never an empty active one."""
    count = 0
    following = [segment.base_offset for segment in log.segments[1:]]
    for upper in following:
        if upper > high_watermark.offset:
            return count
        count += 1
    if log.active.size and log.end_offset <= high_watermark.offset:
        count += 1
    return count


def roll_due(log: Log, now: Now) -> bool:
    """Whether an idle active segment has reached `segment.ms` (or `max.compaction.lag.ms`, when compacted).

    While batches arrive the log rolls by their timestamps. Without any, age is counted on the broker's clock
    too, from the segment's last opening, so that old records copied in do not roll at every check.
    """
    active = log.active
    if not active.size:
        return False
    config = log.config
    limit_ms = config.segment_ms - log.roll_jitter_ms
    if "compact" in config.cleanup_policy:
        limit_ms = min(limit_ms, config.max_compaction_lag_ms)
    since_ms = active.created_ms
    if active.first_timestamp is not None:
        since_ms = max(since_ms, active.first_timestamp)
    return now.wall_ms - since_ms > limit_ms
