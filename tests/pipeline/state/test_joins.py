"""Joins against one query of Spark over the whole log: every pair once, whatever the batches."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from tests.support.state_batches import GAMES, HF_DDL, Played, Player, Record, placed

from holdfast.pipeline.core.failures import StepError
from holdfast.pipeline.core.sql import ddl_schema
from holdfast.pipeline.definition.model import Join
from holdfast.pipeline.state.joins import LEFT, RIGHT, JoinOperator
from holdfast.pipeline.state.watermarks import Clock

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WITHIN_MS = 10
DELAY_MS = 4
COLUMNS = "k string, amount int"
SELECT = {"k": "l.k", "total": "l.amount + coalesce(r.amount, 0)", "paid": "r.amount"}


def paid(kind: str = "inner", **changes: Any) -> Join:
    words = {"left": "_hf.topic = 'orders'", "right": "_hf.topic = 'payments'", "on": {"k": "k"}}
    step = {**words, "within": f"{WITHIN_MS}ms", "select": SELECT, "kind": kind, **changes}
    return Join("paid", **step)


def operator(kind: str = "inner", **changes: Any) -> JoinOperator:
    return JoinOperator(paid(kind, **changes))


def order(time_ms: int | None, key: str | None = "a", amount: int = 1) -> Record:
    return Record(time_ms, {"k": key, "amount": amount}, topic="orders")


def payment(time_ms: int | None, key: str | None = "a", amount: int = 100) -> Record:
    return Record(time_ms, {"k": key, "amount": amount}, topic="payments")


@pytest.fixture
def player(spark: SparkSession, tmp_path: Path) -> Player:
    return Player(spark, str(tmp_path), COLUMNS, DELAY_MS)


# ---------------------------------------------------------------------------- the oracle


Pair = tuple[int, int | None, str | None, int, int | None]


def expected(spark: SparkSession, log: Sequence[Record], kind: str, watermark_ms: int | None) -> list[Pair]:
    """One batch over everything, in Spark's own SQL; of rows that nothing was found for those whose time is over."""
    rows = [
        (
            each.record.topic,
            each.offset,
            each.record.time_ms,
            each.record.values["k"],
            each.record.values["amount"],
        )
        for each in placed(log, Clock(delay_ms=DELAY_MS))
        if each.record.time_ms is not None and not each.is_late_for(each.record.time_ms + WITHIN_MS)
    ]
    frame = spark.createDataFrame(rows, "topic string, o bigint, t bigint, k string, amount int")
    over = "false" if watermark_ms is None else f"l.t + {2 * WITHIN_MS} <= {watermark_ms}"
    query = f"""
        SELECT l.o, r.o, l.k, l.amount + coalesce(r.amount, 0), r.amount
        FROM (SELECT * FROM {{rows}} WHERE topic = 'orders') l
        {kind.upper()} JOIN (SELECT * FROM {{rows}} WHERE topic = 'payments') r
        ON l.k = r.k AND abs(l.t - r.t) <= {WITHIN_MS}
        WHERE r.o IS NOT NULL OR {over}
    """
    return sorted((tuple(row) for row in spark.sql(query, rows=frame).collect()), key=repr)


def pairs(played: Played) -> list[Pair]:
    found = []
    for row in played.rows:
        right = row["right_hf"]["offset"] if row["right_hf"] is not None else None
        found.append((row["left_hf"]["offset"], right, row["k"], row["total"], row["paid"]))
    return sorted(found, key=repr)


def late_ones(log: Sequence[Record]) -> list[tuple[str, int, int]]:
    return sorted(
        each.place
        for each in placed(log, Clock(delay_ms=DELAY_MS))
        if each.record.topic != "others"
        and (each.record.time_ms is None or each.is_late_for(each.record.time_ms + WITHIN_MS))
    )


def remembered(log: Sequence[Record], kind: str, watermark_ms: int | None) -> list[tuple[int, int, int]]:
    """Side, time and end of each row that the memory holds."""
    found = []
    for each in placed(log, Clock(delay_ms=DELAY_MS)):
        time_ms, is_left = each.record.time_ms, each.record.topic == "orders"
        if time_ms is None or each.is_late_for(time_ms + WITHIN_MS) or each.record.topic == "others":
            continue
        if each.record.values["k"] is None and not (kind == "left" and is_left):
            continue
        until = time_ms + WITHIN_MS * (3 if kind == "left" and not is_left else 2)
        if watermark_ms is None or until > watermark_ms:
            found.append((LEFT if is_left else RIGHT, time_ms, until))
    return sorted(found)


def check(spark: SparkSession, played: Played, log: Sequence[Record], kind: str) -> None:
    assert pairs(played) == expected(spark, log, kind, played.watermark_ms)
    assert sorted(played.late) == late_ones(log)
    memory = played.memory(spark, "_side int, _t bigint, _until bigint")
    found = sorted((row["_side"], row["_t"], row["_until"]) for row in memory)
    assert found == remembered(log, kind, played.watermark_ms)
    assert played.counters["neither"] == sum(record.topic == "others" for record in log)


# ---------------------------------------------------------------------------- however the log is cut


@settings(
    max_examples=GAMES,
    phases=[Phase.generate],  # a smaller seed is no smaller log
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(seed=st.integers(min_value=0, max_value=2**32), kind=st.sampled_from(["inner", "left"]))
def test_pairs_and_memory_are_those_of_one_query_in_any_batching(
    player: Player, spark: SparkSession, seed: int, kind: str
) -> None:
    chance = random.Random(seed)
    log = [
        Record(
            100 + number + chance.randint(-20, 9),
            {"k": chance.choice(["a", "b", "c", "d", None]), "amount": number},
            topic=chance.choice(["orders", "payments"]),
        )
        for number in range(chance.randrange(40, 100))
    ]
    cuts = chance.sample(range(len(log)), chance.randint(1, 3))

    played = player.play(operator(kind), log, cuts, twice={1})

    check(spark, played, log, kind)


TELLING = [
    order(100),
    payment(100, "b"),
    payment(110),  # a pair at the very edge
    order(120, "c"),
    payment(120, "d"),
    Record(130, {"k": "a", "amount": 7}, topic="others"),
    # cut here
    order(107, "b"),  # meets a payment that lies further back than anything that can still come
    order(107),  # meets a remembered payment
    payment(109, "c"),  # too far from 120
    payment(109),  # meets a remembered order, and a new one
    Record(150, {"k": "a", "amount": 7}, topic="others"),
    order(150, "e"),
    payment(150, "e"),
    # cut here
    order(130, "f"),  # late
    payment(None),
    order(190, None),
    payment(190, None),
    Record(190, {"k": "a", "amount": 7}, topic="others"),
]
CUTS = [6, 13]


@pytest.mark.long
@pytest.mark.parametrize("kind", ["inner", "left"])
def test_telling_log(player: Player, spark: SparkSession, kind: str) -> None:
    played = player.play(operator(kind), TELLING, CUTS)

    check(spark, played, TELLING, kind)
    alone = [row["k"] for row in played.rows if row["right_hf"] is None]
    assert alone == ([] if kind == "inner" else ["c"])
    assert {row["_hf"]["topic"] for row in played.rows} == {"paid"}
    assert {row["_hf"]["offset"] for row in played.rows} <= {1, 2, 3}
    assert {bytes(row["_key"]) for row in played.rows if row["k"] == "a"} == {b"a"}


def test_a_row_that_nothing_is_found_for_has_columns_of_any_name(spark: SparkSession, tmp_path: Path) -> None:
    player = Player(spark, str(tmp_path), "k string, `order-no` int", DELAY_MS)
    step = operator("left", select={"k": "l.k", "no": "r.`order-no`"})
    log = [Record(time_ms, {"k": "a", "order-no": 7}, topic="orders") for time_ms in (100, 200)]
    [row] = player.play(step, log, [1]).rows
    assert (row["k"], row["no"]) == ("a", None)


def is_found_out(spark: SparkSession, played: Played, kind: str) -> bool:
    return pairs(played) != expected(spark, TELLING, kind, played.watermark_ms)


@pytest.mark.long
def test_a_memory_that_forgets_is_found_out(player: Player, spark: SparkSession) -> None:
    assert is_found_out(spark, player.play(operator(), TELLING, CUTS, forgets=True), "inner")


class LetsGoEarly(JoinOperator):
    def _lives_ms(self, side: int) -> int:
        return super()._lives_ms(side) - WITHIN_MS


class PairsTwice(JoinOperator):
    def _new_pairs(self, *args: Any) -> list[DataFrame]:
        made = super()._new_pairs(*args)
        return [*made, made[-1]] if len(made) > 1 else made


@pytest.mark.long
@pytest.mark.parametrize("wrong", [LetsGoEarly, PairsTwice])
def test_a_join_that_errs_is_found_out(
    player: Player, spark: SparkSession, wrong: type[JoinOperator]
) -> None:
    assert is_found_out(spark, player.play(wrong(paid()), TELLING, CUTS), "inner")


# ---------------------------------------------------------------------------- sides, keys and columns


def test_a_stream_joined_with_itself_leaves_out_the_row_itself(player: Player) -> None:
    log = [order(1, "a", 1), order(2, "a", 2), order(3, "b", 3)]

    made = player.play(operator(left="true", right="amount > 1"), log, [1])

    assert sorted((row["total"], row["paid"]) for row in made.rows) == [(3, 2)]


def test_keys_of_two_columns_and_a_whole_side(spark: SparkSession, tmp_path: Path) -> None:
    player = Player(spark, str(tmp_path), "is_left boolean, a int, b bigint, c string", DELAY_MS)
    log = [
        Record(1, {"is_left": True, "a": 7, "b": 8, "c": "x"}),
        Record(2, {"is_left": False, "a": 8, "b": 7, "c": "y"}),
        Record(2, {"is_left": False, "a": 8, "b": 8, "c": "z"}),
    ]
    step = operator(
        left="is_left",
        right="NOT is_left",
        on={"a": "b", "b": "a"},
        select={"both": "to_json(struct(l.c, r))", "when": "l.a"},
    )

    played = player.play(step, log, [1, 2])

    assert [(row["both"], bytes(row["_key"])) for row in played.rows] == [
        ('{"c":"x","r":{"is_left":false,"a":8,"b":7,"c":"y"}}', b'["7","8"]')
    ]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"on": {"gone": "k"}}, "no column 'gone'"),
        ({"on": {"k": "amount"}}, "cast one"),
        ({"on": {}}, "`on` names nothing"),
        ({"select": {"x": "rand()"}}, "another value"),
        ({"select": {"x": "sum(l.amount)"}}, "aggregates"),
        ({"select": {"x": "explode(array(l.amount, r.amount))"}}, "other rows"),
        ({"select": {"x": "l.gone"}}, "gone"),
        ({"select": {"_x": "l.k"}}, "ours"),
        ({"left": "rand() > 0.5"}, "another value"),
        ({"left": "nothing = 1"}, "nothing"),
    ],
)
def test_what_cannot_be_joined_is_told(spark: SparkSession, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(StepError, match=words):
        operator(**changes).schemas(spark, ddl_schema(f"{HF_DDL}, {COLUMNS}"))


def test_schemas_are_those_of_the_rows(player: Player, spark: SparkSession) -> None:
    rows = ddl_schema(f"{HF_DDL}, {COLUMNS}")

    schemas = operator().schemas(spark, rows)

    assert schemas["late"] == rows
    assert schemas[""].names == [
        *("_hf", "_key", "_timestamp", "_tombstone", "_headers"),
        *("left_hf", "right_hf", "k", "total", "paid"),
    ]
