"""Requests that create, change and delete topics and choose who leads partitions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, Final, NamedTuple
from uuid import UUID

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata import changes
from holdfast.broker.metadata.image import TopicImage
from holdfast.broker.node.context import Fields, RequestContext, Within
from holdfast.broker.node.handlers.administration import NOT_IN_TIME, deadline_ms, has_no_time, within
from holdfast.broker.node.services import ClusterServices
from holdfast.config.describe import describe_topic
from holdfast.errors import ApiError
from holdfast.seams import Now
from holdfast.wire.metadata_records import Config, MetadataRecord, Partition, Topic

CONFIGS_SINCE = 5


def create_topics(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    """CreateTopics (19), versions 2 to 7.

    Each topic is created whole or refused. Versions from 5 answer with the number of partitions, the replication
    factor and every setting with its source, as the topic has them; from 7 with its id. A name that occurs twice
    in a request is refused and neither topic is made.
    """
    repeated = changes.duplicates(topic.name for topic in request.topics)
    results = [
        _create(node, context, topic, request, now) for topic in request.topics if topic.name not in repeated
    ]
    results += [
        _not_created(
            name, ErrorCode.invalid_request, f"topic {name!r} is named more than once in the request"
        )
        for name in sorted(repeated)
    ]
    names = dict.fromkeys(topic.name for topic in request.topics)
    too_late = [_not_created(name, ErrorCode.request_timed_out, NOT_IN_TIME) for name in names]
    return within(request, now, "topics", results, too_late)


def _create(node: ClusterServices, context: RequestContext, topic: Any, request: Any, now: Now) -> Fields:
    if has_no_time(request):
        return _not_created(topic.name, ErrorCode.request_timed_out, "the request allows no time")
    wanted = changes.NewTopic(
        topic.name,
        topic.num_partitions,
        topic.replication_factor,
        [(assignment.partition_index, assignment.broker_ids) for assignment in topic.assignments],
        [(config.name, config.value) for config in topic.configs],
    )
    try:
        records = changes.create_topic(
            node.metadata.image, wanted, node.settings.broker, node.seams.randomness
        )
        if not request.validate_only:
            node.metadata.append(records, now)
    except ApiError as refused:
        return _not_created(topic.name, refused.code, refused.message)
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


def _not_created(name: str, code: ErrorCode, message: str | None) -> Fields:
    return {
        "name": name,
        "error_code": code,
        "error_message": message,
        "num_partitions": -1,
        "replication_factor": -1,
        "configs": [],
    }


class WantedTopic(NamedTuple):
    name: str | None
    topic_id: UUID | None


def delete_topics(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    """DeleteTopics (20), versions 1 to 6: by name, from version 6 also by id.

    A topic that is named twice, in whichever way, is refused and stays. Files go once the record that removes the
    topic is durable, which is also when the answer leaves.
    """
    if context.version >= 6:
        wanted = [WantedTopic(topic.name, topic.topic_id) for topic in request.topics]
    else:
        wanted = [WantedTopic(name, None) for name in request.topic_names]
    blanket = _refusal_of_all(node, context, request)
    times = Counter(wanted)
    results = [_delete(node, each, times, blanket, now) for each in times]
    too_late = [_deleted(*each, ErrorCode.request_timed_out, NOT_IN_TIME) for each in times]
    return within(request, now, "responses", results, too_late)


def _refusal_of_all(node: ClusterServices, context: RequestContext, request: Any) -> ApiError | None:
    if not node.settings.broker.delete_topic_enable:
        code = ErrorCode.topic_deletion_disabled if context.version >= 3 else ErrorCode.invalid_request
        return ApiError(code, "delete.topic.enable is false on this broker")
    if has_no_time(request):
        return ApiError(ErrorCode.request_timed_out, "the request allows no time")
    return None


def _delete(
    node: ClusterServices, each: WantedTopic, times: Counter[WantedTopic], blanket: ApiError | None, now: Now
) -> Fields:
    name, topic_id = each
    try:
        if blanket is not None:
            raise blanket
        topic = _find_wanted(node, each, times)
        # By a name the id, and by an id the name, is told only once the topic is found.
        name, topic_id = topic.name, topic.topic_id
        if times[WantedTopic(name, None)] + times[WantedTopic(None, topic_id)] > 1:
            raise ApiError(ErrorCode.invalid_request, f"topic {name!r} is named by name and by id")
        node.metadata.append(changes.delete_topic(node.metadata.image, topic.topic_id), now)
    except ApiError as refused:
        return _deleted(name, topic_id, refused.code, refused.message)
    return _deleted(name, topic_id, ErrorCode.none, None)


def _find_wanted(node: ClusterServices, each: WantedTopic, times: Counter[WantedTopic]) -> TopicImage:
    name, topic_id = each
    if name is not None and topic_id is not None:
        raise ApiError(ErrorCode.invalid_request, f"topic {name!r} is named by id as well: give one of both")
    if times[each] > 1:
        raise ApiError(ErrorCode.invalid_request, f"topic {name or topic_id!r} is named more than once")
    if name is not None:
        return changes.existing_topic(node.metadata.image, name)
    if topic_id is None:
        raise ApiError(ErrorCode.invalid_request, "a topic without a name and without an id")
    topic = node.metadata.image.topic_by_id(topic_id)
    if topic is None:
        raise ApiError(ErrorCode.unknown_topic_id, f"no topic has the id {topic_id}")
    return topic


def _deleted(name: str | None, topic_id: UUID | None, code: ErrorCode, message: str | None) -> Fields:
    return {"name": name, "topic_id": topic_id, "error_code": code, "error_message": message}


def create_partitions(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    """CreatePartitions (37), versions 0 to 3: more partitions for a topic; there is no way to fewer."""
    repeated = changes.duplicates(topic.name for topic in request.topics)
    results = [
        _grown(name, ErrorCode.invalid_request, f"topic {name!r} is named more than once in the request")
        for name in sorted(repeated)
    ]
    results += [_grow(node, topic, request, now) for topic in request.topics if topic.name not in repeated]
    names = dict.fromkeys(topic.name for topic in request.topics)
    too_late = [_grown(name, ErrorCode.request_timed_out, NOT_IN_TIME) for name in names]
    return within(request, now, "results", results, too_late)


def _grow(node: ClusterServices, topic: Any, request: Any, now: Now) -> Fields:
    if has_no_time(request):
        return _grown(topic.name, ErrorCode.request_timed_out, "the request allows no time")
    assignments = None
    if topic.assignments is not None:
        assignments = [assignment.broker_ids for assignment in topic.assignments]
    try:
        records = changes.add_partitions(
            node.metadata.image, topic.name, topic.count, assignments, node.seams.randomness
        )
        if not request.validate_only:
            node.metadata.append(records, now)
    except ApiError as refused:
        return _grown(topic.name, refused.code, refused.message)
    return _grown(topic.name, ErrorCode.none, None)


def _grown(name: str, code: ErrorCode, message: str | None) -> Fields:
    return {"name": name, "error_code": code, "error_message": message}


PREFERRED: Final = 0
UNCLEAN: Final = 1


def elect_leaders(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Within:
    """ElectLeaders (43), versions 0 to 2: back to the preferred leader, or to any replica when none leads.

    Null asks for every partition, and those that have the leader they should have are then left out.
    """
    election = request.election_type if context.version >= 1 else PREFERRED
    code = ErrorCode.none if election in (PREFERRED, UNCLEAN) else ErrorCode.invalid_request
    everything = request.topic_partitions is None
    if everything:
        wanted = [(topic.name, range(len(topic.partitions))) for topic in node.metadata.image.topics.values()]
    else:
        wanted = [(topic.topic, topic.partitions) for topic in request.topic_partitions]
    results = []
    for topic, indexes in wanted:
        partitions = [_elect(node, topic, index, election, now) for index in indexes]
        if everything:
            partitions = [one for one in partitions if one["error_code"] is not ErrorCode.election_not_needed]
        results.append({"topic": topic, "partition_result": partitions})
    answer = {"error_code": code, "replica_election_results": results}
    return Within(answer, deadline_ms(request, now), _too_late(request))


def _too_late(request: Any) -> Fields:
    code = ErrorCode.request_timed_out
    results = [
        {
            "topic": topic.topic,
            "partition_result": [_elected(index, code, NOT_IN_TIME) for index in topic.partitions],
        }
        for topic in request.topic_partitions or ()
    ]
    everything = request.topic_partitions is None
    return {
        "error_code": code if everything else ErrorCode.none,
        "replica_election_results": results,
    }


def _elect(node: ClusterServices, topic: str, index: int, election: int, now: Now) -> Fields:
    code, message = ErrorCode.none, None
    try:
        if election not in (PREFERRED, UNCLEAN):
            raise ApiError(ErrorCode.invalid_request, f"election type {election} is unknown")
        node.metadata.append(
            changes.elect_leader(node.metadata.image, topic, index, unclean=election == UNCLEAN), now
        )
    except ApiError as refused:
        code, message = refused.code, refused.message
    return _elected(index, code, message)


def _elected(index: int, code: ErrorCode, message: str | None) -> Fields:
    return {"partition_id": index, "error_code": code, "error_message": message}


def alter_partition_reassignments(
    node: ClusterServices, context: RequestContext, request: Any, now: Now
) -> Fields:
    """AlterPartitionReassignments (45), versions 0 and 1: replicas stay where they are.

    Asking for the replicas a partition has is fine and changes nothing, cancelling finds nothing to cancel, and
    anything else is refused: there is one broker.
    """
    return {
        "allow_replication_factor_change": context.version < 1 or request.allow_replication_factor_change,
        "error_code": ErrorCode.none,
        "error_message": None,
        "responses": [
            {
                "name": topic.name,
                "partitions": [_reassign(node, topic.name, partition) for partition in topic.partitions],
            }
            for topic in request.topics
        ],
    }


def _reassign(node: ClusterServices, topic: str, partition: Any) -> Fields:
    code, message = ErrorCode.none, None
    try:
        _check_reassignment(node, topic, partition.partition_index, partition.replicas)
    except ApiError as refused:
        code, message = refused.code, refused.message
    return {"partition_index": partition.partition_index, "error_code": code, "error_message": message}


def _check_reassignment(
    node: ClusterServices, topic: str, index: int, replicas: Sequence[int] | None
) -> None:
    changes.existing_topic(node.metadata.image, topic)
    partition = node.metadata.image.partition(topic, index)
    if partition is None:
        raise ApiError(ErrorCode.unknown_topic_or_partition, f"topic {topic!r} has no partition {index}")
    if replicas is None:
        raise ApiError(ErrorCode.no_reassignment_in_progress, f"{topic}-{index} is not being moved")
    if changes.checked_replicas(node.metadata.image, replicas, None) != partition.replicas:
        raise ApiError(ErrorCode.invalid_replica_assignment, f"{topic}-{index} cannot be moved")


def list_partition_reassignments(
    node: ClusterServices, context: RequestContext, request: Any, now: Now
) -> Fields:
    """ListPartitionReassignments (46), version 0: no partition is ever on the move."""
    return {"error_code": ErrorCode.none, "error_message": None, "topics": []}
