"""Every minor version of Spark that the extra allows, beside the installed one, runs pipelines end to end."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

OTHERS = ("4.0", "4.1", "4.2")
WITH_STREAMS = ("4.2",)
"""Those whose Python sources are told how much a batch may hold."""


@pytest.mark.long
@pytest.mark.spark
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("version", OTHERS)
def test_pipelines_run_end_to_end_on_another_version(version: str, tmp_path: Path) -> None:
    """pip fetches it: this is for machines with a package index."""
    pip = (
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--target",
        str(tmp_path),
        f"pyspark~={version}.0",
    )
    subprocess.run(pip, check=True)
    modules = ["test_end_to_end.py", "test_stateful_guide.py"]
    modules += ["test_source.py"] if version in WITH_STREAMS else []
    here = Path(__file__).parent
    path = os.pathsep.join(filter(None, (str(tmp_path), os.environ.get("PYTHONPATH"))))
    environment = {**os.environ, "PYTHONPATH": path}
    asked = (sys.executable, "-c", "import pyspark; print(pyspark.__version__)")
    assert subprocess.check_output(asked, env=environment, text=True).startswith(f"{version}.")
    ran = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "no:cacheprovider",
            *(str(here / name) for name in modules),
        ],
        env=environment,
        cwd=here.parents[1],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ran.returncode == 0, ran.stdout[-4000:]
    assert "passed" in ran.stdout
    assert "skipped" not in ran.stdout
