"""The simulated disk keeps what was flushed through any crash, and forgets what was not."""

from __future__ import annotations

import errno

import pytest

from holdfast.seams import FileSystem
from holdfast.testing.disk import Fault, PowerLost, SimulatedDisk
from holdfast.testing.disk_files import PAGE_BYTES, StaleHandle

SEEDS = range(60)


def disk_with(content: bytes, seed: int = 0) -> SimulatedDisk:
    """A disk with the durable file /data/log."""
    disk = SimulatedDisk(seed)
    disk.prepare("/data")
    file = disk.open("/data/log", "create")
    file.pwritev([content], 0)
    file.flush()
    disk.flush_directory("/data")
    return disk


def read(disk: SimulatedDisk, path: str) -> bytes:
    return disk.open(path, "read").pread(1 << 30, 0)


def outcomes(disk: SimulatedDisk) -> list[SimulatedDisk]:
    """The disk after the same crash, by many seeds."""
    twins = [disk.copy(seed) for seed in SEEDS]
    for twin in twins:
        twin.crash()
    return twins


def test_it_is_a_file_system() -> None:
    file_system: FileSystem = SimulatedDisk()
    assert file_system.list("/") == []


def test_flushed_bytes_survive_every_crash() -> None:
    disk = disk_with(b"a" * 10_000)
    assert all(read(twin, "/data/log") == b"a" * 10_000 for twin in outcomes(disk))


def test_unflushed_bytes_may_survive_may_vanish_and_may_be_torn() -> None:
    disk = disk_with(b"a" * 6_000)
    disk.open("/data/log", "write").pwritev([b"b" * 20_000], 6_000)
    found = [read(twin, "/data/log") for twin in outcomes(disk)]
    assert all(content[:6_000] == b"a" * 6_000 for content in found)
    assert b"a" * 6_000 in found
    assert b"a" * 6_000 + b"b" * 20_000 in found
    assert any(len(content) == 26_000 and b"\0" in content for content in found), "grown, with pages missing"
    tears = [
        content for content in found if content[6_000:8_192].strip(b"b") and b"b" in content[6_000:8_192]
    ]
    assert tears, "a page torn between sectors"


def test_unflushed_overwrite_shows_old_or_new_sectors_only() -> None:
    disk = disk_with(b"a" * 3 * PAGE_BYTES)
    disk.open("/data/log", "write").pwritev([b"b" * 3 * PAGE_BYTES], 0)
    for twin in outcomes(disk):
        content = read(twin, "/data/log")
        assert len(content) == 3 * PAGE_BYTES
        assert set(content) <= {ord("a"), ord("b")}


def test_unflushed_truncation_may_be_undone() -> None:
    disk = disk_with(b"a" * 10_000)
    disk.open("/data/log", "write").truncate(3_000)
    sizes = {len(read(twin, "/data/log")) for twin in outcomes(disk)}
    assert sizes == {3_000, 10_000}
    assert all(read(twin, "/data/log")[:3_000] == b"a" * 3_000 for twin in outcomes(disk))


def test_flushed_truncation_and_regrowth_survive() -> None:
    disk = disk_with(b"a" * 10_000)
    file = disk.open("/data/log", "write")
    file.truncate(3_000)
    file.flush()
    file.pwritev([b"c" * 100], 3_000)
    file.flush()
    assert all(read(twin, "/data/log") == b"a" * 3_000 + b"c" * 100 for twin in outcomes(disk))


def test_new_file_needs_its_directory_flushed() -> None:
    disk = disk_with(b"")
    file = disk.open("/data/new", "create")
    file.pwritev([b"x"], 0)
    file.flush()
    assert {twin.exists("/data/new") for twin in outcomes(disk)} == {True, False}
    disk.flush_directory("/data")
    assert all(read(twin, "/data/new") == b"x" for twin in outcomes(disk))


def test_new_directory_needs_its_parent_flushed() -> None:
    disk = disk_with(b"")
    disk.make_directory("/data/topic-0")
    disk.open("/data/topic-0/log", "create").flush()
    disk.flush_directory("/data/topic-0")
    assert {twin.exists("/data/topic-0/log") for twin in outcomes(disk)} == {True, False}
    disk.flush_directory("/data")
    assert all(twin.exists("/data/topic-0/log") for twin in outcomes(disk))


def test_rename_is_atomic() -> None:
    disk = disk_with(b"old")
    file = disk.open("/data/log.tmp", "create")
    file.pwritev([b"new"], 0)
    file.flush()
    disk.rename("/data/log.tmp", "/data/log")
    found = {read(twin, "/data/log") for twin in outcomes(disk)}
    assert found == {b"old", b"new"}
    disk.flush_directory("/data")
    for twin in outcomes(disk):
        assert read(twin, "/data/log") == b"new"
        assert twin.list("/data") == ["log"]


def test_rename_of_unflushed_content_may_leave_an_empty_file() -> None:
    disk = disk_with(b"old")
    disk.open("/data/log.tmp", "create").pwritev([b"new"], 0)
    disk.rename("/data/log.tmp", "/data/log")
    disk.flush_directory("/data")
    assert b"" in {read(twin, "/data/log") for twin in outcomes(disk)}


def test_rename_between_directories_is_atomic() -> None:
    disk = disk_with(b"content")
    disk.prepare("/other")
    disk.rename("/data/log", "/other/log")
    for twin in outcomes(disk):
        assert twin.exists("/data/log") != twin.exists("/other/log")
    disk.flush_directory("/other")
    for twin in outcomes(disk):
        assert (twin.exists("/data/log"), twin.exists("/other/log")) == (False, True)


def test_unflushed_removal_may_be_undone() -> None:
    disk = disk_with(b"content")
    disk.remove("/data/log")
    assert {twin.exists("/data/log") for twin in outcomes(disk)} == {True, False}
    disk.flush_directory("/data")
    assert not any(twin.exists("/data/log") for twin in outcomes(disk))


def test_removed_tree_may_come_back_in_part() -> None:
    disk = disk_with(b"content")
    disk.prepare("/data/topic-0")
    for name in "abc":
        disk.open(f"/data/topic-0/{name}", "create")
    disk.flush_directory("/data/topic-0")
    disk.remove_tree("/data/topic-0")
    assert not disk.exists("/data/topic-0")
    left = {tuple(twin.list("/data/topic-0")) for twin in outcomes(disk) if twin.exists("/data/topic-0")}
    assert len(left) > 1


def test_kill_forgets_nothing_but_handles_and_locks() -> None:
    disk = disk_with(b"a")
    lock = disk.lock("/data/.lock")
    with pytest.raises(BlockingIOError):
        disk.lock("/data/.lock")
    file = disk.open("/data/log", "write")
    file.pwritev([b"b"], 1)
    disk.kill()
    assert read(disk, "/data/log") == b"ab"
    with pytest.raises(StaleHandle):
        file.pwritev([b"c"], 2)
    second = disk.lock("/data/.lock")
    lock.release()
    with pytest.raises(BlockingIOError):
        disk.lock("/data/.lock")
    second.release()
    disk.lock("/data/.lock")


def test_failed_flush_marks_pages_clean_that_are_not_durable() -> None:
    lost = 0
    for seed in SEEDS:
        disk = disk_with(b"a" * PAGE_BYTES, seed)
        file = disk.open("/data/log", "write")
        file.pwritev([b"b" * 4 * PAGE_BYTES], 0)
        disk.plan(Fault("flush"))
        with pytest.raises(OSError) as failure:
            file.flush()
        assert failure.value.errno == errno.EIO
        file.flush()
        assert read(disk, "/data/log") == b"b" * 4 * PAGE_BYTES, "the cache still shows what was written"
        held = disk.held("/data/log")
        twin = disk.copy(seed)
        twin.crash()
        assert read(twin, "/data/log") == held, "a second flush that succeeds brings nothing back"
        file.drop_cache()
        assert read(disk, "/data/log") == held, "and the platters show otherwise"
        lost += held != b"b" * 4 * PAGE_BYTES
        disk.crash()
        assert read(disk, "/data/log") == held
    assert lost > len(SEEDS) // 2


def test_write_after_failed_flush_reaches_the_disk_again() -> None:
    disk = disk_with(b"")
    file = disk.open("/data/log", "write")
    file.pwritev([b"b" * 100], 0)
    disk.plan(Fault("flush"))
    with pytest.raises(OSError):
        file.flush()
    file.pwritev([b"b" * 100], 0)
    file.flush()
    assert all(read(twin, "/data/log") == b"b" * 100 for twin in outcomes(disk))


def test_planned_write_fails_at_its_turn_and_writes_nothing() -> None:
    disk = disk_with(b"")
    file = disk.open("/data/log", "write")
    disk.plan(Fault("write", skip=1, path_contains="log"))
    file.pwritev([b"one"], 0)
    with pytest.raises(OSError):
        file.pwritev([b"two"], 3)
    assert read(disk, "/data/log") == b"one"
    file.pwritev([b"three"], 3)
    assert read(disk, "/data/log") == b"onethree"
    assert disk.faults["write failed"] == 1


def test_short_write_leaves_a_part() -> None:
    lengths = set()
    for seed in SEEDS:
        disk = disk_with(b"", seed)
        disk.plan(Fault("write", error=errno.ENOSPC, partial=True))
        with pytest.raises(OSError) as failure:
            disk.open("/data/log", "write").pwritev([b"0123456789"], 0)
        assert failure.value.errno == errno.ENOSPC
        content = read(disk, "/data/log")
        assert b"0123456789".startswith(content)
        lengths.add(len(content))
    assert len(lengths) > 5


def test_full_disk_writes_what_fits_and_recovers_when_space_is_freed() -> None:
    disk = disk_with(b"a" * 100)
    disk.open("/data/other", "create").pwritev([b"b" * 50], 0)
    disk.capacity_bytes = 160
    file = disk.open("/data/log", "write")
    file.pwritev([b"c" * 100], 0)
    with pytest.raises(OSError) as failure:
        file.pwritev([b"d" * 20], 100)
    assert failure.value.errno == errno.ENOSPC
    assert disk.free_bytes("/data") == 0
    assert read(disk, "/data/log") == b"c" * 100 + b"d" * 10
    disk.remove("/data/other")
    file.pwritev([b"d" * 20], 100)
    assert disk.free_bytes("/data") == 40


def test_read_only_disk_refuses_changes_and_serves_reads() -> None:
    disk = disk_with(b"a")
    file = disk.open("/data/log", "write")
    disk.read_only = True
    for change in (
        lambda: file.pwritev([b"b"], 0),
        lambda: file.truncate(0),
        lambda: disk.open("/data/new", "create"),
        lambda: disk.open("/data/log", "write"),
        lambda: disk.rename("/data/log", "/data/moved"),
        lambda: disk.remove("/data/log"),
        lambda: disk.make_directory("/data/directory"),
    ):
        with pytest.raises(OSError) as failure:
            change()
        assert failure.value.errno == errno.EROFS
    assert file.pread(10, 0) == b"a"
    disk.read_only = False
    file.pwritev([b"b"], 0)


def test_flipped_bit_shows_once_the_cache_is_dropped() -> None:
    disk = disk_with(b"a" * 5_000)
    disk.flip_bit("/data/log", 4_500, bit=1)
    file = disk.open("/data/log", "read")
    assert file.pread(1, 4_500) == b"a"
    file.drop_cache()
    assert file.pread(1, 4_500) == b"c"
    disk.crash()
    assert read(disk, "/data/log") == b"a" * 4_500 + b"c" + b"a" * 499


def test_read_error() -> None:
    disk = disk_with(b"a")
    disk.plan(Fault("read", times=2))
    file = disk.open("/data/log", "read")
    for _ in range(2):
        with pytest.raises(OSError):
            file.pread(1, 0)
    assert file.pread(1, 0) == b"a"


def test_power_is_lost_inside_an_operation_and_stays_lost() -> None:
    disk = disk_with(b"a")
    file = disk.open("/data/log", "write")
    disk.lose_power_after(operations=1)
    file.pwritev([b"b"], 1)
    with pytest.raises(PowerLost):
        file.flush()
    with pytest.raises(PowerLost):
        disk.flush_directory("/data")
    disk.crash()
    assert read(disk, "/data/log")[:1] == b"a"
    disk.flush_directory("/data")


def test_the_same_seed_gives_the_same_disk() -> None:
    def run(seed: int) -> bytes:
        disk = disk_with(b"a" * 9_000, seed)
        disk.open("/data/log", "write").pwritev([b"b" * 50_000], 5_000)
        disk.crash()
        return read(disk, "/data/log")

    assert run(7) == run(7)
    assert len({run(seed) for seed in SEEDS}) > 10


def test_missing_and_misused_paths_raise_what_the_system_raises() -> None:
    disk = disk_with(b"a")
    with pytest.raises(FileNotFoundError):
        disk.open("/data/none", "read")
    with pytest.raises(FileNotFoundError):
        disk.open("/none/file", "create")
    with pytest.raises(IsADirectoryError):
        disk.open("/data", "read")
    with pytest.raises(FileNotFoundError):
        disk.list("/none")
    with pytest.raises(NotADirectoryError):
        disk.list("/data/log")
    with pytest.raises(FileNotFoundError):
        disk.rename("/data/none", "/data/other")
    with pytest.raises(OSError):
        disk.open("/data/log", "read").pwritev([b"x"], 0)


def test_what_is_taken_away_comes_back_as_it_was_wherever_it_is_put() -> None:
    disk = disk_with(b"one")
    disk.open("/data/log", "write").pwritev([b"two"], 3)
    node = disk.take_away("/data")
    assert not disk.exists("/data")
    assert disk.used_bytes == 0
    disk.crash()
    assert not disk.exists("/data")
    disk.prepare("/data")
    disk.put_back("/data", node)
    disk.crash()
    assert read(disk, "/data/log") == b"onetwo"
    assert disk.used_bytes == 6
    assert [path for path, _ in disk.walk("/")] == ["/data", "/data/log"]


def test_a_directory_that_is_read_only_can_be_read_and_its_neighbour_written() -> None:
    disk = disk_with(b"one")
    disk.prepare("/database")
    disk.forbid_changes("/data")
    assert read(disk, "/data/log") == b"one"
    for change in (
        lambda: disk.open("/data/log", "write"),
        lambda: disk.open("/data/new", "create"),
        lambda: disk.rename("/data/log", "/data/other"),
        lambda: disk.remove("/data/log"),
    ):
        with pytest.raises(OSError) as raised:
            change()
        assert raised.value.errno == errno.EROFS
    disk.open("/database/new", "create").close()


def test_a_name_has_at_most_255_bytes() -> None:
    disk = disk_with(b"one")
    longest = "/data/" + "n" * 255
    disk.rename("/data/log", longest)
    for make in (
        lambda: disk.rename(longest, longest + "n"),
        lambda: disk.make_directory(longest + "n"),
        lambda: disk.open(longest + "n", "create"),
    ):
        with pytest.raises(OSError) as raised:
            make()
        assert raised.value.errno == errno.ENAMETOOLONG
    assert read(disk, longest) == b"one"
