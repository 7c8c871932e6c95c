"""ElectLeaders (43), versions 0 to 2: back to the preferred leader, or to any replica when none leads.

Null asks for every partition, and those that have the leader they should have are then left out.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import elect_leader
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.handlers.administration import NOT_IN_TIME, deadline_ms
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now

PREFERRED: Final = 0
UNCLEAN: Final = 1


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    election = request.election_type if context.version >= 1 else PREFERRED
    code = ErrorCode.none if election in (PREFERRED, UNCLEAN) else ErrorCode.invalid_request
    everything = request.topic_partitions is None
    if everything:
        wanted = [(topic.name, range(len(topic.partitions))) for topic in node.metadata.image.topics.values()]
    else:
        wanted = [(topic.topic, topic.partitions) for topic in request.topic_partitions]
    results = []
    for topic, indexes in wanted:
        partitions = [_one(node, topic, index, election, now) for index in indexes]
        if everything:
            partitions = [one for one in partitions if one["error_code"] is not ErrorCode.election_not_needed]
        results.append({"topic": topic, "partition_result": partitions})
    answer = {"throttle_time": 0, "error_code": code, "replica_election_results": results}
    return Within(answer, deadline_ms(request, now), _too_late(request))


def _too_late(request: Any) -> Fields:
    code = ErrorCode.request_timed_out
    results = [
        {
            "topic": topic.topic,
            "partition_result": [_result(index, code, NOT_IN_TIME) for index in topic.partitions],
        }
        for topic in request.topic_partitions or ()
    ]
    everything = request.topic_partitions is None
    return {
        "throttle_time": 0,
        "error_code": code if everything else ErrorCode.none,
        "replica_election_results": results,
    }


def _one(node: ClusterServices, topic: str, index: int, election: int, now: Now) -> Fields:
    code, message = ErrorCode.none, None
    try:
        if election not in (PREFERRED, UNCLEAN):
            raise ApiError(ErrorCode.invalid_request, f"election type {election} is unknown")
        node.metadata.append(
            elect_leader(node.metadata.image, topic, index, unclean=election == UNCLEAN), now
        )
    except ApiError as refused:
        code, message = refused.code, refused.message
    return _result(index, code, message)


def _result(index: int, code: ErrorCode, message: str | None) -> Fields:
    return {"partition_id": index, "error_code": code, "error_message": message}
