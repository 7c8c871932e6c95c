"""`holdfast cluster`: brokers that outlive the command, and end when told."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.cli.app import run_command
from holdfast.cli.exits import run
from holdfast.lab.clusters import STATE, Cluster, Node, load_cluster, started_at
from holdfast.testing.apache import broker_answers


def cluster(*arguments: str) -> int:
    return run(lambda: run_command(["cluster", *arguments]))


@pytest.mark.check
def test_a_cluster_is_there_until_it_is_ended(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = ("--directory", str(tmp_path))
    # From a process of its own, which is gone when the cluster is asked for.
    command = [sys.executable, "-m", "holdfast.cli", "cluster", "up", *where]
    address = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    try:
        host, _, port = address.rpartition(":")
        assert broker_answers(host, int(port))
        assert cluster("status", *where, "--output", "json") == 0
        status = json.loads(capsys.readouterr().out)
        assert status["bootstrap_servers"] == address
        assert [node["state"] for node in status["nodes"]] == ["running"]
        assert cluster("up", *where) == 2
        assert "a cluster runs in" in capsys.readouterr().err
    finally:
        assert cluster("down", *where) == 0
    assert "1 process ended" in capsys.readouterr().out
    assert not broker_answers(host, int(port))
    assert cluster("status", *where) == 2
    assert "no cluster was started" in capsys.readouterr().err


def test_a_process_that_took_the_id_over_is_left_alone(tmp_path: Path) -> None:
    mine = started_at(os.getpid())
    assert mine is not None
    Cluster(tmp_path, "holdfast", "127.0.0.1:1", (Node("broker 1", os.getpid(), mine - 1),)).save()
    found = load_cluster(tmp_path)
    assert not found.nodes[0].is_alive()
    assert found.stop() == 0
    assert not (tmp_path / STATE).exists()


def test_a_dead_process_is_said_to_be_gone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Cluster(tmp_path, "holdfast", "127.0.0.1:1", (Node("broker 1", os.getpid(), 1),)).save()
    assert cluster("status", "--directory", str(tmp_path)) == 1
    said = capsys.readouterr()
    assert "gone" in said.out
    assert "not every process" in said.err


@pytest.mark.parametrize(("engine", "brokers"), [("holdfast", "3"), ("kafka", "2")])
def test_a_cluster_that_cannot_be_had_is_usage(
    engine: str, brokers: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cluster("up", "--engine", engine, "--brokers", brokers, "--directory", str(tmp_path)) == 2
    assert "cannot be had" in capsys.readouterr().err


def test_a_state_that_cannot_be_read_is_said_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / STATE).write_text("{}")
    assert cluster("down", "--directory", str(tmp_path)) == 2
    assert "cannot be read" in capsys.readouterr().err
