"""DescribeTransactions (65), version 0: what the coordinator knows of transactional ids."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    journals: dict[CoordinatorPartition, None] = {}
    states = [_one(node, transactional_id, now, journals) for transactional_id in request.transactional_ids]

    def refused(code: ErrorCode) -> Fields:
        return {"transaction_states": [_unknown(name, code) for name in request.transactional_ids]}

    return answer_all(journals, {"transaction_states": states}, refused)


def _one(
    node: TransactionServices, transactional_id: str, now: Now, journals: dict[CoordinatorPartition, None]
) -> Fields:
    try:
        check_transactional_id(transactional_id)
        journal, machine = node.transactions.known(transactional_id, now)
    except ApiError as error:
        return _unknown(transactional_id, error.code)
    journals[journal] = None
    metadata = machine.describe(transactional_id)
    if metadata is None:
        return _unknown(transactional_id, ErrorCode.transactional_id_not_found)
    by_topic: dict[str, list[int]] = {}
    for topic, index in sorted(metadata.partitions):
        by_topic.setdefault(topic, []).append(index)
    return {
        "error_code": ErrorCode.none,
        "transactional_id": transactional_id,
        "transaction_state": metadata.state.label,
        "transaction_timeout": metadata.timeout_ms,
        "transaction_start_time": metadata.start_ms,
        "producer_id": metadata.producer_id,
        "producer_epoch": metadata.producer_epoch,
        "topics": [{"topic": topic, "partitions": indexes} for topic, indexes in by_topic.items()],
    }


def _unknown(transactional_id: str, code: ErrorCode) -> Fields:
    return {"error_code": code, "transactional_id": transactional_id, "transaction_start_time": 0}
