"""What must hold of records: none lost, none twice, none changed, in order, to every reader alike.

RecordsChecker
    acknowledged-lost    acknowledged as durable and not deleted: read by every later reader, at its offset
    offset-reused        an offset once acknowledged as durable or shown never holds anything else
    stored-twice         a batch has one offset, in one partition
    changed              what is read is what was sent, whole batches only
    out-of-order         batches of one producer lie in the order they were sent
    refused-but-stored   what the broker refused is never read
    watermark-moved-back the end shown to clients never moves back, and no record is shown beyond it
    stable-moved-back    nor does the last stable offset, and it is never beyond the end
    start-moved-back     the start shown to clients never moves back, nor forward unasked
    gap                  readers see every offset from where they ask
    sequence-lost        a batch that follows a producer's last acknowledged one is never out of sequence
CompactionChecker
    compacted-lost       of each key, the last acknowledged record that is committed or in no transaction is shown, or
                         a later one; a tombstone may be gone, and then nothing older of its key is left
LookupsChecker
    time-lookup          a lookup finds the first record of at least that time, and tells its time

Three kinds of partition promise less, and the history says which they are: those that expire, those that are
compacted (records go one by one, a later one of the same key must stay), and those whose records are not flushed before
they are acknowledged. Of the last, a loss of the page cache may take any tail; what lies below the cut stays as it was.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field
from typing import NamedTuple

from tests.support import history
from tests.support.checkers_coordinators import TransactionsChecker
from tests.support.history import Checker, Partition, broken


class SentBatch(NamedTuple):
    """A batch as its producer sent it."""

    partition: Partition
    producer: str
    number: int
    values: tuple[bytes, ...]
    timestamp: int = -1

    def __str__(self) -> str:
        return f"batch {self.number} of {self.producer} ({len(self.values)} records)"


class StoredMarker(NamedTuple):
    """The end of a transaction, as the log shows it."""

    marker: history.Marker

    def __str__(self) -> str:
        return f"{self.marker.kind} marker of producer {self.marker.producer_id}"


Owner = SentBatch | StoredMarker


@dataclass(slots=True)
class PartitionHistory:
    owner: dict[int, Owner] = field(default_factory=dict)
    """What is at each offset that was acknowledged as durable or shown; it may never change."""
    base_of: dict[tuple[str, int], int] = field(default_factory=dict)
    """Where each of those batches lies, by (producer, number)."""
    order: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """(number, base offset) of each producer's batches, by number."""
    epochs: dict[int, int] = field(default_factory=dict)
    """Leader epoch of batches shown, by base offset."""
    end_floor: int = 0
    """Every later reader must be shown an end at least here."""
    stable_floor: int = 0
    """Every later reader must be shown a last stable offset at least here."""
    start_floor: int = 0
    """The log start that was shown or acknowledged."""
    start_ceiling: int = 0
    """How far deletions that were asked for may have moved the log start."""
    may_expire: bool = False
    compacted: bool = False
    may_be_lost: bool = False
    """Acknowledged before it is flushed: losing the page cache may take any tail."""
    before_loss: PartitionHistory | None = None
    """What was known before the page cache was last lost, as far as the log may still hold it."""

    def after_loss(self) -> PartitionHistory:
        """The page cache is gone: a tail of the log may be, too."""
        known = self
        if self.before_loss is not None:
            known.owner = {**self.before_loss.owner, **self.owner}
            known.base_of = {**self.before_loss.base_of, **self.base_of}
        known.before_loss = None
        return PartitionHistory(
            start_ceiling=max(self.start_ceiling, self.start_floor),
            may_expire=self.may_expire,
            compacted=self.compacted,
            may_be_lost=True,
            before_loss=known,
        )

    def cut(self, offset: int) -> None:
        """Something new is at `offset`: nothing older is left from there on."""
        before = self.before_loss
        if before is not None:
            before.owner = {at: owner for at, owner in before.owner.items() if at < offset}
            before.base_of = {key: base for key, base in before.base_of.items() if base < offset}


class _Floor(NamedTuple):
    end: int = 0
    start: int = 0
    stable: int = 0


class RecordsChecker(Checker):
    def __init__(self) -> None:
        self._partitions: dict[Partition, PartitionHistory] = {}
        self._batches: dict[tuple[str, int], SentBatch] = {}
        self._sent_as: dict[bytes, tuple[SentBatch, int]] = {}
        """The batch of each value, and its place in it."""
        self._refused: set[tuple[str, int]] = set()
        self._floors: dict[tuple[str, Partition], _Floor] = {}
        self.handlers = {
            history.BatchSent: self._sent,
            history.BatchAcknowledged: self._acknowledged,
            history.BatchRefused: self._refuse,
            history.ReadBegun: self._begin,
            history.BatchesRead: self._read,
            history.ReadOutOfRange: self._out_of_range,
            history.OffsetsListed: self._listed,
            history.DeletionRequested: self._deletion_requested,
            history.DeletionAcknowledged: self._deleted,
            history.ExpiryAllowed: self._expiry_allowed,
            history.CompactionAllowed: self._compaction_allowed,
            history.LossAllowed: self._loss_allowed,
            history.PageCacheLost: self._page_cache_lost,
            history.ExpiryForgotten: self._expiry_forgotten,
            history.SequenceRefused: self._sequence_refused,
        }

    def end_floor(self, partition: Partition) -> int:
        """The end every reader that begins now must be shown, or more."""
        return self.of(partition).end_floor

    def of(self, partition: Partition) -> PartitionHistory:
        found = self._partitions.get(partition)
        if found is None:
            found = self._partitions[partition] = PartitionHistory()
        return found

    # Sending

    def _sent(self, event: history.BatchSent) -> None:
        batch = SentBatch(event.partition, event.producer, event.number, event.values, event.timestamp)
        self._batches[batch.producer, batch.number] = batch
        for index, value in enumerate(batch.values):
            if value in self._sent_as:
                raise ValueError(f"a history needs unique values; {value!r} was sent before")
            self._sent_as[value] = (batch, index)

    def _acknowledged(self, event: history.BatchAcknowledged) -> None:
        batch = self._batches[event.producer, event.number]
        if event.base_offset < 0:
            broken("changed", f"{batch} was acknowledged at offset {event.base_offset}")
        if not event.durable:
            return
        self._claim(batch, event.base_offset, "was acknowledged")
        partition = self.of(event.partition)
        partition.end_floor = max(partition.end_floor, event.base_offset + len(batch.values))

    def _refuse(self, event: history.BatchRefused) -> None:
        key = event.producer, event.number
        self._refused.add(key)
        if key in self.of(event.partition).base_of:
            broken(
                "refused-but-stored",
                f"{self._batches[key]} was refused after it had been shown or acknowledged",
            )

    def _claim(self, batch: SentBatch, base: int, how: str) -> None:
        """The batch is at `base`, for ever."""
        key = batch.producer, batch.number
        partition = self.of(batch.partition)
        known = partition.base_of.get(key)
        if known is not None:
            if known != base:
                broken("stored-twice", f"{batch} {how} at {base} of {batch.partition}, and is at {known}")
            return
        if key in self._refused:
            broken("refused-but-stored", f"{batch} {how} at {base} of {batch.partition}, and was refused")
        self._follow_loss(partition, batch, base)
        for offset in range(base, base + len(batch.values)):
            self._own(partition, offset, batch, f"{batch} {how} at {base} of {batch.partition}")
        partition.base_of[key] = base
        self._place(partition, batch, base)

    def _own(self, partition: PartitionHistory, offset: int, owner: Owner, what: str) -> None:
        other = partition.owner.get(offset)
        if other is not None and other != owner:
            broken("offset-reused", f"{what}; {offset} holds {other}")
        partition.owner[offset] = owner

    def _follow_loss(self, partition: PartitionHistory, batch: SentBatch, base: int) -> None:
        """Where the log was before the page cache was lost, or behind the place where it was cut."""
        before = partition.before_loss
        if before is None:
            return
        known = before.base_of.get((batch.producer, batch.number))
        if known == base:
            return
        if known is not None:
            partition.cut(known)
        partition.cut(base)

    def _place(self, partition: PartitionHistory, batch: SentBatch, base: int) -> None:
        order = partition.order.setdefault(batch.producer, [])
        entry = (batch.number, base)
        at = bisect_left(order, entry)
        before = order[at - 1] if at else None
        after = order[at] if at < len(order) else None
        if (before is not None and before[1] > base) or (after is not None and after[1] < base):
            neighbour = before if before is not None and before[1] > base else after
            broken(
                "out-of-order", f"{batch} is at {base} of {batch.partition}, but (number, offset) {neighbour}"
            )
        insort(order, entry)

    # Reading

    def _begin(self, event: history.ReadBegun) -> None:
        partition = self.of(event.partition)
        self._floors[event.reader, event.partition] = _Floor(
            partition.end_floor, partition.start_floor, partition.stable_floor
        )

    def floor(self, reader: str, partition: Partition) -> _Floor:
        """What a reader's answer must show at least: what was known when its request left."""
        return self._floors.get((reader, partition), _Floor())

    def _read(self, event: history.BatchesRead) -> None:
        partition = self.of(event.partition)
        floor = self.floor(event.reader, event.partition)
        name = f"{event.reader} at {event.position} of {event.partition}"
        self._check_end(partition, floor, event.high_watermark, name)
        if event.log_start >= 0:
            self._check_start(partition, floor, event.log_start, name)
        if event.last_stable >= 0:
            self._check_stable(partition, floor, event.last_stable, event.high_watermark, name)
        end = event.last_stable if event.committed_only else event.high_watermark
        position = event.position
        for index, stored in enumerate(event.batches):
            follows = stored.base_offset == position if index else stored.base_offset <= position
            if not follows and not (partition.compacted and stored.base_offset > position):
                broken("gap", f"{name}: expected {position}, read a batch at {stored.base_offset}")
            if stored.next_offset <= position:
                broken(
                    "gap",
                    f"{name}: expected {position}, read a batch of {stored.base_offset} "
                    f"to {stored.next_offset - 1}",
                )
            self._check_stored(event.partition, partition, stored, name)
            position = stored.next_offset
        if position > end and event.batches:
            broken("watermark-moved-back", f"{name}: shown up to {position}, beyond the end {end}")
        if not event.batches and not event.limited and position < end and not partition.compacted:
            broken("acknowledged-lost", f"{name}: nothing, although the end is {end}")

    def _check_stored(
        self, identity: Partition, partition: PartitionHistory, stored: history.StoredBatch, name: str
    ) -> None:
        """A stored batch is one or more sent batches, whole and unchanged, or what compaction left of one."""
        base = stored.base_offset
        known = partition.epochs.setdefault(base, stored.leader_epoch)
        if known != stored.leader_epoch:
            broken("changed", f"{name}: leader epoch {stored.leader_epoch} at {base}, and before {known}")
        if stored.marker is not None:
            owner = StoredMarker(stored.marker)
            before = partition.before_loss
            if before is not None and before.owner.get(base) != owner:
                partition.cut(base)
            self._own(partition, base, owner, f"{name}: {owner} at {base}")
            return
        if not stored.values and not partition.compacted:
            broken("changed", f"{name}: an empty batch at {base}")
        if partition.compacted:
            self._check_remains(identity, stored, name)
            return
        index = 0
        while index < len(stored.values):
            batch = self._recognise(identity, stored.values[index], base + index, name)[0]
            if stored.values[index : index + len(batch.values)] != batch.values:
                broken("changed", f"{name}: {batch} at {base + index} was not sent so")
            self._claim(batch, base + index, "was read")
            index += len(batch.values)

    def _check_remains(self, identity: Partition, stored: history.StoredBatch, name: str) -> None:
        for offset, value in zip(stored.record_offsets, stored.values, strict=True):
            batch, index = self._recognise(identity, value, offset, name)
            self._claim(batch, offset - index, "was read")

    def _recognise(self, identity: Partition, value: bytes, offset: int, name: str) -> tuple[SentBatch, int]:
        found = self._sent_as.get(value)
        if found is None:
            broken("changed", f"{name}: {value[:40]!r} at {offset} was not sent so")
        if found[0].partition != identity:
            broken("changed", f"{name}: {found[0]} was sent to {found[0].partition}")
        return found

    # Ends

    def _check_end(self, partition: PartitionHistory, floor: _Floor, end: int, name: str) -> None:
        if end < floor.end:
            last = partition.owner.get(floor.end - 1)
            rule = "watermark-moved-back" if last is None else "acknowledged-lost"
            broken(
                rule, f"{name}: the end is {end}, and was shown or acknowledged up to {floor.end} ({last})"
            )
        partition.end_floor = max(partition.end_floor, end)

    def _check_stable(
        self, partition: PartitionHistory, floor: _Floor, stable: int, end: int, name: str
    ) -> None:
        if stable < floor.stable or stable > end:
            broken(
                "stable-moved-back",
                f"{name}: the last stable offset is {stable}; {floor.stable} was shown, the end is {end}",
            )
        partition.stable_floor = max(partition.stable_floor, stable)

    def _check_start(self, partition: PartitionHistory, floor: _Floor, start: int, name: str) -> None:
        if start < floor.start:
            broken("start-moved-back", f"{name}: the log starts at {start}, and started at {floor.start}")
        asked = partition.start_ceiling
        if start > asked and not partition.may_expire:
            broken("start-moved-back", f"{name}: the log starts at {start}; deletion was asked up to {asked}")
        partition.start_floor = max(partition.start_floor, start)

    def _out_of_range(self, event: history.ReadOutOfRange) -> None:
        partition = self.of(event.partition)
        floor = self.floor(event.reader, event.partition)
        if partition.may_expire or event.position < partition.start_ceiling:
            return
        if event.position <= floor.end:
            broken(
                "acknowledged-lost",
                f"{event.reader} at {event.position} of {event.partition}: out of range, below {floor.end}",
            )

    def _listed(self, event: history.OffsetsListed) -> None:
        partition = self.of(event.partition)
        floor = self.floor(event.reader, event.partition)
        name = f"{event.reader} listing {event.partition}"
        if event.end >= 0:
            self._check_end(partition, floor, event.end, name)
        if event.stable >= 0:
            self._check_stable(partition, floor, event.stable, event.stable, name)
        if event.start >= 0:
            self._check_start(partition, floor, event.start, name)

    # What was asked for, and what may be

    def _deletion_requested(self, event: history.DeletionRequested) -> None:
        partition = self.of(event.partition)
        partition.start_ceiling = max(partition.start_ceiling, event.before_offset)

    def _deleted(self, event: history.DeletionAcknowledged) -> None:
        partition = self.of(event.partition)
        if event.log_start > partition.start_ceiling and not partition.may_expire:
            broken(
                "start-moved-back", f"{event.partition}: deleted up to {event.log_start}, further than asked"
            )
        if not partition.may_be_lost:
            partition.start_floor = max(partition.start_floor, event.log_start)

    def _sequence_refused(self, event: history.SequenceRefused) -> None:
        partition = self.of(event.partition)
        if partition.start_ceiling or partition.may_expire or partition.before_loss is not None:
            # What a producer sent before its last batch is remembered only while the log still has it.
            return
        if partition.compacted:
            return  # the same: compaction keeps a producer's last batch only
        batch = self._batches[event.producer, event.number]
        broken("sequence-lost", f"{batch} follows an acknowledged one and was refused as {event.error}")

    def _expiry_allowed(self, event: history.ExpiryAllowed) -> None:
        self.of(event.partition).may_expire = True

    def _compaction_allowed(self, event: history.CompactionAllowed) -> None:
        self.of(event.partition).compacted = True

    def _loss_allowed(self, event: history.LossAllowed) -> None:
        self.of(event.partition).may_be_lost = True

    def _expiry_forgotten(self, _: history.ExpiryForgotten) -> None:
        for partition in self._partitions.values():
            if partition.may_expire:
                partition.start_floor = 0

    def _page_cache_lost(self, _: history.PageCacheLost) -> None:
        self._partitions = {
            identity: partition.after_loss() if partition.may_be_lost else partition
            for identity, partition in self._partitions.items()
        }
        self._floors = {key: floor for key, floor in self._floors.items() if not self.of(key[1]).may_be_lost}


LARGEST = -3
TOMBSTONE = b"tombstone:"
"""How the value of a history begins that stands for a tombstone."""


class _Keyed(NamedTuple):
    key: bytes
    value: bytes
    offset: int
    transaction: str | None


class CompactionChecker(Checker):
    def __init__(self, transactions: TransactionsChecker) -> None:
        self._transactions = transactions
        self._compacted: set[Partition] = set()
        self._sent: dict[tuple[str, int], history.BatchSent] = {}
        self._key_of: dict[bytes, bytes] = {}
        self._acknowledged: dict[Partition, list[_Keyed]] = {}
        self._expected: dict[tuple[str, Partition], dict[bytes, _Keyed]] = {}
        self._tombstones: dict[tuple[Partition, bytes], set[bytes]] = {}
        """Tombstones of each key that were sent and not acknowledged: one may be the last, and then all may be gone."""
        self.handlers = {
            history.CompactionAllowed: self._allowed,
            history.BatchSent: self._batch_sent,
            history.BatchAcknowledged: self._batch_acknowledged,
            history.ScanBegun: self._scan_begun,
            history.PartitionScanned: self._scanned,
        }

    def _allowed(self, event: history.CompactionAllowed) -> None:
        self._compacted.add(event.partition)

    def _batch_sent(self, event: history.BatchSent) -> None:
        if event.partition in self._compacted:
            self._sent[event.producer, event.number] = event
            for key, value in zip(event.keys, event.values, strict=True):
                self._key_of[value] = key
                if value.startswith(TOMBSTONE):
                    self._tombstones.setdefault((event.partition, key), set()).add(value)

    def _batch_acknowledged(self, event: history.BatchAcknowledged) -> None:
        sent = self._sent.get((event.producer, event.number))
        if sent is None or not event.durable:
            return
        known = self._acknowledged.setdefault(event.partition, [])
        for index, (key, value) in enumerate(zip(sent.keys, sent.values, strict=True)):
            known.append(_Keyed(key, value, event.base_offset + index, sent.transaction))
            self._tombstones.get((event.partition, key), set()).discard(value)

    def _counts(self, record: _Keyed) -> bool:
        return record.transaction is None or self._transactions.outcome(record.transaction) == "committed"

    def _scan_begun(self, event: history.ScanBegun) -> None:
        last: dict[bytes, _Keyed] = {}
        for record in self._acknowledged.get(event.partition, ()):
            best = last.get(record.key)
            if self._counts(record) and (best is None or record.offset > best.offset):
                last[record.key] = record
        self._expected[event.reader, event.partition] = last

    def _scanned(self, event: history.PartitionScanned) -> None:
        shown: dict[bytes, int] = {}
        for offset, value in event.records:
            key = self._key_of.get(value)
            if key is not None:
                shown[key] = max(shown.get(key, -1), offset)
        for key, record in self._expected.pop((event.reader, event.partition), {}).items():
            offset = shown.get(key, -1)
            may_be_gone = record.value.startswith(TOMBSTONE) or self._tombstones.get((event.partition, key))
            if offset >= record.offset or (offset < 0 and may_be_gone):
                continue
            found = f"its last is at {offset}" if offset >= 0 else "nothing of it is there"
            broken(
                "compacted-lost",
                f"{event.reader} of {event.partition}: {record.value[:30]!r} of key {key!r} was acknowledged at "
                f"{record.offset}; {found}",
            )


class LookupsChecker(Checker):
    def __init__(self, records: RecordsChecker) -> None:
        self._records = records
        self.handlers = {history.TimeLookedUp: self._looked_up}

    def _looked_up(self, event: history.TimeLookedUp) -> None:
        partition = self._records.of(event.partition)
        floor = self._records.floor(event.reader, event.partition)
        name = f"{event.reader} of {event.partition}: time {event.timestamp}"
        found = partition.owner.get(event.offset)
        if event.offset >= 0 and isinstance(found, SentBatch) and found.timestamp != event.found_timestamp:
            broken(
                "time-lookup",
                f"{name} is at {event.offset}, {event.found_timestamp}; it is {found.timestamp}",
            )
        if event.offset >= 0 and event.timestamp != LARGEST and event.found_timestamp < event.timestamp:
            broken("time-lookup", f"{name} is at {event.offset}, whose time is {event.found_timestamp}")
        if partition.may_expire or partition.compacted:
            return
        end = floor.stable if event.committed_only else floor.end
        known = [
            (offset, owner.timestamp)
            for offset, owner in partition.owner.items()
            if isinstance(owner, SentBatch) and partition.start_ceiling <= offset < end
        ]
        if event.timestamp == LARGEST:
            self._check_largest(event, known, name)
        else:
            self._check_first(event, known, name)

    def _check_largest(self, event: history.TimeLookedUp, known: list[tuple[int, int]], name: str) -> None:
        if event.committed_only and event.offset < 0:
            return  # the largest is undecided: as Kafka, the broker names no other in its place
        if known and max(timestamp for _, timestamp in known) > event.found_timestamp:
            broken(
                "time-lookup", f"{name}: the largest is said to be {event.found_timestamp} at {event.offset}"
            )

    def _check_first(self, event: history.TimeLookedUp, known: list[tuple[int, int]], name: str) -> None:
        later = [offset for offset, timestamp in known if timestamp >= event.timestamp]
        if later and (event.offset < 0 or min(later) < event.offset):
            broken("time-lookup", f"{name} is said to be at {event.offset}; {min(later)} has it")
