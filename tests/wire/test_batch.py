"""Record batches: what is built is read back, and nothing that is not a batch passes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.tiers import examples

from holdfast.errors import InvalidRecords
from holdfast.wire.batch import (
    HEADER_SIZE,
    Record,
    batch_crc,
    build_batch,
    check_batch,
    check_whole,
    count_records,
    encode_record,
    iterate_records,
    make_batch,
    read_header,
    seal,
    with_log_append_time,
)
from holdfast.wire.codecs import Codec

optional_bytes = st.none() | st.binary(max_size=300)
headers = st.lists(st.tuples(st.text(max_size=20), optional_bytes), max_size=4).map(tuple)


@st.composite
def record_lists(draw: st.DrawFn) -> list[Record]:
    count = draw(st.integers(1, 30))
    same_size = draw(st.booleans())
    value = draw(st.binary(max_size=200))
    return [
        Record(
            index,
            draw(st.integers(-(2**40), 2**40)),
            None if same_size else draw(optional_bytes),
            value if same_size else draw(optional_bytes),
            () if same_size else draw(headers),
        )
        for index in range(count)
    ]


@given(record_lists(), st.sampled_from(list(Codec)), st.integers(0, 2**62))
def test_what_is_built_is_read_back(records: list[Record], codec: Codec, base_offset: int) -> None:
    batch = build_batch(records, base_offset=base_offset, base_timestamp=10**12, codec=codec)
    header = check_whole(batch)
    assert header.base_offset == base_offset
    assert header.records_count == len(records)
    assert header.crc == batch_crc(batch)
    assert list(iterate_records(batch)) == records


@given(st.lists(st.integers(0, 300), min_size=1, max_size=80), st.integers(1, 40))
def test_counting_by_runs_agrees_with_stepping(sizes: list[int], repeat: int) -> None:
    data = b"".join(encode_record(Record(0, 0, None, bytes(size))) * repeat for size in sizes)
    assert count_records(data) == len(sizes) * repeat


@given(record_lists(), st.data())
def test_a_cut_batch_never_passes(records: list[Record], data: st.DataObject) -> None:
    batch = build_batch(records)
    length = data.draw(st.integers(0, len(batch) - 1))
    with pytest.raises(InvalidRecords):
        check_batch(batch[:length])


@pytest.mark.check
@settings(max_examples=examples(300))
@given(record_lists(), st.data())
def test_any_flipped_bit_under_the_checksum_is_noticed(records: list[Record], data: st.DataObject) -> None:
    batch = bytearray(build_batch(records, codec=data.draw(st.sampled_from(list(Codec)))))
    bit = data.draw(st.integers(16 * 8, len(batch) * 8 - 1))
    batch[bit // 8] ^= 1 << bit % 8
    with pytest.raises(InvalidRecords):
        check_batch(bytes(batch))


@given(st.binary(max_size=400))
def test_garbage_is_refused_and_never_crashes(data: bytes) -> None:
    with pytest.raises(InvalidRecords):
        check_batch(data)


@given(st.binary(max_size=200), st.integers(1, 20))
def test_records_that_do_not_parse_are_refused_even_with_a_good_checksum(body: bytes, count: int) -> None:
    batch = bytearray(make_batch([b"x"]))
    header = read_header(batch)._replace(last_offset_delta=count - 1, records_count=count)
    sealed = seal(header, body)
    try:
        check_batch(sealed)
    except InvalidRecords:
        return
    assert count_records(body) == count


def test_a_second_batch_behind_the_first_is_refused() -> None:
    batch = make_batch([b"one"])
    with pytest.raises(InvalidRecords, match="exactly one batch"):
        check_batch(batch + batch)


def test_a_client_batch_that_does_not_begin_at_offset_zero_is_refused() -> None:
    with pytest.raises(InvalidRecords, match="begins at offset 0") as refused:
        check_batch(make_batch([b"one"], base_offset=5))
    assert refused.value.code is ErrorCode.invalid_record


@pytest.mark.parametrize("codec", list(Codec))
def test_what_a_client_meant_to_send_is_never_called_corrupt(codec: Codec) -> None:
    # CORRUPT_MESSAGE asks for the same bytes again, for ever.
    batch = make_batch([b"one", b"two"], codec=codec)
    for sent in (batch[:-1], batch[:40], seal(read_header(batch), b"garbage")):
        with pytest.raises(InvalidRecords) as refused:
            check_batch(sent)
        assert refused.value.code is ErrorCode.invalid_record


def test_control_batches_from_clients_are_refused() -> None:
    with pytest.raises(InvalidRecords, match="control"):
        check_batch(build_batch([Record(0, 0, b"k", b"v")], is_control=True))


@pytest.mark.parametrize("magic", [0, 1, 3, 77])
def test_other_record_formats_are_refused_by_name(magic: int) -> None:
    batch = bytearray(make_batch([b"x"]))
    batch[16] = magic
    with pytest.raises(InvalidRecords, match=str(magic)):
        check_whole(bytes(batch))


def test_log_append_time_changes_type_maximum_and_checksum_only() -> None:
    batch = make_batch([b"a", b"b"], timestamp=5)
    stamped = with_log_append_time(read_header(batch), batch, 99)
    header = check_whole(stamped)
    assert header.is_log_append_time
    assert header.max_timestamp == 99
    assert stamped[HEADER_SIZE:] == batch[HEADER_SIZE:]


def test_last_sequence_wraps_to_zero() -> None:
    batch = build_batch(
        [Record(i, 0, None, b"") for i in range(3)], producer_id=1, producer_epoch=0, base_sequence=2**31 - 2
    )
    assert read_header(batch).last_sequence == 0
