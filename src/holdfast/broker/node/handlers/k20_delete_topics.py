"""DeleteTopics (20), versions 1 to 6: by name, from version 6 also by id.

A topic that is named twice, in whichever way, is refused and stays. Files go once the record that removes the
topic is durable, which is also when the answer leaves.
"""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import delete_topic, existing_topic
from holdfast.broker.metadata.image import TopicImage
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.handlers.administration import NOT_IN_TIME, has_no_time, within
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.seams import Now


class WantedTopic(NamedTuple):
    name: str | None
    topic_id: UUID | None


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    if context.version >= 6:
        wanted = [WantedTopic(topic.name, topic.topic_id) for topic in request.topics]
    else:
        wanted = [WantedTopic(name, None) for name in request.topic_names]
    blanket = _refusal_of_all(node, context, request)
    times = Counter(wanted)
    results = [_one(node, each, times, blanket, now) for each in times]
    too_late = [_result(*each, ErrorCode.request_timed_out, NOT_IN_TIME) for each in times]
    return within(request, now, "responses", results, too_late)


def _refusal_of_all(node: ClusterServices, context: RequestContext, request: Any) -> ApiError | None:
    if not node.settings.broker.delete_topic_enable:
        code = ErrorCode.topic_deletion_disabled if context.version >= 3 else ErrorCode.invalid_request
        return ApiError(code, "delete.topic.enable is false on this broker")
    if has_no_time(request):
        return ApiError(ErrorCode.request_timed_out, "the request allows no time")
    return None


def _one(
    node: ClusterServices, each: WantedTopic, times: Counter[WantedTopic], blanket: ApiError | None, now: Now
) -> Fields:
    name, topic_id = each
    try:
        if blanket is not None:
            raise blanket
        topic = _find(node, each, times)
        # By a name the id, and by an id the name, is told only once the topic is found.
        name, topic_id = topic.name, topic.topic_id
        if times[WantedTopic(name, None)] + times[WantedTopic(None, topic_id)] > 1:
            raise ApiError(ErrorCode.invalid_request, f"topic {name!r} is named by name and by id")
        node.metadata.append(delete_topic(node.metadata.image, topic.topic_id), now)
    except ApiError as refused:
        return _result(name, topic_id, refused.code, refused.message)
    return _result(name, topic_id, ErrorCode.none, None)


def _find(node: ClusterServices, each: WantedTopic, times: Counter[WantedTopic]) -> TopicImage:
    name, topic_id = each
    if name is not None and topic_id is not None:
        raise ApiError(ErrorCode.invalid_request, f"topic {name!r} is named by id as well: give one of both")
    if times[each] > 1:
        raise ApiError(ErrorCode.invalid_request, f"topic {name or topic_id!r} is named more than once")
    if name is not None:
        return existing_topic(node.metadata.image, name)
    if topic_id is None:
        raise ApiError(ErrorCode.invalid_request, "a topic without a name and without an id")
    topic = node.metadata.image.topic_by_id(topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id, f"no topic has the id {topic_id}")
    return topic


def _result(name: str | None, topic_id: UUID | None, code: ErrorCode, message: str | None) -> Fields:
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}
