"""Stateful steps, recomputed from the source's log and compared with the record and with the sinks.

    check = StatefulCheck(definition, decoder)
    observer = check.begin(spans)            # sees every record while the source is walked; None: nothing to do
    result = check.examine(left, readers, ends)     # `left` is what the pipeline recorded of rows that left the chain

It shares no code with the steps it judges: times, windows, duplicates and watermarks are computed here as
docs/adr/0010 defines them, in whole arrays. Who reached a step is taken from the record of what left before it
(`holdfast.pipeline.aside`, dead letters), which the ledgers' numbers and digests vouch for.

Records that an earlier audit has handed on stand before the new ones and are judged with them, but counted no more; the
examination ends with what the next audit needs of both (`holdfast.audit.stateful.carried`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.content import by_place
from holdfast.audit.decoding import KEY_PREFIX, Computing, Observer, SourceDecoder
from holdfast.audit.left import Left, hides_rows
from holdfast.audit.model import STEPS, ColumnCoverage, Examined, Fate, Finding, Said, gap
from holdfast.audit.sinks.base import SinkReader
from holdfast.audit.stateful.carried import LEFT, ROUTE, WATERMARK, Carried
from holdfast.audit.stateful.dedupe import judge
from holdfast.audit.stateful.rows import ID_COLUMN, NOTHING, Clock, Flags, Numbers, Recorder, key_codes
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
from holdfast.audit.stateful.window_check import WindowCheck, record_findings, time_text
from holdfast.audit.stateful.windows import columns_needed
from holdfast.pipeline.aside import DUPLICATE, LATE, LATE_FOR
from holdfast.pipeline.core.sql import quoted
from holdfast.pipeline.definition.columns import plain_columns
from holdfast.pipeline.definition.model import (
    Dedupe,
    DeltaSink,
    Join,
    Keyed,
    PipelineDefinition,
    PostgresSink,
    Python,
    SinkDefinition,
    Sql,
    Step,
    Window,
)
from holdfast.pipeline.definition.streams import DUPLICATES, is_stateful, merged
from holdfast.pipeline.positions import Place


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


class StatefulCheck:
    """The stateful steps of one pipeline, and its sinks that keep one row for each key."""

    def __init__(
        self,
        definition: PipelineDefinition,
        decoder: SourceDecoder,
        others: Mapping[str, Collection[str]] | None = None,
        before: Carried | None = None,
    ) -> None:
        self._before = before
        """What an earlier audit has handed on, which ended where the spans begin."""
        self.others = others or {}
        """By step, the fingerprints of definitions that had it otherwise: their rows are not made again."""
        self._definition = definition
        self.types = decoder.types
        event = definition.source.event_time
        self.clock = None if event is None else Clock.of(event)
        self.numbers = {step.name: number for number, step in enumerate(definition.steps)}

    # -------------------------------------------------------------------- while reading

    @property
    def stateful(self) -> list[Step]:
        return [step for step in self._definition.steps if is_stateful(step)]

    @property
    def upserts(self) -> list[PostgresSink | DeltaSink]:
        steps = {step.name for step in self._definition.steps if is_stateful(step)}
        found = (merged(sink) for sink in self._definition.sinks if sink.rows not in steps)
        return [sink for sink in found if sink is not None]

    def begin(self, spans: Spans) -> Observer | None:
        """What has to see every record of these spans."""
        if not self.stateful and not self.upserts:
            return None
        self.scope = dict(spans)
        keeps_ids = any(isinstance(step, Dedupe) and step.by == "hf-id" for step in self.stateful)
        wanted = sorted({name for name in self._wanted() if name in self.types})
        known = self._before.rows if self._before is not None else None
        self._recorder = Recorder(self.clock, wanted, keeps_ids=keeps_ids, spans=spans, before=known)
        return self._recorder

    def _wanted(self) -> Iterable[str]:
        """Columns of the source that keys and aggregates are made of."""
        for step in self.stateful:
            plain = self.plain(step.name)
            names = [*getattr(step, "key", ())]
            if isinstance(step, Window):
                names += columns_needed(step.aggregates)
            yield from (plain[name] for name in names if name in plain)
        for sink in self.upserts:
            plain = self.plain(sink.rows)
            yield from (plain[name] for name in sink.key if name in plain)
            yield from (KEY_PREFIX + name for name in sink.key)
            if sink.order_by is not None:
                yield plain.get(sink.order_by, "")
            if sink.delete_when is not None:
                yield from (field for name, field in plain.items() if name in sink.delete_when)

    def plain(self, rows: str) -> Mapping[str, str]:
        return plain_columns(self._definition, self.types, rows).columns

    # -------------------------------------------------------------------- the examination

    def examine(
        self,
        left: Left,
        readers: Sequence[SinkReader],
        ends: Mapping[Place, int],
        computing: Computing | None = None,
    ) -> StatefulResult:
        """`readers` are all sinks of the pipeline, `ends` where the audit ends, by partition; `computing` makes columns
        again that steps compute."""
        self.left, self.ends, self.computing = left, ends, computing
        self.readers = {reader.name: reader for reader in readers}
        self.rows = self._recorder.finish()
        spans = self.scope.items()
        self.scope = {place: (start, min(end, ends.get(place, end))) for place, (start, end) in spans}
        size = len(self.rows)
        self._found = Examined()
        self._is_open: Flags = np.zeros(size, np.bool_)
        self._is_kept: Flags = np.zeros(size, np.bool_)
        """What is handed on to the next audit."""
        self._lacks = ""
        self._is_new = self._of_known(LEFT, -2) == -2
        self._watermarks: Numbers = np.full(size, NOTHING, np.int64)
        self._left_at, self._routes = self._departures()
        self._chains = {name: self._chain_of(reader) for name, reader in self.readers.items()}
        whole = {name: chain for name, chain in self._chains.items() if chain.is_whole}
        self._main_name = max(whole, key=lambda name: len(whole[name].turns), default="")
        if self._before is not None:
            self._main_name = self._before.main
        self._main = None if (main := whole.get(self._main_name)) is None else self._dated(main)
        stateful, clock = self.stateful, self.clock
        if stateful and clock is not None and self._can_recompute(clock):
            chain = self._main or self._dated(one_turn(self.scope))
            self._tell_watermarks(chain)
            self._turns = chain.turns_of(self.rows)
            watermarks = own_watermarks(self.rows, chain, self._turns, clock)
            self._watermarks = np.where(self._is_new, watermarks, self._of_known(WATERMARK, NOTHING))
            for step in stateful:
                if self._is_expanded(step.name):
                    self._take_on_trust(step, "a step before it makes several rows of one record")
                elif isinstance(step, Dedupe):
                    self._dedupe(step)
                else:
                    self._tap(step)
        superseded = {sink.name: self._upsert(sink) for sink in self.upserts}
        waiting = self.rows.offsets_by_place(self._is_open)
        return StatefulResult(self._found, waiting, superseded, self._carried())

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
            return chain_of(reader.entries(), self.scope)
        known = self._before.chains.get(reader.name)
        return Chain((), is_whole=False) if known is None else chain_of(reader.entries(), self.scope, known)

    def _of_known(self, name: str, otherwise: Any) -> npt.NDArray[Any]:
        """What an earlier audit has said of the records that it handed on; null for others."""
        if name not in self.rows.table.column_names:
            return np.full(len(self.rows), otherwise)
        return np.array(pc.fill_null(self.rows.table.column(name), otherwise))

    def _carried(self) -> Carried:
        """What the next audit needs of this one, or why it cannot go on from it."""
        stateful = self.stateful
        others = {mark for step in stateful for mark in self.others.get(step.name, ())}
        if stateful and self._main is None:
            self._cannot_go_on("no sink's ledger has all batches")
        elif self._main is not None and len(self._main.made_by(others)):
            self._cannot_go_on("another version of the definition had stateful steps otherwise")
        if self._lacks:
            return Carried(self._lacks)
        routes = {f"{ROUTE}{by} {step}": flags for (step, by), flags in self._routes.items()}
        told = {LEFT: self._left_at, WATERMARK: self._watermarks, **routes}
        ends = {name: self._chain_for(name).end for name, chain in self._chains.items() if chain.is_whole}
        return Carried(chains=ends, main=self._main_name, rows=self.rows.telling(told).where(self._is_kept))

    def _cannot_go_on(self, why: str) -> None:
        self._lacks = self._lacks or why

    # -------------------------------------------------------------------- what is there to go by

    def _departures(self) -> tuple[Numbers, dict[tuple[str, str], Flags]]:
        """For each record the number of the step at which it left; and by step and route those that did."""
        steps = self.numbers
        left_at = self._of_known(LEFT, len(steps)).astype(np.int64)
        left_at[self._is_new & ~self.rows.is_decoded] = -1
        routes: dict[tuple[str, str], Flags] = {}
        for name in self.rows.named(ROUTE):
            by, step = name.split(" ", 1)
            routes[step, by] = self._of_known(ROUTE + name, False)
        for rows, step, by in self.left.departures:
            at = self.rows.match(rows.topic, rows.partition, rows.offsets)
            at = at[at >= 0]
            at = at[self._is_new[at]]
            goes_on = by == LATE_FOR
            key = (step, LATE if goes_on else by)
            routes.setdefault(key, np.zeros(len(self.rows), np.bool_))[at] = True
            if not goes_on:
                left_at[at] = steps.get(step, -1)
        return left_at, routes

    def _recorded(self, step: str, route: str) -> Flags:
        return self._routes.get((step, route), np.zeros(len(self.rows), np.bool_))

    def _reached(self, step: str) -> Flags:
        """Records that came as far as this step."""
        return self._left_at >= self.numbers[step]

    def _is_expanded(self, step: str) -> bool:
        before = self._definition.steps[: self.numbers[step]] if step else self._definition.steps
        return any(isinstance(each, Sql | Python) and each.expand for each in before)

    def _can_recompute(self, clock: Clock) -> bool:
        if self.left.unknown:
            self._say(gap("what stateful steps did", self.left.unknown))
            self._cannot_go_on(self.left.unknown)
            return False
        begun = {} if self._before is not None else self._beginnings()
        cut = [place for place, (start, _) in self.scope.items() if start > begun.get(place, start)]
        if cut:
            place = min(cut)
            why = (
                f"the audit begins at {self.scope[place][0]} of {place.topic}-{place.partition}, and the pipeline "
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
        for reader in self.readers.values():
            for entry in reader.entries():
                for place, span in entry.range.spans.items():
                    found[place] = min(span.start, found.get(place, span.start))
        return found

    def _dated(self, chain: Chain) -> Chain:
        """With the watermark before and after each batch, where there are any."""
        clock = self.clock
        return chain if clock is None else with_watermarks(chain, self.rows, clock, self._definition.source)

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
        self._say(*record_findings(fate, "", self.rows, which, detail))

    # -------------------------------------------------------------------- deduplication

    def _dedupe(self, step: Dedupe) -> None:
        rows, reached = self.rows, self._reached(step.name)
        columns = self._key_columns(step)
        within = reach_ms(step)
        if self._was_otherwise(step.name).any():
            why = "another version of the definition had it otherwise; which records it let go is recorded"
            self._take_on_trust(step, why)
            return
        late, doubled = self._recorded(step.name, LATE), self._recorded(step.name, DUPLICATE)
        if columns is None:
            past = is_past(rows.events, self._watermarks, within)
            self._late(step.name, reached & past, late, is_all=False)
            why = (
                f"its key ({', '.join(step.key)}) is computed by a step; which records it let go is recorded"
            )
            self._say(ColumnCoverage(STEPS, step.name, unaltered=self._count(doubled), why=why))
            return
        keyless = np.ones(len(rows), np.bool_)
        for column in columns.values():
            keyless &= np.asarray(column.is_null().to_numpy(), np.bool_)
        past = is_past(rows.events, self._watermarks, within) & ~keyless
        self._late(step.name, reached & past, late, is_all=True)
        judged = reached & ~past & ~keyless
        gone = self._count((late | doubled) & reached)
        self._say(ColumnCoverage(STEPS, step.name, recomputed=gone))
        [codes] = key_codes((len(rows), list(columns.values())))
        order = self._turns * len(rows) + np.arange(len(rows))
        went_on = judged & (self._left_at > self.numbers[step.name])
        # A row that comes in time is after the watermark less `within`, and so is all it can be a duplicate of, twice.
        self._is_kept |= went_on & (rows.events > self._low_watermark() - 2 * within)
        found = judge(codes, rows.events, order, went_on, doubled & judged, within)
        went = f"left as a duplicate at step {step.name!r}, and"
        self._tell(
            Fate.DUPLICATED, found.repeated, f"went on at step {step.name!r}, though its key had before"
        )
        self._tell(Fate.LOST, found.lost, f"{went} is the first of its key")
        self._tell(Fate.LOST, np.flatnonzero(doubled & keyless), f"{went} has no key")

    def _key_columns(self, step: Dedupe | Window) -> Mapping[str, pa.ChunkedArray] | None:
        """Nothing, where they are not known."""
        if isinstance(step, Dedupe) and step.by == "hf-id":
            column = self.rows.columns.get(ID_COLUMN)
            return {} if column is None else {ID_COLUMN: column}
        found = self._columns(step.name, step.key)
        return {name: found[name] for name in step.key} if len(found) == len(set(step.key)) else None

    def _columns(self, stream: str, names: Iterable[str]) -> dict[str, pa.ChunkedArray]:
        """Columns of the rows that reach a step or a sink, by record: of the source, or computed again."""
        plain, wanted = self.plain(stream), list(dict.fromkeys(names))
        found = {name: self._column(plain[name]) for name in wanted if plain.get(name) in self.types}
        more = {name: quoted(name) for name in wanted if name not in found}
        return found | self._computed(stream, more)

    def _computed(self, stream: str, expressions: Mapping[str, str]) -> dict[str, pa.ChunkedArray]:
        """Expressions over the rows that reach a step or a sink, by record; null where no row does."""
        if self.computing is None or not expressions:
            return {}
        tables = self.computing.rows(stream, expressions)
        if tables is None:
            return {}
        at = np.full(len(self.rows), -1, np.int64)
        made: list[pa.Table] = []
        count = 0
        for table in tables:
            for place, rows, offsets in by_place(table, self.scope):
                matched = self.rows.match(place.topic, place.partition, offsets)
                at[matched[matched >= 0]] = rows[matched >= 0] + count
            made.append(table)
            count += table.num_rows
        if not made:
            return {}
        whole = pa.concat_tables(made)
        places = pa.array(at, mask=at < 0)
        return {name: whole.column(name).take(places) for name in expressions}

    def _column(self, name: str) -> pa.ChunkedArray:
        return self.rows.columns.get(name, pa.chunked_array([], self.types[name]))

    # -------------------------------------------------------------------- what is late

    def _late(self, step: str, must: Flags, told: Flags, *, is_all: bool) -> None:
        """Late rows are exactly those that were recorded; without `is_all`, at least no others were."""
        in_time = f"recorded as late for step {step!r}, and is in time by the log"
        self._tell(Fate.LOST, np.flatnonzero(told & ~must), in_time)
        if is_all:
            missed = np.flatnonzero(must & ~told)
            self._tell(Fate.ALTERED, missed, f"late for step {step!r} by the log, and not recorded so")

    def _tap(self, step: Step) -> None:
        rows, reached = self.rows, self._reached(step.name)
        told = self._recorded(step.name, LATE)
        if isinstance(step, Window):
            late = Measure.of(step).is_late(rows.events, self._watermarks)
            judged = ~self._was_otherwise(step.name)
            self._late(step.name, reached & late & judged, told & judged, is_all=True)
            self._windows(step, reached & ~late)
            return
        assert isinstance(step, Keyed | Join)
        late = is_past(rows.events, self._watermarks, reach_ms(step))
        sided = self._sided(step) if isinstance(step, Join) else np.ones(len(rows), np.bool_)
        if sided is not None:
            late &= sided
        self._late(step.name, reached & late, told, is_all=sided is not None)

    def _was_otherwise(self, step: str) -> Flags:
        """Records of batches in which the step was another one."""
        if self._main is None:
            return np.zeros(len(self.rows), np.bool_)
        return np.isin(self._turns, self._main.made_by(self.others.get(step, ())))

    def _sided(self, step: Join) -> Flags | None:
        """Records on a side of a join, where both sides are topics."""
        topics = self._definition.source.topics
        if step.left not in topics or step.right not in topics:
            return None
        is_side = np.array([place.topic in (step.left, step.right) for place in self.rows.places], np.bool_)
        return is_side[self.rows.place_numbers()] if len(is_side) else np.zeros(0, np.bool_)

    # -------------------------------------------------------------------- windows

    def _windows(self, step: Window, taken: Flags) -> None:
        keys = self._key_columns(step)
        plain = self._columns(step.name, columns_needed(step.aggregates))
        for sink in self._definition.sinks:
            reader = self.readers.get(sink.name)
            if sink.rows != step.name or reader is None or hides_rows(sink):
                continue
            check = WindowCheck(
                step,
                self.rows,
                np.flatnonzero(taken),
                keys,
                plain,
                self._watermarks,
                self._chain_for(sink.name),
                sink,
                reader,
                self.computing,
                self.others.get(step.name, ()),
            )
            if self._before is not None:
                check.before = self._before.turns.get(sink.name, UNNUMBERED)
                if sink.name in self._before.tables and merged(sink) is not None:
                    check.known_rows = len(self._before.tables[sink.name])
            self._found += check.examine()
            self._keep_windows(check)
            self._is_open |= check.is_open

    def _keep_windows(self, check: WindowCheck) -> None:
        """Rows of windows that may still be given out, or again."""
        measure, step, chain = check.measure, check.step, check.chain
        if not chain.is_whole:
            self._cannot_go_on(f"the ledger of sink {check.sink.name!r} does not have all batches")
        elif not check.is_fixed and measure.kind == "session":
            self._cannot_go_on(f"step {step.name!r} gives out sessions that grow")
        elif not check.is_fixed and check.keys is None:
            self._cannot_go_on(f"the key of step {step.name!r} is computed by a step")
        if measure.kind == "session":
            self._is_kept |= check.is_open
            return
        ends = measure.last_starts(self.rows.events[check.taken]) + measure.size_ms + measure.hold_ms
        self._is_kept[check.taken[ends > min(chain.watermark, self._low_watermark())]] = True

    def _low_watermark(self) -> int:
        """What comes later has at least this watermark; low enough to be counted from."""
        return -(2**62) if self._main is None else max(-(2**62), self._main.watermark)

    def _chain_for(self, sink: str) -> Chain:
        """The batches of this sink; those before it began are the others'."""
        own = self._chains[sink]
        if self._main is not None and sink == self._main_name:
            return self._main
        if own.is_whole and self._main is not None and own.before is None:
            own = behind(self._main, own)
        return self._dated(own if own.is_whole else one_turn(self.scope))

    # -------------------------------------------------------------------- one row for each key

    def _upsert(self, sink: PostgresSink | DeltaSink) -> dict[Place, Numbers]:
        reader = self.readers.get(sink.name)
        if reader is None:
            return {}
        if self.left.unknown:  # a record that is not in the table may have left
            self._say(gap(f"the rows of sink {sink.name!r}", self.left.unknown))
            self._cannot_go_on(self.left.unknown)
            return {}
        reaching = self._stream(sink)
        columns = {
            name: self._column(field)
            for name, field in self.plain(sink.rows).items()
            if field in self.rows.columns
        }
        columns |= self._columns(sink.rows, (*sink.key, *filter(None, (sink.order_by,))))
        if sink.delete_when is not None and condition_flags(sink.delete_when, self.rows, columns) is None:
            columns |= self._computed(sink.rows, {DELETES: f"coalesce(({sink.delete_when}), false)"})
        columns |= keys_of_tombstones(sink, self.rows, columns)
        chain = self._chains[sink.name]
        turns = chain.turns_of(self.rows) if chain.is_whole else None
        if sink.mode == "scd2":
            turns = np.zeros(len(self.rows), np.int64)  # of equal ones, the last by place
        elif sink.order_by in columns:
            turns = ranks(columns[sink.order_by])
        elif turns is None and len(self.scope) > 1:
            self._cannot_go_on(f"the ledger of sink {sink.name!r} does not have all batches")
        starts = {} if self._before is None else {place: start for place, (start, _) in self.scope.items()}
        check = UpsertCheck(
            sink, reader, self.rows, columns, np.flatnonzero(reaching), turns, self.ends, starts
        )
        self._found += check.examine()
        self._is_kept |= check.is_standing
        return self.rows.offsets_by_place(check.superseded)

    def _stream(self, sink: SinkDefinition) -> Flags:
        """The records whose rows this sink takes."""
        if not sink.rows:
            return np.asarray(self._left_at == len(self._definition.steps), np.bool_)
        step, _, kind = sink.rows.partition(".")
        return self._recorded(step, DUPLICATE if kind == DUPLICATES else LATE)
