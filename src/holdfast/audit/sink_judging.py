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

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
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
from holdfast.pipeline.definition.model import Join, Keyed, PipelineDefinition, Window
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
        self, dead: Holding, unparsed: Holding, others: Books, parts: Iterable[PartitionWalk]
    ) -> Iterator[Finding]:
        """`unparsed` are the dead letters that say they could not be decoded; `others` everything that has rows."""
        for part in parts:
            judged = self._judged[part.place] & part.records
            failed, sent = self._failed[part.place], unparsed.counts[part.place] > 0
            can_be = "there because they could not be decoded, and they can be"
            yield from marked(Fate.ALTERED, dead.name, part, judged & sent & ~failed, can_be)
            stayed = judged & failed & ~sent & others.held(part.place)
            yield from marked(
                Fate.ALTERED, "", part, stayed, "they cannot be decoded, and did not leave for that"
            )


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
            is_letters = reader.kind == "dead_letter"
            holding = Holding(reader.name, self.spans, numbers_rows=self.numbers_rows and not is_letters)
            turn = self.turns.get(reader.name)
            rows = _behind(reader.rows(SinkScope(self.spans, turn)), reader.takes, turn)
            if self.numbers_rows and is_letters:  # a topic's do not say which row they are: nobody's count
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
        counted = total(holding.counts) - total(holding.erased)
        made = sum(
            len(each)
            for (topic, _), parts in holding.unknown.items()
            for each in parts
            if topic == reader.takes
        )
        return counted or max(0, made - holding.rows_erased)


def _behind(batches: Iterable[LineageBatch], step: str, turn: int | None) -> Iterator[LineageBatch]:
    """Without the rows that a step made up to this turn."""
    for batch in batches:
        if turn is None or not step or batch.topic != step:
            yield batch
        else:
            chosen = batch.offsets > turn
            yield replace(batch, offsets=batch.offsets[chosen], indexes=batch.indexes[chosen])


def upserts(definition: PipelineDefinition) -> set[str]:
    """The sinks that keep one row for each key."""
    return {sink.name for sink in definition.sinks if merged(sink) is not None}


def main_sinks(definition: PipelineDefinition, readers: Mapping[str, SinkReader]) -> dict[str, SinkReader]:
    """Those that keep every row of the end of the steps."""
    apart = {DEAD_LETTER_NAME, *upserts(definition)}
    return {name: each for name, each in readers.items() if not each.takes and name not in apart}


@dataclass
class SinkJudge:
    """Everything that was read, and what follows from it."""

    definition: PipelineDefinition
    scope: PipelineScope
    logs: Mapping[Place, LogEnds]
    readers: Mapping[str, SinkReader]
    """Those that have a ledger."""
    batches: list[Entry]
    """Entries that say what became of the scope, each offset in one."""
    left: Left
    rows: SinkRows
    walked: SourceWalk
    judgements: dict[str, list[Judgement]] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.routes = self.left.routes
        self.parts = list(self.walked.partitions.values())
        self.mains = main_sinks(self.definition, self.readers)
        self.upserts = upserts(self.definition)

    def judge(self) -> Examined:
        self._settle(self.left, self.mains.values())
        for name, own in self.left.own.items():
            self._settle(own, [self.readers[name]])
        return Examined.of((*self._judge(), *self._sides())) + self._ledgers()

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
        tables = [each for name, each in self.readers.items() if name in self.upserts and not each.takes]
        for reader, part in product(tables, self.parts):
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
        return dead is None or bool(dead.gone_offsets)

    def _known(self) -> list[Fate]:
        """The routes that could be read whole."""
        known = [] if self.has_forgotten_dead_letters else [Fate.DEAD_LETTER]
        if not self.left.unrecorded:
            known += [fate for fate in self.routes if fate is not Fate.DEAD_LETTER]
        return known

    def _excuse(self, reader: SinkReader, judgements: list[Judgement]) -> Iterator[Said]:
        """Where a topic has dropped, compacted or not decided as many rows as are missing, they may be among those."""
        missing = sum(int(each.lost.sum()) for each in judgements)
        dead = self.readers.get(DEAD_LETTER_NAME)
        both = [reader, *([] if dead is None else [dead])]
        if not 0 < missing <= sum(each.gone_offsets + each.undecided_offsets for each in both):
            return
        whys = [
            f"{each.name} has lost {each.gone_offsets:,} offsets to retention or compaction"
            for each in both
            if each.gone_offsets
        ]
        whys += [
            f"{each.name} holds {each.undecided_offsets:,} offsets behind a transaction that is still open"
            for each in both
            if each.undecided_offsets
        ]
        for judgement in judgements:
            judgement.excuse()
        yield gap(f"whether {missing:,} records were in {reader.name!r}", " and ".join(whys))

    def _sides(self) -> Iterator[Said]:
        """Sinks of streams beside the chain; windows belong to the stateful steps."""
        for name, reader in self.readers.items():
            side = side_stream(self.definition, reader.takes)
            if name in self.upserts:
                continue
            if side is not None and not self.left.unrecorded:
                starts = self.scope.sink_starts.get(name, {})
                expected = self.left.of(side.route, side.step)
                yield from check_side(self.rows.of(reader), expected, self.parts, starts)
                yield from self._strays(reader)
            elif self._is_counted(reader):
                yield from check_turns(reader, reader.entries(), self.rows.turns.get(name))

    def _is_counted(self, reader: SinkReader) -> bool:
        """Whether rows that a step made can only be counted."""
        step = next((each for each in self.definition.steps if each.name == reader.takes), None)
        hidden = {sink.name for sink in self.definition.sinks if hides_rows(sink)}
        return isinstance(step, Keyed | Join) or (isinstance(step, Window) and reader.name in hidden)

    def lineage(self) -> Iterator[ColumnCoverage]:
        """Places that were held against the log; of rows that a step made, and of upserts, their own checks speak."""
        taps = {step.name for step in self.definition.steps if isinstance(step, Window | Keyed | Join)}
        for name, reader in self.readers.items():
            if reader.takes not in taps and name not in self.upserts:
                yield ColumnCoverage(name, LINEAGE, recomputed=self.rows.inside(reader, {}))

    def _strays(self, reader: SinkReader) -> list[Finding]:
        positions = {place: at.offset for place, at in reader.positions().at.items()}
        # What the ledgers name beyond the log's end was produced: the log was cut since.
        ends = {place: max(self.logs[place].end, positions.get(place, 0)) for place in self.scope.spans}
        unread = {(place.topic, place.partition) for place in positions if place not in ends}
        return strays(self.rows.of(reader), positions, ends, is_exact=reader.is_exact, unread=unread)

    def _held_by(self, readers: Iterable[SinkReader]) -> dict[str, Holding]:
        return {reader.name: self.rows.of(reader) for reader in readers}

    def _settle(self, left: Left, mains: Collection[SinkReader]) -> None:
        """Records in no sink, of batches whose record of what left is not there: taken for it where the number fits."""
        books = Books(self.walked, left.routes, self._held_by(mains), {})
        for entry in left.unrecorded if mains else ():
            if not ledgers.is_whole(entry, self.scope.spans):
                continue
            nowhere: dict[Place, npt.NDArray[np.int64]] = {}
            for place, span in entry.range.spans.items():
                part = self.walked.partitions[place]
                chosen = slice(span.start - part.start, span.end - part.start)
                missing = part.records[chosen] & ~books.held(place, chosen)
                nowhere[place] = np.flatnonzero(missing) + chosen.start
            expected = entry.routes.total - entry.routes.main - sum(entry.routes.dead_letter.values())
            if sum(map(len, nowhere.values())) == expected:
                for place, at in nowhere.items():
                    left.routes[Fate.FILTERED].counts[place][at] += 1

    def doubtful(self) -> dict[Place, npt.NDArray[np.bool_]]:
        """The offsets about which something was found, or cannot be."""
        found = {part.place: np.zeros(len(part.codes), np.bool_) for part in self.parts}
        for judgements in self.judgements.values():
            for part, each in zip(self.parts, judgements, strict=True):
                found[part.place] |= (
                    each.lost | each.twice | (False if each.unknown is None else each.unknown)
                )
        return found

    def _ledgers(self) -> Examined:
        mains = self._held_by(self.mains.values())
        books = Books(self.walked, self.routes, mains, self.doubtful())
        found = check_intake(self.batches, books)
        books.mains = {name: each for name, each in mains.items() if not self.readers[name].gone_offsets}
        found += check_routes(self.batches, books, self._known())
        for name in books.mains:
            found += check_rows(name, self.readers[name].entries(), books)
        return found

    def decodings(self, watch: DecodingWatch) -> Examined:
        """Whether what could not be decoded is where it belongs."""
        if self.left.unparsed is None:
            return Examined()
        dead = self.routes[Fate.DEAD_LETTER]
        routes = {fate: each for fate, each in self.routes.items() if each is not dead}
        others = Books(self.walked, routes, self._held_by(self.mains.values()), {})
        return Examined.of(watch.examine(dead, self.left.unparsed, others, self.parts))

    # -------------------------------------------------------------------- what became of every record

    def fates(self, result: StatefulResult | None) -> dict[Place, Fates]:
        """One for each record; windows and tables of keys say more where no sink has every row."""
        mains = list(self._held_by(self.mains.values()).values())
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


def total(counts: Mapping[Place, npt.NDArray[np.uint16]]) -> int:
    """Of all partitions."""
    return sum(int(each.sum(dtype=np.int64)) for each in counts.values())


def _mark(fates: npt.NDArray[np.uint8], start: int, offsets: Any, fate: Fate, instead_of: Fate) -> None:
    if offsets is None or not len(offsets):
        return
    at = offsets - start
    at = at[(at >= 0) & (at < len(fates))]
    at = at[fates[at] == CODE[instead_of]]
    fates[at] = CODE[fate]


def _mark_erased(fates: npt.NDArray[np.uint8], part: PartitionWalk, mains: Sequence[Holding]) -> None:
    """Records of which no sink has a row any more, and some had one that was erased."""
    nothing = np.zeros(len(fates), np.uint16)
    erased = [(each.counts[part.place], each.erased.get(part.place, nothing)) for each in mains]
    gone = np.logical_or.reduce([taken > 0 for _, taken in erased])
    left = np.logical_or.reduce([there > taken for there, taken in erased])
    _mark(fates, part.start, np.flatnonzero(gone & ~left) + part.start, Fate.ERASED, Fate.OUTPUT)
