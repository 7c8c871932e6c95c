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

_SUBJECT: Final = ("subject",)
_PLACE: Final = ("subject", "topic", "partition")
_FATE: Final = ("subject", "fate")
_VERDICT: Final = ("subject", "verdict")

FAMILIES: Final = table(
    Family("holdfast_audit_runs_total", "counter", "Audits that came to a verdict, by verdict.", _VERDICT),
    Family(
        "holdfast_audit_errors_total",
        "counter",
        "Audits that came to none: something could not be reached.",
        _SUBJECT,
    ),
    Family("holdfast_audit_full_runs_total", "counter", "Audits that looked at everything again.", _SUBJECT),
    Family("holdfast_audit_verdict", "gauge", "1 for the newest verdict, 0 for the others.", _VERDICT),
    Family("holdfast_audit_last_run_timestamp_seconds", "gauge", "When the newest audit began.", _SUBJECT),
    Family(
        "holdfast_audit_last_proven_timestamp_seconds",
        "gauge",
        "When the newest audit that was proven began; 0: none.",
        _SUBJECT,
    ),
    Family("holdfast_audit_duration_seconds", "gauge", "How long the newest audit took.", _SUBJECT),
    Family(
        "holdfast_audit_records",
        "gauge",
        "Records by fate: all that was looked at since the last full audit.",
        _FATE,
    ),
    Family("holdfast_audit_findings", "gauge", "Findings of the newest audit, by fate.", _FATE),
    Family(
        "holdfast_audit_unproven",
        "gauge",
        "What the newest audit could not prove; gap: it kept the verdict open.",
        ("subject", "gap"),
    ),
    Family(
        "holdfast_audit_cells",
        "gauge",
        "Cells of the newest audit: recomputed, unaltered or trusted.",
        ("subject", "evidence"),
    ),
    Family("holdfast_audit_proven_offset", "gauge", "Every offset below is accounted for.", _PLACE),
    Family(
        "holdfast_audit_log_end_offset",
        "gauge",
        "Where the source's log ended when the newest audit began.",
        _PLACE,
    ),
    Family(
        "holdfast_audit_sink_lag_offsets",
        "gauge",
        "Offsets between where a sink stands and the end of the log.",
        ("subject", "sink"),
    ),
)


@dataclass
class AuditMetrics:
    """The numbers of one subject; read by the server's threads while the audits write."""

    subject: str
    _numbers: Numbers = field(init=False)

    def __post_init__(self) -> None:
        self._numbers = Numbers(FAMILIES, subject=self.subject)
        for verdict in Verdict:
            self._set("holdfast_audit_verdict", 0, verdict=verdict)
            self._numbers.add("holdfast_audit_runs_total", 0, verdict=verdict)
        for name in (
            "holdfast_audit_errors_total",
            "holdfast_audit_full_runs_total",
            "holdfast_audit_last_proven_timestamp_seconds",
        ):
            self._set(name, 0)

    def observe(self, report: Report, proven: Proven | None, *, was_full: bool) -> None:
        """An audit came to a verdict; `proven` is what is proven after it."""
        with self._numbers.lock:
            for verdict in Verdict:
                self._set("holdfast_audit_verdict", verdict is report.verdict, verdict=verdict)
            self._add("holdfast_audit_runs_total", verdict=report.verdict)
            if was_full:
                self._add("holdfast_audit_full_runs_total")
            self._set("holdfast_audit_last_run_timestamp_seconds", report.started_ms / 1000)
            self._set("holdfast_audit_duration_seconds", report.took_ms / 1000)
            if report.verdict.exit_code == 0:
                self._set("holdfast_audit_last_proven_timestamp_seconds", report.started_ms / 1000)
            self._observe_records(report, proven)
            self._observe_places(report, proven)

    def observe_error(self, at_ms: int) -> None:
        """An audit could not be made."""
        with self._numbers.lock:
            self._add("holdfast_audit_errors_total")
            self._set("holdfast_audit_last_run_timestamp_seconds", at_ms / 1000)

    def _observe_records(self, report: Report, proven: Proven | None) -> None:
        for fate in words.ORDER:
            count = report.total(fate)
            if proven is not None and not fate.is_fault and fate is not Fate.PENDING:
                count = proven.fates.get(fate, 0)
            self._set("holdfast_audit_records", count, fate=fate)
        for fate in words.FAULTS:
            found = sum(1 for each in report.findings if each.fate is fate)
            self._set("holdfast_audit_findings", found, fate=fate)
        for is_gap in (False, True):
            found = sum(1 for each in report.unproven if each.is_gap is is_gap)
            self._set("holdfast_audit_unproven", found, gap=str(is_gap).lower())
        for evidence in Evidence:
            self._set("holdfast_audit_cells", report.cells(evidence), evidence=evidence)

    def _observe_places(self, report: Report, proven: Proven | None) -> None:
        for account in report.partitions:
            place = {"topic": account.place.topic, "partition": str(account.place.partition)}
            self._set("holdfast_audit_log_end_offset", account.log_end, **place)
        for at, offset in (proven.positions if proven is not None else {}).items():
            self._set("holdfast_audit_proven_offset", offset, topic=at.topic, partition=str(at.partition))
        for sink, lag in report.lag.items():
            self._set("holdfast_audit_sink_lag_offsets", lag, sink=sink)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._numbers.set(name, float(value), **labels)

    def _add(self, name: str, **labels: str) -> None:
        self._numbers.add(name, 1, **labels)

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        return self._numbers.text()
