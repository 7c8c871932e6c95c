"""Rows counted so that two counts can be held against each other."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.pipeline.digest import MASK


@dataclass(frozen=True)
class Tally:
    """Rows, by number and by the digest of their places."""

    rows: int = 0
    digest: int = 0

    def __add__(self, other: Tally) -> Tally:
        return Tally(self.rows + other.rows, (self.digest + other.digest) & MASK)
