"""Index files lost or damaged while nobody looked: readers find the same, by offset, by time, committed or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest
from tests.support.partition_logs import DIRECTORY, NOW, START_MS, LogState, state_of, topic_config
from tests.support.transactional_log import TransactionalLog

from holdfast.broker.log.index import IndexSums, read_sums
from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import Trust, open_log
from holdfast.broker.log.segment import INDEX_SUFFIXES, SUMS_SUFFIX, TXN_INDEX_SUFFIX, offset_name
from holdfast.testing.committed_reader import ReadResult, read_answer
from holdfast.testing.disk import SimulatedDisk

CONFIG = topic_config(internal_segment_bytes="1200", index_interval_bytes="200")


class Readings(NamedTuple):
    """Whatever a reader can find out."""

    state: LogState
    committed: list[ReadResult]
    """What a read_committed reader gets from some offsets, little at a time and a lot."""
    by_time: list[int | None]


def readings(log: Log) -> Readings:
    committed = []
    for offset in range(log.start_offset, log.end_offset, 3):
        for max_bytes in (300, 1 << 20):
            piece = log.read(offset, max_bytes, log.end_position, at_least_one=True)
            assert piece is not None
            aborted = log.aborted_in(offset, piece, log.end_offset)
            committed.append(read_answer(piece.file.pread(piece.length, piece.position), offset, aborted))
    by_time = []
    for timestamp in range(START_MS - 5, START_MS + 12):
        found = log.batch_at_or_after_time(timestamp, log.end_position)
        by_time.append(found[1].header.base_offset if found is not None else None)
    return Readings(state_of(log), committed, by_time)


class Closed:
    """A log whose transactions cross segments, after a clean stop. Its youngest record is not its last."""

    def __init__(self) -> None:
        subject = TransactionalLog(CONFIG)
        for number in range(14):
            subject.now_ms = START_MS + (number if number < 8 else 10 - number)
            subject.write([(None, b"one %d" % number)] * 2, 1)
            subject.write([(None, b"two %d" % number * 8)], 2)
            subject.write([(None, b"plain %d" % number)])
            if number % 3 == 1:
                subject.end(1, is_commit=number > 5)
            if number % 4 == 3:
                subject.end(2, is_commit=False)
        subject.log.flush_and_close()
        self.disk = subject.disk
        self.disk.kill()
        self.end_offset = subject.log.end_offset
        self.bases = [segment.base_offset for segment in subject.log.segments]
        self.readings = readings(self.open(self.disk.copy(), []))
        assert len(self.bases) == 4
        assert all(self.disk.size(self.path(base, ".index")) >= 16 for base in self.bases)
        assert self.disk.size(self.path(self.bases[1], TXN_INDEX_SUFFIX)) > 0

    def open(self, disk: SimulatedDisk, said: list[str], *, clean: bool = True) -> Log:
        trust = Trust(clean, self.end_offset, 0, torn_tail_expected=False)
        now = TransactionalLog(CONFIG).now
        return open_log(disk, DIRECTORY, CONFIG, trust, now, said.append)

    @staticmethod
    def path(base: int, suffix: str) -> str:
        return f"{DIRECTORY}/{offset_name(base)}{suffix}"


@pytest.fixture(scope="module")
def closed() -> Closed:
    return Closed()


Damage = Callable[[SimulatedDisk, str], object]


def damages(size: int) -> Iterator[Damage]:
    yield lambda disk, path: disk.remove(path)
    yield lambda disk, path: disk.open(path, "write").pwritev([bytes(size)], 0)
    yield lambda disk, path: disk.open(path, "write").pwritev([b"x" * 34], size)
    for length in range(0, size, 17):
        yield lambda disk, path, length=length: disk.open(path, "write").truncate(length)  # type: ignore[misc]
    for position in range(size):
        yield lambda disk, path, position=position: flip(disk, path, position, position * 5 % 8)  # type: ignore[misc]


def flip(disk: SimulatedDisk, path: str, position: int, bit: int) -> None:
    file = disk.open(path, "write")
    file.pwritev([bytes([file.pread(1, position)[0] ^ 1 << bit])], position)


@pytest.mark.parametrize("which", [1, -1])
@pytest.mark.parametrize("suffix", INDEX_SUFFIXES)
def test_a_damaged_index_is_rebuilt_and_nobody_reads_anything_else(
    closed: Closed, suffix: str, which: int
) -> None:
    path = closed.path(closed.bases[which], suffix)
    for number, damage in enumerate(damages(closed.disk.size(path))):
        disk = closed.disk.copy()
        before = disk.open(path, "read").pread(10_000, 0)
        damage(disk, path)
        if disk.exists(path) and disk.open(path, "read").pread(10_000, 0) == before:
            continue
        said: list[str] = []
        log = closed.open(disk, said, clean=number % 5 > 0)
        # The last segment is verified after a kill, and its indexes are made anew anyway.
        assert said or (which == -1 and number % 5 == 0)
        assert readings(log) == closed.readings
        if number % 4:
            continue
        # What was rebuilt was written down: the next start finds nothing.
        log.flush_and_close()
        disk.kill()
        said.clear()
        assert readings(closed.open(disk, said)) == closed.readings
        assert said == []


def test_every_segment_that_is_closed_has_its_checksums(closed: Closed) -> None:
    for base in closed.bases:
        contents = [
            disk_bytes(closed.disk, closed.path(base, suffix))
            for suffix in INDEX_SUFFIXES
            if suffix != SUMS_SUFFIX
        ]
        assert read_sums(closed.disk, closed.path(base, SUMS_SUFFIX)) == IndexSums.of(*contents)


def disk_bytes(disk: SimulatedDisk, path: str) -> bytes:
    return disk.open(path, "read").pread(10_000, 0) if disk.exists(path) else b""


@pytest.mark.parametrize("clean", [True, False])
def test_transaction_indexes_that_are_all_gone_with_their_checksums_are_rebuilt(
    closed: Closed, clean: bool
) -> None:
    disk = closed.disk.copy()
    for name in disk.list(DIRECTORY):
        if name.endswith((TXN_INDEX_SUFFIX, SUMS_SUFFIX)):
            disk.remove(f"{DIRECTORY}/{name}")
    said: list[str] = []
    assert readings(closed.open(disk, said, clean=clean)) == closed.readings
    assert len([line for line in said if "as earlier versions wrote them" in line]) == 1


def test_an_index_that_is_lost_while_the_log_is_open_is_rebuilt_when_it_is_needed(closed: Closed) -> None:
    disk = closed.disk.copy()
    log = closed.open(disk, [])
    for base in closed.bases[:-1]:
        for suffix in INDEX_SUFFIXES:
            if disk.exists(closed.path(base, suffix)):
                disk.remove(closed.path(base, suffix))
    assert readings(log) == closed.readings


def test_a_log_that_ends_in_an_empty_segment_needs_no_look_at_the_others(
    closed: Closed, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = closed.disk.copy()
    log = closed.open(disk, [])
    log.roll(NOW)
    log.flush_and_close()
    monkeypatch.setattr("holdfast.broker.log.end_markers.walk_headers", lambda *_: pytest.fail("walked"))
    assert closed.open(disk, []).active.size == 0


def test_a_full_disk_does_not_keep_what_was_rebuilt_from_being_used(closed: Closed) -> None:
    disk = closed.disk.copy()
    for base in closed.bases:
        disk.remove(closed.path(base, SUMS_SUFFIX))
    disk.capacity_bytes = 0
    assert readings(closed.open(disk, [])) == closed.readings
