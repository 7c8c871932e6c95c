"""Transactional batches of a produce request, and what the coordinator says about them before they are appended.

A partition must be part of the transaction, durably, before its log holds anything of it; otherwise a crash could
leave records that no coordinator would ever decide about. Clients of the newer protocol (KIP-890, produce 12 on)
leave it to the broker to add the partition to the transaction. Older ones have added it themselves, which is verified.

Once a log has the producer's transaction open, in the same epoch, its partition has been through this: later batches of
the transaction are appended at once. So is a batch that the log has already: it changes nothing.

The coordinator answers in the order it was asked, so that batches a producer sends one behind the other into a
partition are appended in that order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.transaction_service import TransactionService
from holdfast.broker.transactions.coordinator import Refusals
from holdfast.broker.transactions.model import (
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    AddPartitions,
    ProducerIdentity,
    TopicPartition,
)
from holdfast.errors import ApiError, InvalidRecords
from holdfast.seams import Now
from holdfast.wire.batch import HEADER_SIZE, MAGIC, MAGIC_OFFSET, BatchHeader, read_header

ADDING_VERSION: Final = 12
"""Produce requests from here on add their partitions to the transaction."""
ABORTABLE_VERSION: Final = 11
"""Clients from here on know TRANSACTION_ABORTABLE."""
UNAVAILABLE: Final = frozenset(
    (
        ErrorCode.coordinator_load_in_progress,
        ErrorCode.coordinator_not_available,
        ErrorCode.not_coordinator,
        ErrorCode.network_exception,
    )
)


class WaitingBatch(NamedTuple):
    """One batch that waits for the coordinator."""

    hosted: HostedPartition
    data: Any
    """The partition's part of the request."""
    outcomes: list[Any]
    at: int
    """Where among the outcomes of its topic this batch's own belongs."""


class TransactionalBatches:
    """The transactional side of one produce request."""

    __slots__ = ("is_settled", "producer", "transactional_id", "version", "waiting")

    def __init__(self, transactional_id: str, version: int, producer: ProducerIdentity) -> None:
        self.transactional_id = transactional_id
        self.version = version
        self.producer = producer
        self.waiting: list[WaitingBatch] = []
        self.is_settled = False
        """The coordinator has spoken: nothing waits any more."""

    def must_wait(self, hosted: HostedPartition, records: bytes) -> bool:
        """Whether a transactional batch may be appended only when the coordinator has agreed."""
        if len(records) < HEADER_SIZE:
            return False
        header = read_header(records)
        producers = hosted.log.producers
        if self.is_settled:
            self._check_beginning(hosted, header)
            return False
        if header.producer_id < 0 or producers.has_transaction(header.producer_id, header.producer_epoch):
            return False
        try:
            return not isinstance(producers.check(header, is_client=True), Duplicate)
        except InvalidRecords:
            return False
        except ApiError as error:
            # An unexpected sequence may be the next one when those who wait have been appended.
            return error.code is ErrorCode.out_of_order_sequence_number

    def _check_beginning(self, hosted: HostedPartition, header: BatchHeader) -> None:
        """In the newer protocol every transaction has its own epoch, so that its first batch is number 0."""
        is_newer = self.version >= ADDING_VERSION
        if is_newer and header.base_sequence > 0 and header.producer_id not in hosted.log.producers:
            raise ApiError(
                ErrorCode.out_of_order_sequence_number,
                f"producer {header.producer_id} begins with sequence {header.base_sequence} in {hosted.name}",
            )

    def begin(self, transactions: TransactionService, now: Now, done: Callable[[Refusals], None]) -> None:
        """Ask the coordinator for all that wait."""
        is_newer = self.version >= ADDING_VERSION
        partitions = frozenset((waiting.hosted.topic, waiting.hosted.index) for waiting in self.waiting)
        addition = AddPartitions(
            self.transactional_id,
            self.producer,
            partitions,
            NEWER_PROTOCOL if is_newer else OLDER_PROTOCOL,
        )

        def settle(refusals: Refusals) -> None:
            self.is_settled = True
            done(refusals)

        if is_newer:
            transactions.add_before_write(addition, now, settle)
        else:
            transactions.verify(addition, now, settle)

    def check(self, refusals: Refusals, partition: TopicPartition) -> None:
        """Raise what a producer is told whose batch the coordinator does not let in."""
        code = refusals.get(partition)
        if code is None:
            return
        if code is ErrorCode.producer_fenced:
            raise ApiError(ErrorCode.invalid_producer_epoch, "the producer is fenced by a newer epoch")
        if code is ErrorCode.transaction_abortable and self.version < ABORTABLE_VERSION:
            raise ApiError(ErrorCode.invalid_txn_state, "the partition was not added to the transaction")
        if code in UNAVAILABLE or (
            code is ErrorCode.concurrent_transactions and self.version < ADDING_VERSION
        ):
            # Clients retry this one, and do not look for another leader because of it.
            raise ApiError(
                ErrorCode.not_enough_replicas, f"the transaction could not be verified: {code.name}"
            )
        raise ApiError(code)


def producers_of(request: Any) -> set[ProducerIdentity]:
    """Who wrote the transactional batches of a produce request."""
    found = set()
    for topic in request.topic_data:
        for data in topic.partition_data:
            records = data.records
            if records is None or len(records) < HEADER_SIZE or records[MAGIC_OFFSET] != MAGIC:
                continue
            header = read_header(records)
            if header.is_transactional and header.producer_id >= 0:
                found.add(ProducerIdentity(header.producer_id, header.producer_epoch))
    return found
