"""Transactions as Kafka's records of `__transaction_state`, and back."""

from __future__ import annotations

from holdfast.broker.transactions.model import NEWER_PROTOCOL, NO_EPOCH, TransactionMetadata, TransactionState
from holdfast.errors import CorruptLog
from holdfast.wire.batch import Record
from holdfast.wire.coordinator_records import (
    TransactionLogKey,
    TransactionLogValue,
    TransactionPartitions,
    decode_transaction_record,
)


def record_of(transactional_id: str, metadata: TransactionMetadata) -> tuple[bytes, bytes]:
    value = TransactionLogValue(
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
    return TransactionLogKey(transactional_id).encode(), value.encode()


def tombstone_of(transactional_id: str) -> tuple[bytes, None]:
    return TransactionLogKey(transactional_id).encode(), None


def _implied_last_epoch(metadata: TransactionMetadata) -> int:
    """By the newer protocol each end of a transaction raises the epoch: then the one before is known."""
    has_ended = metadata.state.is_prepared or metadata.state.is_complete
    return (
        metadata.producer_epoch - 1 if has_ended and metadata.client_version >= NEWER_PROTOCOL else NO_EPOCH
    )


def _partitions(metadata: TransactionMetadata) -> tuple[TransactionPartitions, ...] | None:
    if metadata.state is TransactionState.EMPTY:
        return None
    by_topic: dict[str, list[int]] = {}
    for topic, partition in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(partition)
    return tuple(TransactionPartitions(topic, tuple(ids)) for topic, ids in by_topic.items())


def read_record(record: Record) -> tuple[str, TransactionMetadata | None] | None:
    """The transactional id and what is known of it, None when it is forgotten; None for records of other kinds."""
    if record.key is None:
        raise CorruptLog("a record of a transaction without a key")
    key, value = decode_transaction_record(record.key, record.value)
    if not isinstance(key, TransactionLogKey):
        return None
    if value is None:
        return key.transactional_id, None
    if not isinstance(value, TransactionLogValue):
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
