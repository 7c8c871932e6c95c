"""The guide for tests holds: its programs pass, in a directory of their own, and their types are right."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.check

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "guides" / "testing-your-code.md"


def programs_of(page: Path, directory: Path) -> list[Path]:
    """Every program of a page as a module of its own."""
    found = re.findall(r"^```python\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)
    modules = [directory / f"test_{page.stem.replace('-', '_').lower()}_{at}.py" for at in range(len(found))]
    for module, program in zip(modules, found, strict=True):
        module.write_text(program)
    assert modules
    return modules


def test_every_test_of_the_guide_passes(tmp_path: Path) -> None:
    programs = programs_of(GUIDE, tmp_path)
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-q", str(tmp_path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stdout
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) >= len(programs)


def test_mypy_is_content_with_every_program_of_the_guide_and_the_readme(tmp_path: Path) -> None:
    """With the settings and the cache of `make types`, which has looked at all that they import."""
    programs = [*programs_of(GUIDE, tmp_path), *programs_of(ROOT / "README.md", tmp_path)]
    wrong = tmp_path / "test_wrong.py"
    wrong.write_text("from holdfast.testing import Record\n\nRecord.no_such_thing\n")
    run = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", *map(str, programs), str(wrong)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    errors = [line for line in run.stdout.splitlines() if ": error:" in line]
    assert len(errors) == 1, run.stdout + run.stderr
    assert "test_wrong.py:3" in errors[0]
