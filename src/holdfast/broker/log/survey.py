"""One walk over the headers of a log before it is compacted: which transactions were aborted, and where
segments end.

A producer has one transaction at a time in a partition: its transactional batches since its last marker belong
to its next marker. So the walk tells every transaction's outcome, whatever the `.txnindex` files say, and
whether any batch of a marker's transaction is still there. Compaction never goes past the last stable offset,
hence every transaction it meets is decided somewhere; the walk goes on behind the part to be compacted until it
has found the last decision. A transaction without one would be left as it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from typing import Final, NamedTuple

from holdfast.broker.log.batches import walk_headers
from holdfast.seams import File
from holdfast.wire.batch import BatchHeader, iterate_records
from holdfast.wire.control_records import decode_end_marker

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
