"""The life of one record as plain values: what was found of it, where, and what that means."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from holdfast.audit import words
from holdfast.audit.row_places import Standing
from holdfast.audit.sinks.base import DeadLetterRow
from holdfast.audit.stored import Stored
from holdfast.pipeline.ledger import Entry

ENDS: Final[Mapping[str, str]] = {
    "expired": "it is gone: retention or a deletion moved the start of the log past it",
    "compacted": "it is gone: the topic is compacted, and a later record of its key took its place, or it never was",
    "aborted": "its transaction was aborted: readers of committed records never see it",
    "control": "it is no record but the marker that ended a transaction",
    "open": "its transaction has not ended: nobody may take it yet",
    "not_yet": "the log has not grown to it yet",
}


@dataclass(frozen=True)
class SinkLife:
    """One sink and the record."""

    name: str
    kind: str
    takes: str = ""
    standing: str = "taken"
    """`taken`: its ledger covers the offset; `before`: it began behind it; `other`: it was fed from
    another topic of the name; `pending`, `empty`, `unreadable`."""
    entry: Entry | None = None
    held: tuple[str, ...] = ()
    """Where the rows made of it are."""
    problem: str = ""
    instead: Standing | None = None
    """A table of one row for each key: what stands for the record's key, where that can be told."""
    keeps_last: bool = False
    """It is such a table."""

    def as_json(self) -> dict[str, Any]:
        entry = self.entry
        return {
            "name": self.name,
            "kind": self.kind,
            "takes": self.takes,
            "standing": self.standing,
            "entry": None
            if entry is None
            else {
                "number": entry.number,
                "batch_time_ms": entry.batch_time_ms,
                "range": entry.range.as_json(),
                "fingerprint": entry.fingerprint,
            },
            "held": list(self.held),
            "instead": self.instead.name if self.instead is not None and self.instead.topic else None,
            "problem": self.problem,
        }


@dataclass(frozen=True)
class Departure:
    """A row of the record that left the steps."""

    route: str
    step: str
    index: int
    batch: str

    def as_json(self) -> dict[str, Any]:
        return {"route": self.route, "step": self.step, "index": self.index, "batch": self.batch}


@dataclass(frozen=True)
class Life:
    stored: Stored
    pipeline: str = ""
    sinks: tuple[SinkLife, ...] = ()
    departures: tuple[Departure, ...] = ()
    dead_letters: tuple[DeadLetterRow, ...] = ()
    fate: str = ""
    """One of the audit's fates, or what the offset is instead of a record; `unknown` where nobody can tell."""
    conclusion: str = ""

    @property
    def is_fault(self) -> bool:
        return self.fate in {str(fate) for fate in words.FAULTS}

    def as_json(self) -> dict[str, Any]:
        return {
            "record": self.stored.as_json(),
            "pipeline": self.pipeline or None,
            "sinks": [each.as_json() for each in self.sinks],
            "left": [each.as_json() for each in self.departures],
            "dead_letters": [
                {"index": each.index, "reason": each.reason, "error": each.error, "where": each.where}
                for each in self.dead_letters
            ],
            "fate": self.fate,
            "conclusion": self.conclusion,
        }
