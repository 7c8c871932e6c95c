"""Requests about topics and who leads their partitions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Final
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, create_topic
from holdfast.broker.metadata.image import TopicImage
from holdfast.broker.metadata.names import METADATA_TOPIC, check_topic_name
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.administration import (
    OPERATIONS_NOT_ASKED,
    TOPIC_OPERATIONS,
    brokers_on,
    client_name,
    cluster_operations,
    is_internal,
    partition_fields,
    topic_operations,
)
from holdfast.broker.node.services import ClusterServices
from holdfast.errors import ApiError
from holdfast.saying import info
from holdfast.seams import Now

NAMES_TOLD_MAX: Final = 1000
"""Pairs of topic and client that were reported: enough for honest mistakes, and a bound for the others."""


def metadata(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """Metadata (3), versions 0 to 13: brokers, topics and who leads their partitions.

    Addresses are those of the listener the client came in by. In version 0 no topics means all of them, later
    null does and none means none. Topics can be named by id from version 12; versions 10 and 11 carry an id but
    refuse it, as Kafka does. Asking for a topic creates it only with `auto.create.topics.enable`, which is off
    by default; then the operator is told once who asks for what.
    """
    version = context.version
    operations = topic_operations(version >= 8 and request.include_topic_authorized_operations)
    asks_cluster = 8 <= version <= 10 and request.include_cluster_authorized_operations
    if _wants_all(version, request):
        topics = [_found(node, topic) for topic in node.metadata.image.topics.values()]
    else:
        may_create = version < 4 or request.allow_auto_topic_creation
        topics = list(_named(node, context, request.topics, may_create, now))
    return {
        "brokers": [
            {"node_id": broker_id, **address}
            for broker_id, address in brokers_on(node, context.session.listener)
        ],
        "cluster_id": node.identity.cluster_id,
        "controller_id": node.identity.node_id,
        "topics": [{**topic, "topic_authorized_operations": operations} for topic in topics],
        "cluster_authorized_operations": cluster_operations(asks_cluster),
        "error_code": ErrorCode.none,
    }


def _wants_all(version: int, request: Any) -> bool:
    return not request.topics if version == 0 else request.topics is None


def _named(
    node: ClusterServices, context: RequestContext, wanted: Iterable[Any], may_create: bool, now: Now
) -> Iterator[Fields]:
    """Each topic once, however often and in whichever way it is named."""
    answered: set[str] = set()
    for each in wanted:
        topic_id: UUID | None = each.topic_id if context.version >= 10 else None
        name: str | None = each.name
        if topic_id is not None and context.version < 12:
            yield _missing(name or "", ErrorCode.invalid_request, topic_id)
            continue
        if topic_id is not None:
            topic = node.metadata.image.topic_by_id(topic_id)
            if topic is None:
                yield _missing(None, ErrorCode.unknown_topic_id, topic_id)
                continue
            name = topic.name
        if name is None:
            yield _missing("", ErrorCode.invalid_request, None)
        elif name not in answered:
            answered.add(name)
            yield _by_name(node, context, name, may_create, now)


def _by_name(node: ClusterServices, context: RequestContext, name: str, may_create: bool, now: Now) -> Fields:
    topic = node.metadata.image.topic(name)
    if topic is not None:
        return _found(node, topic)
    try:
        check_topic_name(name)
        _create_if_allowed(node, context, name, may_create, now)
    except ApiError as refused:
        return _missing(name, refused.code, None)
    return _found(node, node.metadata.image.topics[name])


def _create_if_allowed(
    node: ClusterServices, context: RequestContext, name: str, may_create: bool, now: Now
) -> None:
    if not node.settings.broker.auto_create_topics_enable:
        _tell_operator(node, context, name)
    elif may_create and name != METADATA_TOPIC and not is_internal(name):
        node.metadata.append(
            create_topic(node.metadata.image, NewTopic(name), node.settings.broker, node.seams.randomness),
            now,
        )
        text = f"topic {name!r} was created because {client_name(context)} asked for it"
        node.say(info(text, kind="created topic"))
        return
    raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {name!r} does not exist")


def _tell_operator(node: ClusterServices, context: RequestContext, name: str) -> None:
    """Once for each topic and client: a mistyped name is seen, a polling client does not fill the log."""
    key = (name, context.session.client_id or "")
    if key in node.unserved_topics or len(node.unserved_topics) >= NAMES_TOLD_MAX:
        return
    node.unserved_topics.add(key)
    node.say(
        f"{client_name(context)} asks for topic {name!r}, which does not exist; "
        "create it, or set auto.create.topics.enable=true to have such topics created"
    )


def _found(node: ClusterServices, topic: TopicImage) -> Fields:
    return {
        "error_code": ErrorCode.none,
        "name": topic.name,
        "topic_id": topic.topic_id,
        "is_internal": is_internal(topic.name),
        "partitions": [partition_fields(node, topic, partition) for partition in topic.partitions],
    }


def _missing(name: str | None, code: ErrorCode, topic_id: UUID | None) -> Fields:
    return {
        "error_code": code,
        "name": name,
        "topic_id": topic_id,
        "is_internal": name is not None and is_internal(name),
        "partitions": [],
    }


def describe_topic_partitions(
    node: ClusterServices, context: RequestContext, request: Any, now: Now
) -> Fields:
    """DescribeTopicPartitions (75), version 0: topics in the order of their names, a page at a time.

    A page ends at the limit of partitions, and its cursor names the partition the next page begins with. No names
    asks for every topic.
    """
    cursor = request.cursor
    asked = sorted({topic.name for topic in request.topics} or node.metadata.image.topics)
    if cursor is not None and _is_beside(cursor, request):
        return {
            "topics": [_undescribed(name, ErrorCode.invalid_request, OPERATIONS_NOT_ASKED) for name in asked],
            "next_cursor": None,
        }
    first = 0
    if cursor is not None:
        asked = [name for name in asked if name >= cursor.topic_name]
        if asked and asked[0] == cursor.topic_name:
            first = cursor.partition_index
    room = max(
        1, min(request.response_partition_limit, node.settings.broker.max_request_partition_size_limit)
    )
    topics: list[Fields] = []
    for name in asked:
        if room == 0:
            return {"topics": topics, "next_cursor": _cursor(name, 0)}
        shown, left = _page_of(node, name, first, room)
        topics.append(shown)
        if left is not None:
            return {"topics": topics, "next_cursor": _cursor(name, left)}
        room -= len(shown["partitions"])
        first = 0
    return {"topics": topics, "next_cursor": None}


def _is_beside(cursor: Any, request: Any) -> bool:
    """Whether the cursor cannot be one this request's earlier page ended with."""
    names = {topic.name for topic in request.topics}
    return cursor.partition_index < 0 or bool(names and cursor.topic_name not in names)


def _page_of(node: ClusterServices, name: str, first: int, room: int) -> tuple[Fields, int | None]:
    """A topic from one of its partitions on, and the partition that no longer fits."""
    topic = node.metadata.image.topic(name)
    if topic is None:
        try:
            check_topic_name(name)
        except ApiError as refused:
            return _undescribed(name, refused.code, TOPIC_OPERATIONS), None
        return _undescribed(name, ErrorCode.unknown_topic_or_partition, TOPIC_OPERATIONS), None
    shown = topic.partitions[first : first + room]
    fields = {
        "error_code": ErrorCode.none,
        "name": name,
        "topic_id": topic.topic_id,
        "is_internal": is_internal(name),
        "partitions": [
            {
                **partition_fields(node, topic, partition),
                "eligible_leader_replicas": partition.eligible_leader_replicas,
                "last_known_elr": partition.last_known_elr,
            }
            for partition in shown
        ],
        "topic_authorized_operations": TOPIC_OPERATIONS,
    }
    end = first + len(shown)
    return fields, end if end < len(topic.partitions) and shown else None


def _undescribed(name: str, code: ErrorCode, operations: int) -> Fields:
    return {
        "error_code": code,
        "name": name,
        "topic_id": None,
        "is_internal": is_internal(name),
        "partitions": [],
        "topic_authorized_operations": operations,
    }


def _cursor(topic: str, index: int) -> Fields:
    return {"topic_name": topic, "partition_index": index}
