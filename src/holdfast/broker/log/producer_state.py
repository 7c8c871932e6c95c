"""What one partition remembers of its idempotent and transactional producers.

For every producer id: its epoch, its last five batches of that epoch, the first offset of its open
transaction, the coordinator epoch of its last marker and when it was last heard of. From this the partition
decides, before it writes a batch, whether the batch is new, a duplicate, or must be refused:

- An epoch below the known one is fenced: INVALID_PRODUCER_EPOCH.
- A client's batch whose first and last sequence are those of one of the last five batches is a duplicate.
  It is answered with the offsets of the first one and not stored again.
- A client's batch must continue the last one: the next sequence, 0 after 2^31 − 1 (a batch may span that
  wrap). Anything else is OUT_OF_ORDER_SEQUENCE_NUMBER.
- A new epoch begins at sequence 0. A producer id without state may begin anywhere: its state may have
  expired, or its records may be gone.
- While a transaction is open, only transactional batches of that producer are taken: INVALID_TXN_STATE.
- Coordinators write with a producer id but without sequences; for them only the epoch and the transaction
  count.

`check` changes nothing and `update` refuses nothing: a batch is checked, written, and then recorded, and
replaying a log records without checking, since what the log holds has been accepted.

A transaction marker ends its producer's transaction. Until the high watermark has passed the marker, the
transaction still holds back `first_unstable_offset`, which bounds what read_committed consumers see.

State expires after `producer.id.expiration.ms` without an append, never while a transaction is open. The
time of an append is the broker's, not the records': a producer that copies old records keeps its
protection.

The `.snapshot` file holds what a partition knows of its producers at the offset the file is named after. Kafka's
format, version 1, big endian:

    int16 version, uint32 CRC-32C of all that follows, int32 count, then per entry
    int64 producer id, int16 epoch, int32 last sequence, int64 last offset, int32 offset delta,
    int64 timestamp, int32 coordinator epoch, int64 first offset of the open transaction (−1: none)

An entry names one batch: its last offset, its last sequence, and how many offsets (and so sequences) it
spans beyond the first. Last offset −1 means that no batch of this epoch is known.

Kafka writes one entry per producer, its newest batch, so that after a restart a retry of an older batch is
refused as out of sequence although it had been stored. We write an entry for each batch we remember, at
most five per producer, oldest first, and before them the newest with the broker's time when the producer
was heard of later than its records' timestamps say. Kafka reads such a file as it should be read, since of
several entries for one producer the last wins; and we read Kafka's. A retry therefore gets the same answer
before and after a restart.

Any change of a byte is found by the checksum: a snapshot is whole or it is `CorruptLog`, and then an older
one and the log rebuild the state.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from struct import Struct
from typing import Final, NamedTuple

from crc32c import crc32c
from kio.schema.errors import ErrorCode

from holdfast.errors import ApiError, CorruptLog, InvalidRecords
from holdfast.seams import Buffer
from holdfast.wire.batch import NO_SEQUENCE, NO_TIMESTAMP, SEQUENCE_MAX, TRANSACTIONAL, BatchHeader
from holdfast.wire.control_records import EndTransactionMarker

SNAPSHOT_VERSION = 1
SNAPSHOT_SUFFIX = ".snapshot"

_PREFIX = Struct(">hI")
_COUNT = Struct(">i")
_ENTRY = Struct(">qhiqiqiq")
_HEADER_BYTES = _PREFIX.size + _COUNT.size


class SnapshotEntry(NamedTuple):
    producer_id: int
    epoch: int
    last_sequence: int
    last_offset: int
    offset_delta: int
    timestamp: int
    coordinator_epoch: int
    transaction_first_offset: int
    """−1 when no transaction is open."""


def encode_snapshot(entries: Sequence[SnapshotEntry]) -> bytes:
    body = b"".join((_COUNT.pack(len(entries)), *(_ENTRY.pack(*entry) for entry in entries)))
    return _PREFIX.pack(SNAPSHOT_VERSION, crc32c(body)) + body


def decode_snapshot(data: Buffer, path: str) -> list[SnapshotEntry]:
    """The entries in file order; `CorruptLog` naming `path` unless every byte is as written."""
    if len(data) < _HEADER_BYTES:
        raise CorruptLog(f"{path}: {len(data)} bytes are too few for a producer snapshot")
    version, crc = _PREFIX.unpack_from(data)
    if version != SNAPSHOT_VERSION:
        raise CorruptLog(f"{path}: producer snapshot version {version} is unknown")
    body = memoryview(data)[_PREFIX.size :]
    computed = crc32c(body)
    if crc != computed:
        raise CorruptLog(f"{path}: checksum {crc:#010x} stored, {computed:#010x} computed")
    (count,) = _COUNT.unpack_from(body)
    if count * _ENTRY.size != len(body) - _COUNT.size:
        raise CorruptLog(f"{path}: {count} entries announced in {len(data)} bytes")
    return [SnapshotEntry._make(fields) for fields in _ENTRY.iter_unpack(body[_COUNT.size :])]


BATCHES_REMEMBERED = 5
"""As many as a client may have in flight with idempotence: any of them may be retried."""
EPOCH_MAX = 2**15 - 1
NO_COORDINATOR_EPOCH = -1
SEEN_TOLERANCE_MS = 60_000
"""A snapshot says apart when a producer was heard of only when its records are older than that."""
NO_OFFSET = -1


def sequence_after(sequence: int, steps: int = 1) -> int:
    """The sequence number `steps` later; after 2^31 − 1 comes 0. Negative steps go back."""
    return (sequence + steps) & SEQUENCE_MAX


class Accept(NamedTuple):
    """The batch is new: write it."""


class Duplicate(NamedTuple):
    """The batch has been written before, at these offsets. Answer so once they are durable."""

    first_offset: int
    last_offset: int
    timestamp: int
    """The largest timestamp of the batch."""


ACCEPT: Final = Accept()


class BatchMetadata(NamedTuple):
    """One remembered batch."""

    first_sequence: int
    last_sequence: int
    first_offset: int
    last_offset: int
    timestamp: int


_NO_BATCH: Final = BatchMetadata(NO_SEQUENCE, NO_SEQUENCE, NO_OFFSET, NO_OFFSET, NO_TIMESTAMP)


class CompletedTransaction(NamedTuple):
    """A transaction whose marker has been appended."""

    producer_id: int
    first_offset: int
    last_offset: int
    """The marker's own offset."""
    is_aborted: bool
    last_stable_offset: int
    """Where the undecided part of the log begins after it; the transaction index keeps this."""


class ProducerDescription(NamedTuple):
    """One producer as DescribeProducers shows it, by that response's names."""

    producer_id: int
    producer_epoch: int
    last_sequence: int
    last_timestamp: int
    coordinator_epoch: int
    current_txn_start_offset: int


class _Producer:
    """What is known of one producer id."""

    __slots__ = (
        "batches",
        "coordinator_epoch",
        "epoch",
        "last_seen_ms",
        "last_timestamp",
        "transaction_first_offset",
    )

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch
        # Batches of this epoch alone, oldest first.
        self.batches: deque[BatchMetadata] = deque(maxlen=BATCHES_REMEMBERED)
        self.coordinator_epoch = NO_COORDINATOR_EPOCH
        self.last_timestamp = NO_TIMESTAMP
        # The broker's clock at the last append; expiry counts from here.
        self.last_seen_ms = NO_TIMESTAMP
        self.transaction_first_offset = NO_OFFSET

    @property
    def last_sequence(self) -> int:
        return self.batches[-1].last_sequence if self.batches else NO_SEQUENCE

    def remember(self, batch: BatchMetadata) -> None:
        """Add a batch read from a snapshot; one that does not come later begins the list anew."""
        if self.batches and batch.last_offset <= self.batches[-1].last_offset:
            self.batches.clear()
        self.batches.append(batch)

    def enter_epoch(self, epoch: int) -> None:
        if epoch != self.epoch:
            self.epoch = epoch
            self.batches.clear()


class ProducerStateMap:
    """The producers of one partition; `partition` names it in messages."""

    def __init__(self, partition: str = "") -> None:
        self.partition = partition
        self._producers: dict[int, _Producer] = {}
        # First offset -> producer id of open transactions, in the order of the log.
        self._ongoing: OrderedDict[int, int] = OrderedDict()
        # (marker offset, first offset) of transactions whose marker the high watermark has not passed, in order.
        self._undurable: deque[tuple[int, int]] = deque()
        self.unstable: OrderedDict[int, int] = OrderedDict()
        """First offset -> producer id of both, in the order of the log; empty nearly always."""

    def __len__(self) -> int:
        return len(self._producers)

    def __contains__(self, producer_id: int) -> bool:
        return producer_id in self._producers

    # ---- deciding about a batch

    def check(self, header: BatchHeader, *, is_client: bool) -> Accept | Duplicate:
        """Whether a data batch with a producer id may be appended; raises the refusal, changes nothing."""
        producer = self._producers.get(header.producer_id)
        if is_client and header.base_sequence < 0:
            raise InvalidRecords(
                ErrorCode.invalid_record,
                f"producer {header.producer_id} sent sequence {header.base_sequence} to {self.partition}",
            )
        if producer is None:
            return ACCEPT
        if header.producer_epoch < producer.epoch:
            raise self._stale_epoch(header.producer_id, header.producer_epoch, producer.epoch)
        if is_client:
            duplicate = self._check_sequence(header, producer)
            if duplicate is not None:
                return duplicate
        if producer.transaction_first_offset != NO_OFFSET and not header.attributes & TRANSACTIONAL:
            raise ApiError(
                ErrorCode.invalid_txn_state,
                f"producer {header.producer_id} wrote outside the transaction it has open in "
                f"{self.partition} since offset {producer.transaction_first_offset}",
            )
        return ACCEPT

    def _check_sequence(self, header: BatchHeader, producer: _Producer) -> Duplicate | None:
        first = header.base_sequence
        if header.producer_epoch != producer.epoch:
            if first == 0:
                return None
            raise self._out_of_order(header, "a new epoch begins at 0")
        batches = producer.batches
        expected = (batches[-1].last_sequence + 1) & SEQUENCE_MAX if batches else 0
        if first == expected:
            return None
        last = (first + header.last_offset_delta) & SEQUENCE_MAX
        for batch in batches:
            if batch.first_sequence == first and batch.last_sequence == last:
                return Duplicate(batch.first_offset, batch.last_offset, batch.timestamp)
        raise self._out_of_order(header, f"{expected} is next")

    def check_marker(
        self, producer_id: int, producer_epoch: int, coordinator_epoch: int, *, transaction_version: int = 0
    ) -> None:
        """Whether a coordinator may end this producer's transaction; raises the refusal.

        From transaction version 2 on every transaction ends in a new epoch (KIP-890), so that the marker's
        epoch must be above the producer's. Equal is allowed when the transaction has already ended (the
        marker is sent again) and at the last epoch there is, which cannot rise.
        """
        producer = self._producers.get(producer_id)
        if producer is None:
            return
        if transaction_version >= 2 and producer_epoch == producer.epoch:
            is_retry = producer.transaction_first_offset == NO_OFFSET
            is_stale = not (is_retry or producer_epoch == EPOCH_MAX)
        else:
            is_stale = producer_epoch < producer.epoch
        if is_stale:
            raise self._stale_epoch(producer_id, producer_epoch, producer.epoch)
        if coordinator_epoch < producer.coordinator_epoch:
            raise ApiError(
                ErrorCode.transaction_coordinator_fenced,
                f"coordinator epoch {coordinator_epoch} for producer {producer_id} in {self.partition} "
                f"is older than {producer.coordinator_epoch}",
            )

    def _stale_epoch(self, producer_id: int, epoch: int, known_epoch: int) -> ApiError:
        return ApiError(
            ErrorCode.invalid_producer_epoch,
            f"epoch {epoch} of producer {producer_id} in {self.partition} is fenced by {known_epoch}",
        )

    def _out_of_order(self, header: BatchHeader, rule: str) -> ApiError:
        return ApiError(
            ErrorCode.out_of_order_sequence_number,
            f"producer {header.producer_id} epoch {header.producer_epoch} sent sequence "
            f"{header.base_sequence} to {self.partition}, where {rule}",
        )

    # ---- recording what was appended

    def update(self, header: BatchHeader, base_offset: int, now_ms: int) -> None:
        """Record a data batch that was appended at `base_offset`."""
        producer = self._producers.get(header.producer_id)
        if producer is None:
            producer = self._producers[header.producer_id] = _Producer(header.producer_epoch)
        elif header.producer_epoch != producer.epoch:
            producer.enter_epoch(header.producer_epoch)
        delta = header.last_offset_delta
        first = header.base_sequence
        last = (first + delta) & SEQUENCE_MAX if first >= 0 else NO_SEQUENCE
        timestamp = header.max_timestamp
        producer.batches.append(BatchMetadata(first, last, base_offset, base_offset + delta, timestamp))
        producer.last_timestamp = timestamp
        producer.last_seen_ms = now_ms
        if producer.transaction_first_offset == NO_OFFSET and header.attributes & TRANSACTIONAL:
            producer.transaction_first_offset = base_offset
            self._ongoing[base_offset] = self.unstable[base_offset] = header.producer_id

    def complete(
        self, header: BatchHeader, marker: EndTransactionMarker, base_offset: int, now_ms: int
    ) -> CompletedTransaction | None:
        """Record a marker that was appended at `base_offset`; None when it ended nothing here."""
        producer = self._producers.get(header.producer_id)
        if producer is None:
            producer = self._producers[header.producer_id] = _Producer(header.producer_epoch)
        producer.enter_epoch(header.producer_epoch)
        producer.coordinator_epoch = marker.coordinator_epoch
        producer.last_timestamp = header.max_timestamp
        producer.last_seen_ms = now_ms
        first_offset = producer.transaction_first_offset
        if first_offset == NO_OFFSET:
            return None
        producer.transaction_first_offset = NO_OFFSET
        del self._ongoing[first_offset]
        self._undurable.append((base_offset, first_offset))
        last_stable_offset = next(iter(self._ongoing), base_offset + 1)
        return CompletedTransaction(
            header.producer_id, first_offset, base_offset, not marker.is_commit, last_stable_offset
        )

    def note_emptied_marker(self, header: BatchHeader, now_ms: int) -> None:
        """Record a marker that compaction has emptied: of the transaction it ended nothing is left."""
        producer = self._producers.get(header.producer_id)
        if producer is None:
            producer = self._producers[header.producer_id] = _Producer(header.producer_epoch)
        producer.enter_epoch(header.producer_epoch)
        producer.last_timestamp = header.max_timestamp
        producer.last_seen_ms = now_ms
        self._forget_transaction(producer)

    # ---- transactions

    def has_transaction(self, producer_id: int, producer_epoch: int | None = None) -> bool:
        """Whether the producer has a transaction open, in this epoch if one is given."""
        producer = self._producers.get(producer_id)
        return (
            producer is not None
            and producer.transaction_first_offset != NO_OFFSET
            and producer_epoch in (None, producer.epoch)
        )

    def coordinator_epoch(self, producer_id: int) -> int:
        """Of the coordinator that wrote the producer's last marker; below 0 when none did."""
        producer = self._producers.get(producer_id)
        return NO_COORDINATOR_EPOCH if producer is None else producer.coordinator_epoch

    @property
    def ongoing_transactions(self) -> list[tuple[int, int]]:
        """(first offset, producer id) of the open transactions, oldest first."""
        return list(self._ongoing.items())

    @property
    def first_unstable_offset(self) -> int | None:
        """Where the first transaction begins that is open or whose marker is not below the high watermark."""
        return next(iter(self.unstable), None)

    def advance_high_watermark(self, high_watermark: int) -> None:
        """Release the transactions whose markers are now below the high watermark."""
        undurable = self._undurable
        while undurable and undurable[0][0] < high_watermark:
            del self.unstable[undurable.popleft()[1]]

    # ---- forgetting

    def forget_transactions(self) -> None:
        """Take every open transaction for ended: nothing is left of them."""
        for producer in self._producers.values():
            self._forget_transaction(producer)

    def _forget_transaction(self, producer: _Producer) -> None:
        first_offset = producer.transaction_first_offset
        if first_offset != NO_OFFSET:
            producer.transaction_first_offset = NO_OFFSET
            del self._ongoing[first_offset]
            del self.unstable[first_offset]

    def clear(self) -> None:
        """Forget everything, as before state is rebuilt from a snapshot and the log."""
        self._producers.clear()
        self._ongoing.clear()
        self._undurable.clear()
        self.unstable.clear()

    def remove_expired(self, now_ms: int, expiration_ms: int) -> int:
        """Forget producers not heard of for `expiration_ms` that have no transaction open; says how many."""
        expired = [
            producer_id
            for producer_id, producer in self._producers.items()
            if producer.transaction_first_offset == NO_OFFSET
            and now_ms - producer.last_seen_ms >= expiration_ms
        ]
        for producer_id in expired:
            del self._producers[producer_id]
        return len(expired)

    # ---- showing and keeping

    def describe(self) -> list[ProducerDescription]:
        return [
            ProducerDescription(
                producer_id,
                producer.epoch,
                producer.last_sequence,
                producer.last_timestamp,
                producer.coordinator_epoch,
                producer.transaction_first_offset,
            )
            for producer_id, producer in self._producers.items()
        ]

    def batches_of(self, producer_id: int) -> tuple[BatchMetadata, ...]:
        """The remembered batches of the producer's epoch, oldest first."""
        producer = self._producers.get(producer_id)
        return tuple(producer.batches) if producer is not None else ()

    def to_snapshot(self) -> list[SnapshotEntry]:
        """Everything but which markers await the high watermark, in the order `producer_snapshot` asks."""
        return [
            entry
            for producer_id, producer in self._producers.items()
            for entry in _entries(producer_id, producer)
        ]

    @classmethod
    def from_snapshot(cls, entries: Iterable[SnapshotEntry], partition: str = "") -> ProducerStateMap:
        """The state that `to_snapshot`, or Kafka, wrote down."""
        state = cls(partition)
        for entry in entries:
            producer = state._producers.get(entry.producer_id)
            if producer is None:
                producer = state._producers[entry.producer_id] = _Producer(entry.epoch)
            producer.enter_epoch(entry.epoch)
            if entry.last_offset >= 0:
                producer.remember(_batch(entry))
            producer.coordinator_epoch = entry.coordinator_epoch
            producer.last_timestamp = entry.timestamp
            producer.last_seen_ms = max(producer.last_seen_ms, entry.timestamp)
            producer.transaction_first_offset = max(entry.transaction_first_offset, NO_OFFSET)
        open_transactions = sorted(
            (producer.transaction_first_offset, producer_id)
            for producer_id, producer in state._producers.items()
            if producer.transaction_first_offset != NO_OFFSET
        )
        state._ongoing.update(open_transactions)
        state.unstable.update(open_transactions)
        return state


def _entries(producer_id: int, producer: _Producer) -> Iterator[SnapshotEntry]:
    """Entries of which the last is the one Kafka would write, so that Kafka reads what it would have read.

    Kafka passes over entries whose timestamp has expired. Hence no older batch may look younger than the
    newest, and the entry that tells when the producer was heard of names the newest batch too.
    """

    def entry(batch: BatchMetadata, timestamp: int) -> SnapshotEntry:
        return SnapshotEntry(
            producer_id,
            producer.epoch,
            batch.last_sequence,
            batch.last_offset,
            batch.last_offset - batch.first_offset,
            timestamp,
            producer.coordinator_epoch,
            producer.transaction_first_offset,
        )

    *older, newest = producer.batches or (_NO_BATCH,)
    if producer.last_seen_ms - producer.last_timestamp > SEEN_TOLERANCE_MS:
        yield entry(newest, producer.last_seen_ms)
    for batch in older:
        yield entry(batch, min(batch.timestamp, producer.last_timestamp))
    yield entry(newest, producer.last_timestamp)


def _batch(entry: SnapshotEntry) -> BatchMetadata:
    last = entry.last_sequence
    first = sequence_after(last, -entry.offset_delta) if last >= 0 else NO_SEQUENCE
    return BatchMetadata(
        first, last, entry.last_offset - entry.offset_delta, entry.last_offset, entry.timestamp
    )
