"""What an audit has proven so far, kept in a file so that the next one costs what is new.

Only an audit that proved everything in its scope moves it. It stands for one definition: another fingerprint begins
anew. Positions name a topic by its id, so those of a topic that was created again say nothing of the new one. The file
is the auditor's own; losing it costs one full audit.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

from holdfast.atomic import write_atomically
from holdfast.audit.model import Fate, Kind, Report, Verdict, place_from_json, place_json
from holdfast.errors import UsageError
from holdfast.pipeline.positions import Place
from holdfast.real import RealFileSystem

STATE_VERSION: Final = 1
STATE_KIND: Final = "holdfast-audit-state"

Marks = Mapping[str, Mapping[str, str]]
"""By sink, what its old part looked like from outside (`holdfast.audit.marks`)."""


class TopicStart(NamedTuple):
    """From where a sink that is a topic has to be read."""

    offsets: Mapping[int, int]
    """By partition: records below are of what is proven."""
    since: Mapping[Place, int]
    """Up to where they hold the source: what stands behind `offsets` must not be of that again."""


Topics = Mapping[str, TopicStart]
"""By sink."""


@dataclass(frozen=True)
class Proven:
    """Up to where everything is accounted for."""

    subject: str
    fingerprint: str = ""
    positions: Mapping[Place, int] = field(default_factory=dict)
    """In each partition, every offset below was looked at and is accounted for."""
    marks: Marks = field(default_factory=dict)
    topics: Topics = field(default_factory=dict)
    records: int = 0
    """Looked at since the last full audit began, that one included."""
    fates: Mapping[str, int] = field(default_factory=dict)
    at_ms: int = 0
    full_at_ms: int = 0
    runs_since_full: int = 0
    certificate: str = ""
    """The hash of the newest certificate: whoever keeps the state keeps the end of the chain."""

    def as_json(self) -> dict[str, Any]:
        return {
            "kind": STATE_KIND,
            "version": STATE_VERSION,
            "subject": self.subject,
            "fingerprint": self.fingerprint,
            "positions": _positions_json(self.positions),
            "marks": {sink: dict(marks) for sink, marks in self.marks.items()},
            "topics": {
                sink: {
                    "offsets": {str(partition): offset for partition, offset in start.offsets.items()},
                    "since": _positions_json(start.since),
                }
                for sink, start in self.topics.items()
            },
            "records": self.records,
            "fates": dict(self.fates),
            "at_ms": self.at_ms,
            "full_at_ms": self.full_at_ms,
            "runs_since_full": self.runs_since_full,
            "certificate": self.certificate,
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Proven:
        return cls(
            document["subject"],
            document["fingerprint"],
            _positions(document["positions"]),
            document["marks"],
            {
                sink: TopicStart(
                    {int(partition): offset for partition, offset in start["offsets"].items()},
                    _positions(start["since"]),
                )
                for sink, start in document["topics"].items()
            },
            document["records"],
            document["fates"],
            document["at_ms"],
            document["full_at_ms"],
            document["runs_since_full"],
            document["certificate"],
        )


def _positions_json(positions: Mapping[Place, int]) -> list[dict[str, Any]]:
    return [{**place_json(place), "offset": at} for place, at in sorted(positions.items())]


def _positions(document: Iterable[Mapping[str, Any]]) -> dict[Place, int]:
    return {place_from_json(each): each["offset"] for each in document}


def advanced(before: Proven | None, report: Report, marks: Marks, certificate: str = "") -> Proven:
    """After a report that proved its scope, on top of what it began with; nothing: it began at the start."""
    if report.verdict is not Verdict.PROVEN:
        raise UsageError(f"an audit that is {report.verdict} proves nothing")
    positions = {each.place: each.end for each in report.partitions}
    records = sum(each.kinds.get(Kind.RECORD, 0) for each in report.partitions)
    fates = {
        str(fate): report.total(fate) for fate in Fate if fate is not Fate.PENDING and report.total(fate)
    }
    made = Proven(
        report.subject,
        report.fingerprint,
        positions,
        marks,
        {},
        records,
        fates,
        report.started_ms,
        report.started_ms,
        0,
        certificate or (before.certificate if before else ""),
    )
    if before is None:
        return made
    return replace(
        made,
        positions={**before.positions, **positions},
        records=before.records + records,
        fates={
            fate: before.fates.get(fate, 0) + fates.get(fate, 0)
            for fate in dict.fromkeys((*before.fates, *fates))
        },
        full_at_ms=before.full_at_ms,
        runs_since_full=before.runs_since_full + 1,
    )


def read_state(path: str) -> Proven | None:
    """What the file says; nothing when there is none. A file that is no state is an error: it may be somebody's."""
    try:
        with open(path, "rb") as file:
            document = json.loads(file.read())
        if document["kind"] != STATE_KIND:
            raise ValueError("it is of another kind")
        if document["version"] != STATE_VERSION:
            raise ValueError(f"its version is {document['version']}, this holdfast reads {STATE_VERSION}")
        return Proven.from_json(document)
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UsageError(
            f"{path} does not hold the state of an audit ({error}): name another file, or remove it to begin anew"
        ) from error


def write_state(path: str, proven: Proven) -> None:
    whole = os.path.abspath(path)
    os.makedirs(os.path.dirname(whole), exist_ok=True)
    text = json.dumps(proven.as_json(), ensure_ascii=False, separators=(",", ":"))
    write_atomically(RealFileSystem(), whole, text.encode("utf-8", "backslashreplace") + b"\n")
