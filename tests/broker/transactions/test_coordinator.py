"""The coordinator of transactions, by the newer protocol (KIP-890) unless a test says otherwise."""

from __future__ import annotations

from typing import Any

import pytest
from kio.schema.errors import ErrorCode
from tests.support.coordinator_worlds import TransactionWorld

from holdfast.broker.transactions import rules
from holdfast.broker.transactions.model import (
    EPOCH_MAX,
    EPOCH_USABLE_MAX,
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    Ended,
    Initialised,
    ProducerIdentity,
    TransactionMetadata,
    TransactionState,
    record_of,
)
from holdfast.errors import ApiError
from holdfast.wire.batch import iterate_records

A, B = ("orders", 0), ("orders", 1)
NOTHING = ProducerIdentity(-1, -1)
OLDER = {"client_version": OLDER_PROTOCOL}


def with_epoch(world: TransactionWorld, transactional_id: str, epoch: int) -> ProducerIdentity:
    """A transactional id that has gone through many epochs."""
    world.started(transactional_id)
    changed = world.metadata(transactional_id)._replace(producer_epoch=epoch)
    world.journal.append([record_of(transactional_id, changed)], world.now)
    world.settle()
    world.crash()
    return ProducerIdentity(changed.producer_id, epoch)


# InitProducerId


def test_a_new_transactional_id_gets_a_producer_id_at_epoch_0(world: TransactionWorld) -> None:
    answers = world.init("copy")
    assert answers.given == [], "the record is not durable yet"
    world.settle()
    assert answers.only == Initialised(ErrorCode.none, 1001, 0)
    assert world.metadata("copy").state is TransactionState.EMPTY


def test_each_producer_that_comes_later_gets_the_next_epoch(world: TransactionWorld) -> None:
    first = world.started("copy")
    assert world.started("copy") == first._replace(epoch=1)
    assert world.started("copy") == first._replace(epoch=2)


def test_transactional_ids_do_not_share_producer_ids(world: TransactionWorld) -> None:
    assert world.started("copy").producer_id != world.started("other").producer_id


@pytest.mark.parametrize("timeout_ms", [-1, 0, 900_001])
def test_a_time_out_out_of_range_is_refused(world: TransactionWorld, timeout_ms: int) -> None:
    assert world.init("copy", timeout_ms=timeout_ms).only == Initialised(
        ErrorCode.invalid_transaction_timeout
    )
    assert not world.coordinator.transactions
    assert not world.journal.batches


@pytest.mark.parametrize("transactional_id", ["", "x" * 32_768, "ü" * 16_384])
def test_a_transactional_id_that_no_record_can_hold_is_refused(
    world: TransactionWorld, transactional_id: str
) -> None:
    assert world.init(transactional_id).only.error is ErrorCode.invalid_request
    assert world.end(transactional_id, NOTHING, is_commit=True).only.error is ErrorCode.invalid_request
    assert world.add(transactional_id, NOTHING, A).only is ErrorCode.invalid_request
    assert not world.journal.batches


def test_a_producer_id_enters_a_record_only_when_it_has_been_handed_over(world: TransactionWorld) -> None:
    world.producer_ids_wait = True
    answers = world.init("copy")
    world.journal.flush()
    assert not world.journal.batches
    assert answers.given == []
    assert world.init("copy").only.error is ErrorCode.concurrent_transactions
    assert world.end("copy", NOTHING, is_commit=True).only.error is ErrorCode.concurrent_transactions
    world.settle()
    assert answers.only == Initialised(ErrorCode.none, 1001, 0)


def test_a_refused_producer_id_leaves_nothing_behind(world: TransactionWorld) -> None:
    world.producer_ids_wait = True
    answers = world.init("copy")
    world.hand_out(ApiError(ErrorCode.coordinator_not_available))
    assert answers.only.error is ErrorCode.coordinator_not_available
    assert not world.coordinator.transactions
    world.producer_ids_wait = False
    assert world.started("copy").epoch == 0


def test_a_journal_that_refuses_leaves_everything_as_it_was(world: TransactionWorld) -> None:
    alice = world.started("copy")
    before = world.metadata("copy")
    world.journal.refuses = ErrorCode.coordinator_not_available
    assert world.init("other").only.error is ErrorCode.coordinator_not_available
    assert world.init("copy").only.error is ErrorCode.coordinator_not_available
    assert world.add("copy", alice, A).only is ErrorCode.coordinator_not_available
    assert world.end("copy", alice, is_commit=False).only.error is ErrorCode.coordinator_not_available
    assert world.metadata("copy") == before
    assert list(world.coordinator.transactions) == ["copy"]


# KIP-360: a producer that says who it was


def test_a_producer_goes_on_as_itself_with_the_next_epoch(world: TransactionWorld) -> None:
    alice = world.started("copy")
    assert world.started("copy", expected=alice) == alice._replace(epoch=1)


def test_the_retry_of_a_producer_that_goes_on_gets_the_same_epoch(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.started("copy", expected=alice)
    assert world.started("copy", expected=alice) == alice._replace(epoch=1)


def test_a_producer_whose_place_was_taken_cannot_go_on(world: TransactionWorld) -> None:
    alice = world.started("copy")
    bob = world.started("copy")
    assert world.init("copy", expected=alice).only == Initialised(ErrorCode.producer_fenced)
    assert world.metadata("copy").producer_epoch == bob.epoch


def test_a_producer_with_another_id_cannot_go_on(world: TransactionWorld) -> None:
    alice = world.started("copy")
    stranger = alice._replace(producer_id=77)
    assert world.init("copy", expected=stranger).only == Initialised(ErrorCode.producer_fenced)


def test_a_producer_whose_transactional_id_expired_gets_a_new_id(world: TransactionWorld) -> None:
    assert world.started("copy", expected=ProducerIdentity(77, 5)).epoch == 0


def test_a_fenced_producer_does_not_end_the_transaction_of_its_successor(world: TransactionWorld) -> None:
    alice = world.started("copy")
    bob = world.started("copy")
    world.written("copy", bob, A)
    assert world.init("copy", expected=alice).only == Initialised(ErrorCode.producer_fenced)
    assert world.metadata("copy").state is TransactionState.ONGOING


def test_the_owner_of_a_transaction_may_begin_anew(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    answers = world.init("copy", expected=alice)
    world.settle()
    assert answers.only.error is ErrorCode.concurrent_transactions
    assert world.markers(A) == [(alice.producer_id, 1, False)]


# Fencing


def test_a_new_producer_aborts_the_ongoing_transaction_first(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    answers = world.init("copy")
    world.settle()
    assert answers.only == Initialised(ErrorCode.concurrent_transactions)
    assert world.markers(A) == [(alice.producer_id, 1, False)], "with an epoch that fences the old producer"
    assert world.metadata("copy").state is TransactionState.COMPLETE_ABORT
    assert world.started("copy") == alice._replace(epoch=2), "the epoch of the abort belongs to nobody"


def test_a_fenced_producer_changes_nothing(world: TransactionWorld) -> None:
    alice = world.started("copy")
    bob = world.started("copy")
    world.written("copy", bob, A)
    before = world.metadata("copy"), len(world.journal.batches)
    assert world.produce("copy", alice, B, "late").only is ErrorCode.producer_fenced
    assert world.produce("copy", alice, B, "late", **OLDER).only is ErrorCode.producer_fenced
    assert world.add("copy", alice, B).only is ErrorCode.producer_fenced
    assert world.end("copy", alice, is_commit=True).only == Ended(ErrorCode.producer_fenced)
    assert world.end("copy", alice, is_commit=False, **OLDER).only == Ended(ErrorCode.producer_fenced)
    assert (world.metadata("copy"), len(world.journal.batches)) == before


def test_an_epoch_from_the_future_changes_nothing(world: TransactionWorld) -> None:
    alice = world.started("copy")
    future = alice._replace(epoch=5)
    assert world.add("copy", future, A).only is ErrorCode.producer_fenced
    assert world.end("copy", future, is_commit=True).only == Ended(ErrorCode.producer_fenced)
    assert world.metadata("copy").state is TransactionState.EMPTY


def test_another_producer_id_is_not_the_transactional_ids(world: TransactionWorld) -> None:
    alice = world.started("copy")
    stranger = alice._replace(producer_id=77)
    for answers in (
        world.add("copy", stranger, A),
        world.produce("copy", stranger, A, "x"),
        world.produce("copy", stranger, A, "x", **OLDER),
    ):
        assert answers.only is ErrorCode.invalid_producer_id_mapping
    assert world.end("copy", stranger, is_commit=True).only.error is ErrorCode.invalid_producer_id_mapping
    assert (
        world.end("copy", stranger, is_commit=True, **OLDER).only.error
        is ErrorCode.invalid_producer_id_mapping
    )


def test_an_unknown_transactional_id_maps_to_no_producer(world: TransactionWorld) -> None:
    nobody = ProducerIdentity(5, 0)
    assert world.add("copy", nobody, A).only is ErrorCode.invalid_producer_id_mapping
    assert world.end("copy", nobody, is_commit=True).only.error is ErrorCode.invalid_producer_id_mapping
    assert world.produce("copy", nobody, A, "x", **OLDER).only is ErrorCode.invalid_producer_id_mapping


def test_a_fenced_producer_is_not_taken_for_the_one_that_ended_by_the_older_protocol(
    world: TransactionWorld,
) -> None:
    alice = world.started("copy")
    bob = world.started("copy")
    world.written("copy", bob, A)
    world.end("copy", bob, is_commit=True, **OLDER)
    during = world.end("copy", alice, is_commit=True)
    world.settle()
    assert during.only.error is ErrorCode.producer_fenced
    assert world.ended("copy", alice, is_commit=True).error is ErrorCode.producer_fenced


# Enrolment


def test_nothing_is_written_before_the_enrolment_is_durable(world: TransactionWorld) -> None:
    alice = world.started("copy")
    answers = world.produce("copy", alice, A, "one")
    assert world.partitions[A].entries == []
    assert answers.given == []
    world.journal.flush()
    assert [entry.value for entry in world.partitions[A].entries] == ["one"]


def test_batches_sent_one_behind_the_other_keep_their_order(world: TransactionWorld) -> None:
    alice = world.started("copy")
    for number in range(5):
        world.produce("copy", alice, A, str(number))
        world.produce("copy", alice, B, str(number))
    world.settle()
    for partition in (A, B):
        assert [entry.value for entry in world.partitions[partition].entries] == list("01234")
    assert len(world.journal.batches) == 3, "one record for the id and one for each partition"


def test_a_transaction_that_ends_while_an_enrolment_is_flushed_keeps_its_data_out(
    world: TransactionWorld,
) -> None:
    alice = world.started("copy")
    written = world.produce("copy", alice, A, "one")
    world.end("copy", alice, is_commit=True)
    world.settle()
    assert written.only is ErrorCode.producer_fenced
    assert [entry.value for entry in world.partitions[A].entries] == [""], "the marker alone"


def test_a_failed_flush_keeps_the_data_out(world: TransactionWorld) -> None:
    alice = world.started("copy")
    written = world.produce("copy", alice, A, "one")
    world.journal.fail()
    assert written.only is ErrorCode.coordinator_not_available
    assert world.partitions[A].entries == []


def test_the_older_protocol_must_have_added_a_partition(world: TransactionWorld) -> None:
    alice = world.started("copy")
    assert world.produce("copy", alice, A, "one", **OLDER).only is ErrorCode.transaction_abortable
    assert world.add("copy", alice, A).given == []
    world.settle()
    written = world.produce("copy", alice, A, "one", **OLDER)
    world.settle()
    assert written.only is ErrorCode.none
    assert world.produce("copy", alice, B, "one", **OLDER).only is ErrorCode.transaction_abortable


def test_adding_what_is_there_writes_no_record(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.add("copy", alice, A, B)
    world.settle()
    written = len(world.journal.batches)
    assert world.add("copy", alice, B).only is ErrorCode.none
    assert len(world.journal.batches) == written


# The end


def test_the_newer_protocol_answers_with_the_epoch_of_the_next_transaction(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A, B)
    assert world.ended("copy", alice, is_commit=True) == Ended(ErrorCode.none, alice.producer_id, 1)
    assert world.markers(A) == world.markers(B) == [(alice.producer_id, 1, True)]
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT
    assert not world.metadata("copy").partitions


def test_the_older_protocol_keeps_its_epoch(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.add("copy", alice, A)
    world.settle()
    world.produce("copy", alice, A, "one", **OLDER)
    assert world.ended("copy", alice, is_commit=False, **OLDER).error is ErrorCode.none
    assert world.markers(A) == [(alice.producer_id, 0, False)]
    world.add("copy", alice, B)
    world.settle()
    assert world.metadata("copy").state is TransactionState.ONGOING


@pytest.mark.parametrize("client_version", [OLDER_PROTOCOL, NEWER_PROTOCOL])
@pytest.mark.parametrize("is_commit", [True, False])
def test_the_end_comes_in_order(world: TransactionWorld, client_version: int, is_commit: bool) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    answers = world.end("copy", alice, is_commit=is_commit, client_version=client_version)
    assert world.metadata("copy").state.is_prepared
    assert world.markers(A) == [], "not before the decision is durable"
    world.journal.flush()
    assert len(world.markers(A)) == 1
    assert answers.given == [], "not before the markers are durable"
    world.flush_partitions()
    assert answers.only.error is ErrorCode.none
    assert world.metadata("copy").state.is_complete
    assert world.journal.durable < len(world.journal.batches), "nobody waits for the completion"


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_retried_end_gets_the_same_answer(world: TransactionWorld, is_commit: bool) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    first = world.ended("copy", alice, is_commit=is_commit)
    written = len(world.journal.batches)
    assert world.ended("copy", alice, is_commit=is_commit) == first
    world.crash()
    assert world.ended("copy", alice, is_commit=is_commit) == first
    assert world.ended("copy", alice, is_commit=not is_commit).error is ErrorCode.invalid_txn_state
    assert len(world.journal.batches) == written


@pytest.mark.parametrize("is_commit", [True, False])
def test_a_retried_end_of_the_older_protocol_gets_the_same_answer(
    world: TransactionWorld, is_commit: bool
) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    assert world.ended("copy", alice, is_commit=is_commit, **OLDER).error is ErrorCode.none
    assert world.ended("copy", alice, is_commit=is_commit, **OLDER).error is ErrorCode.none
    assert world.ended("copy", alice, is_commit=not is_commit, **OLDER).error is ErrorCode.invalid_txn_state


@pytest.mark.parametrize("client_version", [OLDER_PROTOCOL, NEWER_PROTOCOL])
def test_while_a_transaction_ends_others_are_told_to_come_again(
    world: TransactionWorld, client_version: int
) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    world.end("copy", alice, is_commit=True, client_version=client_version)
    retry = world.end("copy", alice, is_commit=True, client_version=client_version)
    other_end = world.end("copy", alice, is_commit=False, client_version=client_version)
    new_producer = world.init("copy")
    present = alice._replace(epoch=world.metadata("copy").producer_epoch)
    more = world.add("copy", present, B)
    world.settle()
    assert retry.only.error is ErrorCode.concurrent_transactions
    assert other_end.only.error is ErrorCode.invalid_txn_state
    assert new_producer.only.error is ErrorCode.concurrent_transactions
    assert more.only is ErrorCode.concurrent_transactions


@pytest.mark.parametrize("client_version", [OLDER_PROTOCOL, NEWER_PROTOCOL])
def test_a_transaction_that_was_not_begun_cannot_be_committed(
    world: TransactionWorld, client_version: int
) -> None:
    alice = world.started("copy")
    answer = world.ended("copy", alice, is_commit=True, client_version=client_version)
    assert answer.error is ErrorCode.invalid_txn_state
    assert world.metadata("copy").state is TransactionState.EMPTY


def test_aborting_what_was_not_begun_raises_the_epoch(world: TransactionWorld) -> None:
    alice = world.started("copy")
    assert world.ended("copy", alice, is_commit=False) == Ended(ErrorCode.none, alice.producer_id, 1)
    assert world.ended("copy", alice, is_commit=False) == Ended(ErrorCode.none, alice.producer_id, 1)
    after = alice._replace(epoch=1)
    assert world.ended("copy", after, is_commit=False) == Ended(ErrorCode.none, alice.producer_id, 2)
    assert world.ended("copy", alice, is_commit=False, **OLDER).error is ErrorCode.producer_fenced


def test_the_older_protocol_cannot_abort_what_was_not_begun(world: TransactionWorld) -> None:
    alice = world.started("copy")
    assert world.ended("copy", alice, is_commit=False, **OLDER).error is ErrorCode.invalid_txn_state


def test_deleted_partitions_need_no_marker(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A, B)
    del world.partitions[B]
    assert world.ended("copy", alice, is_commit=True).error is ErrorCode.none
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT


def test_a_partition_that_cannot_be_told_does_not_hold_up_the_answer(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A, B)
    world.partitions[B].is_offline = True
    assert world.ended("copy", alice, is_commit=True) == Ended(ErrorCode.none, alice.producer_id, 1)
    assert world.markers(A) == [(alice.producer_id, 1, True)]
    assert world.metadata("copy").state is TransactionState.PREPARE_COMMIT
    assert len(world.said) == 1
    world.advance(5_000)
    world.settle()
    assert len(world.said) == 1, "said once"
    assert world.init("copy").only.error is ErrorCode.concurrent_transactions
    world.partitions[B].is_offline = False
    world.advance(1_000)
    world.settle()
    assert world.markers(A) == [(alice.producer_id, 1, True)], "those that know are not told again"
    assert world.markers(B) == [(alice.producer_id, 1, True)]
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT


def test_a_completion_that_cannot_be_appended_follows_later(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    answers = world.end("copy", alice, is_commit=True)
    world.journal.flush()
    world.journal.refuses = ErrorCode.coordinator_not_available
    world.flush_partitions()
    assert answers.only.error is ErrorCode.none
    assert world.metadata("copy").state is TransactionState.PREPARE_COMMIT
    world.journal.refuses = None
    world.advance(1_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT
    assert len(world.markers(A)) == 1


def test_a_decision_whose_flush_fails_is_not_carried_out(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    answers = world.end("copy", alice, is_commit=True)
    world.journal.fail()
    world.settle()
    assert answers.only.error is ErrorCode.coordinator_not_available
    assert world.markers(A) == []


# Epochs that are used up


def test_the_last_usable_epoch_hands_over_to_a_new_producer_id(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    world.written("copy", alice, A)
    world.producer_ids_wait = True
    answers = world.end("copy", alice, is_commit=True)
    assert world.end("copy", alice, is_commit=True).only.error is ErrorCode.concurrent_transactions
    world.settle()
    bob = ProducerIdentity(world.next_producer_id, 0)
    assert answers.only == Ended(ErrorCode.none, *bob)
    assert world.markers(A) == [(alice.producer_id, EPOCH_MAX, True)]
    world.producer_ids_wait = False
    assert world.ended("copy", alice, is_commit=True) == answers.only, "a retry across the change of id"
    world.crash()
    assert world.ended("copy", alice, is_commit=True) == answers.only
    world.written("copy", bob, A)


def test_a_producer_id_that_cannot_be_had_leaves_the_transaction_open(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    world.written("copy", alice, A)
    world.producer_ids_wait = True
    answers = world.end("copy", alice, is_commit=True)
    world.hand_out(ApiError(ErrorCode.coordinator_not_available))
    assert answers.only.error is ErrorCode.coordinator_not_available
    world.producer_ids_wait = False
    assert world.ended("copy", alice, is_commit=True).error is ErrorCode.none


def test_a_new_producer_gets_a_new_id_when_the_epochs_are_used_up(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    bob = world.started("copy")
    assert bob.epoch == 0
    assert bob.producer_id != alice.producer_id


def test_a_producer_that_goes_on_keeps_its_claim_over_the_change_of_id(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    bob = world.started("copy", expected=alice)
    assert bob.epoch == 0
    assert world.started("copy", expected=alice) == bob, "its answer was lost, and it asks again"


def test_a_stale_claim_on_the_last_epoch_is_fenced(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    stale = alice._replace(epoch=5)
    assert world.init("copy", expected=stale).only.error is ErrorCode.producer_fenced


def test_fencing_the_last_epoch_changes_the_id(world: TransactionWorld) -> None:
    alice = with_epoch(world, "copy", EPOCH_USABLE_MAX)
    world.written("copy", alice, A)
    assert world.init("copy").given == []
    world.settle()
    assert world.markers(A) == [(alice.producer_id, EPOCH_MAX, False)]
    assert world.metadata("copy").producer_id != alice.producer_id


# Time


def test_a_transaction_past_its_time_out_is_aborted_and_its_producer_fenced(world: TransactionWorld) -> None:
    alice = world.started("copy", timeout_ms=60_000)
    world.written("copy", alice, A)
    world.advance(59_000)
    assert world.metadata("copy").state is TransactionState.ONGOING
    world.advance(11_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_ABORT
    assert world.markers(A) == [(alice.producer_id, 1, False)]
    assert world.produce("copy", alice, A, "late").only is ErrorCode.producer_fenced
    assert world.ended("copy", alice, is_commit=True).error is ErrorCode.invalid_txn_state
    assert world.ended("copy", alice, is_commit=True, **OLDER).error is ErrorCode.producer_fenced


def test_a_transaction_that_cannot_be_aborted_keeps_no_other_open(
    world: TransactionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("broken", "copy"):
        world.written(name, world.started(name, timeout_ms=1000), A)
    prepared = rules.prepared
    broken = world.metadata("broken")

    def fail(metadata: TransactionMetadata, *rest: Any) -> TransactionMetadata:
        if metadata is broken:
            raise AssertionError("a defect")
        return prepared(metadata, *rest)

    monkeypatch.setattr(rules, "prepared", fail)
    with pytest.raises(ExceptionGroup):
        world.advance(20_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_ABORT
    monkeypatch.undo()
    world.advance(20_000)
    world.settle()
    assert world.metadata("broken").state is TransactionState.COMPLETE_ABORT


def test_a_defect_while_partitions_are_told_does_not_keep_a_transaction_open_for_ever(
    world: TransactionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    world.partitions[A].is_offline = True
    world.ended("copy", alice, is_commit=True)
    world.partitions[A].is_offline = False
    monkeypatch.setattr(world, "write_markers", None)
    with pytest.raises(TypeError):
        world.advance(2_000)
    monkeypatch.undo()
    world.advance(2_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT


def test_a_defect_in_one_round_of_expiry_does_not_end_the_others(
    world: TransactionWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.started("copy")
    monkeypatch.setattr(world.journal, "append", None)
    with pytest.raises(TypeError):
        world.advance(8 * 24 * 3_600_000)
    monkeypatch.undo()
    world.advance(8 * 24 * 3_600_000)
    assert world.coordinator.describe("copy") is None


def test_the_time_out_counts_from_the_begin_of_each_transaction(world: TransactionWorld) -> None:
    alice = world.started("copy", timeout_ms=30_000)
    for _ in range(5):
        world.written("copy", alice, A)
        world.advance(20_000)
        world.settle()
        reply = world.ended("copy", alice, is_commit=True)
        assert reply.error is ErrorCode.none
        alice = ProducerIdentity(reply.producer_id, reply.producer_epoch)


def test_a_wall_clock_that_jumps_ends_no_transaction(world: TransactionWorld) -> None:
    alice = world.started("copy", timeout_ms=60_000)
    world.written("copy", alice, A)
    world.clock.step_wall(10 * 3_600_000)
    world.advance(20_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.ONGOING


def test_an_abort_that_the_journal_refuses_is_tried_again(world: TransactionWorld) -> None:
    alice = world.started("copy", timeout_ms=10_000)
    world.written("copy", alice, A)
    world.journal.refuses = ErrorCode.coordinator_not_available
    world.advance(30_000)
    assert world.metadata("copy").state is TransactionState.ONGOING
    world.journal.refuses = None
    world.advance(10_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_ABORT


def test_ids_out_of_use_are_forgotten_with_a_tombstone(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.started("other")
    days_ms = 24 * 3_600_000
    world.advance(6 * days_ms)
    world.settle()
    world.written("other", world.started("other"), A)
    world.advance(2 * days_ms)
    world.settle()
    assert set(world.coordinator.transactions) == {"other"}
    world.crash()
    assert set(world.coordinator.transactions) == {"other"}
    assert world.add("copy", alice, A).only is ErrorCode.invalid_producer_id_mapping
    assert world.started("copy").producer_id != alice.producer_id


def test_ids_that_cannot_be_forgotten_now_are_forgotten_later(world: TransactionWorld) -> None:
    world.started("copy")
    world.journal.refuses = ErrorCode.coordinator_not_available
    world.advance(8 * 24 * 3_600_000)
    assert set(world.coordinator.transactions) == {"copy"}
    world.journal.refuses = None
    world.advance(3_600_000)
    assert not world.coordinator.transactions


def test_long_ids_are_forgotten_in_batches_that_fit(world: TransactionWorld) -> None:
    names = [f"{number:03}".ljust(20_000, "x") for number in range(100)]
    for name in names:
        world.started(name)
    before = len(world.journal.batches)
    world.advance(8 * 24 * 3_600_000)
    assert not world.coordinator.transactions
    forgotten = world.journal.batches[before:]
    assert len(forgotten) > 1
    assert all(len(batch) < 1_000_000 for batch in forgotten)
    assert sum(len(list(iterate_records(batch))) for batch in forgotten) == len(names)


def test_changed_settings_count_from_the_next_look(world: TransactionWorld) -> None:
    world.started("copy")
    world.settings = TransactionWorld(
        {"transactional.id.expiration.ms": "1000", "transaction.max.timeout.ms": "5000"}
    ).settings
    assert world.init("copy", timeout_ms=6_000).only.error is ErrorCode.invalid_transaction_timeout
    world.advance(2 * 3_600_000)
    assert not world.coordinator.transactions


# Restarts


def test_before_the_decision_is_durable_the_transaction_goes_on_after_a_crash(
    world: TransactionWorld,
) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    world.end("copy", alice, is_commit=True)
    world.crash(keep=0)
    assert world.metadata("copy").state is TransactionState.ONGOING
    world.written("copy", alice, B)
    assert world.ended("copy", alice, is_commit=False).error is ErrorCode.none
    assert world.markers(A) == world.markers(B) == [(alice.producer_id, 1, False)]


def test_a_decision_that_is_found_again_is_carried_out(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A, B)
    world.end("copy", alice, is_commit=True)
    world.crash(keep=1)
    world.settle()
    assert world.markers(A) == world.markers(B) == [(alice.producer_id, 1, True)]
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT
    assert world.ended("copy", alice, is_commit=True) == Ended(ErrorCode.none, alice.producer_id, 1)


def test_markers_without_a_completion_are_written_again(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    world.end("copy", alice, is_commit=True)
    world.journal.flush()
    world.flush_partitions()
    world.crash(keep=0)
    world.settle()
    assert world.markers(A) == 2 * [(alice.producer_id, 1, True)]
    assert world.metadata("copy").state is TransactionState.COMPLETE_COMMIT


@pytest.mark.parametrize("step_ms", [3_600_000, 0, -30 * 24 * 3_600_000])
def test_a_restart_gives_a_transaction_its_whole_time_again_whatever_the_wall_clock_says(
    world: TransactionWorld, step_ms: int
) -> None:
    alice = world.started("copy", timeout_ms=60_000)
    world.written("copy", alice, A)
    world.clock.step_wall(step_ms)
    world.crash()
    world.advance(50_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.ONGOING
    world.advance(30_000)
    world.settle()
    assert world.metadata("copy").state is TransactionState.COMPLETE_ABORT
    assert world.markers(A) == [(alice.producer_id, 1, False)]


def test_an_unloaded_coordinator_answers_whoever_waits_and_does_nothing_more(world: TransactionWorld) -> None:
    alice = world.started("copy", timeout_ms=1_000)
    world.started("other")
    world.written("copy", alice, A)
    bob = world.started("other")
    world.written("other", bob, B)
    ending = world.end("copy", alice, is_commit=True)
    world.producer_ids_wait = True
    coming = world.init("third")
    written = len(world.journal.batches)
    world.coordinator.unload()
    world.hand_out()
    world.settle()
    world.advance(100_000)
    assert ending.only.error is ErrorCode.coordinator_not_available
    assert coming.only.error is ErrorCode.coordinator_not_available
    assert len(world.journal.batches) == written
    assert world.markers(A) == world.markers(B) == []


# A producer that knows its next epoch before the last transaction is complete


@pytest.mark.parametrize("epoch", [0, EPOCH_USABLE_MAX])
def test_the_producer_of_the_next_transaction_is_not_fenced_by_the_last(
    world: TransactionWorld, epoch: int
) -> None:
    alice = with_epoch(world, "copy", epoch)
    world.written("copy", alice, A)
    world.partitions[A].is_offline = True
    reply = world.ended("copy", alice, is_commit=True)
    assert reply.error is ErrorCode.none
    assert world.metadata("copy").state is TransactionState.PREPARE_COMMIT
    bob = ProducerIdentity(reply.producer_id, reply.producer_epoch)
    assert world.produce("copy", bob, B, "early").only is ErrorCode.concurrent_transactions
    assert world.add("copy", bob, B).only is ErrorCode.concurrent_transactions
    assert world.end("copy", bob, is_commit=False).only.error is ErrorCode.concurrent_transactions
    assert world.init("copy", expected=bob).only.error is ErrorCode.concurrent_transactions
    world.partitions[A].is_offline = False
    world.advance(1_000)
    world.settle()
    world.written("copy", bob, B)


# Renewing an epoch, with the answer lost


@pytest.mark.parametrize("epoch", [0, 7, EPOCH_USABLE_MAX])
def test_a_producer_that_renews_its_epoch_while_the_coordinator_dies_is_not_fenced(
    world: TransactionWorld, epoch: int
) -> None:
    alice = with_epoch(world, "copy", epoch)
    first = world.started("copy", expected=alice)
    for _ in range(2):
        world.crash()
        assert world.started("copy", expected=alice) == first


def test_a_producer_whose_end_was_answered_by_a_crash_may_begin_anew(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.written("copy", alice, A)
    world.ended("copy", alice, is_commit=True)
    world.crash()
    assert world.started("copy", expected=alice) == alice._replace(epoch=1)


def test_a_producer_that_was_replaced_is_fenced_after_a_crash_too(world: TransactionWorld) -> None:
    alice = world.started("copy")
    world.started("copy")
    world.crash()
    assert world.init("copy", expected=alice).only == Initialised(ErrorCode.producer_fenced)
