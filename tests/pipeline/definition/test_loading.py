"""YAML to a definition: what it becomes, and every error with its line, all at once."""

from __future__ import annotations

from pathlib import Path
from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline.definition.errors import DefinitionError
from holdfast.pipeline.definition.loading import load_pipeline, load_yaml, parse_yaml
from holdfast.pipeline.definition.model import (
    DeadLetter,
    Decoding,
    DeltaSink,
    Expect,
    Field,
    Filter,
    KafkaSink,
    ParquetSink,
    PipelineDefinition,
    PostgresSink,
    Python,
    Source,
    Sql,
)

MINIMAL = """\
pipeline: p
source:
  topics: t
  value: text
sinks:
  - parquet: out
"""


def errors(text: str, directory: str = ".") -> list[str]:
    with pytest.raises(DefinitionError) as caught:
        parse_yaml(dedent(text), file="p.yaml", directory=directory)
    return str(caught.value).splitlines()


def loaded(text: str) -> PipelineDefinition:
    return parse_yaml(dedent(text)).definition


def test_the_least_pipeline_has_the_models_defaults() -> None:
    assert loaded(MINIMAL) == PipelineDefinition(
        name="p",
        source=Source(topics=("t",), value=Decoding(format="text")),
        sinks=(ParquetSink(path="out"),),
    )


def test_every_key_reaches_the_definition(tmp_path: Path) -> None:
    (tmp_path / "steps.py").write_text("def f(rows):\n    return rows\n")
    (tmp_path / "p.yaml").write_text(
        dedent("""\
        pipeline: all
        source:
          topics: [a, b]
          bootstrap: h:1
          settings: {security.protocol: SASL_SSL, sasl.password: "${P}", retries: 3}
          value:
            format: csv
            unknown: reject
            fields: {id: long, note: "string?", tags: "int ?"}
            csv: {delimiter: ";", "null": ""}
          key: text
          starting: 2026-01-31T00:00:00Z
          batch_records: 10_000
          batch_bytes: 64MiB
        steps:
          - expect: {name: positive, that: id > 0, else: drop}
          - expect: id < 100
          - filter: {name: f, where: "id <> 3"}
          - sql: {name: q, query: "SELECT * FROM input", expand: true}
          - python: {name: py, file: steps.py, function: f, schema: {id: long, s: string}, mode: pandas}
        sinks:
          - parquet: {path: out, partition_by: id, file_bytes: 1MB, schema: add-columns, compression: zstd}
          - delta: {path: d, name: lake, partition_by: [id, note]}
          - postgres: {url: "postgresql://u:${P}@h/d", table: t, mode: upsert, key: id, delete_when: id < 0,
                       schema_name: s}
          - kafka: {topic: out, bootstrap: "k:1", key: id, value: note, headers: {h: id}, writers: 2}
        dead_letter: {topic: dead, settings: {linger.ms: 5}}
        trigger: 10s
        home: /h
        monitoring_group: g
        spark: {spark.sql.shuffle.partitions: 4}
        """)
    )
    assert load_yaml(str(tmp_path / "p.yaml")).definition == PipelineDefinition(
        name="all",
        source=Source(
            topics=("a", "b"),
            bootstrap="h:1",
            settings={"security.protocol": "SASL_SSL", "sasl.password": "${P}", "retries": "3"},
            value=Decoding(
                format="csv",
                unknown="reject",
                fields=(
                    Field("id", "long"),
                    Field("note", "string", required=False),
                    Field("tags", "int", required=False),
                ),
                csv={"delimiter": ";", "null": ""},
            ),
            key=Decoding(format="text"),
            starting="2026-01-31T00:00:00Z",
            batch_records=10_000,
            batch_bytes=64 * 1024 * 1024,
        ),
        steps=(
            Expect("positive", "id > 0", "drop"),
            Expect("expect-2", "id < 100"),
            Filter("f", "id <> 3"),
            Sql("q", "SELECT * FROM input", expand=True),
            Python("py", "steps.py", "f", schema="id long, s string", mode="pandas"),
        ),
        sinks=(
            ParquetSink(
                "out", partition_by=("id",), file_bytes=10**6, schema="add-columns", compression="zstd"
            ),
            DeltaSink("d", "lake", partition_by=("id", "note")),
            PostgresSink(
                "postgresql://u:${P}@h/d",
                "t",
                mode="upsert",
                key=("id",),
                delete_when="id < 0",
                schema_name="s",
            ),
            KafkaSink("out", bootstrap="k:1", key="id", value="note", headers={"h": "id"}, writers=2),
        ),
        dead_letter=DeadLetter("dead", settings={"linger.ms": "5"}),
        trigger="10s",
        home="/h",
        monitoring_group="g",
        spark={"spark.sql.shuffle.partitions": "4"},
        directory=str(tmp_path),
    )


def test_all_errors_come_at_once_each_with_line_and_column() -> None:
    assert errors("""\
        pipeline: p
        source:
          topics: [t]
          value:
            format: jsn
          stating: latest
        steps:
          - expect:
              that: id > 0
              else: quarantin
          - filtr: id > 1
          - sql: SELECT id FROM input
            expand: true
          - filter: now() > at
        sinks:
          - parquet: {pth: out}
          - kafka: {topic: t2, writers: none}
        triger: 10s
        """) == [
        "p.yaml:5:13: source.value.format: 'jsn' is not one of json, avro, protobuf, csv, text, bytes; "
        "did you mean 'json'?",
        "p.yaml:6:3: source.stating: source has no key 'stating'; did you mean 'starting'?",
        "p.yaml:10:13: steps[0].expect.else: 'quarantin' is not one of warn, drop, quarantine, fail; "
        "did you mean 'quarantine'?",
        "p.yaml:11:5: steps[1].filtr: there is no step 'filtr'; did you mean 'filter'?",
        "p.yaml:13:5: steps[2].expand: 'expand' belongs below 'sql', indented by two more spaces",
        "p.yaml:14:13: steps[3].filter.where: now() changes when a batch is recomputed after a crash; "
        "use _batch_time, the time that is fixed with the batch",
        "p.yaml:16:14: sinks[0].parquet: parquet needs 'path': The directory; each batch is one inside it.",
        "p.yaml:16:15: sinks[0].parquet.pth: parquet has no key 'pth'; did you mean 'path'?",
        "p.yaml:17:33: sinks[1].kafka.writers: expected a whole number, found 'none'",
        "p.yaml:18:1: triger: a pipeline has no key 'triger'; did you mean 'trigger'?",
    ]


@pytest.mark.parametrize(
    ("change", "error"),
    [
        (
            ("pipeline: p", "pipeline: p\npipeline: q"),
            "2:1: pipeline: the key 'pipeline' was given already in line 1",
        ),
        (("  topics: t", "\ttopics: t"), "3:1: this is not YAML: a tab cannot indent; use spaces"),
        (("topics: t", "topics: a: b"), "3:12: this is not YAML: a ':' stands where none can"),
        (("value: text", "value: {a: string?}"), "inside { } a text with '?' must be quoted"),
        (("sinks:", "--- \nsinks:"), "this is not YAML: there is a second document ('---')"),
        (("topics: t", "topics: !x t"), "3:11: source.topics: !x is a tag of YAML"),
        (("topics: t", "topics:"), "3:10: source.topics: expected a list, found empty"),
        (("topics: t", "topics: [t, t]"), "source.topics[1]: 't' is listed twice"),
        (("topics: t", "topics: orders-*"), "for several topics by a regular expression use 'pattern'"),
        (("topics: t", "pattern: '('"), "source.pattern: this is no regular expression"),
        (("topics: t", "topics: t\n  pattern: a.*"), "source.pattern: give 'topics' or 'pattern', not both"),
        (("topics: t", "bootstrap: h:1"), "source: it reads nothing; give 'topics' or a 'pattern'"),
        (("topics: t", "topics: t\n  starting: erliest"), "did you mean 'earliest'?"),
        (("topics: t", "topics: t\n  batch_bytes: 64Mb"), "'64Mb' has no unit of size; write B, kB, MB"),
        (("topics: t", "topics: t\n  batch_records: 1e3"), "expected a whole number, found '1e3'"),
        (
            ("topics: t", "topics: t\n  settings: {isolation.level: read_uncommitted}"),
            "isolation.level cannot be set: a pipeline reads committed records only",
        ),
        (
            ("topics: t", "topics: t\n  settings: {group.id: g}"),
            "group.id cannot be set: a pipeline joins no group",
        ),
        (("topics: t", "topics: t\n  bootstrap: ${K"), "source.bootstrap: a '${' is not closed by '}'"),
        (("value: text", "value: json"), "source.value: json needs 'fields'"),
        (
            ("value: text", "value: avro"),
            "source.value: avro needs 'schema_file' (or 'schema'), or a 'registry'",
        ),
        (
            ("value: text", "value: {format: avro, registry: 'http://r'}"),
            "name the 'fields' that become columns",
        ),
        (
            ("value: text", "value: {format: avro, registry: here, fields: {a: int}}"),
            "source.value.registry: it needs a 'url' such as http://127.0.0.1:8081",
        ),
        (
            ("value: text", "value: {format: avro, schema_file: no.avsc}"),
            "cannot read 'no.avsc': No such file",
        ),
        (("value: text", "value: {format: json, fields: {_a: int}}"), "names that start with '_' are kept"),
        (
            ("value: text", "value: {format: json, fields: {a: int, A: int}}"),
            "'a' and 'A' are one column to Spark",
        ),
        (
            ("value: text", "value: {format: json, fields: {a: itn}}"),
            "fields.a: 'itn' is no type; did you mean 'int'?",
        ),
        (
            ("value: text", "value: {format: csv, fields: {a: int}, csv: {quote: ab}}"),
            "'ab' is not one character",
        ),
        (("parquet: out", "parquet: s3://b/out"), "use a delta sink there"),
        (("parquet: out", "kafka: t"), "'t', which is also read: the pipeline would feed itself"),
        (("parquet: out", "kafka: {topic: o, headers: {hf-source: a}}"), "headers that start with 'hf-' are"),
        (("parquet: out", "kafka: p-dlt"), "'p-dlt' is the dead letter topic"),
        (("parquet: out", "parquet: out\n  - parquet: {path: ./out, name: b}"), "writes to the same place"),
        (
            ("parquet: out", "parquet: out\n  - parquet: b"),
            "sinks[1].parquet.name: sinks[0] is called 'parquet' too",
        ),
        (("parquet: out", "parquet: {path: a, name: dead-letter}"), "is the name of the dead letter sink"),
        (("parquet: out", "postgres: {url: u, table: t, mode: upsert}"), "upsert needs 'key'"),
        (("parquet: out", "postgres: {url: u, table: t, key: a}"), "a key is for 'mode: upsert'"),
        (("  - parquet: out", "  parquet: out"), "sinks: expected a list, found a mapping"),
        (("  - parquet: out", "  []"), "sinks: there is no sink; add one"),
        (("sinks:", "spark: {spark.speculation: true}\nsinks:"), "guarantees and results rest on 'false'"),
        (
            ("sinks:", "spark: {spark.sql.ansi.enabled: false}\nsinks:"),
            "guarantees and results rest on 'true'",
        ),
        (
            ("sinks:", "spark: {spark.sql.legacy.timeParserPolicy: LEGACY}\nsinks:"),
            "results rest on what Spark has of itself",
        ),
        (("sinks:", "spark: {driver.memory: 2g}\nsinks:"), "settings of Spark begin with 'spark.'"),
        (("sinks:", "trigger: fast\nsinks:"), "expected 'available-now' or a duration such as 10s"),
        (("sinks:", "dead_letter: t\nsinks:"), "dead letters go to 't', which is also read"),
        (
            ("sinks:", "steps: [{python: {file: no.py, function: f}}]\nsinks:"),
            "cannot read 'no.py': No such file",
        ),
        (("sinks:", "steps: [{python: f}]\nsinks:"), "'f': there is no such module; give 'file'"),
        (("sinks:", "steps: [{sql: SELECT 1}]\nsinks:"), "it does not read from input"),
        (("sinks:", "steps: [{sql: SELECT a FROM input}]\nsinks:"), "it loses _hf"),
        (("sinks:", "steps: [{filter: (a > 1}]\nsinks:"), "its parentheses do not match"),
        (("sinks:", "steps: [{filter: {name: parse, where: a}}]\nsinks:"), "choose another name"),
        (("sinks:", "steps: [{filter: a, name: x}]\nsinks:"), "'name' belongs below 'filter'"),
        (("sinks:", "steps: [{filter: a, expect: b}]\nsinks:"), "start a new '- expect:' for this"),
        (("pipeline: p", "pipeline: a--b"), "1:11: pipeline: 'a--b' cannot be a name"),
        (("pipeline: p", "pipeline: a-"), "1:11: pipeline: 'a-' cannot be a name"),
        (("pipeline: p", "pipeline: a b"), "1:11: pipeline: 'a b' cannot be a name"),
        (("pipeline: p\n", ""), "a pipeline needs 'pipeline': The pipeline's name."),
    ],
)
def test_what_is_wrong_is_said(change: tuple[str, str], error: str) -> None:  # HF409, HF410
    text = MINIMAL.replace(*change)
    assert text != MINIMAL
    found = errors(text)
    assert any(error in line for line in found), found
    assert all(line.startswith("p.yaml:") for line in found)


def test_an_error_in_one_key_is_not_repeated_as_its_consequences() -> None:
    found = errors(
        MINIMAL.replace("parquet: out", "postgres: {url: u, table: t, mode: upsrt, key: id}").replace(
            "topics: t", "topics: {a: b}"
        )
    )
    assert [line.split(": ")[1] for line in found] == ["source.topics", "sinks[0].postgres.mode"]


def test_yaml_does_not_guess() -> None:
    definition = loaded(
        MINIMAL.replace("topics: t", "topics: [no, 1.10, 0x1F]").replace("pipeline: p", "pipeline: 007")
    )
    assert definition.source.topics == ("no", "1.10", "0x1F")
    assert definition.name == "007"


def test_an_alias_within_itself_is_refused() -> None:
    assert any(
        "an alias" in line for line in errors("pipeline: p\nsource: &s\n  topics: *s\nsinks: [parquet: o]")
    )


def test_aliases_that_swell_are_read_once() -> None:
    levels = "\n".join(f"l{n}: &l{n} [{', '.join([f'*l{n - 1}'] * 9)}]" for n in range(1, 30))
    assert "has no key 'l0'" in errors(f"l0: &l0 [a]\n{levels}")[0]


def test_a_missing_file_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DefinitionError, match="No such file or directory; 'holdfast pipeline init'"):
        load_pipeline(str(tmp_path / "no.yaml"))


@given(st.text(alphabet="ab:{}[]-&*!|>'\"%@` \n\t0123#?,~", max_size=60))
def test_any_text_is_a_definition_or_an_error_with_findings(text: str) -> None:
    with pytest.raises(DefinitionError) as caught:
        parse_yaml(text, file="p.yaml")
    assert caught.value.findings


def test_schemas_are_read_from_the_files_they_stand_in(tmp_path: Path) -> None:
    schema = '{"type": "record", "name": "Order", "fields": [{"name": "id", "type": "long"}]}'
    (tmp_path / "order.avsc").write_text(schema)
    text = MINIMAL.replace("value: text", "value: {format: avro, schema_file: order.avsc}")
    assert parse_yaml(text, directory=str(tmp_path)).definition.source.value.schema == schema


def test_a_schema_that_is_none_is_said(tmp_path: Path) -> None:
    (tmp_path / "order.avsc").write_text('{"type": "recrd"}')
    text = MINIMAL.replace("value: text", "value: {format: avro, schema_file: order.avsc}")
    (line,) = errors(text, str(tmp_path))
    assert line.startswith("p.yaml:4:10: source.value: ")


def test_a_proto_file_and_its_compiled_form_both_load(tmp_path: Path) -> None:
    from google.protobuf import descriptor_pb2

    file = descriptor_pb2.FileDescriptorProto(name="order.proto", syntax="proto3")
    file.message_type.add(name="Order").field.add(name="id", number=1, type=3, label=1)
    (tmp_path / "order.desc").write_bytes(descriptor_pb2.FileDescriptorSet(file=[file]).SerializeToString())
    (tmp_path / "order.proto").write_text('syntax = "proto3";\nmessage Order { int64 id = 1; }\n')
    for name in ("order.desc", "order.proto"):
        text = MINIMAL.replace("value: text", f"value: {{format: protobuf, schema_file: {name}}}")
        assert parse_yaml(text, directory=str(tmp_path)).definition.source.value.schema
