"""Producers that retry over the switch: Kafka must know the batches that were stored and not yet answered.

An idempotent producer has up to five batches under way, and a stop leaves some of them stored without an answer. They
are sent again. Our snapshot of producer state has the last five batches of each producer; Kafka reads one of them, and
answers a retry of an older one with OUT_OF_ORDER_SEQUENCE_NUMBER, which is the end of that producer. But Kafka keeps
five when it reads the batches themselves. So where a producer has several batches near the end of a log, the snapshot
of the end is moved away and one is made of where the first of them begins: Kafka reads the log from there.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import Final

from holdfast.atomic import read_whole
from holdfast.broker.log.index import OffsetIndex
from holdfast.broker.log.producer_state import NO_OFFSET, SnapshotEntry, decode_snapshot, encode_snapshot
from holdfast.broker.log.scan import walk_headers
from holdfast.broker.log.segment import INDEX_SUFFIX, SNAPSHOT_SUFFIX
from holdfast.errors import CorruptLog
from holdfast.graduate.changes import Made, Move
from holdfast.manifest.directory import FS, LogFiles
from holdfast.wire.batch import NO_SEQUENCE

READ_BYTES_MAX: Final = 4 << 20
"""What Kafka reads of each log for it: batches under way are a few, and at the very end."""


def mend(files: LogFiles, aside: str) -> tuple[list[Move], list[Made]]:
    """What lets Kafka know the last five batches of each producer of a partition that was stopped cleanly."""
    end = files.segment_path(files.recovery_point, SNAPSHOT_SUFFIX)
    if not FS.exists(end):
        return [], []
    entries = decode_snapshot(read_whole(FS, end), end)
    offset = _first_to_read(files, entries)
    if offset is None:
        return [], []
    moves = [Move(end, f"{aside}/{end.rpartition('/')[2]}")]
    path = files.segment_path(offset, SNAPSHOT_SUFFIX)
    if FS.exists(path):
        return moves, []
    return moves, [Made(path, encode_snapshot(as_of(entries, offset)).hex())]


def _first_to_read(files: LogFiles, entries: Iterable[SnapshotEntry]) -> int | None:
    """Where the first batch begins that a producer may send again and Kafka would not know."""
    firsts: dict[int, set[int]] = {}
    for entry in entries:
        if entry.last_offset >= 0 and entry.last_sequence != NO_SEQUENCE:
            firsts.setdefault(entry.producer_id, set()).add(entry.last_offset - entry.offset_delta)
    several = {first for each in firsts.values() if len(each) > 1 for first in each}
    if not several:
        return None
    window = _batches_at_the_end(files)
    near = [first for first in several if first in window]
    return min(near) if len(near) > 1 else None


def _batches_at_the_end(files: LogFiles) -> set[int]:
    """Base offsets of the batches in the last part of the last segment."""
    base_offset = files.segments()[-1]
    with closing(FS.open(files.segment_path(base_offset), "read")) as file:
        size = file.size()
        start = 0
        index = files.segment_path(base_offset, INDEX_SUFFIX)
        if size > READ_BYTES_MAX and FS.exists(index):
            try:
                found = OffsetIndex.from_bytes(read_whole(FS, index), base_offset)
            except CorruptLog:
                return set()  # Kafka rebuilds it, and knows one batch of each producer
            places = [position for _, position in found.entries if position >= size - READ_BYTES_MAX]
            start = min(places, default=size)
        return {found.header.base_offset for found in walk_headers(file, size, start)}


def as_of(entries: Iterable[SnapshotEntry], offset: int) -> list[SnapshotEntry]:
    """The state where `offset` was to be written next, as far as what is left to read does not tell it."""
    found: dict[int, SnapshotEntry] = {}
    for entry in entries:
        first = entry.transaction_first_offset
        is_open = first != NO_OFFSET and first < offset
        entry = entry._replace(transaction_first_offset=first if is_open else NO_OFFSET)
        if entry.last_offset < offset:
            found[entry.producer_id] = entry
        elif is_open and entry.producer_id not in found:
            # It has written more than five batches since; what it wrote before is not needed any more.
            found[entry.producer_id] = entry._replace(
                last_sequence=NO_SEQUENCE, last_offset=NO_OFFSET, offset_delta=0
            )
    return list(found.values())
