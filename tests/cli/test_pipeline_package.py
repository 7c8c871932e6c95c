"""`pipeline package`, and `run` with a master elsewhere, as they are called."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from holdfast.pipeline.cluster import packaging
from holdfast.pipeline.cluster.packaging import Contents, Part

Run = Callable[..., subprocess.CompletedProcess[bytes]]


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "orders.yaml"
    path.write_text(
        "pipeline: orders\nsource: {topics: orders, value: {format: json, fields: {id: long}}}\n"
        "steps:\n  - python: {file: steps.py, function: same}\n"
        "sinks: [parquet: out]\n"
    )
    (tmp_path / "steps.py").write_text("def same(batch):\n    return batch\n")
    return path


def test_package_tells_where_it_is_how_large_and_for_whom(
    run_here_anywhere: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = tmp_path / "part.py"
    part.write_text("x = 1\n")
    asked: list[list[str]] = []

    def find(more: list[str]) -> Contents:
        asked.append(more)
        return Contents((Part("part.py", str(part), "digest", part.stat().st_size),), {})

    monkeypatch.setattr(packaging, "find_contents", find)
    monkeypatch.setattr(packaging, "cache_directory", lambda home=None: str(tmp_path / "cache"))
    target = tmp_path / "parts.tar.gz"
    result = run_here_anywhere("pipeline", "package", "--to", str(target), "--with", "a", "--with", "b")
    assert result.returncode == 0, result.stderr
    assert asked == [["a", "b"]]
    assert target.is_file()
    # Machine code for the digests of rows is there where a sink has written.
    words = rf"{re.escape(str(target))}: 0 MB \(0 MB unpacked, [56] files\), for cpython 3\."
    assert re.match(words, result.stdout.decode())
    again = json.loads(run_here_anywhere("pipeline", "package", "--with", "a", "--output", "json").stdout)
    assert again["path"].startswith(str(tmp_path / "cache"))
    assert again["made_for"]["system"]
    assert run_here_anywhere("pipeline", "package", "--to", "parts.tar").returncode == 2


def test_run_with_a_master_elsewhere_refuses_local_paths_before_anything_else(
    run_here_anywhere: Run, file: Path
) -> None:
    result = run_here_anywhere("pipeline", "run", str(file), "--master", "spark://elsewhere:7077")
    assert result.returncode == 2
    assert b"--shared-filesystem" in result.stderr
    assert not (file.parent / ".holdfast").exists()
