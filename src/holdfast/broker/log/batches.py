"""Reading a sealed segment from end to end, for work that looks at all of it.

`read_batches` gives every batch whole and proves its checksum first: what compaction copies was sound when it
was read. `walk_headers` looks at headers only and skips the records of large batches. Both read in chunks and
hold one chunk, or one batch when that is larger.

Most kernels of servers do not take the processor away from a system call that copies: whoever wants it meanwhile,
the broker or a client, waits for the end of the copy. So none here is larger than `PIECE_BYTES`.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.broker.log.scan import FoundBatch
from holdfast.errors import CorruptLog
from holdfast.seams import File
from holdfast.wire.batch import CRC_START, HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader

CHUNK_BYTES: Final = 1024 * 1024
PIECE_BYTES: Final = 128 * 1024
"""What one system call of background work copies at most: a few dozen microseconds."""
HEADER_CHUNK_BYTES: Final = 64 * 1024


class Batch(NamedTuple):
    header: BatchHeader
    data: memoryview
    """The whole batch, header included."""


def read_batches(file: File, end: int, position: int = 0) -> Iterator[Batch]:
    """Every batch of the file's bytes from `position` to `end`; `CorruptLog` where there is none."""
    chunk = b""
    view = memoryview(chunk)
    chunk_start = position
    while position < end:
        relative = position - chunk_start
        if len(chunk) - relative < HEADER_SIZE:
            chunk = read_in_pieces(file, min(CHUNK_BYTES, end - position), position)
            view, chunk_start, relative = memoryview(chunk), position, 0
        header = _header(chunk, relative, file, position)
        size = LOG_OVERHEAD + header.batch_length
        if len(chunk) - relative < size:
            chunk = read_in_pieces(file, min(max(CHUNK_BYTES, size), end - position), position)
            view, chunk_start, relative = memoryview(chunk), position, 0
            if len(chunk) < size:
                raise CorruptLog(f"{file.path}: the batch at {position} is cut off")
        data = view[relative : relative + size]
        if crc32c(data[CRC_START:]) != header.crc:
            raise CorruptLog(
                f"{file.path}: the checksum of the batch at {position} (offset {header.base_offset}) does not hold"
            )
        yield Batch(header, data)
        position += size


def read_in_pieces(file: File, length: int, position: int) -> bytes:
    """Up to `length` bytes; fewer only at the end of the file."""
    if length <= PIECE_BYTES:
        return file.pread(length, position)
    end = position + length
    return b"".join(
        [file.pread(min(PIECE_BYTES, end - start), start) for start in range(position, end, PIECE_BYTES)]
    )


def walk_headers(file: File, end: int, position: int = 0) -> Iterator[FoundBatch]:
    """Position and header of every batch; lengths are trusted, records are not read."""
    chunk = b""
    chunk_start = position
    while position < end:
        relative = position - chunk_start
        if len(chunk) - relative < HEADER_SIZE:
            chunk = file.pread(min(HEADER_CHUNK_BYTES, end - position), position)
            chunk_start, relative = position, 0
        header = _header(chunk, relative, file, position)
        yield FoundBatch(position, header)
        position += LOG_OVERHEAD + header.batch_length


def _header(chunk: bytes, relative: int, file: File, position: int) -> BatchHeader:
    if len(chunk) - relative < HEADER_SIZE:
        raise CorruptLog(f"{file.path}: no batch header at {position}")
    header = BatchHeader._make(HEADER.unpack_from(chunk, relative))
    if header.magic != MAGIC or header.batch_length < HEADER_SIZE - LOG_OVERHEAD:
        raise CorruptLog(f"{file.path}: no batch header at {position}")
    return header
