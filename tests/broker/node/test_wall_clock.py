"""A wall clock that jumps: nothing expires by it before it is proven, and everything does afterwards."""

from __future__ import annotations

from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.partition_logs import read_all
from tests.support.quiet_broker import QuietBroker
from tests.support.tiers import examples

from holdfast.broker.node.directories import DirectoryFailures, LogDirectory
from holdfast.broker.node.troubles import Troubles
from holdfast.broker.node.wall_clock import AWAY_MS, CLOCK_FILE, GAIN, STEP_MS, WallClock
from holdfast.testing.bare_clients import TransactionalProducer
from holdfast.testing.bare_node import BareNode
from holdfast.testing.disk import SimulatedDisk
from holdfast.testing.fakes import START_WALL_MS, ManualClock
from holdfast.wire.batch import Record, build_batch

SECOND_MS = 1_000
HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
SETTLE_MS = 4 * HOUR_MS
OFFSET_COMMIT, OFFSET_FETCH, LIST_TRANSACTIONS = 8, 9, 66


class Watched:
    """A guard over a manual clock, begun anew as often as wanted."""

    def __init__(self, settle_ms: int = SETTLE_MS) -> None:
        self.clock = ManualClock()
        self.disk = SimulatedDisk()
        self.disk.prepare("/data")
        self.settle_ms = settle_ms
        self.boot_id = "first"
        self.said: list[str] = []
        self.guard = self.begin()

    def begin(self) -> WallClock:
        troubles = Troubles(self.said.append, lambda: self.clock.now().monotonic_ms)
        guard = WallClock(
            self.disk, self.clock, self.boot_id, lambda: self.settle_ms, troubles, self.said.append
        )
        guard.begin(LogDirectory(self.disk, "/data", cast(DirectoryFailures, None)))
        return guard

    def restart(self, *, boots: bool = False, down_ms: int = 0, step_ms: int = 0) -> None:
        self.guard.save()
        self.clock.advance(down_ms)
        self.clock.step_wall(step_ms)
        self.boot_id += "+" * boots
        self.guard = self.begin()

    @property
    def lead_ms(self) -> int:
        """How far the proven time is from where it would be without any step."""
        return self.guard.proven().wall_ms - START_WALL_MS - self.clock.now().monotonic_ms

    @property
    def behind_ms(self) -> int:
        """How far it is behind the wall clock."""
        return self.clock.now().wall_ms - self.guard.proven().wall_ms


@pytest.fixture
def watched() -> Watched:
    return Watched()


def test_a_clock_that_runs_is_followed(watched: Watched) -> None:
    for _ in range(5):
        watched.clock.advance(HOUR_MS)
        assert watched.guard.proven() == watched.clock.now()
    assert watched.said == []


@pytest.mark.parametrize("step_ms", [-DAY_MS, -5, 5, STEP_MS])
def test_small_steps_and_steps_back_are_followed_at_once(watched: Watched, step_ms: int) -> None:
    watched.clock.step_wall(step_ms)
    assert watched.guard.proven() == watched.clock.now()
    assert watched.said == []


def test_a_jump_is_told_once_and_time_goes_on_without_it(watched: Watched) -> None:
    watched.clock.step_wall(30 * DAY_MS)
    for _ in range(3):
        assert 0 <= watched.lead_ms <= STEP_MS
        watched.clock.advance(SECOND_MS)
    (told,) = watched.said
    assert "30 days 0:00:00 ahead" in told
    assert "holdfast.clock.settle.ms=0" in told


def test_a_jump_that_is_taken_back_is_over(watched: Watched) -> None:
    watched.clock.step_wall(30 * DAY_MS)
    watched.guard.proven()
    watched.clock.advance(8 * SECOND_MS)
    watched.clock.step_wall(-30 * DAY_MS)
    assert watched.guard.proven() == watched.clock.now()
    assert len(watched.said) == 2
    assert "agrees again" in watched.said[1]


def test_a_jump_that_lasts_is_believed_in_the_end(watched: Watched) -> None:
    watched.clock.step_wall(30 * DAY_MS)
    watched.guard.proven()
    watched.clock.advance(SETTLE_MS - 1)
    assert watched.behind_ms > 29 * DAY_MS
    watched.clock.advance(1)
    assert watched.behind_ms == 0
    assert "believed from now on" in watched.said[1]
    watched.clock.advance(HOUR_MS)
    assert watched.behind_ms == 0
    assert len(watched.said) == 2


def test_the_operators_word_has_it_believed_at_once(watched: Watched) -> None:
    watched.clock.step_wall(30 * DAY_MS)
    assert watched.behind_ms > 0
    watched.settle_ms = 0
    assert watched.behind_ms == 0
    assert len(watched.said) == 2


def test_many_small_steps_are_a_jump(watched: Watched) -> None:
    for _ in range(100):
        watched.clock.advance(SECOND_MS)
        watched.clock.step_wall(STEP_MS // 2)
        watched.guard.proven()
    assert watched.lead_ms <= STEP_MS
    assert len(watched.said) == 1


moves = st.lists(
    st.tuples(
        st.sampled_from([0, 10, SECOND_MS, HOUR_MS]),
        st.sampled_from([-DAY_MS, -SECOND_MS, 0, 0, SECOND_MS, STEP_MS, STEP_MS + 1, DAY_MS]),
        st.sampled_from(["runs", "runs", "runs", "starts", "boots"]),
    ),
    max_size=12,
)


@settings(max_examples=examples(50), deadline=None)
@given(moves)
def test_the_proven_time_never_runs_ahead(script: list[tuple[int, int, str]]) -> None:
    watched = Watched(settle_ms=1_000 * DAY_MS)
    before = watched.guard.proven()
    for passed_ms, step_ms, how in script:
        if how == "runs":
            watched.clock.advance(passed_ms)
            watched.clock.step_wall(step_ms)
        else:
            watched.restart(boots=how == "boots", down_ms=passed_ms, step_ms=step_ms)
        now = watched.guard.proven()
        believed_ms = AWAY_MS if how == "boots" else STEP_MS
        assert now.wall_ms <= watched.clock.now().wall_ms
        assert now.wall_ms - before.wall_ms <= passed_ms + passed_ms // GAIN + believed_ms
        before = now


# ---- over restarts


def test_a_stop_within_one_boot_is_no_jump(watched: Watched) -> None:
    watched.restart(down_ms=30 * DAY_MS)
    assert watched.behind_ms == 0
    assert watched.said == []


def test_a_jump_during_a_stop_is_seen(watched: Watched) -> None:
    watched.restart(down_ms=HOUR_MS, step_ms=30 * DAY_MS)
    assert 0 <= watched.lead_ms <= STEP_MS
    assert len(watched.said) == 1


def test_a_short_stop_over_a_boot_is_believed_and_a_long_one_is_not(watched: Watched) -> None:
    watched.restart(boots=True, step_ms=AWAY_MS)
    assert watched.behind_ms == 0
    watched.restart(boots=True, step_ms=2 * DAY_MS)
    assert watched.behind_ms == 2 * DAY_MS
    assert "or the machine was off" in watched.said[0]


def test_a_machine_that_is_off_every_night_catches_up(watched: Watched) -> None:
    """The time it has run since the first night counts, however often it was off."""
    for _ in range(3):
        watched.restart(boots=True, step_ms=14 * HOUR_MS)
        watched.clock.advance(SETTLE_MS // 4)
    assert watched.behind_ms > 0
    watched.restart(boots=True, step_ms=14 * HOUR_MS)
    watched.clock.advance(HOUR_MS)
    assert watched.behind_ms == 0


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"[]", b'{"version": 1}', b'{"version": 0, "boot_id": 1}', b"\xff"]
)
def test_a_file_that_cannot_be_read_is_told(watched: Watched, content: bytes) -> None:
    file = watched.disk.open(f"/data/{CLOCK_FILE}", "create")
    file.pwritev([content], 0)
    watched.begin()
    assert CLOCK_FILE in watched.said[0]
    assert watched.behind_ms == 0


# ---- everything that expires


class Holdings:
    """A node with a record, a committed offset, an idempotent producer and a transactional id."""

    def __init__(self) -> None:
        self.node = BareNode({"holdfast.clock.settle.ms": str(SETTLE_MS)})
        client = self.node.connect()
        client.create_topic("t", retention_ms=str(DAY_MS))
        client.create_topic("idle", retention_ms=str(400 * DAY_MS))
        client.produce("t", build_batch([Record(0, 0, b"k", b"v")], base_timestamp=START_WALL_MS))
        self.batch = build_batch(
            [Record(0, 0, b"k", b"v")],
            base_timestamp=START_WALL_MS,
            producer_id=7,
            producer_epoch=0,
            base_sequence=0,
        )
        client.produce("idle", self.batch)
        partition = {"partition_index": 0, "committed_offset": 1, "committed_leader_epoch": -1}
        topics = [{"name": "t", "partitions": [partition]}]
        fields: dict[str, Any] = {"generation_id_or_member_epoch": -1, "member_id": "", "topics": topics}
        assert (
            self._ask_twice(OFFSET_COMMIT, 8, group_id="g", **fields).topics[0].partitions[0].error_code == 0
        )
        assert TransactionalProducer(client, "copy").init() is ErrorCode.none

    def _ask_twice(self, api_key: int, version: int, **fields: Any) -> Any:
        """The first request of all makes the coordinator's topic."""
        self.node.connect().ask(api_key, version, **fields)
        return self.node.connect().ask(api_key, version, **fields)

    def go_on(self, ms: int) -> None:
        for _ in range(ms // (10 * 60_000)):
            self.node.advance(10 * 60_000)
            self.node.settle()

    @property
    def left(self) -> set[str]:
        client = self.node.connect()
        found = set()
        if client.fetch("t", 0).error_code is ErrorCode.none:
            found.add("record")
        groups = [{"group_id": "g", "topics": [{"name": "t", "partition_indexes": [0]}], "member_epoch": -1}]
        answer = client.ask(OFFSET_FETCH, 8, groups=groups, require_stable=False)
        if answer.groups[0].topics[0].partitions[0].committed_offset == 1:
            found.add("committed offset")
        if 7 in self.node.hosted("idle").log.producers:
            found.add("producer id")
        answer = client.ask(LIST_TRANSACTIONS, 0, state_filters=[], producer_id_filters=[])
        if [state.transactional_id for state in answer.transaction_states] == ["copy"]:
            found.add("transactional id")
        return found


EVERYTHING = {"record", "committed offset", "producer id", "transactional id"}


@pytest.fixture
def holdings() -> Holdings:
    return Holdings()


def test_nothing_expires_by_a_jump_and_all_of_it_when_the_jump_is_believed(holdings: Holdings) -> None:
    holdings.go_on(HOUR_MS)
    holdings.node.clock.step_wall(30 * DAY_MS)
    holdings.go_on(SETTLE_MS - HOUR_MS)
    assert holdings.left == EVERYTHING
    answer = holdings.node.connect().produce("idle", holdings.batch)
    assert (answer.error_code, answer.base_offset) == (ErrorCode.none, 0), "and no batch is let in twice"
    holdings.go_on(3 * HOUR_MS)
    assert holdings.left == set()


def test_a_jump_that_was_taken_back_has_taken_nothing(holdings: Holdings) -> None:
    holdings.node.clock.step_wall(30 * DAY_MS)
    holdings.go_on(2 * HOUR_MS)
    holdings.node.clock.step_wall(-30 * DAY_MS)
    holdings.go_on(2 * HOUR_MS)
    assert holdings.left == EVERYTHING


@pytest.mark.parametrize(
    ("ends", "ran_ms"), [("stop", 0), ("kill", 0), ("lose_power", 0), ("lose_power", HOUR_MS)]
)
def test_a_start_after_a_jump_takes_nothing(holdings: Holdings, ends: str, ran_ms: int) -> None:
    holdings.go_on(ran_ms)
    holdings.node.clock.step_wall(30 * DAY_MS)
    holdings.node = getattr(holdings.node, ends)()
    holdings.go_on(SETTLE_MS - HOUR_MS)
    assert holdings.left == EVERYTHING
    holdings.go_on(3 * HOUR_MS)
    assert holdings.left <= {"producer id"}, "of which a recovery does not know when it was last heard of"


@pytest.mark.parametrize("back_ms", [HOUR_MS, 30 * DAY_MS])
def test_a_clock_that_is_set_back_lets_all_of_it_last_longer(holdings: Holdings, back_ms: int) -> None:
    holdings.node.clock.step_wall(-back_ms)
    holdings.go_on(2 * HOUR_MS)
    assert holdings.left == EVERYTHING


def test_an_open_transaction_outlives_a_start_after_a_jump() -> None:
    node = BareNode()
    client = node.connect()
    client.create_topic("t")
    producer = TransactionalProducer(client, "copy")
    producer.init()
    producer.produce("t", 0, b"one")
    node.clock.step_wall(30 * DAY_MS)
    node = node.stop()
    node.advance(30 * SECOND_MS)
    node.settle()
    assert node.hosted("t").log.producers.has_transaction(producer.producer_id)


def test_tombstones_and_lags_of_compaction_outlast_a_jump() -> None:
    broker = QuietBroker()
    compacted = {
        "cleanup_policy": "compact",
        "internal_segment_bytes": "100",
        "min_cleanable_dirty_ratio": "0",
    }
    hosted = broker.create("t", 1, **compacted)
    lagging = broker.create("u", 1, min_compaction_lag_ms=str(HOUR_MS), **compacted)
    for partition in (hosted, lagging):
        for _ in range(3):
            broker.append(partition, b"k", None)
    broker.pass_time(60 * SECOND_MS)
    assert [record.offset for record in read_all(hosted.log)] == [1, 2], "1 is kept until its horizon"
    broker.clock.step_wall(30 * DAY_MS)
    for _ in range(2):
        broker.append(hosted, b"other", b"v")
    broker.pass_time(60 * SECOND_MS)
    assert [record.offset for record in read_all(hosted.log)] == [2, 3, 4], (
        "compacted, and without a tombstone less"
    )
    assert [record.offset for record in read_all(lagging.log)] == [0, 1, 2]


# ---- what waits


def test_a_transactional_batch_that_waited_is_stamped_when_it_is_appended() -> None:
    node = BareNode()
    client = node.connect()
    client.create_topic("t", message_timestamp_type="LogAppendTime")
    producer = TransactionalProducer(client, "copy")
    producer.init()
    asked = producer.begin_produce({("t", 0): producer.batch("t", 0, b"one")})
    node.turn()
    assert node.hosted("t").log.end_offset == 0, "the coordinator has not agreed yet"
    appended_ms = node.clock.advance(5 * SECOND_MS).wall_ms
    node.settle()
    assert producer.produced(asked) == [ErrorCode.none]
    (stored,) = node.hosted("t").log.batches_from(0)
    assert stored.header.max_timestamp == appended_ms
