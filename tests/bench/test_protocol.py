"""The bare-socket client's own encoding, checked against independent decoders."""

from __future__ import annotations

import struct

from bench.load.payload import payloads
from bench.protocol import count_leaders, produce_error, produce_frame, record_batch
from kafka.record.default_records import DefaultRecordBatch


def test_record_batch_is_what_another_client_reads() -> None:
    batch = DefaultRecordBatch(record_batch([b"one", b"x" * 5_000], 1_700_000_000_000))
    assert batch.validate_crc()
    records = list(batch)
    assert [each.value for each in records] == [b"one", b"x" * 5_000]
    assert [each.key for each in records] == [None, None]
    assert [each.offset for each in records] == [0, 1]


def test_produce_frame_carries_its_own_length() -> None:
    frame = produce_frame("topic", 7, b"batch")
    assert struct.unpack_from(">i", frame)[0] == len(frame) - 4
    assert frame.endswith(struct.pack(">ii", 7, 5) + b"batch")


def test_error_code_of_a_produce_answer_is_found() -> None:
    answer = struct.pack(">iih5siihqqqihi", 1, 1, 5, b"topic", 1, 0, 6, -1, -1, -1, 0, -1, 0)
    assert produce_error(answer, "topic") == 6


def test_partitions_with_leaders_are_counted() -> None:
    broker = struct.pack(">ih4sih", 1, 4, b"host", 9092, -1)
    led = struct.pack(">hii" + "ii" * 2, 0, 0, 1, 1, 1, 1, 1)
    orphan = struct.pack(">hii" + "ii" * 2, 5, 1, -1, 1, 1, 1, 1)
    topic = struct.pack(">hh1sbi", 0, 1, b"t", 0, 2) + led + orphan
    answer = struct.pack(">ii", 1, 1) + broker + struct.pack(">ii", 1, 1) + topic
    assert count_leaders(answer) == 1


def test_payloads_are_of_the_size_asked_for_and_the_same_each_time() -> None:
    assert {len(each) for each in payloads(100)} == {100}
    assert payloads(1_000) == payloads(1_000)
    assert len(set(payloads(1_000))) > 500
