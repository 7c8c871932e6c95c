"""Producer snapshots: Kafka's bytes, and no damage goes unnoticed."""

from __future__ import annotations

import pytest
from crc32c import crc32c
from hypothesis import given
from hypothesis import strategies as st

from holdfast.broker.log.producer_state import SnapshotEntry, decode_snapshot, encode_snapshot
from holdfast.errors import CorruptLog

PATH = "/data/topic-0/00000000000000000042.snapshot"

int32 = st.integers(-(2**31), 2**31 - 1)
int64 = st.integers(-(2**63), 2**63 - 1)
entries = st.lists(
    st.builds(
        SnapshotEntry, int64, st.integers(-(2**15), 2**15 - 1), int32, int64, int32, int64, int32, int64
    ),
    max_size=8,
)


def test_the_file_is_kafkas() -> None:
    data = encode_snapshot([SnapshotEntry(1000, 3, 9, 41, 4, 1_700_000_000_000, 2, -1)])
    assert data[:2] == b"\0\1"
    assert data[2:6] == crc32c(data[6:]).to_bytes(4, "big")
    assert data[6:] == bytes.fromhex(
        "00000001 00000000000003e8 0003 00000009 0000000000000029 00000004"
        "0000018bcfe56800 00000002 ffffffffffffffff"
    )


@given(entries)
def test_entries_survive_their_file_in_order(written: list[SnapshotEntry]) -> None:
    assert decode_snapshot(encode_snapshot(written), PATH) == written


@given(entries, st.data())
def test_any_flipped_bit_is_found(written: list[SnapshotEntry], data: st.DataObject) -> None:
    content = bytearray(encode_snapshot(written))
    content[data.draw(st.integers(0, len(content) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(CorruptLog, match="snapshot"):
        decode_snapshot(content, PATH)


@given(entries, st.data())
def test_any_cut_is_found(written: list[SnapshotEntry], data: st.DataObject) -> None:
    content = encode_snapshot(written)
    with pytest.raises(CorruptLog):
        decode_snapshot(content[: data.draw(st.integers(0, len(content) - 1))], PATH)


@given(entries, st.binary(min_size=1, max_size=100))
def test_anything_behind_the_entries_is_found(written: list[SnapshotEntry], behind: bytes) -> None:
    with pytest.raises(CorruptLog):
        decode_snapshot(encode_snapshot(written) + behind, PATH)


@given(st.binary(max_size=200))
def test_garbage_with_a_right_checksum_is_entries_or_corrupt(body: bytes) -> None:
    content = b"\0\1" + crc32c(body).to_bytes(4, "big") + body
    try:
        decoded = decode_snapshot(content, PATH)
    except CorruptLog:
        return
    assert encode_snapshot(decoded) == content


def test_another_version_is_refused_by_name() -> None:
    with pytest.raises(CorruptLog, match="version 2 is unknown"):
        decode_snapshot(b"\0\2" + encode_snapshot([])[2:], PATH)
