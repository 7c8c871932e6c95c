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

Offsets that were flushed and are in no file are a loss, whatever the start: see `lost_offsets`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple

from holdfast.atomic import flush_file, parent_of
from holdfast.broker.log.checkpoints import PARTITION_METADATA_FILE, encode_partition_metadata
from holdfast.broker.log.end_markers import add_aborted, rebuild_transactions, replay_batch
from holdfast.broker.log.index import TransactionIndex
from holdfast.broker.log.leader_epochs import EpochFiles, LeaderEpochs
from holdfast.broker.log.log import Log
from holdfast.broker.log.producer_state import CompletedTransaction, ProducerStateMap
from holdfast.broker.log.recovery_steps import (
    LostOffsets,
    Snapshots,
    cut_off,
    finish_interrupted_work,
    remove_files,
    settle_start,
)
from holdfast.broker.log.scan import ANYWHERE, Damage, VerifiedScan, find_later_batch, header_at, scan_headers
from holdfast.broker.log.segment import (
    LOG_SUFFIX,
    SNAPSHOT_SUFFIX,
    SUMS_SUFFIX,
    TXN_INDEX_SUFFIX,
    Segment,
    offset_name,
    timestamp_of,
)
from holdfast.broker.log.write_ahead import content_end
from holdfast.config.topic import TopicConfig
from holdfast.errors import CorruptLog
from holdfast.saying import Say, warn
from holdfast.seams import FileSystem, Now
from holdfast.wire.batch import BatchHeader


class Trust(NamedTuple):
    """What the rest of the data directory says about this partition."""

    clean: bool
    recovery_point: int
    start_offset: int
    torn_tail_expected: bool
    recovery_point_known: bool = True
    """Whether the file of recovery points was there to be read. Without it compaction may have been anywhere."""
    start_offset_known: bool = True
    """Whether the file of log starts was there to be read. Without it the first segment tells where the log
    starts."""
    has_gaps_anywhere: bool = False
    """Whether Apache Kafka has compacted the log: it goes as far as the active segment."""

    @property
    def gaps_below(self) -> int:
        """Our compaction keeps below the recovery point, so offsets are missing only there."""
        return self.recovery_point if self.recovery_point_known and not self.has_gaps_anywhere else ANYWHERE

    def may_have_lost(self, offset: int) -> bool:
        """Whether a power failure may have taken `offset` and what follows: nothing of that had been flushed."""
        is_unflushed = self.recovery_point_known and offset >= self.recovery_point
        return is_unflushed and self.torn_tail_expected and not self.clean


def create_log(fs: FileSystem, directory: str, config: TopicConfig, topic_id: bytes, now: Now) -> Log:
    """A new, empty log. Nothing of it is flushed: its first flush takes the files and both directories along."""
    fs.make_directory(directory)
    identity = f"{directory}/{PARTITION_METADATA_FILE}"
    with closing(fs.open(identity, "create")) as file:
        file.pwritev([encode_partition_metadata(topic_id)], 0)
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
        epoch_files=EpochFiles(fs, directory),
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
    *,
    accept_loss: bool = False,
) -> Log:
    """Open, or make, the log in `directory`; raise `CorruptLog` when it is damaged beyond its tail.

    With `accept_loss` an operator gives up the offsets that are missing: see `lost_offsets`.
    """
    lost = LostOffsets(fs, directory, say, accept_loss=accept_loss)
    if not fs.exists(directory):
        # Absent is new only where nothing had been flushed, or where the loss is given up.
        if trust.recovery_point > trust.start_offset and not accept_loss:
            lost.check(trust.start_offset, trust.recovery_point, "the directory is not there")
        fs.make_directory(directory)
        fs.flush_directory(parent_of(directory))
    finish_interrupted_work(fs, directory, say)
    trust = trust._replace(start_offset=settle_start(fs, directory, trust.start_offset))
    snapshots = Snapshots(fs, directory, say)
    segments = _find_segments(fs, directory, trust.start_offset, snapshots)
    segments = _with_the_first(fs, directory, segments, trust, lost, now)
    opening = _Opening(fs, directory, config, trust, segments, lost, now, say)
    if trust.clean:
        opening.load_clean()
    else:
        opening.recover()
    return opening.finish()


def _find_segments(fs: FileSystem, directory: str, start_offset: int, snapshots: Snapshots) -> list[Segment]:
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
    while first > 0 and not snapshots.is_durable(segments[first].base_offset):
        first -= 1
    for gone in segments[: max(first, 0)]:
        remove_files(fs, gone)
    return segments[max(first, 0) :]


def _with_the_first(
    fs: FileSystem, directory: str, segments: list[Segment], trust: Trust, lost: LostOffsets, now: Now
) -> list[Segment]:
    """The segments of a log that begins where it should; raises `MissingOffsets` when its beginning was lost."""
    start = trust.start_offset
    if segments and (segments[0].base_offset <= start or not trust.start_offset_known):
        return segments
    base = max(start, trust.recovery_point)
    if not segments and start < base:
        reason = f"there is no segment, and everything below {base} had been flushed"
        lost.check(start, base, reason)
    elif segments and not trust.may_have_lost(start):
        lost.check(start, segments[0].base_offset, f"{segments[0].path()} is the first segment there is")
        return segments
    # Nothing of it had been flushed: it is new, or a power failure has left what recovery will cut off.
    segment = Segment(fs, directory, base, 0, now.wall_ms)
    segment.create()
    return [segment, *segments]


@dataclass(eq=False, repr=False)
class _Opening:
    """The state of one opening: filled segment by segment."""

    fs: FileSystem
    directory: str
    config: TopicConfig
    trust: Trust
    segments: list[Segment]
    lost: LostOffsets
    now: Now
    say: Callable[[str], None]
    unwritten: list[Segment] = field(default_factory=list, init=False)
    """Sealed or closed segments whose index files were lost or damaged."""
    unproven: list[Segment] = field(default_factory=list, init=False)
    """Those of which no checksum proves the transaction index."""
    cut_bytes: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.warn: Say = lambda text: self.say(warn(text))
        self.end_offset = self.segments[0].base_offset
        self.snapshots = Snapshots(self.fs, self.directory, self.say)
        self.producers = ProducerStateMap(self.directory)
        self.epoch_files = EpochFiles(self.fs, self.directory)
        self.epochs = self.epoch_files.read(self.say)
        self.epochs_lost = not self.epochs.entries

    def finish(self) -> Log:
        self._check_end()
        self._rebuild_transactions()
        is_changed = self._write_rebuilt_indexes()
        if self.end_offset < self.trust.recovery_point:
            self._go_on_at(self.trust.recovery_point)
        if self.end_offset < self.trust.start_offset:
            self._begin_at_start()
        if self.epochs_lost:
            self._rebuild_epochs()
        start_offset = max(self.trust.start_offset, self.segments[0].base_offset)
        self.epochs.truncate_from_end(self.end_offset)
        self.epochs.truncate_from_start(start_offset)
        self._keep_epochs()
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
            epoch_files=self.epoch_files,
            is_changed=is_changed
            or (not self.trust.clean and any(segment.size for segment in self.segments)),
        )
        log.growth.cut_bytes = self.cut_bytes
        log.transactions_of(log.active)  # appended to from now on: damage is found here or never
        for segment in log.segments:
            segment.close()
        return log

    def _check_lost(self, end: int, reason: str) -> None:
        """The log has nothing from where it has been read to up to `end`; what is below its start was deleted."""
        first = max(self.end_offset, self.trust.start_offset)
        if first < end:
            self.lost.check(first, end, reason)

    def _check_end(self) -> None:
        flushed = self.trust.recovery_point
        self._check_lost(
            flushed,
            f"{self.segments[-1].path()} ends at offset {self.end_offset}, and everything below {flushed} had been "
            "flushed",
        )

    def _go_on_at(self, offset: int) -> None:
        """The end of the log is given up: seal what is left of it, and begin where no offset is given again."""
        self._write_sealed_indexes(self.segments[-1])
        self.snapshots.write(offset, self.producers)
        segment = Segment(self.fs, self.directory, offset, 0, self.now.wall_ms)
        segment.create()
        self.segments.append(segment)
        self.fs.flush_directory(self.directory)
        self.end_offset = offset

    def _begin_at_start(self) -> None:
        """Records were deleted that had not been flushed, and then the power failed: what is left is deleted too."""
        self.warn(
            f"{self.directory}: ends at offset {self.end_offset}, below its start at "
            f"{self.trust.start_offset}; it begins anew there"
        )
        for segment in self.segments:
            remove_files(self.fs, segment)
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

    def _keep_epochs(self) -> None:
        try:
            self.epoch_files.keep_sealed(self.epochs, self.segments[-1].base_offset)
        except OSError as error:
            self.warn(f"{self.directory}: its leader epochs could not be written: {error}")

    # A clean stop

    def load_clean(self) -> None:
        for segment in self.segments[:-1]:
            self._load_sealed(segment)
        last = self.segments[-1]
        if last.size:
            self._load_sealed(last)
            last.bytes_since_index_entry = last.size - last.index.last_entry[1]
        else:
            self._is_behind_lost_tail(last)
            # Its files may be of batches that were lost.
            last.start_indexes()
            last.set_transactions(TransactionIndex(last.base_offset))
            self.end_offset = last.base_offset
        self._check_end()
        self._rebuild_producers(self.end_offset)
        self.snapshots.remove_unused({segment.base_offset for segment in self.segments}, self.end_offset)

    def _load_sealed(self, segment: Segment) -> None:
        self._is_behind_lost_tail(segment)
        times = segment.time_index
        self.end_offset = segment.next_offset
        if segment.whole_bytes < segment.size:
            self._cut_short(segment)
        if segment.size and not self._proves_transactions(segment):
            self.unproven.append(segment)
        if not segment.size or not (len(times) or segment.has_untimed):
            if segment.size and segment.max_timestamp < 0:
                segment.rebuild_indexes(self.config.index_interval_bytes)
            return
        segment.max_timestamp, segment.offset_of_max_timestamp = times.last_entry
        segment.first_timestamp = timestamp_of(header_at(segment.file, 0))
        if segment.index_damage is not None:
            self.warn(f"{segment.index_damage}; rebuilt from the batches")
            self.unwritten.append(segment)
        elif segment is not self.segments[-1]:
            segment.forget_indexes()
        segment.close()

    def _cut_short(self, segment: Segment) -> None:
        """A file that was whole ends inside a batch: what is behind that was lost, and its remains are cut off."""
        position = segment.whole_bytes
        following = self.segments[self.segments.index(segment) + 1 :]
        end = following[0].base_offset if following else self.trust.recovery_point
        if self.end_offset >= end:
            raise CorruptLog(
                f"{segment.path()}: {segment.size - position} bytes behind the last batch are no batch"
            )
        self._check_lost(end, f"{segment.path()} is cut off inside a batch, at {position}")
        cut_off(self.fs, segment, position, segment.size, [])
        segment.size = position

    @staticmethod
    def _proves_transactions(segment: Segment) -> bool:
        try:
            return segment.transactions is not None
        except (FileNotFoundError, CorruptLog):
            return False

    def _rebuild_transactions(self) -> None:
        """Rebuild transaction indexes that nothing proves: without them readers would see what was aborted."""
        unproven = self.unproven
        if not unproven:
            return
        others = f" and {len(unproven) - 1} others" if len(unproven) > 1 else ""
        which = f"{unproven[0].path(TXN_INDEX_SUFFIX)}{others}"
        if any(self.fs.exists(segment.path(SUMS_SUFFIX)) for segment in self.segments):
            self.warn(f"{which}: lost or damaged, or its checksum is; rebuilt from the batches")
        else:
            self.say(f"{which}: without checksums, as earlier versions wrote them; rebuilt from the batches")
        segments = self.segments[: self.segments.index(unproven[-1]) + 1]
        for segment, index in zip(segments, rebuild_transactions(segments), strict=True):
            if segment in unproven:
                segment.set_transactions(index)
            segment.close()
        self.unwritten += [segment for segment in unproven if segment not in self.unwritten]

    def _write_rebuilt_indexes(self) -> bool:
        """Replace lost index files; whether the active segment is among them, whose files follow when it is closed.

        They are not flushed: checksums tell. Without room for them they are rebuilt again when they are needed.
        """
        for segment in self.unwritten:
            if segment is self.segments[-1]:
                continue
            try:
                for file in segment.write_indexes():
                    file.close()
            except OSError as error:
                self.warn(f"{segment.path()}: its indexes could not be written: {error}")
            else:
                segment.index_damage = None
                segment.forget_indexes()
        return self.segments[-1] in self.unwritten

    # Anything else

    def recover(self) -> None:
        first = self._first_to_verify()
        for segment in self.segments[:first]:
            self._load_sealed(segment)
        doubtful = self.segments[first:]
        self._is_behind_lost_tail(doubtful[0])
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
        self.snapshots.remove_above(max(base, self.trust.recovery_point))
        self._rebuild_producers(base)
        self.end_offset = base
        for index, segment in enumerate(doubtful):
            if index and self._is_behind_lost_tail(segment):
                reason = f"the next segment begins at {segment.base_offset}"
                self._cut(first + index - 1, Damage(doubtful[index - 1].size, reason))
                break
            if index and not self._has_state_of_roll(segment):
                self.snapshots.write(segment.base_offset, self.producers)
            damage = self._verify(segment)
            if damage is not None and self._cut(first + index, damage):
                break
            if segment is not self.segments[-1]:
                self._write_sealed_indexes(segment)
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
        """Whether a power failure has taken what was in front of a segment, all of which was not flushed.

        Of a deletion below the log start it may have kept any part. Any other gap is a loss.
        """
        if segment.base_offset < self.end_offset:
            raise CorruptLog(
                f"{segment.path()}: begins at {segment.base_offset}, before the end {self.end_offset} of the "
                "segment in front of it"
            )
        first = max(self.end_offset, self.trust.start_offset)
        if first < segment.base_offset and self.trust.may_have_lost(first):
            return True
        expected = f"{offset_name(self.end_offset)}{LOG_SUFFIX}"
        self._check_lost(segment.base_offset, f"they should be in {expected}, or in the segment before it")
        return False

    def _has_state_of_roll(self, segment: Segment) -> bool:
        """Take the state as of the segment's beginning from the roll that began it, if it is known to be true.

        The segment in front of it may have been compacted since: then its batches do not tell all any more.
        """
        if segment.base_offset > self.trust.recovery_point or not self._load_state(segment.base_offset):
            return False
        flush_file(self.fs, segment.path(SNAPSHOT_SUFFIX))
        return True

    def _first_to_verify(self) -> int:
        """The segment with the last offset below the recovery point: a flush may have ended there before the roll
        that wrote its indexes, so those may be lost."""
        flushed = sum(segment.base_offset < self.trust.recovery_point for segment in self.segments)
        return max(flushed - 1, 0)

    def _verify(self, segment: Segment) -> Damage | None:
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
        return scan.damage

    @staticmethod
    def _write_sealed_indexes(segment: Segment) -> None:
        for file in segment.write_indexes():
            file.flush()
            file.close()

    def _replay(self, segment: Segment, position: int, header: BatchHeader) -> CompletedTransaction | None:
        if header.leader_epoch > self.epochs.latest_epoch:
            self.epochs.assign(header.leader_epoch, header.base_offset)
        # Expiry counts from when the broker saw a producer, not from the times it put into its records.
        return replay_batch(self.producers, header, segment.file, position, self.now.wall_ms)

    def _cut(self, index: int, damage: Damage) -> bool:
        """Cut a segment off at a bad place; whether the log ends there, and so what follows is cut off as well."""
        segment = self.segments[index]
        following = self.segments[index + 1 :]
        end = segment.file.size()
        zeros_from = content_end(segment.file, damage.position, end)
        here = None
        if zeros_from > damage.position:
            # The batch at the damaged place itself, if it is whole and only its offset does not fit.
            here = next(iter(VerifiedScan(segment.file, damage.position, 0, end)), None)
            if here is None:
                here = find_later_batch(segment.file, damage.position, self.end_offset, end)
        behind = (found for other in following for found in VerifiedScan(other.file, 0, other.base_offset))
        later = here or next(behind, None)
        bad_place = f"damaged at {damage.position} (offset {self.end_offset}): {damage.reason}"
        # A gap, and behind it a whole batch of an offset inside: it was no gap but a wrong offset, not a torn tail.
        steps_back = damage.after_gap and later is not None and later.header.base_offset < self.end_offset
        is_lost_tail = self.trust.may_have_lost(self.end_offset)
        is_cut_short = here is None and later is not None and later.header.base_offset > self.end_offset
        if later is not None and (steps_back or not (is_lost_tail or is_cut_short)):
            raise CorruptLog(
                f"{segment.path()}: {bad_place}; a valid batch of offset {later.header.base_offset} is at "
                f"{later.position}, so this is not a torn tail. Nothing was changed. Inspect it with "
                f"`holdfast dump-log --verify --files {segment.path()}` and restore the file."
            )
        log_ends = later is None or is_lost_tail
        lost_end = self.trust.recovery_point if later is None or log_ends else later.header.base_offset
        self._check_lost(lost_end, f"{segment.path()} is {bad_place}")
        gone = following if log_ends else []
        cut_bytes = end - damage.position + sum(each.file.size() for each in gone)
        kept = cut_off(self.fs, segment, damage.position, zeros_from, gone)
        self.segments = [segment for segment in self.segments if segment not in gone]
        if kept or gone:
            self.cut_bytes += cut_bytes
            fate = "were given up" if self.end_offset < lost_end else "were never acknowledged with acks=all"
            if self.config.holdfast_flush == "os":
                fate = "may have been acknowledged (holdfast.flush=os)"
            self.warn(
                f"{segment.path()}: cut {cut_bytes} bytes at {damage.position}, from offset {self.end_offset} "
                f"on: {damage.reason}; they {fate} and are kept in "
                f"{', '.join(kept) or 'no file, being zeros'}"
            )
        return log_ends

    # Producer state

    def _rebuild_producers(self, end_offset: int) -> None:
        """State as of `end_offset`: the snapshot taken there. Without it every batch is replayed.

        An older snapshot and what follows it would not do: of a transaction that was open then, compaction may have
        removed everything since, the marker too.
        """
        start = self.segments[0].base_offset
        if self._load_state(end_offset) or end_offset <= start:
            return
        if self._load_state(start):
            # It alone knows of producers whose batches are deleted. Their transactions have nothing here that could
            # be shown too early, and are open again from their next batch on.
            self.producers.forget_transactions()
        for segment in self.segments:
            if segment.base_offset >= end_offset:
                break
            if segment.base_offset > start:
                self.snapshots.replace(segment.base_offset, self.producers)
            for found in scan_headers(segment.file, 0, segment.size):
                if found.header.base_offset >= end_offset:
                    break
                replay_batch(self.producers, found.header, segment.file, found.position, self.now.wall_ms)
        self.snapshots.replace(end_offset, self.producers)

    def _load_state(self, offset: int) -> bool:
        """Take the state as of `offset` from its snapshot, if there is one and it is sound."""
        producers = self.snapshots.load(offset)
        if producers is not None:
            self.producers = producers
        return producers is not None
