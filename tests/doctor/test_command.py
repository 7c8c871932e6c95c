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
