"""Windows against Spark's own batch SQL: the same windows however the log is cut and whichever turns are repeated.

The oracle computes every window at once, over the rows that are not late by their own log, with Spark's `window` and
`session_window`. Planted errors have to be found by the same comparison.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.state_batches import GAMES, Played, Player, Record, placed

from holdfast.pipeline.definition.model import Window
from holdfast.pipeline.digest import MASK, place_hash
from holdfast.pipeline.state.operator import OperatorContext, OperatorResult
from holdfast.pipeline.state.watermarks import Clock
from holdfast.pipeline.state.windows import WindowOperator

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

DELAY_MS = 6
GAP_MS = 5
HOLD_MS = 12
EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
DDL = "k string, v int, x string"
KINDS: Mapping[str, Mapping[str, str]] = {
    "tumbling": {"size": "10ms"},
    "sliding": {"size": "10ms", "every": "4ms"},
    "session": {"gap": f"{GAP_MS}ms"},
}
MODES: Mapping[str, Mapping[str, str]] = {
    "closed": {},
    "changes": {"emit": "changes"},
    "correct": {"late": "correct", "correct_within": f"{HOLD_MS}ms"},
}
AGGREGATES = {
    "n": "count(*)",
    "total": "sum(v)",
    "low": "min(v) FILTER (WHERE x <> 'p')",
    "mean": "avg(v)",
    "kinds": "count(DISTINCT x)",
    "opening": "first(x, true)",
    "final": "last(x)",
    "each": "sum(v) / count(*)",
}
FEW = {name: AGGREGATES[name] for name in ("n", "total", "kinds", "final")}
GENERAL = {"n": "count(*)", "middle": "percentile(v, 0.5)", "final": "last(x)"}
ORDER = "struct(t, topic, partition, offset)"
ORACLE = {
    **{name: AGGREGATES[name] for name in ("n", "total", "low", "mean", "kinds", "each")},
    "middle": GENERAL["middle"],
    "opening": f"min_by(x, {ORDER}) FILTER (WHERE x IS NOT NULL)",
    "final": f"max_by(x, {ORDER})",
}


def step_of(kind: str, mode: str, aggregates: Mapping[str, str] = AGGREGATES) -> Window:
    options: dict[str, Any] = {"kind": kind, **KINDS[kind], **MODES[mode]}
    return Window("w", aggregates, key=("k",), **options)


# ---------------------------------------------------------------------------- the oracle


@dataclass(frozen=True)
class Expected:
    given: list[dict[str, Any]]
    """The windows as they stand in the end, of those that are given out."""
    late: list[tuple[str, int, int]]
    kept: list[tuple[str | None, int, int, int]]
    """What is remembered in the end: key, start, count and digest of each window that is not over."""


def expected(spark: SparkSession, step: Window, log: Sequence[Record], watermark_ms: int | None) -> Expected:
    hold_ms = HOLD_MS if step.late == "correct" else 0
    wait_ms = GAP_MS if step.kind == "session" else 0
    rows = placed(log, Clock(delay_ms=DELAY_MS))
    table = [
        (
            each.record.values["k"],
            each.record.values["v"],
            each.record.values["x"],
            None if each.record.time_ms is None else EPOCH + timedelta(milliseconds=each.record.time_ms),
            *each.place,
            None if each.watermark_ms is None else each.watermark_ms,
        )
        for each in rows
    ]
    schema = f"{DDL}, t timestamp, topic string, partition int, offset bigint, mark bigint"
    frame = spark.createDataFrame(table, schema).coalesce(1).where("t IS NOT NULL")
    in_time = f"coalesce(unix_millis(w.end) + {hold_ms} > mark, true)"
    if step.kind == "session":
        in_time = f"coalesce(unix_millis(t) + {GAP_MS + hold_ms} > mark, true)"
        grouped = frame.where(in_time).selectExpr("*", f"session_window(t, '{GAP_MS} milliseconds') AS w")
    else:
        lengths = [f"'{part.replace('ms', ' milliseconds')}'" for part in (step.size, step.every) if part]
        grouped = frame.selectExpr("*", f"window(t, {', '.join(lengths)}) AS w").where(in_time)
    found = _aggregated(grouped, step)
    closed_ms = -(10**9) if watermark_ms is None else watermark_ms
    given, kept, taken = [], [], set()
    for row in found:
        places = [(place["topic"], place["partition"], place["offset"]) for place in row.pop("places")]
        taken.update(places)
        digest = sum(place_hash(*place) for place in places) & MASK
        row |= {"_hf_count": len(places), "_hf_digest": digest - (1 << 64) * (digest >> 63)}
        end_ms = _ms(row["window_end"]) + wait_ms
        if step.emit == "changes" or end_ms <= closed_ms:
            given.append(row)
        if end_ms + hold_ms > closed_ms:
            kept.append((row["k"], _ms(row["window_start"]), len(places), digest))
    late = [each.place for each in rows if each.place not in taken]
    return Expected(_sorted(given), sorted(late), sorted(kept, key=str))


def _aggregated(grouped: DataFrame, step: Window) -> list[dict[str, Any]]:
    from pyspark.sql import functions as f

    aggregates = [f.expr(ORACLE[name]).alias(name) for name in step.aggregates]
    places = f.expr("collect_list(struct(topic, partition, offset))").alias("places")
    found = grouped.groupBy("k", "w").agg(*aggregates, places)
    rows = found.selectExpr("*", "w.start AS window_start", "w.end AS window_end").drop("w").collect()
    return [row.asDict(recursive=True) for row in rows]


def _ms(time: datetime) -> int:
    return round((time.replace(tzinfo=time.tzinfo or UTC) - EPOCH) / timedelta(milliseconds=1))


def _sorted(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: (str(row["k"]), row["window_start"]))


# ---------------------------------------------------------------------------- what came out


def as_expected(spark: SparkSession, step: Window, played: Played) -> Expected:
    last: dict[tuple[str | None, datetime], dict[str, Any]] = {}
    for row in played.rows:
        place = (row["k"], row["window_start"])
        start = row["window_start"].astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        assert json.loads(row["_key"]) == {"k": row["k"], "window_start": start}
        assert row["_timestamp"] == row["window_end"]
        if step.emit == "closed" and step.late == "route":
            assert place not in last, f"{place} was given out twice"
        if row["_tombstone"]:
            assert last.pop(place), f"{place} was taken back and never given"
        else:
            last[place] = {name: value for name, value in row.items() if name not in HIDDEN}
    return Expected(_sorted(last.values()), sorted(played.late), memory(spark, step, played))


HIDDEN = ("_hf", "_key", "_timestamp", "_tombstone", "_headers")


def memory(spark: SparkSession, step: Window, played: Played) -> list[tuple[str | None, int, int, int]]:
    """The windows of the state, each made of its pieces."""
    ddl = "k string, _start bigint, _until bigint, _n bigint, _low bigint, _high bigint"
    more = {"session": ", _end bigint", "sliding": ", _last bigint", "tumbling": ""}[step.kind]
    pieces = played.memory(spark, ddl + more)
    if step.kind == "sliding":
        size_ms, over_ms = 10 + HOLD_MS * (step.late == "correct"), played.watermark_ms
        pieces = [
            {**piece, "_start": start}
            for piece in pieces
            for start in range(piece["_start"], piece["_last"] + 1, 4)
            if over_ms is None or start + size_ms > over_ms
        ]
    windows: list[list[Any]] = []
    for piece in sorted(pieces, key=lambda piece: (str(piece["k"]), piece["_start"])):
        digest = piece["_low"] + (piece["_high"] << 32)
        here = windows[-1] if windows else None
        if here and here[0] == piece["k"] and piece["_start"] <= here[4]:
            here[2], here[3] = here[2] + piece["_n"], (here[3] + digest) & MASK
            here[4] = max(here[4], piece.get("_end") or piece["_start"])
        else:
            end = piece.get("_end") or piece["_start"]
            windows.append([piece["k"], piece["_start"], piece["_n"], digest & MASK, end])
    return sorted((tuple(window[:4]) for window in windows), key=str)


# ---------------------------------------------------------------------------- however the log is cut


def log_of(random: Random) -> list[Record]:
    """Time goes on, with steps back: some rows are in disorder, some late, some have no time."""
    now_ms, log = 1000, []
    for _ in range(random.randint(30, 60)):
        now_ms += random.choice((0, 1, 2, 2, 3, 9))
        time_ms = now_ms + random.choice((0, 0, 0, 1, 3, 8, -1, -4, -9, -14, -25))
        values = {
            "k": random.choice(("a", "a", "b", None)),
            "v": random.choice((None, -3, 0, 7, 2_000_000_000)),
            "x": random.choice((None, "p", "q", "r")),
        }
        log.append(Record(None if random.random() < 0.05 else time_ms, values, random.randint(0, 1)))
    return log


ALL = tuple((kind, mode) for kind in KINDS for mode in MODES)
PLAYED = ALL if GAMES > 1 else tuple(ALL[number] for number in (0, 1, 2, 3, 7, 8))
"""Every kind and every mode at least once; all pairs where more games are played."""


@pytest.fixture
def player(spark: SparkSession, tmp_path: Path) -> Player:
    return Player(spark, str(tmp_path), DDL, DELAY_MS)


@pytest.mark.parametrize(
    ("kind", "mode"),
    [pytest.param(kind, mode, marks=() if kind == "sliding" else pytest.mark.long) for kind, mode in PLAYED],
)
@settings(
    max_examples=GAMES,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
    derandomize=True,
)
@given(seed=st.integers(min_value=0, max_value=2**32))
def test_windows_are_those_of_one_query_over_everything(
    player: Player, spark: SparkSession, kind: str, mode: str, seed: int
) -> None:
    random = Random(f"{kind} {mode} {seed}")
    log = log_of(random)
    step = step_of(kind, mode, AGGREGATES if mode == "closed" else FEW)

    cuts = random.sample(range(1, len(log)), 2)
    played = player.play(WindowOperator(step), log, cuts, twice={1})

    assert as_expected(spark, step, played) == expected(spark, step, log, played.watermark_ms)


@pytest.mark.long
def test_aggregates_that_need_the_rows_are_those_of_one_query_too(
    player: Player, spark: SparkSession
) -> None:
    step = step_of("session", "changes", GENERAL)

    played = player.play(WindowOperator(step), TELLING, [9, 18])

    assert as_expected(spark, step, played) == expected(spark, step, TELLING, played.watermark_ms)


# ---------------------------------------------------------------------------- planted errors


def at(time_ms: int, key: str = "a", partition: int = 0) -> Record:
    return Record(time_ms, {"k": key, "v": time_ms % 7, "x": "pqr"[time_ms % 3]}, partition)


TELLING = [
    *(at(time_ms, partition=partition) for time_ms in (1000, 1004, 1009) for partition in (0, 1)),
    at(1007, "b"),
    at(1016),
    at(1016, partition=1),
    # A cut here: windows up to 1010 close, at the end of the batch and not of the next.
    at(1012),
    at(1005),  # late
    at(1019, "b", partition=1),
    at(
        1030
    ),  # ahead: by the batch's greatest time the one after next would be late, by its own log it is not
    at(1024, "b", partition=1),
    at(1018, "b", partition=1),
    at(1031, partition=1),
    at(1033, "b"),
    at(1029, "b"),
    # A cut here.
    at(1052),
    at(1044, "b", partition=1),
    at(1053, partition=1),
]


class ClosesByTheStart(WindowOperator):
    """By the watermark where the batch began."""

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        return super().run(rows, replace(context, next_watermark_ms=context.watermark_ms))


class GivesOutTheDead(WindowOperator):
    """As if nothing had closed before."""

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        return super().run(rows, replace(context, watermark_ms=None))


class LateByTheBatch(WindowOperator):
    """By the greatest event time of the batch, not of the log up to the row."""

    def run(self, rows: DataFrame, context: OperatorContext) -> OperatorResult:
        fields = [name for name in rows.schema["_hf"].dataType.names if name != "watermark"]  # type: ignore[attr-defined]
        same = ", ".join(f"'{name}', _hf.{name}" for name in fields)
        lineage = f"named_struct({same}, 'watermark', greatest((SELECT max(_hf.event_time) FROM {{rows}}) "
        changed = context.spark.sql(
            f"SELECT {lineage} - INTERVAL '0.{DELAY_MS:03d}' SECOND, _hf.watermark)) AS _hf, k, v, x FROM {{rows}}",
            rows=rows,
        )
        return super().run(changed, context)


@pytest.mark.long
@pytest.mark.parametrize("wrong", [ClosesByTheStart, GivesOutTheDead, LateByTheBatch, None])
def test_an_operator_that_is_wrong_is_found(
    player: Player, spark: SparkSession, wrong: type[WindowOperator] | None
) -> None:
    step = step_of("tumbling", "closed", {"n": "count(*)"})
    operator = (wrong or WindowOperator)(step)

    def compare() -> None:
        played = player.play(operator, TELLING, [9, 18])
        assert as_expected(spark, step, played) == expected(spark, step, TELLING, played.watermark_ms)

    if wrong is None:
        compare()
    else:
        with pytest.raises(AssertionError):
            compare()
