"""The first pipeline's guide holds as it is typed: each of its commands does what the text says of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.broker import BrokerProcess

TEXT = (Path(__file__).parents[2] / "docs" / "guides" / "first-pipeline.md").read_text(encoding="utf-8")
TYPED = re.findall(r"^```sh\n(.*?)^```$", TEXT, re.DOTALL | re.MULTILINE)


def typed(place: Path, blocks: list[str], address: str) -> subprocess.CompletedProcess[str]:
    """What a shell says that is given these blocks, one after the other."""
    tools = place / "bin"
    tools.mkdir(exist_ok=True)
    for name, arguments in {"holdfast": "-m holdfast.cli ", "python": ""}.items():
        (tools / name).write_text(f'#!/bin/sh\nexec {sys.executable} {arguments}"$@"\n')
        (tools / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{tools}:{os.environ['PATH']}",
        "HOLDFAST_BOOTSTRAP_SERVER": address,
        "KAFKA": address,
        "COLUMNS": "200",
    }
    return subprocess.run(
        ["bash", "-e"],
        input="\n".join(blocks),
        cwd=place,
        env=environment,
        capture_output=True,
        text=True,
        timeout=800,
        check=False,
    )


@pytest.mark.check
def test_what_needs_no_spark_works_as_typed(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path / "data")) as broker:
        done = typed(tmp_path, TYPED[:2], broker.bootstrap_servers)
    assert done.returncode == 0, done.stderr
    assert "orders.yaml: no error found" in done.stdout


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.java
def test_all_of_it_works_as_typed(tmp_path: Path) -> None:
    with BrokerProcess(str(tmp_path / "data")) as broker:
        done = typed(tmp_path, TYPED, broker.bootstrap_servers)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^0\s+1\s+ada\s+1\.805$", done.stdout, re.MULTILINE)
    assert "positive-amount" in done.stdout
    assert done.stdout.count("pipeline orders") >= 3
    assert "0 offsets to read" in done.stderr
    assert "lost 0, duplicated 0" in re.sub(r"\s+", " ", done.stdout)
