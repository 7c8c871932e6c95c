"""The `.txnindex` file of a segment: the aborted transactions whose markers the segment holds.

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

from array import array
from bisect import bisect_left
from collections.abc import Iterator
from struct import Struct
from typing import NamedTuple

from holdfast.broker.log.index import EntryFile
from holdfast.errors import CorruptLog, UsageError
from holdfast.seams import Buffer

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
