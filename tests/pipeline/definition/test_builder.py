"""Python and YAML that say the same are the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.pipeline import Decoding, Field, KafkaSink, ParquetSink, Pipeline, load_pipeline
from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.fingerprint import fingerprint
from holdfast.pipeline.definition.functions import run_file
from holdfast.pipeline.definition.loading import parse_yaml

YAML = """\
pipeline: orders
source:
  topics: [orders]
  bootstrap: ${KAFKA:-127.0.0.1:9092}
  value:
    format: json
    unknown: reject
    fields:
      id: long
      note: string?
  batch_bytes: 64MiB
steps:
  - expect: {that: id > 0, else: drop}
  - filter: {name: small, where: id < 100}
  - sql: SELECT * FROM input
  - python: {file: steps.py, function: enrich, schema: {id: long}}
sinks:
  - parquet: {path: out, partition_by: [id]}
  - kafka: clean
dead_letter: dead
"""
STEPS = """\
import functools

LIMIT = 3


@functools.lru_cache
def enrich(rows):
    return rows  # as it is
"""


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    (tmp_path / "orders.yaml").write_text(YAML)
    (tmp_path / "steps.py").write_text(STEPS)
    return tmp_path


def built(enrich: Any) -> Pipeline:
    return (
        Pipeline("orders")
        .read(
            "orders",
            bootstrap="${KAFKA:-127.0.0.1:9092}",
            value={"format": "json", "unknown": "reject", "fields": {"id": "long", "note": "string?"}},
            batch_bytes="64MiB",
        )
        .expect("id > 0", otherwise="drop")
        .filter("id < 100", name="small")
        .sql("SELECT * FROM input")
        .python(enrich, schema={"id": "long"})
        .write("parquet", path="out", partition_by=["id"])
        .write(KafkaSink("clean"))
        .dead_letter("dead")
    )


def test_yaml_and_python_have_the_same_fingerprint(directory: Path) -> None:
    from_yaml = load_pipeline(str(directory / "orders.yaml")).definition
    enrich = run_file(str(directory / "steps.py")).enrich
    from_python = built(enrich).definition()
    assert from_python.steps[3].function is enrich  # type: ignore[union-attr]
    assert fingerprint(from_python) == fingerprint(from_yaml)


def test_values_and_words_are_the_same(directory: Path) -> None:
    value = Decoding("json", (Field("id", "long"), Field("note", "string", required=False)), "reject")
    base = Pipeline("p").write(ParquetSink("out", partition_by=("id",), compression="zstd"))
    words = base.read(
        "t", value={"format": "json", "unknown": "reject", "fields": {"id": "long", "note": "string?"}}
    )
    assert base.read("t", value=value).definition() == words.definition()


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("batch_bytes: 64MiB", "batch_bytes: 1MiB\n  batch_records: 5"), True),
        (("pipeline: orders", "pipeline: orders\ntrigger: 10s\nhome: /h\nmonitoring_group: g"), True),
        (("- filter: {name: small, where", "- filter: {name: smaller, where"), False),
        (("id > 0", "id > 1"), False),
        (("note: string?", "note: string"), False),
        (("${KAFKA:-127.0.0.1:9092}", "other:9092"), False),
        (("path: out", "path: out2"), False),
        (("dead_letter: dead", "dead_letter: dead2"), False),
    ],
)
def test_the_fingerprint_changes_with_what_can_change_a_row(
    directory: Path, change: tuple[str, str], same: bool
) -> None:
    before = parse_yaml(YAML, directory=str(directory)).definition
    after = parse_yaml(YAML.replace(*change), directory=str(directory)).definition
    assert before != after
    assert (fingerprint(before) == fingerprint(after)) is same


def test_the_fingerprint_changes_with_the_functions_own_lines(directory: Path) -> None:
    definition = load_pipeline(str(directory / "orders.yaml")).definition
    before = fingerprint(definition)
    (directory / "steps.py").write_text(
        STEPS.replace("LIMIT = 3", "LIMIT = 3\n\n\ndef other():\n    return 1")
    )
    assert fingerprint(definition) == before
    (directory / "steps.py").write_text(STEPS.replace("return rows", "return rows.slice(0)"))
    assert fingerprint(definition) != before


def test_the_fingerprint_does_not_depend_on_the_environment(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    definition = load_pipeline(str(directory / "orders.yaml")).definition
    before = fingerprint(definition)
    monkeypatch.setenv("KAFKA", "elsewhere:9092")
    assert fingerprint(definition) == before


def test_a_pipeline_is_not_changed_by_going_on() -> None:
    common = Pipeline("p").read("t", value="text").write("parquet", path="out")
    assert len(common.filter("true").definition().steps) == 1
    assert common.definition().steps == ()


def test_errors_have_the_words_of_yaml() -> None:
    typo: Any = "fial"
    with pytest.raises(DefinitionError) as caught:
        Pipeline("p").read("t", value="jsn").expect("x", otherwise=typo).write(
            "parket", path="o"
        ).definition()
    assert str(caught.value).splitlines() == [
        "source.value: 'jsn' is not one of json, avro, protobuf, csv, text, bytes; did you mean 'json'?",
        "steps[0].expect.else: 'fial' is not one of warn, drop, quarantine, fail; did you mean 'fail'?",
        "sinks[0].parket: there is no sink 'parket'; did you mean 'parquet'?",
    ]


def test_a_python_file_defines_a_pipeline(directory: Path) -> None:
    (directory / "orders.py").write_text(
        "from holdfast.pipeline import Pipeline\n"
        "from steps import enrich\n"
        "orders = (Pipeline('orders').read('t', value='text').python(enrich).write('parquet', path='out'))\n"
    )
    definition = load_pipeline(str(directory / "orders.py")).definition
    assert definition.name == "orders"
    assert definition.directory == str(directory)


def test_a_python_file_with_several_pipelines_wants_a_name(directory: Path) -> None:
    text = (
        "from holdfast.pipeline import Pipeline\nbase = Pipeline('b')\nmore = base.read('t', value='text')\n"
    )
    (directory / "two.py").write_text(text + "more = more.write('parquet', path='o')\n")
    with pytest.raises(DefinitionError, match=r"makes 2 pipelines \(base, more\); name one"):
        load_pipeline(str(directory / "two.py"))
    assert load_pipeline(f"{directory / 'two.py'}:more").definition.name == "b"
    with pytest.raises(DefinitionError, match="no pipeline is called 'no'"):
        load_pipeline(f"{directory / 'two.py'}:no")


def test_a_python_file_that_raises_says_so(directory: Path) -> None:
    (directory / "bad.py").write_text("1 / 0\n")
    with pytest.raises(DefinitionError, match="ZeroDivisionError"):
        load_pipeline(str(directory / "bad.py"))
