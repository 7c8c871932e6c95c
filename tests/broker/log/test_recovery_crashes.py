"""Crashes between any two operations on the disk: what a flush promised is there, the rest is a prefix. B6, B7.

The same script of appends, rolls, flushes and closing runs again and again; each time the machine loses power, or the
process dies, one operation later. Power loss keeps any subset of what was not flushed, so each moment is tried with
several seeds.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import (
    NOW,
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
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk
from holdfast.wire.codecs import Codec

CONFIG = topic_config(internal_segment_bytes="450")
SEEDS = 4
OPERATIONS_MAX = 400


class Run:
    """One run of the script: what was appended, and below which offset a flush promised everything."""

    def __init__(self, disk: SimulatedDisk) -> None:
        self.disk = disk
        self.appended: list[Stored] = []
        self.durable = 0
        self.is_closed = False
        self.has_space_ahead = False

    def script(self) -> None:
        log = open_at(self.disk, config=CONFIG)
        for number in range(14):
            batch = Batch(
                (b"%02d" % number * 20, b"second"),
                1 + number % 2,
                number // 2 * 2,
                Codec.LZ4 if number % 3 == 0 else Codec.NONE,
                START_MS + number * (7 if number % 4 else -7),
                epoch=number // 5,
            )
            self.appended.append(append(log, batch))
            # Some in a row, so that space is written ahead, used, and given back by the roll.
            if number % 3 == 2 or number in (3, 4, 6, 7, 9):
                self.durable = flush(self.disk, log)
        self.has_space_ahead = self.has_space_ahead or log.active.has_space_ahead
        self.durable = flush(self.disk, log)
        log.flush_and_close()
        self.is_closed = True


def crash_after(operations: int, seed: int, end: Callable[[SimulatedDisk], None]) -> Run:
    disk = SimulatedDisk(seed)
    disk.prepare("/data")
    run = Run(disk)
    disk.lose_power_after(operations)
    with suppress(PowerLost):
        run.script()
    disk.clear_faults()
    end(disk)
    return run


def check_recovered(run: Run, *, torn: bool) -> None:
    """A prefix of what was appended, at least what was promised; the same when opened again; and it goes on."""
    log = open_at(run.disk, config=CONFIG, torn=torn, recovery_point=run.durable)
    assert log.end_offset >= run.durable
    state = state_of(log)
    count = len(state.batches)
    assert state.batches == tuple(stored.data for stored in run.appended[:count]) or is_append_under_way(
        run, state
    )
    expected = state_of(fresh_copy(run.appended[:count], CONFIG)) if count <= len(run.appended) else state
    assert state.producers == expected.producers
    run.disk.kill()
    again = open_at(run.disk, config=CONFIG, torn=False, recovery_point=log.end_offset)
    assert state_of(again) == state
    append(again, Batch((b"goes on",), epoch=9))
    assert flush(run.disk, again) == log.end_offset + 1
    again.flush_and_close()
    closed = open_at(run.disk, config=CONFIG, clean=True, recovery_point=log.end_offset + 1)
    assert closed.end_offset == log.end_offset + 1
    assert state_of(closed).batches[:-1] == state.batches


def is_append_under_way(run: Run, state: LogState) -> bool:
    """The batch whose append was interrupted may be there as well: it was written and nobody was told."""
    count = len(run.appended)
    return len(state.batches) == count + 1 and state.batches[:count] == tuple(s.data for s in run.appended)


def test_power_loss_at_any_moment() -> None:
    for operations in range(OPERATIONS_MAX):
        for seed in range(SEEDS):
            run = crash_after(operations, seed, SimulatedDisk.crash)
            if run.is_closed:
                assert operations > 50
                assert run.has_space_ahead
                return
            check_recovered(run, torn=True)
    pytest.fail("the script never ended")


def test_a_killed_process_at_any_moment() -> None:
    for operations in range(OPERATIONS_MAX):
        run = crash_after(operations, 0, SimulatedDisk.kill)
        if run.is_closed:
            return
        check_recovered(run, torn=False)
        assert run.disk.faults["process kill"]
    pytest.fail("the script never ended")


def test_power_loss_at_any_moment_of_recovery_itself() -> None:
    """Recovery writes, cuts and renames too; interrupted, it is done again."""
    for operations in range(OPERATIONS_MAX):
        interrupted = 0
        for seed in range(2 * SEEDS):
            run = crash_after(15 + seed * 4, seed, SimulatedDisk.crash)
            run.disk.lose_power_after(operations)
            try:
                open_at(run.disk, config=CONFIG, torn=True, recovery_point=run.durable)
            except PowerLost:
                interrupted += 1
                run.disk.crash()
                check_recovered(run, torn=True)
        if not interrupted:
            assert operations > 5
            return
    pytest.fail("recovery never ended")


def test_power_loss_at_any_moment_of_shortening() -> None:
    """Removing old segments leaves whole segments: those from the new start on are never touched."""
    for operations in range(OPERATIONS_MAX):
        for seed in range(SEEDS):
            disk = SimulatedDisk(seed)
            disk.prepare("/data")
            log = open_at(disk, config=CONFIG)
            stored = [append(log, Batch((b"%02d" % number * 20,), 1, number)) for number in range(16)]
            end = flush(disk, log)
            disk.lose_power_after(operations)
            start = log.segments[2].base_offset
            is_done = False
            with suppress(PowerLost):
                log.advance_start(start)
                for path in log.remove(log.segments_before(start)):
                    disk.remove(path)
                disk.flush_directory(log.directory)
                is_done = True
            disk.crash()
            again = open_at(disk, config=CONFIG, torn=True, recovery_point=end, start_offset=start)
            assert (again.start_offset, again.end_offset) == (start, end)
            wanted = tuple(s.data for s in stored if s.header.base_offset >= start)
            assert state_of(again).batches == wanted
            assert again.producers.batches_of(1)[-1].last_sequence == 15
        if is_done:
            assert operations > 5
            return
    pytest.fail("removing never ended")


def failing_operations() -> list[tuple[str, int]]:
    return [
        (operation, skip) for operation in ("write", "create", "truncate", "rename") for skip in range(12)
    ]


@pytest.mark.parametrize(("operation", "skip"), failing_operations())
def test_an_operation_that_fails_leaves_the_log_as_it_was(operation: str, skip: int) -> None:
    """Refused at any step of an append or a roll: the log is unchanged, readable, and takes the batch the next time."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=CONFIG)
    for number in range(3):
        append(log, Batch((b"%02d" % number * 20,), 1, number))
    disk.plan(Fault(operation, skip=skip, partial=operation == "write"))  # type: ignore[arg-type]
    expected = 3
    for number in range(3, 14):
        batch = Batch((b"%02d" % number * 20,), 1, number, epoch=number // 4)
        before = observable(log)
        try:
            append(log, batch)
        except OSError:
            assert observable(log) == before
            append(log, batch)
        expected += 1
        assert log.end_offset == expected
    flush(disk, log)
    disk.crash()
    again = open_at(disk, config=CONFIG, torn=True, recovery_point=expected)
    assert again.end_offset == expected
    assert [entry.epoch for entry in again.epochs.entries] == [0, 1, 2, 3]


def observable(log: Log) -> tuple[object, ...]:
    state = state_of(log)
    return state.batches, state.end_offset, state.producers


batches = st.builds(
    Batch,
    st.lists(st.binary(min_size=0, max_size=150), min_size=1, max_size=4).map(tuple),
    producer_id=st.integers(-1, 2),
    sequence=st.just(0),
    epoch=st.just(0),
    codec=st.sampled_from(list(Codec)),
    timestamp=st.integers(START_MS - 50, START_MS + 50),
)
steps = st.lists(st.one_of(batches, st.sampled_from(["flush", "roll", "reopen", "restart"])), max_size=25)


@given(steps, st.integers(150, 800), st.integers(1, 400))
@settings(max_examples=examples(150), deadline=None)
def test_a_clean_start_and_a_recovery_find_the_same_log(
    script: list[Batch | str], segment_bytes: int, interval_bytes: int
) -> None:
    config = topic_config(internal_segment_bytes=str(segment_bytes), index_interval_bytes=str(interval_bytes))
    disk = SimulatedDisk()
    disk.prepare("/data")
    log = open_at(disk, config=config)
    stored: list[Stored] = []
    sequences: dict[int, int] = {}
    for step in script:
        if isinstance(step, Batch):
            sequence = sequences.get(step.producer_id, 0)
            sequences[step.producer_id] = sequence + len(step.values)
            stored.append(append(log, step._replace(sequence=sequence)))
        elif step == "flush":
            flush(disk, log)
        elif step == "roll":
            if log.active.size:
                log.roll(NOW)
        elif step == "reopen":
            flush(disk, log)
            disk.kill()
            log = open_at(disk, config=config, recovery_point=log.end_offset)
        else:
            log.flush_and_close()
            log = open_at(disk, config=config, clean=True, recovery_point=log.end_offset)
    end = log.end_offset
    state = state_of(log)
    assert state.batches == tuple(batch.data for batch in stored)
    log.flush_and_close()
    cleanly = open_at(disk.copy(), config=config, clean=True, recovery_point=end)
    recovered = open_at(disk.copy(), config=config, clean=False, recovery_point=0, torn=True)
    from_its_point = open_at(disk.copy(), config=config, clean=False, recovery_point=end)
    assert state_of(cleanly) == state_of(recovered) == state_of(from_its_point) == state
    # Every clean stop adds what its segment knows to the time index, so its entries may be more; lookups are the same.
    assert offset_entries(cleanly) == offset_entries(recovered) == offset_entries(from_its_point)
    assert lookups(cleanly) == lookups(recovered) == lookups(from_its_point)


def offset_entries(log: Log) -> list[object]:
    return [indexes.offsets for indexes in indexes_of(log)]


def lookups(log: Log) -> list[int | None]:
    """The batch found for each timestamp near those in the log."""
    found = (
        log.batch_at_or_after_time(when, log.end_position) for when in range(START_MS - 60, START_MS + 60, 3)
    )
    return [place[1].header.base_offset if place is not None else None for place in found]
