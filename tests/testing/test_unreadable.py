"""What cannot be looked at is not absent: on a real disk and on the simulated one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from holdfast.real import RealFileSystem
from holdfast.seams import FileSystem
from holdfast.testing.disk import SimulatedDisk


@pytest.fixture(params=["real", "simulated"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[FileSystem, str]:
    """A directory `there` with a file in it, which the file system can no longer look at."""
    files: FileSystem = RealFileSystem()
    top = str(tmp_path)
    if request.param == "simulated":
        files, top = SimulatedDisk(), "/top"
    files.make_directory(f"{top}/there")
    files.open(f"{top}/there/file", "create").close()
    if isinstance(files, SimulatedDisk):
        files.unreadable.add(f"{top}/there")
    else:
        # A name that leads to itself: root may look at everything else.
        (tmp_path / "there").rename(tmp_path / "elsewhere")
        (tmp_path / "there").symlink_to(tmp_path / "there")
    return files, top


@pytest.mark.parametrize("name", ["there", "there/file"])
def test_what_cannot_be_looked_at_raises(directory: tuple[FileSystem, str], name: str) -> None:
    files, top = directory
    for look in (files.exists, files.is_directory):
        with pytest.raises(OSError) as raised:
            look(f"{top}/{name}")
        assert raised.value.errno in (errno.EIO, errno.ELOOP)


def test_what_is_not_there_is_absent(directory: tuple[FileSystem, str]) -> None:
    files, top = directory
    files.open(f"{top}/plain", "create").close()
    assert files.exists(f"{top}/plain")
    assert not files.is_directory(f"{top}/plain")
    assert not files.exists(f"{top}/nothing")
    assert not files.exists(f"{top}/plain/below a file")
    assert not files.is_directory(f"{top}/nothing")


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_an_open_file_knows_whether_its_path_leads_to_it(kind: str, tmp_path: Path) -> None:
    files: FileSystem = RealFileSystem() if kind == "real" else SimulatedDisk()
    top = str(tmp_path) if kind == "real" else "/top"
    files.make_directory(top)
    file = files.open(f"{top}/file", "create")
    assert file.is_at_path()
    files.rename(f"{top}/file", f"{top}/moved")
    assert not file.is_at_path()
    other = files.open(f"{top}/file", "create")
    assert not file.is_at_path()
    assert other.is_at_path()
    files.rename(f"{top}/moved", f"{top}/file")
    assert file.is_at_path()
    assert not other.is_at_path()


@pytest.mark.parametrize("kind", ["real", "simulated"])
def test_a_lock_knows_whether_its_directory_is_where_it_was(kind: str, tmp_path: Path) -> None:
    files: FileSystem = RealFileSystem() if kind == "real" else SimulatedDisk()
    top = str(tmp_path) if kind == "real" else "/top"
    files.make_directory(f"{top}/data")
    lock = files.lock(f"{top}/data/.lock")
    assert lock.is_in_place()
    files.remove(f"{top}/data/.lock")
    assert lock.is_in_place()
    files.rename(f"{top}/data", f"{top}/moved")
    assert not lock.is_in_place()
    files.make_directory(f"{top}/data")
    assert not lock.is_in_place()
    files.remove_tree(f"{top}/data")
    files.rename(f"{top}/moved", f"{top}/data")
    assert lock.is_in_place()
    lock.release()
