"""The two sparse indexes of a segment: from offsets to file positions, and from timestamps to offsets.

Both are Kafka's files, big endian, one entry every `index.interval.bytes` of log:

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
"""

from __future__ import annotations

import sys
from abc import ABC, abstractmethod
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from itertools import islice
from operator import ge, gt

from holdfast.errors import CorruptLog, UsageError
from holdfast.seams import Buffer

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
