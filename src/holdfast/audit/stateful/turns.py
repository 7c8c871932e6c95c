"""The batches a sink took, from its ledger, and the watermark before and after each, recomputed from the log.

A ledger names the range of every batch and the time that stood for "now" in it; the log says what was in the range.
From both follows the pipeline's watermark where each batch began: the least, over the partitions that were known, of
the greatest event less the delay; partitions that were idle left out; never going back. The ledger has it too, and the
two must be equal.

A chain of batches is *whole* when it starts where the sink first knew each partition and goes on without a gap up to
the audit's end. Without a whole chain, a source whose partitions never idle needs none: what is late and what is closed
then depends on the log alone, and everything up to the end is treated as one batch.

Which rows are late for which step: by their event time, the step's own measure and the watermark they met.

    window    the last window it belongs to (and the time to correct it) is over; so is one without an event
    dedupe    event + within is over; a row without a key goes on whenever it comes
    keyed     event + ttl is over
    join      event + within is over, of rows that are on one of its sides

Over: at or before the row's watermark. What a pipeline has recorded as late must be exactly these.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from holdfast.audit.model import Document
from holdfast.audit.stateful.rows import NOTHING, Clock, Flags, Numbers, Rows
from holdfast.pipeline.definition.model import Dedupe, Join, Keyed, Source, Window
from holdfast.pipeline.definition.units import parse_duration_ms
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

Spans = Mapping[Place, tuple[int, int]]
UNNUMBERED = -1
"""The number of a batch whose rows of taps nobody has: taken before the steps were stateful, or not by this sink."""


@dataclass(frozen=True)
class Turn:
    """One batch."""

    spans: Spans
    known: tuple[Place, ...]
    """The partitions the sink knew after it."""
    time_ms: int
    number: int
    """Of the version of the state it made: the `offset` in the lineage of taps' rows."""
    told_ms: int | None = None
    """The watermark where it began, as the ledger has it."""
    rows: int | None = None
    """That the sink wrote for it."""
    mark: str = ""
    """The fingerprint of the definition that made it."""


@dataclass(frozen=True)
class ChainEnd(Document):
    """Where an audit left a chain of batches, for the next to go on from."""

    number: int
    """Of the newest entry."""
    watermark: int = NOTHING
    greatest: Mapping[Place, int] = field(default_factory=dict)
    active: Mapping[Place, int] = field(default_factory=dict)
    """When each partition last had records."""


@dataclass(frozen=True)
class Chain:
    """Batches in their order, up to the audit's end. Where an earlier audit has left it, the first stands for all that
    came before."""

    turns: tuple[Turn, ...]
    is_whole: bool
    beyond: int | None = None
    """The lowest number of a batch past the audit's end."""
    starts: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    """The watermark where each batch began; `NOTHING` before the first."""
    ends: Numbers = field(default_factory=lambda: np.zeros(0, np.int64))
    before: ChainEnd | None = None
    end: ChainEnd = ChainEnd(-1)

    @property
    def watermark(self) -> int:
        """Where the last one ended."""
        return int(self.ends[-1]) if len(self.ends) else NOTHING

    def turns_of(self, rows: Rows) -> Numbers:
        """The number, within the chain, of the batch that took each row."""
        found = np.zeros(len(rows), np.int64)
        for number, place in enumerate(rows.places):
            cuts = [(turn.spans[place][1], at) for at, turn in enumerate(self.turns) if place in turn.spans]
            if cuts:
                ends, turns = (np.array(each, np.int64) for each in zip(*cuts, strict=True))
                part = rows.slice_of(number)
                at = np.searchsorted(ends, rows.offsets[part], side="right")
                found[part] = turns[np.minimum(at, len(turns) - 1)]
        return found

    def made_by(self, marks: Collection[str]) -> Numbers:
        """Where in the chain the batches stand that definitions with these fingerprints have made."""
        return np.array([at for at, turn in enumerate(self.turns) if turn.mark in marks], np.int64)

    @property
    def numbers(self) -> Numbers:
        """Of the batches, in their order."""
        return np.array([turn.number for turn in self.turns], np.int64)

    def differing(self) -> list[tuple[Turn, int]]:
        """The batches whose ledger has another watermark, and what it should be."""
        pairs = zip(self.turns, self.starts.tolist(), strict=True)
        told = ((turn, start, NOTHING if turn.told_ms is None else turn.told_ms) for turn, start in pairs)
        return [(turn, start) for turn, start, has in told if turn.number != UNNUMBERED and has != start]


def chain_of(entries: Sequence[Entry], scope: Spans, before: ChainEnd | None = None) -> Chain:
    """The batches of a ledger that lie within the scope; `before`: behind those that an earlier audit has seen."""
    at: dict[Place, int] = {}
    turns: list[Turn] = []
    last = -1
    if before is not None:
        last = before.number
        entries = [entry for entry in entries if entry.number > last]
        seen = {place: (0, start) for place, (start, _) in scope.items()}
        turns.append(Turn(seen, tuple(sorted(scope)), 0, UNNUMBERED))
    numbers = [entry.number for entry in entries]
    is_whole = numbers == list(range(last + 1, last + 1 + len(numbers))) and last + len(numbers) >= 0
    beyond = None
    for entry in entries:
        for place, span in entry.range.spans.items():
            is_first = at.setdefault(place, span.start) == span.start
            begin = scope[place][0] if place in scope else -1
            is_after = before is not None and span.start > begin
            if place not in scope or (is_first and (span.start < begin or is_after)):
                is_whole = False
        spans = {place: (span.start, span.end) for place, span in entry.range.spans.items() if span.offsets}
        if any(place in scope and end > scope[place][1] for place, (_, end) in spans.items()):
            beyond = entry.state
            break
        last = entry.number
        if not spans:
            continue
        number = UNNUMBERED if entry.state is None else entry.state
        known = tuple(sorted(entry.positions.at))
        told = entry.watermark_ms, entry.rows, entry.fingerprint
        turns.append(Turn(spans, known, entry.batch_time_ms, number, *told))
    covered = {place: end for turn in turns for place, (_, end) in turn.spans.items()}
    is_whole = is_whole and all(covered.get(place, start) == end for place, (start, end) in scope.items())
    return Chain(tuple(turns), is_whole, beyond, before=before, end=ChainEnd(last))


def behind(main: Chain, own: Chain) -> Chain:
    """A sink that began later: what the others took before it is of batches it has no rows of."""
    first: dict[Place, int] = {}
    for turn in own.turns:
        for place, (start, _) in turn.spans.items():
            first.setdefault(place, start)
    before = [
        replace(turn, number=UNNUMBERED, rows=None)
        for turn in main.turns
        if all(end <= first.get(place, end) for place, (_, end) in turn.spans.items())
        and not (own.turns and turn.spans == own.turns[0].spans)
    ]
    return replace(own, turns=(*before, *own.turns))


def one_turn(scope: Spans) -> Chain:
    """Everything up to the end as one batch: for a source without idle partitions."""
    known = tuple(sorted(scope))
    return Chain((Turn({place: scope[place] for place in known}, known, 0, UNNUMBERED),), is_whole=False)


def with_watermarks(chain: Chain, rows: Rows, clock: Clock, source: Source) -> Chain:
    """The chain with the watermark before and after each batch, from the rows that were in it."""
    numbers = {place: number for number, place in enumerate(rows.places)}
    before = chain.before or ChainEnd(-1)
    greatest, active, now = dict(before.greatest), dict(before.active), before.watermark
    shown = _shown(chain, rows)
    starts, ends = [], []
    for at, turn in enumerate(chain.turns):
        if at == 0 and chain.before is not None:
            starts.append(NOTHING)
            ends.append(now)
            continue
        starts.append(now)
        for place in turn.spans:
            found = shown.get((at, numbers.get(place, -1)))
            if found is not None:
                greatest[place] = max(found, greatest.get(place, NOTHING))
                active[place] = turn.time_ms
        awake = [
            greatest.get(place, NOTHING)
            for place in turn.known
            if _reads(source, place) and clock.is_awake(active.get(place), turn.time_ms)
        ]
        if awake and min(awake) != NOTHING:
            now = max(now, min(awake) - clock.delay_ms)
        ends.append(now)
    end = ChainEnd(chain.end.number, now, greatest, active)
    return replace(chain, starts=np.array(starts, np.int64), ends=np.array(ends, np.int64), end=end)


def _shown(chain: Chain, rows: Rows) -> dict[tuple[int, int], int]:
    """By batch and place that had records in it: the greatest event up to its end."""
    found: dict[tuple[int, int], int] = {}
    for number, place in enumerate(rows.places):
        turns = [at for at, turn in enumerate(chain.turns) if place in turn.spans]
        spans = np.array([chain.turns[at].spans[place] for at in turns], np.int64).reshape(-1, 2)
        offsets = rows.offsets[rows.slice_of(number)]
        counts = np.searchsorted(offsets, spans[:, 1]) - np.searchsorted(offsets, spans[:, 0])
        events = rows.seen_by(number, spans[:, 1])
        for at, count, event in zip(turns, counts.tolist(), events.tolist(), strict=True):
            if count:
                found[at, number] = event
    return found


def _reads(source: Source, place: Place) -> bool:
    return place.topic in source.topics or (
        source.pattern is not None and re.fullmatch(source.pattern, place.topic) is not None
    )


def own_watermarks(rows: Rows, chain: Chain, turns: Numbers, clock: Clock) -> Numbers:
    """Of each row: what ends at or before it, the row is late for. `NOTHING`: it is late for nothing."""
    own = np.where(rows.seen == NOTHING, NOTHING, rows.seen - clock.delay_ms)
    if len(chain.starts) == 0:
        return own
    return np.maximum(own, chain.starts[turns])


# ---------------------------------------------------------------------------- lateness


@dataclass(frozen=True)
class Measure:
    """The windows of one step, in milliseconds."""

    kind: str
    size_ms: int
    """Session: the gap."""
    every_ms: int
    hold_ms: int
    """How long after its end a window may be corrected."""

    @classmethod
    def of(cls, step: Window) -> Measure:
        size = step.gap if step.kind == "session" else step.size
        assert size is not None
        size_ms = parse_duration_ms(size)
        every_ms = parse_duration_ms(step.every) if step.kind == "sliding" and step.every else size_ms
        hold_ms = parse_duration_ms(step.correct_within) if step.late == "correct" else 0
        return cls(step.kind, size_ms, every_ms, hold_ms)

    @property
    def wait_ms(self) -> int:
        """From a window's end until it closes: a session may be touched by a row of its gap."""
        return self.size_ms if self.kind == "session" else 0

    def last_starts(self, events: Numbers) -> Numbers:
        """Of the windows a row belongs to, the last one's start."""
        return events if self.kind == "session" else events - np.mod(events, self.every_ms)

    def first_starts(self, events: Numbers, watermarks: Numbers) -> Numbers:
        """The start of the first that the row belongs to and is not late for."""
        if self.kind != "sliding":
            return self.last_starts(events)
        holding = _at_or_after(events - (self.size_ms - 1), self.every_ms)
        far = np.iinfo(np.int64).min // 2
        over = np.maximum(watermarks, far) - (self.size_ms + self.hold_ms - 1)
        return np.maximum(holding, _at_or_after(over, self.every_ms))

    def is_late(self, events: Numbers, watermarks: Numbers) -> Flags:
        known = events != NOTHING
        ends = self.last_starts(np.where(known, events, 0)) + self.size_ms + self.hold_ms
        return np.asarray(~known | (ends <= watermarks), np.bool_)


def _at_or_after(times: Numbers, every_ms: int) -> Numbers:
    return times + np.mod(-times, every_ms)


def is_past(events: Numbers, watermarks: Numbers, reach_ms: int) -> Flags:
    """Rows whose event lies that far behind their watermark, and those without one."""
    known = events != NOTHING
    return np.asarray(~known | (np.where(known, events, 0) + reach_ms <= watermarks), np.bool_)


def reach_ms(step: Dedupe | Keyed | Join) -> int:
    return parse_duration_ms(step.ttl if isinstance(step, Keyed) else step.within)
