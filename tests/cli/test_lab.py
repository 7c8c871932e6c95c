"""`holdfast lab`: experiments by name, their results, a report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.cli.app import run_command
from holdfast.cli.exits import run
from holdfast.lab.engines import EngineUnavailable
from holdfast.lab.experiment import Experiment, Lab


def lab(*arguments: str) -> int:
    return run(lambda: run_command(["lab", *arguments]))


def test_the_list_has_every_experiment(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("list", "--output", "json") == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found) == 43
    assert {each["id"]: each["engines"] for each in found}["HF202"] == ["kafka"]
    assert lab("list") == 0
    assert "min.insync.replicas=1" in capsys.readouterr().out


@pytest.mark.check
def test_a_run_says_what_both_halves_showed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, results = tmp_path / "page.html", tmp_path / "results"
    assert lab("run", "hf205", "--seed", "7", "--page", str(page), "--results", str(results)) == 0
    said = capsys.readouterr().out
    assert said.startswith("HF205 HELD")
    assert "lost" in said
    assert "HF205 on holdfast: HELD" in page.read_text()
    page.unlink()
    report = ("--output", str(tmp_path / "report"), "--page", str(page))
    assert lab("report", "--results", str(results), *report) == 0
    assert page.is_file()
    assert "1 runs: 1 HELD" in capsys.readouterr().out
    assert (tmp_path / "report" / "HF205.svg").is_file()
    # What was kept can be judged again.
    assert run(lambda: run_command(["check", str(results / "HF205-holdfast-7" / "unsafe.jsonl")])) == 1
    assert run(lambda: run_command(["check", str(results / "HF205-holdfast-7" / "safe.jsonl")])) == 0


def test_several_seeds_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert lab("run", "HF211", "--seeds", "3", "--output", "json") == 0
    document = json.loads(capsys.readouterr().out)
    assert [each["seed"] for each in document["results"]] == [1, 2, 3]
    assert {each["outcome"] for each in document["results"]} == {"HELD"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["run"], "name experiments, or say --all"),
        (["run", "HF101", "--all"], "name experiments, or say --all"),
        (["run", "HF999"], "no experiment HF999"),
        (["run", "HF202", "--engine", "holdfast"], "does not run on"),
        (["run", "HF205", "--brokers", "3"], "no experiment is like that"),
        (["report", "--results", "nowhere", "--output", "x"], "no results in nowhere"),
    ],
)
def test_what_cannot_be_run_is_said_so(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert lab(*arguments) == 2
    assert says in capsys.readouterr().err


def nothing(lab: Lab) -> None:
    lab.note("send", "p", id="a", topic="t")


def loses(lab: Lab) -> None:
    nothing(lab)
    lab.note("ack", "p", id="a", topic="t")
    lab.note("log-end", "log", topic="t")


def lacks(lab: Lab) -> None:
    raise EngineUnavailable("no Java here")


@pytest.mark.parametrize(
    ("unsafe", "safe", "code", "says"),
    [
        (loses, loses, 1, "NOT HELD"),
        (loses, nothing, 4, "VOID"),
        (lacks, lacks, 3, "no Java here"),
    ],
)
def test_a_claim_that_does_not_hold_is_an_exit_code(
    unsafe: object,
    safe: object,
    code: int,
    says: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    made = Experiment("HF101", "x", unsafe, safe, "a", "b")  # type: ignore[arg-type]
    monkeypatch.setattr("holdfast.lab.experiments.EXPERIMENTS", {"HF101": made})
    assert lab("run", "HF101") == code
    said = capsys.readouterr()
    assert says in said.out + said.err
