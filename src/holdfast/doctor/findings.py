"""What an examination says: findings, what could not be examined, and how bad it is as a whole.

The rules these types keep:

- A finding names one risk of the table in `risks`, one place, and what was seen there. What can be lost is the
  risk's own words unless the rule knows better. `HF000` is for what no risk covers: a name nobody knows, a value
  that cannot be.
- A finding is made by what is there, never by what could not be read. What could not be read is a `Gap`, and an
  examination with gaps is incomplete whatever else it found.
- The same finding at the same place is told once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal

from holdfast.doctor.risks import RISKS, Risk
from holdfast.errors import UsageError


class DoctorError(UsageError):
    """The doctor was asked something it cannot do: an unknown client, a suppression without a reason."""


class Severity(StrEnum):
    """How bad, the least first; compared by `rank`."""

    NOTE = "note"
    WARNING = "warning"
    ERROR = "error"

    @property
    def rank(self) -> int:
        return list(Severity).index(self)


@dataclass(frozen=True, order=True)
class Location:
    """Where something was found: a line of a file, or a thing of the cluster such as `topic orders`."""

    file: str = ""
    line: int = 0
    """From 1; 0 when the place is the file as a whole."""
    resource: str = ""

    def __str__(self) -> str:
        where = f"{self.file}:{self.line}" if self.line else self.file
        if where and self.resource:
            return f"{where} ({self.resource})"
        return where or self.resource

    def as_json(self) -> dict[str, Any]:
        return {"file": self.file or None, "line": self.line or None, "resource": self.resource or None}


FixKind = Literal["command", "settings", "code", "advice"]


@dataclass(frozen=True)
class ConfigChange:
    """A fix that a program can make: one setting of one topic or broker."""

    resource_type: Literal["topic", "broker", "group"]
    resource_name: str
    """Empty for the cluster-wide default of all brokers."""
    setting: str
    value: str


@dataclass(frozen=True)
class Fix:
    """What to do: a command to run, lines for the file, a change of the code, or words."""

    text: str
    kind: FixKind = "advice"
    change: ConfigChange | None = None

    def as_json(self) -> dict[str, Any]:
        return {"kind": self.kind, "text": self.text}


@dataclass(frozen=True)
class Finding:
    id: str
    severity: Severity
    place: Location
    found: str
    loses: str
    fix: Fix | None = None
    related: tuple[str, ...] = ()

    @property
    def risk(self) -> Risk:
        return RISKS[self.id]

    @property
    def where(self) -> str:
        return str(self.place)

    def as_json(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "title": self.risk.title,
            "severity": self.severity.value,
            "where": self.where,
            "place": self.place.as_json(),
            "found": self.found,
            "loses": self.loses,
            "fix": None if self.fix is None else self.fix.as_json(),
            "related": list(self.related),
        }


def finding(
    risk_id: str,
    place: Location,
    found: str,
    *,
    fix: Fix | None = None,
    severity: Severity | None = None,
    loses: str | None = None,
    related: Iterable[str] = (),
) -> Finding:
    """A finding of a risk, with the risk's own severity and words where nothing better is given."""
    risk = RISKS[risk_id]
    return Finding(
        risk_id,
        Severity(risk.severity) if severity is None else severity,
        place,
        found,
        risk.loses if loses is None else loses,
        fix,
        tuple(related),
    )


GapKind = Literal["unreadable", "permission", "connection", "unsupported"]


@dataclass(frozen=True)
class Gap:
    """Something that could not be examined, and why: the examination is incomplete."""

    what: str
    why: str
    kind: GapKind = "unreadable"


@dataclass(frozen=True)
class Suppressed:
    """A finding that somebody has accepted, with the reason and the day it ends (ISO 8601)."""

    finding: Finding
    reason: str
    expires: str

    def as_json(self) -> dict[str, Any]:
        return {**self.finding.as_json(), "reason": self.reason, "expires": self.expires}


@dataclass
class Examination:
    """Everything one run of the doctor has to say; each part of the doctor adds to it."""

    findings: list[Finding] = field(default_factory=list)
    gaps: list[Gap] = field(default_factory=list)
    examined: list[str] = field(default_factory=list)
    """What was looked at, in words: `producer.properties as a producer of the Java client`."""
    suppressed: list[Suppressed] = field(default_factory=list)

    def add(self, findings: Iterable[Finding]) -> None:
        known = set(self.findings)
        for found in findings:
            if found not in known:
                known.add(found)
                self.findings.append(found)

    def merge(self, other: Examination) -> None:
        self.add(other.findings)
        self.gaps.extend(other.gaps)
        self.examined.extend(other.examined)
        self.suppressed.extend(other.suppressed)

    def missed(self, what: str, why: str, kind: GapKind = "unreadable") -> None:
        self.gaps.append(Gap(what, why, kind))

    @property
    def complete(self) -> bool:
        return not self.gaps

    def in_order(self) -> list[Finding]:
        """The worst first, then by place."""
        return sorted(self.findings, key=lambda found: (-found.severity.rank, found.place, found.id))

    def at_least(self, severity: Severity) -> Iterator[Finding]:
        return (found for found in self.in_order() if found.severity.rank >= severity.rank)

    def count(self, severity: Severity) -> int:
        return sum(found.severity is severity for found in self.findings)
