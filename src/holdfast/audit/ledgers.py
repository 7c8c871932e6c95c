"""The ledgers as chains: without a gap from where a sink began to where it stands.

A ledger is the pipeline's own word, and a sink's rows are compared with the log, not with it. But it says where the
pipeline began and how far each sink is, which no log tells; so it has to be a chain: entries numbered without a gap,
each range continuing the one before, positions that follow from both. What entries count is counted again in `books`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import numpy.typing as npt

from holdfast.audit.model import AuditError, Examined, Fate, Finding, Unproven
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place, Positions

Span = tuple[int, int]
Offsets = npt.NDArray[np.int64]

PRUNED: Final = frozenset({"kafka", "dead_letter", "delta"})
"""Kinds of sinks whose older entries go: a compacted topic keeps the newest of each writer, a log is cleaned."""


@dataclass(frozen=True)
class Chain:
    """What one sink's entries say about its way through the source."""

    sink: str
    starts: Mapping[Place, int]
    """Where it began in each partition; where that is not kept any more, where the oldest entry begins."""
    unsure: frozenset[Place]
    """Partitions whose beginning is not kept."""
    positions: Positions
    examined: Examined = field(default_factory=Examined)
    begins_anew: bool = False
    """It had a ledger before this one, which was forgotten or lost, and that was said to be meant."""


def follow(sink: str, kind: str, pipeline: str, entries: Sequence[Entry]) -> Chain:
    """Read a ledger from its oldest entry to its newest."""
    found: list[Finding] = []
    unproven: list[Unproven] = []
    starts: dict[Place, int] = {}
    unsure: set[Place] = set()
    standing: Positions | None = None
    previous: Entry | None = None
    for entry in entries:
        if entry.pipeline != pipeline:
            found.append(
                _altered(sink, f"entry {entry.number} of its ledger is of pipeline {entry.pipeline!r}")
            )
        if previous is None:
            is_first = entry.number == 0
            for place, at in entry.positions.at.items():
                span = entry.range.spans.get(place)
                starts[place] = at.offset if span is None else span.start
                if not is_first:
                    unsure.add(place)
            if not is_first and kind not in PRUNED:
                found.append(_missing(sink, 0, entry.number - 1))
            elif not is_first:
                unproven.append(_pruned(sink, 0, entry.number - 1))
        elif entry.number != previous.number + 1:
            if kind in PRUNED and entry.number > previous.number:
                unproven.append(_pruned(sink, previous.number + 1, entry.number - 1))
            else:
                found.append(_missing(sink, previous.number + 1, entry.number - 1))
        else:
            assert standing is not None
            found.extend(_continues(sink, standing, entry))
        for place, span in entry.range.spans.items():
            starts.setdefault(place, span.start)
        standing, previous = entry.positions, entry
    return Chain(
        sink,
        starts,
        frozenset(unsure),
        standing or Positions({}),
        Examined(tuple(found), tuple(unproven)),
        begins_anew=bool(entries) and entries[0].generation > 0,
    )


def _continues(sink: str, standing: Positions, entry: Entry) -> list[Finding]:
    found = []
    for place, span in sorted(entry.range.spans.items()):
        known = standing.of(place.topic, place.partition)
        if known is None:
            continue
        other, at = known
        name = f"{place.topic}-{place.partition}"
        if other.topic_id != place.topic_id:
            found.append(
                _altered(
                    sink, f"entry {entry.number} of its ledger goes on in another topic named {place.topic}"
                )
            )
        elif span.start != at.offset:
            verb = "leaves out" if span.start > at.offset else "repeats"
            first, last = sorted((span.start, at.offset))
            found.append(
                Finding(
                    Fate.ALTERED,
                    sink,
                    place,
                    ((first, last - 1),),
                    last - first,
                    (),
                    f"entry {entry.number} of its ledger {verb} these offsets of {name}",
                )
            )
    if standing.moved(entry.range).at != entry.positions.at:
        found.append(
            _altered(
                sink, f"the positions of entry {entry.number} of its ledger do not follow from its range"
            )
        )
    return found


def _altered(sink: str, detail: str) -> Finding:
    return Finding(Fate.ALTERED, sink, count=1, detail=detail)


def _missing(sink: str, first: int, last: int) -> Finding:
    which = f"entry {first} is" if first >= last else f"entries {first} to {last} are"
    return _altered(sink, f"{which} missing in its ledger, with the rows they stand for")


def _pruned(sink: str, first: int, last: int) -> Unproven:
    return Unproven(
        f"what the entries {first} to {last} of the ledger of {sink!r} counted",
        "they are not kept; the rows of those batches are compared with the log all the same",
    )


def reached(home: str) -> dict[str, tuple[int, int]]:
    """Generation and number of the newest entry that each sink had; a home from before there was this file has none."""
    path = os.path.join(home, "sinks.json")
    try:
        with open(path, encoding="utf-8") as file:
            sinks = json.load(file)["sinks"]
        return {name: (each["generation"], each["number"]) for name, each in sinks.items()}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise AuditError(f"{path} says how far each sink had come, and cannot be read ({error})") from error


# ---------------------------------------------------------------------------- which entry is about which offset


def cover(chains: Mapping[str, Sequence[Entry]], spans: Mapping[Place, Span], first: str = "") -> list[Entry]:
    """Entries of all sinks, each offset of the scope in at most one: those of `first`, then of the fullest ledger."""
    covered: dict[Place, list[Span]] = {}
    chosen: list[Entry] = []
    sizes = {sink: sum(_within(each, spans) for each in entries) for sink, entries in chains.items()}
    fullest = sorted(chains, key=lambda sink: (sink != first, -sizes[sink], sink))
    for sink in fullest:
        for entry in chains[sink]:
            taken = {place: span for place, span in entry.range.spans.items() if span.offsets}
            if not taken or not _within(entry, spans):
                continue
            if any(
                span.start < end and start < span.end
                for place, span in taken.items()
                for start, end in covered.get(place, ())
            ):
                continue
            chosen.append(entry)
            for place, span in taken.items():
                _join(covered.setdefault(place, []), (span.start, span.end))
    return chosen


def _join(spans: list[Span], added: Span) -> None:
    """Ranges mostly continue the last one: kept short, looking through them stays cheap."""
    if spans and spans[-1][1] == added[0]:
        spans[-1] = (spans[-1][0], added[1])
    else:
        spans.append(added)


def _within(entry: Entry, spans: Mapping[Place, Span]) -> int:
    """Offsets of the entry's range that are in the scope."""
    total = 0
    for place, span in entry.range.spans.items():
        if place in spans:
            start, end = spans[place]
            total += max(0, min(span.end, end) - max(span.start, start))
    return total


def is_whole(entry: Entry, spans: Mapping[Place, Span]) -> bool:
    """Whether all that the entry took is in the scope."""
    return entry.range.offsets > 0 and _within(entry, spans) == entry.range.offsets
