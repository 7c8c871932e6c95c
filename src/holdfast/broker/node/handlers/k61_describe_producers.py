"""DescribeProducers (61), version 0: who writes to a partition, as its producer state knows them.

The answer leaves when everything it tells is committed: a transaction that a crash could take back is nobody's
business yet.
"""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.node.context import Answer, Fields, Later, RequestContext
from holdfast.broker.node.handlers.administration import code_of
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import DataServices
from holdfast.errors import ApiError
from holdfast.seams import Now


class Describing:
    """One request under way: what is told of each partition, and how many of them are not committed yet."""

    def __init__(self, node: DataServices) -> None:
        self._node = node
        self.waiting = 1  # for the last partition to be added
        self.later = Later()
        self.fields: Fields = {"throttle_time": 0, "topics": []}

    def add(self, hosted: HostedPartition) -> Fields:
        partition: Fields = {
            "partition_index": hosted.index,
            "error_code": 0,
            "active_producers": [producer._asdict() for producer in hosted.log.producers.describe()],
        }

        def committed(error: Exception | None) -> None:
            self.waiting -= 1
            if error is not None:
                partition.update(_refused(hosted.index, code_of(error), str(error)))
            if not self.waiting:
                self.later.resolve(self.fields)

        self.waiting += 1
        end_offset = hosted.log.end_offset
        if not hosted.offsets.is_committed(end_offset):
            # A coordinator's log may end with records that no flush was asked for.
            self._node.commit.request(hosted)
        hosted.offsets.when_committed(end_offset, self.later.step(committed))
        return partition


def handle(node: DataServices, context: RequestContext, request: Any, now: Now) -> Answer:
    describing = Describing(node)
    for topic in request.topics:
        partitions = [_one(node, describing, topic.name, index) for index in topic.partition_indexes]
        describing.fields["topics"].append({"name": topic.name, "partitions": partitions})
    describing.waiting -= 1
    return describing.later if describing.waiting else describing.fields


def _one(node: DataServices, describing: Describing, topic: str, index: int) -> Fields:
    try:
        return describing.add(node.partitions.leader_of(topic, index))
    except ApiError as error:
        return _refused(index, error.code, error.message)


def _refused(index: int, code: ErrorCode, message: str | None) -> Fields:
    return {"partition_index": index, "error_code": code, "error_message": message, "active_producers": []}
