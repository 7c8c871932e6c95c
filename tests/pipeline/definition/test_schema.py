"""The published JSON Schema is what the code makes, and agrees with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.example import DEFINITION
from holdfast.pipeline.definition.loading import from_document
from holdfast.pipeline.definition.schema import json_schema, json_schema_text

DOCS = Path(__file__).parents[3] / "docs"
LEAST: dict[str, Any] = {"pipeline": "p", "source": {"topics": ["t"]}, "sinks": [{"parquet": "out"}]}


def test_the_published_schema_is_what_the_code_makes() -> None:
    assert (DOCS / "pipeline.schema.json").read_text() == json_schema_text(), (
        "write it again: holdfast pipeline schema > docs/pipeline.schema.json"
    )


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_example_is_valid() -> None:
    jsonschema.validate(yaml.safe_load(DEFINITION.replace("2026-", "2026-")), json_schema())


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"trigger": "10s"},
        {"trigger": "often"},
        {"tigger": "10s"},
        {"source": {}},
        {"source": {"topics": "t", "batch_bytes": "64MiB"}},
        {"source": {"topics": "t", "batch_bytes": "64Mb"}},
        {"source": {"topics": "t", "batch_records": 0}},
        {"source": {"topics": "t", "value": "xml"}},
        {"source": {"topics": "t", "value": {"format": "text", "unknown": "keep"}}},
        {"source": {"topics": "t", "settings": {"retries": 3}}},
        {"steps": [{"expect": "a"}]},
        {"steps": [{"expect": {"that": "a", "else": "drop"}}]},
        {"steps": [{"expect": {"that": "a", "else": "dropp"}}]},
        {"steps": [{"expect": {"else": "drop"}}]},
        {"steps": [{"filter": "a", "sql": "b"}]},
        {"steps": {"filter": "a"}},
        {"sinks": [{"parquet": {"path": "o", "schema": "add-columns"}}]},
        {"sinks": [{"parquet": {"schema": "add-columns"}}]},
        {"sinks": [{"kafka": {"topic": "o", "writers": 65}}]},
        {"dead_letter": "d"},
        {"dead_letter": {}},
    ],
)
def test_schema_and_loader_agree_on_shapes(change: dict[str, Any]) -> None:
    document = {**LEAST, **change}
    rules_only = change == {"source": {}}  # that a source reads something is a rule, not a shape
    valid = jsonschema.Draft202012Validator(json_schema()).is_valid(document)
    try:
        from_document(document)
        loads = True
    except DefinitionError:
        loads = False
    assert valid is (loads or rules_only)


def test_every_key_is_described() -> None:
    def properties(schema: Any) -> list[tuple[str, Any]]:
        if isinstance(schema, list):
            return [found for each in schema for found in properties(each)]
        if not isinstance(schema, dict):
            return []
        own = schema.get("properties")
        mine = list(own.items()) if isinstance(own, dict) else []
        return mine + [found for each in schema.values() for found in properties(each)]

    found = properties(json.loads(json_schema_text()))
    assert len(found) > 40
    assert [name for name, each in found if not each.get("description")] == []
