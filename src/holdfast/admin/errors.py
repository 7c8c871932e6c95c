"""What can go wrong between a client and a cluster, as a branch of holdfast's tree.

HoldfastError
└── ClusterError
    ├── Unreachable          no broker, or not the one that has to answer, answered in time
    ├── NotAuthorised        the cluster refuses the credentials, or the principal may not do that
    ├── UnsupportedBroker    the broker lacks a request, or the version of it, that is needed
    ├── Refused              a broker answered with another error; carries its code
    └── …                    what can go wrong while reading: `holdfast.reader.errors`
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from holdfast.errors import ExitCode, HoldfastError
from holdfast.wire import error_table


class ClusterError(HoldfastError):
    """Whatever a cluster, or the way to it, refuses."""


class Unreachable(ClusterError):
    """Nobody who could answer did so in time."""

    exit_code = ExitCode.CANNOT_CONNECT


class NotAuthorised(ClusterError):
    """Credentials refused, or no permission."""

    exit_code = ExitCode.CANNOT_CONNECT


class UnsupportedBroker(ClusterError):
    """The broker lacks a request that is needed."""


class Refused(ClusterError):
    """A broker answered with an error that asking again does not change."""

    def __init__(self, message: str, code: ErrorCode) -> None:
        super().__init__(message)
        self.code = code

    @property
    def name(self) -> str:
        """Kafka's name for the error."""
        known = error_table.BY_CODE.get(int(self.code))
        return known.name if known is not None else f"ERROR_{int(self.code)}"

    def __reduce__(self) -> tuple[object, ...]:
        return Refused, (str(self), self.code)


def refused(subject: str, code: ErrorCode, said: str | None = None, advice: str = "") -> Refused:
    """A broker's refusal in words: what was attempted, the broker's reason or Kafka's, and what to do about it."""
    known = error_table.BY_CODE.get(int(code))
    reason = said.rstrip(".") if said else known.meaning if known is not None else "no reason was given"
    refusal = Refused(subject, code)
    return Refused(f"{subject}: {reason} ({refusal.name})" + (f"; {advice}" if advice else ""), code)


def check(code: ErrorCode, subject: str, said: str | None = None, advice: str = "") -> None:
    """Raise `Refused` unless the code means that all is well."""
    if code is not ErrorCode.none:
        raise refused(subject, code, said, advice)
