"""Compression of record batches: the four codecs as Kafka's clients write and read them.

What Java's clients can read decides what we write, and what they cannot read we refuse to store:

- gzip: one or more members.
- snappy: Java frames blocks of 32 KiB behind a 16-byte header of its own (snappy-java's stream format);
  librdkafka writes one bare snappy block. Both are read; the framed form is written, which all of them read.
- lz4: one standard frame with *independent* blocks. Frames with linked blocks, which most lz4 libraries write
  when left alone, are refused, as Kafka refuses them; so is anything after the frame, where Java stops
  reading.
- zstd: one or more frames.

Decompression is bounded. The output goes into a buffer that starts at the size the data declares or suggests,
grows by factors, and never exceeds `limit_bytes`; the decoder stops at the buffer's end. So a bomb costs at
most about the limit in memory and the time to fill it once or twice, whatever it would have unpacked to.
Empty input is no valid stream of any codec. Bytes after a stream that are not another stream of the same kind
are corruption.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import cramjam
from kio.schema.errors import ErrorCode

from holdfast.errors import InvalidRecords
from holdfast.seams import Buffer


class Codec(IntEnum):
    """The codec's number in the attributes of a batch."""

    NONE = 0
    GZIP = 1
    SNAPPY = 2
    LZ4 = 3
    ZSTD = 4


_XERIAL_HEADER: Final = b"\x82SNAPPY\x00" + struct.pack(">ii", 1, 1)
"""snappy-java's magic, its format version, and the oldest version that can read it."""
_XERIAL_BLOCK_BYTES: Final = 32 * 1024
_XERIAL_MAGIC_START: Final = int.from_bytes(_XERIAL_HEADER[:4])
_LZ4_MAGIC: Final = b"\x04\x22\x4d\x18"
_LZ4_INDEPENDENT_BLOCKS: Final = 0x20
_LZ4_BLOCK_CHECKSUM: Final = 0x10
_LZ4_CONTENT_SIZE: Final = 0x08
_LZ4_CONTENT_CHECKSUM: Final = 0x04
_LZ4_BLOCK_SIZE_MASK: Final = 0x7FFFFFFF
"""The top bit of a block's size says that the block is stored as it is."""
_LZ4_LEVEL_DEFAULT: Final = 9
"""Kafka's default, which means lz4's fast mode; every other level means its high-compression mode."""
_LZ4_FAST: Final = 0
_LZ4_HIGH_MIN: Final = 3
"""Below this number the library's frames use the fast mode."""
_ZSTD_MAGIC: Final = b"\x28\xb5\x2f\xfd"
_ZSTD_LEVEL_DEFAULT: Final = 3
_GZIP_LEVEL_DEFAULT: Final = -1
_GZIP_WRAPPER: Final = 16
"""Tells zlib to write a gzip member instead of its own format."""

_BUFFER_BYTES_MIN: Final = 4 * 1024
_BUFFER_GROWTH: Final = 4
"""Repeating the work at each growth costs a third more in all; a smaller factor repeats more often."""
_RATIO_GUESS: Final = 4
"""First buffer in multiples of the compressed size, where the data does not say: typical of JSON and text."""
_RATIO_BELIEVED: Final = 1024
"""How much a declared size may exceed the compressed one and still be taken at its word: gzip cannot do better."""
_OUTPUT_FULL: Final = "failed to write whole buffer"
"""What cramjam's decoders report when the output does not fit the buffer they were given."""

_uint32_le = struct.Struct("<I").unpack_from
_uint64_le = struct.Struct("<Q").unpack_from
_uint32_be = struct.Struct(">I").unpack_from


def compress(codec: Codec | int, data: Buffer, level: int | None = None) -> bytes:
    """The compressed form of `data`; `level` as in `compression.<codec>.level`, None for Kafka's default."""
    if codec == Codec.NONE:
        return bytes(data)
    if codec == Codec.GZIP:
        return _compress_gzip(data, _GZIP_LEVEL_DEFAULT if level is None else level)
    if codec == Codec.SNAPPY:
        return _compress_snappy(memoryview(data))
    if codec == Codec.LZ4:
        return _compress_lz4(data, level)
    if codec == Codec.ZSTD:
        return bytes(cramjam.zstd.compress(data, level=_ZSTD_LEVEL_DEFAULT if level is None else level))
    raise ValueError(f"there is no codec {codec}")


def decompress(codec: Codec | int, data: Buffer, limit_bytes: int, expected_bytes: int = 0) -> Buffer:
    """What `data` unpacks to, if that is no more than `limit_bytes`.

    `expected_bytes` is a guess of its size, for streams that do not tell it: right, it saves unpacking twice.

    Raises `InvalidRecords`: `corrupt_message` when the bytes are no stream of this codec,
    `message_too_large` when they unpack to more.
    """
    if codec == Codec.NONE:
        if len(data) > limit_bytes:
            raise _too_large(Codec.NONE, limit_bytes)
        return data
    try:
        codec = Codec(codec)
    except ValueError:
        raise InvalidRecords(ErrorCode.unsupported_compression_type, f"there is no codec {codec}") from None
    if len(data) == 0:
        raise _corrupt(codec, "no bytes at all")
    if codec is Codec.SNAPPY:
        return _decompress_snappy(data, limit_bytes)
    return _DECODERS[codec](data, limit_bytes, expected_bytes)


def _decompress_gzip(data: Buffer, limit_bytes: int, expected_bytes: int) -> Buffer:
    # The last four bytes tell the size of the last member: right for the usual single one, else a first
    # guess.
    declared = int(_uint32_le(data, len(data) - 4)[0]) if len(data) >= 18 else expected_bytes
    return _into_growing_buffer(Codec.GZIP, cramjam.gzip.decompress_into, data, declared, limit_bytes)


def _decompress_lz4(data: Buffer, limit_bytes: int, expected_bytes: int) -> Buffer:
    declared = _lz4_content_size(data) or expected_bytes
    return _into_growing_buffer(Codec.LZ4, cramjam.lz4.decompress_into, data, declared, limit_bytes)


def _lz4_content_size(data: Buffer) -> int:
    """The content size in the frame's header, 0 when it is not told; refuses what Java clients cannot
    read."""
    if len(data) < 7 or data[:4] != _LZ4_MAGIC:
        raise _corrupt(Codec.LZ4, "no lz4 frame")
    flags = data[4]
    if not flags & _LZ4_INDEPENDENT_BLOCKS:
        raise _corrupt(Codec.LZ4, "the frame's blocks depend on each other, which Java clients cannot read")
    has_size = flags & _LZ4_CONTENT_SIZE
    position = 15 if has_size else 7
    block_overhead = 8 if flags & _LZ4_BLOCK_CHECKSUM else 4
    while position + 4 <= len(data):
        size = int(_uint32_le(data, position)[0])
        if size == 0:
            position += 8 if flags & _LZ4_CONTENT_CHECKSUM else 4
            break
        position += block_overhead + (size & _LZ4_BLOCK_SIZE_MASK)
    if position < len(data):
        raise _corrupt(
            Codec.LZ4, f"{len(data) - position} bytes follow the frame, which Java clients do not read"
        )
    return int(_uint64_le(data, 6)[0]) if has_size and len(data) >= 14 else 0


def _decompress_zstd(data: Buffer, limit_bytes: int, expected_bytes: int) -> Buffer:
    declared = _zstd_content_size(data) or expected_bytes
    return _into_growing_buffer(Codec.ZSTD, cramjam.zstd.decompress_into, data, declared, limit_bytes)


_DECODERS: Final[dict[Codec, Callable[[Buffer, int, int], Buffer]]] = {
    Codec.GZIP: _decompress_gzip,
    Codec.LZ4: _decompress_lz4,
    Codec.ZSTD: _decompress_zstd,
}


def _zstd_content_size(data: Buffer) -> int:
    """The content size in the first frame's header; 0 when it is not told."""
    if len(data) < 6 or data[:4] != _ZSTD_MAGIC:
        return 0
    descriptor = data[4]
    single_segment = descriptor >> 5 & 1
    field_size = (1 if single_segment else 0, 2, 4, 8)[descriptor >> 6]
    start = 5 + (1 - single_segment) + (0, 1, 2, 4)[descriptor & 3]
    size = int.from_bytes(data[start : start + field_size], "little")
    return size + 256 if field_size == 2 else size


def _into_growing_buffer(
    codec: Codec,
    decompress_into: Callable[[Buffer, bytearray], int],
    data: Buffer,
    declared_bytes: int,
    limit_bytes: int,
) -> Buffer:
    """Decode into buffers of growing size, up to the limit.

    A declared size is a hint: too small, and the buffer grows; beyond what the data could plausibly unpack to, and
    the buffer grows up to there, so that a header that lies decides neither the error's name nor what it costs.
    """
    size = min(declared_bytes, len(data) * _RATIO_BELIEVED) or max(
        len(data) * _RATIO_GUESS, _BUFFER_BYTES_MIN
    )
    while True:
        size = max(1, min(size, limit_bytes))
        output = _fitted(codec, decompress_into, data, size)
        if output is not None:
            if len(output) > limit_bytes:
                raise _too_large(codec, limit_bytes)
            return output
        if size >= limit_bytes:
            raise _too_large(codec, limit_bytes)
        size = max(size * _BUFFER_GROWTH, _BUFFER_BYTES_MIN)


def _fitted(
    codec: Codec, decompress_into: Callable[[Buffer, bytearray], int], data: Buffer, size: int
) -> Buffer | None:
    """The unpacked data if it fits `size` bytes, else None."""
    output = bytearray(size)
    try:
        written = decompress_into(data, output)
    except cramjam.DecompressionError as error:
        if _OUTPUT_FULL in str(error):
            return None
        raise _corrupt(codec, str(error)) from None
    return memoryview(output)[:written] if written < size else output


def _compress_gzip(data: Buffer, level: int) -> bytes:
    compressor = zlib.compressobj(level, zlib.DEFLATED, zlib.MAX_WBITS | _GZIP_WRAPPER)
    return compressor.compress(data) + compressor.flush()


def _compress_lz4(data: Buffer, level: int | None) -> bytes:
    mode = _LZ4_FAST if level in (None, _LZ4_LEVEL_DEFAULT) else max(level or 0, _LZ4_HIGH_MIN)
    compressor = cramjam.lz4.Compressor(level=mode, content_checksum=False, block_linked=False)
    compressor.compress(bytes(data))
    return bytes(compressor.finish())


def _compress_snappy(data: memoryview) -> bytes:
    parts: list[Any] = [_XERIAL_HEADER]
    for start in range(0, len(data), _XERIAL_BLOCK_BYTES):
        block = bytes(cramjam.snappy.compress_raw(data[start : start + _XERIAL_BLOCK_BYTES]))
        parts += (struct.pack(">i", len(block)), block)
    return b"".join(parts)


def _decompress_snappy(data: Buffer, limit_bytes: int) -> Buffer:
    view = memoryview(data)
    blocks = _xerial_blocks(view) if view[:8] == _XERIAL_HEADER[:8] else [view]
    # Each block begins with its unpacked size, so the sum is known before anything is unpacked.
    sizes = [_snappy_size(block) for block in blocks]
    total = sum(sizes)
    if total > limit_bytes:
        raise _too_large(Codec.SNAPPY, limit_bytes)
    output = bytearray(total)
    target = memoryview(output)
    position = 0
    for block, size in zip(blocks, sizes, strict=True):
        try:
            written = cramjam.snappy.decompress_raw_into(block, target[position : position + size])
        except cramjam.DecompressionError as error:
            raise _corrupt(Codec.SNAPPY, str(error)) from None
        if written != size:
            raise _corrupt(Codec.SNAPPY, f"a block of {size} bytes unpacked to {written}")
        position += size
    return output


def _snappy_size(block: memoryview) -> int:
    try:
        return int(cramjam.snappy.decompress_raw_len(block))
    except cramjam.DecompressionError as error:
        raise _corrupt(Codec.SNAPPY, str(error)) from None


def _xerial_blocks(data: memoryview) -> list[memoryview]:
    blocks: list[memoryview] = []
    position = 0
    while position < len(data):
        if len(data) - position < 4:
            raise _corrupt(Codec.SNAPPY, "a block's size is cut off")
        size = int(_uint32_be(data, position)[0])
        if size == _XERIAL_MAGIC_START:  # a stream begins, the first or one appended to it
            if data[position : position + 8] != _XERIAL_HEADER[:8] or len(data) - position < 16:
                raise _corrupt(Codec.SNAPPY, "the stream's header is damaged")
            position += len(_XERIAL_HEADER)
            continue
        position += 4
        if size > len(data) - position:
            raise _corrupt(Codec.SNAPPY, f"a block of {size} bytes where {len(data) - position} are left")
        blocks.append(data[position : position + size])
        position += size
    return blocks


def _corrupt(codec: Codec, reason: str) -> InvalidRecords:
    return InvalidRecords(ErrorCode.corrupt_message, f"records are not valid {codec.name.lower()}: {reason}")


def _too_large(codec: Codec, limit_bytes: int) -> InvalidRecords:
    return InvalidRecords(
        ErrorCode.message_too_large, f"{codec.name.lower()} records unpack to more than {limit_bytes} bytes"
    )
