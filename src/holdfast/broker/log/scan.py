"""Walking the batches of a segment file without holding it in memory.

`scan_headers` trusts lengths and reads headers only: for lookups in files whose content was verified
before. `scan_verified` reads every byte and checks every checksum: for recovery, where nothing may be
trusted; it stops at the first place that is not a whole valid batch and says why.

Work that looks at all of a sealed segment reads it from end to end. `read_batches` gives every batch whole and
proves its checksum first: what compaction copies was sound when it was read. `walk_headers` looks at headers only
and skips the records of large batches. Both read in chunks and hold one chunk, or one batch when that is larger.

Most kernels of servers do not take the processor away from a system call that copies: whoever wants it meanwhile,
the broker or a client, waits for the end of the copy. So none here is larger than `PIECE_BYTES`.

One walk over the headers of a log before it is compacted tells which transactions were aborted, and where segments
end (`survey`). A producer has one transaction at a time in a partition: its transactional batches since its last
marker belong to its next marker. So the walk tells every transaction's outcome, whatever the `.txnindex` files say,
and whether any batch of a marker's transaction is still there. Compaction never goes past the last stable offset,
hence every transaction it meets is decided somewhere; the walk goes on behind the part to be compacted until it has
found the last decision. A transaction without one would be left as it is.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.errors import CorruptLog
from holdfast.seams import File
from holdfast.wire.batch import (
    CRC_START,
    HEADER,
    HEADER_SIZE,
    LOG_OVERHEAD,
    MAGIC,
    BatchHeader,
    iterate_records,
)
from holdfast.wire.control_records import decode_end_marker

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


OFFSET_MAX: Final = 2**63 - 1


class Stretch(NamedTuple):
    """The batches of one segment file up to `end`."""

    base_offset: int
    file: File
    end: int


class Survey:
    """What the walk found."""

    def __init__(self) -> None:
        self.last_offsets: dict[int, int] = {}
        """The last offset of each segment that has a batch, by its base offset."""
        # Per producer, (first offset, marker offset) of its aborted transactions, in order.
        self._aborted: dict[int, list[tuple[int, int]]] = {}
        # Offsets of the markers whose transactions still have batches.
        self._with_data: set[int] = set()

    def is_aborted(self, header: BatchHeader) -> bool:
        """Whether a data batch belongs to an aborted transaction."""
        if not header.is_transactional:
            return False
        spans = self._aborted.get(header.producer_id)
        if not spans:
            return False
        slot = bisect_right(spans, (header.base_offset, OFFSET_MAX)) - 1
        return slot >= 0 and header.base_offset < spans[slot][1]

    def has_data(self, marker_offset: int) -> bool:
        """Whether a batch is left of the transaction that the marker at this offset ended."""
        return marker_offset in self._with_data

    def decided(self, producer_id: int, first_offset: int, marker_offset: int, is_commit: bool) -> None:
        self._with_data.add(marker_offset)
        if not is_commit:
            self._aborted.setdefault(producer_id, []).append((first_offset, marker_offset))


def survey(stretches: Iterable[Stretch], bound: int) -> Survey:
    """Walk the log from its beginning until every transaction that begins below `bound` is decided."""
    found = Survey()
    open_since: dict[int, int] = {}
    for base_offset, file, end in stretches:
        if base_offset >= bound and not open_since:
            break
        for position, header in walk_headers(file, end):
            found.last_offsets[base_offset] = header.last_offset
            if not header.is_transactional:
                continue
            producer_id = header.producer_id
            if not header.is_control:
                if header.base_offset < bound:
                    open_since.setdefault(producer_id, header.base_offset)
                continue
            is_commit = _is_commit(file.pread(header.size, position))
            if is_commit is not None and producer_id in open_since:
                found.decided(producer_id, open_since.pop(producer_id), header.base_offset, is_commit)
    return found


def _is_commit(batch: bytes) -> bool | None:
    """The outcome a marker tells; None for other control records, and for a marker that was emptied."""
    for record in iterate_records(batch):
        marker = decode_end_marker(record.key, record.value)
        return None if marker is None else marker.is_commit
    return None
