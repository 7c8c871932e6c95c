"""Entries of a ledger as an auditor takes them: read with suspicion, and compared with their neighbours."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from holdfast.audit.model import Fate, Finding
from holdfast.errors import HoldfastError
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Positions

NOWHERE_YET: Final = Positions({})


def read_entry(document: str | bytes | dict[str, Any], pipeline: str, sink: str) -> Entry:
    """An entry of this sink; `ValueError` says why it is none."""
    try:
        parsed = document if isinstance(document, dict) else json.loads(document)
        entry = Entry.from_json(parsed)
    except (HoldfastError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"it is no entry: {type(error).__name__} {error}") from error
    wrong = _malformed(entry)
    if wrong:
        raise ValueError(f"it is no entry: {wrong}")
    if (entry.pipeline, entry.sink) != (pipeline, sink):
        raise ValueError(f"it is of the sink {entry.sink!r} of the pipeline {entry.pipeline!r}")
    return entry


def _malformed(entry: Entry) -> str:
    """What is not what it has to be; nothing: it is an entry."""
    routes = entry.routes
    counts = {
        "number": entry.number,
        "rows": entry.rows,
        "batch_time_ms": entry.batch_time_ms,
        **{f"intake {name}": value for name, value in entry.intake.as_json().items() if name != "digest"},
        **{f"routes {name}": getattr(routes, name) for name in ("main", "duplicate", "late")},
    }
    if not isinstance(entry.taps, dict):
        return f"taps is {entry.taps!r}"
    for name, by in (("dead_letter", routes.dead_letter), ("filtered", routes.filtered), *entry.taps.items()):
        if not isinstance(by, dict):
            return f"{name} is {by!r}"
        counts |= {f"{name} {key}": value for key, value in by.items()}
    for place, span in entry.range.spans.items():
        counts |= {f"start of {place}": span.start, f"end of {place}": span.end}
        if _is_count(span.start) and _is_count(span.end) and span.start > span.end:
            return f"the range of {place} is {span}"
    counts |= {f"position of {place}": at.offset for place, at in entry.positions.at.items()}
    wrong = [f"{name} is {value!r}" for name, value in counts.items() if not _is_count(value)]
    marks = {"watermark_ms": entry.watermark_ms, "state": entry.state, "digest": entry.intake.digest}
    wrong += [
        f"{name} is {value!r}"
        for name, value in marks.items()
        if value is not None and (not isinstance(value, int) or isinstance(value, bool))
    ]
    for name, texts in (("lookups", entry.lookups), ("digests", entry.digests)):
        if not isinstance(texts, dict) or not all(isinstance(value, str) for value in texts.values()):
            wrong.append(f"{name} is {texts!r}")
    return wrong[0] if wrong else ""


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def hole_findings(sink: str, what: str, before: Entry | None, after: Entry | None) -> list[Finding]:
    """Entries that are missing between two others: by partition the offsets they took."""
    if before is None and after is None:
        return [Finding(Fate.ALTERED, sink, detail=what)]
    if after is None or before is None:
        return [Finding(Fate.ALTERED, sink, detail=f"{what}; what they took is not known")]
    found = []
    for place, span in sorted(after.range.spans.items()):
        start = before.positions.at.get(place)
        if start is not None and start.offset < span.start:
            found.append(Finding(Fate.ALTERED, sink, place, ((start.offset, span.start - 1),), detail=what))
    for place, position in sorted(after.positions.at.items()):
        start = before.positions.at.get(place)
        if place not in after.range.spans and start is not None and start.offset < position.offset:
            found.append(
                Finding(Fate.ALTERED, sink, place, ((start.offset, position.offset - 1),), detail=what)
            )
    return found or [Finding(Fate.ALTERED, sink, detail=f"{what}; they took no offset")]


def number_holes(sink: str, entries: Sequence[Entry], what: str) -> list[Finding]:
    """Numbers missing in a ledger that keeps every entry."""
    found: list[Finding] = []
    before: Entry | None = None
    for entry in entries:
        expected = 0 if before is None else before.number + 1
        if entry.number > expected:
            numbers = f"{expected}" if entry.number == expected + 1 else f"{expected} to {entry.number - 1}"
            found += hole_findings(sink, f"entry {numbers} missing from {what}", before, entry)
        before = entry
    return found
