"""Compaction against a dictionary, with restarts in between, and against power loss at every step of the swap."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import (
    DELETE_RETENTION_MS,
    DIRECTORY,
    CompactedLog,
    Kept,
    Pair,
    compacted,
    latest,
    read_all,
)
from tests.support.tiers import examples

from holdfast.broker.log.compaction import Swap
from holdfast.broker.log.index import IndexSums, TransactionIndex
from holdfast.testing.disk import PowerLost, SimulatedDisk
from holdfast.wire.codecs import Codec

KEYS = [b"a", b"bb", b"c" * 14, b"d" * 15, b"e" * 40, b"f", b"g", b"h"]

pairs = st.tuples(st.sampled_from(KEYS), st.none() | st.binary(max_size=60))
appends = st.tuples(st.just("append"), st.lists(pairs, min_size=1, max_size=6), st.sampled_from(list(Codec)))
others = st.sampled_from(["roll", "compact", "compact a little", "restart", "wait", "wait long"]).map(
    lambda name: (name, None, None)
)
steps = st.lists(appends | others, max_size=60)


class Model:
    """Everything ever appended, and which tombstones may be gone."""

    def __init__(self) -> None:
        self.subject = CompactedLog(compacted(internal_segment_bytes="400"))
        self.appended: dict[int, Kept] = {}
        self.tombstone_cleaned_ms: dict[int, int] = {}
        self.untouched_from = 0

    def append(self, records: list[Pair], codec: Codec) -> None:
        subject = self.subject
        header = subject.append(records, codec)
        for delta, (key, value) in enumerate(records):
            offset = header.base_offset + delta
            self.appended[offset] = Kept(offset, key, value, subject.now_ms + delta)

    def compact(self, map_bytes: int) -> None:
        subject = self.subject
        untouched = [
            record for record in subject.records() if record.offset >= subject.log.active.base_offset
        ]
        end_offset = subject.compact(map_bytes).end_offset
        assert end_offset <= subject.log.active.base_offset
        records = subject.records()
        assert [record for record in records if record.offset >= subject.log.active.base_offset] == untouched
        below = [record for record in records if record.offset < end_offset]
        keys = [record.key for record in below]
        assert len(keys) == len(set(keys)), "a key has two values below the cleaned end"
        for record in below:
            if record.value is None:
                self.tombstone_cleaned_ms.setdefault(record.offset, subject.now_ms)

    def check(self) -> None:
        """Every latest value is there; what is there is what was appended, in order."""
        subject = self.subject
        records = subject.records()
        offsets = [record.offset for record in records]
        assert offsets == sorted(set(offsets))
        for record in records:
            assert record == self.appended[record.offset]
        assert latest(records) == latest(self.appended.values())
        self._check_tombstones(set(offsets))
        for record in records:
            part = subject.log.read(record.offset, 1, subject.log.end_position, at_least_one=True)
            assert part is not None

    def _check_tombstones(self, present: set[int]) -> None:
        """The last word on a key, when it is a deletion, stays for the retention after it was first cleaned."""
        last = {record.key: record for record in self.appended.values()}
        for record in last.values():
            if record.value is None and record.offset not in present:
                cleaned_ms = self.tombstone_cleaned_ms[record.offset]
                assert self.subject.now_ms >= cleaned_ms + DELETE_RETENTION_MS


@settings(max_examples=examples(150), deadline=None)
@given(steps)
def test_any_history_reads_back_as_its_latest_values(history: list[tuple[str, list[Pair], Codec]]) -> None:
    model = Model()
    subject = model.subject
    actions: dict[str, Callable[[], None]] = {
        "roll": lambda: subject.roll() if subject.log.active.size else None,
        "compact": lambda: model.compact(1 << 20),
        "compact a little": lambda: model.compact(2 * 160),
        "restart": subject.restart,
    }
    for name, records, codec in history:
        if name == "append":
            model.append(records, codec)
        elif name == "wait":
            subject.now_ms += 100
        elif name == "wait long":
            subject.now_ms += DELETE_RETENTION_MS
        else:
            actions[name]()
            model.check()
    model.check()


# ---- power loss


def dirty_log() -> CompactedLog:
    """Several segments, most of which shrink, some to nothing, in more than one group."""
    subject = CompactedLog(compacted(internal_segment_bytes="700"))
    for number in range(10):
        subject.append([(KEYS[number % 3], b"%d" % number * 40), (KEYS[number % 5], None)])
        subject.append([(b"only-%d" % (number % 7), b"x" * 30)])
        if number > 6:
            subject.roll()
    subject.append([(b"z", b"1")])
    subject.flush()
    subject.roll()
    subject.append([(b"a", b"active")])
    subject.flush()
    return subject


def swap_in(subject: CompactedLog) -> None:
    subject.swap_in(subject.clean())


def operations_of(
    action: Callable[[CompactedLog], None], make: Callable[[], CompactedLog] = dirty_log
) -> int:
    subject = make()
    disk = subject.disk
    disk.lose_power_after(1 << 30)
    action(subject)
    return (1 << 30) - (disk._operations_until_power_loss or 0)


def assert_old_or_new(
    subject: CompactedLog, disk: SimulatedDisk, before: list[Kept], after: list[Kept]
) -> None:
    log = subject.open(clean=False, recovery_point=subject.log.active.base_offset, disk=disk)
    records = read_all(log)
    assert latest(records) == latest(before)
    assert set(after) <= set(records) <= set(before)
    assert log.end_offset == subject.log.end_offset
    assert [record.offset for record in records] == sorted(record.offset for record in records)
    for segment in log.segments[:-1]:
        batches = {
            (found.header.last_offset, found.position) for found in log.batches_from(segment.base_offset)
        }
        assert set(segment.index.entries) <= batches
    assert not [name for name in disk.list(DIRECTORY) if name.endswith((".cleaned", ".swap", ".deleted"))]


def expected() -> tuple[list[Kept], list[Kept]]:
    subject = dirty_log()
    before = subject.records()
    cleaned = subject.clean()
    assert len(cleaned.segments) > 1
    assert any(len(segment.replaces) > 1 for segment in cleaned.segments)
    subject.swap_in(cleaned)
    after = subject.records()
    assert len(after) < len(before)
    return before, after


def test_power_loss_at_any_step_leaves_the_old_segments_or_the_new() -> None:
    before, after = expected()
    operations = operations_of(swap_in)
    assert operations > 30
    for at in range(operations):
        subject = dirty_log()
        subject.disk.lose_power_after(at)
        with pytest.raises(PowerLost):
            swap_in(subject)
        for seed in range(4):
            disk = subject.disk.copy(seed)
            disk.crash()
            assert_old_or_new(subject, disk, before, after)


def test_power_loss_while_recovery_completes_a_swap_leaves_the_new_segment() -> None:
    before, after = expected()
    subject = dirty_log()
    cleaned = subject.clean()
    seen = {segment.base_offset: segment for segment in subject.log.segments}
    Swap(subject.disk, subject.log, cleaned.segments[0], seen).commit()
    subject.disk.flush_directory(DIRECTORY)
    for at in range(40):
        disk = subject.disk.copy()
        disk.crash()
        disk.lose_power_after(at)
        try:
            subject.open(clean=False, recovery_point=subject.log.active.base_offset, disk=disk)
        except PowerLost:
            disk.crash()
        disk.clear_faults()
        assert_old_or_new(subject, disk, before, after)


def log_that_loses_a_marker() -> CompactedLog:
    """The next round removes the marker of an aborted transaction, and its entry in the transaction index."""
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")], producer_id=7, producer_epoch=0, base_sequence=0, is_transactional=True)
    marker = subject.append_marker(7, is_commit=False).base_offset
    index = TransactionIndex(0)
    index.append(7, 0, marker, marker + 1)
    file = subject.disk.open(subject.log.segments[0].path(".txnindex"), "create")
    file.pwritev([index.to_bytes()], 0)
    file.flush()
    for has_round in (True, True, False):
        subject.append([(b"b", b"1")])
        subject.roll()
        subject.log.producers.clear()
        if has_round:
            subject.compact()
        subject.now_ms += DELETE_RETENTION_MS
    # The entry is still there, as after a crash before the index followed.
    first = subject.log.segments[0]
    indexes = (first.index.to_bytes(), first.time_index.to_bytes(), index.to_bytes())
    for suffix, data in ((".txnindex", indexes[-1]), (".sums", IndexSums.of(*indexes).to_bytes())):
        file = subject.disk.open(first.path(suffix), "create")
        file.pwritev([data], 0)
        file.flush()
    subject.disk.flush_directory(DIRECTORY)
    return subject


@pytest.mark.check
def test_power_loss_never_leaves_an_aborted_transaction_without_its_marker() -> None:
    """A consumer told of it would wait for the marker and drop what the producer commits later."""
    subject = log_that_loses_a_marker()
    assert [header.is_control for header in subject.headers()].count(True) == 1
    swap_in(subject)
    assert not any(header.is_control for header in subject.headers())
    outcomes = set()
    for at in range(operations_of(swap_in, log_that_loses_a_marker)):
        subject = log_that_loses_a_marker()
        subject.disk.lose_power_after(at)
        with pytest.raises(PowerLost):
            swap_in(subject)
        for seed in range(20):
            disk = subject.disk.copy(seed)
            disk.crash()
            log = subject.open(clean=False, recovery_point=subject.log.active.base_offset, disk=disk)
            markers = {found.header.base_offset for found in log.batches_from(0) if found.header.is_control}
            path = log.segments[0].path(".txnindex")
            index = TransactionIndex.from_bytes(disk.open(path, "read").pread(1000, 0), 0)
            told = {entry.last_offset for entry in index.entries}
            assert told <= markers
            outcomes.add((len(told), len(markers)))
    assert {(1, 1), (0, 0)} <= outcomes


def test_an_abandoned_swap_leaves_no_trace() -> None:
    subject = dirty_log()
    names = subject.disk.list(DIRECTORY)
    before = subject.records()
    cleaned = subject.clean()
    seen = {segment.base_offset: segment for segment in subject.log.segments}
    for number, segment in enumerate(cleaned.segments):
        swap = Swap(subject.disk, subject.log, segment, seen)
        if number:
            swap.commit()
        swap.abandon()
    assert subject.disk.list(DIRECTORY) == names
    assert subject.records() == before


def test_a_swap_is_impossible_once_retention_took_a_segment() -> None:
    subject = dirty_log()
    cleaned = subject.clean()
    seen = {segment.base_offset: segment for segment in subject.log.segments}
    swap = Swap(subject.disk, subject.log, cleaned.segments[0], seen)
    assert swap.is_possible
    subject.log.advance_start(subject.log.segments[1].base_offset)
    subject.log.remove(subject.log.segments_before(subject.log.start_offset))
    assert not swap.is_possible
