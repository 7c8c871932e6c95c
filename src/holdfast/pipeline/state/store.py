"""Versions of a pipeline's state on disk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Segment:
    """Some immutable files of one step's state."""

    files: tuple[str, ...]
    """Relative to the state's directory."""
    rows: int
    bytes: int
    low_ms: int
    """Least `_until` of its rows: when the first of them closes or dies."""
    high_ms: int
    tier: int = 0


@dataclass(frozen=True)
class StepState:
    """What one step remembers."""

    fingerprint: str = ""
    segments: tuple[Segment, ...] = ()
    notes: Mapping[str, Any] = field(default_factory=dict)


class StateStore:
    """To be filled."""
