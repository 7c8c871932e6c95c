"""Audits one after the other: each looks at what is new since the last proof, and now and then at everything.

The rules:

- An audit that failed ends it: somebody has to look. One that is inconclusive, or could not be made (a broker away), is
  counted and told, and the next begins where the last proof ended.
- An incremental audit begins where everything below is proven. It looks at everything instead when there is no proof
  yet, the definition is another, the pipeline remembers rows (what is new cannot be judged without what is old), a mark
  of the old part changed, or it is the Nth since it last did.
- What the marks cannot see of the old part is told with each incremental report, as something that is not proven.
- The proof is written down after the certificate: a crash in between costs one audit more, never a claim without one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Protocol

from holdfast.audit import words
from holdfast.audit.certificate import Certificate
from holdfast.audit.metrics import AuditMetrics
from holdfast.audit.model import Report, Unproven, Verdict
from holdfast.audit.proven import (
    Proven,
    Seen,
    Topics,
    TopicStart,
    advanced,
    changes,
    kept,
    read_state,
    topic_ends,
    write_state,
)
from holdfast.errors import HoldfastError, UsageError
from holdfast.pipeline.definition.model import (
    Dedupe,
    Join,
    Keyed,
    PipelineDefinition,
    Window,
)
from holdfast.pipeline.definition.streams import merged
from holdfast.pipeline.positions import Place

FULL_EVERY_DEFAULT: Final = 12
CHANGES_SHOWN: Final = 3


class Auditor(Protocol):
    """What is audited, again and again."""

    subject: str
    fingerprint: str

    def audit(self, since: Mapping[Place, int] | None, topics: Topics) -> Report:
        """Look at everything, or at what lies behind these positions, in sinks that are topics from there on."""

    def marks(self, proven: Mapping[Place, int]) -> Mapping[str, Seen]:
        """By sink, what its old part looks like from outside; `proven` are the positions it is old up to."""

    def remembers(self) -> str:
        """Why what is new cannot be judged alone; nothing: it can."""


def remembering(definition: PipelineDefinition) -> str:
    """Why an audit of this pipeline always looks at everything; nothing: it need not."""
    for step in definition.steps:
        if isinstance(step, Dedupe | Window | Keyed | Join):
            return f"step {step.name!r} remembers rows"
    for sink in definition.sinks:
        if merged(sink) is not None:
            return f"sink {sink.name!r} keeps the last row of each key"
    return ""


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
        reason = "it was asked for" if full else self._why_full(old, before)
        since = None if old is None or reason else old.positions
        self.was_full = since is None
        report = self.auditor.audit(since, old.topics if old is not None and since is not None else {})
        report = replace(
            report,
            notes=(
                *report.notes,
                *([f"everything was looked at: {reason}"] if old is not None and reason else ()),
            ),
            unproven=(*report.unproven, *(_unseen(before) if since is not None else ())),
        )
        certificate = self.keep(report)
        if report.verdict.exit_code == 0:
            self._advance(None if since is None else old, report, before, certificate)
        return report

    def _why_full(self, old: Proven | None, now: Mapping[str, Seen]) -> str:
        if old is None:
            return "nothing is proven yet"
        remembers = self.auditor.remembers()
        if remembers:
            return remembers
        if old.fingerprint != self.auditor.fingerprint:
            return "the definition is another than the one that was proven"
        if set(old.marks) != set(now):
            return "the sinks are others than those that were proven"
        for sink, marks in old.marks.items():
            found = [] if now[sink].unseen else changes(marks, now[sink].marks)
            if found:
                more = f" and {len(found) - CHANGES_SHOWN} more" if len(found) > CHANGES_SHOWN else ""
                listed = ", ".join(found[:CHANGES_SHOWN])
                return f"the part of sink {sink!r} that was proven has changed since ({listed}{more})"
        if self.full_every and old.runs_since_full + 1 >= self.full_every:
            return f"each {self.full_every}th audit does"
        return ""

    def _advance(
        self,
        on_top_of: Proven | None,
        report: Report,
        before: Mapping[str, Seen],
        certificate: Certificate | None,
    ) -> None:
        made = advanced(on_top_of, report, {}, certificate.sha256 if certificate else "")
        after = self.auditor.marks(made.positions)
        marks = {
            sink: kept(before[sink].marks if sink in before else {}, seen.marks)
            for sink, seen in after.items()
        }
        known = on_top_of.topics if on_top_of is not None else {}
        self.proven = replace(made, marks=marks, topics={**known, **_proven_topics(report, before)})
        if self.state_path is not None:
            write_state(self.state_path, self.proven)


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


def _unseen(seen: Mapping[str, Seen]) -> Sequence[Unproven]:
    return [
        Unproven(
            f"that what was proven earlier of sink {sink!r} is still as it was",
            f"it was not looked at again: {each.unseen}",
        )
        for sink, each in seen.items()
        if each.unseen
    ]


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
