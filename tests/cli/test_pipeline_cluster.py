"""`pipeline package`, `deploy`, and `run` with a master elsewhere, as they are called."""

from __future__ import annotations

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from holdfast.pipeline.cluster import packaging
from holdfast.pipeline.cluster.contents import Contents, Part

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


def test_deploy_without_dry_run_says_that_it_only_prints(run_here_anywhere: Run, file: Path) -> None:
    result = run_here_anywhere("pipeline", "deploy", str(file), "--to", "yarn")
    assert result.returncode == 2
    assert b"only prints" in result.stderr
    assert result.stdout == b""


def test_deploy_prints_what_spark_submit_takes(run_here_anywhere: Run, file: Path) -> None:
    arguments = (
        "pipeline",
        "deploy",
        str(file),
        "--to",
        "standalone",
        "--master",
        "spark://h:7077",
        "--dry-run",
    )
    result = run_here_anywhere(*arguments)
    words = shlex.split(result.stdout.decode().replace("\\\n", " "), comments=True)
    assert words[0] == "spark-submit"
    assert words[-6:] == ["pipeline", "run", str(file), "--master", "spark://h:7077", "--shared-filesystem"]
    as_json = json.loads(run_here_anywhere(*arguments, "--output", "json").stdout)
    assert as_json == {"arguments": words}


def test_deploy_to_kubernetes_prints_a_manifest_with_the_files(run_here_anywhere: Run, file: Path) -> None:
    result = run_here_anywhere(
        "pipeline", "deploy", str(file), "--to", "k8s", "--image", "i:1", "--namespace", "n", "--dry-run"
    )
    assert result.returncode == 0, result.stderr
    objects = list(yaml.safe_load_all(result.stdout))
    (definition,) = [each for each in objects if each["metadata"]["name"] == "holdfast-orders-definition"]
    assert definition["data"] == {
        "orders.yaml": file.read_text(),
        "steps.py": file.with_name("steps.py").read_text(),
    }
    assert {each["metadata"]["namespace"] for each in objects} == {"n"}


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
    assert result.stdout.startswith(f"{target}: 0 MB (0 MB unpacked, 5 files), for cpython 3.".encode())
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
