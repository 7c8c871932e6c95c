"""A place in a partition: an offset, and where its batch begins on disk."""

from __future__ import annotations

from typing import NamedTuple


class LogPosition(NamedTuple):
    """A place between two batches: the offset, and where it is in which segment."""

    offset: int
    segment_base: int
    position: int
