"""Which handler answers which API; what has no handler here is not offered to clients."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from types import ModuleType
from typing import Any, Final

from holdfast.broker.node.context import Answer, RequestContext
from holdfast.errors import MalformedFrame
from holdfast.seams import Now
from holdfast.wire.apis import API_VERSIONS, BY_KEY

Handler = Callable[[Any, RequestContext, Any, Now], Answer]
"""Takes the parts of the broker that it needs (`services`), who asks, the decoded request and the time."""

HANDLERS: Final = {
    0: "produce.produce",
    1: "fetch.fetch",
    2: "log_offsets.list_offsets",
    3: "metadata.metadata",
    8: "committed_offsets.offset_commit",
    9: "committed_offsets.offset_fetch",
    10: "group_admin.find_coordinator",
    11: "group_members.join_group",
    12: "group_members.heartbeat",
    13: "group_members.leave_group",
    14: "group_members.sync_group",
    15: "group_admin.describe_groups",
    16: "group_admin.list_groups",
    18: "cluster.api_versions",
    19: "topics.create_topics",
    20: "topics.delete_topics",
    21: "log_offsets.delete_records",
    22: "transactions.init_producer_id",
    23: "log_offsets.offset_for_leader_epoch",
    24: "transactions.add_partitions_to_txn",
    25: "transactions.add_offsets_to_txn",
    26: "transactions.end_txn",
    27: "transactions.write_txn_markers",
    28: "committed_offsets.txn_offset_commit",
    29: "cluster.describe_acls",
    32: "configs.describe_configs",
    33: "configs.alter_configs",
    35: "cluster.describe_log_dirs",
    37: "topics.create_partitions",
    42: "group_admin.delete_groups",
    43: "topics.elect_leaders",
    44: "configs.incremental_alter_configs",
    45: "topics.alter_partition_reassignments",
    46: "topics.list_partition_reassignments",
    47: "committed_offsets.offset_delete",
    48: "cluster.describe_client_quotas",
    49: "cluster.alter_client_quotas",
    50: "cluster.describe_user_scram_credentials",
    55: "cluster.describe_quorum",
    57: "cluster.update_features",
    60: "cluster.describe_cluster",
    61: "transactions.describe_producers",
    65: "transactions.describe_transactions",
    66: "transactions.list_transactions",
    68: "group_members.consumer_group_heartbeat",
    69: "group_admin.consumer_group_describe",
    74: "configs.list_config_resources",
    75: "metadata.describe_topic_partitions",
}
"""API key to module and function of `holdfast.broker.node.handlers`. A module is imported when it is first needed."""

_handlers: dict[tuple[int, int], Handler] = {}


def is_offered(api_key: int, version: int) -> bool:
    return api_key in HANDLERS and BY_KEY[api_key].is_served(version)


def find(context: RequestContext) -> Handler | None:
    """The handler for a request, or None when the API or its version is not offered."""
    key = (context.api_key, context.version)
    handler = _handlers.get(key)
    if handler is None and is_offered(*key):
        module, name = HANDLERS[context.api_key].split(".")
        handler = _handlers[key] = getattr(_module(module), name)
    return handler


def _module(name: str) -> ModuleType:
    return import_module(f"holdfast.broker.node.handlers.{name}")


def refuse(context: RequestContext) -> Answer:
    """What Kafka does: ApiVersions is answered in version 0, anything else closes the connection."""
    if context.api_key == API_VERSIONS:
        answer: Answer = _module("cluster").unsupported()
        return answer
    raise MalformedFrame(f"API {context.api_key} version {context.version} is not offered")
