"""Records of a scope held against the rows of a sink by a match: the audit of a job that we did not write.

The order of looking is what makes it safe while everything moves: the scope was fixed first (what the job says it has
done), then the sink is read, then the log's ends are taken, then the log is read. So a record of the scope must be in
the sink, and a row of the sink must be a record of the log, unless the log has forgotten it.

What a match cannot say is said: a row whose record the log has forgotten is nobody's fault, rows of one value stand for
any record of it, and a record that the job filtered looks like one that it lost (`--where` tells them apart).
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from uuid import UUID

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast import __version__
from holdfast.audit import words
from holdfast.audit.compare import finding
from holdfast.audit.evaluating import Evaluator, Kind, flags, shown
from holdfast.audit.foreign_rows import ForeignTable
from holdfast.audit.foreign_tables import DeadLetters
from holdfast.audit.lineage import as_ranges
from holdfast.audit.matched_values import Buckets, Extra, MatchedValues, Numbers, Outcome
from holdfast.audit.matching import Condition
from holdfast.audit.model import (
    AuditError,
    Examined,
    Fate,
    Finding,
    Mode,
    PartitionAccount,
    Report,
    Said,
    Scope,
    SinkAccount,
    Unproven,
    gap,
    ranges_text,
)
from holdfast.audit.record_walk import Ground, Walked, evaluated, find_values, grounds_of, walk
from holdfast.audit.source import keys_at
from holdfast.pipeline.positions import Place
from holdfast.pipeline.scratch import ScratchDatabase
from holdfast.reader import Cluster, TopicPartition
from holdfast.reader.errors import OffsetGone

ATTEMPTS = 3
"""How often a log may lose its head while it is read, before that is the answer."""
OPEN = "behind a transaction that is still open"


@dataclass(frozen=True)
class Question:
    """What is asked of a sink."""

    subject: str
    mode: Mode
    settings: Mapping[str, str]
    """Of the source's cluster."""
    scopes: Mapping[TopicPartition, tuple[int, int]]
    """By partition: from which offset on, up to which one, the sink has to have all."""
    begins: str
    ends: str
    topic_ids: Mapping[str, UUID | str]
    """Of the topics that the scopes are of, where somebody has written them down."""
    table: ForeignTable
    conditions: Sequence[Condition] = ()
    is_distinct: bool = False
    dead_letters: DeadLetters = field(default_factory=DeadLetters)
    has_tail: bool = False
    """What is missing at the end of a partition may be on its way."""
    unproven: Sequence[Unproven] = ()
    notes: Sequence[str] = ()


def audit_matched(question: Question) -> Report:
    started_s = time.time()
    clock_s = time.monotonic()
    kinds = question.table.kinds()
    for attempt in range(ATTEMPTS):
        with tempfile.TemporaryDirectory(prefix="holdfast-audit-") as directory:
            try:
                with ScratchDatabase(directory) as database:
                    report = _audited(question, kinds, MatchedValues(database))
                break
            except OffsetGone as gone:
                if attempt == ATTEMPTS - 1:
                    raise AuditError(
                        f"the source loses its head faster than it can be read: {gone}"
                    ) from gone
    return replace(report, started_ms=int(started_s * 1000), took_ms=int((time.monotonic() - clock_s) * 1000))


def _audited(question: Question, kinds: Sequence[Kind], values: MatchedValues) -> Report:
    wheres, unread_rows = _read_rows(question.table, kinds, values)
    evaluator = Evaluator(question.table.match.expressions, question.conditions)
    with Cluster(question.settings) as cluster:
        walked = walk(cluster, grounds_of(cluster, question.scopes), evaluator, kinds, values)
        buckets = Buckets.between(walked.first_ms, walked.last_ms)
        outcome = values.compare(
            buckets, is_distinct=question.is_distinct, nulls_apart=bool(walked.unread_count)
        )
        judgement = _Judgement(question, cluster, evaluator, kinds, walked, outcome, wheres, unread_rows)
        examined = Examined.of(judgement.said())
    return judgement.report(examined, buckets)


def _read_rows(table: ForeignTable, kinds: Sequence[Kind], into: MatchedValues) -> tuple[list[str], int]:
    """Where rows were found, by their number, and how many cannot be read."""
    wheres: list[str] = []
    unread = 0
    for batch in table.rows():
        if not wheres or wheres[-1] != batch.where:
            wheres.append(batch.where)
        values = evaluated(batch.values, kinds)
        count = len(values.array)
        numbers = batch.numbers
        if numbers is None:
            numbers = np.arange(count) + batch.first if batch.first >= 0 else np.full(count, -1)
        good = ~values.bad
        unread += int(values.bad.sum())
        array = values.array if good.all() else values.array.filter(pa.array(good))
        into.add_rows(array, len(wheres) - 1, numbers[good])
    return wheres, unread


@dataclass
class _Judgement:
    question: Question
    cluster: Cluster
    evaluator: Evaluator
    kinds: Sequence[Kind]
    walked: Walked
    outcome: Outcome
    wheres: Sequence[str]
    unread_rows: int
    aside: dict[int, int] = field(default_factory=dict)
    """By place: records of the lost that were set aside."""
    tails: dict[int, int] = field(default_factory=dict)
    """By place: records at the end that may be on their way."""

    @property
    def table(self) -> ForeignTable:
        return self.question.table

    def said(self) -> Iterator[Said]:
        yield from self._recreated()
        yield from self.question.unproven
        yield from self._expired()
        yield from self._unreadable()
        yield from self._lost()
        yield from self._duplicated()
        yield from self._extra()
        yield from self.table.problems
        yield from self._unsure()

    def _recreated(self) -> Iterator[Said]:
        ids = self.question.topic_ids
        for topic, now in sorted(self.cluster.topics(sorted(ids)).items()) if ids else ():
            if str(now.topic_id) != str(ids[topic]):
                yield gap(
                    f"all of topic {topic!r}",
                    f"it was deleted and created again: its id was {ids[topic]}, now it is {now.topic_id}",
                )

    def _expired(self) -> Iterator[Said]:
        for ground in self.walked.grounds:
            if ground.expired:
                yield gap(
                    f"{ground.expired:,} offsets of {ground.name}, {ground.start} to {ground.log_start - 1}",
                    "the source does not hold them any more",
                )
            if ground.end > ground.log_end:
                why = f"the log ends at {ground.high_watermark}: the topic was deleted and created again, or cut"
                if ground.end <= ground.high_watermark:
                    why = f"a transaction that begins at {ground.log_end} is still open: nobody can say what counts"
                first = max(ground.log_end, ground.start)
                yield gap(f"offsets {first} to {ground.end - 1} of {ground.name}", why)

    def _unreadable(self) -> Iterator[Said]:
        for place, parts in sorted(self.walked.unread.items()):
            offsets = np.sort(np.concatenate(parts))
            ground = self.walked.grounds[place]
            keys = keys_at(self.cluster, ground.place, offsets[:3].tolist())
            known = f", keys {', '.join(keys)}" if keys else ""
            what = f"{_records_at(ground, offsets)}{known}"
            yield gap(what, f"{self.table.match} cannot be computed for them")
        excused = min(self.outcome.null_rows, self.walked.unread_count)
        if excused:
            yield gap(
                f"{excused:,} rows of {self.table.name} whose match columns are null",
                "they may stand for the records that cannot be read",
            )
        # There are no more such records than that.
        self.outcome.extra += self.outcome.null_rows - excused
        if self.unread_rows:
            yield gap(f"{self.unread_rows:,} rows of {self.table.name}", "their match columns cannot be read")

    def _lost(self) -> Iterator[Said]:
        """Records that no row stands for, unless the sink has lost rows by itself, or has some that cannot be read,
        enough of them to be these."""
        table, letters, outcome = self.table, self.question.dead_letters, self.outcome
        unseen = {
            f"has forgotten {table.forgotten:,} records: expired, or compacted away": table.forgotten,
            f"holds {table.undecided:,} offsets {OPEN}": table.undecided,
            f"the dead letters hold {letters.undecided:,} offsets {OPEN}": letters.undecided,
            f"has {self.unread_rows:,} rows that cannot be read": self.unread_rows,
        }
        is_seen = sum(unseen.values()) < sum(map(len, outcome.lost.values()))
        detail = f"no row of {table.match.columns[0]} stands for them"
        if outcome.repeats:
            detail = "fewer rows than records have their value"
        for place, offsets in sorted(outcome.lost.items()):
            ground = self.walked.grounds[place]
            is_aside = np.isin(offsets, letters.offsets.get(ground.at, np.zeros(0, np.int64)))
            self.aside[place] = int(is_aside.sum())
            offsets = offsets[~is_aside]
            if self.question.has_tail:
                is_tail = offsets > outcome.last_there.get(place, -1)
                self.tails[place] = int(is_tail.sum())
                yield from self._tail(ground, offsets[is_tail])
                offsets = offsets[~is_tail]
            if len(offsets) and is_seen:
                yield self._finding(Fate.LOST, ground, offsets, len(offsets), detail)
            elif len(offsets):
                why = ", and ".join(what for what, count in unseen.items() if count)
                yield gap(_records_at(ground, offsets), f"{table.name} does not have them, and {why}")

    def _tail(self, ground: Ground, offsets: Numbers) -> Iterator[Said]:
        if len(offsets):
            yield gap(
                f"{len(offsets):,} records at the end of {ground.name}, from offset {int(offsets[0])} on",
                f"they are not in {self.table.name}: on their way, or lost (--finished says that none is)",
            )

    def _duplicated(self) -> Iterator[Said]:
        outcome = self.outcome
        rows = sum(outcome.duplicated_rows.values())
        if rows and self.walked.forgotten and outcome.repeats:
            yield gap(
                f"{rows:,} rows of {self.table.name} more than records have their value",
                "values repeat, and the log has forgotten offsets: the rows may stand for those",
            )
            return
        for place, offsets in sorted(outcome.duplicated.items()):
            count = outcome.duplicated_rows.get(place, len(offsets))
            detail = f"{count:,} row{'s' if count > 1 else ''} too many"
            yield self._finding(Fate.DUPLICATED, self.walked.grounds[place], offsets, count, detail)

    def _finding(self, fate: Fate, ground: Ground, offsets: Numbers, count: int, detail: str) -> Finding:
        found = finding(fate, self.table.name, ground.place, offsets, detail, count)
        return replace(found, keys=tuple(keys_at(self.cluster, ground.place, offsets.tolist())))

    def _extra(self) -> Iterator[Said]:
        left, walked, name = self.outcome.extra, self.walked, self.table.name
        if len(self.outcome.extra_values):
            left -= yield from self._explained()
        if left <= 0:
            return
        examples = self.outcome.extra_examples
        # Of two topics, what comes behind the key is a digest of the value.
        parts = 1 if self.question.mode == "topics" else len(self.kinds)
        values = tuple(shown(each.value, len(self.kinds), parts) for each in examples)
        first = f"; the first{self._where(examples[0])}" if examples else ""
        excused = min(left, walked.forgotten)
        if excused:
            listed = f": {', '.join(values)}" if values else ""
            yield Unproven(
                f"{excused:,} rows of {name} match no record that can be read{listed}{first}",
                f"the log has forgotten {walked.forgotten:,} offsets, and they may come from those",
                # What the scope itself has lost cannot be proven; what was before it is not asked for.
                is_gap=left > walked.forgotten_before,
            )
        if left > excused:
            least = ", at least" if excused else ""
            detail = f"no record of the source has their {self.table.match.columns[0]}{least}{first}"
            yield Finding(Fate.EXTRA, name, None, (), left - excused, values, detail)

    def _where(self, extra: Extra) -> str:
        return f" in {self.wheres[extra.source]}" + (f" row {extra.row}" if extra.row >= 0 else "")

    def _explained(self) -> Generator[Said, None, int]:
        """Extra rows that are records all the same: left out by the condition, taken back, or not decided yet.

        Returns how many rows they are.
        """
        outcome, grounds = self.outcome, self.walked.grounds
        values = outcome.extra_values
        look = (self.cluster, grounds, self.evaluator, self.kinds, values)
        ends = {ground.place: ground.log_end for ground in grounds}
        committed: dict[Place, Numbers] = {}
        known = pa.array([], pa.large_binary())
        if self.question.conditions:
            committed, known = find_values(*look, "read_committed")
            yield from self._rows_of(committed, "that --where leaves out")
        if self.walked.aborted or any(each.undecided for each in grounds):
            everywhere, more = find_values(*look, "read_uncommitted")
            known = pa.concat_arrays([known, more])
            other = {
                place: np.setdiff1d(offsets, committed.get(place, np.zeros(0, np.int64)))
                for place, offsets in everywhere.items()
            }
            gone = {place: offsets[offsets < ends[place]] for place, offsets in other.items()}
            yield from self._rows_of(gone, "taken back: the transaction was aborted")
            undecided = {place: offsets[offsets >= ends[place]] for place, offsets in other.items()}
            yield from self._rows_of(undecided, "not committed yet")
        outcome.extra_examples[:] = [
            each
            for each in outcome.extra_examples
            if not pc.is_in(pa.scalar(each.value, pa.large_binary()), value_set=known).as_py()
        ]
        return int(outcome.extra_counts[flags(pc.is_in(values, value_set=known, skip_nulls=True))].sum())

    def _rows_of(self, found: Mapping[Place, Numbers], why: str) -> Iterator[Said]:
        for place, offsets in sorted(found.items()):
            if len(offsets):
                yield finding(Fate.EXTRA, self.table.name, place, offsets, f"rows of records {why}")

    def _unsure(self) -> Iterator[Said]:
        """What cannot be told by the match."""
        outcome, question = self.outcome, self.question
        if outcome.unsure:
            yield gap(
                f"{outcome.unsure:,} records of the scope",
                "records before it have the same value, and the rows do not suffice for both",
            )
        if outcome.repeats and not question.is_distinct:
            yield Unproven(
                f"which of {outcome.repeats:,} records with a value that repeats a row stands for",
                f"{self.table.match} does not tell them apart; how many there are was compared",
            )
        if not question.conditions and question.mode != "topics":
            yield Unproven(
                "that the job had to write every record",
                "a filter of its own is not known; --where names it",
            )

    # The report

    def report(self, examined: Examined, buckets: Buckets) -> Report:
        question, table, grounds, outcome = self.question, self.table, self.walked.grounds, self.outcome
        partitions = tuple(self._account(number, ground) for number, ground in enumerate(grounds))
        fates = words.summed(account.fates for account in partitions)
        if outcome.extra:
            fates[Fate.EXTRA] = outcome.extra
        positions = {ground.name: ground.end for ground in grounds}
        pending = sum(max(0, ground.log_end - max(ground.end, ground.log_start)) for ground in grounds)
        return Report(
            subject=question.subject,
            mode=question.mode,
            scope=Scope(
                question.begins,
                question.ends,
                sum(max(0, ground.end - ground.start) for ground in grounds),
                sum(ground.expired for ground in grounds),
                pending,
            ),
            partitions=partitions,
            sinks=(SinkAccount(table.name, table.kind, outcome.rows, 0, positions, fates),),
            findings=examined.findings,
            unproven=examined.unproven,
            timeline=buckets.timeline(outcome.times),
            lag={table.name: pending},
            notes=(*question.notes, *table.notes, f"matched by {table.match}"),
            versions={"holdfast": __version__},
        )

    def _account(self, number: int, ground: Ground) -> PartitionAccount:
        fates = {str(fate): count for fate, count in self.outcome.fates.get(number, {}).items()}
        for fate, by_place in ((Fate.DEAD_LETTER, self.aside), (Fate.PENDING, self.tails)):
            if count := by_place.get(number, 0):
                fates[fate] = count
                fates[Fate.LOST] -= count
        fates[Fate.FILTERED] = self.walked.filtered.get(number, 0)
        return ground.account({fate: count for fate, count in fates.items() if count})


def _records_at(ground: Ground, offsets: Numbers) -> str:
    return f"{len(offsets):,} records of {ground.name} at {ranges_text(as_ranges(offsets))}"
