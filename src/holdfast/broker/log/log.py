"""The log of one partition: segments in order, appended at the end, read anywhere, shortened at the front.

What a caller may rely on:

- Offsets are given once, in order. A failed write leaves the log as it was: the bytes behind the last
  whole batch are cut off again before the error is passed on.
- Nothing is durable until a flush of what `begin_flush` names has returned; `LogPosition` of that call is
  then the durable end. A roll puts the sealed segment, its indexes and the directory among the targets of
  the next flush, so no offset of the new segment counts as durable before them.
- The log never flushes by itself while serving; only opening and closing do.
- The file of the active segment may end behind the log, with zeros: see `write_ahead`. Nothing here asks a file for
  its length.
- What transactions come to is kept in step with the batches: producer state knows the open ones, each segment's
  transaction index the aborted ones whose markers it holds.
- Segments are removed in two steps, `segments_before` and `remove`, so that the new log start can be made
  durable in between. `remove` only renames files: freeing a large one takes longer than a request may wait.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, NamedTuple
from zlib import crc32

from holdfast.atomic import flush_each, rename_all
from holdfast.broker.log.end_markers import add_aborted, read_end_marker, rebuild_transactions
from holdfast.broker.log.index import AbortedTransaction, TransactionIndex
from holdfast.broker.log.leader_epochs import EpochFiles, LeaderEpochs
from holdfast.broker.log.producer_state import ProducerStateMap, encode_snapshot
from holdfast.broker.log.scan import FoundBatch, header_at, scan_headers
from holdfast.broker.log.segment import (
    DELETED_SUFFIX,
    INDEX_SUFFIXES,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    Segment,
    Slice,
    offset_name,
    timestamp_of,
)
from holdfast.broker.log.write_ahead import NO_ROOM_ERRNOS, WriteAhead
from holdfast.config.topic import TopicConfig
from holdfast.errors import CorruptLog
from holdfast.seams import Buffer, File, FileSystem, FlushTarget, Now
from holdfast.wire.batch import CONTROL, LOG_OVERHEAD, NO_TIMESTAMP, OFFSET_AND_EPOCH, BatchHeader
from holdfast.wire.positions import LogPosition

OFFSET_ENTRY_BYTES: Final = 8
RELATIVE_OFFSET_MAX: Final = 2**31 - 1
LOADED_MAX: Final = 8
"""Sealed segments of one log whose files stay open, and indexes in memory: readers cluster at a few places."""


class PendingFlush(NamedTuple):
    targets: tuple[FlushTarget, ...]
    end: LogPosition


@dataclass(slots=True)
class Growth:
    """What became of a log since it was opened."""

    opened_end_offset: int
    bytes_before_active: int
    """Appended to segments that are sealed now, less what the first active one held before."""
    cut_bytes: int = 0
    """What recovery cut off its end when it was opened."""


class Log:
    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: TopicConfig,
        *,
        segments: list[Segment],
        end_offset: int,
        start_offset: int,
        producers: ProducerStateMap,
        epochs: LeaderEpochs,
        epoch_files: EpochFiles,
        is_changed: bool = False,
    ) -> None:
        self._fs = fs
        self.directory = directory
        self.config = config
        self.segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self.end_offset = end_offset
        """The offset the next record will get."""
        self.start_offset = start_offset
        """The first offset that may be read; records before it are deleted."""
        self.producers = producers
        self.epochs = epochs
        self._epoch_files = epoch_files
        self._with_aborted = [segment for segment in segments if segment.has_aborted]
        """The segments whose transaction indexes may have entries: nearly always none."""
        self.recovery_point = end_offset
        """Everything below is on disk and was verified, or was flushed by us."""
        self.flushed_base = segments[-1].base_offset
        """Segments below this one were sealed by a roll whose flush has returned: their indexes are on disk, and
        the state of producers at their ends."""
        self._sealed_unflushed: list[File] = []
        self._directory_unflushed = True
        self._identity_unflushed: str | None = None
        self._parent_unflushed: str | None = None
        self._is_changed = is_changed
        """Whether anything was written since the log was opened: an unchanged one is closed without a trace."""
        self._appended_since_flush = False
        self._flush_under_way: tuple[FlushTarget, ...] = ()
        """What a flush that has not returned yet is to make durable: a stop cannot count on it."""
        self.unflushed_messages = 0
        self._write_ahead = WriteAhead()
        self._size_at_flush = segments[-1].size
        """Of the active segment when the last flush was begun."""
        self._loaded: list[Segment] = []
        self.growth = Growth(end_offset, -segments[-1].size)

    @property
    def active(self) -> Segment:
        return self.segments[-1]

    @property
    def size(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def appended_bytes(self) -> int:
        """Since the log was opened, whether they are still there or not."""
        return self.growth.bytes_before_active + self.segments[-1].size

    @property
    def appended_messages(self) -> int:
        """The same in messages; a transaction's marker counts as one."""
        return self.end_offset - self.growth.opened_end_offset

    @property
    def end_position(self) -> LogPosition:
        active = self.segments[-1]
        return LogPosition(self.end_offset, active.base_offset, active.size)

    # Appending

    def append(self, header: BatchHeader, batch: Buffer, leader_epoch: int, now: Now) -> BatchHeader:
        """Give the batch the next offsets and write it; returns its header as stored.

        The batch was checked before; `header` is its own. Raises `OSError` when the disk refuses, with
        the log unchanged.
        """
        base_offset = self.end_offset
        last_offset = base_offset + header.last_offset_delta
        # Built at once: `_replace` would cost as much as the rest of this function.
        stored = BatchHeader._make((base_offset, header[1], leader_epoch, *header[3:]))
        active = self.segments[-1]
        if self._must_roll(active, stored, last_offset, now):
            active = self.roll(now)
        if leader_epoch > self.epochs.latest_epoch:
            self.epochs.assign(leader_epoch, base_offset)
        head = OFFSET_AND_EPOCH.pack(base_offset, header[1], leader_epoch)
        self._write(active, stored, head, memoryview(batch)[16:])
        active.appended_ms = now.wall_ms
        self._appended_since_flush = self._is_changed = True
        self.unflushed_messages += header.records_count
        self.end_offset = last_offset + 1
        if header.producer_id >= 0:
            if header.attributes & CONTROL:
                self._end_transaction(active, stored, batch, now)
            else:
                self.producers.update(stored, base_offset, now.wall_ms)
        return stored

    def _write(self, active: Segment, stored: BatchHeader, head: bytes, rest: Buffer) -> None:
        config = self.config
        zeros_behind = 0
        if self._write_ahead.is_due:
            end = active.size + LOG_OVERHEAD + stored.batch_length
            if end > active.ahead_end:
                limit = config.holdfast_write_ahead_bytes
                zeros_behind = self._write_ahead.bytes_behind(end, limit, config.segment_bytes)
        try:
            active.append(stored, head, rest, config.index_interval_bytes, zeros_behind)
        except OSError as error:
            self._cut_behind_end(active)
            if not zeros_behind or error.errno not in NO_ROOM_ERRNOS:
                raise
            # There may be room for the batch by itself.
            self._write_ahead.begin_anew()
            self._write(active, stored, head, rest)

    def _end_transaction(self, active: Segment, stored: BatchHeader, batch: Buffer, now: Now) -> None:
        marker = read_end_marker(batch)
        assert marker is not None, "only whole markers are appended"
        completed = self.producers.complete(stored, marker, stored.base_offset, now.wall_ms)
        if completed is not None and completed.is_aborted:
            add_aborted(active.transactions, completed)
            if not self._with_aborted or self._with_aborted[-1] is not active:
                self._with_aborted.append(active)

    def _must_roll(self, active: Segment, header: BatchHeader, last_offset: int, now: Now) -> bool:
        size = active.size
        if last_offset - active.base_offset > RELATIVE_OFFSET_MAX:
            return True
        if not size:
            return False
        config = self.config
        if (
            size + LOG_OVERHEAD + header.batch_length > config.segment_bytes
            or len(active.index) * OFFSET_ENTRY_BYTES >= config.segment_index_bytes
        ):
            return True
        age_ms = self._age_ms(active, header, now)
        # The jitter is worked out only for a segment that is old enough with all there could be of it.
        return (
            age_ms > config.segment_ms - config.segment_jitter_ms
            and age_ms > config.segment_ms - self.roll_jitter_ms
        )

    @property
    def roll_jitter_ms(self) -> int:
        """What the active segment's age falls short of `segment.ms`, lest all partitions roll at once.

        Each segment has its own, and the same after a restart.
        """
        most = min(self.config.segment_jitter_ms, self.config.segment_ms)
        return crc32(f"{self.directory}/{self.active.base_offset}".encode()) % most if most else 0

    @staticmethod
    def _age_ms(segment: Segment, header: BatchHeader, now: Now) -> int:
        first = segment.first_timestamp
        if first is not None and first > 0 and (timestamp := timestamp_of(header)) > 0:
            return timestamp - first
        return now.wall_ms - segment.created_ms

    def roll(self, now: Now) -> Segment:
        """Seal the active segment and begin a new one at the end offset; an empty one has that offset already."""
        old = self.segments[-1]
        if not old.size:
            return old
        if old.has_space_ahead:
            self._cut_behind_end(old)
        sealed = [old.file, *old.write_indexes(), self._write_snapshot()]
        epochs = self._epoch_files.write_aside(self.epochs)
        segment = Segment(self._fs, self.directory, self.end_offset, 0, now.wall_ms)
        segment.create()
        # Nothing is refused from here on: a roll that was is tried again with the next batch, and leaves nothing open.
        self._sealed_unflushed += sealed
        if epochs is not None:
            self._sealed_unflushed.append(epochs)
            self._epoch_files.written_aside(self.epochs)
        self.segments.append(segment)
        self.growth.bytes_before_active += old.size
        self._keep_loaded(old)
        self._bases.append(segment.base_offset)
        self._directory_unflushed = self._is_changed = True
        self._size_at_flush = 0
        return segment

    def _write_snapshot(self) -> File:
        path = f"{self.directory}/{offset_name(self.end_offset)}{SNAPSHOT_SUFFIX}"
        file = self._fs.open(path, "create")
        data = encode_snapshot(self.producers.to_snapshot())
        file.pwritev([data], 0)
        file.truncate(len(data))
        return file

    def _keep_loaded(self, segment: Segment) -> None:
        """A segment is about to be used: unload one that was not for long, unless it is the active one."""
        loaded = self._loaded
        if segment in loaded or segment is self.segments[-1]:
            return
        loaded.append(segment)
        if len(loaded) > LOADED_MAX:
            loaded.pop(0).unload()

    # Flushing

    @property
    def needs_flush(self) -> bool:
        return self._appended_since_flush or self._directory_unflushed or bool(self._sealed_unflushed)

    @property
    def has_sealed_unflushed(self) -> bool:
        """Whether a segment was sealed, or the log made, and no flush has followed."""
        return bool(self._sealed_unflushed) or self._identity_unflushed is not None

    def flush_first(self, identity: str, parent: str) -> None:
        """The log is new: its first flush must make the file `identity` and its directory's own entry durable too."""
        self._identity_unflushed = identity
        self._parent_unflushed = parent
        self._is_changed = True

    def begin_flush(self, *, apart: bool = False) -> PendingFlush:
        """What must be flushed, in order, for everything up to `end` to be durable.

        `apart` tells that hardly any other file is flushed at the same time. Raises `OSError`, with everything left
        to be flushed, when there is no descriptor for it.
        """
        targets: list[FlushTarget] = [*self._sealed_unflushed]
        if self._identity_unflushed is not None:
            # Opened for its flush alone: thousands of new partitions may wait for theirs.
            targets.append(self._fs.open(self._identity_unflushed, "write"))
        if self._appended_since_flush:
            active = self.segments[-1]
            targets.append(active.file)
            apart = apart and self.config.holdfast_flush == "group"
            self._write_ahead.flushing(active.size - self._size_at_flush, apart=apart)
            self._size_at_flush = active.size
        if self._directory_unflushed:
            targets.append(self.directory)
        if self._parent_unflushed is not None:
            targets.append(self._parent_unflushed)
            self._parent_unflushed = None
        self._sealed_unflushed = []
        self._identity_unflushed = None
        self._appended_since_flush = False
        self._directory_unflushed = False
        self.unflushed_messages = 0
        self._flush_under_way += tuple(targets)
        return PendingFlush(tuple(targets), self.end_position)

    def flush_not_begun(self) -> None:
        """A flush was refused before anything was asked of the disk: what it was to make durable is still to be."""
        for target in self._flush_under_way:
            if not isinstance(target, str):
                self._sealed_unflushed.append(target)
            elif target == self.directory:
                self._directory_unflushed = True
            else:
                self._parent_unflushed = target
        self._flush_under_way = ()

    def give_back_when_idle(self) -> None:
        """Called now and then: cut off what was written ahead if nothing was flushed since the last call."""
        if self._write_ahead.was_idle() and self.active.has_space_ahead:
            self._give_back()

    def _give_back(self) -> None:
        self._cut_behind_end(self.active)
        self._write_ahead.begin_anew()

    def _cut_behind_end(self, segment: Segment) -> None:
        segment.cut_behind_end()
        # Even if nothing is appended any more: a clean stop must not leave a file that is longer than its log.
        self._appended_since_flush = self._is_changed = True

    def advance_recovery_point(self, end: LogPosition) -> None:
        self._flush_under_way = ()
        self.flushed_base = max(self.flushed_base, end.segment_base)
        if end.offset > self.recovery_point:
            self.recovery_point = end.offset

    # Reading

    def segment_for(self, offset: int) -> int:
        """The index of the segment that holds `offset`, or would."""
        return max(0, bisect_right(self._bases, offset) - 1)

    def read(self, offset: int, max_bytes: int, end: LogPosition, *, at_least_one: bool) -> Slice | None:
        """Bytes of whole batches (the last may be cut) from `offset` up to `end`; None when there are none.

        The first batch may begin before `offset`: clients skip what they did not ask for. With
        `at_least_one` it is returned whole however large it is.
        """
        if offset >= end.offset:
            return None
        which = self.segment_for(offset)
        while which < len(self.segments):
            segment = self.segments[which]
            if segment.base_offset > end.segment_base:
                return None
            self._keep_loaded(segment)
            position, size = segment.find(offset)
            stop = (
                min(end.position, segment.size) if segment.base_offset == end.segment_base else segment.size
            )
            if size and position < stop:
                length = min(max_bytes, stop - position)
                if length < size:
                    if not at_least_one:
                        return None
                    length = size
                return Slice(segment.file, position, length)
            which += 1
        return None

    def aborted_in(self, offset: int, read: Slice, bound: int) -> list[AbortedTransaction]:
        """The aborted transactions that a reader of `offset` must know of to make sense of `read`.

        They are in the order of their markers, and began below `bound`, where the reader stops. A few that
        begin behind the bytes of `read` may be among them.
        """
        if not self._with_aborted:
            return []
        first = self.segment_for(offset)
        at = first
        while self.segments[at].file is not read.file:
            at += 1
        upper = self.segments[at].offset_bound_behind(read.position + read.length)
        if upper is None:
            upper = self._bases[at + 1] if at + 1 < len(self._bases) else self.end_offset
        found: list[AbortedTransaction] = []
        start = bisect_left(self._with_aborted, self._bases[first], key=lambda segment: segment.base_offset)
        for segment in self._with_aborted[start:]:
            transactions, is_complete = self.transactions_of(segment).collect(offset, min(upper, bound))
            found += transactions
            if is_complete:
                break
        return found

    def transactions_of(self, segment: Segment) -> TransactionIndex:
        """The segment's transaction index, rebuilt from the log when its file is lost or damaged."""
        self._keep_loaded(segment)
        try:
            return segment.transactions
        except (CorruptLog, FileNotFoundError):
            *_, index = rebuild_transactions(self._used(self.segments[: self.segments.index(segment) + 1]))
            segment.set_transactions(index)
            return index

    def _used(self, segments: list[Segment]) -> Iterator[Segment]:
        for segment in segments:
            self._keep_loaded(segment)
            yield segment

    def batches_from(self, offset: int, end: LogPosition | None = None) -> Iterator[FoundBatch]:
        """Headers of the batches that hold `offset` and later ones: for recovery, tools and lookups by time."""
        for segment in self.segments[self.segment_for(offset) :]:
            self._keep_loaded(segment)
            position, size = segment.find(max(offset, segment.base_offset))
            stop = segment.size
            if end is not None:
                if segment.base_offset > end.segment_base:
                    return
                if segment.base_offset == end.segment_base:
                    stop = min(end.position, stop)
            if size:
                yield from scan_headers(segment.file, position, stop)

    def position_of(self, offset: int) -> LogPosition:
        """Where the batch that holds `offset` begins, for bounds that are not the end of the log."""
        if offset >= self.end_offset:
            return self.end_position
        segment = self.segments[self.segment_for(offset)]
        self._keep_loaded(segment)
        position, _ = segment.find(offset)
        return LogPosition(offset, segment.base_offset, position)

    # Shortening

    def segments_before(self, offset: int) -> list[Segment]:
        """Sealed segments all of whose offsets are below `offset`.

        One goes only when the flush of its roll has returned: what its batches tell of producers must be on disk.
        """
        bound = min(offset, self.flushed_base)
        count = 0
        while count + 1 < len(self.segments) and self.segments[count + 1].base_offset <= bound:
            count += 1
        return self.segments[:count]

    def advance_start(self, offset: int) -> None:
        if offset > self.start_offset:
            self.start_offset = offset

    def remove(self, segments: list[Segment]) -> list[str]:
        """Take segments out of the log and rename their files; the new start must be durable already.

        Returns the files' new names: they may be deleted whenever it suits.
        """
        retired: list[str] = []
        for segment in segments:
            at = self.segments.index(segment)
            if at == len(self.segments) - 1:
                raise ValueError("the active segment is rolled before it is removed")
            renames = self.retirement(segment, with_snapshot=segment.base_offset < self.start_offset)
            rename_all(self._fs, renames)
            retired += [new for _, new in renames]
            del self.segments[at]
            del self._bases[at]
            if segment in self._loaded:
                self._loaded.remove(segment)
            if segment in self._with_aborted:
                self._with_aborted.remove(segment)
        # The file of epochs follows when the next epoch begins; opening cuts it to the log start anyway.
        self.epochs.truncate_from_start(self.start_offset)
        return retired

    def retirement(self, segment: Segment, *, with_snapshot: bool) -> list[tuple[str, str]]:
        """The renames that put a segment's files out of the way; recovery deletes what is left of them."""
        suffixes = [LOG_SUFFIX, *INDEX_SUFFIXES]
        if with_snapshot:
            suffixes.append(SNAPSHOT_SUFFIX)
        paths = [path for path in map(segment.path, suffixes) if self._fs.exists(path)]
        return [(path, path + DELETED_SUFFIX) for path in paths]

    def replace(self, old: list[Segment], new: Segment | None) -> None:
        """Swap in what compaction made of neighbouring sealed segments; files were renamed by the caller."""
        at = self.segments.index(old[0])
        put = [] if new is None else [new]
        self.segments[at : at + len(old)] = put
        self._bases[at : at + len(old)] = [segment.base_offset for segment in put]
        self._loaded = [segment for segment in self._loaded if segment not in old]
        self._with_aborted = [segment for segment in self.segments if segment.has_aborted]

    # Looking up by time

    def newest_batch(self, end: LogPosition) -> tuple[Segment, FoundBatch] | None:
        """The first batch with the largest timestamp there is below `end`; None when no record has one."""
        best: tuple[int, Segment, int] | None = None
        for segment in self.segments:
            if segment.base_offset > end.segment_base:
                break
            if segment.max_timestamp < 0:
                continue
            is_last = segment.base_offset == end.segment_base
            stop = min(end.position, segment.size) if is_last else segment.size
            if stop < segment.size:
                self._keep_loaded(segment)
            timestamp, offset = segment.newest_below(end.offset, stop)
            if offset < self.start_offset:
                self._keep_loaded(segment)
                # It is deleted, and no index tells of the largest behind it. Only the first segment can have that.
                timestamp, offset = segment.newest_from(self.start_offset, stop)
            if timestamp >= 0 and (best is None or timestamp > best[0]):
                best = timestamp, segment, offset
        if best is None:
            return None
        _, segment, offset = best
        self._keep_loaded(segment)
        position, _ = segment.find(offset)
        return segment, FoundBatch(position, header_at(segment.file, position))

    def batch_at_or_after_time(self, timestamp: int, end: LogPosition) -> tuple[Segment, FoundBatch] | None:
        """The first batch below `end` that holds a record of `timestamp` or later."""
        for segment in self.segments:
            if segment.base_offset > end.segment_base:
                return None
            if segment.max_timestamp < timestamp or segment.max_timestamp == NO_TIMESTAMP:
                continue
            self._keep_loaded(segment)
            offset = segment.time_index.lookup(timestamp)[1]
            position, size = segment.find(max(offset, segment.base_offset))
            stop = (
                min(end.position, segment.size) if segment.base_offset == end.segment_base else segment.size
            )
            if not size:
                continue
            for found in scan_headers(segment.file, position, stop):
                if (
                    found.header.max_timestamp >= timestamp
                    and found.header.records_count
                    and found.header.last_offset >= self.start_offset
                ):
                    return segment, found
        return None

    # Ending

    def write_for_clean_start(self) -> list[FlushTarget]:
        """Write what a clean start will trust; once all of what is returned is flushed, `close` may follow."""
        if not self.active.size:
            self.active.leave_empty_indexes()
        if not self._is_changed and self.recovery_point >= self.end_offset:
            return []
        if self.active.has_space_ahead:
            self._give_back()
        self.begin_flush()
        targets: list[FlushTarget] = [*self._flush_under_way]
        if self.end_offset > self.active.base_offset or len(self.producers):
            targets += [*self.active.write_indexes(), self._write_snapshot()]
        epochs = self._epoch_files.write_aside(self.epochs)
        if epochs is not None:
            targets.append(epochs)
            self._epoch_files.written_aside(self.epochs)
        return [*targets, self.directory]

    def close(self) -> None:
        """Everything is flushed: let go of the files."""
        self.advance_recovery_point(self.end_position)
        self._epoch_files.close()
        for segment in self.segments:
            segment.close()

    def flush_and_close(self) -> None:
        """Both steps of an orderly end for one log by itself. Blocks."""
        flush_each(self._fs, self.write_for_clean_start())
        self.close()
