"""Which files of producer state a log keeps: those at its segments' beginnings, and the one its last stop wrote."""

from __future__ import annotations

import errno

import pytest
from tests.support.partition_logs import DIRECTORY, Batch, append, flush, open_at, state_of

from holdfast.broker.log.log import Log
from holdfast.testing.disk import Fault, SimulatedDisk

PRODUCER = 7


def snapshots(disk: SimulatedDisk) -> list[int]:
    return [int(name[:20]) for name in disk.list(DIRECTORY) if name.endswith(".snapshot")]


def append_next(log: Log) -> None:
    append(log, Batch((b"x" * 60,), producer_id=PRODUCER, sequence=log.end_offset))


def restart(disk: SimulatedDisk, log: Log) -> Log:
    log.flush_and_close()
    return open_at(disk, clean=True)


def test_clean_stops_leave_one_snapshot_beside_those_of_segments(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    for _ in range(12):
        append_next(log)
        before = state_of(log)
        log = restart(disk, log)
        assert state_of(log) == before
        assert len(log.producers.batches_of(PRODUCER)) == min(log.end_offset, 5)
    assert len(log.segments) > 2
    bases = [segment.base_offset for segment in log.segments if segment.base_offset]
    assert snapshots(disk) == sorted({*bases, log.end_offset})


def test_a_log_that_nothing_is_appended_to_keeps_its_snapshot(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    append_next(log)
    for _ in range(3):
        log = restart(disk, log)
    assert snapshots(disk) == [1]
    assert PRODUCER in log.producers


def test_crashes_between_the_stops_change_nothing(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    for _ in range(4):
        append_next(log)
        log = restart(disk, log)
        append_next(log)
        flush(disk, log)
        before = state_of(log)
        disk.crash()
        log = open_at(disk, recovery_point=log.end_offset, torn=True)
        assert state_of(log) == before
    log = restart(disk, log)
    bases = [segment.base_offset for segment in log.segments if segment.base_offset]
    assert snapshots(disk) == sorted({*bases, log.end_offset})


def test_older_snapshots_stay_until_the_last_one_is_there(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    append_next(log)
    log = restart(disk, log)
    append_next(log)
    log.flush_and_close()
    assert snapshots(disk) == [1, 2]
    disk.remove(f"{DIRECTORY}/{2:020d}.snapshot")
    disk.plan(Fault("create", errno.ENOSPC, path_contains=".snapshot"))
    log = open_at(disk, clean=True)
    assert snapshots(disk) == [1]
    assert PRODUCER in log.producers


@pytest.mark.parametrize("operations", range(8))
def test_power_lost_while_old_ones_are_removed_loses_no_state(disk: SimulatedDisk, operations: int) -> None:
    log = open_at(disk)
    for _ in range(3):
        append_next(log)
        log.flush_and_close()
        before = state_of(log)
        twin = disk.copy(operations)
        open_at(twin, clean=True)
        twin.crash()
        assert state_of(open_at(twin, recovery_point=log.end_offset, torn=True)) == before
        log = open_at(disk, clean=True)


def test_a_disk_that_refuses_to_remove_one_is_no_reason_to_refuse_the_log(disk: SimulatedDisk) -> None:
    log = open_at(disk)
    append_next(log)
    log = restart(disk, log)
    append_next(log)
    log.flush_and_close()
    disk.plan(Fault("remove", errno.ENOSPC, path_contains=".snapshot"))
    said: list[str] = []
    log = open_at(disk, clean=True, said=said)
    assert (log.end_offset, snapshots(disk)) == (2, [1, 2])
    assert len(said) == 1
