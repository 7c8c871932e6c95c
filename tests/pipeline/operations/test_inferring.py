"""A definition inferred from a topic reads that topic: every value it was inferred from is a row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.server.embed import Broker
from holdfast.pipeline.definition.loading import load_pipeline
from holdfast.pipeline.operations.inferring import definition_text, infer_fields, newest_values, type_of
from holdfast.testing.pipelines import PipelineTester

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NAMES = st.sampled_from(["id", "on", "no one", "größe", "a.b", "x-y", "1st", "true"])
LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**40), 2**40),
    st.floats(-1e6, 1e6),
    st.text("abc -:", max_size=4),
    st.sampled_from(["2026-01-31", "2026-01-31T12:00:00Z", "2026-01-31T12:00:00", "31.1.2026"]),
)
DOCUMENTS = st.dictionaries(NAMES, LEAVES | st.lists(st.integers(0, 5), max_size=2), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("seen", "kind"),
    [
        ([1, 2], "long"),
        ([1, 2.5], "double"),
        ([1 << 70, 1], "double"),
        ([True, None], "boolean"),
        ([True, 1], "string"),
        (["2026-01-31T12:00:00Z", "2026-01-31T12:00:00+01:00"], "timestamp"),
        (["2026-01-31T12:00:00"], "string"),
        (["2026-01-31"], "date"),
        (["2026-01-31", "x"], "string"),
        ([[1], [None, 2.5]], "array<double>"),
        ([[]], "array<string>"),
        ([{"a": 1}, {"b c": "x"}], "struct<a:long,`b c`:string>"),
        ([None], "string"),
    ],
)
def test_types_are_the_narrowest_that_take_all(seen: list[Any], kind: str) -> None:
    assert type_of(seen) == kind


@given(st.lists(DOCUMENTS, min_size=1, max_size=4))
def test_what_is_written_is_a_definition(
    tmp_path_factory: pytest.TempPathFactory, documents: list[Any]
) -> None:
    values = [json.dumps(document).encode() for document in documents]
    path = tmp_path_factory.getbasetemp() / "inferred.yaml"
    path.write_text(definition_text("my.topic", values, file="f", bootstrap="h:1"))
    decoding = load_pipeline(str(path)).definition.source.value
    fields = infer_fields(values)
    assert fields is not None
    assert [field.name for field in decoding.fields] == list(fields)
    assert [field.required for field in decoding.fields] == [
        not kind.endswith("?") for kind in fields.values()
    ]


def test_values_that_are_no_objects_are_text_or_bytes() -> None:
    assert "  value: text\n" in definition_text("t", [b"a", b"{}", None], file="f", bootstrap="h:1")
    assert "  value: bytes\n" in definition_text("t", [b"\xff", b"{}"], file="f", bootstrap="h:1")


@pytest.mark.spark
def test_every_record_it_was_inferred_from_is_a_row(spark: SparkSession, tmp_path: Path) -> None:
    documents: list[dict[str, Any]] = [
        {"id": 1, "at": "2026-01-31T12:00:00Z", "who": {"name": "ada", "age": 3}, "tags": ["a"]},
        {"id": 2, "at": "2026-01-31T12:00:00.5+01:00", "who": {"name": "bob"}, "rate": 0.5},
        {"id": 3, "at": "2026-02-01T00:00:00Z", "who": {"name": None, "age": 4}, "tags": []},
    ]
    with Broker() as broker:
        broker.create_topic("people", 2)
        producer = Producer({"bootstrap.servers": broker.bootstrap_servers})
        for document in documents:
            producer.produce("people", json.dumps(document))
        assert producer.flush(30) == 0
        values = newest_values({"bootstrap.servers": broker.bootstrap_servers}, "people")
    assert sorted(values, key=str) == sorted((json.dumps(each).encode() for each in documents), key=str)
    path = tmp_path / "people.yaml"
    path.write_text(definition_text("people", values, file="people.yaml", bootstrap="127.0.0.1:9092"))
    with PipelineTester(spark) as tester:
        trial = tester.run(path, [{"value": document} for document in documents])
    assert trial.dead_letters == []
    assert [(row["id"], row["who"]["name"], row["rate"]) for row in trial.rows["parquet"]] == [
        (1, "ada", None),
        (2, "bob", 0.5),
        (3, None, None),
    ]
