"""The table of cells, and the verdict that follows from it; values of every kind in one form."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast.audit import words
from holdfast.audit.cells import as_type, hash_values, keeps_exactly
from holdfast.audit.coverage import ANY, settled
from holdfast.audit.model import STEPS, ColumnCoverage, Evidence, Report, Verdict
from holdfast.audit.text import plain_lines

RECOMPUTED = ColumnCoverage("lake", "id", 10)
UNALTERED = ColumnCoverage("lake", "score", 4, 6, why="'scored' made it")
TRUSTED = ColumnCoverage("lake", "note", trusted=10, why="nothing makes it again")


@pytest.fixture
def report(make_report: Callable[..., Report]) -> Callable[..., Report]:
    def make(*covered: ColumnCoverage, accepted: tuple[str, ...] = (), wrong: tuple[str, ...] = ()) -> Report:
        return replace(make_report(*wrong, unproven=()), coverage=covered, accepted=accepted)

    return make


@pytest.mark.parametrize(
    ("covered", "accepted", "verdict", "strictly"),
    [
        ((RECOMPUTED,), (), Verdict.PROVEN, 0),
        ((RECOMPUTED, UNALTERED), (), Verdict.UNALTERED, 4),
        ((RECOMPUTED, UNALTERED), ("lake.score",), Verdict.UNALTERED, 0),
        ((RECOMPUTED, UNALTERED, TRUSTED), (), Verdict.INCONCLUSIVE, 4),
        ((RECOMPUTED, UNALTERED, TRUSTED), ("lake.score",), Verdict.INCONCLUSIVE, 4),
        ((RECOMPUTED, UNALTERED, TRUSTED), ("lake.note",), Verdict.ACCEPTED, 4),
        ((RECOMPUTED, TRUSTED), ("lake.note",), Verdict.ACCEPTED, 0),
    ],
)
def test_the_verdict_follows_from_the_cells(
    report: Callable[..., Report],
    covered: tuple[ColumnCoverage, ...],
    accepted: tuple[str, ...],
    verdict: Verdict,
    strictly: int,
) -> None:
    made = report(*covered, accepted=accepted)
    assert made.verdict is verdict
    assert made.exit_code() == verdict.exit_code
    assert made.exit_code(is_strict=True) == strictly
    assert Report.from_json(made.as_json()) == made
    assert report(*covered, accepted=accepted, wrong=("lost",)).verdict is Verdict.FAILED


def test_the_table_and_the_figure_are_in_the_report(report: Callable[..., Report]) -> None:
    made = report(RECOMPUTED, UNALTERED, TRUSTED)
    assert made.cells(Evidence.RECOMPUTED) == 14
    assert words.cells(made) == "46.7 % of 30 cells recomputed, 20.0 % unaltered, 33.3 % trusted"
    lines = list(plain_lines(made))
    assert any(line.split()[:5] == ["lake", "score", "4", "6", "0"] for line in lines)
    assert made.reasons == ("10 cells of lake.note are trusted: nothing makes it again",)


def test_what_nobody_speaks_of_is_trusted_and_no_cell_counts_twice() -> None:
    claims = [
        ColumnCoverage("lake", "id", 7),
        ColumnCoverage("lake", "id", unaltered=8),
        ColumnCoverage("lake", ANY, why="a step made it"),
        ColumnCoverage(STEPS, "few", unaltered=3, why="recorded"),
        ColumnCoverage("empty", "id", 0),
    ]
    found = settled({"lake": ("id", "note"), "empty": ("id",)}, {"lake": 10, "empty": 0}, claims)
    assert found == (
        ColumnCoverage("lake", "id", 7, 1, 2, "a step made it"),
        ColumnCoverage("lake", "note", 0, 0, 10, "a step made it"),
        ColumnCoverage(STEPS, "few", 0, 3, 0, "recorded"),
    )


def test_percentages_are_never_rounded_to_all_or_nothing() -> None:
    assert words.percent(0, 9) == "0"
    assert words.percent(9, 9) == "100 %"
    assert words.percent(1, 10**9) == "0.1 %"
    assert words.percent(10**9 - 1, 10**9) == "99.9 %"


STRUCT = pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))])
MAP = pa.map_(pa.string(), pa.float64())


@pytest.mark.parametrize(
    ("kind", "one", "other"),
    [
        (STRUCT, {"a": 1, "b": ["x", "y"]}, {"a": 1, "b": ["y", "x"]}),
        (STRUCT, {"a": 1, "b": ["x"]}, {"a": 2, "b": ["x"]}),
        (STRUCT, {"a": 1, "b": []}, {"a": 1, "b": None}),
        (STRUCT, {"a": None, "b": None}, None),
        (pa.list_(pa.int64()), [1, 2], [1, 2, 0]),
        (pa.list_(pa.int64()), [None], []),
        (pa.list_(STRUCT), [{"a": 1, "b": ["x"]}], [{"a": 1, "b": ["z"]}]),
        (MAP, [("k", 1.0)], [("k", 2.0)]),
        (MAP, [("k", 1.0), ("l", 2.0)], [("k", 2.0), ("l", 1.0)]),
        (MAP, [], None),
    ],
)
def test_nested_values_differ_by_their_leaves(kind: pa.DataType, one: Any, other: Any) -> None:
    # Null values and a slice around them: what lies beneath must not count.
    values = pa.array([None, one, other, one, None], kind)
    hashed = hash_values(values)
    assert hashed[1] == hashed[3]
    assert hashed[1] != hashed[2]
    assert hashed[0] == hashed[4]
    assert np.array_equal(hash_values(values.slice(1, 3)), hashed[1:4])


def test_maps_have_no_order_and_one_zero() -> None:
    one, other = pa.array([[("a", -0.0), ("b", 2.0)], [("b", 2.0), ("a", 0.0)]], MAP)
    assert hash_values(pa.array([one], MAP)) == hash_values(pa.array([other], MAP))


def test_texts_of_a_sink_are_read_as_the_types_of_the_source() -> None:
    kind = pa.struct([("a", pa.int64()), ("m", pa.map_(pa.string(), pa.int64()))])
    texts = pa.array(['{"m": {"y": 2, "x": 1}, "a": 1}', None, '{"a": 1, "m": {}, "more": 2}', "no"])
    found, wrong = as_type(texts, kind, "struct<a:bigint,m:map<string,bigint>>")
    assert wrong.tolist() == [False, False, True, True]
    meant = pa.array([{"a": 1, "m": [("x", 1), ("y", 2)]}, None], kind)
    assert np.array_equal(hash_values(found.slice(0, 2)), hash_values(meant))
    numbers, wrong = as_type(pa.array(["7", "seven", None]), pa.int64(), "bigint")
    assert (numbers.to_pylist(), wrong.tolist()) == ([7, None, None], [False, True, False])
    assert keeps_exactly("jsonb", "map<string,bigint>")
    assert not keeps_exactly("numeric(10,2)", "double")
