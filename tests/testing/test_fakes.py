"""The manual clock, and seams that wait until told."""

from __future__ import annotations

import uuid

import pytest

from holdfast.seams import Clock, Flusher, FlushJob, Randomness
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.testing.fakes import ManualClock, ManualFlusher, SeededRandomness


def test_the_clock_moves_only_when_told() -> None:
    clock = ManualClock()
    seam: Clock = clock
    before = seam.now()
    assert seam.now() == before
    after = clock.advance(250)
    assert (after.wall_ms - before.wall_ms, after.monotonic_ms - before.monotonic_ms) == (250, 250)


def test_only_the_wall_clock_steps_back() -> None:
    clock = ManualClock()
    before = clock.now()
    after = clock.step_wall(-1_000)
    assert (after.wall_ms - before.wall_ms, after.monotonic_ms - before.monotonic_ms) == (-1_000, 0)
    with pytest.raises(ValueError, match="backwards"):
        clock.advance(-1)


def test_seeded_randomness_repeats_itself() -> None:
    one: Randomness = SeededRandomness(3)
    other = SeededRandomness(3)
    assert [one.uuid_bytes(), one.below(10)] == [other.uuid_bytes(), other.below(10)]
    assert uuid.UUID(bytes=one.uuid_bytes()).version == 4
    assert SeededRandomness(4).uuid_bytes() != SeededRandomness(5).uuid_bytes()


def test_flushes_wait_until_told_and_report_their_result() -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    flusher = ManualFlusher(disk)
    seam: Flusher = flusher
    file = disk.open("/data/log", "create")
    file.pwritev([b"x"], 0)
    results: list[OSError | None] = []
    seam.submit(FlushJob((file, "/data"), results.append))
    assert results == []
    assert disk.held("/data/log") == b""
    assert flusher.run_all() == 1
    assert results == [None]
    disk.crash()
    assert disk.size("/data/log") == 1


def test_the_first_failure_ends_a_flush_job() -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    flusher = ManualFlusher(disk)
    file = disk.open("/data/log", "create")
    results: list[OSError | None] = []
    flusher.submit(FlushJob((file, "/data"), results.append))
    disk.plan(Fault("flush"))
    assert flusher.run_one()
    assert isinstance(results[0], OSError)
    assert disk.operations["flush directory"] == 0
    assert not flusher.run_one()
