"""The index files of a segment: where offsets and times are in its log, and which transactions were aborted.

The two sparse indexes lead from offsets to file positions, and from timestamps to offsets. Both are Kafka's files,
big endian, one entry every `index.interval.bytes` of log:

    .index       int32 offset − base offset, int32 position in the .log file
    .timeindex   int64 timestamp, int32 offset − base offset

Rules the reader may rely on:

- An index only ever helps: it says where to *start* looking. A missing, short or empty one costs time,
  never records, because everything in it can be read again from the log.
- Keys grow strictly, in memory and in a file that `from_bytes` accepts. Positions grow strictly, the
  offsets of a time index never fall.
- Entries live in packed arrays, 8 and 12 bytes each as in the file, and are found by bisection.
- Nothing is written here: the owner writes and flushes the files when it seals a segment, and rebuilds them after a
  crash.

A time index may begin with one entry that names no time, (−1, base offset): see `TimeIndex.has_untimed`. Kafka reads
it as the beginning of the segment.

A file that was allocated ahead ends in zeros. An offset index never holds an entry (0, 0): the first entry
comes after a whole interval of log. A time index may begin with one, so there only zeros after another
entry are padding.

Checksums of a segment's index files, which have none themselves: `*.sums`, written with them.

Four CRC-32C, big endian: of the offset index, of the time index, of the transaction index (of nothing when there is
no file), and of these three. An index that it does not prove is rebuilt from the batches. So a lost or damaged
index costs time and never shows a record of an aborted transaction, nor hides one from a lookup by time. Apache
Kafka writes none: then the offset and the time index prove themselves by their last entries, and the transaction
index is rebuilt.

The `.txnindex` file of a segment: the aborted transactions whose markers the segment holds.

A read_committed consumer gets records of aborted transactions along with the others and drops them itself;
for that a fetch tells it which producers aborted from which offset on. Kafka's format, one entry per
aborted transaction in the order of their markers, big endian:

    int16 version (0), int64 producer id, int64 first offset, int64 last offset (the marker's),
    int64 last stable offset

The last stable offset of an entry is where the undecided part of the log began once that marker was
appended. It never falls from entry to entry. So a search that must know every transaction that touches
offsets below some bound can stop at the first entry whose last stable offset has reached the bound:
whatever aborts later began later.

Segments without aborted transactions have no such file.
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from operator import ge, gt
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.atomic import read_whole
from holdfast.errors import CorruptLog, UsageError
from holdfast.seams import Buffer, FileSystem

RELATIVE_OFFSET_MAX = 2**31 - 1
"""Offsets of one segment span at most this much; the log rolls before."""
POSITION_MAX = 2**31 - 1
NO_TIMESTAMP = -1
UNTIMED = b"\xff" * 8 + bytes(4)
"""The entry (−1, base offset)."""

_SWAP_BYTES = sys.byteorder == "little"
# Where the halves of an int64 lie in this machine's memory, in int32 words.
_HIGH_HALF, _LOW_HALF = (1, 0) if _SWAP_BYTES else (0, 1)


class EntryFile(ABC):
    """Entries of one size, appended in memory, that make up a file."""

    entry_bytes: int

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def to_bytes(self) -> bytes:
        """The whole file's content."""

    def _check_whole_entries(self, data: Buffer, what: str) -> None:
        if len(data) % self.entry_bytes:
            raise CorruptLog(
                f"{what}: {len(data)} bytes are not a whole number of {self.entry_bytes}-byte entries"
            )

    def _used_bytes(self, data: Buffer) -> int:
        """How much of `data` comes before the zero entries that a file allocated ahead ends in."""
        used = len(bytes(data).rstrip(b"\0"))
        return used + -used % self.entry_bytes


class OffsetIndex(EntryFile):
    """Offsets to positions. An entry's offset is the last one of the batch that begins at its position."""

    entry_bytes = 8

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self._offsets = array("i")
        self._positions = array("i")

    def __len__(self) -> int:
        return len(self._offsets)

    @property
    def entries(self) -> Iterator[tuple[int, int]]:
        """(offset, position) in order."""
        base = self.base_offset
        return (
            (base + relative, position)
            for relative, position in zip(self._offsets, self._positions, strict=True)
        )

    @property
    def last_entry(self) -> tuple[int, int]:
        """(offset, position) of the last entry, or (base offset, 0)."""
        if not self._offsets:
            return self.base_offset, 0
        return self.base_offset + self._offsets[-1], self._positions[-1]

    def append(self, offset: int, position: int) -> None:
        relative = offset - self.base_offset
        offsets = self._offsets
        if not (0 <= relative <= RELATIVE_OFFSET_MAX and 0 <= position <= POSITION_MAX):
            raise UsageError(f"offset {offset} at {position} does not fit an index from {self.base_offset}")
        if offsets and (relative <= offsets[-1] or position <= self._positions[-1]):
            raise UsageError(
                f"offset {offset} at {position} does not follow the last entry {self.last_entry}"
            )
        offsets.append(relative)
        self._positions.append(position)

    def lookup(self, offset: int) -> tuple[int, int]:
        """The greatest entry at or below `offset`, or (base offset, 0): start reading there."""
        slot = bisect_right(self._offsets, offset - self.base_offset)
        if not slot:
            return self.base_offset, 0
        return self.base_offset + self._offsets[slot - 1], self._positions[slot - 1]

    def offset_at_or_after(self, position: int) -> int | None:
        """The offset of the first entry at or past `position`, or None: bytes before it hold smaller ones."""
        slot = bisect_left(self._positions, position)
        return self.base_offset + self._offsets[slot] if slot < len(self._positions) else None

    @classmethod
    def from_bytes(cls, data: Buffer, base_offset: int) -> OffsetIndex:
        """Read a file's content; `CorruptLog` when no append could have written it."""
        index = cls(base_offset)
        what = f"offset index from {base_offset}"
        index._check_whole_entries(data, what)
        words = _words_of(memoryview(data)[: index._used_bytes(data)])
        index._offsets = words[0::2]
        index._positions = words[1::2]
        for name, values in (("offset", index._offsets), ("position", index._positions)):
            if values and (values[0] < 0 or any(map(ge, values, islice(values, 1, None)))):
                raise CorruptLog(f"{what}: its {name}s do not increase")
        return index

    def to_bytes(self) -> bytes:
        words = array("i", bytes(8 * len(self._offsets)))
        words[0::2] = self._offsets
        words[1::2] = self._positions
        return _big_endian(words)


class TimeIndex(EntryFile):
    """Timestamps to offsets: no record below an entry's offset is younger than its timestamp."""

    entry_bytes = 12

    def __init__(self, base_offset: int) -> None:
        self.base_offset = base_offset
        self.has_untimed = False
        """Whether the segment has batches whose age no timestamp tells: `UNTIMED` in front of the file says so."""
        self._timestamps = array("q")
        self._offsets = array("i")

    def __len__(self) -> int:
        return len(self._timestamps)

    @property
    def entries(self) -> Iterator[tuple[int, int]]:
        """(timestamp, offset) in order."""
        base = self.base_offset
        return (
            (timestamp, base + relative)
            for timestamp, relative in zip(self._timestamps, self._offsets, strict=True)
        )

    @property
    def last_entry(self) -> tuple[int, int]:
        """(timestamp, offset) of the last entry, or (−1, base offset)."""
        if not self._timestamps:
            return NO_TIMESTAMP, self.base_offset
        return self._timestamps[-1], self.base_offset + self._offsets[-1]

    def append(self, timestamp: int, offset: int) -> bool:
        """Note the largest timestamp so far and its offset; a timestamp that is no larger is no news."""
        last_timestamp, last_offset = self.last_entry
        if timestamp <= last_timestamp:
            return False
        relative = offset - self.base_offset
        if offset < last_offset or relative > RELATIVE_OFFSET_MAX:
            raise UsageError(
                f"offset {offset} cannot follow {last_offset} in a time index from {self.base_offset}"
            )
        self._timestamps.append(timestamp)
        self._offsets.append(relative)
        return True

    def lookup(self, timestamp: int) -> tuple[int, int]:
        """The greatest entry at or below `timestamp`, or (−1, base offset)."""
        slot = bisect_right(self._timestamps, timestamp)
        if not slot:
            return NO_TIMESTAMP, self.base_offset
        return self._timestamps[slot - 1], self.base_offset + self._offsets[slot - 1]

    def largest_up_to(self, offset: int) -> tuple[int, int]:
        """The last entry that names `offset` or one below it, or (−1, base offset)."""
        slot = bisect_right(self._offsets, offset - self.base_offset)
        if not slot:
            return NO_TIMESTAMP, self.base_offset
        return self._timestamps[slot - 1], self.base_offset + self._offsets[slot - 1]

    @classmethod
    def from_bytes(cls, data: Buffer, base_offset: int) -> TimeIndex:
        """Read a file's content; `CorruptLog` when no append could have written it."""
        index = cls(base_offset)
        what = f"time index from {base_offset}"
        index._check_whole_entries(data, what)
        if data[: cls.entry_bytes] == UNTIMED:
            index.has_untimed = True
            data = data[cls.entry_bytes :]
        used = index._used_bytes(data)
        if not used and len(data) == cls.entry_bytes:
            used = cls.entry_bytes  # one whole entry: timestamp 0 at the base offset
        words = _words_of(memoryview(data)[:used])
        halves = array("i", bytes(8 * (len(words) // 3)))
        halves[_HIGH_HALF::2] = words[0::3]
        halves[_LOW_HALF::2] = words[1::3]
        index._timestamps.frombytes(halves.tobytes())
        index._offsets = words[2::3]
        timestamps, offsets = index._timestamps, index._offsets
        if timestamps and (timestamps[0] < 0 or any(map(ge, timestamps, islice(timestamps, 1, None)))):
            raise CorruptLog(f"{what}: its timestamps do not increase")
        if offsets and (offsets[0] < 0 or any(map(gt, offsets, islice(offsets, 1, None)))):
            raise CorruptLog(f"{what}: its offsets fall")
        return index

    def to_bytes(self) -> bytes:
        halves = array("i", self._timestamps.tobytes())
        words = array("i", bytes(12 * len(self)))
        words[0::3] = halves[_HIGH_HALF::2]
        words[1::3] = halves[_LOW_HALF::2]
        words[2::3] = self._offsets
        return (UNTIMED if self.has_untimed else b"") + _big_endian(words)


def _words_of(data: memoryview) -> array[int]:
    """The big-endian int32 words of a file. Whole arrays are cut and joined, since a loop per entry shows up
    as a pause when the index of a large segment is read."""
    words = array("i")
    words.frombytes(data)
    if _SWAP_BYTES:
        words.byteswap()
    return words


def _big_endian(words: array[int]) -> bytes:
    """The file of these words, which are used up."""
    if _SWAP_BYTES:
        words.byteswap()
    return words.tobytes()


NO_CONTENT: Final = crc32c(b"")
_SUMS: Final = Struct(">III")
_CHECK: Final = Struct(">I")


class IndexSums(NamedTuple):
    offsets: int
    times: int
    transactions: int

    @classmethod
    def of(cls, *contents: bytes) -> IndexSums:
        """Of the files' contents in the order of the fields."""
        return cls(*map(crc32c, contents))

    def to_bytes(self) -> bytes:
        data = _SUMS.pack(*self)
        return data + _CHECK.pack(crc32c(data))


def read_sums(fs: FileSystem, path: str) -> IndexSums | None:
    """None when there is no such file, or it does not hold."""
    try:
        data = read_whole(fs, path)
    except FileNotFoundError:
        return None
    if len(data) != _SUMS.size + _CHECK.size:
        return None
    sums = IndexSums._make(_SUMS.unpack_from(data))
    return sums if sums.to_bytes() == data else None


ENTRY_VERSION = 0

_ENTRY = Struct(">hqqqq")


class AbortedTransaction(NamedTuple):
    """What a fetch tells a consumer."""

    producer_id: int
    first_offset: int


class AbortedEntry(NamedTuple):
    """One entry of the file."""

    producer_id: int
    first_offset: int
    last_offset: int
    last_stable_offset: int


class AbortedSearch(NamedTuple):
    transactions: list[AbortedTransaction]
    is_complete: bool
    """Whether later segments cannot add to them."""


class TransactionIndex(EntryFile):
    """The aborted transactions whose markers lie in the segment that begins at `base_offset`."""

    entry_bytes = _ENTRY.size

    def __init__(self, base_offset: int = 0) -> None:
        self.base_offset = base_offset
        self._producer_ids = array("q")
        self._first_offsets = array("q")
        self._last_offsets = array("q")
        self._last_stable_offsets = array("q")

    def __len__(self) -> int:
        return len(self._last_offsets)

    @property
    def entries(self) -> Iterator[AbortedEntry]:
        return map(AbortedEntry, *self._columns)

    @property
    def _columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        return self._producer_ids, self._first_offsets, self._last_offsets, self._last_stable_offsets

    @property
    def last_offset(self) -> int | None:
        """The offset of the last marker."""
        return self._last_offsets[-1] if self._last_offsets else None

    def append(self, producer_id: int, first_offset: int, last_offset: int, last_stable_offset: int) -> None:
        """Note a transaction that the marker at `last_offset` aborted."""
        if self._last_offsets and last_offset <= self._last_offsets[-1]:
            raise UsageError(f"a marker at {last_offset} does not follow the one at {self._last_offsets[-1]}")
        self._add(producer_id, first_offset, last_offset, last_stable_offset)

    def _add(self, *fields: int) -> None:
        for column, value in zip(self._columns, fields, strict=True):
            column.append(value)

    def collect(self, fetch_offset: int, upper_bound: int) -> AbortedSearch:
        """The aborted transactions that touch the offsets from `fetch_offset` up to below `upper_bound`."""
        found: list[AbortedTransaction] = []
        for slot in range(bisect_left(self._last_offsets, fetch_offset), len(self)):
            if self._first_offsets[slot] < upper_bound:
                found.append(AbortedTransaction(self._producer_ids[slot], self._first_offsets[slot]))
            if self._last_stable_offsets[slot] >= upper_bound:
                return AbortedSearch(found, True)
        return AbortedSearch(found, False)

    @classmethod
    def from_bytes(cls, data: Buffer, base_offset: int) -> TransactionIndex:
        """Read a file's content; `CorruptLog` when no append could have written it."""
        index = cls(base_offset)
        what = f"transaction index from {base_offset}"
        index._check_whole_entries(data, what)
        previous_offset = base_offset - 1
        for number, (version, *fields) in enumerate(_ENTRY.iter_unpack(data)):
            if version != ENTRY_VERSION:
                raise CorruptLog(f"{what}: entry {number} has the unknown version {version}")
            entry = AbortedEntry(*fields)
            if not (
                entry.producer_id >= 0
                and 0 <= entry.first_offset < entry.last_offset
                and entry.last_offset > previous_offset
                and 0 <= entry.last_stable_offset <= entry.last_offset + 1
            ):
                raise CorruptLog(f"{what}: entry {number} cannot be, {entry}")
            previous_offset = entry.last_offset
            index._add(*entry)
        return index

    def to_bytes(self) -> bytes:
        return b"".join(_ENTRY.pack(ENTRY_VERSION, *entry) for entry in self.entries)
