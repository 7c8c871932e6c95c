"""A node left to its timers: retention, rolling, flushes by time, expiry, compaction, the scrub."""

from __future__ import annotations

import errno

import pytest
from tests.support.partition_logs import latest, read_all
from tests.support.quiet_broker import QuietBroker

from holdfast.broker.log import compaction
from holdfast.broker.log.checkpoints import CLEANER_FILE, LOG_START_FILE, OffsetCheckpoint
from holdfast.broker.log.log import Log
from holdfast.broker.log.retention import Expired, expired
from holdfast.broker.log.write_ahead import FLUSHES_MIN
from holdfast.broker.node import housekeeping
from holdfast.broker.node.handlers.log_offsets import MAX_TIMESTAMP, find_offset
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.housekeeping import FIRST_CHECK_MS, SPACE_CHECK_MS
from holdfast.seams import Now
from holdfast.testing.disk import Fault, PowerLost
from holdfast.wire.positions import LogPosition

DAY_MS = 86_400_000


@pytest.fixture
def broker() -> QuietBroker:
    return QuietBroker()


# ---- retention


def test_expired_segments_go_after_the_log_start_is_durable(broker: QuietBroker) -> None:
    hosted = broker.create("t", internal_segment_bytes="100", retention_ms="1000")
    for number in range(4):
        broker.append(hosted, b"k", b"%d" % number)
        broker.pass_time(400)
    fault = broker.disk.plan(Fault("rename", path_contains=".deleted"))
    broker.pass_time(FIRST_CHECK_MS)
    assert fault.times == 0
    assert hosted.offline  # the rename of the first file failed; the checkpoint was there before
    assert OffsetCheckpoint(broker.disk, f"/data/{LOG_START_FILE}").read() == {("t", 0): 3}


def test_retention_leaves_what_is_young_and_removes_the_rest(broker: QuietBroker) -> None:
    hosted = broker.create(
        "t", internal_segment_bytes="100", retention_ms="40000", file_delete_delay_ms="500"
    )
    broker.append(hosted, b"k", b"1")
    broker.append(hosted, b"k", b"2")
    broker.pass_time(FIRST_CHECK_MS - 1)
    broker.append(hosted, b"k", b"3")
    broker.pass_time(302_000, works=False)
    assert hosted.log.start_offset == 3
    assert broker.files(hosted) == ["00000000000000000003.log"]
    assert len(broker.files(hosted, ".log.deleted")) == 3
    broker.settle()
    assert broker.files(hosted, ".deleted") == []


def test_an_expired_active_segment_is_rolled_and_then_removed(broker: QuietBroker) -> None:
    hosted = broker.create("t", retention_ms="1000", segment_ms=str(30 * DAY_MS))
    broker.append(hosted, b"k", b"1")
    broker.pass_time(FIRST_CHECK_MS + 2_000)
    assert hosted.log.start_offset == hosted.log.end_offset == 1
    assert broker.files(hosted) == ["00000000000000000001.log"]
    broker.append(hosted, b"k", b"2")
    assert [record.offset for record in read_all(hosted.log)] == [1]


def test_an_expired_segment_stays_until_its_sealing_is_flushed(broker: QuietBroker) -> None:
    hosted = broker.create("t", retention_ms="1000")
    broker.append(hosted, b"k", b"1")
    broker.clock.advance(FIRST_CHECK_MS)
    broker.node.tick(broker.clock.now())
    broker.clock.advance(5_000)
    broker.node.tick(broker.clock.now())
    assert len(hosted.log.segments) == 2
    assert hosted.log.start_offset == 0


def test_many_partitions_that_expire_together_are_looked_at_twice_each(
    broker: QuietBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once by the check that rolls them all, once by the one that follows when the rolls are flushed."""
    hosted = broker.create("t", partitions=30, retention_ms="1000", segment_ms=str(30 * DAY_MS))
    for partition in broker.node.partitions:
        broker.append(partition, b"k", b"1")
    looked_at: list[Log] = []

    def count(log: Log, high_watermark: LogPosition, now: Now) -> Expired | None:
        looked_at.append(log)
        return expired(log, high_watermark, now)

    monkeypatch.setattr(housekeeping, "expired", count)
    broker.pass_time(FIRST_CHECK_MS + 2_000)
    assert hosted.log.start_offset == 1
    assert all(partition.log.start_offset == 1 for partition in broker.node.partitions)
    assert len(looked_at) == 60


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT], ids=["no space", "no quota"])
def test_a_removal_that_is_refused_at_any_rename_goes_on_at_the_next_check(code: int) -> None:
    refused = 0
    while True:
        broker = QuietBroker()
        hosted = broker.create("t", internal_segment_bytes="100", retention_ms="1000")
        for number in range(4):
            broker.append(hosted, b"k", b"%d" % number)
        fault = broker.disk.plan(Fault("rename", code, skip=refused, path_contains=".deleted"))
        broker.pass_time(FIRST_CHECK_MS)
        if fault.times:
            break
        assert hosted.log.start_offset == 3
        assert not hosted.offline
        assert broker.node.failures.fatal is None
        assert any("/data refuses writes" in line for line in broker.said)
        assert broker.files(hosted) == [f"{segment.base_offset:020}.log" for segment in hosted.log.segments]
        broker.pass_time(broker.node.settings.broker.log_retention_check_interval_ms + 120_000)
        assert hosted.log.start_offset == hosted.log.end_offset == 4
        assert [segment.base_offset for segment in hosted.log.segments] == [4]
        assert broker.files(hosted) == ["00000000000000000004.log"]
        assert broker.files(hosted, ".deleted") == []
        refused += 1
    assert refused > 6


def test_a_check_that_raises_is_told_and_made_again(
    broker: QuietBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosted = broker.create("t", retention_ms="1000")
    dirty = broker.create("u", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, dirty)
    broker.append(hosted, b"k", b"1")
    broker.has_defect = True

    def broken(log: Log, high_watermark: LogPosition, now: Now) -> Expired | None:
        raise KeyError("defect")

    monkeypatch.setattr(housekeeping, "expired", broken)
    broker.pass_time(FIRST_CHECK_MS)
    (told,) = [line for line in broker.said if "defect in the timer" in line]
    assert "KeyError" in told
    assert "check_retention" in told
    assert len(read_all(dirty.log)) < 12, "compaction has its own timer"
    monkeypatch.undo()
    broker.pass_time(broker.node.settings.broker.log_retention_check_interval_ms + 2_000)
    assert hosted.log.start_offset == 1


def test_a_second_that_raises_is_followed_by_the_next(
    broker: QuietBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Recovery points and time-outs of produces come from one timer that repeats itself."""
    hosted = broker.create("t")
    broker.has_defect = True

    def broken() -> None:
        raise KeyError("defect")

    monkeypatch.setattr(broker.node.checkpoints, "write_recovery_points", broken)
    broker.append(hosted, b"k", b"1")
    broker.pass_time(1_000)
    assert any("defect in the timer" in line for line in broker.said)
    monkeypatch.undo()
    broker.append(hosted, b"k", b"2")
    broker.pass_time(1_000)
    assert broker.node.checkpoints.persisted_recovery_point(hosted) == 2


@pytest.mark.check
def test_a_compacted_topic_keeps_its_old_segments(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="100", retention_ms="1000")
    broker.append(hosted, b"a", b"1")
    broker.append(hosted, b"b", b"1")
    broker.pass_time(DAY_MS)
    assert latest(read_all(hosted.log)) == {b"a": b"1", b"b": b"1"}


def test_a_changed_setting_counts_at_the_next_check(broker: QuietBroker) -> None:
    hosted = broker.create("t", internal_segment_bytes="100", retention_ms=str(30 * DAY_MS))
    broker.append(hosted, b"k", b"1")
    broker.append(hosted, b"k", b"2")
    broker.pass_time(600_000)
    assert hosted.log.start_offset == 0
    broker.set("t", "retention.ms", "1000")
    broker.pass_time(300_000)
    assert hosted.log.start_offset > 0


def test_an_idle_segment_is_rolled_when_its_time_is_over(broker: QuietBroker) -> None:
    hosted = broker.create("t", segment_ms="60000")
    broker.append(hosted, b"k", b"1")
    broker.pass_time(FIRST_CHECK_MS + 300_000)
    assert [segment.base_offset for segment in hosted.log.segments] == [0, 1]
    broker.pass_time(600_000)
    assert [segment.base_offset for segment in hosted.log.segments] == [0, 1]


def test_files_that_a_stop_left_behind_are_gone_after_the_next_start(broker: QuietBroker) -> None:
    hosted = broker.create("t", internal_segment_bytes="100", retention_ms="1000")
    broker.append(hosted, b"k", b"1")
    broker.append(hosted, b"k", b"2")
    broker.pass_time(FIRST_CHECK_MS + 2_000, works=False)
    assert broker.files(hosted, ".deleted")
    again = broker.restart()
    found = again.node.partitions.get("t", 0)
    assert found is not None
    assert again.files(found, ".deleted") == []
    assert found.log.start_offset == 2


# ---- flushes by time and producers


def test_appends_are_flushed_after_flush_ms_where_acknowledging_does_not(broker: QuietBroker) -> None:
    hosted = broker.create("t", holdfast_flush="os", flush_ms="3000")
    broker.append(hosted, b"k", b"0")  # takes the new files along
    broker.pass_time(1_000)
    broker.append(hosted, b"k", b"1")
    flushes = broker.node.commit.flushes
    broker.pass_time(1_500)
    assert broker.node.commit.flushes == flushes
    broker.pass_time(1_500)
    assert broker.node.commit.flushes == flushes + 1
    assert not hosted.log.needs_flush


def test_space_written_ahead_is_given_back_when_nothing_is_appended(broker: QuietBroker) -> None:
    hosted = broker.create("t")
    for number in range(FLUSHES_MIN + 1):
        broker.append(hosted, b"k", b"%d" % number)
    path = hosted.log.active.path()
    assert broker.disk.size(path) > hosted.log.size
    broker.pass_time(SPACE_CHECK_MS)
    broker.append(hosted, b"k", b"busy")
    broker.pass_time(SPACE_CHECK_MS)
    assert broker.disk.size(path) > hosted.log.size
    broker.pass_time(2 * SPACE_CHECK_MS)
    assert broker.disk.size(path) == hosted.log.size


def test_space_that_cannot_be_given_back_takes_the_directory_offline(broker: QuietBroker) -> None:
    hosted = broker.create("t")
    for number in range(FLUSHES_MIN + 1):
        broker.append(hosted, b"k", b"%d" % number)
    broker.disk.plan(Fault("truncate", path_contains="/t-0/"))
    broker.pass_time(3 * SPACE_CHECK_MS)
    assert hosted.offline


@pytest.mark.check
def test_a_producer_that_is_silent_for_long_is_forgotten(broker: QuietBroker) -> None:
    hosted = broker.create("t")
    broker.append(hosted, b"k", b"1", producer_id=5, producer_epoch=0, base_sequence=0)
    broker.pass_time(DAY_MS - 1_000_000)
    assert 5 in hosted.log.producers
    broker.pass_time(2_000_000)
    assert 5 not in hosted.log.producers


# ---- compaction


def fill(broker: QuietBroker, hosted: HostedPartition) -> None:
    for number in range(12):
        broker.append(hosted, b"key-%d" % (number % 2), b"%d" % number * 20)


def test_a_dirty_log_is_compacted_and_the_checkpoint_written(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(FIRST_CHECK_MS)
    records = read_all(hosted.log)
    assert latest(records) == {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
    assert len(records) < 12
    written = OffsetCheckpoint(broker.disk, f"/data/{CLEANER_FILE}").read()
    assert written == {("t", 0): hosted.log.active.base_offset}
    again = broker.restart()
    found = again.node.partitions.get("t", 0)
    assert found is not None
    assert read_all(found.log) == records


def test_a_clean_log_is_left_alone_also_after_a_restart(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(FIRST_CHECK_MS)
    again = broker.restart()
    again.pass_time(FIRST_CHECK_MS, works=False)
    assert not again.worker.jobs


def test_compaction_can_be_turned_off() -> None:
    broker = QuietBroker({"log.cleaner.enable": "false"})
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(DAY_MS // 24)
    assert len(read_all(hosted.log)) == 12


def test_one_compaction_at_a_time(broker: QuietBroker) -> None:
    for name in ("t", "u"):
        fill(broker, broker.create(name, cleanup_policy="compact", internal_segment_bytes="250"))
    broker.pass_time(FIRST_CHECK_MS * 4, works=False)
    assert [job.task for job in broker.worker.jobs] == ["compact"]
    broker.settle()
    assert all(len(read_all(hosted.log)) < 12 for hosted in broker.node.partitions)


def test_reading_goes_on_between_the_steps_of_a_swap(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    expected = latest(read_all(hosted.log))
    broker.pass_time(FIRST_CHECK_MS, works=False)
    broker.worker.run_one()
    steps = 0
    while broker.flusher.jobs:
        assert latest(read_all(hosted.log)) == expected
        broker.flusher.run_one()
        steps += 1
    assert steps >= 3
    assert latest(read_all(hosted.log)) == expected
    assert broker.files(hosted, ".swap") == broker.files(hosted, ".cleaned") == []


def test_a_large_round_is_done_in_parts(broker: QuietBroker, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compaction, "PART_BYTES_MIN", 100)
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    for number in range(40):
        broker.append(hosted, b"once-%d" % number, b"1" * 40)
        broker.append(hosted, b"again", b"1" * 40)
    broker.pass_time(FIRST_CHECK_MS, works=False)
    jobs = 0
    while broker.worker.run_one():
        jobs += 1
        broker.settle(works=False)
    assert jobs > 3
    assert len(read_all(hosted.log)) < 45
    written = OffsetCheckpoint(broker.disk, f"/data/{CLEANER_FILE}").read()
    assert written == {("t", 0): hosted.log.active.base_offset}


def test_a_lookup_by_time_finds_a_record_that_compaction_left(broker: QuietBroker) -> None:
    hosted = broker.create(
        "t", cleanup_policy="compact", internal_segment_bytes="250", message_timestamp_type="LogAppendTime"
    )
    fill(broker, hosted)
    start_ms = broker.clock.now().wall_ms
    broker.pass_time(FIRST_CHECK_MS)
    offsets = [record.offset for record in read_all(hosted.log)]
    assert offsets[0] > 0
    assert find_offset(hosted, start_ms, False) == (start_ms, offsets[0])
    assert find_offset(hosted, MAX_TIMESTAMP, False)[1] in offsets


@pytest.mark.parametrize("flushes", range(6))
def test_deleting_the_topic_ends_its_compaction(broker: QuietBroker, flushes: int) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(FIRST_CHECK_MS, works=False)
    if flushes:
        broker.worker.run_one()
    for _ in range(flushes - 1):
        broker.flusher.run_one()
    broker.delete("t")
    broker.settle()
    other = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, other)
    broker.pass_time(FIRST_CHECK_MS)
    assert latest(read_all(other.log)) == {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
    assert len(read_all(other.log)) < 12
    assert not any("offline" in line for line in broker.said)


@pytest.mark.parametrize("flushes", range(6))
def test_retention_during_a_compaction_wins(broker: QuietBroker, flushes: int) -> None:
    hosted = broker.create("t", cleanup_policy="compact,delete", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(FIRST_CHECK_MS, works=False)
    if flushes:
        broker.worker.run_one()
    for _ in range(flushes - 1):
        broker.flusher.run_one()
    broker.node.log_starts.move([(hosted, 3)])
    broker.settle()
    assert hosted.log.start_offset == 3
    records = read_all(hosted.log)
    assert latest(records) == {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
    broker.pass_time(60_000)
    assert len(read_all(hosted.log)) < 9
    assert broker.files(hosted, ".swap") == broker.files(hosted, ".cleaned") == []
    assert not any("offline" in line for line in broker.said)


def test_damage_is_reported_and_the_log_left_alone_for_a_while(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    segment = hosted.log.segments[0]
    segment.file.pwritev([b"?"], segment.size - 2)
    broker.pass_time(FIRST_CHECK_MS + 60_000)
    reports = [line for line in broker.said if "not compacted" in line]
    assert len(reports) == 1
    assert "checksum" in reports[0]
    assert len(read_all_offsets(hosted)) == 12


def read_all_offsets(hosted: HostedPartition) -> list[int]:
    return [found.header.base_offset for found in hosted.log.batches_from(0)]


def test_a_disk_too_full_for_the_result_puts_compaction_off(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.disk.capacity_bytes = broker.disk.used_bytes + 1_000_000
    broker.pass_time(FIRST_CHECK_MS)
    assert any("not compacted" in line for line in broker.said)
    broker.disk.capacity_bytes = None
    broker.pass_time(600_000 + 30_000)
    assert len(read_all(hosted.log)) < 12


def test_a_failed_flush_during_a_swap_takes_the_directory_offline(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
    fill(broker, hosted)
    broker.pass_time(FIRST_CHECK_MS, works=False)
    broker.worker.run_one()
    broker.disk.plan(Fault("flush directory", path_contains="t-0"))
    broker.settle()
    assert hosted.offline


def test_power_loss_during_a_compaction_loses_no_latest_value() -> None:
    operations = 0
    is_over = False
    while not is_over:
        broker = QuietBroker()
        hosted = broker.create("t", cleanup_policy="compact", internal_segment_bytes="250")
        fill(broker, hosted)
        broker.pass_time(14_000)
        broker.disk.lose_power_after(operations)
        try:
            broker.pass_time(10_000)
            is_over = True
        except PowerLost:
            operations += 3
        broker.disk.crash()
        again = QuietBroker(disk=broker.disk, boot_id="next boot")
        found = again.node.partitions.get("t", 0)
        assert found is not None, again.said
        assert latest(read_all(found.log)) == {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
        assert found.log.end_offset == 12
        again.pass_time(FIRST_CHECK_MS * 2)
        assert latest(read_all(found.log)) == {b"key-0": b"10" * 20, b"key-1": b"11" * 20}
        assert len(read_all(found.log)) < 12
    assert operations > 40


def test_idle_records_are_compacted_after_the_longest_lag(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact", max_compaction_lag_ms="60000")
    for number in range(5):
        broker.append(hosted, b"k", b"%d" % number)
    broker.pass_time(30_000)
    assert len(read_all(hosted.log)) == 5
    broker.pass_time(90_000)
    assert [record.offset for record in read_all(hosted.log)] == [4]


# ---- the scrub


@pytest.mark.check
def test_rot_below_the_recovery_point_is_found_and_named(broker: QuietBroker) -> None:
    hosted = broker.create("t", internal_segment_bytes="250")
    fill(broker, hosted)
    segment = hosted.log.segments[1]
    broker.disk.flip_bit(segment.path(), segment.size - 4)
    broker.pass_time(900_000)
    (found,) = [line for line in broker.said if "scrub" in line]
    assert segment.path() in found
    assert "checksum" in found
    assert not hosted.offline
    broker.pass_time(DAY_MS - 1_200_000)
    assert len([line for line in broker.said if line == found]) == 1
    broker.pass_time(1_200_000)
    assert len([line for line in broker.said if line == found]) == 2


def test_a_sound_log_is_scrubbed_in_silence_while_it_is_compacted_and_cut(broker: QuietBroker) -> None:
    hosted = broker.create("t", cleanup_policy="compact,delete", internal_segment_bytes="250")
    broker.pass_time(590_000)
    for number in range(40):
        fill(broker, hosted)
        if number % 10 == 9:
            broker.node.log_starts.move([(hosted, hosted.log.segments[-2].base_offset)])
        broker.pass_time(11_000)
    assert not any("scrub" in line for line in broker.said)


# ---- every second


def test_seconds_in_which_the_process_was_stopped_are_not_made_up_for(
    broker: QuietBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    rounds: list[int] = []
    monkeypatch.setattr(broker.node.checkpoints.deletions, "carry_on", lambda: rounds.append(1))
    broker.node.tick(broker.clock.advance(DAY_MS))
    assert rounds == [1]
    broker.node.tick(broker.clock.advance(1_000))
    assert rounds == [1, 1]
