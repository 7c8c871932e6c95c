"""The arithmetic of the figures: medians, quartiles, paired ratios, and when a rate counts as steady.

A round runs every series once, so values of the same round were taken seconds apart on the same machine
in the same mood. Ratios are therefore taken within each round and summarised afterwards, never between
medians.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Final, NamedTuple

STEADY_WINDOW: Final = 3
STEADY_TOLERANCE: Final = 0.10
"""Three runs in a row within a tenth of their median: less is noise, more is warming up."""


class Summary(NamedTuple):
    """What is reported of one series of values."""

    median: float
    low_quartile: float
    high_quartile: float


def percentile(values: Sequence[float], fraction: float) -> float:
    """The value below which `fraction` of the values lie, linearly between neighbours."""
    if not values:
        raise ValueError("no values to take a percentile of")
    ordered = sorted(values)
    place = fraction * (len(ordered) - 1)
    below = math.floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def summarise(values: Sequence[float]) -> Summary:
    """Median and quartiles."""
    return Summary(percentile(values, 0.5), percentile(values, 0.25), percentile(values, 0.75))


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Ours divided by theirs, round by round; a round where theirs was zero has no ratio."""
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} rounds of ours and {len(theirs)} of theirs cannot be paired")
    return [mine / other for mine, other in zip(ours, theirs, strict=True) if other != 0]


def is_steady(
    rates: Sequence[float], window: int = STEADY_WINDOW, tolerance: float = STEADY_TOLERANCE
) -> bool:
    """Whether the last `window` rates lie within `tolerance` of their median."""
    if len(rates) < window:
        return False
    last = rates[-window:]
    middle = percentile(last, 0.5)
    return max(last) - min(last) <= tolerance * middle
