"""CreatePartitions (37), versions 0 to 3: more partitions for a topic; there is no way to fewer."""

from __future__ import annotations

from typing import Any

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import add_partitions, duplicates
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.handlers.administration import NOT_IN_TIME, has_no_time, within
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    repeated = duplicates(topic.name for topic in request.topics)
    results = [
        _result(name, ErrorCode.invalid_request, f"topic {name!r} is named more than once in the request")
        for name in sorted(repeated)
    ]
    results += [_one(node, topic, request, now) for topic in request.topics if topic.name not in repeated]
    names = dict.fromkeys(topic.name for topic in request.topics)
    too_late = [_result(name, ErrorCode.request_timed_out, NOT_IN_TIME) for name in names]
    return within(request, now, "results", results, too_late)


def _one(node: ClusterServices, topic: Any, request: Any, now: Now) -> Fields:
    if has_no_time(request):
        return _result(topic.name, ErrorCode.request_timed_out, "the request allows no time")
    assignments = None
    if topic.assignments is not None:
        assignments = [assignment.broker_ids for assignment in topic.assignments]
    try:
        records = add_partitions(
            node.metadata.image, topic.name, topic.count, assignments, node.seams.randomness
        )
        if not request.validate_only:
            node.metadata.append(records, now)
    except ApiError as refused:
        return _result(topic.name, refused.code, refused.message)
    return _result(topic.name, ErrorCode.none, None)


def _result(name: str, code: ErrorCode, message: str | None) -> Fields:
    return {"name": name, "error_code": code, "error_message": message}
