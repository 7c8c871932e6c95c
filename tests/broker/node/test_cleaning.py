"""Compaction on a disk that refuses: put off, tried again, and the log is whole at every moment."""

from __future__ import annotations

import errno
from os import strerror

import pytest
from tests.support.partition_logs import latest, read_all
from tests.support.quiet_broker import QuietBroker

from holdfast.broker.log import tasks
from holdfast.broker.log.checkpoints import CLEANER_FILE, OffsetCheckpoint
from holdfast.broker.log.compaction import Swap
from holdfast.broker.node import cleaning
from holdfast.broker.node.cleaning import RETRY_MS, STEP_RETRY_MS
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.housekeeping import FIRST_CHECK_MS
from holdfast.testing.disk import Fault, SimulatedDisk

LATEST = {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
RENAMES = "/t-0/"
FOR_EVER = 1 << 30
CHECKED_MS = 16_000
"""The first check is after log.cleaner.backoff.ms, and a step that it led to was not tried again yet."""


def dirty_log(broker: QuietBroker, topic: str = "t") -> HostedPartition:
    hosted = broker.create(topic, cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    return hosted


def fill(broker: QuietBroker, hosted: HostedPartition) -> None:
    for number in range(12):
        broker.append(hosted, b"key-%d" % (number % 2), b"%d" % number * 20)


def is_compacted(hosted: HostedPartition) -> bool:
    return len(read_all(hosted.log)) < 12


def latest_after_a_crash(disk: SimulatedDisk, seed: int) -> dict[bytes | None, bytes]:
    """What a start finds if the power failed now."""
    twin = disk.copy(seed)
    twin.crash()
    again = QuietBroker(disk=twin, boot_id="next boot")
    found = again.node.partitions.get("t", 0)
    assert found is not None, again.said
    assert found.log.end_offset == 12
    return latest(read_all(found.log))


@pytest.mark.check
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["no space", "no quota"])
def test_a_swap_that_is_refused_at_any_rename_is_completed_later(code: int) -> None:
    refused = 0
    while True:
        broker = QuietBroker()
        hosted = dirty_log(broker)
        fault = broker.disk.plan(Fault("rename", code, skip=refused, path_contains=RENAMES))
        broker.pass_time(CHECKED_MS)
        if fault.times:
            assert is_compacted(hosted)
            break
        assert not broker.disk.exists(f"/data/{CLEANER_FILE}"), "the round is not over"
        assert latest(read_all(hosted.log)) == LATEST
        missing = {f"{segment.base_offset:020}.log" for segment in hosted.log.segments} - {
            *broker.files(hosted)
        }
        assert missing <= {name.removesuffix(".swap") for name in broker.files(hosted, ".swap")}
        for seed in range(3):
            assert latest_after_a_crash(broker.disk, seed) == LATEST
        assert any(strerror(code) in line and "trying again" in line for line in broker.said), broker.said
        broker.pass_time(RETRY_MS + FIRST_CHECK_MS)
        assert not hosted.offline, broker.said
        assert is_compacted(hosted)
        assert latest(read_all(hosted.log)) == LATEST
        assert broker.files(hosted, ".swap") == broker.files(hosted, ".cleaned") == []
        refused += 1
    assert refused > 10


@pytest.mark.parametrize("name", [".swap", ".deleted"], ids=["commit", "exchange"])
def test_a_refusal_that_lasts_is_told_and_waited_out(name: str) -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    broker.disk.plan(Fault("rename", errno.ENOSPC, times=FOR_EVER, path_contains=name))
    broker.pass_time(RETRY_MS)
    assert not hosted.offline
    assert not is_compacted(hosted)
    assert latest(read_all(hosted.log)) == LATEST
    assert len([line for line in broker.said if "trying again" in line]) == 1
    assert not any("compacted again" in line for line in broker.said)
    broker.disk.clear_faults()
    broker.pass_time(RETRY_MS)
    assert is_compacted(hosted)
    assert len([line for line in broker.said if "compacted again" in line]) == 1


def test_a_log_reads_from_the_cleaned_file_while_its_last_rename_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    rename = broker.disk.rename
    refused = 0

    def refuse_to_finish(old: str, new: str) -> None:
        nonlocal refused
        if old.endswith(".log.swap"):
            refused += 1
            raise OSError(errno.ENOSPC, strerror(errno.ENOSPC), new)
        rename(old, new)

    monkeypatch.setattr(broker.disk, "rename", refuse_to_finish)
    broker.pass_time(CHECKED_MS + 3 * STEP_RETRY_MS)
    assert refused == 4
    assert len([line for line in broker.said if "trying again" in line]) == 1
    (swap,) = broker.files(hosted, ".log.swap")
    assert swap.removesuffix(".swap") not in broker.files(hosted)
    assert latest(read_all(hosted.log)) == LATEST
    monkeypatch.undo()
    for seed in range(3):
        assert latest_after_a_crash(broker.disk, seed) == LATEST
    broker.pass_time(STEP_RETRY_MS)
    assert is_compacted(hosted)
    assert broker.files(hosted, ".swap") == broker.files(hosted, ".cleaned") == []


def test_a_swap_goes_on_when_there_are_descriptors_again() -> None:
    """The flush of a directory opens it: without descriptors nothing was flushed, and nothing has failed."""
    for flushes in range(3):
        broker = QuietBroker()
        hosted = dirty_log(broker)
        broker.pass_time(CHECKED_MS, works=False)
        broker.worker.run_one()
        fault = broker.disk.plan(
            Fault("flush directory", errno.EMFILE, skip=flushes, times=2, path_contains="/t-0")
        )
        broker.settle()
        assert fault.times == 1
        assert not broker.disk.exists(f"/data/{CLEANER_FILE}"), "the round is not over"
        assert latest(read_all(hosted.log)) == LATEST
        broker.pass_time(3 * STEP_RETRY_MS)
        assert not hosted.offline
        assert is_compacted(hosted)
        assert broker.files(hosted, ".swap") == broker.files(hosted, ".cleaned") == []


def test_a_swap_that_cannot_be_undone_takes_the_directory_offline_and_the_next_start_completes_it() -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    broker.disk.plan(Fault("rename", errno.ENOSPC, skip=2, times=2, path_contains=RENAMES))
    broker.pass_time(FIRST_CHECK_MS)
    assert hosted.offline
    assert any("cannot be undone" in line for line in broker.said)
    assert latest_after_a_crash(broker.disk, 1) == LATEST


def test_retention_and_deletion_end_a_swap_that_waits() -> None:
    for deletes in (False, True):
        broker = QuietBroker()
        hosted = dirty_log(broker)
        fault = broker.disk.plan(Fault("rename", errno.ENOSPC, skip=1, path_contains=RENAMES))
        broker.pass_time(CHECKED_MS)
        assert not fault.times
        assert broker.files(hosted, ".swap")
        other = dirty_log(broker, "u")
        if deletes:
            broker.delete("t")
            broker.settle()
        else:
            broker.node.log_starts.move([(hosted, hosted.log.segments[2].base_offset)])
        broker.pass_time(STEP_RETRY_MS + FIRST_CHECK_MS)
        assert is_compacted(other), "nothing is under way any more"
        if not deletes:
            assert broker.files(hosted, ".swap") == []
            assert latest(read_all(hosted.log)) == LATEST
        assert not any("offline" in line for line in broker.said)


def test_a_full_disk_at_any_moment_of_a_compaction_costs_nothing_and_no_restart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cleaning, "FREE_BYTES_MIN", -(1 << 40))
    outcomes = set()
    for room in range(0, 1400, 53):
        broker = QuietBroker()
        hosted = dirty_log(broker)
        broker.pass_time(10_000)
        broker.disk.capacity_bytes = broker.disk.used_bytes + room
        broker.pass_time(FIRST_CHECK_MS)
        outcomes.add(is_compacted(hosted))
        assert not hosted.offline, (room, broker.said)
        assert broker.node.failures.fatal is None
        assert latest(read_all(hosted.log)) == LATEST
        assert broker.files(hosted, ".cleaned") == [], "a full disk needs what they hold"
        broker.disk.capacity_bytes = None
        broker.pass_time(RETRY_MS + FIRST_CHECK_MS)
        assert is_compacted(hosted)
        assert latest(read_all(hosted.log)) == LATEST
        written = OffsetCheckpoint(broker.disk, f"/data/{CLEANER_FILE}").read()
        assert written == {("t", 0): hosted.log.active.base_offset}
    assert outcomes == {True, False}


def test_a_checkpoint_that_finds_no_room_is_written_when_there_is_some() -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    broker.disk.plan(Fault("write", errno.ENOSPC, times=3, path_contains=CLEANER_FILE))
    broker.pass_time(FIRST_CHECK_MS)
    assert is_compacted(hosted)
    assert broker.node.failures.fatal is None
    path = f"/data/{CLEANER_FILE}"
    assert not broker.disk.exists(path)
    broker.pass_time(3 * FIRST_CHECK_MS)
    assert OffsetCheckpoint(broker.disk, path).read() == {("t", 0): hosted.log.active.base_offset}


def test_a_checkpoint_that_fails_otherwise_takes_the_directory_offline() -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    broker.disk.plan(Fault("write", errno.EIO, path_contains=CLEANER_FILE))
    broker.pass_time(FIRST_CHECK_MS)
    assert hosted.offline


def test_a_directory_whose_free_space_cannot_be_asked_holds_up_no_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = QuietBroker({"log.dirs": "/data,/second"})
    logs = [dirty_log(broker, topic) for topic in ("t", "u", "v", "w")]
    stale = [hosted for hosted in logs if hosted.directory.path == "/data"]
    sound = [hosted for hosted in logs if hosted.directory.path == "/second"]
    assert len(stale) == len(sound) == 2
    fill(broker, stale[0])  # the dirtiest
    free_bytes = broker.disk.free_bytes
    asked: list[str] = []

    def free_bytes_of(path: str) -> int:
        asked.append(path)
        if path == "/data":
            raise OSError(errno.ESTALE, strerror(errno.ESTALE), path)
        return free_bytes(path)

    monkeypatch.setattr(broker.disk, "free_bytes", free_bytes_of)
    broker.pass_time(3 * RETRY_MS)
    assert all(map(is_compacted, sound))
    assert not any(map(is_compacted, stale))
    told = [line for line in broker.said if strerror(errno.ESTALE) in line]
    assert len(told) == 1
    assert "/data" in told[0]
    assert not any(hosted.offline for hosted in logs)
    assert asked.count("/data") <= 8, "once each time it is tried again, and for the reserve of a start"
    monkeypatch.undo()
    broker.pass_time(RETRY_MS + FIRST_CHECK_MS)
    assert latest(read_all(stale[1].log)) == LATEST
    assert is_compacted(stale[1])


@pytest.mark.parametrize("name", ["commit", "exchange", "finish"])
def test_a_defect_ends_a_round_and_not_compaction(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = QuietBroker()
    broker.has_defect = True
    hosted = dirty_log(broker)
    other = dirty_log(broker, "u")

    def broken(self: Swap) -> None:
        raise KeyError("defect")

    with monkeypatch.context() as patched:
        patched.setattr(Swap, name, broken)
        broker.pass_time(CHECKED_MS)
    assert any(line.startswith("defect in the compaction of") and "KeyError" in line for line in broker.said)
    assert latest(read_all(hosted.log)) == latest(read_all(other.log)) == LATEST
    assert latest_after_a_crash(broker.disk, 1) == LATEST
    broker.pass_time(RETRY_MS + FIRST_CHECK_MS)
    assert is_compacted(hosted)
    assert is_compacted(other)
    assert latest(read_all(hosted.log)) == latest(read_all(other.log)) == LATEST


def test_an_answer_that_makes_no_sense_ends_a_round_and_not_compaction(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    broker = QuietBroker()
    hosted = dirty_log(broker)
    broker.has_defect = True
    with monkeypatch.context() as patched:
        patched.setattr(tasks, "run", lambda *_: {})
        broker.pass_time(CHECKED_MS)
    assert not is_compacted(hosted)
    broker.pass_time(RETRY_MS + FIRST_CHECK_MS)
    assert is_compacted(hosted)
