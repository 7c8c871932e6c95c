"""What a running pipeline tells: one event after the other, plain values for a progress display or a log."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from holdfast.pipeline.ledger import Intake, Rejected, Routes
from holdfast.pipeline.positions import BatchRange
from holdfast.pipeline.state.store import Version


@dataclass(frozen=True)
class Preparing:
    """Work before the start that takes a while."""

    what: str


@dataclass(frozen=True)
class Started:
    pipeline: str
    home: str
    sinks: tuple[str, ...]
    lag: int
    """Offsets between the sink furthest behind and the end of what can be read."""


@dataclass(frozen=True)
class StateNow:
    """The state where a batch ends."""

    number: int
    watermark_ms: int | None
    """Of the whole pipeline: what ends at or before it is closed."""
    steps: Mapping[str, tuple[int, int]]
    """Rows and bytes by step."""

    @classmethod
    def of(cls, version: Version) -> StateNow:
        return cls(
            version.number,
            version.watermark.get("watermark_ms"),
            {name: (state.rows, state.bytes) for name, state in version.steps.items()},
        )

    @property
    def bytes(self) -> int:
        return sum(size for _, size in self.steps.values())

    def as_json(self) -> dict[str, Any]:
        return {
            "number": self.number,
            "watermark_ms": self.watermark_ms,
            "steps": {name: {"rows": rows, "bytes": size} for name, (rows, size) in self.steps.items()},
        }


@dataclass(frozen=True)
class BatchDone:
    range: BatchRange
    batch_time_ms: int
    intake: Intake
    routes: Routes
    warned: Mapping[str, int]
    """Rows that broke a `warn` rule, by rule."""
    rows_by_sink: Mapping[str, int]
    """For the sinks this batch went to; more than these when one of them was behind."""
    times_ms: Mapping[str, int] = field(default_factory=dict)
    """By phase: plan, stage, route, prepare, aside, commit."""
    number: int = 0
    """Counts this run's batches from 1."""
    duration_ms: int = 0
    lag: int = 0
    step_counts: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    """By step with a state, what it counted: `taken`, `late`, `rows`, `closed`…"""
    state: StateNow | None = None
    rejected: tuple[Rejected, ...] = ()
    """Records that are dead letters because a sink does not take a row made of them."""
    sink_times_ms: Mapping[str, int] = field(default_factory=dict)
    """By sink: how long it prepared and committed."""

    def as_json(self) -> dict[str, Any]:
        counts = {name: dict(counts) for name, counts in self.step_counts.items()}
        return {
            "event": "batch",
            "number": self.number,
            "range": self.range.as_json(),
            "batch_time_ms": self.batch_time_ms,
            "intake": self.intake.as_json(),
            "routes": self.routes.as_json(),
            "warned": dict(self.warned),
            "sinks": dict(self.rows_by_sink),
            "duration_ms": self.duration_ms,
            "times_ms": dict(self.times_ms),
            "sink_times_ms": dict(self.sink_times_ms),
            "lag": self.lag,
            **({} if self.state is None else {"step_counts": counts, "state": self.state.as_json()}),
            **({"rejected": [list(each) for each in self.rejected]} if self.rejected else {}),
        }


@dataclass(frozen=True)
class Retrying:
    reason: str
    in_ms: int
    sink: str = ""
    """The sink that the batch failed in, if it was one."""


@dataclass(frozen=True)
class Waiting:
    """Nothing to read."""

    lag: int = 0


@dataclass(frozen=True)
class Stopping:
    """The batch under way will be the last."""

    why: str


@dataclass(frozen=True)
class Warned:
    """Something that does not stop the pipeline."""

    message: str


@dataclass(frozen=True)
class Failed:
    """The run ends with an error."""

    reason: str
    sink: str = ""


@dataclass(frozen=True)
class Ended:
    """The run ends as it is meant to."""

    reason: str


Event: TypeAlias = Preparing | Started | BatchDone | Retrying | Waiting | Stopping | Warned | Failed | Ended
Progress: TypeAlias = Callable[[Event], None]


def told_to(*each: Progress | None) -> Progress | None:
    """All of them, in this order."""
    listeners = [listener for listener in each if listener is not None]

    def tell(event: Event) -> None:
        for listener in listeners:
            listener(event)

    return tell if listeners else None


@dataclass(frozen=True)
class Summary:
    """What a run did."""

    pipeline: str
    batches: int = 0
    intake: Intake = field(default_factory=Intake)
    routes: Routes = field(default_factory=Routes)
    warned: Mapping[str, int] = field(default_factory=dict)
    rows_by_sink: Mapping[str, int] = field(default_factory=dict)
    duration_ms: int = 0
    lag: int = 0
    reason: Literal["done", "stopped"] = "done"

    def as_json(self) -> dict[str, Any]:
        return {
            "event": "summary",
            "pipeline": self.pipeline,
            "batches": self.batches,
            "intake": self.intake.as_json(),
            "routes": self.routes.as_json(),
            "warned": dict(self.warned),
            "sinks": dict(self.rows_by_sink),
            "duration_ms": self.duration_ms,
            "lag": self.lag,
            "reason": self.reason,
        }


def add_intakes(one: Intake, other: Intake) -> Intake:
    mine, theirs = one.as_json(), other.as_json()
    total = {name: mine[name] + theirs[name] for name in mine}
    return Intake(**{**total, "digest": total["digest"] % 2**64})


def add_counts(one: Mapping[str, int], other: Mapping[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + other.get(name, 0) for name in dict.fromkeys([*one, *other])}


def add_routes(one: Routes, other: Routes) -> Routes:
    return Routes(
        main=one.main + other.main,
        dead_letter=add_counts(one.dead_letter, other.dead_letter),
        filtered=add_counts(one.filtered, other.filtered),
        duplicate=one.duplicate + other.duplicate,
        late=one.late + other.late,
    )
