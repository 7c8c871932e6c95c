"""What `holdfast graduate verify` found, in the words and the form that certificates keep.

The verdict is the audit's: `failed` where something of the manifest is not there or not what it was, `inconclusive`
where something could not be looked at, `proven` otherwise. What retention and compaction took since is named beside it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any, Final

VERDICTS: Final = {"failed": 1, "inconclusive": 4, "proven": 0}
"""By name: the exit code."""


class Fault(StrEnum):
    LOST = "lost"
    ALTERED = "altered"
    UNPROVEN = "unproven"


@dataclass(frozen=True)
class Finding:
    fault: Fault
    subject: str
    """A partition, topic, group, transactional id or setting."""
    text: str


@dataclass
class Counts:
    topics: int = 0
    partitions: int = 0
    records: int = 0
    """Of the manifest."""
    records_proven: int = 0
    """In blocks whose bytes are the same."""
    keys: int = 0
    keys_proven: int = 0
    keys_superseded: int = 0
    keys_expired: int = 0
    """Tombstones that compaction has removed, and what retention took."""
    records_expired: int = 0
    """Below the log start now."""
    offsets: int = 0
    offsets_moved_on: int = 0
    transactions: int = 0
    producers: int = 0
    producers_expired: int = 0
    settings: int = 0
    bytes_read: int = 0


@dataclass
class Report:
    subject: str
    cluster_id: str
    bootstrap_servers: str
    manifest_sha256: str
    counts: Counts = field(default_factory=Counts)
    findings: list[Finding] = field(default_factory=list)
    expired: list[str] = field(default_factory=list)
    """What retention took since, by partition and offsets."""
    notes: list[str] = field(default_factory=list)
    replicas: str = ""
    """How far the cluster has grown, and what keeps acknowledged messages until then."""
    seconds: float = 0.0

    @property
    def verdict(self) -> str:
        faults = {finding.fault for finding in self.findings}
        if faults - {Fault.UNPROVEN}:
            return "failed"
        return "inconclusive" if faults else "proven"

    def find(self, fault: Fault, subject: str, text: str) -> None:
        self.findings.append(Finding(fault, subject, text))

    def as_json(self) -> dict[str, Any]:
        return {"mode": "graduation", "verdict": self.verdict, **asdict(self)}


def lines_of(report: Report) -> Sequence[str]:
    """For people."""
    counts = report.counts
    lines = [
        f"{report.verdict}: cluster {report.cluster_id} at {report.bootstrap_servers} against the manifest "
        f"{report.manifest_sha256[:12]}",
        f"  records    {counts.records_proven:,} of {counts.records:,} by digest in {counts.partitions:,} partitions "
        f"of {counts.topics:,} topics",
    ]
    if counts.keys:
        lines.append(
            f"  keys       {counts.keys_proven:,} of {counts.keys:,} in compacted topics have their last value; "
            f"{counts.keys_superseded:,} have a newer one, {counts.keys_expired:,} went by compaction or retention"
        )
    lines += [
        f"  offsets    {counts.offsets:,} committed offsets, {counts.offsets_moved_on:,} of them moved on since",
        f"  producers  {counts.transactions:,} transactional ids, {counts.producers:,} producers, "
        f"{counts.producers_expired:,} of them expired",
        f"  settings   {counts.settings:,}",
        f"  replicas   {report.replicas}",
    ]
    lines += [f"  gone       {line}" for line in report.expired]
    lines += [f"  note       {line}" for line in report.notes]
    lines += [f"  {each.fault.value:<10} {each.subject}: {each.text}" for each in report.findings]
    return lines
