"""Small files hold the old content or the new, whatever happens in between."""

from __future__ import annotations

import errno

import pytest

from holdfast.atomic import parent_of, read_whole, rename_all, write_atomically
from holdfast.testing.disk import Fault, Operation, PowerLost, SimulatedDisk

PATH = "/data/small"
OLD = b"old content"
NEW = b"the new content, which is longer than a page " * 200


def with_old_content(seed: int) -> SimulatedDisk:
    disk = SimulatedDisk(seed)
    disk.prepare("/data")
    write_atomically(disk, PATH, OLD)
    return disk


def test_what_was_written_is_read_back(disk: SimulatedDisk) -> None:
    for content in (b"long content", b"short", b""):
        write_atomically(disk, PATH, content)
        assert read_whole(disk, PATH) == content
    assert disk.list("/data") == ["small"]


def test_once_written_it_survives_power_loss() -> None:
    for seed in range(100):
        disk = with_old_content(seed)
        write_atomically(disk, PATH, NEW)
        disk.crash()
        assert read_whole(disk, PATH) == NEW


@pytest.mark.parametrize("operations", range(8))
def test_power_loss_at_any_step_leaves_old_or_new(operations: int) -> None:
    for seed in range(60):
        disk = with_old_content(seed)
        disk.lose_power_after(operations)
        try:
            write_atomically(disk, PATH, NEW)
            finished = True
        except PowerLost:
            finished = False
        disk.crash()
        assert read_whole(disk, PATH) in ((NEW,) if finished else (OLD, NEW))
        write_atomically(disk, PATH, OLD)  # whatever lies aside does not disturb the next write
        assert read_whole(disk, PATH) == OLD


@pytest.mark.parametrize("operation", ["write", "flush", "rename", "truncate"])
def test_a_failure_before_the_rename_keeps_the_old_content(operation: Operation) -> None:
    disk = with_old_content(seed=1)
    disk.plan(Fault(operation, partial=operation == "write"))
    with pytest.raises(OSError):
        write_atomically(disk, PATH, NEW)
    assert read_whole(disk, PATH) == OLD
    disk.crash()
    assert read_whole(disk, PATH) == OLD


def test_a_directory_that_cannot_be_flushed_is_reported(disk: SimulatedDisk) -> None:
    disk.plan(Fault("flush directory"))
    with pytest.raises(OSError):
        write_atomically(disk, PATH, NEW)


def test_reading_what_is_not_there_says_so(disk: SimulatedDisk) -> None:
    with pytest.raises(FileNotFoundError):
        read_whole(disk, PATH)


def test_parent_of_a_path() -> None:
    assert parent_of("/data/topic-0/file") == "/data/topic-0"
    assert parent_of("/file") == "/"
    assert parent_of("file") == "."


RENAMES = [(f"/data/{name}", f"/data/{name}.gone") for name in "abc"]


def with_three_files() -> SimulatedDisk:
    disk = SimulatedDisk()
    disk.prepare("/data")
    for name, _ in RENAMES:
        disk.open(name, "create").close()
    return disk


def test_several_renames_are_all_done_or_none() -> None:
    for refused in range(len(RENAMES)):
        disk = with_three_files()
        disk.plan(Fault("rename", errno.ENOSPC, skip=refused))
        with pytest.raises(OSError, match="No space") as caught:
            rename_all(disk, RENAMES)
        assert caught.value.errno == errno.ENOSPC
        assert disk.list("/data") == ["a", "b", "c"]
        rename_all(disk, RENAMES)
        assert disk.list("/data") == ["a.gone", "b.gone", "c.gone"]


def test_renames_that_cannot_be_undone_are_no_mere_want_of_room() -> None:
    disk = with_three_files()
    disk.plan(Fault("rename", errno.ENOSPC, skip=1, times=2))
    with pytest.raises(OSError, match="cannot be undone: No space") as caught:
        rename_all(disk, RENAMES)
    assert caught.value.errno == errno.EIO
