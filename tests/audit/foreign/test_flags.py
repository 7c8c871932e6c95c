"""The flags of `holdfast audit` for what is no pipeline: which are needed, which refused, and what comes out."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

from holdfast.cli import exits
from holdfast.cli.app import run_command

if TYPE_CHECKING:
    from pathlib import Path

    from .conftest import World


def run_main(line: list[str]) -> int:
    """The command as its user runs it, in this process."""
    return exits.run(lambda: run_command(line))


SINK = ("--sink", "parquet:x")
MATCH = ("--match", "a = key")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (("checkpoint", "c", *MATCH), "Missing option '--sink'"),
        (("checkpoint", "c", *SINK), "Missing option '--match'"),
        (("checkpoint", *SINK, *MATCH), "Missing argument 'DIR'"),
        (("checkpoint", "c", *SINK, *MATCH, "--key", "key"), "No such option: --key"),
        (("checkpoint", "c", *SINK, *MATCH, "--from", "earliest"), "No such option: --from"),
        (("group", "g"), "Missing option '--sink'"),
        (("group", "g", *SINK, "--state", "f"), "No such option: --state"),
        (("topics", "a"), "Missing argument 'COPY'"),
        (("topics", "a", "b", *SINK), "No such option: --sink"),
        (("spool",), "name homes of spools, or topics"),
        (("spool", "d", *MATCH), "No such option: --match"),
        (("pipeline", "orders.yaml", "--where", "key = 'x'"), "No such option: --where"),
        (("pipeline",), "Missing argument 'PIPELINE'"),
        (("orders.yaml",), "No such command 'orders.yaml'"),
    ],
)
def test_what_a_command_lacks_or_does_not_take_is_refused(
    line: tuple[str, ...], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_main(["audit", *line]) == 2
    assert complaint in capsys.readouterr().err


def test_a_properties_file_says_how_to_get_there(
    world: World, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("HOLDFAST_BOOTSTRAP_SERVER", raising=False)
    world.send_orders(range(3), topic="a")
    world.send_orders(range(3), topic="b")
    config = tmp_path / "client.properties"
    config.write_text(
        f"bootstrap.servers={world.settings['bootstrap.servers']}\nsecurity.protocol=PLAINTEXT\n"
    )
    line = ("audit", "topics", "a", "b", "--key", "value.id", "--to-command-config", str(config))
    assert run_main([*line, "--command-config", str(config)]) == 0
    assert "proven" in capsys.readouterr().out
    config.write_text("socket.connection.setup.timeout.ms=200\n")
    elsewhere = ("--to-bootstrap-server", "127.0.0.1:1")
    assert run_main([*line, *elsewhere, "--bootstrap-server", world.settings["bootstrap.servers"]]) == 3
    assert "127.0.0.1:1" in capsys.readouterr().err


def test_what_is_not_there_is_no_failed_audit(world: World, capsys: pytest.CaptureFixture[str]) -> None:
    world.send_orders(range(3), topic="a")
    servers = ("--bootstrap-server", world.settings["bootstrap.servers"])
    assert run_main(["audit", "topics", "a", "none", *servers]) == 3
    assert "there is no topic 'none'" in capsys.readouterr().err


@pytest.mark.check
def test_the_command_prints_the_report_and_ends_with_the_verdict(world: World, tmp_path: Path) -> None:
    world.send_orders(range(6))
    world.batches({0: 6}, start={0: 0})
    world.rows([0, 1, 2, 4, 5, 5])
    flags = [
        str(world.checkpoint),
        "--sink",
        f"parquet:{world.out}",
        "--match",
        "id = value.id",
    ]
    page = tmp_path / "audit.html"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "holdfast.cli", "audit", "checkpoint", *flags),
            *("--bootstrap-server", world.settings["bootstrap.servers"]),
            *("--output", "json", "--html", str(page)),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert (report["mode"], report["verdict"]) == ("checkpoint", "failed")
    assert {(each["fate"], *each["ranges"][0]) for each in report["findings"]} == {
        ("lost", 3, 3),
        ("duplicated", 5, 5),
    }
    assert "duplicated" in page.read_text()
