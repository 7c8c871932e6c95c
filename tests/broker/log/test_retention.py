"""Which segments retention lets go, and when an idle one is rolled."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.tiers import examples

from holdfast.broker.log.log import Log
from holdfast.broker.log.recovery import Trust, open_log
from holdfast.broker.log.retention import Expired, expired, roll_due
from holdfast.config.broker import BrokerConfig
from holdfast.config.topic import TopicConfig
from holdfast.seams import Now
from holdfast.testing.disk import SimulatedDisk
from holdfast.wire.batch import Record, build_batch, check_whole
from holdfast.wire.positions import LogPosition

START_MS = 1_700_000_000_000
RECORD_BYTES = 70


def topic(**settings: str) -> TopicConfig:
    config, _ = BrokerConfig.load({"log.dirs": "/data"})
    return config.topic_config({name.replace("_", "."): value for name, value in settings.items()})


def log_of(timestamps: list[int], **settings: str) -> Log:
    """A log with one record, of 70 bytes, in each of its segments; the last one is active."""
    disk = SimulatedDisk()
    disk.prepare("/data")
    config = topic(internal_segment_bytes="100", **settings)
    log = open_log(disk, "/data/t-0", config, Trust(False, 0, 0, False), Now(START_MS, 0), lambda line: None)
    for timestamp in timestamps:
        append(log, timestamp)
    assert len(log.segments) == max(1, len(timestamps))
    return log


def append(log: Log, timestamp: int) -> None:
    batch = build_batch([Record(0, 0, None, b"12")], base_timestamp=timestamp)
    assert len(batch) == RECORD_BYTES
    log.append(check_whole(batch), batch, 0, Now(START_MS, 0))
    log.advance_recovery_point(log.end_position)


def due(log: Log, now_ms: int, high_watermark: LogPosition | None = None) -> Expired | None:
    return expired(log, high_watermark or log.end_position, Now(now_ms, 0))


# ---- by time


def test_segments_whose_youngest_record_is_too_old_go() -> None:
    log = log_of([START_MS, START_MS + 10, START_MS + 20, START_MS + 30], retention_ms="100")
    assert due(log, START_MS + 100) is None
    found = due(log, START_MS + 111)
    assert found is not None
    assert (found.start_offset, found.segments, found.rolls_active) == (2, 2, False)
    assert found.reason == "retention.ms=100"


def test_a_young_segment_protects_those_behind_it() -> None:
    log = log_of([START_MS + 1000, START_MS, START_MS], retention_ms="100")
    assert due(log, START_MS + 500) is None


def test_a_log_without_a_time_limit_keeps_everything() -> None:
    assert due(log_of([1, 1, 1], retention_ms="-1"), START_MS) is None


def test_a_segment_without_timestamps_counts_from_its_last_change() -> None:
    log = log_of([-1, -1], retention_ms="100")
    assert due(log, START_MS + 100) is None
    found = due(log, START_MS + 101)
    assert found is not None
    assert found.segments == 1


# ---- by size


def test_segments_go_while_what_remains_is_enough() -> None:
    log = log_of([START_MS] * 4, retention_bytes=str(2 * RECORD_BYTES + 1))
    found = due(log, START_MS)
    assert found is not None
    assert (found.start_offset, found.segments, found.reason) == (1, 1, "retention.bytes=141")
    assert due(log_of([START_MS] * 4, retention_bytes=str(3 * RECORD_BYTES + 1)), START_MS) is None


def test_a_size_of_zero_takes_the_active_segment_too() -> None:
    found = due(log_of([START_MS] * 2, retention_bytes="0"), START_MS)
    assert found is not None
    assert (found.segments, found.rolls_active) == (1, True)


# ---- bounds


def test_a_compacted_topic_deletes_nothing() -> None:
    assert due(log_of([1, 1, 1], cleanup_policy="compact", retention_ms="1"), START_MS) is None


def test_compacted_and_deleted_is_both() -> None:
    found = due(log_of([1, 1, 1], cleanup_policy="compact,delete", retention_ms="1"), START_MS)
    assert found is not None
    assert found.rolls_active


def test_nothing_at_or_above_the_high_watermark_goes() -> None:
    log = log_of([1, 1, 1, 1], retention_ms="1")
    found = due(log, START_MS, LogPosition(2, 2, 0))
    assert found is not None
    assert (found.start_offset, found.rolls_active) == (2, False)


def test_a_segment_goes_only_after_the_flush_that_sealed_it() -> None:
    log = log_of([1, 1], retention_ms="1")
    before_roll = log.end_position
    log.roll(Now(START_MS, 0))
    found = due(log, START_MS, before_roll)
    assert found is not None
    assert found.start_offset == 1
    log.advance_recovery_point(log.end_position)
    found = due(log, START_MS)
    assert found is not None
    assert found.start_offset == 2


def test_a_segment_that_was_never_flushed_stays() -> None:
    """With `holdfast.flush=os` the high watermark does not wait for flushes."""
    log = log_of([1, 1, 1], retention_ms="1")
    log.flushed_base = 1
    found = due(log, START_MS)
    assert found is not None
    assert found.start_offset == 1


def test_an_empty_active_segment_is_not_rolled() -> None:
    assert due(log_of([], retention_ms="0"), START_MS + 1_000) is None
    log = log_of([1], retention_ms="1")
    log.roll(Now(START_MS, 0))
    log.advance_recovery_point(log.end_position)
    found = due(log, START_MS)
    assert found is not None
    assert not found.rolls_active


# ---- rolling what is idle


def test_an_idle_segment_rolls_after_segment_ms() -> None:
    log = log_of([START_MS], segment_ms="1000")
    assert not roll_due(log, Now(START_MS + 1000, 0))
    assert roll_due(log, Now(START_MS + 1001, 0))


def test_an_empty_segment_never_rolls() -> None:
    assert not roll_due(log_of([], segment_ms="1000"), Now(START_MS + 10_000, 0))


def test_old_records_copied_in_do_not_roll_a_new_segment() -> None:
    log = log_of([1], segment_ms="1000")
    assert not roll_due(log, Now(START_MS + 500, 0))


def test_a_compacted_segment_rolls_in_time_for_the_longest_lag() -> None:
    settings = {"segment_ms": "100000", "max_compaction_lag_ms": "1000"}
    now = Now(START_MS + 1001, 0)
    assert roll_due(log_of([START_MS], cleanup_policy="compact", **settings), now)
    assert not roll_due(log_of([START_MS], **settings), now)


# ---- settings at their limits


@settings(max_examples=examples(60), deadline=None)
@given(
    st.lists(st.sampled_from([-(2**63), -1, 0, 1, START_MS, 2**63 - 1]), min_size=1, max_size=3),
    st.sampled_from([-1, 0, 1, 2**63 - 1]),
    st.sampled_from([-(2**63), -1, 0, 1, 2**63 - 1]),
    st.sampled_from([1, 2**31, 2**63 - 1]),
    st.sampled_from([0, 2**63 - 1]),
)
def test_limits_of_settings_and_times_keep_what_is_to_be_kept(
    timestamps: list[int], retention_ms: int, retention_bytes: int, segment_ms: int, jitter_ms: int
) -> None:
    log = log_of(
        timestamps,
        retention_ms=str(retention_ms),
        retention_bytes=str(retention_bytes),
        segment_ms=str(segment_ms),
        segment_jitter_ms=str(jitter_ms),
    )
    roll_due(log, Now(START_MS + 2**40, 0))
    found = due(log, START_MS + 2**40)
    keeps_all = retention_ms in (-1, 2**63 - 1) and retention_bytes not in (0, 1)
    assert found is None if keeps_all else found is None or found.segments < len(timestamps)
