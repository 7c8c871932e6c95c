"""`holdfast check`: a file in, a verdict and an exit code out."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.app import run_command
from holdfast.cli.exits import run

SENT = '{"t":1,"actor":"p","event":"send","id":"a","topic":"t"}\n'
ACKED = '{"t":2,"actor":"p","event":"ack","id":"a","topic":"t","partition":0,"offset":0}\n'
STORED = '{"t":3,"actor":"log","event":"stored","id":"a","topic":"t","partition":0,"offset":0}\n'
END = '{"t":4,"actor":"log","event":"log-end","topic":"t"}\n'


def checked(tmp_path: Path, text: str, *flags: str) -> int:
    path = tmp_path / "history.jsonl"
    path.write_text(text, encoding="utf-8")
    return run(lambda: run_command(["check", str(path), *flags]))


@pytest.mark.parametrize(
    ("text", "code", "says"),
    [
        (SENT + ACKED + STORED + END, 0, "verdict: clean"),
        (SENT + ACKED + END, 1, "lost: a: it was acknowledged, and is not in the log"),
        (SENT + ACKED + STORED + "broken\n" + END, 4, "not read: line 4: not JSON"),
        (SENT + ACKED + "broken\n" + END, 1, "verdict: violated (in part)"),
        (SENT, 4, "void: too few successes: 0 of 1"),
        ("", 4, "void: too few successes"),
    ],
)
def test_a_history_is_judged(
    text: str, code: int, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert checked(tmp_path, text) == code
    assert says in capsys.readouterr().out


def test_json_has_everything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert checked(tmp_path, SENT + ACKED + END, "--output", "json") == 1
    document = json.loads(capsys.readouterr().out)
    assert (document["verdict"], document["violations"]["lost"]) == ("violated", ["a"])
    assert document["counts"]["acknowledged"] == 1


def test_a_long_list_is_cut_in_the_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lines = "".join(
        SENT.replace('"a"', f'"m{n}"')
        + ACKED.replace('"a"', f'"m{n}"').replace('"t":2', '"t":1').replace('"offset":0', f'"offset":{n}')
        for n in range(25)
    )
    assert checked(tmp_path, lines + END) == 1
    assert "lost: and 5 more (--output json tells all)" in capsys.readouterr().out


def test_a_file_that_is_not_there_is_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(lambda: run_command(["check", str(tmp_path / "none")])) == 2
    assert "cannot read" in capsys.readouterr().err
