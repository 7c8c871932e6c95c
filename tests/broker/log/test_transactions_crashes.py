"""A log with transactions that ends at any byte, or whose machine fails at any moment: state and index are right."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress

import pytest
from tests.support import tiers
from tests.support.partition_logs import DIRECTORY, topic_config
from tests.support.transactional_log import TransactionalLog, expect

from holdfast.broker.log.recovery import Trust, open_log
from holdfast.broker.log.segment import SNAPSHOT_SUFFIX, TXN_INDEX_SUFFIX
from holdfast.testing.disk import PowerLost, SimulatedDisk

CONFIG = topic_config(internal_segment_bytes="500")
SEEDS = tiers.by_tier(quick=1, check=3, long=3)
OPERATIONS_MAX = 400


def script(subject: TransactionalLog) -> Iterator[None]:
    """Three producers whose transactions cross each other and several segments."""
    for number in range(5):
        subject.write([(None, b"plain %d" % number)])
        subject.write([(None, b"one %d" % number)] * 2, 1)
        yield
        subject.write([(None, b"two %d" % number)], 2)
        subject.end(1, is_commit=number % 2 == 0, bumps_epoch=number == 3)
        subject.flush()
        yield
        subject.write([(None, b"three %d" % number)], 3, transactional=number > 0)
        if number % 2:
            subject.end(2, is_commit=False)
        yield
    subject.flush()
    subject.write([(None, b"last")], 1)
    subject.end(1, is_commit=False)
    yield


def filled(disk: SimulatedDisk | None = None) -> TransactionalLog:
    subject = TransactionalLog(CONFIG, disk)
    for _ in script(subject):
        subject.check()
    return subject


@pytest.mark.check
def test_a_log_cut_at_any_byte_is_one_that_ended_there() -> None:
    subject = filled()
    subject.flush()
    assert len(subject.log.segments) > 3
    for which, segment in enumerate(subject.log.segments):
        for size in range(segment.size):
            disk = subject.disk.copy()
            disk.kill()
            disk.open(segment.path(), "write").truncate(size)
            for later in subject.log.segments[which + 1 :]:
                disk.remove(later.path())
            trust = Trust(clean=False, recovery_point=0, start_offset=0, torn_tail_expected=False)
            log = open_log(disk, DIRECTORY, CONFIG, trust, subject.now, subject.said.append)
            history = [entry for entry in subject.history if entry.next_offset <= log.end_offset]
            expected = expect(history, log.end_offset)
            assert log.producers.ongoing_transactions == expected.open_transactions
            assert log.producers.first_unstable_offset == min(expected.open_transactions, default=(None,))[0]
            entries = [entry for part in log.segments for entry in log.transactions_of(part).entries]
            assert entries == expected.aborted
            if size % 10 == 0:
                # What recovery has written is what the next start, after a clean stop, believes.
                log.flush_and_close()
                again = open_log(
                    disk, DIRECTORY, CONFIG, trust._replace(clean=True), subject.now, subject.said.append
                )
                assert entries == [
                    entry for part in again.segments for entry in again.transactions_of(part).entries
                ]
                assert again.producers.ongoing_transactions == expected.open_transactions


def crashed(operations: int, seed: int, *, kill: bool) -> TransactionalLog | None:
    disk = SimulatedDisk(seed)
    subject = TransactionalLog(CONFIG, disk)
    disk.lose_power_after(operations)
    is_over = False
    with suppress(PowerLost):
        for _ in script(subject):
            pass
        subject.log.flush_and_close()
        is_over = True
    disk.clear_faults()
    if is_over:
        return None
    if kill:
        subject.kill()
    else:
        subject.lose_power()
    return subject


@pytest.mark.parametrize("kill", [False, True], ids=["power loss", "kill"])
def test_a_crash_at_any_moment_leaves_what_the_history_says(kill: bool) -> None:
    for operations in range(OPERATIONS_MAX):
        for seed in range(1 if kill else SEEDS):
            subject = crashed(operations, seed, kill=kill)
            if subject is None:
                assert operations > 50
                return
            subject.check()
            goes_on(subject)
    pytest.fail("the script never ended")


def goes_on(subject: TransactionalLog) -> None:
    """Whatever a crash left on disk says nothing about what is written afterwards, in the same places."""
    for producer_id in (1, 2, 3):
        subject.end(producer_id, is_commit=True)
    subject.roll()
    for number in range(4):
        subject.write([(None, b"again %d" % number)], 1)
        subject.end(1, is_commit=True)
        subject.roll()
    subject.restart()
    subject.check()


def test_an_index_of_a_log_that_was_lost_is_not_believed() -> None:
    """The index of a stop reached the disk, and the batches it tells of did not."""
    subject = TransactionalLog(topic_config())
    subject.write([(None, b"no")], 1)
    subject.end(1, is_commit=False)
    path = subject.log.active.path(TXN_INDEX_SUFFIX)
    subject.log.write_for_clean_start()
    content = subject.disk.open(path, "read").pread(1000, 0)
    assert content
    fresh = SimulatedDisk()
    fresh.prepare("/data")
    fresh.prepare(DIRECTORY)
    for base in ("0" * 20, f"{2:020d}"):
        file = fresh.open(f"{DIRECTORY}/{base}{TXN_INDEX_SUFFIX}", "create")
        file.pwritev([content], 0)
    subject = TransactionalLog(topic_config(), fresh)
    subject.check()
    subject.restart()
    subject.write([(None, b"one")], 1)
    subject.end(1, is_commit=True)
    subject.roll()
    subject.write([(None, b"two")], 1)
    subject.end(1, is_commit=True)
    subject.roll()
    subject.restart()
    subject.check()
    assert [shown.value for shown in subject.shown()] == [b"one", b"two"]


@pytest.mark.parametrize("damage", ["cut", "flip", "remove"])
def test_a_damaged_index_is_rebuilt_from_the_log(damage: str) -> None:
    subject = filled()
    subject.restart()
    for segment in subject.log.segments:
        path = segment.path(TXN_INDEX_SUFFIX)
        if not subject.disk.exists(path):
            continue
        if damage == "cut":
            subject.disk.open(path, "write").truncate(subject.disk.size(path) - 1)
        elif damage == "flip":
            subject.disk.flip_bit(path, 0)
        elif segment is not subject.log.active:
            subject.disk.remove(path)
    if damage != "remove":
        subject.log.close()
        subject.reopen(clean=True)
    subject.check()


def test_transactions_survive_the_loss_of_every_snapshot() -> None:
    subject = filled()
    subject.log.flush_and_close()
    for name in subject.disk.list(DIRECTORY):
        if name.endswith(SNAPSHOT_SUFFIX):
            subject.disk.remove(f"{DIRECTORY}/{name}")
    subject.reopen(clean=True)
    subject.check()


def test_records_deleted_before_they_were_flushed_and_lost_begin_the_log_anew() -> None:
    subject = TransactionalLog(topic_config(holdfast_flush="os"))
    for _ in range(3):
        subject.write([(None, b"x")])
    subject.hosted.advance_start(3)
    subject.start_offset = 3
    fresh = SimulatedDisk()
    subject.disk = fresh
    fresh.prepare("/data")
    subject.durable = 0
    subject.reopen(clean=False, torn=True)
    assert (subject.log.start_offset, subject.log.end_offset) == (3, 3)
    subject.history = []
    assert subject.write([(None, b"y")]) == 3
    subject.check()
