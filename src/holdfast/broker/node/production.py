"""Produce requests under way: what became of each batch, and the response that tells of it.

acks=all is answered when every batch of the request is committed; acks=1 once written; acks=0 never, and an
error closes the connection. Each partition succeeds or fails by itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import NO_RESPONSE, Fields, Hangup, Later, NoResponse, Packed
from holdfast.errors import ApiError, InvalidRecords
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
            "throttle_time": 0,
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
