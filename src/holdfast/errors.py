"""Every exception holdfast raises, as a tree.

    HoldfastError
    ├── UsageError                 you misused this: fix the call, the flag or the setting
    │   ├── ConfigError            a setting has a wrong name or value
    │   ├── NotInstalled           a package is missing that an extra of ours brings
    │   └── DataDirectoryError     the data directory cannot be used as asked
    │       └── DataDirectoryLocked    another process has it
    ├── PeerError                  the peer misbehaved: its connection may be closed, nothing else is
    │   ├── MalformedFrame         bytes that are no request of this protocol
    │   └── InvalidRecords         a record batch that breaks the format; carries the protocol's error code
    ├── ApiError                   the protocol's own answer to a request we refuse; carries its error code
    └── StorageError               the disk failed us or its content is not what was written
        ├── CorruptLog             a file holds what no append could have written
        │   └── MissingOffsets     a log lacks offsets that it had once; carries the range
        └── LogDirectoryOffline    a write or flush failed; nothing is read or written there until restart

`ApiError` and `InvalidRecords` turn into responses; the others into log lines, exit codes or closed connections.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import IntEnum

from kio.schema.errors import ErrorCode


class ExitCode(IntEnum):
    """What a command's exit code tells a script."""

    FINE = 0
    FINDINGS = 1
    USAGE = 2
    CANNOT_CONNECT = 3
    INCONCLUSIVE = 4
    INTERRUPTED = 130


class HoldfastError(Exception):
    """The root: catch it to catch whatever holdfast raises on purpose."""


class UsageError(HoldfastError):
    """The caller asked for something that cannot be done as asked."""


class ConfigError(UsageError):
    """A setting has a name or a value that cannot be right."""


class NotInstalled(UsageError):
    """A package is missing that an extra of ours brings; the message says which extra."""

    exit_code = 3


@contextmanager
def from_extra(extra: str, what: str) -> Iterator[None]:
    """Around an import for `what`, which needs the extra: where that is not installed, the error says so."""
    try:
        yield
    except ModuleNotFoundError as missing:
        told = f"{what} needs {missing.name}, which is not installed: pip install 'holdfast[{extra}]'"
        raise NotInstalled(told) from missing


class DataDirectoryError(UsageError):
    """The data directory cannot be used as asked."""


class DataDirectoryLocked(DataDirectoryError):
    """Another process is using the data directory."""


class PeerError(HoldfastError):
    """The other side of a connection broke the protocol."""


class MalformedFrame(PeerError):
    """Bytes that are no request of this protocol; the connection cannot be trusted further."""


class ApiError(HoldfastError):
    """A request we refuse with one of the protocol's error codes."""

    def __init__(self, code: ErrorCode, message: str | None = None) -> None:
        super().__init__(message or code.name)
        self.code = code
        self.message = message


class InvalidRecords(PeerError):
    """A record batch that breaks the format or the topic's rules."""

    def __init__(self, code: ErrorCode, message: str, record_indexes: Sequence[int] = ()) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.record_indexes = record_indexes
        """Which records of the batch are at fault, when single ones are."""


class StorageError(HoldfastError):
    """The disk failed, or holds what was never written."""


class CorruptLog(StorageError):
    """A log file holds bytes that no append could have written."""


class MissingOffsets(CorruptLog):
    """A log lacks the offsets from `first` to below `end`, which it had once."""

    def __init__(self, message: str, first: int, end: int) -> None:
        super().__init__(message)
        self.first = first
        self.end = end


class LogDirectoryOffline(StorageError):
    """A write or flush failed in this log directory; it is out of service until restart."""
