"""Opening a partition's directory: trusting a clean stop, proving everything else.

After a clean stop the files are as `Log.close` left them and only the last index entry's neighbourhood is
read. Otherwise nothing from the recovery point on is believed:

1. The files to be checked and their directory are flushed and their cached pages dropped, so that what is
   verified is what the disk holds, not what a cache remembers.
2. Every batch is verified; indexes, producer state and leader epochs are rebuilt from what holds.
3. At the first place that is not a whole valid batch the log ends. The bytes behind it are kept in
   `*.cut`, a file for each cut, and cut off, and the log line says how many and why. Zeros up to the end of the last
   file were written ahead (see `write_ahead`): they are cut off without a word, and are no part of what is kept.

A bad place with a whole valid batch of a later offset behind it is not a tail. On a machine that kept
running, the page cache held every write in order, so a hole means damage: the partition stays offline and
nothing is touched. After a power failure (`torn_tail_expected`) the disk may have kept any subset of the
pages that were not flushed yet, so a hole above the recovery point is how an unacknowledged tail looks,
and it is cut like any other, with its bytes kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final, NamedTuple

from holdfast.atomic import flush_file, parent_of, read_whole
from holdfast.config.topic import TopicConfig
from holdfast.errors import CorruptLog
from holdfast.log.checkpoints import PARTITION_METADATA_FILE, encode_partition_metadata
from holdfast.log.cut_bytes import keep_cut_bytes
from holdfast.log.end_markers import add_aborted, replay_batch
from holdfast.log.interrupted import finish_interrupted_work
from holdfast.log.leader_epochs import LEADER_EPOCH_FILE, LeaderEpochs
from holdfast.log.log import Log
from holdfast.log.producer_snapshot import decode_snapshot, encode_snapshot
from holdfast.log.producer_state import CompletedTransaction, ProducerStateMap
from holdfast.log.scan import ANYWHERE, Damage, Found, VerifiedScan, find_later_batch, header_at, scan_headers
from holdfast.log.segment import (
    INDEX_SUFFIX,
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    TIME_INDEX_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    offset_name,
    timestamp_of,
)
from holdfast.log.transaction_index import TransactionIndex
from holdfast.log.write_ahead import content_end
from holdfast.seams import FileSystem, Now
from holdfast.wire.batch import BatchHeader

ZEROS_KEPT: Final = 512
"""Kept of the zeros behind a cut tail: the end of its last batch may be among them, what was written ahead is not."""


class Trust(NamedTuple):
    """What the rest of the data directory says about this partition."""

    clean: bool
    recovery_point: int
    start_offset: int
    torn_tail_expected: bool
    recovery_point_known: bool = True
    """Whether the file of recovery points was there to be read. Without it compaction may have been anywhere."""

    @property
    def gaps_below(self) -> int:
        """Compaction keeps below the recovery point, so offsets are missing only there."""
        return self.recovery_point if self.recovery_point_known else ANYWHERE


def create_log(fs: FileSystem, directory: str, config: TopicConfig, topic_id: bytes, now: Now) -> Log:
    """A new, empty log. Nothing of it is flushed: its first flush takes the files and both directories along."""
    fs.make_directory(directory)
    identity = f"{directory}/{PARTITION_METADATA_FILE}"
    file = fs.open(identity, "create")
    try:
        file.pwritev([encode_partition_metadata(topic_id)], 0)
    finally:
        file.close()
    segment = Segment(fs, directory, 0, 0, now.wall_ms)
    segment.create()
    log = Log(
        fs,
        directory,
        config,
        segments=[segment],
        end_offset=0,
        start_offset=0,
        producers=ProducerStateMap(directory),
        epochs=LeaderEpochs(),
    )
    log.flush_first(identity, parent_of(directory))
    segment.close()
    return log


def open_log(
    fs: FileSystem,
    directory: str,
    config: TopicConfig,
    trust: Trust,
    now: Now,
    say: Callable[[str], None],
) -> Log:
    """Open, or make, the log in `directory`; raise `CorruptLog` when it is damaged beyond its tail."""
    if not fs.exists(directory):
        fs.make_directory(directory)
        fs.flush_directory(directory.rpartition("/")[0])
    finish_interrupted_work(fs, directory, say)
    segments = _find_segments(fs, directory, trust.start_offset, now)
    opening = _Opening(fs, directory, config, trust, segments, now, say)
    if trust.clean:
        opening.load_clean()
    else:
        opening.recover()
    return opening.finish()


def _find_segments(fs: FileSystem, directory: str, start_offset: int, now: Now) -> list[Segment]:
    segments = []
    names = set(fs.list(directory))
    for name in sorted(names):
        if name.endswith(LOG_SUFFIX) and name[:-4].isdigit():
            path = f"{directory}/{name}"
            segment = Segment(fs, directory, int(name[:-4]), fs.size(path), fs.modified_ms(path))
            segment.has_transaction_file = name[:-4] + TXN_INDEX_SUFFIX in names
            segments.append(segment)
    # A power failure may have kept any part of a deletion: what is below the log start is deleted again, as far as
    # what it tells of producers is written down.
    first = sum(segment.base_offset <= start_offset for segment in segments) - 1
    while first > 0 and not _has_snapshot(fs, segments[first]):
        first -= 1
    for gone in segments[: max(first, 0)]:
        _remove_files(fs, gone)
    segments = segments[max(first, 0) :]
    if not segments:
        segment = Segment(fs, directory, start_offset, 0, now.wall_ms)
        segment.create()
        segments.append(segment)
    return segments


def _remove_files(fs: FileSystem, segment: Segment) -> None:
    """Everything of a segment but the state of producers at its beginning."""
    segment.close()
    for path in map(segment.path, (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX, TXN_INDEX_SUFFIX)):
        if fs.exists(path):
            fs.remove(path)


def _has_snapshot(fs: FileSystem, segment: Segment) -> bool:
    """Whether the state of producers at the segment's beginning is on disk, whole; now, if not before."""
    path = segment.path(SNAPSHOT_SUFFIX)
    try:
        decode_snapshot(read_whole(fs, path), path)
    except (FileNotFoundError, CorruptLog):
        return False
    flush_file(fs, path)
    fs.flush_directory(segment.directory)
    return True


class _Opening:
    """The state of one opening: filled segment by segment."""

    def __init__(
        self,
        fs: FileSystem,
        directory: str,
        config: TopicConfig,
        trust: Trust,
        segments: list[Segment],
        now: Now,
        say: Callable[[str], None],
    ) -> None:
        self.now = now
        self.fs = fs
        self.directory = directory
        self.config = config
        self.trust = trust
        self.segments = segments
        self.say = say
        self.end_offset = segments[0].base_offset
        self.producers = ProducerStateMap(directory)
        self.epochs = self._read_epochs()
        self.epochs_lost = not self.epochs.entries

    def _read_epochs(self) -> LeaderEpochs:
        try:
            return LeaderEpochs.read(self.fs, f"{self.directory}/{LEADER_EPOCH_FILE}")
        except CorruptLog as error:
            self.say(f"{error}; leader epochs are rebuilt from the log")
            return LeaderEpochs()

    def finish(self) -> Log:
        self._check_nothing_is_missing()
        if self.end_offset < self.trust.start_offset:
            self._begin_at_start()
        if self.epochs_lost:
            self._rebuild_epochs()
        start_offset = max(self.trust.start_offset, self.segments[0].base_offset)
        self.epochs.truncate_from_end(self.end_offset)
        self.epochs.truncate_from_start(start_offset)
        # Everything that was found is on disk, and so below the high watermark.
        self.producers.advance_high_watermark(self.end_offset)
        log = Log(
            self.fs,
            self.directory,
            self.config,
            segments=self.segments,
            end_offset=self.end_offset,
            start_offset=start_offset,
            producers=self.producers,
            epochs=self.epochs,
            is_changed=not self.trust.clean and any(segment.size for segment in self.segments),
        )
        log.transactions_of(log.active)  # appended to from now on: damage is found here or never
        for segment in log.segments:
            segment.close()
        return log

    def _check_nothing_is_missing(self) -> None:
        if self.end_offset < self.trust.recovery_point:
            raise CorruptLog(
                f"{self.segments[-1].path()}: ends at offset {self.end_offset}, and everything below "
                f"{self.trust.recovery_point} had been flushed. Restore the file, or move the partition's "
                "directory away to give its messages up."
            )

    def _begin_at_start(self) -> None:
        """Records were deleted that had not been flushed, and then the power failed: what is left is deleted too."""
        self.say(
            f"{self.directory}: ends at offset {self.end_offset}, below its start at {self.trust.start_offset}; "
            "it begins anew there"
        )
        for segment in self.segments:
            _remove_files(self.fs, segment)
        self.end_offset = self.trust.start_offset
        segment = Segment(self.fs, self.directory, self.end_offset, 0, self.now.wall_ms)
        segment.create()
        self.segments = [segment]

    def _rebuild_epochs(self) -> None:
        """Without the file, every batch tells which epoch wrote it."""
        self.epochs = LeaderEpochs()
        for segment in self.segments:
            for found in scan_headers(segment.file, 0, segment.size):
                if found.header.leader_epoch > self.epochs.latest_epoch:
                    self.epochs.assign(found.header.leader_epoch, found.header.base_offset)

    # A clean stop

    def load_clean(self) -> None:
        for segment in self.segments[:-1]:
            self._load_sealed(segment)
        last = self.segments[-1]
        self.end_offset = last.base_offset
        if last.size:
            self._load_sealed(last)
            self.end_offset = self._end_of(last)
            last.bytes_since_index_entry = last.size - last.index.last_entry[1]
        else:
            last.start_indexes()  # its files may be of batches that were lost
        self._rebuild_producers(self.end_offset)
        self._remove_unused_snapshots()

    def _load_sealed(self, segment: Segment) -> None:
        if not len(segment.time_index) and not segment.has_untimed:
            if segment.size and segment.max_timestamp < 0:
                segment.rebuild_indexes(self.config.index_interval_bytes)
            return
        segment.max_timestamp, segment.offset_of_max_timestamp = segment.time_index.last_entry
        segment.first_timestamp = timestamp_of(header_at(segment.file, 0))
        if segment is not self.segments[-1]:
            if segment.indexes_rebuilt:
                self._write_indexes(segment)
            segment.forget_indexes()
            segment.close()

    def _write_indexes(self, segment: Segment) -> None:
        """Replace lost index files. Without room for them the next lookup rebuilds them in memory once more."""
        try:
            for file in segment.write_indexes():
                file.close()
        except OSError as error:
            self.say(f"{segment.path()}: its indexes could not be written: {error}")
        else:
            segment.indexes_rebuilt = False

    def _end_of(self, segment: Segment) -> int:
        position = segment.index.last_entry[1]
        end = segment.base_offset
        for found in scan_headers(segment.file, position, segment.size):
            end = found.header.last_offset + 1
            position = found.position + found.header.size
        if position != segment.size:
            raise CorruptLog(
                f"{segment.path()}: stopped cleanly, yet {segment.size - position} bytes behind the last batch"
            )
        return end

    # Anything else

    def recover(self) -> None:
        first = self._first_to_verify()
        for segment in self.segments[:first]:
            self._load_sealed(segment)
        doubtful = self.segments[first:]
        # An empty log has nothing to verify, and its first flush takes its directories along.
        if any(segment.size for segment in doubtful):
            for segment in doubtful:
                segment.file.flush()
            self.fs.flush_directory(self.directory)
            self.fs.flush_directory(parent_of(self.directory))
            for segment in doubtful:
                segment.file.drop_cache()
        base = doubtful[0].base_offset
        self.epochs.truncate_from_end(max(base, self.trust.recovery_point))
        self._remove_snapshots_above(max(base, self.trust.recovery_point))
        self._rebuild_producers(base)
        self.end_offset = base
        for index, segment in enumerate(doubtful):
            if index and self._is_behind_lost_tail(segment):
                reason = f"the next segment begins at {segment.base_offset}"
                self._cut(first + index - 1, Damage(doubtful[index - 1].size, reason))
                break
            if index and not self._has_state_of_roll(segment):
                self._write_snapshot(segment.base_offset)
            damage = self._verify(segment)
            if damage is not None:
                self._cut(first + index, damage)
                break
        if self._remove_untrue_transactions() or len(doubtful) > 1:
            self.fs.flush_directory(self.directory)

    def _remove_untrue_transactions(self) -> bool:
        """Remove transaction indexes that tell of batches the log has lost, before their offsets are given again.

        The active segment's is in memory now. A segment that has gone may have left its own behind.
        """
        sealed = {offset_name(segment.base_offset) for segment in self.segments[:-1]}
        untrue = [
            name
            for name in self.fs.list(self.directory)
            if name.endswith(TXN_INDEX_SUFFIX) and name.removesuffix(TXN_INDEX_SUFFIX) not in sealed
        ]
        for name in untrue:
            self.fs.remove(f"{self.directory}/{name}")
        self.segments[-1].has_transaction_file = False
        return bool(untrue)

    def _is_behind_lost_tail(self, segment: Segment) -> bool:
        """Whether offsets are missing in front of a segment that were neither deleted nor compacted away.

        Of a deletion below the log start a power failure may have kept any part; compaction keeps below the recovery
        point.
        """
        if segment.base_offset <= self.trust.start_offset:
            return False
        return segment.base_offset > self.end_offset >= self.trust.gaps_below

    def _has_state_of_roll(self, segment: Segment) -> bool:
        """Take the state as of the segment's beginning from the roll that began it, if it is known to be true.

        The segment in front of it may have been compacted since: then its batches do not tell all any more.
        """
        if segment.base_offset > self.trust.recovery_point or not self._load_snapshot(segment.base_offset):
            return False
        flush_file(self.fs, segment.path(SNAPSHOT_SUFFIX))
        return True

    def _write_snapshot(self, offset: int) -> None:
        """Producer state as of `offset`: the batches it came from may be deleted one day."""
        file = self.fs.open(self._snapshot_path(offset), "create")
        data = encode_snapshot(self.producers.to_snapshot())
        file.pwritev([data], 0)
        file.truncate(len(data))
        file.flush()
        file.close()

    def _first_to_verify(self) -> int:
        """The segment with the last offset below the recovery point: a flush may have ended there before the roll
        that wrote its indexes, so those may be lost."""
        first = 0
        for index, segment in enumerate(self.segments):
            if segment.base_offset < self.trust.recovery_point:
                first = index
        return first

    def _verify(self, segment: Segment) -> Damage | None:
        if segment.base_offset < self.end_offset:
            raise CorruptLog(
                f"{segment.path()}: begins at {segment.base_offset}, before the end {self.end_offset} of the "
                "segment in front of it"
            )
        segment.start_indexes()
        transactions = TransactionIndex(segment.base_offset)
        segment.set_transactions(transactions)
        interval = self.config.index_interval_bytes
        scan = VerifiedScan(segment.file, 0, segment.base_offset, gaps_below=self.trust.gaps_below)
        replay = self._replay
        for position, header in scan:
            segment.note_read_batch(header, position, interval)
            add_aborted(transactions, replay(segment, position, header))
        segment.size = scan.position
        self.end_offset = max(self.end_offset, scan.next_offset)
        if scan.damage is None and segment is not self.segments[-1]:
            for file in segment.write_indexes():
                file.flush()
                file.close()
        return scan.damage

    def _replay(self, segment: Segment, position: int, header: BatchHeader) -> CompletedTransaction | None:
        if header.leader_epoch > self.epochs.latest_epoch:
            self.epochs.assign(header.leader_epoch, header.base_offset)
        # Expiry counts from when the broker saw a producer, not from the times it put into its records.
        return replay_batch(self.producers, header, segment.file, position, self.now.wall_ms)

    def _cut(self, index: int, damage: Damage) -> None:
        segment = self.segments[index]
        later_segments = self.segments[index + 1 :]
        end = segment.file.size()
        zeros_from = content_end(segment.file, damage.position, end)
        later = None
        if zeros_from > damage.position:
            later = self._misplaced_batch(segment, damage, end)
            if later is None:
                later = find_later_batch(segment.file, damage.position, self.end_offset, end)
        if later is None:
            for following in later_segments:
                for found in VerifiedScan(following.file, 0, following.base_offset):
                    later = found
                    break
        below_recovery_point = self.end_offset < self.trust.recovery_point
        # A gap, and behind it a whole batch of an offset inside: it was no gap but a wrong offset, not a torn tail.
        steps_back = damage.after_gap and later is not None and later.header.base_offset < self.end_offset
        if below_recovery_point or steps_back or (later is not None and not self.trust.torn_tail_expected):
            behind = (
                f"a valid batch of offset {later.header.base_offset} is at {later.position}"
                if later is not None
                else f"everything below offset {self.trust.recovery_point} had been flushed"
            )
            raise CorruptLog(
                f"{segment.path()}: damaged at {damage.position} (offset {self.end_offset}): {damage.reason}; "
                f"{behind}, so this is not a torn tail. Nothing was changed. Inspect it with "
                f"`holdfast dump-log --verify --files {segment.path()}` and restore the file, or move the "
                "partition's directory away to give its messages up."
            )
        kept = []
        if zeros_from > damage.position:
            kept_end = min(end, zeros_from + ZEROS_KEPT)
            kept.append(keep_cut_bytes(self.fs, segment, damage.position, kept_end))
        segment.file.truncate(damage.position)
        segment.file.flush()
        if zeros_from == damage.position and not later_segments:
            return
        for following in later_segments:
            if following.file.size():
                kept.append(keep_cut_bytes(self.fs, following, 0, following.file.size()))
            _remove_files(self.fs, following)
        del self.segments[index + 1 :]
        self.fs.flush_directory(self.directory)
        self.say(
            f"{segment.path()}: cut {end - damage.position} bytes at {damage.position}, behind offset "
            f"{self.end_offset}: {damage.reason}; they were never acknowledged and are kept in "
            f"{', '.join(kept) or 'no file, being zeros'}"
        )

    @staticmethod
    def _misplaced_batch(segment: Segment, damage: Damage, end: int) -> Found | None:
        """The batch at the damaged place itself, if it is whole and only its offset does not fit."""
        for found in VerifiedScan(segment.file, damage.position, 0, end):
            return found
        return None

    # Producer state

    def _rebuild_producers(self, end_offset: int) -> None:
        """State as of `end_offset`: the snapshot taken there. Without it every batch is replayed.

        An older snapshot and what follows it would not do: of a transaction that was open then, compaction may have
        removed everything since, the marker too.
        """
        start = self.segments[0].base_offset
        if self._load_snapshot(end_offset) or end_offset <= start:
            return
        if self._load_snapshot(start):
            # It alone knows of producers whose batches are deleted. Their transactions have nothing here that could
            # be shown too early, and are open again from their next batch on.
            self.producers.forget_transactions()
        for segment in self.segments:
            if segment.base_offset >= end_offset:
                break
            if segment.base_offset > start:
                self._replace_snapshot(segment.base_offset)
            for found in scan_headers(segment.file, 0, segment.size):
                if found.header.base_offset >= end_offset:
                    break
                replay_batch(self.producers, found.header, segment.file, found.position, self.now.wall_ms)
        self._replace_snapshot(end_offset)

    def _replace_snapshot(self, offset: int) -> None:
        """Write a lost snapshot anew. Without room for it, the next start replays once more."""
        try:
            self._write_snapshot(offset)
            self.fs.flush_directory(self.directory)
        except OSError as error:
            self.say(f"{self.directory}: the state of producers at {offset} could not be written: {error}")

    def _load_snapshot(self, offset: int) -> bool:
        """Take the state as of `offset` from its file, if there is one and it is sound."""
        path = self._snapshot_path(offset)
        try:
            entries = decode_snapshot(read_whole(self.fs, path), path)
        except FileNotFoundError:
            return False
        except CorruptLog as error:
            self.say(f"{error}; producer state is rebuilt from the log")
            return False
        self.producers = ProducerStateMap.from_snapshot(entries, self.directory)
        return True

    def _remove_unused_snapshots(self) -> None:
        """Remove what earlier stops wrote at their ends, once there is one of this end."""
        used = {segment.base_offset for segment in self.segments} | {self.end_offset}
        found = self._snapshots()
        if self.end_offset not in found:
            return
        try:
            for offset in found:
                if offset not in used:
                    self.fs.remove(self._snapshot_path(offset))
        except OSError as error:
            self.say(f"{self.directory}: an old state of producers could not be removed: {error}")

    def _remove_snapshots_above(self, offset: int) -> None:
        """Remove what may be of batches that were not flushed and are lost: their offsets are given again."""
        for found in self._snapshots():
            if found > offset:
                self.fs.remove(self._snapshot_path(found))

    def _snapshots(self) -> list[int]:
        """The offsets there are states of producers of."""
        names = [name for name in self.fs.list(self.directory) if name.endswith(SNAPSHOT_SUFFIX)]
        stems = (name.removesuffix(SNAPSHOT_SUFFIX) for name in names)
        return [int(stem) for stem in stems if stem.isdigit() and offset_name(int(stem)) == stem]

    def _snapshot_path(self, offset: int) -> str:
        return f"{self.directory}/{offset_name(offset)}{SNAPSHOT_SUFFIX}"
