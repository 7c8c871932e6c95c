"""One partition's log with transactions on a simulated disk, beside a model of what readers should see.

The model is the plain history of what was appended. Everything else, which transactions are open, where the last
stable offset is, what is committed, which entries the transaction index must have, is worked out from it anew each
time, by counting: slow, and too simple to be wrong in the same way as the log.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple, cast
from uuid import UUID

from tests.support.partition_logs import DIRECTORY, MAP_BYTES, START_MS, Pair, swap_in

from holdfast.atomic import flush_each
from holdfast.broker.log.cleaner import Cleaned
from holdfast.broker.log.compaction import examine, plan_round
from holdfast.broker.log.end_markers import build_end_marker, read_end_marker
from holdfast.broker.log.index import AbortedEntry
from holdfast.broker.log.log import Log, PendingFlush
from holdfast.broker.log.producer_state import Accept
from holdfast.broker.log.recovery import Trust, open_log
from holdfast.broker.log.segment import SNAPSHOT_SUFFIX
from holdfast.broker.log.tasks import run
from holdfast.broker.node.directories import DirectoryFailures, LogDirectory
from holdfast.broker.node.hosted import HostedPartition
from holdfast.config.topic import TopicConfig
from holdfast.seams import Now
from holdfast.testing.committed_reader import Shown, read_committed
from holdfast.testing.disk import PowerLost, SimulatedDisk
from holdfast.wire.batch import Record, build_batch, check_whole
from holdfast.wire.codecs import Codec
from holdfast.wire.control_records import EndTransactionMarker


class Written(NamedTuple):
    """One data batch of the history."""

    base_offset: int
    pairs: tuple[Pair, ...]
    producer_id: int
    is_transactional: bool

    @property
    def next_offset(self) -> int:
        return self.base_offset + len(self.pairs)


class Ended(NamedTuple):
    """One marker of the history."""

    base_offset: int
    producer_id: int
    is_commit: bool

    @property
    def next_offset(self) -> int:
        return self.base_offset + 1


History = list[Written | Ended]


class Transaction:
    def __init__(self, producer_id: int, first_offset: int) -> None:
        self.producer_id = producer_id
        self.first_offset = first_offset
        self.marker: Ended | None = None


class Expected(NamedTuple):
    """What a history comes to when everything below the high watermark is committed."""

    last_stable_offset: int
    shown: list[Shown]
    """The records a read_committed consumer sees, in order."""
    open_transactions: list[tuple[int, int]]
    aborted: list[AbortedEntry]


def expect(history: Sequence[Written | Ended], high_watermark: int, start_offset: int = 0) -> Expected:
    transactions: list[Transaction] = []
    of_batch: dict[int, Transaction] = {}
    aborted: list[AbortedEntry] = []
    for entry in history:
        mine = [t for t in transactions if t.producer_id == entry.producer_id and t.marker is None]
        if isinstance(entry, Written):
            if entry.is_transactional:
                if not mine:
                    mine = [Transaction(entry.producer_id, entry.base_offset)]
                    transactions += mine
                of_batch[entry.base_offset] = mine[0]
        elif mine:
            mine[0].marker = entry
            if not entry.is_commit:
                still_open = [t.first_offset for t in transactions if t.marker is None]
                stable = min(still_open, default=entry.next_offset)
                aborted.append(
                    AbortedEntry(entry.producer_id, mine[0].first_offset, entry.base_offset, stable)
                )
    unstable = [
        t.first_offset for t in transactions if t.marker is None or t.marker.base_offset >= high_watermark
    ]
    stable = min(max(min(unstable, default=high_watermark), start_offset), high_watermark)
    shown: list[Shown] = []
    for entry in history:
        if isinstance(entry, Ended) or entry.base_offset >= stable:
            continue
        marker = of_batch[entry.base_offset].marker if entry.is_transactional else None
        if not entry.is_transactional or (marker is not None and marker.is_commit):
            shown += [
                Shown(entry.base_offset + delta, key, value)
                for delta, (key, value) in enumerate(entry.pairs)
                if start_offset <= entry.base_offset + delta < stable
            ]
    undecided = [(t.first_offset, t.producer_id) for t in transactions if t.marker is None]
    return Expected(stable, shown, undecided, aborted)


class TransactionalLog:
    """A log that is written to, flushed, restarted, cut off and compacted, and its history."""

    def __init__(self, config: TopicConfig, disk: SimulatedDisk | None = None) -> None:
        self.disk = disk or SimulatedDisk()
        self.disk.prepare("/data")
        self.config = config
        self.now_ms = START_MS
        self.history: History = []
        self.recovery_point = 0
        """As the checkpoint file would have it: at most what was flushed."""
        self.durable = 0
        self.start_offset = 0
        self.clean_to: int | None = None
        self.touched_to = 0
        """No round of compaction has been further, whether it was finished or not."""
        self.said: list[str] = []
        self._pending: PendingFlush | None = None
        self.hosted = self._open(clean=False, torn=True)

    @property
    def log(self) -> Log:
        return self.hosted.log

    @property
    def now(self) -> Now:
        return Now(self.now_ms, self.now_ms)

    @property
    def high_watermark(self) -> int:
        return self.hosted.offsets.high_watermark.offset

    def _open(self, *, clean: bool, torn: bool) -> HostedPartition:
        self._pending = None
        trust = Trust(clean, self.recovery_point, self.start_offset, torn)
        log = open_log(self.disk, DIRECTORY, self.config, trust, self.now, self.said.append)
        directory = LogDirectory(self.disk, "/data", cast(DirectoryFailures, None))
        return HostedPartition(
            "t", UUID(int=1), 0, 0, log, directory, lambda where, _: self.said.append(where)
        )

    # Writing

    def epoch_of(self, producer_id: int) -> int:
        for producer in self.log.producers.describe():
            if producer.producer_id == producer_id:
                return producer.producer_epoch
        return 0

    def write(
        self,
        pairs: Sequence[Pair],
        producer_id: int = -1,
        *,
        transactional: bool = True,
        codec: Codec = Codec.NONE,
    ) -> int:
        """Append a batch, in the producer's transaction unless it has none; returns its first offset."""
        is_transactional = transactional and producer_id >= 0
        batches = self.log.producers.batches_of(producer_id)
        batch = build_batch(
            [Record(index, index, key, value) for index, (key, value) in enumerate(pairs)],
            base_timestamp=self.now_ms,
            codec=codec,
            producer_id=producer_id,
            producer_epoch=self.epoch_of(producer_id) if producer_id >= 0 else -1,
            base_sequence=-1 if producer_id < 0 else batches[-1].last_sequence + 1 if batches else 0,
            is_transactional=is_transactional,
        )
        header = check_whole(batch)
        if producer_id >= 0:
            verdict = self.log.producers.check(header, is_client=True)
            assert isinstance(verdict, Accept), verdict
        stored = self.log.append(header, batch, 0, self.now)
        self.history.append(Written(stored.base_offset, tuple(pairs), producer_id, is_transactional))
        self._appended()
        return stored.base_offset

    def end(self, producer_id: int, *, is_commit: bool, bumps_epoch: bool = False) -> int:
        """Append a marker; returns its offset. With `bumps_epoch` as KIP-890 ends transactions."""
        epoch = self.epoch_of(producer_id) + bumps_epoch
        self.log.producers.check_marker(producer_id, epoch, 0, transaction_version=2 if bumps_epoch else 0)
        batch = build_end_marker(producer_id, epoch, EndTransactionMarker(is_commit, 0), self.now_ms)
        stored = self.log.append(check_whole(batch), batch, 0, self.now)
        self.history.append(Ended(stored.base_offset, producer_id, is_commit))
        self._appended()
        return stored.base_offset

    def _appended(self) -> None:
        if not self.hosted.flushes_in_groups:
            self.hosted.became_durable(self.log.end_position)

    def roll(self) -> None:
        if self.log.active.size:
            self.log.roll(self.now)

    def begin_flush(self) -> None:
        """What is appended from now on is for the flush after this one."""
        if self._pending is None:
            self._pending = self.log.begin_flush()

    def flush(self) -> None:
        """Let the flush under way return, or a whole one if there is none."""
        self.begin_flush()
        assert self._pending is not None
        targets, end = self._pending
        self._pending = None
        flush_each(self.disk, targets)
        self.log.advance_recovery_point(end)
        self.hosted.became_durable(end)
        self.durable = max(self.durable, end.offset)

    def checkpoint(self) -> None:
        self.recovery_point = self.durable

    def delete_below(self, offset: int) -> None:
        """DeleteRecords of what was flushed: the new start is durable, then segments go."""
        self.start_offset = max(self.start_offset, min(offset, self.durable))
        self.hosted.advance_start(self.start_offset)
        run(self.disk, "remove", {"paths": self.log.remove(self.log.segments_before(self.start_offset))})

    # Ending, and beginning again

    def restart(self, *, power_lost_after: int | None = None) -> None:
        """Stop cleanly and start; or until the power fails after so many operations of the stop."""
        if power_lost_after is not None:
            self.disk.lose_power_after(power_lost_after)
        try:
            self.log.flush_and_close()
        except PowerLost:
            self.lose_power()
            return
        self.disk.clear_faults()
        self.durable = self.recovery_point = self.log.end_offset
        self.hosted = self._open(clean=True, torn=False)

    def kill(self) -> None:
        """The process dies; the page cache does not."""
        self.disk.kill()
        self.reopen(clean=False, torn=False)
        assert not self.history or self.log.end_offset >= self.history[-1].next_offset

    def lose_power(self) -> None:
        self.disk.crash()
        self.reopen(clean=False, torn=True)

    def reopen(self, *, clean: bool, torn: bool = False) -> None:
        """Start on what the disk holds now; the history ends where the log does."""
        self.disk.clear_faults()
        self.hosted = self._open(clean=clean, torn=torn)
        end_offset = self.log.end_offset
        assert end_offset >= self.durable
        self.durable = end_offset
        self.history = [entry for entry in self.history if entry.next_offset <= end_offset]

    def lose_snapshots(self, *, clean: bool) -> None:
        """Between an end of the process and a new start somebody deletes every producer snapshot."""
        if clean:
            self.log.flush_and_close()
            self.durable = self.recovery_point = self.log.end_offset
        else:
            self.disk.kill()
        for name in self.disk.list(DIRECTORY):
            if name.endswith(SNAPSHOT_SUFFIX):
                self.disk.remove(f"{DIRECTORY}/{name}")
        self.reopen(clean=clean)

    # Compacting

    def compact(self, map_bytes: int = MAP_BYTES, *, power_lost_after: int | None = None) -> Cleaned | None:
        """A round, swapped in; or until the power fails after so many operations on the disk, and a new start."""
        if power_lost_after is None:
            return self._compact(map_bytes)
        self.disk.lose_power_after(power_lost_after)
        cleaned = None
        with suppress(PowerLost):
            cleaned = self._compact(map_bytes)
        self.lose_power()
        return cleaned

    def age(self, wait_ms: int) -> None:
        """Round after round with time in between, until what may go at all has gone."""
        for number in range(4):
            self.write([(b"age", b"%d" % number)])
            self.roll()
            self.flush()
            self.flush()
            self.checkpoint()
            self._compact(MAP_BYTES)
            self.now_ms += wait_ms

    def _compact(self, map_bytes: int) -> Cleaned | None:
        log, offsets = self.log, self.hosted.offsets
        bound = min(offsets.last_stable_offset, self.recovery_point)
        dirt = examine(log, self.clean_to, bound, offsets.high_watermark, self.now)
        if not dirt.dirty_bytes:
            return None
        self.touched_to = max(self.touched_to, dirt.bound)
        asked = plan_round(log, dirt, offsets.high_watermark, self.now, map_bytes)
        cleaned = Cleaned.from_json(run(self.disk, "compact", asked.to_json()))
        swap_in(self.disk, log, cleaned)
        self.clean_to = cleaned.end_offset
        return cleaned

    # Looking

    def expected(self) -> Expected:
        return expect(self.history, self.high_watermark, self.start_offset)

    def shown(self, offset: int | None = None, max_bytes: int = 1) -> list[Shown]:
        """What a read_committed consumer sees."""
        end = self.hosted.readable_end(read_committed=True)
        return read_committed(self.log, end, offset=offset, max_bytes=max_bytes)

    def check(self) -> None:
        """A reader sees what the history says, from every offset and in fetches of every size; without compaction."""
        expected = self.expected()
        assert self.hosted.offsets.last_stable_offset == expected.last_stable_offset
        assert self.log.producers.ongoing_transactions == expected.open_transactions
        for max_bytes in (1, 250, 1 << 20):
            assert self.shown(max_bytes=max_bytes) == expected.shown
        for offset in range(self.start_offset, expected.last_stable_offset + 1):
            assert self.shown(offset) == [shown for shown in expected.shown if shown.offset >= offset]
        first = self.log.segments[0].base_offset
        told = [entry for entry in expected.aborted if entry.last_offset >= first]
        if self.start_offset:
            # Where a transaction began, and what else was open, may be known no more.
            assert [entry[2] for entry in self.index_entries()] == [entry[2] for entry in told]
        else:
            assert self.index_entries() == told

    def index_entries(self) -> list[AbortedEntry]:
        return [entry for segment in self.log.segments for entry in self.log.transactions_of(segment).entries]

    def markers(self) -> dict[int, bool]:
        """Offset and outcome of the markers in the log that have not been emptied."""
        found: dict[int, bool] = {}
        for place in self.log.batches_from(self.log.segments[0].base_offset):
            if place.header.is_control:
                segment = self.log.segments[self.log.segment_for(place.header.base_offset)]
                marker = read_end_marker(segment.file.pread(place.header.size, place.position))
                if marker is not None:
                    found[place.header.base_offset] = marker.is_commit
        return found
