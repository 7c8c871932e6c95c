"""One segment: a file of batches with its offset, time and transaction index.

The last segment of a log is active, appended to and indexed in memory; the others are sealed and never
written again (compaction replaces them whole). Index entries of the active segment live in memory and
reach their files when the segment is sealed or the log is closed, because recovery rebuilds them anyway.
A segment in which no transaction was aborted has no transaction index file, or an empty one; `index_sums` tells that
from a lost one.

The file of the active segment may be longer than the log: see `write_ahead`. A sealed one never is.

Files are opened when first needed, and those of sealed segments closed when others were needed since, so that
thousands of idle partitions cost no descriptors, and a long log a few.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from crc32c import crc32c

from holdfast.atomic import read_whole
from holdfast.broker.log.index import (
    NO_CONTENT,
    RELATIVE_OFFSET_MAX,
    IndexSums,
    OffsetIndex,
    TimeIndex,
    TransactionIndex,
    read_sums,
)
from holdfast.broker.log.scan import FoundBatch, header_at, scan_headers
from holdfast.broker.log.write_ahead import zeros
from holdfast.errors import CorruptLog, UsageError
from holdfast.seams import Buffer, File, FileSystem
from holdfast.wire.batch import (
    DELETE_HORIZON,
    HEADER_SIZE,
    LOG_APPEND_TIME,
    LOG_OVERHEAD,
    NO_TIMESTAMP,
    BatchHeader,
    read_header,
)

LOG_SUFFIX: Final = ".log"
INDEX_SUFFIX: Final = ".index"
TIME_INDEX_SUFFIX: Final = ".timeindex"
TXN_INDEX_SUFFIX: Final = ".txnindex"
SUMS_SUFFIX: Final = ".sums"
INDEX_SUFFIXES: Final = (INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX, SUMS_SUFFIX)
SNAPSHOT_SUFFIX: Final = ".snapshot"
CLEANED_SUFFIX: Final = ".cleaned"
SWAP_SUFFIX: Final = ".swap"
DELETED_SUFFIX: Final = ".deleted"
INDEX_INTERVAL_BYTES: Final = 4096
"""Between two entries of an index that is rebuilt outside recovery: Kafka's default."""


def offset_name(offset: int) -> str:
    return f"{offset:020d}"


class Slice(NamedTuple):
    """Bytes of a file, to be sent as they are."""

    file: File
    position: int
    length: int


class TimestampAndOffset(NamedTuple):
    timestamp: int
    offset: int


@dataclass(slots=True, eq=False, repr=False)
class Segment:
    _fs: FileSystem
    directory: str
    base_offset: int
    size: int
    """Bytes of whole batches; what lies behind them in the file is not part of the log."""
    created_ms: int
    next_offset: int = field(init=False)
    whole_bytes: int = 0
    """Where the last whole batch ends, by offset and in the file, as reading the indexes has found it."""
    ahead_end: int = 0
    """Up to here the file holds zeros behind its last batch; below `size` when there are none."""
    appended_ms: int = field(init=False)
    """When the last batch was appended, on the broker's clock. After a start, when the file was last changed."""
    first_timestamp: int | None = None
    """Of the first batch, see `timestamp_of`: a segment rolls `segment.ms` after it."""
    max_timestamp: int = NO_TIMESTAMP
    has_untimed: bool = False
    """Whether there is a batch here without a timestamp: its age is counted from `appended_ms`."""
    offset_of_max_timestamp: int = field(init=False)
    bytes_since_index_entry: int = 0
    index_damage: str | None = None
    """What is wrong with the index files, if anything is: then they should be written anew."""
    has_transaction_file: bool = False
    """Whether there is a transaction index on disk, which may be older than the one in memory."""
    _file: File | None = None
    _is_adopted: bool = False
    """Whether the file has another name for now."""
    _index: OffsetIndex | None = None
    _time_index: TimeIndex | None = None
    _transactions: TransactionIndex | None = None

    def __post_init__(self) -> None:
        self.next_offset = self.offset_of_max_timestamp = self.base_offset
        self.appended_ms = self.created_ms

    def path(self, suffix: str = LOG_SUFFIX) -> str:
        return f"{self.directory}/{offset_name(self.base_offset)}{suffix}"

    @property
    def file(self) -> File:
        if self._file is None:
            self._file = self._fs.open(self.path(), "write")
        return self._file

    @property
    def newest_ms(self) -> int:
        """When the youngest record here came into being: what retention and compaction count its age from."""
        if self.has_untimed or self.max_timestamp <= 0:
            return max(self.max_timestamp, self.appended_ms)
        return self.max_timestamp

    def adopt_file(self, file: File) -> None:
        """Read from `file`, which is on its way to this segment's name."""
        self._file = file
        self._is_adopted = True

    def forget_file(self) -> None:
        """Let go of the file, to be opened by name when next needed; it closes when nobody sends from it."""
        self._file = None
        self._is_adopted = False

    def create(self) -> None:
        """Make the empty file; it is durable once its directory is flushed."""
        self._file = self._fs.open(self.path(), "create")
        if self._file.size():
            self._file.truncate(0)
        self._index = OffsetIndex(self.base_offset)
        self._time_index = TimeIndex(self.base_offset)
        self._transactions = TransactionIndex(self.base_offset)

    # Indexes

    @property
    def index(self) -> OffsetIndex:
        if self._index is None:
            self._load_indexes()
        assert self._index is not None
        return self._index

    @property
    def time_index(self) -> TimeIndex:
        if self._time_index is None:
            self._load_indexes()
        assert self._time_index is not None
        return self._time_index

    @property
    def transactions(self) -> TransactionIndex:
        """The aborted transactions whose markers are here; `CorruptLog` or `OSError` when its file is lost or
        damaged.

        It cannot be rebuilt from this segment alone: where a transaction began may lie in an earlier one.
        """
        if self._transactions is None:
            data = read_whole(self._fs, self.path(TXN_INDEX_SUFFIX)) if self.has_transaction_file else b""
            sums = read_sums(self._fs, self.path(SUMS_SUFFIX))
            if sums is None or crc32c(data) != sums.transactions:
                raise CorruptLog(f"{self.path(TXN_INDEX_SUFFIX)}: no checksum proves it")
            self._transactions = TransactionIndex.from_bytes(data, self.base_offset)
        return self._transactions

    @property
    def has_aborted(self) -> bool:
        """Whether its transaction index may have entries."""
        return self.has_transaction_file if self._transactions is None else len(self._transactions) > 0

    def offset_bound_behind(self, position: int) -> int | None:
        """An offset that the bytes before `position` do not reach; None when the index knows of none."""
        offset = self.index.offset_at_or_after(position)
        if offset is None:
            return None
        # The entry must be true, or a reader would not be told of a transaction that was aborted.
        found = self.index.lookup(offset)[1]
        return offset if _batch_ends_at(self.file, found, offset) else None

    def set_transactions(self, index: TransactionIndex) -> None:
        """Take `index`, rebuilt from the log, in place of what the file says."""
        self._transactions = index

    def _load_indexes(self) -> None:
        """Read both index files; a missing or damaged one is rebuilt from the segment's batches."""
        try:
            sums = read_sums(self._fs, self.path(SUMS_SUFFIX))
            index = OffsetIndex.from_bytes(self._read_index(INDEX_SUFFIX, sums, 0), self.base_offset)
            times = TimeIndex.from_bytes(self._read_index(TIME_INDEX_SUFFIX, sums, 1), self.base_offset)
            self._check_indexes(index, times)
        except (FileNotFoundError, CorruptLog) as error:
            self.rebuild_indexes(INDEX_INTERVAL_BYTES)
            self.index_damage = str(error)
            return
        self._index, self._time_index = index, times
        self.has_untimed = times.has_untimed
        if sums is not None and sums.transactions == NO_CONTENT and not self.has_transaction_file:
            self._transactions = TransactionIndex(self.base_offset)

    def _read_index(self, suffix: str, sums: IndexSums | None, which: int) -> bytes:
        data = read_whole(self._fs, self.path(suffix))
        if sums is not None and crc32c(data) != sums[which]:
            raise CorruptLog(f"{self.path(suffix)}: not what was written, by its checksum")
        return data

    def _check_indexes(self, index: OffsetIndex, times: TimeIndex) -> None:
        """Raise `CorruptLog` unless the last entries are true and nothing behind them is younger.

        Not every index has a checksum. Entries in the middle prove themselves where they lead (`find`); the last ones
        also tell where the log ends and how old the segment is, so they are proved here.
        """
        last_offset, position = index.last_entry
        if len(index) and not _batch_ends_at(self.file, position, last_offset):
            raise CorruptLog(f"{self.path(INDEX_SUFFIX)}: offset {last_offset} is not at {position}")
        youngest = NO_TIMESTAMP
        for found in self._whole_batches(position):
            if found.header.records_count:
                youngest = max(youngest, found.header.max_timestamp)
                if timestamp_of(found.header) < 0 and not times.has_untimed:
                    raise CorruptLog(
                        f"{self.path(TIME_INDEX_SUFFIX)}: does not know of records without a time"
                    )
        timestamp, offset = times.last_entry
        if youngest > timestamp:
            raise CorruptLog(f"{self.path(TIME_INDEX_SUFFIX)}: does not know of timestamp {youngest}")
        if not len(times):
            return
        for found in scan_headers(self.file, index.lookup(offset)[1], self.size):
            if found.header.last_offset >= offset:
                if found.header.max_timestamp == timestamp:
                    return
                break
        raise CorruptLog(f"{self.path(TIME_INDEX_SUFFIX)}: offset {offset} is not of {timestamp}")

    def _whole_batches(self, position: int) -> Iterator[FoundBatch]:
        """The batches from `position` to the end, but for one that is cut off there; sets where they end."""
        self.next_offset, self.whole_bytes = self.base_offset, position
        for found in scan_headers(self.file, position, self.size):
            end = found.position + found.header.size
            if end > self.size:
                self.next_offset = found.header.base_offset
                return
            self.next_offset, self.whole_bytes = found.header.next_offset, end
            yield found

    def rebuild_indexes(self, interval_bytes: int) -> None:
        self.start_indexes()
        for position, header in self._whole_batches(0):
            self.note_read_batch(header, position, interval_bytes)
        try:
            self.finish_time_index()
        except UsageError as error:
            raise CorruptLog(f"{self.path()}: {error}") from error

    def start_indexes(self) -> None:
        self._index = OffsetIndex(self.base_offset)
        self._time_index = TimeIndex(self.base_offset)
        self.max_timestamp = NO_TIMESTAMP
        self.offset_of_max_timestamp = self.base_offset
        self.has_untimed = False
        self.first_timestamp = None
        self.bytes_since_index_entry = 0

    def note_read_batch(self, header: BatchHeader, position: int, interval_bytes: int) -> None:
        """Index a batch found in the file; `CorruptLog` when its offset cannot be of this segment."""
        relative = header.base_offset - self.base_offset
        if (
            header.last_offset_delta < 0
            or not 0 <= relative <= RELATIVE_OFFSET_MAX - header.last_offset_delta
        ):
            raise CorruptLog(
                f"{self.path()}: offset {header.base_offset} at {position} is not of this segment"
            )
        try:
            self.note_batch(header, position, interval_bytes)
        except UsageError as error:
            raise CorruptLog(f"{self.path()}: at {position}: {error}") from error

    def note_batch(self, header: BatchHeader, position: int, interval_bytes: int) -> None:
        """Index a batch that stands at `position`: an entry at most every `interval_bytes`."""
        last_offset = header.base_offset + header.last_offset_delta
        if header.max_timestamp > self.max_timestamp and header.records_count:
            self.max_timestamp = header.max_timestamp
            self.offset_of_max_timestamp = last_offset
        if self.first_timestamp is None:
            self.first_timestamp = timestamp_of(header)
        if not 0 < header.base_timestamp <= header.max_timestamp and timestamp_of(header) < 0:
            self.has_untimed = self.time_index.has_untimed = True
        if self.bytes_since_index_entry > interval_bytes:
            self.index.append(last_offset, position)
            self.time_index.append(self.max_timestamp, self.offset_of_max_timestamp)
            self.bytes_since_index_entry = 0
        self.bytes_since_index_entry += LOG_OVERHEAD + header.batch_length

    def finish_time_index(self) -> None:
        """The last entry of a sealed segment's time index is its largest timestamp."""
        if self.max_timestamp >= 0:
            self.time_index.append(self.max_timestamp, self.offset_of_max_timestamp)

    def index_files(self) -> list[tuple[str, bytes]]:
        """Suffix and content of the index files of a segment about to be sealed, and of their checksums."""
        self.finish_time_index()
        contents = (self.index.to_bytes(), self.time_index.to_bytes(), self.transactions.to_bytes())
        files = list(zip(INDEX_SUFFIXES, contents, strict=False))
        if not contents[-1] and not self.has_transaction_file:
            files.pop()  # an earlier file is emptied rather than removed: that needs no flush but its own
        return [*files, (SUMS_SUFFIX, IndexSums.of(*contents).to_bytes())]

    def write_indexes(self) -> list[File]:
        """Write the index files whole; the caller flushes them. Only for a segment about to be sealed."""
        contents = self.index_files()
        self.has_transaction_file = len(contents) == len(INDEX_SUFFIXES)
        files = []
        for suffix, data in contents:
            file = self._fs.open(self.path(suffix), "create")
            file.truncate(0)
            if data:
                file.pwritev([data], 0)
            files.append(file)
        return files

    def leave_empty_indexes(self) -> None:
        """Make the indexes of a segment without batches: Apache Kafka complains of each that is missing. We never read
        them, so nobody flushes them."""
        for suffix in (INDEX_SUFFIX, TIME_INDEX_SUFFIX):
            if not self._fs.exists(self.path(suffix)):
                self._fs.open(self.path(suffix), "create").close()

    def forget_indexes(self) -> None:
        """Give the memory back; the next lookup reads the files."""
        self._index = None
        self._time_index = None
        self._transactions = None

    def unload(self) -> None:
        """Give memory and descriptor back; the next use opens the files again."""
        self.forget_indexes()
        if not self._is_adopted:
            self.forget_file()

    # Reading

    def append(
        self, header: BatchHeader, head: bytes, rest: Buffer, interval_bytes: int, zeros_behind: int = 0
    ) -> int:
        """Write one batch at the end: `head` replaces its first bytes, `rest` follows untouched."""
        position = self.size
        if zeros_behind:
            written = self.file.pwritev((head, rest, *zeros(zeros_behind)), position) - zeros_behind
            self.ahead_end = position + written + zeros_behind
        else:
            written = self.file.pwritev((head, rest), position)
        self.note_batch(header, position, interval_bytes)
        self.size = position + written
        return position

    @property
    def has_space_ahead(self) -> bool:
        return self.ahead_end > self.size

    def cut_behind_end(self) -> None:
        """Let the file end where the log does: without what was written ahead, or what a failed write left."""
        self.file.truncate(self.size)
        self.ahead_end = 0

    def find(self, offset: int) -> tuple[int, int]:
        """Position and size of the batch that holds `offset`, or of the first one after it.

        (end of segment, 0) when there is none.
        """
        entry, position = self.index.lookup(offset)
        end = self.size
        file = self.file
        if position and not _batch_ends_at(file, position, entry):
            # Index files have no checksum: an entry that points elsewhere is noticed here, or never.
            self.rebuild_indexes(INDEX_INTERVAL_BYTES)
            position = self.index.lookup(offset)[1]
        # One read usually covers the gap between two index entries.
        data = file.pread(min(8192, end - position), position)
        start = position
        while position + HEADER_SIZE <= end:
            relative = position - start
            if relative + HEADER_SIZE > len(data):
                data = file.pread(min(8192, end - position), position)
                start = position
                relative = 0
                if len(data) < HEADER_SIZE:
                    raise CorruptLog(f"{file.path}: ends at {position + len(data)}, before its {end} bytes")
            header = read_header(data, relative)
            size = LOG_OVERHEAD + header.batch_length
            if size < HEADER_SIZE:
                raise CorruptLog(f"{file.path}: no batch at {position}")
            if header.base_offset + header.last_offset_delta >= offset:
                return position, size
            position += size
        return end, 0

    def newest_below(self, offset: int, position: int) -> TimestampAndOffset:
        """The largest timestamp of the batches below `offset`, which end at `position`, and the first that has it.

        Both indexes get their entries at the same batches: what is behind the last one, no more than an interval, is
        looked at.
        """
        if position >= self.size:
            return TimestampAndOffset(self.max_timestamp, self.offset_of_max_timestamp)
        indexed_offset, start = self.index.lookup(offset - 1)
        newest = TimestampAndOffset(*self.time_index.largest_up_to(indexed_offset))
        return self._newest_of(start, position, newest)

    def newest_from(self, offset: int, position: int) -> TimestampAndOffset:
        """The same of the batches that hold `offset` and later ones. Every one of them is looked at."""
        return self._newest_of(self.find(offset)[0], position, TimestampAndOffset(NO_TIMESTAMP, offset))

    def _newest_of(self, start: int, end: int, newest: TimestampAndOffset) -> TimestampAndOffset:
        for found in scan_headers(self.file, start, end):
            if found.header.max_timestamp > newest.timestamp and found.header.records_count:
                newest = TimestampAndOffset(found.header.max_timestamp, found.header.last_offset)
        return newest

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None


def _batch_ends_at(file: File, position: int, last_offset: int) -> bool:
    """Whether a batch stands at `position` that ends at `last_offset`."""
    try:
        return header_at(file, position).last_offset == last_offset
    except CorruptLog:
        return False


def timestamp_of(header: BatchHeader) -> int:
    """The time a batch's age is counted from, or `NO_TIMESTAMP` when its header tells none that can be relied on.

    Producers that know of no time write -1, 0, or a maximum below the base. A base in front of all time means that
    some records have none. Where the broker stamped the batch, or compaction gave it a delete horizon, the base is
    no record's time and says nothing.
    """
    newest = header.max_timestamp
    if newest <= 0:
        return NO_TIMESTAMP
    if header.attributes & (LOG_APPEND_TIME | DELETE_HORIZON) or not header.records_count:
        return newest
    return newest if 0 < header.base_timestamp <= newest else NO_TIMESTAMP
