"""What can go wrong while reading, as a branch of holdfast's tree.

HoldfastError
└── ReaderError
    ├── TopicMissing         no topic of that name, or it was deleted while it was read
    ├── TopicRecreated       the name now belongs to another topic: its offsets mean other records
    ├── OffsetGone           the log does not hold the offsets asked for
    ├── EndNotReached        the log, or its stable part, did not grow to the range's end in time
    ├── CorruptBatch         bytes of the log that are no valid record batch
    ├── Unreachable          no broker, or not the one that leads, answered in time
    ├── NotAuthorised        the cluster refuses the credentials, or the principal may not read
    ├── UnsupportedBroker    the broker is too old to be read by topic id
    └── Refused              a broker answered with another error; carries its code
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from holdfast.errors import HoldfastError


class ReaderError(HoldfastError):
    """Whatever ends a read on purpose."""


class TopicMissing(ReaderError):
    """There is no such topic."""


class TopicRecreated(ReaderError):
    """The topic was deleted and created again: same name, other records."""


class OffsetGone(ReaderError):
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


class EndNotReached(ReaderError):
    """Records before the range's end are not there yet, or belong to a transaction still open."""


class CorruptBatch(ReaderError):
    """Bytes that no producer can have meant: damage in the log or on the way."""


class Unreachable(ReaderError):
    """Nobody who could answer did so in time."""


class NotAuthorised(ReaderError):
    """Credentials refused, or no permission."""


class UnsupportedBroker(ReaderError):
    """The broker lacks a request that reading needs."""


class Refused(ReaderError):
    """A broker answered with an error that asking again does not change."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code

    def __reduce__(self) -> tuple[object, ...]:
        return Refused, (str(self), self.code)
