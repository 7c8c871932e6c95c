"""Which rows are in which entry of a ledger, and the places of rows that were erased.

A row belongs to the entry whose range has its place; a row that a stateful step made, to the entry whose state has its
number (`RowsByEntry`). So digests are summed by entry when an audit reads rows, and when rows are erased.

An erasure names its rows by place (`pack`, `unpack`): of each partition the offsets, ascending, each as its difference
from the one before, and the indexes, as numbers of 64 bits, deflated and in base64. Neighbours take next to nothing;
rows here and there about a byte and a half.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from holdfast.pipeline.ledger import Entry

Numbers = npt.NDArray[np.int64]


class RowsByEntry:
    """The entries of one ledger that are kept, ascending, as the homes of rows."""

    def __init__(self, entries: Sequence[Entry]) -> None:
        self.entries = entries
        self._ends: dict[tuple[str, int], Numbers] = {}
        states = [-1 if entry.state is None else entry.state for entry in entries]
        self._states = np.maximum.accumulate(np.array(states, np.int64)) + 1
        self._topics = {place.topic for entry in entries for place in entry.positions.at}

    @property
    def beyond(self) -> int:
        """In place of an entry: the row is behind the newest."""
        return len(self.entries)

    @property
    def before(self) -> int:
        """In place of an entry: the row is from before the ledger began."""
        return len(self.entries) + 1

    def groups(self, lineage: Mapping[str, pa.Array]) -> Numbers:
        """Of each row the entry that it belongs to, or that stands for some that are not kept, by its place in the
        list."""
        found = np.full(len(lineage["offset"]), self.beyond, np.int64)
        for topic, partition, rows, offsets in by_partition(lineage):
            if topic:
                groups = np.searchsorted(self._ends_of(topic, partition), offsets, "right")
                groups[offsets < self._start_of(topic, partition)] = self.before
                found[rows] = groups
        return found

    def _start_of(self, topic: str, partition: int) -> int:
        """Where the ledger began there; rows from before are in none of its entries. A partition that came later begins
        where it was first named, and an entry that is not the first began somewhere before it."""
        first = self.entries[0]
        if first.number:
            return 0
        is_opening = not first.range.offsets
        if topic not in self._topics:
            return int(self._states[0]) if is_opening else 0
        known = first.positions.of(topic, partition)
        if known is None:
            return 0
        place, at = known
        span = first.range.spans.get(place)
        return at.offset if span is None else span.start

    def _ends_of(self, topic: str, partition: int) -> Numbers:
        """Of each entry, the offset that it ends before: ascending."""
        if topic not in self._topics:
            return self._states
        known = self._ends.get((topic, partition))
        if known is None:
            at = [entry.positions.of(topic, partition) for entry in self.entries]
            known = np.maximum.accumulate(
                np.array([0 if each is None else each[1].offset for each in at], np.int64)
            )
            self._ends[topic, partition] = known
        return known


def by_partition(lineage: Mapping[str, pa.Array]) -> Iterator[tuple[str, int, Numbers, Numbers]]:
    """Which rows are from each partition, and their offsets; those of which a part is null are from ("", -1)."""
    topics = lineage["topic"]
    if not hasattr(topics, "indices"):
        topics = topics.dictionary_encode()
    names = topics.dictionary.to_pylist()
    codes, partitions, offsets = map(_whole, (topics.indices, lineage["partition"], lineage["offset"]))
    mixed = np.where((codes >= 0) & (partitions >= 0), codes << 32 | partitions, -1)
    for each in np.unique(mixed).tolist():
        rows = np.flatnonzero(mixed == each)
        yield (
            names[each >> 32] if each >= 0 else "",
            each & 0xFFFFFFFF if each >= 0 else -1,
            rows,
            offsets[rows],
        )


def _whole(column: Any) -> Numbers:
    filled = column.fill_null(-1).to_numpy(zero_copy_only=False)
    return np.asarray(filled, np.int64)


def pack(numbers: Numbers) -> str:
    """Numbers as text; few where they ascend by steps that are alike."""
    steps = np.diff(numbers, prepend=np.int64(0)).astype("<i8")
    return base64.b64encode(zlib.compress(steps.tobytes())).decode()


def unpack(text: str) -> Numbers:
    """`ValueError` for a text that is none of these."""
    try:
        steps = np.frombuffer(zlib.decompress(base64.b64decode(text, validate=True)), "<i8")
    except zlib.error as error:
        raise ValueError(f"it names no rows ({error})") from error
    return np.cumsum(steps, dtype=np.int64)
