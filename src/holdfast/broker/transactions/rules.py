"""The rules of transactions: who may do what in which state, and what the state is then.

Functions of the record alone. They return the record that shall follow, or raise the protocol's error; nothing here
writes, waits or remembers. Where the newer protocol (KIP-890) differs from the older, the rules stand side by side.

How a retried EndTxn is told from a new one: under the older protocol the epoch stays, so the state alone tells. Under
the newer one the first EndTxn has raised the epoch; a request with the epoch before the present one is the retry and
gets the same answer, one with the present epoch is about the next transaction.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode

from holdfast.broker.transactions.model import (
    EPOCH_MAX,
    EPOCH_USABLE_MAX,
    NEWER_PROTOCOL,
    NO_EPOCH,
    NO_PRODUCER_ID,
    NO_TIME,
    AddPartitions,
    EndTransactionRequest,
    ProducerIdentity,
    TopicPartition,
    TransactionMetadata,
    TransactionState,
)
from holdfast.errors import ApiError

ONGOING = TransactionState.ONGOING
COMPLETE_COMMIT = TransactionState.COMPLETE_COMMIT
COMPLETE_ABORT = TransactionState.COMPLETE_ABORT
PREPARE_COMMIT = TransactionState.PREPARE_COMMIT
PREPARE_ABORT = TransactionState.PREPARE_ABORT
EMPTY = TransactionState.EMPTY


def successor(metadata: TransactionMetadata) -> ProducerIdentity:
    """Who may write the next transaction once the prepared one is complete; its producer may know already."""
    if metadata.next_producer_id != NO_PRODUCER_ID:
        return ProducerIdentity(metadata.next_producer_id, 0)
    return ProducerIdentity(metadata.producer_id, metadata.producer_epoch)


def check_not_too_early(metadata: TransactionMetadata, producer: ProducerIdentity | None) -> None:
    """The rightful producer of the next transaction is told to come again, not that it was fenced."""
    if metadata.state.is_prepared and producer == successor(metadata):
        raise not_complete()


# InitProducerId


def check_successor(metadata: TransactionMetadata, expected: ProducerIdentity | None) -> None:
    """Whether a producer may take the transactional id over, or go on with it, now.

    One that says who it was (KIP-360) must be the present producer, or one whose last answer, with a new id because
    the epochs were used up, was lost. In the middle of a transaction it must be the very producer that has it open:
    one that was fenced ends nothing.
    """
    check_not_too_early(metadata, expected)
    if expected is not None:
        is_present = expected.producer_id == metadata.producer_id
        lost_its_new_id = (
            expected.producer_id == metadata.previous_producer_id and expected.epoch >= EPOCH_USABLE_MAX
        )
        is_owner = is_present and expected.epoch == metadata.producer_epoch
        if not (is_present or lost_its_new_id) or (metadata.state is ONGOING and not is_owner):
            raise fenced(metadata, expected)
    if metadata.state.is_prepared:
        raise not_complete()


def needs_new_id(metadata: TransactionMetadata, expected: ProducerIdentity | None) -> bool:
    """Whether the next epoch must be the first of another producer id."""
    return metadata.is_exhausted and (expected is None or expected.epoch == metadata.producer_epoch)


def first_epoch(producer_id: int, timeout_ms: int, now_ms: int) -> TransactionMetadata:
    """A transactional id that was not known."""
    return TransactionMetadata(producer_id, 0, timeout_ms, now_ms, previous_producer_id=producer_id)


def with_new_id(
    metadata: TransactionMetadata, producer_id: int, timeout_ms: int, now_ms: int, *, is_renewal: bool
) -> TransactionMetadata:
    return metadata.become(
        EMPTY,
        now_ms,
        producer_id=producer_id,
        producer_epoch=0,
        last_producer_epoch=metadata.producer_epoch if is_renewal else NO_EPOCH,
        timeout_ms=timeout_ms,
        partitions=frozenset(),
        start_ms=NO_TIME,
        next_producer_id=NO_PRODUCER_ID,
    )


def with_next_epoch(
    metadata: TransactionMetadata, expected: ProducerIdentity | None, timeout_ms: int, now_ms: int
) -> TransactionMetadata:
    epoch, last, previous_id = metadata.producer_epoch + 1, NO_EPOCH, metadata.producer_id
    if expected is not None:
        if expected.epoch == metadata.producer_epoch:
            last = metadata.producer_epoch
        elif expected.epoch == metadata.last_producer_epoch:
            # The answer to the first call was lost, and so may this one be. A new producer would have set the last
            # epoch to none.
            epoch, last = metadata.producer_epoch, metadata.last_producer_epoch
            previous_id = metadata.previous_producer_id
        else:
            raise fenced(metadata, expected)
    return metadata.become(
        EMPTY,
        now_ms,
        producer_epoch=epoch,
        last_producer_epoch=last,
        timeout_ms=timeout_ms,
        partitions=frozenset(),
        start_ms=NO_TIME,
        next_producer_id=NO_PRODUCER_ID,
    )._replace(previous_producer_id=previous_id)


# Partitions


def check_owner(metadata: TransactionMetadata, producer: ProducerIdentity) -> None:
    check_not_too_early(metadata, producer)
    check_identity(metadata, producer)
    if metadata.state.is_prepared:
        raise not_complete()


def with_partitions(
    metadata: TransactionMetadata, addition: AddPartitions, now_ms: int
) -> TransactionMetadata:
    """With more partitions in it; the record itself when it has them all."""
    check_owner(metadata, addition.producer)
    if metadata.state is ONGOING and addition.partitions <= metadata.partitions:
        return metadata
    return metadata.become(
        ONGOING,
        now_ms,
        last_producer_epoch=NO_EPOCH,
        partitions=metadata.partitions | addition.partitions,
        start_ms=metadata.start_ms if metadata.state is ONGOING else now_ms,
        client_version=addition.client_version,
    )


def missing_partitions(metadata: TransactionMetadata, addition: AddPartitions) -> frozenset[TopicPartition]:
    """Partitions that a producer of the older protocol writes to without having added them."""
    check_owner(metadata, addition.producer)
    return addition.partitions - metadata.partitions


# EndTxn


def end_of(metadata: TransactionMetadata, request: EndTransactionRequest) -> TransactionState | None:
    """The state that decides the transaction, or None for a retry that gets the answer of the first request."""
    if request.client_version >= NEWER_PROTOCOL:
        return _newer_end(metadata, request)
    return _older_end(metadata, request)


def _older_end(metadata: TransactionMetadata, request: EndTransactionRequest) -> TransactionState | None:
    check_identity(metadata, request.producer)
    state = metadata.state
    wanted = PREPARE_COMMIT if request.is_commit else PREPARE_ABORT
    if state is ONGOING:
        return wanted
    if state is (COMPLETE_COMMIT if request.is_commit else COMPLETE_ABORT):
        return None
    if state is wanted:
        raise ApiError(ErrorCode.concurrent_transactions, "the transaction is being ended already")
    raise invalid_end(metadata, request)


def _newer_end(metadata: TransactionMetadata, request: EndTransactionRequest) -> TransactionState | None:
    check_not_too_early(metadata, request.producer)
    producer_id, epoch = request.producer
    state = metadata.state
    is_retry_across_ids = (
        producer_id == metadata.previous_producer_id
        and epoch == EPOCH_USABLE_MAX
        and metadata.producer_epoch == 0
    )
    # Only where the epoch has risen with the end. Where a client of the older protocol has ended its transaction
    # since, the epoch before is that of a producer it has fenced.
    has_risen = metadata.client_version >= NEWER_PROTOCOL and metadata.producer_epoch == epoch + 1
    is_retry = is_retry_across_ids or has_risen
    if producer_id != metadata.producer_id and not is_retry_across_ids:
        check_identity(metadata, request.producer)
    if state.is_prepared:
        may_ask = has_risen
    elif state.is_complete:
        may_ask = is_retry or epoch == metadata.producer_epoch
    else:
        may_ask = epoch == metadata.producer_epoch
    if not may_ask:
        raise fenced(metadata, request.producer)
    if state is ONGOING:
        return PREPARE_COMMIT if request.is_commit else PREPARE_ABORT
    if state.is_prepared:
        if request.is_commit is (state is PREPARE_COMMIT):
            raise ApiError(ErrorCode.concurrent_transactions, "the transaction is being ended already")
    elif state.is_complete and is_retry:
        if request.is_commit is (state is COMPLETE_COMMIT):
            return None
    elif not request.is_commit:
        # Nothing was written in this transaction, or the client does not know: the epoch is raised all the same.
        return PREPARE_ABORT
    raise invalid_end(metadata, request)


def check_identity(metadata: TransactionMetadata, producer: ProducerIdentity) -> None:
    if producer.producer_id != metadata.producer_id:
        raise ApiError(
            ErrorCode.invalid_producer_id_mapping,
            f"the transactional id belongs to producer {metadata.producer_id}, not {producer.producer_id}",
        )
    if producer.epoch != metadata.producer_epoch:
        raise fenced(metadata, producer)


def prepared(
    metadata: TransactionMetadata,
    state: TransactionState,
    client_version: int,
    next_producer_id: int,
    now_ms: int,
) -> TransactionMetadata:
    """Decided. Under the newer protocol the epoch rises with it; the very last one cannot."""
    bumps = client_version >= NEWER_PROTOCOL
    return metadata.become(
        state,
        now_ms,
        producer_epoch=min(metadata.producer_epoch + 1, EPOCH_MAX) if bumps else metadata.producer_epoch,
        last_producer_epoch=metadata.producer_epoch if bumps else metadata.last_producer_epoch,
        next_producer_id=next_producer_id,
        start_ms=metadata.start_ms if metadata.state is ONGOING else now_ms,
        client_version=client_version,
    )


def completed(metadata: TransactionMetadata, now_ms: int) -> TransactionMetadata:
    """Every partition knows of the decision."""
    changes_id = metadata.next_producer_id != NO_PRODUCER_ID
    return metadata.become(
        COMPLETE_COMMIT if metadata.state is PREPARE_COMMIT else COMPLETE_ABORT,
        now_ms,
        producer_id=metadata.next_producer_id if changes_id else metadata.producer_id,
        producer_epoch=0 if changes_id else metadata.producer_epoch,
        next_producer_id=NO_PRODUCER_ID,
        partitions=frozenset(),
    )


# Refusals


def fenced(metadata: TransactionMetadata, producer: ProducerIdentity) -> ApiError:
    return ApiError(
        ErrorCode.producer_fenced,
        f"epoch {producer.epoch} of producer {producer.producer_id} is not the present one: the transactional id is "
        f"with epoch {metadata.producer_epoch} of producer {metadata.producer_id}",
    )


def not_complete() -> ApiError:
    return ApiError(ErrorCode.concurrent_transactions, "the last transaction is not complete yet")


def invalid_end(metadata: TransactionMetadata, request: EndTransactionRequest) -> ApiError:
    verb = "committed" if request.is_commit else "aborted"
    return ApiError(
        ErrorCode.invalid_txn_state, f"a transaction in state {metadata.state.label} cannot be {verb}"
    )
