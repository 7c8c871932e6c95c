"""One look at all stateful steps, with what the walk over the log has brought.

Records that an earlier audit has handed on stand before the new ones and are judged with them, but counted no more; the
examination ends with what the next audit needs of both (`holdfast.audit.stateful.carried`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.audit.content import by_place
from holdfast.audit.decoding import Computing
from holdfast.audit.left import Left, hides_rows
from holdfast.audit.model import STEPS, ColumnCoverage, Examined, Fate, Finding, Said, gap
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.stateful.aggregates import columns_needed
from holdfast.audit.stateful.carried import Carried, CarriedRows
from holdfast.audit.stateful.dedupe import judge
from holdfast.audit.stateful.rows import (
    ID_COLUMN,
    NOTHING,
    Clock,
    Flags,
    KeySpace,
    Numbers,
    Rows,
    Times,
)
from holdfast.audit.stateful.turns import (
    UNNUMBERED,
    Chain,
    Measure,
    Spans,
    behind,
    chain_of,
    is_past,
    one_turn,
    own_watermarks,
    reach_ms,
    with_watermarks,
)
from holdfast.audit.stateful.upserts import DELETES, UpsertCheck, condition_flags, keys_of_tombstones, ranks
from holdfast.audit.stateful.window_check import Keys, Taken, WindowCheck, record_findings, time_text
from holdfast.pipeline.aside import DUPLICATE, LATE, LATE_FOR
from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.definition.model import (
    Dedupe,
    DeltaSink,
    Join,
    Keyed,
    PostgresSink,
    Python,
    SinkDefinition,
    Sql,
    Step,
    Window,
)
from holdfast.pipeline.definition.streams import DUPLICATES, merged
from holdfast.pipeline.positions import Place

if TYPE_CHECKING:
    from holdfast.audit.stateful.check import StatefulCheck


@dataclass(frozen=True)
class StatefulResult:
    """What became of records by stateful steps, and what is wrong."""

    examined: Examined = field(default_factory=Examined)
    waiting: Mapping[Place, Numbers] = field(default_factory=dict)
    """Records in a window that is not closed yet."""
    superseded: Mapping[str, Mapping[Place, Numbers]] = field(default_factory=dict)
    """By sink that keeps one row for each key: records whose key has a newer row, or was deleted."""
    carried: Carried = field(default_factory=Carried)
    """For the next audit."""


class Examination:
    """One look at all steps, with what the walk has brought."""

    def __init__(
        self,
        check: StatefulCheck,
        rows: Rows,
        scope: Spans,
        left: Left,
        readers: Sequence[SinkReader],
        ends: Mapping[Place, int],
        computing: Computing | None,
    ) -> None:
        self._computing = computing
        self._check = check
        self._definition = check.definition
        self._rows = rows
        self._scope = scope
        self._left = left
        self._ends = ends
        self._readers = {reader.name: reader for reader in readers}
        self._found = Examined()
        self._is_open: Flags = np.zeros(len(rows), np.bool_)
        self._before = check.before
        starts = np.array([scope[place][0] for place in rows.places], np.int64)
        self._is_new = rows.offsets >= np.repeat(starts, np.diff(rows.bounds))
        """Others were handed on by an earlier audit."""
        self._is_kept: Flags = np.zeros(len(rows), np.bool_)
        """What is handed on to the next."""
        self._lacks = ""
        self._watermarks: Times = np.full(len(rows), NOTHING, np.int64)
        self._spaces: dict[tuple[int, ...], KeySpace] = {}
        self._left_at, self._routes = self._departures()
        self._chains = {name: self._chain_of(reader) for name, reader in self._readers.items()}
        whole = {name: chain for name, chain in self._chains.items() if chain.is_whole}
        self._main_name = max(whole, key=lambda name: len(whole[name].turns), default="")
        if self._before is not None:
            self._main_name = self._before.main
        self._main = whole.get(self._main_name)

    def run(self) -> StatefulResult:
        stateful = self._check.stateful
        if stateful and self._can_recompute():
            clock = self._check.clock
            assert clock is not None
            chain = self._with_watermarks(self._main or one_turn(self._scope), clock)
            self._tell_watermarks(chain)
            turns = chain.turns_of(self._rows)
            watermarks = own_watermarks(self._rows, chain, turns, clock)
            if self._before is not None and self._before.rows is not None:
                watermarks[~self._is_new] = self._known(self._before.rows.watermarks)
            self._watermarks = watermarks
            for step in stateful:
                if self._is_expanded(step.name):
                    self._take_on_trust(step, "a step before it makes several rows of one record")
                elif isinstance(step, Dedupe):
                    self._dedupe(step, watermarks, turns)
                else:
                    self._tap(step, watermarks, turns, chain)
        superseded = {sink.name: self._upsert(sink) for sink in self._check.upserts}
        return StatefulResult(
            self._found,
            self._rows.offsets_by_place(self._is_open),
            superseded,
            self._carried(),
        )

    def _take_on_trust(self, step: Step, why: str) -> None:
        """What a step let go is not made again."""
        left = self._recorded(step.name, LATE) | self._recorded(step.name, DUPLICATE)
        self._say(ColumnCoverage(STEPS, step.name, unaltered=self._count(left), why=why))

    def _say(self, *said: Said) -> None:
        self._found += Examined.of(said)

    def _count(self, which: Flags) -> int:
        """Of these, the new ones."""
        return int((which & self._is_new).sum())

    # -------------------------------------------------------------------- from one audit to the next

    def _chain_of(self, reader: SinkReader) -> Chain:
        if self._before is None:
            return chain_of(reader.entries(), self._scope)
        known = self._before.chains.get(reader.name)
        return Chain((), is_whole=False) if known is None else chain_of(reader.entries(), self._scope, known)

    def _known(self, values: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Of what was handed on by record, that of records of the scope's partitions."""
        assert self._before is not None
        assert self._before.rows is not None
        known = self._before.rows.rows
        is_ours = np.array([place in self._scope for place in known.places], np.bool_)
        return values[np.repeat(is_ours, np.diff(known.bounds))]

    def _carried(self) -> Carried:
        """What the next audit needs of this one, or why it cannot go on from it."""
        stateful, clock = self._check.stateful, self._check.clock
        others = {mark for step in stateful for mark in self._check.others.get(step.name, ())}
        made = self._main.made_by(others) if self._main is not None else ()
        if stateful and self._main is None:
            self._lacks = self._lacks or "no sink's ledger has all batches"
        elif len(made):
            self._lacks = self._lacks or "another version of the definition had stateful steps otherwise"
        if self._lacks:
            return Carried(self._lacks)
        chains = {name: chain for name, chain in self._chains.items() if chain.is_whole}
        if stateful and clock is not None and self._main is not None:
            main = self._with_watermarks(self._main, clock)
            chains = {name: self._chain_for(name, main) for name in chains}
        rows = CarriedRows(
            self._rows.where(self._is_kept),
            self._left_at[self._is_kept],
            self._watermarks[self._is_kept],
            {each: flags[self._is_kept] for each, flags in self._routes.items()},
        )
        ends = {name: chain.end for name, chain in chains.items()}
        return Carried(chains=ends, main=self._main_name, rows=rows)

    def _cannot_go_on(self, why: str) -> None:
        self._lacks = self._lacks or why

    # -------------------------------------------------------------------- what is there to go by

    def _departures(self) -> tuple[npt.NDArray[np.int32], dict[tuple[str, str], Flags]]:
        """For each record the number of the step at which it left; and by step and route those that did."""
        steps = self._check.numbers
        left_at = np.full(len(self._rows), len(steps), np.int32)
        left_at[~self._rows.is_decoded] = -1
        routes: dict[tuple[str, str], Flags] = {}
        for rows, step, by in self._left.departures:
            at = self._rows.match(rows.topic, rows.partition, rows.offsets)
            at = at[at >= 0]
            goes_on = by == LATE_FOR
            flags = routes.setdefault((step, LATE if goes_on else by), np.zeros(len(self._rows), np.bool_))
            flags[at] = True
            if not goes_on:
                left_at[at] = steps.get(step, -1)
        known = self._before.rows if self._before is not None else None
        if known is not None:
            left_at[~self._is_new] = self._known(known.left_at)
            for route, before in known.routes.items():
                flags = routes.setdefault(route, np.zeros(len(self._rows), np.bool_))
                flags[~self._is_new] = self._known(before)
        return left_at, routes

    def _recorded(self, step: str, route: str) -> Flags:
        return self._routes.get((step, route), np.zeros(len(self._rows), np.bool_))

    def _reached(self, step: str) -> Flags:
        """Records that came as far as this step."""
        return self._left_at >= self._check.numbers[step]

    def _is_expanded(self, step: str) -> bool:
        before = self._definition.steps[: self._check.numbers[step]] if step else self._definition.steps
        return any(isinstance(each, Sql | Python) and each.expand for each in before)

    def _can_recompute(self) -> bool:
        clock = self._check.clock
        if clock is None:
            return False
        if self._left.unknown:
            self._say(gap("what stateful steps did", self._left.unknown))
            self._cannot_go_on(self._left.unknown)
            return False
        begun = {} if self._before is not None else self._beginnings()
        cut = [place for place, (start, _) in self._scope.items() if start > begun.get(place, start)]
        if cut:
            place = min(cut)
            why = (
                f"the audit begins at {self._scope[place][0]} of {place.topic}-{place.partition}, and the pipeline "
                f"began at {begun[place]}: what it remembered from before is not known"
            )
            self._say(gap("windows, duplicates and late rows", why))
            self._cannot_go_on("what the pipeline remembered where the audit began is not known")
            return False
        if self._main is None and clock.idle_ms is not None:
            why = "partitions may idle, so what is late depends on batches, and no sink's ledger has them all"
            self._say(gap("windows, duplicates and late rows", why))
            return False
        return True

    def _beginnings(self) -> dict[Place, int]:
        """Where the pipeline began, as far as ledgers have it."""
        found: dict[Place, int] = {}
        for reader in self._readers.values():
            for entry in reader.entries():
                for place, span in entry.range.spans.items():
                    found[place] = min(span.start, found.get(place, span.start))
        return found

    def _with_watermarks(self, chain: Chain, clock: Clock) -> Chain:
        return with_watermarks(chain, self._rows, clock, self._definition.source)

    def _tell_watermarks(self, chain: Chain) -> None:
        differing = chain.differing()
        if not differing:
            return
        turn, must = differing[0]
        has = "none" if turn.told_ms is None else time_text(turn.told_ms)
        wants = "none" if must == NOTHING else time_text(must)
        detail = (
            f"the ledger has the watermark {has} where batch {turn.number} began, and the records say {wants}"
        )
        self._say(Finding(Fate.ALTERED, "", count=len(differing), detail=detail))

    def _tell(self, fate: Fate, which: Numbers, detail: str) -> None:
        """Records that were wrongly treated."""
        self._say(*record_findings(fate, "", self._rows, which, detail))

    # -------------------------------------------------------------------- deduplication

    def _dedupe(self, step: Dedupe, watermarks: Times, turns: npt.NDArray[np.int32]) -> None:
        rows, reached = self._rows, self._reached(step.name)
        columns = self._key_columns(step)
        within = reach_ms(step)
        if self._was_otherwise(step.name, turns).any():
            why = "another version of the definition had it otherwise; which records it let go is recorded"
            self._take_on_trust(step, why)
            return
        late, doubled = self._recorded(step.name, LATE), self._recorded(step.name, DUPLICATE)
        if columns is None:
            past = is_past(rows.events, watermarks, within)
            self._late(step.name, reached & past, late, is_all=False)
            why = (
                f"its key ({', '.join(step.key)}) is computed by a step; which records it let go is recorded"
            )
            self._say(ColumnCoverage(STEPS, step.name, unaltered=self._count(doubled), why=why))
            return
        keyless = np.ones(len(rows), np.bool_)
        for column in columns:
            keyless &= np.asarray(column.is_null().to_numpy(), np.bool_)
        past = is_past(rows.events, watermarks, within) & ~keyless
        self._late(step.name, reached & past, late, is_all=True)
        judged = reached & ~past & ~keyless
        gone = self._count((late | doubled) & reached)
        self._say(ColumnCoverage(STEPS, step.name, recomputed=gone))
        codes = self._space(columns).codes
        order = turns.astype(np.int64) * len(rows) + np.arange(len(rows))
        went_on = judged & (self._left_at > self._check.numbers[step.name])
        # A row that comes in time is after the watermark less `within`, and so is all it can be a duplicate of, twice.
        self._is_kept |= went_on & (rows.events > self._low_watermark() - 2 * within)
        found = judge(codes, rows.events, order, went_on, doubled & judged, within)
        went = f"left as a duplicate at step {step.name!r}, and"
        self._tell(
            Fate.DUPLICATED, found.repeated, f"went on at step {step.name!r}, though its key had before"
        )
        self._tell(Fate.LOST, found.lost, f"{went} is the first of its key")
        self._tell(Fate.LOST, np.flatnonzero(doubled & keyless), f"{went} has no key")

    def _key_columns(self, step: Dedupe | Window) -> list[pa.ChunkedArray] | None:
        if isinstance(step, Dedupe) and step.by == "hf-id":
            column = self._rows.columns.get(ID_COLUMN)
            return [] if column is None else [column]
        found = self._columns(step.name, step.key)
        return [found[name] for name in step.key] if len(found) == len(set(step.key)) else None

    def _columns(self, stream: str, names: Iterable[str]) -> dict[str, pa.ChunkedArray]:
        """Columns of the rows that reach a step or a sink, by record: of the source, or computed again."""
        plain, wanted = self._check.plain(stream), list(dict.fromkeys(names))
        found = {name: self._column(plain[name]) for name in wanted if plain.get(name) in self._check.types}
        more = {name: quoted(name) for name in wanted if name not in found}
        return found | self._computed(stream, more)

    def _computed(self, stream: str, expressions: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
        """Expressions over the rows that reach a step or a sink, by record; null where no row does."""
        if self._computing is None or not expressions:
            return {}
        tables = self._computing.rows(stream, expressions)
        if tables is None:
            return {}
        at = np.full(len(self._rows), -1, np.int64)
        made: list[pa.Table] = []
        count = 0
        for table in tables:
            for place, rows, offsets in by_place(table, self._scope):
                matched = self._rows.match(place.topic, place.partition, offsets)
                at[matched[matched >= 0]] = rows[matched >= 0] + count
            made.append(table)
            count += table.num_rows
        if not made:
            return {}
        whole = pa.concat_tables(made)
        places = pa.array(at, mask=at < 0)
        return {name: whole.column(name).take(places) for name in expressions}

    def _space(self, columns: Sequence[pa.ChunkedArray]) -> KeySpace:
        """Numbers for these columns, made once."""
        known = tuple(id(column) for column in columns)
        if known not in self._spaces:
            self._spaces[known] = KeySpace(columns, len(self._rows))
        return self._spaces[known]

    def _column(self, name: str) -> pa.ChunkedArray:
        return self._rows.columns.get(name, pa.chunked_array([], self._check.types[name]))

    # -------------------------------------------------------------------- what is late

    def _late(self, step: str, must: Flags, told: Flags, *, is_all: bool) -> None:
        """Late rows are exactly those that were recorded; without `is_all`, at least no others were."""
        in_time = f"recorded as late for step {step!r}, and is in time by the log"
        self._tell(Fate.LOST, np.flatnonzero(told & ~must), in_time)
        if is_all:
            missed = np.flatnonzero(must & ~told)
            self._tell(Fate.ALTERED, missed, f"late for step {step!r} by the log, and not recorded so")

    def _tap(self, step: Step, watermarks: Times, turns: npt.NDArray[np.int32], chain: Chain) -> None:
        rows, reached = self._rows, self._reached(step.name)
        told = self._recorded(step.name, LATE)
        if isinstance(step, Window):
            late = Measure.of(step).is_late(rows.events, watermarks)
            judged = ~self._was_otherwise(step.name, turns)
            self._late(step.name, reached & late & judged, told & judged, is_all=True)
            self._windows(step, reached & ~late, watermarks, chain)
            return
        assert isinstance(step, Keyed | Join)
        late = is_past(rows.events, watermarks, reach_ms(step))
        sided = self._sided(step) if isinstance(step, Join) else np.ones(len(rows), np.bool_)
        if sided is not None:
            late &= sided
        self._late(step.name, reached & late, told, is_all=sided is not None)

    def _was_otherwise(self, step: str, turns: npt.NDArray[np.int32]) -> Flags:
        """Records of batches in which the step was another one."""
        if self._main is None:
            return np.zeros(len(self._rows), np.bool_)
        return np.isin(turns, self._main.made_by(self._check.others.get(step, ())))

    def _sided(self, step: Join) -> Flags | None:
        """Records on a side of a join, where both sides are topics."""
        topics = self._definition.source.topics
        if step.left not in topics or step.right not in topics:
            return None
        is_side = np.array([place.topic in (step.left, step.right) for place in self._rows.places], np.bool_)
        return is_side[self._rows.place_numbers()] if len(is_side) else np.zeros(0, np.bool_)

    # -------------------------------------------------------------------- windows

    def _windows(self, step: Window, taken: Flags, watermarks: Times, main: Chain) -> None:
        columns = self._key_columns(step)
        keys = (
            None if columns is None else Keys(dict(zip(step.key, columns, strict=True)), self._space(columns))
        )
        plain = self._columns(step.name, columns_needed(step.aggregates))
        hashes = self._rows.hashes()
        for sink in self._definition.sinks:
            reader = self._readers.get(sink.name)
            if sink.rows != step.name or reader is None or hides_rows(sink):
                continue
            chain = self._chain_for(sink.name, main)
            turns = chain.turns_of(self._rows).astype(np.int64)
            given = Taken(
                step,
                Measure.of(step),
                np.flatnonzero(taken),
                keys,
                plain,
                watermarks,
                turns,
                hashes,
                self._computing,
                self._check.others.get(step.name, ()),
            )
            before = None if self._before is None else self._before.turns.get(sink.name, UNNUMBERED)
            tables = {} if self._before is None else self._before.tables
            known = len(tables[sink.name]) if sink.name in tables and merged(sink) is not None else None
            check = WindowCheck(given, self._rows, chain, sink, reader, before, known)
            self._found += check.examine()
            self._keep_windows(step, given, check, chain)
            self._is_open |= check.is_open

    def _keep_windows(self, step: Window, taken: Taken, check: WindowCheck, chain: Chain) -> None:
        """Rows of windows that may still be given out, or again."""
        measure = taken.measure
        is_fixed = step.emit == "closed" and measure.hold_ms == 0
        if not chain.is_whole:
            self._cannot_go_on(f"the ledger of sink {check.sink!r} does not have all batches")
        elif not is_fixed and measure.kind == "session":
            self._cannot_go_on(f"step {step.name!r} gives out sessions that grow")
        elif not is_fixed and taken.keys is None:
            self._cannot_go_on(f"the key of step {step.name!r} is computed by a step")
        if measure.kind == "session":
            self._is_kept |= check.is_open
            return
        ends = measure.last_starts(self._rows.events[taken.rows]) + measure.size_ms + measure.hold_ms
        self._is_kept[taken.rows[ends > min(chain.watermark, self._low_watermark())]] = True

    def _low_watermark(self) -> int:
        """What comes later has at least this watermark; low enough to be counted from."""
        clock = self._check.clock
        if self._main is None or clock is None:
            return -(2**62)
        return max(-(2**62), self._with_watermarks(self._main, clock).watermark)

    def _chain_for(self, sink: str, main: Chain) -> Chain:
        """The batches of this sink; those before it began are the others'."""
        own = self._chains[sink]
        if own is self._main:
            return main
        if own.is_whole and self._main is not None and own.before is None:
            own = behind(self._main, own)
        clock = self._check.clock
        assert clock is not None
        return self._with_watermarks(own if own.is_whole else one_turn(self._scope), clock)

    # -------------------------------------------------------------------- one row for each key

    def _upsert(self, sink: PostgresSink | DeltaSink) -> dict[Place, Numbers]:
        reader = self._readers.get(sink.name)
        if reader is None:
            return {}
        if self._left.unknown:  # a record that is not in the table may have left
            self._say(gap(f"the rows of sink {sink.name!r}", self._left.unknown))
            self._cannot_go_on(self._left.unknown)
            return {}
        reaching = self._stream(sink)
        columns = {
            name: self._column(field)
            for name, field in self._check.plain(sink.rows).items()
            if field in self._rows.columns
        }
        columns |= self._columns(sink.rows, (*sink.key, *filter(None, (sink.order_by,))))
        if sink.delete_when is not None and condition_flags(sink.delete_when, self._rows, columns) is None:
            columns |= self._computed(sink.rows, {DELETES: f"coalesce(({sink.delete_when}), false)"})
        columns |= keys_of_tombstones(sink, self._rows, columns)
        chain = self._chains[sink.name]
        turns = chain.turns_of(self._rows).astype(np.int64) if chain.is_whole else None
        if sink.mode == "scd2":
            turns = np.zeros(len(self._rows), np.int64)  # of equal ones, the last by place
        elif sink.order_by in columns:
            turns = ranks(columns[sink.order_by])
        elif turns is None and len(self._scope) > 1:
            self._cannot_go_on(f"the ledger of sink {sink.name!r} does not have all batches")
        starts = {} if self._before is None else {place: start for place, (start, _) in self._scope.items()}
        check = UpsertCheck(
            sink, reader, self._rows, columns, np.flatnonzero(reaching), turns, self._ends, starts
        )
        self._found += check.examine()
        self._is_kept |= check.is_standing
        return self._rows.offsets_by_place(check.superseded)

    def _stream(self, sink: SinkDefinition) -> Flags:
        """The records whose rows this sink takes."""
        if not sink.rows:
            return np.asarray(self._left_at == len(self._definition.steps), np.bool_)
        step, _, kind = sink.rows.partition(".")
        return self._recorded(step, DUPLICATE if kind == DUPLICATES else LATE)
