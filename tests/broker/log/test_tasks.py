"""The background process's tasks, called by name."""

from __future__ import annotations

import pytest

from holdfast.broker.log.tasks import run
from holdfast.errors import UsageError
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import make_batch

PATH = "/data/00000000000000000000.log"


def write(disk: SimulatedDisk, count: int) -> int:
    """Batches of one record each; returns the file's size."""
    file = disk.open(PATH, "create")
    position = 0
    for number in range(count):
        position += file.pwritev([make_batch([b"value"], base_offset=number)], position)
    file.flush()
    return position


def scrub(disk: SimulatedDisk, end: int, **changed: object) -> dict[str, object]:
    arguments = {
        "path": PATH,
        "position": 0,
        "end": end,
        "next_offset": 0,
        "bytes_max": 1 << 20,
        "drop_cache": True,
    }
    return run(disk, "scrub", {**arguments, **changed})


def test_a_sound_file_is_scrubbed_to_its_end(disk: SimulatedDisk) -> None:
    end = write(disk, 10)
    assert scrub(disk, end) == {"position": end, "next_offset": 10, "is_finished": True, "damage": None}


def test_a_scrub_reads_no_more_than_its_bound_and_goes_on_from_there(disk: SimulatedDisk) -> None:
    end = write(disk, 10)
    position, next_offset, calls = 0, 0, 0
    is_finished = False
    while not is_finished:
        result = scrub(disk, end, position=position, next_offset=next_offset, bytes_max=end // 4)
        assert result["damage"] is None
        assert isinstance(result["position"], int)
        assert isinstance(result["next_offset"], int)
        assert result["position"] - position <= end // 4 + end // 10
        position, next_offset, is_finished = (
            result["position"],
            result["next_offset"],
            bool(result["is_finished"]),
        )
        calls += 1
    assert (position, next_offset) == (end, 10)
    assert 3 <= calls <= 5


def test_a_scrub_sees_what_the_disk_holds_not_what_the_cache_remembers(disk: SimulatedDisk) -> None:
    end = write(disk, 10)
    disk.flip_bit(PATH, end - 3)
    assert scrub(disk, end, drop_cache=False)["damage"] is None
    damage = scrub(disk, end)["damage"]
    assert isinstance(damage, str)
    assert PATH in damage
    assert "offset 9" in damage


def test_a_scrub_of_a_file_that_retention_took_finds_nothing(disk: SimulatedDisk) -> None:
    assert scrub(disk, 100)["is_finished"]
    assert scrub(disk, 100)["damage"] is None


def test_removing_skips_what_is_gone(disk: SimulatedDisk) -> None:
    write(disk, 1)
    assert run(disk, "remove", {"paths": [PATH, "/data/never-there"]}) == {"removed": 1}
    assert disk.list("/data") == []


def test_an_unknown_task_is_refused_by_name(disk: SimulatedDisk) -> None:
    with pytest.raises(UsageError, match=r"'defragment'.*compact"):
        run(disk, "defragment", {})
