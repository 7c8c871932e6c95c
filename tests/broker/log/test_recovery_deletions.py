"""Recovery after a deletion of which a power failure has kept any part."""

from __future__ import annotations

from itertools import combinations

import pytest
from tests.support.partition_logs import DIRECTORY, Batch, append, flush, open_at, read_batches

from holdfast.testing.disk import SimulatedDisk

SUFFIXES = (".log", ".index", ".timeindex", ".snapshot")
DELETED = 4
"""Segments below the log start."""


def deleted_log(
    gone: tuple[int, ...], without_snapshots: bool
) -> tuple[SimulatedDisk, int, tuple[bytes, ...]]:
    """A log of many segments whose first ones were deleted, as far as the disk has kept of that."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk)
    for number in range(40):
        append(log, Batch((b"%d:" % number + b"x" * 100,)))
        flush(disk, log)
    start = log.segments[DELETED].base_offset + 1
    log.advance_start(start)
    expected = read_batches(log)
    names = [f"{DIRECTORY}/{segment.base_offset:020d}" for segment in log.segments]
    disk.kill()
    for place in gone:
        for suffix in SUFFIXES:
            if disk.exists(names[place] + suffix):
                disk.remove(names[place] + suffix)
    for name in names if without_snapshots else ():
        if disk.exists(name + ".snapshot"):
            disk.remove(name + ".snapshot")
    return disk, start, expected


@pytest.mark.parametrize("without_snapshots", [False, True])
@pytest.mark.parametrize(
    "gone", [some for count in range(DELETED + 1) for some in combinations(range(DELETED), count)], ids=str
)
def test_whatever_is_left_below_the_log_start_costs_nothing_above_it(
    gone: tuple[int, ...], without_snapshots: bool
) -> None:
    disk, start, expected = deleted_log(gone, without_snapshots)
    log = open_at(disk, start_offset=start, torn=True)
    assert (log.start_offset, log.end_offset) == (start, 40)
    assert read_batches(log) == expected


def test_a_gap_above_the_log_start_is_a_lost_tail_still() -> None:
    disk, start, _ = deleted_log((DELETED + 1,), without_snapshots=True)
    said: list[str] = []
    log = open_at(disk, start_offset=start, torn=True, said=said)
    assert log.end_offset < 40
    assert any("the next segment begins at" in line for line in said)
