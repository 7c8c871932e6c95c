"""IncrementalAlterConfigs (44), versions 0 and 1: set, delete, append to and subtract from single settings."""

from __future__ import annotations

from typing import Any

from holdfast.broker.metadata.settings import SettingChange, alter_settings
from holdfast.broker.node.context import Fields, RequestContext
from holdfast.broker.node.handlers.altering import alter_each
from holdfast.broker.node.services import ClusterServices
from holdfast.seams import Now


def handle(node: ClusterServices, context: RequestContext, request: Any, now: Now) -> Fields:
    return alter_each(
        node,
        request,
        now,
        lambda resource, asked: alter_settings(
            node.metadata.image,
            resource,
            [SettingChange(config.name, config.config_operation, config.value) for config in asked.configs],
            node.settings.broker,
        ),
    )
