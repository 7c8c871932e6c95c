"""Compaction seen from the broker: which log to clean and how far, and swapping the result in.

The log of a compacted topic is clean up to the cleaner's checkpoint and dirty behind it. A round may reach up to
the first segment that

- is active, or whose sealing the high watermark has not passed,
- reaches past the last stable offset,
- or, in the dirty part, has a record younger than `min.compaction.lag.ms`.

A log is due when the dirty bytes are more than `min.cleanable.dirty.ratio` of what the round would read, or
when its oldest dirty segment is older than `max.compaction.lag.ms`. `cleaner` does the work, in another process.

Swapping a cleaned segment in, so that a crash at any moment leaves the old segments or the new one:

1. The cleaned files and their directory have been flushed by the cleaner.
2. `commit`: `.log.cleaned` is renamed to `.log.swap`. The directory is flushed: from here on recovery
   completes the swap, before that it throws the cleaned files away.
3. `exchange`: the old files are renamed out of the way, the new indexes to their names, and the log in memory
   reads from the new file. The directory is flushed.
4. `finish`: `.log.swap` gets the segment's name. The directory is flushed.

Between two steps the caller flushes; each step is a few renames. While `.log.swap` is there every step can be
repeated, and when it is gone everything else has been durable.

The groups of a round are swapped in order, and after one that was abandoned none follows. A tombstone goes only
with a delete horizon, which an earlier round gave it, and that round has removed the values before it: they
cannot come back.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple

from holdfast.atomic import rename_all
from holdfast.broker.log.cleaner import CleanedSegment, LastRecord, Round, Source
from holdfast.broker.log.log import Log
from holdfast.broker.log.segment import (
    CLEANED_SUFFIX,
    INDEX_SUFFIXES,
    LOG_SUFFIX,
    SWAP_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
)
from holdfast.seams import FileSystem, Now
from holdfast.wire.batch import NO_TIMESTAMP
from holdfast.wire.positions import LogPosition

PART_BYTES_MIN: Final = 1024 * 1024 * 1024
PARTS_MAX: Final = 8
"""Each part reads the dirty part again, and the log needs an eighth more room for a while."""


class Dirt(NamedTuple):
    """How much a round of cleaning could do for a log."""

    first_dirty_offset: int
    bound: int
    """The base of the first segment that must not be touched."""
    clean_bytes: int
    dirty_bytes: int
    is_overdue: bool
    """The oldest dirty segment has waited longer than `max.compaction.lag.ms`."""

    @property
    def ratio(self) -> float:
        total = self.clean_bytes + self.dirty_bytes
        return self.dirty_bytes / total if total else 0.0


def examine(
    log: Log, clean_to: int | None, last_stable_offset: int, high_watermark: LogPosition, now: Now
) -> Dirt:
    """Measure a log of which `clean_to` says how far it was cleaned; None when it never was."""
    first_dirty = log.start_offset if clean_to is None else clean_to
    if not log.start_offset <= first_dirty <= log.end_offset:
        first_dirty = log.start_offset
    config = log.config
    clean_bytes = dirty_bytes = 0
    is_overdue = False
    for segment, following in zip(log.segments, log.segments[1:], strict=False):
        is_dirty = following.base_offset > first_dirty
        too_young = now.wall_ms - config.min_compaction_lag_ms < segment.newest_ms
        if (
            segment.base_offset >= high_watermark.segment_base
            or following.base_offset > last_stable_offset
            or (is_dirty and config.min_compaction_lag_ms and too_young)
        ):
            break
        if is_dirty:
            dirty_bytes += segment.size
            first = segment.first_timestamp or NO_TIMESTAMP
            waits_since_ms = first if first > 0 else segment.appended_ms
            is_overdue = is_overdue or waits_since_ms < now.wall_ms - config.max_compaction_lag_ms
        else:
            clean_bytes += segment.size
    else:
        segment = log.active
    return Dirt(first_dirty, segment.base_offset, clean_bytes, dirty_bytes, is_overdue)


def is_due(log: Log, dirt: Dirt) -> bool:
    if not dirt.dirty_bytes:
        return False
    return dirt.is_overdue or dirt.ratio > log.config.min_cleanable_dirty_ratio


def part_bytes(dirt: Dirt) -> int:
    """How much one part of a round writes: most rounds have one part, and none more than about eight."""
    return max(PART_BYTES_MIN, (dirt.clean_bytes + dirt.dirty_bytes) // PARTS_MAX)


def room_needed(log: Log, dirt: Dirt) -> int:
    """Bytes that a part of a round may need on disk beside the log."""
    largest = max(segment.size for segment in log.segments)
    return min(dirt.clean_bytes + dirt.dirty_bytes, part_bytes(dirt) + largest)


def plan_round(
    log: Log, dirt: Dirt, high_watermark: LogPosition, now: Now, map_bytes: int, first_base: int = 0
) -> Round:
    """What the cleaner needs to know for the part of a round that begins at `first_base`.

    Segments behind the bound, up to the high watermark, are for reading.
    """
    sources = []
    for segment in log.segments:
        if segment.base_offset > high_watermark.segment_base:
            break
        is_last = segment.base_offset == high_watermark.segment_base
        sources.append(Source(segment.base_offset, high_watermark.position if is_last else segment.size))
    config = log.config
    return Round(
        directory=log.directory,
        sources=sources,
        first_dirty_offset=dirt.first_dirty_offset,
        bound=dirt.bound,
        now_ms=now.wall_ms,
        delete_retention_ms=config.delete_retention_ms,
        segment_bytes=config.segment_bytes,
        segment_index_bytes=config.segment_index_bytes,
        index_interval_bytes=config.index_interval_bytes,
        map_bytes=map_bytes,
        producers=last_records(log, dirt.bound),
        first_base=first_base,
        part_bytes=part_bytes(dirt),
    )


def last_records(log: Log, bound: int) -> dict[int, LastRecord]:
    """The producers whose state a round up to `bound` must not lose, and what carries it."""
    producers = {}
    for description in log.producers.describe():
        batches = log.producers.batches_of(description.producer_id)
        last_offset = batches[-1].last_offset if batches else -1
        if last_offset < bound:
            producers[description.producer_id] = LastRecord(last_offset, description.producer_epoch)
    return producers


class Swap:
    """One cleaned segment on its way into the log; see the steps above."""

    def __init__(
        self, fs: FileSystem, log: Log, cleaned: CleanedSegment, seen: Mapping[int, Segment]
    ) -> None:
        """`seen` are the log's segments, by base offset, as they were when the round began."""
        self._fs = fs
        self._log = log
        self._cleaned = cleaned
        self._old = [seen[base_offset] for base_offset in cleaned.replaces]
        self._new = Segment(
            fs, log.directory, cleaned.base_offset, cleaned.size, max(old.created_ms for old in self._old)
        )
        self._new.appended_ms = max(old.appended_ms for old in self._old)
        self._new.has_untimed = cleaned.has_untimed
        self._new.max_timestamp = cleaned.max_timestamp
        self._new.offset_of_max_timestamp = cleaned.offset_of_max_timestamp
        self._new.first_timestamp = cleaned.first_timestamp
        self.is_committed = False

    @property
    def is_possible(self) -> bool:
        """Whether the segments it was made from are all still there: retention may have taken some."""
        present = self._log.segments[:-1]
        return all(any(old is segment for segment in present) for old in self._old)

    @property
    def _swap_path(self) -> str:
        return self._new.path(LOG_SUFFIX) + SWAP_SUFFIX

    def commit(self) -> None:
        self._fs.rename(self._new.path(LOG_SUFFIX) + CLEANED_SUFFIX, self._swap_path)
        self.is_committed = True

    def exchange(self) -> list[str]:
        """Returns the files that may be deleted whenever it suits. Where it fails nothing is exchanged."""
        file = self._fs.open(self._swap_path, "write")
        renames: list[tuple[str, str]] = []
        for old in self._old:
            is_first = old.base_offset == self._new.base_offset
            renames += self._log.retirement(old, with_snapshot=not is_first)
        retired = [new for _, new in renames]
        for path in map(self._new.path, INDEX_SUFFIXES):
            if self._fs.exists(path + CLEANED_SUFFIX):
                renames.append((path + CLEANED_SUFFIX, path))
        rename_all(self._fs, renames)
        self._new.adopt_file(file)
        self._new.has_transaction_file = self._fs.exists(self._new.path(TXN_INDEX_SUFFIX))
        self._log.replace(self._old, self._new)
        return retired

    def finish(self) -> None:
        self._fs.rename(self._swap_path, self._new.path())
        self._new.forget_file()

    def abandon(self) -> None:
        """Leave the log as it is, before `exchange`."""
        paths = [self._swap_path]
        paths += [self._new.path(suffix) + CLEANED_SUFFIX for suffix in (LOG_SUFFIX, *INDEX_SUFFIXES)]
        for path in paths:
            if self._fs.exists(path):
                self._fs.remove(path)
