"""Plans follow from ledgers alone, and give every offset to every sink exactly once."""

from __future__ import annotations

import random
import uuid
from collections import Counter
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.digest import Tally
from holdfast.pipeline.engine.planning import (
    Limits,
    Log,
    Plan,
    opening_range,
    openings,
    plan_batch,
    remaining,
    share_out,
    unread,
)
from holdfast.pipeline.engine.progress import StateNow
from holdfast.pipeline.engine.staging import Piece, Staged
from holdfast.pipeline.engine.stateful import Growth
from holdfast.pipeline.ledger import Decision, Entry, Intake, decide
from holdfast.pipeline.positions import BatchRange, Place, Position, Positions, Span

TOPIC = uuid.UUID(int=7)
ALL = Limits(offsets=10**9, bytes=10**12)


def place(partition: int) -> Place:
    return Place("orders", TOPIC, partition)


def entry_at(sink: str, at: dict[int, int], taken: BatchRange | None = None, time_ms: int = 1) -> Entry:
    positions = Positions({place(partition): Position(offset, 3) for partition, offset in at.items()})
    return Entry("p", sink, 1, taken or BatchRange({}), positions, time_ms, "f")


def spans(plan: Plan | None) -> dict[int, tuple[int, int]]:
    assert plan is not None
    return {where.partition: (span.start, span.end) for where, span in plan.range.spans.items()}


LOGS = {place(0): Log(0, 100, 5), place(1): Log(0, 10, 6)}


def test_sinks_at_one_place_share_a_batch_up_to_the_stable_ends() -> None:
    ledgers: dict[str, Entry | None] = {
        "a": entry_at("a", {0: 40, 1: 10}),
        "b": entry_at("b", {0: 40, 1: 10}),
    }
    plan = plan_batch(ledgers, LOGS, ALL)
    assert plan == Plan(BatchRange({place(0): Span(40, 100, 5)}), ("a", "b"), None)


def test_nothing_to_read_is_no_batch() -> None:
    assert plan_batch({"a": entry_at("a", {0: 100, 1: 10})}, LOGS, ALL) is None


def test_a_run_that_ends_stops_where_the_logs_ended_at_its_start() -> None:
    ledgers = {"a": entry_at("a", {0: 40, 1: 10})}
    assert spans(plan_batch(ledgers, LOGS, ALL, until={place(0): 60, place(1): 10})) == {0: (40, 60)}
    assert plan_batch({"a": entry_at("a", {0: 60, 1: 10})}, LOGS, ALL, until={place(0): 60}) is None


def test_a_sink_behind_catches_up_alone_with_the_batch_the_other_took() -> None:
    taken = BatchRange({place(0): Span(40, 70, 4)})
    ledgers = {"a": entry_at("a", {0: 70, 1: 10}, taken, time_ms=99), "b": entry_at("b", {0: 40, 1: 10})}
    plan = plan_batch(ledgers, LOGS, Limits(offsets=1, bytes=1))
    assert plan == Plan(taken, ("b",), 99, is_catch_up=True)


def test_a_sink_far_behind_never_crosses_a_position_of_another() -> None:
    ledgers = {
        "a": entry_at("a", {0: 70, 1: 10}, BatchRange({place(0): Span(60, 70)})),
        "b": entry_at("b", {0: 20, 1: 3}),
        "c": entry_at("c", {0: 50, 1: 10}),
    }
    plan = plan_batch(ledgers, LOGS, ALL)
    assert plan is not None
    assert plan.targets == ("b",)
    assert spans(plan) == {0: (20, 50), 1: (3, 10)}
    assert (
        plan.range.spans[place(0)].leader_epoch == 3
    )  # of the position it reaches, as the other ledger has it


def test_a_batch_a_sink_has_half_comes_first_and_as_it_was() -> None:
    half = entry_at("k", {0: 70, 1: 10}, BatchRange({place(0): Span(40, 70)}), time_ms=5)
    ledgers = {"k": entry_at("k", {0: 40, 1: 10}), "a": entry_at("a", {0: 40, 1: 10})}
    assert plan_batch(ledgers, LOGS, ALL, unfinished={"k": half}) == Plan(
        half.range, ("k",), 5, is_catch_up=True
    )


def test_an_unfinished_plan_is_taken_again_only_where_it_still_fits() -> None:
    noted = Plan(BatchRange({place(0): Span(40, 55, 5)}), ("a", "b"), 77)
    at = {0: 40, 1: 10}
    assert plan_batch({"a": entry_at("a", at), "b": entry_at("b", at)}, LOGS, ALL, noted=noted) == noted
    moved = {"a": entry_at("a", {0: 55, 1: 10}), "b": entry_at("b", at)}
    assert plan_batch(moved, LOGS, ALL, noted=noted) != noted
    assert plan_batch({"a": entry_at("a", at)}, LOGS, ALL, noted=noted) != noted
    shorter = {**LOGS, place(0): Log(0, 50, 5)}
    assert plan_batch({"a": entry_at("a", at), "b": entry_at("b", at)}, shorter, ALL, noted=noted) != noted


@pytest.mark.parametrize(("allowed", "shares"), [(1000, [3, 50, 100]), (90, [3, 43, 44]), (1, [1, 1, 1])])
def test_a_limit_is_shared_and_no_partition_starves(allowed: int, shares: list[int]) -> None:
    available = {place(0): 3, place(1): 50, place(2): 100}
    assert list(share_out(available, allowed).values()) == shares


def test_the_limit_of_bytes_goes_by_the_size_of_records() -> None:
    assert Limits(offsets=1000, bytes=10_000, record_bytes=100).allowed == 100
    assert Limits(offsets=10, bytes=10_000, record_bytes=100).allowed == 10
    assert Limits(offsets=10, bytes=1, record_bytes=100).allowed == 1


class TestOpenings:
    def test_a_new_pipeline_begins_where_its_definition_says(self) -> None:
        begins = {place(0): 7, place(1): 0}
        found = openings({"a": None, "b": None}, LOGS, begins)
        assert found["a"] == found["b"] == Positions({place(0): Position(7, 5), place(1): Position(0, 6)})

    def test_a_new_sink_begins_at_the_lowest_place_of_the_others(self) -> None:
        ledgers = {"a": entry_at("a", {0: 50, 1: 2}), "b": entry_at("b", {0: 30, 1: 9}), "new": None}
        assert openings(ledgers, LOGS, {})["new"] == Positions(
            {place(0): Position(30, 3), place(1): Position(2, 3)}
        )

    def test_a_new_partition_begins_at_its_logs_start_whatever_the_definition_says(self) -> None:  # HF402
        logs = {**LOGS, place(2): Log(4, 9, 0)}
        found = openings({"a": entry_at("a", {0: 50, 1: 2}), "new": None}, logs, {})
        assert found["a"] == Positions({place(2): Position(4, -1)})
        assert found["new"].at[place(2)] == Position(4, -1)

    def test_sinks_opened_before_there_was_a_partition_let_a_new_one_begin_where_they_do(self) -> None:
        found = openings({"a": entry_at("a", {}), "new": None}, {place(0): Log(4, 9, 2)}, {})
        assert found["new"] == found["a"] == Positions({place(0): Position(4, -1)})

    def test_sinks_that_know_everything_are_left_alone(self) -> None:
        assert openings({"a": entry_at("a", {0: 50, 1: 2})}, LOGS, {}) == {}


class TestUnread:
    def told(self, ledgers: dict[str, Entry | None], logs: dict[Place, Log], start: int = 0) -> list[str]:
        return unread(ledgers, logs, openings(ledgers, logs, dict.fromkeys(logs, start)))

    def test_a_sink_that_begins_behind_the_start_is_told_with_what_lies_before(self) -> None:
        ledgers: dict[str, Entry | None] = {
            "dead-letter": entry_at("dead-letter", {0: 40, 1: 10}),
            "new": None,
        }
        (line,) = self.told(ledgers, LOGS)
        assert line.startswith("sink 'new' is new and begins where the others stand: 50 offsets")
        assert "refill FILE new" in line
        assert self.told({"dead-letter": entry_at("dead-letter", {0: 0, 1: 0}), "new": None}, LOGS) == []

    def test_a_log_that_was_cut_before_the_first_run_is_told(self) -> None:
        logs = {place(0): Log(30, 100, 5), place(1): Log(0, 10, 6)}
        (line,) = self.told({"a": None, "b": None}, logs, 30)
        assert "the logs of 1 partitions do not begin at offset 0 (orders-0 at 30)" in line
        assert self.told({"a": None, "b": None}, LOGS) == []
        assert self.told({"a": entry_at("a", {0: 40, 1: 0})}, logs) == []


def test_lag_is_counted_from_the_sink_furthest_behind() -> None:
    ledgers = {"a": entry_at("a", {0: 50, 1: 10}), "b": entry_at("b", {0: 20, 1: 10})}
    assert remaining(ledgers, {place(0): 100, place(1): 10}) == 80


# ---------------------------------------------------------------------------- a model of crashes


@dataclass
class World:
    """Sinks that commit or do not, logs that grow, and a driver that forgets everything when it crashes."""

    chance: random.Random
    ends: dict[Place, int]
    ledgers: dict[str, Entry | None]
    held: dict[str, Counter[tuple[Place, int]]] = field(default_factory=dict)
    begun: dict[str, dict[Place, int]] = field(default_factory=dict)
    noted: Plan | None = None
    times: dict[tuple[Place, int], set[int]] = field(default_factory=dict)
    clock: int = 0

    def logs(self) -> dict[Place, Log]:
        return {where: Log(0, end, 1) for where, end in self.ends.items()}

    def crashes(self) -> bool:
        return self.chance.random() < 0.15

    def open_sinks(self) -> bool:
        for name, positions in openings(self.ledgers, self.logs(), dict.fromkeys(self.ends, 0)).items():
            last = self.ledgers[name]
            known = {} if last is None else dict(last.positions.at)
            self.ledgers[name] = Entry(
                "p",
                name,
                0 if last is None else last.number + 1,
                opening_range(positions),
                Positions({**known, **positions.at}),
                0,
                "f",
            )
            for where, at in positions.at.items():
                self.begun.setdefault(name, {})[where] = at.offset
            if self.crashes():
                return False
        return True

    def commit(self, name: str, plan: Plan) -> None:
        last = self.ledgers[name]
        assert last is not None
        assert plan.batch_time_ms is not None
        assert decide(name, last.positions, plan.range) is Decision.WRITE
        for where, span in plan.range.spans.items():
            self.held.setdefault(name, Counter()).update(
                (where, offset) for offset in range(span.start, span.end)
            )
        self.ledgers[name] = Entry(
            "p", name, last.number + 1, plan.range, last.positions.moved(plan.range), plan.batch_time_ms, "f"
        )

    def batch(self, limits: Limits) -> bool:
        """One turn of the loop; false when there was nothing to do."""
        if not self.open_sinks():
            return True
        plan = plan_batch(self.ledgers, self.logs(), limits, noted=self.noted)
        if plan is None:
            return False
        self.clock += 1
        plan = plan if plan.batch_time_ms is not None else replace(plan, batch_time_ms=self.clock)
        self.noted = plan
        self.check_not_crossing(plan)
        for name in plan.targets:
            if self.crashes():
                return True
            self.commit(name, plan)
        self.noted = None
        return True

    def check_not_crossing(self, plan: Plan) -> None:
        for entry in self.ledgers.values():
            assert entry is not None
            for where, span in plan.range.spans.items():
                at = entry.positions.at[where].offset
                assert not span.start < at < span.end


@settings(max_examples=examples(150))
@given(st.integers(0, 2**32 - 1), st.integers(1, 4), st.integers(1, 3))
def test_every_offset_reaches_every_sink_exactly_once_whatever_crashed(
    seed: int, sinks: int, partitions: int
) -> None:
    """The driver dies anywhere, loses its home at times, sinks and partitions are added, logs grow."""
    chance = random.Random(seed)
    names = [f"sink-{number}" for number in range(sinks)]
    world = World(
        chance, {place(number): chance.randrange(30) for number in range(partitions)}, dict.fromkeys(names)
    )
    for _ in range(60):
        limits = Limits(chance.choice([1, 3, 10, 1000]), 10**9)
        event = chance.random()
        if event < 0.2:
            world.ends[chance.choice(list(world.ends))] += chance.randrange(20)
        elif event < 0.23 and len(world.ends) < 6:
            world.ends[place(len(world.ends))] = chance.randrange(10)
        elif event < 0.26 and len(world.ledgers) < 6:
            world.ledgers[f"added-{len(world.ledgers)}"] = None
        elif event < 0.36:
            world.noted = None  # the home is lost
        else:
            world.batch(limits)
    world.chance = random.Random(0)
    world.crashes = lambda: False  # type: ignore[method-assign]
    for _ in range(100_000):
        if not world.batch(Limits(1000, 10**9)):
            break
    for name in world.ledgers:
        held = world.held.get(name, Counter())
        expected = {
            (where, offset)
            for where, end in world.ends.items()
            for offset in range(world.begun[name][where], end)
        }
        assert set(held) == expected
        assert not held or max(held.values()) == 1
    for name in names:
        assert set(world.begun[name].values()) == {0}  # only a sink that was added later starts later


def test_sinks_that_passed_each_other_meet_again() -> None:
    """Not reachable by batches of ours, yet no reason to be stuck: each catches up where it is behind."""
    ledgers: dict[str, Entry | None] = {"a": entry_at("a", {0: 50, 1: 2}), "b": entry_at("b", {0: 30, 1: 9})}
    world = World(random.Random(1), {place(0): 100, place(1): 10}, ledgers)
    world.crashes = lambda: False  # type: ignore[method-assign]
    while world.batch(ALL):
        pass
    assert {offset for where, offset in world.held["a"] if where.partition == 1} == set(range(2, 10))
    assert max(world.held["a"].values()) == max(world.held["b"].values()) == 1


class TestMemory:
    def test_a_sink_behind_takes_watermark_and_tables_of_the_one_ahead(self) -> None:
        taken = BatchRange({place(0): Span(40, 60, 5)})
        ahead = replace(
            entry_at("a", {0: 60, 1: 10}, taken, 77), watermark_ms=9, lookups={"users": "v3"}, state=4
        )
        plan = plan_batch({"a": ahead, "b": entry_at("b", {0: 40, 1: 10})}, LOGS, ALL)
        assert plan == Plan(taken, ("b",), 77, is_catch_up=True, watermark_ms=9, lookups={"users": "v3"})
        assert Plan.from_json(plan.as_json()) == plan

    def test_a_plan_of_before_is_readable(self) -> None:
        plan = Plan(BatchRange({place(0): Span(40, 60, 5)}), ("b",), 77)
        document = plan.as_json()
        del document["watermark_ms"], document["lookups"]
        assert Plan.from_json(document) == plan

    def test_entries_keep_what_a_memory_needs(self) -> None:
        entry = replace(
            entry_at("a", {0: 60}), state=4, lookups={"users": "v3"}, taps={"totals": {"taken": 5, "late": 1}}
        )
        assert Entry.from_json(entry.as_json()) == entry
        assert Entry.from_json(replace(entry, state=None).as_json()).state is None

    def test_entries_without_a_memory_are_as_they_were(self) -> None:
        entry = entry_at("a", {0: 60})
        assert not {"state", "lookups", "taps"} & set(entry.as_json())
        assert Entry.from_json(entry.as_json()).state == -1
        opening = replace(entry, number=0, state=None)
        assert "state" not in opening.as_json()
        assert Entry.from_json(opening.as_json()).state is None


class TestPieces:
    def test_what_was_seen_before_a_piece_is_of_its_own_partition_alone(self) -> None:
        pieces = (
            Piece(place(0), 3, 50),
            Piece(place(0), 2, None),
            Piece(place(0), 2, 40),
            Piece(place(1), 0, None),
            Piece(place(2), 4, None),
        )
        staged = Staged(Intake(), Tally(), Tally(), {}, pieces)
        assert staged.seen_before_ms({place(0): 45, place(1): 7}) == [45, 50, 50, 7, None]
        assert staged.seen_before_ms({place(0): 60}) == [60, 60, 60, None, None]
        assert staged.greatest_ms == {place(0): 50, place(2): None}


def test_a_state_is_told_when_it_is_large_and_each_time_it_has_doubled() -> None:
    growth = Growth()
    gib = 1024**3
    sizes = [gib - 1, gib, 2 * gib - 1, 2 * gib, 3 * gib, 4 * gib]
    told = [growth.message(StateNow(1, None, {"totals": (9, size - 8), "once": (1, 8)})) for size in sizes]
    assert [message is not None for message in told] == [False, True, False, True, False, True]
    assert growth.message(None) is None
    assert told[1] is not None
    assert "1.0 GiB of it (9 rows) of step 'totals'" in told[1]
