"""Which columns of a table made by hand hold the values of the rows as they are."""

from __future__ import annotations

import pytest

from holdfast.pipeline.sinks.postgres_copy import is_fitting


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("text", "text"),
        ("uuid", "text"),
        ("character varying(20)", "text"),
        ("numeric", "numeric(12,4)"),
        ("numeric(20,4)", "numeric(12,4)"),
        ("numeric(4,4)", "numeric(12,4)"),  # what is too large is an error
        ("numeric(10,0)", "bigint"),
        ("smallint", "bigint"),
        ("numeric", "double precision"),
        ("double precision", "real"),
        ("timestamp(6) with time zone", "timestamp with time zone"),
        ("timestamp without time zone", "timestamp with time zone"),
        ("timestamp without time zone", "date"),
        ("json", "jsonb"),
    ],
)
def test_types_that_hold_every_value_or_refuse_it(held: str, wanted: str) -> None:
    assert is_fitting(held, wanted)
    assert is_fitting(wanted, wanted)


@pytest.mark.parametrize(
    ("held", "wanted"),
    [
        ("numeric(12,2)", "numeric(12,4)"),
        ("numeric(12)", "numeric(12,4)"),
        ("numeric(3,-2)", "bigint"),
        ("numeric(12,4)", "double precision"),
        ("double precision", "numeric(12,4)"),
        ("real", "double precision"),
        ("oid", "bigint"),
        ("character(5)", "text"),
        ("name", "text"),
        ('"char"', "text"),
        ("timestamp(3) with time zone", "timestamp with time zone"),
        ("timestamp with time zone", "timestamp without time zone"),
        ("timestamp with time zone", "date"),
    ],
)
def test_types_that_would_change_a_value_without_an_error(held: str, wanted: str) -> None:
    assert not is_fitting(held, wanted)
