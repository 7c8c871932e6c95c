"""Requests about brokers: what they offer, where they are, what their directories hold. And about what no broker
here has: access control lists, quotas, credentials.
"""

from __future__ import annotations

import re
from collections import Counter
from functools import lru_cache
from typing import Any, Final

from kio.schema.errors import ErrorCode

from holdfast.broker.metadata.names import METADATA_TOPIC
from holdfast.broker.node.context import Fields, Packed, RequestContext
from holdfast.broker.node.directories import LogDirectory
from holdfast.broker.node.dispatch import MODULES
from holdfast.broker.node.handlers.administration import OPERATIONS_NOT_ASKED, brokers_on, cluster_operations
from holdfast.broker.node.hosted import HostedPartition
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now
from holdfast.wire.apis import API_VERSIONS, APIS, BY_KEY, FEATURES, supported_features
from holdfast.wire.messages import encode_response

_SOFTWARE = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9\-.]*[a-zA-Z0-9])?")


def api_versions(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields | Packed:
    """ApiVersions (18), versions 0 to 4: what this broker offers, in the versions Kafka 4.3 offers it.

    A client that asks in a version we do not know gets UNSUPPORTED_VERSION in version 0, with the range we do
    know, and tries again.
    """
    if context.version >= 3:
        for text in (request.client_software_name, request.client_software_version):
            if not _SOFTWARE.fullmatch(text):
                return {"error_code": ErrorCode.invalid_request, "api_keys": []}
    image = node.metadata.image
    return Packed([_offered(context.version, image.last_offset, frozenset(image.features.items()))])


@lru_cache(maxsize=16)
def _offered(version: int, epoch: int, levels: frozenset[tuple[str, int]]) -> bytes:
    """Every connection begins by asking, and the answer is long: it is encoded again when it has changed."""
    features = dict(levels)
    fields = {
        "error_code": 0,
        "api_keys": [
            {"api_key": api.key, "min_version": api.min, "max_version": api.max}
            for api in APIS
            if api.key in MODULES
        ],
        "supported_features": [
            {"name": feature.name, "min_version": feature.min, "max_version": feature.max}
            for feature in supported_features(version)
        ],
        "finalized_features_epoch": epoch,
        "finalized_features": [
            {"name": f.name, "max_version_level": level, "min_version_level": level}
            for f in FEATURES
            if (level := features.get(f.name, f.finalized if f.name == "kraft.version" else 0))
        ],
        "zk_migration_ready": False,
    }
    return encode_response(API_VERSIONS, version, fields)


def unsupported() -> Fields:
    api = BY_KEY[API_VERSIONS]
    return {
        "error_code": ErrorCode.unsupported_version,
        "api_keys": [{"api_key": api.key, "min_version": api.min, "max_version": api.max}],
    }


def update_features(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """UpdateFeatures (57), versions 0 to 2: features stand at the highest level and stay there.

    Asking for the level a feature has is fine. Higher ones are not supported and lower ones are refused: the data
    on disk may need what the present level brought. One refusal refuses the whole request.
    """
    refusals = [
        refusal
        for update in request.feature_updates
        if (refusal := _feature_refusal(node, update.feature, update.max_version_level)) is not None
    ]
    if refusals:
        return {
            "error_code": ErrorCode.invalid_update_version,
            "error_message": "; ".join(refusals),
            "results": [],
        }
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "results": [
            {"feature": update.feature, "error_code": ErrorCode.none, "error_message": None}
            for update in request.feature_updates
        ],
    }


def _feature_refusal(node: ClusterServices, name: str, level: int) -> str | None:
    feature = next((feature for feature in FEATURES if feature.name == name), None)
    if feature is None:
        return f"feature {name!r} is unknown"
    if not feature.min <= level <= feature.max:
        return f"feature {name} has levels {feature.min} to {feature.max}, not {level}"
    current = node.metadata.image.features.get(name, feature.finalized)
    if level != current:
        return f"feature {name} stands at level {current} and cannot be set to {level}"
    return None


BROKERS: Final = 1
CONTROLLERS: Final = 2


def describe_cluster(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeCluster (60), versions 0 to 2: the brokers, as seen on the listener the client came in by."""
    endpoint_type = request.endpoint_type if context.version >= 1 else BROKERS
    if endpoint_type == CONTROLLERS:
        return _not_described(
            ErrorCode.mismatched_endpoint_type, "this listener is a broker's, not a controller's"
        )
    if endpoint_type != BROKERS:
        return _not_described(
            ErrorCode.unsupported_endpoint_type, f"endpoint type {endpoint_type} is unknown"
        )
    fenced_too = context.version >= 2 and request.include_fenced_brokers
    return {
        "error_code": ErrorCode.none,
        "error_message": None,
        "endpoint_type": BROKERS,
        "cluster_id": node.identity.cluster_id,
        "controller_id": node.identity.node_id,
        "brokers": [
            {"broker_id": broker_id, "is_fenced": node.metadata.image.brokers[broker_id].fenced, **address}
            for broker_id, address in brokers_on(node, context.session.listener, fenced_too=fenced_too)
        ],
        "cluster_authorized_operations": cluster_operations(request.include_cluster_authorized_operations),
    }


def _not_described(code: ErrorCode, message: str) -> Fields:
    return {
        "error_code": code,
        "error_message": message,
        "endpoint_type": BROKERS,
        "cluster_id": "",
        "controller_id": -1,
        "brokers": [],
        "cluster_authorized_operations": OPERATIONS_NOT_ASKED,
    }


def describe_quorum(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeQuorum (55), versions 0 to 2: who keeps the metadata log, and how far each has it.

    One node is a quorum of one: the only voter, and always caught up with itself.
    """
    topics = [
        {
            "topic_name": topic.topic_name,
            "partitions": [
                _quorum_of(node, topic.topic_name, partition.partition_index, now)
                for partition in topic.partitions
            ],
        }
        for topic in request.topics
    ]
    served = any(not partition["error_code"] for topic in topics for partition in topic["partitions"])
    listeners = [
        {"name": end_point.name, "host": end_point.host, "port": end_point.port}
        for end_point in node.identity.endpoints.values()
    ]
    return {
        "error_code": ErrorCode.none,
        "error_message": "",
        "topics": topics,
        "nodes": [{"node_id": node.identity.node_id, "listeners": listeners}] if served else [],
    }


def _quorum_of(node: ClusterServices, topic: str, index: int, now: Now) -> Fields:
    metadata = node.metadata.hosted
    if topic != METADATA_TOPIC or index != 0:
        return {
            "partition_index": index,
            "error_code": ErrorCode.unknown_topic_or_partition,
            "error_message": f"only {METADATA_TOPIC}-0 has a quorum",
        }
    return {
        "partition_index": 0,
        "error_code": ErrorCode.none,
        "error_message": "",
        "leader_id": node.identity.node_id,
        "leader_epoch": metadata.leader_epoch,
        "high_watermark": metadata.offsets.high_watermark.offset,
        "current_voters": [_voter(node, metadata, now)],
        "observers": [],
    }


def _voter(node: ClusterServices, metadata: HostedPartition, now: Now) -> Fields:
    return {
        "replica_id": node.identity.node_id,
        "replica_directory_id": metadata.directory.id,
        "log_end_offset": metadata.log.end_offset,
        "last_fetch_timestamp": now.wall_ms,
        "last_caught_up_timestamp": now.wall_ms,
    }


UNKNOWN_BYTES: Final = -1


def describe_log_dirs(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeLogDirs (35), versions 1 to 5: log directories, their room, and the partitions in them.

    Null asks for every partition. A directory is listed even when it holds none of those asked for, and an
    offline one with KAFKA_STORAGE_ERROR. The capacity of a directory is not known here and stands as -1.
    """
    asked: set[tuple[str, int]] | None = None
    if request.topics is not None:
        asked = {(topic.topic, index) for topic in request.topics for index in topic.partitions}
    return {
        "error_code": ErrorCode.none,
        "results": [_log_dir(node, directory, asked) for directory in node.directories],
    }


def _log_dir(node: ClusterServices, directory: LogDirectory, asked: set[tuple[str, int]] | None) -> Fields:
    if directory.offline:
        return {"error_code": ErrorCode.kafka_storage_error, "log_dir": directory.path, "topics": []}
    sizes: dict[str, list[Fields]] = {}
    for hosted in node.partitions:
        if hosted.directory is directory and (asked is None or (hosted.topic, hosted.index) in asked):
            sizes.setdefault(hosted.topic, []).append(
                {
                    "partition_index": hosted.index,
                    "partition_size": hosted.log.size,
                    "offset_lag": 0,
                    "is_future_key": False,
                }
            )
    return {
        "error_code": ErrorCode.none,
        "log_dir": directory.path,
        "topics": [{"name": topic, "partitions": partitions} for topic, partitions in sizes.items()],
        "total_bytes": UNKNOWN_BYTES,
        "usable_bytes": _free_bytes(node, directory),
        "is_cordoned": False,
    }


def _free_bytes(node: ClusterServices, directory: LogDirectory) -> int:
    try:
        return node.seams.fs.free_bytes(directory.path)
    except OSError:
        # Not worth an error of its own: a directory that no longer works is found out by a write or flush.
        return UNKNOWN_BYTES


def describe_acls(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeAcls (29), versions 1 to 3: there are none, since authorisation is off: every principal may do
    everything."""
    return {
        "error_code": ErrorCode.security_disabled,
        "error_message": "this broker has no authorizer, so it keeps no access control lists",
        "resources": [],
    }


ENTITY_TYPES: Final = frozenset({"user", "client-id", "ip"})
EXACT: Final = 0
MATCHES: Final = (EXACT, 1, 2)
"""An exact name, the default, any."""


def describe_client_quotas(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """DescribeClientQuotas (48), versions 0 and 1: no client has one."""
    refusal = _quota_refusal(request.components)
    if refusal is not None:
        code, message = refusal
        return {"error_code": code, "error_message": message, "entries": None}
    return {"error_code": ErrorCode.none, "error_message": "", "entries": []}


def _quota_refusal(components: Any) -> tuple[ErrorCode, str] | None:
    seen: set[str] = set()
    for component in components:
        kind, match = component.entity_type, component.match
        if kind not in ENTITY_TYPES:
            kinds = ", ".join(sorted(ENTITY_TYPES))
            return ErrorCode.unsupported_version, f"quotas belong to {kinds}, not to {kind!r}"
        if kind in seen:
            return ErrorCode.invalid_request, f"{kind!r} is asked for twice"
        seen.add(kind)
        if component.match_type not in MATCHES:
            return ErrorCode.invalid_request, f"no way to match has the number {component.match_type}"
        if (match is None) == (component.match_type == EXACT):
            return ErrorCode.invalid_request, "an exact match, and no other, names what it matches"
    return None


def alter_client_quotas(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    """AlterClientQuotas (49), versions 0 and 1: refused.

    A quota that is stored and not enforced would be worse than none.
    """
    return {
        "entries": [
            {
                "error_code": ErrorCode.unsupported_version,
                "error_message": "this broker does not enforce client quotas, so it stores none",
                "entity": [
                    {"entity_type": entity.entity_type, "entity_name": entity.entity_name}
                    for entity in entry.entity
                ],
            }
            for entry in request.entries
        ],
    }


def describe_user_scram_credentials(
    node: ClusterServices, context: RequestContext, request: Any, now: Now
) -> Fields:
    """DescribeUserScramCredentials (50), version 0: no user has any.

    Null or an empty list asks for every user.
    """
    times = Counter(user.name for user in request.users or ())
    return {
        "error_code": ErrorCode.none,
        "error_message": "",
        "results": [_credentials_of(user, count) for user, count in times.items()],
    }


def _credentials_of(user: str, count: int) -> Fields:
    if count > 1:
        code, message = ErrorCode.duplicate_resource, f"user {user!r} is named more than once in the request"
    else:
        code, message = ErrorCode.resource_not_found, f"user {user!r} has no SCRAM credentials"
    return {"user": user, "error_code": code, "error_message": message, "credential_infos": []}
