"""A definition whose tombstones would delete nothing is refused."""

from __future__ import annotations

import pytest

from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.loading import parse_yaml

WITHOUT_KEY = "it would delete nothing: decode the record's key with a field 'id'"
KEYED = "  key: {format: json, fields: {id: long}}"
SINK = """\
sinks:
  - postgres: {url: "postgresql://h/d", table: t, mode: upsert, key: id, delete_when: _tombstone}
"""


def loaded(source: str = "", steps: str = "", sinks: str = SINK) -> None:
    value = "  value: {format: json, fields: {id: long, name: string}}"
    parse_yaml("\n".join(["pipeline: p", "source:", "  topics: t", value, source, steps, sinks]))


def refused(words: str, source: str = "", steps: str = "", sinks: str = SINK) -> None:
    with pytest.raises(DefinitionError, match=words):
        loaded(source, steps, sinks)


def test_a_key_that_only_the_value_has_is_refused() -> None:
    refused(WITHOUT_KEY)
    refused(WITHOUT_KEY, "  key: text")
    refused(WITHOUT_KEY, steps='steps: [{filter: {where: name <> "x"}}]')


def test_a_decoded_key_with_the_same_field_deletes() -> None:
    loaded(KEYED)
    loaded(KEYED, "steps: [{sql: 'SELECT *, upper(name) AS loud FROM input'}]")


def test_a_step_that_drops_the_keys_field_is_refused() -> None:
    refused(WITHOUT_KEY, KEYED, "steps: [{sql: 'SELECT _hf, id, name FROM input'}]")


def test_a_key_of_another_type_is_refused() -> None:
    refused("give both the same type", "  key: {format: json, fields: {id: string}}")


def test_a_column_that_a_step_makes_is_the_authors_affair() -> None:
    made = "steps: [{sql: 'SELECT * EXCEPT (id), coalesce(id, CAST(_key_value AS BIGINT)) AS id FROM input'}]"
    loaded("  key: text", made)


def test_rows_that_delete_by_their_value_need_no_key() -> None:
    loaded(sinks=SINK.replace("_tombstone", "name = 'gone'"))


def test_a_tombstone_whose_version_has_no_beginning_is_refused() -> None:
    sink = SINK.replace("mode: upsert", "mode: scd2, order_by: name")
    refused("its 'name' is null and nothing says since when it counts", KEYED, sinks=sink)
    made = "steps: [{sql: 'SELECT * EXCEPT (name), coalesce(name, _timestamp) AS name FROM input'}]"
    loaded(KEYED, made, sink)
