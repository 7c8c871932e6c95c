"""What the index files of a segment hold, and whether the log beside them agrees.

An offset index and a log are walked together, both in order of position, so that neither has to fit in memory.
Every entry must lead to a place where a batch begins, and carry the last offset of that batch or of one that was
appended with it. An entry of a time index must name an offset in the log, and the largest timestamp up to there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any, Final, NamedTuple

from holdfast.atomic import read_whole
from holdfast.broker.dump.batches import DumpOptions, Event, finding
from holdfast.broker.log.index import OffsetIndex, TimeIndex, TransactionIndex
from holdfast.broker.log.scan import FoundBatch, scan_headers
from holdfast.broker.log.write_ahead import content_end
from holdfast.errors import CorruptLog
from holdfast.seams import FileSystem
from holdfast.wire.batch import HEADER_SIZE


def _headers(fs: FileSystem, log_path: str) -> Iterator[FoundBatch]:
    with closing(fs.open(log_path, "read")) as file:
        end = file.size()
        zeros_from = content_end(file, 0, end)
        # The file may end in space written ahead; so few zeros are the end of a batch.
        yield from scan_headers(file, 0, zeros_from if end - zeros_from >= HEADER_SIZE else end)


def _check_offsets(index: OffsetIndex, path: str, fs: FileSystem, log_path: str) -> Iterator[Event]:
    entries = iter(index.entries)
    entry = next(entries, None)
    reached = False  # whether the batch at the entry's position has been seen
    try:
        for place in _headers(fs, log_path):
            while entry is not None and not reached and entry[1] < place.position:
                yield finding(path, f"no batch begins at position {entry[1]}", entry[1], entry[0])
                entry = next(entries, None)
            if entry is None:
                return
            reached = reached or entry[1] == place.position
            if reached and place.header.last_offset >= entry[0]:
                if place.header.last_offset != entry[0]:
                    message = f"offset {entry[0]} at position {entry[1]} is not the last of a batch there"
                    yield finding(path, message, entry[1], entry[0])
                entry, reached = next(entries, None), False
    except CorruptLog as problem:
        yield finding(path, f"cannot be checked to its end: {problem}")
        return
    while entry is not None:
        yield finding(path, f"offset {entry[0]} lies past the end of the log", entry[1], entry[0])
        entry = next(entries, None)


def _check_times(index: TimeIndex, path: str, fs: FileSystem, log_path: str) -> Iterator[Event]:
    entries = iter(index.entries)
    entry = next(entries, None)
    largest = -1
    try:
        for place in _headers(fs, log_path):
            largest = max(largest, place.header.max_timestamp)
            while entry is not None and entry[1] <= place.header.last_offset:
                timestamp, offset = entry
                if timestamp != largest:
                    message = (
                        f"timestamp {timestamp} for offset {offset}, where the log's largest is {largest}"
                    )
                    yield finding(path, message, None, offset)
                entry = next(entries, None)
            if entry is None:
                return
    except CorruptLog as problem:
        yield finding(path, f"cannot be checked to its end: {problem}")
        return
    while entry is not None:
        yield finding(path, f"offset {entry[1]} lies past the end of the log", None, entry[1])
        entry = next(entries, None)


class IndexKind(NamedTuple):
    read: Callable[[bytes, int], Any]
    """The index in a file's content; `CorruptLog` when it is none."""
    event: Callable[[Any], Event]
    """What one entry says."""
    check: Callable[[Any, str, FileSystem, str], Iterator[Event]] | None
    """Holds the index against the log beside it."""


OFFSETS: Final = IndexKind(
    OffsetIndex.from_bytes,
    lambda entry: {"type": "index_entry", "offset": entry[0], "position": entry[1]},
    _check_offsets,
)
TIMES: Final = IndexKind(
    TimeIndex.from_bytes,
    lambda entry: {"type": "time_index_entry", "timestamp_ms": entry[0], "offset": entry[1]},
    _check_times,
)
TRANSACTIONS: Final = IndexKind(
    TransactionIndex.from_bytes,
    lambda entry: {"type": "aborted_transaction", "version": 0, **entry._asdict()},
    None,
)


def dump_index(
    kind: IndexKind, fs: FileSystem, path: str, base_offset: int, log_path: str, options: DumpOptions
) -> Iterator[Event]:
    try:
        index = kind.read(read_whole(fs, path), base_offset)
    except CorruptLog as problem:
        yield finding(path, str(problem))
        return
    if options.index_sanity_check:
        yield {"type": "sanity", "path": path}
        return
    if not (options.verify or options.verify_index_only):
        yield from map(kind.event, index.entries)
    if kind.check is not None and fs.exists(log_path):
        yield from kind.check(index, path, fs, log_path)
