"""Each rule about members and what they own: a history that keeps it passes, one that breaks it does not."""

from __future__ import annotations

import pytest
from tests.support import history as h
from tests.support.checkers import Violation, check

P: h.Partition = ("topic", 0)
Q: h.Partition = ("topic", 1)


def broken_rule(*events: h.Event) -> str:
    with pytest.raises(Violation) as violation:
        check(events)
    return violation.value.rule


# Classic groups


def assigned(
    member: str, *partitions: h.Partition, generation: int = 1, name: str = "a", instance: str | None = None
) -> h.GenerationAssigned:
    return h.GenerationAssigned("g", generation, member, instance, name, frozenset(partitions))


def test_members_of_a_generation_share_the_partitions() -> None:
    check([assigned("m1", P), assigned("m2", Q), assigned("m2", P, Q, generation=2, name="b")])
    assert broken_rule(assigned("m1", P), assigned("m2", P, Q)) == "double-owner"


def test_members_of_a_generation_have_parts_of_one_assignment() -> None:
    assert broken_rule(assigned("m1", P), assigned("m2", Q, name="b")) == "torn-generation"


def test_a_static_member_is_the_same_owner_after_a_restart() -> None:
    check([assigned("m1", P, instance="i"), assigned("m2", P, instance="i")])
    late = h.OffsetsCommitSent("g", "c", {P: 1}, "m1", 1)
    restarted = (assigned("m1", P, instance="i"), assigned("m2", P, instance="i"))
    answer = h.OffsetsCommitAnswered("g", "c", accepted=(P,))
    assert broken_rule(*restarted, late, answer) == "fenced-commit"


def test_a_deleted_group_begins_anew() -> None:
    check([assigned("m1", P), h.GroupDeletionRequested("g"), assigned("m2", P, name="b")])


# Sessions


def test_a_member_is_not_dropped_before_its_session_has_run_out() -> None:
    alive = h.MemberAlive("g", "m1", 1_000, 500)
    check([alive, h.MemberDropped("g", "m1", 1_500, "unknown")])
    assert broken_rule(alive, h.MemberDropped("g", "m1", 1_499, "unknown")) == "member-lost"
    check([alive, h.MemberLeaving("g", "m1"), h.MemberDropped("g", "m1", 1_100, "unknown")])


# KIP-848 groups


def given(
    member: str, *partitions: h.Partition, at: int, epoch: int = 1, sent_epoch: int | None = None
) -> list[h.Event]:
    return [
        h.PartitionsGiven(
            "g", member, epoch - 1 if sent_epoch is None else sent_epoch, epoch, frozenset(partitions), at
        ),
        h.MemberAlive("g", member, at, 1_000),
    ]


def test_a_partition_is_given_once_its_owner_has_released_it() -> None:
    released = h.PartitionsHeld("g", "m1", frozenset({Q}))
    check([*given("m1", P, Q, at=0), released, *given("m2", P, at=10)])
    assert broken_rule(*given("m1", P, Q, at=0), *given("m2", P, at=10)) == "given-before-release"
    still_held = h.PartitionsHeld("g", "m1", frozenset({P}))
    assert broken_rule(*given("m1", P, Q, at=0), still_held, *given("m2", P, at=9)) == "given-before-release"


def test_a_partition_is_given_once_its_owner_has_left_or_was_told_that_it_is_fenced() -> None:
    check([*given("m1", P, at=0), h.MemberLeaving("g", "m1"), *given("m2", P, at=10)])
    check([*given("m1", P, at=0), h.MemberDropped("g", "m1", 1_000, "fenced"), *given("m2", P, at=1_001)])


def test_a_partition_is_given_once_its_owner_has_been_silent_for_too_long() -> None:
    check([*given("m1", P, at=0), *given("m2", P, at=1_000)])
    alive = h.MemberAlive("g", "m1", 500, 1_000)
    assert broken_rule(*given("m1", P, at=0), alive, *given("m2", P, at=1_000)) == "given-before-release"


def test_a_silent_owner_is_fenced_until_it_joins_anew() -> None:
    fenced = [*given("m1", P, at=0), *given("m2", P, at=1_000)]
    assert broken_rule(*fenced, *given("m1", at=1_100, epoch=2)) == "fenced-heartbeat"
    check([*fenced, *given("m1", at=1_100, epoch=3, sent_epoch=0), *given("m1", at=1_200, epoch=4)])
    commit = h.OffsetsCommitSent("g", "late", {P: 3}, "m1", 1)
    answer = h.OffsetsCommitAnswered("g", "late", accepted=(P,))
    assert broken_rule(*fenced, commit, answer) == "fenced-commit"


def test_a_members_epoch_never_falls() -> None:
    assert broken_rule(*given("m1", P, at=0, epoch=5), *given("m1", P, at=1, epoch=4)) == "epoch-moved-back"
