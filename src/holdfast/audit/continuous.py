"""Audits one after the other: each looks at what is new since the last proof, and now and then at everything.

The rules:

- An audit that failed ends it: somebody has to look. One that is inconclusive, or could not be made (a broker away), is
  counted and told, and the next begins where the last proof ended.
- An incremental audit begins where everything below is proven, with what the audit before it has handed on of what
  the pipeline remembers (`stateful.carried`). It looks at everything instead when there is no proof yet, the definition
  is another, what was handed on is missing, a mark of the old part changed, or it is the Nth since it last did.
- Where the change is that batches of files were merged, or were changed, it goes back to a checkpoint before them.
- One that was handed something on and does not come out clean is made again, of everything: what is wrong is told by
  an audit that has seen all of it.
- What the marks cannot see of the old part is told with each incremental report, as something that is not proven.
- The proof is written down after the certificate: a crash in between costs one audit more, never a claim without one.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from holdfast.audit import words
from holdfast.audit.certificate import Certificate
from holdfast.audit.metrics import AuditMetrics
from holdfast.audit.model import Report, Unproven, Verdict
from holdfast.audit.proven import (
    Checkpoint,
    Handed,
    Proven,
    Seen,
    Topics,
    TopicStart,
    advanced,
    changes,
    first_changed,
    kept,
    read_state,
    spread,
    topic_ends,
    write_state,
)
from holdfast.audit.stateful.carried import Carried, Memory
from holdfast.errors import HoldfastError, UsageError
from holdfast.pipeline.positions import Place
from holdfast.pipeline.row_digest import DigestKey

FULL_EVERY_DEFAULT: Final = 12
CHANGES_SHOWN: Final = 3


class Auditor(Protocol):
    """What is audited, again and again."""

    subject: str
    fingerprint: str

    def audit(self, since: Mapping[Place, int] | None, topics: Topics, memory: Memory | None) -> Report:
        """Look at everything, or at what lies behind these positions, in sinks that are topics from there on. `memory`
        has what was handed on there, and takes what is to be handed on."""

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        """By sink, what its old part looks like from outside; `proven` are the positions it is old up to."""

    def remembers(self) -> str:
        """Why what is new cannot be judged without what an earlier audit hands on; nothing: it can."""


@dataclass
class Incremental:
    """One audit after the other on top of what is proven."""

    auditor: Auditor
    state_path: str | None = None
    full_every: int = FULL_EVERY_DEFAULT
    """Each Nth audit looks at everything; 0: only when something asks for it."""
    keep: Callable[[Report], Certificate | None] = lambda report: None
    """Writes the certificate and whatever else is wanted of a report."""
    proven: Proven | None = None
    was_full: bool = field(default=True, init=False)

    def __post_init__(self) -> None:
        self._handed = Handed(self.state_path)
        if self.state_path is None:
            return
        self.proven = read_state(self.state_path)
        if self.proven is not None and self.proven.subject != self.auditor.subject:
            raise UsageError(
                f"{self.state_path} is the state of the audit of {self.proven.subject!r}, not of "
                f"{self.auditor.subject!r}: name another file"
            )

    def run(self, *, full: bool = False) -> Report:
        """The next audit."""
        old = self.proven
        before = self.auditor.marks(old.positions if old is not None else {})
        secret = bytes.fromhex(old.secret if old is not None else "") or secrets.token_bytes(32)
        reason, start = ("it was asked for", None) if full else self._where_to_begin(old, before)
        memory = Memory(DigestKey(secret))
        if start is not None and start.carried:
            memory.before = self._carried(start)
            if memory.before is None:
                reason = "what an earlier audit has handed on is not there any more, or is not what it wrote"
                start = None
        report = self._audit(start, memory, before)
        if report.verdict.exit_code and memory.before is not None:
            reason, start, memory = "of what is new not all could be proven", None, Memory(memory.key)
            report = self._audit(None, memory, before)
        self.was_full = start is None
        looked = "everything" if start is None else "more than what is new"
        if old is not None and reason:
            report = replace(report, notes=(*report.notes, f"{looked} was looked at: {reason}"))
        certificate = self.keep(report)
        if report.verdict.exit_code == 0:
            self._advance(old, start, report, before, certificate, memory, secret)
        return report

    def _audit(self, start: Checkpoint | None, memory: Memory, seen: Mapping[str, Seen]) -> Report:
        if start is None:
            return self.auditor.audit(None, {}, memory)
        report = self.auditor.audit(start.positions, start.topics, memory)
        looked_at = memory.before.tables if memory.before is not None else {}
        unseen = (
            Unproven(
                f"that what was proven earlier of sink {sink!r} is still as it was",
                f"it was not looked at again: {each.unseen}",
            )
            for sink, each in seen.items()
            if each.unseen and sink not in looked_at
        )
        return replace(report, unproven=(*report.unproven, *unseen))

    def _carried(self, start: Checkpoint) -> Carried | None:
        data = self._handed.get(start.carried)
        return None if data is None else Carried.from_bytes(data)

    def _where_to_begin(self, old: Proven | None, now: Mapping[str, Seen]) -> tuple[str, Checkpoint | None]:
        """The checkpoint, and why it is not the newest; without one, why everything is looked at."""
        reason = self._why_full(old, now)
        if old is None or reason:
            return reason, None
        # A state of before there were checkpoints has one all the same.
        only = Checkpoint(old.positions, old.topics, records=old.records, fates=old.fates)
        points = list(old.checkpoints) or [only]
        reason = ""
        for sink, marks in old.marks.items():
            found = [] if now[sink].unseen else changes(marks, now[sink].marks)
            if not found:
                continue
            more = f" and {len(found) - CHANGES_SHOWN} more" if len(found) > CHANGES_SHOWN else ""
            listed = ", ".join(found[:CHANGES_SHOWN])
            reason = reason or f"the part of sink {sink!r} that was proven has changed since ({listed}{more})"
            first = first_changed(marks, now[sink].marks)
            points = [point for point in points if point.numbers.get(sink, first) < first]
        if not points:
            return reason, None
        remembers = self.auditor.remembers()
        if remembers and not points[-1].carried:
            return points[-1].lacks or remembers, None
        return reason, points[-1]

    def _why_full(self, old: Proven | None, now: Mapping[str, Seen]) -> str:
        if old is None:
            return "nothing is proven yet"
        if old.fingerprint != self.auditor.fingerprint:
            return "the definition is another than the one that was proven"
        if set(old.marks) != set(now):
            return "the sinks are others than those that were proven"
        if self.full_every and old.runs_since_full + 1 >= self.full_every:
            return f"each {self.full_every}th audit does"
        return ""

    def _advance(
        self,
        old: Proven | None,
        start: Checkpoint | None,
        report: Report,
        before: Mapping[str, Seen],
        certificate: Certificate | None,
        memory: Memory,
        secret: bytes,
    ) -> None:
        on_top_of = None
        if old is not None and start is not None:
            on_top_of = replace(old, records=start.records, fates=start.fates)
        made = advanced(on_top_of, report, {}, certificate.sha256 if certificate else "")
        marks = {
            sink: kept(before.get(sink, Seen()).marks, seen.marks)
            for sink, seen in self.auditor.marks(made.positions).items()
        }
        topics = {**(start.topics if start is not None else {}), **_proven_topics(report, before)}
        carried = memory.after or Carried()
        digest = self._handed.put(carried.as_bytes()) if carried.is_needed else ""
        newest = Checkpoint(
            made.positions, topics, carried.numbers, digest, carried.lacks, made.records, made.fates
        )
        # Those behind where this audit began are of what has changed since.
        points = [each for each in made.checkpoints if start is not None and each.records <= start.records]
        self.proven = replace(
            made, marks=marks, topics=topics, checkpoints=spread([*points, newest]), secret=secret.hex()
        )
        if self.state_path is not None:
            write_state(self.state_path, self.proven)
        self._handed.keep({each.carried for each in self.proven.checkpoints})


def _proven_topics(report: Report, before: Mapping[str, Seen]) -> dict[str, TopicStart]:
    """Where the topics ended of which nothing but what is proven now can lie below: the ledger of such a sink, read
    after its end was, stood where the proof ends. One that was ahead has records below that are not proven yet."""
    ends = {words.place_text(each.place): each.end for each in report.partitions}
    since = {each.place: each.end for each in report.partitions}
    return {
        sink.name: TopicStart(found, since)
        for sink in report.sinks
        if sink.name in before and dict(sink.positions) == ends and (found := topic_ends(before[sink.name]))
    }


@dataclass
class Watch:
    """Audits until one fails, or somebody stops it."""

    audits: Incremental
    every_s: float
    metrics: AuditMetrics
    wait: Callable[[float], bool]
    """Waits so many seconds; true when it is time to stop."""
    tell: Callable[[Report], None]
    complain: Callable[[str], None]
    now_s: Callable[[], float] = time.time
    count: int = field(default=0, init=False)

    def run(self, *, full_first: bool = False) -> Verdict | None:
        """The newest verdict when it ended; nothing if there was none."""
        newest: Verdict | None = None
        while True:
            began_s = self.now_s()
            report = self._once(full=full_first and self.count == 0)
            if report is not None:
                newest = report.verdict
                if newest is Verdict.FAILED:
                    return newest
            # Audits begin at even distances; one that takes longer than that is followed by the next at once.
            if self.wait(max(began_s + self.every_s - self.now_s(), 0.0)):
                return newest

    def _once(self, *, full: bool) -> Report | None:
        self.count += 1
        try:
            report = self.audits.run(full=full)
        except UsageError:
            raise
        except (HoldfastError, OSError) as error:
            self.metrics.observe_error(int(self.now_s() * 1000))
            self.complain(f"audit {self.count:,} could not be made, the next one tries again: {error}")
            return None
        self.metrics.observe(report, self.audits.proven, was_full=self.audits.was_full)
        self.tell(report)
        return report


def summary(report: Report, *, was_full: bool) -> str:
    """One line for each audit of many."""
    what = "everything" if was_full else "what is new"
    return (
        f"{words.moment(report.started_ms)} {what}: {words.looked_at(report)}: {words.verdict_line(report)}"
    )
