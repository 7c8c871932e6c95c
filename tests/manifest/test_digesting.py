"""Digests of segments: blocks depend on the file alone, and what was digested before is not read again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from holdfast.errors import CorruptLog
from holdfast.manifest import digesting
from holdfast.manifest.digesting import DigestCache
from holdfast.manifest.model import SegmentDigest
from holdfast.wire.batch import Record, build_batch

BATCHES = 40


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digesting, "BLOCK_BYTES", 1000)


def batch(number: int) -> bytes:
    records = [Record(index, 0, None, f"{number}/{index}".encode() * 10) for index in range(3)]
    return build_batch(records, base_offset=3 * number, base_timestamp=number)


def digest(path: Path, cache: DigestCache | None = None, below: int = 2**62) -> SegmentDigest:
    return (cache or DigestCache(str(path) + ".none")).digest(str(path), 0, below=below)


@pytest.fixture
def segment(tmp_path: Path) -> Path:
    path = tmp_path / "00000000000000000000.log"
    path.write_bytes(b"".join(map(batch, range(BATCHES))))
    return path


def test_a_log_that_grew_has_the_blocks_it_had_and_those_behind(segment: Path, tmp_path: Path) -> None:
    whole = digest(segment)
    assert whole.records == 3 * BATCHES == whole.end_offset
    assert whole.bytes == segment.stat().st_size
    content = segment.read_bytes()
    segment.write_bytes(b"")
    cache = DigestCache(str(tmp_path / "cache.json"))
    for number in range(BATCHES):
        with segment.open("ab") as file:
            file.write(batch(number))
        found = digest(segment, cache)
    assert segment.read_bytes() == content
    assert found == whole


def test_what_lies_behind_the_recovery_point_is_not_looked_at(segment: Path) -> None:
    whole = segment.read_bytes()
    segment.write_bytes(whole + bytes(4096))  # space written ahead
    assert digest(segment, below=3 * BATCHES).bytes == len(whole)
    assert digest(segment, below=30).end_offset == 30
    with pytest.raises(CorruptLog):
        digest(segment)


def test_a_cache_spares_reading_what_is_the_same_file(segment: Path, tmp_path: Path) -> None:
    cache = DigestCache(str(tmp_path / "cache.json"))
    whole = digest(segment, cache)
    cache.save()
    again = DigestCache(str(tmp_path / "cache.json"))
    assert digest(segment, again) == whole
    assert again.bytes_known == whole.bytes


def test_another_file_in_its_place_is_read(segment: Path, tmp_path: Path) -> None:
    cache = DigestCache(str(tmp_path / "cache.json"))
    before = digest(segment, cache)
    aside = tmp_path / "other"
    aside.write_bytes(b"".join(map(batch, range(1, BATCHES + 1))))
    os.replace(aside, segment)
    assert digest(segment, cache) == digest(segment) != before
    assert cache.bytes_known == 0


def test_every_changed_byte_shows(segment: Path) -> None:
    before = digest(segment)
    data = bytearray(segment.read_bytes())
    data[12:16] = b"\0\0\0\7"  # the leader epoch, which no checksum covers
    segment.write_bytes(data)
    assert digest(segment) != before
    data[80] ^= 1
    segment.write_bytes(data)
    with pytest.raises(CorruptLog, match="checksum"):
        digest(segment)
