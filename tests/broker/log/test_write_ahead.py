"""Zeros written behind the last batch: who gets them, that nobody takes them for the log, and how they go again.

The damage tests are those of recovery, on a file that ends in such zeros: whatever is done to its bytes, the log is a
prefix of the batches that were appended, and its own zeros are neither kept aside nor called damage.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support import tiers
from tests.support.partition_logs import (
    DIRECTORY,
    NOW,
    START_MS,
    Batch,
    Stored,
    append,
    flush,
    fresh_copy,
    indexes_of,
    open_at,
    read_batches,
    state_of,
    topic_config,
)
from tests.support.tiers import examples

from holdfast.broker.dump.batches import DumpOptions, Event
from holdfast.broker.dump.path import dump_path
from holdfast.broker.log.log import Log
from holdfast.broker.log.write_ahead import (
    FIRST_BYTES,
    FLUSHES_MIN,
    FLUSHES_MIN_AFTER_OTHERS,
    GROUPS_MIN,
    WriteAhead,
    content_end,
    zeros,
)
from holdfast.errors import CorruptLog
from holdfast.real import RealFileSystem
from holdfast.seams import Now
from holdfast.testing.disk import Fault, SimulatedDisk

CONFIG = topic_config(internal_segment_bytes="2000")
LIMIT = 1 << 20
NO_END = 1 << 30
PATH = f"{DIRECTORY}/{0:020d}.log"
CUT = PATH.removesuffix(".log") + ".cut"


def batch(number: int) -> Batch:
    return Batch(
        (b"%03d" % number * 9, b"\0" * 8), 1 + number % 2, number // 2 * 2, timestamp=START_MS + number
    )


def flushed_often(disk: SimulatedDisk, count: int = FLUSHES_MIN + 2) -> tuple[Log, list[Stored]]:
    """A log with every batch flushed by itself, and so with space behind the last one."""
    log = open_at(disk, config=CONFIG)
    stored = []
    for number in range(count):
        stored.append(append(log, batch(number)))
        flush(disk, log)
    assert log.active.has_space_ahead
    return log, stored


def content(disk: SimulatedDisk, path: str = PATH) -> bytes:
    return disk.open(path, "read").pread(1 << 20, 0)


# Who gets any


def small_flushes(count: int, group_bytes: int = 200) -> WriteAhead:
    ahead = WriteAhead()
    for _ in range(count):
        ahead.flushing(group_bytes, apart=True)
    return ahead


def test_space_is_due_after_a_few_small_flushes_of_a_log_by_itself() -> None:
    assert not small_flushes(FLUSHES_MIN - 1).is_due
    assert small_flushes(FLUSHES_MIN).is_due


def test_after_a_flush_together_with_others_it_takes_many_more() -> None:
    ahead = small_flushes(FLUSHES_MIN)
    ahead.flushing(200, apart=False)
    assert not ahead.is_due
    for _ in range(FLUSHES_MIN_AFTER_OTHERS):
        assert not ahead.is_due
        ahead.flushing(200, apart=True)
    assert ahead.is_due


def test_space_doubles_up_to_the_limit_and_ends_at_a_page() -> None:
    ahead = small_flushes(FLUSHES_MIN)
    end, given_bytes = 300, []
    for _ in range(10):
        length = ahead.bytes_behind(end, LIMIT, NO_END)
        assert (end + length) % 4096 == 0
        given_bytes.append(-(-length // 4096) * 4096)
        end += length + 200
    assert given_bytes[0] == FIRST_BYTES
    assert given_bytes == sorted(given_bytes)
    assert given_bytes[-1] == LIMIT
    ahead.begin_anew()
    assert not ahead.is_due


def test_large_groups_get_none_and_middling_ones_enough_for_many() -> None:
    assert small_flushes(40, LIMIT // GROUPS_MIN * 2).bytes_behind(0, LIMIT, NO_END) == 0
    assert small_flushes(40, 4096).bytes_behind(0, LIMIT, NO_END) >= 3900 * GROUPS_MIN


def test_space_never_reaches_beyond_the_largest_segment() -> None:
    ahead = small_flushes(FLUSHES_MIN)
    assert ahead.bytes_behind(1000, LIMIT, 5000) == 4000
    assert ahead.bytes_behind(5000, LIMIT, 5000) == 0
    assert ahead.bytes_behind(6000, LIMIT, 5000) == 0


def test_nothing_is_written_ahead_when_it_is_turned_off(disk: SimulatedDisk) -> None:
    for settings_ in ({"holdfast_write_ahead_bytes": "0"}, {"holdfast_flush": "os"}):
        log = open_at(disk, config=topic_config(**settings_))
        for _ in range(3 * FLUSHES_MIN):
            append(log, Batch((b"x",)))
            flush(disk, log)
            assert disk.size(log.active.path()) == log.active.size
        log.flush_and_close()


@given(st.integers(0, 300_000))
def test_zeros_are_as_many_as_asked_for(length: int) -> None:
    assert b"".join(zeros(length)) == bytes(length)


@given(st.binary(max_size=30), st.integers(0, 40), st.integers(0, 30))
def test_the_end_of_the_content_is_behind_its_last_byte_that_is_not_zero(
    data: bytes, count: int, position: int
) -> None:
    disk = SimulatedDisk()
    file = disk.open("/f", "create")
    file.pwritev([data, bytes(count)], 0)
    size = file.size()
    position = min(position, size)
    expected = max(position, len((data + bytes(count)).rstrip(b"\0")))
    assert content_end(file, position, size) == expected


# What it is not


def test_the_log_ends_where_its_batches_do(disk: SimulatedDisk) -> None:
    log, stored = flushed_often(disk)
    size = sum(len(each.data) for each in stored)
    assert (log.size, log.active.size, log.end_position.position) == (size, size, size)
    assert disk.size(PATH) == CONFIG.segment_bytes > size
    assert content(disk) == b"".join(each.data for each in stored).ljust(CONFIG.segment_bytes, b"\0")
    assert read_batches(log) == tuple(each.data for each in stored)


def test_batches_replace_the_zeros_without_making_the_file_longer(disk: SimulatedDisk) -> None:
    log, _ = flushed_often(disk)
    before = disk.size(PATH)
    append(log, batch(100))
    flush(disk, log)
    assert disk.size(PATH) == before
    assert disk.held(PATH) == content(disk)


def test_a_roll_gives_the_space_back_and_the_next_segment_has_its_own(disk: SimulatedDisk) -> None:
    log, _ = flushed_often(disk)
    sealed = log.active
    log.roll(NOW)
    append(log, batch(100))
    flush(disk, log)
    disk.crash()
    assert disk.size(sealed.path()) == sealed.size
    assert disk.size(log.active.path()) > log.active.size


def test_a_clean_stop_gives_the_space_back(disk: SimulatedDisk) -> None:
    log, stored = flushed_often(disk)
    log.flush_and_close()
    disk.crash()
    assert disk.size(PATH) == log.size
    assert open_at(disk, config=CONFIG, clean=True).end_offset == stored[-1].header.next_offset


def test_an_idle_log_gives_the_space_back(disk: SimulatedDisk) -> None:
    log, stored = flushed_often(disk)
    log.give_back_when_idle()
    assert log.active.has_space_ahead, "it was flushed a moment ago"
    log.give_back_when_idle()
    assert disk.size(PATH) == log.size
    log.give_back_when_idle()
    for number in range(100, 100 + FLUSHES_MIN):
        append(log, batch(number))
        flush(disk, log)
        assert not log.active.has_space_ahead, "it must be deserved again"
    assert read_batches(log)[: len(stored)] == tuple(each.data for each in stored)


def test_space_given_back_when_idle_is_gone_after_a_clean_stop_and_a_power_failure() -> None:
    for seed in range(6):
        disk = SimulatedDisk(seed)
        disk.prepare("/data")
        log, _ = flushed_often(disk)
        log.give_back_when_idle()
        log.give_back_when_idle()
        log.flush_and_close()
        disk.crash()
        assert open_at(disk, config=CONFIG, clean=True).end_offset == log.end_offset


@pytest.mark.parametrize("room", [0, 1, 60, 300])
def test_without_room_for_the_space_the_batch_is_written_by_itself(disk: SimulatedDisk, room: int) -> None:
    log = open_at(disk, config=CONFIG)
    for number in range(FLUSHES_MIN):
        append(log, batch(number))
        flush(disk, log)
    before = state_of(log)
    disk.capacity_bytes = disk.used_bytes + room
    if room < 300:
        with pytest.raises(OSError) as refused:
            append(log, batch(FLUSHES_MIN))
        assert refused.value.errno == errno.ENOSPC
        assert state_of(log) == before
    else:
        append(log, batch(FLUSHES_MIN))
        assert log.end_offset == before.end_offset + 2
    assert disk.size(PATH) == log.size
    disk.capacity_bytes = None
    append(log, batch(FLUSHES_MIN + 2))
    flush(disk, log)
    disk.crash()
    assert open_at(disk, config=CONFIG, torn=True).end_offset == log.end_offset


def test_a_write_into_the_space_that_fails_leaves_the_log_as_it_was(disk: SimulatedDisk) -> None:
    log, _ = flushed_often(disk)
    before = state_of(log)
    disk.plan(Fault("write", partial=True))
    with pytest.raises(OSError, match="Input/output"):
        append(log, batch(100))
    assert state_of(log) == before
    assert disk.size(PATH) == log.size, "what was written in part is gone, and the zeros with it"
    append(log, batch(100))
    flush(disk, log)
    disk.kill()
    assert open_at(disk, config=CONFIG).end_offset == log.end_offset


@pytest.mark.parametrize("operation", ["write", "create", "truncate"])
@pytest.mark.parametrize("skip", range(3))
def test_space_cut_off_for_an_append_that_failed_is_gone_after_a_clean_stop(
    operation: str, skip: int
) -> None:
    """And a power failure behind it: the file is as long as its log, or the clean start would call it damaged."""
    for seed in range(6):
        disk = SimulatedDisk(seed)
        disk.prepare("/data")
        log, stored = flushed_often(disk)
        disk.plan(Fault(operation, skip=skip, times=1000))  # type: ignore[arg-type]
        with suppress(OSError):
            log.roll(NOW)
        with suppress(OSError):
            append(log, batch(100))
        disk.clear_faults()
        log.flush_and_close()
        disk.crash()
        again = open_at(disk, config=CONFIG, clean=True, recovery_point=log.end_offset)
        assert read_batches(again)[: len(stored)] == tuple(each.data for each in stored)
        assert again.end_offset == log.end_offset


# Recovery


class Written:
    """A log as a killed process leaves it: batches, all flushed, and zeros behind them."""

    def __init__(self) -> None:
        self.disk = SimulatedDisk()
        self.disk.prepare("/data")
        log, self.stored = flushed_often(self.disk)
        self.disk.kill()
        self.size = log.size
        self.file_bytes = self.disk.size(PATH)
        self.end_offset = log.end_offset

    def batches_before(self, position: int) -> list[Stored]:
        found, end = [], 0
        for each in self.stored:
            end += len(each.data)
            if end <= position:
                found.append(each)
        return found


@pytest.fixture(scope="module")
def written() -> Written:
    return Written()


def assert_recovers_to(prefix: list[Stored], disk: SimulatedDisk, said: list[str], **trust: object) -> Log:
    log = open_at(disk, config=CONFIG, said=said, **trust)  # type: ignore[arg-type]
    expected = fresh_copy(prefix, CONFIG)
    assert state_of(log) == state_of(expected)
    assert indexes_of(log) == indexes_of(expected)
    assert disk.size(PATH) == log.size
    return log


@pytest.mark.parametrize("torn", [True, False])
def test_zeros_behind_the_last_batch_are_cut_off_without_a_word(written: Written, torn: bool) -> None:
    disk = written.disk.copy()
    said: list[str] = []
    assert_recovers_to(written.stored, disk, said, torn=torn, recovery_point=written.end_offset)
    assert said == []
    assert not disk.exists(CUT)
    disk.crash()
    assert disk.size(PATH) == written.size, "the file is as long as its log from then on"


def test_a_file_of_nothing_but_zeros_is_an_empty_log(written: Written) -> None:
    disk = written.disk.copy()
    disk.open(PATH, "write").pwritev([bytes(written.file_bytes)], 0)
    said: list[str] = []
    assert_recovers_to([], disk, said)
    assert said == []


def test_zeros_where_flushed_batches_were_are_damage(written: Written) -> None:
    disk = written.disk.copy()
    last = len(written.stored[-1].data)
    file = disk.open(PATH, "write")
    file.pwritev([bytes(last)], written.size - last)
    file.flush()
    before = content(disk)
    for torn in (True, False):
        with pytest.raises(CorruptLog):
            open_at(disk, config=CONFIG, torn=torn, recovery_point=written.end_offset)
    assert content(disk) == before


def test_zeros_with_a_batch_behind_them_are_damage(written: Written) -> None:
    """A hole: refused on a machine that kept running, a tail that was never acknowledged after a power failure."""
    for hole in range(len(written.stored) - 1):
        begin = sum(len(each.data) for each in written.stored[:hole])
        disk = written.disk.copy()
        file = disk.open(PATH, "write")
        file.pwritev([bytes(len(written.stored[hole].data))], begin)
        file.flush()
        before = content(disk)
        with pytest.raises(CorruptLog):
            open_at(disk, config=CONFIG, torn=False)
        assert content(disk) == before
        said: list[str] = []
        assert_recovers_to(written.stored[:hole], disk, said, torn=True)
        assert len(said) == 1
        kept = content(disk, CUT)
        assert before[begin:].startswith(kept)
        assert begin + len(kept) >= written.size, "the batches behind it are kept"
        assert len(kept) < written.file_bytes - begin, "what was written ahead is not"


def test_zeros_in_front_of_another_segment_are_damage(written: Written) -> None:
    disk = written.disk.copy()
    following = disk.open(f"{DIRECTORY}/{written.end_offset:020d}.log", "create")
    later = fresh_copy(written.stored, CONFIG)
    data = append(later, batch(200)).data
    following.pwritev([data], 0)
    disk.flush_all(DIRECTORY)
    before = content(disk)
    with pytest.raises(CorruptLog):
        open_at(disk, config=CONFIG, torn=False)
    assert content(disk) == before


def test_a_file_cut_at_any_byte_ends_at_its_last_whole_batch(written: Written) -> None:
    for length in range(0, written.file_bytes + 1, tiers.by_tier(quick=3, check=1, long=1)):
        disk = written.disk.copy()
        file = disk.open(PATH, "write")
        file.truncate(length)
        file.flush()
        said: list[str] = []
        assert_recovers_to(written.batches_before(length), disk, said, torn=length % 2 == 0)
        if length >= written.size:
            assert said == []
            # Once more, as if everything below had been flushed.
            assert_recovers_to(written.stored, disk, said, recovery_point=written.end_offset)


def test_a_bit_flipped_among_the_zeros_costs_nothing_and_is_kept(written: Written) -> None:
    for position in range(written.size, written.file_bytes, 7):
        disk = written.disk.copy()
        disk.flip_bit(PATH, position, position % 8)
        disk.open(PATH, "read").drop_cache()
        said: list[str] = []
        assert_recovers_to(written.stored, disk, said, recovery_point=written.end_offset)
        assert len(said) == 1
        assert any(content(disk, CUT))


BASE_OFFSET = range(8)
LEADER_EPOCH = range(12, 16)


def test_a_bit_flipped_in_a_batch_ends_the_log_there_or_has_it_refused(written: Written) -> None:
    for position in range(0, written.size, 3):
        prefix = written.batches_before(position)
        inside = position - sum(len(each.data) for each in prefix)
        if inside in LEADER_EPOCH or (inside in BASE_OFFSET and len(prefix) == len(written.stored) - 1):
            continue  # outside the checksum, and no batch behind it that would give it away
        disk = written.disk.copy()
        disk.flip_bit(PATH, position, position * 5 % 8)
        disk.open(PATH, "read").drop_cache()
        refused = disk.copy()
        with pytest.raises(CorruptLog):
            open_at(refused, config=CONFIG, torn=True, recovery_point=written.end_offset)
        assert_recovers_to(prefix, disk, [], torn=True)


@given(data=st.data())
@settings(max_examples=examples(150), deadline=None)
def test_a_batch_torn_in_any_way_over_zeros_is_whole_or_not_there(data: st.DataObject) -> None:
    """Power loss over space that was on disk: of each piece the old zeros or the new bytes."""
    written = Written()
    disk = written.disk
    unflushed = fresh_copy(written.stored, CONFIG)
    later = [append(unflushed, batch(200 + number)) for number in range(2)]
    new = b"".join(each.data for each in later)
    grain = data.draw(st.sampled_from([1, 8, 64]), label="grain")
    pieces = range(0, len(new), grain)
    survives = data.draw(
        st.lists(st.booleans(), min_size=len(pieces), max_size=len(pieces)) | st.just([True] * len(pieces)),
        label="what survives",
    )
    torn = b"".join(
        new[at : at + grain] if kept else bytes(len(new[at : at + grain]))
        for at, kept in zip(pieces, survives, strict=True)
    )
    disk.open(PATH, "write").pwritev([torn], written.size)
    disk.flush_all(DIRECTORY)
    whole = 0
    for each in later:
        begin = sum(len(other.data) for other in later[:whole])
        if torn[begin : begin + len(each.data)] != each.data:
            break
        whole += 1
    log = assert_recovers_to(
        [*written.stored, *later[:whole]], disk, [], torn=True, recovery_point=written.end_offset
    )
    append(log, batch(300))
    assert flush(disk, log) == log.end_offset


def test_power_loss_after_an_acknowledged_append_into_the_space_keeps_it() -> None:
    for seed in range(40):
        disk = SimulatedDisk(seed)
        disk.prepare("/data")
        log, stored = flushed_often(disk)
        stored.append(append(log, batch(100)))
        durable = flush(disk, log)
        unflushed = append(log, batch(101))
        disk.crash()
        again = open_at(disk, config=CONFIG, torn=True, recovery_point=durable)
        found = read_batches(again)
        assert found in (
            tuple(each.data for each in stored),
            tuple(each.data for each in (*stored, unflushed)),
        )


# Tools


def events(directory: Path) -> Iterator[Event]:
    return dump_path(RealFileSystem(), str(directory), DumpOptions(verify=True))


def test_dump_log_tells_what_was_written_ahead_and_finds_nothing_wrong(
    tmp_path: Path, written: Written
) -> None:
    path = tmp_path / f"{0:020d}.log"
    path.write_bytes(content(written.disk))
    found = list(events(tmp_path))
    assert [event["type"] for event in found] == ["file", "written_ahead", "summary"]
    assert found[1]["bytes"] == written.file_bytes - written.size
    assert found[2]["bytes"] == written.size
    assert found[2]["findings"] == 0


def test_dump_log_finds_zeros_behind_a_sealed_segment_wrong(tmp_path: Path, written: Written) -> None:
    (tmp_path / f"{0:020d}.log").write_bytes(content(written.disk))
    (tmp_path / f"{written.end_offset:020d}.log").write_bytes(b"")
    assert [event["message"] for event in events(tmp_path) if event["type"] == "finding"]


def test_dump_log_checks_indexes_against_a_log_with_space_ahead(tmp_path: Path, written: Written) -> None:
    disk = written.disk.copy()
    log = open_at(disk, config=CONFIG)
    log.flush_and_close()
    for name in (f"{0:020d}.index", f"{0:020d}.timeindex"):
        (tmp_path / name).write_bytes(content(disk, f"{DIRECTORY}/{name}"))
    (tmp_path / f"{0:020d}.log").write_bytes(content(written.disk))
    found = list(events(tmp_path))
    assert {event["type"] for event in found} == {"file", "written_ahead", "summary"}


def test_time_passes_without_a_trace(disk: SimulatedDisk) -> None:
    """A log that is rolled by age gives its space back like any other."""
    log, _ = flushed_often(disk)
    log.roll(Now(START_MS + 10**9, 10**9))
    assert not log.segments[0].has_space_ahead
