"""Indexes, snapshots and checkpoints only help: cut, flipped or deleted, the log is the same. B2, B7."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
from tests.support.partition_logs import (
    DIRECTORY,
    START_MS,
    Batch,
    LogState,
    append,
    flush,
    open_at,
    read_batches,
    state_of,
)

from holdfast.testing.disk import SimulatedDisk

SMALL = (".index", ".timeindex", ".snapshot", "leader-epoch-checkpoint")


class Closed:
    """A log of several segments after a clean stop."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.prepare("/data")
        log = open_at(self.disk)
        for number in range(24):
            epoch = number // 8
            append(
                log, Batch((b"%03d" % number * 12,), 5, number, timestamp=START_MS + 10 * number, epoch=epoch)
            )
        flush(self.disk, log)
        self.state = state_of(log)
        log.flush_and_close()
        self.disk.kill()
        self.end_offset = log.end_offset
        self.files = [f"{DIRECTORY}/{name}" for name in self.disk.list(DIRECTORY) if name.endswith(SMALL)]
        assert len(log.segments) >= 3
        assert self.disk.size(f"{DIRECTORY}/{0:020d}.index") >= 8

    def open(self, disk: SimulatedDisk, *, clean: bool) -> LogState:
        return state_of(open_at(disk, clean=clean, recovery_point=self.end_offset))


@pytest.fixture(scope="module")
def closed() -> Closed:
    return Closed()


Damage = Callable[[SimulatedDisk, str], None]


def damages(disk: SimulatedDisk, path: str) -> Iterator[Damage]:
    yield lambda disk, path: disk.remove(path)
    yield lambda disk, path: disk.open(path, "write").truncate(0)
    yield lambda disk, path: overwrite(disk, path, b"garbage" * 30)
    yield lambda disk, path: overwrite(disk, path, bytes(200))
    yield lambda disk, path: overwrite(disk, path, b"\xff" * 96)
    for position in range(disk.size(path)):
        yield lambda disk, path, position=position: disk.open(path, "write").truncate(position)  # type: ignore[misc]
        yield lambda disk, path, position=position: flip(disk, path, position, position % 8)  # type: ignore[misc]


def overwrite(disk: SimulatedDisk, path: str, data: bytes) -> None:
    file = disk.open(path, "write")
    file.truncate(0)
    file.pwritev([data], 0)


def flip(disk: SimulatedDisk, path: str, position: int, bit: int) -> None:
    file = disk.open(path, "write")
    file.pwritev([bytes([file.pread(1, position)[0] ^ 1 << bit])], position)


@pytest.mark.parametrize("clean", [pytest.param(True, marks=pytest.mark.check), False])
@pytest.mark.parametrize("suffix", [".index", ".snapshot"])
def test_a_damaged_file_is_rebuilt_and_nothing_else_differs(closed: Closed, suffix: str, clean: bool) -> None:
    paths = [path for path in closed.files if path.endswith(suffix)][-2:]
    assert paths
    for path in paths:
        for damage in damages(closed.disk, path):
            disk = closed.disk.copy()
            damage(disk, path)
            assert closed.open(disk, clean=clean) == closed.state


@pytest.mark.parametrize("clean", [True, False])
def test_a_damaged_time_index_costs_no_message_and_no_crash(closed: Closed, clean: bool) -> None:
    for path in closed.files:
        if not path.endswith(".timeindex"):
            continue
        for damage in damages(closed.disk, path):
            disk = closed.disk.copy()
            damage(disk, path)
            log = open_at(disk, clean=clean, recovery_point=closed.end_offset)
            assert read_batches(log) == closed.state.batches
            assert (
                tuple((s.max_timestamp, s.offset_of_max_timestamp) for s in log.segments)
                == closed.state.timestamps
            )


@pytest.mark.parametrize("clean", [True, False])
def test_a_damaged_file_of_epochs_is_rebuilt_from_the_batches(closed: Closed, clean: bool) -> None:
    path = f"{DIRECTORY}/leader-epoch-checkpoint"
    for damage in (
        lambda disk: disk.remove(path),
        lambda disk: overwrite(disk, path, b"garbage"),
        lambda disk: overwrite(disk, path, b""),
        lambda disk: overwrite(disk, path, b"0\n2\n0 0\n"),
        lambda disk: overwrite(disk, path, b"0\n2\n5 9\n4 3\n"),
    ):
        disk = closed.disk.copy()
        damage(disk)
        said: list[str] = []
        log = open_at(disk, clean=clean, recovery_point=closed.end_offset, said=said)
        assert tuple(log.epochs.entries) == closed.state.epochs


def test_all_small_files_at_once_may_be_missing(closed: Closed) -> None:
    for clean in (True, False):
        disk = closed.disk.copy()
        for path in closed.files:
            disk.remove(path)
        assert closed.open(disk, clean=clean) == closed.state


def test_left_over_files_of_interrupted_work_are_removed(closed: Closed) -> None:
    disk = closed.disk.copy()
    for name in (f"{3:020d}.log.deleted", f"{9:020d}.index.deleted", f"{0:020d}.log.cleaned", "x.tmp"):
        disk.open(f"{DIRECTORY}/{name}", "create").pwritev([b"left over"], 0)
    assert closed.open(disk, clean=False) == closed.state
    assert not [name for name in disk.list(DIRECTORY) if name.endswith((".deleted", ".cleaned", ".tmp"))]


def test_strange_files_are_left_alone(closed: Closed) -> None:
    disk = closed.disk.copy()
    for name in ("notes.txt", "abc.log", ".hidden", "00000000000000000000.log.bak"):
        disk.open(f"{DIRECTORY}/{name}", "create").pwritev([b"not ours"], 0)
    assert closed.open(disk, clean=False) == closed.state
    assert {"notes.txt", "abc.log", ".hidden"} <= set(disk.list(DIRECTORY))
