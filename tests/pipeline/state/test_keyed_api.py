"""What a keyed function gets and returns, without Spark: the state of a key, and rows brought to their columns."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pytest

from holdfast.pipeline.keyed import KeyState, WrongState, each_row, to_ms
from holdfast.pipeline.state.keyed_rows import OutputRows, WrongRows, key_bytes

SCHEMA = pa.schema([("user", pa.string()), ("n", pa.int64())])
NOON = datetime(2026, 5, 1, 12, tzinfo=UTC)


def rows_of(*returned: Any, key: tuple[Any, ...] = ("ann",)) -> list[dict[str, Any]]:
    rows = OutputRows(SCHEMA, ("user",))
    for each in returned:
        rows.take(each, key, 5)
    table: list[dict[str, Any]] = rows.table().select(["user", "n"]).to_pylist()
    return table


def test_a_function_can_be_tested_with_a_state_made_by_hand() -> None:
    @each_row
    def third(key: tuple[str], row: dict[str, Any] | None, state: KeyState) -> dict[str, Any] | None:
        seen = (state.value or {"seen": 0})["seen"] + 1
        state.put({"seen": seen})
        return {"user": key[0]} if seen == 3 else None

    state = KeyState(("ann",), {"seen": 1})
    assert third(("ann",), {}, state) is None
    assert third(("ann",), {}, state) == {"user": "ann"}
    assert state.value == {"seen": 3}


def test_a_value_is_a_copy_until_it_is_put() -> None:
    state = KeyState((), {"items": [1], "n": 1})
    value = state.value
    assert value is not None
    value["items"].append(2)
    value["n"] = 2
    assert state.value == {"items": [1], "n": 1}
    state.put(value)
    value["n"] = 3
    assert state.value == {"items": [1, 2], "n": 2}


def test_put_takes_the_declared_columns_and_no_others() -> None:
    state = KeyState(columns=frozenset({"a", "b"}))
    with pytest.raises(WrongState, match="missing b"):
        state.put({"a": 1})
    with pytest.raises(WrongState, match="unknown c"):
        state.put({"a": 1, "b": 2, "c": 3})
    with pytest.raises(WrongState, match="not int"):
        state.put(1)  # type: ignore[arg-type]
    assert state.value is None


def test_clear_forgets_value_and_timer() -> None:
    state = KeyState((), {"a": 1}, timer_ms=5)
    state.clear()
    assert (state.value, state.timer) == (None, None)


def test_times_are_told_in_utc() -> None:
    state = KeyState(watermark_ms=0, batch_time_ms=1500, fired_ms=1)
    assert state.watermark == datetime(1970, 1, 1, tzinfo=UTC)
    assert state.batch_time == datetime(1970, 1, 1, 0, 0, 1, 500_000, tzinfo=UTC)
    assert state.fired == datetime(1970, 1, 1, 0, 0, 0, 1000, tzinfo=UTC)
    assert KeyState().watermark is None


def test_a_timer_takes_a_time_or_milliseconds_and_never_goes_off_early() -> None:
    state = KeyState()
    state.set_timer(NOON + timedelta(microseconds=1))
    assert state.timer == NOON + timedelta(milliseconds=1)
    state.set_timer(NOON.replace(tzinfo=None))
    assert state.timer == NOON
    state.set_timer(17)
    assert state.timer_ms == 17
    state.clear_timer()
    assert state.timer is None


@pytest.mark.parametrize("at", [1.5, True, "noon", None, 1 << 60])
def test_what_is_no_time_sets_no_timer(at: Any) -> None:
    with pytest.raises(WrongState, match="timer"):
        KeyState().set_timer(at)


def test_a_timer_that_goes_off_cannot_set_itself_again_to_the_same_time() -> None:
    state = KeyState(fired_ms=10)
    with pytest.raises(WrongState, match="later"):
        state.set_timer(10)
    state.set_timer(11)


def test_a_time_before_1970_is_rounded_up_too() -> None:
    assert to_ms(datetime(1969, 12, 31, 23, 59, 59, 999_500, tzinfo=UTC)) == 0


def test_rows_are_dicts_tables_or_batches_in_the_order_given() -> None:
    table = pa.table({"user": ["b"], "n": [2]})
    batch = pa.RecordBatch.from_pydict({"user": ["c"], "n": [3]})
    found = rows_of([{"user": "a", "n": 1}], table, None, batch, {"user": "d", "n": 4}, [])
    assert [(row["user"], row["n"]) for row in found] == [("a", 1), ("b", 2), ("c", 3), ("d", 4)]


def test_a_generator_may_yield_one_dict_again_and_again() -> None:
    def rows() -> Iterator[dict[str, Any]]:
        row: dict[str, Any] = {"user": "a"}
        for row["n"] in range(3):
            yield row

    assert [row["n"] for row in rows_of(rows())] == [0, 1, 2]


def test_a_column_of_the_key_is_filled_in() -> None:
    assert rows_of({"n": 1}, pa.table({"n": [2, 3]})) == [{"user": "ann", "n": n} for n in (1, 2, 3)]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (7, "returned int"),
        ("text", "returned str"),
        ([7], "rows that are int"),
        ([{"user": "a"}], "without the column 'n'"),
        ([{"user": "a", "n": 1, "m": 2}], "returned the column 'm'"),
        (pa.table({"user": ["a"]}), "without the column 'n'"),
        (pa.table({"n": [1], "m": [1]}), "returned the column 'm'"),
        (pa.table({"n": ["one"]}), "column 'n' that is no int64"),
        (pa.table([[1], [1]], names=["n", "n"]), "two columns of one name"),
        ([{"n": "one"}], "returned 'one' for 'n', which is no int64"),
        ([{"n": 1 << 70}], "for 'n', which is no int64"),
    ],
)
def test_what_does_not_fit_the_schema_is_told(returned: Any, message: str) -> None:
    with pytest.raises(WrongRows, match=message):
        rows_of(returned)


def test_the_key_of_a_row_that_does_not_fit_is_found_among_all() -> None:
    rows = OutputRows(SCHEMA, ("user",))
    rows.take([{"n": 1}], ("a",), 0)
    rows.take(pa.table({"n": [2, 3]}), ("b",), 0)
    rows.take([{"n": 4}, {"n": 5}], ("c",), 0)
    rows.take([{"n": 4}, {"n": "x"}], ("d",), 0)
    rows.take([{"n": 4}], ("e",), 0)
    with pytest.raises(WrongRows) as raised:
        rows.table()
    assert raised.value.key == ("d",)


@pytest.mark.parametrize(
    ("key", "written"),
    [
        (("a",), b"a"),
        ((b"\0\1",), b"\0\1"),
        ((None,), None),
        ((42,), b"42"),
        ((True,), b"true"),
        ((Decimal("1.50"),), b"1.50"),
        ((date(2026, 5, 1),), b"2026-05-01"),
        ((NOON,), b"2026-05-01 12:00:00"),
        ((NOON + timedelta(milliseconds=250),), b"2026-05-01 12:00:00.25"),
        (("é", 1, None, b"\xff"), '["é","1",null,"/w=="]'.encode()),
    ],
)
def test_the_key_of_a_row_is_its_text(key: tuple[Any, ...], written: bytes | None) -> None:
    assert key_bytes(key) == written
