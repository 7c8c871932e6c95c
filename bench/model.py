"""What is measured and what must be reached: measures, their series, the rows of the report.

A *measure* is one experiment (`bench/measures/*.py`). It runs several *series* alternately (ours flushed,
ours in the page cache, Kafka flushed...), each giving named *metrics* per round. A *row* of the report
compares one metric of one series with one of another, and carries the target.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

Metrics: TypeAlias = dict[str, float]
Round: TypeAlias = dict[str, Metrics]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of the report. `ours` and `theirs` name a metric as "series.metric"."""

    title: str
    unit: str
    ours: str
    theirs: str | None = None
    against: str = "Apache Kafka"
    at_most: float | None = None
    """The median ratio, ours by theirs, that meets the target when lower is better."""
    at_least: float | None = None
    """The same when higher is better."""
    below: float | None = None
    """A bound on our own value, whatever theirs is."""
    above: float | None = None
    """The same from the other side."""
    or_reaches: str | None = None
    """A metric that meets the target too when ours reaches it: the machine's own limit."""
    or_reaches_with: str | None = None
    """Our metric in the unit of `or_reaches`."""

    @property
    def target(self) -> str:
        """The target in words."""
        if self.at_most is not None:
            return f"≤ {self.at_most:g}×"
        if self.at_least is not None:
            return f"≥ {self.at_least:g}×" + (" or the disk's rate" if self.or_reaches else "")
        if self.below is not None:
            return f"< {self.below:g} {self.unit}"
        if self.above is not None:
            return f"≥ {self.above:,g} {self.unit}"
        return "report"


@dataclass(slots=True)
class MeasureResult:
    """The raw figures of one measure, as stored."""

    name: str
    taken_at: str
    rounds: list[Round] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    """Series that could not be run here, with the reason."""
    notes: list[str] = field(default_factory=list)

    def values(self, metric: str) -> list[float]:
        """The rounds of "series.metric"; empty when the series was not run."""
        series, name = metric.split(".", 1)
        return [each[series][name] for each in self.rounds if name in each.get(series, {})]

    def why_missing(self, metric: str) -> str:
        """Why there are no values of "series.metric"."""
        return self.missing.get(metric.split(".", 1)[0], "not measured")


@dataclass(slots=True)
class Results:
    """Everything a report is made of."""

    machine: dict[str, str] = field(default_factory=dict)
    measures: dict[str, MeasureResult] = field(default_factory=dict)

    @classmethod
    def load(cls, path: Path) -> Results:
        """The stored results, or empty ones when there are none yet."""
        if not path.exists():
            return cls()
        stored: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        measures = {name: MeasureResult(**fields) for name, fields in stored["measures"].items()}
        return cls(machine=dict(stored["machine"]), measures=measures)

    def save(self, path: Path) -> None:
        """Write beside and rename, so that an interrupted run leaves the last results whole."""
        path.parent.mkdir(parents=True, exist_ok=True)
        aside = path.with_suffix(".tmp")
        text = json.dumps(_rounded(asdict(self)), indent=1, sort_keys=True, ensure_ascii=False)
        aside.write_text(text + "\n", encoding="utf-8")
        aside.replace(path)

    def merge(self, measured: Sequence[MeasureResult], machine: Mapping[str, str]) -> None:
        """Put new results in the place of older ones of the same measures; the others stay."""
        self.machine = dict(machine)
        for each in measured:
            self.measures[each.name] = each


def _rounded(value: Any) -> Any:
    """Floats cut to six significant digits: more is noise, and noise makes diffs unreadable."""
    if isinstance(value, float):
        return float(f"{value:.6g}")
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    return value
