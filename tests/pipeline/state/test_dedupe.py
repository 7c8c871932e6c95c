"""Deduplication against a few lines of Python: which rows go on, and what is remembered, however the log is cut."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.state_batches import GAMES, Played, Player, Record, placed
from tests.support.tiers import by_tier

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.definition.model import Dedupe, PipelineDefinition, Source
from holdfast.pipeline.state import dedupe
from holdfast.pipeline.state.dedupe import Chain, DedupeOperator
from holdfast.pipeline.state.operator import operator_of
from holdfast.pipeline.state.watermarks import Clock

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WITHIN_MS = 10
DELAY_MS = 4
CUTS_MAX = by_tier(quick=2, check=2, long=3)
MEMORY_DDL = "k string, _t bigint, _until bigint"


def once(**changes: Any) -> DedupeOperator:
    return DedupeOperator(Dedupe("once", **{"key": ("k",), "within": f"{WITHIN_MS}ms", **changes}))


def at(time_ms: int | None, key: str | None = "a", partition: int = 0) -> Record:
    return Record(time_ms, {"k": key, "n": 1}, partition)


@pytest.fixture
def player(spark: SparkSession, tmp_path: Path) -> Player:
    return Player(spark, str(tmp_path), "k string, n int", DELAY_MS)


# ---------------------------------------------------------------------------- the rule, in plain Python


class Expected(NamedTuple):
    went_on: list[tuple[str, int, int]]
    late: list[tuple[str, int, int]]
    duplicates: list[tuple[str, int, int]]
    remembered: list[tuple[str, int]]
    expired: int


def expected(log: Sequence[Record]) -> Expected:
    """Keys of these logs stay in their partitions, so the log's own order is the order of every key."""
    clock = Clock(delay_ms=DELAY_MS)
    kept: dict[str, list[int]] = defaultdict(list)
    on, late, doubles = [], [], []
    for each in placed(log, clock):
        key, time_ms = each.record.values["k"], each.record.time_ms
        if key is None:
            on.append(each.place)
        elif time_ms is None or each.is_late_for(time_ms + WITHIN_MS):
            late.append(each.place)
        elif any(abs(time_ms - other) < WITHIN_MS for other in kept[key]):
            doubles.append(each.place)
        else:
            kept[key].append(time_ms)
            on.append(each.place)
    greatest: dict[int, int] = {}
    for record in log:
        if record.time_ms is not None:
            greatest[record.partition] = max(record.time_ms, greatest.get(record.partition, record.time_ms))
    everywhere = {record.partition for record in log} == set(greatest)
    watermark_ms = min(greatest.values()) - DELAY_MS if greatest and everywhere else None
    entries = [(key, time_ms) for key, times in kept.items() for time_ms in times]
    alive = [(k, t) for k, t in entries if watermark_ms is None or t + 2 * WITHIN_MS > watermark_ms]
    return Expected(sorted(on), sorted(late), sorted(doubles), sorted(alive), len(entries) - len(alive))


def as_expected(played: Played, spark: SparkSession) -> Expected:
    memory = played.memory(spark, MEMORY_DDL)
    assert all(row["_until"] == row["_t"] + 2 * WITHIN_MS for row in memory)
    return Expected(
        played.places,
        sorted(played.late),
        sorted(played.duplicates),
        sorted((row["k"], row["_t"]) for row in memory),
        played.counters["expired"],
    )


# ---------------------------------------------------------------------------- however the log is cut

KEYS = "abcdef"


def log_of(chance: random.Random) -> list[Record]:
    """Time goes on, with steps back: some rows are early, some in disorder, some late, a few without time or key."""
    log = []
    for number in range(chance.randrange(50, 120)):
        key = chance.choice(KEYS)
        time_ms = 100 + number + chance.randint(-18, 9)
        lost = chance.random()
        log.append(
            at(None if lost < 0.03 else time_ms, None if lost > 0.95 else key, partition=KEYS.index(key) % 2)
        )
    return log


@settings(
    max_examples=GAMES,
    phases=[Phase.generate],  # a smaller seed is no smaller log
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(min_value=0, max_value=2**32))
def test_rows_and_memory_are_those_of_the_rule_in_any_batching(
    player: Player, spark: SparkSession, seed: int
) -> None:
    chance = random.Random(seed)
    log = log_of(chance)
    cuts = chance.sample(range(len(log)), chance.randint(1, CUTS_MAX))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dedupe, "SIFTED_ROWS_MIN", chance.choice([0, len(log)]))
        played = player.play(once(), log, cuts, twice={1})

    assert as_expected(played, spark) == expected(log)


TELLING = [
    at(100),
    at(105),  # a duplicate in its batch
    at(120),  # within of none
    at(112),  # nearer than `within` to 120, though not to 100
    # cut here
    at(109),  # not late, and a duplicate of the very first: the memory must reach back twice `within`
    at(131),
    at(130, "b"),
    # cut here
    at(129, "b"),
    at(90),  # late
    at(None),
    at(105, None),
]
CUTS = [4, 7]


@pytest.mark.long
def test_telling_log(player: Player, spark: SparkSession) -> None:
    played = player.play(once(), TELLING, CUTS)

    assert as_expected(played, spark) == expected(TELLING)
    assert [offset for _, _, offset in played.duplicates] == [1, 3, 4, 7]
    assert [offset for _, _, offset in played.late] == [8, 9]
    assert [row["n"] for row in played.rows] == [1] * 5


@pytest.mark.long
def test_a_memory_that_forgets_is_found_out(player: Player, spark: SparkSession) -> None:
    played = player.play(once(), TELLING, CUTS, forgets=True)

    assert as_expected(played, spark) != expected(TELLING)


@pytest.mark.long
def test_a_memory_that_lets_go_too_early_is_found_out(
    player: Player, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe, "REACH", 1)

    played = player.play(once(), TELLING, CUTS)

    assert as_expected_places(played) != expected(TELLING)[:3]


def as_expected_places(played: Played) -> tuple[Any, ...]:
    return played.places, sorted(played.late), sorted(played.duplicates)


# ---------------------------------------------------------------------------- keys


def test_by_id_of_the_spool_and_rows_without_one_go_on(player: Player, spark: SparkSession) -> None:
    def sent(time_ms: int, number: bytes | None) -> Record:
        headers = () if number is None else (("trace", b"x"), ("hf-id", number))
        return Record(time_ms, {"k": "a", "n": 1}, headers=headers)

    log = [sent(1, b"s/0/1"), sent(2, None), sent(3, b"s/0/2"), sent(4, b"s/0/1"), sent(5, None)]

    played = player.play(once(key=(), by="hf-id"), log, [2])

    assert [offset for _, _, offset in played.duplicates] == [3]
    assert [offset for _, _, offset in played.places] == [0, 1, 2, 4]


def test_keys_of_several_columns_and_types(spark: SparkSession, tmp_path: Path) -> None:
    """Not-a-number equals itself, zero has no sign, and null is a value beside others."""
    player = Player(spark, str(tmp_path), "d double, b binary, w timestamp", DELAY_MS)
    nan = float("nan")
    keys: list[tuple[float | None, bytes | None]] = [
        (nan, b"1"),
        (0.0, b"1"),
        (None, b"1"),
        (None, None),
        (nan, b"1"),
        (-0.0, b"1"),
        (None, b"1"),
        (None, None),
        (nan, b"2"),
    ]
    log = [Record(1, {"d": d, "b": b, "w": None}) for d, b in keys]

    played = player.play(once(key=("d", "b", "w")), log, [3])

    assert [offset for _, _, offset in played.duplicates] == [4, 5, 6]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"key": ("gone",)}, "no column 'gone'"),
        ({"key": ()}, "no key"),
        ({"key": ("m",)}, "simple values"),
        ({"within": "0s"}, "nothing is that near"),
    ],
)
def test_what_cannot_be_a_key_is_told(spark: SparkSession, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StepError, match=words):
        once(**changes).schemas(spark, ddl_schema("k string, m map<string,int>"))


def test_without_event_time_there_is_no_within() -> None:
    definition = PipelineDefinition("p", Source(("t",)), steps=(Dedupe("once", ("k",)),))
    with pytest.raises(StepError, match="event_time"):
        operator_of(definition.steps[0], definition)


# ---------------------------------------------------------------------------- the chain


@given(
    st.lists(st.integers(min_value=-50, max_value=50), max_size=30), st.integers(min_value=1, max_value=12)
)
def test_a_chain_is_the_rule_of_one_key(times: list[int], within_ms: int) -> None:
    chain, kept = Chain(within_ms), list[int]()

    for time_ms in times:
        is_first = all(abs(time_ms - other) >= within_ms for other in kept)
        assert chain.goes_on(time_ms) == is_first
        if is_first:
            kept.append(time_ms)
