"""A new data directory is found again after a power failure, however its path is written."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest

from holdfast.broker.log.checkpoints import MetaProperties
from holdfast.broker.node.directories import DirectoryFailures, LogDirectory
from holdfast.real import RealFileSystem
from holdfast.testing.disk import SimulatedDisk

META = MetaProperties("Y2NjY2NjY2NjY2NjY2NjYw", 1, b"d" * 16)
NOBODY = cast(DirectoryFailures, None)


class WatchedFiles(RealFileSystem):
    """The real disk, and which directories were flushed in what state."""

    def __init__(self) -> None:
        self.flushed: set[tuple[str, str]] = set()

    def flush_directory(self, path: str) -> None:
        super().flush_directory(path)
        whole = Path(path).resolve()
        self.flushed.update((str(whole), entry.name) for entry in whole.iterdir())


def opened(directory: LogDirectory) -> LogDirectory:
    said: list[str] = []
    directory.open("boot", said.append)
    if directory.is_blank:
        directory.prepare("boot", said.append)
    assert not said
    return directory


@pytest.mark.parametrize("path", ["/a/b/c", "/a/b/c/", "/a//b/c", "/top", "/there/new", "below/here"])
def test_a_new_directory_survives_power_loss_with_what_is_in_it(path: str) -> None:
    for seed in range(20):
        disk = SimulatedDisk(seed)
        disk.make_directory("/there")
        disk.flush_directory("/")
        directory = opened(LogDirectory(disk, path, NOBODY))
        directory.write_meta(META)
        disk.crash()
        assert opened(LogDirectory(disk, path, NOBODY)).meta == META


@pytest.mark.parametrize("is_absolute", [False, True])
@pytest.mark.parametrize(
    ("path", "entries"),
    [
        ("new", [("", "new")]),
        ("./new", [("", "new")]),
        ("new/", [("", "new")]),
        ("new/below//", [("", "new"), ("new", "below")]),
        ("there/../new/below", [("", "new"), ("new", "below")]),
        ("there/x/y", [("there", "x"), ("there/x", "y")]),
    ],
)
def test_every_parent_of_what_was_made_is_flushed_after_it(
    path: str,
    entries: list[tuple[str, str]],
    is_absolute: bool,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    (tmp_path / "there").mkdir()
    monkeypatch.chdir(tmp_path)
    fs = WatchedFiles()
    opened(LogDirectory(fs, f"{tmp_path}/{path}" if is_absolute else path, NOBODY)).release()
    assert fs.flushed >= {(str(tmp_path / parent), name) for parent, name in entries}


def test_what_was_there_is_not_flushed(tmp_path: Path) -> None:
    fs = WatchedFiles()
    opened(LogDirectory(fs, str(tmp_path), NOBODY)).release()
    assert not fs.flushed


def test_a_working_directory_that_may_not_be_entered_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Closed(RealFileSystem):
        def exists(self, path: str) -> bool:
            return path.startswith("/")

    monkeypatch.chdir(tmp_path)
    (tmp_path / "data").touch()
    with pytest.raises(FileExistsError):
        opened(LogDirectory(Closed(), "data", NOBODY))
