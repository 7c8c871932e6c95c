"""Which dead letters a filter means."""

from __future__ import annotations

import pytest

from holdfast.cli.dlq_reading import Filter, Letter
from holdfast.client.dead_letter_dialects import Failure
from holdfast.errors import UsageError

LETTER = Letter(
    "orders-dlt",
    0,
    5,
    1_000,
    b"k1",
    b'{"id": 7}',
    (("tenant", b"acme"), ("hf-redrives", b"2"), ("raw", b"\xff")),
    Failure(
        "orders", 2, 7, 500, "mailer", "ValueError", "timed out", "5 attempts", None, 5, 1_794_729_600_000
    ),
)
UNKNOWN = Letter("other-dlt", 0, 0, 1_000, None, None, (), Failure())


@pytest.mark.parametrize(
    "expression",
    [
        "error=ValueError",
        "error!=KeyError",
        "message~time.? out",
        "message!~refused",
        "topic=orders",
        "partition=2",
        "offset>=7",
        "offset<=7",
        "attempts>=5",
        "redrives<=2",
        "group=mailer",
        "key=k1",
        'value~"id": 7',
        "header.tenant=acme",
        "header.missing=",
        "dialect=holdfast",
        "time>=2026-11-15T08:00",
        "time<=2026-11-15T09:00+01:00",
        "time=1794729600000",
        "attempts~^5$",
    ],
)
def test_what_holds(expression: str) -> None:
    assert Filter([expression])(LETTER)


@pytest.mark.parametrize(
    "expression",
    ["error=ValueErro", "error!=ValueError", "message!~timed", "partition=1", "offset>=8", "time<=1", "key="],
)
def test_what_does_not_hold(expression: str) -> None:
    assert not Filter([expression])(LETTER)


def test_all_filters_must_hold() -> None:
    assert Filter(["error=ValueError", "partition=2"])(LETTER)
    assert not Filter(["error=ValueError", "partition=3"])(LETTER)
    assert Filter([])(LETTER)


def test_what_is_not_told_is_empty_and_no_number() -> None:
    assert Filter(["error=", "group!=mailer", "redrives=0"])(UNKNOWN)
    assert not Filter(["attempts>=0"])(UNKNOWN)
    assert not Filter(["attempts<=9"])(UNKNOWN)


@pytest.mark.parametrize(
    ("expression", "said"),
    [
        ("nonsense", "not NAME=VALUE"),
        ("colour=red", "there is no colour"),
        ("message~(", "not a regular expression"),
        ("attempts=many", "not a number"),
        ("time>=soon", "neither a time"),
        ("error>=3", "is text"),
    ],
)
def test_filters_that_make_no_sense_are_refused(expression: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Filter([expression])
