"""The dynamic default of all brokers, which librdkafka has no way to address.

Kafka names it by an empty broker name; librdkafka refuses that before anything is sent. So these two requests
are said directly, to any bootstrap server: brokers of a cluster pass them on. Plain connections only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from confluent_kafka.admin import AlterConfigOpType, ConfigEntry, ConfigResource

from holdfast.cli.client import REQUEST_TIMEOUT_S, Connection
from holdfast.cli.exits import CannotConnect, CommandFailed
from holdfast.testing.wire_client import (
    DESCRIBE_CONFIGS,
    INCREMENTAL_ALTER_CONFIGS,
    WireClient,
)

BROKER: Final[int] = ConfigResource.Type.BROKER.value
DESCRIBE_VERSION: Final = 4
ALTER_VERSION: Final = 1


def read_defaults(connection: Connection) -> dict[str, ConfigEntry]:
    """The settings of the default, by name."""
    request = {
        "resources": [{"resource_type": BROKER, "resource_name": "", "configuration_keys": None}],
        "include_synonyms": True,
        "include_documentation": False,
    }
    result = _ask(connection, DESCRIBE_CONFIGS, DESCRIBE_VERSION, request).results[0]
    _check(result, "cannot read the default settings of all brokers")
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
    result = _ask(connection, INCREMENTAL_ALTER_CONFIGS, ALTER_VERSION, request).responses[0]
    _check(result, "cannot change the default settings of all brokers")


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


def _ask(connection: Connection, api_key: int, version: int, fields: Mapping[str, Any]) -> Any:
    protocol = connection.settings.get("security.protocol", "PLAINTEXT")
    if protocol.upper() != "PLAINTEXT":
        raise CommandFailed(
            f"the default of all brokers can be reached over a plain connection only, not {protocol}; "
            "name each broker with --broker ID instead"
        )
    problem = "no bootstrap server was given"
    for server in connection.bootstrap_servers.split(","):
        with WireClient(server.strip(), timeout_s=REQUEST_TIMEOUT_S) as client:
            try:
                answer = client.ask(api_key, version, fields)
            except OSError as error:
                problem = f"{server}: {error.strerror or error}"
                continue
        if not isinstance(answer, str):
            return answer
        problem = f"{server}: {answer}"
    raise CannotConnect(f"cannot ask for the default settings of all brokers: {problem}")


def _check(result: Any, subject: str) -> None:
    if result.error_code.value:
        said = result.error_message or result.error_code.name
        raise CommandFailed(f"{subject}: {said.rstrip('.')} ({result.error_code.name.upper()})")
