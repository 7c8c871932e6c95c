"""The guide for tests holds: its programs are tests, and they pass in a directory of their own."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "testing-your-code.md"


def test_every_test_of_the_guide_passes(tmp_path: Path) -> None:
    programs = re.findall(r"^```python\n(.*?)^```$", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    for number, program in enumerate(programs):
        (tmp_path / f"test_program_{number}.py").write_text(program)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    assert f"{len(programs)} passed" in run.stdout
