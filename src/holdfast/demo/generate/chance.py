"""Chance and time that are the same everywhere: one seeded stream of numbers, whole milliseconds.

Only `random()` is drawn, the one method whose numbers Python promises to keep; nothing passes through the machine's
mathematical library, whose last digits differ.
"""

from __future__ import annotations

import datetime
import random
from collections.abc import Sequence
from functools import lru_cache
from typing import TypeVar

T = TypeVar("T")


class Chance:
    def __init__(self, seed: str) -> None:
        self.draw = random.Random(seed).random
        """From 0 up to 1."""

    def below(self, limit: int) -> int:
        return int(self.draw() * limit)

    def between(self, low: int, high: int) -> int:
        return low + int(self.draw() * (high - low + 1))

    def one_of(self, among: Sequence[T]) -> T:
        return among[int(self.draw() * len(among))]

    def skewed(self, limit: int) -> int:
        """Small numbers far more often: a tenth of the customers place almost half of the orders."""
        part = self.draw()
        return int(part * part * part * limit)


@lru_cache(maxsize=4096)
def _second_text(second: int) -> str:
    return datetime.datetime.fromtimestamp(second, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S")


def time_text(time_ms: int) -> str:
    """ISO 8601 in UTC, to the millisecond."""
    second, rest_ms = divmod(time_ms, 1000)
    return f"{_second_text(second)}.{rest_ms:03}Z"


def money_text(cents: int) -> str:
    return f"{cents // 100}.{cents % 100:02}"
