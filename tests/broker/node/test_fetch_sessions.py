"""Incremental fetch sessions, row by row of KIP-227's table."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest
from kio.schema.errors import ErrorCode

from holdfast.broker.node import fetch_sessions
from holdfast.broker.node.fetch_sessions import (
    EVICTION_MS,
    FetchPlan,
    FetchSessions,
    PartitionKey,
    WantedPartition,
)
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.testing.fakes import SeededRandomness
from holdfast.wire.hot import Fetched

T0: PartitionKey = ("t", 0)
T1: PartitionKey = ("t", 1)
U0: PartitionKey = (UUID(int=5), 0)


def want(offset: int = 0) -> WantedPartition:
    return WantedPartition(offset, 1000, -1, -1, -1)


def fetched(
    index: int, *, high_watermark: int = 0, start: int = 0, length: int = 0, error: int = 0
) -> Fetched:
    return Fetched(index, error, high_watermark, high_watermark, start, None, None, length)


def at(ms: int) -> Now:
    return Now(0, ms)


class Sessions:
    def __init__(self, slots: int = 10) -> None:
        self.sessions = FetchSessions(slots, SeededRandomness(1))

    def plan(
        self,
        session_id: int,
        epoch: int,
        *wanted: PartitionKey,
        forgotten: tuple[PartitionKey, ...] = (),
        now: int = 0,
        offset: int = 0,
    ) -> FetchPlan:
        request = SimpleNamespace(session_id=session_id, session_epoch=epoch)
        return self.sessions.plan(request, {key: want(offset) for key in wanted}, list(forgotten), at(now))

    def begin(self, *wanted: PartitionKey, now: int = 0) -> FetchPlan:
        plan = self.plan(0, 0, *wanted, now=now)
        assert plan.session is not None
        return plan


@pytest.fixture
def sessions() -> Sessions:
    return Sessions()


def refused(code: ErrorCode, sessions: Sessions, session_id: int, epoch: int, *wanted: PartitionKey) -> None:
    with pytest.raises(ApiError) as caught:
        sessions.plan(session_id, epoch, *wanted)
    assert caught.value.code is code


def keys(plan: FetchPlan) -> list[PartitionKey]:
    return [key for key, _ in plan.partitions]


def test_no_session_and_the_final_epoch_is_a_full_fetch_without_a_session(sessions: Sessions) -> None:
    plan = sessions.plan(0, -1, T0, T1)
    assert (keys(plan), plan.session_id, plan.is_full) == ([T0, T1], 0, True)
    assert len(sessions.sessions) == 0


def test_the_initial_epoch_is_a_full_fetch_and_makes_a_session(sessions: Sessions) -> None:
    plan = sessions.plan(0, 0, T0, T1)
    assert keys(plan) == [T0, T1]
    assert plan.is_full
    assert plan.session_id > 0
    assert len(sessions.sessions) == 1


def test_the_initial_epoch_with_an_id_closes_that_session_and_makes_another(sessions: Sessions) -> None:
    old = sessions.begin(T0).session_id
    plan = sessions.plan(old, 0, T1)
    assert plan.session_id not in (0, old)
    assert keys(plan) == [T1]
    assert len(sessions.sessions) == 1
    refused(ErrorCode.fetch_session_id_not_found, sessions, old, 1)


def test_the_final_epoch_with_an_id_is_a_full_fetch_and_closes_the_session(sessions: Sessions) -> None:
    old = sessions.begin(T0).session_id
    plan = sessions.plan(old, -1, T1)
    assert (keys(plan), plan.session_id, plan.is_full) == ([T1], 0, True)
    refused(ErrorCode.fetch_session_id_not_found, sessions, old, 1)


def test_the_next_epoch_is_incremental_and_names_only_changes(sessions: Sessions) -> None:
    session_id = sessions.begin(T0, T1).session_id
    plan = sessions.plan(session_id, 1, T1, offset=50)
    assert plan.session_id == session_id
    assert not plan.is_full
    assert dict(plan.partitions)[T0].fetch_offset == 0
    assert dict(plan.partitions)[T1].fetch_offset == 50
    assert keys(sessions.plan(session_id, 2)) == [T0, T1]


def test_an_incremental_fetch_adds_and_forgets_partitions(sessions: Sessions) -> None:
    session_id = sessions.begin(T0).session_id
    assert keys(sessions.plan(session_id, 1, T1)) == [T0, T1]
    assert keys(sessions.plan(session_id, 2, forgotten=(T0, ("unknown", 3)))) == [T1]


def test_a_session_that_forgets_its_last_partition_ends(sessions: Sessions) -> None:
    session = sessions.begin(T0).session
    assert session is not None
    plan = sessions.plan(session.id, 1, forgotten=(T0,))
    assert plan.session is None
    assert plan.is_full
    refused(ErrorCode.fetch_session_id_not_found, sessions, session.id, 2)


@pytest.mark.parametrize("epoch", [2, 5, 2**31 - 1])
def test_an_epoch_that_is_not_the_next_is_refused_and_changes_nothing(sessions: Sessions, epoch: int) -> None:
    session_id = sessions.begin(T0).session_id
    refused(ErrorCode.invalid_fetch_session_epoch, sessions, session_id, epoch, T1)
    assert keys(sessions.plan(session_id, 1)) == [T0]


def test_a_repeated_epoch_is_refused(sessions: Sessions) -> None:
    session_id = sessions.begin(T0).session_id
    sessions.plan(session_id, 1)
    refused(ErrorCode.invalid_fetch_session_epoch, sessions, session_id, 1)


@pytest.mark.parametrize("session_id", [0, 7])
def test_an_incremental_fetch_of_no_session_is_refused(sessions: Sessions, session_id: int) -> None:
    refused(ErrorCode.fetch_session_id_not_found, sessions, session_id, 1)


def test_after_the_last_epoch_comes_1(sessions: Sessions) -> None:
    plan = sessions.begin(T0)
    assert plan.session is not None
    plan.session.epoch = 2**31 - 1
    sessions.plan(plan.session_id, 2**31 - 1)
    sessions.plan(plan.session_id, 1)


def test_names_and_ids_do_not_mix_in_one_session(sessions: Sessions) -> None:
    session_id = sessions.begin(T0).session_id
    refused(ErrorCode.fetch_session_topic_id_error, sessions, session_id, 1, U0)


def test_a_session_may_begin_with_nothing_and_grow(sessions: Sessions) -> None:
    session_id = sessions.plan(0, 0).session_id
    assert session_id > 0
    assert keys(sessions.plan(session_id, 1, U0)) == [U0]


def test_ids_are_given_once(sessions: Sessions) -> None:
    ids = {sessions.begin(T0).session_id for _ in range(10)}
    assert len(ids) == 10
    assert 0 not in ids


# What an incremental response carries


def test_a_partition_without_news_is_left_out(sessions: Sessions) -> None:
    session = sessions.begin(T0).session
    assert session is not None
    session.sent(T0, fetched(0, high_watermark=5))
    assert not session.is_news(T0, fetched(0, high_watermark=5))


@pytest.mark.parametrize(
    "what",
    [
        fetched(0, high_watermark=6),
        fetched(0, high_watermark=5, start=1),
        fetched(0, high_watermark=5, length=10),
        fetched(0, high_watermark=5, error=6),
        fetched(0, high_watermark=5)._replace(diverging=(1, 3)),
    ],
)
def test_news_is_a_new_bound_records_an_error_or_divergence(sessions: Sessions, what: Fetched) -> None:
    session = sessions.begin(T0).session
    assert session is not None
    session.sent(T0, fetched(0, high_watermark=5))
    assert session.is_news(T0, what)


def test_an_error_is_repeated_and_its_end_is_news(sessions: Sessions) -> None:
    session = sessions.begin(T0).session
    assert session is not None
    session.sent(T0, fetched(0, high_watermark=5))
    session.sent(T0, fetched(0, error=6))
    assert session.is_news(T0, fetched(0, error=6))
    assert session.is_news(T0, fetched(0, high_watermark=5))


def test_a_partition_that_returned_records_goes_to_the_end_so_that_none_starves(sessions: Sessions) -> None:
    plan = sessions.begin(T0, T1)
    assert plan.session is not None
    plan.session.sent(T0, fetched(0, length=100))
    assert keys(sessions.plan(plan.session_id, 1)) == [T1, T0]


# Slots


def test_with_all_slots_taken_a_new_session_is_not_made_and_the_fetch_is_served_all_the_same() -> None:
    sessions = Sessions(slots=2)
    sessions.begin(T0)
    sessions.begin(T0)
    plan = sessions.plan(0, 0, T1, now=EVICTION_MS - 1)
    assert (keys(plan), plan.session_id, plan.is_full) == ([T1], 0, True)
    assert len(sessions.sessions) == 2


def test_the_session_idle_longest_gives_way_after_two_minutes() -> None:
    sessions = Sessions(slots=2)
    first, second = (sessions.begin(T0).session_id for _ in range(2))
    sessions.plan(first, 1, now=10)
    sessions.begin(T1, now=EVICTION_MS + 5)
    refused(ErrorCode.fetch_session_id_not_found, sessions, second, 1)
    sessions.plan(first, 2, now=EVICTION_MS + 6)


def test_without_slots_nobody_gets_a_session() -> None:
    assert Sessions(slots=0).plan(0, 0, T0).session is None


@pytest.fixture
def little_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fetch_sessions, "REMEMBERED_MAX", 10)


def partitions(count: int, topic: str = "t") -> list[PartitionKey]:
    return [(topic, index) for index in range(count)]


@pytest.mark.usefixtures("little_room")
def test_what_sessions_remember_together_is_bounded(sessions: Sessions) -> None:
    """Whether the partitions exist or not; who gets no session is served all the same."""
    assert sessions.plan(0, 0, *partitions(11)).session is None
    sessions.begin(*partitions(4))
    sessions.begin(*partitions(6))
    plan = sessions.plan(0, 0, T0)
    assert (keys(plan), plan.session, plan.is_full) == ([T0], None, True)
    assert len(sessions.sessions) == 2


@pytest.mark.usefixtures("little_room")
def test_names_longer_than_a_topic_may_have_count_for_more(sessions: Sessions) -> None:
    assert sessions.plan(0, 0, ("t" * 249, 0), ("t" * 249, 1)).session is not None
    assert sessions.plan(0, 0, ("t" * 2500, 0)).session is None


@pytest.mark.usefixtures("little_room")
def test_those_idle_longest_make_room(sessions: Sessions) -> None:
    first = sessions.begin(*partitions(5), now=0)
    second = sessions.begin(*partitions(5), now=1)
    assert sessions.plan(0, 0, *partitions(8), now=EVICTION_MS).session is None
    assert sessions.plan(0, 0, *partitions(8), now=EVICTION_MS + 1).session is not None
    for gone in (first, second):
        refused(ErrorCode.fetch_session_id_not_found, sessions, gone.session_id, 1)


@pytest.mark.usefixtures("little_room")
def test_a_session_that_outgrows_the_room_ends(sessions: Sessions) -> None:
    session_id = sessions.begin(*partitions(8)).session_id
    plan = sessions.plan(session_id, 1, *partitions(9), forgotten=(("t", 0), ("none", 0)))
    assert keys(plan) == partitions(9)[1:]
    assert len(sessions.plan(session_id, 2, *partitions(2, "more")).partitions) == 10
    refused(ErrorCode.fetch_session_id_not_found, sessions, session_id, 3, ("one more", 0))
    assert len(sessions.sessions) == 0
    sessions.begin(*partitions(10))
