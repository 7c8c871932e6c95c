"""Fingerprints: those from before stay, and a state's changes with what decides about its rows."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.fingerprint import canonical, fingerprint, state_marks
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.model import PipelineDefinition

FIELDS = {"id": "long", "at": "timestamp", "note": "string?"}
YAML = """\
pipeline: p
source:
  topics: [t]
  value: {format: json, fields: {id: long, name: string, amount: double, at: timestamp}}
  event_time: {field: at, delay: 1m}
steps:
  - expect: {that: id > 0, else: warn}
  - filter: amount > 0
  - lookup: {table: t.parquet, on: id, columns: city}
  - dedupe: {name: once, key: id}
  - window: {name: totals, size: 1m, key: name, aggregates: {n: count(*)}}
  - keyed: {name: watch, file: steps.py, function: f, key: name, schema: n long, state: n long}
  - filter: {name: last, where: id < 100}
sinks:
  - parquet: out
"""


def test_a_definition_without_new_words_has_the_fingerprint_it_had() -> None:
    pipeline = (
        Pipeline("golden")
        .read(
            "orders",
            bootstrap="h:1",
            value={"format": "json", "unknown": "reject", "fields": FIELDS},
            key="text",
        )
        .expect("id > 0", name="positive", otherwise="drop")
        .filter("id < 100")
        .sql("SELECT * FROM input")
        .write("parquet", path="out")
        .write("delta", path="lake")
        .write("postgres", url="postgresql://h/d", table="t", mode="upsert", key="id")
        .write("kafka", topic="clean")
        .dead_letter("dead")
    )
    assert (
        fingerprint(pipeline.definition())
        == "d777e2e93556e7fd8706338da21b4afa70b0af25147c895b3fe534e08afe66cc"
    )


@pytest.fixture
def directory(tmp_path: Path) -> str:
    (tmp_path / "steps.py").write_text("def f(batch):\n    return batch\n")
    return str(tmp_path)


def loaded(text: str, directory: str) -> PipelineDefinition:
    return parse_yaml(text, directory=directory).definition


ALL = {"once", "totals", "watch"}


@pytest.mark.parametrize(
    ("change", "changed"),
    [
        (("pipeline: p", "pipeline: q"), set()),
        (("topics: [t]", "topics: [t, u]"), set()),
        (("topics: [t]", "topics: [t]\n  bootstrap: h:1\n  starting: latest\n  batch_records: 5"), set()),
        (("parquet: out", "parquet: out\n  - kafka: {topic: o, rows: totals}"), set()),
        (("id < 100", "id < 50"), set()),
        (("id > 0, else: warn", "id > 1, else: warn"), set()),
        (("id > 0, else: warn", "id > 0"), ALL),
        (("- filter: amount > 0", "- filter: {name: f, where: amount > 0}"), set()),
        (("amount > 0", "amount > 1"), ALL),
        (("columns: city}", "columns: city, refresh: 5m}"), set()),
        (("columns: city", "columns: town"), ALL),
        (("delay: 1m", "delay: 2m"), ALL),
        (("id: long", "id: int"), ALL),
        (("key: id}", "key: name}"), ALL),
        (("key: id}", "key: id, within: 2d}"), ALL),
        (("name: once", "name: ones"), {"once", "ones"}),
        (("size: 1m", "size: 2m"), {"totals"}),
        (("n: count(*)", "n: sum(id)"), {"totals"}),
        (("state: n long", "state: n int"), {"watch"}),
        (("  - window: {name: totals, size: 1m, key: name, aggregates: {n: count(*)}}\n", ""), {"totals"}),
    ],
)
def test_a_states_fingerprint_changes_with_what_decides_about_its_rows(
    directory: str, change: tuple[str, str], changed: set[str]
) -> None:
    assert change[0] in YAML
    before = state_marks(canonical(loaded(YAML, directory)))
    after = state_marks(canonical(loaded(YAML.replace(*change), directory)))
    assert before.keys() == ALL
    assert {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)} == changed


def test_a_states_fingerprint_changes_with_its_function(directory: str) -> None:
    definition = loaded(YAML, directory)
    before = state_marks(canonical(definition))
    Path(directory, "steps.py").write_text("def f(batch):\n    return batch[:1]\n")
    after = state_marks(canonical(definition))
    assert {name for name in before if before[name] != after[name]} == {"watch"}


def test_the_kind_of_a_window_counts(directory: str) -> None:
    sliding = YAML.replace("size: 1m", "size: 1m, every: 1m")
    before, after = (state_marks(canonical(loaded(text, directory))) for text in (YAML, sliding))
    assert before["totals"] != after["totals"]
    assert [step["kind"] for step in canonical(loaded(YAML, directory))["steps"]][4] == "window"
