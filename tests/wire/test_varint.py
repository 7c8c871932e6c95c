"""Variable-length integers."""

from __future__ import annotations

import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from kio.serial import writers

from holdfast.wire.varint import decode_uvarint, decode_varlong, encode_uvarint, encode_varint


def written_by_kio(write: object, value: int) -> bytes:
    buffer = io.BytesIO()
    write(buffer, value)  # type: ignore[operator]
    return buffer.getvalue()


@given(st.integers(0, 2**32 - 1), st.binary(max_size=3), st.binary(max_size=3))
def test_unsigned_numbers_come_back(value: int, before: bytes, after: bytes) -> None:
    encoded = encode_uvarint(value)
    assert encoded == written_by_kio(writers.write_unsigned_varint, value)
    assert decode_uvarint(before + encoded + after, len(before)) == (value, len(before) + len(encoded))


@given(st.integers(-(2**31), 2**31 - 1))
def test_signed_numbers_come_back(value: int) -> None:
    encoded = encode_varint(value)
    assert encoded == written_by_kio(writers.write_signed_varint, value)
    assert decode_varlong(encoded, 0) == (value, len(encoded))


@given(st.integers(-(2**63), 2**63 - 1))
def test_signed_long_numbers_come_back(value: int) -> None:
    encoded = encode_varint(value)
    assert encoded == written_by_kio(writers.write_signed_varlong, value)
    assert decode_varlong(encoded, 0) == (value, len(encoded))


@given(st.binary(max_size=12))
def test_whatever_the_bytes_nothing_past_the_end_is_read(data: bytes) -> None:
    for decode in (decode_uvarint, decode_varlong):
        try:
            _, end = decode(data, 0)
        except ValueError:
            continue
        assert 0 < end <= len(data)


@pytest.mark.parametrize("cut_off", [b"", b"\x80", b"\xff\xff"])
def test_a_number_that_is_cut_off_is_refused(cut_off: bytes) -> None:
    for decode in (decode_uvarint, decode_varlong):
        with pytest.raises(ValueError, match="cut off"):
            decode(cut_off, 0)


def test_a_number_too_wide_is_refused() -> None:
    assert decode_uvarint(b"\xff\xff\xff\xff\x0f", 0) == (2**32 - 1, 5)
    with pytest.raises(ValueError, match="32 bits"):
        decode_uvarint(b"\xff\xff\xff\xff\x10", 0)
    with pytest.raises(ValueError, match="longer than 5"):
        decode_uvarint(b"\xff\xff\xff\xff\xff\x01", 0)
    with pytest.raises(ValueError, match="64 bits"):
        decode_varlong(b"\xff" * 9 + b"\x02", 0)
    with pytest.raises(ValueError, match="longer than 10"):
        decode_varlong(b"\xff" * 10 + b"\x01", 0)


def test_a_negative_number_has_no_unsigned_form() -> None:
    with pytest.raises(ValueError, match="negative"):
        encode_uvarint(-1)
