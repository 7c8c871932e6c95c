"""Compression as Kafka's clients know it, and bombs that do not go off."""

from __future__ import annotations

import random
import struct
import subprocess
import sys
import zlib

import lz4.frame
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st
from kio.schema.errors import ErrorCode
from tests.support.tiers import examples

from holdfast.errors import InvalidRecords
from holdfast.wire.codecs import Codec, compress, decompress

TEXT = b"the quick brown fox " * 5
PACKED = [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD]
LIMIT = 1 << 20

# What the codecs of Kafka's Java client made of TEXT.
WRITTEN_BY_JAVA = {
    Codec.GZIP: ("1f8b08000000000000ff2bc94855282ccd4cce56482aca2fcf5348cbaf5028a1b21800c685af2a64000000"),
    Codec.SNAPPY: (
        "82534e415050590000000001000000010000001c644c74686520717569636b2062726f776e20666f7820fe14003e1400"
    ),
    Codec.LZ4: (
        "04224d186040821f000000ff0574686520717569636b2062726f776e20666f78201400385020666f782000000000"
    ),
    Codec.ZSTD: ("28b52ffd0058dc0000a074686520717569636b2062726f776e20666f78200100fad0c904010000"),
}


def mixed(size: int) -> bytes:
    chance = random.Random(size)
    words = [b"alpha", b"beta", b"gamma"]
    return b"".join(chance.choice(words) + chance.randbytes(2) for _ in range(size // 7))


def code_of(codec: Codec | int, data: bytes, limit_bytes: int = LIMIT) -> ErrorCode:
    with pytest.raises(InvalidRecords) as caught:
        decompress(codec, data, limit_bytes)
    return caught.value.code


def outcome(codec: Codec, data: bytes) -> ErrorCode | str:
    try:
        return "read" if len(decompress(codec, data, 1000)) <= 1000 else "read past the limit"
    except InvalidRecords as refused:
        return refused.code


@pytest.mark.parametrize("codec", PACKED)
def test_what_java_clients_write_is_read(codec: Codec) -> None:
    assert decompress(codec, bytes.fromhex(WRITTEN_BY_JAVA[codec]), LIMIT) == TEXT


@pytest.mark.parametrize("codec", Codec)
@pytest.mark.parametrize(
    "data", [b"", b"a", TEXT, mixed(300_000), random.Random(1).randbytes(100_000)], ids=len
)
@pytest.mark.parametrize("level", [None, 1, 9])
def test_what_is_compressed_comes_back(codec: Codec, data: bytes, level: int | None) -> None:
    packed = compress(codec, data, level)
    assert decompress(codec, packed, len(data)) == data
    assert decompress(codec, memoryview(packed), LIMIT) == data
    assert decompress(codec, bytearray(packed), LIMIT) == data


@pytest.mark.parametrize("codec", list(Codec))
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
def test_any_buffer_can_be_compressed(codec: Codec, kind: type) -> None:
    packed = compress(codec, kind(b"record" * 50))
    assert bytes(decompress(codec, packed, 1000)) == b"record" * 50


@pytest.mark.parametrize("codec", Codec)
def test_the_limit_is_exact(codec: Codec) -> None:
    data = mixed(50_000)
    packed = compress(codec, data)
    assert decompress(codec, packed, len(data)) == data
    assert code_of(codec, packed, len(data) - 1) is ErrorCode.message_too_large
    assert code_of(codec, packed, 1) is ErrorCode.message_too_large
    assert code_of(codec, packed, 0) is ErrorCode.message_too_large


@pytest.mark.parametrize(("codec", "best"), [(Codec.GZIP, 9), (Codec.LZ4, 17), (Codec.ZSTD, 22)])
def test_a_higher_level_packs_tighter(codec: Codec, best: int) -> None:
    data = mixed(300_000)
    assert len(compress(codec, data, best)) < len(compress(codec, data, 1))
    assert len(compress(codec, data, best)) < len(compress(codec, data))
    assert compress(codec, data) == compress(
        codec, data, {Codec.GZIP: -1, Codec.LZ4: 9, Codec.ZSTD: 3}[codec]
    )


def test_zstd_takes_negative_levels() -> None:
    assert decompress(Codec.ZSTD, compress(Codec.ZSTD, TEXT, -50), LIMIT) == TEXT


def test_snappy_is_written_framed_and_read_bare_too() -> None:
    data = mixed(100_000)
    framed = compress(Codec.SNAPPY, data)
    assert framed.startswith(b"\x82SNAPPY\0" + struct.pack(">ii", 1, 1))
    size = struct.unpack_from(">i", framed, 16)[0]
    first_block = framed[20 : 20 + size]
    assert decompress(Codec.SNAPPY, first_block, LIMIT) == data[: 32 * 1024]


def test_lz4_frames_have_independent_blocks() -> None:
    data = mixed(300_000)
    for level in (None, 1, 17):
        assert not lz4.frame.get_frame_info(compress(Codec.LZ4, data, level))["block_linked"]
    assert lz4.frame.decompress(compress(Codec.LZ4, data)) == data


def test_lz4_frames_with_linked_blocks_are_refused() -> None:
    linked = lz4.frame.compress(mixed(300_000), block_linked=True)
    assert code_of(Codec.LZ4, linked) is ErrorCode.corrupt_message


@pytest.mark.parametrize("store_size", [True, False])
@pytest.mark.parametrize("checksums", [True, False])
@pytest.mark.parametrize("block_size", [4, 7])
def test_lz4_frames_of_other_writers_are_read(store_size: bool, checksums: bool, block_size: int) -> None:
    data = mixed(300_000)
    frame = lz4.frame.compress(
        data,
        block_linked=False,
        store_size=store_size,
        block_size=block_size,
        content_checksum=checksums,
        block_checksum=checksums,
    )
    assert decompress(Codec.LZ4, frame, LIMIT) == data


def test_zstd_frames_of_other_writers_are_read() -> None:
    data = mixed(300_000)
    for sized in (True, False):
        for size in (0, 1, 255, 256, 65_791, 65_792, len(data)):
            packed = zstandard.ZstdCompressor(write_content_size=sized, write_checksum=sized).compress(
                data[:size]
            )
            assert decompress(Codec.ZSTD, packed, LIMIT) == data[:size]
    assert zstandard.ZstdDecompressor().decompress(compress(Codec.ZSTD, data)) == data


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.ZSTD])
def test_streams_one_after_the_other_are_read_as_one(codec: Codec) -> None:
    other = mixed(70_000)
    assert decompress(codec, compress(codec, TEXT) + compress(codec, other), LIMIT) == TEXT + other


def test_a_second_lz4_frame_is_refused() -> None:
    # Java's reader stops at the end of the first frame: it would miss the records of the second.
    for first in (compress(Codec.LZ4, TEXT), lz4.frame.compress(TEXT, block_linked=False, store_size=True)):
        assert code_of(Codec.LZ4, first + compress(Codec.LZ4, TEXT)) is ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", PACKED)
def test_nothing_at_all_is_no_stream(codec: Codec) -> None:
    assert code_of(codec, b"") is ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", PACKED)
def test_every_cut_is_refused(codec: Codec) -> None:
    packed = compress(codec, TEXT * 20)
    header_of_an_empty_stream = 16 if codec is Codec.SNAPPY else None
    for size in range(len(packed)):
        if size != header_of_an_empty_stream:
            assert code_of(codec, packed[:size]) is ErrorCode.corrupt_message, size


@pytest.mark.parametrize("codec", PACKED)
def test_garbage_after_the_stream_is_refused(codec: Codec) -> None:
    assert code_of(codec, compress(codec, TEXT) + b"garbage") is ErrorCode.corrupt_message


@pytest.mark.parametrize("codec", PACKED)
@settings(max_examples=examples(300), deadline=None)
@given(
    data=st.binary(max_size=60)
    | st.binary(max_size=30).map(lambda tail: b"\x82SNAPPY\0\0\0\0\1\0\0\0\1" + tail)
)
def test_garbage_is_refused_or_read_but_nothing_else(codec: Codec, data: bytes) -> None:
    assert outcome(codec, data) in ("read", ErrorCode.corrupt_message, ErrorCode.message_too_large)


@pytest.mark.parametrize("codec", PACKED)
@settings(max_examples=examples(200), deadline=None)
@given(chance=st.randoms(use_true_random=False))
def test_damaged_streams_are_refused_or_read_but_nothing_else(codec: Codec, chance: random.Random) -> None:
    packed = bytearray(compress(codec, TEXT * 3))
    for _ in range(chance.randint(1, 4)):
        packed[chance.randrange(len(packed))] = chance.randrange(256)
    assert outcome(codec, bytes(packed)) in ("read", ErrorCode.corrupt_message, ErrorCode.message_too_large)


def test_a_declared_size_is_not_believed() -> None:
    packed = bytearray(compress(Codec.GZIP, TEXT))
    packed[-4:] = (2**32 - 1).to_bytes(4, "little")
    assert code_of(Codec.GZIP, bytes(packed)) is ErrorCode.corrupt_message
    claims_gigabytes = b"\xff\xff\xff\xff\x0f" + b"\0a"
    assert code_of(Codec.SNAPPY, claims_gigabytes) is ErrorCode.message_too_large
    lying = b"\x28\xb5\x2f\xfd\xe0" + (2**62).to_bytes(8, "little") + b"\x01\x00\x00"
    assert code_of(Codec.ZSTD, lying) is ErrorCode.corrupt_message


def test_an_unknown_codec_is_refused() -> None:
    for codec in (5, 6, 7):
        assert code_of(codec, b"data") is ErrorCode.unsupported_compression_type
        with pytest.raises(ValueError, match="no codec"):
            compress(codec, b"data")


BOMBS = """
import resource, sys, zlib
from holdfast.errors import InvalidRecords
from holdfast.wire.codecs import Codec, compress, decompress

million = bytes(1 << 20)
bombs = [(codec, compress(codec, million) * 1024) for codec in (Codec.GZIP, Codec.SNAPPY, Codec.ZSTD)]
frame = compress(Codec.LZ4, million)
bombs.append((Codec.LZ4, frame[:7] + frame[7:-4] * 1024 + bytes(4)))  # each of these is a gigabyte
packer = zlib.compressobj(1, zlib.DEFLATED, 31)
bombs.append((Codec.GZIP, b"".join(packer.compress(million) for _ in range(200)) + packer.flush()))
zstd_repeats = (((128 << 10) << 3) | 2).to_bytes(3, "little") + bytes(1)  # one byte, 128 KiB times
bombs.append((Codec.ZSTD, bytes.fromhex("28b52ffd0058") + zstd_repeats * 8192))
limit = 64 << 20
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for codec, bomb in bombs:
    try:
        decompress(codec, bomb, limit)
        sys.exit(f"{codec.name} went off")
    except InvalidRecords as refused:
        assert refused.code.name == "message_too_large", refused
grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
assert grown < limit * 1.5, f"took {grown} bytes for a limit of {limit}"
"""


def test_bombs_cost_no_more_than_the_limit() -> None:
    done = subprocess.run([sys.executable, "-c", BOMBS], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]


def test_gzip_of_other_writers_is_read() -> None:
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress(TEXT) + packer.flush()
    named = packed[:3] + b"\x08" + packed[4:10] + b"name\0" + packed[10:]
    assert decompress(Codec.GZIP, packed, LIMIT) == TEXT
    assert decompress(Codec.GZIP, named, LIMIT) == TEXT


@pytest.mark.parametrize("codec", [Codec.GZIP, Codec.SNAPPY, Codec.LZ4, Codec.ZSTD])
@pytest.mark.parametrize("expected_bytes", [0, 1, 20_000, 1_000_000, 2**40])
def test_a_wrong_guess_of_the_size_changes_nothing(codec: Codec, expected_bytes: int) -> None:
    data = bytes(range(200)) * 100
    packed = compress(codec, data)
    assert bytes(decompress(codec, packed, 100_000, expected_bytes)) == data
    with pytest.raises(InvalidRecords) as refused:
        decompress(codec, packed, 10_000, expected_bytes)
    assert refused.value.code is ErrorCode.message_too_large
