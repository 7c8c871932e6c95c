"""Producer state: Kafka's rules one by one, then any history against a model that forgets nothing (X2)."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from kio.schema.errors import ErrorCode
from tests.support.tiers import examples

from holdfast.broker.log.producer_state import (
    ACCEPT,
    BATCHES_REMEMBERED,
    EPOCH_MAX,
    Accept,
    BatchMetadata,
    CompletedTransaction,
    Duplicate,
    ProducerDescription,
    ProducerStateMap,
    SnapshotEntry,
    decode_snapshot,
    encode_snapshot,
    sequence_after,
)
from holdfast.errors import ApiError, InvalidRecords
from holdfast.wire.batch import CONTROL, SEQUENCE_MAX, TRANSACTIONAL, BatchHeader
from holdfast.wire.control_records import EndTransactionMarker

DAY_MS = 86_400_000
COMMIT, ABORT = EndTransactionMarker(True, 0), EndTransactionMarker(False, 0)


def batch(
    sequence: int = 0,
    count: int = 1,
    *,
    pid: int = 7,
    epoch: int = 0,
    transactional: bool = False,
    control: bool = False,
    timestamp: int = 1000,
) -> BatchHeader:
    attributes = (TRANSACTIONAL if transactional or control else 0) | (CONTROL if control else 0)
    return BatchHeader(
        0, 49, 0, 2, 0, attributes, count - 1, timestamp, timestamp, pid, epoch, sequence, count
    )


def marker(*, pid: int = 7, epoch: int = 0, timestamp: int = 1000) -> BatchHeader:
    return batch(-1, pid=pid, epoch=epoch, control=True, timestamp=timestamp)


def append(state: ProducerStateMap, header: BatchHeader, offset: int, now_ms: int = 1000) -> None:
    assert state.check(header, is_client=True) == ACCEPT
    state.update(header, offset, now_ms)


def refusal(state: ProducerStateMap, header: BatchHeader, *, is_client: bool = True) -> ErrorCode:
    with pytest.raises(ApiError) as caught:
        state.check(header, is_client=is_client)
    return caught.value.code


def restarted(state: ProducerStateMap) -> ProducerStateMap:
    data = encode_snapshot(state.to_snapshot())
    return ProducerStateMap.from_snapshot(decode_snapshot(data, "00.snapshot"), state.partition)


# ---- sequences


def test_batches_in_sequence_are_accepted() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 3), 10)
    append(state, batch(3, 1), 13)
    append(state, batch(4, 100), 20)
    assert state.batches_of(7)[-1] == BatchMetadata(4, 103, 20, 119, 1000)


def test_an_id_without_state_may_begin_anywhere() -> None:
    state = ProducerStateMap()
    append(state, batch(123_456, epoch=9), 0)
    assert refusal(state, batch(0, epoch=9)) == ErrorCode.out_of_order_sequence_number


@pytest.mark.parametrize("sequence", [4, 1, SEQUENCE_MAX])
def test_gaps_and_steps_back_are_refused(sequence: int) -> None:
    state = ProducerStateMap("topic-0")
    append(state, batch(0, 3), 10)
    with pytest.raises(
        ApiError, match=r"producer 7 epoch 0 sent sequence .* to topic-0, where 3 is next"
    ) as caught:
        state.check(batch(sequence), is_client=True)
    assert caught.value.code == ErrorCode.out_of_order_sequence_number


def test_each_of_the_last_five_batches_is_a_duplicate_and_the_sixth_is_not() -> None:
    state = ProducerStateMap()
    for number in range(6):
        append(state, batch(number * 10, 10, timestamp=number), 100 + number * 10)
    assert refusal(state, batch(0, 10)) == ErrorCode.out_of_order_sequence_number
    for number in range(1, 6):
        first = 100 + number * 10
        found = state.check(batch(number * 10, 10), is_client=True)
        assert found == Duplicate(first, first + 9, number)
        assert isinstance(found, Duplicate)


def test_a_duplicate_has_the_same_first_and_last_sequence() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 10), 0)
    for sequence, count in ((0, 9), (1, 9), (0, 11)):
        assert refusal(state, batch(sequence, count)) == ErrorCode.out_of_order_sequence_number


def test_checking_changes_nothing() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 10), 0)
    before = state.to_snapshot()
    state.check(batch(0, 10), is_client=True)
    state.check(batch(10, 5), is_client=True)
    state.check(batch(0, epoch=3, pid=9), is_client=True)
    refusal(state, batch(99))
    assert state.to_snapshot() == before


def test_sequences_wrap_to_zero_between_batches() -> None:
    state = ProducerStateMap()
    append(state, batch(SEQUENCE_MAX - 1, 2), 0)
    append(state, batch(0, 1), 2)
    assert state.check(batch(SEQUENCE_MAX - 1, 2), is_client=True) == Duplicate(0, 1, 1000)


def test_a_batch_may_span_the_wrap() -> None:
    state = ProducerStateMap()
    append(state, batch(SEQUENCE_MAX - 1, 5), 0)
    assert state.describe()[0].last_sequence == 2
    assert refusal(state, batch(2)) == ErrorCode.out_of_order_sequence_number
    append(state, batch(3, 1), 5)
    for again in (state, restarted(state)):
        assert again.check(batch(SEQUENCE_MAX - 1, 5), is_client=True) == Duplicate(0, 4, 1000)


def test_sequence_arithmetic_goes_round() -> None:
    assert sequence_after(SEQUENCE_MAX) == 0
    assert sequence_after(5, 10) == 15
    assert sequence_after(0, -1) == SEQUENCE_MAX


def test_a_client_cannot_send_an_id_without_a_sequence() -> None:
    with pytest.raises(InvalidRecords) as caught:
        ProducerStateMap().check(batch(-1), is_client=True)
    assert caught.value.code == ErrorCode.invalid_record


def test_coordinators_write_without_sequences() -> None:
    state = ProducerStateMap()
    for offset in (0, 1):
        header = batch(-1, transactional=True)
        assert state.check(header, is_client=False) == ACCEPT
        state.update(header, offset, 1000)
    assert state.describe()[0].last_sequence == -1
    assert restarted(state).describe() == state.describe()
    assert refusal(state, batch(-1, epoch=-1), is_client=False) == ErrorCode.invalid_producer_epoch


# ---- epochs


def test_a_stale_epoch_is_fenced() -> None:
    state = ProducerStateMap()
    append(state, batch(0, epoch=3), 0)
    assert refusal(state, batch(1, epoch=2)) == ErrorCode.invalid_producer_epoch
    assert refusal(state, batch(0, epoch=2)) == ErrorCode.invalid_producer_epoch


def test_a_new_epoch_begins_at_zero_and_forgets_the_old_batches() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 5, epoch=0), 0)
    assert refusal(state, batch(5, epoch=1)) == ErrorCode.out_of_order_sequence_number
    append(state, batch(0, 5, epoch=1), 5)
    assert state.batches_of(7) == (BatchMetadata(0, 4, 5, 9, 1000),)
    assert state.check(batch(0, 5, epoch=1), is_client=True) == Duplicate(5, 9, 1000)


def test_after_a_marker_raised_the_epoch_sequences_begin_at_zero() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 5, transactional=True), 0)
    state.complete(marker(epoch=1), COMMIT, 5, 1000)
    assert refusal(state, batch(5, epoch=0, transactional=True)) == ErrorCode.invalid_producer_epoch
    assert refusal(state, batch(5, epoch=1, transactional=True)) == ErrorCode.out_of_order_sequence_number
    append(state, batch(0, epoch=1, transactional=True), 6)


def test_after_a_marker_of_the_same_epoch_sequences_go_on() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 5, transactional=True), 0)
    state.complete(marker(), COMMIT, 5, 1000)
    append(state, batch(5, transactional=True), 6)
    assert state.check(batch(0, 5, transactional=True), is_client=True) == Duplicate(0, 4, 1000)


# ---- transactions


def test_a_transaction_begins_with_its_first_batch_and_ends_with_its_marker() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 5, transactional=True), 10)
    append(state, batch(5, 5, transactional=True), 15)
    assert state.has_transaction(7)
    assert state.first_unstable_offset == 10
    assert state.complete(marker(), ABORT, 20, 1000) == CompletedTransaction(7, 10, 20, True, 21)
    assert not state.has_transaction(7)
    assert not state.ongoing_transactions


def test_the_last_stable_offset_waits_for_the_marker_to_pass_the_high_watermark() -> None:
    state = ProducerStateMap()
    append(state, batch(0, 5, transactional=True), 10)
    state.complete(marker(), COMMIT, 15, 1000)
    state.advance_high_watermark(15)
    assert state.first_unstable_offset == 10
    state.advance_high_watermark(16)
    assert state.first_unstable_offset is None


def test_the_oldest_transaction_holds_back_all_that_follow() -> None:
    state = ProducerStateMap()
    append(state, batch(0, pid=1, transactional=True), 10)
    append(state, batch(0, pid=2, transactional=True), 11)
    append(state, batch(0, pid=3, transactional=True), 12)
    assert state.ongoing_transactions == [(10, 1), (11, 2), (12, 3)]
    completed = state.complete(marker(pid=2), ABORT, 13, 1000)
    assert completed == CompletedTransaction(2, 11, 13, True, 10)
    assert state.complete(marker(pid=1), COMMIT, 14, 1000) == CompletedTransaction(1, 10, 14, False, 12)
    assert state.ongoing_transactions == [(12, 3)]
    assert state.first_unstable_offset == 10
    state.advance_high_watermark(14)
    assert state.first_unstable_offset == 10
    state.advance_high_watermark(15)
    assert state.first_unstable_offset == 12


def test_a_marker_without_a_transaction_ends_nothing_and_is_remembered() -> None:
    state = ProducerStateMap()
    assert state.complete(marker(epoch=4), EndTransactionMarker(True, 9), 0, 1000) is None
    assert state.first_unstable_offset is None
    assert state.describe() == [ProducerDescription(7, 4, -1, 1000, 9, -1)]
    assert refusal(state, batch(0, epoch=3)) == ErrorCode.invalid_producer_epoch


def test_a_plain_batch_inside_a_transaction_is_refused() -> None:
    state = ProducerStateMap()
    append(state, batch(0, transactional=True), 10)
    assert refusal(state, batch(1)) == ErrorCode.invalid_txn_state
    # Its retry is a duplicate all the same, as Kafka finds duplicates first.
    assert isinstance(state.check(batch(0), is_client=True), Duplicate)


def test_markers_of_older_epochs_and_coordinators_are_refused() -> None:
    state = ProducerStateMap()
    state.check_marker(7, 5, 3)
    append(state, batch(0, epoch=5, transactional=True), 0)
    state.complete(marker(epoch=5), EndTransactionMarker(True, 3), 1, 1000)
    state.check_marker(7, 5, 3)
    with pytest.raises(ApiError) as caught:
        state.check_marker(7, 4, 3)
    assert caught.value.code == ErrorCode.invalid_producer_epoch
    with pytest.raises(ApiError) as caught:
        state.check_marker(7, 5, 2)
    assert caught.value.code == ErrorCode.transaction_coordinator_fenced


def test_from_transaction_version_2_a_marker_must_raise_the_epoch() -> None:  # KIP-890
    state = ProducerStateMap()
    append(state, batch(0, epoch=5, transactional=True), 0)
    with pytest.raises(ApiError) as caught:
        state.check_marker(7, 5, 0, transaction_version=2)
    assert caught.value.code == ErrorCode.invalid_producer_epoch
    state.check_marker(7, 6, 0, transaction_version=2)
    state.complete(marker(epoch=6), COMMIT, 1, 1000)
    state.check_marker(7, 6, 0, transaction_version=2)  # sent again
    append(state, batch(0, pid=8, epoch=EPOCH_MAX, transactional=True), 2)
    state.check_marker(8, EPOCH_MAX, 0, transaction_version=2)  # cannot rise


# ---- forgetting and keeping


def test_state_expires_when_unheard_of_but_never_inside_a_transaction() -> None:
    state = ProducerStateMap()
    append(state, batch(0, pid=1), 0, now_ms=1000)
    append(state, batch(0, pid=2, transactional=True), 1, now_ms=1000)
    append(state, batch(0, pid=3), 2, now_ms=1001)
    assert state.remove_expired(999 + DAY_MS, DAY_MS) == 0
    assert state.remove_expired(1000 + DAY_MS, DAY_MS) == 1
    assert [producer_id in state for producer_id in (1, 2, 3)] == [False, True, True]
    append(state, batch(55, pid=1), 3)


def test_a_producer_of_old_records_does_not_expire_early() -> None:
    state = ProducerStateMap()
    append(state, batch(0, timestamp=5), 0, now_ms=10 * DAY_MS)
    assert state.remove_expired(10 * DAY_MS, DAY_MS) == 0
    again = restarted(restarted(state))
    assert again.remove_expired(11 * DAY_MS - 1, DAY_MS) == 0
    assert again.describe()[0].last_timestamp == 5
    assert again.remove_expired(11 * DAY_MS, DAY_MS) == 1


def test_the_last_entry_of_a_producer_is_the_one_kafka_would_write() -> None:
    state = ProducerStateMap()
    for number in range(3):
        append(state, batch(number * 10, 10, timestamp=number), number * 10, now_ms=DAY_MS)
    entries = state.to_snapshot()
    assert [entry.last_offset for entry in entries] == [29, 9, 19, 29]
    assert entries[0] == entries[-1]._replace(timestamp=DAY_MS)
    assert entries[-1] == SnapshotEntry(7, 0, 29, 29, 9, 2, -1, -1)


def test_a_restart_keeps_all_five_batches_and_open_transactions() -> None:
    state = ProducerStateMap("topic-0")
    append(state, batch(0, pid=2, transactional=True), 3)
    for number in range(7):
        append(state, batch(number * 10, 10, pid=1), 100 + number * 10)
    append(state, batch(0, pid=3, transactional=True), 200)
    again = restarted(state)
    assert again.describe() == state.describe()
    assert [again.batches_of(pid) for pid in (1, 2, 3)] == [state.batches_of(pid) for pid in (1, 2, 3)]
    assert again.ongoing_transactions == [(3, 2), (200, 3)]
    assert again.partition == "topic-0"


def test_a_snapshot_of_kafkas_with_one_entry_per_producer_knows_the_last_batch() -> None:
    entries = [SnapshotEntry(7, 2, 14, 109, 4, 1000, -1, -1), SnapshotEntry(8, 0, -1, -1, 0, 1000, 3, -1)]
    state = ProducerStateMap.from_snapshot(entries)
    assert state.check(batch(10, 5, epoch=2), is_client=True) == Duplicate(105, 109, 1000)
    assert state.check(batch(15, epoch=2), is_client=True) == ACCEPT
    assert state.batches_of(8) == ()
    assert state.describe()[1].coordinator_epoch == 3


def test_when_kafka_passes_over_expired_entries_it_is_left_with_the_newest_batch() -> None:
    state = ProducerStateMap()
    for number, timestamp in enumerate((900, 100, 500, 50)):
        append(state, batch(number, timestamp=timestamp), number, now_ms=DAY_MS)
    for expired_before in (0, 50, 51, 100, 500, 900, DAY_MS):
        left = [entry for entry in state.to_snapshot() if entry.timestamp >= expired_before]
        assert left[-1].last_sequence == 3
    assert restarted(state).check(batch(0), is_client=True) == Duplicate(0, 0, 50)


def test_of_entries_with_different_epochs_the_last_counts() -> None:
    entries = [SnapshotEntry(7, 1, 9, 50, 0, 1000, -1, 40), SnapshotEntry(7, 2, 0, 60, 0, 1000, -1, -1)]
    state = ProducerStateMap.from_snapshot(entries)
    assert state.batches_of(7) == (BatchMetadata(0, 0, 60, 60, 1000),)
    assert state.ongoing_transactions == []


def test_cleared_state_knows_nobody() -> None:
    state = ProducerStateMap()
    append(state, batch(0, transactional=True), 0)
    state.clear()
    assert len(state) == 0
    assert state.first_unstable_offset is None
    assert state.batches_of(7) == ()
    assert not state.has_transaction(7)


# ---- any history


@dataclass
class Sent:
    epoch: int
    sequences: list[int]
    first_offset: int

    def retry(self, pid: int, transactional: bool) -> BatchHeader:
        return batch(
            self.sequences[0], len(self.sequences), pid=pid, epoch=self.epoch, transactional=transactional
        )


@dataclass
class ModelProducer:
    """Everything one producer ever had accepted since its state began."""

    epoch: int
    seen_ms: int
    history: list[Sent] = field(default_factory=list)
    transaction: int | None = None

    def of_this_epoch(self) -> list[Sent]:
        return [sent for sent in self.history if sent.epoch == self.epoch]


class Histories(RuleBasedStateMachine):
    """Random sends, retries, gaps, epochs, markers, restarts and expiry; the model lists what must happen."""

    PIDS = st.integers(1, 3)

    def __init__(self) -> None:
        super().__init__()
        self.state = ProducerStateMap("topic-0")
        self.model: dict[int, ModelProducer] = {}
        self.ended: dict[int, int] = {}
        self.offset = 0
        self.high_watermark = 0
        self.now_ms = 1_000_000

    def expected(self, header: BatchHeader) -> Accept | Duplicate | ErrorCode:
        producer = self.model.get(header.producer_id)
        if producer is None:
            return ACCEPT
        if header.producer_epoch < producer.epoch:
            return ErrorCode.invalid_producer_epoch
        sequences = [(header.base_sequence + step) % 2**31 for step in range(header.records_count)]
        known = producer.of_this_epoch() if header.producer_epoch == producer.epoch else []
        for sent in known[-BATCHES_REMEMBERED:]:
            if sent.sequences == sequences:
                return Duplicate(sent.first_offset, sent.first_offset + len(sequences) - 1, 1000)
        wanted = (known[-1].sequences[-1] + 1) % 2**31 if known else 0
        if sequences[0] != wanted:
            return ErrorCode.out_of_order_sequence_number
        if producer.transaction is not None and not header.is_transactional:
            return ErrorCode.invalid_txn_state
        return ACCEPT

    def send(self, header: BatchHeader) -> None:
        expected = self.expected(header)
        if isinstance(expected, ErrorCode):
            assert refusal(self.state, header) == expected
            return
        found = self.state.check(header, is_client=True)
        assert type(found) is type(expected)
        assert found == expected
        if isinstance(found, Accept):
            self.state.update(header, self.offset, self.now_ms)
            producer = self.model.setdefault(header.producer_id, ModelProducer(header.producer_epoch, 0))
            producer.epoch = header.producer_epoch
            producer.seen_ms = self.now_ms
            sequences = [(header.base_sequence + step) % 2**31 for step in range(header.records_count)]
            producer.history.append(Sent(header.producer_epoch, sequences, self.offset))
            if header.is_transactional and producer.transaction is None:
                producer.transaction = self.offset
            self.offset += header.records_count

    @rule(pid=PIDS, count=st.integers(1, 4), transactional=st.booleans())
    def next_batch(self, pid: int, count: int, transactional: bool) -> None:
        producer = self.model.get(pid)
        known = producer.of_this_epoch() if producer else []
        sequence = (known[-1].sequences[-1] + 1) % 2**31 if known else 0
        epoch = producer.epoch if producer else 0
        self.send(batch(sequence, count, pid=pid, epoch=epoch, transactional=transactional))

    @rule(pid=PIDS, count=st.integers(1, 4), before_wrap=st.integers(0, 6), epoch=st.integers(0, 2))
    def near_the_wrap(self, pid: int, count: int, before_wrap: int, epoch: int) -> None:
        self.send(batch(SEQUENCE_MAX - before_wrap, count, pid=pid, epoch=epoch))

    @precondition(lambda self: any(producer.history for producer in self.model.values()))
    @rule(data=st.data(), transactional=st.booleans())
    def retry(self, data: st.DataObject, transactional: bool) -> None:
        pid = data.draw(st.sampled_from([pid for pid, producer in self.model.items() if producer.history]))
        sent = data.draw(st.sampled_from(self.model[pid].history[-8:]))
        self.send(sent.retry(pid, transactional))

    @rule(pid=PIDS, sequence=st.integers(0, 12), count=st.integers(1, 4), epoch=st.integers(0, 4))
    def anything(self, pid: int, sequence: int, count: int, epoch: int) -> None:
        self.send(batch(sequence, count, pid=pid, epoch=epoch))

    @rule(pid=PIDS, raise_epoch=st.booleans(), is_commit=st.booleans())
    def end_transaction(self, pid: int, raise_epoch: bool, is_commit: bool) -> None:
        producer = self.model.setdefault(pid, ModelProducer(0, self.now_ms))
        producer.epoch += raise_epoch
        producer.seen_ms = self.now_ms
        open_since, producer.transaction = producer.transaction, None
        self.state.check_marker(pid, producer.epoch, 0)
        completed = self.state.complete(
            marker(pid=pid, epoch=producer.epoch),
            EndTransactionMarker(is_commit, 0),
            self.offset,
            self.now_ms,
        )
        if open_since is None:
            assert completed is None
        else:
            still_open = [other.transaction for other in self.model.values() if other.transaction is not None]
            stable = min(still_open, default=self.offset + 1)
            assert completed == CompletedTransaction(pid, open_since, self.offset, not is_commit, stable)
            self.ended[open_since] = self.offset
        self.offset += 1

    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        self.high_watermark = data.draw(st.integers(self.high_watermark, self.offset))
        self.state.advance_high_watermark(self.high_watermark)
        self.ended = {first: last for first, last in self.ended.items() if last >= self.high_watermark}

    @rule()
    def restart(self) -> None:
        """What is rebuilt is durable: nothing waits for the high watermark any more."""
        self.state = restarted(self.state)
        self.ended.clear()
        self.high_watermark = self.offset

    @rule(passed_ms=st.integers(0, DAY_MS))
    def time_passes(self, passed_ms: int) -> None:
        self.now_ms += passed_ms
        expired = [
            pid
            for pid, producer in self.model.items()
            if producer.transaction is None and self.now_ms - producer.seen_ms >= DAY_MS
        ]
        assert self.state.remove_expired(self.now_ms, DAY_MS) == len(expired)
        for pid in expired:
            del self.model[pid]

    @invariant()
    def the_state_is_the_models(self) -> None:
        assert {entry.producer_id: entry.producer_epoch for entry in self.state.describe()} == {
            pid: producer.epoch for pid, producer in self.model.items()
        }
        undecided = sorted(p.transaction for p in self.model.values() if p.transaction is not None)
        assert [first for first, _ in self.state.ongoing_transactions] == undecided
        unstable = [*undecided, *self.ended]
        assert self.state.first_unstable_offset == min(unstable, default=None)
        for pid in self.model:
            assert len(self.state.batches_of(pid)) <= BATCHES_REMEMBERED


TestHistories = Histories.TestCase
TestHistories.settings = settings(max_examples=examples(100), stateful_step_count=60, deadline=None)
