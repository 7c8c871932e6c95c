"""The arithmetic behind the report."""

from __future__ import annotations

import pytest
from bench.stats import Summary, is_steady, paired_ratios, percentile, summarise


def test_percentile_lies_linearly_between_neighbours() -> None:
    values = [40.0, 10.0, 30.0, 20.0]
    assert percentile(values, 0.0) == 10
    assert percentile(values, 0.5) == 25
    assert percentile(values, 1.0) == 40
    assert percentile(values, 0.9) == pytest.approx(37)
    assert percentile([7.0], 0.99) == 7


def test_percentile_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 0.5)


def test_summary_has_median_and_quartiles() -> None:
    assert summarise([1, 2, 3, 4, 5, 6, 7, 8, 9]) == Summary(5, 3, 7)


def test_ratios_are_taken_within_each_round() -> None:
    # The machine was twice as slow in the second round: medians would hide that ours was always twice as fast.
    ours, theirs = [200.0, 100.0, 190.0], [100.0, 50.0, 95.0]
    assert paired_ratios(ours, theirs) == [2, 2, 2]


def test_a_round_where_theirs_was_zero_has_no_ratio() -> None:
    assert paired_ratios([1.0, 2.0], [0.0, 1.0]) == [2]


def test_rounds_that_do_not_pair_are_refused() -> None:
    with pytest.raises(ValueError, match="cannot be paired"):
        paired_ratios([1.0, 2.0], [1.0])


@pytest.mark.parametrize(
    ("rates", "steady"),
    [
        ([100.0, 101.0], False),
        ([100.0, 101.0, 99.0], True),
        ([10.0, 50.0, 100.0, 101.0, 105.0], True),
        ([100.0, 100.0, 111.0], False),
        ([100.0, 100.0, 100.0, 120.0], False),
    ],
)
def test_a_rate_is_steady_when_three_runs_lie_within_a_tenth(rates: list[float], steady: bool) -> None:
    assert is_steady(rates) is steady
