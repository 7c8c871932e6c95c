"""Findings that somebody has accepted: a file with an identifier, a place, a reason and a day on which it ends.

    suppressions:
      - id: HF305
        where: config/alerts.properties        # a place, or a pattern such as config/*; `*` is everywhere
        reason: alerts older than a minute are of no use
        expires: 2027-03-31

- Every entry has all four, and the day is a real one: silence without a reason or without an end is refused.
- On and after its day an entry silences nothing, and says so with a finding of its own.
- An entry that matches nothing is told as well: what it silenced is gone, or its place is mistyped.
"""

from __future__ import annotations

import datetime
import fnmatch
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import yaml

from holdfast.doctor.findings import (
    DoctorError,
    Examination,
    Finding,
    Location,
    Severity,
    Suppressed,
    finding,
)
from holdfast.doctor.properties_files import read_text
from holdfast.doctor.risks import RISKS

FIELDS: Final = ("id", "where", "reason", "expires")


@dataclass(frozen=True)
class Suppression:
    id: str
    where: str
    reason: str
    expires: datetime.date
    place: Location

    def covers(self, found: Finding) -> bool:
        if self.id != found.id:
            return False
        place = found.place
        candidates = (found.where, place.file, place.resource, f"{place.file}:{place.line}")
        return any(text and fnmatch.fnmatchcase(text, self.where) for text in candidates)


def read_suppressions(path: str) -> list[Suppression]:
    """DoctorError, with the entry, for a file that is not as it must be."""
    try:
        document = yaml.safe_load(read_text(path))
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise DoctorError(f"{path}: not YAML: {error}") from error
    entries = document.get("suppressions") if isinstance(document, Mapping) else document
    if entries is None:
        entries = []
    if not isinstance(entries, Sequence) or isinstance(entries, str):
        raise DoctorError(f"{path}: must be a list of suppressions, each with {', '.join(FIELDS)}")
    return [_entry(path, number, entry) for number, entry in enumerate(entries, 1)]


def _entry(path: str, number: int, entry: Any) -> Suppression:
    where = f"{path}: suppression {number}"
    if not isinstance(entry, Mapping):
        raise DoctorError(f"{where} must have {', '.join(FIELDS)}")
    unknown = sorted(set(map(str, entry)) - set(FIELDS))
    if unknown:
        raise DoctorError(f"{where} has an unknown field {unknown[0]!r}; known are {', '.join(FIELDS)}")
    for name in FIELDS:
        value = entry.get(name)
        if not isinstance(value, (str, int, datetime.date)) or not str(value).strip():
            raise DoctorError(f"{where} has no {name}: what is silenced needs a reason and an end")
    risk_id = str(entry["id"]).strip()
    if risk_id not in RISKS:
        raise DoctorError(f"{where} names {risk_id!r}, which is no risk")
    return Suppression(
        risk_id,
        str(entry["where"]).strip(),
        str(entry["reason"]).strip(),
        _day(where, entry["expires"]),
        Location(path, 0, f"suppression {number}"),
    )


def _day(where: str, value: Any) -> datetime.date:
    if isinstance(value, datetime.datetime):
        return value.date()
    if isinstance(value, datetime.date):
        return value
    try:
        return datetime.date.fromisoformat(str(value).strip())
    except ValueError:
        raise DoctorError(f"{where}: expires {value!r} is not a day such as 2027-03-31") from None


def suppress(
    examination: Examination, suppressions: Sequence[Suppression], today: datetime.date
) -> Examination:
    """The examination with accepted findings set aside, and what there is to say about the entries themselves."""
    result = Examination(gaps=list(examination.gaps), examined=list(examination.examined))
    result.suppressed = list(examination.suppressed)
    used: set[Suppression] = set()
    for found in examination.findings:
        covering = [entry for entry in suppressions if entry.covers(found)]
        used.update(covering)
        valid = next((entry for entry in covering if today < entry.expires), None)
        if valid is None:
            result.add([found])
        else:
            result.suppressed.append(Suppressed(found, valid.reason, valid.expires.isoformat()))
    result.add(_about_entries(suppressions, used, today))
    return result


def _about_entries(
    suppressions: Sequence[Suppression], used: set[Suppression], today: datetime.date
) -> Iterator[Finding]:
    for entry in suppressions:
        if entry not in used:
            yield finding(
                "HF000",
                entry.place,
                f"{entry.id} at {entry.where} was not found: the suppression can be removed, or its place is mistyped",
                severity=Severity.NOTE,
            )
        elif today >= entry.expires:
            yield finding(
                "HF000",
                entry.place,
                f"the suppression of {entry.id} at {entry.where} ended on {entry.expires.isoformat()}: {entry.reason}",
                severity=Severity.WARNING,
                loses="nothing by itself: what was accepted for a time counts again",
            )
