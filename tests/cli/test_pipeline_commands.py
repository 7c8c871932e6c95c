"""`holdfast pipeline` without Spark: init, check, explain, schema, status, reset, and what goes wrong."""

from __future__ import annotations

import json
import subprocess
import uuid
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.admin.settings import ConnectionSettings

Run = Callable[..., subprocess.CompletedProcess[bytes]]

YAML = """\
pipeline: {name}
source:
  topics: [{topic}]
  value:
    format: json
    unknown: keep
    fields:
      id: long
steps:
  - expect: id > 0
sinks:
  - parquet: out
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "p.yaml"
    path.write_text(YAML.format(name="p", topic="t"))
    return path


def test_init_writes_an_example_that_passes_check(run_here_anywhere: Run, tmp_path: Path) -> None:
    result = run_here_anywhere("pipeline", "init", str(tmp_path / "new"))
    assert result.returncode == 0
    written = result.stdout.decode().splitlines()
    assert [Path(path).name for path in written] == [
        "orders.yaml",
        "steps.py",
        "orders.test.yaml",
        "README.md",
    ]
    checked = run_here_anywhere("pipeline", "check", written[0], "--no-spark")
    assert (checked.returncode, checked.stderr) == (0, b"")
    assert b"no error found" in checked.stdout


def test_init_refuses_to_overwrite(run_here_anywhere: Run, tmp_path: Path) -> None:
    assert run_here_anywhere("pipeline", "init", str(tmp_path)).returncode == 0
    (tmp_path / "orders.yaml").write_text("mine")
    again = run_here_anywhere("pipeline", "init", str(tmp_path))
    assert again.returncode == 2
    assert b"not overwritten" in again.stderr
    assert (tmp_path / "orders.yaml").read_text() == "mine"


@pytest.mark.parametrize("command", ["check", "explain", "run", "status", "reset", "compact"])
def test_every_command_says_what_is_wrong_with_the_definition(
    run_here_anywhere: Run, file: Path, command: str
) -> None:
    file.write_text(file.read_text().replace("expect: id", "expct: id").replace("keep", "keeep"))
    result = run_here_anywhere("pipeline", command, str(file))
    assert result.returncode == 2
    assert result.stderr.decode().splitlines() == [
        f"{file}:6:14: source.value.unknown: 'keeep' is not one of keep, ignore, reject; did you mean 'keep'?",
        f"{file}:10:5: steps[0].expct: there is no step 'expct'; did you mean 'expect'?",
    ]
    assert result.stdout == b""


def test_check_as_json_has_places(run_here_anywhere: Run, file: Path) -> None:
    file.write_text(file.read_text().replace("id > 0", "rand() > 0"))
    result = run_here_anywhere("pipeline", "check", str(file), "--no-spark", "--output", "json")
    assert result.returncode == 2
    document = json.loads(result.stdout)
    assert document["valid"] is False
    (finding,) = document["findings"]
    assert (finding["path"], finding["line"], finding["column"]) == ("steps[0].expect.that", 10, 13)


def test_a_file_that_is_not_there_is_an_error(run_here_anywhere: Run, tmp_path: Path) -> None:
    result = run_here_anywhere("pipeline", "check", str(tmp_path / "no.yaml"))
    assert result.returncode == 2
    assert b"no.yaml: cannot read it: No such file or directory" in result.stderr


def test_check_without_java_says_what_to_install(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from holdfast.pipeline import java

    monkeypatch.setenv("JAVA_HOME", "/nowhere")
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(java, "USUAL_FOLDERS", ())
    result = run_here_anywhere("pipeline", "check", str(file))
    assert result.returncode == 3
    assert b"Spark needs Java 17 or newer" in result.stderr
    assert b"--no-spark" in result.stderr


def test_schema_prints_what_is_published(run_here_anywhere: Run) -> None:
    published = Path(__file__).parents[2] / "docs" / "pipeline.schema.json"
    assert run_here_anywhere("pipeline", "schema").stdout.decode() == published.read_text()


def test_explain_shows_hops_and_the_weakest(run_here_anywhere: Run, file: Path) -> None:
    file.write_text(file.read_text().replace("unknown: keep", "unknown: ignore"))
    result = run_here_anywhere("pipeline", "explain", str(file))
    assert result.returncode == 0
    lines = result.stdout.decode().splitlines()
    assert "  source: topic t at the default broker" in lines
    assert any(line.startswith("weakest: parse value, exactly once, some fields left out") for line in lines)
    assert lines[-1] == "raise it by: source.value.unknown: keep (or reject)"
    document = json.loads(run_here_anywhere("pipeline", "explain", str(file), "--output", "json").stdout)
    assert document["weakest"]["name"] == "parse value"


def test_explain_needs_no_secret_and_shows_none(
    run_here_anywhere: Run, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = file.read_text().replace(
        "  value:", "  bootstrap: ${KAFKA}\n  settings: {sasl.password: '${PASSWORD}'}\n  value:"
    )
    file.write_text(text)
    without = run_here_anywhere("pipeline", "explain", str(file))
    monkeypatch.setenv("PASSWORD", "hunter2")
    monkeypatch.setenv("KAFKA", "kafka.example:9092")
    result = run_here_anywhere("pipeline", "explain", str(file))
    assert result.stdout == without.stdout
    assert b"${KAFKA} with sasl.password" in result.stdout
    assert b"hunter2" not in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["run", "status", "reset"])
def test_a_variable_that_is_missing_is_named_with_its_line(
    run_here_anywhere: Run, file: Path, command: str
) -> None:
    file.write_text(file.read_text().replace("parquet: out", "parquet: ${OUT_OF_NOWHERE}/out"))
    result = run_here_anywhere("pipeline", command, str(file))
    assert result.returncode == 2
    assert result.stderr.decode() == (
        f"{file}:12:14: sinks[0].parquet.path: the environment has no variable OUT_OF_NOWHERE (or it is empty); "
        "set it, or write ${OUT_OF_NOWHERE:-default}\n"
    )


def test_a_sink_that_does_not_exist_is_refused(run_here_anywhere: Run, file: Path) -> None:
    result = run_here_anywhere("pipeline", "reset", str(file), "--sink", "parkuet", "--yes")
    assert result.returncode == 2
    assert b"the pipeline has no sink 'parkuet'; did you mean 'parquet'?" in result.stderr


def test_explain_asks_the_broker(run_here: Run, file: Path, make_topic: Callable[..., str]) -> None:
    topic = make_topic("--config", "holdfast.flush=os")
    file.write_text(YAML.format(name="p", topic=topic))
    result = run_here("pipeline", "explain", str(file), "--ask-broker", "--output", "json")
    assert result.returncode == 0, result.stderr
    weakest = json.loads(result.stdout)["weakest"]
    assert weakest["guarantee"] == "may lose acknowledged records"
    assert weakest["raise"] == f"holdfast configs alter --topic {topic} --add-config holdfast.flush=group"


def test_explain_of_a_topic_that_is_not_there(run_here: Run, file: Path) -> None:
    file.write_text(YAML.format(name="p", topic="nowhere-at-all"))
    result = run_here("pipeline", "explain", str(file), "--ask-broker")
    assert result.returncode == 1
    assert b"create it with 'holdfast topics create --topic nowhere-at-all'" in result.stderr


@pytest.mark.check
def test_an_unreachable_broker_is_exit_code_3(
    run_here_anywhere: Run, file: Path, dead_address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ConnectionSettings, "connect_timeout_ms", 300)
    result = run_here_anywhere(
        "pipeline", "explain", str(file), "--ask-broker", "--bootstrap-server", dead_address
    )
    assert result.returncode == 3
    assert dead_address.encode() in result.stderr


def test_status_and_reset_of_a_pipeline_that_never_ran(run_here: Run, file: Path, topic: str) -> None:
    file.write_text(YAML.format(name=f"p-{uuid.uuid4().hex[:8]}", topic=topic))
    status = run_here("pipeline", "status", str(file), "--output", "json")
    assert status.returncode == 0, status.stderr
    document = json.loads(status.stdout)
    assert {sink["name"]: sink["entry"] for sink in document["sinks"]} == {
        "dead-letter": None,
        "parquet": None,
    }
    shown = run_here("pipeline", "status", str(file))
    assert b"nothing yet" in shown.stdout
    reset = run_here("pipeline", "reset", str(file))
    assert reset.returncode == 2
    assert b"has no ledger; nothing to forget" in reset.stdout
    assert b"--yes does it unasked" in reset.stderr


def test_compact_of_a_pipeline_that_never_ran_has_nothing_to_merge(
    run_here_anywhere: Run, file: Path
) -> None:
    result = run_here_anywhere("pipeline", "compact", str(file))
    assert (result.returncode, result.stdout) == (0, b"nothing to merge\n")
    as_json = run_here_anywhere("pipeline", "compact", str(file), "--output", "json", "--sink", "parquet")
    assert json.loads(as_json.stdout) == []
