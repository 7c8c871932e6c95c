"""Each rule about transactions and positions: a history that keeps it passes, one that breaks it does not."""

from __future__ import annotations

import pytest
from tests.support import history as h
from tests.support.checkers import Violation, check

P: h.Partition = ("topic", 0)
Q: h.Partition = ("topic", 1)


def broken_rule(*parts: list[h.Event]) -> str:
    with pytest.raises(Violation) as violation:
        check([event for part in parts for event in part])
    return violation.value.rule


def passes(*parts: list[h.Event]) -> None:
    check([event for part in parts for event in part])


def session(name: str = "s1", epoch: int = 0) -> list[h.Event]:
    return [h.TransactionalIdTaken("id", name, 7, epoch)]


def begun(number: int = 1, by: str = "s1") -> list[h.Event]:
    return [h.TransactionBegun(f"{by}#{number}", "id", by)]


def sent(number: int, partition: h.Partition = P, transaction: str | None = "s1#1") -> h.BatchSent:
    return h.BatchSent(partition, "s1", number, (b"v%d" % number,), transaction=transaction)


def commit(transaction: str = "s1#1", *, answered: bool = True, complete: bool = True) -> list[h.Event]:
    asked: list[h.Event] = [h.TransactionEndRequested(transaction, True)]
    return [*asked, h.TransactionEnded(transaction, True, complete)] if answered else asked


def abort(transaction: str = "s1#1") -> list[h.Event]:
    return [h.TransactionEndRequested(transaction, False), h.TransactionEnded(transaction, False)]


def read(
    number: int, *, hidden: bool = False, partition: h.Partition = P, reader: str = "r", base: int = 0
) -> list[h.Event]:
    """A reader of committed records gets to the batch, and shows it or leaves it out."""
    stored = h.StoredBatch(base, (b"v%d" % number,))
    return [
        h.ReadBegun(reader, partition),
        h.BatchesRead(
            reader,
            partition,
            base,
            (stored,),
            base + 1,
            last_stable=base + 1,
            committed_only=True,
            hidden=frozenset({base}) if hidden else frozenset(),
        ),
    ]


BOTH: list[h.Event] = [*session(), *begun(), sent(1), sent(2, Q)]


def test_a_committed_transaction_is_shown_and_an_aborted_one_hidden() -> None:
    passes(BOTH, commit(), read(1), read(2, partition=Q))
    passes(BOTH, abort(), read(1, hidden=True), read(2, hidden=True, partition=Q))


def test_nothing_of_an_aborted_transaction_is_shown() -> None:
    assert broken_rule(BOTH, abort(), read(1)) == "aborted-shown"


def test_nothing_of_an_undecided_transaction_is_shown() -> None:
    assert broken_rule(BOTH, read(1)) == "undecided-shown"
    assert broken_rule(BOTH, [h.TransactionEndRequested("s1#1", False)], read(1)) == "undecided-shown"
    assert broken_rule(BOTH, session("s2", 1), read(1)) == "aborted-shown"


def test_nothing_of_a_committed_transaction_is_hidden() -> None:
    assert broken_rule(BOTH, commit(), read(1, hidden=True)) == "committed-hidden"
    outside: list[h.Event] = [sent(3, transaction=None)]
    assert broken_rule(outside, read(3, hidden=True)) == "committed-hidden"


def test_a_transaction_whose_end_was_not_answered_is_all_or_none() -> None:
    unknown = commit(answered=False)
    passes(BOTH, unknown, read(1), read(2, partition=Q))
    passes(BOTH, unknown, read(1, hidden=True), read(2, hidden=True, partition=Q))
    assert broken_rule(BOTH, unknown, read(1), read(2, hidden=True, partition=Q)) == "committed-hidden"
    assert broken_rule(BOTH, unknown, read(1, hidden=True), read(2, partition=Q)) == "aborted-shown"


def test_an_acknowledged_end_agrees_with_what_was_seen() -> None:
    seen: list[h.Event] = [*commit(answered=False), *read(1, hidden=True)]
    assert broken_rule(BOTH, seen, [h.TransactionEnded("s1#1", True)]) == "torn-transaction"


def test_a_fenced_session_writes_nothing() -> None:
    fenced: list[h.Event] = [*session(), *begun(), *session("s2", 1)]
    passes(fenced, [sent(1)])
    assert broken_rule(fenced, [sent(1), h.BatchAcknowledged(P, "s1", 1, 0, True)]) == "fenced-wrote"
    uncommitted: list[h.Event] = [h.BatchesRead("r", P, 0, (h.StoredBatch(0, (b"v1",)),), 1)]
    assert broken_rule(fenced, [sent(1)], uncommitted) == "fenced-wrote"


def test_what_a_session_sent_before_it_was_fenced_may_be_stored() -> None:
    passes(BOTH, session("s2", 1), [h.BatchAcknowledged(P, "s1", 1, 0, True)], read(1, hidden=True))


def test_a_fenced_session_ends_nothing() -> None:
    fenced: list[h.Event] = [*session(), *begun(), sent(1), *session("s2", 1)]
    assert broken_rule(fenced, commit()) == "fenced-ended"


def test_of_two_sessions_the_one_with_the_higher_epoch_lives() -> None:
    crossed: list[h.Event] = [*session("s2", 5), *session("s1", 4), *begun(1, "s1"), sent(1)]
    assert broken_rule(crossed, [h.BatchAcknowledged(P, "s1", 1, 0, True)]) == "fenced-wrote"


def test_the_last_stable_offset_never_moves_back_nor_passes_the_end() -> None:
    def stable(offset: int, end: int = 9) -> list[h.Event]:
        return [h.ReadBegun("r", P), h.BatchesRead("r", P, 9, (), end, last_stable=offset)]

    passes(stable(3), stable(3), stable(4))
    assert broken_rule(stable(4), stable(3)) == "stable-moved-back"
    assert broken_rule(stable(10)) == "stable-moved-back"
    listed: list[h.Event] = [h.ReadBegun("r", P), h.OffsetsListed("r", P, stable=2)]
    assert broken_rule(stable(4), listed) == "stable-moved-back"


def test_nothing_beyond_the_last_stable_offset_is_shown_to_a_reader_of_committed() -> None:
    stored = h.StoredBatch(0, (b"v1",))
    beyond: list[h.Event] = [h.BatchesRead("r", P, 0, (stored,), 1, last_stable=0, committed_only=True)]
    assert broken_rule(BOTH, commit(), beyond) == "watermark-moved-back"


# Positions


def offset_sent(
    name: str, offset: int, transaction: str | None = None, member: str = "", generation: int = -1
) -> list[h.Event]:
    return [h.OffsetsCommitSent("g", name, {P: offset}, member, generation, transaction)]


def accepted(name: str) -> list[h.Event]:
    return [h.OffsetsCommitAnswered("g", name, accepted=(P,))]


def told(position: tuple[int, str] | None, reader: str = "r") -> list[h.Event]:
    return [h.OffsetsFetchBegun(reader, "g"), h.OffsetsFetched(reader, "g", {P: position})]


ONE = [*offset_sent("one", 10), *accepted("one")]
TWO = [*offset_sent("two", 20), *accepted("two")]


def test_the_last_acknowledged_position_is_told() -> None:
    passes(told(None), ONE, told((10, "one")), TWO, told((20, "two")))
    assert broken_rule(ONE, told(None)) == "offset-lost"
    assert broken_rule(ONE, TWO, told((10, "one"))) == "offset-lost"


def test_a_committed_offset_may_move_back_by_request() -> None:
    passes(TWO, ONE, told((10, "one")))
    assert broken_rule(TWO, ONE, told((20, "two"))) == "offset-lost"


def test_a_commit_that_was_not_answered_may_or_may_not_count_but_not_both() -> None:
    unknown = offset_sent("two", 20)
    passes(ONE, unknown, told((10, "one")), told((20, "two")))
    passes(ONE, unknown, told((10, "one")), told((10, "one")))
    assert broken_rule(ONE, unknown, told((20, "two")), told((10, "one"))) == "offset-lost"


def test_a_fetch_under_way_while_a_commit_is_acknowledged_may_tell_either() -> None:
    begun_before: list[h.Event] = [h.OffsetsFetchBegun("r", "g")]
    answer: list[h.Event] = [h.OffsetsFetched("r", "g", {P: (10, "one")})]
    passes(ONE, begun_before, TWO, answer)


def test_a_committed_offset_is_told_as_it_was_committed() -> None:
    assert broken_rule(ONE, told((11, "one"))) == "offset-changed"
    assert broken_rule(told((11, "never"))) == "offset-changed"


def test_a_refused_position_is_never_told() -> None:
    refused: list[h.Event] = [*offset_sent("one", 10), h.OffsetsCommitAnswered("g", "one", refused=(P,))]
    passes(refused, told(None))
    assert broken_rule(refused, told((10, "one"))) == "refused-offset"
    late: list[h.Event] = [h.OffsetsCommitAnswered("g", "one", refused=(P,))]
    assert broken_rule(offset_sent("one", 10), told((10, "one")), late) == "refused-offset"


def test_deleted_offsets_are_gone() -> None:
    asked: list[h.Event] = [h.OffsetsDeletionRequested("g", "away", (P,))]
    gone: list[h.Event] = [*asked, h.OffsetsDeleted("g", "away")]
    passes(ONE, asked, told((10, "one")), told(None))
    passes(ONE, gone, told(None), TWO, told((20, "two")))
    assert broken_rule(ONE, gone, told((10, "one"))) == "offset-lost"
    assert broken_rule(ONE, gone, TWO, told(None)) == "offset-lost"


def test_committed_offsets_of_a_transaction_show_if_and_only_if_it_is_committed() -> None:
    within: list[h.Event] = [*session(), *begun(), sent(1), *offset_sent("tx", 30, "s1#1"), *accepted("tx")]
    passes(within, told(None), commit(), told((30, "tx")), read(1))
    passes(within, abort(), told(None))
    assert broken_rule(within, told((30, "tx"))) == "undecided-shown"
    assert broken_rule(within, abort(), told((30, "tx"))) == "aborted-shown"
    assert broken_rule(within, commit(), told(None)) == "offset-lost"


def test_committed_offsets_and_records_of_a_transaction_have_one_outcome() -> None:
    within: list[h.Event] = [*session(), *begun(), sent(1), *offset_sent("tx", 30, "s1#1"), *accepted("tx")]
    unknown = commit(answered=False)
    assert broken_rule(within, unknown, told((30, "tx")), read(1, hidden=True)) == "committed-hidden"
    assert broken_rule(within, unknown, read(1, hidden=True), told((30, "tx"))) == "aborted-shown"
    settled: list[h.Event] = [h.EverythingSettled()]
    assert broken_rule(within, unknown, read(1), settled, told(None)) == "offset-lost"


def test_a_commit_that_is_not_carried_out_yet_need_not_show() -> None:
    within: list[h.Event] = [*session(), *begun(), *offset_sent("tx", 30, "s1#1"), *accepted("tx")]
    passes(within, commit(complete=False), told(None))


def test_a_fenced_producer_commits_no_positions() -> None:
    fenced: list[h.Event] = [*session(), *begun(), *session("s2", 1), *offset_sent("tx", 30, "s1#1")]
    passes(fenced, told(None))
    assert broken_rule(fenced, accepted("tx")) == "fenced-commit"


def test_a_member_of_an_earlier_generation_commits_no_positions() -> None:
    moved_on: list[h.Event] = [
        h.GenerationAssigned("g", 3, "m1", None, "a", frozenset({P})),
        h.GenerationAssigned("g", 4, "m2", None, "b", frozenset({P})),
    ]
    passes(moved_on, offset_sent("new", 5, member="m2", generation=4), accepted("new"))
    late = offset_sent("late", 5, member="m1", generation=3)
    assert broken_rule(moved_on, late, accepted("late")) == "fenced-commit"
    assert broken_rule(moved_on, late, told((5, "late"))) == "fenced-commit"
