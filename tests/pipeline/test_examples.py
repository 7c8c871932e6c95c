"""The example pipelines as a user runs them: one command, and the results are what the generator knows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.testing.apache import die_with_parent
from holdfast.testing.postgres import NoPostgres, PostgresServer

EXAMPLES = Path(__file__).parents[2] / "examples" / "pipelines"
NAMES = ("activity", "logs", "changes", "payments")


def test_every_example_finds_what_was_generated(tmp_path: Path) -> None:
    try:
        server = PostgresServer()
    except NoPostgres as missing:
        pytest.skip(str(missing))
    options = ["--count", "1500", "--seed", "7", "--directory", str(tmp_path)]
    with server:
        ran = subprocess.run(
            [sys.executable, str(EXAMPLES / "run.py"), *NAMES, *options],
            env={**os.environ, "DATABASE_URL": server.url},
            capture_output=True,
            text=True,
            timeout=600,
            preexec_fn=die_with_parent,
        )
    assert ran.returncode == 0, ran.stdout + ran.stderr[-3000:]
    assert "should be" not in ran.stdout
    found = dict(re.findall(r"^  (visits|lines|rows|payments): (\d+)$", ran.stdout, re.MULTILINE))
    assert set(found) == {"visits", "lines", "rows", "payments"}
    assert all(int(number) > 100 for number in found.values()), found


def test_every_definition_says_at_its_top_what_it_shows() -> None:
    for name in NAMES:
        assert (EXAMPLES / f"{name}.yaml").read_text().startswith("# ")
