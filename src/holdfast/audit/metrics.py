"""What continuous audits tell Prometheus, in its text format, on a port of this machine.

The names are a promise to alert rules. `holdfast_audit_verdict` has one series for each verdict, the newest being
1. The time since the last proof is what to alert on: it also grows when the auditor is stuck or gone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from holdfast.audit import words
from holdfast.audit.model import Evidence, Fate, Report, Verdict
from holdfast.audit.proven import Proven
from holdfast.exposition import Family, Numbers, table

LAST_PROVEN: Final = "last_proven_timestamp_seconds"
_SUBJECT: Final = ("subject",)
_PLACE: Final = (*_SUBJECT, "topic", "partition")
_VERDICT, _FATE, _GAP, _EVIDENCE, _SINK = (
    (*_SUBJECT, label) for label in ("verdict", "fate", "gap", "evidence", "sink")
)

PREFIX: Final = "holdfast_audit_"
"""Of every name."""
FAMILIES: Final = table(
    *(
        Family(PREFIX + name, "counter" if name.endswith("_total") else "gauge", meaning, labels)
        for name, labels, meaning in (
            ("runs_total", _VERDICT, "Audits that came to a verdict, by verdict."),
            ("errors_total", _SUBJECT, "Audits that came to none: something could not be reached."),
            ("full_runs_total", _SUBJECT, "Audits that looked at everything again."),
            ("verdict", _VERDICT, "1 for the newest verdict, 0 for the others."),
            ("last_run_timestamp_seconds", _SUBJECT, "When the newest audit began."),
            (LAST_PROVEN, _SUBJECT, "When the newest audit that was proven began; 0: none."),
            ("duration_seconds", _SUBJECT, "How long the newest audit took."),
            ("records", _FATE, "Records by fate: all that was looked at since the last full audit."),
            ("findings", _FATE, "Findings of the newest audit, by fate."),
            (
                "unproven",
                _GAP,
                "What the newest audit could not prove; gap: it kept the verdict open.",
            ),
            ("cells", _EVIDENCE, "Cells of the newest audit: recomputed, unaltered or trusted."),
            ("proven_offset", _PLACE, "Every offset below is accounted for."),
            ("log_end_offset", _PLACE, "Where the source's log ended when the newest audit began."),
            ("sink_lag_offsets", _SINK, "Offsets between where a sink stands and the end of the log."),
        )
    )
)


@dataclass
class AuditMetrics:
    """The numbers of one subject; read by the server's threads while the audits write."""

    subject: str
    _numbers: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = Numbers(FAMILIES, subject=self.subject)
        for verdict in Verdict:
            self._set("verdict", 0, verdict=verdict)
            self._set("runs_total", 0, verdict=verdict)
        for name in ("errors_total", "full_runs_total", LAST_PROVEN):
            self._set(name, 0)

    def observe(self, report: Report, proven: Proven | None, *, was_full: bool) -> None:
        """An audit came to a verdict; `proven` is what is proven after it."""
        with self._numbers.lock:
            for verdict in Verdict:
                self._set("verdict", verdict is report.verdict, verdict=verdict)
            self._add("runs_total", verdict=report.verdict)
            if was_full:
                self._add("full_runs_total")
            self._set("last_run_timestamp_seconds", report.started_ms / 1000)
            self._set("duration_seconds", report.took_ms / 1000)
            if report.verdict.exit_code == 0:
                self._set(LAST_PROVEN, report.started_ms / 1000)
            self._observe_records(report, proven)
            self._observe_places(report, proven)

    def observe_error(self, at_ms: int) -> None:
        """An audit could not be made."""
        with self._numbers.lock:
            self._add("errors_total")
            self._set("last_run_timestamp_seconds", at_ms / 1000)

    def _observe_records(self, report: Report, proven: Proven | None) -> None:
        for fate in words.ORDER:
            count = report.total(fate)
            if proven is not None and not fate.is_fault and fate is not Fate.PENDING:
                count = proven.fates.get(fate, 0)
            self._set("records", count, fate=fate)
        for fate in words.FAULTS:
            found = sum(1 for each in report.findings if each.fate is fate)
            self._set("findings", found, fate=fate)
        for is_gap in (False, True):
            found = sum(1 for each in report.unproven if each.is_gap is is_gap)
            self._set("unproven", found, gap=str(is_gap).lower())
        for evidence in Evidence:
            self._set("cells", report.cells(evidence), evidence=evidence)

    def _observe_places(self, report: Report, proven: Proven | None) -> None:
        for account in report.partitions:
            place = {"topic": account.place.topic, "partition": str(account.place.partition)}
            self._set("log_end_offset", account.log_end, **place)
        for at, offset in (proven.positions if proven is not None else {}).items():
            self._set("proven_offset", offset, topic=at.topic, partition=str(at.partition))
        for sink, lag in report.lag.items():
            self._set("sink_lag_offsets", lag, sink=sink)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._numbers.set(PREFIX + name, float(value), **labels)

    def _add(self, name: str, **labels: str) -> None:
        self._numbers.add(PREFIX + name, 1, **labels)

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return self._numbers.text()
