"""Where rows of one key may lie in several partitions, `check` says what depends on batches, and names the choices."""

from __future__ import annotations

import pytest

from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.loading import parse_yaml

UPSERT = "sinks: [{postgres: {url: 'postgresql://h/d', table: t, mode: upsert, key: id%s}}]"
DEDUPE = "steps: [{dedupe: {key: id, within: 1h}}]"
KEYED = "  key: {format: json, fields: {id: long}}"


def warned(
    source: str = "", steps: str = "", sinks: str = "sinks: [{parquet: out}]", topics: str = "t"
) -> bool:
    value = "  value: {format: json, fields: {id: long, at: timestamp}}"
    lines = ["pipeline: p", "source:", f"  topics: {topics}", "  event_time: at", value, source, steps, sinks]
    found = parse_yaml("\n".join(lines)).warnings
    return any("may lie in several partitions" in str(each) for each in found)


@pytest.mark.parametrize(("steps", "sinks"), [("", UPSERT % ""), (DEDUPE, "sinks: [{parquet: out}]")])
def test_a_key_that_nothing_ties_to_a_partition_is_said(steps: str, sinks: str) -> None:
    assert warned("", steps, sinks)
    assert not warned(KEYED, steps, sinks)
    assert warned(KEYED, steps, sinks, topics="[t, u]")
    assert warned(KEYED.replace("id: long", "id: long, part: long"), steps, sinks)


def test_an_order_makes_an_upsert_right() -> None:
    assert not warned(sinks=UPSERT % ", order: at")


def test_copies_of_one_message_need_no_key() -> None:
    assert not warned(steps="steps: [{dedupe: {by: hf-id, within: 1h}}]")
    assert not warned(steps=DEDUPE.replace("key: id", "key: _key"))


def test_an_order_beside_deletes_is_refused() -> None:
    with pytest.raises(
        DefinitionError, match="leaves nothing behind that an older row could be compared with"
    ):
        warned(sinks=UPSERT % ", order: at, delete_when: id < 0")
    with pytest.raises(DefinitionError, match="append keeps every row; it needs 'mode: upsert'"):
        warned(sinks=(UPSERT % ", order: at").replace("mode: upsert, key: id", "mode: append"))
