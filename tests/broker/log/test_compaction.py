"""What compaction keeps and what it drops, how far it goes, and what becomes of the segments."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.partition_logs import (
    DELETE_RETENTION_MS,
    DIRECTORY,
    START_MS,
    CompactedLog,
    compacted,
    latest,
)
from tests.support.tiers import examples

from holdfast.broker.log.compaction import Swap, examine, is_due
from holdfast.broker.log.index import TransactionIndex
from holdfast.errors import CorruptLog
from holdfast.wire.batch import (
    Record,
    build_batch,
    check_batch,
    check_whole,
    encode_record,
    nearest_timestamp,
    read_header,
    seal,
)
from holdfast.wire.codecs import Codec
from holdfast.wire.varint import encode_varint

# ---- what stays and what goes


def test_only_the_latest_value_of_each_key_stays_at_its_offset() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1")])
    subject.append([(b"a", b"2"), (b"c", b"1")])
    subject.append([(b"b", b"2")])
    subject.roll()
    subject.compact()
    assert [record[:3] for record in subject.records()] == [(2, b"a", b"2"), (3, b"c", b"1"), (4, b"b", b"2")]


def test_batches_keep_the_offsets_they_span() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    subject.append([(b"a", b"2"), (b"c", b"2")])
    subject.roll()
    subject.compact()
    assert [(h.base_offset, h.last_offset, h.records_count) for h in subject.headers()] == [
        (0, 2, 1),
        (3, 4, 2),
    ]


def test_records_without_a_key_go() -> None:
    subject = CompactedLog()
    subject.append([(None, b"lost"), (b"a", b"1"), (None, None)])
    subject.roll()
    subject.compact()
    assert [record[:3] for record in subject.records()] == [(1, b"a", b"1")]


def test_the_active_segment_is_not_touched() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    subject.roll()
    subject.append([(b"a", b"2"), (b"a", b"3")])
    subject.compact()
    assert [record.offset for record in subject.records()] == [0, 1, 2]


def test_a_key_of_any_length_is_told_from_every_other() -> None:
    keys = [b"", b"k" * 14, b"k" * 15, b"k" * 16, b"k" * 300]
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for value in (b"old", b"new"):
        for key in keys:
            subject.append([(key, value)])
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == dict.fromkeys(keys, b"new")
    assert len(subject.records()) == len(keys)


@pytest.mark.parametrize("codec", list(Codec))
def test_a_batch_is_packed_again_with_its_own_codec(codec: Codec) -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"key-%d" % index, b"value" * 20) for index in range(50)], codec)
    subject.append([(b"key-%d" % index, b"new" * 20) for index in range(0, 50, 2)], codec)
    subject.roll()
    subject.compact()
    first = subject.headers()[0]
    assert (first.codec, first.records_count) == (codec, 25)
    assert [record.offset for record in subject.records()][:25] == list(range(1, 50, 2))
    assert subject.records()[0].timestamp == START_MS + 1


def test_the_largest_timestamp_is_that_of_the_records_that_stay() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1"), (b"c", b"1")])
    subject.append([(b"c", b"2")])
    subject.roll()
    subject.compact()
    assert subject.headers()[0].max_timestamp == START_MS + 1


# ---- tombstones


def test_a_tombstone_stays_until_its_horizon_and_goes_afterwards() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1")])
    subject.append([(b"a", None)])
    subject.roll()
    subject.compact()
    tombstone = subject.headers()[-1]
    assert tombstone.has_delete_horizon
    assert tombstone.base_timestamp == START_MS + DELETE_RETENTION_MS
    assert subject.records()[-1] == (2, b"a", None, START_MS)

    subject.now_ms += DELETE_RETENTION_MS - 1
    subject.append([(b"x", b"1")])
    subject.roll()
    subject.compact()
    assert (2, b"a", None, START_MS) in subject.records()

    subject.now_ms += 1
    subject.append([(b"x", b"2")])
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == {b"b": b"1", b"x": b"2"}
    assert all(record.value is not None for record in subject.records())


def test_a_tombstone_behind_the_mapped_part_gets_no_horizon_yet() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")])
    subject.append([(b"b", b"1")])
    subject.append([(b"a", None)])
    subject.roll()
    cleaned = subject.compact(map_bytes=1)
    assert cleaned.end_offset == 1
    assert not subject.headers()[-1].has_delete_horizon


# ---- the bounds of a round


def test_a_full_map_ends_the_round_and_the_next_goes_on() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for value in (b"1", b"2"):
        for key in (b"a", b"b", b"c", b"d"):
            subject.append([(key, value)])
    subject.roll()
    ends: list[int] = []
    while not ends or ends[-1] < subject.log.active.base_offset:
        ends.append(subject.compact(map_bytes=3 * 160).end_offset)
        assert latest(subject.records()) == dict.fromkeys((b"a", b"b", b"c", b"d"), b"2")
    assert len(ends) > 1
    assert [record.offset for record in subject.records()] == [4, 5, 6, 7]


def test_a_round_in_parts_ends_as_one_in_a_single_part() -> None:
    def dirty() -> CompactedLog:
        subject = CompactedLog(compacted(internal_segment_bytes="300"))
        for number in range(30):
            subject.append([(b"key-%d" % (number % 7), b"%d" % number * 20)])
        subject.roll()
        return subject

    whole, parts = dirty(), dirty()
    whole.compact()
    first_base: int | None = 0
    count = 0
    while first_base is not None:
        cleaned = parts.clean(first_base=first_base, part_bytes=200)
        clean_to = parts.clean_to
        parts.swap_in(cleaned)
        first_base = cleaned.resume_base
        if first_base is not None:
            parts.clean_to = clean_to
        count += 1
        assert latest(parts.records()) == latest(whole.records())
    assert count > 2
    assert parts.records() == whole.records()
    assert parts.clean_to == whole.clean_to


def test_a_round_stops_at_the_last_stable_offset() -> None:
    subject = CompactedLog()
    for _ in range(3):
        subject.append([(b"a", b"1")])
        subject.roll()
    dirt = examine(subject.log, None, 2, subject.log.end_position, subject.now)
    assert dirt.bound == 2


def test_a_round_stops_where_the_high_watermark_is() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    before_roll = subject.log.end_position
    subject.roll()
    assert examine(subject.log, None, 1, before_roll, subject.now).bound == 0
    assert examine(subject.log, None, 1, subject.log.end_position, subject.now).bound == 1


def test_records_younger_than_the_lag_are_left_alone() -> None:
    subject = CompactedLog(compacted(min_compaction_lag_ms="1000"))
    subject.append([(b"a", b"1")])
    subject.roll()
    subject.now_ms += 600
    subject.append([(b"a", b"2")])
    subject.roll()
    subject.now_ms += 600
    assert examine(subject.log, None, 2, subject.log.end_position, subject.now).bound == 1


def test_a_log_is_due_by_its_dirty_ratio_or_by_the_age_of_its_dirt() -> None:
    subject = CompactedLog(compacted(min_cleanable_dirty_ratio="0.5", max_compaction_lag_ms="5000"))
    for _ in range(3):
        subject.append([(b"a", b"1")])
        subject.roll()

    def due(clean_to: int) -> bool:
        dirt = examine(subject.log, clean_to, 3, subject.log.end_position, subject.now)
        return is_due(subject.log, dirt)

    assert due(1)
    assert not due(2)
    subject.now_ms += 5001
    assert due(2)
    assert not due(3)


@pytest.mark.parametrize("clean_to", [99, 1])
def test_a_checkpoint_outside_the_log_is_taken_as_none(clean_to: int) -> None:
    subject = CompactedLog()
    for _ in range(4):
        subject.append([(b"a", b"1")])
    subject.roll()
    subject.log.advance_start(2)
    dirt = examine(subject.log, clean_to, 4, subject.log.end_position, subject.now)
    assert dirt.first_dirty_offset == 2


# ---- segments


def test_small_neighbours_become_one_segment() -> None:
    subject = CompactedLog()
    for round_number in range(20):
        subject.append([(b"key", b"%d" % round_number * 50)])
        subject.roll()
    assert len(subject.log.segments) == 21
    subject.compact()
    subject.compact()
    assert [segment.base_offset for segment in subject.log.segments][-1] == 20
    assert len(subject.log.segments) < 6
    assert [record.offset for record in subject.records()] == [19]


def test_a_segment_in_which_nothing_changes_is_not_written_again() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="150"))
    subject.append([(b"a", b"1" * 80)])
    subject.roll()
    before = subject.log.segments[0]
    assert subject.compact().segments == []
    assert subject.log.segments[0] is before
    assert not [name for name in subject.disk.list(DIRECTORY) if "cleaned" in name]


def test_a_cleaned_segment_reaches_to_the_end_of_what_it_replaces() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")])
    subject.append([(b"b", b"1")])
    subject.roll()
    subject.append([(b"a", b"2"), (b"b", b"2")])
    subject.roll()
    seen = {segment.base_offset: segment for segment in subject.log.segments}
    subject.config = compacted(internal_segment_bytes="10")
    subject.log.config = subject.config
    cleaned = subject.clean()
    first = cleaned.segments[0]
    assert first.replaces == [0]
    Swap(subject.disk, subject.log, first, seen).commit()
    subject.log = subject.open(clean=True)
    headers = subject.headers()
    assert (headers[0].base_offset, headers[0].last_offset, headers[0].records_count) == (1, 1, 0)


def test_indexes_of_a_cleaned_segment_are_those_a_rebuild_gives() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    for number in range(100):
        subject.now_ms += 7
        subject.append([(b"key-%d" % (number % 60), b"v" * 30)])
    subject.roll()
    subject.compact()
    segment = subject.log.segments[0]
    written = (list(segment.index.entries), list(segment.time_index.entries))
    assert len(written[0]) > 10
    segment.rebuild_indexes(subject.config.index_interval_bytes)
    assert (list(segment.index.entries), list(segment.time_index.entries)) == written


def test_damage_ends_the_round_and_changes_nothing() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    subject.append([(b"a", b"2")])
    subject.roll()
    segment = subject.log.segments[0]
    segment.file.pwritev([b"X"], segment.size - 3)
    with pytest.raises(CorruptLog, match="checksum"):
        subject.clean()
    assert not [name for name in subject.disk.list(DIRECTORY) if "cleaned" in name]


# ---- transactions and producers


def transactional(producer_id: int, sequence: int = 0) -> dict[str, Any]:
    return {
        "producer_id": producer_id,
        "producer_epoch": 0,
        "base_sequence": sequence,
        "is_transactional": True,
    }


def test_aborted_records_go_and_hide_nothing() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"committed")])
    subject.append([(b"a", b"aborted"), (b"b", b"aborted")], **transactional(7))
    subject.append_marker(7, is_commit=False)
    subject.append([(b"c", b"1")], **transactional(7, 2))
    subject.append_marker(7, is_commit=True)
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == {b"a": b"committed", b"c": b"1"}


def test_a_transaction_aborted_behind_the_cleaned_part_is_known_there() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"aborted")], **transactional(7))
    subject.roll()
    subject.append_marker(7, is_commit=False)
    subject.append([(b"b", b"1")])
    subject.compact()
    assert latest(subject.records()) == {b"b": b"1"}


def test_two_producers_aborting_and_committing_side_by_side_are_told_apart() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"aborted")], **transactional(1))
    subject.append([(b"b", b"committed")], **transactional(2))
    subject.append([(b"c", b"aborted")], **transactional(1, 1))
    subject.append_marker(2, is_commit=True)
    subject.append_marker(1, is_commit=False)
    subject.append([(b"d", b"committed")], **transactional(1, 2))
    subject.append_marker(1, is_commit=True)
    subject.roll()
    subject.compact()
    assert latest(subject.records()) == {b"b": b"committed", b"d": b"committed"}


def test_a_marker_stays_for_the_retention_after_its_data_is_gone() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")], **transactional(7))
    marker = subject.append_marker(7, is_commit=True).base_offset
    subject.append([(b"a", b"2")])
    subject.roll()
    subject.log.producers.clear()

    def markers() -> list[tuple[int, bool]]:
        return [(h.base_offset, h.has_delete_horizon) for h in subject.headers() if h.is_control]

    def compact_again() -> None:
        subject.append([(b"x", b"1")])
        subject.roll()
        subject.compact()

    subject.compact()
    assert markers() == [(marker, False)]  # its data was there until this round
    compact_again()
    assert markers() == [(marker, True)]
    subject.now_ms += DELETE_RETENTION_MS - 1
    compact_again()
    assert markers() == [(marker, True)]
    subject.now_ms += 1
    compact_again()
    assert markers() == []


def test_the_transaction_index_keeps_what_consumers_must_still_be_told() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"aborted")], **transactional(7))
    marker = subject.append_marker(7, is_commit=False).base_offset
    subject.append([(b"b", b"1")])
    subject.roll()
    subject.log.producers.clear()
    path = subject.log.segments[0].path(".txnindex")
    index = TransactionIndex(0)
    index.append(7, 0, marker, marker + 1)
    subject.disk.open(path, "create").pwritev([index.to_bytes()], 0)

    def told() -> list[int]:
        data = subject.disk.open(path, "read")
        entries = TransactionIndex.from_bytes(data.pread(data.size(), 0), 0).entries
        return [entry.last_offset for entry in entries]

    subject.compact()
    assert told() == [marker]
    subject.append([(b"b", b"2")])
    subject.roll()
    subject.compact()
    assert told() == []


def test_the_last_batch_of_a_live_producer_stays_emptied() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")], producer_id=9, producer_epoch=3, base_sequence=0)
    subject.append([(b"a", b"2"), (b"b", b"1")], producer_id=9, producer_epoch=3, base_sequence=1)
    subject.append([(b"a", b"3"), (b"b", b"2")])
    subject.roll()
    subject.compact()
    headers = [header for header in subject.headers() if header.producer_id == 9]
    (emptied,) = headers
    assert (emptied.base_offset, emptied.last_offset, emptied.records_count) == (1, 2, 0)
    assert (emptied.producer_epoch, emptied.base_sequence, emptied.last_sequence) == (3, 1, 2)
    # Recovery without a snapshot knows the producer's last sequence from it.
    for name in subject.disk.list(DIRECTORY):
        if name.endswith(".snapshot"):
            subject.disk.remove(f"{DIRECTORY}/{name}")
    log = subject.open(clean=False, recovery_point=subject.log.active.base_offset)
    (producer,) = log.producers.describe()
    assert (producer.producer_id, producer.producer_epoch, producer.last_sequence) == (9, 3, 2)


def test_the_batches_of_a_forgotten_producer_go() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.append([(b"a", b"1")], producer_id=9, producer_epoch=3, base_sequence=0)
    subject.append([(b"a", b"2")])
    subject.roll()
    subject.log.producers.clear()
    subject.compact()
    assert [header.base_offset for header in subject.headers()] == [1]


def test_an_emptied_batch_is_no_answer_to_a_lookup_by_time() -> None:
    subject = CompactedLog(compacted(internal_segment_bytes="100000"))
    subject.now_ms += 1000
    subject.append([(b"a", b"1")], producer_id=9, producer_epoch=0, base_sequence=0)
    subject.now_ms -= 500
    subject.append([(b"a", b"2")])
    subject.roll()
    subject.compact()
    assert subject.headers()[0].records_count == 0
    found = subject.log.batch_at_or_after_time(START_MS, subject.log.end_position)
    assert found is not None
    assert found[1].header.base_offset == 1
    assert subject.log.segments[0].max_timestamp == START_MS + 500


# ---- what producers may have sent, and settings at their limits


def append_raw(subject: CompactedLog, bodies: list[bytes]) -> int:
    """Records of these bytes behind their lengths, which is all that a broker looks at; the base offset."""
    whole = build_batch([Record(at, 0, b"k", b"v") for at in range(len(bodies))], base_timestamp=START_MS)
    data = b"".join(encode_varint(len(body)) + body for body in bodies)
    batch = seal(read_header(whole), data)
    check_batch(batch)
    return subject.log.append(read_header(batch), batch, 0, subject.now).base_offset


@settings(max_examples=examples(60), deadline=None)
@given(st.lists(st.lists(st.binary(max_size=20), min_size=1, max_size=3), min_size=1, max_size=3))
def test_records_that_make_no_sense_stay_and_stop_nothing(batches: list[list[bytes]]) -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1"), (b"b", b"1")])
    for bodies in batches:
        append_raw(subject, bodies)
    stored = list(subject.headers())[1:]
    subject.append([(b"a", b"2")])
    subject.roll()
    unreadable = subject.compact().unreadable
    assert subject.headers()[-1].records_count == 1, "of the two values of a, the later"
    kept = {header.base_offset: header for header in subject.headers()}
    for header in stored:
        if header.base_offset in unreadable:
            assert kept[header.base_offset] == header
    assert subject.compact().unreadable == []


def test_a_batch_that_cannot_be_read_to_its_end_replaces_nothing() -> None:
    subject = CompactedLog()
    subject.append([(b"a", b"1")])
    good = encode_record(Record(0, 0, b"a", b"2"))[1:]
    junk = append_raw(subject, [good, b"\x00\xff\xff"])
    subject.roll()
    assert subject.compact().unreadable == [junk]
    assert [header.records_count for header in subject.headers()] == [1, 2]


LONGS = st.sampled_from([0, 1, 1_000, 2**31 - 1, 2**31, 2**62, 2**63 - 1])


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from([-(2**63), -5_000, -1, 0, 1, START_MS, 2**63 - 1]),
    st.lists(st.sampled_from([-(2**63), -1, 0, 1, 2**62, 2**63 - 1]), min_size=1, max_size=3),
    LONGS,
    LONGS,
    LONGS.filter(bool),
    st.sampled_from([1, 600, 2**31 - 1]),
)
def test_no_setting_and_no_time_stops_compaction(
    base_timestamp: int, deltas: list[int], delete_ms: int, least_ms: int, most_ms: int, segment_bytes: int
) -> None:
    subject = CompactedLog(
        compacted(
            delete_retention_ms=str(delete_ms),
            min_compaction_lag_ms=str(least_ms),
            max_compaction_lag_ms=str(max(least_ms, most_ms)),
            internal_segment_bytes=str(segment_bytes),
            segment_index_bytes=str(max(4, segment_bytes)),
        )
    )
    records = [Record(at, delta, b"k%d" % at, None) for at, delta in enumerate(deltas)]
    for _ in range(2):
        batch = build_batch(records, base_timestamp=base_timestamp, max_timestamp=START_MS)
        subject.log.append(check_whole(batch), batch, 0, subject.now)
        subject.append([(b"other", b"v")])
    subject.roll()
    times = {nearest_timestamp(record.timestamp) for record in subject.records()}
    is_allowed = least_ms <= 1_000
    subject.now_ms += 1_000
    subject.compact()
    assert (len(subject.records()) == len(deltas) + 1) is is_allowed
    kept = {nearest_timestamp(record.timestamp) for record in subject.records()}
    assert {time for time in kept if time >= 0} <= times
    subject.append([(b"other", b"v")])
    subject.roll()
    subject.now_ms += 2_000
    subject.compact()
    if is_allowed:
        assert (len(subject.records()) == 1) is (delete_ms <= 1_000)
    subject.restart()
