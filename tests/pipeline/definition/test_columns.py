"""Columns that are known without Spark."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.errors import HoldfastError
from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.columns import columns_before, columns_of, listed_columns, source_columns
from holdfast.pipeline.definition.model import Decoding, Field


def test_a_list_of_columns_is_read() -> None:
    assert listed_columns(
        "id long, `a b` decimal(10,2), s struct<x:int,y:array<string>>,\n t: timestamp"
    ) == {
        "id": "bigint",
        "a b": "decimal(10,2)",
        "s": "struct<`x`:int,`y`:array<string>>",
        "t": "timestamp",
    }


@pytest.mark.parametrize(
    "text", ["", "id", "id long,", "id long, id int", "long id", "id long int", "`id long"]
)
def test_what_is_no_list_of_columns_is_said(text: str) -> None:
    with pytest.raises((HoldfastError, ValueError)):
        listed_columns(text)


@given(st.text(alphabet="ab <>(),:`1 lonigt", max_size=40))
def test_any_text_is_a_list_or_an_error(text: str) -> None:
    with contextlib.suppress(HoldfastError, ValueError):
        assert all(listed_columns(text))


def test_columns_of_a_decoding() -> None:
    assert columns_of(Decoding("text")) == {"value": "string"}
    assert columns_of(Decoding("json", (Field("id", "long"),))) == {"id": "bigint"}
    assert columns_of(Decoding("avro", registry={"url": "http://r"}, schema="{}")) is None
    assert columns_of(Decoding("avro", (Field("id", "int"),), registry={"url": "http://r"})) == {"id": "int"}
    assert columns_of(Decoding("json", (Field("id", "lnog"),))) is None


def test_columns_before_a_step() -> None:
    fields = {"id": "long", "at": "timestamp"}
    definition = (
        Pipeline("p")
        .read("t", value={"format": "json", "fields": fields}, event_time="at")
        .lookup("t.parquet", on="id", columns="city")
        .dedupe("city")
        .sql("SELECT * FROM input")
        .filter("id > 0")
        .write("parquet", path="o")
        .definition()
    )
    assert columns_before(definition, 0) == frozenset({"id", "at"})
    assert source_columns(definition.source) == {"id": "bigint", "at": "timestamp"}
    assert columns_before(definition, 2) == frozenset({"id", "at", "city"})
    assert columns_before(definition, 3) is None
