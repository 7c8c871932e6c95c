"""One sink that takes the rows of a window step, against what the source says the windows must hold.

Three proofs, from the strongest that can be had:

- By batch: the sink's ledger is whole, so it is known which rows each batch gave out; a sink that appends must hold
  each of them once, with the number and digest of that time, and nothing else.
- By the end: of each window only what stands in the end is known (sessions that grow, tables that keep one row for a
  key, a ledger that keeps its last entries only).
- By sum: the key is a column that some step computed. Then the rows of all keys in a window's time are added up, and
  number and digest must be those of all records that belong there: each record is in exactly one window of that time.

Findings about windows and rows, told one by one as long as they are few.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.audit.compare import finding
from holdfast.audit.coverage import ANY, LINEAGE
from holdfast.audit.decoding import Computing
from holdfast.audit.model import ColumnCoverage, Examined, Fate, Finding, Unproven, WindowAccount, gap
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.stateful.rows import Flags, KeysDiffer, Numbers, Rows, key_codes, key_text
from holdfast.audit.stateful.turns import UNNUMBERED, Chain, Measure
from holdfast.audit.stateful.windows import (
    COUNT,
    DIGEST,
    END,
    START,
    STEP,
    NotWindows,
    Windows,
    alike,
    among,
    compare,
    differing_values,
    found_at,
    given_out,
    held_rows,
    last_states,
    rows_in_order,
    sessions,
)
from holdfast.audit.unaltered import RESET
from holdfast.pipeline.definition.model import SinkDefinition, Window
from holdfast.pipeline.definition.streams import merged

NAMED_MAX: Final = 20
"""Findings of one kind that are told one by one; the rest is told as a number."""


class Told:
    """Findings of one step in one sink."""

    def __init__(self, sink: str, step: str) -> None:
        self._sink = sink
        self._step = step
        self.found: list[Finding] = []

    def add(self, fate: Fate, which: Numbers, describe: Callable[[int], tuple[str, str]]) -> None:
        """`describe` says of something by its number: its key, and what is wrong with it."""
        for number in which[:NAMED_MAX].tolist():
            key, detail = describe(number)
            self.say(fate, detail, key)
        more = len(which) - NAMED_MAX
        if more > 0:
            self.say(fate, f"{more} more like these", count=more)

    def say(self, fate: Fate, detail: str, key: str = "", count: int = 1) -> None:
        keys = (key,) if key else ()
        detail = f"step {self._step!r}: {detail}"
        self.found.append(Finding(fate, self._sink, count=count, keys=keys, detail=detail))


def record_findings(fate: Fate, sink: str, rows: Rows, which: Numbers, detail: str) -> Iterator[Finding]:
    """Records that were wrongly treated, by partition."""
    for number, place in enumerate(rows.places):
        part = rows.slice_of(number)
        offsets = rows.offsets[which[(which >= part.start) & (which < part.stop)]]
        if len(offsets):
            yield finding(fate, sink, place, np.sort(offsets), detail)


def time_text(time_ms: int) -> str:
    """In UTC; a time that no calendar has, as its number."""
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(milliseconds=time_ms)
    except OverflowError:
        return f"{time_ms} ms"
    return moment.isoformat(timespec="milliseconds" if time_ms % 1000 else "seconds").replace("+00:00", "Z")


def span_text(window: Windows) -> str:
    return f"{time_text(int(window['start']))} to {time_text(int(window['end']))}"


# ---------------------------------------------------------------------------- window check


class Due(NamedTuple):
    """What a sink must hold."""

    windows: Windows
    growing: Windows
    """Sessions that were given out and may have grown since: nothing is expected, and what is there is no fault."""
    parts: Windows
    """The rows of the source, each with the start of its session; or with that of the last window it is in, and that of
    the first as its end."""
    is_by_batch: bool


@dataclass
class WindowCheck:
    """The comparison of one step with one sink."""

    step: Window
    source: Rows
    taken: Numbers
    """Of the source, the rows that reached the step and were not late."""
    keys: Mapping[str, pa.ChunkedArray] | None
    """The key of the step, by row of the source; nothing when its columns are not the source's own."""
    plain: Mapping[str, pa.ChunkedArray]
    """Columns that aggregates may go by."""
    watermarks: Numbers
    chain: Chain
    sink: SinkDefinition
    reader: SinkReader
    computing: Computing | None
    """Makes again what is no plain function of a column."""
    others: Collection[str]
    """Fingerprints of definitions that had the step otherwise: what their batches gave out is not made again."""
    before: int | None = None
    """The newest turn that an earlier audit has proven."""
    known_rows: int | None = None
    """How many rows the table had then, where it is one whose rows are replaced."""
    _unproven: list[Unproven] = field(init=False, default_factory=list)
    _recomputed: dict[str, int] = field(init=False, default_factory=dict)
    """By column, how many cells were made again."""
    _why: str = field(init=False, default="it is no plain function of a column of the source")

    def __post_init__(self) -> None:
        self.measure = Measure.of(self.step)
        self._given_before: Windows | None = None
        self.is_fixed = self.step.emit == "closed" and self.measure.hold_ms == 0
        self._told = Told(self.reader.name, self.step.name)
        self._account = WindowAccount(self.reader.name, self.step.name)
        self._hidden = self.chain.made_by(self.others)
        """Batches whose windows were others."""
        places = (batch for each in self.reader.erased for batch in each.places)
        self._erased = Counter(offset for batch in places for offset in batch.offsets.tolist())
        """Rows that were taken out on purpose, by the batch that had given them out."""
        self.is_open: Flags = np.zeros(len(self.source), np.bool_)
        """Rows of the source in windows that are not given out yet."""

    @property
    def _is_upsert(self) -> bool:
        return merged(self.sink) is not None

    def examine(self) -> Examined:
        try:
            self._table, held = held_rows(self.reader.values(scope=SinkScope({}, self.before)))
        except NotWindows as missing:
            return self._cannot(f"its rows lack {missing}", "they are not stored as they were given out")
        old = held[:0]
        if self.before is not None:
            is_old = held["turn"] <= self.before
            old, held = held[is_old], held[~is_old]
        held, hidden = self._without_hidden(held)
        try:
            keys = self._number_keys(old, held := self._own(held))
        except KeysDiffer as error:
            return self._cannot("its key cannot be compared with the source's", str(error))
        held, later = self._within(held)
        if self.keys is None:
            self._by_sum(held, later)
            self._compare_old(old, None)
        else:
            due = self._due(keys)
            self._compare_old(old, due)
            if self._is_upsert:  # what a batch past the end has replaced is not judged
                due = due._replace(windows=due.windows[~among(due.windows, later)])
            self._compare(due, held)
        records = int(held["count"].sum())
        self._account = replace(self._account, windows=len(held) + hidden, records=records)
        return Examined.of((*self._told.found, *self._unproven, self._account, *self._coverage()))

    def _coverage(self) -> Iterator[ColumnCoverage]:
        made, step = self._recomputed, self.step
        if self.reader.kind == "kafka":
            names = (*step.key, START, END, COUNT, DIGEST, *step.aggregates)
            value = min(made.get(name, 0) for name in names)
            made = {LINEAGE: made.get(LINEAGE, 0), "value": value}
        for name, count in {ANY: 0, **made}.items():
            yield ColumnCoverage(self.reader.name, name, count, why=self._why)

    def _cannot(self, what: str, why: str) -> Examined:
        name = f"the windows of step {self.step.name!r} in sink {self.reader.name!r}"
        return Examined.of((gap(f"{name}: {what}", why), self._account))

    # -------------------------------------------------------------------- what the sink has

    def _without_hidden(self, held: Windows) -> tuple[Windows, int]:
        """Rows that are judged, and how many are not: those of another definition, or from before a reset."""
        is_other = np.isin(held["turn"], self.chain.numbers[self._hidden])
        is_before = held["turn"] <= self._reset_at()
        if is_other.any() or is_before.any():
            self._why = RESET if is_before.any() else "another version of the definition made it"
        is_hidden = is_other | is_before
        return held[~is_hidden], int(is_hidden.sum())

    def _reset_at(self) -> int:
        """The number of the newest batch before a reset whose rows may be there still; below all of them: there was
        none, or it is not told by batch what the sink has."""
        first = next(iter(self.reader.entries()), None)
        is_opening = first is not None and first.number == 0 and not first.range.offsets
        if first is None or not is_opening or not first.generation or first.state is None:
            return UNNUMBERED - 1
        return first.state if self.chain.is_whole and not self._is_upsert else UNNUMBERED - 1

    def _own(self, held: Windows) -> Windows:
        """Rows of this step; others are told."""
        if not len(held):
            return held
        steps = self._table.column(STEP).cast(pa.string())
        is_own: Flags = np.asarray(pc.fill_null(pc.equal(steps, self.step.name), False))[held["at"]]

        def stranger(at: int) -> tuple[str, str]:
            return "", f"a row of {steps[held['at'][at]].as_py()!r} stands there"

        self._told.add(Fate.EXTRA, np.flatnonzero(~is_own), stranger)
        return held[is_own]

    def _number_keys(self, *parts: Windows) -> Numbers:
        """Give these rows of the sink the numbers of their keys, and return those of the source's rows."""
        there = self._table.column_names
        names = [name for name in self.step.key if self.keys is not None or name in there]
        if parts := tuple(part for part in parts if len(part)):
            missing = [name for name in names if name not in there]
            if missing:
                raise KeysDiffer(f"there is no column {missing[0]!r}")
        sides = [
            (len(part), [self._table.column(name).take(pa.array(part["at"])) for name in names])
            for part in parts
        ]
        if self.keys is not None:
            sides.insert(0, (len(self.source), [self.keys[name] for name in names]))
        codes = key_codes(*sides)
        for part, numbers in zip(parts, codes[len(codes) - len(parts) :], strict=True):
            part["key"] = numbers
        return codes[0] if codes else np.zeros(0, np.int64)

    def _within(self, held: Windows) -> tuple[Windows, Windows]:
        """Rows up to the audit's end, and those of later batches; those of no batch are told."""
        is_later = np.zeros(len(held), np.bool_)
        if self.chain.is_whole:
            is_later = held["turn"] > self.chain.numbers.max(initial=UNNUMBERED)
            if self.chain.beyond is None and self.reader.is_exact:
                self._tell(Fate.EXTRA, held, np.flatnonzero(is_later), "is of a batch that no ledger has")
        return held[~is_later], held[is_later]

    # -------------------------------------------------------------------- what it must have

    def _due(self, keys: Numbers) -> Due:
        chain, rows, is_session = self.chain, self.taken, self.measure.kind == "session"
        is_closed = self.step.emit == "closed"
        events, watermarks = self.source.events[rows], self.watermarks[rows]
        parts = Windows(
            key=keys[rows],
            start=self.measure.last_starts(events),
            end=self.measure.first_starts(events, watermarks),
            turn=chain.turns_of(self.source)[rows],
            count=np.ones(len(rows), np.int64),
            digest=self.source.hashes[rows],
            at=rows,
        )
        if is_session:
            found, starts = sessions(self.measure, parts, chain.ends)
            parts["start"] = parts["end"] = starts
        else:
            found = given_out(self.measure, parts, chain.ends, is_closed=is_closed)
        found = found[~np.isin(found["turn"], self._hidden)]
        is_given = found["turn"] < len(chain.turns)
        due, waiting = found[is_given], found[~is_given]
        self._given_before = due[due["turn"] == 0] if chain.before is not None else None
        self._account = replace(self._account, open=len(last_states(waiting)))
        if is_closed:
            over = parts["start"] + self.measure.size_ms <= chain.watermark
            self.is_open[rows[among(parts, waiting) if is_session else ~over]] = True
        if is_session and not self.is_fixed:
            return Due(due, waiting, parts, False) if is_closed else Due(found, found[:0], parts, False)
        if chain.is_whole:
            due = due[self.chain.numbers[due["turn"]] != UNNUMBERED]
            if not self._is_upsert:
                return Due(due, found[:0], parts, True)
        return Due(due[last_states(due)], found[:0], parts, False)

    def _compare_old(self, old: Windows, due: Due | None) -> None:
        """Of a table whose rows are replaced: what an earlier audit has proven is there, but for what was replaced.
        Each row is one of those that were proven (`TableRows`), so that their number tells."""
        if self.known_rows is None:
            return
        replaced = 0
        if due is not None and self._given_before is not None:
            replaced = int(among(self._given_before, due.windows).sum())
            again = np.flatnonzero(among(old, due.windows))
            self._tell(Fate.DUPLICATED, old, again, "was replaced, and is there still")
        if len(old) != self.known_rows - replaced:
            known = self.known_rows
            text = f"of {known:,} windows that were proven {replaced:,} were replaced, and {len(old):,} are there"
            self._told.say(Fate.LOST, text)

    # -------------------------------------------------------------------- both together

    def _compare(self, due: Due, held: Windows) -> None:
        by = ["key", "start"]
        if due.is_by_batch:
            by.append("turn")
            self._recomputed[LINEAGE] = rows_in_order(self._table, held, self.step.key)
            held = Windows(**held.columns)
            held["turn"] = found_at([(self.chain.numbers, held["turn"])])
        else:
            self._count_batches(held)
            held = held[self._standing(due, held)]
        names = (*self.step.key, START, END, COUNT, DIGEST)
        self._recomputed |= dict.fromkeys(names, len(held))
        rows, of = self._judge(due.windows, held, *by)
        is_last = np.zeros(len(due.windows), np.bool_)
        is_last[last_states(due.windows)] = True
        rows, of = rows[is_last[of]], of[is_last[of]]
        there = [name for name in self.step.aggregates if name in self._table.column_names]
        values = self._table.select(there).take(pa.array(held["at"][rows]))
        for at, text in differing_values(
            self.step,
            self.measure,
            self.plain,
            due.parts,
            due.windows[of],
            values,
            self._recomputed,
            self._computed,
        ):
            row = held[rows[at]]
            self._told.say(Fate.ALTERED, f"the window {span_text(row)}: {text}", self._held_key(row))

    def _judge(self, due: Windows, held: Windows, *by: str) -> tuple[Numbers, Numbers]:
        """Tell how they differ; the rows that are as they must be, each once, and the window of each."""
        of, is_again = compare(due, held, *by)
        known = np.flatnonzero(of >= 0)
        differs = np.zeros(len(known), np.bool_)
        for name in ("count", "digest", "end"):
            differs |= held[name][known] != due[name][of[known]]
        is_missing = np.bincount(of[known], minlength=len(due)) == 0

        def lost(at: int) -> tuple[str, str]:
            keys = self.keys or {}
            text = f"the window {span_text(due[at])} with {due['count'][at]} records is not there"
            return key_text(list(keys), keys, int(due["at"][at])), text

        def altered(at: int) -> tuple[str, str]:
            return self._held_key(held[at]), _difference(held[at], due[of[at]])

        self._told.add(Fate.LOST, self._not_erased(due, np.flatnonzero(is_missing)), lost)
        self._tell(Fate.EXTRA, held, np.flatnonzero(of < 0), "is not one of the source, or is not closed")
        self._tell(Fate.DUPLICATED, held, np.flatnonzero(is_again), "is there twice")
        self._told.add(Fate.ALTERED, known[differs], altered)
        same = known[~differs]
        self._account = replace(self._account, expected=len(due), recomputed=len(same))
        same = same[~is_again[same]]
        return same, of[same]

    def _computed(
        self, aggregates: Mapping[str, str], rows: Numbers, groups: Numbers, count: int
    ) -> dict[str, list[Any] | None]:
        """Aggregates of rows of the source in groups, by whoever evaluates the steps again."""
        if self.computing is None:
            return {}
        places = [self.source.places[number] for number in self.source.place_numbers()[rows]]
        members = pa.table(
            {
                "topic": [place.topic for place in places],
                "partition": pa.array([place.partition for place in places], pa.int32()),
                "offset": self.source.offsets[rows],
                "order": self.source.events[rows],
                "group": groups,
            }
        )
        made = self.computing.aggregates(self.step.name, members, aggregates)
        return {name: [values.get(group) for group in range(count)] for name, values in made.items()}

    def _standing(self, due: Due, held: Windows) -> Numbers:
        """Of each window the newest row, unless it takes the window back."""
        chosen = last_states(held)
        again = np.setdiff1d(np.arange(len(held)), chosen)
        if self.is_fixed:
            self._tell(Fate.DUPLICATED, held, again, "is there twice")
        elif len(again) and not self._is_upsert:
            self._why = "later rows have replaced it; what stands now is recomputed"
        if self.measure.kind == "session":
            chosen = chosen[held["count"][chosen] > 0]
        return chosen[~among(held[chosen], due.growing)]

    def _count_batches(self, held: Windows) -> None:
        """Where rows cannot be told one by one: how many each batch wrote, as its ledger says."""
        if self._is_upsert or not self.chain.is_whole:
            return
        judged = (turn for turn in self.chain.turns if turn.mark not in self.others)
        wanted = {turn.number: turn.rows for turn in judged if turn.rows is not None}
        there = Counter(held["turn"].tolist())
        for number in sorted({*wanted, *there}):
            has, must = there[number], wanted.get(number, 0) - self._erased[number]
            if has != must:
                fate = Fate.LOST if has < must else Fate.EXTRA
                text = f"{has} rows of batch {number} are there, and its ledger says {must}"
                self._told.say(fate, text)

    def _not_erased(self, due: Windows, missing: Numbers) -> Numbers:
        """Windows that are not there, but for those that may have been erased: as many of a batch as were, where it is
        known which batch gave them out. That all others are there, the digests tell."""
        if not self._erased:
            return missing
        numbers = np.append(self.chain.numbers, UNNUMBERED)[due["turn"][missing]].tolist()
        counts = Counter(numbers)
        kept = np.array([counts[number] > self._erased[number] for number in numbers], np.bool_)
        return missing[kept] if len(missing) > self._erased.total() or kept.all() else missing[:0]

    # -------------------------------------------------------------------- without the key

    def _by_sum(self, held: Windows, later: Windows) -> None:
        name = f"of step {self.step.name!r} in sink {self.reader.name!r}"
        is_session = self.measure.kind == "session"
        if is_session and self.step.emit == "closed":
            why = (
                "their key is computed by a step, and without it nobody can say which are closed; --spark can"
            )
            self._unproven.append(gap(f"the sessions {name}", why))
            return
        if self._is_upsert and len(later):
            why = "their key is computed by a step, and later batches have replaced some of them"
            self._unproven.append(gap(f"the windows {name}", why))
            return
        due = self._due(np.zeros(len(self.source), np.int64))
        rows, expected = held[self._standing(due, held)], due.windows[last_states(due.windows)]
        if self._erased:
            self._why = "rows were erased, and the key is computed by a step: nobody can say which"
            return
        self._why = (
            f"the key ({', '.join(self.step.key)}) is computed by a step; number and digest of all keys together are "
            "those of the records"
        )
        if is_session:  # all there is as one
            for each in (rows, expected):
                each["start"] = each["end"] = np.zeros(len(each), np.int64)
        self._judge(alike(expected, expected["start"]), alike(rows, rows["start"]), "start")

    # -------------------------------------------------------------------- words

    def _tell(self, fate: Fate, held: Windows, which: Numbers, what: str) -> None:
        def text(at: int) -> tuple[str, str]:
            records = held["count"][at]
            return self._held_key(held[at]), f"the window {span_text(held[at])} with {records} records {what}"

        self._told.add(fate, which, text)

    def _held_key(self, row: Windows) -> str:
        names = [name for name in self.step.key if name in self._table.column_names]
        return key_text(names, {name: self._table.column(name) for name in names}, int(row["at"]))


def _difference(held: Windows, due: Windows) -> str:
    span = span_text(held)
    if held["end"] != due["end"]:
        return f"the window {span} must be {span_text(due)}"
    if held["count"] != due["count"]:
        return f"the window {span} holds {held['count']} records, and the source has {due['count']}"
    return (
        f"the window {span} has the digest {int(held['digest']):016x} of {held['count']} records, and those of "
        f"the source have {int(due['digest']):016x}: other records are in it"
    )
