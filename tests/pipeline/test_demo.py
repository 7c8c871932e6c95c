"""`holdfast demo` as a newcomer runs it, only smaller."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

DEMO = [sys.executable, "-m", "holdfast.cli", "demo", "--messages", "5000", "--orders", "4000"]


def test_the_demo_loses_nothing_and_says_where_everything_is(tmp_path: Path) -> None:
    done = subprocess.run(
        [*DEMO, "--keep", str(tmp_path)], capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "missing or twice" in done.stdout
    assert "none" in done.stdout
    assert "→ dead letter: parse" in done.stdout
    assert "Nothing was lost" in done.stdout
