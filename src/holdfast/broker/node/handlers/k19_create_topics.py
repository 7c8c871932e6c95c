"""CreateTopics (19), versions 2 to 7.

Each topic is created whole or refused. Versions from 5 answer with the number of partitions, the replication
factor and every setting with its source, as the topic has them; from 7 with its id. A name that occurs twice
in a request is refused and neither topic is made.
"""

from __future__ import annotations

from typing import Any
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.changes import NewTopic, create_topic, duplicates
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.handlers.administration import NOT_IN_TIME, has_no_time, within
from holdfast.broker.node.services import ClusterServices
from holdfast.config.describe import describe_topic
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.metadata_records import Config, MetadataRecord, Partition, Topic

CONFIGS_SINCE = 5


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    repeated = duplicates(topic.name for topic in request.topics)
    results = [
        _one(node, context, topic, request, now) for topic in request.topics if topic.name not in repeated
    ]
    results += [
        _refused(name, ErrorCode.invalid_request, f"topic {name!r} is named more than once in the request")
        for name in sorted(repeated)
    ]
    names = dict.fromkeys(topic.name for topic in request.topics)
    too_late = [_refused(name, ErrorCode.request_timed_out, NOT_IN_TIME) for name in names]
    return within(request, now, "topics", results, too_late)


def _one(node: ClusterServices, context: RequestContext, topic: Any, request: Any, now: Now) -> Fields:
    if has_no_time(request):
        return _refused(topic.name, ErrorCode.request_timed_out, "the request allows no time")
    wanted = NewTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [(assignment.partition_index, assignment.broker_ids) for assignment in topic.assignments],
        [(config.name, config.value) for config in topic.configs],
    )
    try:
        records = create_topic(node.metadata.image, wanted, node.settings.broker, node.seams.randomness)
        if not request.validate_only:
            node.metadata.append(records, now)
    except ApiError as refused:
        return _refused(topic.name, refused.code, refused.message)
    return _created(node, context, topic.name, records)


def _created(
    node: ClusterServices, context: RequestContext, name: str, records: list[MetadataRecord]
) -> Fields:
    """The answer, from the records: a topic that was only validated is described in the same words."""
    topic_id: UUID | None = None
    partitions: list[Partition] = []
    settings: dict[str, str] = {}
    for record in records:
        match record:
            case Topic():
                topic_id = record.topic_id
            case Partition():
                partitions.append(record)
            case Config() if record.value is not None:
                settings[record.name] = record.value
    configs: list[Fields] = []
    if context.version >= CONFIGS_SINCE:
        configs = [
            {
                "name": entry.name,
                "value": entry.value,
                "read_only": entry.read_only,
                "config_source": entry.config_source,
                "is_sensitive": entry.is_sensitive,
            }
            for entry in describe_topic(node.settings.broker, settings)
        ]
    return {
        "name": name,
        "topic_id": topic_id,
        "error_code": ErrorCode.none,
        "error_message": None,
        "num_partitions": len(partitions),
        "replication_factor": len(partitions[0].replicas),
        "configs": configs,
    }


def _refused(name: str, code: ErrorCode, message: str | None) -> Fields:
    return {
        "name": name,
        "error_code": code,
        "error_message": message,
        "num_partitions": -1,
        "replication_factor": -1,
        "configs": [],
    }
