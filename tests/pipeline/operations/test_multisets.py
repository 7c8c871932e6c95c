"""Rows are compared as multisets, by bytes."""

from __future__ import annotations

import datetime
from collections import Counter
from collections.abc import Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.operations.multisets import GONE, ORDER, Differences, Multisets, as_bytes
from holdfast.pipeline.scratch import ScratchDatabase, closed_database

Rows = list[tuple[Any, ...]]


def add(multisets: Multisets, side: str, names: Sequence[str], rows: Rows) -> None:
    """A few at once, as batches come."""
    for start in range(0, len(rows), 3):
        part = rows[start : start + 3]
        content = {name: as_bytes(pa.array([row[at] for row in part])) for at, name in enumerate(names)}
        multisets.add(side, pa.table(content))


def differences(directory: Path, a: Rows, b: Rows, *, key: Sequence[str] = ()) -> Differences:
    columns = [name for name in ("k", "v") if name not in key]
    with ScratchDatabase(str(directory)) as database:
        multisets = Multisets(database, columns, key=key)
        add(multisets, "a", ["k", "v"], a)
        add(multisets, "b", ["k", "v"], b)
        return multisets.compare()


def test_rows_are_equal_in_any_order(tmp_path: Path) -> None:
    a: Rows = [(1, "x"), (2, None), (2, None), (3, "z")]
    found = differences(tmp_path, a, a[::-1], key=["k"])
    assert found.are_none
    assert (found.rows_a, found.rows_b) == (4, 4)


def test_a_row_that_is_there_twice_is_not_the_same_as_once(tmp_path: Path) -> None:
    found = differences(tmp_path, [(1, "x"), (1, "x")], [(1, "x")], key=["k"])
    assert (found.only_a, found.only_b, found.differing) == (1, 0, 0)
    assert found.examples_a == [{"k": "1", "v": "x"}]


def test_rows_with_the_same_key_differ_in_columns(tmp_path: Path) -> None:
    found = differences(tmp_path, [(1, "x"), (2, "y")], [(1, "X"), (3, None)], key=["k"])
    assert (found.only_a, found.only_b, found.differing) == (1, 1, 1)
    assert found.columns == {"v": 1}
    assert found.examples == [({"k": "1", "v": "x"}, {"k": "1", "v": "X"})]
    assert (found.examples_a, found.examples_b) == ([{"k": "2", "v": "y"}], [{"k": "3", "v": None}])


def test_nothing_is_not_an_empty_text(tmp_path: Path) -> None:
    assert differences(tmp_path, [(1, None)], [(1, "")], key=["k"]).differing == 1


def test_names_that_differ_in_capitals_alone_are_columns_of_their_own(tmp_path: Path) -> None:
    with ScratchDatabase(str(tmp_path)) as database:
        multisets = Multisets(database, ["v", "V", 'a"b'], key=["k"])
        add(multisets, "a", ["k", "v", "V", 'a"b'], [(1, "x", "y", "z")])
        add(multisets, "b", ["k", "v", "V", 'a"b'], [(1, "x", "Y", "z")])
        found = multisets.compare()
    assert found.columns == {"V": 1}


def test_examples_are_few_however_much_differs(tmp_path: Path) -> None:
    found = differences(tmp_path, [(number, "x") for number in range(100)], [], key=["k"])
    assert (found.only_a, len(found.examples_a)) == (100, 5)


@settings(
    max_examples=examples(40), deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    a=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["x", "y", None])), max_size=12),
    b=st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["x", "y", None])), max_size=12),
    has_key=st.booleans(),
)
def test_the_differences_are_those_of_counters(
    tmp_path_factory: pytest.TempPathFactory, a: Rows, b: Rows, has_key: bool
) -> None:
    key = ["k"] if has_key else []
    found = differences(tmp_path_factory.mktemp("rows"), a, b, key=key)
    left, right = Counter(a) - Counter(b), Counter(b) - Counter(a)
    assert found.only_a + found.differing == left.total()
    assert found.only_b + found.differing == right.total()
    pairs = sum(
        min(
            sum(n for (k, _), n in left.items() if k == key),
            sum(n for (k, _), n in right.items() if k == key),
        )
        for key in range(4)
    )
    assert found.differing == (pairs if has_key else 0)


@settings(max_examples=examples(20), deadline=None)
@given(
    rows=st.lists(
        st.tuples(st.integers(0, 3), st.integers(0, 50), st.booleans()), unique_by=lambda row: row[1]
    ),
)
def test_only_the_last_row_of_a_key_counts_where_later_ones_take_its_place(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, int, bool]]
) -> None:
    last: dict[int, tuple[int, int, bool]] = {}
    for row in sorted(rows, key=lambda row: row[1]):
        last[row[0]] = row
    expected = [row for row in last.values() if not row[2]]
    with ScratchDatabase(str(tmp_path_factory.mktemp("rows"))) as database:
        multisets = Multisets(database, ["v"], key=["k"], is_folded=True)
        for side, content in (("a", rows), ("b", expected)):
            for k, order, gone in content:
                table = pa.table({"k": as_bytes(pa.array([k])), "v": as_bytes(pa.array([order]))})
                table = table.append_column(ORDER, pa.array([order])).append_column(GONE, pa.array([gone]))
                multisets.add(side, table)
        found = multisets.compare()
    assert found.are_none
    assert found.rows_a == len(expected)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pa.array([datetime.datetime(2026, 1, 1)], pa.timestamp("ns", "UTC")), pa.timestamp("us", "UTC")),
        (pa.array([1], pa.int32()), pa.int64()),
        (pa.array(["x"]), pa.large_string()),
        (pa.array(["x"]), pa.dictionary(pa.int32(), pa.string())),
        (pa.array([Decimal("1.50")]), pa.decimal128(20, 2)),
        (pa.array([datetime.date(2026, 1, 1)]), pa.date32()),
    ],
)
def test_the_same_value_in_another_form_is_the_same(one: pa.Array, other: pa.DataType) -> None:
    assert as_bytes(one).to_pylist() == as_bytes(one.cast(other)).to_pylist()


def test_nested_values_and_bytes_have_a_form_too() -> None:
    assert as_bytes(pa.array([{"a": [1, None], "b": b"\xff"}, None])).to_pylist() == [
        b'{"a":[1,null],"b":"ff"}',
        None,
    ]
    assert as_bytes(pa.array([b"\xff"])).to_pylist() == [b"\xff"]


def test_a_comparison_draws_nothing_on_standard_output() -> None:
    """What a command prints there is for others to read."""
    asked = "SELECT value FROM duckdb_settings() WHERE name = 'enable_progress_bar'"
    with closed_database(64 << 20) as database:
        assert database.execute(asked).fetchone() == ("false",)
