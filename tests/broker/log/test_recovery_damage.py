"""Recovery from damage: files cut at every byte, bits flipped anywhere. B7.

What must hold whatever happens to the bytes: opening never fails otherwise than with `CorruptLog`; what it returns is a
prefix of the batches that were appended, each whole and unchanged; indexes, producers and epochs are those of a log
to which just that prefix was appended; opening again gives the same again.

After a power failure (`torn`) the prefix ends where the damage begins. On a machine that kept running, damage with
good batches behind it is not a tail: the partition is refused and nothing is touched.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import tiers
from tests.support.partition_logs import (
    DIRECTORY,
    START_MS,
    Batch,
    LogState,
    Stored,
    append,
    flush,
    fresh_copy,
    indexes_of,
    open_at,
    state_of,
    topic_config,
)
from tests.support.tiers import examples

from holdfast.broker.log.log import Log
from holdfast.errors import CorruptLog
from holdfast.saying import Level, Line
from holdfast.testing.disk import Fault, SimulatedDisk
from holdfast.wire.batch import ATTRIBUTES_LOW_BYTE, HEADER_SIZE
from holdfast.wire.codecs import Codec

BATCHES = [
    Batch((b"a" * 40,), 1, 0),
    Batch((b"b", b"c"), 2, 0, Codec.GZIP, START_MS + 5),
    Batch((b"d" * 100,), timestamp=START_MS + 3),
    Batch((b"e", b"f", b"g"), 1, 1, Codec.LZ4, START_MS + 9),
    Batch((b"h" * 60,), 2, 2, timestamp=START_MS + 9, epoch=1),
    Batch((b"i" * 30, b"j"), timestamp=START_MS + 20, epoch=1),
    Batch((b"k",), 1, 4, Codec.ZSTD, START_MS + 21, epoch=1),
    Batch((b"l" * 90,), 2, 3, timestamp=START_MS + 2, epoch=3),
    Batch((b"m", b"n"), 1, 5, Codec.SNAPPY, START_MS + 30, epoch=3),
]

CONFIG = topic_config(internal_segment_bytes="450")
BASE_OFFSET = range(8)
LEADER_EPOCH = range(12, 16)


class Written:
    """The log of BATCHES as a killed process leaves it, everything flushed."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.prepare("/data")
        log = open_at(self.disk, config=CONFIG)
        self.stored = [append(log, batch) for batch in BATCHES]
        flush(self.disk, log)
        self.disk.kill()
        self.end_offset = log.end_offset
        self.paths = [segment.path() for segment in log.segments]
        self.places: list[tuple[str, int, Stored]] = []
        """Path and position of each batch."""
        at = iter(self.stored)
        for segment in log.segments:
            position = 0
            while position < segment.size:
                stored = next(at)
                self.places.append((segment.path(), position, stored))
                position += len(stored.data)
        assert len(log.segments) >= 3

    def batches_before(self, path: str, position: int) -> list[Stored]:
        """The whole batches in front of a damaged byte."""
        return [
            stored
            for where, begin, stored in self.places
            if (where, begin + len(stored.data)) <= (path, position)
        ]

    def batch_at(self, path: str, position: int) -> tuple[int, Stored]:
        """Where in its batch a byte lies, and which batch that is."""
        for where, begin, stored in self.places:
            if where == path and begin <= position < begin + len(stored.data):
                return position - begin, stored
        raise AssertionError(f"no batch at {path} {position}")

    def bytes(self) -> Iterator[tuple[str, int]]:
        for path in self.paths:
            for position in range(self.disk.size(path)):
                yield path, position


@pytest.fixture(scope="module")
def written() -> Written:
    return Written()


def cut(disk: SimulatedDisk, path: str, length: int) -> None:
    file = disk.open(path, "write")
    file.truncate(length)
    file.flush()


def flip(disk: SimulatedDisk, path: str, position: int, bit: int) -> None:
    disk.flip_bit(path, position, bit)
    disk.open(path, "read").drop_cache()


def normal(state: LogState) -> LogState:
    """Without the empty segment that a cut at a segment's very beginning leaves behind."""
    if len(state.segments) > 1 and not state.segments[-1][1]:
        return state._replace(segments=state.segments[:-1], timestamps=state.timestamps[:-1])
    return state


def finished_indexes(log: Log) -> list[object]:
    log.active.finish_time_index()
    indexes: list[object] = [*indexes_of(log)]
    return indexes[:-1] if len(indexes) > 1 and not log.active.size else indexes


def contents(disk: SimulatedDisk) -> dict[str, bytes]:
    return {
        name: disk.open(f"{DIRECTORY}/{name}", "read").pread(1 << 20, 0)
        for name in disk.list(DIRECTORY)
        if name.endswith((".log", ".cut"))
    }


def assert_recovers_to(prefix: list[Stored], disk: SimulatedDisk, *, torn: bool) -> None:
    log = open_at(disk, config=CONFIG, torn=torn)
    expected = fresh_copy(prefix, CONFIG)
    state = state_of(log)
    assert normal(state) == normal(state_of(expected))
    assert finished_indexes(log) == finished_indexes(expected)
    # Once more after another kill, and once more after a clean end: the same log.
    disk.kill()
    again = open_at(disk, config=CONFIG, torn=False, recovery_point=log.end_offset)
    assert state_of(again) == state
    again.flush_and_close()
    assert state_of(open_at(disk, config=CONFIG, clean=True, recovery_point=log.end_offset)) == state


def assert_refused(disk: SimulatedDisk, **trust: object) -> None:
    before = contents(disk)
    with pytest.raises(CorruptLog):
        open_at(disk, config=CONFIG, **trust)  # type: ignore[arg-type]
    assert contents(disk) == before, "a partition that is refused is left as it is"


def is_last(written: Written, path: str) -> bool:
    return path == written.paths[-1]


def test_a_log_cut_at_any_byte_of_its_last_segment_ends_at_the_last_whole_batch(written: Written) -> None:
    path = written.paths[-1]
    for length in range(written.disk.size(path) + 1):
        disk = written.disk.copy()
        cut(disk, path, length)
        assert_recovers_to(written.batches_before(path, length), disk, torn=length % 2 == 0)


@pytest.mark.check
def test_an_earlier_segment_cut_at_any_byte_ends_the_log_after_a_power_failure(written: Written) -> None:
    for path in written.paths[:-1]:
        for length in range(written.disk.size(path)):
            disk = written.disk.copy()
            cut(disk, path, length)
            assert_recovers_to(written.batches_before(path, length), disk, torn=True)


def test_an_earlier_segment_cut_at_any_byte_is_refused_on_a_machine_that_kept_running(
    written: Written,
) -> None:
    for path in written.paths[:-1]:
        for length in range(written.disk.size(path)):
            disk = written.disk.copy()
            cut(disk, path, length)
            assert_refused(disk)


def test_what_was_flushed_is_never_cut_whatever_byte_is_missing(written: Written) -> None:
    """Below the recovery point everything was on disk, so that a shorter log has lost acknowledged messages."""
    for path, length in written.bytes():
        disk = written.disk.copy()
        cut(disk, path, length)
        if path < written.paths[-1]:
            continue  # sealed segments below the recovery point are left to the scrub
        assert_refused(disk, recovery_point=written.end_offset, torn=length % 2 == 0)


@pytest.mark.parametrize("torn", [True, False])
def test_a_flipped_bit_ends_the_log_there_or_has_it_refused(written: Written, torn: bool) -> None:
    every = tiers.by_tier(quick=3, check=1, long=1)
    for number, (path, position) in enumerate(islice(written.bytes(), 0, None, every)):
        inside, damaged = written.batch_at(path, position)
        disk = written.disk.copy()
        flip(disk, path, position, number * 5 % 8)
        if inside in LEADER_EPOCH:
            # Outside the checksum: the batch is whole, and only the epochs may differ.
            log = open_at(disk, config=CONFIG, torn=torn)
            assert log.end_offset == written.end_offset
            continue
        prefix = written.batches_before(path, position)
        if torn or (damaged is written.stored[-1] and inside not in BASE_OFFSET):
            assert_recovers_to(prefix, disk, torn=torn)
        else:
            assert_refused(disk, torn=False)


def test_what_was_flushed_is_never_cut_whatever_bit_is_flipped(written: Written) -> None:
    path = written.paths[-1]
    for position in range(written.disk.size(path)):
        inside, damaged = written.batch_at(path, position)
        if inside in LEADER_EPOCH or (inside in BASE_OFFSET and damaged is written.stored[-1]):
            continue  # outside the checksum and without a batch behind it that would give it away
        disk = written.disk.copy()
        flip(disk, path, position, position * 3 % 8)
        assert_refused(disk, recovery_point=written.end_offset, torn=position % 2 == 0)


@given(data=st.data())
@settings(max_examples=examples(300), deadline=None)
def test_any_damage_at_all_leaves_whole_unchanged_batches_or_a_refusal(data: st.DataObject) -> None:
    written = Written()
    disk = written.disk
    paths = [f"{DIRECTORY}/{name}" for name in disk.list(DIRECTORY)]
    for _ in range(data.draw(st.integers(1, 4), label="how often")):
        path = data.draw(st.sampled_from(paths), label="file")
        what = data.draw(st.sampled_from(["cut", "flip", "overwrite", "remove", "grow"]), label="what")
        if not disk.exists(path):
            continue
        size = disk.size(path)
        if what == "remove":
            disk.remove(path)
        elif what == "grow":
            disk.open(path, "write").pwritev([data.draw(st.binary(min_size=1, max_size=90))], size)
        elif size:
            position = data.draw(st.integers(0, size - 1), label="where")
            if what == "cut":
                disk.open(path, "write").truncate(position)
            elif what == "flip":
                raw = disk.open(path, "write")
                byte = raw.pread(1, position)[0] ^ (1 << data.draw(st.integers(0, 7)))
                raw.pwritev([bytes([byte])], position)
            else:
                disk.open(path, "write").pwritev([data.draw(st.binary(min_size=1, max_size=90))], position)
    disk.flush_all(DIRECTORY)
    clean = data.draw(st.booleans(), label="clean")
    torn = data.draw(st.booleans(), label="torn")
    recovery_point = data.draw(st.integers(0, written.end_offset), label="recovery point")
    try:
        log = open_at(disk, config=CONFIG, torn=torn, clean=clean, recovery_point=recovery_point)
    except CorruptLog:
        return
    if clean or recovery_point:
        return  # a clean start trusts what it finds; batches are verified by whoever reads them
    appended = {stored.data[16:] for stored in written.stored}
    for batch in state_of(log).batches:
        # The bytes under the checksum, and the format, are always those that were appended.
        assert batch[16:] in appended


def test_a_clean_start_refuses_a_batch_that_damage_has_made_a_marker(written: Written) -> None:
    """Without the snapshot of producers every batch is replayed, though none is verified."""
    disk = written.disk.copy()
    disk.open(written.paths[0], "write").pwritev([b"\x20"], ATTRIBUTES_LOW_BYTE)
    for name in disk.list(DIRECTORY):
        if name.endswith(".snapshot"):
            disk.remove(f"{DIRECTORY}/{name}")
    with pytest.raises(CorruptLog, match="no control batch"):
        open_at(disk, config=CONFIG, clean=True)


def test_a_tail_of_garbage_is_cut_and_kept_aside(written: Written) -> None:
    for garbage in (b"\xff" * 70, b"x" * (HEADER_SIZE - 1), bytes(HEADER_SIZE) + b"x" + bytes(50)):
        disk = written.disk.copy()
        path = written.paths[-1]
        size = disk.size(path)
        file = disk.open(path, "write")
        file.pwritev([garbage], size)
        file.flush()
        said: list[str] = []
        log = open_at(disk, config=CONFIG, said=said)
        assert log.end_offset == written.end_offset
        assert disk.size(path) == size
        kept = path.removesuffix(".log") + ".cut"
        assert disk.open(kept, "read").pread(1 << 20, 0) == garbage
        assert any(f"cut {len(garbage)} bytes" in line for line in said)


@pytest.mark.parametrize(
    ("flush_setting", "promise"), [("group", "were never acknowledged"), ("os", "may have been acknowledged")]
)
def test_it_is_said_what_is_cut_and_whether_it_was_promised(
    written: Written, flush_setting: str, promise: str
) -> None:
    """After a power failure all behind the damage goes, later segments too."""
    disk = written.disk.copy()
    first, *later = written.paths
    disk.flip_bit(first, 20)
    cut = sum(disk.size(path) for path in written.paths)
    said: list[str] = []
    config = topic_config(internal_segment_bytes="450", holdfast_flush=flush_setting)
    log = open_at(disk, config=config, torn=True, said=said)
    assert (log.end_offset, log.growth.cut_bytes) == (0, cut)
    (line,) = said
    assert isinstance(line, Line)
    assert line.level is Level.WARN
    assert f"cut {cut} bytes at 0, from offset 0 on" in line
    assert promise in line
    assert all(path.removesuffix(".log").rpartition("/")[2] + ".cut" in line for path in (first, *later))


def test_every_tail_that_is_cut_off_one_segment_is_kept(written: Written) -> None:
    path = written.paths[-1]
    stem = path.removesuffix(".log")
    disk = written.disk.copy()
    tails = (b"\xff" * 70, b"\xfe" * 90, b"\xfd" * 70)
    for tail in tails:
        file = disk.open(path, "write")
        file.pwritev([tail], disk.size(path))
        file.flush()
        said: list[str] = []
        open_at(disk, config=CONFIG, said=said)
    kept = [f"{stem}.cut", f"{stem}.2.cut", f"{stem}.3.cut"]
    assert tuple(disk.open(name, "read").pread(1 << 20, 0) for name in kept) == tails
    assert any(kept[-1].rpartition("/")[2] in line for line in said)


def test_a_tail_whose_cutting_was_interrupted_is_kept_once(written: Written) -> None:
    path = written.paths[-1]
    disk = written.disk.copy()
    file = disk.open(path, "write")
    file.pwritev([b"\xff" * 70], disk.size(path))
    file.flush()
    disk.plan(Fault("truncate", path_contains=path))
    with pytest.raises(OSError, match=path):
        open_at(disk, config=CONFIG)
    open_at(disk, config=CONFIG)
    assert [name for name in disk.list(DIRECTORY) if name.endswith(".cut")] == [
        path.rpartition("/")[2].removesuffix(".log") + ".cut"
    ]


def test_a_tail_that_there_was_no_room_to_keep_is_kept_once_there_is(written: Written) -> None:
    path = written.paths[-1]
    disk = written.disk.copy()
    file = disk.open(path, "write")
    file.pwritev([b"\xff" * 70], disk.size(path))
    file.flush()
    disk.plan(Fault("write", errno.ENOSPC, partial=True, path_contains=".cut"))
    with pytest.raises(OSError, match=r"\.cut"):
        open_at(disk, config=CONFIG)
    open_at(disk, config=CONFIG)
    (kept,) = [name for name in disk.list(DIRECTORY) if name.endswith(".cut")]
    assert disk.open(f"{DIRECTORY}/{kept}", "read").pread(1 << 20, 0) == b"\xff" * 70


@pytest.mark.parametrize("torn", [True, False])
def test_a_whole_batch_of_a_lower_offset_behind_the_end_is_no_part_of_the_log(
    written: Written, torn: bool
) -> None:
    disk = written.disk.copy()
    file = disk.open(written.paths[-1], "write")
    file.pwritev([written.stored[-2].data], file.size())
    file.flush()
    if torn:
        assert_recovers_to(written.stored, disk, torn=True)
    else:
        assert_refused(disk)


def test_an_offset_below_the_recovery_point_that_jumped_ahead_does_not_cost_what_follows(
    written: Written,
) -> None:
    """Compaction leaves gaps there, so the jump alone is not noticed; the batch behind it gives it away."""
    path, position, _ = written.places[-2]
    for bit in range(8):
        disk = written.disk.copy()
        flip(disk, path, position + 5, bit)
        assert_refused(disk, recovery_point=written.end_offset, torn=True)
        assert_refused(disk, recovery_point_known=False, torn=True)
