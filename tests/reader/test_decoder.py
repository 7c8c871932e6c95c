"""The decoder gives what the plain reference gives, whatever the batches, and never trusts a byte."""

from __future__ import annotations

import random
import subprocess
import sys

import numpy as np
import pytest
from crc32c import crc32c
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.reader_cases import (
    CORRUPT,
    TOPIC_ID,
    by_arrow,
    by_reference,
    damaged,
    random_run,
    rows_of,
)
from tests.support.tiers import examples

from holdfast.reader import arrow, layout
from holdfast.reader.errors import CorruptBatch
from holdfast.reader.fetch_messages import Aborted
from holdfast.reader.model import PartitionRange, RangeReport
from holdfast.reader.reference import Decoded
from holdfast.wire.batch import Record, build_batch, make_batch
from holdfast.wire.codecs import Codec

optional_bytes = st.none() | st.binary(max_size=100)
headers = st.lists(st.tuples(st.text(max_size=8), optional_bytes), max_size=3).map(tuple)


@st.composite
def runs(draw: st.DrawFn) -> tuple[bytes, int]:
    """Batches as a log holds them one after another, and the offset behind them."""
    offset = draw(st.integers(0, 2**40))
    parts = []
    for _ in range(draw(st.integers(1, 4))):
        deltas = sorted(draw(st.sets(st.integers(0, 300), max_size=12)))
        last_delta = max([0, *deltas]) + draw(st.integers(0, 3))
        is_transactional = draw(st.booleans())
        parts.append(
            build_batch(
                [
                    Record(
                        delta,
                        draw(st.integers(-(2**41), 2**41)),
                        draw(optional_bytes),
                        draw(optional_bytes),
                        draw(headers),
                    )
                    for delta in deltas
                ],
                base_offset=offset,
                base_timestamp=draw(st.integers(-1, 2**42)),
                codec=draw(st.sampled_from(Codec)),
                producer_id=draw(st.integers(0, 2)) if is_transactional else -1,
                is_transactional=is_transactional,
                log_append_time=draw(st.booleans()),
                max_timestamp=draw(st.integers(0, 2**42)),
                last_offset_delta=last_delta,
            )
        )
        offset += last_delta + 1 + draw(st.integers(0, 5))
    return b"".join(parts), offset


@settings(max_examples=examples(150))
@given(run=runs(), data=st.data())
def test_machine_code_gives_what_the_reference_gives(run: tuple[bytes, int], data: st.DataObject) -> None:
    batches, behind = run
    first = int.from_bytes(batches[:8], "big")
    start = data.draw(st.integers(first, behind))
    end = data.draw(st.integers(start, behind + 2)) + 1
    aborted = data.draw(
        st.lists(st.builds(Aborted, st.integers(0, 2), st.integers(first, behind)), max_size=3)
    )
    view = memoryview(batches)
    found = by_arrow(view, start, end, aborted, chunk_bytes=data.draw(st.sampled_from((1, 1000, 1 << 20))))
    assert isinstance(found, Decoded)
    assert found == by_reference(view, start, end, aborted)


@pytest.mark.parametrize("seed", range(60))
def test_random_runs_with_control_batches_and_any_codec(seed: int) -> None:
    chance = random.Random(seed)
    data, behind = random_run(chance)
    aborted = [Aborted(chance.randrange(3), chance.randrange(behind + 1)) for _ in range(2)]
    assert by_arrow(memoryview(data), 0, behind, aborted) == by_reference(
        memoryview(data), 0, behind, aborted
    )


@pytest.mark.parametrize("seed", range(60))
def test_damage_under_the_checksum_is_always_noticed(seed: int) -> None:
    chance = random.Random(seed)
    values = [chance.randbytes(chance.choice((0, 10, 5000))) for _ in range(5)]
    batch = bytearray(make_batch(values, base_offset=10, codec=chance.choice(list(Codec))))
    batch[chance.randrange(21, len(batch))] ^= 1 << chance.randrange(8)
    assert by_arrow(memoryview(batch), 0, 100) == CORRUPT


def test_damaged_bytes_never_crash_the_machine_code_nor_make_it_read_past_their_end() -> None:
    # In a process of its own: the memory behind the bytes is guarded, and a read there would be the end of it.
    code = "from tests.support.reader_cases import fuzz; fuzz(1_000_000, 1500)"
    run = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=200, check=False
    )
    assert (run.returncode, run.stdout) == (0, "1500 rounds\n"), run.stderr


@settings(max_examples=examples(100))
@given(st.binary(max_size=400))
def test_random_bytes_are_refused_or_empty(data: bytes) -> None:
    found = by_arrow(memoryview(data), 0, 1000, check_crc=False)
    assert found == by_reference(memoryview(data), 0, 1000, check_crc=False)


@settings(max_examples=examples(200))
@given(body=st.binary(max_size=120), count=st.integers(-5, 20), delta=st.integers(-3, 30))
def test_random_records_in_a_valid_batch_are_refused_unless_they_are_records(
    body: bytes, count: int, delta: int
) -> None:
    batch = bytearray(make_batch([b"x"], base_offset=5))
    batch[61:] = body
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    batch[23:27] = delta.to_bytes(4, "big", signed=True)
    batch[57:61] = count.to_bytes(4, "big", signed=True)
    found = by_arrow(memoryview(batch), 0, 1000, check_crc=False)
    assert found in (by_reference(memoryview(batch), 0, 1000, check_crc=False), CORRUPT)


def varint(number: int) -> bytes:
    encoded = (number << 1) ^ (number >> 63)
    out = bytearray()
    while encoded >= 0x80:
        out.append(encoded & 0x7F | 0x80)
        encoded >>= 7
    return bytes([*out, encoded])


def record(*fields: int | bytes, size: int | None = None) -> bytes:
    """A record of these fields, numbers as varints, under its own length or another."""
    body = b"\0" + b"".join(each if isinstance(each, bytes) else varint(each) for each in fields)
    return varint(len(body) if size is None else size) + body


def with_records(*records: bytes, last_delta: int = 9) -> memoryview:
    batch = bytearray(make_batch([b"x"] * len(records)))
    batch[61:] = b"".join(records)
    batch[8:12] = (len(batch) - 12).to_bytes(4, "big")
    batch[23:27] = last_delta.to_bytes(4, "big")
    return memoryview(batch)


GOOD = record(0, 0, 1, b"k", 2, b"vv", 1, 1, b"h", -1)


@pytest.mark.parametrize(
    ("records", "status"),
    [
        ([GOOD], layout.FINE),
        ([record(5, 3, -1, -1, 0), record(5, 4, -7, 0, 0)], layout.FINE),
        ([record(0, 3, -1, -1, 0), record(0, 3, -1, -1, 0)], layout.BAD_OFFSET),
        ([record(0, 3, -1, -1, 0), record(0, 2, -1, -1, 0)], layout.BAD_OFFSET),
        ([record(0, 10, -1, -1, 0)], layout.BAD_OFFSET),
        ([record(0, -1, -1, -1, 0)], layout.BAD_OFFSET),
        ([record(0, 0, -1, -1, 0, size=7)], layout.BAD_RECORD),
        ([record(0, 0, -1, -1, 0, size=5)], layout.BAD_RECORD),
        ([record(0, 0, -1, -1, 0, size=-1)], layout.BAD_RECORD),
        ([b"\xff" * 12], layout.BAD_VARINT),
        ([record(b"\xff" * 9 + b"\x02", 0, -1, -1, 0)], layout.BAD_VARINT),
        ([record(b"\xff" * 9 + b"\x01", 0, -1, -1, 0)], layout.FINE),
        ([record(0, b"\x80\x80\x80\x80\x80")], layout.BAD_VARINT),
        ([record(0, 0, 5, b"k", -1, 0)], layout.BAD_KEY),
        ([record(0, 0, 2**62, b"k", -1, 0)], layout.BAD_KEY),
        ([record(0, 0, -1, 3, b"v", 0)], layout.BAD_VALUE),
        ([record(0, 0, -1, 2**62, b"v", 0)], layout.BAD_VALUE),
        ([record(0, 0, -1, 1, b"v", -1)], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 2**40)], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 2, 1, b"h", -1)], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 1, -1, -1)], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 1, 9, b"h", -1)], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 1, 1, b"h", 9, b"v")], layout.BAD_HEADERS),
        ([record(0, 0, -1, 1, b"v", 0, b"rest")], layout.BAD_HEADERS),
        ([GOOD + b"rest"], layout.LEFT_OVER),
        ([GOOD + record(0, 1, -1, -1, 0)], layout.LEFT_OVER),
        ([GOOD, b""], layout.BAD_COUNT),
        ([record(0, 0, -1, 9, b"123456789", 0), b""], layout.BAD_VARINT),
    ],
)
def test_each_way_in_which_records_are_wrong_has_its_name(records: list[bytes], status: int) -> None:
    data = with_records(*records)
    expected = by_reference(data, 0, 100, check_crc=False)
    wanted = PartitionRange("t", TOPIC_ID, 0, 0, 100)
    reading = arrow.Reading(wanted, 0, RangeReport(wanted), (), True, 1 << 20, check_crc=False)
    surveyed = arrow.survey(data, check_crc=False)
    if status == layout.FINE:
        assert expected == by_arrow(data, 0, 100, check_crc=False) != CORRUPT
        return
    with pytest.raises(CorruptBatch) as corrupt:
        list(arrow.decode(surveyed, reading))
    assert layout.MEANINGS[status] in str(corrupt.value)
    assert expected == CORRUPT


@pytest.mark.parametrize(
    ("place", "change", "status"),
    [
        (16, b"\x03", layout.BAD_MAGIC),
        (16, b"\x01", layout.BAD_MAGIC),
        (8, (40).to_bytes(4, "big"), layout.BAD_LENGTH),
        (8, b"\xff\xff\xff\xff", layout.BAD_LENGTH),
        (17, b"\0\0\0\0", layout.BAD_CRC),
    ],
)
def test_each_way_in_which_a_header_is_wrong_has_its_name(place: int, change: bytes, status: int) -> None:
    batch = bytearray(make_batch([b"x"]))
    batch[place : place + len(change)] = change
    surveyed = arrow.survey(memoryview(batch))
    assert len(surveyed.table) == 0
    assert surveyed.problem.startswith(layout.MEANINGS[status])


@pytest.mark.parametrize(
    ("base_offset", "delta", "count"),
    [(2, 0, 1), (-1, 0, 1), (2**63 - 1, 0, 1), (9, -1, 1), (9, 0, 2), (9, 0, -1)],
)
def test_headers_that_contradict_those_before_them_or_themselves(
    base_offset: int, delta: int, count: int
) -> None:
    batch = bytearray(make_batch([b"x"]))
    batch[0:8] = base_offset.to_bytes(8, "big", signed=True)
    batch[23:27] = delta.to_bytes(4, "big", signed=True)
    batch[57:61] = count.to_bytes(4, "big", signed=True)
    data = memoryview(make_batch([b"a", b"b", b"c"]) + bytes(batch))
    assert by_arrow(data, 0, 100, check_crc=False) == by_reference(data, 0, 100, check_crc=False) == CORRUPT


def test_every_truncation_of_a_run_gives_its_whole_batches() -> None:
    parts = [make_batch([b"a", b"b"], base_offset=0), make_batch([b"c"], base_offset=2)]
    data = b"".join(parts)
    for size in range(len(data) + 1):
        found = by_arrow(memoryview(data)[:size], 0, 3)
        assert isinstance(found, Decoded)
        whole = 0 if size < len(parts[0]) else 2 if size < len(data) else 3
        assert len(found.rows) == whole == found.next_offset


def test_a_batch_cut_off_tells_how_large_it_is() -> None:
    data = make_batch([bytes(1000)])
    assert arrow.survey(memoryview(data)[:-1]).wanted_bytes == len(data)
    assert arrow.survey(memoryview(data)[:10]).wanted_bytes == 0
    assert arrow.survey(memoryview(data)).wanted_bytes == 0


def test_a_bomb_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "RECORDS_BYTES_MAX", 100_000)
    batch = make_batch([bytes(200_000)], codec=Codec.ZSTD)
    assert by_arrow(memoryview(batch), 0, 10) == CORRUPT


def test_a_batch_of_more_rows_than_a_record_batch_may_have_is_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrow, "ROWS_MAX", 10)
    data = b"".join(
        [
            make_batch([b"%d" % n for n in range(35)], base_offset=3),
            make_batch([b"x"] * 4, base_offset=50, codec=Codec.LZ4),
            make_batch([b"y"] * 30, base_offset=60, codec=Codec.GZIP),
        ]
    )
    for start, end in ((0, 100), (7, 70)):
        wanted = PartitionRange("t", TOPIC_ID, 0, start, end)
        reading = arrow.Reading(wanted, start, RangeReport(wanted), (), True, 1 << 20)
        batches = list(arrow.decode(arrow.survey(memoryview(data)), reading))
        assert max(batch.num_rows for batch in batches) <= 10
        expected = by_reference(memoryview(data), start, end)
        assert isinstance(expected, Decoded)
        assert rows_of(batches) == expected.rows


def test_chunks_have_about_the_size_asked_for() -> None:
    data = b"".join(make_batch([bytes(100)] * 10, base_offset=10 * n) for n in range(100))
    wanted = PartitionRange("t", TOPIC_ID, 0, 0, 1000)
    reading = arrow.Reading(wanted, 0, RangeReport(wanted), (), True, 10_000)
    sizes = [batch.num_rows for batch in arrow.decode(arrow.survey(memoryview(data)), reading)]
    assert sum(sizes) == 1000
    assert set(sizes[:-1]) == {90}


def test_headers_can_be_left_out() -> None:
    data = build_batch([Record(0, 0, b"k", b"v", (("h", b"x"),))])
    wanted = PartitionRange("t", TOPIC_ID, 0, 0, 1)
    reading = arrow.Reading(wanted, 0, RangeReport(wanted), (), False, 1 << 20)
    (batch,) = arrow.decode(arrow.survey(memoryview(data)), reading)
    assert batch.column("headers").to_pylist() == [None]
    assert batch.schema == arrow.SCHEMA()


def test_the_result_does_not_change_with_the_buffer_it_was_decoded_from() -> None:
    buffer = bytearray(build_batch([Record(0, 0, b"key", bytes(100), (("name", b"value"),))]))
    wanted = PartitionRange("t", TOPIC_ID, 0, 0, 1)
    reading = arrow.Reading(wanted, 0, RangeReport(wanted), (), True, 1 << 20)
    (batch,) = arrow.decode(arrow.survey(memoryview(buffer)), reading)
    before = batch.to_pylist()
    buffer[:] = b"\xff" * len(buffer)
    assert batch.to_pylist() == before


def test_messages_of_corrupt_batches_say_where() -> None:
    batch = bytearray(make_batch([b"x"], base_offset=41))
    batch[-1] ^= 1
    wanted = PartitionRange("orders", TOPIC_ID, 3, 41, 42)
    reading = arrow.Reading(wanted, 41, RangeReport(wanted), (), True, 1 << 20)
    with pytest.raises(CorruptBatch, match=r"orders-3: the batch at offset 41 is damaged: its checksum"):
        list(arrow.decode(arrow.survey(memoryview(batch)), reading))


@given(st.binary(max_size=300))
def test_machine_codes_checksum_is_crc32c(data: bytes) -> None:
    batch = bytearray(make_batch([data]))
    assert len(arrow.survey(memoryview(batch)).table) == 1
    table = arrow.survey(memoryview(batch)).table
    assert int(table[0, layout.CRC]) == crc32c(bytes(batch[21:]))
    assert table[0, layout.IS_CHECKED] == (len(batch) <= arrow.SMALL_BYTES)


def test_damage_behind_the_range_does_not_matter() -> None:
    good, bad = make_batch([b"a"] * 3), bytearray(make_batch([b"b"], base_offset=3))
    bad[-1] ^= 1
    data = memoryview(good + bytes(bad))
    found = by_arrow(data, 0, 3)
    assert isinstance(found, Decoded)
    assert len(found.rows) == 3
    assert by_arrow(data, 0, 4) == CORRUPT


def test_damaged_helper_damages() -> None:
    data = make_batch([b"hello"] * 10)
    assert sum(damaged(random.Random(seed), data) != data for seed in range(50)) > 40


def test_one_column_of_one_value_is_shared_between_batches() -> None:
    assert arrow._repeated_number(3, 50).equals(arrow._repeated_number(3, 60).slice(0, 50))
    assert arrow._repeated_text("topic", 70_000).to_pylist() == ["topic"] * 70_000
    assert np.array_equal(arrow._repeated_number(1, 70_000).to_numpy(), np.full(70_000, 1))
