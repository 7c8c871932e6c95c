"""The states of a classic group, under Kafka's names, and where each can lead."""

from __future__ import annotations

from enum import Enum
from typing import Final


class ClassicState(Enum):
    EMPTY = "Empty"
    PREPARING = "PreparingRebalance"
    COMPLETING = "CompletingRebalance"
    STABLE = "Stable"
    DEAD = "Dead"


TRANSITIONS: Final = {
    ClassicState.EMPTY: {ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.PREPARING: {ClassicState.COMPLETING, ClassicState.EMPTY, ClassicState.DEAD},
    ClassicState.COMPLETING: {ClassicState.STABLE, ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.STABLE: {ClassicState.PREPARING, ClassicState.DEAD},
    ClassicState.DEAD: set(),
}
"""Where a group can go from where it is."""
