"""The archive of Python parts: what is in it, that it is the same each time, and what it says to a wrong Python."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from holdfast.errors import UsageError
from holdfast.pipeline.cluster import packaging, worker_start
from holdfast.pipeline.cluster.packaging import (
    Contents,
    Part,
    PartMissing,
    find_contents,
    find_distributions,
    make_package,
    place_package,
    serve_from_home,
)


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Two small files in the place of everything that is installed."""
    directory = tmp_path / "installed"
    directory.mkdir()
    (directory / "one.py").write_text("ONE = 1\n")
    (directory / "two.so").write_bytes(b"\x7fELF")

    def find(more: object = ()) -> Contents:
        paths = [directory / "one.py", directory / "two.so"]
        found = [
            Part(f"some/{path.name}", str(path), path.read_bytes().hex(), path.stat().st_size)
            for path in paths
        ]
        return Contents(tuple(found), {"some": "1.0"})

    monkeypatch.setattr(packaging, "find_contents", find)
    return directory


def test_the_parts_are_those_that_workers_use() -> None:
    found = find_contents()
    names = {part.name for part in found.parts}
    assert {
        "holdfast/reader/kernel.py",
        "pyspark_holdfast/__init__.py",
        "holdfast/pipeline/worker_daemon.py",
    } <= names
    assert any(name.startswith("pyarrow/libarrow.so") for name in names)
    assert any(name.endswith("libllvmlite.so") for name in names)
    assert {
        "numpy",
        "numba",
        "kio",
        "confluent-kafka",
        "psycopg",
        "psycopg-binary",
        "pandas",
    } <= found.versions.keys()
    assert not {"pyspark", "py4j", "deltalake", "pytest", "hypothesis"} & found.versions.keys()
    outside = [name for name in names if name.startswith(("holdfast/testing/", "holdfast/cli/", "..", "/"))]
    assert outside == []
    assert [
        name for name in names if "/tests/" in name or "__pycache__" in name or name.endswith(".pth")
    ] == []
    assert [part.name for part in found.parts] == sorted(names)


def test_a_distribution_that_is_not_installed_is_named() -> None:
    with pytest.raises(PartMissing, match="no-such-thing is not installed"):
        find_distributions([("No_Such.Thing", ())])


def test_requirements_of_extras_count_only_when_the_extra_is_asked_for() -> None:
    plain = find_distributions([("holdfast", ())])
    assert "pandas" not in plain
    assert {"pandas", "psycopg-binary"} <= find_distributions([("holdfast", ("spark",))]).keys()
    assert "deltalake" in packaging.NOT_SHIPPED


def test_the_archive_holds_the_parts_the_manifest_and_the_machine_code(parts: Path, tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []
    made = make_package(str(tmp_path / "cache"), progress=lambda done, total: told.append((done, total)))
    with tarfile.open(made.path) as archive:
        members = {member.name: member for member in archive.getmembers()}
        manifest = json.loads(archive.extractfile("holdfast-package.json").read())  # type: ignore[union-attr]
        assert archive.extractfile("some/one.py").read() == b"ONE = 1\n"  # type: ignore[union-attr]
    kernels = [name for name in members if name.endswith(".o")]
    compiled = {name.split("-")[0].rpartition("/")[2] for name in kernels}
    assert compiled == {"kernel", "formats", "rows"}
    folder = members.pop("holdfast/reader/__pycache__")
    assert (folder.isdir(), folder.mode) == (True, 0o755)
    assert members.keys() == {
        "holdfast-package.json",
        "holdfast_worker.py",
        "some/one.py",
        "some/two.so",
        *kernels,
    }
    assert members["some/two.so"].mode == 0o755
    assert {(member.uid, member.gid, member.mtime) for member in members.values()} == {
        (0, 0, packaging.TIME_S)
    }
    assert manifest["made_for"] == worker_start.facts()
    assert manifest["distributions"] == {"some": "1.0"}
    assert told == [(8, 12), (12, 12)]


def test_the_same_parts_make_the_same_bytes_and_are_packed_once(parts: Path, tmp_path: Path) -> None:
    one = make_package(str(tmp_path / "one"))
    other = make_package(str(tmp_path / "other"))
    assert Path(one.path).read_bytes() == Path(other.path).read_bytes()
    assert (one.is_new, make_package(str(tmp_path / "one")).is_new) == (True, False)


def test_a_changed_part_makes_another_archive_and_few_are_kept(parts: Path, tmp_path: Path) -> None:
    seen = []
    for number in range(5):
        (parts / "one.py").write_text(f"ONE = {number}\n")
        seen.append(make_package(str(tmp_path / "cache")).path)
        os.utime(seen[-1], (number, number))
    assert len(set(seen)) == 5
    kept = sorted(os.listdir(tmp_path / "cache"))
    assert kept == sorted(map(os.path.basename, seen[-packaging.KEPT :]))


def test_a_run_serves_its_own_link_which_the_cache_cannot_take_away(parts: Path, tmp_path: Path) -> None:
    old = make_package(str(tmp_path / "cache"))
    serve_from_home(old, str(tmp_path / "home"))
    (parts / "one.py").write_text("ONE = 2\n")
    made = make_package(str(tmp_path / "cache"))
    served = serve_from_home(made, str(tmp_path / "home"))
    os.unlink(made.path)
    assert tarfile.is_tarfile(served)
    assert os.listdir(tmp_path / "home" / "package") == [os.path.basename(served)]


def test_an_archive_whose_name_spark_would_not_understand_is_refused(parts: Path, tmp_path: Path) -> None:
    made = make_package(str(tmp_path / "cache"))
    with pytest.raises(UsageError, match=r"ends in \.tar\.gz"):
        place_package(made, str(tmp_path / "parts.tar"))
    assert place_package(made, str(tmp_path / "new" / "parts.tgz")) == str(tmp_path / "new" / "parts.tgz")


@pytest.mark.parametrize("name", ["python", "machine", "libc", "implementation", "system"])
def test_a_worker_with_another_python_says_so_and_starts_nothing(name: str, tmp_path: Path) -> None:
    made_for = {**worker_start.facts(), name: "something-else"}
    (tmp_path / "holdfast-package.json").write_text(json.dumps({"made_for": made_for}))
    start = tmp_path / "holdfast_worker.py"
    start.write_bytes(Path(worker_start.__file__).read_bytes())
    done = subprocess.run(
        [sys.executable, "-I", "-S", str(start)], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(f"holdfast-package: made for {name} something-else, and ")
