"""The heavy half of compaction: sealed segments in, cleaned segments beside them. Runs in the child process.

A round has a *dirty* part, from where the last round ended up to a bound the broker gives (see `compaction`).

1. A map from key to last offset is built over the dirty part, within a bound on memory. When the map is full
   the round ends there and the next one goes on.
2. Every segment from the first one up to the end of the mapped part is written anew. A record stays iff the
   map has no later offset for its key. What lies behind the mapped part is copied as it is.
3. Neighbours that fit together become one segment.

A round over a large log is done in parts, each of which builds the map again, so that the log need not be on disk
twice. The map of a later part knows at least as much: what the earlier ones removed was not the latest of its key.

What else the rules say, all of them Kafka's:

- Offsets never change. A batch keeps its base offset and its last offset delta whatever it loses.
- A record without a value, a tombstone, must be seen by readers that have read the value. A batch with
  tombstones gets a *delete horizon*, `delete.retention.ms` from the round that first kept them; from then on
  they may go. The horizon stands in the batch, in place of the base of its timestamps, and an attribute says so.
- Records of aborted transactions go. A marker whose transaction has no batch left gets a delete horizon in the
  same way, and then goes.
- The last batch of every producer the broker still knows stays, emptied: it carries the producer's epoch and
  sequence to whoever rebuilds that state from the log.

And two of ours. A cleaned segment reaches to the last offset of the segments it replaces, with an emptied batch
at its end if need be, so that after a crash its file alone tells what it replaces. And a batch whose records make no
sense, though its checksum holds, is as its producer sent it: nobody knows what keys it has, so it stays as it is and
replaces nothing.

The cleaned files end in `.cleaned`, are flushed, and their directory is flushed; nothing reads them until the
broker swaps them in.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from holdfast.broker.log.index import RELATIVE_OFFSET_MAX, TransactionIndex
from holdfast.broker.log.record_filter import (
    keep_latest,
    largest_timestamp_delta,
    note_keys,
    shift_timestamps,
)
from holdfast.broker.log.scan import PIECE_BYTES, Batch, Stretch, Survey, read_batches, survey
from holdfast.broker.log.segment import (
    CLEANED_SUFFIX,
    INDEX_SUFFIX,
    LOG_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
)
from holdfast.errors import CorruptLog, InvalidRecords
from holdfast.seams import Buffer, File, FileSystem
from holdfast.wire.batch import (
    CONTROL,
    DELETE_HORIZON,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    LOG_OVERHEAD,
    NO_TIMESTAMP,
    TRANSACTIONAL,
    BatchHeader,
    nearest_timestamp,
    records_bytes,
    seal,
)
from holdfast.wire.codecs import Codec, compress

MAP_ENTRY_BYTES: Final = 160
"""What one key costs in the map, measured: a dictionary slot, a short byte string and an integer."""
WRITE_BYTES: Final = 1024 * 1024
FLUSH_BYTES: Final = 8 * 1024 * 1024
"""A cleaned file is flushed as it grows: one large flush at its end would hold up the broker's small ones."""


class Source(NamedTuple):
    """A segment of the log, as far as it may be read."""

    base_offset: int
    size: int


class LastRecord(NamedTuple):
    """What keeps a producer's state alive: the batch that ends at this offset, or a marker of this epoch."""

    last_offset: int
    """-1 when the producer's current epoch has written no data."""
    epoch: int


@dataclass(frozen=True, slots=True)
class Round:
    """One round of cleaning, as the broker asks for it."""

    directory: str
    sources: Sequence[Source]
    """The segments from the first one on; those from `bound` on are read for transaction markers only."""
    first_dirty_offset: int
    bound: int
    """The base of the first segment that must not be touched."""
    now_ms: int
    delete_retention_ms: int
    segment_bytes: int
    segment_index_bytes: int
    index_interval_bytes: int
    map_bytes: int
    producers: Mapping[int, LastRecord]
    first_base: int
    """The base of the first segment this part of the round writes anew; those before it have been."""
    part_bytes: int
    """After writing about this much the part ends, so that what it replaces can be deleted before the next."""

    def to_json(self) -> dict[str, Any]:
        fields = {name: getattr(self, name) for name in self.__slots__}
        fields["sources"] = [list(source) for source in self.sources]
        fields["producers"] = [[producer_id, *last] for producer_id, last in self.producers.items()]
        return fields

    @classmethod
    def from_json(cls, arguments: Mapping[str, Any]) -> Round:
        fields = dict(arguments)
        fields["sources"] = [Source(*source) for source in arguments["sources"]]
        fields["producers"] = {
            producer_id: LastRecord(*last) for producer_id, *last in arguments["producers"]
        }
        return cls(**fields)


class CleanedSegment(NamedTuple):
    """A segment waiting in `.cleaned` files to take the place of those it was made from."""

    base_offset: int
    replaces: list[int]
    """Base offsets of the segments it was made from; the first is its own."""
    size: int
    max_timestamp: int
    offset_of_max_timestamp: int
    first_timestamp: int | None
    has_untimed: bool


class Cleaned(NamedTuple):
    """What a round has done."""

    segments: list[CleanedSegment]
    """In order; segments in which nothing changed are not among them."""
    end_offset: int
    """Everything below is clean: the next round's dirty part begins here."""
    resume_base: int | None
    """Where the next part of the round goes on; None when this was the last one."""
    unreadable: list[int]
    """Base offsets of the batches in the dirty part whose records make no sense."""

    def to_json(self) -> dict[str, Any]:
        return {**self._asdict(), "segments": [list(segment) for segment in self.segments]}

    @classmethod
    def from_json(cls, result: Mapping[str, Any]) -> Cleaned:
        return cls(**{**result, "segments": [CleanedSegment(*segment) for segment in result["segments"]]})


def clean(fs: FileSystem, asked: Round) -> Cleaned:
    """Carry out a round; raises `CorruptLog` or `OSError` with nothing but `.cleaned` files left behind."""
    remove_cleaned_files(fs, asked.directory)
    cleaner = _Cleaner(fs, asked)
    try:
        return cleaner.run()
    except OSError:
        # If it was for want of room, these files have it.
        with suppress(OSError):
            remove_cleaned_files(fs, asked.directory)
        raise
    finally:
        cleaner.close()


def remove_cleaned_files(fs: FileSystem, directory: str) -> None:
    for name in fs.list(directory):
        if name.endswith(CLEANED_SUFFIX):
            fs.remove(f"{directory}/{name}")


class _Cleaner:
    def __init__(self, fs: FileSystem, asked: Round) -> None:
        self._fs = fs
        self._asked = asked
        self._files: dict[int, File] = {}
        self._modified_ms: dict[int, int] = {}
        for base_offset, _ in asked.sources:
            path = Segment(fs, asked.directory, base_offset, 0, 0).path()
            self._files[base_offset] = fs.open(path, "read")
            self._modified_ms[base_offset] = fs.modified_ms(path)
        self._offsets: dict[bytes, int] = {}
        self._survey = Survey()
        self._unreadable: list[int] = []
        self._bytes_written = 0

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def run(self) -> Cleaned:
        asked = self._asked
        self._survey = survey(
            (Stretch(base, self._files[base], size) for base, size in asked.sources), asked.bound
        )
        end_offset = self._build_map()
        segments = []
        cleanable = [
            source for source in asked.sources if asked.first_base <= source.base_offset < end_offset
        ]
        resume_base: int | None = None
        for group in self._groups(cleanable):
            if self._bytes_written >= asked.part_bytes:
                resume_base = group[0].base_offset
                break
            cleaned = self._clean_group(group, end_offset)
            if cleaned is not None:
                segments.append(cleaned)
        if segments:
            self._fs.flush_directory(asked.directory)
        return Cleaned(segments, end_offset, resume_base, self._unreadable)

    # The map

    def _build_map(self) -> int:
        """Map the dirty part, or as much of it as fits; returns the offset up to which it is mapped."""
        asked = self._asked
        first = asked.first_dirty_offset
        offsets = self._offsets
        entries_max = max(1, asked.map_bytes // MAP_ENTRY_BYTES)
        bases = [source.base_offset for source in asked.sources if source.base_offset < asked.bound]
        for source, upper in zip(asked.sources, [*bases[1:], asked.bound], strict=False):
            if upper <= first:
                continue
            for header, data in read_batches(self._files[source.base_offset], source.size):
                if header.last_offset < first or header.is_control or not header.records_count:
                    continue
                if len(offsets) >= entries_max:
                    return header.base_offset
                if self._survey.is_aborted(header):
                    continue
                found: dict[bytes, int] = {}
                try:
                    note_keys(bytes(records_bytes(data, header)), header.base_offset, first, found)
                except (CorruptLog, InvalidRecords):
                    self._unreadable.append(header.base_offset)
                else:
                    offsets.update(found)
        return asked.bound

    # Grouping

    def _groups(self, sources: Iterable[Source]) -> list[list[Source]]:
        """Neighbours that fit one segment together, in bytes, index bytes and offsets."""
        asked = self._asked
        groups: list[list[Source]] = []
        size = index_bytes = 0
        following = {
            source.base_offset: after.base_offset
            for source, after in zip(asked.sources, asked.sources[1:], strict=False)
        }
        for source in sources:
            more_index_bytes = self._index_bytes(source)
            last_offset = following.get(source.base_offset, asked.bound) - 1
            if (
                groups
                and size + source.size <= asked.segment_bytes
                and index_bytes + more_index_bytes <= asked.segment_index_bytes
                and last_offset - groups[-1][0].base_offset <= RELATIVE_OFFSET_MAX
            ):
                groups[-1].append(source)
                size += source.size
                index_bytes += more_index_bytes
            else:
                groups.append([source])
                size, index_bytes = source.size, more_index_bytes
        return groups

    def _index_bytes(self, source: Source) -> int:
        segment = Segment(self._fs, self._asked.directory, source.base_offset, 0, 0)
        paths = (segment.path(INDEX_SUFFIX), segment.path(TIME_INDEX_SUFFIX))
        return max((self._fs.size(path) for path in paths if self._fs.exists(path)), default=0)

    # Writing anew

    def _clean_group(self, group: list[Source], end_offset: int) -> CleanedSegment | None:
        output = _Output(self._fs, self._asked, group[0].base_offset)
        try:
            last_offset = self._last_offset(group)
            has_changes = False
            for source in group:
                for batch in read_batches(self._files[source.base_offset], source.size):
                    header = batch.header
                    if header.base_offset >= end_offset:
                        kept: tuple[BatchHeader, Buffer] | None = (header, batch.data)
                    else:
                        kept = self._filter(batch, header.last_offset == last_offset)
                        has_changes = has_changes or kept is None or kept[1] is not batch.data
                    if kept is not None:
                        output.append(*kept)
            if len(group) == 1 and not has_changes:
                return None
            self._take_transactions(output.segment, group, end_offset)
            bases = [source.base_offset for source in group]
            cleaned = output.finish(bases, max(self._modified_ms[base] for base in bases))
            self._bytes_written += cleaned.size
            return cleaned
        finally:
            output.close()

    def _last_offset(self, group: list[Source]) -> int:
        """The last offset of the group, whose batch is kept at least emptied; -1 when it has no batch."""
        last_offsets = self._survey.last_offsets
        return max((last_offsets.get(source.base_offset, -1) for source in group), default=-1)

    def _filter(self, batch: Batch, is_last: bool) -> tuple[BatchHeader, Buffer] | None:
        """What stays of a batch below the mapped end: the same object when all of it does, None when nothing."""
        header = batch.header
        try:
            rebuilt = self._filter_marker(batch) if header.is_control else self._filter_data(batch)
        except (CorruptLog, InvalidRecords):
            return header, batch.data
        if rebuilt is None and (is_last or self._carries_producer_state(header)):
            return _emptied(header) if header.records_count else (header, batch.data)
        return rebuilt

    def _carries_producer_state(self, header: BatchHeader) -> bool:
        if header.producer_id < 0:
            return False
        last = self._asked.producers.get(header.producer_id)
        if last is None:
            return False
        if last.last_offset >= 0:
            return header.last_offset == last.last_offset
        return header.is_control and header.producer_epoch == last.epoch

    def _has_delete_horizon(self, header: BatchHeader) -> bool:
        """Whether an earlier round gave the batch its horizon. In the dirty part only its producer can have."""
        return header.has_delete_horizon and header.base_offset < self._asked.first_dirty_offset

    def _filter_marker(self, batch: Batch) -> tuple[BatchHeader, Buffer] | None:
        header = batch.header
        if not header.records_count:
            return None
        if not header.is_transactional or self._survey.has_data(header.base_offset):
            return header, batch.data
        if not self._has_delete_horizon(header):
            return self._rebuilt(batch, bytes(records_bytes(batch.data, header)), header.records_count, True)
        return None if header.base_timestamp <= self._asked.now_ms else (header, batch.data)

    def _filter_data(self, batch: Batch) -> tuple[BatchHeader, Buffer] | None:
        header = batch.header
        if not header.records_count or self._survey.is_aborted(header):
            return None
        data = bytes(records_bytes(batch.data, header))
        has_horizon = self._has_delete_horizon(header)
        drops_tombstones = has_horizon and header.base_timestamp <= self._asked.now_ms
        kept = keep_latest(data, header.base_offset, self._offsets, drops_tombstones)
        if not kept.records_count:
            return None
        sets_horizon = kept.has_tombstone and not has_horizon
        if kept.data is None and not sets_horizon:
            return header, batch.data
        return self._rebuilt(
            batch, data if kept.data is None else kept.data, kept.records_count, sets_horizon
        )

    def _rebuilt(
        self, batch: Batch, data: bytes, count: int, sets_horizon: bool
    ) -> tuple[BatchHeader, Buffer]:
        """The batch with these records, as its own codec packs them."""
        header = batch.header._replace(records_count=count)
        if not header.is_log_append_time:
            largest = header.base_timestamp + largest_timestamp_delta(data)
            header = header._replace(max_timestamp=nearest_timestamp(largest))
        if sets_horizon:
            horizon_ms = nearest_timestamp(self._asked.now_ms + self._asked.delete_retention_ms)
            data = shift_timestamps(data, header.base_timestamp - horizon_ms)
            header = header._replace(base_timestamp=horizon_ms, attributes=header.attributes | DELETE_HORIZON)
        packed = compress(Codec(header.codec), data) if header.codec else data
        sealed = seal(header, packed)
        return header._replace(batch_length=len(sealed) - LOG_OVERHEAD), sealed

    def _take_transactions(self, output: Segment, group: list[Source], end_offset: int) -> None:
        """Give `output` the aborted transactions consumers must still be told of: those that had batches before this
        round.

        It gets a file whenever the replaced segments had one, even if it is empty now, so that the old one never
        stands beside the new segment.
        """
        kept = TransactionIndex(output.base_offset)
        for source in group:
            segment = Segment(self._fs, self._asked.directory, source.base_offset, 0, 0)
            segment.has_transaction_file = self._fs.exists(segment.path(TXN_INDEX_SUFFIX))
            output.has_transaction_file = output.has_transaction_file or segment.has_transaction_file
            for entry in segment.transactions.entries:
                if entry.last_offset >= end_offset or self._survey.has_data(entry.last_offset):
                    kept.append(*entry)
        output.set_transactions(kept)


class _Output:
    """A cleaned segment being written: batches at the end of a file, and its indexes."""

    def __init__(self, fs: FileSystem, asked: Round, base_offset: int) -> None:
        self._fs = fs
        self._interval_bytes = asked.index_interval_bytes
        self.segment = Segment(fs, asked.directory, base_offset, 0, 0)
        self.segment.start_indexes()
        self._path = self.segment.path(LOG_SUFFIX) + CLEANED_SUFFIX
        self._file = fs.open(self._path, "create")
        self._file.truncate(0)
        self._pending: list[bytes] = []
        self._pending_bytes = 0
        self._written = 0
        self._unflushed = 0
        self._is_finished = False

    def append(self, header: BatchHeader, batch: Buffer) -> None:
        self.segment.note_batch(header, self._written + self._pending_bytes, self._interval_bytes)
        self._pending.append(bytes(batch))  # a view would keep the whole chunk it was read in
        self._pending_bytes += len(batch)
        if self._pending_bytes >= WRITE_BYTES:
            self._write()

    def _write(self) -> None:
        if not self._pending:
            return
        data = memoryview(b"".join(self._pending))
        for start in range(0, len(data), PIECE_BYTES):
            self._file.pwritev([data[start : start + PIECE_BYTES]], self._written + start)
        self._written += self._pending_bytes
        self._unflushed += self._pending_bytes
        self._pending, self._pending_bytes = [], 0
        if self._unflushed >= FLUSH_BYTES:
            self._file.flush()
            self._unflushed = 0

    def finish(self, replaces: list[int], modified_ms: int) -> CleanedSegment:
        """`modified_ms` is of the files it replaces: records without times of their own are as old as those."""
        self._write()
        self._file.flush()
        segment = self.segment
        for suffix, data in segment.index_files():
            _write_file(self._fs, segment.path(suffix) + CLEANED_SUFFIX, data)
        self._fs.set_modified_ms(self._path, modified_ms)
        self._is_finished = True
        return CleanedSegment(
            segment.base_offset,
            replaces,
            self._written,
            segment.max_timestamp,
            segment.offset_of_max_timestamp,
            segment.first_timestamp,
            segment.has_untimed,
        )

    def close(self) -> None:
        self._file.close()
        if not self._is_finished:
            self._fs.remove(self._path)


def _write_file(fs: FileSystem, path: str, data: bytes) -> None:
    with closing(fs.open(path, "create")) as file:
        file.truncate(0)
        if data:
            file.pwritev([data], 0)
        file.flush()


def _emptied(header: BatchHeader) -> tuple[BatchHeader, Buffer]:
    """The header alone: offsets, epoch and sequence, no records."""
    empty = header._replace(
        attributes=header.attributes & (LOG_APPEND_TIME | TRANSACTIONAL | CONTROL),
        base_timestamp=NO_TIMESTAMP,
        records_count=0,
    )
    return empty._replace(batch_length=HEADER_SIZE - LOG_OVERHEAD), seal(empty, b"")
