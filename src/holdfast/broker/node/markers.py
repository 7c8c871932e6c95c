"""Ending a transaction in one partition: the marker is appended, and everybody who keeps account is told.

The log's producer state and transaction index follow the append. The last stable offset follows when the marker
is below the high watermark, with the flush that is asked for here. A partition that holds groups' committed offsets has
a coordinator beside its log, which learns at once what becomes of the pending ones: its answers wait for the flush.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kio.schema.errors import ErrorCode

from holdfast.broker.log.end_markers import build_end_marker
from holdfast.broker.node.commit import GroupCommit
from holdfast.broker.node.group_service import GroupService
from holdfast.broker.node.hosted import HostedPartition
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.batch import read_header, with_log_append_time
from holdfast.wire.control_records import EndTransactionMarker

if TYPE_CHECKING:
    from holdfast.broker.node.transaction_service import TransactionService


def ends_hanging(
    transactions: TransactionService,
    hosted: HostedPartition,
    producer_id: int,
    producer_epoch: int,
    coordinator_epoch: int,
) -> bool:
    """Whether a marker that none of our coordinators sent ends a transaction that hangs; False for one that has ended.

    Anybody can send one. In a transaction that a coordinator knows of, it would decide about part of what the
    coordinator decides about as a whole; and epochs nobody has reached would fence those who have not yet.
    """
    producers = hosted.log.producers
    known_epoch = max(transactions.epoch, producers.coordinator_epoch(producer_id))
    if coordinator_epoch > known_epoch:
        raise ApiError(
            ErrorCode.invalid_request,
            f"no coordinator has reached epoch {coordinator_epoch}: the latest is {known_epoch}",
        )
    if not producers.has_transaction(producer_id):
        return False
    if not any(producers.has_transaction(producer_id, producer_epoch - above) for above in (0, 1)):
        raise ApiError(
            ErrorCode.invalid_producer_epoch,
            f"the transaction of producer {producer_id} in {hosted.name} has another epoch than {producer_epoch}",
        )
    owner = transactions.owner_of(producer_id, (hosted.topic, hosted.index))
    if owner is not None:
        raise ApiError(
            ErrorCode.invalid_txn_state,
            f"the coordinator of transactional id {owner!r} ends this transaction",
        )
    return True


class Markers:
    def __init__(self, commit: GroupCommit, groups: GroupService) -> None:
        self._commit = commit
        self._groups = groups

    def append(
        self,
        hosted: HostedPartition,
        producer_id: int,
        producer_epoch: int,
        is_commit: bool,
        coordinator_epoch: int,
        transaction_version: int,
        now: Now,
    ) -> int:
        """Append the marker; returns the end offset that must be committed before its transaction has ended here.

        Raises `ApiError` when producer or coordinator are fenced, or the log cannot be written: nothing has changed.
        """
        log = hosted.log
        if hosted.offline or hosted.is_deleted or hosted.offsets.failure is not None:
            raise ApiError(ErrorCode.kafka_storage_error, f"{hosted.name} is offline")
        log.producers.check_marker(
            producer_id, producer_epoch, coordinator_epoch, transaction_version=transaction_version
        )
        batch = build_end_marker(
            producer_id, producer_epoch, EndTransactionMarker(is_commit, coordinator_epoch), now.wall_ms
        )
        header = read_header(batch)
        if log.config.message_timestamp_type == "LogAppendTime":
            batch = with_log_append_time(header, batch, now.wall_ms)
            header = read_header(batch)
        hosted.append(header, batch, now)
        end_offset = log.end_offset
        if hosted.topic == self._groups.topic:
            coordinator = self._groups.known_at(hosted.index)
            if coordinator is not None:
                coordinator.machine.end_transaction(producer_id, is_commit, now)
        self._commit.appended(hosted)
        return end_offset
