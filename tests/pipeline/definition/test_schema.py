"""The published JSON Schema is what the code makes, and agrees with the loader."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.pipeline.definition.documents import Findings, from_yaml
from holdfast.pipeline.definition.editor_schema import json_schema, json_schema_text
from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.example import DEFINITION
from holdfast.pipeline.definition.loading import from_document
from holdfast.pipeline.definition.model import PIPELINE

DOCS = Path(__file__).parents[3] / "docs"
LEAST: dict[str, Any] = {"pipeline": "p", "source": {"topics": ["t"]}, "sinks": [{"parquet": "out"}]}


def test_the_published_schema_is_what_the_code_makes() -> None:
    assert (DOCS / "pipeline.schema.json").read_text() == json_schema_text(), (
        "write it again: holdfast pipeline schema > docs/pipeline.schema.json"
    )


def test_the_schema_is_a_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(json_schema())


def test_the_example_is_valid() -> None:
    jsonschema.validate(yaml.safe_load(DEFINITION), json_schema())


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
    # That a source reads something, and that dead letters go to one place, are rules and not shapes.
    rules_only = change in ({"source": {}}, {"dead_letter": {}})
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


FULL: dict[str, Any] = {
    "pipeline": "p",
    "source": {
        "topics": ["a", "b"],
        "settings": {"retries": 3},
        "value": {"format": "csv", "fields": {"id": "long"}, "csv": {"delimiter": ";", "null": ""}},
        "key": {"format": "avro", "registry": {"url": "http://r"}, "fields": {"k": "int"}},
        "batch_records": 10,
        "batch_bytes": "64MiB",
        "values": {"a": {"format": "json", "fields": {"id": "long", "at": "timestamp"}}},
        "event_time": {"field": "_timestamp", "delay": "0s", "idle": "1m", "ahead": "1h"},
    },
    "steps": [
        {"expect": {"that": "id > 0", "else": "drop", "name": "r"}},
        {"filter": "id > 1"},
        {"sql": {"query": "SELECT * FROM input", "expand": True}},
        {"python": {"function": "json:dumps", "schema": {"id": "long"}, "mode": "pandas"}},
        {"dedupe": {"key": ["id"], "by": "key", "within": "1d"}},
        {"lookup": {"table": "t.csv", "on": {"id": "k"}, "columns": ["city"], "missing": "filter"}},
        {"window": {"size": "1m", "key": "id", "aggregates": {"n": "count(*)"}, "name": "w"}},
        {"keyed": {"function": "json:dumps", "key": "id", "schema": {"n": "long"}, "state": "n long"}},
        {"join": {"left": "a", "right": "b", "on": "id", "select": ["l.id"], "within": "1h", "name": "j"}},
    ],
    "sinks": [
        {"parquet": {"path": "o", "partition_by": ["id"], "file_bytes": 5, "schema": "fail"}},
        {"postgres": {"url": "u", "table": "t", "mode": "upsert", "key": "id"}},
        {"kafka": {"topic": "w", "name": "w", "rows": "w"}},
        {"kafka": {"topic": "c", "headers": {"h": "id"}, "writers": 2, "settings": {"linger.ms": "5"}}},
    ],
    "dead_letter": {"topic": "d"},
    "trigger": "10s",
    "spark": {"spark.x": True},
}
REPLACEMENTS: list[Any] = [
    None,
    "",
    " ",
    "x",
    "10s",
    "1MiB",
    0,
    5,
    -1,
    1.5,
    True,
    [],
    ["x"],
    [5],
    {},
    {"x": "y"},
    {"topic": "t"},
]


def places(document: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    inner = (
        document.items()
        if isinstance(document, dict)
        else enumerate(document)
        if isinstance(document, list)
        else ()
    )
    return [path, *(place for key, each in inner for place in places(each, (*path, key)))]


def changed(document: Any, path: tuple[Any, ...], value: Any, key: str | None) -> Any:
    """The document with another value at a place, or with its key renamed."""
    if not path:
        return value
    copy = dict(document) if isinstance(document, dict) else list(document)
    if len(path) == 1 and key is not None and isinstance(copy, dict):
        copy[key] = copy.pop(path[0])
    else:
        copy[path[0]] = changed(document[path[0]], path[1:], value, key)
    return copy


@settings(max_examples=examples(400))
@given(
    st.sampled_from(places(FULL)[1:]),
    st.sampled_from(REPLACEMENTS),
    st.sampled_from([None, None, "x", "path", "name"]),
)
def test_what_an_editor_accepts_the_loader_can_read(
    path: tuple[Any, ...], value: Any, key: str | None
) -> None:
    document = changed(FULL, path, value, key)
    if not jsonschema.Draft202012Validator(json_schema()).is_valid(document):
        return
    findings = Findings()
    root = from_yaml(yaml.safe_dump(document), findings)
    assert root is not None
    PIPELINE.read(root, (), findings)
    assert [str(finding) for finding in findings.found] == []


def test_the_whole_document_is_valid_for_both() -> None:
    jsonschema.validate(FULL, json_schema())
    from_document(FULL)
