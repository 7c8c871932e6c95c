"""Two checkouts beside each other: whose figure stands where, and what is missing is said."""

from __future__ import annotations

from bench.against import line_of
from bench.model import MeasureResult, Row

ROW = Row("produce", "records/s", "ours.rate", "kafka.rate")


def _measured(*rates: float) -> MeasureResult:
    return MeasureResult("bulk", "now", [{"ours": {"rate": rate}, "kafka": {"rate": 7.0}} for rate in rates])


def test_the_ratio_is_this_checkouts_figure_by_the_others_within_each_round() -> None:
    others = [_measured(100), _measured(200), _measured(400)]
    this = [_measured(90), _measured(220), _measured(400)]

    assert line_of(ROW, others, this) == "produce: 200 -> 220 records/s, 1.000× (0.900 to 1.100)"


def test_a_round_that_one_side_lacks_is_left_out() -> None:
    assert line_of(ROW, [None, _measured(10)], [_measured(5), _measured(20)]) == (
        "produce: 10 -> 20 records/s, 2.000× (2.000 to 2.000)"
    )
    assert line_of(ROW, [None], [_measured(5)]) is None
