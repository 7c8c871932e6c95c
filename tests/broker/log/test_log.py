"""The log: offsets, rolling, reading, looking up, shortening, on a simulated disk. B1, B2, B3."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import (
    NOW,
    START_MS,
    Batch,
    Stored,
    append,
    flush,
    open_at,
    read_batches,
    state_of,
    topic_config,
)
from tests.support.tiers import examples

from holdfast.broker.log.log import LOADED_MAX, Log
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.disk_files import SimulatedFile
from holdfast.wire.batch import read_header
from holdfast.wire.positions import LogPosition


@pytest.fixture
def log(disk: SimulatedDisk) -> Log:
    return open_at(disk)


def fill(log: Log, count: int, size: int = 60) -> list[Stored]:
    return [
        append(log, Batch((b"%03d" % number * (size // 3),), timestamp=START_MS + number))
        for number in range(count)
    ]


# Offsets


def test_a_new_log_is_empty_and_begins_at_0(log: Log) -> None:
    assert (log.start_offset, log.end_offset, log.size) == (0, 0, 0)
    assert log.read(0, 1000, log.end_position, at_least_one=True) is None


def test_offsets_are_given_in_order_one_to_each_record(log: Log) -> None:
    first = append(log, Batch((b"a", b"b", b"c")))
    second = append(log, Batch((b"d",)))
    assert (first.header.base_offset, first.header.last_offset) == (0, 2)
    assert second.header.base_offset == 3
    assert log.end_offset == 4


def test_a_batch_is_stored_as_it_came_but_for_offset_and_epoch(log: Log, disk: SimulatedDisk) -> None:
    stored = append(log, Batch((b"a" * 50,), epoch=7))
    piece = log.read(0, 1 << 20, log.end_position, at_least_one=True)
    assert piece is not None
    assert piece.file.pread(piece.length, piece.position) == stored.data
    assert read_header(stored.data).leader_epoch == 7


# Rolling


def test_a_segment_rolls_before_it_would_exceed_its_size(log: Log) -> None:
    fill(log, 40)
    assert len(log.segments) > 3
    assert all(segment.size <= 700 for segment in log.segments)
    assert [segment.base_offset for segment in log.segments] == sorted({s.base_offset for s in log.segments})


def test_a_batch_larger_than_a_segment_gets_one_of_its_own(log: Log) -> None:
    fill(log, 2)
    append(log, Batch((b"x" * 5000,)))
    append(log, Batch((b"y",)))
    assert [segment.size > 700 for segment in log.segments] == [False, True, False]


def test_a_segment_rolls_by_the_age_of_its_first_record(disk: SimulatedDisk) -> None:
    log = open_at(disk, config=topic_config(segment_ms="1000"))
    for timestamp in (START_MS, START_MS + 1000):
        append(log, Batch((b"x",), timestamp=timestamp))
    assert len(log.segments) == 1
    append(log, Batch((b"x",), timestamp=START_MS + 1001))
    assert len(log.segments) == 2


def test_jitter_lets_segments_roll_earlier_and_not_all_at_the_same_age(disk: SimulatedDisk) -> None:
    log = open_at(disk, config=topic_config(segment_ms="100000", segment_jitter_ms="50000"))
    timestamp, ages = START_MS, set()
    append(log, Batch((b"x",), timestamp=timestamp))
    for rolls in range(1, 21):
        age_ms = 100_000 - log.roll_jitter_ms
        assert 50_000 < age_ms <= 100_000
        append(log, Batch((b"x",), timestamp=timestamp + age_ms))
        assert len(log.segments) == rolls
        timestamp += age_ms + 1
        append(log, Batch((b"x",), timestamp=timestamp))
        assert len(log.segments) == rolls + 1
        ages.add(age_ms)
    assert len(ages) > 10


def test_a_segment_of_records_without_time_rolls_by_its_own_age(disk: SimulatedDisk) -> None:
    log = open_at(disk, config=topic_config(segment_ms="1000"))
    append(log, Batch((b"x",), timestamp=-1))
    append(log, Batch((b"x",), timestamp=-1), Now(START_MS + 1000, 0))
    assert len(log.segments) == 1
    append(log, Batch((b"x",), timestamp=-1), Now(START_MS + 1001, 0))
    assert len(log.segments) == 2


def test_a_segment_rolls_when_its_index_is_full(disk: SimulatedDisk) -> None:
    config = topic_config(
        internal_segment_bytes="1000000", segment_index_bytes="40", index_interval_bytes="0"
    )
    log = open_at(disk, config=config)
    fill(log, 20)
    assert len(log.segments) > 2
    assert all(len(segment.index) <= 5 for segment in log.segments)


def test_what_a_roll_leaves_behind_is_flushed_with_the_next_flush(log: Log, disk: SimulatedDisk) -> None:
    fill(log, 12)
    assert len(log.segments) >= 2
    targets = [getattr(target, "path", target) for target in log.begin_flush().targets]
    directory = log.directory
    sealed = log.segments[0]
    for suffix in (".log", ".index", ".timeindex"):
        assert sealed.path(suffix) in targets
    assert log.segments[1].path(".snapshot") in targets
    assert targets.index(log.active.path()) > targets.index(sealed.path())
    assert directory in targets
    assert log.begin_flush().end.offset == 12


def test_begin_flush_promises_the_end_at_that_moment(log: Log) -> None:
    fill(log, 2)
    pending = log.begin_flush()
    fill(log, 1)
    assert pending.end.offset == 2
    assert log.recovery_point == 0
    log.advance_recovery_point(pending.end)
    assert log.recovery_point == 2
    assert log.needs_flush


# Reading


def test_reading_is_bounded_by_bytes_and_always_begins_with_the_batch_asked_for(log: Log) -> None:
    stored = fill(log, 5)
    size = len(stored[0].data)
    piece = log.read(1, 2 * size, log.end_position, at_least_one=True)
    assert piece is not None
    assert (piece.position, piece.length) == (size, 2 * size)
    assert read_header(piece.file.pread(61, piece.position)).base_offset == 1


def test_at_least_one_whole_batch_is_returned_when_asked(log: Log) -> None:
    (stored,) = fill(log, 1, 300)
    for limit in (0, 1, 50, len(stored.data) - 1):
        assert log.read(0, limit, log.end_position, at_least_one=False) is None
        piece = log.read(0, limit, log.end_position, at_least_one=True)
        assert piece is not None
        assert piece.length == len(stored.data)


def test_an_offset_inside_a_batch_finds_the_whole_batch(log: Log) -> None:
    append(log, Batch((b"a", b"b", b"c")))
    second = append(log, Batch((b"d", b"e", b"f")))
    piece = log.read(4, 1 << 20, log.end_position, at_least_one=True)
    assert piece is not None
    assert piece.file.pread(piece.length, piece.position) == second.data


def test_nothing_is_read_beyond_the_bound(log: Log) -> None:
    fill(log, 3)
    bound = log.end_position
    fill(log, 3)
    assert len(b"".join(pieces(log, bound))) == bound.position
    assert log.read(3, 1 << 20, bound, at_least_one=True) is None
    assert log.read(100, 1 << 20, bound, at_least_one=True) is None


def pieces(log: Log, bound: LogPosition) -> list[bytes]:
    found = []
    offset = log.start_offset
    while (piece := log.read(offset, 1 << 20, bound, at_least_one=True)) is not None:
        data = piece.file.pread(piece.length, piece.position)
        found.append(data)
        while data:
            header = read_header(data)
            offset = header.next_offset
            data = data[header.size :]
    return found


def test_every_offset_is_found_in_whichever_segment_it_is(log: Log) -> None:
    stored = fill(log, 60)
    for offset in random.Random(3).sample(range(60), 60):
        piece = log.read(offset, 1, log.end_position, at_least_one=True)
        assert piece is not None
        assert piece.file.pread(piece.length, piece.position) == stored[offset].data
    loaded = sum(segment._index is not None for segment in log.segments)
    assert loaded <= LOADED_MAX + 1, "indexes of cold segments are not kept in memory"


def test_position_of_names_the_batch_that_holds_an_offset(log: Log) -> None:
    stored = fill(log, 30)
    for offset in range(30):
        position = log.position_of(offset)
        segment = log.segments[log.segment_for(offset)]
        assert position.segment_base == segment.base_offset
        assert segment.file.pread(len(stored[offset].data), position.position) == stored[offset].data
    assert log.position_of(30) == log.end_position


# Shortening


def test_removing_segments_moves_the_start_and_keeps_the_rest(log: Log, disk: SimulatedDisk) -> None:
    stored = fill(log, 40)
    flush(disk, log)
    start = log.segments[2].base_offset
    log.advance_start(start)
    before = len(log.segments)
    retired = log.remove(log.segments_before(start))
    assert len(log.segments) == before - 2
    assert retired
    assert all(path.endswith(".deleted") for path in retired)
    assert log.start_offset == start
    assert read_batches(log) == tuple(s.data for s in stored[start:])


def test_a_start_inside_a_segment_removes_only_what_is_wholly_below_it(log: Log) -> None:
    fill(log, 40)
    inside = log.segments[1].base_offset + 1
    assert log.segments_before(inside) == [], "before the flush of its roll none may go"
    log.advance_recovery_point(log.end_position)
    assert [segment.base_offset for segment in log.segments_before(inside)] == [0]
    assert log.segments_before(0) == []
    assert len(log.segments_before(log.end_offset)) == len(log.segments) - 1


def test_the_active_segment_is_never_removed(log: Log) -> None:
    fill(log, 2)
    with pytest.raises(ValueError, match="rolled"):
        log.remove([log.active])


def test_the_start_does_not_move_back(log: Log) -> None:
    fill(log, 10)
    log.advance_start(5)
    log.advance_start(3)
    assert log.start_offset == 5


def test_a_slice_outlives_the_removal_of_its_segment(log: Log, disk: SimulatedDisk) -> None:
    """A response that is being sent reads from a file that is gone from the directory."""
    stored = fill(log, 40)
    piece = log.read(0, 1 << 20, log.end_position, at_least_one=True)
    assert piece is not None
    log.advance_start(log.segments[1].base_offset)
    for path in log.remove(log.segments_before(log.start_offset)):
        disk.remove(path)
    assert piece.file.pread(len(stored[0].data), piece.position) == stored[0].data


# Looking up by time, against a model


timestamps = st.lists(st.integers(-1, 60), min_size=1, max_size=40)


@given(timestamps, st.integers(0, 300))
@settings(deadline=None, max_examples=examples(200))
def test_the_first_batch_of_a_time_or_later_is_found(times: list[int], interval_bytes: int) -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    config = topic_config(internal_segment_bytes="500", index_interval_bytes=str(interval_bytes))
    log = open_at(disk, config=config)
    for time in times:
        append(log, Batch((b"x" * 20,), timestamp=time))
    for wanted in range(62):
        found = log.batch_at_or_after_time(wanted, log.end_position)
        expected = next((offset for offset, time in enumerate(times) if time >= wanted), None)
        assert (found[1].header.base_offset if found is not None else None) == expected


@given(st.lists(st.integers(0, 4), max_size=60), st.integers(200, 900))
@settings(deadline=None, max_examples=examples(150))
def test_whatever_is_done_what_is_read_is_what_was_appended(script: list[int], segment_bytes: int) -> None:
    """Appends, rolls, flushes, new starts and restarts in any order, beside a list."""
    config = topic_config(internal_segment_bytes=str(segment_bytes))
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=config)
    model: list[Stored] = []
    for number, step in enumerate(script):
        if step <= 1:
            model.append(append(log, Batch((b"%d" % number * 30, b"second")[: 1 + step], 3, number)))
        elif step == 2:
            log.roll(NOW) if log.active.size else None
        elif step == 3:
            start = log.start_offset + (log.end_offset - log.start_offset) // 3
            flush(disk, log)
            log.advance_start(start)
            log.remove(log.segments_before(start))
            model = [stored for stored in model if stored.header.last_offset >= start]
        else:
            start = log.start_offset
            log.flush_and_close()
            log = open_at(disk, config=config, clean=True, start_offset=start, recovery_point=log.end_offset)
        assert read_batches(log, max_bytes=300) == tuple(stored.data for stored in model)
    state = state_of(log)
    flush(disk, log)
    disk.crash()
    again = open_at(
        disk, config=config, torn=True, start_offset=log.start_offset, recovery_point=log.recovery_point
    )
    assert state_of(again).batches == state.batches


# ---- the largest timestamp


times = st.lists(st.integers(-1, 30), min_size=1, max_size=40)


@settings(max_examples=examples(60))
@given(times, st.data())
def test_the_newest_batch_below_any_end_is_found(timestamps: list[int], data: st.DataObject) -> None:
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=topic_config(index_interval_bytes="150", internal_segment_bytes="700"))
    ends = []
    for timestamp in timestamps:
        append(log, Batch((b"v",), timestamp=timestamp))
        ends.append(log.end_position)
    count = data.draw(st.integers(1, len(timestamps)))
    start = data.draw(st.integers(0, count))
    log.advance_start(start)
    found = log.newest_batch(ends[count - 1])
    visible = [(timestamp, -at) for at, timestamp in enumerate(timestamps[:count]) if at >= start]
    newest, at = max(visible, default=(-1, 0))
    if newest < 0:
        assert found is None
    else:
        assert found is not None
        assert (found[1].header.max_timestamp, found[1].header.base_offset) == (newest, -at)


def test_the_newest_batch_is_found_without_a_walk_over_the_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """However long the log is, and although the newest of all is not committed yet."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=topic_config(index_interval_bytes="300", internal_segment_bytes="7000"))
    for number in range(500):
        append(log, Batch((b"v",), timestamp=START_MS + number % 400))
    committed = log.end_position
    append(log, Batch((b"v",), timestamp=START_MS + 1000))
    reads: list[int] = []
    pread = SimulatedFile.pread

    def counted(file: SimulatedFile, length: int, position: int) -> bytes:
        reads.append(position)
        return pread(file, length, position)

    monkeypatch.setattr(SimulatedFile, "pread", counted)
    found = log.newest_batch(committed)
    assert found is not None
    assert found[1].header.base_offset == 399
    assert len(reads) <= 300 // 70 + 5


def test_rolling_an_empty_segment_changes_nothing(log: Log, disk: SimulatedDisk) -> None:
    first = log.active
    assert log.roll(NOW) is first
    append(log, Batch((b"a",)))
    log.roll(NOW)
    log.roll(NOW)
    assert [segment.base_offset for segment in log.segments] == [0, 1]
    flush(disk, log)
    log.advance_start(1)
    assert log.remove(log.segments_before(1))
    assert log.segments_before(2) == []
