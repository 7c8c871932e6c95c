"""Where rows of one key may lie in several partitions, `check` says what depends on batches, and names the choices."""

from __future__ import annotations

import pytest

from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.loading import Loaded, parse_yaml
from holdfast.pipeline.definition.model import KafkaSink, PipelineDefinition
from holdfast.pipeline.definition.rules_rows import last_of_key

UPSERT = "sinks: [{postgres: {url: 'postgresql://h/d', table: t, mode: upsert, key: id%s}}]"
DEDUPE = "steps: [{dedupe: {key: id, within: 1h}}]"
FUNCTION = "steps: [{keyed: {name: f, function: 'json:loads', key: id, state: {n: long}, schema: {n: long}}}]"
JOIN = "steps: [{join: {name: j, left: id > 0, right: id < 0, on: id, within: 1h, select: [l.id]}}]"
KEYED = "  key: {format: json, fields: {id: long}}"


def loaded(
    source: str = "", steps: str = "", sinks: str = "sinks: [{parquet: out}]", topics: str = "t"
) -> Loaded:
    value = "  value: {format: json, fields: {id: long, at: timestamp}}"
    lines = ["pipeline: p", "source:", f"  topics: {topics}", "  event_time: at", value, source, steps, sinks]
    return parse_yaml("\n".join(lines))


def definition(*texts: str) -> PipelineDefinition:
    return loaded(*texts).definition


def warned(*texts: str, **more: str) -> bool:
    return any("may lie in several partitions" in str(each) for each in loaded(*texts, **more).warnings)


@pytest.mark.parametrize(
    ("steps", "sinks"),
    [
        ("", UPSERT % ""),
        (DEDUPE, "sinks: [{parquet: out}]"),
        (FUNCTION, "sinks: [{parquet: out}]"),
        (FUNCTION, UPSERT % ", rows: f"),
    ],
)
def test_a_key_that_nothing_ties_to_a_partition_is_said(steps: str, sinks: str) -> None:
    assert warned("", steps, sinks)
    assert not warned(KEYED, steps, sinks)
    assert warned(KEYED, steps, sinks, topics="[t, u]")
    assert warned(KEYED.replace("id: long", "id: long, part: long"), steps, sinks)


def test_an_order_makes_an_upsert_right() -> None:
    assert not warned(sinks=UPSERT % ", order_by: at")


def test_pairs_of_a_join_have_no_order_but_the_one_that_is_named() -> None:
    assert warned(KEYED, JOIN, UPSERT % ", rows: j")
    assert not warned(KEYED, JOIN, UPSERT % ", rows: j, order_by: id")


@pytest.mark.parametrize(
    ("steps", "sinks"),
    [
        ("", UPSERT % ", unordered: true"),
        (DEDUPE.replace("1h", "1h, unordered: true"), "sinks: [{parquet: out}]"),
        (FUNCTION.replace("key: id", "key: id, unordered: true"), "sinks: [{parquet: out}]"),
    ],
)
def test_an_author_who_means_it_is_not_warned_and_the_fingerprint_stays(steps: str, sinks: str) -> None:
    assert warned("", *(text.replace(", unordered: true", "") for text in (steps, sinks)))
    assert not warned("", steps, sinks)
    plain = [text.replace(", unordered: true", "") for text in (steps, sinks)]
    assert fingerprint(definition("", steps, sinks)) == fingerprint(definition("", *plain))


def test_only_the_cluster_knows_that_a_topic_is_compacted() -> None:
    """So a Kafka sink says it when it is opened."""
    sink = "sinks: [{kafka: {topic: out%s}}]"
    assert last_of_key_of(sink % "") is None
    assert "unordered: true" in str(last_of_key_of(sink % "", topics="[t, u]"))
    assert "unordered: true" in str(last_of_key_of(sink % ", key: id"))
    assert last_of_key_of(sink % ", key: id", KEYED) is None
    assert last_of_key_of(sink % ", key: id, unordered: true") is None


def last_of_key_of(sinks: str, source: str = "", topics: str = "t") -> str | None:
    made = definition(source, "", sinks, topics)
    [sink] = made.sinks
    assert isinstance(sink, KafkaSink)
    return last_of_key(made, sink)


def test_copies_of_one_message_need_no_key() -> None:
    assert not warned(steps="steps: [{dedupe: {by: hf-id, within: 1h}}]")
    assert not warned(steps=DEDUPE.replace("key: id", "key: _key"))


def test_an_order_beside_deletes_is_refused() -> None:
    with pytest.raises(
        DefinitionError, match="leaves nothing behind that an older row could be compared with"
    ):
        warned(sinks=UPSERT % ", order_by: at, delete_when: id < 0")
    with pytest.raises(DefinitionError, match="append keeps every row; it needs 'mode: upsert'"):
        warned(sinks=(UPSERT % ", order_by: at").replace("mode: upsert, key: id", "mode: append"))


VERSIONS = "sinks: [{%s: {%s, mode: scd2, key: id, order_by: at%s}}]"


@pytest.mark.parametrize(
    "kind", [("postgres", 'url: "postgresql://h/d", table: t'), ("delta", "path: out/t")]
)
def test_versions_need_their_key_and_their_beginning(kind: tuple[str, str]) -> None:
    whole = VERSIONS % (*kind, ", delete_when: id < 0")
    assert not warned(sinks=whole)
    with pytest.raises(DefinitionError, match="scd2 needs 'order_by': the column that says since when"):
        warned(sinks=whole.replace(", order_by: at", ""))
    with pytest.raises(DefinitionError, match="scd2 needs 'key'"):
        warned(sinks=whole.replace(", key: id", ""))
    with pytest.raises(DefinitionError, match="it cannot be part of the key"):
        warned(sinks=whole.replace("key: id", "key: [id, at]"))
    with pytest.raises(DefinitionError, match="made by a step and have no versions"):
        warned(KEYED, JOIN, whole.replace("mode:", "rows: j, mode:"))
    with pytest.raises(DefinitionError, match=r"use 'mode: scd2', which remembers deletions"):
        warned(sinks=whole.replace("scd2", "upsert"))
