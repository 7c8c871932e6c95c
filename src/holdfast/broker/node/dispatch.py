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

MODULES: Final = {
    0: "k00_produce",
    1: "k01_fetch",
    2: "k02_list_offsets",
    3: "k03_metadata",
    8: "k08_offset_commit",
    9: "k09_offset_fetch",
    10: "k10_find_coordinator",
    11: "k11_join_group",
    12: "k12_heartbeat",
    13: "k13_leave_group",
    14: "k14_sync_group",
    15: "k15_describe_groups",
    16: "k16_list_groups",
    18: "k18_api_versions",
    19: "k19_create_topics",
    20: "k20_delete_topics",
    21: "k21_delete_records",
    22: "k22_init_producer_id",
    23: "k23_offset_for_leader_epoch",
    24: "k24_add_partitions_to_txn",
    25: "k25_add_offsets_to_txn",
    26: "k26_end_txn",
    27: "k27_write_txn_markers",
    28: "k28_txn_offset_commit",
    29: "k29_describe_acls",
    32: "k32_describe_configs",
    33: "k33_alter_configs",
    35: "k35_describe_log_dirs",
    37: "k37_create_partitions",
    42: "k42_delete_groups",
    43: "k43_elect_leaders",
    44: "k44_incremental_alter_configs",
    45: "k45_alter_partition_reassignments",
    46: "k46_list_partition_reassignments",
    47: "k47_offset_delete",
    48: "k48_describe_client_quotas",
    49: "k49_alter_client_quotas",
    50: "k50_describe_user_scram_credentials",
    55: "k55_describe_quorum",
    57: "k57_update_features",
    60: "k60_describe_cluster",
    61: "k61_describe_producers",
    65: "k65_describe_transactions",
    66: "k66_list_transactions",
    68: "k68_consumer_group_heartbeat",
    69: "k69_consumer_group_describe",
    74: "k74_list_config_resources",
    75: "k75_describe_topic_partitions",
}
"""API key to module of `holdfast.broker.node.handlers`; each has a function `handle`."""

_handlers: dict[tuple[int, int], Handler] = {}


def is_offered(api_key: int, version: int) -> bool:
    return api_key in MODULES and BY_KEY[api_key].is_served(version)


def find(context: RequestContext) -> Handler | None:
    """The handler for a request, or None when the API or its version is not offered."""
    key = (context.api_key, context.version)
    handler = _handlers.get(key)
    if handler is None and is_offered(*key):
        handler = _handlers[key] = _module(context.api_key).handle
    return handler


def _module(api_key: int) -> ModuleType:
    return import_module(f"holdfast.broker.node.handlers.{MODULES[api_key]}")


def refuse(context: RequestContext) -> Answer:
    """What Kafka does: ApiVersions is answered in version 0, anything else closes the connection."""
    if context.api_key == API_VERSIONS:
        answer: Answer = _module(API_VERSIONS).unsupported()
        return answer
    raise MalformedFrame(f"API {context.api_key} version {context.version} is not offered")
