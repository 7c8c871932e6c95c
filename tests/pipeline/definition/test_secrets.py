"""Secrets are expanded for a run alone, and show nowhere."""

from __future__ import annotations

import json
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.pipeline import Pipeline
from holdfast.pipeline.definition.explaining import explain
from holdfast.pipeline.definition.fingerprint import canonical
from holdfast.pipeline.definition.loading import parse_yaml
from holdfast.pipeline.definition.model import KafkaSink, Lookup, PipelineDefinition, PostgresSink
from holdfast.pipeline.definition.secrets import Redactor, SecretMissing, expand, expand_definition

YAML = """\
pipeline: p
source:
  topics: ["${PREFIX:-}orders"]
  bootstrap: ${KAFKA:-127.0.0.1:9092}
  settings:
    security.protocol: SASL_SSL
    sasl.username: ada
    sasl.password: ${PASSWORD}
    ssl.key.password: file:key.txt
  value:
    format: avro
    fields: {id: long}
    registry: {url: "http://r", basic.auth.user.info: "u:${PASSWORD}"}
sinks:
  - postgres: {url: "postgresql://u:${PASSWORD}@${HOST:-h}/d", table: t}
  - kafka: {topic: out, settings: {sasl.password: "${PASSWORD}"}}
dead_letter: {topic: dead, settings: {sasl.password: "${PASSWORD}"}}
spark: {spark.executorEnv.TOKEN: "${PASSWORD}"}
"""
PASSWORD = 'hunter2 "§/'
KEY = "a key\nof two lines"


@pytest.fixture
def definition(tmp_path: Path) -> PipelineDefinition:
    (tmp_path / "key.txt").write_text(KEY + "\n")
    return parse_yaml(YAML, directory=str(tmp_path)).definition


def test_references_are_expanded_everywhere(definition: PipelineDefinition) -> None:
    expanded, _ = expand_definition(definition, {"PASSWORD": PASSWORD, "KAFKA": "k:1"})
    source = expanded.source
    assert source.topics == ("orders",)
    assert source.bootstrap == "k:1"
    assert source.settings["sasl.password"] == PASSWORD
    assert source.settings["ssl.key.password"] == KEY
    assert source.value.registry == {"url": "http://r", "basic.auth.user.info": f"u:{PASSWORD}"}
    postgres, kafka = expanded.sinks
    assert isinstance(postgres, PostgresSink)
    assert isinstance(kafka, KafkaSink)
    assert postgres.url == f"postgresql://u:{PASSWORD}@h/d"
    assert kafka.settings["sasl.password"] == PASSWORD
    assert expanded.dead_letter is not None
    assert expanded.dead_letter.settings["sasl.password"] == PASSWORD
    assert expanded.spark["spark.executorEnv.TOKEN"] == PASSWORD


def test_a_variable_that_is_not_set_is_named_with_every_place_it_is_used(
    definition: PipelineDefinition,
) -> None:
    with pytest.raises(SecretMissing) as caught:
        expand_definition(definition, {})
    lines = str(caught.value).splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        "source.settings.sasl.password",
        "source.value.registry.basic.auth.user.info",
        "sinks[0].postgres.url",
        "sinks[1].kafka.settings.sasl.password",
        "dead_letter.settings.sasl.password",
        "spark.spark.executorEnv.TOKEN",
    ]
    assert all("the environment has no variable PASSWORD" in line for line in lines)


def test_a_secrets_file_that_cannot_be_read_is_named(definition: PipelineDefinition, tmp_path: Path) -> None:
    (tmp_path / "key.txt").unlink()
    with pytest.raises(SecretMissing, match=r"the secret's file 'key\.txt' cannot be read: No such file"):
        expand_definition(definition, {"PASSWORD": PASSWORD})


def test_an_error_shows_no_value(definition: PipelineDefinition, tmp_path: Path) -> None:
    (tmp_path / "key.txt").write_text("")
    with pytest.raises(SecretMissing) as caught:
        expand_definition(definition, {"PASSWORD": PASSWORD})
    assert PASSWORD not in str(caught.value)


def test_neither_explanation_nor_fingerprint_shows_a_secret(
    definition: PipelineDefinition, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PASSWORD", PASSWORD)
    for text in (json.dumps(explain(definition).as_json()), json.dumps(canonical(definition))):
        assert "hunter2" not in text
        assert "two lines" not in text


def test_the_redactor_puts_the_reference_back(definition: PipelineDefinition) -> None:
    _, redactor = expand_definition(definition, {"PASSWORD": PASSWORD})
    for carried in (
        PASSWORD,
        quote(PASSWORD, safe=""),
        json.dumps(PASSWORD),
        json.dumps({"a": f"u:{PASSWORD}"}),
    ):
        shown = redactor.redact(f"cannot log in with {carried}!")
        assert "hunter2" not in shown
        assert "${PASSWORD}" in shown
    assert redactor.redact(f"-{KEY}-") == "-file:key.txt-"


def test_a_password_written_in_the_file_is_taken_out_as_well() -> None:
    text = YAML.replace("sasl.password: ${PASSWORD}", "sasl.password: swordfish", 1)
    loaded = parse_yaml(text.replace("file:key.txt", "${PASSWORD}"))
    assert ["sasl.password is written in the definition" in str(each) for each in loaded.warnings] == [True]
    _, redactor = expand_definition(loaded.definition, {"PASSWORD": PASSWORD})
    assert redactor.redact("swordfish!") == "***!"


def test_short_values_are_taken_out_only_where_something_is_set_to_them() -> None:
    redactor = Redactor({"e": "${N}"})
    left_alone = "the step e of /e/rows.e, e-mail 'here'"
    assert redactor.redact(left_alone) == left_alone
    assert redactor.redact("postgresql://me:e@h/e n=e, 'e'") == "postgresql://me:${N}@h/e n=${N}, '${N}'"


def test_defaults_and_what_looks_like_them_are_no_secrets(definition: PipelineDefinition) -> None:
    _, redactor = expand_definition(definition, {"PASSWORD": PASSWORD, "KAFKA": "127.0.0.1:9092"})
    assert redactor.redact("cannot connect to 127.0.0.1:9092") == "cannot connect to 127.0.0.1:9092"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("a${X}b", "a1b"),
        ("${Y:-d}", "d"),
        ("${Y:-}", ""),
        ("${X:-d}", "1"),
        ("${E:-d}", "d"),
        ("$${X}", "${X}"),
        ("$X {X}", "$X {X}"),
        ("${X}${X}", "11"),
        ("${Y:-a:-b}", "a:-b"),
    ],
)
def test_how_references_are_written(text: str, value: str) -> None:
    assert expand(text, {"X": "1", "E": ""}) == value


@pytest.mark.parametrize("text", ["${", "a${X", "${}", "${1A}", "${A-B}", "${A:d}"])
def test_broken_references_are_errors(text: str) -> None:
    with pytest.raises(SecretMissing):
        expand(text, {"X": "1"})


@given(st.text(alphabet="${}:-AB\\", max_size=20), st.text(min_size=4, max_size=8))
def test_expansion_never_fails_otherwise_and_values_are_not_expanded_again(text: str, value: str) -> None:
    try:
        expanded = expand(text, {"A": "${B}" + value, "B": "never"})
    except SecretMissing:
        return
    if "${A}" in text and "$${A}" not in text:
        assert "${B}" + value in expanded


@given(st.text(min_size=4, max_size=12), st.text(max_size=12), st.text(max_size=12))
def test_what_was_redacted_holds_no_value(value: str, before: str, after: str) -> None:
    shown = Redactor({value: "«»"}).redact(before + value + after)
    assert value not in shown or value in "«»"


@pytest.mark.parametrize(
    ("name", "is_secret"),
    [
        ("sasl.password", True),
        ("ssl.key.password", True),
        ("sasl.jaas.config", True),
        ("basic.auth.user.info", True),
        ("ssl.key.pem", True),
        ("sasl.oauthbearer.client.secret", True),
        ("ssl.key.location", False),
        ("sasl.oauthbearer.token.endpoint.url", False),
        ("sasl.mechanism", False),
        ("security.protocol", False),
    ],
)
def test_which_settings_hold_secrets(name: str, is_secret: bool) -> None:
    text = YAML.replace("security.protocol: SASL_SSL", f"{name}: something").replace(
        "sasl.password: ${PASSWORD}", "", 1
    )
    text = text.replace("    ssl.key.password: file:key.txt\n", "")
    assert bool(parse_yaml(text).warnings) is is_secret


def test_a_lookups_address_is_expanded_and_a_files_path_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "address").write_text("postgresql://u:swordfish@h/d\n")
    pipeline = (
        Pipeline("p")
        .read("t", value="text")
        .lookup("file:address", query="SELECT 1", on="value", columns="a", name="database")
        .lookup("${WHERE}/table.parquet", on="value", columns="b", name="files")
        .write("parquet", path="out")
    )
    document = pipeline.definition(directory=str(tmp_path))
    expanded, redactor = expand_definition(document, {"WHERE": "/data"})
    database, files = expanded.steps
    assert isinstance(database, Lookup)
    assert isinstance(files, Lookup)
    assert database.table == "postgresql://u:swordfish@h/d"
    assert files.table == "/data/table.parquet"
    assert redactor.redact(f"cannot open {database.table}") == "cannot open file:address"
    with pytest.raises(
        SecretMissing, match=r"steps\[1\].lookup.table: the environment has no variable WHERE"
    ):
        expand_definition(document, {})
