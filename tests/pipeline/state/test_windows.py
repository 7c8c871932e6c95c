"""What a window step gives out, remembers and refuses, turn by turn."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from tests.support.state_batches import HF_DDL, Played, Player, Record

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.digest import MASK, Tally, place_hash
from holdfast.pipeline.state import segments, window_state, windows
from holdfast.pipeline.state.operator import OperatorContext
from holdfast.pipeline.state.segments import StepState
from holdfast.pipeline.state.store import StateStore
from holdfast.pipeline.state.window_state import spans_of
from holdfast.pipeline.state.windows import WindowOperator

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

DDL = "k string, v bigint"
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


def step(**changes: Any) -> Window:
    options: dict[str, Any] = {"aggregates": {"n": "count(*)"}, "size": "10ms", "key": ("k",), **changes}
    return Window("w", **options)


def at(time_ms: int | None, key: str | None = "a", value: int = 1) -> Record:
    return Record(time_ms, {"k": key, "v": value})


@pytest.fixture
def player(spark: SparkSession, tmp_path: Path) -> Player:
    return Player(spark, str(tmp_path), DDL)


def told(played: Played, *names: str) -> list[tuple[Any, ...]]:
    """Rows as (turn, key, start, end, …)."""
    return [
        (
            row["_hf"]["offset"],
            row["k"],
            *(_ms(row[name]) for name in ("window_start", "window_end")),
            *(row[name] for name in names or ("n",)),
        )
        for row in played.rows
    ]


def _ms(time: datetime) -> int:
    return round((time.replace(tzinfo=time.tzinfo or UTC) - EPOCH) / timedelta(milliseconds=1))


# ---------------------------------------------------------------------------- when windows are given out


def test_a_window_is_given_out_in_the_turn_whose_end_it_closes_by(
    player: Player, spark: SparkSession
) -> None:
    log = [at(3), at(9), at(5, "b"), at(12), at(14), at(20)]

    played = player.play(WindowOperator(step()), log, [2, 4, 5])

    assert told(played) == [(2, "a", 0, 10, 2), (2, "b", 0, 10, 1), (4, "a", 10, 20, 2)]
    first = played.rows[0]
    assert first["_hf"] == {"topic": "w", "partition": 0, "offset": 2, "index": 0}
    assert first["_hf_count"] == 2
    assert first["_hf_digest"] & MASK == (place_hash("t", 0, 0) + place_hash("t", 0, 1)) & MASK
    assert played.counters["closed"] == 3
    assert [row["_n"] for row in played.memory(spark, "_n bigint, _until bigint")] == [1]


def test_rows_and_schemas_are_what_was_announced(player: Player, spark: SparkSession) -> None:
    operator = WindowOperator(step(aggregates={"n": "count(*)", "s": "sum(v)"}))
    rows = ddl_schema(f"{HF_DDL}, {DDL}")

    schemas = operator.schemas(spark, rows)

    assert schemas["late"] == rows
    assert schemas[""].simpleString() == (
        "struct<_hf:struct<topic:string,partition:int,offset:bigint,index:int>,_key:binary,_timestamp:timestamp,"
        "_tombstone:boolean,_headers:array<struct<key:string,value:binary>>,k:string,window_start:timestamp,"
        "window_end:timestamp,n:bigint,s:bigint,_hf_count:bigint,_hf_digest:bigint>"
    )


def test_late_rows_and_rows_without_time_are_routed_and_counted_by_window(player: Player) -> None:
    log = [at(3), at(25), at(4, "late"), at(None, "timeless"), at(14, "late"), at(13, "late"), at(26)]

    played = player.play(WindowOperator(step()), log, [2])

    assert [place[2] for place in played.late] == [2, 3, 4, 5]
    assert told(played) == [(1, "a", 0, 10, 1)]
    assert played.counters["late_windows"] == 2
    assert played.state.notes == {"late": 4, "late_windows": {"0": 1, "10": 2}}


def test_a_late_row_reopens_its_window_where_it_may_be_corrected(player: Player) -> None:
    operator = WindowOperator(step(late="correct", correct_within="20ms"))
    log = [at(3), at(4, "b"), at(15), at(5), at(32), at(6)]

    played = player.play(operator, log, [3, 4, 5])

    assert told(played) == [
        (1, "a", 0, 10, 1),
        (1, "b", 0, 10, 1),
        (2, "a", 0, 10, 2),  # corrected, and b is not given out again
        (3, "a", 10, 20, 1),
    ]
    assert [place[2] for place in played.late] == [5]  # 20 ms after its end
    assert (played.counters["closed"], played.counters["corrected"]) == (3, 1)


def test_changes_are_given_out_as_windows_stand(player: Player) -> None:
    log = [at(1), at(2, "b"), at(3), at(11), at(4)]

    played = player.play(WindowOperator(step(emit="changes")), log, [2, 4])

    assert told(played) == [(1, "a", 0, 10, 1), (1, "b", 0, 10, 1), (2, "a", 0, 10, 2), (2, "a", 10, 20, 1)]
    assert [place[2] for place in played.late] == [4]


def test_sliding_windows_share_rows_and_each_counts_them(player: Player) -> None:
    operator = WindowOperator(step(kind="sliding", size="10ms", every="5ms"))

    played = player.play(operator, [at(7), at(12), at(8), at(30)], [2])

    # 8 came when the window that ended at 10 was over for its partition, and the one that ended at 15 was not.
    assert told(played) == [(1, "a", 0, 10, 1), (2, "a", 5, 15, 3), (2, "a", 10, 20, 1)]
    assert played.late == []


def test_windows_without_key_are_of_all_rows(player: Player) -> None:
    played = player.play(WindowOperator(step(key=())), [at(1), at(2, "b"), at(None), at(11)], [1])

    key = b'{"window_start":"1970-01-01T00:00:00.000000Z"}'
    assert [(row["n"], row["_key"]) for row in played.rows] == [(2, key)]


# ---------------------------------------------------------------------------- sessions


def test_a_session_goes_on_while_rows_touch_it_though_its_first_pieces_are_over(
    player: Player, spark: SparkSession
) -> None:
    operator = WindowOperator(step(kind="session", gap="5ms", aggregates={"n": "count(*)", "s": "sum(v)"}))
    log = [
        at(0, value=1),
        at(4, value=2),
        at(8, value=4),
        at(12, value=8),
        at(17, value=16),
        at(40, value=32),
    ]

    played = player.play(operator, log, [1, 2, 3, 4, 5])

    assert told(played, "n", "s") == [(6, "a", 0, 22, 5, 31)]
    assert sum(row["_n"] for row in played.memory(spark, "_n bigint, _until bigint")) == 1


def test_a_session_that_became_part_of_another_is_taken_back(player: Player) -> None:
    operator = WindowOperator(step(kind="session", gap="5ms", emit="changes"))
    player.clock = type(player.clock)(delay_ms=20)

    played = player.play(operator, [at(10), at(18), at(14)], [2])

    assert told(played, "n", "_tombstone", "_hf_count") == [
        (1, "a", 10, 15, 1, False, 1),
        (1, "a", 18, 23, 1, False, 1),
        (2, "a", 10, 23, 3, False, 3),
        (2, "a", 18, 23, None, True, 0),
    ]


# ---------------------------------------------------------------------------- state


def test_an_empty_batch_closes_what_the_watermark_has_passed(spark: SparkSession, tmp_path: Path) -> None:
    rows = spark.createDataFrame([], ddl_schema(f"{HF_DDL}, {DDL}"))
    store, operator = StateStore(str(tmp_path / "state")), WindowOperator(step())
    full = rows.sparkSession.sql(
        "SELECT named_struct('topic', 't', 'partition', 0, 'offset', 0L, 'index', 0, 'timestamp', timestamp_millis(0), "
        "'key', CAST(NULL AS BINARY), 'headers', CAST(array() AS ARRAY<STRUCT<key: STRING, value: BINARY>>), "
        "'tombstone', false, 'raw', CAST(NULL AS BINARY), 'event_time', timestamp_millis(5), 'watermark', "
        "CAST(NULL AS TIMESTAMP)) AS _hf, 'a' AS k, 1L AS v"
    )

    first = operator.run(
        full, OperatorContext(spark, store, StepState(), 0, None, 5, 1, str(tmp_path), "one")
    )
    second = operator.run(rows, OperatorContext(spark, store, first.state, 1, 5, 60, 2, str(tmp_path), "two"))

    assert (first.row_count, first.taken) == (0, Tally(1, place_hash("t", 0, 0)))
    assert (second.row_count, second.taken, second.late) == (1, Tally(), Tally())
    assert second.state.segments == ()
    assert second.counters["expired"] == 1


@pytest.mark.parametrize("kind", ["tumbling", pytest.param("session", marks=pytest.mark.long)])
def test_segments_become_one_and_hold_the_same(
    player: Player, spark: SparkSession, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(segments, "FAN_IN", 2)
    player.clock = type(player.clock)(delay_ms=1000)
    operator = WindowOperator(step(kind=kind, gap="10ms", aggregates={"d": "count(DISTINCT v)"}))
    log = [at(3, value=1), at(4, value=2), at(5, value=1), at(6, "b", value=3)]

    played = player.play(operator, log, [1, 2, 3])

    memory = played.memory(spark, "k string, _n bigint, _until bigint, _p0 array<bigint>")
    assert len(played.state.segments) == 1
    assert [(row["k"], row["_n"], sorted(row["_p0"])) for row in memory] == [("a", 3, [1, 2]), ("b", 1, [3])]


def test_many_rows_are_merged_and_numbered_by_many_tasks(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "ROWS_FOR_ONE_TASK", 0)
    monkeypatch.setattr(window_state, "ROWS_FOR_ONE_TASK", 0)
    log = [at(number % 20, f"k{number % 7}") for number in range(40)] + [at(50)]

    played = player.play(WindowOperator(step(late="correct")), log, [15, 30])

    newest = {(row["k"], _ms(row["window_start"])): row["n"] for row in played.rows}
    assert sum(newest.values()) == 40
    assert len(newest) == 14


def test_a_batch_that_touches_little_looks_only_for_that(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(windows, "ROWS_TO_LOOK_UP", 1)
    log = [at(1), at(1, None), at(1, "c"), at(2, None)]

    played = player.play(WindowOperator(step(emit="changes")), log, [3])

    assert told(played)[-1] == (2, None, 0, 10, 2)


# ---------------------------------------------------------------------------- refusals


def test_a_sum_too_large_stops_with_the_name_of_the_step(player: Player) -> None:
    operator = WindowOperator(step(aggregates={"s": "sum(v)"}))

    with pytest.raises(StepError, match=r"step 'w': a number is too large .*DECIMAL"):
        player.play(operator, [at(1, value=2**62), at(2, value=2**62), at(30)], [1])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"key": ("nobody",)}, "no column 'nobody'"),
        ({"aggregates": {}}, "no aggregates"),
        ({"aggregates": {"K": "count(*)"}}, "'K'"),
        ({"aggregates": {"window_end": "count(*)"}}, "'window_end'"),
        ({"aggregates": {"_n": "count(*)"}}, "underscore"),
    ],
)
def test_columns_that_cannot_be_are_refused(spark: SparkSession, changes: dict[str, Any], said: str) -> None:
    operator = WindowOperator(step(**changes))

    with pytest.raises(StepError, match=said):
        operator.schemas(spark, ddl_schema(f"{HF_DDL}, {DDL}"))


@pytest.mark.parametrize(
    "changes",
    [
        {"size": None},
        {"kind": "session"},
        {"kind": "sliding"},
        {"kind": "sliding", "every": "11ms"},
        {"size": "0s"},
    ],
)
def test_windows_without_length_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(StepError, match="step 'w'"):
        spans_of(step(**changes))
