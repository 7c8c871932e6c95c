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
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import numpy as np
import pyarrow as pa

from holdfast.audit.compare import finding
from holdfast.audit.coverage import ANY, LINEAGE
from holdfast.audit.decoding import Computing
from holdfast.audit.model import ColumnCoverage, Examined, Fate, Finding, Unproven, WindowAccount, gap
from holdfast.audit.sinks.base import SinkReader, SinkScope
from holdfast.audit.stateful.aggregates import differing_values
from holdfast.audit.stateful.rows import (
    Codes,
    Flags,
    Hashes,
    KeysDiffer,
    KeySpace,
    Numbers,
    Rows,
    Times,
    key_text,
)
from holdfast.audit.stateful.turns import UNNUMBERED, Chain, Measure, ranks
from holdfast.audit.stateful.windows import (
    COUNT,
    DIGEST,
    END,
    NEVER,
    START,
    Compared,
    Held,
    NotWindows,
    Parts,
    Windows,
    compare,
    given_out,
    held_rows,
    joint_ids,
    last_of_each,
    last_states,
    pieces,
    rows_in_order,
    sessions,
)
from holdfast.audit.unaltered import RESET
from holdfast.pipeline.definition.model import SinkDefinition, Window
from holdfast.pipeline.definition.streams import merged

NAMED_MAX: Final = 20
"""Findings of one kind that are told one by one; the rest is told as a number."""

Describe = Callable[[int], tuple[str, str]]
"""Of something by its number: its key, and what is wrong with it."""


class Told:
    """Findings of one step in one sink."""

    def __init__(self, sink: str, step: str) -> None:
        self._sink = sink
        self._step = step
        self.found: list[Finding] = []

    def add(self, fate: Fate, which: Numbers, describe: Describe) -> None:
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


def span_text(start_ms: int, end_ms: int) -> str:
    return f"{time_text(start_ms)} to {time_text(end_ms)}"


# ---------------------------------------------------------------------------- window check


class Keys(NamedTuple):
    """The key of a step, by row of the source."""

    columns: Mapping[str, pa.ChunkedArray]
    space: KeySpace


@dataclass(frozen=True)
class Taken:
    """The rows that a window step used, and what is known of them."""

    step: Window
    measure: Measure
    rows: Numbers
    """Of the source, those that reached the step and were not late."""
    keys: Keys | None
    """Nothing when its columns are not the source's own."""
    plain: Mapping[str, pa.ChunkedArray]
    """Columns that aggregates may go by."""
    watermarks: Times
    turns: Numbers
    """The batch that took each row of the source."""
    hashes: Hashes
    computing: Computing | None = None
    """Makes again what is no plain function of a column."""
    others: Collection[str] = ()
    """Fingerprints of definitions that had the step otherwise: what their batches gave out is not made again."""


@dataclass(frozen=True)
class Due:
    """What a sink must hold."""

    windows: Windows
    growing: Windows
    """Sessions that were given out and may have grown since: nothing is expected, and what is there is no fault."""
    parts: Parts
    """The rows of the source, with the start of their session, or of the last window they are in."""
    is_by_batch: bool


class WindowCheck:
    """The comparison of one step with one sink."""

    def __init__(
        self,
        taken: Taken,
        source: Rows,
        chain: Chain,
        sink: SinkDefinition,
        reader: SinkReader,
        before: int | None = None,
        known_rows: int | None = None,
    ) -> None:
        """`before` is the newest turn that an earlier audit has proven, `known_rows` how many rows the table had then,
        where it is one whose rows are replaced."""
        self._known_rows = known_rows
        self.sink = sink.name
        self._before = before
        self._given_before: Windows | None = None
        self._taken = taken
        self._source = source
        self._chain = chain
        self._hidden = chain.made_by(taken.others)
        """Batches whose windows were others."""
        self._reader = reader
        self._is_upsert = merged(sink) is not None
        self._told = Told(reader.name, taken.step.name)
        self._unproven: list[Unproven] = []
        self._account = WindowAccount(reader.name, taken.step.name)
        self._recomputed: dict[str, int] = {}
        """By column, how many cells were made again."""
        self._why = "it is no plain function of a column of the source"
        self._erased = Counter[int]()
        """Rows that were taken out on purpose, by the batch that had given them out."""
        for each in reader.erased:
            for batch in each.places:
                self._erased.update(batch.offsets.tolist())
        self.is_open: Flags = np.zeros(len(source), np.bool_)
        """Rows of the source in windows that are not given out yet."""

    def examine(self) -> Examined:
        try:
            held = held_rows(self._reader.values(scope=SinkScope({}, self._before)))
        except NotWindows as missing:
            return self._cannot(f"its rows lack {missing}", "they are not stored as they were given out")
        old = held.where(held.numbers <= (UNNUMBERED - 1 if self._before is None else self._before))
        held = held if self._before is None else held.where(held.numbers > self._before)
        numbers = [self._chain.turns[at].number for at in self._hidden.tolist()]
        is_hidden = np.isin(held.numbers, numbers)
        if is_hidden.any():
            self._why = "another version of the definition made it"
        is_before = held.numbers <= self._reset_at()
        if is_before.any():
            self._why = RESET
        is_hidden |= is_before
        hidden, held = int(is_hidden.sum()), held.where(~is_hidden)
        held, later = self._within(held)
        if self._taken.keys is None:
            self._by_sum(held, later)
            self._compare_old(old, None)
        else:
            try:
                theirs = self._codes(held)
                due = self._due(self._taken.keys.space.codes)
                self._compare_old(old, due)
                due = self._without_later(due, later)
            except KeysDiffer as error:
                return self._cannot("its key cannot be compared with the source's", str(error))
            self._compare(due, held, theirs)
        self._account = replace(self._account, windows=len(held) + hidden, records=int(held.counts.sum()))
        return Examined.of((*self._told.found, *self._unproven, self._account, *self._coverage()))

    def _coverage(self) -> Iterator[ColumnCoverage]:
        made, step = self._recomputed, self._taken.step
        if self._reader.kind == "kafka":
            names = (*step.key, START, END, COUNT, DIGEST, *step.aggregates)
            value = min(made.get(name, 0) for name in names)
            made = {LINEAGE: made.get(LINEAGE, 0), "value": value}
        for name, count in {ANY: 0, **made}.items():
            yield ColumnCoverage(self._reader.name, name, count, why=self._why)

    def _cannot(self, what: str, why: str) -> Examined:
        name = f"the windows of step {self._taken.step.name!r} in sink {self._reader.name!r}"
        return Examined.of((gap(f"{name}: {what}", why), self._account))

    # -------------------------------------------------------------------- what the sink has

    def _reset_at(self) -> int:
        """The number of the newest batch before a reset whose rows may be there still; below all of them: there was
        none, or it is not told by batch what the sink has."""
        first = next(iter(self._reader.entries()), None)
        is_opening = first is not None and first.number == 0 and not first.range.offsets
        if first is None or not is_opening or not first.generation or first.state is None:
            return UNNUMBERED - 1
        return first.state if self._chain.is_whole and not self._is_upsert else UNNUMBERED - 1

    def _within(self, held: Held) -> tuple[Held, Held]:
        """Rows up to the audit's end, and those of later batches; those that are nobody's are told."""
        foreign = np.array([step != self._taken.step.name for step in held.steps], np.bool_)
        self._told.add(
            Fate.EXTRA, np.flatnonzero(foreign), lambda at: ("", f"a row of {held.steps[at]!r} stands there")
        )
        held = held.where(~foreign)
        is_later = np.zeros(len(held), np.bool_)
        if self._chain.is_whole:
            is_later = held.numbers > max((turn.number for turn in self._chain.turns), default=UNNUMBERED)
            if self._chain.beyond is None and self._reader.is_exact:
                self._tell(Fate.EXTRA, held, np.flatnonzero(is_later), "is of a batch that no ledger has")
        return held.where(~is_later), held.where(is_later)

    def _codes(self, held: Held) -> Codes:
        assert self._taken.keys is not None
        names = list(self._taken.keys.columns)
        if len(held) == 0 or not names:
            return np.zeros(len(held), np.int64)
        missing = [name for name in names if name not in held.table.column_names]
        if missing:
            raise KeysDiffer(f"there is no column {missing[0]!r}")
        return self._taken.keys.space.codes_of([held.table.column(name) for name in names])

    # -------------------------------------------------------------------- what it must have

    def _due(self, keys: Codes) -> Due:
        taken, chain = self._taken, self._chain
        events = self._source.events[taken.rows]
        is_closed = taken.step.emit == "closed"
        if taken.measure.kind == "session":
            parts = Parts(taken.rows, keys[taken.rows], events)
            windows, starts = sessions(taken.measure, parts, taken.hashes, chain.ends)
            parts = replace(parts, starts=starts)
        else:
            parts = Parts(taken.rows, keys[taken.rows], taken.measure.last_starts(events))
            found = pieces(
                taken.measure,
                taken.rows,
                keys,
                self._source.events,
                taken.watermarks,
                taken.turns,
                taken.hashes,
            )
            windows = given_out(taken.measure, found, chain.ends, is_closed=is_closed)
        windows = windows.where(~np.isin(windows.turns, self._hidden))
        is_given = windows.turns != NEVER
        self._given_before = windows.where(windows.turns == 0) if chain.before is not None else None
        self._account = replace(self._account, open=len(last_states(windows.where(~is_given))))
        if is_closed:
            self._note_open(windows, parts)
        is_fixed = is_closed and taken.measure.hold_ms == 0
        growing = windows.where(np.zeros(len(windows), np.bool_))
        if taken.measure.kind == "session" and not is_fixed:
            due = windows.where(is_given) if is_closed else windows
            return Due(due, windows.where(~is_given) if is_closed else growing, parts, is_by_batch=False)
        due = windows.where(is_given)
        if chain.is_whole:
            numbers = np.array([turn.number for turn in chain.turns], np.int64)
            due = due.where(numbers[due.turns] != UNNUMBERED)
            if not self._is_upsert:
                return Due(due, growing, parts, is_by_batch=True)
        return Due(last_states(due), growing, parts, is_by_batch=False)

    def _note_open(self, windows: Windows, parts: Parts) -> None:
        """Which records wait in a window that is not closed."""
        if self._taken.measure.kind != "session":
            is_open = parts.starts + self._taken.measure.size_ms > self._chain.watermark
        else:
            waiting = windows.where(windows.turns == NEVER)
            ours, theirs, _ = joint_ids([(parts.keys, waiting.keys), (parts.starts, waiting.starts)])
            is_open = np.isin(ours, theirs)
        self.is_open[parts.rows[is_open]] = True

    def _without_later(self, due: Due, later: Held) -> Due:
        """Of a table that keeps one row for each key: those that a batch past the end has replaced are not judged."""
        if not self._is_upsert or len(later) == 0:
            return due
        windows = due.windows
        one, other, _ = joint_ids([(windows.keys, self._codes(later)), (windows.starts, later.starts)])
        return replace(due, windows=windows.where(~np.isin(one, other)))

    def _compare_old(self, old: Held, due: Due | None) -> None:
        """Of a table whose rows are replaced: what an earlier audit has proven is there, but for what was replaced.
        Each row is one of those that were proven (`TableRows`), so that their number tells."""
        if self._known_rows is None:
            return
        replaced = 0
        if due is not None and self._given_before is not None:
            given, windows = self._given_before, due.windows
            one, other, _ = joint_ids([(given.keys, windows.keys), (given.starts, windows.starts)])
            replaced = len(np.intersect1d(one, other))
            ours, theirs, _ = joint_ids([(windows.keys, self._codes(old)), (windows.starts, old.starts)])
            again = np.flatnonzero(np.isin(theirs, ours))
            self._tell(Fate.DUPLICATED, old, again, "was replaced, and is there still")
        if len(old) != self._known_rows - replaced:
            known = self._known_rows
            text = f"of {known:,} windows that were proven {replaced:,} were replaced, and {len(old):,} are there"
            self._told.say(Fate.LOST, text)

    # -------------------------------------------------------------------- both together

    def _compare(self, due: Due, held: Held, theirs: Codes) -> None:
        rows, keys = held, theirs
        turns = ranks(self._chain, held.numbers) if due.is_by_batch else None
        if not due.is_by_batch:
            self._count_batches(held)
            chosen = self._standing(due, held, theirs)
            rows, keys = held.where(chosen), theirs[chosen]
        found = compare(due.windows, rows, keys, turns)
        self._account = replace(
            self._account, expected=len(due.windows), recomputed=len(found.matched), open=self._account.open
        )
        self._tell_compared(due.windows, rows, found)
        names = (*self._taken.step.key, START, END, COUNT, DIGEST)
        self._recomputed = dict.fromkeys(names, len(rows))
        if due.is_by_batch:
            self._recomputed[LINEAGE] = rows_in_order(rows, self._taken.step.key)
        for at, text in self._values(due, rows, keys, turns):
            span = span_text(int(rows.starts[at]), int(rows.ends[at]))
            self._told.say(Fate.ALTERED, f"the window {span}: {text}", self._held_key(rows, at))

    def _values(self, due: Due, held: Held, keys: Codes, turns: Numbers | None) -> Iterator[tuple[int, str]]:
        taken = self._taken
        parts = due.parts
        firsts = parts.starts
        if taken.measure.kind == "sliding":
            firsts = taken.measure.first_starts(self._source.events[parts.rows], taken.watermarks[parts.rows])
        windows = last_states(due.windows)
        return differing_values(
            taken.step,
            taken.measure,
            taken.plain,
            windows,
            parts,
            firsts,
            held,
            keys,
            turns,
            self._recomputed,
            self._computed,
        )

    def _computed(
        self, aggregates: Mapping[str, str], rows: Numbers, groups: Numbers, count: int
    ) -> dict[str, list[Any] | None]:
        """Aggregates of rows of the source in groups, by whoever evaluates the steps again."""
        if self._taken.computing is None:
            return {}
        places = [self._source.places[number] for number in self._source.place_numbers()[rows]]
        members = pa.table(
            {
                "topic": [place.topic for place in places],
                "partition": pa.array([place.partition for place in places], pa.int32()),
                "offset": self._source.offsets[rows],
                "order": self._source.events[rows],
                "group": groups,
            }
        )
        made = self._taken.computing.aggregates(self._taken.step.name, members, aggregates)
        return {name: [values.get(group) for group in range(count)] for name, values in made.items()}

    def _standing(self, due: Due, held: Held, keys: Codes) -> Numbers:
        """Of each window the newest row, unless it takes the window back."""
        chosen = last_of_each(held, keys)
        is_fixed = self._taken.step.emit == "closed" and self._taken.measure.hold_ms == 0
        again = np.setdiff1d(np.arange(len(held)), chosen)
        if is_fixed:
            self._tell(Fate.DUPLICATED, held, again, "is there twice")
        elif len(again) and not self._is_upsert:
            self._why = "later rows have replaced it; what stands now is recomputed"
        if self._taken.measure.kind == "session":
            chosen = chosen[held.counts[chosen] > 0]
        if len(due.growing):
            columns = [(due.growing.keys, keys[chosen]), (due.growing.starts, held.starts[chosen])]
            one, other, _ = joint_ids(columns)
            chosen = chosen[~np.isin(other, one)]
        return chosen

    def _count_batches(self, held: Held) -> None:
        """Where rows cannot be told one by one: how many each batch wrote, as its ledger says."""
        if self._is_upsert or not self._chain.is_whole:
            return
        judged = (turn for turn in self._chain.turns if turn.mark not in self._taken.others)
        wanted = {turn.number: turn.rows for turn in judged if turn.rows is not None}
        numbers, counts = np.unique(held.numbers, return_counts=True)
        there = dict(zip(numbers.tolist(), counts.tolist(), strict=True))
        for number in sorted({*wanted, *there}):
            has, must = there.get(number, 0), (wanted.get(number, 0) or 0) - self._erased[number]
            if has != must:
                fate = Fate.LOST if has < must else Fate.EXTRA
                text = f"{has} rows of batch {number} are there, and its ledger says {must}"
                self._told.say(fate, text)

    def _tell_compared(self, due: Windows, rows: Held, found: Compared) -> None:
        def lost(at: int) -> tuple[str, str]:
            span = span_text(int(due.starts[at]), int(due.ends[at]))
            return self._source_key(due, at), f"the window {span} with {due.counts[at]} records is not there"

        self._told.add(Fate.LOST, self._not_erased(due, found.missing), lost)
        self._tell(Fate.EXTRA, rows, found.extra, "is not one of the source, or is not closed")
        self._tell(Fate.DUPLICATED, rows, found.repeated, "is there twice")
        of = dict(zip(found.altered.tolist(), found.altered_of.tolist(), strict=True))

        def altered(at: int) -> tuple[str, str]:
            return self._held_key(rows, at), _difference(rows, at, due, of[at])

        self._told.add(Fate.ALTERED, found.altered, altered)

    def _not_erased(self, due: Windows, missing: Numbers) -> Numbers:
        """Windows that are not there, but for those that may have been erased: as many of a batch as were, where it is
        known which batch gave them out. That all others are there, the digests tell."""
        if not self._erased:
            return missing
        batches = self._chain.turns
        numbers = np.array(
            [batches[at].number if at >= 0 else -1 for at in due.turns[missing].tolist()], np.int64
        )
        kept = np.ones(len(missing), np.bool_)
        for number, count in Counter(numbers.tolist()).items():
            kept[numbers == number] = count > self._erased[number]
        return missing[kept] if len(missing) > self._erased.total() or kept.all() else missing[:0]

    # -------------------------------------------------------------------- without the key

    def _by_sum(self, held: Held, later: Held) -> None:
        taken = self._taken
        name = f"of step {taken.step.name!r} in sink {self._reader.name!r}"
        if taken.measure.kind == "session" and taken.step.emit == "closed":
            why = (
                "their key is computed by a step, and without it nobody can say which are closed; --spark can"
            )
            self._unproven.append(gap(f"the sessions {name}", why))
            return
        if self._is_upsert and len(later):
            why = "their key is computed by a step, and later batches have replaced some of them"
            self._unproven.append(gap(f"the windows {name}", why))
            return
        others = [each for each in taken.step.key if each in held.table.column_names]
        theirs = KeySpace([held.table.column(each) for each in others], len(held)).codes
        due = self._due(np.zeros(len(self._source), np.int64))
        due = replace(due, is_by_batch=False, windows=last_states(due.windows))
        chosen = self._standing(due, held, theirs)
        rows, is_session = held.where(chosen), taken.measure.kind == "session"
        if self._erased:
            self._why = "rows were erased, and the key is computed by a step: nobody can say which"
            return
        self._why = (
            f"the key ({', '.join(taken.step.key)}) is computed by a step; number and digest of all keys together are "
            "those of the records"
        )
        summed = _summed(rows, merge_all=is_session)
        expected = _merged(due.windows) if is_session else due.windows
        found = compare(expected, summed, np.zeros(len(summed), np.int64), None)
        self._account = replace(self._account, expected=len(expected), recomputed=len(found.matched))
        self._tell_compared(expected, summed, found)

    # -------------------------------------------------------------------- words

    def _tell(self, fate: Fate, held: Held, which: Numbers, what: str) -> None:
        def text(at: int) -> tuple[str, str]:
            span = span_text(int(held.starts[at]), int(held.ends[at]))
            return self._held_key(held, at), f"the window {span} with {held.counts[at]} records {what}"

        self._told.add(fate, which, text)

    def _held_key(self, held: Held, row: int) -> str:
        names = [name for name in self._taken.step.key if name in held.table.column_names]
        return key_text(names, {name: held.table.column(name) for name in names}, row)

    def _source_key(self, windows: Windows, at: int) -> str:
        keys = {} if self._taken.keys is None else self._taken.keys.columns
        return key_text(list(keys), keys, int(windows.sample[at]))


def _difference(held: Held, row: int, due: Windows, at: int) -> str:
    span = span_text(int(held.starts[row]), int(held.ends[row]))
    if held.ends[row] != due.ends[at]:
        return f"the window {span} must be {span_text(int(due.starts[at]), int(due.ends[at]))}"
    if held.counts[row] != due.counts[at]:
        return f"the window {span} holds {held.counts[row]} records, and the source has {due.counts[at]}"
    return (
        f"the window {span} has the digest {int(held.digests[row]):016x} of {held.counts[row]} records, and those of "
        f"the source have {int(due.digests[at]):016x}: other records are in it"
    )


def _summed(held: Held, *, merge_all: bool) -> Held:
    """All keys together, by start; or all there is as one."""
    starts = np.zeros(len(held), np.int64) if merge_all else held.starts
    order = np.argsort(starts, kind="stable")
    firsts = np.flatnonzero(np.concatenate(([True], np.diff(starts[order]) != 0))) if len(order) else order
    found = held.where(order[firsts])
    if len(order) == 0:
        return found
    return replace(
        found,
        starts=starts[order][firsts],
        ends=starts[order][firsts] if merge_all else found.ends,
        counts=np.add.reduceat(held.counts[order], firsts),
        digests=np.add.reduceat(held.digests[order], firsts),
    )


def _merged(windows: Windows) -> Windows:
    if len(windows) == 0:
        return windows
    first = windows.where(np.zeros(1, np.int64))
    zero = np.zeros(1, np.int64)
    return replace(
        first,
        starts=zero,
        ends=zero,
        counts=windows.counts.sum(keepdims=True),
        digests=windows.digests.sum(keepdims=True, dtype=np.uint64),
    )
