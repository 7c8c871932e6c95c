from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.cli.client import parse_assignments, read_properties, translate
from holdfast.cli.topics import name_pattern, parse_replica_assignment, pattern_to_change, select_topics
from holdfast.errors import ConfigError, UsageError


def test_names_of_the_java_client_become_librdkafkas(capsys: pytest.CaptureFixture[str]) -> None:
    given = {
        "linger.ms": "5",
        "max.request.size": "2000000",
        "buffer.memory": "33554432",
        "fetch.max.wait.ms": "100",
        "value.deserializer": "x",
        "sasl.jaas.config": 'org.example.Plain required username="me" password="pa=ss";',
    }
    assert translate(given) == {
        "linger.ms": "5",
        "message.max.bytes": "2000000",
        "queue.buffering.max.kbytes": "32768",
        "fetch.wait.max.ms": "100",
        "sasl.username": "me",
        "sasl.password": "pa=ss",
    }
    assert capsys.readouterr().err == "holdfast: value.deserializer has no effect in this client\n"


def test_settings_that_cannot_be_right_are_refused() -> None:
    with pytest.raises(ConfigError, match="username"):
        translate({"sasl.jaas.config": "nothing"})
    with pytest.raises(ConfigError, match="whole number"):
        translate({"buffer.memory": "much"})
    with pytest.raises(ConfigError, match="--property"):
        parse_assignments(["name"], "--property")


def test_values_of_flags_keep_their_blanks() -> None:
    assert parse_assignments(["key.separator= ", "a=b=c"], "--property") == {"key.separator": " ", "a": "b=c"}


def test_a_properties_file_is_read(tmp_path: Path) -> None:
    file = tmp_path / "client.properties"
    file.write_text("# comment\nsecurity.protocol = PLAINTEXT\nlong=a,\\\n  b\n")
    assert read_properties(str(file)) == {"security.protocol": "PLAINTEXT", "long": "a,b"}


def test_a_pattern_spans_whole_names_and_a_comma_means_or() -> None:
    names = ["orders", "orders-dlq", "payments"]
    assert select_topics(names, name_pattern("orders")) == ["orders"]
    assert select_topics(names, name_pattern("orders, pay.*")) == ["orders", "payments"]
    assert select_topics(names, name_pattern(None)) == names
    with pytest.raises(UsageError):
        name_pattern("(")


def test_changing_takes_what_could_be_a_name_literally() -> None:
    names = ["orders.v1", "orders-v1"]
    assert select_topics(names, name_pattern("orders.v1")) == ["orders-v1", "orders.v1"]
    assert select_topics(names, pattern_to_change("orders.v1")) == ["orders.v1"]
    assert select_topics(names, pattern_to_change("orders.*")) == ["orders-v1", "orders.v1"]


def test_a_replica_assignment_is_parsed() -> None:
    assert parse_replica_assignment("0:1,1:2") == [[0, 1], [1, 2]]
    for wrong in ("0:0", "0:1,2", "a", ""):
        with pytest.raises(UsageError):
            parse_replica_assignment(wrong)
