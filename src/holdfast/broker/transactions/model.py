"""What is known about one transactional id, what is asked about it, and the answers.

The states are Kafka's, and so is the record each of them is kept in:

    Empty ──▶ Ongoing ──▶ PrepareCommit ──▶ CompleteCommit ─┐
      ▲          │                                           ├──▶ Ongoing, Empty, PrepareAbort
      │          └──────▶ PrepareAbort ───▶ CompleteAbort ──┘
      └── InitProducerId, from Empty and both Complete states

`TransactionMetadata` never changes: a transition makes a new one through `become`, which refuses what the table does
not allow. Whoever holds a transaction writes the new one down first and takes it over after.

Two protocols share these states. In the older one (client version 0) a producer keeps its epoch from one transaction
to the next. In the newer one (client version 2, KIP-890) every end of a transaction raises the epoch, so that nothing
that was sent in one transaction can arrive in the next; a producer id whose epochs are used up is left behind for
`next_producer_id` at the same moment.

Transactions become Kafka's records of `__transaction_state`, and are read from them.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final, NamedTuple, TypeAlias

from kio.schema.errors import ErrorCode

from holdfast.errors import CorruptLog
from holdfast.wire import coordinator_records as records
from holdfast.wire.batch import Record

NO_PRODUCER_ID: Final = -1
NO_EPOCH: Final = -1
NO_TIME: Final = -1
EPOCH_MAX: Final = 2**15 - 1
EPOCH_USABLE_MAX: Final = EPOCH_MAX - 1
"""The last epoch a producer is given: one more must be left to fence it with."""
OLDER_PROTOCOL: Final = 0
NEWER_PROTOCOL: Final = 2
"""KIP-890: `transaction.version` 2."""
TRANSACTIONAL_ID_BYTES_MAX: Final = 2**15 - 1
"""What the key of its record can hold."""

TopicPartition: TypeAlias = tuple[str, int]


class TransactionState(IntEnum):
    """Numbered as in the records."""

    EMPTY = 0
    ONGOING = 1
    PREPARE_COMMIT = 2
    PREPARE_ABORT = 3
    COMPLETE_COMMIT = 4
    COMPLETE_ABORT = 5
    DEAD = 6
    PREPARE_EPOCH_FENCE = 7

    @property
    def label(self) -> str:
        """As Kafka and its tools write it."""
        return _LABELS[self]

    @property
    def is_prepared(self) -> bool:
        """Decided, but not in every partition yet."""
        return self in (TransactionState.PREPARE_COMMIT, TransactionState.PREPARE_ABORT)

    @property
    def is_complete(self) -> bool:
        return self in (TransactionState.COMPLETE_COMMIT, TransactionState.COMPLETE_ABORT)

    @property
    def may_expire(self) -> bool:
        return self is TransactionState.EMPTY or self.is_complete


_LABELS: Final = {
    state: "".join(part.capitalize() for part in state.name.split("_")) for state in TransactionState
}
STATES_BY_LABEL: Final = {label: state for state, label in _LABELS.items()}

_S = TransactionState
BEFORE: Final[dict[TransactionState, frozenset[TransactionState]]] = {
    _S.EMPTY: frozenset((_S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT)),
    _S.ONGOING: frozenset((_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT)),
    _S.PREPARE_COMMIT: frozenset((_S.ONGOING,)),
    # Aborting what has not begun is allowed in the newer protocol: the producer cannot know whether it had.
    _S.PREPARE_ABORT: frozenset((_S.ONGOING, _S.EMPTY, _S.COMPLETE_COMMIT, _S.COMPLETE_ABORT)),
    _S.COMPLETE_COMMIT: frozenset((_S.PREPARE_COMMIT,)),
    _S.COMPLETE_ABORT: frozenset((_S.PREPARE_ABORT,)),
}
"""From which states each state is reached. Dead and PrepareEpochFence are never reached: Kafka has them for moments
in which a change is written but not applied, and here there are none."""


class IllegalTransition(AssertionError):
    """A defect of ours: a state was to follow one that it cannot follow."""


class TransactionMetadata(NamedTuple):
    """The record of one transactional id."""

    producer_id: int
    producer_epoch: int
    timeout_ms: int
    last_update_ms: int
    state: TransactionState = TransactionState.EMPTY
    partitions: frozenset[TopicPartition] = frozenset()
    """Where the transaction has written, or may have."""
    start_ms: int = NO_TIME
    previous_producer_id: int = NO_PRODUCER_ID
    """Of the record before this one: tells a retry across a change of id."""
    next_producer_id: int = NO_PRODUCER_ID
    """While prepared: the id that follows because this one's epochs are used up."""
    last_producer_epoch: int = NO_EPOCH
    """The epoch before the last bump a producer asked for, to tell its retry; none once it has used the new one."""
    client_version: int = OLDER_PROTOCOL
    """The protocol of the client that caused this state."""

    @property
    def is_exhausted(self) -> bool:
        return self.producer_epoch >= EPOCH_USABLE_MAX

    def become(self, state: TransactionState, now_ms: int, **changes: Any) -> TransactionMetadata:
        """The same id in another state."""
        if self.state not in BEFORE.get(state, ()):
            raise IllegalTransition(f"{state.label} cannot follow {self.state.label}")
        changed = self._replace(
            state=state, last_update_ms=now_ms, previous_producer_id=self.producer_id, **changes
        )
        if changed.producer_id < 0 or not 0 <= changed.producer_epoch <= EPOCH_MAX:
            raise IllegalTransition(f"{changed} has no producer id or an impossible epoch")
        return changed


# What is asked


class ProducerIdentity(NamedTuple):
    """A producer id with its epoch."""

    producer_id: int
    epoch: int


class InitProducer(NamedTuple):
    transactional_id: str
    timeout_ms: int
    expected: ProducerIdentity | None = None
    """What the producer had (KIP-360): it wants to go on as itself, and is told if somebody took its place."""


class AddPartitions(NamedTuple):
    """Partitions that a producer is about to write to in its transaction."""

    transactional_id: str
    producer: ProducerIdentity
    partitions: frozenset[TopicPartition]
    client_version: int


class EndTransactionRequest(NamedTuple):
    transactional_id: str
    producer: ProducerIdentity
    is_commit: bool
    client_version: int


# What is answered


class Initialised(NamedTuple):
    error: ErrorCode
    producer_id: int = NO_PRODUCER_ID
    producer_epoch: int = NO_EPOCH


class Ended(NamedTuple):
    error: ErrorCode
    producer_id: int = NO_PRODUCER_ID
    """Which id and epoch the next transaction has; clients of the older protocol are not told."""
    producer_epoch: int = NO_EPOCH


class Decision(NamedTuple):
    """A transaction's end, as its partitions are told."""

    transactional_id: str
    producer: ProducerIdentity
    """With the epoch after the end: whatever comes with an earlier one is fenced from then on."""
    is_commit: bool
    client_version: int


def record_of(transactional_id: str, metadata: TransactionMetadata) -> tuple[bytes, bytes]:
    value = records.TransactionLogValue(
        producer_id=metadata.producer_id,
        previous_producer_id=metadata.previous_producer_id,
        next_producer_id=metadata.next_producer_id,
        producer_epoch=metadata.producer_epoch,
        transaction_timeout_ms=metadata.timeout_ms,
        transaction_status=metadata.state,
        transaction_partitions=_partitions(metadata),
        transaction_last_update_timestamp_ms=metadata.last_update_ms,
        transaction_start_timestamp_ms=metadata.start_ms,
        client_transaction_version=metadata.client_version,
        last_producer_epoch=NO_EPOCH
        if metadata.last_producer_epoch == _implied_last_epoch(metadata)
        else metadata.last_producer_epoch,
    )
    return records.TransactionLogKey(transactional_id).encode(), value.encode()


def tombstone_of(transactional_id: str) -> tuple[bytes, None]:
    return records.TransactionLogKey(transactional_id).encode(), None


def _implied_last_epoch(metadata: TransactionMetadata) -> int:
    """By the newer protocol each end of a transaction raises the epoch: then the one before is known."""
    has_ended = metadata.state.is_prepared or metadata.state.is_complete
    return (
        metadata.producer_epoch - 1 if has_ended and metadata.client_version >= NEWER_PROTOCOL else NO_EPOCH
    )


def _partitions(metadata: TransactionMetadata) -> tuple[records.TransactionPartitions, ...] | None:
    if metadata.state is TransactionState.EMPTY:
        return None
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(partition)
    return tuple(records.TransactionPartitions(topic, tuple(ids)) for topic, ids in by_topic.items())


def read_record(record: Record) -> tuple[str, TransactionMetadata | None] | None:
    """The transactional id and what is known of it, None when it is forgotten; None for records of other kinds."""
    if record.key is None:
        raise CorruptLog("a record of a transaction without a key")
    key, value = records.decode_transaction_record(record.key, record.value)
    if not isinstance(key, records.TransactionLogKey):
        return None
    if value is None:
        return key.transactional_id, None
    if not isinstance(value, records.TransactionLogValue):
        return None
    try:
        state = TransactionState(value.transaction_status)
    except ValueError as error:
        raise CorruptLog(f"transaction {key.transactional_id!r}: {error}") from error
    partitions = frozenset(
        (group.topic, partition)
        for group in value.transaction_partitions or ()
        for partition in group.partition_ids
    )
    metadata = TransactionMetadata(
        producer_id=value.producer_id,
        producer_epoch=value.producer_epoch,
        timeout_ms=value.transaction_timeout_ms,
        last_update_ms=value.transaction_last_update_timestamp_ms,
        state=state,
        partitions=partitions,
        start_ms=value.transaction_start_timestamp_ms,
        previous_producer_id=value.previous_producer_id,
        next_producer_id=value.next_producer_id,
        last_producer_epoch=value.last_producer_epoch,
        client_version=value.client_transaction_version,
    )
    if metadata.last_producer_epoch == NO_EPOCH:
        metadata = metadata._replace(last_producer_epoch=_implied_last_epoch(metadata))
    return key.transactional_id, metadata
