"""How many files a log keeps open: few, however many segments it has, and none for a partition nobody uses."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tests.support.partition_logs import NOW, START_MS, Batch, append, topic_config

from holdfast.broker.log.log import LOADED_MAX, Log
from holdfast.broker.log.recovery import Trust, create_log, open_log
from holdfast.config.topic import TopicConfig
from holdfast.real import RealFileSystem

OF_A_LOG = LOADED_MAX + 1
"""The sealed segments used last, and the active one."""


def open_below(directory: Path) -> int:
    """Files this process has open in a directory; those of it that are deleted count as well."""
    count = 0
    for number in os.listdir("/proc/self/fd"):
        try:
            count += os.readlink(f"/proc/self/fd/{number}").startswith(f"{directory}/")
        except OSError:
            continue
    return count


@pytest.fixture
def config() -> TopicConfig:
    return topic_config()


@pytest.fixture
def log(tmp_path: Path, config: TopicConfig) -> Log:
    """30 segments and more, flushed."""
    log = create_log(RealFileSystem(), str(tmp_path / "t-0"), config, b"i" * 16, NOW)
    while len(log.segments) < 30:
        append(log, Batch((b"x" * 60,), timestamp=START_MS + log.end_offset))
    pending = log.begin_flush()
    log.advance_recovery_point(pending.end)
    return log


def test_a_new_log_has_nothing_open_until_it_is_used(tmp_path: Path, config: TopicConfig) -> None:
    logs = [
        create_log(RealFileSystem(), str(tmp_path / f"t-{index}"), config, b"i" * 16, NOW)
        for index in range(20)
    ]
    assert open_below(tmp_path) == 0
    for log in logs:
        log.flush_and_close()
    assert open_below(tmp_path) == 0


def test_rolling_and_reading_keep_a_few_files_open(tmp_path: Path, log: Log) -> None:
    assert open_below(tmp_path) <= OF_A_LOG
    for offset in range(log.end_offset):
        assert log.read(offset, 1, log.end_position, at_least_one=True) is not None
    assert open_below(tmp_path) <= OF_A_LOG


def test_lookups_and_scans_keep_a_few_files_open(tmp_path: Path, log: Log) -> None:
    for offset in range(log.end_offset):
        found = log.batch_at_or_after_time(START_MS + offset, log.end_position)
        assert found is not None
        assert found[1].header.base_offset == offset
        assert log.position_of(offset).offset == offset
    assert open_below(tmp_path) <= OF_A_LOG
    assert sum(1 for _ in log.batches_from(0)) == log.end_offset
    assert open_below(tmp_path) <= OF_A_LOG


def test_what_is_being_sent_outlives_its_segments_turn(tmp_path: Path, log: Log) -> None:
    piece = log.read(0, 1, log.end_position, at_least_one=True)
    assert piece is not None
    expected = piece.file.pread(piece.length, piece.position)
    for offset in range(log.end_offset):
        log.read(offset, 1, log.end_position, at_least_one=True)
    again = log.read(0, 1, log.end_position, at_least_one=True)
    assert again is not None
    assert again.file is not piece.file
    assert piece.file.pread(piece.length, piece.position) == expected
    del piece, again
    assert open_below(tmp_path) <= OF_A_LOG


def test_a_cleaned_segment_keeps_its_file_open_while_that_has_another_name(log: Log) -> None:
    """Between two steps of a swap nothing of the segment's own name is there to be opened."""
    segment = log.segments[0]
    swap = segment.path() + ".swap"
    os.rename(segment.path(), swap)
    segment.adopt_file(RealFileSystem().open(swap, "write"))
    for offset in range(log.end_offset):
        log.read(offset, 1, log.end_position, at_least_one=True)
    assert log.read(0, 1, log.end_position, at_least_one=True) is not None
    os.rename(swap, segment.path())
    segment.forget_file()
    assert log.read(0, 1, log.end_position, at_least_one=True) is not None


@pytest.mark.parametrize("clean", [True, False])
def test_a_log_that_was_opened_has_nothing_open_until_it_is_used(
    tmp_path: Path, log: Log, config: TopicConfig, clean: bool
) -> None:
    log.flush_and_close()
    assert open_below(tmp_path) == 0
    again = open_log(
        RealFileSystem(), log.directory, config, Trust(clean, 0, 0, torn_tail_expected=False), NOW, print
    )
    assert again.end_offset == log.end_offset
    assert open_below(tmp_path) == 0
    append(again, Batch((b"x",)))
    assert open_below(tmp_path) == 1
