"""What can go wrong while reading, as a branch of holdfast's tree.

HoldfastError
└── ClusterError             with what can go wrong at any cluster: `holdfast.admin.errors`
    ├── TopicMissing         no topic of that name, or it was deleted while it was read
    ├── TopicRecreated       the name now belongs to another topic: its offsets mean other records
    ├── OffsetGone           the log does not hold the offsets asked for
    ├── EndNotReached        the log, or its stable part, did not grow to the range's end in time
    └── CorruptBatch         bytes of the log that are no valid record batch
"""

from __future__ import annotations

from holdfast.admin.errors import ClusterError


class TopicMissing(ClusterError):
    """There is no such topic."""


class TopicRecreated(ClusterError):
    """The topic was deleted and created again: same name, other records."""


class OffsetGone(ClusterError):
    """Offsets that the log does not hold: deleted from its head, or cut off its tail."""

    def __init__(self, message: str, *, offset: int, log_start: int, log_end: int) -> None:
        super().__init__(message)
        self.offset = offset
        self.log_start = log_start
        self.log_end = log_end

    def __reduce__(self) -> tuple[object, ...]:
        return _offset_gone, (str(self), self.offset, self.log_start, self.log_end)


def _offset_gone(message: str, offset: int, log_start: int, log_end: int) -> OffsetGone:
    return OffsetGone(message, offset=offset, log_start=log_start, log_end=log_end)


class EndNotReached(ClusterError):
    """Records before the range's end are not there yet, or belong to a transaction still open."""


class CorruptBatch(ClusterError):
    """Bytes that no producer can have meant: damage in the log or on the way."""
