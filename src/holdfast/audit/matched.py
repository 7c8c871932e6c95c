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
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast import __version__
from holdfast.audit.compare import finding
from holdfast.audit.evaluating import Evaluator, Kind, shown
from holdfast.audit.foreign_rows import ForeignTable
from holdfast.audit.foreign_tables import DeadLetters
from holdfast.audit.lineage import as_ranges
from holdfast.audit.matched_values import Buckets, MatchedValues, Numbers, Outcome
from holdfast.audit.matching import Condition
from holdfast.audit.model import (
    AuditError,
    Fate,
    Finding,
    Mode,
    PartitionAccount,
    Report,
    Scope,
    SinkAccount,
    Unproven,
    gap,
    ranges_text,
)
from holdfast.audit.record_walk import (
    Ground,
    Walked,
    evaluated,
    find_values,
    grounds_of,
    walk,
)
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
    table: ForeignTable
    conditions: Sequence[Condition] = ()
    is_distinct: bool = False
    dead_letters: DeadLetters = field(default_factory=DeadLetters)
    has_tail: bool = False
    """What is missing at the end of a partition may be on its way."""
    is_all_wanted: bool = False
    """No record is left out on purpose."""
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
                    report = _Audit(question, kinds, MatchedValues(database)).run()
                break
            except OffsetGone as gone:
                if attempt == ATTEMPTS - 1:
                    raise AuditError(
                        f"the source loses its head faster than it can be read: {gone}"
                    ) from gone
    return replace(report, started_ms=int(started_s * 1000), took_ms=int((time.monotonic() - clock_s) * 1000))


class _Audit:
    def __init__(self, question: Question, kinds: Sequence[Kind], values: MatchedValues) -> None:
        self._question = question
        self._table = question.table
        self._kinds = kinds
        self._values = values
        self._wheres: list[str] = []
        self._evaluator = Evaluator(question.table.match.expressions, question.conditions)
        self._findings: list[Finding] = []
        self._unproven: list[Unproven] = list(question.unproven)
        self._unread_rows = 0
        self._tails: dict[int, int] = {}
        """By place: records at the end that may be on their way."""

    def run(self) -> Report:
        self._read_rows()
        with Cluster(self._question.settings) as cluster:
            grounds = grounds_of(cluster, self._question.scopes)
            walked = walk(cluster, grounds, self._evaluator, self._kinds, self._values)
            buckets = Buckets.between(walked.first_ms, walked.last_ms)
            outcome = self._values.compare(
                buckets, is_distinct=self._question.is_distinct, nulls_apart=bool(walked.unread_count)
            )
            self._expired(walked)
            self._unreadable(cluster, walked, outcome)
            letters = self._lost(cluster, grounds, outcome)
            self._duplicated(cluster, grounds, walked, outcome)
            self._extra(cluster, walked, outcome)
            self._rest(outcome)
        return self._report(walked, outcome, buckets, letters)

    def _gap(self, what: str, why: str) -> None:
        self._unproven.append(gap(what, why))

    # The sink

    def _read_rows(self) -> None:
        for batch in self._table.rows():
            if not self._wheres or self._wheres[-1] != batch.where:
                self._wheres.append(batch.where)
            values = evaluated(batch.values, self._kinds)
            count = len(values.array)
            numbers = batch.numbers
            if numbers is None:
                numbers = np.arange(count) + batch.first if batch.first >= 0 else np.full(count, -1)
            good = ~values.bad
            self._unread_rows += int(values.bad.sum())
            array = values.array if good.all() else values.array.filter(pa.array(good))
            self._values.add_rows(array, len(self._wheres) - 1, numbers[good])

    # What was found

    def _expired(self, walked: Walked) -> None:
        for ground in walked.grounds:
            name = _name(ground.place)
            if ground.expired:
                self._gap(
                    f"{ground.expired:,} offsets of {name}, {ground.start} to {ground.log_start - 1}",
                    "the source does not hold them any more",
                )
            if ground.end > ground.log_end:
                why = f"the log ends at {ground.high_watermark}: the topic was deleted and created again, or cut"
                if ground.end <= ground.high_watermark:
                    why = f"a transaction that begins at {ground.log_end} is still open: nobody can say what counts"
                self._gap(f"offsets {max(ground.log_end, ground.start)} to {ground.end - 1} of {name}", why)

    def _unreadable(self, cluster: Cluster, walked: Walked, outcome: Outcome) -> None:
        for place, parts in sorted(walked.unread.items()):
            offsets = np.sort(np.concatenate(parts))
            ground = walked.grounds[place]
            keys = keys_at(cluster, ground.place, offsets[:3].tolist())
            known = f", keys {', '.join(keys)}" if keys else ""
            self._gap(
                f"{len(offsets):,} records of {_name(ground.place)} at {_ranges_text(offsets)}{known}",
                f"{self._table.match} cannot be computed for them",
            )
        excused = min(outcome.null_rows, walked.unread_count)
        if excused:
            self._gap(
                f"{excused:,} rows of {self._table.name} whose match columns are null",
                "they may stand for the records that cannot be read",
            )
        # There are no more such records than that.
        outcome.extra += outcome.null_rows - excused
        if self._unread_rows:
            self._gap(
                f"{self._unread_rows:,} rows of {self._table.name}", "their match columns cannot be read"
            )

    def _lost(self, cluster: Cluster, grounds: Sequence[Ground], outcome: Outcome) -> dict[int, int]:
        """Records that no row stands for; returns how many of them were set aside, by place."""
        letters: dict[int, int] = {}
        total = sum(map(len, outcome.lost.values()))
        for place, offsets in sorted(outcome.lost.items()):
            ground = grounds[place]
            aside = self._question.dead_letters.offsets.get(
                TopicPartition(ground.place.topic, ground.place.partition), np.zeros(0, np.int64)
            )
            is_aside = np.isin(offsets, aside)
            letters[place] = int(is_aside.sum())
            offsets = offsets[~is_aside]
            if self._question.has_tail:
                offsets = self._without_tail(ground, offsets, outcome.last_there.get(place, -1), place)
            if not len(offsets):
                continue
            unseen = self._table.forgotten + self._table.undecided + self._question.dead_letters.undecided
            if unseen + self._unread_rows >= total:
                self._forgotten(ground, offsets)
                continue
            detail = f"no row of {self._table.match.columns[0]} stands for them"
            if outcome.repeats:
                detail = "fewer rows than records have their value"
            self._findings.append(self._finding(cluster, Fate.LOST, ground, offsets, len(offsets), detail))
        return letters

    def _forgotten(self, ground: Ground, offsets: Numbers) -> None:
        """The sink has lost rows by itself, or has some that cannot be read: enough of them to be these."""
        table, letters = self._table, self._question.dead_letters
        why = {
            f"has forgotten {table.forgotten:,} records: expired, or compacted away": table.forgotten,
            f"holds {table.undecided:,} offsets {OPEN}": table.undecided,
            f"the dead letters hold {letters.undecided:,} offsets {OPEN}": letters.undecided,
            f"has {self._unread_rows:,} rows that cannot be read": self._unread_rows,
        }
        said = ", and ".join(words for words, count in why.items() if count)
        self._gap(
            f"{len(offsets):,} records of {_name(ground.place)} at {_ranges_text(offsets)}",
            f"{table.name} does not have them, and {said}",
        )

    def _without_tail(self, ground: Ground, offsets: Numbers, last_there: int, place: int) -> Numbers:
        tail = offsets[offsets > last_there]
        if len(tail):
            self._tails[place] = len(tail)
            self._gap(
                f"{len(tail):,} records at the end of {_name(ground.place)}, from offset {int(tail[0])} on",
                f"they are not in {self._table.name}: on their way, or lost (--finished says that none is)",
            )
        return offsets[offsets <= last_there]

    def _duplicated(
        self, cluster: Cluster, grounds: Sequence[Ground], walked: Walked, outcome: Outcome
    ) -> None:
        rows = sum(outcome.duplicated_rows.values())
        if rows and walked.forgotten and outcome.repeats:
            self._gap(
                f"{rows:,} rows of {self._table.name} more than records have their value",
                "values repeat, and the log has forgotten offsets: the rows may stand for those",
            )
            return
        for place, offsets in sorted(outcome.duplicated.items()):
            count = outcome.duplicated_rows.get(place, len(offsets))
            detail = f"{count:,} row{'s' if count > 1 else ''} too many"
            self._findings.append(
                self._finding(cluster, Fate.DUPLICATED, grounds[place], offsets, count, detail)
            )

    def _finding(
        self, cluster: Cluster, fate: Fate, ground: Ground, offsets: Numbers, count: int, detail: str
    ) -> Finding:
        found = finding(fate, self._table.name, ground.place, offsets, detail, count)
        return replace(found, keys=tuple(keys_at(cluster, ground.place, offsets.tolist())))

    def _extra(self, cluster: Cluster, walked: Walked, outcome: Outcome) -> None:
        if not outcome.extra:
            return
        left = outcome.extra
        if len(outcome.extra_values):
            left -= self._explained(cluster, walked, outcome)
        if left <= 0:
            return
        examples = outcome.extra_examples
        # Of two topics, what comes behind the key is a digest of the value.
        parts = 1 if self._question.mode == "topics" else len(self._kinds)
        shown_values = [shown(each.value, len(self._kinds), parts) for each in examples]
        first = f"; the first{self._where(examples[0].source, examples[0].row)}" if examples else ""
        excused = min(left, walked.forgotten)
        if excused:
            listed = f": {', '.join(shown_values)}" if shown_values else ""
            self._unproven.append(
                Unproven(
                    f"{excused:,} rows of {self._table.name} match no record that can be read{listed}{first}",
                    f"the log has forgotten {walked.forgotten:,} offsets, and they may come from those",
                    # What the scope itself has lost cannot be proven; what was before it is not asked for.
                    is_gap=left > walked.forgotten_before,
                )
            )
        left -= excused
        if not left:
            return
        least = ", at least" if excused else ""
        detail = f"no record of the source has their {self._table.match.columns[0]}{least}{first}"
        self._findings.append(
            Finding(Fate.EXTRA, self._table.name, None, (), left, tuple(shown_values), detail)
        )

    def _where(self, source: int, row: int) -> str:
        return f" in {self._wheres[source]}" + (f" row {row}" if row >= 0 else "")

    def _explained(self, cluster: Cluster, walked: Walked, outcome: Outcome) -> int:
        """Extra rows that are records all the same: left out by the condition, taken back, or not decided yet.

        Returns how many rows they are.
        """
        values = outcome.extra_values
        look = (cluster, walked.grounds, self._evaluator, self._kinds, values)
        ends = {ground.place: ground.log_end for ground in walked.grounds}
        committed: dict[Place, Numbers] = {}
        found = [pa.array([], pa.large_binary())]
        if self._question.conditions:
            committed, known = find_values(*look, "read_committed")
            found.append(known)
            self._note_extra(committed, "that --where leaves out")
        if walked.aborted or any(each.high_watermark > each.log_end for each in walked.grounds):
            everywhere, known = find_values(*look, "read_uncommitted")
            found.append(known)
            other = {
                place: np.setdiff1d(offsets, committed.get(place, np.zeros(0, np.int64)))
                for place, offsets in everywhere.items()
            }
            gone = {place: offsets[offsets < ends[place]] for place, offsets in other.items()}
            self._note_extra(gone, "taken back: the transaction was aborted")
            undecided = {place: offsets[offsets >= ends[place]] for place, offsets in other.items()}
            self._note_extra(undecided, "not committed yet")
        known = pa.concat_arrays(found)
        outcome.extra_examples[:] = [
            each
            for each in outcome.extra_examples
            if not pc.is_in(pa.scalar(each.value, pa.large_binary()), value_set=known).as_py()
        ]
        hits = pc.is_in(values, value_set=known, skip_nulls=True).to_numpy(zero_copy_only=False)
        return int(outcome.extra_counts[hits].sum())

    def _note_extra(self, found: Mapping[Place, Numbers], why: str) -> None:
        for place, offsets in sorted(found.items()):
            if len(offsets):
                detail = f"rows of records {why}"
                self._findings.append(finding(Fate.EXTRA, self._table.name, place, offsets, detail))

    def _rest(self, outcome: Outcome) -> None:
        self._findings += self._table.problems
        if outcome.unsure:
            self._gap(
                f"{outcome.unsure:,} records of the scope",
                "records before it have the same value, and the rows do not suffice for both",
            )
        if outcome.repeats and not self._question.is_distinct:
            self._unproven.append(
                Unproven(
                    f"which of {outcome.repeats:,} records with a value that repeats a row stands for",
                    f"{self._table.match} does not tell them apart; how many there are was compared",
                )
            )
        if not self._question.conditions and not self._question.is_all_wanted:
            self._unproven.append(
                Unproven(
                    "that the job had to write every record",
                    "a filter of its own is not known; --where names it",
                )
            )

    # The report

    def _report(
        self, walked: Walked, outcome: Outcome, buckets: Buckets, letters: Mapping[int, int]
    ) -> Report:
        partitions = tuple(
            self._account(number, ground, walked, outcome, letters.get(number, 0))
            for number, ground in enumerate(walked.grounds)
        )
        fates: Counter[str] = Counter()
        for account in partitions:
            fates.update(account.fates)
        if outcome.extra:
            fates[Fate.EXTRA] = outcome.extra
        positions = {_name(ground.place): ground.end for ground in walked.grounds}
        pending = sum(max(0, ground.log_end - max(ground.end, ground.log_start)) for ground in walked.grounds)
        table = self._table
        return Report(
            subject=self._question.subject,
            mode=self._question.mode,
            scope=Scope(
                self._question.begins,
                self._question.ends,
                sum(max(0, ground.end - ground.start) for ground in walked.grounds),
                sum(ground.expired for ground in walked.grounds),
                pending,
            ),
            partitions=partitions,
            sinks=(SinkAccount(table.name, table.kind, outcome.rows, 0, positions, fates),),
            findings=tuple(self._findings),
            unproven=tuple(self._unproven),
            timeline=buckets.timeline(outcome.times),
            lag={table.name: pending},
            notes=(*self._question.notes, *table.notes, f"matched by {table.match}"),
            versions={"holdfast": __version__},
        )

    def _account(
        self, number: int, ground: Ground, walked: Walked, outcome: Outcome, letters: int
    ) -> PartitionAccount:
        fates: dict[str, int] = {str(fate): count for fate, count in outcome.fates.get(number, {}).items()}
        for fate, count in ((Fate.DEAD_LETTER, letters), (Fate.PENDING, self._tails.get(number, 0))):
            if count:
                fates[fate] = count
                fates[Fate.LOST] -= count
        if not fates.get(Fate.LOST, 1):
            del fates[Fate.LOST]
        if walked.filtered.get(number):
            fates[Fate.FILTERED] = walked.filtered[number]
        return PartitionAccount(
            ground.place,
            ground.start,
            max(ground.start, ground.end),
            {str(kind): count for kind, count in walked.kinds[number].items()},
            fates,
            ground.log_start,
            ground.log_end,
        )


def _name(place: Place) -> str:
    return f"{place.topic}-{place.partition}"


def _ranges_text(offsets: Numbers) -> str:
    return ranges_text(as_ranges(offsets))
