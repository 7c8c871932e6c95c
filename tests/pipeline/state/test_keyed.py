"""Keyed steps on Spark: rows dealt to workers, functions from files, late rows, versions of state."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from tests.support.state_batches import HF_DDL, Played, Player, Record

from holdfast.errors import UsageError
from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.definition.model import EventTime, Keyed
from holdfast.pipeline.keyed import KeyState, each_row
from holdfast.pipeline.state import keyed, segments
from holdfast.pipeline.state.keyed import KeyedOperator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EVENT_TIME = EventTime("at")
COLUMNS = "user string, amount bigint"

RULES = """
from datetime import timedelta

from helpers import GAP, longest
from holdfast.pipeline.keyed import each_row


@each_row
def watch(key, row, state):
    value = state.value
    if row is None:
        state.clear()
        return {"total": value["total"], "longest": value["names"][-1], "until": state.fired}
    names = value["names"] if value else []
    state.put({
        "total": (value["total"] if value else 0) + row["amount"],
        "names": longest([*names, f"{row['user']}{row['amount']}"]),
        "since": value["since"] if value else row["_event_time"],
        "last": {"amount": row["amount"]},
    })
    state.set_timer(row["_event_time"] + timedelta(milliseconds=GAP))
"""
HELPERS = """
GAP = 20

def longest(names):
    return sorted(set(names), key=lambda name: (len(name), name))
"""


def step(function: Any, **others: Any) -> Keyed:
    settings: dict[str, Any] = {
        "key": ("user",),
        "schema": "user string, n bigint",
        "state": "n bigint",
        **others,
    }
    return Keyed("rule", function=function, **settings)


def counting(key: tuple[Any, ...], rows: pa.Table, state: KeyState) -> list[dict[str, Any]]:
    n = (state.value or {"n": 0})["n"]
    state.put({"n": n + rows.num_rows})
    return [{"n": n + number} for number in range(1, rows.num_rows + 1)]


def log_of(*parts: tuple[int | None, str | None, int], partition: int = 0) -> list[Record]:
    return [Record(at, {"user": user, "amount": amount}, partition) for at, user, amount in parts]


def content(played: Played, *names: str) -> list[tuple[Any, ...]]:
    return sorted((tuple(row[name] for name in names) for row in played.rows), key=repr)


def at_ms(time_ms: int) -> datetime:
    return datetime.fromtimestamp(time_ms / 1000, UTC)


@pytest.fixture
def player(spark: SparkSession, tmp_path: Path) -> Player:
    return Player(spark, str(tmp_path), COLUMNS)


@pytest.fixture(autouse=True)
def few_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keyed, "BUCKETS", 3)


def test_a_function_of_a_file_gives_the_same_in_any_batches(player: Player, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES)
    (tmp_path / "helpers.py").write_text(HELPERS)
    rule = step(
        "watch",
        file="rules.py",
        schema="user string, total bigint, longest string, until timestamp",
        state="total bigint, names array<string>, since timestamp, last struct<amount:bigint>",
    )
    log = log_of(
        *((100, "ann", 1), (105, "bob", 20), (110, "ann", 300), (131, "cat", 4), (132, "ann", 5)),
        *((200, "bob", 6), (201, None, 7), (230, "dan", 8)),
    )
    operator = KeyedOperator(rule, EVENT_TIME, str(tmp_path))
    whole = player.play(operator, log)
    cut = player.play(operator, log, [0, 3, 5], twice={2})
    names = ("user", "total", "longest", "until", "_timestamp", "_key")
    assert content(cut, *names) == content(whole, *names)
    assert content(whole, "user", "total", "longest") == [
        ("ann", 301, "ann300"),
        ("ann", 5, "ann5"),
        ("bob", 20, "bob20"),
        ("bob", 6, "bob6"),
        ("cat", 4, "cat4"),
        (None, 7, "None7"),
    ]
    assert cut.counters == whole.counters
    assert cut.state.notes["keys"] == whole.state.notes["keys"] == 1


MINUTE = 60_000


@each_row
def visit(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any]:
    """How many rows came so far; a visit is over when none came for half an hour, and ann's never is."""
    n = (state.value or {"n": 0})["n"]
    if row is None:
        state.clear()
        return {"n": -n}
    state.put({"n": n + 1})
    if key != ("ann",):
        state.set_timer(row["_event_time"] + timedelta(minutes=30))
    return {"n": n + 1}


@pytest.mark.parametrize("fan_in", [2, pytest.param(8, marks=pytest.mark.long)])
def test_a_batch_that_passes_the_end_of_a_whole_segment_still_uses_it(
    player: Player, monkeypatch: pytest.MonkeyPatch, fan_in: int
) -> None:
    """Its timers are due in that very batch, and rows in front of the jump belong to its keys."""
    monkeypatch.setattr(segments, "FAN_IN", fan_in)
    log = log_of(
        *((1 * MINUTE, "ann", 1), (2 * MINUTE, "bob", 1), (3 * MINUTE, "cat", 1), (4 * MINUTE, "bob", 1)),
        *((20 * MINUTE, "ann", 1), (21 * MINUTE, "cat", 1), (600 * MINUTE, "dan", 1)),
        *((601 * MINUTE, "ann", 1), (602 * MINUTE, "bob", 1)),
    )
    operator = KeyedOperator(step(visit, ttl="1h"), EventTime("at", ahead="30d"), ".")
    small = player.play(operator, log, range(1, len(log)))
    jumps = player.play(operator, log, [2, 4], twice={2})
    assert content(small, "user", "n") == [
        *(("ann", 1), ("ann", 1), ("ann", 2), ("bob", -2), ("bob", 1), ("bob", 1), ("bob", 2)),
        *(("cat", -2), ("cat", 1), ("cat", 2), ("dan", 1)),
    ]
    assert content(jumps, "user", "n", "_timestamp") == content(small, "user", "n", "_timestamp")
    assert jumps.counters == small.counters == {"expired": 1, "fired": 2}
    assert jumps.state.notes["keys"] == small.state.notes["keys"] == 3
    assert {segment.high_ms > 602 * MINUTE for segment in jumps.state.segments} == {True}


def test_rows_have_the_layout_that_sinks_take(spark: SparkSession, player: Player) -> None:
    operator = KeyedOperator(step(counting), EVENT_TIME, ".")
    schemas = operator.schemas(spark, ddl_schema(f"{HF_DDL}, {COLUMNS}"))
    assert schemas[""].names == ["_hf", "_key", "_timestamp", "_tombstone", "_headers", "user", "n"]
    played = player.play(operator, log_of((1, "ann", 1), (2, "ann", 1), (3, "bob", 1)), [1])
    last = next(row for row in played.rows if row["user"] == "ann" and row["n"] == 2)
    assert (last["_key"], last["_tombstone"], last["_headers"]) == (b"ann", False, None)
    assert (last["_hf"]["topic"], last["_hf"]["partition"], last["_hf"]["offset"]) == ("rule", 0, 2)


def test_rows_behind_the_time_to_live_or_without_a_time_are_late(player: Player) -> None:
    log = log_of((100, "ann", 1), (50, "bob", 1), (51, "bob", 1), (None, "cat", 1), (101, "dan", 1))
    played = player.play(KeyedOperator(step(counting, ttl="50ms"), EVENT_TIME, "."), log, [2])
    assert played.late == [("t", 0, 1), ("t", 0, 3)]
    assert content(played, "user", "n") == [("ann", 1), ("bob", 1), ("dan", 1)]
    assert played.state.notes["keys"] == 2  # of bob nothing is younger than the watermark less 50 ms
    assert played.counters["expired"] == 1


def test_keys_of_several_columns_and_types(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(segments, "FAN_IN", 2)
    player = Player(
        spark, str(tmp_path), "a bigint, b date, c binary, d decimal(6,2), e boolean, f timestamp"
    )
    keys = ("a", "b", "c", "d", "e", "f")
    day, moment = at_ms(0).date(), at_ms(5)
    log = [
        Record(1 + number, dict(zip(keys, values, strict=True)))
        for number, values in enumerate(
            [
                (1, day, b"x", 1, True, moment),
                (1, day, b"x", 1, True, None),
                (1, day, b"x", None, True, moment),
                (None, None, None, None, None, None),
            ]
        )
    ]
    rule = step(counting, key=keys, schema="a bigint, d decimal(6,2), n bigint")
    played = player.play(KeyedOperator(rule, EVENT_TIME, "."), [*log, *log], [2, 4, 6])
    assert sorted(row["n"] for row in played.rows) == [1, 1, 1, 1, 2, 2, 2, 2]
    assert played.state.notes["keys"] == 4
    found = {row["_key"] for row in played.rows}
    assert b'["1","1970-01-01","eA==","1.00","true","1970-01-01 00:00:00.005"]' in found
    assert b"[null,null,null,null,null,null]" in found


def test_segments_are_merged_and_keys_counted_once(player: Player, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segments, "FAN_IN", 2)
    log = log_of(*((number, f"user-{number % 5}", 1) for number in range(16)))
    operator = KeyedOperator(step(counting), EVENT_TIME, ".")
    played = player.play(operator, log, [4, 8, 12], twice={2})
    assert content(played, "user", "n") == sorted((f"user-{n % 5}", n // 5 + 1) for n in range(16))
    assert [segment.tier for segment in played.state.segments] == [1, 0, 0]
    assert played.state.notes["keys"] == 5


def test_a_failing_function_ends_the_turn_with_its_key_and_line(player: Player) -> None:
    @each_row
    def fails(key: tuple[str], row: dict[str, Any], state: KeyState) -> None:
        if row["amount"] == 3:
            raise ValueError("three is too much")

    with pytest.raises(StepError) as raised:
        player.play(KeyedOperator(step(fails), EVENT_TIME, "."), log_of((1, "ann", 1), (2, "bob", 3)))
    assert "raised ValueError: three is too much, for the key ('bob',)" in str(raised.value)
    assert "test_keyed.py, line" in str(raised.value)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"key": ()}, "it has no key"),
        ({"key": ("nobody",)}, "no column 'nobody'"),
        ({"key": ("share",)}, "'share' is double, which cannot be a key"),
        ({"schema": ""}, "its schema names no columns"),
        ({"schema": "n wrong"}, "its schema 'n wrong'"),
        ({"schema": "_n bigint"}, "its schema names '_n'"),
        ({"schema": "n bigint, N string"}, "its schema names 'n' twice"),
        ({"state": ""}, "its state names no columns"),
        ({"state": "n array<variant>"}, "its state has 'n' as array<variant>"),
        ({"function": lambda key, rows: None}, "is called with key, rows and state"),
    ],
)
def test_a_step_that_cannot_work_is_refused_before_it_runs(
    spark: SparkSession, others: dict[str, Any], message: str
) -> None:
    function = others.get("function", counting)
    rule = step(function, **{name: each for name, each in others.items() if name != "function"})
    with pytest.raises(StepError, match=message):
        KeyedOperator(rule, EVENT_TIME, ".").schemas(
            spark, ddl_schema(f"{HF_DDL}, user string, share double")
        )


def test_a_function_that_is_not_there_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    (tmp_path / "rules.py").write_text(RULES.replace("from helpers import GAP, longest", "GAP = 1"))
    operator = KeyedOperator(step("nothing", file="rules.py"), EVENT_TIME, str(tmp_path))
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        operator.schemas(spark, ddl_schema(f"{HF_DDL}, {COLUMNS}"))
