"""What a storm over a pipeline looks for is found when it is there."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from tests.support.history import Violation
from tests.support.pipeline_chaos import Orders, Row, check_once, is_broken

from holdfast.testing.processes import MARK, marked

GOOD = [Row(0, 0, 0, 0), Row(0, 1, 0, 1), Row(1, 0, 1, 0)]
EXPECTED = {0: [0, 1], 1: [0]}


def test_every_row_once_is_right_in_any_order() -> None:
    check_once(EXPECTED, reversed(GOOD), "rows")


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (GOOD[:2], r"1 of 3 are missing, such as \[\(1, 0\)\]"),
        ([*GOOD, GOOD[1]], r"there twice, such as \[\(0, 1\)\]"),
        ([*GOOD, Row(1, 1, 1, 1)], r"not expected, such as \[\(1, 1\)\]"),
        ([*GOOD[:2], Row(1, 0, 0, 1)], "a row of 1@0 has the content of 0@1"),
    ],
)
def test_what_is_wrong_is_named(found: list[Row], said: str) -> None:
    with pytest.raises(Violation, match=said):
        check_once(EXPECTED, found, "rows")


def test_good_and_broken_records_are_all_there_are() -> None:
    orders = Orders("127.0.0.1:1", "orders", 2)
    orders.sent = {0: 200, 1: 96}
    assert sorted(orders.good()[0] + orders.broken()[0]) == list(range(200))
    assert len(orders.broken()[0]) == 2
    assert orders.broken()[1] == []
    assert not any(map(is_broken, orders.good()[1]))


def test_a_process_is_found_by_the_mark_of_the_one_that_started_its_parent() -> None:
    program = (
        "import subprocess, sys; subprocess.run([sys.executable, '-c', 'print(1, flush=True); input()'])"
    )
    mark = f"test-{os.getpid()}"
    process = subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, MARK: mark},
    )
    with process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"1\n"
        found = marked(mark)
        process.communicate(b"\n")
    assert process.pid in found
    assert len(found) == 2
    assert marked(mark) == []
