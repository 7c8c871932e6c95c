"""Where dead letters go: one place, by the words of its kind."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.pipeline.changes.sink_changes import sink_changes
from holdfast.pipeline.definition.builder import PipelineBuilder
from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.explaining import explain
from holdfast.pipeline.definition.fingerprint import canonical, fingerprint
from holdfast.pipeline.definition.loading import from_document
from holdfast.pipeline.definition.model import (
    DeadLetter,
    DeltaSink,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
)
from holdfast.pipeline.definition.naming import dead_letter_sink, own_topics
from holdfast.pipeline.definition.places import places_of
from holdfast.pipeline.definition.secrets import expand_definition
from holdfast.pipeline.operations.backfilling import derive, destinations

URL = "postgresql://me:${PASSWORD}@db/sales"


def definition(dead_letter: Any = None) -> PipelineDefinition:
    document = {
        "pipeline": "orders",
        "source": {"topics": "orders", "value": {"format": "json", "fields": {"id": "long"}}},
        "sinks": [{"parquet": "out"}],
    }
    return from_document({**document, **({"dead_letter": dead_letter} if dead_letter else {})}).definition


@pytest.mark.parametrize(
    ("words", "sink"),
    [
        (None, KafkaSink("orders-dlt", "dead-letter")),
        ("rejected", KafkaSink("rejected", "dead-letter")),
        ({"parquet": "dead"}, ParquetSink("dead", "dead-letter")),
        (
            {"parquet": {"path": "dead", "compression": "zstd"}},
            ParquetSink("dead", "dead-letter", compression="zstd"),
        ),
        ({"delta": "s3://bucket/dead"}, DeltaSink("s3://bucket/dead", "dead-letter")),
        (
            {"postgres": {"url": URL, "table": "dead", "schema_name": "ops"}},
            PostgresSink(URL, "dead", "dead-letter", schema_name="ops"),
        ),
    ],
)
def test_they_go_to_a_topic_or_become_rows(words: Any, sink: Any) -> None:
    found = definition(words)
    assert dead_letter_sink(found) == sink
    assert own_topics(found) == ({sink.topic} if isinstance(sink, KafkaSink) else set())
    hops = {hop.name: hop.what for hop in explain(found).sinks}
    assert any(word in hops["dead-letter"] for word in ("orders-dlt", "rejected", "dead"))


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ({"settings": {"acks": "all"}}, "one place.*found none"),
        ({"topic": "d", "delta": "d"}, "one place.*'topic' and 'delta'"),
        ({"parquet": "d", "bootstrap": "h:1"}, "bootstrap.*belongs to a topic"),
        ({"parquet": "s3://d"}, "cannot rename a directory"),
        ({"parquet": "out"}, r"sinks\[0\] writes to the same place"),
        ({"delta": {"path": "d", "rows": "x"}}, "no key 'rows'"),
        ({"postgres": {"url": URL}}, "needs 'table'"),
        ({"parqet": "d"}, "did you mean 'parquet'"),
    ],
)
def test_what_cannot_be_is_said(words: Any, says: str) -> None:
    with pytest.raises(DefinitionError, match=f"(?s){says}"):
        definition(words)


def test_python_says_the_same_as_yaml() -> None:
    made = PipelineBuilder("orders").read("orders", value={"format": "json", "fields": {"id": "long"}})
    made = made.write("parquet", path="out")
    wanted = fingerprint(definition({"parquet": {"path": "dead", "file_bytes": "1MiB"}}))
    for letters in (
        made.dead_letter(parquet={"path": "dead", "file_bytes": "1MiB"}),
        made.dead_letter(DeadLetter(parquet=ParquetSink("dead", file_bytes=1 << 20))),
        made.dead_letter(parquet=ParquetSink("dead", file_bytes=1 << 20)),
    ):
        assert fingerprint(letters.definition()) == wanted


def test_a_definition_without_the_words_has_the_fingerprint_it_had() -> None:
    assert canonical(definition("rejected"))["dead_letter"] == {
        "topic": "rejected",
        "bootstrap": None,
        "settings": {},
    }


def test_secrets_in_it_are_expanded() -> None:
    expanded, redactor = expand_definition(
        definition({"postgres": {"url": URL, "table": "dead"}}), {"PASSWORD": "a secret of mine"}
    )
    sink = dead_letter_sink(expanded)
    assert isinstance(sink, PostgresSink)
    assert "a secret of mine" in sink.url
    assert "a secret of mine" not in redactor.redact(sink.url)


def test_a_backfill_has_its_own() -> None:
    assert destinations(derive(definition({"delta": "dead"}), "again"))["dead-letter"] == "delta dead-again"


def test_another_kind_of_place_is_refused_and_a_moved_one_is_said() -> None:
    before, moved, tuned, topic = (
        canonical(definition(words))
        for words in (
            {"parquet": "dead"},
            {"parquet": "elsewhere"},
            {"parquet": {"path": "dead", "compression": "zstd"}},
            "rejected",
        )
    )
    assert places_of(before)["dead-letter"] != places_of(moved)["dead-letter"]
    assert places_of(before)["dead-letter"] == places_of(tuned)["dead-letter"]
    [change] = sink_changes(before, moved)
    assert (change.where, change.level.name) == ("dead_letter.parquet.path", "SAFE")
    [change] = sink_changes(before, tuned)
    assert (change.where, change.level.name) == ("dead_letter.parquet.compression", "SAFE")
    for one, other in ((before, topic), (topic, before)):
        [change] = sink_changes(one, other)
        assert (change.where, change.level.name) == ("dead_letter", "REFUSED")
