"""Sinks that take a stream beside the chain of steps: the rows a step set aside, or those it made itself.

- `<step>.late` and `<step>.duplicates` hold rows of records, as they came. The pipeline's home records which those are,
  and a sink must have exactly them.
- `<step>` of a keyed function or a join holds rows of the step's own making, numbered within the turn of the batch that
  made them. The ledger tells how many rows each turn gave: as many are there, each number once, and no others. That the
  step made the right ones is taken on its word. Windows are made again instead (`memory`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from holdfast.audit.compare import Holding, finding
from holdfast.audit.lineage import as_ranges
from holdfast.audit.model import Examined, Fate, Finding, Unproven, ranges_text
from holdfast.audit.sinks.base import SinkScope
from holdfast.audit.source import RECORD, PartitionWalk
from holdfast.pipeline.aside import DUPLICATE, LATE, LATE_FOR
from holdfast.pipeline.definition.model import Dedupe, PipelineDefinition
from holdfast.pipeline.definition.streams import DUPLICATES, streams
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.sinks.base import SinkReader


@dataclass(frozen=True)
class SideStream:
    """What a sink takes, in the words of the home's record."""

    route: str
    step: str


def side_stream(definition: PipelineDefinition, takes: str) -> SideStream | None:
    """The rows a step set aside that a sink takes; nothing when it takes others."""
    stream = streams(definition).get(takes)
    if stream is None or not stream.kind:
        return None
    step = next(each for each in definition.steps if each.name == stream.step)
    if not isinstance(step, Dedupe):
        return SideStream(LATE_FOR, step.name)
    return SideStream(DUPLICATE if stream.kind == DUPLICATES else LATE, step.name)


def check_side(
    sink: Holding, expected: Holding, parts: Sequence[PartitionWalk], starts: Mapping[Place, int]
) -> list[Finding]:
    """The sink has the rows that were set aside, and no others."""
    found: list[Finding] = []
    for part in parts:
        have, wanted = sink.counts[part.place], expected.counts[part.place]
        known = part.codes == RECORD
        known[: max(0, starts.get(part.place, part.start) - part.start)] = False
        for fate, mask, detail in (
            (Fate.LOST, known & (have < wanted), "set aside by the step, and not here"),
            (Fate.DUPLICATED, known & (wanted > 0) & (have > wanted), "more than once"),
            (Fate.EXTRA, (have > 0) & (wanted == 0), "not among the rows that the step set aside"),
        ):
            if mask.any():
                offsets = np.flatnonzero(mask).astype(np.int64) + part.start
                found.append(finding(fate, sink.name, part.place, offsets, detail))
    return found


def check_turns(reader: SinkReader, entries: Sequence[Entry]) -> Examined:
    """The rows of a step's own making are as many in every turn as the ledger says, each once."""
    step = reader.takes
    numbers: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
    strangers = 0
    for batch in reader.rows(SinkScope({})):
        if batch.topic != step:
            strangers += len(batch)
            continue
        numbers.append((batch.offsets << 32) | batch.indexes.astype(np.int64))
    found: list[Finding] = []
    if strangers:
        detail = f"rows that step {step!r} did not make"
        found.append(Finding(Fate.EXTRA, reader.name, count=strangers, detail=detail))
    rows = np.sort(np.concatenate(numbers)) if numbers else np.empty(0, np.int64)
    repeated = rows[1:][rows[1:] == rows[:-1]]
    if len(repeated):
        turns = ranges_text(as_ranges(np.unique(repeated >> 32)))
        found.append(
            Finding(Fate.DUPLICATED, reader.name, count=len(repeated), detail=f"rows of turn {turns} twice")
        )
    found.extend(_by_turn(reader, entries, rows >> 32))
    unproven = Unproven(
        f"that the rows of {step!r} in {reader.name} are what the step had to make",
        "its code is not run again; their number in every batch agrees with the ledger",
    )
    return Examined(tuple(found), (unproven,))


def _by_turn(
    reader: SinkReader, entries: Sequence[Entry], turns: np.ndarray[tuple[int], np.dtype[np.int64]]
) -> list[Finding]:
    said: dict[int, int] = {}
    for entry in entries:
        if entry.range and entry.state is not None:
            said[entry.state] = said.get(entry.state, 0) + entry.rows
    is_complete = bool(entries) and entries[0].number == 0
    newest = max(said, default=-1)
    held = dict(zip(*(each.tolist() for each in np.unique(turns, return_counts=True)), strict=True))
    found: list[Finding] = []
    for turn in sorted(said.keys() | held.keys()):
        if turn not in said and (not is_complete or (turn > newest and not reader.is_exact)):
            continue  # its entry is not kept, or it is younger than the ledger we read
        wanted, have = said.get(turn, 0), held.get(turn, 0)
        if wanted == have:
            continue
        fate = Fate.EXTRA if turn not in said else Fate.LOST if have < wanted else Fate.DUPLICATED
        found.append(
            Finding(
                fate,
                reader.name,
                count=abs(wanted - have),
                detail=f"turn {turn} of {reader.takes!r} gave {wanted} rows by the ledger, and {have} are there",
            )
        )
    return found
