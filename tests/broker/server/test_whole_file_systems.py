"""Where a flush of the whole file system counts as one of each file: only where that is known for certain."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.faulty_files import FaultyFiles

from holdfast import real
from holdfast.real import RealFile, RealFileSystem, file_of_whole, file_system_on, flush_whole

DISK = os.makedev(8, 1)
MOUNTS = """\
22 27 0:21 / /proc rw,relatime - proc proc rw
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
28 27 8:1 /var/lib /srv/a\\040-\\040b rw,relatime shared:1 master:3 - ext4 /dev/sda1 rw,errors=remount-ro
29 27 8:11 / /old rw - ext2 /dev/sda11 rw
30 27 254:0 / /fast rw,noatime - xfs /dev/dm-0 rw,attr2
31 27 0:40 / /safe rw,nosuid - fuse.gocryptfs /srv/secret rw,user_id=0
32 27 8:33 / /windows rw - fuseblk /dev/sdc1 rw
33 27 0:41 / /var/lib/docker/overlay2/x/merged rw - overlay overlay rw,lowerdir=/l,upperdir=/u
34 27 0:42 /@data /data rw shared:9 - btrfs /dev/sdd1 rw,subvol=/@data
35 27 0:43 / /far rw - nfs4 server:/export rw
36 27 8:49 / /twice rw - ext4 /dev/sde1 rw
37 27 8:49 / /twice rw - fuseblk /dev/sde1 rw
"""


@pytest.mark.parametrize(
    ("device", "kind"),
    [
        ((8, 1), "ext4"),
        ((8, 11), "ext2"),
        ((254, 0), "xfs"),
        ((0, 40), "fuse.gocryptfs"),
        ((0, 41), "overlay"),
        ((8, 49), None),
        ((0, 99), None),
        ((8, 4), None),
    ],
)
def test_the_kind_of_file_system_is_that_of_all_mounts_of_the_device(
    device: tuple[int, int], kind: str | None
) -> None:
    assert file_system_on(os.makedev(*device), MOUNTS) == kind


@pytest.mark.parametrize("text", ["", "\n", "27 1\n", "27 1 8:1 / / rw,relatime ext4 /dev/sda1 rw\n"])
def test_mounts_that_cannot_be_read_name_no_file_system_to_trust(text: str) -> None:
    assert file_system_on(DISK, text) not in real.FLUSHED_WHOLE


@pytest.fixture
def mounts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "mountinfo"
    path.write_text(MOUNTS, encoding="ascii")
    monkeypatch.setattr(real, "MOUNTS", str(path))
    return path


def is_flushed_whole(device: int, release: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """As a process finds it that looks for the first time, under such a kernel."""
    told = os.uname_result(("Linux", "here", release, "#1", "x86_64"))
    monkeypatch.setattr(os, "uname", lambda: told)
    real.is_flushed_whole.cache_clear()
    try:
        return real.is_flushed_whole(device)
    finally:
        real.is_flushed_whole.cache_clear()


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        ((8, 1), True),
        ((254, 0), True),
        ((8, 11), False),
        ((0, 40), False),
        ((8, 33), False),
        ((0, 41), False),
        ((0, 42), False),
        ((0, 43), False),
        ((8, 49), False),
        ((0, 99), False),
    ],
)
def test_only_known_file_systems_are_flushed_whole(
    mounts: Path, device: tuple[int, int], expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_flushed_whole(os.makedev(*device), "6.1.0-18-amd64", monkeypatch) is expected


@pytest.mark.parametrize(
    ("release", "expected"),
    [
        ("5.8.0", True),
        ("5.10.0-28-amd64", True),
        ("5.15.153.1-microsoft-standard-WSL2", True),
        ("6.0", True),
        ("10.2-rc1", True),
        ("5.7.19", False),
        ("4.18.0-553.el8.x86_64", False),
        ("4.4.0", False),
        ("5", False),
        ("", False),
        ("unknown", False),
    ],
)
def test_only_kernels_that_report_what_could_not_be_written_are_believed(
    mounts: Path, release: str, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert is_flushed_whole(DISK, release, monkeypatch) is expected


def test_without_a_list_of_mounts_nothing_is_believed(mounts: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts.unlink()
    assert not is_flushed_whole(DISK, "6.1.0", monkeypatch)


@pytest.fixture
def trusting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: True)


@pytest.fixture
def files(tmp_path: Path) -> list[RealFile]:
    return [RealFileSystem().open(str(tmp_path / str(number)), "create") for number in range(3)]


@pytest.mark.usefixtures("trusting")
def test_files_and_directories_of_one_device_are_flushed_together(
    files: list[RealFile], tmp_path: Path
) -> None:
    assert file_of_whole([str(tmp_path), *files]) is files[0]


@pytest.mark.usefixtures("trusting")
def test_nothing_is_flushed_together_that_may_be_elsewhere(files: list[RealFile], tmp_path: Path) -> None:
    elsewhere = RealFile(os.open("/proc/self/status", os.O_RDONLY | os.O_CLOEXEC), "/proc/self/status")
    wrapped = FaultyFiles().open(str(tmp_path / "w"), "create")
    assert file_of_whole([*files, elsewhere]) is None
    assert file_of_whole([*files, "/proc"]) is None
    assert file_of_whole([*files, str(tmp_path / "gone")]) is None
    assert file_of_whole([*files, wrapped]) is None
    assert file_of_whole([str(tmp_path)]) is None
    assert file_of_whole([]) is None
    files[1].close()
    assert file_of_whole(files) is None


class RecordingLibrary:
    """Stands for the C library, and for what of the system's is called besides."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        self.answer = 0
        monkeypatch.setattr(real, "_libc", self)
        monkeypatch.setattr(os, "fdatasync", lambda fd: self.calls.append(("fdatasync", fd)))
        monkeypatch.setattr(os, "fsync", lambda fd: self.calls.append(("fsync", fd)))

    def syncfs(self, fd: int) -> int:
        self.calls.append(("syncfs", fd))
        return self.answer


@pytest.mark.usefixtures("trusting")
def test_a_whole_file_system_is_flushed_once_and_then_one_file(
    files: list[RealFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RecordingLibrary(monkeypatch)
    RealFileSystem().flush_many([*files, str(tmp_path)])
    assert library.calls == [("syncfs", files[0].fd), ("fdatasync", files[0].fd)]


def test_a_whole_file_system_that_cannot_be_flushed_is_an_error(
    files: list[RealFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RecordingLibrary(monkeypatch)
    library.answer = -1
    with pytest.raises(OSError, match=files[0].path):
        flush_whole(files[0])


def test_a_file_that_cannot_be_flushed_after_the_rest_is_an_error(
    files: list[RealFile], monkeypatch: pytest.MonkeyPatch
) -> None:
    RecordingLibrary(monkeypatch)

    def refuse(fd: int) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(os, "fdatasync", refuse)
    with pytest.raises(OSError, match="Read-only"):
        flush_whole(files[0])


@pytest.mark.usefixtures("trusting")
def test_each_target_has_its_say_when_some_file_of_the_file_system_could_not_be_written(
    files: list[RealFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    library = RecordingLibrary(monkeypatch)
    library.answer = -1
    RealFileSystem().flush_many([*files, str(tmp_path)])
    assert [name for name, _ in library.calls] == ["syncfs", "fdatasync", "fdatasync", "fdatasync", "fsync"]


def test_many_targets_are_flushed_one_by_one_where_nothing_is_known(
    files: list[RealFile], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(real, "is_flushed_whole", lambda device: False)
    library = RecordingLibrary(monkeypatch)
    RealFileSystem().flush_many([*files, str(tmp_path)])
    assert library.calls[:3] == [("fdatasync", file.fd) for file in files]
    assert [name for name, _ in library.calls[3:]] == ["fsync"]
