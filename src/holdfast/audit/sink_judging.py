"""The sinks of a pipeline judged: against the log, against the routes out of the steps, and by their ledgers.

What is wrong is told once, and of whom it is true: a record that the ledgers count among the dead letters and that is
nowhere is the dead letters' loss and not a sink's; a row that a topic may have dropped is nobody's; a batch about which
something was found already is not found wrong again by its count.

Whether the records that left because they could not be decoded cannot be, and all others can.

Decoding is a function of the record's bytes and the definition, so the auditor decodes for itself while it walks the
log: what stands among the dead letters as `parse` must fail, and what does not stand there must not. Only batches that
the definition of today has made are judged; another one may have decoded otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.audit import ledgers
from holdfast.audit.compare import CODE, Holding, Judgement, fates_of, judge, judge_routes, marked, strays
from holdfast.audit.content import made_by
from holdfast.audit.coverage import LINEAGE
from holdfast.audit.decoding import Decode
from holdfast.audit.ledgers import (
    ROUTE_NAMES,
    Books,
    check_intake,
    check_routes,
    check_rows,
    missing_from_routes,
)
from holdfast.audit.left import Left, check_side, check_turns, hides_rows, side_stream
from holdfast.audit.lineage import LineageBatch
from holdfast.audit.model import ColumnCoverage, Examined, Fate, Finding, Said, gap
from holdfast.audit.scope import PipelineScope
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.source import LogEnds, PartitionWalk, SourceWalk
from holdfast.pipeline.aside import LATE_FOR
from holdfast.pipeline.definition.model import Join, Keyed, PipelineDefinition, Step, Window
from holdfast.pipeline.definition.naming import DEAD_LETTER_NAME
from holdfast.pipeline.definition.streams import merged
from holdfast.pipeline.ledger import Entry
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.stateful import StatefulResult

Mask = npt.NDArray[np.bool_]


class DecodingWatch:
    """Looks on while the source is walked (an `Observer`)."""

    def __init__(self, spans: Mapping[Place, tuple[int, int]], batches: Iterable[Entry], mark: str) -> None:
        self._spans = spans
        self._judged = made_by({mark}, batches, spans)
        self._failed = {place: np.zeros_like(judged) for place, judged in self._judged.items()}

    def take(self, place: Place, batch: pa.RecordBatch, decoded: Decode) -> None:
        at = batch.column("offset").to_numpy() - self._spans[place][0]
        if not self._judged[place][at].any():
            return
        errors = decoded().errors
        if errors.null_count < len(errors):
            self._failed[place][at[errors.is_valid().to_numpy(zero_copy_only=False)]] = True

    def examine(
        self, dead: Holding, unparsed: Holding, others: Sequence[Holding], parts: Iterable[PartitionWalk]
    ) -> Iterator[Finding]:
        """`unparsed` are the dead letters that say they could not be decoded; `others` everything that has rows."""
        for part in parts:
            judged = self._judged[part.place] & part.records
            failed, sent = self._failed[part.place], unparsed.counts[part.place] > 0
            elsewhere = np.zeros_like(failed)
            for holding in others:
                elsewhere |= holding.counts[part.place] > 0
            can_be = "there because they could not be decoded, and they can be"
            yield from marked(Fate.ALTERED, dead.name, part, judged & sent & ~failed, can_be)
            stayed = "they cannot be decoded, and did not leave for that"
            yield from marked(Fate.ALTERED, "", part, judged & failed & ~sent & elsewhere, stayed)


# ---------------------------------------------------------------------------- sink judging


Fates = npt.NDArray[np.uint8]


@dataclass
class SinkRows:
    """The rows of sinks, each read once."""

    spans: Mapping[Place, tuple[int, int]]
    numbers_rows: bool
    """A step makes several rows of a record."""
    holdings: dict[str, Holding] = field(default_factory=dict)
    turns: Mapping[str, int] = field(default_factory=dict)
    """By sink, the newest turn that an earlier audit has proven: rows that steps made are read behind it."""

    def of(self, reader: SinkReader) -> Holding:
        if reader.name not in self.holdings:
            is_main = reader.kind != "dead_letter"
            holding = Holding(reader.name, self.spans, numbers_rows=self.numbers_rows and is_main)
            turn = self.turns.get(reader.name)
            rows = _behind(reader.rows(SinkScope(self.spans, turn)), reader.takes, turn)
            if self.numbers_rows and not is_main:  # a topic's do not say which row they are: nobody's count
                rows = (replace(each, indexes=np.zeros_like(each.indexes)) for each in rows)
            holding.add(rows)
            for each in reader.erased:
                holding.add_erased(_behind(each.places, reader.takes, turn))
            self.holdings[reader.name] = holding
        return self.holdings[reader.name]

    def inside(self, reader: SinkReader, windows: Mapping[str, int]) -> int:
        """Rows of the scope; `windows` are those of sinks that were judged as such."""
        if reader.name in windows:
            return windows[reader.name]
        holding = self.of(reader)
        counted = sum(int(counts.sum(dtype=np.int64)) for counts in holding.counts.values())
        counted -= sum(int(counts.sum(dtype=np.int64)) for counts in holding.erased.values())
        made = [
            each for (topic, _), parts in holding.unknown.items() if topic == reader.takes for each in parts
        ]
        return counted or max(0, sum(map(len, made)) - holding.rows_erased)


def _behind(batches: Iterable[LineageBatch], step: str, turn: int | None) -> Iterator[LineageBatch]:
    """Without the rows that a step made up to this turn."""
    for batch in batches:
        if turn is None or not step or batch.topic != step:
            yield batch
        else:
            chosen = batch.offsets > turn
            yield replace(batch, offsets=batch.offsets[chosen], indexes=batch.indexes[chosen])


def is_upsert(definition: PipelineDefinition, name: str) -> bool:
    """Whether a sink keeps one row for each key."""
    sink = next((each for each in definition.sinks if each.name == name), None)
    return merged(sink) is not None


def main_sinks(definition: PipelineDefinition, readers: Mapping[str, SinkReader]) -> dict[str, SinkReader]:
    """Those that keep every row of the end of the steps."""
    return {
        name: reader
        for name, reader in readers.items()
        if reader.kind != "dead_letter" and not reader.takes and not is_upsert(definition, name)
    }


@dataclass
class SinkJudge:
    """Everything that was read, and what follows from it."""

    definition: PipelineDefinition
    scope: PipelineScope
    logs: Mapping[Place, LogEnds]
    readers: Mapping[str, SinkReader]
    """Those that have a ledger."""
    entries: Mapping[str, Sequence[Entry]]
    left: Left
    rows: SinkRows
    walked: SourceWalk
    examined: Examined = field(init=False, default_factory=Examined)
    judgements: dict[str, list[Judgement]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.routes = self.left.routes
        self.parts = list(self.walked.partitions.values())
        self.batches = ledgers.cover(self.entries, self.scope.spans)
        """Entries that say what became of the scope, each offset in one."""
        self.mains = main_sinks(self.definition, self.readers)

    def judge(self) -> Examined:
        self._settle_unrecorded()
        self.examined += Examined.of(self._judge()) + Examined.of(self._sides())
        self._ledgers()
        return self.examined

    def _judge(self) -> Iterator[Said]:
        self.judgements[""] = [judge_routes(list(self.routes.values()), part) for part in self.parts]
        for name, reader in self.mains.items():
            holding = self.rows.of(reader)
            starts = self.scope.sink_starts.get(name, {})
            routes = list(self.left.own.get(name, self.left).routes.values())
            self.judgements[name] = [
                judge(holding, routes, part, since=starts.get(part.place, part.start)) for part in self.parts
            ]
            yield from self._excuse(reader, self.judgements[name])
        yield from self._blame_routes()
        yield from self._one_row_a_key()
        for judgements in self.judgements.values():
            for each in judgements:
                yield from each.findings
        for reader in self.readers.values():
            if not reader.takes:
                yield from self._strays(reader)

    def _one_row_a_key(self) -> Iterator[Finding]:
        """Tables with one row for each key lack rows by design: `stateful` tells which. The others are judged."""
        for name, reader in self.readers.items():
            if not reader.takes and is_upsert(self.definition, name):
                for part in self.parts:
                    judged = judge(self.rows.of(reader), list(self.routes.values()), part)
                    yield from (each for each in judged.findings if each.fate is not Fate.LOST)

    def _blame_routes(self) -> Iterator[Finding]:
        """Records in no sink that had left by a route, as far as the ledgers tell: the route has lost them."""
        mains = [name for name in self.mains if any(each.lost.any() for each in self.judgements[name])]
        if not mains or len(mains) != len(self.mains):
            return
        lost = {
            part.place: np.logical_and.reduce([self.judgements[name][number].lost for name in mains])
            for number, part in enumerate(self.parts)
        }
        books = Books(self.walked, self.routes, {}, {})
        blamed = missing_from_routes(self.batches, books, lost, self._known())
        for fate, masks in blamed.items():
            for number, part in enumerate(self.parts):
                mask = masks[part.place]
                if not mask.any():
                    continue
                for name in mains:
                    self.judgements[name][number].blame_other(mask, name, part)
                what = f"the ledgers count them as {ROUTE_NAMES[fate]}, and they are nowhere"
                yield from marked(Fate.LOST, self.routes[fate].name, part, mask, what)

    @property
    def has_forgotten_dead_letters(self) -> bool:
        dead = self.readers.get(DEAD_LETTER_NAME)
        return dead is None or bool(_gone(dead))

    def _known(self) -> list[Fate]:
        """The routes that could be read whole."""
        known = [] if self.has_forgotten_dead_letters else [Fate.DEAD_LETTER]
        if not self.left.unrecorded:
            known += [fate for fate in self.routes if fate is not Fate.DEAD_LETTER]
        return known

    def _excuse(self, reader: SinkReader, judgements: list[Judgement]) -> Iterator[Said]:
        """Where a topic has dropped, compacted or not decided as many rows as are missing, they may be among those."""
        missing = sum(int(each.lost.sum()) for each in judgements)
        both = [reader, *(each for name, each in self.readers.items() if name == DEAD_LETTER_NAME)]
        gone = {each.name: count for each in both if (count := _gone(each))}
        undecided = {each.name: count for each in both if (count := _undecided(each))}
        if not 0 < missing <= sum(gone.values()) + sum(undecided.values()):
            return
        for each in judgements:
            each.excuse()
        whys = [
            f"{name} has lost {count:,} offsets to retention or compaction" for name, count in gone.items()
        ]
        whys += [
            f"{name} holds {count:,} offsets behind a transaction that is still open"
            for name, count in undecided.items()
        ]
        yield gap(f"whether {missing:,} records were in {reader.name!r}", " and ".join(whys))

    def _sides(self) -> Iterator[Said]:
        """Sinks of streams beside the chain; windows belong to the stateful steps."""
        steps = {step.name: step for step in self.definition.steps}
        for name, reader in self.readers.items():
            side = side_stream(self.definition, reader.takes)
            if side is not None and not self.left.unrecorded and not is_upsert(self.definition, name):
                holding = self.rows.of(reader)
                starts = self.scope.sink_starts.get(name, {})
                expected = self.left.of(side.route, side.step)
                yield from check_side(holding, expected, self.parts, starts)
                yield from self._strays(reader)
            elif self._is_counted(steps.get(reader.takes), name) and not is_upsert(self.definition, name):
                yield from check_turns(reader, self.entries[name], self.rows.turns.get(name))

    def _is_counted(self, step: Step | None, name: str) -> bool:
        """Whether rows that a step made can only be counted."""
        sink = next((each for each in self.definition.sinks if each.name == name), None)
        return isinstance(step, Keyed | Join) or (
            isinstance(step, Window) and sink is not None and hides_rows(sink)
        )

    def lineage(self) -> Iterator[ColumnCoverage]:
        """Places that were held against the log; of rows that a step made, and of upserts, their own checks speak."""
        taps = {step.name for step in self.definition.steps if isinstance(step, Window | Keyed | Join)}
        for name, reader in self.readers.items():
            if reader.takes not in taps and not is_upsert(self.definition, name):
                yield ColumnCoverage(name, LINEAGE, recomputed=self.rows.inside(reader, {}))

    def _strays(self, reader: SinkReader) -> list[Finding]:
        positions = {place: at.offset for place, at in reader.positions().at.items()}
        # What the ledgers name beyond the log's end was produced: the log was cut since.
        ends = {place: max(self.logs[place].end, positions.get(place, 0)) for place in self.scope.spans}
        unread = {(place.topic, place.partition) for place in positions if place not in ends}
        return strays(self.rows.of(reader), positions, ends, is_exact=reader.is_exact, unread=unread)

    def _settle_unrecorded(self) -> None:
        """Records in no sink, of batches whose record of what left is not there: taken for it where the number fits."""
        self._settle(self.left, list(self.mains.values()))
        for name, own in self.left.own.items():
            self._settle(own, [self.readers[name]])

    def _settle(self, left: Left, mains: Sequence[SinkReader]) -> None:
        holdings = [self.rows.of(reader) for reader in mains]
        for entry in left.unrecorded if mains else ():
            if not ledgers.is_whole(entry, self.scope.spans):
                continue
            nowhere = {
                place: _nowhere(place, span.start, span.end, [*holdings, *left.routes.values()], self.walked)
                for place, span in entry.range.spans.items()
            }
            expected = entry.routes.total - entry.routes.main - sum(entry.routes.dead_letter.values())
            if sum(map(len, nowhere.values())) == expected:
                for place, offsets in nowhere.items():
                    start = self.scope.spans[place][0]
                    left.routes[Fate.FILTERED].counts[place][offsets - start] += 1

    def doubtful(self) -> dict[Place, npt.NDArray[np.bool_]]:
        """The offsets about which something was found, or cannot be."""
        found = {part.place: np.zeros(len(part.codes), np.bool_) for part in self.parts}
        for judgements in self.judgements.values():
            for part, each in zip(self.parts, judgements, strict=True):
                found[part.place] |= each.lost | each.twice
                if each.unknown is not None:
                    found[part.place] |= each.unknown
        return found

    def _ledgers(self) -> None:
        mains = {name: self.rows.of(reader) for name, reader in self.mains.items()}
        books = Books(self.walked, self.routes, mains, self.doubtful())
        self.examined += check_intake(self.batches, books)
        books.mains = {name: each for name, each in mains.items() if not _gone(self.readers[name])}
        self.examined += check_routes(self.batches, books, self._known())
        for name in books.mains:
            self.examined += check_rows(name, self.entries[name], books)

    def decodings(self, watch: DecodingWatch) -> Examined:
        """Whether what could not be decoded is where it belongs."""
        if self.left.unparsed is None:
            return Examined()
        routes = [holding for fate, holding in self.routes.items() if fate is not Fate.DEAD_LETTER]
        others = [*routes, *(self.rows.of(reader) for reader in self.mains.values())]
        dead = self.routes[Fate.DEAD_LETTER]
        return Examined.of(watch.examine(dead, self.left.unparsed, others, self.parts))

    # -------------------------------------------------------------------- what became of every record

    def fates(self, result: StatefulResult | None) -> dict[Place, Fates]:
        """One for each record; windows and tables of keys say more where no sink has every row."""
        mains = [self.rows.of(reader) for reader in self.mains.values()]
        taken = {reader.takes for reader in self.readers.values()}
        windows = [
            step.name for step in self.definition.steps if isinstance(step, Window) and step.name in taken
        ]
        main = Fate.OUTPUT if mains or not windows else Fate.AGGREGATED
        late = [] if mains else [self.left.of(LATE_FOR, step) for step in windows]
        found: dict[Place, Fates] = {}
        for number, part in enumerate(self.parts):
            judged = [judgements[number] for judgements in self.judgements.values()]
            fates = fates_of(part, self.routes, mains, main, judged)
            found[part.place] = fates
            if mains:
                _mark_erased(fates, part, mains)
                continue
            for each in late:
                offsets = np.flatnonzero(each.counts[part.place]).astype(np.int64) + part.start
                _mark(fates, part.start, offsets, Fate.LATE, main)
            if result is not None:
                _mark(fates, part.start, result.waiting.get(part.place), Fate.PENDING, main)
                for superseded in result.superseded.values():
                    _mark(fates, part.start, superseded.get(part.place), Fate.SUPERSEDED, main)
        return found


def _undecided(reader: SinkReader) -> int:
    """Offsets at a topic's ends that nobody can read yet; other sinks have none."""
    return int(getattr(reader, "undecided_offsets", 0))


def _gone(reader: SinkReader) -> int:
    """Offsets that a topic has dropped or compacted away; other sinks forget nothing."""
    return int(getattr(reader, "gone_offsets", 0))


def _mark(fates: npt.NDArray[np.uint8], start: int, offsets: Any, fate: Fate, instead_of: Fate) -> None:
    if offsets is None or not len(offsets):
        return
    at = offsets - start
    at = at[(at >= 0) & (at < len(fates))]
    at = at[fates[at] == CODE[instead_of]]
    fates[at] = CODE[fate]


def _mark_erased(fates: npt.NDArray[np.uint8], part: PartitionWalk, mains: Sequence[Holding]) -> None:
    """Records of which no sink has a row any more, and some had one that was erased."""
    gone = np.zeros(len(fates), np.bool_)
    left = np.zeros(len(fates), np.bool_)
    for holding in mains:
        erased = holding.erased.get(part.place)
        there = holding.counts[part.place]
        gone |= False if erased is None else erased > 0
        left |= there > (0 if erased is None else erased)
    _mark(fates, part.start, np.flatnonzero(gone & ~left) + part.start, Fate.ERASED, Fate.OUTPUT)


def _nowhere(
    place: Place, start: int, end: int, holdings: Sequence[Holding], walked: SourceWalk
) -> npt.NDArray[np.int64]:
    """Records between two offsets that none of these has."""
    part = walked.partitions[place]
    chosen = slice(start - part.start, end - part.start)
    missing = part.records[chosen]
    for holding in holdings:
        missing = missing & (holding.counts[place][chosen] == 0)
    return np.flatnonzero(missing).astype(np.int64) + start
