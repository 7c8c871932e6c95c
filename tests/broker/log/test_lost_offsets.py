"""Files of a log that are gone: it is not opened as if they had never been, until the loss is given up by request."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations
from typing import Any

import pytest
from tests.support.partition_logs import (
    DIRECTORY,
    Batch,
    CompactedLog,
    append,
    flush,
    open_at,
    read_batches,
    state_of,
)

from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery_steps import LOST_OFFSETS_FILE, name_start
from holdfast.broker.log.segment import offset_name
from holdfast.errors import CorruptLog, MissingOffsets
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import read_header

BATCHES = 20
STARTS: dict[str, dict[str, Any]] = {
    "clean stop": {"clean": True},
    "kill": {},
    "power failure": {"torn": True},
}


class Closed:
    """A log of several segments, two batches each, all of it flushed."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.prepare("/data")
        log = open_at(self.disk)
        for number in range(BATCHES):
            append(log, Batch((b"%d:" % number + b"x" * 200, b"second"), 7, 2 * number))
        log.flush_and_close()
        self.state = state_of(log)
        self.bases = [base for base, _ in self.state.segments]
        self.ends = [*self.bases[1:], log.end_offset]
        self.end_offset = log.end_offset
        self.disk.kill()
        assert len(self.bases) >= 5

    def batches_outside(self, first: int, end: int) -> tuple[bytes, ...]:
        return tuple(
            batch for batch in self.state.batches if not first <= read_header(batch).base_offset < end
        )


@pytest.fixture(scope="module")
def closed() -> Closed:
    return Closed()


def remove(disk: SimulatedDisk, base: int) -> None:
    """Everything that bears the segment's name."""
    for name in disk.list(DIRECTORY):
        if name.startswith(offset_name(base)):
            disk.remove(f"{DIRECTORY}/{name}")


def remove_log(disk: SimulatedDisk, base: int) -> None:
    disk.remove(f"{DIRECTORY}/{offset_name(base)}.log")


def empty(disk: SimulatedDisk, base: int) -> None:
    disk.open(f"{DIRECTORY}/{offset_name(base)}.log", "write").truncate(0)


LOSSES: list[Callable[[SimulatedDisk, int], None]] = [remove, remove_log, empty]


def logs(disk: SimulatedDisk) -> dict[str, int]:
    return {name: disk.size(f"{DIRECTORY}/{name}") for name in disk.list(DIRECTORY) if name.endswith(".log")}


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("lose", LOSSES)
def test_a_segment_that_is_gone_or_empty_is_missed(
    closed: Closed, lose: Callable[[SimulatedDisk, int], None], start: dict[str, Any]
) -> None:
    for base, end in zip(closed.bases, closed.ends, strict=True):
        disk = closed.disk.copy()
        lose(disk, base)
        disk.flush_all(DIRECTORY)
        before = logs(disk)
        with pytest.raises(MissingOffsets) as missing:
            open_at(disk, recovery_point=closed.end_offset, **start)
        assert (missing.value.first, missing.value.end) == (base, end)
        assert f"from {base} to {end - 1}" in str(missing.value)
        assert "Restore the files from a copy" in str(missing.value)
        assert logs(disk) == before


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_the_segment_comes_back_and_all_is_as_before(closed: Closed, start: dict[str, Any]) -> None:
    for base in closed.bases:
        disk = closed.disk.copy()
        path = f"{DIRECTORY}/{offset_name(base)}.log"
        disk.rename(path, "/data/away")
        with pytest.raises(MissingOffsets):
            open_at(disk, recovery_point=closed.end_offset, **start)
        disk.rename("/data/away", path)
        assert state_of(open_at(disk, recovery_point=closed.end_offset, **start)) == closed.state


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("lose", LOSSES)
def test_what_is_given_up_is_asked_for_once_and_no_offset_is_given_again(
    closed: Closed, lose: Callable[[SimulatedDisk, int], None], start: dict[str, Any]
) -> None:
    for base, end in zip(closed.bases, closed.ends, strict=True):
        disk = closed.disk.copy()
        lose(disk, base)
        disk.flush_all(DIRECTORY)
        said: list[str] = []
        log = open_at(disk, recovery_point=closed.end_offset, accept_loss=True, said=said, **start)
        assert read_batches(log) == closed.batches_outside(base, end)
        assert log.end_offset == closed.end_offset
        assert [line for line in said if f"from {base} to {end - 1} are given up" in line]
        append(log, Batch((b"after",), 7, 2 * BATCHES))
        flush(disk, log)
        expected = read_batches(log)
        disk.crash()
        again = open_at(disk, recovery_point=closed.end_offset, torn=True)
        assert read_batches(again) == expected
        again.flush_and_close()
        assert read_batches(open_at(disk, clean=True, recovery_point=again.end_offset)) == expected


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_directory_without_segments_is_not_new(closed: Closed, start: dict[str, Any]) -> None:
    for whole in (True, False):
        disk = closed.disk.copy()
        if whole:
            disk.remove_tree(DIRECTORY)
        else:
            for base in closed.bases:
                remove_log(disk, base)
        with pytest.raises(MissingOffsets) as missing:
            open_at(disk, recovery_point=closed.end_offset, **start)
        assert (missing.value.first, missing.value.end) == (0, closed.end_offset)
        assert disk.exists(DIRECTORY) is not whole
        assert (not whole and not logs(disk)) or whole
        log = open_at(disk, recovery_point=closed.end_offset, accept_loss=True, **start)
        assert (log.start_offset, log.end_offset, read_batches(log)) == (
            closed.end_offset,
            closed.end_offset,
            (),
        )
        disk.kill()
        assert open_at(disk, recovery_point=closed.end_offset).end_offset == closed.end_offset


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
def test_a_segment_cut_anywhere_is_missed_and_can_be_given_up(closed: Closed, start: dict[str, Any]) -> None:
    for which in (0, 1, -2, -1):
        base, end = closed.bases[which], closed.ends[which]
        path = f"{DIRECTORY}/{offset_name(base)}.log"
        size = closed.disk.size(path)
        for length in (7, size // 2, size // 2 + 1, size - 1):
            disk = closed.disk.copy()
            disk.open(path, "write").truncate(length)
            disk.flush_all(DIRECTORY)
            with pytest.raises(MissingOffsets) as missing:
                open_at(disk, recovery_point=closed.end_offset, **start)
            first = missing.value.first
            assert base <= first < missing.value.end == end
            for again in range(2):
                log = open_at(disk, recovery_point=closed.end_offset, accept_loss=not again, **start)
                assert read_batches(log) == closed.batches_outside(first, end)
                disk.kill()


def test_bytes_behind_the_last_batch_of_a_sealed_segment_are_damage(closed: Closed) -> None:
    for garbage in (b"x" * 30, b"x" * 90):
        disk = closed.disk.copy()
        path = f"{DIRECTORY}/{offset_name(closed.bases[1])}.log"
        disk.open(path, "write").pwritev([garbage], disk.size(path))
        with pytest.raises(CorruptLog):
            open_at(disk, recovery_point=closed.end_offset, clean=True)


def test_an_earlier_beginning_than_the_checkpoint_of_starts_is_no_loss(closed: Closed) -> None:
    start = closed.bases[2]
    disk = closed.disk.copy()
    for base in closed.bases[:2]:
        remove(disk, base)
    with pytest.raises(MissingOffsets):
        open_at(disk.copy(), recovery_point=closed.end_offset, clean=True, start_offset=start - 1)
    log = open_at(disk.copy(), recovery_point=closed.end_offset, clean=True, start_offset=start)
    assert log.start_offset == start
    # Nobody knows where the log started: its first segment tells.
    log = open_at(disk, recovery_point=closed.end_offset, clean=True, start_offset_known=False)
    assert log.start_offset == start


@pytest.mark.parametrize("seed", range(40))
def test_nothing_that_a_power_failure_takes_before_the_first_flush_is_a_loss(seed: int) -> None:
    disk = SimulatedDisk(seed)
    disk.prepare("/data")
    log = open_at(disk)
    flushed_to = 0
    for number in range(8):
        append(log, Batch((b"%d" % number * 300,), 7, number))
        if seed % 4 == 3 and number == 3:
            flushed_to = flush(disk, log)
    expected = read_batches(log)
    disk.crash()
    if not disk.exists(DIRECTORY):
        disk.make_directory(DIRECTORY)
    log = open_at(disk, torn=True, recovery_point=flushed_to)
    assert log.start_offset == 0
    assert expected[:flushed_to] == read_batches(log)[:flushed_to]
    assert expected[: log.end_offset] == read_batches(log)


def test_any_segment_of_a_compacted_log_is_missed() -> None:
    subject = CompactedLog()
    for number in range(60):
        subject.append([(b"k%d" % (number % 7), b"v%d" % number * 10)])
    subject.compact()
    for number in range(20):
        subject.append([(b"k%d" % (number % 5), b"w%d" % number * 10)])
    log = subject.log
    log.flush_and_close()
    subject.disk.kill()
    bases = [segment.base_offset for segment in log.segments]
    assert len(bases) > 3
    for base in bases:
        disk = subject.disk.copy()
        remove(disk, base)
        with pytest.raises(MissingOffsets):
            subject.open(clean=True, recovery_point=log.end_offset, disk=disk)


# ---- log starts that no checkpoint had room for


def shortened(disk: SimulatedDisk, log: Log, start: int) -> None:
    name_start(disk, log.segments[0], start)
    log.advance_start(start)
    log.remove(log.segments_before(start))


def test_a_start_that_is_told_by_a_name_counts_until_the_checkpoint_has_it() -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk)
    for number in range(BATCHES):
        append(log, Batch((b"%d" % number * 200,)))
    flush(disk, log)
    for start in (log.segments[2].base_offset, log.segments[4].base_offset):
        shortened(disk, log, start)
        assert [name for name in disk.list(DIRECTORY) if name.endswith(".start")] == [f"{start:020d}.start"]
    expected = read_batches(log)
    disk.crash()
    for checkpointed in (0, start):
        log = open_at(disk, torn=True, recovery_point=BATCHES, start_offset=checkpointed)
        assert (log.start_offset, read_batches(log)) == (start, expected)
        disk.kill()
    assert not [name for name in disk.list(DIRECTORY) if name.endswith((".start", ".deleted"))]
    remove(disk, start)
    with pytest.raises(MissingOffsets):
        open_at(disk, recovery_point=BATCHES, start_offset=start)


def test_a_start_is_told_whatever_files_the_first_segment_has() -> None:
    for gone in (some for count in range(3) for some in combinations((".index", ".timeindex"), count)):
        disk = SimulatedDisk()
        disk.prepare("/data")
        log = open_at(disk)
        for number in range(6):
            append(log, Batch((b"%d" % number * 400,)))
        flush(disk, log)
        for suffix in gone:
            disk.remove(f"{DIRECTORY}/{offset_name(0)}{suffix}")
        shortened(disk, log, log.segments[1].base_offset)
        disk.crash()
        assert open_at(disk, torn=True).start_offset == log.start_offset


def test_a_damaged_file_of_what_was_given_up_gives_nothing_up(closed: Closed) -> None:
    disk = closed.disk.copy()
    remove(disk, closed.bases[1])
    open_at(disk, clean=True, recovery_point=closed.end_offset, accept_loss=True)
    disk.open(f"{DIRECTORY}/{LOST_OFFSETS_FILE}", "write").pwritev([b"?"], 0)
    said: list[str] = []
    with pytest.raises(MissingOffsets):
        open_at(disk, clean=True, recovery_point=closed.end_offset, said=said)
    assert [line for line in said if "nothing counts as given up" in line]
