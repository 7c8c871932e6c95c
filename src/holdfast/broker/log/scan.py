"""Walking the batches of a segment file without holding it in memory.

`scan_headers` trusts lengths and reads headers only: for lookups in files whose content was verified
before. `scan_verified` reads every byte and checks every checksum: for recovery, where nothing may be
trusted; it stops at the first place that is not a whole valid batch and says why.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.errors import CorruptLog
from holdfast.seams import File
from holdfast.wire.batch import CRC_START, HEADER, HEADER_SIZE, LOG_OVERHEAD, MAGIC, BatchHeader

CHUNK_BYTES: Final = 1024 * 1024
"""Read-ahead of a verifying scan: large enough that a system call per chunk costs nothing."""


ANYWHERE: Final = 2**63
"""Above every offset."""


class FoundBatch(NamedTuple):
    position: int
    header: BatchHeader


class Damage(NamedTuple):
    """Where a verifying scan stopped and why; `position` is the end of the last whole valid batch."""

    position: int
    reason: str
    after_gap: bool = False
    """Whether offsets were missing in front of it: a gap, or a wrong offset that looks like one."""


def header_at(file: File, position: int) -> BatchHeader:
    data = file.pread(HEADER_SIZE, position)
    if len(data) < HEADER_SIZE:
        raise CorruptLog(f"{file.path}: no batch header at {position}, the file ends after {len(data)} bytes")
    header = BatchHeader._make(HEADER.unpack(data))
    if (
        header.magic != MAGIC
        or header.batch_length < HEADER_SIZE - LOG_OVERHEAD
        or header.base_offset < 0
        or header.last_offset_delta < 0
    ):
        raise CorruptLog(f"{file.path}: no batch header at {position}")
    return header


def scan_headers(file: File, position: int, end: int) -> Iterator[FoundBatch]:
    """Headers of the batches in [position, end); a place that is no header raises `CorruptLog`."""
    while position + HEADER_SIZE <= end:
        header = header_at(file, position)
        yield FoundBatch(position, header)
        position += LOG_OVERHEAD + header.batch_length


class VerifiedScan:
    """Iterates over whole valid batches from `position`; afterwards `damage` tells whether all was read.

    Offsets must grow from `next_offset` on. Compaction leaves gaps, and only below `gaps_below`.
    """

    def __init__(
        self,
        file: File,
        position: int,
        next_offset: int,
        end: int | None = None,
        *,
        gaps_below: int = ANYWHERE,
    ) -> None:
        self._file = file
        self.position = position
        self.next_offset = next_offset
        self.end = file.size() if end is None else end
        self.damage: Damage | None = None
        self._gaps_below = gaps_below
        self._saw_gap = False

    def __iter__(self) -> Iterator[FoundBatch]:
        data = b""
        data_start = self.position
        while self.position < self.end:
            relative = self.position - data_start
            available = len(data) - relative
            if available < HEADER_SIZE:
                data, data_start, relative = self._read(HEADER_SIZE), self.position, 0
                available = len(data)
                if available < HEADER_SIZE:
                    self._stop(f"{self.end - self.position} bytes are less than a batch header")
                    return
            header = BatchHeader._make(HEADER.unpack_from(data, relative))
            problem = self._header_problem(header)
            if problem:
                self._stop(problem)
                return
            size = LOG_OVERHEAD + header.batch_length
            if self.position + size > self.end:
                self._stop(f"a batch of {size} bytes is cut after {self.end - self.position}")
                return
            if available < size:
                data, data_start, relative = self._read(size), self.position, 0
                if len(data) < size:
                    self._stop(f"only {len(data)} of a batch's {size} bytes could be read")
                    return
            if crc32c(memoryview(data)[relative + CRC_START : relative + size]) != header.crc:
                self._stop(f"the checksum of the batch at offset {header.base_offset} does not hold")
                return
            if header.base_offset != self.next_offset:
                self._saw_gap = True
            yield FoundBatch(self.position, header)
            self.position += size
            self.next_offset = header.last_offset + 1

    def _read(self, at_least: int) -> bytes:
        length = min(max(CHUNK_BYTES, at_least), self.end - self.position)
        return self._file.pread(length, self.position)

    def _header_problem(self, header: BatchHeader) -> str | None:
        if header.magic != MAGIC:
            return f"record format {header.magic} where 2 is expected"
        if header.batch_length < HEADER_SIZE - LOG_OVERHEAD:
            return f"batch length {header.batch_length} is less than a header"
        if header.base_offset < self.next_offset:
            return f"offset {header.base_offset} where {self.next_offset} or more is expected"
        if header.base_offset > self.next_offset >= self._gaps_below:
            return f"offset {header.base_offset} where {self.next_offset} is expected"
        if header.last_offset_delta < 0 or header.records_count < 0:
            return f"last offset delta {header.last_offset_delta} of {header.records_count} records"
        return None

    def _stop(self, reason: str) -> None:
        self.damage = Damage(self.position, reason, self._saw_gap)


def find_later_batch(file: File, position: int, next_offset: int, end: int) -> FoundBatch | None:
    """The first whole valid batch of offset `next_offset` or later that begins after `position`.

    A torn tail has none; a damaged middle does. Candidates are found by their shape (the high half of the
    offset, the format byte) at the regular-expression engine's speed, then proved by checksum.
    """
    high = (next_offset >> 32).to_bytes(4, "big")
    pattern = re.compile(b"(?=(" + re.escape(high) + b").{12}\x02)", re.DOTALL)
    overlap = HEADER_SIZE
    start = position + 1
    while start + HEADER_SIZE <= end:
        data = file.pread(min(CHUNK_BYTES * 4, end - start), start)
        for match in pattern.finditer(data):
            candidate = start + match.start()
            if candidate + HEADER_SIZE > end:
                break
            scan = VerifiedScan(file, candidate, next_offset, end)
            for found in scan:
                return found
        if start + len(data) >= end:
            return None
        start += max(1, len(data) - overlap)
    return None
