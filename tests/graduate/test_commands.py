"""The hand-over as somebody does it who has read the guide: from the command line, every step a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.broker import BrokerProcess
from holdfast.testing.processes import free_ports

pytestmark = [pytest.mark.long, pytest.mark.java, pytest.mark.timeout(600)]


def holdfast(*arguments: str, code: int = 0, given: str = "") -> str:
    """What a command says."""
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli", *arguments],
        input=given,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def test_there_and_back_from_the_command_line(tmp_path: Path) -> None:
    port, controller = free_ports(2)
    data, output, server = str(tmp_path / "data"), str(tmp_path / "out"), f"127.0.0.1:{port}"
    at = ("--bootstrap-server", server)
    places = ("--data-dir", data, "--listen", server, "--controller", f"127.0.0.1:{controller}")
    to = ("--output", output)
    lines = "".join(f"{number}\n" for number in range(500))
    with BrokerProcess(data, listen=server) as broker:
        holdfast("topics", "create", *at, "--topic", "orders", "--partitions", "3")
        holdfast("produce", *at, "--topic", "orders", given=lines)
        assert "digested" in holdfast("graduate", "prepare", "--data-dir", data, *to)
        assert "is in use" in holdfast("graduate", *places, *to, code=2)
        assert broker.stop() == 0
    assert "nothing was changed" in holdfast("graduate", *places, *to, "--dry-run")
    holdfast("graduate", *places, *to)
    assert "is as holdfast left it" in holdfast("graduate", "--undo", *to)
    try:
        assert f"Apache Kafka serves on {server}" in holdfast("graduate", *places, *to, "--start")
        assert "is in use" in holdfast("graduate", "--start", *to, code=2)
        assert holdfast("graduate", "verify", *to, *at).startswith("proven: ")
        holdfast("produce", *at, "--topic", "orders", given="from Kafka\n")
    finally:
        assert "1 process ended" in holdfast("cluster", "down", "--directory", output)
    with BrokerProcess(data, listen=server):
        said = holdfast(
            "consume", *at, "--topic", "orders", "--from-beginning", "--max-messages", "501"
        ).splitlines()
        assert sorted(said[:501]) == sorted([*lines.split(), "from Kafka"])


def test_the_demo_hands_over_under_load(tmp_path: Path) -> None:
    said = holdfast("demo", "--graduate", "--keep", str(tmp_path / "kept"))
    assert "Nothing was lost" in said
    assert "proven" in said
