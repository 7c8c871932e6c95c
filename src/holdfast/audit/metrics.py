"""What continuous audits tell Prometheus, in its text format, on a port of this machine.

The names are a promise to alert rules. `holdfast_audit_verdict` has one series for each verdict, the newest being
1. The time since the last proof is what to alert on: it also grows when the auditor is stuck or gone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Final, Literal

from holdfast.audit import words
from holdfast.audit.model import Fate, Report, Verdict
from holdfast.audit.proven import Proven
from holdfast.errors import UsageError

LOOPBACK: Final = "127.0.0.1"
POLL_S: Final = 0.1
"""How often the server looks whether it is to end."""
CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
Kind = Literal["counter", "gauge"]

NAMES: Final[Mapping[str, tuple[Kind, str]]] = {
    "holdfast_audit_runs_total": ("counter", "Audits that came to a verdict, by verdict."),
    "holdfast_audit_errors_total": ("counter", "Audits that came to none: something could not be reached."),
    "holdfast_audit_full_runs_total": ("counter", "Audits that looked at everything again."),
    "holdfast_audit_verdict": ("gauge", "1 for the newest verdict, 0 for the others."),
    "holdfast_audit_last_run_timestamp_seconds": ("gauge", "When the newest audit began."),
    "holdfast_audit_last_proven_timestamp_seconds": (
        "gauge",
        "When the newest audit that was proven began; 0: none.",
    ),
    "holdfast_audit_duration_seconds": ("gauge", "How long the newest audit took."),
    "holdfast_audit_records": ("gauge", "Records by fate: all that was looked at since the last full audit."),
    "holdfast_audit_findings": ("gauge", "Findings of the newest audit, by fate."),
    "holdfast_audit_unproven": (
        "gauge",
        "What the newest audit could not prove; gap: it kept the verdict open.",
    ),
    "holdfast_audit_proven_offset": ("gauge", "Every offset below is accounted for."),
    "holdfast_audit_log_end_offset": ("gauge", "Where the source's log ended when the newest audit began."),
    "holdfast_audit_sink_lag_offsets": (
        "gauge",
        "Offsets between where a sink stands and the end of the log.",
    ),
}

Labels = tuple[tuple[str, str], ...]


@dataclass
class AuditMetrics:
    """The numbers of one subject; read by the server's threads while the audits write."""

    subject: str
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _values: dict[str, dict[Labels, float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for verdict in Verdict:
            self._set("holdfast_audit_verdict", 0, verdict=verdict)
            self._set("holdfast_audit_runs_total", 0, verdict=verdict)
        for name in (
            "holdfast_audit_errors_total",
            "holdfast_audit_full_runs_total",
            "holdfast_audit_last_proven_timestamp_seconds",
        ):
            self._set(name, 0)

    def observe(self, report: Report, proven: Proven | None, *, was_full: bool) -> None:
        """An audit came to a verdict; `proven` is what is proven after it."""
        with self._lock:
            for verdict in Verdict:
                self._set("holdfast_audit_verdict", verdict is report.verdict, verdict=verdict)
            self._add("holdfast_audit_runs_total", verdict=report.verdict)
            if was_full:
                self._add("holdfast_audit_full_runs_total")
            self._set("holdfast_audit_last_run_timestamp_seconds", report.started_ms / 1000)
            self._set("holdfast_audit_duration_seconds", report.took_ms / 1000)
            if report.verdict is Verdict.PROVEN:
                self._set("holdfast_audit_last_proven_timestamp_seconds", report.started_ms / 1000)
            self._observe_records(report, proven)
            self._observe_places(report, proven)

    def observe_error(self, at_ms: int) -> None:
        """An audit could not be made."""
        with self._lock:
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

    def _observe_places(self, report: Report, proven: Proven | None) -> None:
        for account in report.partitions:
            place = {"topic": account.place.topic, "partition": str(account.place.partition)}
            self._set("holdfast_audit_log_end_offset", account.log_end, **place)
        for at, offset in (proven.positions if proven is not None else {}).items():
            self._set("holdfast_audit_proven_offset", offset, topic=at.topic, partition=str(at.partition))
        for sink, lag in report.lag.items():
            self._set("holdfast_audit_sink_lag_offsets", lag, sink=sink)

    def _set(self, name: str, value: float, **labels: str) -> None:
        self._values.setdefault(name, {})[self._labels(labels)] = float(value)

    def _add(self, name: str, **labels: str) -> None:
        series = self._values.setdefault(name, {})
        key = self._labels(labels)
        series[key] = series.get(key, 0.0) + 1

    def _labels(self, labels: Mapping[str, str]) -> Labels:
        return (("subject", self.subject), *((name, str(value)) for name, value in labels.items()))

    def text(self) -> str:
        """All of it, as Prometheus reads it."""
        lines = []
        with self._lock:
            for name, (kind, meaning) in NAMES.items():
                series = self._values.get(name)
                if not series:
                    continue
                lines += [f"# HELP {name} {meaning}", f"# TYPE {name} {kind}"]
                lines += [f"{name}{{{_pairs(labels)}}} {value:.15g}" for labels, value in series.items()]
        return "\n".join(lines) + "\n"


def _pairs(labels: Labels) -> str:
    return ",".join(f'{name}="{_escaped(value)}"' for name, value in labels)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def parse_address(text: str) -> tuple[str, int]:
    """`9400`, or `0.0.0.0:9400` for those who mean it: without a host only this machine can look."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65_535:
        raise UsageError(f"{text!r} is no port, and no host and port")
    return host or LOOPBACK, int(port)


@contextmanager
def served(metrics: AuditMetrics, host: str, port: int) -> Iterator[int]:
    """The metrics at `/metrics` while within; gives the port, which is a free one for 0."""

    class Handler(BaseHTTPRequestHandler):
        timeout = 10
        """Seconds a client may take: a connection that says nothing holds a thread."""

        def do_GET(self) -> None:
            if self.path.partition("?")[0] != "/metrics":
                self.send_error(404, "only /metrics is here")
                return
            body = metrics.text().encode("utf-8", "backslashreplace")
            self.send_response(200)
            self.send_header("Content-Type", CONTENT_TYPE)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the base class's name for it
            """Being asked every few seconds is not worth a line."""

    server = ThreadingHTTPServer((host, port), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, args=(POLL_S,), name="audit-metrics", daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
