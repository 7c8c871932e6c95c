"""`holdfast version` names the commit of a checkout and of a wheel, and says when nobody knows it."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

from holdfast.cli.version import origin

Run = Callable[..., subprocess.CompletedProcess[bytes]]
ROOT = Path(__file__).parents[2]


def test_a_checkout_names_its_commit(run_here_anywhere: Run) -> None:
    found = json.loads(run_here_anywhere("version", "--output", "json").stdout)
    assert found["wheel"] is None
    if (ROOT / ".git").exists():
        head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True)
        assert found["commit"].rstrip("+") == head.stdout.strip()
        assert f"commit {found['commit']}, no wheel)" in run_here_anywhere("version").stdout.decode()


def test_a_wheel_names_the_commit_it_was_built_from(tmp_path: Path) -> None:
    package = tmp_path / "site-packages" / "holdfast"
    package.mkdir(parents=True)
    assert origin(package)["commit"] is None  # built from an archive of the sources
    (package / "build.json").write_text('{"commit": "0123abcd"}')
    found = origin(package)
    assert found["commit"] == "0123abcd"
    assert re.fullmatch(r"holdfast-\S+-py3-none-any\.whl", found["wheel"] or "")


def test_a_checkout_that_git_does_not_know_has_no_commit(tmp_path: Path) -> None:
    (tmp_path / ".git").write_text("gitdir: nowhere\n")
    package = tmp_path / "src" / "holdfast"
    package.mkdir(parents=True)
    assert origin(package) == {"commit": None, "wheel": None}
