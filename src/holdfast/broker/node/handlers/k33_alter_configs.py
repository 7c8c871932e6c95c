"""AlterConfigs (33), versions 0 to 2: the settings given are all the resource has afterwards.

Kafka's older way, kept for older tools; IncrementalAlterConfigs changes single settings.
"""

from __future__ import annotations

from typing import Any

from holdfast.broker.metadata.settings import replace_settings
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.altering import alter_each
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return alter_each(
        node,
        request,
        now,
        lambda resource, asked: replace_settings(
            node.metadata.image,
            resource,
            [(config.name, config.value) for config in asked.configs],
            node.settings.broker,
        ),
    )
