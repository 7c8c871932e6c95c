"""`holdfast doctor`: its exit codes and what it prints."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli import exits
from holdfast.cli.app import run_command


def run(*arguments: str) -> int:
    return exits.run(lambda: run_command(["doctor", *arguments]))


@pytest.fixture
def files(tmp_path: Path) -> dict[str, str]:
    texts = {
        "clean": "acks=all\n",
        "risky": "acks=1\n",
        "mild": "max.in.flight.requests.per.connection=10\n",
        "broken": "acks=\\u1\n",
    }
    for name, text in texts.items():
        (tmp_path / f"{name}.properties").write_text(text)
    return {name: str(tmp_path / f"{name}.properties") for name in texts}


@pytest.mark.parametrize(
    ("names", "flags", "code"),
    [
        (["clean"], [], 0),
        (["risky"], [], 1),
        (["mild"], [], 1),
        (["mild"], ["--fail-on", "error"], 0),
        (["clean", "broken"], [], 4),
        (["risky", "broken"], [], 1),
        (["mild", "broken"], ["--fail-on", "error"], 4),
        (["clean"], ["--client", "sarama"], 2),
        (["clean"], ["--output", "xml"], 2),
        ([], [], 2),
    ],
)
def test_exit_codes(names: list[str], flags: list[str], code: int, files: dict[str, str]) -> None:
    asked = [word for name in names for word in ("--producer", files[name])]
    assert run(*asked, *flags) == code


def test_a_finding_is_told_with_place_loss_and_fix(
    files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--producer", files["risky"])
    said = capsys.readouterr().out
    assert f"HF102 error  {files['risky']}:1" in said
    assert "can be lost:" in said
    assert "fix: acks=all" in said


def test_fix_prints_the_fixes_alone(files: dict[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--producer", files["risky"], "--fix") == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if not line.startswith("#")] == ["acks=all"]
    assert Path(files["risky"]).read_text() == "acks=1\n"


@pytest.mark.parametrize("output", ["json", "sarif"])
def test_programs_get_json_and_nothing_else(
    output: str, files: dict[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("--producer", files["risky"], "--producer", files["broken"], "--output", output)
    json.loads(capsys.readouterr().out)


def test_an_accepted_finding_does_not_fail(
    files: dict[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    accepted = tmp_path / "accepted.yaml"
    accepted.write_text("- {id: HF102, where: '*', reason: metrics only, expires: 9999-12-31}\n")
    assert run("--producer", files["risky"], "--suppressions", str(accepted)) == 0
    assert "1 suppressed" in capsys.readouterr().out
    accepted.write_text("- {id: HF102, where: '*', reason: metrics only, expires: 2020-01-01}\n")
    assert run("--producer", files["risky"], "--suppressions", str(accepted)) == 1
    accepted.write_text("- {id: HF102, where: '*', expires: 9999-12-31}\n")
    assert run("--producer", files["risky"], "--suppressions", str(accepted)) == 2


def test_a_name_that_is_no_text_does_not_stop_the_report(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = bytes(tmp_path) + b"/p\xff.properties"
    with open(path, "w") as file:
        file.write("acks=1\n")
    for output in ("table", "json", "sarif", "junit"):
        assert run("--producer", path.decode("utf-8", "surrogateescape"), "--output", output) == 1
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("texts", "code"),
    [
        ({"app.yaml": "server: {port: 8080}\n"}, 4),
        ({"empty.properties": ""}, 4),
        ({"worker.properties": "producer.acks=0\n", "app.yaml": "server: {port: 8080}\n"}, 1),
        ({"producer.properties": "bootstrap.servers=b\nacks=all\n", "app.yaml": "a: 1\n"}, 4),
        ({"producer.properties": "bootstrap.servers=b\nacks=all\n"}, 0),
        ({"p.properties": "bootstrap.servers=b\nacks=${ACKS}\n"}, 4),
    ],
    ids=lambda each: "+".join(each) if isinstance(each, dict) else str(each),
)
def test_what_is_not_recognised_is_not_examined(
    texts: dict[str, str], code: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    assert run(*(str(tmp_path / name) for name in texts)) == code
    said = capsys.readouterr().out
    assert ("not examined:" in said) == (code == 4 or len(texts) > 1)
    assert "nothing found;" not in said or code == 0


def test_what_is_not_examined_stands_in_every_output(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "app.yaml"
    path.write_text("server: {port: 8080}\n")
    said = {}
    for output in ("json", "sarif", "junit"):
        assert run(str(path), "--output", output) == 4
        said[output] = capsys.readouterr().out
    document = json.loads(said["json"])
    assert document["complete"] is False
    assert [gap["what"] for gap in document["notExamined"]] == [str(path)]
    (invocation,) = json.loads(said["sarif"])["runs"][0]["invocations"]
    assert invocation["executionSuccessful"] is False
    assert str(path) in invocation["toolExecutionNotifications"][0]["message"]["text"]
    assert 'errors="1"' in said["junit"]


def test_a_directory_is_searched_for_what_is_about_kafka(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "package.json").write_text('{"name": "x"}')
    (tmp_path / "node_modules").mkdir()
    (tmp_path / "node_modules" / "p.properties").write_text("acks=0\nbootstrap.servers=b\n")
    assert run(str(tmp_path)) == 4
    assert "nothing in it that the doctor knows" in capsys.readouterr().out
    (tmp_path / "deploy").mkdir()
    (tmp_path / "deploy" / "kafka.env").write_text("KAFKA_UNCLEAN_LEADER_ELECTION_ENABLE=true\n")
    (tmp_path / "deploy" / "compose.yml").write_text(
        "services:\n  kafka:\n    image: apache/kafka\n    env_file: [kafka.env]\n"
    )
    (tmp_path / "Main.java").write_text("import org.apache.kafka.clients.producer.KafkaProducer;\n")
    assert run(str(tmp_path)) == 1
    said = capsys.readouterr().out
    assert f"HF204 error  {tmp_path}/deploy/kafka.env:1" in said
    assert "1 .java file with Kafka in them" in said
