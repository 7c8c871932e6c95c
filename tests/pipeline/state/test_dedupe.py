"""Deduplication against a few lines of Python: which rows go on, and what is remembered, however the log is cut."""

from __future__ import annotations

import json
import random
from collections import defaultdict
from collections.abc import Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.state_batches import GAMES, Played, Player, Record, placed
from tests.support.tiers import by_tier

from holdfast.pipeline.core.failures import StepError, Unbalanced
from holdfast.pipeline.core.frames import raise_reported
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.definition.model import Dedupe, PipelineDefinition, Source
from holdfast.pipeline.digest import MASK, place_hash
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
        # Rows that are over go with their segment, or with the next merge.
        played.counters["expired"] + played.state.rows - len(memory),
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
        patch.setattr(dedupe, "SMALL_ROWS", chance.choice([0, len(log)]))
        patch.setattr(dedupe, "TASK_ROWS_MAX", chance.choice([7, len(log)]))
        patch.setattr(dedupe, "SLAB_ROWS", chance.choice([3, len(log)]))
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


# ---------------------------------------------------------------------------- what a task does

MOMENT = 300_000_000_000_000_000
"""Microseconds; Python's own times end some thousands of years before."""
VALUES: list[tuple[pa.DataType, Any, Any]] = [
    (pa.string(), "a", "b"),
    (pa.binary(), b"\xff", b"\xfe"),
    (pa.int64(), 2**62, 2**62 + 1),
    (pa.bool_(), True, False),
    (pa.decimal128(38, 2), Decimal("1.50"), Decimal("1.51")),
    (pa.date32(), -1_000_000, -1_000_001),
    (pa.timestamp("us", "UTC"), MOMENT, MOMENT + 1),
    (pa.timestamp("us"), -MOMENT, 1 - MOMENT),
    (pa.string(), None, ""),
]


def judged(
    path: Path, columns: Mapping[str, pa.Array], known: int, *, dead_to_ms: int | None = None
) -> tuple[dict[str, Any], list[int], pa.Table | None]:
    """The report of one task over rows of one time, the first `known` of the state; offsets that are duplicates; and
    what it keeps."""
    count = len(next(iter(columns.values())))
    places = [None] * known + list(range(count - known))
    batch = pa.record_batch(
        {
            "_h": pa.array([7] * count, pa.int64()),
            **columns,
            "_new": pa.array([offset is not None for offset in places]),
            "_hf_topic": pa.array([None if offset is None else "t" for offset in places]),
            "_hf_partition": pa.array([None if offset is None else 0 for offset in places], pa.int32()),
            "_hf_offset": pa.array(places, pa.int64()),
            "_hf_index": pa.array([None if offset is None else 0 for offset in places], pa.int32()),
            "_t": pa.array([100] * count, pa.int64()),
        }
    )
    for name in ("state", "places"):
        (path / name).mkdir(exist_ok=True)
    job = dedupe._Job(WITHIN_MS, tuple(columns), dead_to_ms, str(path / "state"), str(path / "places"))
    report = json.loads(next(dedupe._judge(job, [batch])).column("report")[0].as_py())
    assert "failure" not in report
    doubles = pq.read_table(report["places_file"]) if report["places_file"] else None
    offsets = [] if doubles is None else sorted(doubles.column("_hf_offset").to_pylist())
    assert report["doubled"] == [len(offsets), sum(place_hash("t", 0, each) for each in offsets) & MASK]
    return report, offsets, pq.read_table(report["state_file"]) if report["state_file"] else None


@pytest.mark.parametrize(("kind", "one", "other"), VALUES, ids=str)
def test_keys_with_the_same_hash_are_told_apart_by_value(
    tmp_path: Path, kind: pa.DataType, one: Any, other: Any
) -> None:
    keys = {"k": pa.array([one, one, other, other], kind), "n": pa.array([1, 1, 1, 1])}
    _, doubles, kept = judged(tmp_path, keys, 1)
    assert doubles == [0, 2]
    assert kept is not None
    assert kept.column("k").cast(kind).combine_chunks().equals(pa.array([other], kind))
    assert kept.column("_until").to_pylist() == [100 + 2 * WITHIN_MS]


def test_what_is_over_where_the_batch_ends_is_counted_and_not_kept(tmp_path: Path) -> None:
    report, doubles, kept = judged(
        tmp_path, {"k": pa.array(["a", "a", "b"])}, 0, dead_to_ms=100 + 2 * WITHIN_MS
    )
    assert (report["dead"], doubles, kept) == (2, [1], None)


def test_a_task_without_rows_reports_nothing_and_leaves_no_file(tmp_path: Path) -> None:
    job = dedupe._Job(WITHIN_MS, ("k",), None, str(tmp_path), str(tmp_path))
    report = json.loads(next(dedupe._judge(job, [])).column("report")[0].as_py())
    assert report == {"doubled": [0, 0], "dead": 0, "state_file": None, "places_file": None}
    assert not list(tmp_path.iterdir())


def test_a_disk_that_fails_a_task_is_told_as_it_was(tmp_path: Path) -> None:
    gone = str(tmp_path / "gone")
    job = dedupe._Job(WITHIN_MS, ("k",), None, gone, gone)
    rows = pa.record_batch({"_h": pa.array([1]), "k": pa.array(["a"]), "_new": pa.array([True])})
    for name, kind in (("_hf_topic", pa.string()), ("_hf_partition", pa.int32())):
        rows = rows.append_column(name, pa.array([None], kind))
    for name in ("_hf_offset", "_hf_index", "_t"):
        rows = rows.append_column(name, pa.array([1], pa.int64()))
    report = json.loads(next(dedupe._judge(job, [rows])).column("report")[0].as_py())
    with pytest.raises(FileNotFoundError, match="gone"):
        raise_reported([report])


def test_a_batch_that_is_not_small_is_judged_by_tasks_alike(
    player: Player, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe, "SMALL_ROWS", 0)
    monkeypatch.setattr(dedupe, "TASK_ROWS_MAX", 2)
    played = player.play(once(), TELLING, CUTS)
    assert as_expected(played, spark) == expected(TELLING)


def test_a_batch_that_spark_does_not_count_on_the_way_is_counted_after_it(
    player: Player, spark: SparkSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dedupe, "metrics_of", lambda observation: None)
    played = player.play(once(), TELLING)
    assert as_expected(played, spark) == expected(TELLING)


def test_rows_that_no_task_accounts_for_stop_the_batch(
    player: Player, monkeypatch: pytest.MonkeyPatch
) -> None:
    judged = dedupe._judged
    monkeypatch.setattr(dedupe, "_judged", lambda job, batches: {**judged(job, batches), "dead": 1})
    with pytest.raises(Unbalanced, match="of 4 rows"):
        player.play(once(), TELLING, CUTS)


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
