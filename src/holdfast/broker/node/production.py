"""Produce requests under way: what became of each batch, and the response that tells of it.

acks=all is answered when every batch of the request is committed; acks=1 once written; acks=0 never, and an
error closes the connection. Each partition succeeds or fails by itself.

The coordinator is asked about transactional batches of a produce request before they are appended. A partition must
be part of the transaction, durably, before its log holds anything of it; otherwise a crash could leave records that
no coordinator would ever decide about. Clients of the newer protocol (KIP-890, produce 12 on) leave it to the
broker to add the partition to the transaction. Older ones have added it themselves, which is verified.

Once a log has the producer's transaction open, in the same epoch, its partition has been through this: later
batches of the transaction are appended at once. So is a batch that the log has already: it changes nothing.

The coordinator answers in the order it was asked, so that batches a producer sends one behind the other into a
partition are appended in that order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.log.producer_state import Duplicate
from holdfast.broker.node.context import NO_RESPONSE, Fields, Hangup, Later, NoResponse, Packed
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
from holdfast.wire.hot import Produced, pack_produce_response

ACKS_ALL: Final = -1
NOT_FLUSHED_IN_TIME: Final = ApiError(ErrorCode.request_timed_out, "not flushed within the time-out")


@dataclass(slots=True, eq=False, repr=False)
class FailedBatch:
    """A batch that was refused, or whose outcome is unknown for good."""

    partition: int
    code: ErrorCode
    message: str | None
    record_indexes: Sequence[int] = ()


class UncommittedBatch:
    """A batch that has been appended, or waits for the coordinator of its transaction, and is not committed."""

    __slots__ = ("partition", "produced")

    def __init__(self, produced: Produced) -> None:
        self.partition = produced.partition
        self.produced = produced


BatchOutcome = Produced | FailedBatch | UncommittedBatch


class Production:
    """One produce request under way: an outcome per partition, and how many are not committed yet."""

    __slots__ = ("has_failures", "later", "topics", "version", "waiting")

    def __init__(self, version: int) -> None:
        self.version = version
        self.topics: list[tuple[str | UUID, list[BatchOutcome]]] = []
        self.waiting = 1
        """How many batches are uncommitted, and one while not all were begun; 0 when the request is over."""
        self.has_failures = False
        self.later = Later()

    def response(self) -> Fields | Packed | NoResponse | Hangup:
        if not self.has_failures:
            return Packed([pack_produce_response(self.version, self.topics)])  # type: ignore[arg-type]
        return {
            "responses": [
                {
                    ("topic_id" if isinstance(topic, UUID) else "name"): topic,
                    "partition_responses": [outcome_fields(outcome) for outcome in outcomes],
                }
                for topic, outcomes in self.topics
            ],
        }

    def settle(self, outcomes: list[BatchOutcome], at: int, error: Exception | None) -> None:
        """The batch of `outcomes[at]` is committed, or its outcome is unknown for good."""
        outcome = outcomes[at]
        if not isinstance(outcome, UncommittedBatch):
            return  # time was over before
        self.waiting -= 1
        try:
            if error is None:
                outcomes[at] = outcome.produced
            else:
                outcomes[at] = failure(outcome.partition, error)
                self.has_failures = True
            if not self.waiting:
                self.later.resolve(self.response())
        except Exception as defect:  # noqa: BLE001 - others wait for the same flush
            self.later.fail(defect)

    def time_out(self) -> None:
        """The client's patience ended before the flush did: what is not committed is reported so."""
        self.later.take(self._report_uncommitted, None)

    def _report_uncommitted(self, _event: None) -> None:
        self.has_failures = True
        self.waiting = 0
        for _, outcomes in self.topics:
            for at, outcome in enumerate(outcomes):
                if isinstance(outcome, UncommittedBatch):
                    outcomes[at] = failure(outcome.partition, NOT_FLUSHED_IN_TIME)
        self.later.take(lambda _: self.later.resolve(self.response()), None)


class SilentProduction(Production):
    """One with acks=0: it gets no response, and an error closes the connection."""

    __slots__ = ()

    def response(self) -> NoResponse | Hangup:
        if self.has_failures:
            return Hangup("a produce request with acks=0 failed; closing is the only way to tell")
        return NO_RESPONSE


def failure(index: int, error: Exception) -> FailedBatch:
    if isinstance(error, ApiError):
        return FailedBatch(index, error.code, error.message)
    if isinstance(error, InvalidRecords):
        return FailedBatch(index, error.code, error.message, error.record_indexes)
    return FailedBatch(index, ErrorCode.kafka_storage_error, str(error))


def outcome_fields(outcome: BatchOutcome) -> Fields:
    assert not isinstance(outcome, UncommittedBatch)
    if isinstance(outcome, FailedBatch):
        errors = [
            {"batch_index": index, "batch_index_error_message": outcome.message}
            for index in outcome.record_indexes
        ]
        return {
            "index": outcome.partition,
            "error_code": outcome.code,
            "base_offset": -1,
            "log_append_time": -1,
            "log_start_offset": -1,
            "record_errors": errors,
            "error_message": outcome.message,
        }
    return {
        "index": outcome.partition,
        "error_code": 0,
        "base_offset": outcome.base_offset,
        "log_append_time": outcome.log_append_time,
        "log_start_offset": outcome.log_start_offset,
    }


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
