"""AddPartitionsToTxn (24), versions 0 to 5: partitions become part of a transaction.

Versions 0 to 3 come from clients of the older protocol: one transaction. Versions 4 and 5 are what Kafka's brokers say
to each other: several transactions, each to be extended or, with `verify_only`, only looked at. As with Kafka, a client
that may act on the cluster may send them too. One partition that cannot be added keeps all the others out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, RequestContext
from holdfast.broker.node.coordinator_partition import CoordinatorPartition
from holdfast.broker.node.group_service import answer_all
from holdfast.broker.node.intake import INTERNAL_TOPICS
from holdfast.broker.node.services import TransactionServices
from holdfast.broker.transactions.coordinator import check_transactional_id
from holdfast.broker.transactions.model import (
    NEWER_PROTOCOL,
    OLDER_PROTOCOL,
    AddPartitions,
    ProducerIdentity,
    TopicPartition,
)
from holdfast.errors import ApiError
from holdfast.seams import Now

FENCED_VERSION: Final = 2
BATCHED_VERSION: Final = 4

Codes = dict[TopicPartition, ErrorCode]


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    is_batched = context.version >= BATCHED_VERSION
    asked = request.transactions if is_batched else (_Transaction(request),)
    journals: dict[CoordinatorPartition, None] = {}
    results = [
        (transaction.transactional_id, _one(node, context.version, transaction, now, journals))
        for transaction in asked
    ]

    def refused(code: ErrorCode) -> Fields:
        return _response(context.version, [(name, dict.fromkeys(codes, code)) for name, codes in results])

    return answer_all(journals, _response(context.version, results), refused)


class _Transaction:
    """A request of the older shape, read as one of the newer."""

    def __init__(self, request: Any) -> None:
        self.transactional_id = request.v3_and_below_transactional_id
        self.producer_id = request.v3_and_below_producer_id
        self.producer_epoch = request.v3_and_below_producer_epoch
        self.topics = request.v3_and_below_topics
        self.verify_only = False


def _one(
    node: TransactionServices,
    version: int,
    transaction: Any,
    now: Now,
    journals: dict[CoordinatorPartition, None],
) -> Codes:
    partitions = [(topic.name, index) for topic in transaction.topics for index in topic.partitions]
    refused = _unwritable(node, version, partitions)
    if refused:
        return {
            partition: refused.get(partition, ErrorCode.operation_not_attempted) for partition in partitions
        }
    try:
        check_transactional_id(transaction.transactional_id)
        found = node.transactions.known(transaction.transactional_id, now)
    except ApiError as error:
        return dict.fromkeys(partitions, error.code)
    journals[found.journal] = None
    addition = AddPartitions(
        transaction.transactional_id,
        ProducerIdentity(transaction.producer_id, transaction.producer_epoch),
        frozenset(partitions),
        NEWER_PROTOCOL if version >= BATCHED_VERSION else OLDER_PROTOCOL,
    )
    if transaction.verify_only:
        outside = found.machine.partitions_outside(addition)
        return {partition: outside.get(partition, ErrorCode.none) for partition in partitions}
    code = found.machine.add_partitions(addition, now)
    if code is ErrorCode.producer_fenced and version < FENCED_VERSION:
        code = ErrorCode.invalid_producer_epoch
    return dict.fromkeys(partitions, code)


def _unwritable(
    node: TransactionServices, version: int, partitions: list[TopicPartition]
) -> Mapping[TopicPartition, ErrorCode]:
    refused: Codes = {}
    for topic, index in partitions:
        if version < BATCHED_VERSION and topic in INTERNAL_TOPICS:
            refused[topic, index] = ErrorCode.topic_authorization_failed
        elif node.metadata.image.partition(topic, index) is None:
            refused[topic, index] = ErrorCode.unknown_topic_or_partition
    return refused


def _response(version: int, results: list[tuple[str, Codes]]) -> Fields:
    if version < BATCHED_VERSION:
        return {"results_by_topic_v3_and_below": _topics(results[0][1])}
    return {
        "error_code": ErrorCode.none,
        "results_by_transaction": [
            {"transactional_id": transactional_id, "topic_results": _topics(codes)}
            for transactional_id, codes in results
        ],
    }


def _topics(codes: Codes) -> list[Fields]:
    by_topic: dict[str, list[Fields]] = {}
    for (topic, index), code in codes.items():
        by_topic.setdefault(topic, []).append({"partition_index": index, "partition_error_code": code})
    return [{"name": topic, "results_by_partition": partitions} for topic, partitions in by_topic.items()]
