"""WriteTxnMarkers (27), versions 1 and 2: a coordinator, or an operator, ends transactions in partitions.

Each marker is answered for each partition, once it is committed there. Version 2 says by which rules the
transaction ran, which decides how its epoch is checked. Our coordinators do not send it; an operator does, to end
a hanging transaction: one that no coordinator knows of any more. No other is ended (`holdfast.broker.node.markers`).
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.markers import ends_hanging
from holdfast.broker.node.services import TransactionServices
from holdfast.errors import ApiError
from holdfast.seams import Now

Codes = dict[int, dict[str, dict[int, int]]]
"""The answer: error code by producer id, topic and partition."""


class Writing:
    """One request under way: an error code for each marker, and how many are not committed yet."""

    def __init__(self) -> None:
        self.codes: Codes = {}
        self.waiting = 1  # for the last marker to be begun
        self.later = Later()

    def settle(self, producer_id: int, topic: str, index: int, error: Exception | None) -> None:
        if error is not None:
            code = error.code if isinstance(error, ApiError) else ErrorCode.kafka_storage_error
            self.codes[producer_id][topic][index] = code
        self.waiting -= 1
        if not self.waiting:
            self.later.resolve(self.response())

    def response(self) -> Fields:
        return {
            "markers": [
                {
                    "producer_id": producer_id,
                    "topics": [
                        {
                            "name": topic,
                            "partitions": [
                                {"partition_index": index, "error_code": code}
                                for index, code in partitions.items()
                            ],
                        }
                        for topic, partitions in topics.items()
                    ],
                }
                for producer_id, topics in self.codes.items()
            ]
        }


def handle(node: TransactionServices, context: RequestContext, request: Any, now: Now) -> Answer:
    writing = Writing()
    has_nobody = any(marker.producer_id < 0 or marker.producer_epoch < 0 for marker in request.markers)
    for marker in request.markers:
        for topic in marker.topics:
            for index in topic.partition_indexes:
                codes = writing.codes.setdefault(marker.producer_id, {}).setdefault(topic.name, {})
                codes[index] = 0
                try:
                    if has_nobody:  # as Kafka: a marker of nobody's spoils the request
                        raise ApiError(ErrorCode.unknown_server_error)
                    _write(node, writing, marker, topic.name, index, now)
                except ApiError as error:
                    codes[index] = error.code
    writing.waiting -= 1
    return writing.later if writing.waiting else writing.response()


def _write(
    node: TransactionServices, writing: Writing, marker: Any, topic: str, index: int, now: Now
) -> None:
    hosted = node.partitions.leader_of(topic, index)
    producer_id, epoch, coordinator_epoch = (
        marker.producer_id,
        marker.producer_epoch,
        marker.coordinator_epoch,
    )
    version = getattr(marker, "transaction_version", 0)
    hosted.log.producers.check_marker(producer_id, epoch, coordinator_epoch, transaction_version=version)
    end_offset = hosted.log.end_offset
    if ends_hanging(node.transactions, hosted, producer_id, epoch, coordinator_epoch):
        is_commit = marker.transaction_result
        end_offset = node.transactions.markers.append(
            hosted, producer_id, epoch, is_commit, coordinator_epoch, version, now
        )
    if not hosted.offsets.is_committed(end_offset):
        writing.waiting += 1
        hosted.offsets.when_committed(
            end_offset,
            writing.later.step(lambda error: writing.settle(producer_id, topic, index, error)),
        )
