"""The dynamic default of all brokers, which librdkafka has no way to address.

Kafka names it by an empty broker name; librdkafka refuses that before anything is sent. So these two requests
are said directly, to any bootstrap server: brokers of a cluster pass them on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from holdfast.admin.errors import check
from holdfast.cli.client import Connection
from holdfast.wire.api_keys import DESCRIBE_CONFIGS, INCREMENTAL_ALTER_CONFIGS

BROKER: Final[int] = ConfigResource.Type.BROKER.value


def read_defaults(connection: Connection) -> dict[str, ConfigEntry]:
    """The settings of the default, by name."""
    request = {
        "resources": [{"resource_type": BROKER, "resource_name": "", "configuration_keys": None}],
        "include_synonyms": True,
        "include_documentation": False,
    }
    with connection.brokers() as brokers:
        (result,) = brokers.ask_any(DESCRIBE_CONFIGS, request).results
    check(result.error_code, "cannot read the default settings of all brokers", result.error_message)
    return {entry.name: _entry(entry) for entry in result.configs}


def change_defaults(connection: Connection, additions: Mapping[str, str], removals: Sequence[str]) -> None:
    changes = [
        {"name": name, "config_operation": AlterConfigOpType.SET.value, "value": value}
        for name, value in additions.items()
    ]
    changes += [
        {"name": name, "config_operation": AlterConfigOpType.DELETE.value, "value": None} for name in removals
    ]
    request = {
        "resources": [{"resource_type": BROKER, "resource_name": "", "configs": changes}],
        "validate_only": False,
    }
    with connection.brokers() as brokers:
        (result,) = brokers.ask_any(INCREMENTAL_ALTER_CONFIGS, request).responses
    check(result.error_code, "cannot change the default settings of all brokers", result.error_message)


def _entry(entry: Any) -> ConfigEntry:
    return ConfigEntry(
        entry.name,
        entry.value,
        source=entry.config_source,
        is_read_only=entry.read_only,
        is_sensitive=entry.is_sensitive,
        synonyms={
            synonym.name: ConfigEntry(synonym.name, synonym.value, source=synonym.source)
            for synonym in entry.synonyms
        },
    )
